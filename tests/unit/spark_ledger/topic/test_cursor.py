import asyncio

import pytest

from spark_ledger import errors
from spark_ledger.metadata import paths
from spark_ledger.topic.acks import steps
from spark_ledger.topic.log.intents import CURSOR, HEARTBEAT_S, STALE
from spark_ledger.topic.subscription import cursor as cursor_module
from spark_ledger.topic.subscription import records as subscription_records
from spark_ledger.topic.subscription.cursor import IDLE_S
from tests.unit.spark_ledger.topic.stage import play
from tests.unit.spark_ledger.topic.subscription_stage import (
    NAME,
    fill,
    intent_of,
    listed,
    opened,
    positions,
    subscriptions_of,
    told,
)


def test_a_query_finds_its_subscription_where_its_last_run_left_it():
    async def act(stage):
        await fill(stage, 10)
        cursor = await opened(stage, run="r1")
        await told(cursor, 1, 3)
        await cursor.release()

        again = await opened(stage, run="r2")

        assert await again.recovered() == {0: 3}
        assert await positions(stage) == {0: 3}

    play(act)


def test_positions_told_often_go_to_a_ledger_and_are_read_back_from_it():
    async def act(stage):
        await fill(stage, 10)
        cursor = await opened(stage)
        await told(cursor, 1, 2, 3, 4)
        await asyncio.sleep(2)  # the ledger's readers hear of its last entry when nothing follows
        found = await listed(stage)

        assert found.ledger_id is not None
        assert found.positions[0] < 4
        assert await positions(stage) == {0: 4}

    play(act)


def test_the_next_run_fences_the_ledger_of_a_crashed_one_and_finds_its_last_position():
    async def act(stage):
        await fill(stage, 10)
        cursor = await opened(stage, run="r1")
        await told(cursor, 1, 2, 3, 7)
        ledger_id = (await listed(stage)).ledger_id
        await cursor.abandon()

        again = await opened(stage, run="r2")

        assert (await stage.client.intents.get(await intent_of(stage))).record.kind == CURSOR
        assert await again.recovered() == {0: 7}
        await again.durable()
        assert (await listed(stage)).epoch == 2
        assert (await listed(stage)).ledger_id is None
        await asyncio.sleep(5)
        with pytest.raises(errors.NoSuchLedger):
            await stage.client.ledgers.record(ledger_id, fresh=True)

    play(act)


async def ledgers_ever(stage):
    """How many cursor ledgers were made."""
    made = {
        change.path
        for commit in stage.world.store.log
        for change in commit.changes
        if change.path.startswith(paths.LEDGERS + "/") and len(change.path) > 30
    }
    return len(made)


def writes(stage):
    """Moments at which a subscription's record or its cursor ledger's was written."""
    record = paths.subscription(stage.topic.id, NAME)
    return [
        commit.time
        for commit in stage.world.store.log
        for change in commit.changes
        if change.path == record
    ]


def test_the_next_run_finds_a_position_that_went_into_the_record_after_the_last_entry():
    async def act(stage):
        await fill(stage, 500)
        cursor = await opened(stage, run="r1")
        await told(cursor, 1, 2, 3, 4)
        assert (await listed(stage)).ledger_id is not None
        for offset in range(5, 500):
            await told(cursor, offset)
            if (await listed(stage)).positions == {0: offset}:
                break
        else:
            raise AssertionError("no position went into the record of a cursor with a ledger")
        await cursor.abandon()

        again = await opened(stage, run="r2")

        assert await again.recovered() == {0: offset}

    play(act)


def test_telling_it_a_thousand_times_a_second_writes_once_a_second():
    async def act(stage):
        await fill(stage, 10_000)
        cursor = await opened(stage)
        await cursor.durable()
        before = len(writes(stage))
        for offset in range(5000):
            cursor.advance({0: offset})
            await asyncio.sleep(0.001)
        await cursor.durable()

        assert cursor.confirmed == {0: 4999}
        assert len(writes(stage)) - before <= 2
        ledger_id = (await listed(stage)).ledger_id
        assert (await stage.client.ledgers.open(ledger_id, recover=True)).last_add_confirmed < 6

    play(act)


def test_a_query_that_triggers_every_two_minutes_makes_no_ledger():
    async def act(stage):
        await fill(stage, 1000)
        cursor = await opened(stage)
        for trigger in range(50):
            await told(cursor, trigger)
            await asyncio.sleep(125)

        assert await ledgers_ever(stage) == 0
        assert await positions(stage) == {0: 49}

    play(act)


def test_an_idle_cursor_leaves_its_ledger_and_holds_none_open():
    async def act(stage):
        await fill(stage, 1000)
        cursor = await opened(stage)
        await told(cursor, 1, 2, 3)
        ledger_id = (await listed(stage)).ledger_id
        await asyncio.sleep(IDLE_S + 20)

        found = await listed(stage)

        assert (found.ledger_id, found.positions) == (None, {0: 3})
        with pytest.raises(errors.NoSuchLedger):
            await stage.client.ledgers.record(ledger_id, fresh=True)
        await told(cursor, 4)
        assert await positions(stage) == {0: 4}

    play(act)


def test_a_long_ledger_is_rolled_and_the_one_before_it_deleted(monkeypatch):
    monkeypatch.setattr(steps, "LEDGER_ENTRIES_MAX", 5)

    async def act(stage):
        await fill(stage, 1000)
        cursor = await opened(stage)
        await told(cursor, *range(1, 30))
        await asyncio.sleep(3)

        left = [ledger_id async for ledger_id in stage.client.ledgers.list()]

        assert await ledgers_ever(stage) >= 5
        assert left == [(await listed(stage)).ledger_id]
        assert await positions(stage) == {0: 29}

    play(act)


def test_opening_and_telling_wait_for_no_bookie():
    async def act(stage):
        await fill(stage, 1000)
        first = await opened(stage, run="r1")
        await told(first, 1, 2, 3)
        await first.abandon()
        for node in stage.world.nodes:
            node.kill("none")
        began_s = asyncio.get_running_loop().time()

        second = await opened(stage, run="r2")
        second.advance({0: 7})

        assert asyncio.get_running_loop().time() - began_s < 1
        await asyncio.sleep(60)
        assert second.confirmed == {0: (await listed(stage)).positions[0]}
        for node in stage.world.nodes:
            await node.start()
        assert await second.recovered() == {0: 3}
        await second.durable()
        assert await positions(stage) == {0: 7}

    play(act)


def test_without_bookies_a_position_goes_into_the_record():
    async def act(stage):
        await fill(stage, 1000)
        cursor = await opened(stage)
        await told(cursor, 1)
        for node in stage.world.nodes:
            node.kill("none")

        await told(cursor, 2)
        refused_s = asyncio.get_running_loop().time()
        await told(cursor, 3)

        assert asyncio.get_running_loop().time() - refused_s < 5
        assert (await listed(stage)).positions == {0: 3}

    play(act)


def test_positions_too_long_for_a_node_are_found_in_the_ledger(monkeypatch):
    monkeypatch.setattr(subscription_records, "POSITIONS_BYTES_MAX", 5)

    async def act(stage):
        await fill(stage, 1000)
        cursor = await opened(stage, run="r1")
        await told(cursor, 111, 222, 333)
        await asyncio.sleep(IDLE_S + 20)
        await told(cursor, 444)
        await asyncio.sleep(IDLE_S + 20)
        found = await listed(stage)
        assert found.ledger_id is not None
        assert found.positions == {}
        assert await positions(stage) == {0: 444}
        await told(cursor, 222)  # back
        await cursor.release()

        again = await opened(stage, run="r2")

        assert await again.recovered() == {0: 222}
        await told(again, 555)
        await again.abandon()
        last = await opened(stage, run="r3")
        assert await last.recovered() == {0: 555}

    play(act)


def test_a_damaged_last_entry_means_the_one_before_it():
    async def act(stage):
        await fill(stage, 1000)
        cursor = await opened(stage, run="r1")
        await told(cursor, 1, 2, 3)
        await cursor._ledger.writer.append(b"no cursor's entry")
        await cursor.abandon()

        again = await opened(stage, run="r2")

        assert await again.recovered() == {0: 3}

    play(act)


def test_a_query_whose_intent_was_taken_for_dead_goes_on_with_its_subscription():
    async def act(stage):
        await fill(stage, 1000)
        cursor = await opened(stage)
        await told(cursor, 1, 2, 3)
        await stage.client.intents.condemn(await intent_of(stage), STALE)

        await told(cursor, 4, 5)
        await asyncio.sleep(HEARTBEAT_S + 5)
        await told(cursor, 6)

        cursor.check()
        assert (await stage.client.intents.get(await intent_of(stage))).is_open
        assert await positions(stage) == {0: 6}

    play(act)


def test_an_idle_run_that_was_overtaken_hears_of_it_without_writing():
    async def act(stage):
        first = await opened(stage, run="r1")
        await first.durable()
        await opened(stage, run="r2")
        await asyncio.sleep(HEARTBEAT_S + 5)

        with pytest.raises(errors.LedgerFenced, match="taken over by query q, run r2"):
            first.check()

    play(act)


def test_a_query_whose_subscription_was_deleted_is_told():
    async def act(stage):
        await fill(stage, 1000)
        cursor = await opened(stage)
        await told(cursor, 1)
        await subscriptions_of(await stage.another()).delete(stage.topic.id, NAME, force=True)

        cursor.advance({0: 2})

        with pytest.raises(errors.SubscriptionNotFound, match="was deleted"):
            await cursor.durable()

    play(act)


def test_a_defect_of_the_cursor_is_told_to_its_query(monkeypatch):
    def broken(situation):
        raise ZeroDivisionError("broken")

    async def act(stage):
        cursor = await opened(stage)
        await cursor.durable()
        monkeypatch.setattr(cursor_module, "next_step", broken)

        cursor.advance({0: 1})

        with pytest.raises(errors.LedgerError, match="has failed: ZeroDivisionError"):
            await cursor.durable()

    play(act)


def test_a_released_cursor_ends_its_intent_and_leaves_no_ledger():
    async def act(stage):
        await fill(stage, 1000)
        cursor = await opened(stage)
        await told(cursor, 1, 2, 3)
        cursor.advance({0: 4})
        await cursor.release()

        found = await listed(stage)

        assert (found.live, found.ledger_id, found.positions) == (False, None, {0: 4})
        assert not (await stage.client.intents.get(await intent_of(stage))).is_open
        assert [ledger_id async for ledger_id in stage.client.ledgers.list()] == []
        with pytest.raises(errors.LedgerFenced, match="released"):
            cursor.check()

    play(act)
