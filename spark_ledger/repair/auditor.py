"""The auditor puts under-replicated ledgers on the list at which workers work.

    the bookies that are not registered, by the auditor's watch (Absence) -> one pass over all
    records: which ledgers each bookie holds -> the ledgers of bookies that are lost or drained,
    ledgers that bookies list as in limbo, and ledgers with a joining bookie -> the list
    (work_list.py)
    closed ledgers, all again after CHECK_AGAIN_S -> their bookies are asked which entries they have
    (audit.py) -> ledgers with a bookie that lacks an entry -> the list
    ledgers with a misplaced copy, while no copy is missing -> the list, MOVES_MAX at a time

One process of a cluster has this role. The election only saves work: two auditors do no harm.

Always true: the auditor makes a pass over the records when a further bookie is absent for the delay
or drained, and when the first bookie registers on a host or rack; and again after AGAIN_S or, if a
pass takes long, after AGAIN_TIMES its duration. It keeps in memory a count for each bookie, and ids
of ledgers.

A bookie is lost when the auditor saw it not registered for the whole delay, without a break of the
auditor's session. The loss of several bookies does not shorten the delay. If a bookie was
registered meanwhile, its delay begins anew; the auditor notices this also between two looks, which
may be far apart. If more than a third of the bookies with copies are lost together, no undeclared
bookie counts as lost until an operator declares it.
"""

import asyncio
import logging
import time
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

from spark_ledger.errors import NoSuchLedger, Unavailable, UnsupportedFormat
from spark_ledger.ledger.client import LedgerStore
from spark_ledger.ledger.quorum import Quorum
from spark_ledger.ledger.transitions import is_fragment_complete
from spark_ledger.metadata import autorecovery, paths
from spark_ledger.metadata.autorecovery import AutorecoverySettings, BadAutorecoverySettings
from spark_ledger.metadata.ledger_record import LedgerRecord, Tokens
from spark_ledger.metadata.store import SessionState, StoreError
from spark_ledger.metadata.store_calls import call_each, in_batches, names_in, store_now_ms
from spark_ledger.repair import limbo, slots, work_list
from spark_ledger.repair.audit import check_ledger
from spark_ledger.repair.limbo import LimboLedger
from spark_ledger.repair.work_list import Cause, Reason
from spark_ledger.repair.worker import Bookies, bookies
from spark_ledger.repair.worker import settings as read_settings

AGAIN_S, AGAIN_TIMES, AGAIN_S_MAX = 60.0, 100, 3600.0
CHECK_AGAIN_S = 7 * 86_400.0
CHECKS_A_LOOK, CHECKS_AT_ONCE = 256, 8
RECORDS_AT_ONCE = 512
MOVES_MAX = 64
ENSEMBLES_MAX = 10_000
log = logging.getLogger(__name__)


class Judgement(NamedTuple):
    """`lost`: bookies whose copies must be made on other bookies. `too_many`: bookies that would be
    lost, but are more than a third of all bookies: the cause may be the auditor, or the network."""

    lost: frozenset[str]
    too_many: frozenset[str] = frozenset()


def pause_s(passed_s: float) -> float:
    """The pause after a pass over all records that took `passed_s`: passes take a hundredth of the
    time. After a pass that a slow store delayed, the pause is an hour at most."""
    return min(max(AGAIN_S, AGAIN_TIMES * passed_s), AGAIN_S_MAX)


class Absence:
    """The bookies that are not registered, as one auditor saw them. Times are by the loop's clock,
    in s, and by the host's clock, in ms."""

    def __init__(self) -> None:
        self._since: dict[str, tuple[float, int]] = {}
        self._session = 0

    def look(
        self,
        now: tuple[float, int],
        session: int,
        bookies: Collection[str],
        registered: Collection[str],
    ) -> None:
        """Note which of the `bookies` are `registered` now. `session` changes with each break of
        the session."""
        if session != self._session:
            self._session, self._since = session, {}
        registered_ids = set(registered)
        self._since = {
            bookie: self._since.get(bookie, now)
            for bookie in bookies
            if bookie not in registered_ids
        }

    def note_registered(self, is_registered: Callable[[str], bool]) -> None:
        """Note the bookies that registered since the last look: their delay begins anew."""
        self._since = {b: since for b, since in self._since.items() if not is_registered(b)}

    def since_ms(self) -> dict[str, int]:
        """For each absent bookie, the time when the auditor first saw it absent."""
        return {bookie: self._since[bookie][1] for bookie in sorted(self._since)}

    def gone(self, now_s: float, delay_s: float) -> frozenset[str]:
        """The bookies that were absent for the whole delay."""
        return frozenset(b for b, (since, _) in self._since.items() if now_s - since >= delay_s)


def judge(gone: Set[str], holding: Set[str], registered: Set[str], accepted: Set[str]) -> Judgement:
    """Judge the bookies that are `gone`. `holding`: bookies that hold copies by the ledgers'
    records. `accepted`: bookies that an operator declared lost."""
    lost = gone & holding
    undeclared = lost - accepted
    if 3 * len(undeclared) > len(registered | holding):
        return Judgement(frozenset(lost & accepted), frozenset(undeclared))
    return Judgement(frozenset(lost))


@dataclass(slots=True)
class Index:
    """One pass over the records. `held`: how many ledgers each bookie has copies of. `of`: the
    ledgers of each bookie that is gone or drained. `joining`: the joining bookie of a ledger, by
    ledger; `misplaced`: a bookie with a misplaced copy, by ledger. `closed`: all CLOSED ledgers."""

    ledgers: int = 0
    held: Counter[str] = field(default_factory=Counter)
    of: dict[str, "array[int]"] = field(default_factory=dict)
    joining: dict[int, str] = field(default_factory=dict)
    misplaced: dict[int, str] = field(default_factory=dict)
    closed: "array[int]" = field(default_factory=lambda: array("q"))

    def add_record(self, record: LedgerRecord) -> None:
        self.ledgers += 1
        members = {bookie for fragment in record.fragments for bookie in fragment.ensemble}
        self.held.update(members)
        for bookie in self.of.keys() & members:
            self.of[bookie].append(record.ledger_id)
        for joining in record.joining:
            self.joining[record.ledger_id] = joining.bookie_id
        if record.closed:
            self.closed.append(record.ledger_id)


@dataclass(frozen=True, slots=True)
class AuditReport:
    """The result of one look. `listed`: how many ledgers were put on the list; `lost`, `draining`:
    bookies. `too_many`: as in Judgement; `unlisted`: how many ledgers have copies at the `too_many`
    bookies. `absent`: for each bookie that is not registered, since when, by this host's clock."""

    listed: int = 0
    lost: frozenset[str] = frozenset()
    draining: frozenset[str] = frozenset()
    too_many: frozenset[str] = frozenset()
    absent: Mapping[str, int] = field(default_factory=dict)
    unlisted: int = 0

    @property
    def alarm(self) -> str:
        """The text that an operator must read; empty if there is no alarm."""
        return alarm(self.too_many)


def alarm(too_many: Collection[str]) -> str:
    """The text that an operator must read when `too_many` bookies are gone; empty for no bookie."""
    if not too_many:
        return ""
    names = ", ".join(sorted(too_many))
    return (
        f"{len(too_many)} bookies are gone, more than a third: {names}. Their copies are not made"
        " again. If they will not come back: `spark-ledger autorecovery enable --force`"
    )


def _now_ms() -> int:
    return time.time_ns() // 10**6


class Auditor:
    """The auditor of one process; the same object must make every look. `now_ms` is this host's
    clock."""

    def __init__(
        self, ledgers: LedgerStore, tokens: Tokens, now_ms: Callable[[], int] | None = None
    ) -> None:
        self._ledgers = ledgers
        self._now_ms = now_ms or _now_ms
        self._tokens = tokens
        self._store = ledgers.metadata
        self._absence = Absence()
        self._listed_limbo: set[tuple[str, int]] = set()
        self._sessions = 1
        self._index = Index()
        self._indexed_bookies: tuple[frozenset[str], frozenset[str]] | None = None
        self._indexed_at_s = self._index_pass_s = 0.0
        self._hosts_and_racks: set[tuple[str, str]] = set()
        self._unchecked: dict[int, None] = {}
        self._checked: dict[int, frozenset[str]] = {}
        """For each checked ledger, the members that were down and so were not asked."""
        self._checked_since = asyncio.get_running_loop().time()
        self._store.add_session_listener(self._session_changed)
        self._directory = ledgers.cluster.directory
        self._directory.add_listener(self._registrations_changed)

    def _session_changed(self, state: SessionState) -> None:
        if state is not SessionState.CONNECTED:
            self._sessions += 1

    def _registrations_changed(self) -> None:
        self._absence.note_registered(self._directory.is_registered)

    async def look(self) -> AuditReport:
        """Look once, and list the ledgers that need work. Raises Unavailable."""
        try:
            return await self._look()
        except StoreError as failure:
            raise Unavailable(f"the audit ended early: {failure!r}") from failure

    async def _look(self) -> AuditReport:
        settings = await read_settings(self._store)
        now = await bookies(self._store)
        seen = {
            *await names_in(self._store, paths.BOOKIES_KNOWN),
            *self._index.held,
            *now.registered,
        }
        loop_now = asyncio.get_running_loop().time()
        moment = loop_now, self._now_ms()
        self._absence.look(moment, self._sessions, seen, now.registered)
        self._registrations_changed()  # bookies that registered since `now` was read
        absent = self._absence.since_ms()
        await self._drop_declarations(settings, now)
        if not settings.enabled:
            return AuditReport(absent=absent)
        gone = self._absence.gone(loop_now, settings.lost_bookie_delay_s)
        is_due = loop_now - self._indexed_at_s >= pause_s(self._index_pass_s)
        if self._has_new_place() or is_due or self._indexed_bookies != (gone, now.draining):
            await self._index_records(gone, now)
        judgement = judge(gone, {*self._index.held}, now.registered, {*settings.accepted})
        listed = await self._list(judgement, now) + await self._check(now)
        unlisted = {ledger_id for b in judgement.too_many for ledger_id in self._index.of[b]}
        return AuditReport(
            *(listed, judgement.lost, now.draining, judgement.too_many, absent, len(unlisted))
        )

    def _has_new_place(self) -> bool:
        """Whether a bookie is on a host or rack that had no bookie: copies may be placed better on
        it."""
        writable = self._ledgers.cluster.directory.writable()
        new_places = {(bookie.host, bookie.rack) for bookie in writable} - self._hosts_and_racks
        self._hosts_and_racks |= new_places
        return bool(new_places)

    async def _drop_declarations(self, settings: AutorecoverySettings, now: Bookies) -> None:
        """For bookies that are registered again, drop the operator's declaration that they are
        lost."""
        if not now.registered.isdisjoint(settings.accepted):
            accepted = tuple(b for b in settings.accepted if b not in now.registered)
            with suppress(BadAutorecoverySettings):
                await autorecovery.change_settings(self._store, accepted=accepted)

    async def _index_records(self, gone: frozenset[str], now: Bookies) -> None:
        """Read every record. Raises LedgerError, StoreError; the index is unchanged then."""
        began = asyncio.get_running_loop().time()
        index = Index(of={bookie: array("q") for bookie in (*gone, *now.draining)})
        cluster = self._ledgers.cluster

        @lru_cache(maxsize=ENSEMBLES_MAX)  # many ledgers have one ensemble
        def misplaced_in(quorum: Quorum, ensemble: tuple[str, ...]) -> list[int]:
            return slots.misplaced_in(cluster, quorum, ensemble, now.draining)

        def place(record: LedgerRecord) -> None:
            for fragment in record.fragments:
                if is_fragment_complete(record, fragment.first_entry):
                    for slot in misplaced_in(Quorum.of(record), fragment.ensemble):
                        index.misplaced[record.ledger_id] = fragment.ensemble[slot]

        async def add_batch(ledger_ids: Sequence[int]) -> None:
            for versioned in await self._ledgers.cluster.records.read_many(ledger_ids):
                if isinstance(versioned, UnsupportedFormat):
                    log.error("a ledger is left out of repair: %s", versioned.what)
                elif versioned is not None:  # None: the ledger was deleted meanwhile
                    index.add_record(versioned.record)
                    place(versioned.record)

        async for batch in in_batches(self._ledgers.list(), RECORDS_AT_ONCE):
            await add_batch(batch)
        if (gone or now.draining) and index.ledgers:
            log.info("audit: %d ledgers, %d bookies hold them", index.ledgers, len(index.held))
        self._index, self._indexed_bookies = index, (gone, now.draining)
        self._indexed_at_s = asyncio.get_running_loop().time()
        self._index_pass_s = self._indexed_at_s - began
        if self._indexed_at_s - self._checked_since >= CHECK_AGAIN_S:
            self._checked, self._checked_since = {}, self._indexed_at_s
        closed = dict.fromkeys(index.closed)
        self._checked = {  # a ledger is checked again once a silent member is registered
            ledger_id: silent
            for ledger_id, silent in self._checked.items()
            if ledger_id in closed and silent.isdisjoint(now.registered)
        }
        self._unchecked = {i: None for i in closed if i not in self._checked}
        index.closed = array("q")

    async def _list(self, judgement: Judgement, now: Bookies) -> int:
        """Put ledgers on the list; returns how many are new on the list, or got a new reason."""
        causes = [
            (ledger_id, why, bookie)
            for why, bookie_ids in ((Cause.LOST, judgement.lost), (Cause.DRAINED, now.draining))
            for bookie in sorted(bookie_ids)
            for ledger_id in self._index.of.get(bookie, ())
        ]
        causes += [(i, Cause.JOINING, bookie) for i, bookie in self._index.joining.items()]
        if not (judgement.lost or judgement.too_many or now.draining):
            causes += [(i, Cause.MISPLACED, b) for i, b in await self._next_misplaced()]
        since_ms = await store_now_ms(self._store) if causes else 0
        reasons: dict[int, list[Reason]] = {}
        for ledger_id, why, bookie in causes:
            reasons.setdefault(ledger_id, []).append(Reason(why, bookie, since_ms))
        in_limbo = await self._new_limbo(now)
        for listing in in_limbo:
            reason = Reason(Cause.LIMBO, listing.bookie_id, listing.since_ms)
            reasons.setdefault(listing.ledger_id, []).append(reason)
        listed = 0

        async def add(ledger_id: int) -> None:
            nonlocal listed
            listed += await work_list.add(self._store, ledger_id, reasons[ledger_id])

        await call_each(add, sorted(reasons), RECORDS_AT_ONCE)
        self._listed_limbo.update((listing.bookie_id, listing.ledger_id) for listing in in_limbo)
        self._index.joining = {}
        for bookie in judgement.lost | now.draining:  # list them once a pass: workers may be done
            self._index.of[bookie] = array("q")
        return listed

    async def _next_misplaced(self) -> list[tuple[int, str]]:
        """The ledgers whose misplaced copies may be moved now, each with the copy's bookie; empty
        while any copy is missing."""
        misplaced = self._index.misplaced
        if not misplaced or await work_list.is_anything_missing(self._store):
            return []
        room = max(0, MOVES_MAX - len(await work_list.listed_ledgers(self._store)))
        batch = list(islice(misplaced.items(), room))
        for ledger_id, _ in batch:  # list them once a pass: workers may be done
            del misplaced[ledger_id]
        return batch

    async def _check(self, now: Bookies) -> int:
        """Ask the bookies of the next ledgers which entries they have; returns how many ledgers
        were put on the list."""
        batch = [*self._unchecked][:CHECKS_A_LOOK]
        since_ms, listed = await store_now_ms(self._store) if batch else 0, 0

        async def check(ledger_id: int) -> None:
            nonlocal listed
            self._unchecked.pop(ledger_id, None)
            try:
                record = (await self._ledgers.record(ledger_id)).record
                ledger_check = await check_ledger(self._ledgers, record, self._tokens)
            except (NoSuchLedger, UnsupportedFormat):
                return
            if ledger_check.silent.isdisjoint(now.registered):
                self._checked[ledger_id] = ledger_check.silent
            responded = now.registered - ledger_check.silent  # other bookies are asked again
            reasons = [
                Reason(Cause.LACKING, bookie, since_ms)
                for bookie in ledger_check.lacking
                if bookie in responded
            ]
            if reasons:
                log.warning("audit: ledger %d lacks copies: %s", ledger_id, ledger_check.lacking)
                listed += await work_list.add(self._store, ledger_id, reasons)

        await call_each(check, batch, CHECKS_AT_ONCE)
        return listed

    async def _new_limbo(self, now: Bookies) -> list[LimboLedger]:
        """The ledgers that bookies list as in limbo, without ledgers that this auditor has put on
        the list for this reason: thousands may stay in limbo for long."""
        pairs = await limbo.limbo_pairs(self._store)
        if not pairs:
            self._listed_limbo = set()
            return []
        listed_ids = set(await work_list.listed_ledgers(self._store))
        listed = self._listed_limbo.intersection(pairs)
        self._listed_limbo = {pair for pair in listed if pair[1] in listed_ids}
        new = [
            (bookie_id, ledger_id)
            for bookie_id, ledger_id in pairs
            if (bookie_id, ledger_id) not in self._listed_limbo and bookie_id in now.registered
        ]
        return await limbo.read_limbo_ledgers(self._store, new)
