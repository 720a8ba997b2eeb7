"""What must be true of a topic after a case, whatever was done to its queries.

Always true: every value of the steps is there once, as long as it was written; in each partition
they stand by step, task and row; offsets are dense from 0; topics that are written together have
equally many commits whenever somebody looks; and when every run has ended and the janitor was
there, a ledger that names the topic is one that the topic refers to (for rows, for bodies of
commits, for checkpoints, for cursors) or did until not long ago. What it refers to is counted here
from its nodes, not as the janitor does.
"""

import asyncio
import random
from collections.abc import Collection, Sequence
from pathlib import Path

import pyarrow.parquet as pq

from spark_ledger import errors
from spark_ledger.metadata import paths
from spark_ledger.metadata.ledger_record import ledger_ids
from spark_ledger.metadata.store import NoNode
from spark_ledger.process import background_loop
from spark_ledger.topic import blocking
from spark_ledger.topic.blocking import BlockingTopics
from spark_ledger.topic.log.segment_table import BlobPointer
from spark_ledger.topic.log.state import TopicState
from spark_ledger.topic.log.topic_log import fold_agreeing
from spark_ledger.topic.subscription.records import SubscriptionRecord, decode_subscription
from spark_ledger.topic.upkeep.janitor import CleanReport, Janitor
from tests.kit.history import History
from tests.spark.exactly_once.source import Step

CLEAN_EVERY_S = 0.2
ROWS = "rows of the steps"


def check_rows(read: Path, steps: Sequence[Step]) -> None:
    """`read` is what a driver read: place, bytes, topic, partition, offset."""
    history, rows = History(), []
    for step in steps:
        for place in step.places():
            history.promised(ROWS, place, lane=ROWS)
    bytes_of = {step.number: step.bytes for step in steps}
    for row in pq.read_table(read).to_pylist():
        place, size = row["place"], row["bytes"]
        assert size == bytes_of[int(place[:5])], f"{place} has {size} bytes"
        rows.append((((row["topic"], row["partition"]), row["offset"]), place))
    history.read(ROWS, rows, start=0)
    history.check()


class Onlooker:
    """Sees ZooKeeper itself, not through the proxy, and is the janitor: one that comes by again and
    again until it is closed, and at moments that a case chooses. Makes checkpoints then, too."""

    def __init__(self, service_url: str) -> None:
        self._topics: BlockingTopics = blocking.topics(service_url)
        self._janitor = self._new_janitor()
        self._turn = asyncio.Lock()
        self._cleaning = background_loop().submit(self._keep_cleaning())

    def close(self) -> None:
        """Raises what a pass of the janitor raised meanwhile."""
        self._cleaning.cancel()
        if not self._cleaning.cancelled():
            self._cleaning.result()

    def topic_id(self, topic: str) -> str:
        return self._topics.run(self._topics.client.topics.open(topic)).id

    def state(self, topic_id: str) -> TopicState:
        """As it is now, after a sync."""
        return self._topics.run(self._topics.client.log(topic_id).fold(fresh=True))

    def commits(self, topics: Sequence[str]) -> int:
        """How many each has; a reader of all of them sees each commit in all or in none."""
        logs = [self._topics.client.log(self.topic_id(topic)) for topic in topics]
        found = [one.next for one in self._topics.run(fold_agreeing(logs, fresh=True))]
        assert len(set(found)) == 1, f"{dict(zip(topics, found, strict=True))} commits"
        return found[0]

    def open_intents(self, app_id: str) -> list[str]:
        """Those of the query's runs."""
        return self._topics.run(self._open_intents(app_id))

    def clean(self, condemn: Sequence[str] = ()) -> CleanReport:
        """A pass of the janitor, which takes the intents as stale."""
        assert not self._cleaning.done(), f"the janitor failed: {self._cleaning.exception()}"
        return self._topics.run(self._pass(condemn))

    def checkpoint(self, topics: Sequence[str]) -> None:
        """What of their logs is before the last checkpoint goes."""
        for topic in topics:
            self._topics.run(self._topics.client.checkpoints.make(self.topic_id(topic)))

    def fence(self, topic_id: str) -> list[int]:
        """Recover every ledger of the topic that is open; which they were."""
        there = self._topics.run(self._ledgers_of([topic_id]))[topic_id]
        opened = [ledger for ledger, closed in there.items() if not closed]
        for ledger in opened:
            self._topics.run(self._topics.client.ledgers.recover(ledger))
        return opened

    def check_ledgers(self, app_id: str, topics: Sequence[str]) -> None:
        """Nobody writes to the topics any more: the query's runs are over."""
        self._janitor = self._new_janitor()  # this one looks again at ids that were without ledger
        self.clean(self.open_intents(app_id))
        ids = {self.topic_id(topic): topic for topic in topics}
        there = self._topics.run(self._ledgers_of(ids))
        for topic_id, topic in ids.items():
            state, referred = self._topics.run(self._referred(topic_id))
            found = there[topic_id]
            left = sorted(found.keys() - referred - state.dropped.keys())
            assert not left, f"nothing refers to ledgers {left} of topic {topic}, and they stayed"
            gone = sorted(referred - found.keys())
            assert not gone, f"ledgers {gone} are deleted, and topic {topic} refers to them"
            still = [ledger for ledger, closed in found.items() if not closed]
            assert not still, f"ledgers {still} of ended runs are open"

    def _new_janitor(self) -> Janitor:
        client = self._topics.client
        return Janitor(client.store, client.ledgers, random.Random(0))

    async def _keep_cleaning(self) -> None:
        """A tenth of the time."""
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            await self._pass()
            await asyncio.sleep(max(CLEAN_EVERY_S, 10 * (loop.time() - began)))

    async def _pass(self, condemn: Sequence[str] = ()) -> CleanReport:
        async with self._turn:
            return await self._janitor.clean(condemn=condemn, force=True)

    async def _open_intents(self, app_id: str) -> list[str]:
        client = self._topics.client
        await client.store.sync(paths.INTENTS)
        names = sorted(await client.store.children(paths.INTENTS))
        found = [await client.intents.get(name) for name in names]
        return [intent.id for intent in found if intent.is_open and intent.app_id == app_id]

    async def _referred(self, topic_id: str) -> tuple[TopicState, set[int]]:
        """The topic, and every ledger that it needs."""
        client = self._topics.client
        state, newest = await client.log(topic_id).fold_from_checkpoint()
        found = set(state.ledgers(await client.chunks.load(state.chunks())))
        found.update(state.bodies)
        found.update(chunk.pointer.ledger_id for chunk in state.chunks())
        if newest is not None:
            roots = (newest.record.root, newest.record.previous_root)
            found.update(one.ledger_id for one in roots if isinstance(one, BlobPointer))
            found.update(chunk.pointer.ledger_id for chunk in newest.root.state.chunks())
            found.update(newest.root.earlier_ledgers)
        cursors = [one.ledger_id for one in await self._subscriptions(topic_id)]
        return state, found | {ledger for ledger in cursors if ledger is not None}

    async def _subscriptions(self, topic_id: str) -> list[SubscriptionRecord]:
        store, folder = self._topics.client.store, paths.subscriptions(topic_id)
        try:
            nodes = [await store.get(f"{folder}/{name}") for name in await store.children(folder)]
        except NoNode:  # it never had one
            return []
        return [decode_subscription(node.value) for node in nodes]

    async def _ledgers_of(self, topic_ids: Collection[str]) -> dict[str, dict[int, bool]]:
        """Of each topic those that name it, and whether they are closed."""
        client = self._topics.client
        found: dict[str, dict[int, bool]] = {topic_id: {} for topic_id in topic_ids}
        async for ledger_id in ledger_ids(client.store):
            try:
                record = (await client.ledgers.record(ledger_id, fresh=True)).record
            except errors.NoSuchLedger:
                continue
            if record.topic in found:
                found[record.topic][ledger_id] = record.closed
        return found
