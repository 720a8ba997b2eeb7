"""The twin of the RocksDB index: its records lie in one file of a SimDisk, like everything else.

Always true:
- `put` returns after the sync that covers it; what was not synced may be lost or torn at a crash,
  and opening cuts the last batch of the file if its CRC does not match (an opened file is never
  appended to: what it says is first written to a new one);
- rot is not taken for absence: a batch that does not match and is not the last one fails the
  opening, and reads of a file with a flipped bit fail, as RocksDB's do, with DiskFailed.

A batch, what one put writes: magic, length and CRC32C of the body (4 bytes each, little-endian),
then the body: records, each with its length (2 bytes), one byte of kind, and the key and value (or
ledger state) as entry_index.py encodes them.
"""

import bisect
import struct
from collections.abc import Sequence

from crc32c import crc32c

from bookie_server.disk import DiskFailed, File
from bookie_server.entry_index import (
    LedgerState,
    Location,
    decode_ledger_state,
    decode_location,
    encode_ledger_state,
    encode_location,
    entry_key,
)
from tests.simulation.disk import SimDisk

BATCH_MAGIC = b"SLIX"
_FRAME = struct.Struct("<4sII")
_LENGTH = struct.Struct("<H")
_ENTRY, _LEDGER = b"E", b"L"
_KEY_BYTES = len(entry_key(0, 0))


class SimIndex:
    """bookie_server.entry_index.EntryIndex on a SimDisk; make it with `await SimIndex.open`."""

    def __init__(self, disk: SimDisk) -> None:
        self._disk = disk
        self._file: File | None = None
        self._entries: dict[int, dict[int, Location]] = {}
        self._order: dict[int, list[int]] = {}
        self._ledgers: dict[int, LedgerState] = {}

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
        if everything := index._everything():
            await index._file.append([_batch(everything)], sync=True)
        await disk.sync_dir(folder)
        for name in names:
            await disk.remove(f"{folder}/{name}")
        return index

    async def put(self, locations: Sequence[Location]) -> None:
        assert self._file is not None
        records = [_entry_record(location) for location in locations]
        await self._file.append([_batch(records)], sync=True)
        for location in locations:
            self._remember(location)

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

    async def last(self, ledger_id: int) -> int | None:
        self._check()
        ids = self._order.get(ledger_id)
        return ids[-1] if ids else None

    async def put_ledgers(self, states: Sequence[LedgerState]) -> None:
        assert self._file is not None
        await self._file.append([_batch([_ledger_record(s) for s in states])], sync=True)
        for state in states:
            self._ledgers[state.ledger_id] = state

    async def ledgers(self) -> list[LedgerState]:
        return [self._ledgers[ledger_id] for ledger_id in sorted(self._ledgers)]

    async def close(self) -> None:
        if self._file is not None:
            await self._file.close()

    def _check(self) -> None:
        if self._file is not None and self._disk.rot(self._file.path):
            raise DiskFailed(f"{self._file.path}: corruption: a block's checksum does not match")

    def _remember(self, location: Location) -> None:
        entries = self._entries.setdefault(location.ledger_id, {})
        if location.entry_id not in entries:
            bisect.insort(self._order.setdefault(location.ledger_id, []), location.entry_id)
        entries[location.entry_id] = location

    def _everything(self) -> list[bytes]:
        ledgers = [_ledger_record(self._ledgers[ledger_id]) for ledger_id in sorted(self._ledgers)]
        entries = [
            _entry_record(self._entries[ledger_id][entry_id])
            for ledger_id in sorted(self._order)
            for entry_id in self._order[ledger_id]
        ]
        return ledgers + entries

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
        if body[:1] == _LEDGER:
            state = decode_ledger_state(body[1:])
            self._ledgers[state.ledger_id] = state
        else:
            self._remember(decode_location(body[1 : 1 + _KEY_BYTES], body[1 + _KEY_BYTES :]))


def _entry_record(location: Location) -> bytes:
    key = entry_key(location.ledger_id, location.entry_id)
    return _ENTRY + key + encode_location(location)


def _ledger_record(state: LedgerState) -> bytes:
    return _LEDGER + encode_ledger_state(state)


def _batch(records: Sequence[bytes]) -> bytes:
    body = b"".join(_LENGTH.pack(len(record)) + record for record in records)
    return _FRAME.pack(BATCH_MAGIC, len(body), crc32c(body)) + body
