"""The twin of the RocksDB index: its records lie in one file of a SimDisk, like everything else.

Always true:
- what was not synced is lost or torn at a crash (RocksDB may keep some of it; nobody may rely on
  either), and opening cuts the last batch of the file if its CRC does not match (an opened file is
  never appended to: what it says is first written to a new one);
- it hangs with its disk, and is given up with it;
- rot is not taken for absence: a batch that does not match and is not the last one fails the
  opening, and reads of a file with a flipped bit fail, as RocksDB's do, with DiskFailed.

A batch, what one sync writes: magic, length and CRC32C of the body (4 bytes each, little-endian),
then the body: records, each with its length (2 bytes), one byte of kind, and the key and value (or
ledger state) as bookie_server/logs/index.py encodes them; of what was deleted, the
key of the ledger or the entry, of a direct log its key and its mark, if it has one. The first batch
of a file says that nothing of older files counts any more, and all that they said.
"""

import asyncio
import bisect
import contextlib
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from crc32c import crc32c

from bookie_server.disk.interface import DiskFailed, File
from bookie_server.logs.index import (
    IndexDamaged,
    LedgerState,
    Location,
    decode_ledger_state,
    decode_location,
    decode_log_mark,
    encode_ledger_state,
    encode_location,
    encode_log_mark,
    entry_key,
    ledger_key,
    log_key,
)
from tests.simulation.disk import SimDisk

BATCH_MAGIC = b"SLIX"
_FRAME = struct.Struct("<4sII")
_LENGTH = struct.Struct("<H")
_ENTRY, _LEDGER, _NO_ENTRIES, _NO_LEDGER, _NEW = b"E", b"L", b"e", b"l", b"N"
_NO_ENTRY, _LOG = b"x", b"P"
_KEY_BYTES, _LOG_KEY_BYTES = len(entry_key(0, 0)), len(log_key(0))


class SimIndex:
    """bookie_server.logs.index.EntryIndex on a SimDisk; make it with `await SimIndex.open`."""

    def __init__(self, disk: SimDisk) -> None:
        self._disk = disk
        self._file: File | None = None
        self._entries: dict[int, dict[int, Location]] = {}
        self._order: dict[int, list[int]] = {}
        self._ledgers: dict[int, LedgerState] = {}
        self._marks: dict[int, int] = {}
        self.unsynced: list[bytes] = []
        """What a crash may lose."""
        self._one_at_a_time = asyncio.Lock()  # RocksDB has one thread that writes,
        self._cut_short = False  # and that goes on when its caller was cancelled
        self._failure: DiskFailed | None = None  # of a sync
        self.on_damage: Callable[[IndexDamaged], None] = lambda _: None

    @classmethod
    async def open(cls, disk: SimDisk, folder: str = "index") -> "SimIndex":
        """Read what is there, write it to a new file, remove the older ones."""
        index = cls(disk)
        await disk.make_folder(folder)
        names = await disk.list(folder)
        for name in names:
            file = await disk.open(f"{folder}/{name}")
            index._replay(file.path, await file.read(0, file.end))
        number = int(names[-1]) + 1 if names else 0
        index._file = await disk.create(f"{folder}/{number:08d}")
        await index._file.append([_batch([_NEW, *index._everything()])], sync=True)
        await disk.sync_dir(folder)
        for name in names:
            await disk.remove(f"{folder}/{name}")
        return index

    async def put(self, locations: Sequence[Location]) -> None:
        self._check()
        self._check_failure()
        self.unsynced += map(_entry_record, locations)
        for location in locations:
            self._remember(location)

    async def move(self, moves: Sequence[tuple[Location, Location]]) -> None:
        self._check_failure()
        for old, new in moves:
            if await self.get(old.ledger_id, old.entry_id) == old:
                self.unsynced.append(_entry_record(new))
                self._remember(new)

    async def get(self, ledger_id: int, entry_id: int) -> Location | None:
        self._check()
        return self._entries.get(ledger_id, {}).get(entry_id)

    async def range(
        self, ledger_id: int, first_entry: int, last_entry: int, max_bytes: int
    ) -> list[Location]:
        self._check()
        found, total = [], 0
        ids = self._order.get(ledger_id, [])
        for entry_id in ids[bisect.bisect_left(ids, first_entry) :]:
            if entry_id > last_entry:
                break
            location = self._entries[ledger_id][entry_id]
            found.append(location)
            total += location.entry_bytes
            if total >= max_bytes:
                break
        return found

    async def among(
        self, ledger_id: int, entry_ids: Sequence[int], max_bytes: int
    ) -> list[Location]:
        self._check()
        found, total = [], 0
        places = self._entries.get(ledger_id, {})
        for entry_id in entry_ids:
            if entry_id in places and total < max_bytes:
                found.append(places[entry_id])
                total += places[entry_id].entry_bytes
        return found

    async def last(self, ledger_id: int) -> int | None:
        self._check()
        ids = self._order.get(ledger_id)
        return ids[-1] if ids else None

    async def ledger_ids(self) -> list[int]:
        self._check()
        return sorted(self._entries)

    async def delete(self, ledger_id: int, entry_ids: Sequence[int]) -> None:
        self._check()
        self._take([_NO_ENTRY + entry_key(ledger_id, entry_id) for entry_id in entry_ids])

    async def delete_ledger(self, ledger_id: int) -> None:
        self._check()
        self._take([_NO_ENTRIES + ledger_key(ledger_id)])

    async def put_ledgers(self, states: Sequence[LedgerState]) -> None:
        self._check()
        self._check_failure()
        self.unsynced += map(_ledger_record, states)
        self._ledgers.update({state.ledger_id: state for state in states})

    async def delete_states(self, ledger_ids: Sequence[int]) -> None:
        self._check()
        self._take([_NO_LEDGER + ledger_key(ledger_id) for ledger_id in ledger_ids])

    async def mark_logs(self, marks: Mapping[int, int | None]) -> None:
        self._check()
        self._take([_log_record(log_id, mark) for log_id, mark in marks.items()])

    async def marked_logs(self) -> dict[int, int]:
        self._check()
        return dict(sorted(self._marks.items()))

    async def sync(self) -> None:
        self._check()
        self._check_failure()
        assert self._file is not None
        try:
            async with self._one_at_a_time:
                await self._sync(self._file)
        except DiskFailed as error:
            self._failure = error
            raise

    async def _sync(self, file: File) -> None:
        if self._cut_short:
            await file.sync()
        if self.unsynced:
            records, self.unsynced = self.unsynced, []
            await file.append([_batch(records)])
            self._cut_short = True
            await file.sync()
        self._cut_short = False

    async def ledgers(self) -> list[LedgerState]:
        return [self._ledgers[ledger_id] for ledger_id in sorted(self._ledgers, key=ledger_key)]

    async def close(self) -> None:
        if self._file is not None:
            await self._file.close()

    def _check(self) -> None:
        self._disk.deadline.check()
        if self._file is not None and self._disk.rot(self._file.path):
            why = f"{self._file.path}: corruption: a block's checksum does not match"
            self.on_damage(IndexDamaged(why))
            raise IndexDamaged(why)

    def _check_failure(self) -> None:
        if self._failure is not None:
            raise DiskFailed(f"an earlier sync failed: {self._failure}")

    def _take(self, records: Sequence[bytes]) -> None:
        """Visible at once, durable with the next sync."""
        self._check_failure()
        self.unsynced += records
        for record in records:
            self._apply(record)

    def _remember(self, location: Location) -> None:
        ledger_id, entry_id, *_ = location
        if (entries := self._entries.get(ledger_id)) is None:
            entries, self._order[ledger_id] = {}, []
            self._entries[ledger_id] = entries
        if entry_id not in entries:
            order = self._order[ledger_id]
            if order and entry_id < order[-1]:
                bisect.insort(order, entry_id)
            else:
                order.append(entry_id)
        entries[entry_id] = location

    def _forget(self, ledger_id: int, entry_id: int) -> None:
        if self._entries.get(ledger_id, {}).pop(entry_id, None) is not None:
            self._order[ledger_id].remove(entry_id)
            if not self._order[ledger_id]:
                del self._entries[ledger_id], self._order[ledger_id]

    def _everything(self) -> list[bytes]:
        ledgers = [_ledger_record(self._ledgers[ledger_id]) for ledger_id in sorted(self._ledgers)]
        entries = [
            _entry_record(self._entries[ledger_id][entry_id])
            for ledger_id in sorted(self._order)
            for entry_id in self._order[ledger_id]
        ]
        return ledgers + entries + [_log_record(*mark) for mark in sorted(self._marks.items())]

    def _replay(self, path: str, data: bytes) -> None:
        at = 0
        while at + _FRAME.size <= len(data):
            magic, length, crc = _FRAME.unpack_from(data, at)
            body = data[at + _FRAME.size : at + _FRAME.size + length]
            if magic != BATCH_MAGIC or len(body) < length or crc32c(body) != crc:
                if data.find(BATCH_MAGIC, at + 1) >= 0:
                    raise DiskFailed(f"{path}: corruption at {at}, below the last batch")
                return
            self._replay_batch(body)
            at += _FRAME.size + length

    def _replay_batch(self, body: bytes) -> None:
        at = 0
        while at < len(body):
            (length,) = _LENGTH.unpack_from(body, at)
            at += _LENGTH.size + length
            self._apply(body[at - length : at])

    def _apply(self, body: bytes) -> None:
        kind = body[:1]
        if kind == _ENTRY:
            self._remember(_location(body))
        elif kind == _LEDGER:
            state = _state(body)
            self._ledgers[state.ledger_id] = state
        elif kind == _NO_ENTRIES:
            self._entries.pop(_ledger_id(body), None)
            self._order.pop(_ledger_id(body), None)
        elif kind == _NO_ENTRY:
            self._forget(*_ids(body[1:]))
        elif kind == _NO_LEDGER:
            self._ledgers.pop(_ledger_id(body), None)
        elif kind == _LOG:
            key, mark = body[1 : 1 + _LOG_KEY_BYTES], body[1 + _LOG_KEY_BYTES :]
            self._marks.pop(int.from_bytes(key[1:], "big"), None)
            self._marks.update([decode_log_mark(key, mark)] if mark else [])
        else:
            assert kind == _NEW, body  # an older file may be there
            self._entries, self._order, self._ledgers, self._marks = {}, {}, {}, {}


def marks_on(disk: SimDisk, folder: str = "index") -> dict[int, int]:
    """The marks of direct logs that are durable on a disk; for tests."""
    index = SimIndex(disk)
    for path in sorted(path for path in disk.paths() if path.startswith(f"{folder}/")):
        with contextlib.suppress(DiskFailed):
            index._replay(path, disk.durable(path))
    return index._marks


# A node reads at each start what it knew before: what the same bytes say is worked out once.


@lru_cache(maxsize=1 << 14)
def _location(body: bytes) -> Location:
    return decode_location(body[1 : 1 + _KEY_BYTES], body[1 + _KEY_BYTES :])


@lru_cache(maxsize=1 << 12)
def _state(body: bytes) -> LedgerState:
    return decode_ledger_state(body[1:])


@lru_cache(maxsize=1 << 14)
def _entry_record(location: Location) -> bytes:
    key = entry_key(location.ledger_id, location.entry_id)
    return _ENTRY + key + encode_location(location)


@lru_cache(maxsize=1 << 12)
def _ledger_record(state: LedgerState) -> bytes:
    return _LEDGER + encode_ledger_state(state)


def _log_record(log_id: int, mark: int | None) -> bytes:
    return _LOG + log_key(log_id) + (b"" if mark is None else encode_log_mark(mark))


def _ledger_id(body: bytes) -> int:
    return int.from_bytes(body[-8:], "big", signed=True)


def _ids(key: bytes) -> tuple[int, int]:
    """Of the ledger and the entry of a key."""
    return int.from_bytes(key[-16:-8], "big"), int.from_bytes(key[-8:], "big")


def _batch(records: Sequence[bytes]) -> bytes:
    body = b"".join(_LENGTH.pack(len(record)) + record for record in records)
    return _FRAME.pack(BATCH_MAGIC, len(body), crc32c(body)) + body
