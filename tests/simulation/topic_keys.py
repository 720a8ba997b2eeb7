"""Reads of a few keys only: entries whose filters say that they have none of them are skipped.

Always true: what such a read leaves out is compared with a read of everything by the same plan
(T17); in these runs nearly every entry is of one partition, and has a filter.
"""

import asyncio
from collections.abc import Iterator
from contextlib import aclosing, contextmanager

from spark_ledger.errors import LedgerError
from spark_ledger.metadata.store import StoreError
from spark_ledger.topic import write
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.entry import batch_encoder
from spark_ledger.topic.entry.key_filter import hashes_of
from spark_ledger.topic.read.plan import Cutting, ReadTask, plan_read
from spark_ledger.topic.read.slice_reader import fetch_task
from tests.kit.segments_seen import rows_of
from tests.kit.slices import as_planned
from tests.simulation import invariants
from tests.simulation.topic_ghost import LogGhost
from tests.simulation.topic_work import KEYS, TopicWork
from tests.simulation.world import Client

ABSENT = b"nobody's"
_SMALL = ((batch_encoder, "SHARE_BYTES", 1), (write, "ENTRIES_MIN", 1))
Found = dict[tuple[int, int], bytes]
"""By partition and offset: the value that was read."""


@contextmanager
def every_entry_filtered() -> Iterator[None]:
    """Entries are of one partition, and a segment of one entry gets filters too."""
    before = [getattr(module, name) for module, name, _ in _SMALL]
    try:
        for module, name, value in _SMALL:
            setattr(module, name, value)
        yield
    finally:
        for (module, name, _), value in zip(_SMALL, before, strict=True):
            setattr(module, name, value)


class TopicKeys:
    """Of one run."""

    def __init__(self, work: TopicWork) -> None:
        self.work = work
        self.world = work.world
        self._end = self.world.loop.now + work.plan.chaos_s

    async def read_often(self, client: Client) -> None:
        topics = self.work.client(client)
        while client.process.alive and self.world.loop.now < self._end:
            await asyncio.sleep(client.rng.uniform(0.3, 3))
            log = self.work.ghost.named(client.rng.choice(self.work.names))
            try:
                if log is not None:
                    await self._read(client, topics, log)
            except (LedgerError, StoreError) as error:
                self.work.met(client, "read keys", error)

    async def audit(self, client: Client) -> None:
        """Of every topic once."""
        topics = self.work.client(client)
        for log in self.work.ghost.logs.values():
            if not log.state.deleted:
                await self._read(client, topics, log)

    async def _read(self, client: Client, topics: TopicClient, log: LogGhost) -> None:
        state = await topics.log(log.topic_id).fold()
        starts = state.start_offsets()
        ranges = {p: (starts[p], end) for p, end in state.end_offsets().items()}
        newer, read = await topics.state_with_tables(state, ranges)
        if newer is not state:
            return  # the plan would be of another state
        keys = client.rng.sample([*KEYS, ABSENT], client.rng.choice((1, 1, 2)))
        for task in plan_read(state, ranges, topic=log.name, cutting=Cutting(2), read=read):
            everything, skipped = await self._rows(topics, task, None)
            some, entries = await self._rows(topics, task, keys)
            if entries < skipped:
                self.world.ghost.meet("entries skipped by their keys")
            wanted = {
                place: value
                for place, value in everything.items()
                if self.work.ghost.key_of.get(value) in keys
            }
            left_out = [place for place in wanted if place not in some]
            strange = [place for place in some if some[place] != everything.get(place)]
            invariants.a_read_of_keys_leaves_none_out(self.world.ghost, left_out, strange)

    async def _rows(
        self, topics: TopicClient, task: ReadTask, keys: list[bytes] | None
    ) -> tuple[Found, int]:
        """What a read gives, and of how many entries."""
        found, entries = Found(), 0
        hashes = None if keys is None else hashes_of(keys)
        async with aclosing(fetch_task(topics.ledgers, task, hashes, as_planned)) as runs:
            async for run in runs:
                entries += len(run)
                for rows in map(rows_of, run):
                    values = rows.record_batch.column("value").to_pylist()
                    for offset, value in enumerate(values, rows.offset):
                        found[rows.partition, offset] = value
        return found, entries
