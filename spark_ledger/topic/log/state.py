"""The state of a topic after its commits 0 .. next-1: for each partition the places of its rows.

Always true: commits are applied in order, each once; offsets are 0-based, the end is exclusive,
and no offset is ever given to another row: only declared holes have offsets without a row. A state
does not change: `apply` returns the next state, and its cost depends on the commit, not on the
state. For segments that a checkpoint has stored, a state has only the chunk; `ChunkStore` reads the
segments.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from types import MappingProxyType
from typing import Any

from spark_ledger import errors
from spark_ledger.topic.entry.message_batch import Rowless, append_rowless, count_rowless
from spark_ledger.topic.log import actions
from spark_ledger.topic.log.actions import (
    ANY_OPENING,
    Action,
    Append,
    Grow,
    Hole,
    OpenLive,
    Overwrite,
    Replace,
    SealLive,
    Terminate,
    Trim,
)
from spark_ledger.topic.log.producers import bytes_per_partition, with_sequence_ids
from spark_ledger.topic.log.records import FIRST_VERSION, Commit, needed_version
from spark_ledger.topic.log.segment_table import (
    Interval,
    Intervals,
    SegmentTable,
    Stretch,
    TableChunk,
    join_stretches,
)
from spark_ledger.topic.log.segments import (
    NO_TOKEN,
    LiveSegment,
    PlacedSegment,
    Segment,
    token_of,
)

NEVER = -1
"""In place of a commit's number: there was no such commit."""
SHARED_COMMITS_MAX = 64
Tables = Mapping[TableChunk, SegmentTable]
"""Chunks that were read."""
NO_TABLES: Tables = MappingProxyType({})


@dataclass(slots=True)
class PartitionState:
    """Partition `number`; only the fold of a commit changes it, before the fold returns it.
    `start_offset` is the offset of the first row kept, `end_offset` one past the last row that a
    commit added; the rows of a live segment begin at `end_offset`. `rearranged` is the last commit
    that replaced rows or made a hole (NEVER: there was no such commit). `producers`: by name the
    last sequence id in sealed segments, of the producers that sent last (producers.py). `rowless`
    are the offsets in sealed segments that belong to chunks of messages and have no row.
    `end_token` is the token of the commit that made the row before `end_offset`."""

    number: int = 0
    start_offset: int = 0
    end_offset: int = 0
    intervals: Intervals = field(default_factory=Intervals)
    live: LiveSegment | None = None
    rearranged: int = NEVER
    producers: Mapping[str, int] = field(default_factory=dict)
    rowless: tuple[Rowless, ...] = ()
    end_token: int = NO_TOKEN

    def chunks_between(self, lo: int, hi: int) -> list[TableChunk]:
        """The chunks whose tables `stretches` needs for these offsets."""
        sources = (interval.source for interval in self.intervals.between(lo, hi))
        return list(dict.fromkeys(source for source in sources if isinstance(source, TableChunk)))

    def stretches(self, lo: int, hi: int, tables: Tables = NO_TABLES) -> list[Stretch]:
        """The stretches with the rows [lo, hi), in order. An offset in no stretch is in a hole."""
        stretches = []
        for interval in self.intervals.between(lo, hi):
            source = interval.source
            table = tables[source] if isinstance(source, TableChunk) else source
            if table is not None:
                first, end = max(lo, interval.lo), min(hi, interval.hi)
                stretches.append(Stretch(first, end, table.between(self.number, first, end)))
        return join_stretches(stretches)

    def token_before(self, offset: int, tables: Tables = NO_TABLES) -> int:
        """The token of the commit that made the last row before the offset; for a row of the live
        segment the token of the commit that opened the segment. NO_TOKEN if the row has no token,
        if there is no such row, or if `tables` lacks the row's chunk."""
        if offset > self.end_offset:
            return NO_TOKEN if self.live is None else self.live.token
        if offset == self.end_offset:
            return self.end_token
        if offset <= self.start_offset:
            return NO_TOKEN
        for interval in self.intervals.between(offset - 1, offset):
            source = interval.source
            if isinstance(source, TableChunk):
                source = tables.get(source)
            if source is not None:
                return source.token_of(self.number, offset - 1)
        return NO_TOKEN

    def bytes_between(self, lo: int, hi: int) -> int:
        """About how many payload bytes the rows [lo, hi) take; needs no chunks."""
        return sum(part.cut(lo, hi).bytes for part in self.intervals.between(lo, hi))

    def rows_between(self, lo: int, hi: int) -> int:
        """The number of rows in [lo, hi). Exact, except for stretches where the chunks of several
        messages are mixed: there the number of offsets without a row is an estimate."""
        parts = (part.cut(lo, hi) for part in self.intervals.between(lo, hi) if part.source)
        return sum(part.hi - part.lo - self._rowless_between(part.lo, part.hi) for part in parts)

    def _rowless_between(self, lo: int, hi: int) -> int:
        return count_rowless(self.rowless, lo, hi) if self.rowless else 0


@dataclass(frozen=True, slots=True)
class SharedCommit:
    """A commit that several topics share: its number in this topic, and the other topics' ids."""

    commit_id: str
    number: int
    others: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TopicState:
    """`next` is the number that the next commit takes. `head_version` is the version of the head
    node, which the next commit must set at this version. `turn` is the commit that asks to go first
    (commit/views.py). `commit_ms` is the last commit's time, by the store's clock, and never less
    than the time of an earlier commit (hazard 35). `min_writer` is the writer version that every
    later commit needs. `dropped` are ledgers that lost rows, or that were live and never had rows,
    each with the time of its last loss (or seal). If nothing in the state refers to such a ledger
    any more, its delete delay counts from this time. `bodies` are the ledgers with bodies of
    commits, each with the last commit that has its body there. `shared_commits` has the last commit
    shared with each other topic. `last_of_app` is the app that added rows last, with the number of
    its last commit; `last_of_others` is the number of the last commit by which another app added
    rows."""

    topic_id: str
    partitions: tuple[PartitionState, ...]
    next: int = 0
    head_version: int = 0
    turn: str = ""
    deleted: bool = False
    terminated: bool = False
    commit_ms: int = 0
    min_writer: int = FIRST_VERSION
    dropped: Mapping[int, int] = field(default_factory=dict)
    bodies: Mapping[int, int] = field(default_factory=dict)
    shared_commits: tuple[SharedCommit, ...] = ()
    last_of_app: tuple[str, int] = ("", NEVER)
    last_of_others: int = NEVER

    def start_offsets(self) -> dict[int, int]:
        return {p: state.start_offset for p, state in enumerate(self.partitions)}

    def end_offsets(self) -> dict[int, int]:
        return {p: state.end_offset for p, state in enumerate(self.partitions)}

    def chunks(self) -> list[TableChunk]:
        """Every chunk with a row that the topic still has."""
        by_partition = (p.chunks_between(p.start_offset, p.end_offset) for p in self.partitions)
        return list(dict.fromkeys(chunk for chunks in by_partition for chunk in chunks))

    def ledgers(self, tables: Tables = NO_TABLES) -> list[int]:
        """The ledgers to which a segment or live segment refers, ascending. `tables` must have
        every chunk of `chunks()`."""
        ledgers: dict[int, None] = {}
        for partition in self.partitions:
            for part in partition.stretches(partition.start_offset, partition.end_offset, tables):
                ledgers |= dict.fromkeys(part.table.ledger_ids())
            if partition.live is not None:
                ledgers[partition.live.ledger_id] = None
        return sorted(ledgers)

    def last_commit_of_others(self, app_id: str) -> int:
        """The number of the last commit by which an app other than `app_id` added rows; NEVER if
        there is no such commit."""
        last_app, number = self.last_of_app
        return self.last_of_others if last_app == app_id else number


def empty(topic_id: str, partitions: int) -> TopicState:
    """The state before commit 0."""
    return TopicState(topic_id, tuple(PartitionState(p) for p in range(partitions)))


def apply(state: TopicState, number: int, commit: Commit, created_ms: int) -> TopicState:
    """The state after commit `number`, which the store created at `created_ms`.

    Raises errors.UnsupportedFormat if the commit does not follow on the state, or cannot be carried
    out: if a fold left it out, every later offset would move.
    """
    if number != state.next:
        raise errors.UnsupportedFormat(f"commit {number} does not follow commit {state.next - 1}")
    folding = _Folding(state, number, commit, max(state.commit_ms, created_ms))
    for kind, run in groupby(commit.actions, type):
        if kind is SealLive:  # one table for all seals
            folding.seal([action for action in run if isinstance(action, SealLive)])
        elif kind is OpenLive:
            folding.open([action for action in run if isinstance(action, OpenLive)])
        else:
            for action in run:
                folding.apply(action)
    return folding.result()


class _Folding:
    """Applies one commit to the state."""

    def __init__(self, before: TopicState, number: int, commit: Commit, now_ms: int) -> None:
        self._before = before
        self._number = number
        self._commit = commit
        self._now_ms = now_ms
        self._partitions = list(before.partitions)
        self._changed_partitions: dict[int, PartitionState] = {}
        self._terminated = before.terminated
        self._dropped = dict(before.dropped)
        self._token = token_of(commit.commit_id)
        self._losing_ledgers: dict[int, None] = {}
        self._opening_tokens: dict[int, int] = {}

    def apply(self, action: Action) -> None:
        self._losing_ledgers.clear()
        _STEPS[type(action)](self, action)
        still_used = {segment.ledger_id for segment in actions.segments_of(action)}
        for ledger_id in sorted(
            {*actions.dropped_of(action), *(self._losing_ledgers.keys() - still_used)}
        ):
            self._dropped[ledger_id] = self._now_ms  # the last loss counts: rows may come back

    def result(self) -> TopicState:
        before, commit = self._before, self._commit
        shared_commits = before.shared_commits
        if commit.others:
            shared = SharedCommit(commit.commit_id, self._number, commit.others)
            shared_commits = _with_shared_commit(shared_commits, shared)
        bodies = before.bodies
        if commit.body_ledger is not None:
            bodies = {**bodies, commit.body_ledger: self._number}
        for p, partition in self._changed_partitions.items():
            self._partitions[p] = partition
        return replace(
            before,
            partitions=tuple(self._partitions),
            next=self._number + 1,
            terminated=self._terminated,
            commit_ms=self._now_ms,
            min_writer=max(before.min_writer, commit.min_writer, needed_version(commit.actions)),
            dropped=self._dropped,
            bodies=bodies,
            shared_commits=shared_commits,
            **self._authors(),
        )

    def _authors(self) -> dict[str, Any]:
        """The fields about the apps that added rows last, for the guard of an overwrite."""
        before, app_id = self._before, self._commit.app_id
        if not any(actions.adds_rows(action) for action in self._commit.actions):
            return {}
        app_before, last = before.last_of_app
        others = before.last_of_others if app_before == app_id else last
        return {"last_of_app": (app_id, self._number), "last_of_others": others}

    def append(self, action: Append) -> None:
        self._add(action.segments)

    def overwrite(self, action: Overwrite) -> None:
        for p in range(len(self._partitions)):
            self._trim(p, self._changed_partition(p).end_offset)
        self._add(action.segments)

    def trim(self, action: Trim) -> None:
        for p, offset in action.offsets:
            self._trim(p, offset)

    def hole(self, action: Hole) -> None:
        partition = self._changed_partition(action.partition)
        start = max(action.start, partition.start_offset)
        self._check(start < action.end <= partition.end_offset, f"makes the hole {action}")
        hole = Interval(start, action.end, None, 0, self._now_ms, self._now_ms)
        self._note_losing_ledgers(partition, start, action.end)
        self._rearrange(partition, hole)

    def replace(self, action: Replace) -> None:
        partition = self._changed_partition(action.partition)
        rows = sum(segment.rows for segment in action.segments)
        is_inside = partition.start_offset <= action.start and action.end <= partition.end_offset
        self._check(
            is_inside and rows == action.end - action.start, "replaces other rows than it has"
        )
        interval = self._replacement_interval(action)
        self._note_losing_ledgers(partition, action.start, action.end)
        self._rearrange(partition, interval)

    def grow(self, action: Grow) -> None:
        count = len(self._partitions)
        self._partitions += [PartitionState(p) for p in range(count, action.partitions)]

    def open(self, opens: Sequence[OpenLive]) -> None:
        for action in opens:
            partition = self._changed_partition(action.partition)
            self._check(
                partition.live is None, f"opens partition {action.partition}, which is open"
            )
            ledger, version = action.ledger_id, action.metadata_version
            partition.live = LiveSegment(
                *(action.partition, ledger, version, partition.end_offset),
                *(self._number, action.owner, action.epoch, action.deduplicated),
                *(action.first_entry, action.rows_before, action.bytes_before),
                self._token,
            )

    def seal(self, seals: Sequence[SealLive]) -> None:
        """Seals live segments of different partitions; the sealed segments share one table. A live
        ledger without a row loses its last reference by the seal, so it counts as dropped."""
        for action in seals:
            partition = self._changed_partition(action.partition)
            self._check(
                is_seal_of(action, partition.live),
                f"seals ledger {action.ledger_id}, which is not the live one",
            )
            assert partition.live is not None, "the seal is of this live segment"
            self._opening_tokens[action.partition] = partition.live.token
            if action.segment is None and not partition.live.first_entry:
                self._dropped[action.ledger_id] = self._now_ms
            partition.live = None
            if action.producers:
                bytes_max = bytes_per_partition(len(self._partitions))
                partition.producers = with_sequence_ids(
                    partition.producers, action.producers, bytes_max
                )
            rowless = action.rowless.shift(partition.end_offset)
            partition.rowless = append_rowless(partition.rowless, rowless, partition.start_offset)
        segments = [action.segment for action in seals if action.segment is not None]
        if segments:
            self._add(segments)
        self._opening_tokens.clear()

    def terminate(self, action: Terminate) -> None:
        self._terminated = True

    def _add(self, segments: Iterable[Segment]) -> None:
        by_partition: dict[int, list[Segment]] = {}
        for segment in segments:
            by_partition.setdefault(segment.partition, []).append(segment)
        added: list[PlacedSegment] = []
        for p, new_segments in by_partition.items():
            partition = self._changed_partition(p)
            self._check(
                partition.live is None, f"appends to partition {p}, which has a live segment"
            )
            added += self._place(partition.end_offset, new_segments, partition)
        table = SegmentTable.of(added)
        for p, new_segments in by_partition.items():
            partition = self._changed_partition(p)
            end = partition.end_offset + sum([segment.rows for segment in new_segments])
            size = sum([segment.bytes for segment in new_segments])
            first_ms = last_ms = self._now_ms
            if len(new_segments) == 1 and new_segments[0].counted:
                first_ms, last_ms = self._stored_ms(partition, new_segments[0])
            interval = Interval(partition.end_offset, end, table, size, first_ms, last_ms)
            partition.intervals = partition.intervals.with_appended(interval)
            partition.end_offset = end
            partition.end_token = self._opening_tokens.get(p, self._token)

    def _stored_ms(self, partition: PartitionState, segment: Segment) -> tuple[int, int]:
        """The first and the last time at which rows of a segment born live were stored, by its
        owner's clock; limited so that no time is before that of an earlier row of the partition, or
        after this commit (hazard 35)."""
        before_ms = max((interval.last_ms for interval in partition.intervals.last()), default=0)
        last_ms = min(max(segment.max_ms, before_ms), self._now_ms)
        return min(max(segment.min_ms, before_ms), last_ms), last_ms

    def _replacement_interval(self, action: Replace) -> Interval:
        table = SegmentTable.of(self._replacement_segments(action))
        end, size = int(table.ends[-1]), int(table.sizes.sum())
        is_same_partition = bool((table.partitions == action.partition).all())
        self._check(is_same_partition, "replaces rows of another partition")
        _, times = table.commit_times(action.start, end)
        first_ms, last_ms = int(times[0]), int(times[-1])
        return Interval(action.start, end, table, size, first_ms, last_ms)

    def _replacement_segments(self, action: Replace) -> list[PlacedSegment]:
        """The new segments in their places, with the commit times of their rows."""
        segments = self._with_tokens(list(self._place(action.start, action.segments)), action)
        if not action.committed:
            return segments
        row_counts = [sum(rows for rows, _ in times) for times in action.committed]
        all_ms = [ms for times in action.committed for _, ms in times]
        is_rising = all_ms == sorted(all_ms) and all_ms[-1] <= self._now_ms
        rows = [segment.segment.rows for segment in segments]
        self._check(row_counts == rows and is_rising, "gives rows times that cannot be theirs")
        return [
            replace(segment, commit_ms=times[-1][1], times=times if len(times) > 1 else ())
            for segment, times in zip(segments, action.committed, strict=True)
        ]

    def _with_tokens(self, segments: list[PlacedSegment], action: Replace) -> list[PlacedSegment]:
        """The new segments with the tokens of the commits that made their rows."""
        if not action.tokens:
            return [replace(segment, tokens=()) for segment in segments]
        counts = [sum(rows for rows, _ in tokens) for tokens in action.tokens]
        is_fitting = counts == [segment.segment.rows for segment in segments]
        self._check(is_fitting, "gives rows the tokens of others")
        return [
            replace(segment, tokens=tokens)
            for segment, tokens in zip(segments, action.tokens, strict=True)
        ]

    def _place(
        self, base: int, segments: Sequence[Segment], partition: PartitionState | None = None
    ) -> Iterator[PlacedSegment]:
        """Places the segments from the offset `base` on. The times of a segment born live are not
        before those of the rows in `partition`, if it is given."""
        for segment in segments:
            partition_before = partition if segment.counted else None
            at_ms = (
                self._now_ms
                if partition_before is None
                else self._stored_ms(partition_before, segment)[1]
            )
            token = self._opening_tokens.get(segment.partition, self._token)
            tokens = ((segment.rows, token),) if token != NO_TOKEN else ()
            yield PlacedSegment(segment, base, self._number, at_ms, (), tokens)
            base += segment.rows

    def _trim(self, number: int, offset: int) -> None:
        partition = self._changed_partition(number)
        offset = min(offset, partition.end_offset)
        if offset > partition.start_offset:
            self._note_losing_ledgers(partition, partition.start_offset, offset)
            partition.start_offset = offset
            partition.intervals = partition.intervals.from_offset(offset)

    def _note_losing_ledgers(self, partition: PartitionState, lo: int, hi: int) -> None:
        """Notes the ledgers that lose the rows [lo, hi). The action names the ledgers that its
        author saw. A checkpoint may have moved rows to other ledgers since, and only a process that
        folds from that checkpoint sees these ledgers."""
        for interval in partition.intervals.between(lo, hi):
            source = interval.source
            if isinstance(source, SegmentTable):
                part = source.between(partition.number, max(lo, interval.lo), min(hi, interval.hi))
                self._losing_ledgers |= dict.fromkeys(part.ledger_ids())

    def _rearrange(self, partition: PartitionState, interval: Interval) -> None:
        partition.intervals = partition.intervals.with_replaced(interval)
        partition.rearranged = self._number

    def _changed_partition(self, number: int) -> PartitionState:
        """The partition, in the copy that this commit changes."""
        partition = self._changed_partitions.get(number)
        if partition is None:
            count = len(self._partitions)
            self._check(0 <= number < count, f"names partition {number} of {count}")
            partition = self._changed_partitions[number] = replace(self._partitions[number])
        return partition

    def _check(self, is_allowed: bool, what: str) -> None:
        if not is_allowed:
            raise errors.UnsupportedFormat(f"commit {self._number} {what}")


def is_seal_of(seal: SealLive, live: LiveSegment | None) -> bool:
    """Whether the seal ends this live segment."""
    return (
        live is not None
        and seal.ledger_id == live.ledger_id
        and seal.opened in (ANY_OPENING, live.opened)
    )


def _with_shared_commit(
    before: tuple[SharedCommit, ...], last: SharedCommit
) -> tuple[SharedCommit, ...]:
    """The last commit shared with each other topic, oldest first, SHARED_COMMITS_MAX at most."""
    shared, seen_topics = [last], dict.fromkeys(last.others)
    for earlier in reversed(before):
        if any(topic_id not in seen_topics for topic_id in earlier.others):
            shared.append(earlier)
            seen_topics |= dict.fromkeys(earlier.others)
    return tuple(reversed(shared[:SHARED_COMMITS_MAX]))


_STEPS: dict[type, Callable[[_Folding, Any], None]] = {
    Append: _Folding.append,
    Replace: _Folding.replace,
    Trim: _Folding.trim,
    Hole: _Folding.hole,
    Overwrite: _Folding.overwrite,
    Grow: _Folding.grow,
    Terminate: _Folding.terminate,
}
