import asyncio

import pytest

from spark_ledger import errors
from spark_ledger.metadata import paths
from spark_ledger.metadata.store import MultiFailed
from spark_ledger.topic.log.actions import Grow, Hole, Trim
from spark_ledger.topic.log.intents import STALE, SUPERSEDED
from spark_ledger.topic.subscription.records import SubscriptionKind
from spark_ledger.topic.subscription.seek_target import CommittedSince, End
from spark_ledger.topic.subscription.subscriptions import LEASE_S
from tests.simulation.loop import current
from tests.simulation.store import EPOCH_MS
from tests.unit.spark_ledger.topic.stage import play
from tests.unit.spark_ledger.topic.subscription_stage import (
    NAME,
    commit,
    cursor_ledgers,
    fill,
    intent_of,
    listed,
    opened,
    positions,
    subscriptions_of,
    told,
)


def now_ms():
    """By the store's clock."""
    return EPOCH_MS + int(current().now * 1000)


async def of(stage, **options):
    return subscriptions_of(await stage.another(), **options)


async def trim(stage, offset, held):
    """Trim partition 0 as retention does: up to what is held, if nothing came between."""
    await commit(stage, Trim(((0, min(offset, held.offsets.get(0, offset))),)), checks=[held.check])


async def start_offset(stage):
    return (await (await stage.another()).log(stage.topic.id).fold(fresh=True)).start_offsets()[0]


# -- whose it is -------------------------------------------------------------------------------


def test_what_a_query_reserves_holds_rows_from_there_and_is_anybodys_until_it_is_opened():
    async def act(stage):
        await fill(stage, 20)
        some = await of(stage)
        await some.reserve(stage.topic, NAME, start={0: 7})
        await some.reserve(stage.topic, NAME, start={0: 12})
        held = await some.holds(stage.topic.id, 1, now_ms())
        assert held.offsets == {0: 7}
        assert not (await listed(stage)).live

        await opened(stage, "q2", "r1")
        with pytest.raises(errors.SubscriptionBusy):
            await some.reserve(stage.topic, NAME, start={0: 7})

    play(act)


def test_a_second_query_is_refused_while_the_first_lives_and_the_first_may_restart_at_once():
    async def act(stage):
        await opened(stage, "q1", "r1")

        with pytest.raises(errors.SubscriptionBusy, match=r"BUSY\] .*'s' is used by query q1"):
            await opened(stage, "q2", "r1")

        again = await opened(stage, "q1", "r2")
        again.check()
        assert (await listed(stage)).run_id == "r2"

    play(act)


def test_a_query_that_stopped_leaves_its_subscription_to_any_other():
    async def act(stage):
        await fill(stage, 10)
        first = await opened(stage, "q1")
        await told(first, 4)
        await first.release()

        second = await opened(stage, "q2")

        assert await second.recovered() == {0: 4}

    play(act)


def test_a_crashed_querys_subscription_is_anothers_after_a_lease_under_the_same_eyes():
    async def act(stage):
        await fill(stage, 10)
        first = await opened(stage, "q1")
        await told(first, 1, 2)
        held_under = await intent_of(stage)
        await first.abandon()
        waiting = await of(stage)
        began_s = asyncio.get_running_loop().time()
        second = None
        while second is None:
            try:
                second = await waiting.open(stage.topic, NAME, "q2", "r")
            except errors.SubscriptionBusy:
                await asyncio.sleep(20)

        assert LEASE_S <= asyncio.get_running_loop().time() - began_s <= LEASE_S + 25
        assert await second.recovered() == {0: 2}
        intent = await stage.client.intents.get(held_under)
        assert (intent.is_open, intent.record.why) == (False, SUPERSEDED)
        with pytest.raises(errors.SubscriptionBusy):
            await opened(stage, "q1", "r2")

    play(act)


def test_a_query_that_lives_keeps_its_subscription_however_long_another_waits():
    async def act(stage):
        await opened(stage, "q1")
        waiting = await of(stage)
        for _ in range(30):
            with pytest.raises(errors.SubscriptionBusy):
                await waiting.open(stage.topic, NAME, "q2", "r")
            await asyncio.sleep(60)

    play(act)


def test_a_lease_begins_anew_when_the_observers_session_was_in_doubt():
    async def act(stage):
        first = await opened(stage, "q1")
        await first.abandon()
        waiting = await of(stage)
        for pause_s in (LEASE_S - 10, 20):
            with pytest.raises(errors.SubscriptionBusy):
                await waiting.open(stage.topic, NAME, "q2", "r")
            waiting.store.suspend(5)
            await asyncio.sleep(pause_s)

        with pytest.raises(errors.SubscriptionBusy):
            await waiting.open(stage.topic, NAME, "q2", "r")

    play(act)


def test_a_query_whose_intent_was_condemned_leaves_its_subscription_to_another():
    async def act(stage):
        first = await opened(stage, "q1")
        await first.abandon()
        await stage.client.intents.condemn(await intent_of(stage), STALE)

        (await opened(stage, "q2")).check()

    play(act)


def test_an_older_run_does_not_take_its_subscription_back():
    async def act(stage):
        await opened(stage, run="r1")
        await opened(stage, run="r2")

        with pytest.raises(errors.LedgerFenced, match="newer run"):
            await opened(stage, run="r1")

    play(act)


def test_a_query_has_a_subscription_of_consumers_that_nobody_uses():
    async def act(stage):
        kind = SubscriptionKind.CONSUMER
        await (await of(stage)).create(stage.topic.id, NAME, kind=kind)

        await (await of(stage)).reserve(stage.topic, NAME, start=End.EARLIEST)
        await opened(stage)

        assert (await listed(stage)).kind is SubscriptionKind.QUERY

    play(act)


@pytest.mark.parametrize("name", ["", "x" * 256, "a\nb", "\x00", "\x7f", "a\x85"])
def test_what_is_no_name_is_refused(name):
    why = "no control characters" if 0 < len(name) < 256 else "1 to 255 characters"

    async def act(stage):
        with pytest.raises(errors.OptionInvalid, match=why):
            await (await of(stage)).open(stage.topic, name, "q", "r")

    play(act)


def test_a_name_may_have_any_other_characters():
    async def act(stage):
        some = await of(stage)
        for name in ("a/b", "..", "ä ö%", "marks"):
            await some.create(stage.topic.id, name)
        found = [one.name for one in await some.list(stage.topic.id)]
        assert sorted(found) == sorted(("a/b", "..", "ä ö%", "marks"))

    play(act)


# -- verbs -------------------------------------------------------------------------------------


def test_a_subscription_is_made_at_the_end_the_beginning_an_offset_or_a_time():
    async def act(stage):
        await fill(stage, 10)
        await asyncio.sleep(100)
        late_ms = now_ms()
        await fill(stage, 5)
        some, topic_id = await of(stage), stage.topic.id

        assert await some.create(topic_id, "a") == {0: 15}
        assert await some.create(topic_id, "b", End.EARLIEST) == {0: 0}
        assert await some.create(topic_id, "c", {0: 7}) == {0: 7}
        assert await some.create(topic_id, "d", CommittedSince(late_ms)) == {0: 10}
        with pytest.raises(errors.SubscriptionExists, match="'a' already"):
            await some.create(topic_id, "a", End.EARLIEST)
        assert await some.create(topic_id, "a", End.EARLIEST, exist_ok=True) == {0: 15}
        with pytest.raises(errors.OffsetsOutOfRange, match="16 of partition 0, which ends at 15"):
            await some.create(topic_id, "e", {0: 16})
        names = [(one.name, one.live, one.epoch) for one in await some.list(topic_id)]
        assert names == [(name, False, 0) for name in "abcd"]

    play(act)


def test_a_seek_moves_the_partitions_it_names_and_the_next_run_finds_it():
    async def act(stage):
        await fill(stage, 10)
        await fill(stage, 10, partition=1)
        cursor = await opened(stage)
        cursor.advance({0: 5, 1: 6})
        await cursor.durable()
        await cursor.release()
        some = await of(stage)

        assert await some.seek(stage.topic.id, NAME, {1: 2}) == {0: 5, 1: 2}
        assert await (await opened(stage, run="r2")).recovered() == {0: 5, 1: 2}

    play(act, partitions=2)


def test_a_query_sees_that_its_subscription_was_moved_until_it_has_it_again():
    async def act(stage):
        await fill(stage, 10)
        subscriptions, topic_id = await of(stage), stage.topic.id
        assert await subscriptions.is_of_query(topic_id, NAME, "q"), (
            "no subscription has this name yet"
        )
        cursor = await opened(stage)
        assert await subscriptions.is_of_query(topic_id, NAME, "q")
        await cursor.release()
        assert await subscriptions.is_of_query(topic_id, NAME, "q")
        await subscriptions.seek(topic_id, NAME, {0: 3})
        assert not await subscriptions.is_of_query(topic_id, NAME, "q")
        other = await opened(stage, "other")
        assert not await subscriptions.is_of_query(topic_id, NAME, "q")
        await other.release()
        await (await opened(stage, run="r2")).release()
        assert await subscriptions.is_of_query(topic_id, NAME, "q")
        assert not await subscriptions.is_of_query(topic_id, NAME, "other")

    play(act)


def test_a_subscription_in_use_is_sought_and_deleted_by_force_only():
    async def act(stage):
        await fill(stage, 10)
        cursor = await opened(stage)
        await told(cursor, 3, 4, 5)
        some, topic_id = await of(stage), stage.topic.id
        with pytest.raises(errors.SubscriptionBusy):
            await some.seek(topic_id, NAME, End.EARLIEST)
        with pytest.raises(errors.SubscriptionBusy):
            await some.delete(topic_id, NAME)

        assert await some.seek(topic_id, NAME, {0: 1}, force=True) == {0: 1}

        cursor.advance({0: 9})
        with pytest.raises(errors.LedgerFenced):
            await cursor.durable()
        assert await positions(stage) == {0: 1}
        await some.delete(topic_id, NAME)
        assert await some.list(topic_id) == []
        assert [one async for one in stage.client.ledgers.list()] == []

    play(act)


def test_a_subscription_that_is_not_there_is_said_to_be_missing():
    async def act(stage):
        some, topic_id = await of(stage), stage.topic.id
        for asked in (
            some.delete(topic_id, "x"),
            some.seek(topic_id, "x", End.LATEST),
            some.positions(topic_id, "x"),
        ):
            with pytest.raises(errors.SubscriptionNotFound, match="no subscription 'x'"):
                await asked
        assert await some.list(topic_id) == []

    play(act)


def test_a_subscription_that_is_not_there_is_answered_with_those_of_like_names():
    async def act(stage):
        some, topic_id = await of(stage), stage.topic.id
        for name in ("nightly-1", "nightly-2", "else"):
            await some.create(topic_id, name)
        with pytest.raises(errors.SubscriptionNotFound, match=r": nightly-1, nightly-2\."):
            await some.positions(topic_id, "nightly")

    play(act)


def test_a_deleted_topic_gets_no_subscription():
    async def act(stage):
        await stage.client.topics.delete("t")
        some = await of(stage)
        with pytest.raises((errors.TopicDeleted, errors.TopicNotFound)):
            await some.create(stage.topic.id, "x")
        with pytest.raises(errors.TopicNotFound, match="no topic with id nope"):
            await some.create("nope", "x")

    play(act)


def test_lag_is_counted_from_where_the_subscription_is():
    async def act(stage):
        await fill(stage, 10)
        cursor = await opened(stage)
        await told(cursor, 2)
        await asyncio.sleep(60)
        await commit(stage, Hole(0, 4, 6))

        lag = (await (await of(stage)).lag(stage.topic.id, NAME, now_ms()))[0]

        assert (lag.rows, lag.bytes) == (6, 600)
        assert 60_000 <= lag.millis <= 63_000

    play(act)


# -- what is held ------------------------------------------------------------------------------


def test_a_subscription_holds_where_it_was_a_grace_period_ago():
    async def act(stage):
        await fill(stage, 1000)
        cursor = await opened(stage)
        some = await of(stage)

        async def held():
            found = await some.holds(stage.topic.id, 1, now_ms(), grace_ms=120_000)
            return found.offsets[0]

        assert await held() == 0
        for step in range(6):
            await told(cursor, 100 * step + 1)
            await asyncio.sleep(120)
            assert await held() == max(0, 100 * step - 99)
        assert (
            len(
                stage.world.store.peek_children(f"{paths.subscription(stage.topic.id, NAME)}/marks")
            )
            <= 3
        )

    play(act)


def test_the_lowest_of_all_subscriptions_is_held_and_without_one_nothing():
    async def act(stage):
        await fill(stage, 100)
        some, topic_id = await of(stage), stage.topic.id
        assert (await some.holds(topic_id, 1, now_ms())).offsets == {}
        await some.create(topic_id, "a", {0: 70})
        await some.create(topic_id, "b", {0: 30})
        assert (await some.holds(topic_id, 1, now_ms())).offsets == {0: 30}
        await some.delete(topic_id, "b")
        assert (await some.holds(topic_id, 1, now_ms())).offsets == {0: 70}

    play(act)


def test_a_partition_that_came_later_is_held_whole_and_one_that_is_not_read_not_at_all():
    async def act(stage):
        await fill(stage, 100)
        await opened(stage, start=End.LATEST)
        await commit(stage, Grow(2))
        some = await of(stage)
        assert (await some.holds(stage.topic.id, 2, now_ms())).offsets == {0: 100, 1: 0}
        await some.delete(stage.topic.id, NAME, force=True)
        await some.open(stage.topic, "assigned", "q2", "r", start=End.EARLIEST, partitions=(1,))
        assert (await some.holds(stage.topic.id, 2, now_ms())).offsets == {1: 0}

    play(act)


@pytest.mark.parametrize("change", ["create", "open", "seek", "step back", "delete"])
def test_a_trim_planned_before_a_subscription_came_or_went_back_fails(change):
    async def act(stage):
        await fill(stage, 1000)
        some, topic_id = await of(stage), stage.topic.id
        cursor = await opened(stage, start={0: 900})
        await cursor.durable()
        held = await some.holds(topic_id, 1, now_ms())
        if change == "create":
            await some.create(topic_id, "early", {0: 100})
        elif change == "open":
            await some.open(stage.topic, "early", "q2", "r", start={0: 100})
        elif change == "seek":
            await some.seek(topic_id, NAME, {0: 200}, force=True)
        elif change == "step back":
            await told(cursor, 200)
        else:
            await some.delete(topic_id, NAME, force=True)

        with pytest.raises(MultiFailed):
            await trim(stage, 900, held)

    play(act)


def test_no_mark_hides_a_step_back_that_came_between():
    async def act(stage):
        await fill(stage, 1000)
        cursor = await opened(stage, start={0: 100})
        await told(cursor, 900)
        await asyncio.sleep(60)
        asking = await of(stage)
        multi = asking.store.multi

        async def interposed(operations):
            await told(cursor, 200)
            return await multi(operations)

        asking.store.multi = interposed
        await asking.holds(stage.topic.id, 1, now_ms(), grace_ms=120_000)
        asking.store.multi = multi
        await asyncio.sleep(60)
        await told(cursor, 950)
        await asyncio.sleep(61)

        held = await asking.holds(stage.topic.id, 1, now_ms(), grace_ms=120_000)

        assert held.offsets[0] <= 200

    play(act)


@pytest.mark.parametrize("way", ["step back", "seek"])
def test_where_a_subscription_went_back_to_is_held_for_the_grace_period(way):
    async def act(stage):
        await fill(stage, 1000)
        some, cursor = await of(stage), await opened(stage, start={0: 900})
        await asyncio.sleep(130)

        async def held():
            found = await some.holds(stage.topic.id, 1, now_ms(), grace_ms=120_000)
            return found.offsets[0]

        assert await held() == 900
        if way == "step back":
            await told(cursor, 200)
        else:
            await some.seek(stage.topic.id, NAME, {0: 200}, force=True)
            cursor = await opened(stage, run="r2")
        await told(cursor, 950)

        assert await held() == 200
        await asyncio.sleep(100)
        assert await held() == 200

    play(act)


def test_no_mark_that_is_made_while_a_step_back_is_on_its_way_hides_it():
    async def act(stage):
        await fill(stage, 1000)
        client = await stage.another()
        cursor = await opened(stage, client=client, start={0: 100})
        await told(cursor, 900)
        await asyncio.sleep(100)
        asking, multi, slow = await of(stage), client.store.multi, [60]

        async def slowly(operations):  # its first mark says as much as it knows of
            if slow:
                await asking.holds(stage.topic.id, 1, now_ms(), grace_ms=120_000)
                await asyncio.sleep(slow.pop())
            return await multi(operations)

        client.store.multi = slowly
        await told(cursor, 200, 950)
        await asyncio.sleep(70)

        held = await asking.holds(stage.topic.id, 1, now_ms(), grace_ms=120_000)

        assert held.offsets[0] <= 200

    play(act)


def test_moving_on_does_not_disturb_a_trim():
    async def act(stage):
        await fill(stage, 1000)
        cursor = await opened(stage, start={0: 500})
        held = await (await of(stage)).holds(stage.topic.id, 1, now_ms())
        await told(cursor, 600, 700, 800)

        await trim(stage, 900, held)

        assert await start_offset(stage) == 500

    play(act)


@pytest.mark.parametrize("verb", ["create", "open", "seek", "step back"])
def test_a_trim_at_any_moment_of_a_step_back_leaves_every_row_that_is_promised(verb):
    async def act(stage):
        rng = current().random_for(verb)
        await fill(stage, 1000)
        some, topic_id = await of(stage), stage.topic.id
        trimmer = await of(stage)
        cursor = await opened(stage, start={0: 900})
        await cursor.durable()

        async def trims():
            for _ in range(3):
                await asyncio.sleep(rng.uniform(0, 0.06))
                held = await trimmer.holds(topic_id, 1, now_ms(), grace_ms=1)
                await asyncio.sleep(rng.uniform(0, 0.01))
                try:
                    await trim(stage, 900, held)
                except MultiFailed:
                    continue

        async def goes_back():
            await asyncio.sleep(rng.uniform(0, 0.03))
            if verb == "create":
                return (await some.create(topic_id, "early", {0: 100}))[0]
            if verb == "open":
                early = await some.open(stage.topic, "early", "q2", "r", start={0: 100})
                await early.durable()
                return early.confirmed[0]
            if verb == "seek":
                return (await some.seek(topic_id, NAME, {0: 100}, force=True))[0]
            await told(cursor, 100)
            return cursor.confirmed[0]

        _, promised = await asyncio.gather(trims(), goes_back())

        assert promised >= await start_offset(stage)
        return promised

    assert {play(act, seed=seed) for seed in range(16)} == {100, 900}


def test_a_query_that_goes_back_below_the_trim_point_is_put_to_the_first_row_once():
    async def act(stage):
        await fill(stage, 1000)
        cursor = await opened(stage, start={0: 900})
        await cursor.durable()
        await commit(stage, Trim(((0, 600),)))
        await told(cursor, 200)
        assert cursor.confirmed == {0: 600}
        folder = paths.subscriptions(stage.topic.id)
        version = stage.world.store.peek(folder).version

        for _ in range(5):
            cursor.advance({0: 200})
            await asyncio.sleep(2)

        assert cursor.confirmed == {0: 600}
        assert stage.world.store.peek(folder).version == version

    play(act)


def test_the_ledgers_that_subscriptions_need_are_told_to_who_deletes():
    async def act(stage):
        await fill(stage, 100)
        cursor = await opened(stage)
        assert await cursor_ledgers(stage.client, stage.topic.id) == []
        await told(cursor, 1, 2)
        there = [ledger_id async for ledger_id in stage.client.ledgers.list()]
        assert await cursor_ledgers(stage.client, stage.topic.id) == there and len(there) == 1

    play(act)
