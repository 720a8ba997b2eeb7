"""One partition in its owner's hands: batches from any offset on, whoever wrote them.

    the tail in memory -> the live ledger -> what commits hold

Always true: nothing beyond what is confirmed is given out (rows of commits, and what Qa bookies
have synced of the live ledger); batches come in the order of offsets, and the first may begin
before the offset asked for; offsets that no batch has are holes. What Pulsar's producers wrote
comes byte for byte; rows that Spark wrote are cut into batches of ROWS_MAX, counted from the first
row of their entry, and these by their bytes, so that a batch begins where it began before. A chunk
of a message is a batch here, with an offset of its own. The newest batches are kept in memory for
those who read at the end: of all partitions TAIL_BYTES_MAX at most (what came last is always kept);
what goes first is what came first, of whichever partition.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, suppress
from functools import cached_property
from itertools import accumulate, repeat
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from bookie_server.api.entry import Buffer
from spark_ledger import errors
from spark_ledger.broker import names
from spark_ledger.broker.owner.live_writer import LiveWriter
from spark_ledger.broker.owner.waiting import Waiting
from spark_ledger.metadata.store import StoreError
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.entry import pulsar_batch
from spark_ledger.topic.entry.json_values import shown
from spark_ledger.topic.entry.message_batch import (
    EVENT_TIME,
    HEADERS,
    KEY,
    TYPED_NAMES,
    TYPES,
    VALUE,
    Header,
    column_of,
    decode_header,
)
from spark_ledger.topic.log.segment_table import NO_SEGMENTS
from spark_ledger.topic.log.state import PartitionState, TopicState
from spark_ledger.topic.log.topics import TopicInfo
from spark_ledger.topic.read.bad_entries import BadEntries, BadRows
from spark_ledger.topic.read.live import since_in
from spark_ledger.topic.read.pieces import WANTED, LiveRows, Wanted
from spark_ledger.topic.read.plan import ReadTask, plan_read
from spark_ledger.topic.read.row_blocks import Block
from spark_ledger.topic.read.slice_reader import FetchedEntry
from spark_ledger.topic.subscription.seek_target import (
    CommittedSince,
    chunks_needed,
    offset_since,
    rows_around,
)
from spark_ledger.topic.task_reader import fetch_kept

ROWS_MAX = 1000
TAIL_BYTES_MAX = 64 << 20
READ_BYTES = 2 << 20
PLANNED_ROWS_MAX = 200_000
LOST = (errors.RowsLost, errors.NoSuchLedger)
"""Rows that no bookie has any more."""
LOOK_S, SEALED_S = 0.02, 10.0
"""How often it is looked whether a ledger that ended was sealed, and for how long."""


class Stored(NamedTuple):
    """A batch of a partition as its consumers get it: its first message has offset `offset`;
    `batched`: it has metadata of each message."""

    offset: int
    messages: int
    data: Buffer
    batched: bool

    @property
    def has_rows(self) -> bool:
        """Whether it is no chunk that the last one of its message counts for."""
        return self.messages > 1 or not pulsar_batch.is_earlier_chunk(self.data)

    @property
    def end(self) -> int:
        return self.offset + self.messages


def stored(
    offset: int, counts: Sequence[int], batches: Sequence[bytes], batched: bool
) -> list[Stored]:
    """Batches that follow each other from the offset on, of so many messages each."""
    fields = zip(accumulate(counts, initial=offset), counts, batches, repeat(batched), strict=False)
    return list(map(tuple.__new__, repeat(Stored), fields))


_offset = attrgetter("offset")


class TailBudget:
    """Of one broker."""

    def __init__(self, bytes_max: int = TAIL_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._order: deque[tuple[Tail, Sequence[Stored], int]] = deque()

    @cached_property
    def apart(self) -> "TailBudget":
        """A quarter more, for what is read from ledgers: that is not to push out the newest."""
        return TailBudget(self._bytes_max // 4)

    def took(self, tail: "Tail", batches: Sequence[Stored]) -> None:
        if not batches:
            return
        size = sum(len(one.data) for one in batches)
        self._order.append((tail, batches, size))
        self._bytes += size
        while self._bytes > self._bytes_max and len(self._order) > 1:
            oldest, first, size = self._order.popleft()
            self._bytes -= size
            oldest.forget(first)


class Tail:
    """Of one partition."""

    def __init__(self, budget: TailBudget) -> None:
        self._budget = budget
        self._by_offset: dict[int, Stored] = {}

    def add(self, batches: Sequence[Stored]) -> None:
        """Batches that came together, and go together."""
        self._by_offset.update(zip(map(_offset, batches), batches, strict=True))
        self._budget.took(self, batches)

    def forget(self, batches: Sequence[Stored]) -> None:
        for one in batches:
            self._by_offset.pop(one.offset, None)

    def since(self, offset: int, bytes_max: int) -> list[Stored]:
        """The batches that follow each other from the one that begins at `offset`, of so many bytes
        about; none where that one is not here."""
        found: list[Stored] = []
        size = 0
        while size < bytes_max and (batch := self._by_offset.get(offset)) is not None:
            found.append(batch)
            size += len(batch.data)
            offset = batch.end
        return found


async def _nothing_heard() -> None:
    """The state that is known is the newest."""


class Partition:
    """`state` is the topic as it is known now; `catch_up` returns once it has the commits that were
    heard of, or soon after: so that rows which were trimmed are not given out of memory."""

    def __init__(
        self,
        client: TopicClient,
        topic: TopicInfo,
        number: int,
        state: Callable[[], TopicState],
        budget: TailBudget,
        catch_up: Callable[[], Awaitable[None]] = _nothing_heard,
    ) -> None:
        self.number = number
        self.shown = number if topic.policies.partitioned else names.NOT_PARTITIONED
        """What message ids call it."""
        self.ledger = names.ledger_number(topic.id)
        """Of its message ids."""
        self.deduplicates = topic.policies.deduplication
        self.writer: LiveWriter
        """Set by whoever made this."""
        self._client = client
        self._topic = topic
        self._state = state
        self._catch_up = catch_up
        self._budget = budget
        self._tail, self._read = Tail(budget), Tail(budget.apart)
        self._start = self._end = 0
        self._stored_end = 0
        """Of the newest batches in memory."""
        self._last: Stored | None = None
        self._last_until = 0
        """Up to there no other batch with a row comes after it."""
        self.listeners: dict[asyncio.Event, None] = {}
        """Set whenever there may be more than before."""

    @property
    def held(self) -> PartitionState:
        return self._state().partitions[self.number]

    @property
    def start(self) -> int:
        """The first offset that is kept: what lies below it in memory is not given out. While the
        metadata store is away it is where it was."""
        with suppress(errors.Unavailable):
            self._start = max(self._start, self.held.start_offset)
        return self._start

    @property
    def end(self) -> int:
        """One past the last offset that is confirmed; it never goes back, also while a ledger that
        ended is not in a commit yet (hazard 33), or the metadata store is away."""
        with suppress(errors.Unavailable):
            self._end = max(self._end, self.held.end_offset)
        self._end = max(self._end, self.writer.confirmed[0])
        return self._end

    def wake(self) -> None:
        """There may be more than before."""
        for listener in self.listeners:
            listener.set()

    def stored(self, offset: int, run: Waiting) -> None:
        """A producer's batches are confirmed."""
        batches = stored(offset, run.counts, run.batches, run.batched)
        if offset < self._stored_end:
            self._forget()
        self._stored_end = batches[-1].end
        self._end = max(self._end, batches[-1].end)
        if batches[-1].has_rows:
            self._last, self._last_until = batches[-1], batches[-1].end
        elif self._last_until == offset:
            self._last_until = batches[-1].end
        self._tail.add(batches)
        self.wake()

    def _forget(self) -> None:
        """The metadata store went back in time: rows in memory are no rows of the topic any more,
        and their offsets are others' now."""
        self._tail, self._read = Tail(self._budget), Tail(self._budget.apart)
        self._start = self._end = 0
        self._last, self._last_until = None, 0

    async def read(
        self, offset: int, bytes_max: int = READ_BYTES, *, lossy: bool = False
    ) -> list[Stored]:
        """Batches from the offset on, at least one where there is one, about so many bytes; none
        where nothing is confirmed there yet. A batch comes whole, also where rows of it were
        removed. What is before rows that cannot be read comes by itself. `lossy`: without rows
        that are lost; where they are all that commits have, an empty batch is after them. Raises
        as task_reader.fetch_kept."""
        await self._catch_up()
        offset = max(offset, self.start)
        found = self._tail.since(offset, bytes_max)
        if not found:  # what a consumer had no permits for comes again
            found = self._read.since(offset, bytes_max)
        if found:
            return found
        try:
            await self._fetch(found, offset, bytes_max, lossy)
        except LOST as error:
            if not found and not lossy:  # a read of several ledgers fails before its first row
                await self._fetch(found, offset, bytes_max, lossy=True)
                found = self._before_gap(found, offset)
            if not found:
                raise error
        except Exception:
            if not found:
                raise
        end = self.held.end_offset
        if lossy and not found and offset < end:
            following = min(end, offset + PLANNED_ROWS_MAX)
            return await self.read(following, lossy=True) or [Stored(following, 0, b"", False)]
        return found

    async def _fetch(self, found: list[Stored], offset: int, bytes_max: int, lossy: bool) -> None:
        size = 0
        for task in await self._planned(offset):
            async with aclosing(fetch_kept(self._client, task, lossy=lossy)) as runs:
                async for run in runs:
                    for fetched in run:
                        batches = self._batches(fetched)
                        found += batches
                        self._read.add(batches)
                        size += sum(len(one.data) for one in batches)
                    if size >= bytes_max:
                        return

    def _before_gap(self, batches: list[Stored], offset: int) -> list[Stored]:
        """Those from the offset on before the first that lost rows are before."""
        intervals = self.held.intervals
        for at, batch in enumerate(batches):
            between = intervals.between(offset, batch.offset) if offset < batch.offset else ()
            if any(one.source is not None for one in between):
                return batches[:at]
            offset = batch.end
        return batches

    async def skips_lost(self) -> bool:
        """Whether the topic's policy, as it is now, has consumers pass over rows that are lost."""
        with suppress(errors.LedgerError, StoreError):
            info = await self._client.topics.find(self._topic.name.full)
            return info is not None and info.policies.on_lost_rows == "skip"
        return False

    def _batches(self, fetched: FetchedEntry) -> list[Stored]:
        """Raises errors.BadEntry, errors.UnsupportedFormat, with the place."""
        try:
            return list(batches_in(fetched))
        except errors.UnsupportedFormat as why:
            place = fetched.entry.header.ledger_id, fetched.entry.header.entry_id
            lo = int(fetched.pieces["offset"][0])
            rows = BadRows(self.number, lo, lo + int(fetched.pieces["take"].sum()), *place)
            BadEntries(self._topic.name.full).meet(rows, why)
            raise

    async def last(self) -> Stored | None:
        """The last batch with a row that is confirmed, None where there is none. Raises as
        `_read_at`."""
        await self._catch_up()
        until = end = self.end
        if self._last is not None and self._last_until == end and not self._is_gone(self._last.end):
            return self._last
        while end > self.start:
            if self._is_gone(end):
                end = self._before_hole(end)
                continue
            found = [one for one in await self._read_at(end - 1) if one.offset < end]
            if found and found[-1].has_rows:
                self._last, self._last_until = found[-1], until
                return self._last
            end = found[-1].offset if found else self._before_hole(end)
        return None

    def _is_gone(self, end: int) -> bool:
        """Whether the message before that offset was trimmed or taken out."""
        return bool(self.removed(end - 1, end))

    def removed(self, lo: int, hi: int) -> list[tuple[int, int]]:
        """What of the offsets [lo, hi) was trimmed or taken out: no consumer gets it."""
        start = self.start
        gone = [(lo, min(hi, start))] if lo < start else []
        with suppress(errors.Unavailable):
            kept = self.held.intervals.between(max(lo, start), hi)
            gone += [(max(lo, one.lo), min(hi, one.hi)) for one in kept if one.source is None]
        return gone

    async def chunk(self, offset: int) -> Stored | None:
        """The chunk of a message at that offset, which is confirmed; None where it is not kept any
        more. Raises as `_read_at`."""
        if offset < self.start:
            return None
        found = await self._read_at(offset, 1)
        return found[0] if found and found[0].offset == offset and not found[0].has_rows else None

    async def _read_at(self, offset: int, bytes_max: int = READ_BYTES) -> list[Stored]:
        """As `read`, of an offset that is confirmed: none only where no batch has it. Raises as
        `read` and `_readable`."""
        found = await self.read(offset, bytes_max)
        if not found:
            await self._readable(offset)
            found = await self.read(offset, bytes_max)
        return found

    def _before_hole(self, end: int) -> int:
        """The end of the last rows that are kept below `end`."""
        stretches = self.held.intervals.between(self.start, min(end, self.held.end_offset))
        ends = [one.hi for one in stretches if one.source is not None and one.hi < end]
        return max(ends, default=self.start)

    async def since(self, ms: int) -> int:
        """The first offset written at or after `ms` by its owner's clock, or, of what Spark wrote,
        committed then; the end if there is none. Raises as seek_target.exactly, and
        errors.Unavailable where a ledger that ended is not sealed."""
        ms = max(0, min(ms, pulsar_batch.TIME_MS_MAX))
        await self._readable(self.end - 1)
        live, (confirmed, last_entry) = self.writer.live, self.writer.confirmed
        if live is not None:
            await self._readable(live.base - 1)
        state = self._state()
        held = state.partitions[self.number]
        read = await self._client.chunks.load(chunks_needed(state, CommittedSince(ms)))
        found, rows = offset_since(held, ms, read), rows_around(held, ms, read)
        if live is not None and found == held.end_offset < confirmed:  # no commit is so late
            rows = LiveRows(live, found, confirmed, last_entry)
        return found if rows is None else await since_in(self._client.ledgers, rows, ms)

    async def _readable(self, offset: int) -> None:
        """Return once the offset is in a commit or in the ledger at hand: for a moment it may be in
        one that has ended, and whose seal comes. Raises errors.Unavailable."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + SEALED_S
        while offset >= self.held.end_offset and not self._is_live(offset):
            if loop.time() > until_s:
                raise errors.Unavailable(
                    f"partition {self.number} of topic {self._topic.name} cannot be read at offset"
                    f" {offset} now: its ledger has ended, and is not sealed yet"
                )
            await asyncio.sleep(LOOK_S)

    def _is_live(self, offset: int) -> bool:
        live = self.writer.live
        return live is not None and live.base <= offset < self.writer.confirmed[0]

    async def _planned(self, offset: int) -> list[ReadTask]:
        """Reads of what is confirmed from the offset on: of commits, or else of the live ledger."""
        state = self._state()
        held = state.partitions[self.number]
        end = min(held.end_offset, offset + PLANNED_ROWS_MAX)
        if offset < end:
            ranges = {self.number: (max(offset, held.start_offset), end)}
            state, tables = await self._client.readable(state, ranges)
            return plan_read(state, ranges, topic=self._topic.name.full, read=tables)
        live, (confirmed, last_entry) = self.writer.live, self.writer.confirmed
        if live is None or not self._is_live(offset):
            return []
        wanted = LiveRows(live, offset, min(confirmed, offset + PLANNED_ROWS_MAX), last_entry)
        return [ReadTask(self._topic.name.full, self._topic.id, (), NO_SEGMENTS, wanted)]


def batches_in(fetched: FetchedEntry) -> Iterator[Stored]:
    """The batches that hold what was asked for of an entry, in order."""
    payload = fetched.entry.payload
    header = decode_header(payload)
    for piece in fetched.pieces:
        _, _, skip, _, offset = piece.tolist()
        base = offset - skip
        if header.batches:
            yield from _as_they_came(memoryview(payload)[header.body_at :], header, base, piece)
        else:
            yield from _of_rows(fetched, header, piece)


def _as_they_came(body: memoryview, header: Header, base: int, piece: np.void) -> Iterator[Stored]:
    lo = int(piece["offset"])
    hi, at = lo + int(piece["take"]), base
    for messages, data in pulsar_batch.unframed(body, header.rows):
        if at + messages > lo and at < hi:
            batched = messages > 1 or _is_batched(data)
            yield Stored(at, messages, bytes(data), batched)
        at += messages


def _is_batched(data: memoryview) -> bool:
    chunk = pulsar_batch.is_earlier_chunk(data) or pulsar_batch.is_last_chunk(data)
    return not chunk and pulsar_batch.parse(data).batched


def _of_rows(fetched: FetchedEntry, header: Header, piece: np.void) -> Iterator[Stored]:
    """The rows that the entry has of the partition in batches of ROWS_MAX from its first row on,
    those batches that have some of the piece; the entry is decoded once."""
    partition, first_row, skip, take, offset = piece.tolist()
    rows = next(share.rows for share in header.shares if share.partition == partition)
    start = skip - skip % ROWS_MAX
    end = min(rows, start + -(-(skip + take - start) // ROWS_MAX) * ROWS_MAX)
    base = offset - skip
    piece_of_batches = (partition, first_row, start, end - start, base + start)
    wanted: Wanted = np.array([piece_of_batches], dtype=WANTED)
    block = FetchedEntry(fetched.entry, wanted).block()
    columns, times = _untyped(block), block.each_ms()
    for at in range(0, end - start, ROWS_MAX):
        some, place = columns.slice(at, ROWS_MAX), base + start + at
        written_ms = times[at : at + ROWS_MAX].tolist()
        for count, data, batched in pulsar_batch.encoded(some, written_ms, place):
            yield Stored(place, count, data, batched)
            place += count


def _untyped(block: Block) -> pa.RecordBatch:
    """The columns of message_batch.TYPES; typed rows' own columns as JSON."""
    rows = block.record_batch
    if not block.typed:
        return rows
    own = [name for name in rows.schema.names if name not in TYPED_NAMES.values()]
    beside = {name: column_of(rows, TYPED_NAMES[name]) for name in (KEY, EVENT_TIME, HEADERS)}
    columns = {**beside, VALUE: shown(rows.select(own))}
    return pa.RecordBatch.from_arrays([columns[name] for name in TYPES], names=list(TYPES))
