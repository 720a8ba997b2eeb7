"""Where consumers are, when several brokers have a subscription's partitions."""

import asyncio
from itertools import count

import pytest

from spark_ledger import errors
from spark_ledger.metadata import paths
from spark_ledger.metadata.store import Create, MultiFailed
from spark_ledger.topic.log.intents import STALE
from spark_ledger.topic.subscription import records
from spark_ledger.topic.subscription.nodes import SubscriptionNodes
from spark_ledger.topic.subscription.records import (
    Claim,
    SubscriptionKind,
    SubscriptionShare,
    with_shares,
)
from spark_ledger.topic.subscription.seek_target import End
from spark_ledger.topic.subscription.subscriptions import LEASE_S
from tests.unit.spark_ledger.topic.consumers import (
    NAME,
    PARTITIONS,
    adopted,
    broker,
    opened,
    play_here,
    positions,
    shares_of,
    written,
)
from tests.unit.spark_ledger.topic.subscription_stage import intent_of


def test_of_two_shares_the_one_of_the_later_owner_counts_and_none_of_an_older_epoch():
    early, late = (
        SubscriptionShare(3, True, {0: (1, 90), 1: (1, 10)}),
        SubscriptionShare(3, False, {0: (2, 50)}),
    )
    old = SubscriptionShare(2, True, {2: (9, 99)})
    assert with_shares({0: 5, 2: 7}, 3, [late, old, early]) == {0: 50, 1: 10, 2: 7}


def test_consumers_at_two_brokers_are_where_each_of_them_says():
    async def act(stage):
        a, b = await broker(stage, "a"), await broker(stage, "b")
        at_a, at_b = await a.open(5), await b.open(99)
        assert await adopted(at_a, 0, 1) == 5
        assert await adopted(at_b, 1, 1) == 5
        at_a.advance(0, 20)
        at_b.advance(1, 30)
        await written(at_a, at_b)
        assert await positions(stage) == {0: 20, 1: 30, 2: 5, 3: 5}
        (listed,) = await stage.client.subscriptions.list(stage.topic.id)
        assert (listed.live, listed.positions) == (True, {0: 20, 1: 30, 2: 5, 3: 5})
        held = await stage.client.subscriptions.holds(stage.topic.id, PARTITIONS, 2**62)
        assert held.offsets[0] <= 20

    play_here(act)


def test_a_new_subscription_is_made_with_its_brokers_share_by_one_write(monkeypatch):
    async def act(stage):
        a = await broker(stage, "a")
        await a.open(5)
        store, writes = a.client.store, []

        def noted(name, call):
            async def write(*args, **options):
                writes.append(name)
                return await call(*args, **options)

            return write

        for name in ("create", "set", "multi", "delete"):
            monkeypatch.setattr(store, name, noted(name, getattr(store, name)))
        cursor = await a.open(7, "another")
        assert await adopted(cursor, 0, 1) == 7
        assert writes == ["multi"]

    play_here(act)


def test_the_next_owner_of_a_partition_goes_on_and_a_zombie_changes_nothing():
    async def act(stage):
        a, b = await broker(stage, "a"), await broker(stage, "b")
        at_a, at_b = await a.open(), await b.open()
        await at_a.adopt(0, 1)
        at_a.advance(0, 20)
        await written(at_a)
        assert await adopted(at_b, 0, 2) == 20
        await written(at_b)
        at_a.advance(0, 1000)
        await written(at_a)
        assert (await positions(stage))[0] == 20
        at_b.advance(0, 21)
        await written(at_b)
        assert (await positions(stage))[0] == 21

    play_here(act)


def test_the_share_of_a_dead_broker_goes_into_that_of_the_next():
    async def act(stage):
        a = await broker(stage, "a")
        at_a = await a.open()
        for number in range(PARTITIONS):
            await at_a.adopt(number, 1)
            at_a.advance(number, 10 + number)
        await written(at_a)
        await a.die()
        b = await broker(stage, "b")
        at_b = await b.open()
        assert shares_of(stage) == ["b"]
        assert await positions(stage) == {0: 10, 1: 11, 2: 12, 3: 13}
        assert await adopted(at_b, 2, 2) == 12

    play_here(act)


def test_a_broker_that_was_taken_for_dead_is_told_and_writes_nothing_more():
    async def act(stage):
        a = await broker(stage, "a")
        at_a = await a.open()
        await at_a.adopt(0, 1)
        await written(at_a)
        told = []
        at_a.on_failure = lambda: told.append(at_a.failure)
        await a.client.store.delete(paths.broker("a"))
        await (await broker(stage, "b")).open()
        at_a.advance(0, 50)
        await written(at_a)
        assert (await positions(stage))[0] == 0
        assert isinstance(told[0], errors.LedgerFenced)
        with pytest.raises(errors.LedgerFenced, match="another broker took over its share"):
            at_a.check()

    play_here(act)


def test_of_a_broker_that_has_a_partition_again_the_cursor_of_before_writes_nothing_more():
    async def act(stage):
        a, b = await broker(stage, "a"), await broker(stage, "b")
        before = await a.open()
        await before.adopt(0, 2)
        before.advance(0, 30)
        await written(before)
        at_b = await b.open()
        await at_b.adopt(0, 3)
        at_b.advance(0, 40)
        await written(at_b)
        again = await a.open()
        assert await adopted(again, 0, 4) == 40
        again.advance(0, 52)
        await a.cursors.release(again, 5)
        await a.cursors.release(before, 5)  # it waited for consumers to come back
        assert (await positions(stage))[0] == 52
        assert isinstance(before.failure, errors.LedgerFenced)
        assert await adopted((await a.open()), 0, 6) == 52

    play_here(act)


def test_of_two_openings_at_a_broker_at_once_the_later_one_has_the_subscription():
    async def act(stage):
        a = await broker(stage, "a")
        await a.cursors.release(await a.open(), 5)
        store, first = a.client.store, []
        multi = store.multi

        async def overtaken(operations):
            await multi(operations)
            store.multi = multi
            first.append(asyncio.ensure_future(a.open()))
            await asyncio.sleep(0)  # it has begun

        store.multi = overtaken
        with pytest.raises(errors.LedgerFenced, match="opened again"):
            await a.open()
        (later,) = await asyncio.gather(*first)
        await later.adopt(0, 1)
        later.advance(0, 9)
        await a.cursors.written(later, 5)
        assert (await positions(stage))[0] == 9

    play_here(act)


def test_what_is_released_while_a_round_of_writing_waits_is_not_written_over_the_next_one():
    async def act(stage):
        a = await broker(stage, "a")
        before, other = await a.open(), await a.open(name="other")
        for one in (before, other):
            await one.adopt(0, 1)
        async with a.cursors._writing:
            for one in (before, other):
                one.advance(0, 11)
            await asyncio.sleep(2)  # the round knows of both, and writes them together
            await a.cursors.release(before, 0.1)
            again = await a.open()
        await written(other)
        await again.adopt(0, 2)
        again.advance(0, 5)
        await written(again)
        assert (again.failure, (await positions(stage))[0]) == (None, 5)
        assert isinstance(before.failure, errors.LedgerFenced)

    play_here(act)


@pytest.mark.parametrize("way", ["delete", "seek"])
def test_a_subscription_in_use_is_sought_or_deleted_by_force_alone_and_its_brokers_are_told(way):
    async def act(stage):
        a = await broker(stage, "a")
        at_a = await a.open(3)
        await at_a.adopt(0, 1)
        subscriptions, topic_id = stage.client.subscriptions, stage.topic.id

        async def do(**options):
            if way == "delete":
                await subscriptions.delete(topic_id, NAME, **options)
            else:
                await subscriptions.seek(topic_id, NAME, End.EARLIEST, **options)

        with pytest.raises(errors.SubscriptionBusy, match="used by consumers"):
            await do()
        await do(force=True)
        at_a.advance(0, 70)
        await written(at_a)
        error = errors.SubscriptionNotFound if way == "delete" else errors.LedgerFenced
        assert isinstance(at_a.failure, error)
        assert way == "delete" or (await positions(stage))[0] == 0

    play_here(act)


def test_one_that_nobody_moves_is_looked_at_and_fails_after_its_deletion():
    async def act(stage):
        at_a = await (await broker(stage, "a")).open()
        await stage.client.subscriptions.delete(stage.topic.id, NAME, force=True)
        await asyncio.sleep(30)
        assert isinstance(at_a.failure, errors.SubscriptionNotFound)

    play_here(act)


def test_a_subscription_that_was_opened_is_not_read_again_until_its_record_changes():
    async def act(stage):
        a = await broker(stage, "a")
        await a.cursors.release(await a.open(), 5)
        cursor = await a.open()
        get, read = a.client.store.get, []

        async def counted(path, *options):
            read.append(path)
            return await get(path, *options)

        a.client.store.get = counted
        await asyncio.sleep(30)
        assert cursor.path not in read
        await stage.client.subscriptions.seek(stage.topic.id, NAME, End.EARLIEST, force=True)
        await asyncio.sleep(5)
        assert cursor.path in read
        assert isinstance(cursor.failure, errors.LedgerFenced)

    play_here(act)


def test_a_subscription_that_is_sought_while_a_broker_opens_it_is_opened_again():
    async def act(stage):
        a = await broker(stage, "a")
        await a.cursors.release(await a.open(), 5)
        multi = a.client.store.multi

        async def sought_after(operations):
            a.client.store.multi = multi
            await multi(operations)
            await stage.client.subscriptions.seek(stage.topic.id, NAME, End.EARLIEST, force=True)
            await asyncio.sleep(1)  # the watch fires meanwhile

        a.client.store.multi = sought_after
        cursor = await a.open()
        assert cursor.failure is None
        await asyncio.sleep(5)
        assert isinstance(cursor.failure, errors.LedgerFenced)

    play_here(act)


def test_a_released_one_is_free_and_its_positions_stay():
    async def act(stage):
        a = await broker(stage, "a")
        at_a = await a.open()
        await at_a.adopt(1, 1)
        at_a.advance(1, 8)
        await a.cursors.release(at_a, 5)
        (listed,) = await stage.client.subscriptions.list(stage.topic.id)
        assert (listed.live, listed.positions[1]) == (False, 8)
        assert not await stage.client.subscriptions.used_by_consumers(stage.topic.id, NAME)
        again = await a.open()
        assert await adopted(again, 1, 1) == 8

    play_here(act)


def test_what_is_not_released_in_time_is_written_and_free_once_the_store_answers():
    async def act(stage):
        a = await broker(stage, "a")
        at_a = await a.open()
        await at_a.adopt(1, 1)
        at_a.advance(1, 8)
        stage.world.store.stall(8)
        await a.cursors.release(at_a, 2)
        assert at_a.failure is None
        await asyncio.sleep(10)
        (listed,) = await stage.client.subscriptions.list(stage.topic.id)
        assert (listed.live, listed.positions[1]) == (False, 8)
        with pytest.raises(errors.LedgerFenced, match="was released"):
            at_a.check()

    play_here(act)


def test_a_step_back_fails_a_trim_that_was_planned_before_it():
    async def act(stage):
        a = await broker(stage, "a")
        at_a = await a.open()
        await at_a.adopt(0, 1)
        at_a.advance(0, 50)
        await written(at_a)
        holds = await stage.client.subscriptions.holds(stage.topic.id, PARTITIONS, 2**62)
        at_a.advance(0, 10)
        await written(at_a)
        with pytest.raises(MultiFailed):
            await stage.client.store.multi([holds.check, Create("/never")])
        now = await stage.client.subscriptions.holds(stage.topic.id, PARTITIONS, 2**62, 2**62)
        assert now.offsets[0] <= 10
        at_a.advance(0, 11)
        await written(at_a)
        assert (await positions(stage))[0] == 11

    play_here(act)


def test_a_step_back_is_durable_soon_also_where_the_other_partitions_move_all_the_time():
    async def act(stage):
        a = await broker(stage, "a")
        at_a = await a.open()
        for number in (0, 1):
            await at_a.adopt(number, 1)
        at_a.advance(0, 50)
        await written(at_a)

        async def consumes():
            for offset in count():
                at_a.advance(1, offset)
                await asyncio.sleep(0.0001)

        consumer = asyncio.create_task(consumes())
        at_a.advance(0, 10)
        await a.cursors.written(at_a, 5)
        assert (await positions(stage))[0] == 10
        consumer.cancel()

    play_here(act)


def test_what_the_cursor_of_a_broker_of_before_had_is_taken_over_without_loss():
    async def act(stage):
        old = await stage.another()
        query = f"consumers-of-{stage.topic.id}"
        cursor = await old.subscriptions.open(
            stage.topic, NAME, query, "run", kind=SubscriptionKind.CONSUMER, start=End.EARLIEST
        )
        await cursor.recovered()
        for offset in (5, 9):
            cursor.advance({0: offset, 3: 2 * offset})
            await cursor.durable()
        (record,) = await old.subscriptions.list(stage.topic.id)
        assert record.ledger_id is not None
        await cursor.abandon()
        at_b = await (await broker(stage, "b")).open()
        assert [await adopted(at_b, number, 1) for number in range(PARTITIONS)] == [9, 0, 0, 18]

    play_here(act)


def test_consumers_begin_where_a_query_has_ended():
    async def act(stage):
        query = await stage.another()
        cursor = await opened(stage, client=query)
        for offset in (5, 9):
            cursor.advance({0: offset, 3: 2 * offset})
            await cursor.durable()
        await cursor.release()
        a, b = await broker(stage, "a"), await broker(stage, "b")
        at_a, at_b = await asyncio.gather(a.open(77), b.open(77))
        assert [await adopted(at_a, 0, 1), await adopted(at_b, 1, 1)] == [9, 0]
        assert [await adopted(at_a, 2, 1), await adopted(at_b, 3, 1)] == [0, 18]
        at_a.advance(0, 12)
        await written(at_a, at_b)
        assert await positions(stage) == {0: 12, 1: 0, 2: 0, 3: 18}
        assert shares_of(stage) == ["a", "b"]

    play_here(act)


def test_consumers_are_refused_while_a_query_runs_and_go_on_where_it_was_killed_a_lease_later():
    async def act(stage):
        cursor = await opened(stage, "q1")
        cursor.advance({0: 6})
        await cursor.durable()
        a = await broker(stage, "a")
        with pytest.raises(errors.SubscriptionBusy, match="is used by query q1"):
            await a.open()
        cursor.check()
        await cursor.abandon()
        with pytest.raises(errors.SubscriptionBusy):
            await a.open()
        await asyncio.sleep(LEASE_S + 1)
        assert await adopted((await a.open()), 0, 1) == 6

    play_here(act)


def test_a_slow_query_whose_subscription_consumers_have_writes_nothing_more():
    async def act(stage):
        cursor = await opened(stage, "q1")
        for offset in (5, 6):  # to a ledger, which is fenced
            cursor.advance({0: offset})
            await cursor.durable()
        await stage.client.intents.condemn(await intent_of(stage, NAME), STALE)
        at_a = await (await broker(stage, "a")).open()
        cursor.advance({0: 50})
        with pytest.raises(errors.LedgerFenced):
            await cursor.durable()
        assert await adopted(at_a, 0, 1) == 6

    play_here(act)


def test_a_query_has_back_what_consumers_moved_once_they_are_gone_and_is_moved_by_its_checkpoint():
    async def act(stage):
        cursor = await opened(stage, "q1")
        cursor.advance({0: 6})
        await cursor.release()
        a, dead = await broker(stage, "a"), await broker(stage, "dead")
        at_a, at_dead = await a.open(), await dead.open()
        await at_a.adopt(0, 1)
        await at_dead.adopt(1, 1)
        at_a.advance(0, 20)
        at_dead.advance(1, 30)
        await written(at_a, at_dead)
        with pytest.raises(errors.SubscriptionBusy, match="used by consumers"):
            await opened(stage, "q1", "r2")
        await a.cursors.release(at_a, 5)
        await dead.die()
        again = await opened(stage, "q1", "r3")
        assert await again.recovered() == {0: 20, 1: 30, 2: 0, 3: 0}
        assert shares_of(stage) == []
        again.advance({0: 7})
        await again.release()
        assert (await positions(stage))[0] == 7
        assert await adopted((await a.open()), 0, 2) == 7

    play_here(act)


def test_a_query_takes_no_subscription_that_a_broker_writes_in_that_moment():
    async def act(stage):
        a = await broker(stage, "a")
        at_a = await a.open()
        await at_a.adopt(0, 1)
        await a.cursors.release(at_a, 5)
        store = stage.client.store
        multi = store.multi

        async def after_a_broker(operations):
            store.multi = multi
            again = await a.open()  # consumers come, read, and go
            again.advance(0, 20)
            await a.cursors.release(again, 5)
            await multi(operations)

        query = await stage.client.intents.open_query_intent("q1", "r1", "warm")
        assert query.is_open
        nodes = SubscriptionNodes(store, stage.topic.id)
        seen = await nodes.get(NAME)
        claim = Claim("q1", "r1", "token", query.id)
        store.multi = after_a_broker
        some = stage.client.subscriptions
        assert await some._claim(nodes, NAME, seen, claim, query, End.LATEST) is None
        again = await opened(stage, "q1", client=stage.client)
        assert (await again.recovered())[0] == 20

    play_here(act)


def test_a_subscription_that_went_from_hand_to_hand_is_deleted_with_all_its_nodes():
    async def act(stage):
        a = await broker(stage, "a")
        at_a = await a.open()
        await a.cursors.release(at_a, 5)
        await (await opened(stage, "q1")).release()
        await stage.client.subscriptions.delete(stage.topic.id, NAME)
        nodes = SubscriptionNodes(stage.client.store, stage.topic.id)
        assert await nodes.names() == []

    play_here(act)


def test_consumers_of_a_query_of_some_partitions_begin_at_the_first_row_of_the_others():
    async def act(stage):
        cursor = await stage.client.subscriptions.open(
            stage.topic, NAME, "q1", "r1", start=End.EARLIEST, partitions=(1,)
        )
        cursor.advance({1: 8})
        await cursor.release()
        at_a = await (await broker(stage, "a")).open(99)
        assert [await adopted(at_a, number, 1) for number in range(2)] == [0, 8]
        held = await stage.client.subscriptions.holds(stage.topic.id, PARTITIONS, 2**62)
        assert list(held.offsets) == [0, 1, 2, 3]

    play_here(act)


def test_positions_that_do_not_fit_are_refused_to_consumers_not_forgotten(monkeypatch):
    monkeypatch.setattr(records, "POSITIONS_BYTES_MAX", 20)

    async def act(stage):
        a = await broker(stage, "a")
        with pytest.raises(errors.OptionInvalid, match="too many partitions"):
            await a.open(5)
        cursor = await opened(stage, "q1")
        cursor.advance(dict.fromkeys(range(PARTITIONS), 7))
        await cursor.release()
        for _ in range(2):
            with pytest.raises(errors.OptionInvalid, match="too many partitions"):
                await a.open()
        again = await opened(stage, "q1", "r2")
        assert await again.recovered() == dict.fromkeys(range(PARTITIONS), 7)
        await again.release()
        await stage.client.subscriptions.delete(stage.topic.id, NAME)
        assert await adopted((await a.open(0)), 0, 1) == 0

    play_here(act)


def test_of_many_that_move_at_once_one_that_was_deleted_does_not_hold_the_others():
    async def act(stage):
        a = await broker(stage, "a")
        found = []
        for i in range(5):

            async def start():
                return dict.fromkeys(range(PARTITIONS), 0)

            found.append(await a.cursors.open(stage.topic, f"s{i}", start))
        for one in found:
            await one.adopt(0, 1)
        await stage.client.subscriptions.delete(stage.topic.id, "s2", force=True)
        for one in found:
            one.advance(0, 33)
        await written(*found)
        assert [one.failure is None for one in found] == [True, True, False, True, True]
        nodes = SubscriptionNodes(stage.client.store, stage.topic.id)
        for name in ("s0", "s1", "s3", "s4"):
            assert (await nodes.get(name)).floor[0] == 33

    play_here(act)


def test_a_defect_in_one_round_does_not_end_the_writing():
    async def act(stage):
        a = await broker(stage, "a")
        at_a = await a.open()
        await at_a.adopt(0, 1)
        await written(at_a)
        left = [RuntimeError("a defect")]
        operations = at_a.operations

        async def failing(share):
            if left:
                raise left.pop()
            return await operations(share)

        at_a.operations = failing
        at_a.advance(0, 7)
        await written(at_a)
        assert not left
        assert (await positions(stage))[0] == 7

    play_here(act)
