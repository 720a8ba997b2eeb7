"""Whether the metadata store is the one whose links this bookie's disks have, or went back in time.

Always true: the bookie compares the store with its disks before it registers in it, at each new
session with it, when the store's cluster record or chain changes, and every LOOK_S. The store went
back if its chain lacks a link that is on the disks (spark_ledger/metadata/chain.py), or if the
bookie has met a ledger with an id that the store's counter has not given out. A bookie whose store
went back puts the hold (spark_ledger/metadata/hold.py), and reports below /held which of its
ledgers the store does not name. If the store has a higher epoch than the disks, a person accepted
the store: from then on its links count. In a store without a cluster, or with another cluster, the
bookie changes nothing and does not register. The disks keep only links of an accepted or unchanged
store. If no other process appends links, the bookie appends them.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from enum import Enum

from bookie_server.api.entry import EntryHeader
from bookie_server.disk import seen_links
from bookie_server.disk.interface import Disk, DiskFailed
from bookie_server.disk.seen_links import SeenLinks
from bookie_server.ledgers.registry import LedgerHandles
from bookie_server.logs.index import LedgerState
from bookie_server.storage.storage import LedgerStorage
from spark_ledger import errors
from spark_ledger.async_tasks import woken
from spark_ledger.metadata import chain as chains
from spark_ledger.metadata import cluster, hold, ledger_record, paths
from spark_ledger.metadata.chain import BOOKIE_EXTENDS_S, Chain, Extender
from spark_ledger.metadata.cluster import BadClusterRecord, ClusterRecord, Hold
from spark_ledger.metadata.hold import MissingLedger, Report
from spark_ledger.metadata.ledger_record import BadLedgerRecord
from spark_ledger.metadata.store import MetadataStore, NoNode, SessionState, StoreError, Versioned
from spark_ledger.metadata.store_calls import read

LOOK_S = 60.0
RECORDS_AT_ONCE, REPORT_PAUSE_S = 200, 0.2
_log = logging.getLogger(__name__)


class LineageVerdict(Enum):
    """The store, compared with the links on the disks."""

    OURS = "it has the links that were seen"
    ACCEPTED = "a person accepted it after the links were seen"
    OLDER = "it went back in time"
    FOREIGN = "it has no cluster, or another cluster"


def judge(
    seen: SeenLinks,
    stored: ClusterRecord | None,
    chain: Chain | None,
    next_id: int | None,
    id_max: int,
) -> tuple[LineageVerdict, str]:
    """The verdict, and the reason if it is OLDER. `stored`: the store's cluster record; `next_id`:
    the next id of its counter, None under a hold; `id_max`: the highest id of a ledger that this
    bookie met, 0 if it met none."""
    if stored is None or stored.cluster_id != seen.cluster_id:
        return LineageVerdict.FOREIGN, ""
    if stored.epoch < seen.epoch:
        return (
            LineageVerdict.OLDER,
            f"the store has epoch {stored.epoch}, and a bookie has seen epoch {seen.epoch}",
        )
    if next_id is not None and id_max >= next_id:
        return (
            LineageVerdict.OLDER,
            f"a bookie has ledger {id_max}, and the next ledger id of the store is {next_id}",
        )
    if stored.epoch > seen.epoch:
        return LineageVerdict.ACCEPTED, ""
    number = chains.missing_link(seen.links, chain)
    if number is None:
        return LineageVerdict.OURS, ""
    newest = "it has no link" if chain is None else f"its newest is {chain.newest}"
    return LineageVerdict.OLDER, f"the store lacks link {number}, which a bookie has seen; {newest}"


def highest_id(states: Iterable[LedgerState]) -> int:
    """The highest id of the ledgers that were met; 0 if no ledger was met."""
    return max((state.ledger_id for state in states if state.met), default=0)


class Lineage:
    """Compares the metadata store with the links on one bookie's disks."""

    def __init__(
        self, store: MetadataStore, bookie_id: str, disks: Sequence[Disk], seen: SeenLinks
    ) -> None:
        self._store = store
        self._bookie_id = bookie_id
        self._disks = disks
        self._seen = seen
        self.extender = Extender(store, BOOKIE_EXTENDS_S, chains.loop_clock)
        self._look_lock = asyncio.Lock()
        self._wake = asyncio.Event()
        self._went_back = False
        self._last_reported: LineageVerdict | Hold | None = None
        self.refusal = ""
        """Why the bookie does not register, as of the last look; empty if it may register."""
        self.listeners: list[Callable[[], None]] = []
        """Called when `refusal` changes."""
        self.ledgers: LedgerHandles | None = None
        self.storage: LedgerStorage | None = None
        store.add_session_listener(self._session_changed)

    @classmethod
    async def open(
        cls, store: MetadataStore, bookie_id: str, cluster_id: str, disks: Sequence[Disk]
    ) -> "Lineage":
        return cls(store, bookie_id, disks, await seen_links.read(disks, cluster_id))

    def attach(self, storage: LedgerStorage, ledgers: LedgerHandles) -> None:
        """Use the stored ledgers for the comparison from now on. If the store went back, they are
        compared with their records."""
        self.storage, self.ledgers = storage, ledgers
        ledgers.epoch = self._seen.epoch
        if self._went_back:
            ledgers.store_went_back()

    async def run(self) -> None:
        """Look again and again, also after a failure, until cancelled."""
        while True:
            try:
                await self.look()
                if self.refusal:
                    await self._report()
            except StoreError as failure:
                _log.warning("the metadata store was not compared with the disks: %r", failure)
            except Exception:
                _log.exception("a defect: the metadata store was not compared with the disks")
            await woken(self._wake, LOOK_S)
            self._wake.clear()

    async def may_register(self) -> bool:
        """Whether a new look finds no `refusal`. Raises StoreError."""
        await self.look()
        return not self.refusal

    async def look(self) -> None:
        """Compare the store with the disks. If the store went back, put a hold, else keep its
        links. Raises StoreError."""
        async with self._look_lock:
            try:
                await self._look()
            except (BadClusterRecord, chains.BadChain, errors.LedgerError) as damage:
                raise StoreError(f"the metadata store cannot be understood: {damage}") from damage

    async def _look(self) -> None:
        stored = await cluster.read(self._store)
        await self._read_watched(paths.CLUSTER)
        node = await self._read_watched(paths.CHAIN)
        chain = chains.chain_of_node(node)
        states = [] if self.storage is None else self.storage.states()
        verdict, why = judge(self._seen, stored, chain, await self._next_id(), highest_id(states))
        if verdict is LineageVerdict.OLDER:
            text = f"{why}: this is an older copy of the store, or goes on from an older copy"
            epoch = max(self._seen.epoch, 0 if stored is None else stored.epoch)
            new_hold = Hold(text, self._bookie_id, epoch)
            stored = await hold.put(self._store, self._seen.cluster_id, new_hold)
        self._apply(verdict, stored)
        if stored is None or stored.hold is not None:
            return
        if verdict in (LineageVerdict.OLDER, LineageVerdict.FOREIGN):
            return
        if chain is None or verdict is LineageVerdict.OURS:
            await self.extender.once()
        if chain is not None:
            await self._keep_links(stored, chain)

    async def _next_id(self) -> int | None:
        node = await read(self._store, paths.LEDGER_IDS)
        if node is None:
            return hold.FIRST_ID
        try:
            return hold.decode_counter(node.value)
        except errors.LedgerError:  # a hold, or damage
            return None

    async def _keep_links(self, stored: ClusterRecord, chain: Chain) -> None:
        links = chains.newest_of_each_kind(chain)
        seen = SeenLinks(stored.cluster_id, stored.epoch, links)
        if seen == self._seen:
            return
        try:
            await seen_links.FILE.write(self._disks, seen)
        except DiskFailed as failure:  # for example, a full disk: a later look tries again
            _log.warning("the newest links of the metadata store are not kept: %s", failure)
        else:
            self._seen = seen

    def _apply(self, verdict: LineageVerdict, stored: ClusterRecord | None) -> None:
        """Set `refusal`; report a change to the log, the ledgers and the listeners, once."""
        before = self.refusal
        present_hold = None if stored is None else stored.hold
        self.refusal = ""
        if verdict is LineageVerdict.FOREIGN:
            self.refusal = "the metadata store has no cluster, or another cluster than the disks"
        elif present_hold is not None:
            self.refusal = f"the metadata store is held: {present_hold.why}"
        report = present_hold or (
            verdict if verdict in (LineageVerdict.FOREIGN, LineageVerdict.ACCEPTED) else None
        )
        if report != self._last_reported and report is not None:
            if self.refusal:
                _log.error("%s; the bookie serves on and does not register", self.refusal)
            else:
                _log.warning("the metadata store was accepted, epoch %s", stored and stored.epoch)
            self._went_back = True
            if self.ledgers is not None:
                self.ledgers.store_went_back()
        self._last_reported = report
        if self.refusal != before:
            for listener in self.listeners:
                listener()

    # -- when to look -------------------------------------------------------------------------

    async def _read_watched(self, path: str) -> Versioned | None:
        """The node, if it exists; a change of it wakes `run`."""
        try:
            return await self._store.get(path, self._wake.set)
        except NoNode:
            return None

    def _session_changed(self, state: SessionState) -> None:
        if state is SessionState.CONNECTED:
            self._wake.set()

    # -- ledgers that a held store does not name ----------------------------------------------

    async def _report(self) -> None:
        """Write for operators which ledgers of this bookie a held store does not name. Raises
        StoreError."""
        stored = await cluster.read(self._store)
        if self.storage is None or stored is None or stored.hold is None:
            return
        states = sorted(
            (state for state in self.storage.states() if state.ledger_id >= 0 and state.met),
            key=lambda state: state.ledger_id,
        )
        missing_ids: list[int] = []
        ids_of_others: list[int] = []
        buried_ids: list[int] = []
        for start in range(0, len(states), RECORDS_AT_ONCE):
            batch = states[start : start + RECORDS_AT_ONCE]
            nodes = await self._store.get_many([paths.ledger(state.ledger_id) for state in batch])
            for state, node in zip(batch, nodes, strict=True):
                if node is None and not state.deleted:
                    missing_ids.append(state.ledger_id)
                elif node is not None and state.deleted:
                    buried_ids.append(state.ledger_id)
                elif node is not None and _is_of_other_ledger(node.value, state):
                    ids_of_others.append(state.ledger_id)
            await asyncio.sleep(REPORT_PAUSE_S)
        missing_ledgers = [await self._missing_ledger(ledger_id) for ledger_id in missing_ids]
        total_bytes = sum(ledger.bytes for ledger in missing_ledgers)
        listed = missing_ledgers[: hold.LISTED_MAX]
        counts = (len(missing_ids), total_bytes, highest_id(states), stored.epoch)
        report = Report(self._bookie_id, listed, ids_of_others, buried_ids, *counts)
        await hold.publish(self._store, report)

    async def _missing_ledger(self, ledger_id: int) -> MissingLedger:
        assert self.storage is not None
        try:
            last = await self.storage.reader.last_entry(ledger_id)
            if last is None:
                return MissingLedger(ledger_id, -1, 0)
            header = (await self.storage.reader.headers(ledger_id, [last])).get(last)
        except DiskFailed:
            return MissingLedger(ledger_id, -1, 0)
        size = header.cumulative_bytes if isinstance(header, EntryHeader) else 0
        return MissingLedger(ledger_id, last, size)


def _is_of_other_ledger(value: bytes, state: LedgerState) -> bool:
    """Whether the record in `value` is of another ledger than the stored entries."""
    try:
        creator = ledger_record.decode(value).creator
    except BadLedgerRecord:
        return False
    return bool(state.creation and creator and state.creation != creator)
