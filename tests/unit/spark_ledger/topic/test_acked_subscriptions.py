"""Subscriptions of consumers whose acknowledgements are in ack ledgers: taken over, moved, deleted,
released, listed."""

import asyncio

import pytest

from spark_ledger import errors
from spark_ledger.topic.acks.nodes import AckNodes
from spark_ledger.topic.subscription.nodes import SubscriptionNodes
from spark_ledger.topic.subscription.seek_target import End
from tests.unit.spark_ledger.topic.acking_brokers import (
    acking_broker,
    acknowledge,
    announced,
    share_writes,
)
from tests.unit.spark_ledger.topic.consumers import NAME, broker, opened, play_here, positions
from tests.unit.spark_ledger.topic.subscription_stage import fill


def test_the_next_owner_has_every_acknowledgement_whose_receipt_was_given():
    async def act(stage):
        a, b = await acking_broker(stage, "a"), await acking_broker(stage, "b")
        cursor, acks = await a.consume(1)
        await acknowledge(cursor, acks, 0, 1, 5, 9)
        await a.die()
        _, acks = await b.consume(2)
        assert (acks.mark, list(acks.rows)) == (2, [5, 9])

    play_here(act)


def test_a_subscription_is_read_once_more_only_for_a_partition_that_is_taken_over_after_its_opening(
    monkeypatch,
):
    reads, read = [], SubscriptionNodes.read

    async def counted(nodes, name, **options):
        reads.append(name)
        return await read(nodes, name, **options)

    async def act(stage):
        a, b = await acking_broker(stage, "a"), await acking_broker(stage, "b")
        cursor, acks = await a.consume(1)
        await acknowledge(cursor, acks, 0, 1, 5, 9)
        await a.die()
        await b.topic_acks.of(0, 2)
        monkeypatch.setattr(SubscriptionNodes, "read", counted)
        cursor, acks = await b.consume(2)
        assert (acks.mark, list(acks.rows), len(reads)) == (2, [5, 9], 1)
        await cursor.adopt(1, 2)
        assert len(reads) > 1

    play_here(act)


def test_acknowledging_costs_the_metadata_store_less_than_a_write_a_minute():
    async def act(stage):
        a = await acking_broker(stage, "a")
        cursor, acks = await a.consume(1)
        await acknowledge(cursor, acks, 0)
        before = share_writes(stage)
        changes = []
        stage.world.store.listeners.append(changes.append)
        for offset in range(1, 1200):
            acks.add(offset, offset + 1)
            cursor.advance(0, acks.durable)
            await asyncio.sleep(1)
        assert 3 <= share_writes(stage) - before <= 4, "one for each five minutes"
        assert len(changes) <= 20

    play_here(act)


def test_a_released_subscription_goes_on_with_its_gaps_at_any_broker():
    async def act(stage):
        a, b = await acking_broker(stage, "a"), await acking_broker(stage, "b")
        cursor, acks = await a.consume(1)
        await acknowledge(cursor, acks, 0, 4)
        acks.add(6, 7)
        cursor.advance(0, acks.durable)
        await a.release(cursor)
        cursor, acks = await a.consume(1)
        assert (acks.mark, list(acks.rows)) == (1, [4, 6])
        await acknowledge(cursor, acks, 1)
        await a.release(cursor)
        _, acks = await b.consume(2)
        assert (acks.mark, list(acks.rows)) == (2, [4, 6])

    play_here(act)


def test_a_subscription_released_without_gaps_is_where_it_was_whatever_others_write():
    async def act(stage):
        a = await acking_broker(stage, "a")
        cursor, acks = await a.consume(1)
        other, other_acks = await a.consume(1, name="other")
        await acknowledge(cursor, acks, 0, 1, 2)
        await a.release(cursor)
        await asyncio.sleep(400)
        for offset in range(3):
            await acknowledge(other, other_acks, offset)
        _, acks = await a.consume(1)
        assert (acks.mark, list(acks.rows)) == (3, [])

    play_here(act)


def test_an_owner_that_got_no_acknowledgement_loses_none_of_the_owner_before():
    """Its release writes no share that would count for more than the state with gaps."""

    async def act(stage):
        a, b, c = [await acking_broker(stage, name) for name in "abc"]
        cursor, acks = await a.consume(1)
        await acknowledge(cursor, acks, 0, 4)
        await a.die()
        cursor, _ = await b.consume(2)
        await b.release(cursor)
        _, acks = await c.consume(3)
        assert (acks.mark, list(acks.rows)) == (1, [4])

    play_here(act)


def test_a_share_of_a_later_owner_of_an_older_version_counts_alone():
    async def act(stage):
        new, old = await acking_broker(stage, "new"), await broker(stage, "old")
        cursor, acks = await new.consume(1)
        await acknowledge(cursor, acks, 0, 1, 5)
        await new.release(cursor)
        at_old = await old.open()
        assert (await at_old.adopt(0, 2)).position == 2, "the share of the release"
        at_old.advance(0, 4)
        await old.cursors.release(at_old, 10.0)
        cursor, acks = await new.consume(3)
        assert (acks.mark, list(acks.rows)) == (4, [])
        await acknowledge(cursor, acks, 8)
        await new.release(cursor)
        assert (await (await old.open()).adopt(0, 4)).position == 4

    play_here(act)


def test_while_an_older_broker_lives_shares_are_as_new_as_that_broker_would_write_them():
    async def act(stage):
        new, old = await acking_broker(stage, "new"), await broker(stage, "old")
        cursor, acks = await new.consume(1)
        for offset in range(5):
            await acknowledge(cursor, acks, offset)
        new.cursors.set_older_brokers(True)
        for offset in range(5, 20):
            await acknowledge(cursor, acks, offset)
            await asyncio.sleep(1)
        before = share_writes(stage)
        await acknowledge(cursor, acks, 20, 22)
        await asyncio.sleep(3)
        assert share_writes(stage) - before == 1
        await new.die()
        assert (await (await old.open()).adopt(0, 2)).position == 21

    play_here(act)


def test_once_the_older_brokers_are_gone_shares_are_seldom_written_again():
    async def act(stage):
        new = await acking_broker(stage, "new")
        cursor, acks = await new.consume(1)
        new.cursors.set_older_brokers(True)
        await acknowledge(cursor, acks, 0)
        await asyncio.sleep(3)
        before = share_writes(stage)
        new.cursors.set_older_brokers(False)
        for offset in range(1, 100):
            await acknowledge(cursor, acks, offset)
            await asyncio.sleep(1)
        assert share_writes(stage) == before

    play_here(act)


def test_a_query_that_takes_over_begins_at_the_exact_position():
    async def act(stage):
        await fill(stage, 10)
        a = await acking_broker(stage, "a")
        cursor, acks = await a.consume(1)
        await acknowledge(cursor, acks, 0, 1, 2, 5)
        await a.die()
        query = await opened(stage)
        assert (await query.recovered())[0] == 3

    play_here(act)


def test_a_seek_from_outside_ends_receipts_before_it_succeeds_and_nothing_comes_back():
    async def act(stage):
        await fill(stage, 20)
        a = await acking_broker(stage, "a")
        cursor, acks = await a.consume(1)
        other, other_acks = await a.consume(1, name="other")
        await acknowledge(cursor, acks, 0, 1, 7)
        client = await stage.another()
        await client.subscriptions.seek(stage.topic.id, NAME, End.EARLIEST, force=True)
        with pytest.raises(errors.LedgerError):
            await acknowledge(cursor, acks, 8)
        await acknowledge(other, other_acks, 3)
        _, acks = await a.consume(1)
        assert (acks.mark, list(acks.rows)) == (0, [])

    play_here(act)


def test_a_seek_keeps_the_exact_positions_of_partitions_that_it_does_not_name():
    async def act(stage):
        await fill(stage, 20)
        await fill(stage, 20, partition=1)
        a = await acking_broker(stage, "a")
        cursor, acks = await a.consume(1)
        await acknowledge(cursor, acks, 0, 1)
        await a.release(cursor)
        await stage.client.subscriptions.seek(stage.topic.id, NAME, {1: 4})
        found = await positions(stage)
        assert (found[0], found[1]) == (2, 4)

    play_here(act)


def test_a_name_made_anew_inherits_nothing():
    async def act(stage):
        a = await acking_broker(stage, "a")
        cursor, acks = await a.consume(1)
        await acknowledge(cursor, acks, 0, 4)
        await stage.client.subscriptions.delete(stage.topic.id, NAME, force=True)
        with pytest.raises(errors.LedgerError):
            await acknowledge(cursor, acks, 5)
        _, acks = await a.consume(1)
        assert (acks.mark, list(acks.rows)) == (0, [])

    play_here(act)


def test_the_last_consumer_deletes_without_fencing_its_own_ledger():
    async def act(stage):
        a = await acking_broker(stage, "a")
        cursor, acks = await a.consume(1)
        other, other_acks = await a.consume(1, name="other")
        await acknowledge(cursor, acks, 0, 4)
        await acknowledge(other, other_acks, 2)
        nodes = AckNodes(stage.client.ledgers, stage.topic.id)
        node = await nodes.get(0)
        await a.cursors.delete(cursor, 10.0)
        await acknowledge(other, other_acks, 3)
        assert await nodes.get(0) == node
        names = [info.name for info in await stage.client.subscriptions.list(stage.topic.id)]
        assert names == ["other"]

    play_here(act)


def test_lists_and_lag_read_the_ack_ledger_and_count_gaps():
    async def act(stage):
        await fill(stage, 20)
        a = await acking_broker(stage, "a")
        cursor, acks = await a.consume(1)
        await acknowledge(cursor, acks, 0, 1, 5, 6, 7)
        await acknowledge(cursor, acks, 11)
        await announced()
        (listed,) = await stage.client.subscriptions.list(stage.topic.id, exact=True)
        assert (listed.positions[0], listed.acked_beyond) == (2, {0: 4})
        floor_ms = listed.floor_ms
        assert floor_ms >= listed.created_ms
        await asyncio.sleep(400)
        (listed,) = await stage.client.subscriptions.list(stage.topic.id, exact=True)
        assert listed.floor_ms > floor_ms, "the share was written"
        lag = await stage.client.subscriptions.lag(stage.topic.id, NAME, 1)
        assert (lag[0].position, lag[0].rows) == (2, 14)
        await acknowledge(cursor, acks, 2)

    play_here(act)


async def sought(broker, cursor, acks, offset):
    """As a broker carries out a seek of a consumer."""
    acks.reset(offset)
    cursor.seek(0, offset)
    await cursor.acks_durable(0)
    await broker.cursors.written(cursor, 10.0)


async def floor(stage):
    """The position in partition 0 by the nodes: rows below it may go."""
    nodes = SubscriptionNodes(stage.client.store, stage.topic.id)
    return (await nodes.read(NAME)).floor.get(0, 0)


def test_a_seek_of_a_consumer_is_durable_for_later_owners():
    async def act(stage):
        a, b = await acking_broker(stage, "a"), await acking_broker(stage, "b")
        cursor, acks = await a.consume(1)
        await acknowledge(cursor, acks, *range(10), 15)
        await sought(a, cursor, acks, 4)
        await a.die()
        _, acks = await b.consume(2)
        assert (acks.mark, list(acks.rows)) == (4, [])
        held = await stage.client.subscriptions.holds(stage.topic.id, 4, 2**62)
        assert held.offsets[0] <= 4

    play_here(act)


def test_a_seek_forward_that_no_ack_ledger_has_lets_no_row_go():
    async def act(stage):
        a, b = await acking_broker(stage, "a"), await acking_broker(stage, "b")
        cursor, acks = await a.consume(1)
        await acknowledge(cursor, acks, 0, 1, 2, 3, 6)
        a.stop_writing_acks()
        seeking = asyncio.create_task(sought(a, cursor, acks, 13))
        await asyncio.sleep(400)
        assert not seeking.done()
        seeking.cancel()
        await a.die()
        assert await floor(stage) <= 4
        _, acks = await b.consume(2)
        assert (acks.mark, list(acks.rows)) == (4, [6])

    play_here(act)


def test_after_a_seek_back_that_no_share_has_owners_lose_no_later_acknowledgement():
    """The owner that finds the seek writes no share before its own ack ledger has the state."""

    async def act(stage):
        a, b, c = [await acking_broker(stage, name) for name in "abc"]
        cursor, acks = await a.consume(1)
        await acknowledge(cursor, acks, *range(10))
        await asyncio.sleep(400)
        acks.reset(4)
        cursor.seek(0, 4)
        await acknowledge(cursor, acks, 6)
        await a.die()
        assert await floor(stage) == 10
        b.stop_writing_acks()
        _, acks = await b.consume(2)
        assert (acks.mark, list(acks.rows)) == (4, [6])
        await asyncio.sleep(3)
        await b.die()
        cursor, acks = await c.consume(3)
        assert (acks.mark, list(acks.rows)) == (4, [6])
        await asyncio.sleep(3)
        assert await floor(stage) == 4

    play_here(act)


def test_a_seek_whose_subscription_ends_meanwhile_fails():
    async def act(stage):
        a = await acking_broker(stage, "a")
        cursor, acks = await a.consume(1)
        a.stop_writing_acks()
        acks.reset(4)
        cursor.seek(0, 4)
        cursor.end("was sought by another")
        with pytest.raises(errors.LedgerFenced):
            await cursor.acks_durable(0)

    play_here(act)
