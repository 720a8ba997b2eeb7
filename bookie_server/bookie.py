"""One storage node: what it promises, in which order, and what it answers.

Always true (docs/protocol.md has the reasons):
- an add is answered OK only after the sync that covers it; an equal one again is OK, another
  entry under the same id is refused, and nothing of a fenced ledger is taken but recovery's adds;
- a request that fences is answered only after the fence is durable, whatever the answer says;
- an entry that exists, or may have existed, and cannot be delivered is never "no such entry";
- every limit is in bytes; beyond it the answer is BUSY, at once; recovery has a reserve;
- the first failure of the journal or the storage is final: `failed` is set, nothing is
  acknowledged any more.
"""

import asyncio
import contextlib
from collections.abc import Iterator, Sequence

from bookie_server import __version__
from bookie_server.adder import Adder
from bookie_server.api import messages as m
from bookie_server.api.entry import NO_ENTRY
from bookie_server.api.status import Status, StopReason
from bookie_server.disk import Disk, DiskFailed
from bookie_server.entry_index import EVERY_LEDGER, EntryIndex
from bookie_server.journal import Journal, JournalFailed
from bookie_server.journal_format import Kind, Record
from bookie_server.ledger_directory import LedgerDirectory, Refused
from bookie_server.ledger_handle import LedgerHandle
from bookie_server.ledger_storage import LedgerStorage, Range, Undeliverable
from bookie_server.replay import open_journal
from bookie_server.storage_config import StorageConfig
from bookie_server.tombstones import Tombstones
from spark_ledger.metadata.store import MetadataStore

RESULTS_MAX = 16384  # statuses in one reply of Read, whatever the range
WAIT_MS_MAX = 60_000


class Bookie:
    """Order and decisions of one node. All of it runs on one event loop. Made by `start`."""

    def __init__(
        self,
        bookie_id: str,
        disk: Disk,
        storage: LedgerStorage,
        journal: Journal,
        metadata: MetadataStore,
        config: StorageConfig,
        cluster_id: str = "",
    ) -> None:
        self.bookie_id = bookie_id
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done with an exception when journal or storage failed: the process must exit."""
        self._disk = disk
        self._storage = storage
        self._journal = journal
        self._config = config
        self._ledgers = LedgerDirectory(storage, journal, metadata)
        self._adder = Adder(storage, journal, self._ledgers, config)
        self._under_way = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._stopping = False
        self._read_bytes = 0
        self._storage_task = asyncio.ensure_future(storage.run())
        self._sweeping = asyncio.ensure_future(self._sweep(metadata, cluster_id))
        for task in (self._storage_task, journal.task, self._sweeping):
            task.add_done_callback(self._on_task_end)

    @classmethod
    async def start(
        cls,
        bookie_id: str,
        journal_disk: Disk,
        ledger_disk: Disk,
        index: EntryIndex,
        metadata: MetadataStore,
        config: StorageConfig,
        cluster_id: str = "",
    ) -> "Bookie":
        """Replay what the journal holds beyond the checkpoint; ready to serve when it returns.

        A node that is not told the id of its cluster never takes a ledger for deleted.
        Raises DiskFailed.
        """
        storage = await LedgerStorage.open(ledger_disk, index, config)
        journal = await open_journal(journal_disk, ledger_disk, storage, config)
        return cls(bookie_id, ledger_disk, storage, journal, metadata, config, cluster_id)

    @property
    def readonly_reason(self) -> str:
        """Why normal adds are refused by this node as a whole; empty when it is writable."""
        every = self._storage.state(EVERY_LEDGER)
        if every is not None and every.limbo:
            return "acknowledged data may have been lost here; every ledger is in limbo"
        return ""

    async def handle(self, request: m.Request) -> m.Response:
        """Carry out any request of api.messages. Never raises for a bad request."""
        if request.bookie_id != self.bookie_id and (
            request.bookie_id or not isinstance(request, m.InfoRequest)
        ):
            return _refuse_all(request, Status.WRONG_BOOKIE, f"this is {self.bookie_id}")
        if self._stopping:
            return _refuse_all(request, Status.SHUTTING_DOWN, "the bookie is stopping")
        if self.failed.done():
            return _refuse_all(request, Status.IO_ERROR, str(self.failed.exception()))
        self._under_way += 1
        self._idle.clear()
        try:
            return await self._dispatch(request)
        except (JournalFailed, DiskFailed) as error:
            return _refuse_all(request, Status.IO_ERROR, str(error))
        except Refused as error:
            return _refuse_all(request, error.status, error.reason)
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._idle.set()

    async def stop(self) -> None:
        """Drain what is under way, flush, seal the journal, close the index.

        Raises JournalFailed or DiskFailed when the node had failed or fails now.
        """
        self._stopping = True
        self._sweeping.cancel()
        self._ledgers.wake_all()
        await self._idle.wait()
        self._storage.stop()
        await self._storage_task
        await self._journal.append([])
        await self._storage.flush()
        await self._journal.close()
        await self._storage.close()

    def abandon(self) -> None:
        """End at once, as a crash would: nothing is flushed, nobody is answered."""
        self._stopping = True
        self._sweeping.cancel()
        self._storage_task.cancel()
        self._journal.abandon()

    async def _sweep(self, metadata: MetadataStore, cluster_id: str) -> None:
        if cluster_id:
            sweep_s = self._config.tombstone_sweep_s
            await Tombstones(self._ledgers, metadata, cluster_id, sweep_s).run()

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not self.failed.done():
            self.failed.set_exception(error)
            self.failed.exception()  # whoever watches `failed` hears of it; nobody must

    async def _dispatch(self, request: m.Request) -> m.Response:
        if isinstance(request, m.AddRequest):
            if self.readonly_reason:
                return await self._adder.add(request, self.readonly_reason)
            return await self._adder.add(request)
        if isinstance(request, m.ReadRequest):
            return await self._read(request)
        if isinstance(request, m.ReadLacRequest):
            return await self._read_lac(request)
        if isinstance(request, m.WriteLacRequest):
            return await self._write_lac(request)
        return await self._info()

    # -- read --

    async def _read(self, request: m.ReadRequest) -> m.ReadResponse:
        first, last = request.first_entry, request.last_entry
        if request.ledger_id < 0 or not 0 <= first <= last:
            reason = f"no range of entries: {request.ledger_id}:{first}..{last}"
            return m.ReadResponse(Status.BAD_REQUEST, reason=reason)
        if not request.fence and not self._ledgers.known(request.ledger_id):
            return m.ReadResponse(Status.NO_SUCH_LEDGER)
        handle = await self._ledgers.meet(request.ledger_id)
        if not handle.allows("recover" if request.fence else "read", request.token):
            return m.ReadResponse(Status.UNAUTHORIZED)
        if request.fence:
            await self._fence(handle)
        bytes_max = min(request.max_bytes, self._config.read_bytes_max)
        with self._reading(bytes_max, reserve=request.fence) as admitted:
            if not admitted:
                wait = self._config.retry_after_ms
                return m.ReadResponse(Status.BUSY, retry_after_ms=wait)
            last = min(last, first + RESULTS_MAX - 1)
            found = await self._storage.read(request.ledger_id, first, last, max(bytes_max, 1))
        return self._read_response(request, handle, found)

    @contextlib.contextmanager
    def _reading(self, bytes_max: int, *, reserve: bool) -> Iterator[bool]:
        """Count a reply's bytes while it is read; yields whether there is room for it."""
        limit = self._config.read_pending_bytes_max
        limit += self._config.recovery_reserve_bytes if reserve else 0
        if self._read_bytes and self._read_bytes + bytes_max > limit:
            yield False
            return
        self._read_bytes += bytes_max
        try:
            yield True
        finally:
            self._read_bytes -= bytes_max

    def _read_response(
        self, request: m.ReadRequest, handle: LedgerHandle, found: Range
    ) -> m.ReadResponse:
        absent = m.EntryResult(self._absence(handle))
        results: list[m.EntryResult] = []
        for entry_id in range(request.first_entry, found.known_through + 1):
            entry = found.entries.get(entry_id)
            if entry is None:
                results.append(absent)
            elif isinstance(entry, Undeliverable):
                results.append(_UNDELIVERABLE)
            else:
                results.append(m.EntryResult(Status.OK, entry))
        whole = found.known_through >= request.last_entry
        return m.ReadResponse(
            Status.OK,
            results,
            handle.last_add_confirmed,
            StopReason.END_OF_RANGE if whole else StopReason.BYTE_LIMIT,
        )

    def _absence(self, handle: LedgerHandle) -> Status:
        """What an entry that is not stored is answered with: the node must know to say no."""
        limbo = handle.state.limbo or bool(self.readonly_reason)
        return Status.LIMBO if limbo else Status.NO_SUCH_ENTRY

    # -- fence, last add confirmed --

    async def _fence(self, handle: LedgerHandle) -> None:
        """Returns when the fence is durable. Raises JournalFailed."""
        if not handle.state.fenced:
            state = handle.fence()
            self._storage.set_state(state)
            record = Record(Kind.FENCE, state.ledger_id, NO_ENTRY, b"", 0)
            handle.fence_durable = self._journal.append([record])
        if handle.fence_durable is not None:  # None: fenced in an earlier run, durable since
            await asyncio.shield(handle.fence_durable)

    async def _read_lac(self, request: m.ReadLacRequest) -> m.ReadLacResponse:
        if request.ledger_id < 0:
            return m.ReadLacResponse(Status.BAD_REQUEST, reason="a ledger id is not negative")
        handle = await self._ledgers.meet(request.ledger_id)
        if not handle.allows("recover" if request.fence else "read", request.token):
            return m.ReadLacResponse(Status.UNAUTHORIZED)
        if request.fence:
            await self._fence(handle)
        wait_ms = 0 if self._stopping else min(request.wait_ms, WAIT_MS_MAX)
        await handle.wait_beyond(request.previous_lac, wait_ms / 1000)
        lac, fenced = handle.last_add_confirmed, handle.state.fenced
        return m.ReadLacResponse(Status.OK, lac, fenced)

    async def _write_lac(self, request: m.WriteLacRequest) -> m.WriteLacResponse:
        if request.ledger_id < 0 or request.last_add_confirmed < NO_ENTRY:
            return m.WriteLacResponse(Status.BAD_REQUEST, reason="negative ids")
        handle = await self._ledgers.meet(request.ledger_id)
        if not handle.allows("add", request.token):
            return m.WriteLacResponse(Status.UNAUTHORIZED)
        if handle.state.deleted:
            return m.WriteLacResponse(Status.LEDGER_DELETED)
        state = handle.explicit_lac(request.last_add_confirmed)
        self._storage.set_state(state)
        record = Record(Kind.LAC, state.ledger_id, state.explicit_lac, b"", 0)
        await asyncio.shield(self._journal.append([record]))
        return m.WriteLacResponse(Status.OK)

    async def _info(self) -> m.InfoResponse:
        return m.InfoResponse(
            Status.OK,
            self.bookie_id,
            "readonly" if self.readonly_reason else "writable",
            self.readonly_reason,
            await self._disk.free_bytes(),
            await self._disk.total_bytes(),
            self._storage.ledger_count,
            self._config.entry_bytes_max,
            __version__,
        )


_UNDELIVERABLE = m.EntryResult(Status.IO_ERROR)


def _refuse_all(request: m.Request, status: Status, reason: str) -> m.Response:
    """The response that gives one status to everything in the request."""
    if isinstance(request, m.AddRequest):
        results: Sequence[m.AddResult] = [m.AddResult(status, reason=reason)] * len(request.adds)
        return m.AddResponse(results)
    if isinstance(request, m.ReadRequest):
        return m.ReadResponse(status, reason=reason)
    if isinstance(request, m.ReadLacRequest):
        return m.ReadLacResponse(status, reason=reason)
    if isinstance(request, m.WriteLacRequest):
        return m.WriteLacResponse(status, reason=reason)
    return m.InfoResponse(status, reason=reason)
