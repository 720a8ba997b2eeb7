"""What tests of subscriptions share: a topic with rows, and queries that open a subscription."""

import asyncio

from spark_ledger.metadata import paths
from spark_ledger.metadata.store import Create, Set
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.log import records
from spark_ledger.topic.log.actions import Append
from spark_ledger.topic.log.records import Commit, Head
from spark_ledger.topic.subscription.cursor import Cursor
from spark_ledger.topic.subscription.nodes import SubscriptionNodes
from spark_ledger.topic.subscription.seek_target import End
from spark_ledger.topic.subscription.subscriptions import Subscriptions
from tests.unit.spark_ledger.topic.stage import NOW_MS, segment

NAME = "s"


def subscriptions_of(client, **options):
    """The subscriptions as that process sees them."""
    options.setdefault("read_chunks", client.chunks.load)
    return Subscriptions(client.ledgers, client.intents, client.log, client.rng, **options)


async def cursor_ledgers(client, topic_id):
    """The ledgers that the topic's subscriptions refer to."""
    found = [one.ledger_id for one in await subscriptions_of(client).list(topic_id)]
    return [ledger_id for ledger_id in found if ledger_id is not None]


async def commit(stage, *actions, checks=()):
    """One commit of these actions, as some committer makes it."""
    store, topic_id = stage.client.store, stage.topic.id
    node = await store.get(paths.topic_head(topic_id))
    number = records.decode_head(node.value).next
    body = Commit(f"c{number}", "app", "t", number, "run", "intent", tuple(actions))
    head = records.encode_head(Head(number + 1))
    await store.multi(
        [
            Set(paths.topic_head(topic_id), head, node.version),
            Create(paths.topic_log(topic_id, number), records.encode_commit(body)),
            *checks,
        ]
    )


async def fill(stage, rows, partition=0):
    """Commit so many rows, of 100 bytes each; their ledger is only said to exist."""
    await commit(stage, Append((segment(10**9, rows, partition=partition),)))


async def opened(stage, query="q", run="r", *, client=None, start=End.EARLIEST) -> Cursor:
    """The subscription in the hands of a run, in a process of its own."""
    some = subscriptions_of(client or await stage.another())
    return await some.open(stage.topic, NAME, query, run, start=start)


async def told(cursor, *offsets):
    """Tell the cursor each offset of partition 0 in turn, and wait until it is durable."""
    for offset in offsets:
        cursor.advance({0: offset})
        await cursor.durable()


async def positions(stage):
    """Where the subscription is, as another process reads it."""
    return await subscriptions_of(await stage.another()).positions(stage.topic.id, NAME)


async def listed(stage):
    """The subscription as another process lists it."""
    return (await subscriptions_of(await stage.another()).list(stage.topic.id))[0]


async def intent_of(stage, name=NAME) -> str:
    """The intent under which the subscription is held, as its record names it."""
    seen = await SubscriptionNodes(stage.client.store, stage.topic.id).get(name)
    return seen.record.intent


class Doomed:
    """A process that opens the subscription `name` and tells it offsets of partition 0, and is
    killed at the `at`-th answer that leaves a bookie, arrives, or write that the store applies."""

    def __init__(self, stage, process, name, at):
        self.stage = stage
        self.process = process
        self.name = name
        self.client = TopicClient(process.ledgers, process.rng, lambda: NOW_MS)
        self.at = at
        self.events = 0
        self.cursor = None
        world = stage.world
        self._heard = [world.network.taps, world.network.deliveries, world.store.listeners]
        for heard in self._heard:
            heard.append(self._event)

    @classmethod
    async def of(cls, stage, name=NAME, at=10**9):
        return cls(stage, await stage.world.client("doomed"), name, at)

    async def play(self, *offsets, run="r1", release=True):
        """Open, tell, release, as far as it gets."""
        await asyncio.gather(
            self.process.run(self._play(offsets, run, release)), return_exceptions=True
        )
        for heard in self._heard:
            heard.remove(self._event)

    @property
    def confirmed(self):
        """The offset that is durable by its own knowledge, None before it knew of one."""
        return None if self.cursor is None else self.cursor.confirmed.get(0)

    async def _play(self, offsets, run, release):
        self.cursor = await subscriptions_of(self.client).open(
            self.stage.topic, self.name, "q", run, start=End.EARLIEST
        )
        await told(self.cursor, *offsets)
        if release:
            await self.cursor.release()

    def _event(self, what):
        self.events += 1
        if self.events == self.at:
            self.process.kill()
