"""Entry logs: where entries rest, written in runs sorted by (ledger, entry).

Always true: a log is appended to only by the bookie run that made it, and an index names a record
only after the log and its name were synced; each record names its log and its position; a full
log ends in a map of the bytes each ledger has in it (a log without one was cut off by a crash, and
can be scanned). What is appended at once is filled up with zeros to a multiple of 4096, so that it
can go past the page cache. A record that is not what the index says is an entry that cannot be
delivered, never one that does not exist.

docs/formats.md has the pictures. All integers are little-endian.
"""

import struct
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from crc32c import crc32c

from bookie_server.api.entry import BadEntry, Buffer, unpack_entry
from bookie_server.disk import Disk, DiskFailed, File
from bookie_server.entry_index import Location
from bookie_server.storage_config import StorageConfig

FOLDER, SUFFIX = "entrylog", ".log"
LOG_MAGIC, RECORD_MAGIC, FOOTER_MAGIC = b"SLEL", b"SLER", b"SLEF"
VERSION = 1
LOG_HEADER_BYTES = 64
RECORD_HEADER_BYTES = 48
FOOTER_BYTES = 40
BLOCK_BYTES = 4096
_CHUNK_ENTRIES = 1024  # most entries handled between two awaits: about 5 ms

_LOG = struct.Struct("<4sHHQ")
_RECORD = struct.Struct("<4sHHqqQQI")
_MAP_ITEM = struct.Struct("<qQQ")
_FOOTER = struct.Struct("<4sHHQQQI")
_CRC = struct.Struct("<I")
assert _RECORD.size + _CRC.size == RECORD_HEADER_BYTES
assert _FOOTER.size + _CRC.size == FOOTER_BYTES


class BadEntryLog(Exception):
    """Bytes that are no such structure of an entry log."""


class LedgerShare(NamedTuple):
    """What a ledger has in one log: bytes of records (their headers counted) and entries."""

    bytes: int
    entries: int


# -- formats ----------------------------------------------------------------------------------


def encode_log_header(log_id: int) -> bytes:
    head = _LOG.pack(LOG_MAGIC, VERSION, 0, log_id)
    return (head + _CRC.pack(crc32c(head))).ljust(LOG_HEADER_BYTES, b"\0")


def decode_log_header(data: Buffer, log_id: int) -> None:
    """Raises BadEntryLog when these are not the first bytes of log `log_id`."""
    magic, version, _, found = _unpack(_LOG, data, "log header")
    if (magic, version, found) != (LOG_MAGIC, VERSION, log_id):
        raise BadEntryLog(f"log {log_id} says {magic!r} version {version} log {found}")


def encode_record_header(location: Location) -> bytes:
    head = _RECORD.pack(
        RECORD_MAGIC, VERSION, 0, location.ledger_id, location.entry_id,
        location.log_id, location.position, location.entry_bytes,
    )  # fmt: skip
    return head + _CRC.pack(crc32c(head))


def decode_record_header(data: Buffer) -> Location:
    """Raises BadEntryLog."""
    magic, version, _, *location = _unpack(_RECORD, data, "record header")
    if (magic, version) != (RECORD_MAGIC, VERSION):
        raise BadEntryLog(f"unknown record format {magic!r} version {version}")
    return Location(*location)


def decode_record(data: Buffer, location: Location) -> memoryview:
    """The entry in `data`, header, payload, place and identity checked. Raises BadEntryLog."""
    if len(data) != RECORD_HEADER_BYTES + location.entry_bytes:
        raise BadEntryLog(f"the log ends inside the record of {location}")
    if (found := decode_record_header(data)) != location:
        raise BadEntryLog(f"expected {location}, found {found}")
    entry = memoryview(data)[RECORD_HEADER_BYTES:]
    try:
        header = unpack_entry(entry).header
    except BadEntry as error:
        raise BadEntryLog(f"{location}: {error}") from error
    if (header.ledger_id, header.entry_id) != (location.ledger_id, location.entry_id):
        raise BadEntryLog(f"the record of {location} holds another entry")
    return entry


def encode_footer(log_id: int, position: int, shares: dict[int, LedgerShare]) -> bytes:
    """The ledger map, which is written at `position`, and the footer after it."""
    items = b"".join(_MAP_ITEM.pack(ledger_id, *shares[ledger_id]) for ledger_id in sorted(shares))
    head = _FOOTER.pack(
        FOOTER_MAGIC, VERSION, 0, log_id, position, len(shares), crc32c(items)
    )  # fmt: skip
    return items + head + _CRC.pack(crc32c(head))


def decode_footer(log_id: int, tail: Buffer, log_bytes: int) -> dict[int, LedgerShare]:
    """The ledger map of a log of `log_bytes`, whose last bytes are `tail` (map and footer).

    Raises BadEntryLog; one reason is that `tail` is too short: the map's length is not known
    before the footer is read, so a reader takes a generous tail first, the whole log at worst.
    """
    view = memoryview(tail)
    magic, version, _, found, position, count, crc = _unpack(
        _FOOTER, view[max(0, len(view) - FOOTER_BYTES) :], "footer"
    )
    if (magic, version, found) != (FOOTER_MAGIC, VERSION, log_id):
        raise BadEntryLog(f"the footer of log {log_id} says {magic!r} {version} log {found}")
    items_bytes = count * _MAP_ITEM.size
    if position + items_bytes + FOOTER_BYTES != log_bytes or items_bytes + FOOTER_BYTES > len(view):
        raise BadEntryLog(f"the ledger map of log {log_id} is not where the footer says")
    items = view[len(view) - FOOTER_BYTES - items_bytes : len(view) - FOOTER_BYTES]
    if crc32c(items) != crc:
        raise BadEntryLog(f"the ledger map's CRC of log {log_id} does not match")
    return {ledger: LedgerShare(size, n) for ledger, size, n in _MAP_ITEM.iter_unpack(items)}


def _unpack(layout: struct.Struct, data: Buffer, what: str) -> tuple[Any, ...]:
    view = memoryview(data)
    if len(view) < layout.size + _CRC.size:
        raise BadEntryLog(f"the log ends inside a {what}")
    if _CRC.unpack_from(view, layout.size)[0] != crc32c(view[: layout.size]):
        raise BadEntryLog(f"the CRC of a {what} does not match")
    fields: tuple[Any, ...] = layout.unpack_from(view)
    return fields


# -- the logs of one disk ---------------------------------------------------------------------


class EntryLogs:
    """All entry logs of one disk: one that is written, all that are read."""

    def __init__(self, disk: Disk, config: StorageConfig, next_log_id: int) -> None:
        self._disk = disk
        self._config = config
        self._next_log_id = next_log_id
        self._current: _GrowingLog | None = None
        self._files = _OpenFiles(disk)

    @classmethod
    async def open(cls, disk: Disk, config: StorageConfig) -> "EntryLogs":
        """Older logs are read only; new entries go to a log after them. Raises DiskFailed."""
        await disk.make_folder(FOLDER)
        names = await disk.list(FOLDER)
        ids = [int(name.removesuffix(SUFFIX)) for name in names if name.endswith(SUFFIX)]
        return cls(disk, config, max(ids, default=0) + 1)

    async def write(self, entries: Iterator[tuple[int, int, Buffer]]) -> list[Location]:
        """Append (ledger, entry id, entry) in the given order; durable when it returns.

        Raises DiskFailed, which is final: nothing written here may be relied on.
        """
        locations: list[Location] = []
        async for log in self._write_chunks(entries, locations):
            if log.file.end >= self._config.entry_log_bytes_max:
                await self._finish(log)
        if self._current is not None:
            await self._current.sync(self._disk)
        return locations

    async def read(self, locations: Sequence[Location]) -> list[Buffer | BadEntryLog | DiskFailed]:
        """The entries at the locations, each checked, or why it cannot be delivered.

        Neighbours on disk are read at once; what is returned are views.
        """
        found: list[Buffer | BadEntryLog | DiskFailed] = []
        for run in _runs(locations, self._config.read_bytes_max):
            found += await self._read_run(run)
        return found

    async def close(self) -> None:
        """End the current log with its footer."""
        if self._current is not None:
            await self._finish(self._current)
        await self._files.close()

    async def _write_chunks(
        self, entries: Iterator[tuple[int, int, Buffer]], locations: list[Location]
    ) -> AsyncIterator["_GrowingLog"]:
        """Hand about flush_chunk_bytes at a time to the disk, so that no chunk holds up others."""
        chunk: list[tuple[int, int, Buffer]] = []
        chunk_bytes = 0
        for item in entries:
            chunk.append(item)
            chunk_bytes += len(item[2]) + RECORD_HEADER_BYTES
            if chunk_bytes >= self._config.flush_chunk_bytes or len(chunk) >= _CHUNK_ENTRIES:
                yield await self._append(chunk, locations)
                chunk, chunk_bytes = [], 0
        if chunk:
            yield await self._append(chunk, locations)

    async def _append(
        self, chunk: Iterable[tuple[int, int, Buffer]], locations: list[Location]
    ) -> "_GrowingLog":
        if self._current is None:
            self._current = await _GrowingLog.make(self._disk, self._next_log_id)
            self._next_log_id += 1
        locations += await self._current.append(chunk)
        return self._current

    async def _finish(self, log: "_GrowingLog") -> None:
        self._current = None
        await log.append_footer()
        await log.sync(self._disk)
        await log.file.close()

    async def _read_run(self, run: Sequence[Location]) -> list[Buffer | BadEntryLog | DiskFailed]:
        start = run[0].position
        try:
            data = await self._files.read(run[0].log_id, start, _record_end(run[-1]) - start)
        except DiskFailed as error:
            return [error] * len(run)
        view = memoryview(data)
        return [_check(view[e.position - start : _record_end(e) - start], e) for e in run]


class _GrowingLog:
    """The log that is written."""

    def __init__(self, log_id: int, file: File) -> None:
        self.log_id = log_id
        self.file = file
        self._shares: dict[int, LedgerShare] = {}
        self._name_synced = False

    @classmethod
    async def make(cls, disk: Disk, log_id: int) -> "_GrowingLog":
        file = await disk.create(log_path(log_id), direct=True)
        await file.append(_filled_up([encode_log_header(log_id)], LOG_HEADER_BYTES))
        return cls(log_id, file)

    async def append(self, chunk: Iterable[tuple[int, int, Buffer]]) -> list[Location]:
        locations: list[Location] = []
        buffers: list[Buffer] = []
        position = self.file.end
        for ledger_id, entry_id, entry in chunk:
            location = Location(ledger_id, entry_id, self.log_id, position, len(entry))
            locations.append(location)
            buffers += (encode_record_header(location), entry)
            length = RECORD_HEADER_BYTES + len(entry)
            size, count = self._shares.get(ledger_id, _NO_SHARE)
            self._shares[ledger_id] = LedgerShare(size + length, count + 1)
            position += length
        await self.file.append(_filled_up(buffers, position - self.file.end))
        return locations

    async def append_footer(self) -> None:
        """The footer ends where the file ends: what fills it up comes before it."""
        length = len(encode_footer(self.log_id, 0, self._shares))
        gap = -length % BLOCK_BYTES
        await self.file.append(
            [bytes(gap), encode_footer(self.log_id, self.file.end + gap, self._shares)]
        )

    async def sync(self, disk: Disk) -> None:
        await self.file.sync()
        if not self._name_synced:
            await disk.sync_dir(FOLDER)
            self._name_synced = True


class _OpenFiles:
    """Logs open for reading, at most FILES_MAX; one being read is not closed."""

    FILES_MAX = 128

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._files: dict[int, File] = {}  # least recently read first
        self._reads: dict[int, int] = {}

    async def read(self, log_id: int, position: int, length: int) -> bytes:
        file = await self._take(log_id)
        try:
            return await file.read(position, length)
        finally:
            self._reads[log_id] -= 1
            await self._evict()

    async def _take(self, log_id: int) -> File:
        while log_id not in self._files:
            opened = await self._disk.open(log_path(log_id))
            if log_id in self._files:  # another read was faster
                await opened.close()
            else:
                self._files[log_id] = opened
        file = self._files[log_id] = self._files.pop(log_id)
        self._reads[log_id] = self._reads.get(log_id, 0) + 1
        return file

    async def _evict(self) -> None:
        idle = [log_id for log_id in self._files if not self._reads[log_id]]
        surplus = idle[: max(0, len(self._files) - self.FILES_MAX)]
        for file in [self._files.pop(log_id) for log_id in surplus]:
            await file.close()

    async def close(self) -> None:
        while self._files:
            await self._files.pop(next(iter(self._files))).close()


def log_path(log_id: int) -> str:
    return f"{FOLDER}/{log_id:010d}{SUFFIX}"


def _filled_up(buffers: list[Buffer], length: int) -> list[Buffer]:
    """The buffers, `length` bytes together, and the zeros up to the next multiple of 4096."""
    return [*buffers, bytes(-length % BLOCK_BYTES)]


def _record_end(location: Location) -> int:
    return location.position + RECORD_HEADER_BYTES + location.entry_bytes


def _runs(locations: Sequence[Location], bytes_max: int) -> Iterator[list[Location]]:
    """Cut into runs that lie one after the other in a log, each of at most about `bytes_max`."""
    run: list[Location] = []
    for location in locations:
        if run and not (
            len(run) < _CHUNK_ENTRIES
            and location.log_id == run[-1].log_id
            and location.position == _record_end(run[-1])
            and _record_end(location) - run[0].position <= bytes_max
        ):
            yield run
            run = []
        run.append(location)
    if run:
        yield run


def _check(data: memoryview, location: Location) -> Buffer | BadEntryLog:
    try:
        return decode_record(data, location)
    except BadEntryLog as error:
        return error


_NO_SHARE = LedgerShare(0, 0)
