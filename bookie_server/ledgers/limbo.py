"""Limbo: the ledgers of which this node may have lost entries. How the node responds to requests
for such ledgers, which of them it lists in the store, and when it clears the limbo of each.

    EVERY_LEDGER in limbo -> walk the cluster's ledgers: a ledger concerned gets its own limbo
    -> EVERY_LEDGER is cleared -> each ledger is listed under /limbo/<bookie>/<ledger>
    -> repair compares and sends ClearLimbo -> cleared durably -> not listed any more

Always true:
- of two reasons the worse one counts: "lost" (acknowledged entries may be lost) is worse than
  "torn" (entries may be lost that were not synced when the node last died). While EVERY_LEDGER is
  in limbo, the node gives no negative response for any ledger, even if it never met the ledger;
- EVERY_LEDGER is cleared only after the walk has read the records of all the cluster's ledgers,
  from a store that was our cluster's before and after the walk, and after the limbo of every
  ledger concerned is durable. A torn tail concerns ledgers that are not CLOSED and whose record
  names this node. A loss concerns all ledgers whose record names this node, or is malformed. After
  a torn tail the walk also looks up the entries of each CLOSED ledger. If an entry that belongs
  here is missing, the ledger is "lost". If one of its directories is missing too, the walk notes
  only "torn", as that directory may have the entry;
- a ledger that the walk finds IN_RECOVERY or CLOSED is fenced here, if the node has a state of it
  or its record names this node: a recovery changes the record before it sends a fence, so this
  restores a fence that was lost with the tail. Until the walk has ended, a ledger that was met in
  an earlier run takes no normal add before its record is read (LedgerHandles.check_fence);
- the walk also puts the node's unrecorded ledgers in limbo, with EVERY_LEDGER's reason, and fences
  them: the store may be an older copy, and the newer copy has the record;
- limbo is cleared by the deletion of the ledger, or by a ClearLimbo with the present `revision`:
  the limbo has not changed since the comparison began. New damage gives a ledger a new revision,
  even if the ledger is "lost" already;
- while one of a ledger's directories is missing, the ledger counts as "lost", whatever reason the
  walk noted. ClearLimbo gives up that directory: if the directory comes back later, its entries of
  the ledger are garbage. If the directory comes back before a ClearLimbo, the ledger lacks nothing;
- a comparison counts only if the node ran from its beginning to its end and the ledger lost no
  directory meanwhile; entries that the comparison read are durable before the node responds to the
  request that ends the comparison;
- a ledger that gets into limbo is listed at once;
- every step can be repeated: after a restart the work goes on from the states.
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
from bookie_server.ledgers.registry import LedgerHandles, LedgerJudgement
from bookie_server.logs.index import EVERY_LEDGER, LedgerState, LimboReason
from bookie_server.storage.storage import LedgerStorage
from spark_ledger.metadata import ledger_record, paths
from spark_ledger.metadata.cluster import BadClusterRecord
from spark_ledger.metadata.ledger_record import (
    BadLedgerRecord,
    LedgerRecord,
    entries_kept,
    ledger_ids,
    should_keep,
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
    """The limbo of one node. `on_writable` is called when the node stops being read-only."""

    def __init__(
        self,
        bookie_id: str,
        storage: LedgerStorage,
        ledgers: LedgerHandles,
        metadata: MetadataStore,
        cluster_ledgers: ClusterLedgers,
        check_s: float,
        on_writable: Callable[[], None],
    ) -> None:
        self._on_writable = on_writable
        self._bookie_id = bookie_id
        self._storage = storage
        self._ledgers = ledgers
        self._metadata = metadata
        self._cluster_ledgers = cluster_ledgers
        self._check_s = check_s
        self._listed_reasons: dict[int, str] | None = None  # the store's list; None: not read yet
        self._sent_ids: dict[int, None] = {}  # ledgers whose present revision was sent in this run
        self.is_halted = False
        """True: this run takes no more ledgers out of limbo."""
        self._wake = asyncio.Event()
        self._run_id = 0  # the id of a session of this run; 0: there was no session yet
        metadata.add_session_listener(self._session_changed)
        self._forget_at_s = 0.0  # when `look` next looks for deleted ledgers, by the loop's clock

    def wake(self) -> None:
        """Look at once: a ledger got into limbo, or a directory may have been dropped."""
        self._wake.set()

    def _session_changed(self, state: SessionState) -> None:
        """Read the list again: the next session may be with another copy of the store."""
        if state is SessionState.LOST:
            self._listed_reasons = None
            self.wake()

    def note_damage(self, ledger_id: int) -> None:
        """Note damage in the ledger's entries. A comparison that began before the damage may have
        read the entries undamaged, so the next response has a new revision."""
        self._sent_ids.pop(ledger_id, None)

    async def run(self) -> None:
        """Look every `check_s`, and when a ledger gets into limbo or out of it. If a look fails,
        the next look continues its work."""
        while True:
            self._wake.clear()
            try:
                await self.look()
            except (StoreError, BadClusterRecord, JournalFailed) as failure:
                _log.warning("the look at ledgers in limbo did not end: %r", failure)
            try:
                async with asyncio.timeout(self._check_s):
                    await self._wake.wait()
                    await asyncio.sleep(GATHER_S)
            except TimeoutError:
                continue

    async def look(self) -> None:
        """Walk if EVERY_LEDGER is in limbo, and bring the list up to date. Raises StoreError,
        BadClusterRecord, JournalFailed; the next look continues."""
        if self.is_halted:
            return
        every_state = self._ledgers.every_ledger_state()
        is_any_in_limbo = every_state.limbo or self._ledgers.limbo_reasons()
        if not is_any_in_limbo and self._listed_reasons == {}:
            return
        if not await self._cluster_ledgers.store_is_ours():
            return
        if every_state.limbo:
            await self._walk(every_state)
        await self._publish()
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._forget_at_s:  # not at every look, as this reads a node for each ledger
            self._forget_at_s = now_s + self._check_s
            await self._forget_deleted()
            await self._publish()

    # -- the walk ------------------------------------------------------------------------------

    async def _walk(self, every_state: LedgerState) -> None:
        """Put the ledgers concerned in limbo, durably, and take EVERY_LEDGER out of limbo."""
        judgements: list[LedgerJudgement] = []
        count = concerned_count = lost_count = 0
        ids_without_record = dict.fromkeys(self._ledgers.unburied_ids())
        async for ledger_id in ledger_ids(self._metadata):
            count += 1
            ids_without_record.pop(ledger_id, None)
            limbo, fence = await self._judge(ledger_id, every_state.limbo)
            concerned_count += bool(limbo)
            lost_count += limbo == LimboReason.LOST
            judgements.append(LedgerJudgement(ledger_id, limbo, fence))
            if count % READS_AT_ONCE == 0:
                await self._ledgers.put_in_limbo_or_fence(judgements)
                judgements = []
                await asyncio.sleep(READS_AT_ONCE / READS_PER_S)
        unrecorded_ids = await self._cluster_ledgers.find_unrecorded(list(ids_without_record))
        if unrecorded_ids is None:  # the store is not our cluster's: the next look walks again
            return
        judgements += [LedgerJudgement(i, every_state.limbo, fence=True) for i in unrecorded_ids]
        concerned_count += len(unrecorded_ids)
        await self._ledgers.put_in_limbo_or_fence(judgements)
        is_ours = await self._cluster_ledgers.store_is_ours()
        if is_ours and not self.is_halted and self._ledgers.every_ledger_state() is every_state:
            await self._ledgers.clear_limbo(EVERY_LEDGER)
            self._on_writable()
            text = '%d of %d ledgers are in limbo here (%s), %d of them are "lost"'
            _log.warning(text, concerned_count, count, every_state.limbo, lost_count)

    async def _judge(self, ledger_id: int, reason: LimboReason) -> tuple[LimboReason, bool]:
        """The limbo that the loss gives the ledger, NONE if the loss does not concern the ledger;
        and whether to fence the ledger."""
        try:
            node = await self._metadata.get(paths.ledger(ledger_id))
            record = ledger_record.decode(node.value)
        except NoNode:
            return LimboReason.NONE, False
        except BadLedgerRecord as damage:
            _log.error("ledger %d: %s", ledger_id, damage)
            return reason, False
        fence = record.state is not ledger_record.RecordState.OPEN
        if not record.names(self._bookie_id):
            return LimboReason.NONE, fence and self._storage.state(ledger_id) is not None
        if reason == LimboReason.LOST or not record.closed:
            return reason, fence
        return await self._judge_closed(record), fence

    async def _judge_closed(self, record: LedgerRecord) -> LimboReason:
        """The limbo of a CLOSED ledger after a torn tail. A missing directory may have the entry
        that seems lost: then the ledger's own limbo is only "torn" (and the ledger counts as "lost"
        until the directory comes back)."""
        try:
            if not await self._lacks_entry(record):
                return LimboReason.NONE
        except DiskFailed as error:
            _log.error("ledger %d: it may lack entries: %s", record.ledger_id, error)
        state = self._storage.state(record.ledger_id)
        is_whole = state is None or self._storage.directories.is_whole(state)
        return LimboReason.LOST if is_whole else LimboReason.TORN

    async def _lacks_entry(self, record: LedgerRecord) -> bool:
        """Whether an entry is missing that belongs here by the record of a CLOSED ledger. Looks up
        all entries, because repair copies them in any order; COUNTED_PER_S entries a second. Raises
        DiskFailed."""
        assert record.last_entry is not None
        for entries, slot in reversed(entries_kept(record, self._bookie_id, record.last_entry)):
            for end in range(entries.stop, entries.start, -_COUNTED_AT_ONCE):
                window = range(max(entries.start, end - _COUNTED_AT_ONCE), end)
                ids = [entry_id for entry_id in window if should_keep(record, slot, entry_id)]
                if ids:
                    stored = await self._storage.reader.stored(record.ledger_id, ids[0], ids[-1])
                    if any(entry_id not in stored for entry_id in ids):
                        return True
                    await asyncio.sleep(len(ids) / COUNTED_PER_S)
        return False

    # -- the list ------------------------------------------------------------------------------

    async def _forget_deleted(self) -> None:
        """Take deleted ledgers out of limbo: they need no repair."""
        ids_in_limbo = list(self._ledgers.limbo_reasons())
        for ledger_id in await self._cluster_ledgers.confirm_deleted(ids_in_limbo):
            await self._ledgers.bury([ledger_id])
            await self._ledgers.clear_limbo(ledger_id)

    async def _publish(self) -> None:
        """Make the store's list equal to the states, READS_PER_S ledgers a second."""
        if self._listed_reasons is None:  # an earlier run's list: its reasons are written again
            names = await names_in(self._metadata, paths.limbo(self._bookie_id))
            self._listed_reasons = {int(name): "" for name in names if name.isdecimal()}
        listed = self._listed_reasons
        unburied = dict.fromkeys(self._ledgers.unburied_ids())
        reasons = {i: why for i, why in self._ledgers.limbo_reasons().items() if i in unburied}
        changed_ids = [i for i in listed if i not in reasons]
        changed_ids += [i for i, reason in reasons.items() if listed.get(i) != reason]
        for count, ledger_id in enumerate(changed_ids, 1):
            reason, _ = self._ledgers.limbo(ledger_id)  # read again: limbo may be cleared by now
            if reason and ledger_id in reasons:
                await self._list(ledger_id, reason)
                listed[ledger_id] = reason
            else:
                with suppress(NoNode):
                    await self._metadata.delete(paths.limbo(self._bookie_id, ledger_id))
                listed.pop(ledger_id, None)
            if count % READS_AT_ONCE == 0:
                await asyncio.sleep(READS_AT_ONCE / READS_PER_S)

    async def _list(self, ledger_id: int, reason: str) -> None:
        path = paths.limbo(self._bookie_id, ledger_id)
        value = json.dumps({"reason": reason}).encode()
        try:
            await self._metadata.create(path, value, parents=True)
        except NodeExists:
            node = await self._metadata.get(path)
            if node.value != value:
                await self._metadata.set(path, value, node.version)

    # -- ClearLimbo ----------------------------------------------------------------------------

    async def respond(self, request: ClearLimboRequest) -> ClearLimboResponse:
        """Respond with the ledger's limbo. If the request has `clear`, clear the limbo, durably.

        Raises Refused, JournalFailed.
        """
        ledger_id = request.ledger_id
        if ledger_id < 0:
            return ClearLimboResponse(Status.BAD_REQUEST, reason="a ledger id is not negative")
        self._storage.reader.drop_ledger(ledger_id)  # an entry only in the read cache is no copy
        every_limbo = self._ledgers.every_ledger_state().limbo
        if every_limbo:
            reason = "the node still looks for the ledgers that are in limbo here"
            return ClearLimboResponse(Status.LIMBO, every_limbo, reason=reason)
        if not self._ledgers.may_have_met(ledger_id):
            return ClearLimboResponse(Status.OK)
        handle = await self._ledgers.meet(ledger_id)
        if not handle.allows("recover", request.token):
            return ClearLimboResponse(Status.UNAUTHORIZED)
        self._run_id = self._run_id or self._metadata.session_id
        if not self._run_id:
            reason = "the node has no session yet: its revision could be mistaken for another run's"
            return ClearLimboResponse(Status.LIMBO, reason=reason)
        # the comparison counted the ledger's entries as copies: first make the entries durable
        await self._storage.await_durable(ledger_id)
        limbo, revision = self._sent_state(ledger_id)
        if limbo and ledger_id not in self._sent_ids:
            self._sent_ids[ledger_id] = None
            await self._ledgers.renew_revision(ledger_id)
            limbo, revision = self._sent_state(ledger_id)
        if not request.clear or not limbo:
            return ClearLimboResponse(Status.OK, limbo, revision)
        if request.revision != revision:
            reason = "the limbo has changed since the comparison began"
            return ClearLimboResponse(Status.LIMBO, limbo, revision, reason=reason)
        self._sent_ids.pop(ledger_id, None)
        await self._ledgers.clear_limbo(ledger_id)
        self._wake.set()
        return ClearLimboResponse(Status.OK)

    def _sent_state(self, ledger_id: int) -> tuple[str, int]:
        """The ledger's limbo, and its revision for a response: a hash of the ledger's revision and
        of a session of this run. After the loss of an index, revisions begin anew and could equal a
        revision that an earlier run sent; the session makes the hashes differ."""
        limbo, revision = self._ledgers.limbo(ledger_id)
        digest = blake2b(f"{self._run_id} {revision}".encode(), digest_size=8).digest()
        return limbo, int.from_bytes(digest, "little")
