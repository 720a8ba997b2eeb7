"""The auditor: which ledgers are under-replicated, put on the list that workers work at.

    the bookies that are not registered, by its own watch (Absence) -> one pass over all records:
    which ledgers each bookie holds -> the ledgers of bookies that are lost or drained, those that
    bookies list as in limbo, and those with a bookie that was joining -> the list (work_list.py)
    closed ledgers, each once and all again after CHECK_AGAIN_S -> their bookies are asked which
    entries they have (audit.py) -> those with a bookie that lacks an entry, on the list
    ledgers with a misplaced copy -> MOVES_MAX at a time on the list, while no copy is missing

One role in a cluster. The election only saves work: two auditors at once do no harm.

Always true: the pass over the records is made when another bookie is gone or drained, or a bookie
is on a host or rack that had none, and again after AGAIN_S or, if a pass takes long, after
AGAIN_TIMES its duration; the auditor keeps in memory a count for each bookie, and ids of ledgers.

A bookie is lost when the observer saw it not registered for the whole delay, without a break of its
session. The loss of several does not shorten the delay. It begins anew for a bookie that is back,
also if that was between two looks, which may be far apart. When more than a third of the bookies
that hold anything are lost together, none of them counts as lost until an operator declares it.
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
    """`lost`: bookies whose copies must be made elsewhere. `too_many`: bookies that are lost, too,
    but they are more than a third: the cause may be the observer, or the network."""

    lost: frozenset[str]
    too_many: frozenset[str] = frozenset()


def pause_s(passed_s: float) -> float:
    """The pause after a pass over all records that took `passed_s`: a hundredth of the time is for
    passes, but a pass that a slow store held up puts off the next by an hour at most."""
    return min(max(AGAIN_S, AGAIN_TIMES * passed_s), AGAIN_S_MAX)


class Absence:
    """The bookies that one observer sees absent; times are those of the loop's clock, in s, and of
    the host's, in ms."""

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
        """Note which of the `bookies` are `registered` now. `session` is another number after each
        break of the session."""
        if session != self._session:
            self._session, self._since = session, {}
        here = set(registered)
        self._since = {
            bookie: self._since.get(bookie, now) for bookie in bookies if bookie not in here
        }

    def back(self, is_registered: Callable[[str], bool]) -> None:
        """Note changes since the last look: for bookies that are registered the delay begins
        anew."""
        self._since = {b: since for b, since in self._since.items() if not is_registered(b)}

    def since_ms(self) -> dict[str, int]:
        """The absent bookies, and when the observer first saw each absent."""
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
    """One pass over the records. `held`: how many ledgers each bookie holds copies of. `of`: the
    ledgers of each bookie that is gone or drained. `joining`, `misplaced`: ledgers with a joining
    bookie, or a misplaced copy, and that bookie. `closed`: all CLOSED ledgers."""

    ledgers: int = 0
    held: Counter[str] = field(default_factory=Counter)
    of: dict[str, "array[int]"] = field(default_factory=dict)
    joining: dict[int, str] = field(default_factory=dict)
    misplaced: dict[int, str] = field(default_factory=dict)
    closed: "array[int]" = field(default_factory=lambda: array("q"))

    def see(self, record: LedgerRecord) -> None:
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
    """The result of one look. `listed`: how many ledgers came on the list; `lost`, `draining`:
    bookies. `too_many`: bookies that are gone, but so many that they wait for an operator's
    declaration; `unlisted`: how many ledgers wait with them. `absent`: each bookie that is not
    registered, and since when by this host's clock."""

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
        f"{len(too_many)} bookies are gone, more than a third: {names}. Nothing is copied"
        " for them. If they will not come back: `spark-ledger autorecovery enable --force`"
    )


def _now_ms() -> int:
    return time.time_ns() // 10**6


class Auditor:
    """One observer; the same object must make every look. `now_ms` is this host's clock."""

    def __init__(
        self, ledgers: LedgerStore, tokens: Tokens, now_ms: Callable[[], int] | None = None
    ) -> None:
        self._ledgers = ledgers
        self._now_ms = now_ms or _now_ms
        self._tokens = tokens
        self._store = ledgers.metadata
        self._absence = Absence()
        self._limbo_listed: set[tuple[str, int]] = set()
        self._sessions = 1
        self._index = Index()
        self._indexed: tuple[frozenset[str], frozenset[str]] | None = None
        self._indexed_at = self._indexed_for_s = 0.0
        self._places: set[tuple[str, str]] = set()
        self._unchecked: dict[int, None] = {}
        self._checked: dict[int, frozenset[str]] = {}
        """By ledger, the members that were down and so were not asked."""
        self._checked_since = asyncio.get_running_loop().time()
        self._store.add_session_listener(self._heard)
        self._directory = ledgers.cluster.directory
        self._directory.add_listener(self._registrations_changed)

    def _heard(self, state: SessionState) -> None:
        if state is not SessionState.CONNECTED:
            self._sessions += 1

    def _registrations_changed(self) -> None:
        self._absence.back(self._directory.is_registered)

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
        await self._take_back(settings, now)
        if not settings.enabled:
            return AuditReport(absent=absent)
        gone = self._absence.gone(loop_now, settings.lost_bookie_delay_s)
        due = loop_now - self._indexed_at >= pause_s(self._indexed_for_s)
        if self._is_new_place() or due or self._indexed != (gone, now.draining):
            await self._pass(gone, now)
        judged = judge(gone, {*self._index.held}, now.registered, {*settings.accepted})
        listed = await self._list(judged, now) + await self._check(now)
        unlisted = {ledger_id for b in judged.too_many for ledger_id in self._index.of[b]}
        return AuditReport(
            *(listed, judged.lost, now.draining, judged.too_many, absent, len(unlisted))
        )

    def _is_new_place(self) -> bool:
        """Whether a bookie is on a host or rack that had none: copies may be better placed
        there."""
        writable = self._ledgers.cluster.directory.writable()
        new = {(bookie.host, bookie.rack) for bookie in writable} - self._places
        self._places |= new
        return bool(new)

    async def _take_back(self, settings: AutorecoverySettings, now: Bookies) -> None:
        """An operator's declaration that a bookie is lost ends with that absence: drop it for
        bookies that are back."""
        if not now.registered.isdisjoint(settings.accepted):
            accepted = tuple(b for b in settings.accepted if b not in now.registered)
            with suppress(BadAutorecoverySettings):
                await autorecovery.change_settings(self._store, accepted=accepted)

    async def _pass(self, gone: frozenset[str], now: Bookies) -> None:
        """Read every record. Raises LedgerError, StoreError: then the index is as it was."""
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

        async def see(ledger_ids: Sequence[int]) -> None:
            for versioned in await self._ledgers.cluster.records.read_many(ledger_ids):
                if isinstance(versioned, UnsupportedFormat):
                    log.error("a ledger is not looked after: %s", versioned.what)
                elif versioned is not None:  # else it was deleted meanwhile
                    index.see(versioned.record)
                    place(versioned.record)

        async for batch in in_batches(self._ledgers.list(), RECORDS_AT_ONCE):
            await see(batch)
        if (gone or now.draining) and index.ledgers:
            log.info("audit: %d ledgers, %d bookies hold them", index.ledgers, len(index.held))
        self._index, self._indexed = index, (gone, now.draining)
        self._indexed_at = asyncio.get_running_loop().time()
        self._indexed_for_s = self._indexed_at - began
        if self._indexed_at - self._checked_since >= CHECK_AGAIN_S:
            self._checked, self._checked_since = {}, self._indexed_at
        closed = dict.fromkeys(index.closed)
        self._checked = {  # a ledger is checked again when a member is back
            ledger_id: silent
            for ledger_id, silent in self._checked.items()
            if ledger_id in closed and silent.isdisjoint(now.registered)
        }
        self._unchecked = {i: None for i in closed if i not in self._checked}
        index.closed = array("q")

    async def _list(self, judged: Judgement, now: Bookies) -> int:
        """Put ledgers on the list; how many came on it, or got one more reason."""
        causes = [
            (ledger_id, why, bookie)
            for why, going in ((Cause.LOST, judged.lost), (Cause.DRAINED, now.draining))
            for bookie in sorted(going)
            for ledger_id in self._index.of.get(bookie, ())
        ]
        causes += [(i, Cause.JOINING, bookie) for i, bookie in self._index.joining.items()]
        if not (judged.lost or judged.too_many or now.draining):
            causes += [(i, Cause.MISPLACED, b) for i, b in await self._next_misplaced()]
        since_ms = await store_now_ms(self._store) if causes else 0
        reasons: dict[int, list[Reason]] = {}
        for ledger_id, why, bookie in causes:
            reasons.setdefault(ledger_id, []).append(Reason(why, bookie, since_ms))
        in_limbo = await self._in_limbo(now)
        for listing in in_limbo:
            reason = Reason(Cause.LIMBO, listing.bookie_id, listing.since_ms)
            reasons.setdefault(listing.ledger_id, []).append(reason)
        listed = 0

        async def add(ledger_id: int) -> None:
            nonlocal listed
            listed += await work_list.add(self._store, ledger_id, reasons[ledger_id])

        await call_each(add, sorted(reasons), RECORDS_AT_ONCE)
        self._limbo_listed.update((listing.bookie_id, listing.ledger_id) for listing in in_limbo)
        self._index.joining = {}
        for bookie in judged.lost | now.draining:  # once a pass: a worker may be done with them
            self._index.of[bookie] = array("q")
        return listed

    async def _next_misplaced(self) -> list[tuple[int, str]]:
        """As many ledgers as may be moved now, while no copy is missing: each with a member."""
        misplaced = self._index.misplaced
        if not misplaced or await work_list.is_anything_missing(self._store):
            return []
        room = max(0, MOVES_MAX - len(await work_list.listed(self._store)))
        batch = list(islice(misplaced.items(), room))
        for ledger_id, _ in batch:  # once a pass: a worker may be done with them
            del misplaced[ledger_id]
        return batch

    async def _check(self, now: Bookies) -> int:
        """Ask the bookies of the next ledgers which entries they have; how many ledgers came on the
        list."""
        batch = [*self._unchecked][:CHECKS_A_LOOK]
        since_ms, listed = await store_now_ms(self._store) if batch else 0, 0

        async def check(ledger_id: int) -> None:
            nonlocal listed
            self._unchecked.pop(ledger_id, None)
            try:
                record = (await self._ledgers.record(ledger_id)).record
                checked = await check_ledger(self._ledgers, record, self._tokens)
            except (NoSuchLedger, UnsupportedFormat):
                return
            if checked.silent.isdisjoint(now.registered):
                self._checked[ledger_id] = checked.silent
            responded = now.registered - checked.silent  # others are asked again
            reasons = [
                Reason(Cause.LACKING, bookie, since_ms)
                for bookie in checked.lacking
                if bookie in responded
            ]
            if reasons:
                log.warning("audit: ledger %d lacks copies: %s", ledger_id, checked.lacking)
                listed += await work_list.add(self._store, ledger_id, reasons)

        await call_each(check, batch, CHECKS_AT_ONCE)
        return listed

    async def _in_limbo(self, now: Bookies) -> list[LimboLedger]:
        """The ledgers that bookies list as in limbo, except those that this auditor has put on its
        list for that reason: thousands may stay there for long."""
        named = await limbo.named(self._store)
        if not named:
            self._limbo_listed = set()
            return []
        on_list = set(await work_list.listed(self._store))
        listed = self._limbo_listed.intersection(named)
        self._limbo_listed = {pair for pair in listed if pair[1] in on_list}
        new = [
            (bookie_id, ledger_id)
            for bookie_id, ledger_id in named
            if (bookie_id, ledger_id) not in self._limbo_listed and bookie_id in now.registered
        ]
        return await limbo.listed_of(self._store, new)
