"""Owners that are held until a commit comes past their live segments, without a cluster."""

import asyncio

import pytest

from spark_ledger import errors
from spark_ledger.broker.log.holds import SegmentHold, SegmentHolds
from spark_ledger.topic.log import state
from spark_ledger.topic.log.actions import OpenLive, SealLive
from spark_ledger.topic.log.records import Commit
from tests.simulation.loop import run

PARTITIONS = 100


def after(topic, *actions):
    names = {"app_id": "a", "target": "t", "version": 0, "run_id": "r", "intent": "i"}
    return state.apply(topic, topic.next, Commit("c", **names, actions=actions), 0)


def opened(*partitions):
    """A topic whose partitions have each a live segment, which commit 0 brought."""
    opens = [OpenLive(p, 10 + p, 0, "broker", 1) for p in partitions]
    return after(state.empty("id", PARTITIONS), *opens)


def sealed(topic, *partitions):
    return after(topic, *(SealLive(p, 10 + p, None, (), 0) for p in partitions))


class Log:
    """A topic's follower, and what a look finds."""

    def __init__(self, topic):
        self.listeners = {}
        self.now = self.there = topic
        self.looks = 0

    def state(self):
        return self.now

    async def follow(self):
        return self

    def folds(self, topic):
        self.now = self.there = topic
        for listener in list(self.listeners):
            listener(topic)

    async def look(self):
        self.looks += 1
        await asyncio.sleep(0.001)
        return self.there


def holding(topic, *partitions, hold_s=2.0):
    """The log, the holds of the partitions, and who waits for them to be over."""
    log = Log(topic)
    all_, loop = SegmentHolds(log.follow, log.look), asyncio.get_running_loop()
    holds = [SegmentHold(10 + p, 0, loop.time() + hold_s) for p in partitions]
    for hold in holds:
        hold.join()
    waiting = [
        loop.create_task(all_.past(p, hold)) for p, hold in zip(partitions, holds, strict=True)
    ]
    return log, holds, waiting


async def within(waiting, within_s=0.1):
    async with asyncio.timeout(within_s):
        return await asyncio.gather(*waiting)


def test_all_partitions_go_on_with_the_commit_that_the_follower_hears_of_and_nobody_looks():
    async def act():
        every = range(PARTITIONS)
        log, _, waiting = holding(opened(*every), *every)
        await asyncio.sleep(0.5)
        past = sealed(log.now, *every)
        log.folds(past)
        assert await within(waiting) == [past] * PARTITIONS
        assert log.looks == 0
        await asyncio.sleep(0.1)
        assert log.listeners == {}

    run(act())


def test_a_hundred_that_nobody_holds_any_more_cost_one_look():
    async def act():
        every = range(PARTITIONS)
        log, holds, waiting = holding(opened(*every), *every)
        await asyncio.sleep(0.5)
        log.there = past = sealed(log.now, *every)
        for hold in holds:
            hold.leave()
        assert await within(waiting) == [past] * PARTITIONS
        assert log.looks == 1

    run(act())


def test_a_partition_that_the_commit_does_not_touch_stays_held_until_its_own_hold_is_over():
    async def act():
        log, (_, other), waiting = holding(opened(0, 1), 0, 1)
        await asyncio.sleep(0.5)
        past = sealed(log.now, 0)
        log.folds(past)
        assert await within(waiting[:1]) == [past]
        await asyncio.sleep(0.5)
        assert not waiting[1].done()
        other.leave()
        assert await within(waiting[1:]) == [None]

    run(act())


def test_a_hold_is_over_at_its_end_though_its_committer_is_there_still():
    async def act():
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        log, _, waiting = holding(opened(0), 0)
        assert await within(waiting, 3) == [None]
        assert 2.0 <= loop.time() - began_s < 2.1
        assert log.looks == 1

    run(act())


def test_what_was_known_before_the_segment_was_opened_ends_no_hold():
    async def act():
        log, (hold,), waiting = holding(state.empty("id", 1), 0)
        await asyncio.sleep(0.5)
        assert not waiting[0].done()
        log.folds(opened(0))
        await asyncio.sleep(0.5)
        assert not waiting[0].done()
        hold.leave()
        assert await within(waiting) == [None]

    run(act())


def test_a_log_that_cannot_be_read_ends_the_wait_and_a_later_hold_is_waited_for_as_ever():
    async def act():
        log = Log(opened(0))
        loop = asyncio.get_running_loop()

        async def fails():
            raise errors.Unavailable("no store")

        looks = [log.look, fails]
        holds = SegmentHolds(log.follow, lambda: looks[-1]())
        hold = SegmentHold(10, 0, loop.time() + 2.0)
        waiting = loop.create_task(holds.past(0, hold))
        await asyncio.sleep(0.1)
        hold.end()
        with pytest.raises(errors.Unavailable):
            await within([waiting])
        looks.pop()
        again = loop.create_task(holds.past(0, SegmentHold(10, 0, loop.time() + 2.0)))
        await asyncio.sleep(0.1)
        past = sealed(log.now, 0)
        log.folds(past)
        assert await within([again]) == [past]

    run(act())
