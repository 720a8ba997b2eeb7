"""Positions, micro-batches and tasks of the topics that a reader has, from their states; and
committed rows that are gone, found before any task runs (`LedgerEnds`).

Always true: the tasks of a plan hold every row between the positions once; a hole is no loss. A
plan reads only the chunks of checkpoints that it needs. A ledger that was closed below a committed
range, or that is gone, has lost those rows: the plan raises the loss with its exact offsets or, if
the user accepted it, leaves out exactly these rows; no offset is renumbered (hazard 26). A plan
looks at no more than LEDGERS_MAX ledgers that it does not know to be closed; the tasks look at
every ledger that they open (topic/task_reader.py).
"""

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence

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
from spark_ledger.spark.options.limits import Curve, CurveOf
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
from spark_ledger.topic.log.state import UNREAD, PartitionState, Tables, TopicState
from spark_ledger.topic.log.topics import TopicInfo
from spark_ledger.topic.read import plan
from spark_ledger.topic.read.live import LiveEnd, LiveEnds, since_in
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
    without,
)
from spark_ledger.topic.subscription.lag import PartitionLag, topic_lag
from spark_ledger.topic.subscription.seek_target import rows_around

_log = logging.getLogger(__name__)
NAMED_MAX = 8
States = Mapping[str, TopicState]
FOLDS_MAX = 20
CHUNKS_FOR_LIMITS = 64
"""Chunks that are read so that a limit on bytes is exact; of more, rows count as equally large."""


class Planner:
    """Plans for one reader. Its coroutines run on the client's loop; its other methods never
    wait."""

    def __init__(self, client: TopicClient, live: LiveEnds, options: ReadOptions) -> None:
        self._client = client
        self._live = live
        self._options = options
        self._ledger_ends = LedgerEnds(client.ledgers)

    @property
    def _lossy(self) -> bool:
        return not self._options.fail_on_data_loss

    def end_of(self, held: PartitionState) -> int:
        """One past the last row that a commit or a live segment has."""
        if held.live is None:
            return held.end_offset
        return max(held.end_offset, held.live.base + self._live.known(held.live).rows)

    async def positions(
        self, place: ReadPosition, topic_ends: Ends, states: States, infos: Mapping[str, TopicInfo]
    ) -> Positions:
        """As TopicsRead.positions."""
        looked_up: ByPartition | None = None
        if isinstance(place, AtTime):
            by_topic = offsets.times_wanted(place, topic_ends)
            looked = [self._since(states[topic], times) for topic, times in by_topic.items()]
            looked_up = dict(zip(by_topic, await asyncio.gather(*looked), strict=True))
        elif isinstance(place, AtSubscription):
            looked_up = await self._of_subscription(place, infos)
        return offsets.resolve(place, topic_ends, looked_up, lossy=self._lossy)

    async def curves(self, states: States, start: Positions, end: Positions) -> CurveOf:
        """The curves of the rows between the positions, for `limits.admit`."""
        tables: dict[str, Tables] = {}
        if self._options.limits.bytes_max is not None:
            for topic, starts in start.items():
                ranges = _ranges(states[topic], starts, end[topic])
                tables[topic] = await self._some_tables(states[topic], ranges)

        def curve_of(topic: str, partition: int, lo: int, hi: int) -> Curve:
            held = states[topic].partitions[partition]
            size = self._live_bytes(held, lo, hi)
            read = tables.get(topic, UNREAD)
            return limits.curve_of(held, lo, hi, read, live_bytes=size)

        return curve_of

    def lags(
        self, states: States, topic_ends: Ends, positions: Positions, now_ms: int
    ) -> list[PartitionLag]:
        """As TopicsRead.lags."""
        lags: list[PartitionLag] = []
        for topic, parts in positions.items():
            if topic in states:
                state, ends = states[topic], dict(enumerate(topic_ends[topic].ends))
                live_ends = {
                    held.number: self._live.known(held.live)
                    for held in state.partitions
                    if held.live is not None
                }
                lags += topic_lag(state, parts, now_ms, ends=ends, live_ends=live_ends).values()
        return lags

    async def plan(self, states: States, start: Positions, end: Positions) -> list[ReadTask]:
        """As TopicsRead.plan. If the states do not reach the positions, or a ledger is gone, it
        plans again on states read after a sync."""
        try:
            if all(_reaches(states.get(topic), parts, self) for topic, parts in end.items()):
                tasks = await self._tasks(states, start, end)
                ends = await self._ledger_ends.of(tasks)
                if GONE not in ends.values():
                    return readable(tasks, ends, not self._lossy)
        except OffsetsOutOfRange:
            pass
        ids = {topic: states[topic].topic_id for topic in end}
        logs = [self._client.log(topic_id) for topic_id in ids.values()]
        folded = await asyncio.gather(*(log.fold(fresh=True) for log in logs))
        states = dict(zip(ids, folded, strict=True))
        await self._live.look(p.live for s in folded for p in s.partitions if p.live is not None)
        self._ledger_ends.forget()
        tasks = await self._tasks(states, start, end)
        return readable(tasks, await self._ledger_ends.of(tasks), not self._lossy)

    async def check_tokens(
        self, states: States, positions: Positions, tokens: Positions, what: str
    ) -> None:
        """As TopicsRead.check_tokens."""
        others: list[str] = []
        for topic, by_partition in tokens.items():
            for p, token in by_partition.items():
                at = positions.get(topic, {}).get(p)
                if at is not None and topic in states and p < len(states[topic].partitions):
                    held = states[topic].partitions[p]
                    now = held.token_before(at, await self._chunk_before(held, at))
                    if NO_TOKEN not in (now, token) and now != token:
                        others.append(f"offset {at} of partition {p} of topic {topic!r}")
        if not others:
            return
        named = "; ".join(others[:NAMED_MAX]) + ("; ..." if len(others) > NAMED_MAX else "")
        text = f"{what} follows rows that the metadata store does not have, but others: {named}"
        if not self._lossy:
            raise OffsetOfAnotherStore(text)
        _log.warning("%s: as failOnDataLoss is false, it is read on from there", text)

    async def _chunk_before(self, held: PartitionState, offset: int) -> Tables:
        """The chunk that has the row before the offset, if a chunk has it and is not gone."""
        if offset == held.end_offset:
            return UNREAD
        try:
            return await self._client.chunks.load(held.chunks_between(offset - 1, offset))
        except NoSuchLedger:
            return UNREAD

    # -- tasks --------------------------------------------------------------------------------

    async def _tasks(self, states: States, start: Positions, end: Positions) -> list[ReadTask]:
        planned = {t: await self._readable(states[t], at, end[t]) for t, at in start.items()}
        start = self._kept({topic: state for topic, (state, _) in planned.items()}, start, end)
        rows = max(1, offsets.rows_between(start, end))
        tasks: list[ReadTask] = []
        for topic, starts in start.items():
            part = sum(end[topic][p] - at for p, at in starts.items())
            share = max(1, -(-(self._options.min_partitions or 1) * part // rows))
            cutting = Cutting(share, self._options.task_bytes, self._options.task_rows)
            state, read = planned[topic]
            ranges = _ranges(state, starts, end[topic])
            tasks += plan_read(state, ranges, topic=topic, cutting=cutting, read=read)
            for p, at in starts.items():
                tasks += self._live_tasks(topic, state, p, (at, end[topic][p]), cutting)
        return tasks

    def _kept(self, states: States, start: Positions, end: Positions) -> Positions:
        """`start` without rows that were trimmed. Raises RowsTrimmed unless losses are accepted."""
        moved: Positions = {}
        lost: list[TrimmedRange] = []
        for topic, starts in start.items():
            moved[topic] = {}
            for p, at in starts.items():
                last = end[topic][p]
                first = min(max(at, states[topic].partitions[p].start_offset), last)
                moved[topic][p] = first
                if first > at:
                    lost.append(TrimmedRange(topic, p, at, first))
        if lost and not self._lossy:
            raise offsets.rows_trimmed(lost)
        return moved

    async def _readable(
        self, state: TopicState, starts: Mapping[int, int], ends: Mapping[int, int]
    ) -> tuple[TopicState, Tables]:
        """The state, or a newer one if chunks of it are gone, with the chunks that a plan needs."""
        for _ in range(FOLDS_MAX):
            try:
                newer, read = await self._client.readable(state, _ranges(state, starts, ends))
            except (NoSuchEntry, NoSuchLedger):  # the newer state was trimmed meanwhile
                newer = await self._client.log(state.topic_id).fold(fresh=True)
            else:
                if newer is state:
                    return state, read
            state = newer
        raise DataUnavailable(f"topic {state.topic_id} changes faster than it can be planned")

    def _live_tasks(
        self, topic: str, state: TopicState, partition: int, span: tuple[int, int], cutting: Cutting
    ) -> Iterator[ReadTask]:
        """Tasks for the rows of the span that no commit has yet, cut evenly."""
        held = state.partitions[partition]
        lo, hi = max(span[0], held.end_offset), span[1]
        if lo >= hi:
            return
        live, live_end = held.live, self._known(held)
        if live is None or live.base + live_end.rows < hi:
            raise OffsetsOutOfRange(
                f"partition {held.number} of topic {topic!r} is to be read up to {hi}, and ends at"
                f" {self.end_of(held)}"
            )
        size = max(1, self._live_bytes(held, lo, hi))
        rows = max(1, (hi - lo) * cutting.task_bytes // size)
        rows = min(rows, cutting.task_rows or rows, -(-(hi - lo) // cutting.tasks_min))
        chunked = bool(held.rowless or live_end.rowless.number)
        for first in range(lo, hi, rows):
            last = min(hi, first + rows)
            part = LiveRows(live, first, last, live_end.last_entry, live_end.rows)
            yield ReadTask(topic, state.topic_id, (), NO_SEGMENTS, part, chunked)

    def _known(self, held: PartitionState) -> LiveEnd:
        return LiveEnd() if held.live is None else self._live.known(held.live)

    def _live_bytes(self, held: PartitionState, lo: int, hi: int) -> int:
        """An estimate of the bytes of the span's rows in the live segment."""
        live_end = self._known(held)
        rows = max(0, hi - max(lo, held.end_offset))
        return live_end.bytes * rows // live_end.rows if live_end.rows else 0

    # -- looking things up ----------------------------------------------------------------------

    async def _since(self, state: TopicState, times: Mapping[int, int]) -> dict[int, int]:
        try:
            return await self._looked_up(state, times)
        except NoSuchLedger:  # a newer checkpoint replaced chunks, or a merge replaced rows
            state, _ = await self._client.log(state.topic_id).fold_from_checkpoint()
            return await self._looked_up(state, times)

    async def _looked_up(self, state: TopicState, times: Mapping[int, int]) -> dict[int, int]:
        read = await self._client.chunks.load(start_positions.chunks_to_look_up(state, times))
        since = start_positions.look_up(state, times, read)
        for p in since:
            held, millis = state.partitions[p], times[p]
            rows = rows_around(held, millis, read)
            if since[p] == held.end_offset:
                rows = self._open_rows(held)
            if rows is not None:
                since[p] = await since_in(self._client.ledgers, rows, millis)
        return since

    def _open_rows(self, held: PartitionState) -> LiveRows | None:
        """The known rows that no commit has yet."""
        live, live_end = held.live, self._known(held)
        if live is None or not live_end.rows:
            return None
        return LiveRows(
            live, live.base, live.base + live_end.rows, live_end.last_entry, live_end.rows
        )

    async def _of_subscription(
        self, place: AtSubscription, infos: Mapping[str, TopicInfo]
    ) -> dict[str, dict[int, int]]:
        """The positions of the subscription in each topic that has it; a topic must have it."""
        by_topic: dict[str, dict[int, int]] = {}
        missing: SubscriptionNotFound | None = None
        for topic, info in infos.items():
            try:
                by_topic[topic] = await self._client.subscriptions.positions(info.id, place.name)
            except SubscriptionNotFound as error:
                missing = error
        if missing is not None and not by_topic:
            raise missing
        return by_topic

    async def _some_tables(self, state: TopicState, ranges: Ranges) -> Tables:
        """Chunks to share rows out by size; if chunks are gone, rows count as equally large."""
        chunks = chunks_to_read(state, ranges)[:CHUNKS_FOR_LIMITS]
        try:
            return await self._client.chunks.load(chunks)
        except NoSuchLedger:
            return UNREAD


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
    """The part of the offsets that commits hold, by partition."""
    ranges = {}
    for p, at in starts.items():
        held = state.partitions[p]
        last = max(held.start_offset, min(ends[p], held.end_offset))
        ranges[p] = (min(max(at, held.start_offset), last), last)
    return ranges


def _reaches(state: TopicState | None, ends: Mapping[int, int], planner: Planner) -> bool:
    return state is not None and all(
        p < len(state.partitions) and at <= planner.end_of(state.partitions[p])
        for p, at in ends.items()
    )


RECORDS_AT_ONCE = 256
LEDGERS_MAX = 2_000
CLOSED_KEPT = 100_000
GONE = LedgerEnd(-2, 0)
"""The end of a ledger that does not exist."""


class LedgerEnds:
    """The ends of ledgers. A closed ledger does not change, so its record is read once."""

    def __init__(self, ledgers: LedgerStore) -> None:
        self._ledgers = ledgers
        self._closed: dict[int, LedgerEnd] = {}

    async def of(self, tasks: Iterable[ReadTask]) -> plan.LedgerEnds:
        """The ends of the ledgers that the tasks read, without those beyond LEDGERS_MAX."""
        every = sorted({ledger_id for task in tasks for ledger_id in task.table.ledger_ids()})
        ledger_ends: dict[int, LedgerEnd | None] = {}
        ledger_ends.update(
            (ledger_id, self._closed[ledger_id]) for ledger_id in every if ledger_id in self._closed
        )
        unread = [ledger_id for ledger_id in every if ledger_id not in ledger_ends][:LEDGERS_MAX]
        for first in range(0, len(unread), RECORDS_AT_ONCE):
            window = unread[first : first + RECORDS_AT_ONCE]
            ends = await asyncio.gather(*(self._end(ledger_id) for ledger_id in window))
            ledger_ends.update(zip(window, ends, strict=True))
        return ledger_ends

    def forget(self) -> None:
        """Drop the ends of closed ledgers: the ledgers may have been deleted since."""
        self._closed.clear()

    async def _end(self, ledger_id: int) -> LedgerEnd | None:
        try:
            record = (await self._record(ledger_id)).record
        except NoSuchLedger:
            return GONE
        if record.last_entry is None:
            return None
        end = LedgerEnd(record.last_entry, record.rows or 0)
        if len(self._closed) < CLOSED_KEPT:
            self._closed[ledger_id] = end
        return end

    async def _record(self, ledger_id: int) -> VersionedRecord:
        """The record. That it does not exist is believed only after a sync: the replica from which
        a new session reads may be behind the topic's log in memory."""
        try:
            return await self._ledgers.record(ledger_id)
        except NoSuchLedger:
            return await self._ledgers.record(ledger_id, fresh=True)


def readable(
    tasks: Sequence[ReadTask], ends: plan.LedgerEnds, fail_on_data_loss: bool
) -> list[ReadTask]:
    """The tasks without rows that are gone. With `fail_on_data_loss` raises RowsLost if there are
    such rows."""
    lost = {i: gone for i, task in enumerate(tasks) if (gone := lost_of(task, ends))}
    if fail_on_data_loss and lost:
        raise rows_lost([rows for gone in lost.values() for rows in gone])
    kept = (without(task, lost[i]) if i in lost else task for i, task in enumerate(tasks))
    return [task for task in kept if task.rows]
