"""A subscription that passes from consumers to a query and back: what its consumers acknowledged
beyond the query's position stays acknowledged."""

import asyncio

import pytest

from spark_ledger import errors
from spark_ledger.metadata import paths
from spark_ledger.metadata.store import OutcomeUnknown
from spark_ledger.topic.acks import nodes, partition_acks
from spark_ledger.topic.acks.nodes import AckNodes
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.subscription.acked_now import acked_now
from spark_ledger.topic.subscription.nodes import SubscriptionNodes, acks_key_of
from spark_ledger.topic.upkeep.subscription_moves import SubscriptionMoves
from tests.unit.spark_ledger.topic.acking_brokers import AckingBroker, acking_broker, acknowledge
from tests.unit.spark_ledger.topic.consumers import NAME, broker, opened, play_here
from tests.unit.spark_ledger.topic.stage import NOW_MS
from tests.unit.spark_ledger.topic.subscription_stage import fill


async def acked_by_consumers(stage, *offsets, name="a"):
    """The broker at which consumers acknowledged these offsets of partition 0, and left."""
    await fill(stage, 100)
    owner = await acking_broker(stage, name)
    cursor, acks = await owner.consume(1)
    await acknowledge(cursor, acks, *offsets)
    await owner.release(cursor)
    return owner


async def read_by_query(stage, *offsets, query="q", run="r"):
    """A query's run takes the subscription, reads up to each of these offsets of partition 0, and
    releases the subscription."""
    cursor = await opened(stage, query, run)
    await cursor.recovered()
    for offset in offsets:
        cursor.advance({0: offset})
        await cursor.durable()
    await cursor.release()


async def rows_at(owner, epoch, partition=0):
    """(position, acknowledged rows beyond it) at which consumers begin."""
    _, acks = await owner.consume(epoch, partition=partition)
    return acks.mark, list(acks.rows)


async def view(stage):
    return await SubscriptionNodes(stage.client.store, stage.topic.id).get(NAME)


async def seen_by_query(stage, *answering):
    """(position, rows beyond it) of partition 0 at which a query would begin, when these brokers
    answer."""
    asked = []

    async def ask(store, topic_id, name, brokers):
        asked.append(name)
        return [owned for broker in answering for owned in broker.topic_acks.of_subscription(name)]

    client = await stage.another()
    now = await acked_now(client.ledgers, stage.topic.id, NAME, ask)
    assert asked, "a ledger that is read without its owner may lack the last write"
    return now.positions[0], list(now.acked.get(0, ()))


@pytest.mark.parametrize("next_owner", ["the same", "another", "another after a death"])
@pytest.mark.parametrize(
    ("read_up_to", "begin"),
    [
        ([], (1, [4, 6, 7, 50])),
        ([2], (2, [4, 6, 7, 50])),
        ([2, 6], (8, [50])),
        ([20], (20, [50])),
        ([50], (51, [])),
        ([60], (60, [])),
    ],
)
def test_consumers_after_a_query_get_neither_its_rows_nor_what_was_acknowledged(
    next_owner, read_up_to, begin
):
    async def act(stage):
        a = await acked_by_consumers(stage, 0, 4, 6, 7, 50)
        await read_by_query(stage, *read_up_to)
        if next_owner == "the same":
            assert await rows_at(a, 1) == begin
            return
        if next_owner == "another after a death":
            await a.die()
        assert await rows_at(await acking_broker(stage, "b"), 2) == begin

    play_here(act)


def test_what_is_acknowledged_after_a_query_adds_to_it_for_later_owners():
    async def act(stage):
        a = await acked_by_consumers(stage, 0, 4, 9)
        await read_by_query(stage, 3)
        cursor, acks = await a.consume(1)
        await acknowledge(cursor, acks, 3, 6)
        await a.die()
        b = await acking_broker(stage, "b")
        assert await rows_at(b, 2) == (5, [6, 9])

    play_here(act)


def test_a_node_does_not_fill_with_the_moves_of_a_partition_without_acknowledgements(monkeypatch):
    async def act(stage):
        monkeypatch.setattr(nodes, "SUCCESSIONS_MAX", 6)
        monkeypatch.setattr(partition_acks, "SUCCESSIONS_MAX", 6)
        a = await acked_by_consumers(stage, 4)
        for run in range(8):
            await read_by_query(stage, 2, run=f"r{run}")
            cursor, acks = await a.consume(1)
            assert list(acks.rows) == [4]
            await asyncio.sleep(2)
            await a.release(cursor)

    play_here(act)


def test_each_partition_keeps_its_own_acknowledgements():
    async def act(stage):
        a = await acked_by_consumers(stage, 4)
        await fill(stage, 100, partition=1)
        cursor, acks = await a.consume(1, partition=1)
        await acknowledge(cursor, acks, 0, 1, 8, 30, partition=1)
        await a.release(cursor)
        query = await opened(stage)
        query.advance({0: 20, 1: 10})
        await query.release()
        assert await rows_at(a, 1) == (20, [])
        b = await acking_broker(stage, "b")
        assert await rows_at(b, 2, partition=1) == (10, [30])

    play_here(act)


async def acked_in_two_partitions(stage):
    """Consumers acknowledged rows of two partitions, whose states are in the nodes."""
    a = await acked_by_consumers(stage, 4, 9)
    await fill(stage, 100, partition=1)
    cursor, acks = await a.consume(1, partition=1)
    await acknowledge(cursor, acks, 0, 8, partition=1)
    await a.release(cursor)
    await asyncio.sleep(400)
    return a


def test_a_move_of_more_than_one_multi_takes_forgets_no_acknowledgement(monkeypatch):
    async def act(stage):
        monkeypatch.setattr(nodes, "MOVE_BYTES_MAX", 1)
        await acked_in_two_partitions(stage)
        before = len(stage.world.store.log)
        await read_by_query(stage, 2)
        both = {paths.acks(stage.topic.id, number) for number in (0, 1)}
        multis = [{c.path for c in one.changes} for one in stage.world.store.log[before:]]
        assert [len(both & changed) for changed in multis if both & changed] == [1, 1]
        b = await acking_broker(stage, "b")
        assert await rows_at(b, 2) == (2, [4, 9])
        assert await rows_at(b, 2, partition=1) == (1, [8])

    play_here(act)


def test_a_lost_note_of_successions_forgets_no_acknowledgement(monkeypatch):
    """The connection ends before the store has the note, so the nodes keep their versions."""

    class Losing:
        async def multi(self, _):
            raise OutcomeUnknown("the connection ended")

    async def act(stage):
        monkeypatch.setattr(nodes, "MOVE_BYTES_MAX", 1)
        await acked_in_two_partitions(stage)
        note = AckNodes.note

        async def lost(self, operations, seen):
            monkeypatch.setattr(AckNodes, "note", note)
            monkeypatch.setattr(self, "_store", Losing())
            return await self.note(operations, seen)

        monkeypatch.setattr(AckNodes, "note", lost)
        with pytest.raises(errors.Unavailable):
            await read_by_query(stage, 2)
        assert AckNodes.note is note
        await read_by_query(stage, 2)
        b = await acking_broker(stage, "b")
        assert await rows_at(b, 2) == (2, [4, 9])
        assert await rows_at(b, 2, partition=1) == (1, [8])

    play_here(act)


def test_successions_noted_for_a_move_that_failed_change_nothing(monkeypatch):
    async def act(stage):
        monkeypatch.setattr(nodes, "MOVE_BYTES_MAX", 1)
        a = await acked_in_two_partitions(stage)
        write = SubscriptionNodes.write

        async def dies(*_args, **_options):
            raise asyncio.CancelledError

        monkeypatch.setattr(SubscriptionNodes, "write", dies)
        with pytest.raises(asyncio.CancelledError):
            await read_by_query(stage, 2)
        monkeypatch.setattr(SubscriptionNodes, "write", write)
        assert len((await AckNodes(stage.client.ledgers, stage.topic.id).states(0)).keys()) == 2
        assert await rows_at(a, 1) == (0, [4, 9])
        assert await rows_at(await acking_broker(stage, "b"), 2, 1) == (1, [8])

    play_here(act)


def test_several_runs_and_queries_pass_it_on():
    async def act(stage):
        a = await acked_by_consumers(stage, 0, 9, 30)
        await read_by_query(stage, 2)
        await read_by_query(stage, 3, run="r2")
        assert await seen_by_query(stage, a) == (3, [9, 30])
        await read_by_query(stage, 9, query="other")
        assert await seen_by_query(stage) == (10, [30])
        assert await rows_at(a, 1) == (10, [30])

    play_here(act)


def test_consumers_and_queries_in_turns_lose_no_acknowledgement():
    async def act(stage):
        a = await acked_by_consumers(stage, 5, 30)
        at = 0
        for turn in range(6):
            at += 4
            await read_by_query(stage, at, run=f"r{turn}")
            cursor, acks = await a.consume(1)
            await acknowledge(cursor, acks, 60 + turn)
            await a.release(cursor)
        assert await rows_at(a, 1) == (24, [30, 60, 61, 62, 63, 64, 65])

    play_here(act)


def test_a_query_that_comes_back_after_consumers_and_goes_on_keeps_both():
    async def act(stage):
        a = await acked_by_consumers(stage, 30)
        await read_by_query(stage, 10)
        cursor, acks = await a.consume(1)
        await acknowledge(cursor, acks, 10, 11, 40)
        await a.release(cursor)
        await read_by_query(stage, 10, 20, run="by its checkpoint")
        assert await rows_at(a, 1) == (20, [30, 40])

    play_here(act)


def test_where_a_query_went_back_everything_comes_from_its_position_on():
    async def act(stage):
        a = await acked_by_consumers(stage, *range(10), 30)
        await read_by_query(stage, 10, 4)
        assert await seen_by_query(stage, a) == (4, [])
        assert await rows_at(a, 1) == (4, [])

    play_here(act)


@pytest.mark.parametrize("when", ["before the query", "while it reads", "after the query"])
def test_a_seek_forgets_it_whenever_it_comes(when):
    async def seek(stage):
        client = await stage.another()
        await client.subscriptions.seek(stage.topic.id, NAME, {0: 2}, force=True)

    async def act(stage):
        a = await acked_by_consumers(stage, 0, 9)
        if when == "before the query":
            await seek(stage)
        query = await opened(stage)
        if when == "while it reads":
            await seek(stage)
        await query.release()
        if when == "after the query":
            await seek(stage)
        assert await rows_at(a, 1) == (2, [])

    play_here(act)


def test_a_name_made_anew_inherits_nothing_of_a_query():
    async def act(stage):
        a = await acked_by_consumers(stage, 0, 9)
        await read_by_query(stage, 2)
        await stage.client.subscriptions.delete(stage.topic.id, NAME)
        assert await rows_at(a, 1) == (0, [])

    play_here(act)


def test_taking_it_from_a_killed_query_where_it_is_keeps_it():
    async def act(stage):
        a = await acked_by_consumers(stage, 0, 9)
        query = await opened(stage)
        query.advance({0: 2})
        await query.durable()
        await query.abandon()
        with pytest.raises(errors.SubscriptionBusy):
            await a.consume(1)
        client = await stage.another()
        await client.subscriptions.seek(stage.topic.id, NAME, {}, force=True)
        assert await rows_at(a, 1) == (2, [9])

    play_here(act)


def test_skipping_messages_of_a_query_that_ended_counts_what_is_not_acknowledged():
    async def act(stage):
        a = await acked_by_consumers(stage, 0, 3, 30)
        await read_by_query(stage, 2)
        moves = SubscriptionMoves(await stage.another(), stage.topic.id)
        assert (await moves.skip(NAME, 2, 0))[0] == 5
        assert await seen_by_query(stage, a) == (5, [30])
        assert await rows_at(a, 1) == (5, [30])

    play_here(act)


def test_many_moves_leave_no_more_states_than_two():
    async def act(stage):
        await acked_by_consumers(stage, 50, 52, 60)
        moves = SubscriptionMoves(await stage.another(), stage.topic.id)
        for _ in range(20):
            await moves.skip(NAME, 1, 0)
        assert len(await AckNodes(stage.client.ledgers, stage.topic.id).states(0)) <= 2
        assert await rows_at(await acking_broker(stage, "b"), 2) == (20, [50, 52, 60])

    play_here(act)


def test_lag_of_a_query_leaves_out_what_consumers_acknowledged():
    async def act(stage):
        await acked_by_consumers(stage, 0, 9, 30)
        await read_by_query(stage, 20)
        lag = await stage.client.subscriptions.lag(stage.topic.id, NAME, 1)
        assert (lag[0].position, lag[0].rows) == (20, 79)

    play_here(act)


def test_a_query_that_took_no_acknowledged_rows_reads_no_ack_ledger_later(monkeypatch):
    async def act(stage):
        await acked_by_consumers(stage, 0, 1, 2)
        await read_by_query(stage, 20)
        assert (await view(stage)).record.acked_by is None
        monkeypatch.setattr(AckNodes, "all_states", None)
        assert (await stage.client.subscriptions.positions(stage.topic.id, NAME))[0] == 20

    play_here(act)


def states_of(owner):
    (acks,) = owner.topic_acks.of_subscription(NAME)
    return acks.states


def test_an_owner_keeps_it_until_the_query_has_passed_it(monkeypatch):
    monkeypatch.setattr(partition_acks, "FORGET_EVERY_S", 0)

    async def act(stage):
        a = await acked_by_consumers(stage, 0, 9)
        other_cursor, other_acks = await a.consume(1, name="other")
        query = await opened(stage)
        for n, at in enumerate((2, 9, 10)):
            query.advance({0: at})
            await query.durable()
            await asyncio.sleep(400)  # the ledger is left: the next write begins another
            await acknowledge(other_cursor, other_acks, n)
            assert len(states_of(a)) == (at < 10)
        await query.release()
        assert await rows_at(a, 1) == (10, [])

    play_here(act)


def test_an_owner_that_forgets_states_just_as_a_query_takes_over_keeps_this_one(monkeypatch):
    async def act(stage):
        a = await acked_by_consumers(stage, 0, 9)
        other_cursor, other_acks = await a.consume(1, name="other")
        read, taken = SubscriptionNodes.read, []

        async def first_taken(self, name, **options):
            if name == NAME and not taken:
                taken.append(name)
                await read_by_query(stage, 2)
            return await read(self, name, **options)

        monkeypatch.setattr(partition_acks, "FORGET_EVERY_S", 0)
        await asyncio.sleep(400)
        monkeypatch.setattr(SubscriptionNodes, "read", first_taken)
        await acknowledge(other_cursor, other_acks, 0)
        assert taken
        assert await rows_at(a, 1) == (2, [9])
        await a.die()
        assert await rows_at(await acking_broker(stage, "b"), 2) == (2, [9])

    play_here(act)


def test_a_broker_of_an_earlier_version_that_served_it_since_ends_it():
    """Its share counts, and what its consumers acknowledged is never undone."""

    async def act(stage):
        await acked_by_consumers(stage, 0, 9)
        await read_by_query(stage, 2)
        old = await broker(stage, "old")
        query = await old.open()  # as it does: without the acknowledgements of before
        key = acks_key_of(await view(stage))
        assert key.token == (await view(stage)).record.owner
        await query.adopt(0, 2)
        query.advance(0, 12)
        await old.cursors.release(query, 10.0)
        assert await rows_at(await acking_broker(stage, "new"), 3) == (12, [])

    play_here(act)


async def killed(stage, at, act):
    """Does `act` in a process that is killed at the `at`-th response that leaves a bookie, arrives,
    or write that the store applies; whether it was killed."""
    process, events = await stage.world.client("doomed"), 0

    def event(_):
        nonlocal events
        events += 1
        if events == at:
            process.kill()

    world = stage.world
    heard = [world.network.taps, world.network.deliveries, world.store.listeners]
    for listeners in heard:
        listeners.append(event)
    client = TopicClient(process.ledgers, process.rng, lambda: NOW_MS)
    (failure,) = await asyncio.gather(process.run(act(client)), return_exceptions=True)
    for listeners in heard:
        listeners.remove(event)
    process.kill()
    await asyncio.sleep(60)  # its session ends
    if events < at and failure is not None:
        raise failure
    return events >= at


async def left(owner, epoch, partition=0):
    """As rows_at, by consumers that leave again."""
    cursor, acks = await owner.consume(epoch, partition=partition)
    await owner.release(cursor)
    return acks.mark, list(acks.rows)


@pytest.mark.parametrize("part", range(3))
def test_a_broker_killed_at_any_step_of_a_take_over_loses_no_acknowledgement(part):
    async def act(stage):
        await acked_by_consumers(stage, 0, 60, 90)
        at, was_killed = 1 + part, True
        while was_killed:
            await read_by_query(stage, 2, run=f"r{at}")

            async def take(client, name=f"doomed {at}", epoch=10 * at + 1):
                doomed = AckingBroker(stage, client, name)
                await client.store.create(paths.broker(name), b"{}", ephemeral=True, parents=True)
                await left(doomed, epoch)

            was_killed = await killed(stage, at, take)
            assert await left(await acking_broker(stage, f"b{at}"), 10 * at + 2) == (2, [60, 90])
            at += 3
        assert at > 12

    play_here(act)


@pytest.mark.parametrize("part", range(3))
def test_a_query_killed_at_any_step_of_a_take_over_loses_no_acknowledgement(part, monkeypatch):
    async def act(stage):
        monkeypatch.setattr(nodes, "MOVE_BYTES_MAX", 1)  # a multi for each partition
        a = await acked_by_consumers(stage, 0, 60, 90)
        await fill(stage, 100, partition=1)
        cursor, acks = await a.consume(1, partition=1)
        await acknowledge(cursor, acks, 70, partition=1)
        await a.release(cursor)
        at, was_killed = 1 + part, True
        while was_killed:

            async def take(client, run=f"doomed {at}"):
                cursor = await opened(stage, "q", run, client=client)
                cursor.advance({0: 2})
                await cursor.durable()
                await cursor.release()

            was_killed = await killed(stage, at, take)
            if at % 2:
                await read_by_query(stage, 2, run=f"r{at}")
            else:
                client = await stage.another()
                await client.subscriptions.seek(stage.topic.id, NAME, {}, force=True)
            begin, beyond = await left(a, 1)
            assert begin in (1, 2)
            assert beyond == [60, 90]
            assert await left(a, 1, partition=1) == (0, [70])
            at += 3
        assert at > 9

    play_here(act)
