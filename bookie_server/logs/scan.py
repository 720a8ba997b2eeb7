"""The contents of an entry log, for callers that cannot rely on the index. `scan` reads all records
of a log. `LogMap` has each ledger's share of a log (bytes and entries): from the log's footer, or
from a map file if the log has no footer and was scanned before.

Always true of a scan:
- every record is checked before the caller gets it (its header's CRC, log id and position, the
  entry's digests and identity);
- damage is reported with its position. It never ends the scan: the scan goes on at the next valid
  record header;
- at most one chunk, or one larger record, is in memory; other tasks run between two chunks.

Always true of a map:
- a map is used only if its CRC matches and it has its log's id; if a map cannot be read, the log's
  contents count as unknown, not as empty;
- a scan for a map counts only records that the index points to, not copies that a crash left;
- a map takes 24 bytes of memory for each ledger.
"""

import contextlib
import logging
from array import array
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from bookie_server.api.entry import Buffer, fault
from bookie_server.disk.interface import Disk, File, NoSuchFile, read_file, replace_file
from bookie_server.lanes import Pace
from bookie_server.logs.entry_log import (
    BLOCK_BYTES,
    FOOTER_BYTES,
    LOG_HEADER_BYTES,
    MAP,
    MAP_TEMPORARY,
    RECORD_HEADER_BYTES,
    RECORD_MAGIC,
    BadEntryLog,
    EntryLogs,
    LedgerShare,
    decode_footer,
    decode_log_header,
    decode_record_header,
    encode_footer,
    map_path,
    map_start,
    write_start,
)
from bookie_server.logs.index import EntryIndex, Location

CHUNK_BYTES = 1 << 20
RECORDS_PER_CHUNK_MAX = 512  # their checks take about 5 ms
_log = logging.getLogger(__name__)


class Readable(Protocol):
    """A file (disk.File), or a reader that skips its bad blocks."""

    async def read(self, position: int, length: int) -> bytes: ...


class LogRecord(NamedTuple):
    """A whole record. `entry` is a view into the chunk's bytes. `write_start`: see entry_log."""

    location: Location
    entry: memoryview
    write_start: int = 0


class Damage(NamedTuple):
    """Bytes from `start` up to `end` that are no valid records. If a valid record header is there
    and only the entry is damaged, `location` and `write_start` (see entry_log) are from the header.
    """

    start: int
    end: int
    why: str
    location: Location | None = None
    write_start: int = 0


class Scanned(NamedTuple):
    """The contents of `size` bytes of a log: records and damage, each in order of position."""

    records: list[LogRecord]
    damage: list[Damage]
    size: int


class ParseResult(NamedTuple):
    """The result of `parse`. The caller goes on at `position`, with `bytes_min` bytes or more."""

    records: list[LogRecord]
    damage: list[Damage]
    position: int
    bytes_min: int


async def scan(file: Readable, log_id: int, end: int, start: int = 0) -> AsyncIterator[Scanned]:
    """The records of the log before `end`: all of them, or those from `start` on, where a record
    begins. Raises DiskFailed."""
    position, next_bytes = start or LOG_HEADER_BYTES, CHUNK_BYTES
    if not start and (damage := await _bad_header(file, log_id)):
        yield Scanned([], [damage], LOG_HEADER_BYTES)
    while position < end:
        length = min(next_bytes, end - position)
        data = await file.read(position, length)
        if len(data) < length:
            missing = Damage(position + len(data), end, "the file ends too early")
            yield Scanned([], [missing], 0)
            end = missing.start
        result = parse(data, position, end, log_id)
        yield Scanned(result.records, result.damage, result.position - position)
        position, next_bytes = result.position, max(CHUNK_BYTES, result.bytes_min)


def parse(data: Buffer, base: int, end: int, log_id: int) -> ParseResult:
    """The records in `data`, the bytes from `base` on of a log whose records end before `end`."""
    view = memoryview(data)
    records: list[LogRecord] = []
    damage: list[Damage] = []
    at, limit = 0, len(view)
    is_last = base + limit >= end
    while at < limit and len(records) < RECORDS_PER_CHUNK_MAX:
        if (filler_end := _filler_end(view, at, base)) > at:
            at = filler_end
            continue
        if limit - at < RECORD_HEADER_BYTES and not is_last:
            break
        location = _location_at(view, at, base, log_id)
        if location is None:
            next_at = _next_record(view, at + 1, base, log_id, is_last)
            damage.append(Damage(base + at, base + next_at, "no record begins here"))
            at = next_at
            continue
        stop = at + RECORD_HEADER_BYTES + location.entry_bytes
        write_begin = write_start(view[at : at + RECORD_HEADER_BYTES], base + at)
        if base + stop > end:
            why = "the log ends inside a record"
            damage.append(Damage(base + at, end, why, location, write_begin))
            at = limit
        elif stop > limit:
            if is_last:
                why = "the file ends inside a record"
                damage.append(Damage(base + at, end, why, location, write_begin))
                at = limit
                continue
            return ParseResult(records, damage, base + at, stop - at)
        elif why := fault(entry := view[at + RECORD_HEADER_BYTES : stop], *location[:2]):
            damage.append(Damage(base + at, base + stop, why, location, write_begin))
            at = stop
        else:
            records.append(LogRecord(location, entry, write_begin))
            at = stop
    return ParseResult(records, damage, base + at, RECORD_HEADER_BYTES)


async def _bad_header(file: Readable, log_id: int) -> Damage | None:
    try:
        decode_log_header(await file.read(0, LOG_HEADER_BYTES), log_id)
    except BadEntryLog as error:
        return Damage(0, LOG_HEADER_BYTES, str(error))
    return None


def _filler_end(view: memoryview, at: int, base: int) -> int:
    """The end of the zeros from `at` to the end of a block; `at` if other bytes are there."""
    if view[at]:
        return at
    stop = min(len(view), at + BLOCK_BYTES - (base + at) % BLOCK_BYTES)
    gap = bytes(view[at:stop])  # a view would be compared item by item
    return stop if gap == bytes(len(gap)) else at


def _location_at(view: memoryview, at: int, base: int, log_id: int) -> Location | None:
    """The location of the record at `at`, if its header has that log id and position."""
    try:
        location = decode_record_header(view[at : at + RECORD_HEADER_BYTES])
    except BadEntryLog:
        return None
    is_own = (location.log_id, location.position) == (log_id, base + at)
    return location if is_own else None


def _next_record(view: memoryview, at: int, base: int, log_id: int, is_last: bool) -> int:
    """Where the next record begins, at or after `at`. If no record begins in these bytes: where the
    search has to go on."""
    data = bytes(view)
    while (at := data.find(RECORD_MAGIC, at)) >= 0:
        if len(view) - at < RECORD_HEADER_BYTES and not is_last:
            return at
        if _location_at(view, at, base, log_id) is not None:
            return at
        at += 1
    return len(view) if is_last else max(1, len(view) - len(RECORD_MAGIC) + 1)


_EVERYTHING = 1 << 62
_ID_MAX = 2**63 - 1
_PAGE_BYTES = 4 << 20
_LOOK_UPS_SPREAD_MAX = 4  # one range look-up if it reads at most 4 times the requested entries


class LogMap:
    """The map of one log. `records_end`: where its records end. `is_whole`: no record that the
    index points to is damaged."""

    __slots__ = ("_shares", "file_bytes", "has_footer", "is_whole", "log_id", "records_end")

    def __init__(
        self,
        log_id: int,
        file_bytes: int,
        records_end: int,
        shares: Mapping[int, LedgerShare],
        *,
        has_footer: bool = True,
        is_whole: bool = True,
    ) -> None:
        self.log_id = log_id
        self.file_bytes = file_bytes
        self.records_end = records_end
        self.has_footer = has_footer
        self.is_whole = is_whole
        self._shares = array("q")
        for ledger_id in sorted(shares):
            self._shares.extend((ledger_id, *shares[ledger_id]))

    @property
    def ledger_ids(self) -> Sequence[int]:
        return self._shares[::3]

    def shares(self) -> dict[int, LedgerShare]:
        values = iter(self._shares)
        return {i: LedgerShare(size, n) for i, size, n in zip(values, values, values, strict=True)}

    @property
    def record_bytes(self) -> int:
        return sum(self._shares[1::3])

    @property
    def entries(self) -> int:
        return sum(self._shares[2::3])

    def live_bytes(self, dead_ids: Mapping[int, None]) -> int:
        """Bytes of the records of all ledgers except `dead_ids`."""
        ids, sizes = self._shares[::3], self._shares[1::3]
        if not dead_ids:
            return sum(sizes)
        return sum(size for i, size in zip(ids, sizes, strict=True) if i not in dead_ids)


async def read_map(logs: EntryLogs, disk: Disk, log_id: int) -> LogMap | None:
    """The map of a sealed log; None if the log has no map and has to be scanned. Raises
    DiskFailed."""
    file = await logs.open_log(log_id)
    try:
        with contextlib.suppress(BadEntryLog):
            return await _from_footer(file, log_id)
        file_bytes = file.end
    finally:
        await file.close()
    with contextlib.suppress(BadEntryLog, NoSuchFile):
        data = await read_file(disk, map_path(log_id))
        shares = decode_footer(log_id, data, len(data))
        return LogMap(log_id, file_bytes, file_bytes, shares, has_footer=False)
    return None


async def scan_for_map(logs: EntryLogs, index: EntryIndex, log_id: int, pace: Pace) -> LogMap:
    """Read a log that has no map, and count the records that the index points to. Raises
    DiskFailed."""
    shares: dict[int, LedgerShare] = {}
    damage: list[Damage] = []
    last_record = 0  # the position of the last record that the index points to
    synced = 0  # the bytes before this position were synced, as the index points to records there
    file = await logs.open_log(log_id)
    try:
        async for chunk in scan(file, log_id, file.end):
            for location, _, write_start in await indexed_records(index, chunk.records):
                last_record = location.position
                synced = max(synced, _synced_before(location, write_start))
                size, count = shares.get(location.ledger_id, (0, 0))
                size += RECORD_HEADER_BYTES + location.entry_bytes
                shares[location.ledger_id] = LedgerShare(size, count + 1)
            damage += chunk.damage
            for location in [bad.location for bad in chunk.damage if bad.location is not None]:
                if await index.get(location.ledger_id, location.entry_id) == location:
                    last_record = max(last_record, location.position)
                    synced = max(synced, last_record + 1)
            await pace.spend(chunk.size)
        # A torn write may have left whole records after damage. In a flush's log the index points
        # to no such record; in a direct log the index points to those that a start replayed.
        is_whole = all(bad.start > last_record or bad.start >= synced for bad in damage)
        if not is_whole:
            _log.error("log %d is damaged: %s ...", log_id, damage[0])
        return LogMap(log_id, file.end, file.end, shares, has_footer=False, is_whole=is_whole)
    finally:
        await file.close()


def _synced_before(location: Location, write_start: int) -> int:
    """The position before which all bytes were synced, as the index points to this record. For a
    record that a flush wrote, or that is the first of its write, this is the record's position. For
    any other record it is the start of the record's write, as that write may be torn."""
    at = location.position
    return write_start if write_start < at - at % BLOCK_BYTES else at


async def write_map_file(disk: Disk, log_map: LogMap) -> None:
    """Write the map file, so that the next run need not scan this log. Raises DiskFailed; then
    there is no map file."""
    path, data = map_path(log_map.log_id), encode_footer(log_map.log_id, 0, log_map.shares())
    await replace_file(disk, path, data, path.removesuffix(MAP) + MAP_TEMPORARY)


async def indexed_records(index: EntryIndex, records: Sequence[LogRecord]) -> list[LogRecord]:
    """The records among these that the index points to. Raises DiskFailed."""
    return [
        record
        for run in runs_of_a_ledger(records)
        for record, location in zip(run, await locations_of(index, run), strict=True)
        if location == record.location
    ]


async def locations_of(index: EntryIndex, run: Sequence[LogRecord]) -> list[Location | None]:
    """The locations of these entries in the index; the records are of one ledger."""
    ledger_id = run[0].location.ledger_id
    ids = [record.location.entry_id for record in run]
    if max(ids) - min(ids) < _LOOK_UPS_SPREAD_MAX * len(ids):
        indexed = await index.range(ledger_id, min(ids), max(ids), _EVERYTHING)
        locations = {location.entry_id: location for location in indexed}
        return [locations.get(entry_id) for entry_id in ids]
    return [await index.get(ledger_id, entry_id) for entry_id in ids]


def runs_of_a_ledger(records: Iterable[LogRecord]) -> Iterator[list[LogRecord]]:
    """The records, cut where the ledger changes."""
    run: list[LogRecord] = []
    for record in records:
        if run and record.location.ledger_id != run[0].location.ledger_id:
            yield run
            run = []
        run.append(record)
    if run:
        yield run


async def locations_in(index: EntryIndex, log_id: int) -> list[Location]:
    """Every location in the log that the index has. This reads the whole index, so it is only used
    for a damaged log. Raises DiskFailed."""
    locations: list[Location] = []
    for ledger_id in await index.ledger_ids():
        first = 0
        while page := await index.range(ledger_id, first, _ID_MAX, _PAGE_BYTES):
            locations += [location for location in page if location.log_id == log_id]
            first = page[-1].entry_id + 1
    return locations


async def _from_footer(file: File, log_id: int) -> LogMap:
    """Raises BadEntryLog."""
    footer = await file.read(max(0, file.end - FOOTER_BYTES), FOOTER_BYTES)
    start = map_start(log_id, footer, file.end)
    tail = await file.read(start, file.end - start)
    return LogMap(log_id, file.end, start, decode_footer(log_id, tail, file.end))
