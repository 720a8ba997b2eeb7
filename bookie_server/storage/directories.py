"""The directories of a node, and what one ledger directory stores: entry logs and index.

Always true: a directory's id is in its identity file and never changes; a caller that changes where
entries lie (a flush, a compaction, a deletion) holds `index_lock`, so none of them sees half of
another's work: a flush beside a compaction could write the old location of a moved entry back;
after a failed write nothing more is written to the directory.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

from bookie_server.api.entry import Buffer
from bookie_server.disk.interface import Disk
from bookie_server.logs.direct_log import DirectLog
from bookie_server.logs.entry_log import EntryLogs
from bookie_server.logs.index import Changes, EntryIndex, Location
from bookie_server.logs.rebuild import refuse_half_rebuilt
from bookie_server.storage_config import StorageConfig

Entries = Iterator[tuple[int, int, Buffer]]
"""(ledger, entry id, entry), sorted by ledger and entry id."""


@dataclass(frozen=True, slots=True)
class JournalDirectory:
    """A folder for journal segments; `name` is what people call it, its path."""

    id: str
    disk: Disk
    name: str = "journal"
    file_system: str = ""


@dataclass(frozen=True, slots=True)
class LedgerDirectory:
    """A folder for entry logs, with the index that was opened in it. `file_system`: see
    monitor.DirectoryState. `path`: where processes of this host find it, if they can."""

    id: str
    disk: Disk
    index: EntryIndex
    name: str = "ledger"
    file_system: str = ""
    path: str = ""


class Directories(NamedTuple):
    """What a node is started on. `failed`: ledger directories that cannot be opened, by id: why;
    `failed_names` has what they are called in messages."""

    journals: Sequence[JournalDirectory]
    ledgers: Sequence[LedgerDirectory]
    failed: Mapping[str, str] = {}
    failed_names: Mapping[str, str] = {}


class DirectoryStore:
    """One ledger directory. Made by `open`."""

    def __init__(self, directory: LedgerDirectory, logs: EntryLogs, direct_log: DirectLog) -> None:
        self.id = directory.id
        self.disk = directory.disk
        self.path = directory.path
        self.index = directory.index
        self.logs = logs
        self.direct_log = direct_log
        self.index_lock = asyncio.Lock()

    @classmethod
    async def open(cls, directory: LedgerDirectory, config: StorageConfig) -> "DirectoryStore":
        """Raises DiskFailed."""
        await refuse_half_rebuilt(directory.disk)
        logs = await EntryLogs.open(directory.disk, config, await directory.index.marked_logs())
        spare_bytes = config.write_cache_bytes
        direct_log = DirectLog(directory.disk, logs, directory.index, config, spare_bytes)
        return cls(directory, logs, direct_log)

    async def write(
        self, entries: Entries, changes: Changes, direct: Sequence[Location] = (), puts: int = 0
    ) -> None:
        """Entries, what changed, and where entries lie that are here already: durable when it
        returns. With that the index has all that it needs of the direct log's first `puts`.

        Raises DiskFailed: then nothing of it may be relied on.
        """
        marks = self.direct_log.marks(puts)
        async with self.index_lock:
            locations = [*await self.logs.write(entries), *direct]
            if changes.forgotten:
                await self.index.delete_states(changes.forgotten)
            if changes.states:  # first: the index may sync by itself, and then not all of it
                await self.index.put_ledgers(changes.states)
            if locations:
                await self.index.put(locations)
            if marks:  # last, for the same reason
                await self.index.mark_logs(marks)
            if locations or marks or changes.states or changes.forgotten:
                await self.index.sync()
        self.direct_log.settle(puts, marks)

    async def forget_replayed_logs(self) -> None:
        """The index has all that it needs of the direct logs of earlier runs: durable when it
        returns. Raises DiskFailed."""
        if marks := await self.index.marked_logs():
            await self.index.mark_logs(dict.fromkeys(marks))
            await self.index.sync()

    async def delete_ledgers(
        self,
        ledger_ids: Iterable[int],
        wanted: Callable[[int], bool] = lambda _: True,
        going: Callable[[int], AbstractContextManager[None]] = lambda _: nullcontext(),
    ) -> int:
        """Let the index forget the entries of those of the ledgers that are still `wanted` gone
        when their turn comes; returns of how many it had some. Durable when it returns.

        While those of one go, in the context of `going`. Raises DiskFailed.
        """
        deleted = 0
        async with self.index_lock:
            for ledger_id in ledger_ids:
                if await self.index.last(ledger_id) is not None and wanted(ledger_id):
                    with going(ledger_id):
                        await self.index.delete_ledger(ledger_id)
                    deleted += 1
            if deleted:
                await self.index.sync()
        return deleted

    async def delete_entries(self, entries: Mapping[int, Iterable[int]]) -> None:
        """Let the index forget those of the entries (ids by ledger) that it has. Durable when it
        returns. Raises DiskFailed."""
        deleted = False
        async with self.index_lock:
            for ledger_id, entry_ids in entries.items():
                last = await self.index.last(ledger_id)
                held = [each for each in entry_ids if last is not None and each <= last]
                if held:
                    await self.index.delete(ledger_id, held)
                    deleted = True
            if deleted:
                await self.index.sync()

    async def close(self) -> None:
        """Raises DiskFailed."""
        await self.direct_log.close()
        async with self.index_lock:
            await self.logs.close()
            await self.index.close()
