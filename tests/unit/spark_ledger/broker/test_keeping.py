"""How a broker keeps a topic that it has: the watch on the record of owners is set again."""

import asyncio
from contextlib import suppress
from types import SimpleNamespace

from spark_ledger import errors
from spark_ledger.broker.owner.keeping import LOOK_S, Keeping
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
        task = asyncio.create_task(Keeping(commits, looks).go_on())

        await asyncio.sleep(3 * LOOK_S)

        assert looks.count >= 3
        assert all(looks.watched)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    play(act)
