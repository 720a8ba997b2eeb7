"""Subscriptions of consumers that another process moves forward: what was acknowledged beyond the
new position stays acknowledged."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap64

from spark_ledger import errors
from spark_ledger.broker.dispatch.acks import Acks
from spark_ledger.topic.acks import nodes
from spark_ledger.topic.acks.nodes import AckNodes
from spark_ledger.topic.acks.sets import after_missing
from spark_ledger.topic.acks.steps import IDLE_S
from spark_ledger.topic.log.actions import Grow
from spark_ledger.topic.subscription.seek_target import CommittedSince, End
from spark_ledger.topic.upkeep.subscription_moves import SubscriptionMoves
from tests.unit.spark_ledger.topic.acking_brokers import acking_broker, acknowledge, announced
from tests.unit.spark_ledger.topic.consumers import NAME, PARTITIONS, play_here
from tests.unit.spark_ledger.topic.subscription_stage import commit, fill


async def skip(stage, count, name=NAME):
    client = await stage.another()
    return await SubscriptionMoves(client, stage.topic.id).skip(name, count, 0)


async def rows_after(broker, epoch):
    """(mark, rows beyond) as the consumers of the partition's next owner begin."""
    _, acks = await broker.consume(epoch)
    return acks.mark, list(acks.rows)


def test_skipping_without_a_broker_counts_unacknowledged_messages_and_keeps_the_others():
    async def act(stage):
        await fill(stage, 20)
        a, b = await acking_broker(stage, "a"), await acking_broker(stage, "b")
        cursor, acks = await a.consume(1)
        await acknowledge(cursor, acks, 0, 3, 5, 6, 12)
        await announced()
        await a.die()
        assert (await skip(stage, 3))[0] == 7, "past 1, 2 and 4; 3, 5 and 6 are acknowledged"
        assert (await skip(stage, 1))[0] == 8
        (listed,) = await stage.client.subscriptions.list(stage.topic.id, exact=True)
        assert (listed.positions[0], listed.acked_beyond) == (8, {0: 1})
        assert await rows_after(b, 2) == (8, [12])

    play_here(act)


def test_expiring_without_a_broker_keeps_what_is_acknowledged_beyond():
    async def act(stage):
        await fill(stage, 10)
        state = await stage.client.log(stage.topic.id).fold(fresh=True)
        await fill(stage, 10)
        a, b = await acking_broker(stage, "a"), await acking_broker(stage, "b")
        cursor, acks = await a.consume(1)
        await acknowledge(cursor, acks, 2, 15)
        await a.die()
        moves = SubscriptionMoves(stage.client, stage.topic.id)
        assert (await moves.expire(NAME, CommittedSince(state.commit_ms + 1)))[0] == 10
        assert await rows_after(b, 2) == (10, [15])

    play_here(act)


@pytest.mark.parametrize("idle_s", [0, 3 * IDLE_S])
def test_the_owner_goes_on_with_what_was_acknowledged_beyond_and_with_other_subscriptions(idle_s):
    async def act(stage):
        await fill(stage, 20)
        a, b = await acking_broker(stage, "a"), await acking_broker(stage, "b")
        cursor, acks = await a.consume(1)
        other_cursor, other_acks = await a.consume(1, name="other")
        await acknowledge(cursor, acks, 0, 7, 9)
        await acknowledge(other_cursor, other_acks, 4)
        await asyncio.sleep(idle_s)
        assert (await skip(stage, 2))[0] == 3
        cursor, acks = await a.consume(1)
        assert (acks.mark, list(acks.rows)) == (3, [7, 9])
        await acknowledge(other_cursor, other_acks, 5)
        await acknowledge(cursor, acks, 3)
        await a.die()
        assert await rows_after(b, 2) == (4, [7, 9])
        _, other_acks = await b.consume(2, name="other")
        assert (other_acks.mark, list(other_acks.rows)) == (0, [4, 5])

    play_here(act)


def test_consumers_that_come_while_the_owner_reads_an_older_node_keep_what_was_acknowledged(
    monkeypatch,
):
    seen, coming = AckNodes.seen_by_owner, []

    async def act(stage):
        await fill(stage, 20)
        a = await acking_broker(stage, "a")
        cursor, acks = await a.consume(1)
        other_cursor, other_acks = await a.consume(1, name="other")
        await acknowledge(cursor, acks, 0, 7, 9)
        await acknowledge(other_cursor, other_acks, 4)
        await a.release(cursor)

        async def seen_before(nodes, partition):
            read = await seen(nodes, partition)
            if not coming:
                await skip(stage, 1)
                coming.append(asyncio.create_task(a.consume(1)))
                await asyncio.sleep(1)
            return read

        await skip(stage, 1)
        monkeypatch.setattr(AckNodes, "seen_by_owner", seen_before)
        await acknowledge(other_cursor, other_acks, 5)
        _, acks = await coming[0]
        assert (acks.mark, list(acks.rows)) == (3, [7, 9])

    play_here(act)


def test_a_seek_after_that_forgets_what_was_acknowledged_beyond():
    async def act(stage):
        await fill(stage, 20)
        a, b = await acking_broker(stage, "a"), await acking_broker(stage, "b")
        cursor, acks = await a.consume(1)
        await acknowledge(cursor, acks, 7)
        await a.die()
        await skip(stage, 2)
        await stage.client.subscriptions.seek(stage.topic.id, NAME, End.EARLIEST, force=True)
        assert await rows_after(b, 2) == (0, [])

    play_here(act)


async def consuming_two_partitions(stage):
    """A broker that has two partitions of a subscription, with a gap in each."""
    a = await acking_broker(stage, "a")
    cursor, acks = await a.consume(1)
    state = await cursor.adopt(1, 1)
    others = Acks(state.position, state.rows)
    cursor.track(1, others)
    await acknowledge(cursor, acks, 0, 3)
    await acknowledge(cursor, others, 0, 2, partition=1)
    await announced()
    return a


async def acked_in(broker, *partitions, epoch=2):
    """(mark, rows beyond) of each partition, as the consumers of its next owner begin."""
    cursor = await broker.open()
    states = [await cursor.adopt(partition, epoch) for partition in partitions]
    return [(state.position, list(state.rows)) for state in states]


def test_a_reset_of_one_partition_forgets_nothing_of_the_others():
    async def act(stage):
        await fill(stage, 20)
        b, a = await acking_broker(stage, "b"), await consuming_two_partitions(stage)
        moves = SubscriptionMoves(await stage.another(), stage.topic.id)
        assert (await moves.reset(NAME, {0: 2}, 0))[0] == 2
        await a.die()
        assert await acked_in(b, 0, 1) == [(2, []), (1, [2])]
        await moves.clear(NAME)
        assert [rows for _, rows in await acked_in(b, 0, 1)] == [[], []]

    play_here(act)


def test_a_reset_of_one_partition_reaches_its_owner_who_goes_on_with_the_others():
    async def act(stage):
        await fill(stage, 20)
        a = await consuming_two_partitions(stage)
        moves = SubscriptionMoves(await stage.another(), stage.topic.id)
        assert (await moves.reset(NAME, End.EARLIEST, 1))[1] == 0
        assert await acked_in(a, 0, 1, epoch=1) == [(1, [3]), (0, [])]

    play_here(act)


def test_messages_are_skipped_and_expire_in_partitions_that_the_topic_got_later():
    async def act(stage):
        moves = SubscriptionMoves(stage.client, stage.topic.id)
        await stage.client.subscriptions.create(stage.topic.id, NAME, End.EARLIEST)
        await commit(stage, Grow(PARTITIONS + 2))
        await fill(stage, 9, partition=PARTITIONS)
        assert (await moves.skip(NAME, 4, PARTITIONS))[PARTITIONS] == 4
        assert (await moves.expire(NAME, End.LATEST))[PARTITIONS] == 9
        positions = await stage.client.subscriptions.positions(stage.topic.id, NAME)
        assert positions[PARTITIONS] == 9

    play_here(act)


def test_a_node_with_too_many_successions_refuses_one_more(monkeypatch):
    async def act(stage):
        await fill(stage, 20)
        a = await acking_broker(stage, "a")
        cursor, acks = await a.consume(1)
        await acknowledge(cursor, acks, 17)
        await a.die()
        monkeypatch.setattr(nodes, "SUCCESSIONS_MAX", 2)
        for position in (1, 2):
            assert (await skip(stage, 1))[0] == position
        with pytest.raises(errors.Unavailable, match="moved 2 times"):
            await skip(stage, 1)

    play_here(act)


@given(st.sets(st.integers(0, 60)), st.integers(0, 60), st.integers(0, 70), st.integers(0, 70))
def test_after_missing_counts_what_is_not_in_the_set(offsets, at, count, end):
    found = after_missing(BitMap64(offsets), at, count, end)
    missing = [offset for offset in range(at, end) if offset not in offsets]
    expected = max(at, end) if count > len(missing) else ([at - 1, *missing][count] + 1)
    assert found == expected
