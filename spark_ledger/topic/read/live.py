"""How far live segments go: the confirmed rows of a partition's open end; and where rows are in a
ledger whose entries' headers alone count them, open or sealed.

Always true: rows counted are those of entries up to a last add confirmed, whose header has the
rows up to it; the count of a segment never goes back (hazard 33); a ledger that is CLOSED ends for
ever where its record says, whether the log says sealed or not. A segment whose ledger goes on in a
later one, after rows of others, ends before the first entry that says it is at another offset than
it would have here: so a log that is old never gives an entry a wrong offset. What is followed is
told by the bookies' long poll and told from memory.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import numpy as np

from bookie_server.api.entry import NO_ENTRY, Entry, EntryHeader
from spark_ledger import errors
from spark_ledger.ledger.client import LedgerStore
from spark_ledger.ledger.reader import AsyncLedgerReader
from spark_ledger.metadata.ledger_record import LedgerRecord
from spark_ledger.topic.commit.foreign import owned_header
from spark_ledger.topic.entry.message_batch import NONE, Rowless, decode_header
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
_PASSING = (errors.Unavailable, errors.DataUnavailable)


@dataclass(frozen=True, slots=True)
class LiveEnd:
    """What is confirmed of a live segment: entries up to `last_entry`, so many rows and bytes.
    `first_ms` and `last_ms` are when the first and the last of them were stored. `closed`: there
    will be no more. `rowless` are offsets of the segment without a row."""

    last_entry: int = NO_ENTRY
    rows: int = 0
    bytes: int = 0
    closed: bool = False
    first_ms: int = 0
    last_ms: int = 0
    rowless: Rowless = NONE


EMPTY = LiveEnd()
_Opening = tuple[int, int]
"""A ledger, and the commit that opened a live segment in it."""


class LiveEnds:
    """Of one process. `known` and `changes` may be read from any thread; the rest is on the
    loop."""

    def __init__(self, ledgers: LedgerStore) -> None:
        self._ledgers = ledgers
        self._known: dict[_Opening, LiveEnd] = {}
        self._following: dict[_Opening, asyncio.Task[None]] = {}
        self._changes = 0

    @property
    def changes(self) -> int:
        """Another number whenever `known` says more than before."""
        return self._changes

    def known(self, live: LiveSegment) -> LiveEnd:
        """As far as it was heard."""
        return self._known.get(_opening(live), EMPTY)

    async def look(self, lives: Iterable[LiveSegment]) -> None:
        """Ask the bookies how far the segments go: all that was acknowledged before this call, but
        for that of a writer that died. Raises DataUnavailable, Unauthorized, RowsLost, Unavailable;
        a ledger that is gone keeps what is known of it."""
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
                with suppress(errors.DataUnavailable):  # then what was heard before stands
                    await reader.wait_beyond(reader.last_taken - 1, left_s)
                await self._heard(live, reader)

        await asyncio.gather(*map(ask, lives))
        until_s = loop.time() + TAKEN_S
        await asyncio.gather(*(wait(*one) for one in lagging))

    def follow(self, lives: Iterable[LiveSegment]) -> None:
        """Keep what is known of these segments current from now on, and of no others."""
        wanted = {_opening(live): live for live in lives}
        for opening in [one for one in self._following if one not in wanted]:
            self._following.pop(opening).cancel()
            self._known.pop(opening, None)
        for opening, live in wanted.items():
            if opening not in self._following:
                task = asyncio.get_running_loop().create_task(self._follow(live))
                self._following[opening] = task

    async def close(self) -> None:
        for task in self._following.values():
            task.cancel()
        await asyncio.gather(*self._following.values(), return_exceptions=True)
        self._following.clear()

    async def _follow(self, live: LiveSegment) -> None:
        """Until it is closed. What is lost, gone or refused is looked at again now and then:
        a reader of these rows gets an error."""
        while not self.known(live).closed:
            try:
                await self._hear(live)
            except _PASSING:
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
        """None where the ledger is gone: it was sealed, and its rows are elsewhere by now."""
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
    """The last entry of the segment after those that are known, `last` mostly, which is confirmed,
    or the one in front of foreign ones; None: there is none. And whether a later segment follows:
    then it is found by halving."""
    first = max(before.last_entry + 1, live.first_entry)
    entry = await _owned(reader, live, first, last)
    if entry is None or is_of(live, entry):
        return entry, False
    found, last = None, entry.header.entry_id
    while first < last:
        middle = (first + last) // 2
        entry = await _owned(reader, live, first, middle)
        if entry is None or is_of(live, entry):
            found, first = entry or found, middle + 1
        else:
            last = entry.header.entry_id
    return found, True


async def _owned(
    reader: AsyncLedgerReader, live: LiveSegment, first: int, last: int
) -> Entry | None:
    """The last entry of [first, last] that an owner wrote (foreign.py)."""
    async with aclosing(reader.read_back(last, first, known_confirmed=last)) as entries:
        async for _, entry in entries:
            if isinstance(entry, errors.LedgerError):
                raise entry
            with suppress(errors.BadEntry):
                owned_header(live, entry)
                return entry
    return None


def is_of(live: LiveSegment, entry: Entry) -> bool:
    """Whether an owner's entry, of the segment's ledger and not before it, is where it says it is
    if it is counted as the segment's."""
    header = decode_header(entry.payload)
    offset = live.origin + entry.header.cumulative_rows - header.rows
    return not header.at_offset or int(header.index["first_row"][0]) == offset


async def _up_to(
    reader: AsyncLedgerReader, live: LiveSegment, before: LiveEnd, entry: Entry
) -> LiveEnd:
    """What is confirmed with that entry."""
    last, said = entry.header.entry_id, decode_header(entry.payload)
    last_ms = said.written_ms
    first_ms = before.first_ms or last_ms
    if before.last_entry == NO_ENTRY and last > live.first_entry:
        with suppress(errors.LedgerError):  # who reads that entry is told what is wrong
            first = await reader.read_entry(live.first_entry, known_confirmed=last)
            first_ms = decode_header(first.payload).written_ms
    rows = entry.header.cumulative_rows - live.rows_before
    size = entry.header.cumulative_bytes - live.bytes_before
    return LiveEnd(last, rows, size, False, first_ms, last_ms, said.rowless)


async def ends_of(ledgers: LedgerStore, state: TopicState) -> dict[int, LiveEnd]:
    """What is confirmed of each partition's live segment, as bookies tell now. Raises as
    `LiveEnds.look`."""
    lives = {held.number: held.live for held in state.partitions if held.live is not None}
    seen = LiveEnds(ledgers)
    await seen.look(lives.values())
    return {number: seen.known(live) for number, live in lives.items()}


def live_task(
    topic: str, state: TopicState, partition: int, lo: int, known: LiveEnd
) -> ReadTask | None:
    """A read of what is known to be confirmed of the partition's live segment from the offset on;
    None where that is nothing."""
    held = state.partitions[partition]
    live = held.live
    if live is None or live.base + known.rows <= max(lo, live.base):
        return None
    end = live.base + known.rows
    wanted = LiveRows(live, max(lo, live.base), end, known.last_entry, known.rows)
    return ReadTask(topic, state.topic_id, (), NO_SEGMENTS, wanted)


class Starts:
    """Which entries begin at which rows of their ledgers, as reads found out: whoever reads on from
    where a read ended need not look for it. STARTS_KEPT of them, those used last."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[int, int], int] = OrderedDict()

    def note(self, ledger_id: int, row: int, entry_id: int) -> None:
        self._kept[ledger_id, row] = entry_id
        self._kept.move_to_end((ledger_id, row))
        if len(self._kept) > STARTS_KEPT:
            self._kept.popitem(last=False)

    def at(self, ledger_id: int, row: int) -> int | None:
        return self._kept.get((ledger_id, row))


_starts: WeakKeyDictionary[LedgerStore, Starts] = WeakKeyDictionary()


def starts_of(ledgers: LedgerStore) -> Starts:
    """What this process knows of them."""
    return _starts.setdefault(ledgers, Starts())


async def first_piece(
    reader: AsyncLedgerReader, wanted: LiveRows, starts: Starts
) -> tuple[int, int]:
    """The entry that has the first row wanted, and the rows of the segment before that entry, as
    each header counts the rows of the ledger up to it: looked for where it is if rows are spread
    evenly, and by halving in turns."""
    live = wanted.live
    row = wanted.start - live.base
    known = starts.at(reader.ledger_id, live.rows_before + row)
    if known is not None and known <= wanted.last_entry:
        return known, row
    first, last, before = live.first_entry, wanted.last_entry, 0
    end = wanted.rows or wanted.end - live.base  # the rows up to `last`
    halves = False
    while row > before and first < last:
        share = (row - before) * (last + 1 - first) // max(1, end - before)
        middle = (first + last) // 2 if halves else min(first + share, last)
        entry = await reader.read_entry(middle, known_confirmed=wanted.last_entry)
        after = entry.header.cumulative_rows - live.rows_before
        begins = await _begins(reader, wanted, entry)
        if after <= row:
            first, before = middle + 1, after
        elif begins <= row:
            return middle, begins
        else:
            last, end = middle - 1, begins
        halves = not halves
    return first, before


async def _begins(reader: AsyncLedgerReader, wanted: LiveRows, entry: Entry) -> int:
    """The rows of the segment before the entry: after the one before it, where it is foreign."""
    live, entry_id = wanted.live, entry.header.entry_id
    try:
        rows = entry.header.cumulative_rows - owned_header(live, entry).rows
    except errors.BadEntry:
        if entry_id == live.first_entry:
            return 0
        before = await reader.read_entry(entry_id - 1, known_confirmed=wanted.last_entry)
        rows = before.header.cumulative_rows
    return rows - live.rows_before


async def since_in(ledgers: LedgerStore, wanted: LiveRows, ms: int) -> int:
    """As `first_since`. Raises errors.NoSuchLedger where the ledger is gone."""
    version = wanted.live.metadata_version
    reader = await ledgers.open(wanted.live.ledger_id, recover=False, min_version=version)
    return await first_since(reader, within(reader.record, wanted), ms)


async def first_since(reader: AsyncLedgerReader, wanted: LiveRows, ms: int) -> int:
    """The offset of the first row wanted that was stored at `ms` or later by its owner's clock,
    which never falls within a ledger; where wanted rows end if none was. Found by halving."""
    first, end, found = wanted.live.first_entry, wanted.last_entry + 1, wanted.end
    while first < end:
        middle = (first + end) // 2
        entry = await _owned(reader, wanted.live, first, middle)
        if entry is None:
            first = middle + 1
            continue
        header = decode_header(entry.payload)
        if header.written_ms < ms:
            first = middle + 1
        else:
            end = entry.header.entry_id
            found = wanted.live.origin + entry.header.cumulative_rows - header.rows
    return min(max(found, wanted.start), wanted.end)


def lost_of_live(record: LedgerRecord, wanted: LiveRows) -> errors.RowsLost | None:
    """What is wanted beyond the end of a ledger that was closed before it; None if it has all."""
    last = record.last_entry
    if last is None or last >= wanted.last_entry:
        return None
    start = max(wanted.start, wanted.live.origin + (record.rows or 0))
    if start >= wanted.end:
        return None
    return errors.RowsLost(
        f"{wanted.end - start} confirmed rows are gone: offsets {start} to {wanted.end - 1} of"
        f" partition {wanted.live.partition} (ledger {wanted.live.ledger_id} ends at entry {last})",
        rows=wanted.end - start,
        start=start,
        end=wanted.end,
        last_entry=last,
    )


def within(record: LedgerRecord, wanted: LiveRows) -> LiveRows:
    """The same, of a ledger that may have ended before entries that hold none of these rows."""
    last = record.last_entry
    if last is None or last >= wanted.last_entry:
        return wanted
    return replace(wanted, last_entry=last, rows=(record.rows or 0) - wanted.live.rows_before)


def reach_of(wanted: LiveRows, at: int, before: int) -> int:
    """The last entry, about, that has rows wanted, if `before` rows are before entry `at` and the
    others are spread evenly over the entries; all are up to the one that is returned, or more."""
    left, rows = wanted.end - wanted.live.base - before, wanted.rows - before
    if left >= rows:
        return wanted.last_entry
    return min(at + left * (wanted.last_entry + 1 - at) // rows, wanted.last_entry)


def piece_of(wanted: LiveRows, header: EntryHeader, before: int) -> Wanted:
    """What an entry has of the rows wanted; `before` rows of the segment come before it."""
    base = wanted.live.base
    lo = max(wanted.start - base, before)
    hi = min(wanted.end - base, header.cumulative_rows - wanted.live.rows_before)
    piece = (wanted.live.partition, before, lo - before, hi - lo, base + lo)
    return np.array([piece] if hi > lo else [], dtype=WANTED)
