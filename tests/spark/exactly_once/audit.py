"""What must be true of a topic after a case, whatever was done to its queries.

Always true: every value of the steps is there once, as long as it was written; in each partition
they stand by step, task and row; offsets are dense from 0; and when every run has ended and the
janitor was there, a ledger that names the topic is one that the topic refers to.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from spark_ledger import errors
from spark_ledger.client.loop import background_loop
from spark_ledger.metadata import paths
from spark_ledger.metadata.ledger_listing import ledger_ids
from spark_ledger.topic import blocking
from spark_ledger.topic.blocking import BlockingTopics
from spark_ledger.topic.janitor import CleanReport, Janitor
from spark_ledger.topic.state import TopicState
from tests.spark.exactly_once.source import Step

CLEAN_EVERY_S = 0.2


def check_rows(read: Path, steps: Sequence[Step]) -> None:
    """`read` is what a driver read: place, bytes, partition, offset."""
    table = pq.read_table(read).sort_by([("partition", "ascending"), ("offset", "ascending")])
    places = table["place"].to_pylist()
    _check_counts(places, [place for step in steps for place in step.places()])
    bytes_of = {step.number: step.bytes for step in steps}
    for place, size in zip(places, table["bytes"].to_pylist(), strict=True):
        assert size == bytes_of[int(place[:5])], f"{place} has {size} bytes"
    for partition, part in _by_partition(table).items():
        _check_partition(partition, part)


def _check_counts(found: list[str], wanted: list[str]) -> None:
    counted, expected = Counter(found), Counter(wanted)
    lost, doubled = expected - counted, counted - expected
    assert not lost, f"{lost.total()} rows are lost, the first is {min(lost)}"
    assert not doubled, f"{doubled.total()} rows too many, the first is {min(doubled)}"


def _check_partition(partition: int, part: pa.Table) -> None:
    offsets, places = part["offset"].to_pylist(), part["place"].to_pylist()
    assert offsets == list(range(len(offsets))), f"partition {partition} has other offsets"
    for at, (one, other) in enumerate(zip(places, sorted(places), strict=True)):
        assert one == other, f"partition {partition}, offset {at}: {one} where {other} belongs"


def _by_partition(table: pa.Table) -> dict[int, pa.Table]:
    numbers = table["partition"]
    return {
        partition: table.filter(pa.compute.equal(numbers, partition))
        for partition in sorted(set(numbers.to_pylist()))
    }


class Onlooker:
    """Sees ZooKeeper itself, not through the proxy, and is the janitor: one that comes by again and
    again until it is closed, and at moments that a case chooses."""

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

    def commits(self, topic_id: str) -> int:
        """How many there were."""
        return self.state(topic_id).next

    def open_intents(self, target: str) -> list[str]:
        return self._topics.run(self._open_intents(target))

    def clean(self, condemn: Sequence[str] = ()) -> CleanReport:
        """A pass of the janitor, which takes the intents as stale."""
        assert not self._cleaning.done(), f"the janitor failed: {self._cleaning.exception()}"
        return self._topics.run(self._pass(condemn))

    def fence(self, topic_id: str) -> list[int]:
        """Recover every ledger of the topic that is open; which they were."""
        there = self._topics.run(self._ledgers_of(topic_id))
        opened = [ledger for ledger, closed in there.items() if not closed]
        for ledger in opened:
            self._topics.run(self._topics.client.ledgers.recover(ledger))
        return opened

    def check_ledgers(self, topic: str) -> None:
        """Nobody writes to the topic any more: its runs are over."""
        topic_id = self.topic_id(topic)
        self._janitor = self._new_janitor()  # this one looks again at ids that were without ledger
        self.clean(self.open_intents(topic))
        there = self._topics.run(self._ledgers_of(topic_id))
        referred = set(self.state(topic_id).ledgers())
        left = sorted(set(there) - referred)
        assert not left, f"ledgers {left} of topic {topic} are in no commit, and stayed"
        assert referred <= set(there), f"ledgers {sorted(referred - set(there))} are deleted"
        still = [ledger for ledger, closed in there.items() if not closed]
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

    async def _open_intents(self, target: str) -> list[str]:
        client = self._topics.client
        await client.store.sync(paths.INTENTS)
        names = sorted(await client.store.children(paths.INTENTS))
        found = [await client.intents.get(name) for name in names]
        return [intent.id for intent in found if intent.open and intent.target == target]

    async def _ledgers_of(self, topic_id: str) -> Mapping[int, bool]:
        """Those that name the topic, and whether they are closed."""
        client = self._topics.client
        found: dict[int, bool] = {}
        async for ledger_id in ledger_ids(client.store):
            try:
                record = (await client.ledgers.record(ledger_id, fresh=True)).record
            except errors.NoSuchLedger:
                continue
            if record.topic == topic_id:
                found[ledger_id] = record.closed
        return found
