"""Where the topic layer is tested: the simulated cluster with real bookies and the real client."""

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pyarrow as pa

from bookie_server.config import StorageConfig
from spark_ledger.metadata import paths
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.commit.commit import CommitOutcome, TxnKey
from spark_ledger.topic.log.intents import Intent
from spark_ledger.topic.log.segments import INLINE, Segment, merge_ranges
from spark_ledger.topic.log.topics import TopicInfo
from spark_ledger.topic.read.plan import plan_read
from spark_ledger.topic.upkeep.janitor import Janitor
from spark_ledger.topic.write import TaskResult, TaskSettings
from tests.kit.budgets import STORAGE
from tests.kit.loop_task import LoopTask
from tests.kit.owner_calls import OwnerCalls
from tests.kit.settings import with_settings
from tests.kit.slices import read_task
from tests.simulation.loop import run
from tests.simulation.world import World

NOW_MS = 1_700_000_000_000
QUERY, RUN, TARGET = "q", "run-1", "t"
CALM = with_settings(
    STORAGE,
    flush_interval_s=600.0,
    page_cache_sync_s=600.0,
    disk_check_s=600.0,
    limbo_check_s=600.0,
    tombstone_sweep_s=600.0,
    gc_interval_s=600.0,
)
"""Bookies look at their disks seldom: hours and days pass in tests of topics."""
TO_A_LEDGER = TaskSettings(inline_bytes_max=0)
STEPS_MAX = 1_000_000
"""Of a test: three times as many as the longest takes. One that does not end fails within half a
minute."""


@dataclass
class Stage:
    """A cluster and one process that uses topics."""

    world: World
    client: TopicClient
    topic: TopicInfo
    owners: OwnerCalls = field(default_factory=OwnerCalls)
    now_ms: int = NOW_MS
    """The clock of that process."""

    @cached_property
    def janitor(self) -> Janitor:
        """Of that process."""
        return Janitor(self.client.store, self.client.ledgers, self.client.rng)

    async def another(self) -> TopicClient:
        """The topic layer of another process."""
        process = await self.world.client("other")
        return TopicClient(process.ledgers, process.rng, lambda: NOW_MS, self.owners.ask)

    async def intent(self, run_id: str = RUN) -> Intent:
        return await self.client.intents.open_query_intent(QUERY, run_id, TARGET)

    async def intents(self) -> list[Intent]:
        """All that the store has."""
        names = await self.client.store.children(paths.INTENTS)
        return [await self.client.intents.get(name) for name in names]

    async def written(
        self, intent: Intent, rows: Sequence[bytes], task_index: int = 0, *, inline: bool = False
    ) -> TaskResult:
        """Rows (keyed by themselves) written by one task, to a ledger however few they are, or
        as a task does it by default (`inline`)."""
        settings = TaskSettings() if inline else TO_A_LEDGER
        writer = LoopTask(self.client, self.topic, intent, task_index=task_index, settings=settings)
        column = pa.array(rows, pa.binary())
        await writer.write(column, column)
        return await writer.finish()

    async def commit(
        self,
        intent: Intent,
        version: int,
        *results: TaskResult,
        overwrite: bool = False,
        **options: Any,
    ) -> CommitOutcome:
        txn = TxnKey(intent.app_id, intent.target, version, intent.run_id)
        replaced = [self.topic.id] if overwrite else []
        return await self.client.commit_topics(
            {self.topic.id: results}, txn, intent.id, overwrite=replaced, **options
        )

    async def rows(self, partition: int = 0, **options: Any) -> list[tuple[int, bytes]]:
        """(offset, value) of all that is committed and not trimmed, as a new reader sees it."""
        reader = await self.another()
        state = await reader.log(self.topic.id).fold(fresh=True)
        start = state.start_offsets()[partition]
        ranges = {partition: (start, state.partitions[partition].end_offset)}
        found: list[tuple[int, bytes]] = []
        read = await reader.tables(state, ranges)
        for task in plan_read(state, ranges, read=read, **options):
            async for part in read_task(reader.ledgers, task):
                values = part.record_batch.column("value").to_pylist()
                found += enumerate(values, part.offset)
        return found


def play(
    act: Callable[[Stage], Coroutine[Any, Any, Any]],
    *,
    partitions: int = 1,
    seed: int = 0,
    storage: StorageConfig = CALM,
) -> Any:
    """Run `act` on a stage with 4 bookies and topic `t`."""

    async def main() -> Any:
        world = World(storage)
        await world.prepare(4)
        process = await world.client("main")
        owners = OwnerCalls()
        client = TopicClient(
            process.ledgers, process.rng, lambda: stage.now_ms, lambda *of: owners.ask(*of)
        )
        stage = Stage(world, client, await client.topics.create("t", partitions), owners)
        result = await act(stage)
        world.check()
        return result

    return run(main(), seed, steps_max=STEPS_MAX)


def segment(ledger_id: int, *entry_rows: int, partition: int = 0, first: int = 0) -> Segment:
    """Entries `first`... of so many rows each, 100 bytes a row."""
    rows = sum(entry_rows)
    entries = merge_ranges(range(first, first + len(entry_rows)))
    return Segment(partition, ledger_id, 0, entries, entry_rows, rows, rows * 100, 1, 2)


def before_the_first_multi(store, act):
    """Let `act` happen when the store's next multi is about to be sent."""
    multi = store.multi

    async def interrupted(operations):
        store.multi = multi
        await act()
        return await multi(operations)

    store.multi = interrupted


def inline(*payloads, partition=0):
    counts, size = (1,) * len(payloads), sum(map(len, payloads))
    entries = ((0, len(payloads) - 1),)
    return Segment(
        partition, INLINE, 0, entries, counts, len(payloads), size, 1, 1, inline=tuple(payloads)
    )
