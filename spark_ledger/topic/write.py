"""A task's writing: rows to partitions, to entries, to ledgers, to a result that can be committed.

Always true: a result names exactly the entries that were acknowledged, in order, to this task
(hazard 18); no row of a call is sent before all its rows are checked to fit; rows of a partition
keep the order in which they were written. When a ledger fails, its recorded entries stay, and the
others go to the next ledger, once and in the same order (hazard 21). A task whose entries take at
most `inline_bytes_max` in all sends none: they are in its result, and no ledger is made for them.
Rows are encoded in the task's thread; only sending runs on the background loop, so both run at
once.

The writer's `room` and `unacked_bytes_max` bound the bytes that were sent and not acknowledged;
`held_bytes_max` bounds these and the bytes that wait for their last copies, in this ledger and in
earlier ones. FILTER_BYTES_MAX bounds filters of keys: beyond it they are written, and new segments
begin. A filter that cannot be written is left out: it only saves reading.
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
    """How a task writes. `inflight_bytes_max` bounds its rows in memory: a fifth for gathered rows
    (and most of a fifth more while they are sorted), an eighth for encoded entries, three eighths
    for entries sent and not yet on every bookie; at most a quarter is not acknowledged at all. Each
    of these may exceed its share by one row or entry. `schema_version` is that of the topic's own
    columns; `policies` replace the topic's."""

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
    """A task's message to the driver. Picklable; a task without rows has no segments. `creators`:
    for each of the segments' ledgers the creator token of its record, by which the commit
    distinguishes it from another ledger of the same id (commit/guards.py)."""

    topic_id: str
    intent_id: str
    task_index: int
    attempt: int
    segments: tuple[Segment, ...] = ()
    creators: Mapping[int, str] = field(default_factory=dict)


class TaskWriter:
    """One task's writer to one topic, for one thread that is not the loop's. Made by
    blocking.BlockingTopics.task_writer. A later call may raise an error of an earlier sending.
    `nothing` is the result of a task without rows."""

    def __init__(
        self,
        nothing: TaskResult,
        encoder: BatchEncoder,
        sender: "EntrySender",
        settings: TaskSettings = DEFAULT_SETTINGS,
    ) -> None:
        self._nothing = nothing
        self._encoder = encoder
        self._sender = sender
        self._settings = settings
        self._handed: deque[tuple[Future[None], int]] = deque()
        self._handed_bytes = 0

    def write(
        self,
        keys: pa.Array | None,
        values: pa.Array | pa.RecordBatch,
        *,
        event_times: pa.Array | None = None,
        headers: pa.Array | None = None,
        partitions: pa.Array | None = None,
    ) -> None:
        """Take rows: columns of equal length, None for a column of nulls. `keys` and `values` are
        (large_)binary or (large_)string or their views, or `values` is a record batch of the
        topic's own columns; `event_times` are timestamps, `headers` lists of structs of key and
        value, or maps; `partitions` are integers, needed by Routing.COLUMN only. Returns when the
        rows are gathered or handed to the ledger writer; waits while the in-flight bytes are used
        up. The writer may keep the arrays and send them as they are: do not change their memory
        afterwards.

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
        """About the bytes of rows in memory: gathered, handed over, not yet on every bookie."""
        return self._encoder.waiting_bytes + self._handed_bytes + self._sender.held_bytes

    def drain(self) -> None:
        """Send the gathered rows and wait for every ack; more may be written."""
        self._hand_over_all()
        background_loop().run(self._sender.drain())

    def settle(self) -> None:
        """`drain`, then wait until every copy is made or its bookie's time is over: then no bytes
        are held."""
        self.drain()
        background_loop().run(self._sender.settled())

    def finishing(self) -> Callable[[], TaskResult]:
        """Send the gathered rows; the returned function waits for every ack, then up to 0.5 s for
        all copies, so several writers may end at once. A task with few bytes sends nothing: its
        result has the entries inline."""
        small = self._encoder.flush_small(self._settings.inline_bytes_max)
        if small is not None:
            return lambda: replace(self._nothing, segments=inline_segments(small))
        self._hand_over_all()
        finished = background_loop().submit(self._sender.finish())

        def finish() -> TaskResult:
            segments = finished.result()
            return replace(self._nothing, segments=segments, creators=dict(self._sender.creators))

        return finish

    def abort(self) -> None:
        """Give the ledger back. No result names the written entries; the janitor deletes them."""
        for future, _ in self._handed:
            future.cancel()
        background_loop().run(self._sender.abort())

    def _hand_over_all(self) -> None:
        """Send the gathered rows; returns when the ledger writer has them."""
        for entry in self._encoder.flush():
            self._hand_over(entry)
        self._wait_until(0)

    def _hand_over(self, entry: EncodedEntry) -> None:
        sending = background_loop().submit(self._sender.send(entry))
        self._handed.append((sending, entry.payload_bytes))
        self._handed_bytes += entry.payload_bytes
        self._wait_until(self._settings.handed_over_bytes_max)

    def _wait_until(self, bytes_left: int) -> None:
        """Take the results of sends; wait until at most so many bytes are unfinished."""
        while self._handed and (self._handed_bytes > bytes_left or self._handed[0][0].done()):
            future, size = self._handed.popleft()
            self._handed_bytes -= size
            future.result()


def inline_segments(entries: Iterable[EncodedEntry]) -> tuple[Segment, ...]:
    """A segment for each entry, with the entry's payload. Each entry has one partition."""
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

REPLICATED_WAIT_S = 0.5
FAILED_LEDGERS_MAX = 5  # of one task; then its last error is the task's
UNACKED_BYTES_MAX = 16 << 20
HELD_BYTES_MAX = 24 << 20
FILTER_BYTES_MAX = 4 << 20
_HOPELESS = (errors.MessageTooBig, errors.Unauthorized)


@dataclass(slots=True)
class _Sent:
    entry: EncodedEntry
    acked: "asyncio.Future[int]"


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a segment: a part of a ledger between two writings of filters."""

    ledger_id: int
    part: int
    partition: int


@dataclass(slots=True)
class _Recorded:
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

    def segment(self, place: _Place) -> Segment:
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
    """The bounds of a segment's event times: no row has one outside. NO_MS if no row has an event
    time; a bound that is NO_MS by chance is moved outwards."""
    times = list(event_ms)
    if not times:
        return NO_MS, NO_MS
    low, high = min(times), max(times)
    return low - (low == NO_MS), high + (high == NO_MS)


class EntrySender:
    """Sends one task's entries to its ledgers. Calls may overlap: they are carried out in order."""

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
        self._sent: deque[_Sent] = deque()
        self._again: deque[EncodedEntry] = deque()
        self._unacked_bytes_max = unacked_bytes_max
        self._unacked_bytes = 0
        self._held_bytes_max = held_bytes_max
        self._left: list[AsyncLedgerWriter] = []  # may still wait for last copies
        self._part = 0
        self._filter_bytes = 0
        self._next_row: dict[int, int] = {}  # by partition, in the current part of the ledger
        self._recorded: dict[_Place, _Recorded] = {}
        self.creators: dict[int, str] = {}
        """The creator tokens of the ledgers whose acknowledged entries are recorded."""
        self._failures = 0

    @property
    def held_bytes(self) -> int:
        """The bytes of entries to which not every bookie has responded; any thread may read it."""
        return sum(writer.held_bytes for writer in self._writers())

    async def send(self, entry: EncodedEntry) -> None:
        """Append the entry; returns when the ledger's writer has it.

        Raises errors.LedgerFenced (the intent ended), errors.NotEnoughBookies, errors.Unavailable,
        or the error of the last of FAILED_LEDGERS_MAX ledgers.
        """
        async with self._lock:
            self._again.append(entry)
            await self._intents.heartbeat(self._intent)
            await self._send_waiting()

    async def drain(self) -> None:
        """Wait for every ack; more may be sent. Raises as `send`."""
        async with self._lock:
            await self._all_acked()

    async def settled(self) -> None:
        """Wait, after `drain`, until every copy is made or its bookie's time is over."""
        for writer in self._writers():
            await writer.held_below(0)

    async def finish(self) -> tuple[Segment, ...]:
        """Wait for every ack, then up to REPLICATED_WAIT_S for all copies; the ledger goes back
        to the cache. Raises as `send`."""
        async with self._lock:
            await self._all_acked()
            await self._leave_ledger()
        return tuple(made.segment(place) for place, made in self._recorded.items())

    async def abort(self) -> None:
        """Forget the sent entries, without waiting for them; the ledger is closed in the
        background."""
        async with self._lock:
            self._again.clear()
            for sent in self._sent:
                sent.acked.add_done_callback(_taken)
            self._sent.clear()
            self._unacked_bytes = 0
            if self._ledger is not None:
                self._cache.discard(self._ledger)
                self._ledger = None

    async def _all_acked(self) -> None:
        await self._send_waiting()
        while self._sent:
            await self._all_decided()
            if self._sent:
                await self._leave_failed_ledger()
                await self._send_waiting()

    async def _send_waiting(self) -> None:
        while self._again:
            ledger = await self._ledger_with_room(self._again[0].payload_bytes)
            self._append(ledger, self._again.popleft())

    async def _ledger_with_room(self, size: int) -> TaskLedger:
        """The writer of the current ledger once it takes so many bytes more, or of the next one."""
        while True:
            if self._ledger is None:
                self._ledger = await self._cache.acquire(
                    self._topic_id, self._policies, self._intent
                )
                self._next_row = {}
            ledger = self._ledger
            self._record_acked()
            if self._failed():
                await self._leave_failed_ledger()
            elif not ledger.is_usable(asyncio.get_running_loop().time()):
                await self._all_decided()
                if not self._sent:
                    await self._leave_ledger()
            elif self._filter_bytes > FILTER_BYTES_MAX:
                await self._all_decided()
                if not self._sent:
                    await self._write_filters(ledger)
            elif self._sent and self._unacked_bytes + size > self._unacked_bytes_max:
                await asyncio.gather(self._sent[0].acked, return_exceptions=True)
            elif self.held_bytes + size > self._held_bytes_max and self.held_bytes:
                await self._less_held()
            else:
                await ledger.writer.room()
                if not self._failed():
                    return ledger

    async def _less_held(self) -> None:
        """Wait until a writer holds fewer bytes than now."""
        self._left = [writer for writer in self._left if writer.held_bytes]
        first = next(writer for writer in self._writers() if writer.held_bytes)
        await first.held_below(first.held_bytes - 1)

    def _writers(self) -> list[AsyncLedgerWriter]:
        """The writers that may hold bytes, oldest first."""
        ledger = self._ledger
        return self._left if ledger is None else [*self._left, ledger.writer]

    def _append(self, ledger: TaskLedger, entry: EncodedEntry) -> None:
        first_rows = [self._next_row.get(share.partition, 0) for share in entry.shares]
        for share, first_row in zip(entry.shares, first_rows, strict=True):
            self._next_row[share.partition] = first_row + share.rows
        acked = ledger.writer.append(entry.payload(first_rows), entry.rows)
        ledger.bytes += entry.payload_bytes
        self._unacked_bytes += entry.payload_bytes
        self._sent.append(_Sent(entry, acked))

    def _failed(self) -> bool:
        assert self._ledger is not None
        first = self._sent[0].acked if self._sent else None
        broken = first is not None and first.done() and first.exception() is not None
        return broken or self._ledger.writer.failure is not None

    def _record_acked(self) -> None:
        """Move the acknowledged entries, in order, from sent to recorded."""
        while self._sent and self._sent[0].acked.done():
            if self._sent[0].acked.exception() is not None:
                return
            sent = self._sent.popleft()
            self._record(sent.entry, sent.acked.result())

    def _record(self, entry: EncodedEntry, entry_id: int) -> None:
        assert self._ledger is not None
        writer = self._ledger.writer
        self._unacked_bytes -= entry.payload_bytes
        for share in entry.shares:
            place = _Place(writer.ledger_id, self._part, share.partition)
            made = self._recorded.setdefault(place, _Recorded())
            self.creators[writer.ledger_id] = writer.record.creator
            made.add(entry_id, share, entry)
            made.shared = made.shared or len(entry.shares) > 1
            made.metadata_version = max(made.metadata_version, writer.version)
            self._filter_bytes += len(share.key_filter or b"")

    async def _all_decided(self) -> None:
        """Wait until each sent entry was acknowledged or refused; record the acknowledged ones."""
        await asyncio.gather(*(sent.acked for sent in self._sent), return_exceptions=True)
        self._record_acked()

    async def _leave_failed_ledger(self) -> None:
        """Keep the acknowledged entries, send the rest again. Raises if another try is no use."""
        assert self._ledger is not None
        await self._all_decided()
        cause = self._cause(self._sent)
        self._again.extendleft(sent.entry for sent in reversed(self._sent))
        self._sent.clear()
        self._unacked_bytes = 0
        self._begin_part()
        self._left.append(self._ledger.writer)
        self._cache.discard(self._ledger)
        self._ledger = None
        self._failures += 1
        if cause is not None and (
            isinstance(cause, _HOPELESS) or self._failures >= FAILED_LEDGERS_MAX
        ):
            raise cause

    def _cause(self, unacked: Iterable[_Sent]) -> BaseException | None:
        assert self._ledger is not None
        for sent in unacked:
            error = sent.acked.exception()
            if error is not None:
                return error
        return self._ledger.writer.failure

    async def _leave_ledger(self) -> None:
        """Give the ledger back once its copies are complete, or their time is over: then repair
        makes the missing copies (hazard 20)."""
        if self._ledger is None:
            return
        writer = self._ledger.writer
        await self._write_filters(self._ledger)
        ledger_id = writer.ledger_id
        mine = [made.ids for at, made in self._recorded.items() if at.ledger_id == ledger_id]
        if mine:
            first = min(ids[0] for ids in mine)
            await writer.wait_for_copies(REPLICATED_WAIT_S, first)
        self._left.append(writer)
        self._cache.release(self._ledger)
        self._ledger = None

    async def _write_filters(self, ledger: TaskLedger) -> None:
        """Write the filters of the part's longer segments as one entry, and begin a new part. All
        sent entries are recorded."""
        due = {
            place: made
            for place, made in self._recorded.items()
            if made.filters and len(made.ids) >= ENTRIES_MIN
        }
        if due:
            payload = encode_filters(
                (place.partition, *one) for place, made in due.items() for one in made.filters
            )
            ledger.bytes += len(payload)
            acked = ledger.writer.append([payload], 0)
            await asyncio.gather(acked, return_exceptions=True)
            if acked.exception() is None:
                for made in due.values():
                    made.filter_entry = acked.result()
                    made.metadata_version = max(made.metadata_version, ledger.writer.version)
        self._begin_part()

    def _begin_part(self) -> None:
        """Later entries are of new segments; filters that were not written are forgotten."""
        for made in self._recorded.values():
            made.filters.clear()
        self._filter_bytes = 0
        self._part += 1
        self._next_row = {}


def _taken(acked: "asyncio.Future[int]") -> None:
    """The outcome of the task is not used."""
    if not acked.cancelled():
        acked.exception()
