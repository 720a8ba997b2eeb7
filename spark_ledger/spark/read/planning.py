"""Positions, micro-batches and tasks of a reader's topics, from the topics' states. Committed rows
that are lost are found before any task runs (`LedgerEndsCache`).

Always true: the tasks of a plan have every row between the positions once; a hole is no loss. A
plan reads only the chunks of checkpoints that it needs. If a ledger does not exist, or was closed
below a committed range, rows are lost. The plan then raises an error with the exact offsets or, if
the user accepts losses, leaves out exactly these rows; no offset is renumbered (hazard 26). A plan
reads the records of at most LEDGERS_MAX ledgers, apart from ledgers that are known to be closed;
the tasks check every ledger that they open (topic/task_reader.py).
"""

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from spark_ledger.errors import (
    DataUnavailable,
    NoSuchEntry,
    NoSuchLedger,
    OffsetOfAnotherStore,
    OffsetsOutOfRange,
    SubscriptionNotFound,
)
from spark_ledger.ledger.client import LedgerStore, VersionedRecord
from spark_ledger.spark.options import limits, offsets, start_positions
from spark_ledger.spark.options.limits import Curve, CurveOf, GivenCurve
from spark_ledger.spark.options.offsets import Ends, Positions, TrimmedRange
from spark_ledger.spark.options.options import ReadOptions
from spark_ledger.spark.options.start_positions import (
    AtSubscription,
    AtTime,
    ByPartition,
    ReadPosition,
)
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.log.segment_table import NO_SEGMENTS
from spark_ledger.topic.log.segments import NO_TOKEN
from spark_ledger.topic.log.state import NO_TABLES, PartitionState, Tables, TopicState
from spark_ledger.topic.log.topics import TopicInfo
from spark_ledger.topic.read import plan
from spark_ledger.topic.read.acked import NO_ACKED, AckedRows
from spark_ledger.topic.read.live import LiveEnd, LiveEnds, first_stored_since
from spark_ledger.topic.read.pieces import LiveRows
from spark_ledger.topic.read.plan import (
    Cutting,
    LedgerEnd,
    Ranges,
    ReadTask,
    chunks_to_read,
    lost_of,
    plan_read,
    rows_lost,
    without_rows,
)
from spark_ledger.topic.subscription.lag import PartitionLag, topic_lag
from spark_ledger.topic.subscription.seek_target import rows_around

_log = logging.getLogger(__name__)
MISMATCHES_SHOWN = 8
States = Mapping[str, TopicState]
Acked = Mapping[str, AckedRows]
"""By topic, by its short name, the rows that a read leaves out."""
NOTHING_ACKED: Acked = {}
OFFSET_END = 2**63
FOLDS_MAX = 20
CHUNKS_FOR_LIMITS = 64
"""How many chunks are read to make a limit on bytes exact; in further chunks, the bytes of an
interval are spread evenly over its rows."""


class ReadStart(NamedTuple):
    """The positions at which a read begins, and the rows beyond them that it leaves out."""

    positions: Positions
    acked: Acked


class Planner:
    """Plans for one reader. Its coroutines run on the client's loop; its other methods never
    wait."""

    def __init__(self, client: TopicClient, live: LiveEnds, options: ReadOptions) -> None:
        self._client = client
        self._live = live
        self._options = options
        self._ledger_ends = LedgerEndsCache(client.ledgers)

    @property
    def _accepts_loss(self) -> bool:
        return not self._options.fail_on_data_loss

    def end_of(self, partition: PartitionState) -> int:
        """The offset after the last row of a commit or of a live segment."""
        if partition.live is None:
            return partition.end_offset
        return max(
            partition.end_offset, partition.live.base + self._live.end_of(partition.live).rows
        )

    async def start(
        self, place: ReadPosition, topic_ends: Ends, states: States, infos: Mapping[str, TopicInfo]
    ) -> ReadStart:
        """As TopicsRead.start."""
        lookups: ByPartition | None = None
        acked: Acked = NOTHING_ACKED
        if isinstance(place, AtTime):
            by_topic = offsets.times_to_look_up(place, topic_ends)
            calls = [self._offsets_since(states[topic], times) for topic, times in by_topic.items()]
            lookups = dict(zip(by_topic, await asyncio.gather(*calls), strict=True))
        elif isinstance(place, AtSubscription):
            lookups, acked = await self._subscription_positions(place, topic_ends, infos)
        positions = offsets.resolve(place, topic_ends, lookups, lossy=self._accepts_loss)
        return ReadStart(positions, acked)

    async def curves(
        self, states: States, start: Positions, end: Positions, acked: Acked
    ) -> CurveOf:
        """The curves of the rows between the positions, for `limits.admit`."""
        tables: dict[str, Tables] = {}
        if self._options.limits.bytes_max is not None:
            for topic, starts in start.items():
                ranges = _ranges(states[topic], starts, end[topic])
                tables[topic] = await self._tables_for_limits(states[topic], ranges)

        def curve_of(topic: str, number: int, lo: int, hi: int) -> Curve:
            partition = states[topic].partitions[number]
            size = self._live_bytes(partition, lo, hi)
            read = tables.get(topic, NO_TABLES)
            curve = limits.curve_of(partition, lo, hi, read, live_bytes=size)
            acked_rows = acked.get(topic, NO_ACKED)
            return (
                GivenCurve(curve, number, acked_rows) if acked_rows.count(number, lo, hi) else curve
            )

        return curve_of

    def lags(
        self, states: States, topic_ends: Ends, positions: Positions, now_ms: int, acked: Acked
    ) -> list[PartitionLag]:
        """As TopicsRead.lags."""
        lags: list[PartitionLag] = []
        for topic, parts in positions.items():
            if topic in states:
                state, ends = states[topic], dict(enumerate(topic_ends[topic].ends))
                live_ends = {
                    partition.number: self._live.end_of(partition.live)
                    for partition in state.partitions
                    if partition.live is not None
                }
                acked_rows = acked.get(topic, NO_ACKED)
                beyond = {p: acked_rows.count(p, at, OFFSET_END) for p, at in parts.items()}
                lags += topic_lag(
                    state, parts, now_ms, ends=ends, live_ends=live_ends, acked=beyond
                ).values()
        return lags

    async def plan(
        self, states: States, start: Positions, end: Positions, acked: Acked = NOTHING_ACKED
    ) -> list[ReadTask]:
        """As TopicsRead.plan. If the states do not reach the positions, or a ledger does not exist,
        plans again by states that are read after a sync."""
        try:
            if all(_reaches(states.get(topic), parts, self) for topic, parts in end.items()):
                tasks = await self._tasks(states, start, end, acked)
                ends = await self._ledger_ends.of_tasks(tasks)
                if NO_LEDGER not in ends.values():
                    return without_lost_rows(tasks, ends, not self._accepts_loss)
        except OffsetsOutOfRange:
            pass
        ids = {topic: states[topic].topic_id for topic in end}
        logs = [self._client.log(topic_id) for topic_id in ids.values()]
        folded = await asyncio.gather(*(log.fold(fresh=True) for log in logs))
        states = dict(zip(ids, folded, strict=True))
        await self._live.refresh(p.live for s in folded for p in s.partitions if p.live is not None)
        self._ledger_ends.drop_closed()
        tasks = await self._tasks(states, start, end, acked)
        return without_lost_rows(
            tasks, await self._ledger_ends.of_tasks(tasks), not self._accepts_loss
        )

    async def check_tokens(
        self, states: States, positions: Positions, tokens: Positions, what: str
    ) -> None:
        """As TopicsRead.check_tokens."""
        mismatches: list[str] = []
        for topic, by_partition in tokens.items():
            for p, token in by_partition.items():
                at = positions.get(topic, {}).get(p)
                if at is not None and topic in states and p < len(states[topic].partitions):
                    partition = states[topic].partitions[p]
                    store_token = partition.token_before(
                        at, await self._chunk_before(partition, at)
                    )
                    if NO_TOKEN not in (store_token, token) and store_token != token:
                        mismatches.append(f"offset {at} of partition {p} of topic {topic!r}")
        if not mismatches:
            return
        ellipsis = "; ..." if len(mismatches) > MISMATCHES_SHOWN else ""
        places = "; ".join(mismatches[:MISMATCHES_SHOWN]) + ellipsis
        text = f"{what} comes after rows in whose place the topic has others: {places}"
        if not self._accepts_loss:
            raise OffsetOfAnotherStore(text)
        _log.warning("%s: as failOnDataLoss is false, the query reads on from there", text)

    async def _chunk_before(self, partition: PartitionState, offset: int) -> Tables:
        """The chunk that has the row before the offset; empty if no existing chunk has it."""
        if offset == partition.end_offset:
            return NO_TABLES
        try:
            return await self._client.chunks.load(partition.chunks_between(offset - 1, offset))
        except NoSuchLedger:
            return NO_TABLES

    # -- tasks --------------------------------------------------------------------------------

    async def _tasks(
        self, states: States, start: Positions, end: Positions, acked: Acked
    ) -> list[ReadTask]:
        with_chunks = {
            topic: await self._state_with_chunks(states[topic], starts, end[topic])
            for topic, starts in start.items()
        }
        states = {topic: state for topic, (state, _) in with_chunks.items()}
        start = self._after_trimmed(states, start, end, acked)
        rows_of = {
            topic: sum(
                acked.get(topic, NO_ACKED).unacked_count(p, at, end[topic][p])
                for p, at in starts.items()
            )
            for topic, starts in start.items()
        }
        rows = max(1, sum(rows_of.values()))
        tasks: list[ReadTask] = []
        for topic, starts in start.items():
            tasks_min = max(1, -(-(self._options.min_partitions or 1) * rows_of[topic] // rows))
            cutting = Cutting(tasks_min, self._options.task_bytes, self._options.task_rows)
            (state, read), acked_rows = with_chunks[topic], acked.get(topic, NO_ACKED)
            ranges = _ranges(state, starts, end[topic])
            tasks += plan_read(
                state, ranges, topic=topic, cutting=cutting, read=read, acked=acked_rows
            )
            for p, at in starts.items():
                span = (at, end[topic][p])
                tasks += self._live_tasks(topic, state, p, span, cutting, acked_rows)
        return tasks

    def _after_trimmed(
        self, states: States, start: Positions, end: Positions, acked: Acked
    ) -> Positions:
        """`start`, moved past rows that were trimmed. Raises RowsTrimmed if some of them were to be
        read, unless the user accepts losses."""
        positions: Positions = {}
        trimmed: list[TrimmedRange] = []
        for topic, starts in start.items():
            positions[topic] = {}
            for p, at in starts.items():
                last = end[topic][p]
                first = min(max(at, states[topic].partitions[p].start_offset), last)
                positions[topic][p] = first
                rows = acked.get(topic, NO_ACKED).unacked_count(p, at, first)
                if rows:
                    trimmed.append(TrimmedRange(topic, p, at, first, rows))
        if trimmed and not self._accepts_loss:
            raise offsets.rows_trimmed(trimmed)
        return positions

    async def _state_with_chunks(
        self, state: TopicState, starts: Mapping[int, int], ends: Mapping[int, int]
    ) -> tuple[TopicState, Tables]:
        """The state with the chunks that a plan needs; a newer state if its chunks no longer
        exist."""
        for _ in range(FOLDS_MAX):
            try:
                newer, read = await self._client.state_with_tables(
                    state, _ranges(state, starts, ends)
                )
            except (NoSuchEntry, NoSuchLedger):  # the topic was trimmed meanwhile
                newer = await self._client.log(state.topic_id).fold(fresh=True)
            else:
                if newer is state:
                    return state, read
            state = newer
        raise DataUnavailable(f"topic {state.topic_id} changes faster than it can be planned")

    def _live_tasks(
        self,
        topic: str,
        state: TopicState,
        number: int,
        span: tuple[int, int],
        cutting: Cutting,
        acked: AckedRows,
    ) -> Iterator[ReadTask]:
        """Tasks of equal size for the rows of the span that are in no commit yet."""
        partition = state.partitions[number]
        lo, hi = max(span[0], partition.end_offset), span[1]
        if lo >= hi:
            return
        live, live_end = partition.live, self._live_end(partition)
        if live is None or live.base + live_end.rows < hi:
            raise OffsetsOutOfRange(
                f"partition {number} of topic {topic!r} cannot be read up to {hi}: it ends at"
                f" {self.end_of(partition)}"
            )
        size = max(1, self._live_bytes(partition, lo, hi))
        rows = max(1, (hi - lo) * cutting.task_bytes // size)
        runs = acked.without_long_runs(number, lo, hi, cutting.tasks_min)
        count = sum(end - start for start, end in runs)
        rows = min(rows, cutting.task_rows or rows, max(1, -(-count // cutting.tasks_min)))
        has_rowless = bool(partition.rowless or live_end.rowless.number)
        for start, end in runs:
            for first in range(start, end, rows):
                last = min(end, first + rows)
                part = LiveRows(live, first, last, live_end.last_entry, live_end.rows)
                task_acked = acked.within([(number, first, last)])
                task = ReadTask(
                    topic, state.topic_id, (), NO_SEGMENTS, part, has_rowless, task_acked
                )
                if task.rows:
                    yield task

    def _live_end(self, partition: PartitionState) -> LiveEnd:
        return LiveEnd() if partition.live is None else self._live.end_of(partition.live)

    def _live_bytes(self, partition: PartitionState, lo: int, hi: int) -> int:
        """An estimate of the bytes of the span's rows in the live segment."""
        live_end = self._live_end(partition)
        rows = max(0, hi - max(lo, partition.end_offset))
        return live_end.bytes * rows // live_end.rows if live_end.rows else 0

    # -- times and subscriptions ----------------------------------------------------------------

    async def _offsets_since(self, state: TopicState, times: Mapping[int, int]) -> dict[int, int]:
        try:
            return await self._look_up_offsets(state, times)
        except NoSuchLedger:  # a newer checkpoint replaced chunks, or a merge replaced rows
            state, _ = await self._client.log(state.topic_id).fold_from_checkpoint()
            return await self._look_up_offsets(state, times)

    async def _look_up_offsets(self, state: TopicState, times: Mapping[int, int]) -> dict[int, int]:
        read = await self._client.chunks.load(start_positions.chunks_for_times(state, times))
        since = start_positions.offsets_since(state, times, read)
        for p in since:
            partition, millis = state.partitions[p], times[p]
            rows = rows_around(partition, millis, read)
            if since[p] == partition.end_offset:
                rows = self._live_rows(partition)
            if rows is not None:
                since[p] = await first_stored_since(self._client.ledgers, rows, millis)
        return since

    def _live_rows(self, partition: PartitionState) -> LiveRows | None:
        """The known rows of the live segment, if there are any."""
        live, live_end = partition.live, self._live_end(partition)
        if live is None or not live_end.rows:
            return None
        return LiveRows(
            live, live.base, live.base + live_end.rows, live_end.last_entry, live_end.rows
        )

    async def _subscription_positions(
        self, place: AtSubscription, topic_ends: Ends, infos: Mapping[str, TopicInfo]
    ) -> tuple[dict[str, dict[int, int]], Acked]:
        """The subscription's positions in each topic that has it, and what its consumers
        acknowledged beyond them in the partitions that are read. Raises SubscriptionNotFound if no
        topic has it."""
        from spark_ledger.topic.subscription.acked_now import acked_now  # few queries need it

        by_topic: dict[str, dict[int, int]] = {}
        acked: dict[str, AckedRows] = {}
        missing: SubscriptionNotFound | None = None
        for topic, ends in topic_ends.items():
            try:
                now = await acked_now(self._client.ledgers, infos[topic].id, place.name)
            except SubscriptionNotFound as error:
                missing = error
                continue
            by_topic[topic] = now.positions
            acked[topic] = AckedRows({p: now.acked[p] for p in ends.partitions if p in now.acked})
        if missing is not None and not by_topic:
            raise missing
        return by_topic, {topic: rows for topic, rows in acked.items() if rows}

    async def _tables_for_limits(self, state: TopicState, ranges: Ranges) -> Tables:
        """The chunks with the sizes of rows; empty if a chunk no longer exists: bytes are then
        spread evenly over rows."""
        chunks = chunks_to_read(state, ranges)[:CHUNKS_FOR_LIMITS]
        try:
            return await self._client.chunks.load(chunks)
        except NoSuchLedger:
            return NO_TABLES


def tokens_before(states: States, positions: Positions) -> Positions:
    """As TopicsRead.tokens."""
    by_topic: Positions = {}
    for topic, by_partition in positions.items():
        partitions = states[topic].partitions if topic in states else ()
        tokens = {
            p: partitions[p].token_before(at)
            for p, at in by_partition.items()
            if p < len(partitions)
        }
        by_topic[topic] = {p: token for p, token in tokens.items() if token != NO_TOKEN}
    return {topic: tokens for topic, tokens in by_topic.items() if tokens}


def _ranges(state: TopicState, starts: Mapping[int, int], ends: Mapping[int, int]) -> Ranges:
    """For each partition the part of [start, end) that is in commits."""
    ranges = {}
    for p, at in starts.items():
        partition = state.partitions[p]
        last = max(partition.start_offset, min(ends[p], partition.end_offset))
        ranges[p] = (min(max(at, partition.start_offset), last), last)
    return ranges


def _reaches(state: TopicState | None, ends: Mapping[int, int], planner: Planner) -> bool:
    return state is not None and all(
        p < len(state.partitions) and at <= planner.end_of(state.partitions[p])
        for p, at in ends.items()
    )


RECORDS_AT_ONCE = 256
LEDGERS_MAX = 2_000
CLOSED_KEPT = 100_000
NO_LEDGER = LedgerEnd(-2, 0)
"""The end of a ledger that does not exist."""


class LedgerEndsCache:
    """The ends of ledgers. A closed ledger does not change, so its record is read once."""

    def __init__(self, ledgers: LedgerStore) -> None:
        self._ledgers = ledgers
        self._closed: dict[int, LedgerEnd] = {}

    async def of_tasks(self, tasks: Iterable[ReadTask]) -> plan.LedgerEnds:
        """The ends of the ledgers that the tasks read; records are read for at most LEDGERS_MAX
        ledgers that are not known to be closed. None: the ledger is not closed."""
        ledger_ids = sorted({ledger_id for task in tasks for ledger_id in task.table.ledger_ids()})
        ledger_ends: dict[int, LedgerEnd | None] = {}
        ledger_ends.update((id_, self._closed[id_]) for id_ in ledger_ids if id_ in self._closed)
        unread = [id_ for id_ in ledger_ids if id_ not in ledger_ends][:LEDGERS_MAX]
        for first in range(0, len(unread), RECORDS_AT_ONCE):
            window = unread[first : first + RECORDS_AT_ONCE]
            ends = await asyncio.gather(*(self._end(ledger_id) for ledger_id in window))
            ledger_ends.update(zip(window, ends, strict=True))
        return ledger_ends

    def drop_closed(self) -> None:
        """Drop the ends of closed ledgers: these ledgers may have been deleted since."""
        self._closed.clear()

    async def _end(self, ledger_id: int) -> LedgerEnd | None:
        try:
            record = (await self._record(ledger_id)).record
        except NoSuchLedger:
            return NO_LEDGER
        if record.last_entry is None:
            return None
        end = LedgerEnd(record.last_entry, record.rows or 0)
        if len(self._closed) < CLOSED_KEPT:
            self._closed[ledger_id] = end
        return end

    async def _record(self, ledger_id: int) -> VersionedRecord:
        """The ledger's record. If the record is absent, it is read again after a sync: the replica
        from which a new session reads may be behind the topic's log in memory."""
        try:
            return await self._ledgers.record(ledger_id)
        except NoSuchLedger:
            return await self._ledgers.record(ledger_id, fresh=True)


def without_lost_rows(
    tasks: Sequence[ReadTask], ends: plan.LedgerEnds, fail_on_data_loss: bool
) -> list[ReadTask]:
    """The tasks without lost rows. With `fail_on_data_loss` raises RowsLost if rows are lost."""
    lost = {i: ranges for i, task in enumerate(tasks) if (ranges := lost_of(task, ends))}
    if fail_on_data_loss and lost:
        raise rows_lost([rows for ranges in lost.values() for rows in ranges])
    remaining = (without_rows(task, lost[i]) if i in lost else task for i, task in enumerate(tasks))
    return [task for task in remaining if task.rows]
