"""Reading an entry log through, record by record, for those who cannot rely on the index.

Always true: no record is handed out unchecked (its header's CRC, log id and position, the entry's
digests and identity); what cannot be read is named by its location and never ends the scan, which
goes on at the next record that vouches for itself; at most one chunk, or one record where that is
larger, is in memory, and the event loop is free between two chunks.
"""

from collections.abc import AsyncIterator
from typing import NamedTuple, Protocol

from bookie_server.api.entry import BadEntry, Buffer, unpack_entry
from bookie_server.logs.entry_log import (
    BLOCK_BYTES,
    LOG_HEADER_BYTES,
    RECORD_HEADER_BYTES,
    RECORD_MAGIC,
    BadEntryLog,
    decode_log_header,
    decode_record_header,
    write_start,
)
from bookie_server.logs.index import Location

CHUNK_BYTES = 1 << 20
RECORDS_PER_CHUNK_MAX = 512  # about 5 ms


class Readable(Protocol):
    """A file (disk.File), or what reads around its bad blocks."""

    async def read(self, position: int, length: int) -> bytes: ...


class Record(NamedTuple):
    """A whole record; `entry` is a view into its chunk. `write_start`: see entry_log."""

    location: Location
    entry: memoryview
    write_start: int = 0


class Damage(NamedTuple):
    """Bytes from `start` up to `end` that are no records. `location` and `write_start` (see
    entry_log) are set when the record's header could be read: what is damaged is that entry."""

    start: int
    end: int
    why: str
    location: Location | None = None
    write_start: int = 0


class Scanned(NamedTuple):
    """What `size` bytes of a log held, both in order of their position."""

    records: list[Record]
    damage: list[Damage]
    size: int


class Parsed(NamedTuple):
    """What `parse` returns: go on at `position`, with at least `wanted` bytes."""

    records: list[Record]
    damage: list[Damage]
    position: int
    wanted: int


async def scan(file: Readable, log_id: int, end: int, start: int = 0) -> AsyncIterator[Scanned]:
    """All records of the log that lie before `end`; those from `start` on, where one begins, or
    else from the first. Raises DiskFailed."""
    position, wanted = start or LOG_HEADER_BYTES, CHUNK_BYTES
    if not start and (damage := await _bad_header(file, log_id)):
        yield Scanned([], [damage], LOG_HEADER_BYTES)
    while position < end:
        asked = min(wanted, end - position)
        data = await file.read(position, asked)
        if len(data) < asked:
            missing = Damage(position + len(data), end, "the file ends too early")
            yield Scanned([], [missing], 0)
            end = missing.start
        parsed = parse(data, position, end, log_id)
        yield Scanned(parsed.records, parsed.damage, parsed.position - position)
        position, wanted = parsed.position, max(CHUNK_BYTES, parsed.wanted)


def parse(data: Buffer, base: int, end: int, log_id: int) -> Parsed:
    """The records in `data`, which lies at `base` in a log whose records end before `end`."""
    view = memoryview(data)
    records: list[Record] = []
    damage: list[Damage] = []
    at, limit = 0, len(view)
    last = base + limit >= end
    while at < limit and len(records) < RECORDS_PER_CHUNK_MAX:
        if (filler := _filler(view, at, base)) > at:
            at = filler
            continue
        if limit - at < RECORD_HEADER_BYTES and not last:
            break
        location = _header(view, at, base, log_id)
        if location is None:
            found = _next_record(view, at + 1, base, log_id, last)
            damage.append(Damage(base + at, base + found, "no record begins here"))
            at = found
            continue
        stop = at + RECORD_HEADER_BYTES + location.entry_bytes
        begun = write_start(view[at : at + RECORD_HEADER_BYTES], base + at)
        if base + stop > end:
            why = "the log ends inside a record"
            damage.append(Damage(base + at, end, why, location, begun))
            at = limit
        elif stop > limit:
            if last:
                why = "the file ends inside a record"
                damage.append(Damage(base + at, end, why, location, begun))
                at = limit
                continue
            return Parsed(records, damage, base + at, stop - at)
        elif why := _fault(entry := view[at + RECORD_HEADER_BYTES : stop], location):
            damage.append(Damage(base + at, base + stop, why, location, begun))
            at = stop
        else:
            records.append(Record(location, entry, begun))
            at = stop
    return Parsed(records, damage, base + at, RECORD_HEADER_BYTES)


async def _bad_header(file: Readable, log_id: int) -> Damage | None:
    try:
        decode_log_header(await file.read(0, LOG_HEADER_BYTES), log_id)
    except BadEntryLog as error:
        return Damage(0, LOG_HEADER_BYTES, str(error))
    return None


def _filler(view: memoryview, at: int, base: int) -> int:
    """Where the zeros that begin at `at` and fill a block up end; `at` if there are none."""
    if view[at]:
        return at
    stop = min(len(view), at + BLOCK_BYTES - (base + at) % BLOCK_BYTES)
    gap = bytes(view[at:stop])  # a view would be compared item by item
    return stop if gap == bytes(len(gap)) else at


def _header(view: memoryview, at: int, base: int, log_id: int) -> Location | None:
    """The record that begins at `at`, if its header says that it lies exactly there."""
    try:
        location = decode_record_header(view[at : at + RECORD_HEADER_BYTES])
    except BadEntryLog:
        return None
    here = (location.log_id, location.position) == (log_id, base + at)
    return location if here else None


def _next_record(view: memoryview, at: int, base: int, log_id: int, last: bool) -> int:
    """Where the next record begins at or after `at`; else as far as one cannot begin."""
    data = bytes(view)
    while (at := data.find(RECORD_MAGIC, at)) >= 0:
        if len(view) - at < RECORD_HEADER_BYTES and not last:
            return at
        if _header(view, at, base, log_id) is not None:
            return at
        at += 1
    return len(view) if last else max(1, len(view) - len(RECORD_MAGIC) + 1)


def _fault(entry: memoryview, location: Location) -> str:
    """What is wrong with the entry of a record; empty when nothing is."""
    try:
        header = unpack_entry(entry).header
    except BadEntry as error:
        return str(error)
    if (header.ledger_id, header.entry_id) != (location.ledger_id, location.entry_id):
        return "the record holds another entry"
    return ""
