"""Which ledgers lost rows since a checkpoint, where only its chunks say which.

Whoever takes rows away names the ledgers that hold them, as it sees them; but a checkpoint moves
rows that were in commits to ledgers of its own, and what was planned on commits alone does not know
of these. Where the checkpoint has them in its tail the fold notes it (state.py); where they are in
a chunk somebody has to read it. Always true: a ledger that the newest checkpoint refers to, and to
which nothing refers after a later commit, is among those found here or dropped by the state: so the
delete delay holds for it (hazard 34).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from spark_ledger.topic.chunks import ChunkStore
from spark_ledger.topic.intervals import Chunk, Interval
from spark_ledger.topic.state import PartitionState, TopicState

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
