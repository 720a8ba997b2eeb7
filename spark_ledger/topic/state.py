"""What a topic is after its commits 0 .. next-1: for each partition the segments and their offsets.

Always true: commits are applied in order, each once; offsets are dense, 0-based, the end is
exclusive, and no offset is ever given to another row. A state does not change: `apply` returns
the next one. States share the lists of segments: a list only grows at its end and each state
knows how much of it is its own, so applying a commit costs what the commit holds.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from spark_ledger import errors
from spark_ledger.topic.records import WRITER_VERSION, Commit
from spark_ledger.topic.segments import PlacedSegment, Segment


@dataclass(slots=True)
class PartitionState:
    """One partition. `start_offset` is the first row kept, `end_offset` one past the last."""

    _segments: list[PlacedSegment] = field(default_factory=list)
    _bases: list[int] = field(default_factory=list)
    _count: int = 0
    start_offset: int = 0
    end_offset: int = 0

    @property
    def segments(self) -> Sequence[PlacedSegment]:
        """All segments, in order of offsets."""
        return self._segments[: self._count]

    def segments_between(self, lo: int, hi: int) -> list[PlacedSegment]:
        """The segments with a row in [lo, hi), in order; O(log n + those)."""
        if hi <= lo:
            return []
        first = max(0, bisect_right(self._bases, lo, 0, self._count) - 1)
        last = bisect_right(self._bases, hi - 1, 0, self._count)
        return [placed for placed in self._segments[first:last] if placed.end > lo]

    def bytes_between(self, lo: int, hi: int) -> int:
        """About how many payload bytes the rows [lo, hi) take."""
        total = 0
        for placed in self.segments_between(lo, hi):
            rows = min(hi, placed.end) - max(lo, placed.base)
            total += placed.segment.bytes * rows // placed.segment.rows
        return total

    def append(self, segment: Segment, commit: int, commit_ms: int) -> "PartitionState":
        """This partition with `segment` after its last row."""
        kept, bases = self._segments, self._bases
        if len(kept) != self._count:  # another state grew the shared lists: part from it
            kept, bases = kept[: self._count], bases[: self._count]
        kept.append(PlacedSegment(segment, self.end_offset, commit, commit_ms))
        bases.append(self.end_offset)
        end = self.end_offset + segment.rows
        return PartitionState(kept, bases, self._count + 1, self.start_offset, end)


@dataclass(frozen=True, slots=True)
class TopicState:
    """`next` is the number that the next commit takes, `head_version` the version of the head
    node that it must be set from; `commit_ms` is the last commit's time, by the store's clock and
    never less than an earlier commit's (hazard 35); `min_writer` the writer version that every
    later commit needs."""

    topic_id: str
    partitions: tuple[PartitionState, ...]
    next: int = 0
    head_version: int = 0
    deleted: bool = False
    commit_ms: int = 0
    min_writer: int = WRITER_VERSION

    def start_offsets(self) -> dict[int, int]:
        return {p: state.start_offset for p, state in enumerate(self.partitions)}

    def end_offsets(self) -> dict[int, int]:
        return {p: state.end_offset for p, state in enumerate(self.partitions)}

    def ledgers(self) -> list[int]:
        """The ledgers that any segment refers to, ascending."""
        placed = (placed for state in self.partitions for placed in state.segments)
        return sorted({placed.segment.ledger_id for placed in placed})


def empty(topic_id: str, partitions: int) -> TopicState:
    """The state before commit 0."""
    return TopicState(topic_id, tuple(PartitionState() for _ in range(partitions)))


def apply(state: TopicState, number: int, commit: Commit, created_ms: int) -> TopicState:
    """The state after commit `number`, which the store created at `created_ms`.

    Raises errors.UnsupportedFormat when it does not follow on the state: a fold with a hole
    would move every later offset.
    """
    if number != state.next:
        raise errors.UnsupportedFormat(f"commit {number} does not follow commit {state.next - 1}")
    now_ms = max(state.commit_ms, created_ms)
    partitions = list(state.partitions)
    for action in commit.actions:
        for segment in action.segments:
            if segment.partition >= len(partitions):
                raise errors.UnsupportedFormat(
                    f"commit {number} names partition {segment.partition} of {len(partitions)}"
                )
            at = segment.partition
            partitions[at] = partitions[at].append(segment, number, now_ms)
    return replace(
        state,
        partitions=tuple(partitions),
        next=number + 1,
        commit_ms=now_ms,
        min_writer=max(state.min_writer, commit.min_writer),
    )
