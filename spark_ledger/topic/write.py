"""A task's writing: rows to partitions, to entries, to ledgers, to a result that can be committed.

Always true: a result names exactly the entries that were acknowledged, in order, to this task
(hazard 18). Before a row of a call is sent, all rows of the call are checked to fit. Rows of a
partition keep the order in which they were written. When a ledger fails, its acknowledged entries
stay in the result, and the other entries go to the next ledger, once and in the same order (hazard
21). A task whose entries take at most `inline_bytes_max` in all sends no entry: its result has the
entries inline, without a ledger. Rows are encoded in the task's thread, and sent on the background
loop, so both happen at once.

The ledger writer's `room` and `unacked_bytes_max` limit the bytes that were sent and not yet
acknowledged. `held_bytes_max` limits these bytes together with the bytes that wait for their last
copies, in this ledger and in earlier ledgers. FILTER_BYTES_MAX limits filters of keys: when they
take more, the filters are written, and new segments begin. A filter that cannot be written is left
out, since filters only save reading.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import pyarrow as pa

from spark_ledger import errors
from spark_ledger.ledger.writer import AsyncLedgerWriter
from spark_ledger.process import background_loop
from spark_ledger.topic.entry.batch_encoder import (
    GATHER_BYTES_MAX,
    BatchEncoder,
    EncodedEntry,
    EncodedShare,
)
from spark_ledger.topic.entry.key_filter import ENTRIES_MIN, encode_filters
from spark_ledger.topic.entry.routing import Routing
from spark_ledger.topic.log.intents import Intent, Intents
from spark_ledger.topic.log.ledger_cache import LedgerCache, TaskLedger
from spark_ledger.topic.log.policies import TopicPolicies
from spark_ledger.topic.log.segments import INLINE, NO_ENTRY, NO_MS, Segment, merge_ranges

INLINE_TASK_BYTES_MAX = 8 << 10
INFLIGHT_BYTES_MAX = 64 << 20
INFLIGHT_BYTES_MIN = 256 << 10
HANDED_OVER_BYTES_MAX = 8 << 20


@dataclass(frozen=True, slots=True)
class TaskSettings:
    """How a task writes. `inflight_bytes_max` limits the rows in memory: a fifth is for gathered
    rows (nearly another fifth while they are sorted), an eighth for encoded entries, three eighths
    for entries that were sent and are not yet on every bookie. Unacknowledged entries may take a
    quarter at most. Each share may be exceeded by one row or entry. `schema_version` is the version
    of the topic's own columns; `policies` replace the topic's policies."""

    compression: str = "none"
    routing: Routing = Routing.HASH
    key_filters: bool = True
    inflight_bytes_max: int = INFLIGHT_BYTES_MAX
    inline_bytes_max: int = INLINE_TASK_BYTES_MAX
    schema_version: int = 0
    policies: TopicPolicies | None = None

    def __post_init__(self) -> None:
        if self.inflight_bytes_max < INFLIGHT_BYTES_MIN:
            raise errors.BadConfig(
                f"a task needs {INFLIGHT_BYTES_MIN} bytes in flight or more, not"
                f" {self.inflight_bytes_max}"
            )

    @property
    def gather_bytes_max(self) -> int:
        return min(GATHER_BYTES_MAX, self.inflight_bytes_max // 5)

    @property
    def unacked_bytes_max(self) -> int:
        return min(UNACKED_BYTES_MAX, self.inflight_bytes_max // 4)

    @property
    def held_bytes_max(self) -> int:
        return min(HELD_BYTES_MAX, self.inflight_bytes_max * 3 // 8)

    @property
    def handed_over_bytes_max(self) -> int:
        return min(HANDED_OVER_BYTES_MAX, self.inflight_bytes_max // 8)


DEFAULT_SETTINGS = TaskSettings()


@dataclass(frozen=True, slots=True)
class TaskResult:
    """A task's message to the driver. Picklable; a task without rows has no segments. `creators`
    has the creator token of each ledger of the segments, from the ledger's record. By the token the
    commit distinguishes the ledger from another ledger with the same id (commit/guards.py)."""

    topic_id: str
    intent_id: str
    task_index: int
    attempt: int
    segments: tuple[Segment, ...] = ()
    creators: Mapping[int, str] = field(default_factory=dict)


class TaskWriter:
    """One task's writer to one topic, for one thread that is not the loop's. Made by
    blocking.BlockingTopics.task_writer. A call may raise the error of an entry that an earlier call
    sent. `empty_result` is the result of a task without rows."""

    def __init__(
        self,
        empty_result: TaskResult,
        encoder: BatchEncoder,
        sender: "EntrySender",
        settings: TaskSettings = DEFAULT_SETTINGS,
    ) -> None:
        self._empty_result = empty_result
        self._encoder = encoder
        self._sender = sender
        self._settings = settings
        self._pending_sends: deque[tuple[Future[None], int]] = deque()
        self._pending_bytes = 0

    def write(
        self,
        keys: pa.Array | None,
        values: pa.Array | pa.RecordBatch,
        *,
        event_times: pa.Array | None = None,
        headers: pa.Array | None = None,
        partitions: pa.Array | None = None,
    ) -> None:
        """Writes rows, given as columns of equal length (None: a column of nulls). `keys` and
        `values` are (large_)binary or (large_)string or their views, or `values` is a record batch
        of the topic's own columns. `event_times` are timestamps; `headers` are lists of structs of
        key and value, or maps; `partitions` are integers, needed only by Routing.COLUMN. Returns
        when the rows are gathered or the ledger writer has them; waits while the in-flight bytes
        are used up. The writer may keep the arrays and send them without a copy: the caller must
        not change their memory afterwards.

        Raises errors.MessageTooBig, errors.ColumnTypeMismatch and errors.PartitionInvalid (before
        a row of the call is sent), errors.LedgerFenced, errors.NotEnoughBookies,
        errors.Unavailable.
        """
        for entry in self._encoder.add(
            keys, values, event_times=event_times, headers=headers, partitions=partitions
        ):
            self._hand_over(entry)

    @property
    def held_bytes(self) -> int:
        """An estimate of the bytes of rows in memory: rows that are gathered, that are being sent,
        or that are not yet on every bookie."""
        return self._encoder.waiting_bytes + self._pending_bytes + self._sender.held_bytes

    def drain(self) -> None:
        """Sends the gathered rows and waits for every ack. More rows may be written afterwards."""
        self._hand_over_all()
        background_loop().run(self._sender.drain())

    def drain_copies(self) -> None:
        """Drains, then waits until every copy is made or its bookie's time is over. Afterwards the
        writer holds no bytes."""
        self.drain()
        background_loop().run(self._sender.wait_for_copies())

    def start_finish(self) -> Callable[[], TaskResult]:
        """Sends the gathered rows. The returned function waits for every ack, then up to 0.5 s for
        all copies, so several writers may end at the same time. A task with few bytes sends no
        entry: its result has the entries inline."""
        small_entries = self._encoder.flush_small(self._settings.inline_bytes_max)
        if small_entries is not None:
            return lambda: replace(self._empty_result, segments=inline_segments(small_entries))
        self._hand_over_all()
        finished = background_loop().submit(self._sender.finish())

        def finish() -> TaskResult:
            segments = finished.result()
            return replace(
                self._empty_result, segments=segments, creators=dict(self._sender.creators)
            )

        return finish

    def abort(self) -> None:
        """Give the ledger back. No result names the written entries; the janitor deletes their
        ledger."""
        for future, _ in self._pending_sends:
            future.cancel()
        background_loop().run(self._sender.abort())

    def _hand_over_all(self) -> None:
        """Sends the gathered rows; returns when the ledger writer has all of them."""
        for entry in self._encoder.flush():
            self._hand_over(entry)
        self._wait_until(0)

    def _hand_over(self, entry: EncodedEntry) -> None:
        sending = background_loop().submit(self._sender.send(entry))
        self._pending_sends.append((sending, entry.payload_bytes))
        self._pending_bytes += entry.payload_bytes
        self._wait_until(self._settings.handed_over_bytes_max)

    def _wait_until(self, bytes_left: int) -> None:
        """Collects the results of sends; waits until at most `bytes_left` bytes are being sent."""
        while self._pending_sends and (
            self._pending_bytes > bytes_left or self._pending_sends[0][0].done()
        ):
            future, size = self._pending_sends.popleft()
            self._pending_bytes -= size
            future.result()


def inline_segments(entries: Iterable[EncodedEntry]) -> tuple[Segment, ...]:
    """An inline segment for each entry. Each entry must have one partition."""
    return tuple(map(_inline_segment, entries))


def _inline_segment(entry: EncodedEntry) -> Segment:
    (share,) = entry.shares
    event_min_ms, event_max_ms = event_bounds(share.event_ms or ())
    return Segment(
        partition=share.partition,
        ledger_id=INLINE,
        metadata_version=0,
        entries=((0, 0),),
        entry_rows=(share.rows,),
        rows=share.rows,
        bytes=entry.payload_bytes,
        min_ms=entry.written_ms,
        max_ms=entry.written_ms,
        event_min_ms=event_min_ms,
        event_max_ms=event_max_ms,
        inline=(b"".join(entry.payload([0])),),
    )


# -- sending entries to ledgers --------------------------------------------------------------------

COPIES_WAIT_S = 0.5
FAILED_LEDGERS_MAX = 5  # after so many failed ledgers the task raises the last error
UNACKED_BYTES_MAX = 16 << 20
HELD_BYTES_MAX = 24 << 20
FILTER_BYTES_MAX = 4 << 20
_PERMANENT_ERRORS = (errors.MessageTooBig, errors.Unauthorized)


@dataclass(slots=True)
class _SentEntry:
    entry: EncodedEntry
    ack: "asyncio.Future[int]"
    """Its result is the entry id."""


@dataclass(frozen=True, slots=True)
class _SegmentPlace:
    """Which segment of the task this is. `part` is the number of a part of a ledger: a part ends
    when filters are written."""

    ledger_id: int
    part: int
    partition: int


@dataclass(slots=True)
class _AckedEntries:
    """The acknowledged entries of one segment."""

    ids: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    written_ms: list[int] = field(default_factory=list)
    event_ms: list[int] = field(default_factory=list)
    filters: list[tuple[int, bytes]] = field(default_factory=list)
    shared: bool = False
    bytes: int = 0
    metadata_version: int = 0
    filter_entry: int = NO_ENTRY

    def add(self, entry_id: int, share: EncodedShare, entry: EncodedEntry) -> None:
        assert not self.ids or self.ids[-1] < entry_id, "acks come in the order of entries"
        self.ids.append(entry_id)
        self.rows.append(share.rows)
        self.written_ms += (entry.first_written_ms, entry.written_ms)
        self.event_ms += share.event_ms or ()
        self.bytes += share.bytes
        if share.key_filter is not None:
            self.filters.append((entry_id, share.key_filter))

    def segment(self, place: _SegmentPlace) -> Segment:
        event_min_ms, event_max_ms = event_bounds(self.event_ms)
        return Segment(
            partition=place.partition,
            ledger_id=place.ledger_id,
            metadata_version=self.metadata_version,
            entries=merge_ranges(self.ids),
            entry_rows=tuple(self.rows),
            rows=sum(self.rows),
            bytes=self.bytes,
            min_ms=min(self.written_ms),
            max_ms=max(self.written_ms),
            shared=self.shared,
            filter_entry=self.filter_entry,
            event_min_ms=event_min_ms,
            event_max_ms=event_max_ms,
        )


def event_bounds(event_ms: Iterable[int]) -> tuple[int, int]:
    """The least and the greatest event time of a segment; NO_MS if no row has an event time. A
    bound that would be equal to NO_MS is moved outwards by 1."""
    times = list(event_ms)
    if not times:
        return NO_MS, NO_MS
    least, high = min(times), max(times)
    return least - (least == NO_MS), high + (high == NO_MS)


class EntrySender:
    """Sends one task's entries to its ledgers. Calls that overlap run one after the other."""

    def __init__(
        self,
        cache: LedgerCache,
        intents: Intents,
        intent: Intent,
        topic_id: str,
        policies: TopicPolicies,
        unacked_bytes_max: int = UNACKED_BYTES_MAX,
        held_bytes_max: int = HELD_BYTES_MAX,
    ) -> None:
        self._cache = cache
        self._intents = intents
        self._intent = intent
        self._topic_id = topic_id
        self._policies = policies
        self._lock = asyncio.Lock()
        self._ledger: TaskLedger | None = None
        self._unacked: deque[_SentEntry] = deque()
        self._waiting: deque[EncodedEntry] = deque()
        self._unacked_bytes_max = unacked_bytes_max
        self._unacked_bytes = 0
        self._held_bytes_max = held_bytes_max
        self._earlier_writers: list[AsyncLedgerWriter] = []  # which may wait for last copies
        self._part = 0
        self._filter_bytes = 0
        self._next_row: dict[int, int] = {}  # by partition, in the current part of the ledger
        self._segment_entries: dict[_SegmentPlace, _AckedEntries] = {}
        self.creators: dict[int, str] = {}
        """The creator tokens of the ledgers with acknowledged entries, by ledger id."""
        self._failures = 0

    @property
    def held_bytes(self) -> int:
        """The bytes of entries to which not every bookie has responded. Any thread may read
        this."""
        return sum(writer.held_bytes for writer in self._writers())

    async def send(self, entry: EncodedEntry) -> None:
        """Appends the entry; returns when the ledger's writer has the entry.

        Raises errors.LedgerFenced (the intent ended), errors.NotEnoughBookies, errors.Unavailable,
        or the error of the last of FAILED_LEDGERS_MAX ledgers.
        """
        async with self._lock:
            self._waiting.append(entry)
            await self._intents.heartbeat(self._intent)
            await self._send_waiting()

    async def drain(self) -> None:
        """Waits for every ack. More entries may be sent afterwards. Raises as `send`."""
        async with self._lock:
            await self._wait_for_acks()

    async def wait_for_copies(self) -> None:
        """Wait, after `drain`, until every copy is made or its bookie's time is over."""
        for writer in self._writers():
            await writer.held_below(0)

    async def finish(self) -> tuple[Segment, ...]:
        """Wait for every ack, then up to COPIES_WAIT_S for all copies; give the ledger back to the
        cache. Raises as `send`."""
        async with self._lock:
            await self._wait_for_acks()
            await self._leave_ledger()
        return tuple(
            segment_entries.segment(place)
            for place, segment_entries in self._segment_entries.items()
        )

    async def abort(self) -> None:
        """Drop all entries without waiting for acks; the ledger is closed in the background."""
        async with self._lock:
            self._waiting.clear()
            for sent in self._unacked:
                sent.ack.add_done_callback(_ignore_outcome)
            self._unacked.clear()
            self._unacked_bytes = 0
            if self._ledger is not None:
                self._cache.discard(self._ledger)
                self._ledger = None

    async def _wait_for_acks(self) -> None:
        await self._send_waiting()
        while self._unacked:
            await self._wait_for_outcomes()
            if self._unacked:
                await self._leave_failed_ledger()
                await self._send_waiting()

    async def _send_waiting(self) -> None:
        while self._waiting:
            ledger = await self._ledger_with_room(self._waiting[0].payload_bytes)
            self._append(ledger, self._waiting.popleft())

    async def _ledger_with_room(self, size: int) -> TaskLedger:
        """A ledger with room for `size` bytes: the current ledger, or the next ledger if the
        current one failed or is full."""
        while True:
            if self._ledger is None:
                self._ledger = await self._cache.acquire(
                    self._topic_id, self._policies, self._intent
                )
                self._next_row = {}
            ledger = self._ledger
            self._record_acknowledged()
            if self._has_failed():
                await self._leave_failed_ledger()
            elif not ledger.is_usable(asyncio.get_running_loop().time()):
                await self._wait_for_outcomes()
                if not self._unacked:
                    await self._leave_ledger()
            elif self._filter_bytes > FILTER_BYTES_MAX:
                await self._wait_for_outcomes()
                if not self._unacked:
                    await self._write_filters(ledger)
            elif self._unacked and self._unacked_bytes + size > self._unacked_bytes_max:
                await asyncio.gather(self._unacked[0].ack, return_exceptions=True)
            elif self.held_bytes + size > self._held_bytes_max and self.held_bytes:
                await self._wait_for_fewer_held_bytes()
            else:
                await ledger.writer.room()
                if not self._has_failed():
                    return ledger

    async def _wait_for_fewer_held_bytes(self) -> None:
        """Wait until a writer holds fewer bytes than now."""
        self._earlier_writers = [writer for writer in self._earlier_writers if writer.held_bytes]
        first = next(writer for writer in self._writers() if writer.held_bytes)
        await first.held_below(first.held_bytes - 1)

    def _writers(self) -> list[AsyncLedgerWriter]:
        """The ledger writers that may hold bytes, oldest first."""
        ledger = self._ledger
        return self._earlier_writers if ledger is None else [*self._earlier_writers, ledger.writer]

    def _append(self, ledger: TaskLedger, entry: EncodedEntry) -> None:
        first_rows = [self._next_row.get(share.partition, 0) for share in entry.shares]
        for share, first_row in zip(entry.shares, first_rows, strict=True):
            self._next_row[share.partition] = first_row + share.rows
        ack = ledger.writer.append(entry.payload(first_rows), entry.rows)
        ledger.bytes += entry.payload_bytes
        self._unacked_bytes += entry.payload_bytes
        self._unacked.append(_SentEntry(entry, ack))

    def _has_failed(self) -> bool:
        assert self._ledger is not None
        first = self._unacked[0].ack if self._unacked else None
        is_broken = first is not None and first.done() and first.exception() is not None
        return is_broken or self._ledger.writer.failure is not None

    def _record_acknowledged(self) -> None:
        """Move the acknowledged entries, in order, from `_unacked` to `_segment_entries`."""
        while self._unacked and self._unacked[0].ack.done():
            if self._unacked[0].ack.exception() is not None:
                return
            sent = self._unacked.popleft()
            self._record(sent.entry, sent.ack.result())

    def _record(self, entry: EncodedEntry, entry_id: int) -> None:
        assert self._ledger is not None
        writer = self._ledger.writer
        self._unacked_bytes -= entry.payload_bytes
        for share in entry.shares:
            place = _SegmentPlace(writer.ledger_id, self._part, share.partition)
            segment_entries = self._segment_entries.setdefault(place, _AckedEntries())
            self.creators[writer.ledger_id] = writer.record.creator
            segment_entries.add(entry_id, share, entry)
            segment_entries.shared = segment_entries.shared or len(entry.shares) > 1
            segment_entries.metadata_version = max(segment_entries.metadata_version, writer.version)
            self._filter_bytes += len(share.key_filter or b"")

    async def _wait_for_outcomes(self) -> None:
        """Wait until each sent entry was acknowledged or refused; record the acknowledged
        entries."""
        await asyncio.gather(*(sent.ack for sent in self._unacked), return_exceptions=True)
        self._record_acknowledged()

    async def _leave_failed_ledger(self) -> None:
        """Keeps the acknowledged entries, and sends the other entries to the next ledger. Raises
        the ledger's error if the error is permanent, or after too many failed ledgers."""
        assert self._ledger is not None
        await self._wait_for_outcomes()
        cause = self._first_error(self._unacked)
        self._waiting.extendleft(sent.entry for sent in reversed(self._unacked))
        self._unacked.clear()
        self._unacked_bytes = 0
        self._begin_part()
        self._earlier_writers.append(self._ledger.writer)
        self._cache.discard(self._ledger)
        self._ledger = None
        self._failures += 1
        if cause is not None and (
            isinstance(cause, _PERMANENT_ERRORS) or self._failures >= FAILED_LEDGERS_MAX
        ):
            raise cause

    def _first_error(self, unacked: Iterable[_SentEntry]) -> BaseException | None:
        assert self._ledger is not None
        for sent in unacked:
            error = sent.ack.exception()
            if error is not None:
                return error
        return self._ledger.writer.failure

    async def _leave_ledger(self) -> None:
        """Gives the ledger back once its copies are complete, or their time is over. Repair makes
        copies that are still missing (hazard 20)."""
        if self._ledger is None:
            return
        writer = self._ledger.writer
        await self._write_filters(self._ledger)
        ledger_id = writer.ledger_id
        first_ids = [
            segment_entries.ids[0]
            for place, segment_entries in self._segment_entries.items()
            if place.ledger_id == ledger_id
        ]
        if first_ids:
            first = min(first_ids)
            await writer.wait_for_copies(COPIES_WAIT_S, first)
        self._earlier_writers.append(writer)
        self._cache.release(self._ledger)
        self._ledger = None

    async def _write_filters(self, ledger: TaskLedger) -> None:
        """Writes the filters of the part's longer segments as one entry, and begins a new part. All
        entries must be acknowledged before."""
        to_write = {
            place: segment_entries
            for place, segment_entries in self._segment_entries.items()
            if segment_entries.filters and len(segment_entries.ids) >= ENTRIES_MIN
        }
        if to_write:
            payload = encode_filters(
                (place.partition, *entry_filter)
                for place, segment_entries in to_write.items()
                for entry_filter in segment_entries.filters
            )
            ledger.bytes += len(payload)
            ack = ledger.writer.append([payload], 0)
            await asyncio.gather(ack, return_exceptions=True)
            if ack.exception() is None:
                for segment_entries in to_write.values():
                    segment_entries.filter_entry = ack.result()
                    segment_entries.metadata_version = max(
                        segment_entries.metadata_version, ledger.writer.version
                    )
        self._begin_part()

    def _begin_part(self) -> None:
        """Begins new segments with the next entry, and drops filters that were not written."""
        for segment_entries in self._segment_entries.values():
            segment_entries.filters.clear()
        self._filter_bytes = 0
        self._part += 1
        self._next_row = {}


def _ignore_outcome(ack: "asyncio.Future[int]") -> None:
    """Reads the exception: for an unread exception asyncio would log a warning."""
    if not ack.cancelled():
        ack.exception()
