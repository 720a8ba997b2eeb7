"""How far live segments go: the confirmed rows of a partition's live segment. Also finds the entry
with a row in a ledger, open or sealed, if only the headers of its entries count the rows.

Always true: the count of a segment's rows comes from the header of a confirmed entry, and never
goes back (hazard 33). A CLOSED ledger ends for ever at the end in its record, whether or not the
log has sealed the segment. A later segment of the same ledger may follow, after rows that a commit
added in between. The earlier segment ends before the first entry whose header has another offset
than the segment's count gives: so a reader with an old log never gives an entry a wrong offset. The
counts of followed segments arrive by the bookies' long poll, and callers read them from memory.
"""

import asyncio
import logging
from collections.abc import Iterable
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import numpy as np

from bookie_server.api.entry import NO_ENTRY, Entry, EntryHeader
from spark_ledger import errors
from spark_ledger.async_tasks import cancel
from spark_ledger.ledger.client import LedgerStore
from spark_ledger.ledger.reader import AsyncLedgerReader
from spark_ledger.metadata.ledger_record import LedgerRecord
from spark_ledger.metadata.store_calls import call_each
from spark_ledger.process import LruCache
from spark_ledger.topic.commit.seal import owned_header
from spark_ledger.topic.entry.message_batch import NO_ROWLESS, Rowless, decode_header
from spark_ledger.topic.log.segment_table import NO_SEGMENTS
from spark_ledger.topic.log.segments import LiveSegment
from spark_ledger.topic.log.state import TopicState
from spark_ledger.topic.read.acked import AckedRows
from spark_ledger.topic.read.pieces import PIECE_DTYPE, EntryPieces, LiveRows
from spark_ledger.topic.read.plan import ReadTask

_log = logging.getLogger(__name__)

RETRY_S = 1.0
TAKEN_WAIT_S = 1.0
"""How long `refresh` waits until the entries that bookies have are confirmed: a living writer
announces them within `explicit_lac_s`, a tenth of this time."""
POLL_S = 30.0
ENDS_AT_ONCE = 64
STARTS_KEPT = 1024
_PASSING_ERRORS = (errors.Unavailable, errors.DataUnavailable)


@dataclass(frozen=True, slots=True)
class LiveEnd:
    """The confirmed part of a live segment: the entries up to `last_entry`, their number of rows
    and bytes, and the times at which the first and the last of these entries were stored. A
    `closed` segment gets no further entry. `rowless` are offsets of the segment without a row."""

    last_entry: int = NO_ENTRY
    rows: int = 0
    bytes: int = 0
    closed: bool = False
    first_ms: int = 0
    last_ms: int = 0
    rowless: Rowless = NO_ROWLESS


EMPTY_END = LiveEnd()
_Opening = tuple[int, int]
"""A ledger, and the number of the commit that opened a live segment in this ledger."""


class LiveEnds:
    """The live ends in one process's memory. Any thread may call `end_of` and `changes`; the other
    methods belong to the loop."""

    def __init__(self, ledgers: LedgerStore) -> None:
        self._ledgers = ledgers
        self._ends: dict[_Opening, LiveEnd] = {}
        self._follow_tasks: dict[_Opening, asyncio.Task[None]] = {}
        self._changes = 0

    @property
    def changes(self) -> int:
        """A number that changes whenever an end moves."""
        return self._changes

    def end_of(self, live: LiveSegment) -> LiveEnd:
        """The newest end of the segment that a bookie gave; EMPTY_END if no bookie has given an
        end."""
        return self._ends.get(_opening(live), EMPTY_END)

    async def refresh(self, lives: Iterable[LiveSegment]) -> None:
        """Ask the bookies how far the segments go. Afterwards the ends contain every entry that was
        acknowledged before this call, unless the entry's writer died. If a segment's ledger is
        gone, its end does not change. Raises DataUnavailable, Unauthorized, RowsLost, Unavailable.
        """
        loop, read_slots = asyncio.get_running_loop(), asyncio.Semaphore(ENDS_AT_ONCE)
        lagging_readers: list[tuple[LiveSegment, AsyncLedgerReader]] = []

        async def ask(live: LiveSegment) -> None:
            async with read_slots:
                reader = await self._open(live)
                if reader is None:
                    return
                if await reader.refresh_last_add_confirmed() < reader.last_taken:
                    lagging_readers.append((live, reader))
                else:
                    await self._update(live, reader)

        async def wait(live: LiveSegment, reader: AsyncLedgerReader) -> None:
            async with read_slots:
                left_s = max(0.0, until_s - loop.time())
                with suppress(errors.DataUnavailable):  # the end then stays at the earlier entry
                    await reader.wait_beyond(reader.last_taken - 1, left_s)
                await self._update(live, reader)

        await asyncio.gather(*map(ask, lives))
        until_s = loop.time() + TAKEN_WAIT_S
        await asyncio.gather(*(wait(live, reader) for live, reader in lagging_readers))

    def follow(self, lives: Iterable[LiveSegment]) -> None:
        """From now on keep the ends of these segments current, and of no others."""
        live_by_opening = {_opening(live): live for live in lives}
        for opening in [
            opening for opening in self._follow_tasks if opening not in live_by_opening
        ]:
            self._follow_tasks.pop(opening).cancel()
            self._ends.pop(opening, None)
        for opening, live in live_by_opening.items():
            if opening not in self._follow_tasks:
                task = asyncio.get_running_loop().create_task(self._follow(live))
                self._follow_tasks[opening] = task

    async def close(self) -> None:
        await cancel(*self._follow_tasks.values())
        self._follow_tasks.clear()

    async def _follow(self, live: LiveSegment) -> None:
        """Follow the segment until it is closed. If its rows are lost, its ledger is gone or a
        bookie refuses, try again every POLL_S; a reader of these rows gets the error."""
        while not self.end_of(live).closed:
            try:
                await self._follow_until_closed(live)
            except _PASSING_ERRORS:
                await asyncio.sleep(RETRY_S)
            except errors.LedgerError as error:
                _log.warning("ledger %d is not followed: %s", live.ledger_id, error)
                await asyncio.sleep(POLL_S)
            except Exception:
                _log.exception("ledger %d is not followed: a defect", live.ledger_id)
                await asyncio.sleep(POLL_S)

    async def _follow_until_closed(self, live: LiveSegment) -> None:
        reader = await self._open(live)
        while reader is not None and not self.end_of(live).closed:
            await self._update(live, reader)
            if not self.end_of(live).closed:
                last_entry = max(self.end_of(live).last_entry, live.first_entry - 1)
                await reader.wait_beyond(last_entry, POLL_S)
        if reader is None:
            await asyncio.sleep(POLL_S)

    async def _open(self, live: LiveSegment) -> AsyncLedgerReader | None:
        """A reader of the segment's ledger. None if the ledger is gone: the segment was sealed, and
        its rows were merged or removed."""
        version = live.metadata_version
        try:
            return await self._ledgers.open(live.ledger_id, recover=False, min_version=version)
        except errors.NoSuchLedger:
            return None

    async def _update(self, live: LiveSegment, reader: AsyncLedgerReader) -> None:
        before = self.end_of(live)
        closed, last = reader.is_closed, reader.last_add_confirmed
        end = before
        if last > max(before.last_entry, live.first_entry - 1):
            entry, is_continued = await _last_entry_of(reader, live, before, last)
            closed |= is_continued
            if entry is not None:
                end = await _end_at(reader, live, before, entry)
        end = replace(end, closed=closed or before.closed)
        current = self.end_of(live)
        if end != current and end.last_entry >= current.last_entry:
            self._ends[_opening(live)] = end
            self._changes += 1


def _opening(live: LiveSegment) -> _Opening:
    return live.ledger_id, live.opened


async def _last_entry_of(
    reader: AsyncLedgerReader, live: LiveSegment, before: LiveEnd, last: int
) -> tuple[Entry | None, bool]:
    """The last entry of the segment after the end `before` and up to the confirmed entry `last`,
    without foreign entries (None: there is no such entry); and whether a later segment follows in
    the ledger. If a later segment follows, the entry is found by binary search."""
    first = max(before.last_entry + 1, live.first_entry)
    entry = await _last_owned_entry(reader, live, first, last)
    if entry is None or _is_in_segment(live, entry):
        return entry, False
    last_in_segment, last = None, entry.header.entry_id
    while first < last:
        middle = (first + last) // 2
        entry = await _last_owned_entry(reader, live, first, middle)
        if entry is None or _is_in_segment(live, entry):
            last_in_segment, first = entry or last_in_segment, middle + 1
        else:
            last = entry.header.entry_id
    return last_in_segment, True


async def _last_owned_entry(
    reader: AsyncLedgerReader, live: LiveSegment, first: int, last: int
) -> Entry | None:
    """The last entry in [first, last] that an owner wrote (seal.py); None without an entry."""
    async with aclosing(reader.read_back(last, first, known_confirmed=last)) as entries:
        async for _, entry in entries:
            if isinstance(entry, errors.LedgerError):
                raise entry
            with suppress(errors.BadEntry):
                owned_header(live, entry)
                return entry
    return None


def _is_in_segment(live: LiveSegment, entry: Entry) -> bool:
    """Whether an owner's entry belongs to the segment: its header has the offset that the segment's
    count of rows gives."""
    header = decode_header(entry.payload)
    offset = live.origin + entry.header.cumulative_rows - header.rows
    return not header.at_offset or int(header.index["first_row"][0]) == offset


async def _end_at(
    reader: AsyncLedgerReader, live: LiveSegment, before: LiveEnd, entry: Entry
) -> LiveEnd:
    """The live end with `entry` as its last entry."""
    last, header = entry.header.entry_id, decode_header(entry.payload)
    last_ms = header.written_ms
    first_ms = before.first_ms or last_ms
    if before.last_entry == NO_ENTRY and last > live.first_entry:
        with suppress(errors.LedgerError):  # a reader of the first entry gets this error
            first_entry = await reader.read_entry(live.first_entry, known_confirmed=last)
            first_ms = decode_header(first_entry.payload).written_ms
    rows = entry.header.cumulative_rows - live.rows_before
    size = entry.header.cumulative_bytes - live.bytes_before
    return LiveEnd(last, rows, size, False, first_ms, last_ms, header.rowless)


async def ends_of(
    ledgers: LedgerStore,
    state: TopicState,
    partitions: Iterable[int] | None = None,
    unreadable: dict[int, errors.LedgerError] | None = None,
) -> dict[int, LiveEnd]:
    """By partition the end of its live segment, read from the bookies. If `partitions` is None, the
    ends of all partitions. If an end cannot be read, the error goes into `unreadable`, and the
    other ends are returned; without `unreadable` it raises as `LiveEnds.refresh`."""
    numbers = range(len(state.partitions)) if partitions is None else partitions
    chosen_partitions = [state.partitions[number] for number in numbers]
    lives = {
        partition.number: partition.live
        for partition in chosen_partitions
        if partition.live is not None
    }
    live_ends, failed = LiveEnds(ledgers), {} if unreadable is None else unreadable

    async def refresh(number: int) -> None:
        try:
            await live_ends.refresh([lives[number]])
        except errors.LedgerError as error:
            failed[number] = error

    if unreadable is None:
        await live_ends.refresh(lives.values())
    else:
        await call_each(refresh, lives, ENDS_AT_ONCE)
    return {
        number: live_ends.end_of(live) for number, live in lives.items() if number not in failed
    }


def live_task(
    topic: str, state: TopicState, partition: int, lo: int, confirmed: LiveEnd
) -> ReadTask | None:
    """A read of the confirmed rows of the partition's live segment from offset `lo` on; None if
    there are no such rows."""
    live = state.partitions[partition].live
    if live is None or live.base + confirmed.rows <= max(lo, live.base):
        return None
    end = live.base + confirmed.rows
    rows = LiveRows(live, max(lo, live.base), end, confirmed.last_entry, confirmed.rows)
    return ReadTask(topic, state.topic_id, (), NO_SEGMENTS, rows)


EntryStarts = LruCache[tuple[int, int], int]
"""By ledger and row, the entry that begins at this row. Earlier reads put entries here, so that a
read that continues where another read ended need not search. The STARTS_KEPT entries used last are
kept."""

_starts: WeakKeyDictionary[LedgerStore, EntryStarts] = WeakKeyDictionary()


def starts_of(ledgers: LedgerStore) -> EntryStarts:
    """The entry starts that this process keeps for these ledgers."""
    return _starts.setdefault(ledgers, EntryStarts(STARTS_KEPT))


async def first_piece(
    reader: AsyncLedgerReader, live_rows: LiveRows, starts: EntryStarts
) -> tuple[int, int]:
    """The entry with the first of the rows, and the number of the segment's rows before this entry.
    Each header counts the rows of the ledger up to its entry. The search alternates between the
    entry that would have the row if rows were spread evenly, and the middle entry."""
    live = live_rows.live
    row = live_rows.start - live.base
    entry_id = starts.get((reader.ledger_id, live.rows_before + row))
    if entry_id is not None and entry_id <= live_rows.last_entry:
        return entry_id, row
    first, last, before = live.first_entry, live_rows.last_entry, 0
    end = live_rows.rows or live_rows.end - live.base  # the rows up to `last`
    is_halving = False
    while row > before and first < last:
        share = (row - before) * (last + 1 - first) // max(1, end - before)
        middle = (first + last) // 2 if is_halving else min(first + share, last)
        entry = await reader.read_entry(middle, known_confirmed=live_rows.last_entry)
        after = entry.header.cumulative_rows - live.rows_before
        begin = await _rows_before(reader, live_rows, entry)
        if after <= row:
            first, before = middle + 1, after
        elif begin <= row:
            return middle, begin
        else:
            last, end = middle - 1, begin
        is_halving = not is_halving
    return first, before


async def _rows_before(reader: AsyncLedgerReader, live_rows: LiveRows, entry: Entry) -> int:
    """The number of the segment's rows before the entry; for a foreign entry it is in the header of
    the entry before."""
    live, entry_id = live_rows.live, entry.header.entry_id
    try:
        rows = entry.header.cumulative_rows - owned_header(live, entry).rows
    except errors.BadEntry:
        if entry_id == live.first_entry:
            return 0
        before = await reader.read_entry(entry_id - 1, known_confirmed=live_rows.last_entry)
        rows = before.header.cumulative_rows
    return rows - live.rows_before


async def first_stored_since(ledgers: LedgerStore, live_rows: LiveRows, ms: int) -> int:
    """As `find_stored_since`, with a reader of the ledger. Raises errors.NoSuchLedger if the ledger
    is gone."""
    version = live_rows.live.metadata_version
    reader = await ledgers.open(live_rows.live.ledger_id, recover=False, min_version=version)
    return await find_stored_since(reader, clip_to_ledger(reader.record, live_rows), ms)


async def find_stored_since(reader: AsyncLedgerReader, live_rows: LiveRows, ms: int) -> int:
    """The offset of the first row that was stored at `ms` or later by its owner's clock; the end of
    the rows if all rows are older. A binary search: within a ledger the stored times never fall."""
    first, end, offset = live_rows.live.first_entry, live_rows.last_entry + 1, live_rows.end
    while first < end:
        middle = (first + end) // 2
        entry = await _last_owned_entry(reader, live_rows.live, first, middle)
        if entry is None:
            first = middle + 1
            continue
        header = decode_header(entry.payload)
        if header.written_ms < ms:
            first = middle + 1
        else:
            end = entry.header.entry_id
            offset = live_rows.live.origin + entry.header.cumulative_rows - header.rows
    return min(max(offset, live_rows.start), live_rows.end)


def live_rows_lost(
    record: LedgerRecord, live_rows: LiveRows, acked: AckedRows
) -> errors.RowsLost | None:
    """The error for rows beyond the end of a CLOSED ledger; None if the ledger has all the rows
    that are not acknowledged."""
    last = record.last_entry
    if last is None or last >= live_rows.last_entry:
        return None
    start = max(live_rows.start, live_rows.live.origin + (record.rows or 0))
    rows = acked.unacked_count(live_rows.live.partition, start, live_rows.end)
    if not rows:
        return None
    return errors.RowsLost(
        f"{rows} confirmed rows are gone: offsets {start} to {live_rows.end - 1}"
        f" of partition {live_rows.live.partition} (ledger {live_rows.live.ledger_id} ends at entry"
        f" {last})",
        rows=rows,
        start=start,
        end=live_rows.end,
        last_entry=last,
    )


def clip_to_ledger(record: LedgerRecord, live_rows: LiveRows) -> LiveRows:
    """The same rows. If the ledger ended before `last_entry`, the last entry and the row count are
    those of the ledger's record: the missing entries held no row of `live_rows`."""
    last = record.last_entry
    if last is None or last >= live_rows.last_entry:
        return live_rows
    return replace(live_rows, last_entry=last, rows=(record.rows or 0) - live_rows.live.rows_before)


def estimate_last_entry(live_rows: LiveRows, at: int, before: int) -> int:
    """An estimate of the last entry that has some of the rows. `before` rows precede entry `at`;
    the estimate spreads the other rows evenly over the entries from `at` on."""
    rows_left, later_rows = live_rows.end - live_rows.live.base - before, live_rows.rows - before
    if rows_left >= later_rows:
        return live_rows.last_entry
    return min(at + rows_left * (live_rows.last_entry + 1 - at) // later_rows, live_rows.last_entry)


def piece_of(live_rows: LiveRows, header: EntryHeader, before: int) -> EntryPieces:
    """The piece of the rows that an entry has; `before` rows of the segment precede the entry."""
    base = live_rows.live.base
    lo = max(live_rows.start - base, before)
    hi = min(live_rows.end - base, header.cumulative_rows - live_rows.live.rows_before)
    piece = (live_rows.live.partition, before, lo - before, hi - lo, base + lo)
    return np.array([piece] if hi > lo else [], dtype=PIECE_DTYPE)
