"""The auditor: which ledgers are under-replicated, put on the list that workers work at.

    who is registered, by its own watch (Absence) -> one pass over all records: what each bookie
    holds -> the ledgers of those that are lost or drained, those that bookies say are in limbo, and
    those with a bookie that was joining -> the list (work_list.py)
    closed ledgers, each once and all again after CHECK_AGAIN_S -> their bookies are asked which
    entries they have (audit.py) -> those of which a bookie lacks some, on the list
    ledgers of which a copy is misplaced -> MOVES_MAX at a time on the list, when nothing is missing

One role in a cluster; the election saves work, no more: two may do it at once.

Always true: the pass over the records is made when
another bookie is gone or drained, or is on a host or rack where none was, and again after AGAIN_S
or, where it takes long, AGAIN_TIMES as long; what it keeps in memory is a count for each bookie,
and ids of ledgers.

A bookie is lost when the observer saw it not registered for the whole delay, without a break of its
session; losing several does not shorten that; a bookie that is back begins anew, also
one that was back between two looks, which may be far apart; when more than a third of the bookies
that hold anything are lost together, none counts until an operator says that they are.
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
from spark_ledger.ledger.transitions import is_settled
from spark_ledger.metadata import autorecovery, paths
from spark_ledger.metadata.autorecovery import BadSettings, Settings
from spark_ledger.metadata.ledger_record import LedgerRecord, Tokens
from spark_ledger.metadata.store import SessionState, StoreError
from spark_ledger.metadata.store_calls import each, in_batches, names_in, store_now_ms
from spark_ledger.repair import limbo, slots, work_list
from spark_ledger.repair.audit import check_ledger
from spark_ledger.repair.limbo import Listed
from spark_ledger.repair.work_list import Reason
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
    """`lost`: their copies are to be made elsewhere. `too_many`: lost all the same, but more than
    a third, so that it may be the observer, or the network."""

    lost: frozenset[str]
    too_many: frozenset[str] = frozenset()


def pause_s(passed_s: float) -> float:
    """After a pass over all records that took so long: a hundredth of the time is for passes, but
    one that a slow store held up puts off the next by an hour at most."""
    return min(max(AGAIN_S, AGAIN_TIMES * passed_s), AGAIN_S_MAX)


class Absence:
    """Of one observer; times are those of the loop's clock, in s, and of the host's, in ms."""

    def __init__(self) -> None:
        self._since: dict[str, tuple[float, int]] = {}
        self._session = 0

    def look(
        self,
        now: tuple[float, int],
        session: int,
        known: Collection[str],
        registered: Collection[str],
    ) -> None:
        """What was seen now. `session` is another number after each break of the session."""
        if session != self._session:
            self._session, self._since = session, {}
        here = set(registered)
        self._since = {
            bookie: self._since.get(bookie, now) for bookie in known if bookie not in here
        }

    def back(self, is_registered: Callable[[str], bool]) -> None:
        """What was heard since the last look: those that are registered begin anew."""
        self._since = {b: since for b, since in self._since.items() if not is_registered(b)}

    def since_ms(self) -> dict[str, int]:
        """Those that are absent, and since when they were seen to be."""
        return {bookie: self._since[bookie][1] for bookie in sorted(self._since)}

    def gone(self, now_s: float, delay_s: float) -> frozenset[str]:
        """Those that were absent all through the delay."""
        return frozenset(b for b, (since, _) in self._since.items() if now_s - since >= delay_s)


def judge(gone: Set[str], holding: Set[str], registered: Set[str], accepted: Set[str]) -> Judgement:
    """Of those that are gone, `holding` anything by the ledgers' records. `accepted`: an operator
    said that these are lost."""
    lost = gone & holding
    unsaid = lost - accepted
    if 3 * len(unsaid) > len(registered | holding):
        return Judgement(frozenset(lost & accepted), frozenset(unsaid))
    return Judgement(frozenset(lost))


@dataclass(slots=True)
class Index:
    """One pass over the records: how many ledgers each bookie holds copies of, and which ledgers
    those that are to go hold, or have somebody joining, or a copy that is misplaced."""

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
        for one in record.joining:
            self.joining[record.ledger_id] = one.bookie_id
        if record.closed:
            self.closed.append(record.ledger_id)


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What one look found: `listed` ledgers came on the list; `lost` and `draining` bookies;
    `too_many` are gone, but so many that nothing is done until an operator says so, for `unlisted`
    ledgers; `absent`: each that is not registered, and since when by this host's clock."""

    listed: int = 0
    lost: frozenset[str] = frozenset()
    draining: frozenset[str] = frozenset()
    too_many: frozenset[str] = frozenset()
    absent: Mapping[str, int] = field(default_factory=dict)
    unlisted: int = 0

    @property
    def alarm(self) -> str:
        """What an operator must look at; empty for nothing."""
        return alarm(self.too_many)


def alarm(too_many: Collection[str]) -> str:
    """What an operator must look at when so many are gone; empty for nothing."""
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
    """One observer; it must live on from look to look. `now_ms` is this host's clock."""

    def __init__(
        self, ledgers: LedgerStore, tokens: Tokens, now_ms: Callable[[], int] | None = None
    ) -> None:
        self._ledgers = ledgers
        self._now_ms = now_ms or _now_ms
        self._tokens = tokens
        self._store = ledgers.metadata
        self._absence = Absence()
        self._limbo_told: set[tuple[str, int]] = set()
        self._sessions = 1
        self._index = Index()
        self._indexed: tuple[frozenset[str], frozenset[str]] | None = None
        self._indexed_at = self._indexed_for_s = 0.0
        self._places: set[tuple[str, str]] = set()
        self._unchecked: dict[int, None] = {}
        self._checked: dict[int, frozenset[str]] = {}
        """By ledger the members that were away, and were not asked."""
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
        """Look once, and list what is found. Raises Unavailable."""
        try:
            return await self._look()
        except StoreError as failure:
            raise Unavailable(f"the audit ended early: {failure!r}") from failure

    async def _look(self) -> AuditReport:
        settings = await read_settings(self._store)
        now = await bookies(self._store)
        known = {
            *await names_in(self._store, paths.BOOKIES_KNOWN),
            *self._index.held,
            *now.registered,
        }
        loop_now = asyncio.get_running_loop().time()
        moment = loop_now, self._now_ms()
        self._absence.look(moment, self._sessions, known, now.registered)
        self._registrations_changed()  # who came since `now` was read
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
        unlisted = {ledger_id for one in judged.too_many for ledger_id in self._index.of[one]}
        return AuditReport(
            *(listed, judged.lost, now.draining, judged.too_many, absent, len(unlisted))
        )

    def _is_new_place(self) -> bool:
        """Whether a bookie is where none was: copies may be better placed there."""
        writable = self._ledgers.cluster.directory.writable()
        new = {(bookie.host, bookie.rack) for bookie in writable} - self._places
        self._places |= new
        return bool(new)

    async def _take_back(self, settings: Settings, now: Bookies) -> None:
        """An operator's word that a bookie is lost is of the absence that it was said of."""
        if not now.registered.isdisjoint(settings.accepted):
            accepted = tuple(one for one in settings.accepted if one not in now.registered)
            with suppress(BadSettings):
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
                if is_settled(record, fragment.first_entry):
                    for slot in misplaced_in(Quorum.of(record), fragment.ensemble):
                        index.misplaced[record.ledger_id] = fragment.ensemble[slot]

        async def see(ledger_ids: Sequence[int]) -> None:
            for found in await self._ledgers.cluster.records.read_many(ledger_ids):
                if isinstance(found, UnsupportedFormat):
                    log.error("a ledger is not looked after: %s", found.what)
                elif found is not None:  # else it was deleted meanwhile
                    index.see(found.record)
                    place(found.record)

        async for some in in_batches(self._ledgers.list(), RECORDS_AT_ONCE):
            await see(some)
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
        self._unchecked = {one: None for one in closed if one not in self._checked}
        index.closed = array("q")

    async def _list(self, judged: Judgement, now: Bookies) -> int:
        """How many ledgers came on the list, or have a reason more."""
        found = [
            (ledger_id, why, bookie)
            for why, some in ((work_list.LOST, judged.lost), (work_list.DRAINED, now.draining))
            for bookie in sorted(some)
            for ledger_id in self._index.of.get(bookie, ())
        ]
        found += [(i, work_list.JOINING, bookie) for i, bookie in self._index.joining.items()]
        if not (judged.lost or judged.too_many or now.draining):
            found += [(i, work_list.MISPLACED, b) for i, b in await self._some_misplaced()]
        since_ms = await store_now_ms(self._store) if found else 0
        wanted: dict[int, list[Reason]] = {}
        for ledger_id, why, bookie in found:
            wanted.setdefault(ledger_id, []).append(Reason(why, bookie, since_ms))
        in_limbo = await self._in_limbo(now)
        for one in in_limbo:
            reason = Reason(work_list.LIMBO, one.bookie_id, one.since_ms)
            wanted.setdefault(one.ledger_id, []).append(reason)
        listed = 0

        async def add(ledger_id: int) -> None:
            nonlocal listed
            listed += await work_list.add(self._store, ledger_id, wanted[ledger_id])

        await each(add, sorted(wanted), RECORDS_AT_ONCE)
        self._limbo_told.update((one.bookie_id, one.ledger_id) for one in in_limbo)
        self._index.joining = {}
        for bookie in judged.lost | now.draining:  # once a pass: a worker may be done with them
            self._index.of[bookie] = array("q")
        return listed

    async def _some_misplaced(self) -> list[tuple[int, str]]:
        """As many as may be moved now, while nothing is missing: each with a member."""
        misplaced = self._index.misplaced
        if not misplaced or await work_list.is_anything_missing(self._store):
            return []
        room = max(0, MOVES_MAX - len(await work_list.listed(self._store)))
        some = list(islice(misplaced.items(), room))
        for ledger_id, _ in some:  # once a pass: a worker may be done with them
            del misplaced[ledger_id]
        return some

    async def _check(self, now: Bookies) -> int:
        """Ask the bookies of some ledgers which entries they have; how many came on the list."""
        some = [*self._unchecked][:CHECKS_A_LOOK]
        since_ms, listed = await store_now_ms(self._store) if some else 0, 0

        async def check(ledger_id: int) -> None:
            nonlocal listed
            self._unchecked.pop(ledger_id, None)
            try:
                record = (await self._ledgers.record(ledger_id)).record
                found = await check_ledger(self._ledgers, record, self._tokens)
            except (NoSuchLedger, UnsupportedFormat):
                return
            if found.silent.isdisjoint(now.registered):
                self._checked[ledger_id] = found.silent
            told = now.registered - found.silent  # others are asked again
            reasons = [
                Reason(work_list.LACKING, bookie, since_ms)
                for bookie in found.lacking
                if bookie in told
            ]
            if reasons:
                log.warning("audit: ledger %d lacks copies: %s", ledger_id, found.lacking)
                listed += await work_list.add(self._store, ledger_id, reasons)

        await each(check, some, CHECKS_AT_ONCE)
        return listed

    async def _in_limbo(self, now: Bookies) -> list[Listed]:
        """What bookies list as in limbo, but for what is on our list because of it: thousands may
        be there for long."""
        named = await limbo.named(self._store)
        if not named:
            self._limbo_told = set()
            return []
        on_list = set(await work_list.listed(self._store))
        told = self._limbo_told.intersection(named)
        self._limbo_told = {one for one in told if one[1] in on_list}
        new = [one for one in named if one not in self._limbo_told and one[0] in now.registered]
        return await limbo.listed_of(self._store, new)
