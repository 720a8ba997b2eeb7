"""How far live segments go: the confirmed rows of a partition's open end; and where rows are in a
ledger, open or sealed, if only the headers of its entries count them.

Always true: a count has the rows of entries up to a last add confirmed, as that entry's header has
them; the count of a segment never goes back (hazard 33); a CLOSED ledger ends for ever where its
record has its end, whether or not the log has sealed the segment. If a later segment continues in
the same ledger, after rows of others, then a segment ends before the first entry whose own offset
is not the one that it would have here: so an old log never gives an entry a wrong offset. The
counts of followed segments come by the bookies' long poll, and are then read from memory.
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
from spark_ledger.process import LruCache
from spark_ledger.topic.commit.seal import owned_header
from spark_ledger.topic.entry.message_batch import NO_ROWLESS, Rowless, decode_header
from spark_ledger.topic.log.segment_table import NO_SEGMENTS
from spark_ledger.topic.log.segments import LiveSegment
from spark_ledger.topic.log.state import TopicState
from spark_ledger.topic.read.pieces import WANTED, LiveRows, Wanted
from spark_ledger.topic.read.plan import ReadTask

_log = logging.getLogger(__name__)

RETRY_S = 1.0
TAKEN_S = 1.0
"""How long a look waits for entries that bookies took: a writer that lives announces them within
`explicit_lac_s`, a tenth of it."""
POLL_S = 30.0
ENDS_AT_ONCE = 64
STARTS_KEPT = 1024
_RETRIED = (errors.Unavailable, errors.DataUnavailable)


@dataclass(frozen=True, slots=True)
class LiveEnd:
    """The confirmed part of a live segment: entries up to `last_entry`, their rows and bytes, the
    times at which the first and the last of them were stored. `closed`: there will be no more.
    `rowless` are offsets of the segment without a row."""

    last_entry: int = NO_ENTRY
    rows: int = 0
    bytes: int = 0
    closed: bool = False
    first_ms: int = 0
    last_ms: int = 0
    rowless: Rowless = NO_ROWLESS


EMPTY = LiveEnd()
_Opening = tuple[int, int]
"""A ledger, and the commit that opened a live segment in it."""


class LiveEnds:
    """The live ends that one process knows. Any thread may call `known` and `changes`; the rest
    belongs to the loop."""

    def __init__(self, ledgers: LedgerStore) -> None:
        self._ledgers = ledgers
        self._known: dict[_Opening, LiveEnd] = {}
        self._following: dict[_Opening, asyncio.Task[None]] = {}
        self._changes = 0

    @property
    def changes(self) -> int:
        """A number that changes whenever `known` gives more than before."""
        return self._changes

    def known(self, live: LiveSegment) -> LiveEnd:
        """The end of the segment as the bookies last gave it."""
        return self._known.get(_opening(live), EMPTY)

    async def look(self, lives: Iterable[LiveSegment]) -> None:
        """Ask the bookies how far the segments go: up to all that was acknowledged before this
        call, except by a writer that died. Raises DataUnavailable, Unauthorized, RowsLost,
        Unavailable; the end of a segment whose ledger is gone stays as it is."""
        loop, turns = asyncio.get_running_loop(), asyncio.Semaphore(ENDS_AT_ONCE)
        lagging: list[tuple[LiveSegment, AsyncLedgerReader]] = []

        async def ask(live: LiveSegment) -> None:
            async with turns:
                reader = await self._open(live)
                if reader is None:
                    return
                if await reader.refresh_last_add_confirmed() < reader.last_taken:
                    lagging.append((live, reader))
                else:
                    await self._heard(live, reader)

        async def wait(live: LiveSegment, reader: AsyncLedgerReader) -> None:
            async with turns:
                left_s = max(0.0, until_s - loop.time())
                with suppress(errors.DataUnavailable):  # then the end heard before stays
                    await reader.wait_beyond(reader.last_taken - 1, left_s)
                await self._heard(live, reader)

        await asyncio.gather(*map(ask, lives))
        until_s = loop.time() + TAKEN_S
        await asyncio.gather(*(wait(*one) for one in lagging))

    def follow(self, lives: Iterable[LiveSegment]) -> None:
        """Keep the ends of these segments current from now on, and of no others."""
        lives_of = {_opening(live): live for live in lives}
        for opening in [opening for opening in self._following if opening not in lives_of]:
            self._following.pop(opening).cancel()
            self._known.pop(opening, None)
        for opening, live in lives_of.items():
            if opening not in self._following:
                task = asyncio.get_running_loop().create_task(self._follow(live))
                self._following[opening] = task

    async def close(self) -> None:
        await cancel(*self._following.values())
        self._following.clear()

    async def _follow(self, live: LiveSegment) -> None:
        """Follow the segment until it is closed. If its rows are lost, or its ledger is gone or
        refused, look again now and then: a reader of these rows gets the error."""
        while not self.known(live).closed:
            try:
                await self._hear(live)
            except _RETRIED:
                await asyncio.sleep(RETRY_S)
            except errors.LedgerError as error:
                _log.warning("ledger %d is not heard: %s", live.ledger_id, error)
                await asyncio.sleep(POLL_S)
            except Exception:
                _log.exception("ledger %d is not heard: a defect", live.ledger_id)
                await asyncio.sleep(POLL_S)

    async def _hear(self, live: LiveSegment) -> None:
        reader = await self._open(live)
        while reader is not None and not self.known(live).closed:
            await self._heard(live, reader)
            if not self.known(live).closed:
                heard = max(self.known(live).last_entry, live.first_entry - 1)
                await reader.wait_beyond(heard, POLL_S)
        if reader is None:
            await asyncio.sleep(POLL_S)

    async def _open(self, live: LiveSegment) -> AsyncLedgerReader | None:
        """None if the ledger is gone: then it was sealed, and its rows are elsewhere by now."""
        version = live.metadata_version
        try:
            return await self._ledgers.open(live.ledger_id, recover=False, min_version=version)
        except errors.NoSuchLedger:
            return None

    async def _heard(self, live: LiveSegment, reader: AsyncLedgerReader) -> None:
        before = self.known(live)
        closed, last = reader.is_closed, reader.last_add_confirmed
        now = before
        if last > max(before.last_entry, live.first_entry - 1):
            entry, over = await _last_of(reader, live, before, last)
            closed |= over
            if entry is not None:
                now = await _up_to(reader, live, before, entry)
        now = replace(now, closed=closed or before.closed)
        current = self.known(live)
        if now != current and now.last_entry >= current.last_entry:
            self._known[_opening(live)] = now
            self._changes += 1


def _opening(live: LiveSegment) -> _Opening:
    return live.ledger_id, live.opened


async def _last_of(
    reader: AsyncLedgerReader, live: LiveSegment, before: LiveEnd, last: int
) -> tuple[Entry | None, bool]:
    """The last entry of the segment after those of `before`, None without such an entry; and
    whether a later segment follows. It is the confirmed entry `last`, or the last one before
    foreign entries; if a later segment follows, it is found by halving."""
    first = max(before.last_entry + 1, live.first_entry)
    entry = await _owned(reader, live, first, last)
    if entry is None or is_of(live, entry):
        return entry, False
    last_own, last = None, entry.header.entry_id
    while first < last:
        middle = (first + last) // 2
        entry = await _owned(reader, live, first, middle)
        if entry is None or is_of(live, entry):
            last_own, first = entry or last_own, middle + 1
        else:
            last = entry.header.entry_id
    return last_own, True


async def _owned(
    reader: AsyncLedgerReader, live: LiveSegment, first: int, last: int
) -> Entry | None:
    """The last entry of [first, last] that an owner wrote (seal.py); None without such one."""
    async with aclosing(reader.read_back(last, first, known_confirmed=last)) as entries:
        async for _, entry in entries:
            if isinstance(entry, errors.LedgerError):
                raise entry
            with suppress(errors.BadEntry):
                owned_header(live, entry)
                return entry
    return None


def is_of(live: LiveSegment, entry: Entry) -> bool:
    """Whether an owner's entry, at or after the first one of the segment in its ledger, gets its
    own offset if it is counted as an entry of the segment."""
    header = decode_header(entry.payload)
    offset = live.origin + entry.header.cumulative_rows - header.rows
    return not header.at_offset or int(header.index["first_row"][0]) == offset


async def _up_to(
    reader: AsyncLedgerReader, live: LiveSegment, before: LiveEnd, entry: Entry
) -> LiveEnd:
    """The live end with `entry` as its last entry."""
    last, header = entry.header.entry_id, decode_header(entry.payload)
    last_ms = header.written_ms
    first_ms = before.first_ms or last_ms
    if before.last_entry == NO_ENTRY and last > live.first_entry:
        with suppress(errors.LedgerError):  # a reader of that entry gets this error
            first = await reader.read_entry(live.first_entry, known_confirmed=last)
            first_ms = decode_header(first.payload).written_ms
    rows = entry.header.cumulative_rows - live.rows_before
    size = entry.header.cumulative_bytes - live.bytes_before
    return LiveEnd(last, rows, size, False, first_ms, last_ms, header.rowless)


async def ends_of(
    ledgers: LedgerStore, state: TopicState, partitions: Iterable[int] | None = None
) -> dict[int, LiveEnd]:
    """The end of the live segment of each of these partitions (None: of all), as the bookies have
    it now. Raises as `LiveEnds.look`."""
    among = range(len(state.partitions)) if partitions is None else partitions
    held = [state.partitions[number] for number in among]
    lives = {part.number: part.live for part in held if part.live is not None}
    seen = LiveEnds(ledgers)
    await seen.look(lives.values())
    return {number: seen.known(live) for number, live in lives.items()}


def live_task(
    topic: str, state: TopicState, partition: int, lo: int, confirmed: LiveEnd
) -> ReadTask | None:
    """A read of the confirmed rows of the partition's live segment from offset `lo` on; None if
    there are no such rows."""
    held = state.partitions[partition]
    live = held.live
    if live is None or live.base + confirmed.rows <= max(lo, live.base):
        return None
    end = live.base + confirmed.rows
    rows = LiveRows(live, max(lo, live.base), end, confirmed.last_entry, confirmed.rows)
    return ReadTask(topic, state.topic_id, (), NO_SEGMENTS, rows)


EntryStarts = LruCache[tuple[int, int], int]
"""By ledger and row, the entry that begins there, as earlier reads found: a read that continues
where another one ended need not search. The STARTS_KEPT used last are kept."""

_starts: WeakKeyDictionary[LedgerStore, EntryStarts] = WeakKeyDictionary()


def starts_of(ledgers: LedgerStore) -> EntryStarts:
    """The starts that this process keeps for these ledgers."""
    return _starts.setdefault(ledgers, EntryStarts(STARTS_KEPT))


async def first_piece(
    reader: AsyncLedgerReader, live_rows: LiveRows, starts: EntryStarts
) -> tuple[int, int]:
    """The entry that has the first of the rows, and the rows of the segment before that entry.
    Each header counts the rows of the ledger up to its entry: the search takes turns between the
    entry that would have the row if rows were spread evenly, and halving."""
    live = live_rows.live
    row = live_rows.start - live.base
    entry_id = starts.get((reader.ledger_id, live.rows_before + row))
    if entry_id is not None and entry_id <= live_rows.last_entry:
        return entry_id, row
    first, last, before = live.first_entry, live_rows.last_entry, 0
    end = live_rows.rows or live_rows.end - live.base  # the rows up to `last`
    halves = False
    while row > before and first < last:
        share = (row - before) * (last + 1 - first) // max(1, end - before)
        middle = (first + last) // 2 if halves else min(first + share, last)
        entry = await reader.read_entry(middle, known_confirmed=live_rows.last_entry)
        after = entry.header.cumulative_rows - live.rows_before
        begins = await _begins(reader, live_rows, entry)
        if after <= row:
            first, before = middle + 1, after
        elif begins <= row:
            return middle, begins
        else:
            last, end = middle - 1, begins
        halves = not halves
    return first, before


async def _begins(reader: AsyncLedgerReader, live_rows: LiveRows, entry: Entry) -> int:
    """The rows of the segment before the entry; if it is foreign, by the entry in front of it."""
    live, entry_id = live_rows.live, entry.header.entry_id
    try:
        rows = entry.header.cumulative_rows - owned_header(live, entry).rows
    except errors.BadEntry:
        if entry_id == live.first_entry:
            return 0
        before = await reader.read_entry(entry_id - 1, known_confirmed=live_rows.last_entry)
        rows = before.header.cumulative_rows
    return rows - live.rows_before


async def since_in(ledgers: LedgerStore, live_rows: LiveRows, ms: int) -> int:
    """As `first_since`. Raises errors.NoSuchLedger if the ledger is gone."""
    version = live_rows.live.metadata_version
    reader = await ledgers.open(live_rows.live.ledger_id, recover=False, min_version=version)
    return await first_since(reader, within(reader.record, live_rows), ms)


async def first_since(reader: AsyncLedgerReader, live_rows: LiveRows, ms: int) -> int:
    """The offset of the first of the rows that was stored at `ms` or later by its owner's clock;
    the end of the rows if all are older. Found by halving, as the stored times never fall within a
    ledger."""
    first, end, offset = live_rows.live.first_entry, live_rows.last_entry + 1, live_rows.end
    while first < end:
        middle = (first + end) // 2
        entry = await _owned(reader, live_rows.live, first, middle)
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


def lost_of_live(record: LedgerRecord, live_rows: LiveRows) -> errors.RowsLost | None:
    """The error for rows beyond the end of a CLOSED ledger; None if the ledger has them all."""
    last = record.last_entry
    if last is None or last >= live_rows.last_entry:
        return None
    start = max(live_rows.start, live_rows.live.origin + (record.rows or 0))
    if start >= live_rows.end:
        return None
    return errors.RowsLost(
        f"{live_rows.end - start} confirmed rows are gone: offsets {start} to {live_rows.end - 1}"
        f" of partition {live_rows.live.partition} (ledger {live_rows.live.ledger_id} ends at entry"
        f" {last})",
        rows=live_rows.end - start,
        start=start,
        end=live_rows.end,
        last_entry=last,
    )


def within(record: LedgerRecord, live_rows: LiveRows) -> LiveRows:
    """The same rows, with the last entry and row count of the ledger's record if the ledger ended
    before `last_entry`: the entries beyond its end have none of these rows."""
    last = record.last_entry
    if last is None or last >= live_rows.last_entry:
        return live_rows
    return replace(live_rows, last_entry=last, rows=(record.rows or 0) - live_rows.live.rows_before)


def reach_of(live_rows: LiveRows, at: int, before: int) -> int:
    """An estimate of the last entry that has some of the rows, if `before` rows are before entry
    `at` and the others are spread evenly over the entries."""
    left, rows = live_rows.end - live_rows.live.base - before, live_rows.rows - before
    if left >= rows:
        return live_rows.last_entry
    return min(at + left * (live_rows.last_entry + 1 - at) // rows, live_rows.last_entry)


def piece_of(live_rows: LiveRows, header: EntryHeader, before: int) -> Wanted:
    """The piece of the rows that an entry has; `before` rows of the segment come before it."""
    base = live_rows.live.base
    lo = max(live_rows.start - base, before)
    hi = min(live_rows.end - base, header.cumulative_rows - live_rows.live.rows_before)
    piece = (live_rows.live.partition, before, lo - before, hi - lo, base + lo)
    return np.array([piece] if hi > lo else [], dtype=WANTED)
