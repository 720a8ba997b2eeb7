"""How a broker keeps a topic that it has: the watch on the record of owners is set again."""

import asyncio
import logging
from contextlib import suppress
from types import SimpleNamespace

from spark_ledger import errors
from spark_ledger.broker.log.keeping import LOOK_S, HeartbeatLoop, follow
from tests.unit.spark_ledger.topic.stage import play


class Looks:
    """The looks of a keeper; the last watch that was set, until it has fired. The second look,
    which nothing watched, fails once the record has changed."""

    def __init__(self):
        self.count = 0
        self.watch = None
        self.watched = []

    async def heartbeat(self):
        pass

    async def __call__(self, *, fresh, watch):
        self.count += 1
        self.watch = watch or self.watch
        self.watched.append(self.watch is not None)
        if self.count == 2:
            self.fire()
            raise errors.Unavailable("the store is away")

    def fire(self):
        fired, self.watch = self.watch, None
        fired()


def test_a_watch_that_fires_while_a_look_fails_is_set_again():
    async def act(_):
        looks = Looks()
        commits = SimpleNamespace(heartbeat=looks.heartbeat, topic=SimpleNamespace(name="t"))
        task = asyncio.create_task(HeartbeatLoop(commits, looks).run())

        await asyncio.sleep(3 * LOOK_S)

        assert looks.count >= 3
        assert all(looks.watched)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    play(act)


class Followed:
    """A topic's follower: each call of `wait_for_commit` takes the next outcome, and the last for
    ever."""

    def __init__(self, *outcomes):
        self.outcomes, self.failure, self.calls = list(outcomes), None, 0
        self.log = SimpleNamespace(history_number=0)

    async def wait_for_commit(self, number):
        self.calls += 1
        outcome = self.outcomes.pop(0) if len(self.outcomes) > 1 else self.outcomes[0]
        await asyncio.sleep(0.01)
        if isinstance(outcome, Exception):
            raise outcome
        return SimpleNamespace(next=outcome, deleted=False)


async def followed(follower, seconds):
    """What was heard within so many seconds, and why the following ended."""
    heard, gone = [], []
    task = asyncio.create_task(
        follow(follower, "t", lambda another: heard.append(follower.calls), gone.append)
    )
    await asyncio.wait([task], timeout=seconds)
    over = task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return heard, gone, over


def test_what_passes_is_logged_once_and_tried_with_longer_pauses_and_again_once_it_went_well(
    caplog,
):
    async def act(_):
        away = errors.Unavailable("the store is away")
        follower = Followed(*[away] * 6, 1, ZeroDivisionError("a defect"), 2)
        heard, gone, over = await followed(follower, 60)
        assert heard[:2] == [7, 9]
        assert not gone and not over
        lines = [one.getMessage() for one in caplog.records if "is not followed" in one.message]
        assert len(lines) == 2
        assert "the store is away" in lines[0]
        assert "a defect" in lines[1]
        follower = Followed(away)
        await followed(follower, 60)
        assert follower.calls < 12

    with caplog.at_level(logging.WARNING):
        play(act)


def test_a_follower_that_failed_for_good_gives_the_topic_up_once():
    async def act(_):
        why = errors.UnsupportedFormat("a later version wrote it")
        follower = Followed(why)
        follower.failure = why
        heard, gone, over = await followed(follower, 5)
        assert (heard, gone, over, follower.calls) == ([], [why], True, 1)

    play(act)
