"""Chunks of checkpoints that were read, kept for the next plan.

Always true: at most KEPT_BYTES_MAX of decoded chunks are kept, those used last; a chunk that
several ask for at once is read once; a few are read at a time. Chunks never change, so what is
kept is never stale.

And which ledgers lost rows since a checkpoint, where only its chunks say which. Whoever takes rows
away names the ledgers that hold them, as it sees them; but a checkpoint moves rows that were in
commits to ledgers of its own, and what was planned on commits alone does not know of these. Where
the checkpoint has them in its tail the fold notes it (state.py); where they are in a chunk somebody
has to read it. Always true: a ledger that the newest checkpoint refers to, and to which nothing
refers after a later commit, is among those found here or dropped by the state: so the delete delay
holds for it (hazard 34).
"""

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from spark_ledger import errors
from spark_ledger.ledger.client import LedgerStore
from spark_ledger.topic.log.blobs import read_blob
from spark_ledger.topic.log.intervals import Chunk, Interval
from spark_ledger.topic.log.segment_table import SegmentTable
from spark_ledger.topic.log.state import PartitionState, TopicState

KEPT_BYTES_MAX = 256 * 1024 * 1024
READS_AT_ONCE = 4


class ChunkStore:
    """On one event loop."""

    def __init__(self, ledgers: LedgerStore, *, kept_bytes_max: int = KEPT_BYTES_MAX) -> None:
        self._ledgers = ledgers
        self._kept_bytes_max = kept_bytes_max
        self._kept: OrderedDict[Chunk, SegmentTable] = OrderedDict()
        self._bytes = 0
        self._reading: dict[Chunk, asyncio.Task[SegmentTable]] = {}
        self._turns = asyncio.Semaphore(READS_AT_ONCE)

    @property
    def kept_bytes(self) -> int:
        """About how much memory the chunks that are kept take."""
        return self._bytes

    async def load(self, chunks: Iterable[Chunk]) -> Mapping[Chunk, SegmentTable]:
        """The tables of the chunks, read where they are not kept.

        Raises errors.NoSuchLedger (a newer checkpoint took its place: fold again),
        errors.DataUnavailable, errors.DigestMismatch, errors.Unavailable,
        errors.UnsupportedFormat.
        """
        wanted = list(dict.fromkeys(chunks))
        found = {chunk: self._kept[chunk] for chunk in wanted if chunk in self._kept}
        for chunk in found:
            self._kept.move_to_end(chunk)
        missing = [chunk for chunk in wanted if chunk not in found]
        reads = [self._read_once(chunk) for chunk in missing]
        tables = await asyncio.gather(*map(asyncio.shield, reads))
        return {**found, **dict(zip(missing, tables, strict=True))}

    def keep(self, chunk: Chunk, table: SegmentTable) -> None:
        """Remember what is in the chunk: its writer need not read it."""
        if chunk in self._kept:
            return
        self._kept[chunk] = table
        self._bytes += table.nbytes
        while self._bytes > self._kept_bytes_max:
            _, oldest = self._kept.popitem(last=False)
            self._bytes -= oldest.nbytes

    async def close(self) -> None:
        """Give up what is being read."""
        for task in self._reading.values():
            task.cancel()
        await asyncio.gather(*self._reading.values(), return_exceptions=True)

    def _read_once(self, chunk: Chunk) -> "asyncio.Task[SegmentTable]":
        task = self._reading.get(chunk)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._read(chunk))
            self._reading[chunk] = task
            task.add_done_callback(lambda done: self._over(chunk, done))
        return task

    def _over(self, chunk: Chunk, task: "asyncio.Task[SegmentTable]") -> None:
        del self._reading[chunk]
        if not task.cancelled():
            task.exception()  # for waiting calls; perhaps there are none any more

    async def _read(self, chunk: Chunk) -> SegmentTable:
        async with self._turns:
            table = SegmentTable.decode(await read_blob(self._ledgers, chunk.pointer))
        if len(table) != chunk.segments:
            raise errors.UnsupportedFormat(
                f"a chunk in ledger {chunk.pointer.ledger_id} has {len(table)} segments, not"
                f" {chunk.segments}"
            )
        self.keep(chunk, table)
        return table


CHUNKS_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Loss:
    """Rows [lo, hi) of a partition were in a chunk and are not any more."""

    partition: int
    lo: int
    hi: int


def losses(before: TopicState, after: TopicState) -> dict[Chunk, list[Loss]]:
    """By chunk of `before` the rows that `after`, which follows on it, does not have there."""
    found: dict[Chunk, list[Loss]] = {}
    for was, now in zip(before.partitions, after.partitions, strict=False):
        if was.intervals is not now.intervals:
            for chunk, loss in _of_partition(was, now):
                found.setdefault(chunk, []).append(loss)
    return found


async def with_losses(state: TopicState, before: TopicState, chunks: ChunkStore) -> TopicState:
    """The state with the ledgers dropped that lost rows of `before`'s chunks: when is known only to
    within its last commit, and the delay begins there. Raises as ChunkStore.load."""
    lost = losses(before, state)
    ledgers: dict[int, None] = {}
    some = list(lost)
    for at in range(0, len(some), CHUNKS_AT_ONCE):
        read = await chunks.load(some[at : at + CHUNKS_AT_ONCE])
        for chunk, table in read.items():
            for one in lost[chunk]:
                gone = table.between(one.partition, one.lo, one.hi)
                ledgers |= dict.fromkeys(gone.ledger_ids())
    if not ledgers:
        return state
    dropped: Mapping[int, int] = {**state.dropped, **dict.fromkeys(ledgers, state.commit_ms)}
    return replace(state, dropped=dropped)


def _of_partition(was: PartitionState, now: PartitionState) -> Iterator[tuple[Chunk, Loss]]:
    for one in was.intervals:
        if isinstance(one.source, Chunk):
            there = (at for at in now.intervals.between(one.lo, one.hi) if at.source == one.source)
            for lo, hi in _without(one, there):
                yield one.source, Loss(was.number, lo, hi)


def _without(one: Interval, there: Iterable[Interval]) -> Iterator[tuple[int, int]]:
    """The offsets of the interval that none of `there`, in order, has."""
    at = one.lo
    for other in there:
        if at < other.lo:
            yield at, other.lo
        at = max(at, other.hi)
    if at < one.hi:
        yield at, one.hi
