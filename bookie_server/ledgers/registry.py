"""The ledgers that this node has met: a handle for each, first contact, and the order of its adds.

Always true of a handle: its decisions and the changes that follow happen in one step of the event
loop, so an add is either before a fence or refused by it; its last add confirmed never goes back.
Only the storage (logs/index.LedgerStates) knows whether the ledger is fenced, deleted or in limbo:
a handle has no copy of this state.

Always true of all handles: there is one handle per ledger; several requests that arrive together
share one first contact; verifiers are read from the metadata, never from a request; first contact
is logged (a ledger record in the journal) before any other record of that ledger; a buried ledger,
which has a tombstone (reclaim/collect.py), stays buried. A CLOSED ledger whose record does not name
this node is fenced at first contact: reclaim may have removed its state here, and a fence with it.

EVERY_LEDGER is the id of a state whose limbo holds for all ledgers. While it is in limbo, the fence
of any ledger may be lost. But a recovery changes the record before it sends a fence. So in that
time a ledger is fenced at first contact unless its record is OPEN, and a ledger that was met in an
earlier run takes no normal add before its record is read (`check_fence`).

The metadata store may have gone back in time and given an id to a second ledger. The entries of the
two ledgers are never mixed. First contact keeps the creator token of the record with the stored
entries (`LedgerState.creation`). `compare` compares that token with the token of the present
record: in each new session with the store, before the first add that is not above the highest
entry; and after the store went back, before any read or add. If the tokens differ, the stored
entries belong to the other ledger: adds are refused, and reads get *unknown*. If the tokens differ
and no entry is stored, the new token replaces the old one. If the store does not respond, adds and
reads go on.

Entries that an earlier version of the bookie stored have no token. Once the store went back, no
record can prove which ledger such entries belong to, so the bookie never gives them the token of a
record. It adds entries to such a ledger until the store goes back, or has a later epoch than the
ledger's id. From then on the bookie adds no entries, and reads go on.
"""

import asyncio
import contextlib
import hmac
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

from bookie_server.api.entry import NO_ENTRY, EntryHeader
from bookie_server.api.status import Status
from bookie_server.disk.interface import DiskFailed
from bookie_server.journal.format import Record, RecordKind, body_crc
from bookie_server.lanes import Lane, request_lane
from bookie_server.logs.index import (
    EVERY_LEDGER,
    LedgerState,
    LimboReason,
    encode_ledger_state,
    worse_reason,
)
from bookie_server.storage.entry_reader import Undeliverable
from bookie_server.storage.storage import LedgerStorage
from spark_ledger.async_tasks import SharedTasks
from spark_ledger.metadata import ledger_record, paths
from spark_ledger.metadata.cluster import IDS_PER_EPOCH
from spark_ledger.metadata.ledger_record import LedgerRecord, RecordState
from spark_ledger.metadata.store import MetadataStore, NoNode, SessionState, StoreError

T = TypeVar("T")
PAGE_CACHE = "page-cache"  # a ledger's durability: acknowledged before the sync
_TOKENS_REMEMBERED_MAX = 8
_log = logging.getLogger(__name__)


class LedgerHandle:
    """The handle of one ledger, made after first contact. `state_of` gives the storage's state of a
    ledger; until the handle is forgotten, this ledger has a state."""

    def __init__(
        self,
        ledger_id: int,
        state_of: Callable[[int], LedgerState | None],
        last_entry: int,
        last_add_confirmed: int,
        repair_credential: bytes = b"",
    ) -> None:
        self.ledger_id = ledger_id
        self._repair_credential = repair_credential
        self._state_of = state_of
        state = self.state
        self.lane = Lane.PAGE_CACHE if state.durability == PAGE_CACHE else Lane.BULK  # of adds
        self.fence_uncertain = False
        """A fence of the ledger may be lost here. The ledger takes no normal add until
        LedgerHandles.check_fence has read its record."""
        self.holds_other_ledger = False
        """The stored entries and the record of this id belong to different ledgers."""
        self.is_origin_unknown = False
        """No token proves which ledger the stored entries belong to (see the head of this file).
        The ledger takes no more entries here."""
        self.compared_at = -1
        """LedgerHandles._store_changes when the entries were last compared with the record."""
        self.is_forgotten = False
        self.use_count = 0  # frames of adds and fencing reads so far
        self.last_entry = last_entry
        self.last_add_confirmed = max(last_add_confirmed, state.explicit_lac)
        self.fence_durable: asyncio.Future[None] | None = None
        self.waiter_count = 0  # calls of wait_beyond
        self._news = asyncio.Event()  # replaced each time that it is set
        self._has_waiting_ended = state.fenced or state.deleted
        self._allowed: dict[tuple[str, bytes], bool] = {}

    @property
    def state(self) -> LedgerState:
        state = self._state_of(self.ledger_id)
        assert state is not None, f"ledger {self.ledger_id} was forgotten"
        return state

    def allows(self, use: str, token: bytes) -> bool:
        """Whether the token permits the `use`: "read", "add" or "recover". The token of the
        cluster's repair permits to read and recover any ledger."""
        if (verifiers := self.state.verifiers) is None:
            return True
        if use != "add" and token and hmac.compare_digest(token, self._repair_credential):
            return True
        key = (use, token)
        if key not in self._allowed:
            if len(self._allowed) >= _TOKENS_REMEMBERED_MAX:
                self._allowed.clear()
            self._allowed[key] = ledger_record.allows(verifiers, use, token)
        return self._allowed[key]

    def refusal_of_add(self, token: bytes, recovery: bool) -> Status | None:
        """The status with which every add is refused; None if adds may be taken."""
        if not self.allows("recover" if recovery else "add", token):
            return Status.UNAUTHORIZED
        if self.is_forgotten:
            return Status.BUSY  # the client repeats the add, and the ledger is met anew
        if self.holds_other_ledger:
            return Status.CONFLICTING_ENTRY
        if recovery:
            return None
        state = self.state
        if state.deleted:
            return Status.LEDGER_DELETED
        if state.fenced:
            return Status.FENCED
        return Status.METADATA_UNAVAILABLE if self.fence_uncertain else None

    def note_add(self, header: EntryHeader) -> None:
        """Note an add that was put into the write cache."""
        self.last_entry = max(self.last_entry, header.entry_id)
        self.raise_lac(header.last_add_confirmed)

    def raise_lac(self, last_add_confirmed: int) -> None:
        if last_add_confirmed > self.last_add_confirmed:
            self.last_add_confirmed = last_add_confirmed
            self._wake()

    def forget(self) -> None:
        """The caller drops the state of the ledger in this step of the event loop. This handle
        takes no more adds; requests that still use the handle get the last state."""
        last_state = self.state
        self._state_of = lambda _: last_state
        self.is_forgotten = True
        self.end_waiting()

    async def wait_beyond(self, previous_lac: int, wait_s: float) -> None:
        """Return when the last add confirmed exceeds `previous_lac`, when the ledger is fenced or
        deleted, when the node stops, or after `wait_s`."""
        if wait_s <= 0:
            return
        self.waiter_count += 1
        try:
            async with asyncio.timeout(wait_s):
                while self.last_add_confirmed <= previous_lac and not self._has_waiting_ended:
                    await self._news.wait()
        except TimeoutError:
            return
        finally:
            self.waiter_count -= 1

    def end_waiting(self) -> None:
        """End all present calls of `wait_beyond`; later calls return at once."""
        self._has_waiting_ended = True
        self._wake()

    def _wake(self) -> None:
        """Wake all calls of `wait_beyond`; each checks its condition again."""
        if self.waiter_count:
            self._news.set()
            self._news = asyncio.Event()


_MISSING_SHIFT, _INT64_MAX = 40, 2**63 - 1  # the shift is more than the bits of any revision
METADATA_WAIT_S = 2.0
"""Well below a client's time-out, as a request may join a first contact that has waited already."""


class LedgerJudgement(NamedTuple):
    """If `limbo` is not NONE, put the ledger in limbo for that reason; with `fence`, fence it."""

    ledger_id: int
    limbo: LimboReason
    fence: bool


class FirstContactFailed(Exception):
    """First contact failed; the response has this `status`."""

    def __init__(self, status: Status, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class LedgerHandles:
    """Ledger id to handle."""

    def __init__(
        self,
        storage: LedgerStorage,
        metadata: MetadataStore,
        bookie_id: str,
        repair_credential: bytes = b"",
    ) -> None:
        self._storage = storage
        self._repair_credential = repair_credential
        self._metadata = metadata
        self._bookie_id = bookie_id
        self._handles: dict[int, LedgerHandle] = {}
        self._first_contacts = SharedTasks[int, LedgerHandle]()
        self._fence_checks = SharedTasks[int, None]()
        self._fences: dict[int, asyncio.Future[None]] = {}  # fences that are not durable yet
        self._index_removals: dict[int, asyncio.Future[None]] = {}  # done when the removal ends
        self._comparisons = SharedTasks[int, None]()
        self._store_changes = 0  # how often a session began or the store went back
        self._went_back_at = -1  # the `_store_changes` when the store last went back; -1: never
        self.epoch = 0
        """The epoch of the metadata store, as Lineage sets it. Ledgers with ids below the first id
        of the epoch were made before a person accepted a store that had gone back."""
        metadata.add_session_listener(self._session_changed)

    def may_have_met(self, ledger_id: int) -> bool:
        """Whether this node may have met the ledger: while EVERY_LEDGER is in limbo, any ledger."""
        return self._storage.state(ledger_id) is not None or bool(self.every_ledger_state().limbo)

    def get(self, ledger_id: int) -> LedgerHandle | None:
        return self._handles.get(ledger_id)

    async def meet(self, ledger_id: int) -> LedgerHandle:
        """The ledger's handle; makes first contact if there is no handle. Raises
        FirstContactFailed."""
        while (handle := self._handles.get(ledger_id)) is None:
            handle = await self._first_contacts.result(ledger_id, lambda: self._meet(ledger_id))
            if not handle.is_forgotten:  # else meet the ledger again
                break
        return handle

    def forget(self, ledger_id: int) -> bool:
        """Forget a ledger without stored entries: its present handle takes no more adds, and the
        next request meets the ledger anew. Returns False, and forgets nothing, if first contact or
        a fence of the ledger is under way."""
        fence = self._fences.get(ledger_id)
        if ledger_id in self._first_contacts or not (fence is None or fence.done()):
            return False
        self._fences.pop(ledger_id, None)
        handle = self._handles.pop(ledger_id, None)
        if handle is not None:
            handle.forget()
        return True

    async def check_fence(self, handle: LedgerHandle) -> None:
        """Read the ledger's record; calls that come together share one read. If the record is not
        OPEN, fence the ledger again, durably. Then the fence is certain; if the record cannot be
        read, the fence stays uncertain. Raises JournalFailed."""
        await self._fence_checks.result(handle.ledger_id, lambda: self._check_fence(handle))

    async def _check_fence(self, handle: LedgerHandle) -> None:
        try:
            record = await self._record(handle.ledger_id)
        except FirstContactFailed:  # or there is no record: reclaim/collect.py judges that
            return
        if record.state is not RecordState.OPEN:
            judgement = LedgerJudgement(handle.ledger_id, LimboReason.NONE, fence=True)
            await self.put_in_limbo_or_fence([judgement])
        handle.fence_uncertain = False

    def _session_changed(self, state: SessionState) -> None:
        self._store_changes += state is SessionState.CONNECTED

    def store_went_back(self) -> None:
        """The store went back in time, or a person accepted such a store: compare every ledger
        before its next use."""
        self._store_changes += 1
        self._went_back_at = self._store_changes

    def needs_comparison(self, handle: LedgerHandle, *, new_session: bool) -> bool:
        """Whether the entries must be compared with the record: the store went back since the last
        comparison or, with `new_session`, a session began since. Adds that are not above the
        highest entry need `new_session`: if an id was given to a second ledger, that ledger's first
        add is such an add."""
        last_change = self._store_changes if new_session else self._went_back_at
        return handle.compared_at < last_change

    async def check_origin(self, handle: LedgerHandle) -> None:
        """Raises FirstContactFailed if the stored entries are another ledger's. The caller checks
        this before each read."""
        if self.needs_comparison(handle, new_session=False):
            await self.compare(handle)
        if handle.holds_other_ledger:
            reason = "the metadata store went back in time, and gave the ledger's id to another"
            raise FirstContactFailed(Status.LIMBO, reason)

    async def compare(self, handle: LedgerHandle) -> None:
        """Read the ledger's record, and note whether the stored entries are that ledger's. Calls
        that come together share one read. Raises JournalFailed."""
        await self._comparisons.result(handle.ledger_id, lambda: self._compare(handle))

    async def _compare(self, handle: LedgerHandle) -> None:
        store_changes = self._store_changes
        try:
            if self._metadata.session_state is not SessionState.CONNECTED:
                return  # a comparison is needed again in the next session
            record = await self._record(handle.ledger_id)
        except FirstContactFailed as failure:
            # adds and reads go on without the record, except in the session in which the store
            # went back
            if failure.status is Status.LEDGER_DELETED or store_changes > self._went_back_at:
                handle.compared_at = store_changes
            return
        if handle.is_forgotten:
            return
        before = handle.state
        handle.is_origin_unknown = self._is_origin_unknown(handle)
        is_other = bool(before.creation and record.creator and before.creation != record.creator)
        handle.holds_other_ledger = is_other and handle.last_entry != NO_ENTRY
        handle.compared_at = store_changes
        if handle.last_entry == NO_ENTRY and before.creation != record.creator:
            state = replace(
                before,
                creation=record.creator,
                verifiers=record.verifiers,
                durability=record.durability,
            )
            await asyncio.gather(*self._set_state(state, before))
        elif handle.holds_other_ledger:
            _log.error(
                "the record of ledger %d is another ledger's than the entries stored here: its id"
                " was given out again, after the metadata store went back in time; none of its"
                " entries is served",
                handle.ledger_id,
            )

    def _is_origin_unknown(self, handle: LedgerHandle) -> bool:
        entries_lack_token = handle.last_entry != NO_ENTRY and not handle.state.creation
        went_back = self._went_back_at >= 0 or handle.ledger_id < self.epoch * IDS_PER_EPOCH
        return entries_lack_token and went_back

    def use_count(self, ledger_id: int) -> int:
        """The number of frames of adds and of fencing reads of the ledger so far."""
        handle = self._handles.get(ledger_id)
        return 0 if handle is None else handle.use_count

    @contextlib.contextmanager
    def removing_from_index(self, ledger_id: int) -> Iterator[None]:
        """The context in which the caller removes the ledger's entries from an index. Adds and
        fencing reads wait for its end (`wait_for_removals`), as the index may still have entries
        that are about to be removed."""
        done = self._index_removals[ledger_id] = asyncio.get_running_loop().create_future()
        try:
            yield
        finally:
            del self._index_removals[ledger_id]
            done.set_result(None)

    async def wait_for_removals(self, ledger_ids: Iterable[int]) -> None:
        """Wait while entries of these ledgers are being removed from an index."""
        for ledger_id in ledger_ids:
            while (done := self._index_removals.get(ledger_id)) is not None:
                await asyncio.shield(done)

    def unburied_ids(self) -> list[int]:
        """The ids of the ledgers of which this node has a state, except buried ledgers."""
        return [
            state.ledger_id
            for state in self._storage.states()
            if not state.deleted and state.ledger_id != EVERY_LEDGER
        ]

    async def bury(self, ledger_ids: Sequence[int]) -> None:
        """Set the tombstones of these ledgers, which take no normal add from now on. The tombstones
        are durable when this returns.

        Raises JournalFailed.
        """
        records = []
        for ledger_id in ledger_ids:
            before = self._storage.state(ledger_id)
            if before is None:  # forgotten while the caller read the metadata
                continue
            state = self._storage.set_state(replace(before, deleted=True))
            if (handle := self._handles.get(ledger_id)) is not None:
                handle.end_waiting()
            records.append(_ledger_record(state))
        if records:
            await asyncio.shield(self._storage.append(records))

    # -- limbo, as limbo.py decides --

    def every_ledger_state(self) -> LedgerState:
        """The state of EVERY_LEDGER: its limbo holds for all ledgers."""
        return self._storage.state(EVERY_LEDGER) or LedgerState(EVERY_LEDGER)

    def limbo(self, ledger_id: int) -> tuple[LimboReason, int]:
        """The ledger's own limbo (not EVERY_LEDGER's), NONE if the ledger is not in limbo; and the
        revision of the limbo: the state's revision and, in the bits above it, which of the ledger's
        directories are missing."""
        state = self._storage.state(ledger_id)
        if state is None:
            return LimboReason.NONE, 0
        missing = self._storage.directories.missing_bits(state) << _MISSING_SHIFT
        return self._limbo_of(state), state.revision | (missing & _INT64_MAX)

    def limbo_reasons(self) -> dict[int, LimboReason]:
        """By ledger id, the reasons of the ledgers that have a limbo of their own."""
        return {
            state.ledger_id: reason
            for state in self._storage.states()
            if state.ledger_id != EVERY_LEDGER and (reason := self._limbo_of(state))
        }

    def _limbo_of(self, state: LedgerState) -> LimboReason:
        """The ledger's limbo; LOST while one of its directories is missing."""
        is_whole = self._storage.directories.is_whole(state)
        return state.limbo if is_whole else LimboReason.LOST

    async def renew_revision(self, ledger_id: int) -> None:
        """Give the ledger's limbo a new revision, durably. From then on a ClearLimbo with an older
        revision does not clear the limbo. Raises JournalFailed."""
        if (before := self._storage.state(ledger_id)) is None:
            return
        state = self._storage.set_state(before)
        await asyncio.shield(self._storage.append([_ledger_record(state)]))

    async def put_in_limbo_or_fence(self, judgements: Sequence[LedgerJudgement]) -> None:
        """Carry out the judgements, durably. If a ledger is in limbo already, the worse of the two
        reasons counts. Raises JournalFailed."""
        changes = []
        for ledger_id, limbo, fence in judgements:
            before = self._storage.state(ledger_id)
            if before is not None or limbo or fence:
                base = before or LedgerState(ledger_id, met=False)
                reason = worse_reason(base.limbo, limbo)
                state = replace(base, limbo=reason, fenced=base.fenced or fence)
                changes += self._set_state(state, before)
        await asyncio.gather(*changes)

    async def clear_limbo(self, ledger_id: int) -> None:
        """Take the ledger, or EVERY_LEDGER, out of limbo, durably; the ledger gives up its missing
        directories. Raises JournalFailed."""
        before = self._storage.state(ledger_id)
        if before is not None:
            directories = self._storage.directories
            state = directories.without_missing(replace(before, limbo=LimboReason.NONE))
            writes = self._storage.rescue(ledger_id)  # repair may have compared entries in memory
            changes = [*writes, *self._set_state(state, before)]
            if ledger_id == EVERY_LEDGER:
                for handle in self._handles.values():
                    handle.fence_uncertain = False
            await asyncio.gather(*changes)

    def _set_state(
        self, state: LedgerState, before: LedgerState | None
    ) -> list[asyncio.Future[None]]:
        """Set the state; `before` is the state that the caller read in this step of the event loop.
        Returns futures that are done when the state is durable. Even an unchanged state may not be
        durable yet, for example if its journal failed and the next flush will write the state."""
        if state == before:
            return [asyncio.shield(self._storage.append([], after=[state.ledger_id]))]
        ledger_id, state = state.ledger_id, self._storage.set_state(state)
        done = self._storage.append([_ledger_record(state)])
        if state.fenced and not (before and before.fenced):
            if (handle := self._handles.get(ledger_id)) is not None:
                handle.end_waiting()
                handle.fence_durable = done
            self._note_fence(ledger_id, done)
        return [asyncio.shield(done)]

    def _note_fence(self, ledger_id: int, durable: asyncio.Future[None]) -> None:
        """Note a fence that is durable when the future is done. A request that meets the ledger
        earlier waits for the future, or sets the fence again if the future failed."""

        def drop(durable: asyncio.Future[None]) -> None:
            has_failed = durable.cancelled() or durable.exception() is not None
            if not has_failed and self._fences.get(ledger_id) is durable:
                del self._fences[ledger_id]

        self._fences[ledger_id] = durable
        durable.add_done_callback(drop)

    def wake_all(self) -> None:
        """End all calls of `wait_beyond`: the node stops."""
        for handle in self._handles.values():
            handle.end_waiting()

    async def _meet(self, ledger_id: int) -> LedgerHandle:
        # always in recovery's lane: a fence may join the task of a request in another lane
        request_lane.set(Lane.RECOVERY)
        state = self._storage.state(ledger_id)
        is_first, store_changes = state is None or not state.met, self._store_changes
        if is_first:
            await self._first_contact(ledger_id, state)
        try:
            last, lac = await self._last_entry_and_lac(ledger_id)
        except DiskFailed as error:
            raise FirstContactFailed(Status.IO_ERROR, str(error)) from error
        credential = self._repair_credential
        handle = LedgerHandle(ledger_id, self._storage.state, last, lac, credential)
        self._handles[ledger_id] = handle
        handle.fence_durable = self._fences.get(ledger_id)
        handle.fence_uncertain = bool(self.every_ledger_state().limbo) and not is_first
        handle.compared_at = store_changes if is_first else -1
        handle.is_origin_unknown = self._is_origin_unknown(handle)
        return handle

    async def _first_contact(self, ledger_id: int, replayed_state: LedgerState | None) -> None:
        """Read the ledger's record and log that the ledger was met. `replayed_state`: the state
        that replay read from a damaged journal, if any."""
        are_fences_uncertain = bool(self.every_ledger_state().limbo)
        record = await self._record(ledger_id)
        # the state may have been fenced, or put in limbo, while the record was read
        before = self._storage.state(ledger_id) or replayed_state or LedgerState(ledger_id)
        # a bookie that is no member, or is only joining, may have lost a fence
        members = [bookie for fragment in record.fragments for bookie in fragment.ensemble]
        is_no_member = bool(self._bookie_id) and record.closed and self._bookie_id not in members
        may_be_fenced = are_fences_uncertain and record.state is not RecordState.OPEN
        state = replace(
            before,
            verifiers=record.verifiers,
            durability=record.durability,
            met=True,
            creation=before.creation or record.creator,
            fenced=before.fenced or is_no_member or may_be_fenced,
        )
        state = self._storage.set_state(state)
        done = self._storage.append([_ledger_record(state)])
        if state.fenced:
            self._note_fence(ledger_id, done)

    async def _record(self, ledger_id: int) -> LedgerRecord:
        """The ledger's record, after a sync. Raises FirstContactFailed."""
        path = paths.ledger(ledger_id)
        try:
            async with asyncio.timeout(METADATA_WAIT_S):
                await self._metadata.sync(path)
                return ledger_record.decode((await self._metadata.get(path)).value)
        except NoNode as error:
            raise FirstContactFailed(Status.LEDGER_DELETED, "the ledger has no record") from error
        except TimeoutError as error:
            reason = f"the metadata store did not respond within {METADATA_WAIT_S} s"
            raise FirstContactFailed(Status.METADATA_UNAVAILABLE, reason) from error
        except (StoreError, ledger_record.BadLedgerRecord) as error:
            raise FirstContactFailed(Status.METADATA_UNAVAILABLE, str(error)) from error

    async def _last_entry_and_lac(self, ledger_id: int) -> tuple[int, int]:
        """The highest stored entry, and the last add confirmed in its header."""
        last = await self._storage.reader.last_entry(ledger_id)
        if last is None:
            return NO_ENTRY, NO_ENTRY
        header = (await self._storage.reader.headers(ledger_id, [last])).get(last)
        if header is None or isinstance(header, Undeliverable):
            return last, NO_ENTRY
        return last, header.last_add_confirmed


def _ledger_record(state: LedgerState) -> Record:
    body = encode_ledger_state(state)
    return Record(RecordKind.LEDGER, state.ledger_id, NO_ENTRY, body, body_crc(body))
