"""Entry logs: files of entries, written in runs sorted by (ledger, entry).

Always true:
- only the bookie run that made a log appends to it;
- an index has the location of a record only after the log and its name were synced;
- each record has its log id and its position;
- a log that was ended has at its end a map of the bytes that each ledger has in the log. A log that
  a crash or failure cut off has no map, and has to be scanned;
- each append is filled up with zeros to a multiple of 4096, so that it can bypass the page cache;
- an entry whose record differs from its location in the index is undeliverable, never absent;
- a log may be removed only when it is sealed: it takes no more appends, and the index gets no more
  of its records.

docs/formats.md has the pictures. All integers are little-endian.
"""

import asyncio
import contextlib
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, chain, repeat
from operator import add
from typing import Any, NamedTuple

from crc32c import crc32c

from bookie_server.api.entry import Buffer, DamagedEntry, check_entry
from bookie_server.config import StorageConfig
from bookie_server.disk.interface import Disk, DiskFailed, File, NoSuchFile
from bookie_server.logs.index import Location

FOLDER, SUFFIX = "entrylog", ".log"
MAP, MAP_TEMPORARY = ".map", ".map.tmp"
COMPACTING, COMPACTED, DAMAGED = ".compacting", ".compacted", ".damaged"
LOG_MAGIC, RECORD_MAGIC, FOOTER_MAGIC = b"SLEL", b"SLER", b"SLEF"
VERSION = 1
LOG_HEADER_BYTES = 64
RECORD_HEADER_BYTES = 48
FOOTER_BYTES = 40
BLOCK_BYTES = 4096
_CHUNK_ENTRIES = 1024  # most entries that are read and checked between two awaits: about 5 ms
_FLUSH_ENTRIES = 4096  # most entries that a flush encodes between two awaits: about 5 ms

_LOG = struct.Struct("<4sHHQ")
_RECORD = struct.Struct("<4sHHqqQQI")
_MAP_ITEM = struct.Struct("<qQQ")
_FOOTER = struct.Struct("<4sHHQQQI")
_CRC = struct.Struct("<I")
_BLOCKS, _BLOCKS_AT = struct.Struct("<H"), 6  # the field of a record header for `write_start`
MAP_ITEM_BYTES = _MAP_ITEM.size
assert _RECORD.size + _CRC.size == RECORD_HEADER_BYTES
assert _FOOTER.size + _CRC.size == FOOTER_BYTES


class BadEntryLog(Exception):
    """Bytes that do not parse as the expected structure of an entry log."""


class LedgerShare(NamedTuple):
    """A ledger's share of one log: bytes of records (with headers) and number of entries."""

    bytes: int
    entries: int


# -- formats ----------------------------------------------------------------------------------


def encode_log_header(log_id: int) -> bytes:
    head = _LOG.pack(LOG_MAGIC, VERSION, 0, log_id)
    return (head + _CRC.pack(crc32c(head))).ljust(LOG_HEADER_BYTES, b"\0")


def decode_log_header(data: Buffer, log_id: int) -> None:
    """Raises BadEntryLog when these are not the first bytes of log `log_id`."""
    magic, version, _, named_id = _unpack(_LOG, data, "log header")
    if (magic, version, named_id) != (LOG_MAGIC, VERSION, log_id):
        raise BadEntryLog(
            f"the header of log {log_id} names {magic!r} version {version} log {named_id}"
        )


def encode_record_headers(
    locations: Sequence[tuple[int, int, int, int, int]], blocks: Iterable[int] | None = None
) -> list[bytes]:
    """The headers of records at these locations (the fields of Location, in their order). `blocks`:
    by record, how many blocks are between the start of its write and its own (`write_start`)."""
    fixed = map(repeat, (RECORD_MAGIC, VERSION))
    distances = repeat(0) if blocks is None else blocks
    heads = list(map(_RECORD.pack, *fixed, distances, *zip(*locations, strict=True)))
    return list(map(add, heads, map(_CRC.pack, map(crc32c, heads))))


def decode_record_header(data: Buffer) -> Location:
    """Raises BadEntryLog."""
    magic, version, _, *location = _unpack(_RECORD, data, "record header")
    if (magic, version) != (RECORD_MAGIC, VERSION):
        raise BadEntryLog(f"unknown record format {magic!r} version {version}")
    return Location(*location)


def write_start(header: Buffer, position: int) -> int:
    """The position where the write of the record at `position` began: all bytes of the direct log
    before that position were synced when the write began."""
    (blocks,) = _BLOCKS.unpack_from(header, _BLOCKS_AT)
    return int(position // BLOCK_BYTES - blocks) * BLOCK_BYTES


def decode_record(data: Buffer, location: Location) -> memoryview:
    """The entry in `data`, after checks of CRCs, location and identity. Raises BadEntryLog."""
    if len(data) != RECORD_HEADER_BYTES + location.entry_bytes:
        raise BadEntryLog(f"the log ends inside the record of {location}")
    if (on_disk := decode_record_header(data)) != location:
        raise BadEntryLog(f"expected {location}, found {on_disk}")
    entry = memoryview(data)[RECORD_HEADER_BYTES:]
    try:
        header = check_entry(entry)
    except DamagedEntry as error:
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

    Raises BadEntryLog, also when `tail` begins after the start of the map (`map_start`).
    """
    view = memoryview(tail)
    footer = view[max(0, len(view) - FOOTER_BYTES) :]
    tail_bytes = log_bytes - map_start(log_id, footer, log_bytes)
    if tail_bytes > len(view):
        raise BadEntryLog(f"the ledger map of log {log_id} begins before the bytes that were read")
    items = view[len(view) - tail_bytes : len(view) - FOOTER_BYTES]
    if crc32c(items) != _FOOTER.unpack_from(footer)[-1]:
        raise BadEntryLog(f"the ledger map's CRC of log {log_id} does not match")
    return {ledger: LedgerShare(size, n) for ledger, size, n in _MAP_ITEM.iter_unpack(items)}


def map_start(log_id: int, footer: Buffer, log_bytes: int) -> int:
    """Where the ledger map begins in a log of `log_bytes` that ends in `footer` (40 bytes).

    Raises BadEntryLog.
    """
    magic, version, _, named_id, position, count, _ = _unpack(_FOOTER, footer, "footer")
    if (magic, version, named_id) != (FOOTER_MAGIC, VERSION, log_id):
        raise BadEntryLog(f"the footer of log {log_id} names {magic!r} {version} log {named_id}")
    if position + count * MAP_ITEM_BYTES + FOOTER_BYTES != log_bytes:
        raise BadEntryLog(f"the ledger map of log {log_id} is not at the footer's position")
    return int(position)


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
    """All entry logs of one disk. Flushes append to one of them; all can be read."""

    def __init__(self, disk: Disk, config: StorageConfig, next_log_id: int) -> None:
        self._disk = disk
        self._config = config
        self._next_log_id = next_log_id
        self._current: GrowingLog | None = None
        self._full_log_ids: list[int] = []  # ended by the last `write`: not sealed yet
        self._sealed_ids: dict[int, None] = {}
        self._unfinished_copies: dict[int, int] = {}  # by copy of a compaction: its source log
        self._files = _OpenFiles(disk, self.path)

    @classmethod
    async def open(
        cls, disk: Disk, config: StorageConfig, used_ids: Iterable[int] = ()
    ) -> "EntryLogs":
        """Existing logs are only read. New logs get ids above the existing ids, and above
        `used_ids`, the ids of logs that may be lost. Raises DiskFailed."""
        await disk.make_folder(FOLDER)
        names = [name for name in await disk.list(FOLDER) if name.split(".")[0].isdigit()]
        logs = cls(disk, config, max([*used_ids, *map(_log_id, names)], default=0) + 1)
        for name in names:
            if name.endswith((COMPACTING, MAP_TEMPORARY)):
                await disk.remove(f"{FOLDER}/{name}")
            elif name.endswith(COMPACTED):
                logs._unfinished_copies[_log_id(name)] = int(
                    name.split(".")[1].removeprefix("from-")
                )
            elif name.endswith(SUFFIX):
                logs._sealed_ids[_log_id(name)] = None
        return logs

    async def write(self, entries: Iterator[tuple[int, int, Buffer]]) -> list[Location]:
        """Append (ledger, entry id, entry) in the given order; durable when this returns.

        The caller puts the locations into the index before the next call. Raises DiskFailed: then
        the caller writes no more to these logs.
        """
        self._sealed_ids.update(dict.fromkeys(self._full_log_ids))
        self._full_log_ids = []
        locations: list[Location] = []
        for chunk in self._chunks(entries):
            log = self._current = self._current or await self.begin()
            locations += await log.append(chunk)
            if log.file.end >= self._config.entry_log_bytes_max:
                await self._finish(log)
        if self._current is not None:
            await self._current.sync(self._disk)
        return locations

    async def read(self, locations: Sequence[Location]) -> list[Buffer | BadEntryLog | DiskFailed]:
        """For each location the checked entry, or the error why it cannot be delivered.

        Neighbours on disk are read together; the entries are views into the bytes that were read.
        """
        entries: list[Buffer | BadEntryLog | DiskFailed] = []
        for run in runs(locations, self._config.read_bytes_max):
            entries += await self.read_run(run)
        return entries

    async def read_run(self, run: Sequence[Location]) -> list[Buffer | BadEntryLog | DiskFailed]:
        """As `read`, for neighbours on disk (see `runs`). If the read of the run fails, its parts
        between fillers are read one by one. The entries take `held_bytes(run)` of memory."""
        start = run[0].position
        try:
            data = await self._files.read(run[0].log_id, start, run_bytes(run))
        except DiskFailed as error:
            parts = list(runs(run, run_bytes(run), gap_max=0))
            if len(parts) == 1 or isinstance(error, NoSuchFile):
                return [error] * len(run)
            return [*chain(*await asyncio.gather(*map(self.read_run, parts)))]
        view = memoryview(data)
        records = [view[at.position - start : record_end(at) - start] for at in run]
        if held_bytes(run) < len(data):  # mostly filler: views would keep all of `data`
            return list(map(_checked_entry, map(bytes, records), run))
        return list(map(_checked_entry, records, run))

    async def close(self) -> None:
        """End the current log with its footer."""
        if self._current is not None:
            await self._finish(self._current)
        await self._files.close()

    def _chunks(
        self, entries: Iterator[tuple[int, int, Buffer]]
    ) -> Iterator[list[tuple[int, int, Buffer]]]:
        """The entries in chunks of about flush_chunk_bytes, which delay no other write for long."""
        chunk: list[tuple[int, int, Buffer]] = []
        chunk_bytes = 0
        for item in entries:
            chunk.append(item)
            chunk_bytes += len(item[2]) + RECORD_HEADER_BYTES
            if chunk_bytes >= self._config.flush_chunk_bytes or len(chunk) >= _FLUSH_ENTRIES:
                yield chunk
                chunk, chunk_bytes = [], 0
        if chunk:
            yield chunk

    async def _finish(self, log: "GrowingLog") -> None:
        self._current = None
        await log.end(self._disk)
        self._full_log_ids.append(log.log_id)

    async def begin(self) -> "GrowingLog":
        """A new log; the caller ends it, and calls `seal` when the index needs no more records."""
        return await self._make(SUFFIX)

    @property
    def growing_log(self) -> "GrowingLog | None":
        """The log that `write` appends to."""
        return self._current

    async def end_growing_log(self) -> None:
        """End and seal the growing log. The index must have all its records, and no `write` may be
        under way. Raises DiskFailed; then the log has no footer."""
        if (log := self._current) is not None:
            self._current = None
            try:
                await log.end(self._disk)
            finally:
                self.seal(log.log_id)

    def seal(self, log_id: int) -> None:
        """Seal a log from `begin`."""
        self._sealed_ids[log_id] = None

    async def _make(self, suffix: str) -> "GrowingLog":
        log_id = self._next_log_id
        self._next_log_id += 1
        return await GrowingLog.make(self._disk, log_id, _path(log_id, suffix))

    # -- reclaim: whole logs, for compaction, collection and scrub --

    def path(self, log_id: int) -> str:
        """The file that holds the log now."""
        source = self._unfinished_copies.get(log_id)
        return log_path(log_id) if source is None else _copy_path(log_id, source)

    def sealed_ids(self) -> list[int]:
        """The sealed logs, ascending, except copies that a compaction has not finished and the
        sources of these copies."""
        under_way = (*self._unfinished_copies, *self._unfinished_copies.values())
        return sorted(log_id for log_id in self._sealed_ids if log_id not in under_way)

    def unfinished_copies(self) -> dict[int, int]:
        """By id of a complete copy to which the index may not point yet: the id of its source."""
        return dict(self._unfinished_copies)

    async def open_log(self, log_id: int) -> File:
        """The log's file, open to read; the caller closes it. Raises DiskFailed."""
        return await self._disk.open(self.path(log_id))

    async def begin_copy(self) -> "GrowingLog":
        """A log for a compaction's records. The next start removes a copy that is not published."""
        return await self._make(COMPACTING)

    async def discard_copy(self, copy: "GrowingLog") -> None:
        """Remove a copy that was not published."""
        await copy.file.close()
        with contextlib.suppress(NoSuchFile):
            await self._disk.remove(_path(copy.log_id, COMPACTING))

    async def publish_copy(self, copy: "GrowingLog", source: int) -> None:
        """Complete the copy. When this returns, the copy is durable and can be read."""
        await copy.append_footer()
        await copy.file.sync()
        await copy.file.close()
        path = _copy_path(copy.log_id, source)
        await self._disk.rename(_path(copy.log_id, COMPACTING), path)
        await self._disk.sync_dir(FOLDER)
        self._unfinished_copies[copy.log_id] = source

    async def finish_copy(self, log_id: int) -> None:
        """Make the copy an ordinary log. The caller has moved the index and removed the source."""
        source = self._unfinished_copies[log_id]
        await self._disk.rename(_copy_path(log_id, source), log_path(log_id))
        del self._unfinished_copies[log_id]
        self._sealed_ids[log_id] = None
        await self._disk.sync_dir(FOLDER)

    async def abandon_copy(self, log_id: int) -> None:
        """Remove a published copy that the index does not point to."""
        await self._disk.remove(self.path(log_id))
        await self._files.forget(log_id)
        del self._unfinished_copies[log_id]
        await self._disk.sync_dir(FOLDER)

    async def remove(self, log_id: int) -> None:
        """Remove a sealed log (or a copy's source), durably. Reads under way still succeed."""
        await self._unseal(log_id)
        with contextlib.suppress(NoSuchFile):  # an earlier run may have removed it
            await self._disk.remove(log_path(log_id))
        await self._files.forget(log_id)  # after the removal: an open file keeps its space
        await self._disk.sync_dir(FOLDER)

    async def set_aside(self, log_id: int) -> None:
        """Rename a damaged log instead of removing it, so that an operator can examine it."""
        await self._unseal(log_id)
        with contextlib.suppress(NoSuchFile):
            await self._disk.rename(log_path(log_id), _path(log_id, DAMAGED))
        await self._files.forget(log_id)
        await self._disk.sync_dir(FOLDER)

    async def _unseal(self, log_id: int) -> None:
        self._sealed_ids.pop(log_id, None)
        with contextlib.suppress(NoSuchFile):
            await self._disk.remove(_path(log_id, MAP))


class GrowingLog:
    """A log that is not ended: a flush, a compaction or a direct log appends to it."""

    def __init__(self, log_id: int, file: File) -> None:
        self.log_id = log_id
        self.file = file
        self._shares: dict[int, LedgerShare] = {}
        self._is_name_synced = False

    @classmethod
    async def make(cls, disk: Disk, log_id: int, path: str) -> "GrowingLog":
        file = await disk.create(path, direct=True)
        try:
            await file.append(_filled_up([encode_log_header(log_id)], LOG_HEADER_BYTES))
        except DiskFailed:
            await file.close()
            raise
        return cls(log_id, file)

    async def append(
        self, chunk: Sequence[tuple[int, int, Buffer]], *, sync: bool = False
    ) -> list[Location]:
        """Append (ledger, entry id, entry); returns the locations. With `sync` the append is
        durable, and each record has its distance from the block where the chunk begins. The work is
        done column by column: a Python loop over the entries would be a flush's largest cost."""
        ledger_ids, entry_ids, entries = zip(*chunk, strict=True)
        sizes = list(map(len, entries))
        ends = accumulate([RECORD_HEADER_BYTES + size for size in sizes], initial=self.file.end)
        *positions, end = ends
        locations = list(zip(ledger_ids, entry_ids, repeat(self.log_id), positions, sizes))
        blocks = [(at - positions[0]) // BLOCK_BYTES for at in positions] if sync else None
        heads = encode_record_headers(locations, blocks)
        self._count_shares(ledger_ids, sizes)
        buffers = list(chain.from_iterable(zip(heads, entries, strict=True)))
        await self.file.append(_filled_up(buffers, end - self.file.end), sync=sync)
        return list(map(tuple.__new__, repeat(Location), locations))

    def _count_shares(self, ledger_ids: Sequence[int], sizes: Sequence[int]) -> None:
        added: dict[int, int] = {}
        for ledger_id, size in zip(ledger_ids, sizes, strict=True):
            added[ledger_id] = added.get(ledger_id, 0) + size
        for ledger_id, count in Counter(ledger_ids).items():
            size, entries = self._shares.get(ledger_id, _NO_SHARE)
            size += added[ledger_id] + count * RECORD_HEADER_BYTES
            self._shares[ledger_id] = LedgerShare(size, entries + count)

    @property
    def shares(self) -> dict[int, LedgerShare]:
        """The share of each ledger so far."""
        return dict(self._shares)

    async def end(self, disk: Disk) -> None:
        """Write the footer, durably, and close the file, even if the write fails. Raises
        DiskFailed."""
        try:
            await self.append_footer()
            await self.sync(disk)
        finally:
            await self.file.close()

    async def append_footer(self) -> None:
        """Append filler zeros and the footer, so that the file ends at a multiple of 4096."""
        length = len(encode_footer(self.log_id, 0, self._shares))
        gap = -length % BLOCK_BYTES
        await self.file.append(
            [bytes(gap), encode_footer(self.log_id, self.file.end + gap, self._shares)]
        )

    async def sync(self, disk: Disk) -> None:
        await self.file.sync()
        if not self._is_name_synced:
            await disk.sync_dir(FOLDER)
            self._is_name_synced = True


class _OpenFiles:
    """Files of logs that are open to read: at most FILES_MAX, or more while more are being read."""

    FILES_MAX = 128

    def __init__(self, disk: Disk, path: Callable[[int], str]) -> None:
        self._disk = disk
        self._path = path
        self._files: dict[int, File] = {}  # least recently read first
        self._read_counts: dict[int, int] = {}
        self._ids_to_close: dict[int, None] = {}  # closed after the reads under way

    async def read(self, log_id: int, position: int, length: int) -> bytes:
        file = await self._take(log_id)
        try:
            return await file.read(position, length)
        finally:
            self._read_counts[log_id] -= 1
            await self._evict()

    async def forget(self, log_id: int) -> None:
        """Close the file of a removed log, after the reads under way."""
        if log_id in self._files:
            if self._read_counts[log_id]:
                self._ids_to_close[log_id] = None
            else:
                await self._files.pop(log_id).close()

    async def _take(self, log_id: int) -> File:
        while log_id not in self._files:
            new_file = await self._open(log_id)
            if log_id in self._files:  # another read was faster
                await new_file.close()
            else:
                self._files[log_id] = new_file
        file = self._files[log_id] = self._files.pop(log_id)
        self._read_counts[log_id] = self._read_counts.get(log_id, 0) + 1
        return file

    async def _open(self, log_id: int) -> File:
        path = self._path(log_id)
        try:
            return await self._disk.open(path)
        except NoSuchFile:
            if path == log_path(log_id):
                raise
            return await self._disk.open(log_path(log_id))  # `finish_copy` has just renamed it

    async def _evict(self) -> None:
        idle = [log_id for log_id in self._files if not self._read_counts[log_id]]
        surplus = idle[: max(0, len(self._files) - self.FILES_MAX)]
        surplus += [
            log_id for log_id in idle if log_id in self._ids_to_close and log_id not in surplus
        ]
        for log_id in surplus:
            self._ids_to_close.pop(log_id, None)
        for file in [self._files.pop(log_id) for log_id in surplus]:
            await file.close()

    async def close(self) -> None:
        while self._files:
            await self._files.pop(next(iter(self._files))).close()


def log_path(log_id: int) -> str:
    return _path(log_id, SUFFIX)


def map_path(log_id: int) -> str:
    """The path of the map file of a log that has no footer."""
    return _path(log_id, MAP)


def _copy_path(log_id: int, source: int) -> str:
    return _path(log_id, f".from-{source:010d}{COMPACTED}")


def _path(log_id: int, suffix: str) -> str:
    return f"{FOLDER}/{log_id:010d}{suffix}"


def _log_id(name: str) -> int:
    return int(name.split(".", 1)[0])


def _filled_up(buffers: list[Buffer], length: int) -> list[Buffer]:
    """The buffers, `length` bytes together, and the zeros up to the next multiple of 4096."""
    return [*buffers, bytes(-length % BLOCK_BYTES)]


def record_end(location: Location) -> int:
    """Where the record at the location ends in its log."""
    return location.position + RECORD_HEADER_BYTES + location.entry_bytes


def run_bytes(run: Sequence[Location]) -> int:
    """The length of a run on disk."""
    return record_end(run[-1]) - run[0].position


def held_bytes(run: Sequence[Location]) -> int:
    """Bytes of memory of a run's entries: views of the run, or copies if it is mostly filler."""
    on_disk = run_bytes(run)
    records = sum([location.entry_bytes for location in run]) + len(run) * RECORD_HEADER_BYTES
    return records if 2 * records < on_disk else on_disk


def runs(
    locations: Sequence[Location], bytes_max: int, gap_max: int = BLOCK_BYTES - 1
) -> Iterator[list[Location]]:
    """The locations in runs of about `bytes_max` at most. The records of a run follow one another
    in one log, with at most `gap_max` bytes of filler (or of other records) between two records."""
    run: list[Location] = []
    for location in locations:
        if run and not (
            len(run) < _CHUNK_ENTRIES
            and location.log_id == run[-1].log_id
            and 0 <= location.position - record_end(run[-1]) <= gap_max
            and record_end(location) - run[0].position <= bytes_max
        ):
            yield run
            run = []
        run.append(location)
    if run:
        yield run


def _checked_entry(data: Buffer, location: Location) -> Buffer | BadEntryLog:
    try:
        return decode_record(data, location)
    except BadEntryLog as error:
        return error


_NO_SHARE = LedgerShare(0, 0)
