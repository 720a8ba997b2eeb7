"""The entry index in RocksDB; the only file that imports rocksdict.

Always true:
- RocksDB's own log is not used, as a flipped bit in it silently drops all later changes; the
  journal covers changes that were not synced;
- `sync` writes all changes in memory to a table, and RocksDB checks tables when it reads them;
- an index that has lost a sync (`_Guard`) is not opened;
- memory is bounded by the constants below (about 40 MiB);
- all calls run in the threads "<name>-write", "<name>-read" and "<name>-recovery", under a deadline
  (IoDeadline);
- an error of RocksDB becomes DiskFailed. If RocksDB reports corruption, the error is IndexDamaged:
  the tables are damaged, and `--rebuild-index` makes them anew.
"""

import asyncio
import errno
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from crc32c import crc32c
from rocksdict import BlockBasedOptions, Cache, Options, Rdict, WriteBatch, WriteOptions

from bookie_server.disk.interface import DiskFailed, DiskFull, DiskHung, IoDeadline
from bookie_server.disk.os_disk import DiskThreads
from bookie_server.lanes import in_recovery_lane
from bookie_server.logs.index import (
    ENTRY_PREFIX,
    LEDGER_PREFIX,
    LOG_PREFIX,
    BadIndexRecord,
    EntryIndex,
    IndexDamaged,
    LedgerState,
    Location,
    decode_ledger_state,
    decode_location,
    decode_log_mark,
    encode_ledger_state,
    encode_location,
    encode_locations,
    encode_log_mark,
    entry_key,
    ledger_key,
    log_key,
)
from spark_ledger.units import MIB

WRITE_BUFFER_BYTES = 8 * MIB
_BLOCK_CACHE_BYTES = 16 * MIB
_OPEN_FILES_MAX = 256
_PUTS_PER_WRITE = 4096
_ID_MAX = 2**63 - 1
_EVERYTHING = 1 << 62
_SYNCS_KEY = b"s"
GUARD_FILE = "SYNCS"
_SLOT_PITCH = 4096
_COUNT, _CRC = struct.Struct("<Q"), struct.Struct("<I")
_SLOT_BYTES = _COUNT.size + _CRC.size
REBUILD = "python -m bookie_server --rebuild-index (with the usual --config and --set)"
_CORRUPTION = "Corruption"  # how RocksDB's errors of that kind begin
T = TypeVar("T")


class RocksIndex(EntryIndex):
    """See index.EntryIndex. Made by `open`."""

    def __init__(self, db: Any, guard: "_Guard", syncs: int, name: str, limit_s: float) -> None:
        self._db = db
        self._guard = guard
        self._syncs = syncs
        self._failure: DiskFailed | None = None  # of a write or sync
        self.on_damage: Callable[[IndexDamaged], None] = lambda _: None
        deadline = IoDeadline(limit_s)
        self._writer = DiskThreads(1, f"{name}-write", deadline)
        self._readers = DiskThreads(2, f"{name}-read", deadline)
        self._recovery = DiskThreads(1, f"{name}-recovery", deadline)

    @classmethod
    async def open(
        cls, folder: Path, name: str = "index", limit_s: float = math.inf
    ) -> "RocksIndex":
        """Open or make the index in `folder`; a call that takes longer than `limit_s` has hung.

        Raises DiskFull when the disk lacks space for the index, else DiskFailed; both name the
        remedy.
        """
        try:
            return cls(*await asyncio.to_thread(_open, folder), name, limit_s)
        except Exception as error:
            if _lacks_space(error):
                raise DiskFull(
                    f"there is no space to open the entry index in {folder}: nothing is damaged;"
                    " free some bytes on that disk, then start the bookie again"
                ) from error
            raise DiskFailed(
                f"the entry index in {folder} cannot be opened: {error}; make it again from the"
                f" entry logs: {REBUILD}"
            ) from error

    async def put(self, locations: Sequence[Location]) -> None:
        starts = range(0, len(locations), _PUTS_PER_WRITE)
        pairs = (encode_locations(locations[at : at + _PUTS_PER_WRITE]) for at in starts)
        await self._run(self._writer, self._write, chain.from_iterable(pairs))

    async def move(self, moves: Sequence[tuple[Location, Location]]) -> None:
        await self._run(self._writer, self._move, moves)

    async def get(self, ledger_id: int, entry_id: int) -> Location | None:
        return await self._look_up(self._get, entry_key(ledger_id, entry_id))

    async def range(
        self, ledger_id: int, first_entry: int, last_entry: int, max_bytes: int
    ) -> list[Location]:
        return await self._look_up(self._range, ledger_id, first_entry, last_entry, max_bytes)

    async def among(
        self, ledger_id: int, entry_ids: Sequence[int], max_bytes: int
    ) -> list[Location]:
        return await self._look_up(self._among, ledger_id, entry_ids, max_bytes)

    async def last(self, ledger_id: int) -> int | None:
        return await self._look_up(self._last, ledger_id)

    async def ledger_ids(self) -> list[int]:
        return await self._run(self._readers, self._ledger_ids, has_deadline=False)

    async def delete(self, ledger_id: int, entry_ids: Sequence[int]) -> None:
        await self._delete(entry_key(ledger_id, entry_id) for entry_id in entry_ids)

    async def delete_ledger(self, ledger_id: int) -> None:
        span = entry_key(ledger_id, 0), entry_key(ledger_id, _ID_MAX)
        await self._run(self._writer, self._delete_range, *span)

    async def put_ledgers(self, states: Sequence[LedgerState]) -> None:
        pairs = ((ledger_key(state.ledger_id), encode_ledger_state(state)) for state in states)
        await self._run(self._writer, self._write, pairs)

    async def delete_states(self, ledger_ids: Sequence[int]) -> None:
        await self._delete(map(ledger_key, ledger_ids))

    async def _delete(self, keys: Iterable[bytes]) -> None:
        await self._run(self._writer, self._write, ((key, None) for key in keys))

    async def ledgers(self) -> list[LedgerState]:
        return await self._run(self._readers, self._ledgers, has_deadline=False)

    async def mark_logs(self, marks: Mapping[int, int | None]) -> None:
        pairs = [(i, None if mark is None else encode_log_mark(mark)) for i, mark in marks.items()]
        await self._run(self._writer, self._write, ((log_key(i), mark) for i, mark in pairs))

    async def marked_logs(self) -> dict[int, int]:
        return await self._run(self._readers, self._marked_logs)

    async def sync(self) -> None:
        await self._run(self._writer, self._sync)

    async def close(self) -> None:
        await self._run(self._writer, self._close)
        self._writer.shut_down()
        self._readers.shut_down()
        self._recovery.shut_down()

    async def _look_up(self, call: Callable[..., T], *arguments: Any) -> T:
        pool = self._recovery if in_recovery_lane() else self._readers
        return await self._run(pool, call, *arguments)

    async def _run(
        self, pool: DiskThreads, call: Callable[..., T], *arguments: Any, has_deadline: bool = True
    ) -> T:
        alters_index = pool is self._writer
        writes = alters_index and call != self._close
        if writes and self._failure is not None:
            raise DiskFailed(f"entry index: an earlier write failed: {self._failure}")
        try:
            return await pool.run(call, *arguments, alters=alters_index, has_deadline=has_deadline)
        except DiskHung:
            raise
        except Exception as error:
            disk_error = _as_disk_error(error)
            if writes:
                self._failure = disk_error
            if isinstance(disk_error, IndexDamaged):
                self.on_damage(disk_error)
            raise disk_error from error

    # -- calls that run in the threads --

    def _write(self, pairs: Iterable[tuple[bytes, bytes | None]]) -> None:
        """Put the value of each key; None deletes the key."""
        pairs = iter(pairs)
        while True:
            batch = WriteBatch(raw_mode=True)
            for key, value in islice(pairs, _PUTS_PER_WRITE):
                if value is None:
                    batch.delete(key)
                else:
                    batch.put(key, value)
            if batch.is_empty():
                return
            self._db.write(batch, _without_log())

    def _move(self, moves: Sequence[tuple[Location, Location]]) -> None:
        """See EntryIndex.move. There is one writing thread, so no other write comes between the
        look-up and the put."""
        keys = [(entry_key(old.ledger_id, old.entry_id), old, new) for old, new in moves]
        self._write((key, encode_location(new)) for key, old, new in keys if self._get(key) == old)

    def _delete_range(self, first: bytes, last: bytes) -> None:
        batch = WriteBatch(raw_mode=True)
        batch.delete_range(first, last)
        batch.delete(last)
        self._db.write(batch, _without_log())

    def _sync(self) -> None:
        """Put the count of syncs into the table that this sync writes, then into the guard file."""
        self._syncs += 1
        self._db.put(_SYNCS_KEY, _COUNT.pack(self._syncs), write_opt=_without_log())
        self._db.flush(True)
        self._guard.write(self._syncs)

    def _close(self) -> None:
        self._db.close()
        self._guard.close()

    def _get(self, key: bytes) -> Location | None:
        value = self._db.get(key)
        return None if value is None else decode_location(key, value)

    def _range(self, ledger_id: int, first: int, last: int, max_bytes: int) -> list[Location]:
        locations: list[Location] = []
        end, total = entry_key(ledger_id, last), 0
        cursor = self._db.iter()
        cursor.seek(entry_key(ledger_id, first))
        while total < max_bytes and cursor.valid() and (key := cursor.key()) <= end:
            location = decode_location(key, cursor.value())
            locations.append(location)
            total += location.entry_bytes
            cursor.next()
        cursor.status()  # raises the error that ended the walk, if any
        return locations

    def _among(self, ledger_id: int, ids: Sequence[int], max_bytes: int) -> list[Location]:
        """The locations of the ids that are in the index. If the ids are dense, the whole range is
        read: a step to the next key costs half as much as a look-up."""
        if ids[-1] - ids[0] < 2 * len(ids):
            id_set = dict.fromkeys(ids)
            every = self._range(ledger_id, ids[0], ids[-1], _EVERYTHING)
            locations = (location for location in every if location.entry_id in id_set)
        else:
            looked_up = (self._get(entry_key(ledger_id, entry_id)) for entry_id in ids)
            locations = (location for location in looked_up if location is not None)
        first_locations: list[Location] = []
        total = 0
        for location in locations:
            first_locations.append(location)
            total += location.entry_bytes
            if total >= max_bytes:
                break
        return first_locations

    def _last(self, ledger_id: int) -> int | None:
        cursor = self._db.iter()
        cursor.seek_for_prev(entry_key(ledger_id, _ID_MAX))
        cursor.status()
        if not cursor.valid() or not cursor.key().startswith(ENTRY_PREFIX):
            return None
        location = decode_location(cursor.key(), cursor.value())
        return location.entry_id if location.ledger_id == ledger_id else None

    def _ledger_ids(self) -> list[int]:
        """One seek for each ledger."""
        ledger_ids: list[int] = []
        cursor = self._db.iter()
        cursor.seek(ENTRY_PREFIX)
        while cursor.valid() and cursor.key().startswith(ENTRY_PREFIX):
            ledger_id = decode_location(cursor.key(), cursor.value()).ledger_id
            ledger_ids.append(ledger_id)
            cursor.seek(entry_key(ledger_id, _ID_MAX) + b"\0")
        cursor.status()
        return ledger_ids

    def _marked_logs(self) -> dict[int, int]:
        return dict(decode_log_mark(*pair) for pair in self._pairs_with(LOG_PREFIX))

    def _ledgers(self) -> list[LedgerState]:
        return [decode_ledger_state(value) for _, value in self._pairs_with(LEDGER_PREFIX)]

    def _pairs_with(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Keys with the prefix, and their values."""
        cursor = self._db.iter()
        cursor.seek(prefix)
        while cursor.valid() and cursor.key().startswith(prefix):
            yield cursor.key(), cursor.value()
            cursor.next()
        cursor.status()


def _lacks_space(error: Exception) -> bool:
    """Whether the disk has no space, by the error's text, as RocksDB gives no error number."""
    return any(os.strerror(number) in str(error) for number in (errno.ENOSPC, errno.EDQUOT))


def _as_disk_error(error: Exception) -> DiskFailed:
    if isinstance(error, BadIndexRecord) or _CORRUPTION in str(error):
        return IndexDamaged(
            f"the entry index is damaged: {error}; stop the bookie and make it again from the entry"
            f" logs: {REBUILD}"
        )
    kind = DiskFull if _lacks_space(error) else DiskFailed
    return kind(f"entry index: {error}")


class _Guard:
    """A file with the number of syncs of the index. Syncs write the file's two slots in turn, so
    that one slot survives a torn write. A slot: a count (8 bytes, little-endian) and its CRC32C.

    The guard is needed because a flipped bit in RocksDB's manifest (the list of the tables) may
    make RocksDB drop the end of the manifest silently.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def read(self) -> int:
        """The count; 0 when neither slot holds a count."""
        slots = [os.pread(self._fd, _SLOT_BYTES, at * _SLOT_PITCH) for at in (0, 1)]
        return max(_count(slot) for slot in slots)

    def write(self, count: int) -> None:
        body = _COUNT.pack(count)
        data = body + _CRC.pack(crc32c(body))
        os.pwrite(self._fd, data, count % 2 * _SLOT_PITCH)
        os.fdatasync(self._fd) if hasattr(os, "fdatasync") else os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


def _count(slot: bytes) -> int:
    if len(slot) < _SLOT_BYTES or _CRC.unpack_from(slot, 8)[0] != crc32c(slot[:8]):
        return 0
    return int(_COUNT.unpack_from(slot)[0])


def _without_log() -> Any:
    options: Any = WriteOptions()
    options.disable_wal = True
    return options


class _OpenIndex(NamedTuple):
    """The database, its guard, and how often it was synced."""

    db: Any
    guard: _Guard
    syncs: int


def _open(folder: Path) -> _OpenIndex:
    folder.mkdir(parents=True, exist_ok=True)
    guard = _Guard(folder / GUARD_FILE)
    try:
        db = Rdict(str(folder), _options())
        value = db.get(_SYNCS_KEY)
        syncs = _COUNT.unpack(value)[0] if value is not None else 0
        if syncs < (guard_syncs := guard.read()):
            db.close()
            raise OSError(
                f"it has {syncs} of {guard_syncs} syncs, so its newest changes are missing"
            )
    except BaseException:
        guard.close()
        raise
    return _OpenIndex(db, guard, syncs)


def _options() -> Any:
    blocks = BlockBasedOptions()
    blocks.set_block_cache(Cache(_BLOCK_CACHE_BYTES))
    blocks.set_bloom_filter(10, False)
    blocks.set_cache_index_and_filter_blocks(True)
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_block_based_table_factory(blocks)
    options.set_write_buffer_size(WRITE_BUFFER_BYTES)
    options.set_max_write_buffer_number(2)
    options.set_max_open_files(_OPEN_FILES_MAX)
    options.set_max_background_jobs(2)
    options.set_keep_log_file_num(4)
    options.set_max_log_file_size(4 * MIB)
    return options
