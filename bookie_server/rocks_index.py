"""The entry index in RocksDB; the only file that imports rocksdict.

Always true: a put returns after RocksDB's own log was synced; memory is bounded by the constants
below (about 40 MiB); all calls run in the threads named "index-write" and "index-read", and any
error of RocksDB is DiskFailed.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from rocksdict import BlockBasedOptions, Cache, Options, Rdict, WriteBatch, WriteOptions

from bookie_server.disk import DiskFailed
from bookie_server.entry_index import (
    ENTRY_PREFIX,
    LEDGER_PREFIX,
    EntryIndex,
    LedgerState,
    Location,
    decode_ledger_state,
    decode_location,
    encode_ledger_state,
    encode_location,
    entry_key,
    ledger_key,
)

_MIB = 1 << 20
_WRITE_BUFFER_BYTES = 8 * _MIB
_BLOCK_CACHE_BYTES = 16 * _MIB
_LOG_BYTES_MAX = 32 * _MIB
_OPEN_FILES_MAX = 256
_PUTS_PER_WRITE = 4096
_ID_MAX = 2**63 - 1
T = TypeVar("T")


class RocksIndex(EntryIndex):
    """See entry_index.EntryIndex. Made by `open`."""

    def __init__(self, db: Any) -> None:
        self._db = db
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="index-write")
        self._readers = ThreadPoolExecutor(2, thread_name_prefix="index-read")

    @classmethod
    async def open(cls, folder: Path) -> "RocksIndex":
        """Open or make the index in `folder`. Raises DiskFailed."""
        try:
            return cls(await asyncio.to_thread(_open, folder))
        except Exception as error:
            raise DiskFailed(f"the entry index in {folder} cannot be opened: {error}") from error

    async def put(self, locations: Sequence[Location]) -> None:
        pairs = ((entry_key(e.ledger_id, e.entry_id), encode_location(e)) for e in locations)
        await self._run(self._writer, self._write, pairs)

    async def get(self, ledger_id: int, entry_id: int) -> Location | None:
        return await self._run(self._readers, self._get, entry_key(ledger_id, entry_id))

    async def range(
        self, ledger_id: int, first_entry: int, last_entry: int, max_bytes: int
    ) -> list[Location]:
        return await self._run(
            self._readers, self._range, ledger_id, first_entry, last_entry, max_bytes
        )

    async def last(self, ledger_id: int) -> int | None:
        return await self._run(self._readers, self._last, ledger_id)

    async def put_ledgers(self, states: Sequence[LedgerState]) -> None:
        pairs = ((ledger_key(state.ledger_id), encode_ledger_state(state)) for state in states)
        await self._run(self._writer, self._write, pairs)

    async def ledgers(self) -> list[LedgerState]:
        return await self._run(self._readers, self._ledgers)

    async def close(self) -> None:
        await self._run(self._writer, self._db.close)
        self._writer.shutdown()
        self._readers.shutdown()

    async def _run(self, pool: ThreadPoolExecutor, call: Callable[..., T], *arguments: Any) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, call, *arguments)
        except Exception as error:
            raise DiskFailed(f"entry index: {error}") from error

    # -- what runs in the threads --

    def _write(self, pairs: Iterable[tuple[bytes, bytes]]) -> None:
        """Earlier writes are covered by the last one's sync: they lie before it in the log."""
        batch, options = WriteBatch(raw_mode=True), WriteOptions()
        for key, value in pairs:
            if batch.len() >= _PUTS_PER_WRITE:
                self._db.write(batch, options)
                batch = WriteBatch(raw_mode=True)
            batch.put(key, value)
        options.sync = True
        self._db.write(batch, options)

    def _get(self, key: bytes) -> Location | None:
        value = self._db.get(key)
        return None if value is None else decode_location(key, value)

    def _range(self, ledger_id: int, first: int, last: int, max_bytes: int) -> list[Location]:
        found: list[Location] = []
        end, total = entry_key(ledger_id, last), 0
        cursor = self._db.iter()
        cursor.seek(entry_key(ledger_id, first))
        while total < max_bytes and cursor.valid() and (key := cursor.key()) <= end:
            location = decode_location(key, cursor.value())
            found.append(location)
            total += location.entry_bytes
            cursor.next()
        cursor.status()
        return found

    def _last(self, ledger_id: int) -> int | None:
        cursor = self._db.iter()
        cursor.seek_for_prev(entry_key(ledger_id, _ID_MAX))
        cursor.status()
        if not cursor.valid() or not cursor.key().startswith(ENTRY_PREFIX):
            return None
        location = decode_location(cursor.key(), cursor.value())
        return location.entry_id if location.ledger_id == ledger_id else None

    def _ledgers(self) -> list[LedgerState]:
        states = []
        cursor = self._db.iter()
        cursor.seek(LEDGER_PREFIX)
        while cursor.valid() and cursor.key().startswith(LEDGER_PREFIX):
            states.append(decode_ledger_state(cursor.value()))
            cursor.next()
        cursor.status()
        return states


def _open(folder: Path) -> Any:
    folder.mkdir(parents=True, exist_ok=True)
    blocks = BlockBasedOptions()
    blocks.set_block_cache(Cache(_BLOCK_CACHE_BYTES))
    blocks.set_bloom_filter(10, False)
    blocks.set_cache_index_and_filter_blocks(True)
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_block_based_table_factory(blocks)
    options.set_write_buffer_size(_WRITE_BUFFER_BYTES)
    options.set_max_write_buffer_number(2)
    options.set_max_total_wal_size(_LOG_BYTES_MAX)
    options.set_max_open_files(_OPEN_FILES_MAX)
    options.set_max_background_jobs(2)
    options.set_keep_log_file_num(4)
    options.set_max_log_file_size(4 * _MIB)
    return Rdict(str(folder), options)
