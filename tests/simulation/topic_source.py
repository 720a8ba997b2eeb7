"""A query that reads a topic batch by batch: its runs die, and go on where it saved it was (32).

Always true: as with Spark's checkpoint the end of a batch is durable before the batch is read, and
its positions are saved when its rows are there; a run that begins finds both and does the batch
that was begun again. Plans are production's, as are offsets in their durable form; rows that were
trimmed are left out, and nothing else.
"""

import asyncio
import json
from contextlib import aclosing
from dataclasses import dataclass, field

from spark_ledger.errors import LedgerError
from spark_ledger.metadata.store import StoreError
from spark_ledger.spark.options import offsets
from spark_ledger.spark.options.offsets import Ends, TopicEnds
from spark_ledger.spark.options.options import stream_read_options
from spark_ledger.spark.read.planning import Planner
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.log.state import TopicState
from spark_ledger.topic.read.live import LiveEnds
from tests.kit.slices import read_task
from tests.simulation import invariants
from tests.simulation.topic_ghost import LogGhost
from tests.simulation.topic_work import TOPIC, TopicWork
from tests.simulation.world import Client

OPTIONS = stream_read_options(
    {"subscribe": TOPIC, "startingOffsets": "earliest", "failOnDataLoss": "false"}
)

Offsets = dict[int, int]


@dataclass
class Progress:
    """Of one topic id, durable: what outlives every run."""

    saved: str = ""
    """The positions after the last batch that is done, as Spark keeps them."""
    begun: str = ""
    """The end of the batch that was begun; empty when none is."""
    given: Offsets = field(default_factory=dict)
    """By partition: the rows below were given, by which batch and run so ever."""


class TopicSource:
    """The runs of one query, one after another."""

    def __init__(self, work: TopicWork) -> None:
        self.work = work
        self.world = work.world
        self._end = self.world.loop.now + work.plan.chaos_s
        self._progress: dict[str, Progress] = {}

    async def read_on(self, client: Client) -> None:
        """One run: batch after batch, until it dies or the chaos ends."""
        topics = self.work.client(client)
        self.world.ghost.meet("source run")
        while client.process.alive and self.world.loop.now < self._end:
            await asyncio.sleep(client.rng.uniform(0.2, 1.5))
            log = self.work.ghost.named(TOPIC)
            if log is None:
                continue
            try:
                await self._batch(client, topics, log, all_of_it=False)
            except (LedgerError, StoreError) as error:
                self.work.met(client, "source", error)

    async def audit(self, client: Client) -> None:
        """A last run does what was begun and reads to the end: no offset is left out."""
        log = self.work.ghost.named(TOPIC)
        if log is None:
            return
        topics = self.work.client(client)
        while await self._batch(client, topics, log, all_of_it=True):
            pass
        given = self._progress[log.topic_id].given
        for p, end in log.state.end_offsets().items():
            span = (given.get(p, 0), end)
            invariants.a_source_reads_each_position_once(self.world.ghost, p, span, [], end)
            assert given.get(p, 0) == end

    async def _batch(
        self, client: Client, topics: TopicClient, log: LogGhost, *, all_of_it: bool
    ) -> bool:
        """Whether there was one."""
        progress = self._progress.setdefault(log.topic_id, Progress())
        state = await topics.log(log.topic_id).fold(fresh=all_of_it)
        start = _decoded(progress.saved, state)
        if not offsets.is_within({TOPIC: start}, _known(state)):
            self.world.ghost.meet("source ahead of what is known")
            state = await topics.log(log.topic_id).fold(fresh=True)
            start = _decoded(progress.saved, state)
        for p, end in state.end_offsets().items():
            invariants.a_source_never_goes_back(self.world.ghost, p, start.get(p, 0), end)
        if not progress.begun:
            ends = state.end_offsets()
            chosen = {
                p: end if all_of_it else client.rng.randint(min(start[p], end), end)
                for p, end in ends.items()
            }
            if chosen == start:
                return False
            progress.begun = _encoded(chosen, state)
        else:
            self.world.ghost.meet("source batch done again")
        self._may_die(client, all_of_it)
        end_at = {int(p): at for p, at in json.loads(progress.begun)[TOPIC].items()}
        if max(end_at) >= len(state.partitions):  # an earlier run knew of more partitions
            state = await topics.log(log.topic_id).fold(fresh=True)
        start = {p: start.get(p, 0) for p in end_at}
        await self._read(topics, log, state, start, end_at, progress)
        self._may_die(client, all_of_it)
        progress.saved, progress.begun = progress.begun, ""
        progress.given |= end_at
        self.world.ghost.meet("source batch")
        return True

    async def _read(
        self,
        topics: TopicClient,
        log: LogGhost,
        state: TopicState,
        start: Offsets,
        end: Offsets,
        progress: Progress,
    ) -> None:
        planner = Planner(topics, LiveEnds(topics.ledgers), OPTIONS)
        found: dict[int, list[int]] = {p: [] for p in end}
        for task in await planner.plan({TOPIC: state}, {TOPIC: start}, {TOPIC: end}):
            async with aclosing(read_task(topics.ledgers, task)) as read:
                async for rows in read:
                    values = rows.record_batch.column("value").to_pylist()
                    for place, value in enumerate(values, rows.offset):
                        self.work.judge_row(log, rows.partition, place, value)
                        found[rows.partition].append(place)
        kept = dict(log.starts())
        for p, at in end.items():
            span = (progress.given.get(p, 0), at)
            invariants.a_source_reads_each_position_once(
                self.world.ghost, p, span, found[p], kept[p]
            )

    def _may_die(self, client: Client, stays: bool) -> None:
        if not stays and client.rng.random() < 0.1:
            self.world.ghost.meet("source died in a batch")
            client.kill()
            raise asyncio.CancelledError


def _known(state: TopicState) -> Ends:
    starts = tuple(held.start_offset for held in state.partitions)
    ends = tuple(held.end_offset for held in state.partitions)
    return {TOPIC: TopicEnds(state.topic_id, starts, ends)}


def _encoded(at: Offsets, state: TopicState) -> str:
    return json.dumps(offsets.encode({TOPIC: at}, _known(state)))


def _decoded(saved: str, state: TopicState) -> Offsets:
    """Where the query is; a partition that came since it was saved is read from its beginning."""
    if not saved:
        return dict.fromkeys(state.end_offsets(), 0)
    return offsets.decode(json.loads(saved), _known(state), lossy=True)[TOPIC]
