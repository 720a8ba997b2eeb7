"""One storage node: the order of its decisions, and its responses.

Always true (docs/protocol.md has the reasons):
- an add gets OK only after the sync that covers it (page-cache ledgers: the write); if the same
  entry is stored already, the add gets OK, and if another entry has the id, the add is refused; a
  fenced ledger takes only recovery's adds;
- a request that fences gets its response, whatever its status, only after the fence is durable;
- an entry that exists, or may have existed, and cannot be delivered is never "no such entry";
- every limit is in bytes; beyond it the response is BUSY, at once; recovery has a reserve;
- the first failure of the journal or the storage is final: `failed` is set, and no add is
  acknowledged any more.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any

from bookie_server import __version__
from bookie_server.add import Adder
from bookie_server.api import messages as m
from bookie_server.api.codec import ENTRY_ID_MAX
from bookie_server.api.entry import NO_ENTRY
from bookie_server.api.messages import EntryIds, ids_in, spans_of
from bookie_server.api.status import Status, StopReason
from bookie_server.config import StorageConfig
from bookie_server.disk import monitor as disk_monitor
from bookie_server.disk.interface import DiskFailed
from bookie_server.disk.monitor import DiskMonitor, Role, WatchedDirectory
from bookie_server.journal import checkpoint
from bookie_server.journal.format import Record, RecordKind
from bookie_server.journal.writer import JournalFailed
from bookie_server.lanes import RETRY_AFTER_MS_MAX, Budget, Lane, calling, request_lane
from bookie_server.ledgers.cluster_ledgers import ClusterLedgers
from bookie_server.ledgers.limbo import Limbo, absence
from bookie_server.ledgers.peers import Ask, Peers, no_response
from bookie_server.ledgers.registry import (
    FirstContactFailed,
    LedgerHandle,
    LedgerHandles,
    LedgerJudgement,
)
from bookie_server.logs.index import EVERY_LEDGER, LimboReason, worse_reason
from bookie_server.reclaim.reclaim import Reclaim
from bookie_server.start.replay import open_storage
from bookie_server.storage.directories import Directories
from bookie_server.storage.entry_reader import Range, Undeliverable
from bookie_server.storage.storage import LedgerStorage
from spark_ledger.async_tasks import BackgroundTasks
from spark_ledger.metadata.store import MetadataStore

STORED_AT_ONCE = 65536  # entries that one Stored looks up
RESULTS_MAX = 16384  # statuses in one response of Read, whatever the range
WAIT_MS_MAX = 60_000
LONG_POLLS_MAX = 8192  # a few KiB each; beyond it the response is BUSY


class Bookie:
    """Order and decisions of one node. All of it runs on one event loop. Made by `start`."""

    def __init__(
        self,
        bookie_id: str,
        disks: DiskMonitor,
        storage: LedgerStorage,
        metadata: MetadataStore,
        config: StorageConfig,
        cluster_id: str = "",
        repair_credential: bytes = b"",
        ask: Ask = no_response,
    ) -> None:
        self.bookie_id = bookie_id
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done with an exception when journal or storage failed: the process must exit."""
        self.disks = disks
        self.is_drained = False
        """An operator drains the bookie, so that its copies move to others: it is read-only."""
        self.phase = ""
        """The state in Info, if not empty: "starting" until the process has registered the
        bookie."""
        self.storage = storage
        self._config = config
        self.ledgers = LedgerHandles(storage, metadata, bookie_id, repair_credential)
        self._adder = Adder(storage, self.ledgers, config)
        self.under_way = 0
        """Requests that have no response yet."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_stopping = False
        self.received = Budget(config.receive_bytes_max, config.recovery_reserve_bytes)
        """Requests that came and have no response yet."""
        self.responses = Budget(config.read_pending_bytes_max, config.recovery_reserve_bytes)
        """Responses that are being read from disk, or sent."""
        self.long_polls = 0
        """How many calls wait for a last add confirmed to rise."""
        self._storage_task = asyncio.ensure_future(storage.run())
        peers = Peers(ask, repair_credential)
        self.reclaim = Reclaim(
            *(storage, self.ledgers, metadata, config, bookie_id, cluster_id, peers)
        )
        cluster_ledgers = ClusterLedgers(metadata, cluster_id)
        self._limbo = Limbo(
            *(bookie_id, storage, self.ledgers, metadata, cluster_ledgers, config.limbo_check_s),
            self._standing_changed,
        )
        disks.listeners.append(self._limbo.wake)
        storage.on_loss = self._standing_changed
        storage.on_quarantine = self._limbo.note_damage
        # without its cluster's id a node cannot find out which ledgers it may have had
        limbo_runs = [self._limbo.run()] if cluster_id else []
        self._background = BackgroundTasks(self._fail)
        for work in (self.reclaim.run(), *limbo_runs, disks.run()):
            self._background.start(work)
        for task in (self._storage_task, storage.journals_end):
            task.add_done_callback(self._on_task_end)

    @classmethod
    async def start(
        cls,
        bookie_id: str,
        directories: Directories,
        metadata: MetadataStore,
        config: StorageConfig,
        cluster_id: str = "",
        repair_credential: bytes = b"",
        ask: Ask = no_response,
    ) -> "Bookie":
        """Replay the journals' records beyond the checkpoint. The bookie is ready to serve when
        this returns.

        Without a `cluster_id` no ledger ever counts as deleted. Without `ask` the bookie never
        drops copies that only other bookies should have. The `repair_credential` of the cluster
        permits to read and repair ledgers that have a password. Raises DiskFailed.
        """
        watched = [
            WatchedDirectory(
                directory.id, directory.name, role, directory.disk, directory.file_system
            )
            for role, directories_of_role in (
                (Role.JOURNAL, directories.journals),
                (Role.LEDGER, directories.ledgers),
            )
            for directory in directories_of_role
        ]
        names = directories.failed_names
        failures = {names.get(i, i): why for i, why in directories.failed.items()}
        disks = DiskMonitor(watched, config, failures, small=(f"{checkpoint.FOLDER}/",))
        await disks.look()  # before the replay, which may need the reserve
        storage = await open_storage(
            directories._replace(
                journals=[replace(d, disk=disks.disk(d.id)) for d in directories.journals],
                ledgers=[replace(d, disk=disks.disk(d.id)) for d in directories.ledgers],
            ),
            config,
            disks,
        )
        disks.attach(storage.failure, storage.drop, storage.absent)
        return cls(bookie_id, disks, storage, metadata, config, cluster_id, repair_credential, ask)

    @property
    def readonly_reason(self) -> str:
        """Why the node refuses all normal adds; empty when it is writable."""
        if self.failed.done():
            return f"the storage failed: {self.failed.exception()}"
        reason = self.storage.directories.damage
        if not reason and self.is_drained:
            reason = "it is being drained"
        if self.ledgers.every_ledger_state().limbo == LimboReason.LOST:
            reason = "acknowledged data may have been lost here; every ledger is in limbo"
        if not self.disks.any_full:
            return reason
        return disk_monitor.readonly_reason(self.disks.states, reason)

    @property
    def retry_after_ms(self) -> int:
        """When a caller whose add was refused with BUSY should try again."""
        return self._adder.retry_after_ms

    async def handle(self, request: m.Request) -> m.Response:
        """Carry out a request. Never raises for a bad request."""
        if request.bookie_id != self.bookie_id and (
            request.bookie_id or not isinstance(request, m.InfoRequest)
        ):
            return _refuse_all(request, Status.WRONG_BOOKIE, f"this is {self.bookie_id}")
        if self._is_stopping and not isinstance(request, m.InfoRequest):
            return _refuse_all(request, Status.SHUTTING_DOWN, "the bookie is stopping")
        if self.failed.done():
            return _refuse_all(request, Status.IO_ERROR, str(self.failed.exception()))
        self.under_way += 1
        self._idle.clear()
        lane = request_lane.set(Lane.RECOVERY if _is_recovery(request) else Lane.BULK)
        try:
            return await self._dispatch(request)
        except (JournalFailed, DiskFailed) as error:
            return _refuse_all(request, Status.IO_ERROR, str(error))
        except FirstContactFailed as error:
            return _refuse_all(request, error.status, error.reason)
        finally:
            request_lane.reset(lane)
            self.under_way -= 1
            if not self.under_way:
                self._idle.set()

    def drain(self) -> None:
        """Take no new requests. Requests under way get their response, and long polls get theirs at
        once. Writes no longer wait for disk space."""
        self._is_stopping = True
        self.phase = "draining"
        self.ledgers.wake_all()
        self.storage.hurry()

    async def put_all_in_limbo(self, *, until_restart: bool = False) -> None:
        """Put every ledger in limbo, as acknowledged entries of any ledger may be missing here.
        From this step on the node gives no negative response, until the walk has judged each
        ledger; with `until_restart`, until the next start. Durable when it returns. Raises
        JournalFailed."""
        self._limbo.is_halted = self._limbo.is_halted or until_restart
        await self.ledgers.put_in_limbo_or_fence(
            [LedgerJudgement(EVERY_LEDGER, LimboReason.LOST, fence=False)]
        )
        self._limbo.wake()
        self._standing_changed()

    def run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run the work until the bookie stops; if the work raises, the node has failed."""
        self._background.start(work)

    async def stop(self) -> None:
        """Drain the requests under way, flush, seal the journals, close the index.

        Raises JournalFailed or DiskFailed when the node had failed or fails now.
        """
        self.drain()
        self._background.cancel()
        await self._idle.wait()
        self.storage.stop()
        await self._storage_task
        await self.storage.close()

    def abandon(self) -> None:
        """End at once, as a crash would: nothing is flushed, no response is sent."""
        self._is_stopping = True
        self._background.cancel()
        self._storage_task.cancel()
        self.storage.abandon()

    def _standing_changed(self) -> None:
        for listener in self.disks.listeners:
            listener()

    def _on_task_end(self, task: asyncio.Future[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)
            self.failed.exception()  # counts as retrieved even if no task awaits `failed`
            self._standing_changed()

    async def _dispatch(self, request: m.Request) -> m.Response:
        if isinstance(request, m.AddRequest):
            reason = self.readonly_reason
            is_disk_exhausted = bool(reason) and disk_monitor.is_exhausted(
                self.disks.states, self.storage.cache.unflushed_bytes, self._config
            )
            return await self._adder.add(request, reason, even_recovery=is_disk_exhausted)
        if isinstance(request, m.ReadRequest):
            return await self._read(request)
        if isinstance(request, m.ReadLacRequest):
            return await self._read_lac(request)
        if isinstance(request, m.WriteLacRequest):
            return await self._write_lac(request)
        if isinstance(request, m.ClearLimboRequest):
            return await self._limbo.respond(request)
        if isinstance(request, m.StoredRequest):
            return await self._stored(request)
        return await self._info()

    async def _meet(self, ledger_id: int) -> LedgerHandle:
        """The ledger's handle. Raises FirstContactFailed, also if the stored entries are another
        ledger's."""
        handle = await self.ledgers.meet(ledger_id)
        await self.ledgers.check_origin(handle)
        return handle

    # -- read --

    async def _read(self, request: m.ReadRequest) -> m.ReadResponse:
        if reason := _range_fault(request):
            return m.ReadResponse(Status.BAD_REQUEST, reason=reason)
        if not request.fence and not self.ledgers.may_have_met(request.ledger_id):
            return m.ReadResponse(Status.NO_SUCH_LEDGER)
        handle = await self._meet(request.ledger_id)
        if not handle.allows("recover" if request.fence else "read", request.token):
            return m.ReadResponse(Status.UNAUTHORIZED)
        if request.fence:
            handle.use_count += 1  # reclaim then keeps the copies and the fence: repair needs them
            await self._fence(handle)
            await self.ledgers.wait_for_removals([request.ledger_id])
        bytes_max = min(request.max_bytes, self._config.read_bytes_max)
        caller = calling.get()
        if not self.responses.has_room(bytes_max, recovery=request.fence, caller=caller):
            return m.ReadResponse(Status.BUSY, retry_after_ms=self._config.retry_after_ms)
        self.responses.take(bytes_max, caller)  # the size is known only after the read
        try:
            ids = ids_in(request.spans, RESULTS_MAX)
            if request.tail_entries:
                last = max(request.first_entry - 1, handle.last_entry)
                first = max(request.first_entry, last - request.tail_entries + 1)
                ids = range(first, min(last + 1, ENTRY_ID_MAX) + 1)
            locate = request.locations and not request.fence
            outcome = await self._look(request.ledger_id, ids, max(bytes_max, 1), locate=locate)
            if request.fence:  # the entries of the response count as copies
                await self.storage.await_durable(request.ledger_id)
            response = self._read_response(request, ids, handle, outcome)
            if not locate or not request.ahead:
                return response
            ahead = ids_in(request.ahead, RESULTS_MAX)
            located = await self.storage.reader.locations(request.ledger_id, ahead)
            return response._replace(ahead=located)
        finally:  # handler.encoded_response counts its own bytes, with no await in between
            self.responses.give_back(bytes_max, caller)

    async def _look(self, ledger_id: int, ids: EntryIds, max_bytes: int, *, locate: bool) -> Range:
        """Read the stored entries. If the ledger's limbo was cleared meanwhile, read again, as the
        entries may have come only after the look-up. Raises DiskFailed."""
        while True:
            limbo_before = self.storage.limbo(ledger_id)
            outcome = await self.storage.reader.read(ledger_id, ids, max_bytes, locate=locate)
            limbo = self.storage.limbo(ledger_id)
            if worse_reason(limbo_before, limbo) == limbo:
                return outcome

    def _read_response(
        self, request: m.ReadRequest, ids: EntryIds, handle: LedgerHandle, outcome: Range
    ) -> m.ReadResponse:
        # a node responds *no such entry* only if it is certain
        absent = m.EntryResult(absence(self.storage.limbo(handle.ledger_id)))
        end = ids[-1] if request.tail_entries else request.spans[-1][1]
        is_whole = outcome.known_through >= end
        stop = StopReason.END_OF_RANGE if is_whole else StopReason.BYTE_LIMIT
        last_stored = max(outcome.entries, default=NO_ENTRY)
        results: list[m.EntryResult] = []
        for entry_id in ids:
            entry = outcome.entries.get(entry_id)
            if entry_id > outcome.known_through:
                break
            if request.tail_entries and is_whole and entry_id > last_stored:
                results.append(absent)
                stop = StopReason.REST_IS_ABSENT
                break
            if entry is None:
                results.append(absent)
            elif isinstance(entry, Undeliverable):
                results.append(_UNDELIVERABLE)
            elif isinstance(entry, m.EntryLocation):
                results.append(m.EntryResult(Status.OK, location=entry))
            else:
                results.append(m.EntryResult(Status.OK, entry))
        lac, skipped = handle.last_add_confirmed, ids[0] - request.first_entry
        return m.ReadResponse(Status.OK, results, lac, stop, skipped=skipped)

    async def _stored(self, request: m.StoredRequest) -> m.StoredResponse:
        """The entries that cache and index have, once they are durable: the caller counts them as
        copies. They are not read here; the scrub finds entries that cannot be read."""
        first, last = request.first_entry, request.last_entry
        if reason := _range_fault(request):
            return m.StoredResponse(Status.BAD_REQUEST, reason=reason)
        if not self.ledgers.may_have_met(request.ledger_id):
            return m.StoredResponse(Status.OK, last)
        handle = await self._meet(request.ledger_id)
        if not handle.allows("read", request.token):
            return m.StoredResponse(Status.UNAUTHORIZED)
        through = min(last, first + STORED_AT_ONCE - 1)
        flushes = -1
        while flushes != self.storage.flushes:  # an entry may have moved meanwhile
            flushes = self.storage.flushes
            stored = await self.storage.reader.stored(request.ledger_id, first, through)
        await self.storage.await_durable(request.ledger_id)
        return m.StoredResponse(Status.OK, through, spans_of(sorted(stored)))

    # -- fence, last add confirmed --

    async def _fence(self, handle: LedgerHandle) -> None:
        """Returns when the fence is durable. Raises JournalFailed."""
        # the journal of an earlier fence may have failed, while other journals live
        must_repeat = handle.fence_durable is not None and _has_failed(handle.fence_durable)
        if must_repeat or not handle.state.fenced:
            state = self.storage.set_state(replace(handle.state, fenced=True))
            handle.end_waiting()
            record = Record(RecordKind.FENCE, state.ledger_id, NO_ENTRY, b"", 0)
            handle.fence_durable = self.storage.append([record], Lane.RECOVERY)
        if handle.fence_durable is not None:  # None: fenced in an earlier run, durable since
            await asyncio.shield(handle.fence_durable)

    async def _read_lac(self, request: m.ReadLacRequest) -> m.ReadLacResponse:
        if request.ledger_id < 0:
            return m.ReadLacResponse(Status.BAD_REQUEST, reason="a ledger id is not negative")
        handle = await self._meet(request.ledger_id)
        if not handle.allows("recover" if request.fence else "read", request.token):
            return m.ReadLacResponse(Status.UNAUTHORIZED)
        if request.fence:
            await self._fence(handle)
        wait_ms = 0 if self._is_stopping else min(request.wait_ms, WAIT_MS_MAX)
        if wait_ms > 0 and self.long_polls >= LONG_POLLS_MAX:
            return m.ReadLacResponse(Status.BUSY, retry_after_ms=RETRY_AFTER_MS_MAX)
        self.long_polls += 1
        try:
            await handle.wait_beyond(request.previous_lac, wait_ms / 1000)
        finally:
            self.long_polls -= 1
        lac, fenced = handle.last_add_confirmed, handle.state.fenced
        return m.ReadLacResponse(Status.OK, lac, fenced, taken=handle.last_entry + 1)

    async def _write_lac(self, request: m.WriteLacRequest) -> m.WriteLacResponse:
        if request.ledger_id < 0 or request.last_add_confirmed < NO_ENTRY:
            return m.WriteLacResponse(Status.BAD_REQUEST, reason="negative ids")
        handle = await self._meet(request.ledger_id)
        if not handle.allows("add", request.token):
            return m.WriteLacResponse(Status.UNAUTHORIZED)
        if handle.state.deleted:
            return m.WriteLacResponse(Status.LEDGER_DELETED)
        lac = max(handle.state.explicit_lac, request.last_add_confirmed)
        state = self.storage.set_state(replace(handle.state, explicit_lac=lac))
        handle.raise_lac(lac)
        record = Record(RecordKind.LAC, state.ledger_id, state.explicit_lac, b"", 0)
        await asyncio.shield(self.storage.append([record]))
        return m.WriteLacResponse(Status.OK)

    async def _info(self) -> m.InfoResponse:
        return m.InfoResponse(
            Status.OK,
            self.bookie_id,
            self.phase or ("readonly" if self.readonly_reason else "writable"),
            self.readonly_reason,
            *disk_monitor.total_space(self.disks.states),
            self.storage.ledger_count,
            self._config.entry_bytes_max,
            __version__,
            [
                m.DirectoryInfo(d.name, d.role.value, *d.space, d.full, d.failure)
                for d in self.disks.states
            ],
            len(self.ledgers.limbo_reasons()) + bool(self.ledgers.every_ledger_state().limbo),
            self.reclaim.describe(),
        )


def _range_fault(request: m.ReadRequest | m.StoredRequest) -> str:
    """Why the request's range is malformed; empty if it is well-formed."""
    ledger_id, first, last = request.ledger_id, request.first_entry, request.last_entry
    if ledger_id < 0 or not 0 <= first <= last:
        return f"no range of entries: {ledger_id}:{first}..{last}"
    return ""


def _has_failed(done: asyncio.Future[None]) -> bool:
    return done.done() and not done.cancelled() and done.exception() is not None


_UNDELIVERABLE = m.EntryResult(Status.IO_ERROR)
_RESPONSES = dict(m.METHODS.values())


def _is_recovery(request: m.Request) -> bool:
    """Whether the request belongs to recovery's lane; the first add decides for a frame of adds."""
    if isinstance(request, m.AddRequest):
        return bool(request.adds) and request.adds[0].recovery
    return isinstance(request, m.ReadRequest | m.ReadLacRequest) and request.fence


def _refuse_all(request: m.Request, status: Status, reason: str) -> m.Response:
    """The response that gives one status to the whole request."""
    if isinstance(request, m.AddRequest):
        results: Sequence[m.AddResult] = [m.AddResult(status, reason=reason)] * len(request.adds)
        return m.AddResponse(results)
    refusal: m.Response = _RESPONSES[type(request)](status=status, reason=reason)
    return refusal
