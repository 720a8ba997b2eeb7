"""Ledgers of which this node may have lost something: what it responds, which it lists, when each
is cleared.

    EVERY_LEDGER in limbo -> walk the cluster's ledgers: those concerned get it themselves
    -> EVERY_LEDGER is cleared -> each is listed under /limbo/<bookie>/<ledger>
    -> repair compares and sends ClearLimbo -> cleared durably -> not listed any more

Always true:
- of two reasons the worse one counts: "lost" (acknowledged entries) before "torn" (what was not
  synced when the node last died); while EVERY_LEDGER has one, no absence is a denial, that of a
  ledger never met either;
- EVERY_LEDGER is cleared only after a whole listing, from a store that held our cluster before and
  after it, and after the limbo of every ledger concerned is durable. Torn concerns those that are
  not CLOSED and name this node; lost, and a record that cannot be understood, all that name it.
  A CLOSED ledger is "lost" after a torn tail if something that belongs here is not here, and
  "torn" if one of its directories is not here either: what that one has is not decided without it;
- a ledger that the walk finds IN_RECOVERY or CLOSED is fenced here, if anything is known of it here
  or its record names this node: a fence is asked for only after its record said so, so one that
  the tail has taken along comes back. Before the walk is over no normal add is taken of a ledger
  that was met in an earlier run before its record was read (LedgerHandles.make_sure);
- a ledger that is known here, has no record and is not named as deleted is in limbo for that reason
  and fenced: the store may be an older copy, and what it says is put back with the newer one;
- limbo is cleared by ClearLimbo alone, if nothing was added to it since the comparison began
  (`revision`), and for a ledger that was deleted; damage that is found in a ledger that is "lost"
  already adds to it too: what was told before does not clear it;
- a ledger is "lost" too while one of its directories is not there; clearing it gives that one up:
  what it may bring back is garbage. One that comes back before is not missed any more;
- a comparison counts only if the node ran all the while and no directory of the ledger went;
- a ledger that gets into limbo is listed at once;
- every step can be repeated: a restart at any of them goes on where the states say.
"""

import asyncio
import json
import logging
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b

from bookie_server.api.messages import ClearLimboRequest, ClearLimboResponse
from bookie_server.api.status import Status
from bookie_server.disk.interface import DiskFailed
from bookie_server.journal.writer import JournalFailed
from bookie_server.ledgers.cluster_ledgers import READS_AT_ONCE, READS_PER_S, ClusterLedgers
from bookie_server.ledgers.registry import LedgerHandles
from bookie_server.logs.index import EVERY_LEDGER, LedgerState, LimboReason
from bookie_server.storage.storage import LedgerStorage
from spark_ledger.metadata import ledger_record, paths
from spark_ledger.metadata.cluster import BadClusterRecord
from spark_ledger.metadata.ledger_record import (
    BadLedgerRecord,
    LedgerRecord,
    entries_kept,
    keeps,
    ledger_ids,
)
from spark_ledger.metadata.store import (
    MetadataStore,
    NodeExists,
    NoNode,
    SessionState,
    StoreError,
)
from spark_ledger.metadata.store_calls import names_in

_COUNTED_AT_ONCE = 4096
COUNTED_PER_S = 200_000  # entries that the walk looks up, as many as reclaim does
GATHER_S = 0.1  # ledgers that get into limbo together are listed together
_log = logging.getLogger(__name__)


def absence(limbo: LimboReason) -> Status:
    """The status of an entry that is not stored."""
    if limbo == LimboReason.LOST:
        return Status.LIMBO
    return Status.LIMBO_TORN if limbo == LimboReason.TORN else Status.NO_SUCH_ENTRY


class Limbo:
    """Of one node. `standing_changed` is called when it stops being read-only."""

    def __init__(
        self,
        bookie_id: str,
        storage: LedgerStorage,
        ledgers: LedgerHandles,
        metadata: MetadataStore,
        records: ClusterLedgers,
        check_s: float,
        standing_changed: Callable[[], None],
    ) -> None:
        self._standing_changed = standing_changed
        self._bookie_id = bookie_id
        self._storage = storage
        self._ledgers = ledgers
        self._metadata = metadata
        self._records = records
        self._check_s = check_s
        self._listed: dict[int, str] | None = None  # as the store has it; None: not looked yet
        self._told: dict[int, None] = {}  # in this run, since damage was found last
        self.halted = False
        """Nothing leaves limbo in this run any more."""
        self._wake = asyncio.Event()
        self._run = 0  # a session of this run; 0: there was none yet
        metadata.add_session_listener(self._session_changed)
        self._forget_at = 0.0  # when deleted ledgers are looked for again, by the loop's clock

    def wake(self) -> None:
        """Look at once: a ledger is in limbo, or a directory may have been dropped."""
        self._wake.set()

    def _session_changed(self, state: SessionState) -> None:
        """Another session may be with another copy of the store: the list is looked at again."""
        if state is SessionState.LOST:
            self._listed = None
            self.wake()

    def damaged(self, ledger_id: int) -> None:
        """Damage was found in what is stored of the ledger: a comparison that began before may have
        seen it whole, so the next response is of a new revision."""
        self._told.pop(ledger_id, None)

    async def run(self) -> None:
        """Look every `check_s`, and when a ledger got into limbo or out of it. A journal that
        failed while others are left ends nothing: the next look goes on."""
        while True:
            self._wake.clear()
            try:
                await self.look()
            except (StoreError, BadClusterRecord, JournalFailed) as failure:
                _log.warning("ledgers in limbo were not looked at to the end: %r", failure)
            try:
                async with asyncio.timeout(self._check_s):
                    await self._wake.wait()
                    await asyncio.sleep(GATHER_S)
            except TimeoutError:
                continue

    async def look(self) -> None:
        """Walk if need be, and bring the list up to date. Raises StoreError, BadClusterRecord
        (then the next look goes on), JournalFailed."""
        if self.halted:
            return
        every = self._ledgers.every()
        if not every.limbo and not self._ledgers.in_limbo() and self._listed == {}:
            return
        if not await self._records.store_is_ours():
            return
        if every.limbo:
            await self._walk(every)
        await self._publish()
        now = asyncio.get_running_loop().time()
        if now >= self._forget_at:  # this asks the store for each: not whenever one comes
            self._forget_at = now + self._check_s
            await self._forget_deleted()
            await self._publish()

    # -- the walk ------------------------------------------------------------------------------

    async def _walk(self, every: LedgerState) -> None:
        """Put the ledgers concerned in limbo, durably, and take EVERY_LEDGER out of it."""
        judged: list[tuple[int, LimboReason, bool]] = []
        count = concerned = lost = 0
        unlisted = dict.fromkeys(self._ledgers.alive())
        async for ledger_id in ledger_ids(self._metadata):
            count += 1
            unlisted.pop(ledger_id, None)
            limbo, fence = await self._judge(ledger_id, every.limbo)
            concerned += bool(limbo)
            lost += limbo == LimboReason.LOST
            judged.append((ledger_id, limbo, fence))
            if count % READS_AT_ONCE == 0:
                await self._ledgers.doubt(judged)
                judged = []
                await asyncio.sleep(READS_AT_ONCE / READS_PER_S)
        unrecorded = await self._records.unrecorded(list(unlisted))
        if unrecorded is None:
            return
        judged += [(ledger_id, every.limbo, True) for ledger_id in unrecorded]
        concerned += len(unrecorded)
        await self._ledgers.doubt(judged)
        ours = await self._records.store_is_ours()
        if ours and not self.halted and self._ledgers.every() is every:
            await self._ledgers.clear_limbo(EVERY_LEDGER)
            self._standing_changed()
            text = "%d of %d ledgers are in limbo here (%s), something is known to be lost of %d"
            _log.warning(text, concerned, count, every.limbo, lost)

    async def _judge(self, ledger_id: int, reason: LimboReason) -> tuple[LimboReason, bool]:
        """Why the ledger is in limbo here from now on, NONE if it is not concerned; and whether it
        is to be fenced."""
        try:
            node = await self._metadata.get(paths.ledger(ledger_id))
            record = ledger_record.decode(node.value)
        except NoNode:
            return LimboReason.NONE, False
        except BadLedgerRecord as damage:
            _log.error("ledger %d: %s", ledger_id, damage)
            return reason, False
        fence = record.state is not ledger_record.LedgerState.OPEN
        if not record.names(self._bookie_id):
            return LimboReason.NONE, fence and self._storage.state(ledger_id) is not None
        if reason == LimboReason.LOST or not record.closed:
            return reason, fence
        return await self._judge_closed(record), fence

    async def _judge_closed(self, record: LedgerRecord) -> LimboReason:
        """After a torn tail. Without one of its directories the ledger is "lost" as long as that is
        away; what it lacks may be there, so all that is left to say then is that a tail was torn.
        """
        try:
            if not await self._lacks(record):
                return LimboReason.NONE
        except DiskFailed as error:
            _log.error("ledger %d: whether it is whole cannot be said: %s", record.ledger_id, error)
        state = self._storage.state(record.ledger_id)
        whole = state is None or self._storage.directories.is_whole(state)
        return LimboReason.LOST if whole else LimboReason.TORN

    async def _lacks(self, record: LedgerRecord) -> bool:
        """Whether an entry that a CLOSED ledger's record says belongs here is not here: all are
        counted, for repair copies in any order. COUNTED_PER_S. Raises DiskFailed."""
        assert record.last_entry is not None
        for entries, slot in reversed(entries_kept(record, self._bookie_id, record.last_entry)):
            for at in range(entries.stop, entries.start, -_COUNTED_AT_ONCE):
                window = range(max(entries.start, at - _COUNTED_AT_ONCE), at)
                kept = [each for each in window if keeps(record, slot, each)]
                if kept:
                    here = await self._storage.reader.stored(record.ledger_id, kept[0], kept[-1])
                    if any(each not in here for each in kept):
                        return True
                    await asyncio.sleep(len(kept) / COUNTED_PER_S)
        return False

    # -- the list ------------------------------------------------------------------------------

    async def _forget_deleted(self) -> None:
        """Of a ledger that was deleted nothing is to be repaired."""
        for ledger_id in await self._records.confirmed_deleted(list(self._ledgers.in_limbo())):
            await self._ledgers.bury([ledger_id])
            await self._ledgers.clear_limbo(ledger_id)

    async def _publish(self) -> None:
        """Make the store's list that of the states, READS_PER_S ledgers a second."""
        if self._listed is None:  # what an earlier run listed; the reasons are written again
            names = await names_in(self._metadata, paths.limbo(self._bookie_id))
            self._listed = {int(name): "" for name in names if name.isdecimal()}
        alive = dict.fromkeys(self._ledgers.alive())
        wanted = {i: reason for i, reason in self._ledgers.in_limbo().items() if i in alive}
        changed = [i for i in self._listed if i not in wanted]
        changed += [i for i, reason in wanted.items() if self._listed.get(i) != reason]
        for count, ledger_id in enumerate(changed, 1):
            reason, _ = self._ledgers.limbo(ledger_id)  # as of now: it may have been cleared
            if reason and ledger_id in wanted:
                await self._list(ledger_id, reason)
                self._listed[ledger_id] = reason
            else:
                with suppress(NoNode):
                    await self._metadata.delete(paths.limbo(self._bookie_id, ledger_id))
                self._listed.pop(ledger_id, None)
            if count % READS_AT_ONCE == 0:
                await asyncio.sleep(READS_AT_ONCE / READS_PER_S)

    async def _list(self, ledger_id: int, reason: str) -> None:
        path = paths.limbo(self._bookie_id, ledger_id)
        value = json.dumps({"reason": reason}).encode()
        try:
            await self._metadata.create(path, value, parents=True)
        except NodeExists:
            found = await self._metadata.get(path)
            if found.value != value:
                await self._metadata.set(path, value, found.version)

    # -- ClearLimbo ----------------------------------------------------------------------------

    async def respond(self, request: ClearLimboRequest) -> ClearLimboResponse:
        """Say how the ledger stands or clear it; durable when it returns OK.

        Raises Refused, JournalFailed.
        """
        ledger_id = request.ledger_id
        if ledger_id < 0:
            return ClearLimboResponse(Status.BAD_REQUEST, reason="a ledger id is not negative")
        self._storage.reader.deleted(ledger_id)  # what only the read cache has is as good as lost
        every = self._ledgers.every()
        if every.limbo:
            reason = "the node still looks for the ledgers that are in limbo here"
            return ClearLimboResponse(Status.LIMBO, every.limbo, reason=reason)
        if not self._ledgers.known(ledger_id):
            return ClearLimboResponse(Status.OK)
        handle = await self._ledgers.meet(ledger_id)
        if not handle.allows("recover", request.token):
            return ClearLimboResponse(Status.UNAUTHORIZED)
        self._run = self._run or self._metadata.session_id
        if not self._run:
            reason = "the node has no session yet: what it told could be taken for another run's"
            return ClearLimboResponse(Status.LIMBO, reason=reason)
        limbo, revision = self._state_told(ledger_id)
        if limbo and ledger_id not in self._told:
            self._told[ledger_id] = None
            await self._ledgers.renew(ledger_id)
            limbo, revision = self._state_told(ledger_id)
        if not request.clear or not limbo:
            return ClearLimboResponse(Status.OK, limbo, revision)
        if request.revision != revision:
            reason = "it changed since the comparison began"
            return ClearLimboResponse(Status.LIMBO, limbo, revision, reason=reason)
        self._told.pop(ledger_id, None)
        await self._ledgers.clear_limbo(ledger_id)
        self._wake.set()
        return ClearLimboResponse(Status.OK)

    def _state_told(self, ledger_id: int) -> tuple[str, int]:
        """The ledger's limbo, and its revision as it is told: that of another run is another
        number. Revisions by themselves begin anew when an index was lost, and meet what a run
        before it told; no two runs have the same session."""
        limbo, revision = self._ledgers.limbo(ledger_id)
        told = blake2b(f"{self._run} {revision}".encode(), digest_size=8).digest()
        return limbo, int.from_bytes(told, "little")
