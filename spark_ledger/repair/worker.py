"""Repairs the ledgers on the list of under-replicated ledgers, a few at a time.

    lock -> read the record again -> drop reasons that no longer hold -> close the ledger, if its
    writer is gone -> give away the slots of lost and drained bookies; while no copy of any ledger
    is missing, give misplaced slots to bookies on other hosts or racks; bring back the entries that
    other bookies lack -> remove the ledger from the list, or note the obstacle there

Always true:
- before each ledger, and while it copies, the worker reads from the store which bookies are
  registered and drained, and the settings: it makes only copies that are missing;
- an open ledger with a living writer is not recovered. The worker recovers an open ledger only if
  the ledger did not move for half of the delay (the worker saw neither its record nor its last add
  confirmed change), or if it is IN_RECOVERY already;
- an obstacle of one ledger does not stop work at other ledgers: the ledger is tried again, after a
  longer pause each time; a list in which no ledger can be repaired costs one look a round.
"""

import asyncio
import logging
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import NamedTuple

from spark_ledger.errors import LedgerError, NoSuchLedger
from spark_ledger.ledger.client import LedgerStore
from spark_ledger.ledger.ensemble_change import ABSENT_MIN_S
from spark_ledger.ledger.quorum import Quorum
from spark_ledger.ledger.reader import AsyncLedgerReader
from spark_ledger.ledger.records import VersionedRecord
from spark_ledger.metadata import autorecovery, paths
from spark_ledger.metadata.autorecovery import AutorecoverySettings, BadAutorecoverySettings
from spark_ledger.metadata.ledger_record import RecordState, Tokens
from spark_ledger.metadata.store import MetadataStore
from spark_ledger.metadata.store_calls import call_each, names_in, unavailable_while
from spark_ledger.repair import limbo, slots, work_list
from spark_ledger.repair.copies import Pace
from spark_ledger.repair.work_list import Cause, ListedLedger, Reason

BACK_OFF_S, BACK_OFF_MAX_S = 1.0, 300.0
SETTINGS_S = 5.0  # a changed rate takes effect within this time
LEDGERS_AT_ONCE = 3
IDLE_MIN_S = 2 * ABSENT_MIN_S  # within this time a living writer replaces an absent member
IDLE_SHARE = 0.5  # of the delay

log = logging.getLogger(__name__)


class NotNeeded(Exception):
    """No further copy is needed: the bookie whose copies are being made on other bookies is
    registered again, or no longer drained; or repair was disabled."""


class Bookies(NamedTuple):
    """The bookies that are registered, and the bookies that are being drained, by the store."""

    registered: frozenset[str]
    draining: frozenset[str]


async def bookies(store: MetadataStore) -> Bookies:
    """The state of the bookies, not older than this call. Raises StoreError."""
    await store.sync("/bookies")
    registered: list[str] = []
    for folder in (paths.BOOKIES_AVAILABLE, paths.BOOKIES_READONLY):
        registered += await names_in(store, folder)
    return Bookies(frozenset(registered), frozenset(await autorecovery.draining_bookies(store)))


async def settings(store: MetadataStore) -> AutorecoverySettings:
    """The cluster's settings. If the settings are damaged, logs an error and returns the defaults.
    Raises StoreError."""
    try:
        return await autorecovery.read_settings(store)
    except BadAutorecoverySettings as damage:
        log.error("autorecovery: %s", damage)
        return AutorecoverySettings()


class Outcome(NamedTuple):
    """The result for one ledger on the list. Without a `why` the ledger was removed from the list.
    `repaired`: the results at staying bookies that were compared."""

    ledger_id: int
    copied: int = 0
    why: str = ""
    repaired: tuple[limbo.ComparisonResult, ...] = ()


@dataclass(slots=True)
class _Result:
    """The result of work at a ledger: the reasons that remain, and the obstacle (`why`); how many
    entries were copied, and which entries no bookie supplies; the results of comparisons."""

    remaining: tuple[Reason, ...] = ()
    why: str = ""
    copied: int = 0
    damaged: tuple[int, ...] = ()
    repaired: tuple[limbo.ComparisonResult, ...] = ()

    def add(self, result: slots.SlotResult | limbo.ComparisonResult) -> None:
        """Add the result for a slot or a bookie; the first obstacle is kept."""
        self.copied += result.copied
        self.why = self.why or result.why
        if isinstance(result, limbo.ComparisonResult):
            self.repaired += (result,)
        else:
            self.damaged += result.damaged


class _Wait(NamedTuple):
    """When a ledger is tried again."""

    until_s: float
    pause_s: float


class _LedgerState(NamedTuple):
    """The state of an open ledger, and since when the ledger has it (by the loop's clock)."""

    version: int
    last_add_confirmed: int
    since_s: float


class Worker:
    """The worker of one process; the same object must work every round. `idle_s`: an open ledger
    that did not move for this time is recovered; None: half of the delay. `always`: the worker also
    works while repair is disabled."""

    def __init__(
        self,
        ledgers: LedgerStore,
        tokens: Tokens,
        *,
        idle_s: float | None = None,
        always: bool = False,
    ) -> None:
        self._ledgers = ledgers
        self._store = ledgers.metadata
        self._tokens = tokens
        self._idle_s = idle_s
        self._always = always
        self._watched: dict[int, _LedgerState] = {}
        self._waits: dict[int, _Wait] = {}
        self._held_locks: dict[int, None] = {}
        """Locks that could not be given back yet, and for which other workers wait."""
        self._settings = AutorecoverySettings()
        self._owed_bytes = self._paid_s = 0.0
        """The bytes copied beyond the rate, and the time of this count."""
        self.copied_bytes = 0

    async def round(self) -> list[Outcome]:
        """Work once at each ledger that is listed and due; returns the outcome of each. Raises
        Unavailable."""
        for ledger_id in list(self._held_locks):
            await self._unlock(ledger_id)
        ledger_ids = await work_list.listed_ledgers(self._store)
        self._waits = {i: self._waits[i] for i in ledger_ids if i in self._waits}
        self._watched = {i: self._watched[i] for i in ledger_ids if i in self._watched}
        self._ledgers.cluster.rng.shuffle(ledger_ids)
        outcomes = []

        async def work(ledger_id: int) -> None:
            with unavailable_while("looking up the settings of autorecovery"):
                if not await self._may_work():
                    return
            outcome = await self.work_at(ledger_id)
            if outcome is not None:
                outcomes.append(outcome)

        await call_each(work, filter(self._is_due, ledger_ids), LEDGERS_AT_ONCE)
        return outcomes

    def _is_due(self, ledger_id: int) -> bool:
        wait = self._waits.get(ledger_id)
        return wait is None or self._now() >= wait.until_s

    async def work_at(self, ledger_id: int) -> Outcome | None:
        """Work at a listed ledger; None: another worker works at it. Raises Unavailable."""
        with unavailable_while("repairing an under-replicated ledger"):
            if not await work_list.lock(self._store, ledger_id):
                return None
            try:
                return await self._work_at(ledger_id)
            finally:
                await self._unlock(ledger_id)

    def is_waiting_to_close(self, ledger_id: int) -> bool:
        """Whether the ledger was not repaired because it is open, and may be recovered later."""
        return ledger_id in self._watched

    async def _unlock(self, ledger_id: int) -> None:
        """Give the lock back; if that fails, the next round tries again."""
        self._held_locks[ledger_id] = None
        if await work_list.unlock(self._store, ledger_id):
            self._held_locks.pop(ledger_id, None)

    # -- one ledger ---------------------------------------------------------------------------

    async def _work_at(self, ledger_id: int) -> Outcome:
        """Raises StoreError."""
        work = await work_list.find(self._store, ledger_id)
        if work is None:
            return Outcome(ledger_id)
        try:
            result = await self._repair(work)
        except NoSuchLedger:
            result = _Result()
        except NotNeeded as why:
            result = _Result(work.reasons, str(why))
        except LedgerError as failure:
            result = _Result(work.reasons, failure.what)
        if not result.remaining:
            self._waits.pop(ledger_id, None)
            await work_list.remove(self._store, work)
            return Outcome(ledger_id, result.copied, repaired=result.repaired)
        self._put_off(ledger_id, moved=bool(result.copied))
        if (result.remaining, result.why, result.damaged) != (
            work.reasons,
            work.blocked,
            work.damaged,
        ):
            changed = replace(
                work, reasons=result.remaining, blocked=result.why, damaged=result.damaged
            )
            await work_list.update(self._store, changed)
            log.warning("ledger %d stays under-replicated for now: %s", ledger_id, result.why)
        return Outcome(ledger_id, result.copied, result.why, result.repaired)

    async def _repair(self, work: ListedLedger) -> _Result:
        """Raises LedgerError, NotNeeded, StoreError."""
        now = await bookies(self._store)
        reasons = tuple(reason for reason in work.reasons if _still_holds(reason, now))
        leaving = {reason.bookie_id for reason in reasons if reason.why.goes}
        may_place_better = any(reason.why is Cause.MISPLACED for reason in reasons)
        if may_place_better and await work_list.is_anything_missing(self._store):
            may_place_better = False  # the auditor will list the misplaced copy again
        current = await self._ledgers.record(work.ledger_id, fresh=True)
        if not may_place_better:
            await self._withdraw(current, leaving)
        result = _Result()
        current = await self._close_abandoned(current, reasons, leaving, now, result)
        await self._give_away(current, leaving, now, result)
        if may_place_better:
            await self._place_better(work.ledger_id, now, result)
        current = await self._ledgers.record(work.ledger_id, fresh=True)
        if may_place_better and not result.why:
            await self._withdraw(current, leaving)
        result.remaining = tuple(
            [
                reason
                for reason in reasons
                if await self._is_still_listed(reason, current, may_place_better, result)
            ]
        )
        result.why = result.why or ("in work" if result.remaining else "")
        return result

    async def _close_abandoned(
        self,
        current: VersionedRecord,
        reasons: Collection[Reason],
        leaving: Collection[str],
        now: Bookies,
        result: _Result,
    ) -> VersionedRecord:
        """Recover an open ledger whose reasons concern its end, if its writer is gone."""
        is_in_recovery = _is_in_recovery(current)
        if current.record.closed or not (_concerns_end(current, reasons) or is_in_recovery):
            return current
        if not is_in_recovery and self._lacks_spares(current, leaving, now):
            self._watched.pop(current.record.ledger_id, None)  # its writer has no spare either
            result.why = slots.NO_SPARE
        elif await self._may_close(current):
            return await self._ledgers.recover(current.record.ledger_id, tokens=self._tokens)
        else:
            result.why = f"it is open: it is recovered if it does not move for {self._due_s():g} s"
        return current

    async def _give_away(
        self, current: VersionedRecord, leaving: Collection[str], now: Bookies, result: _Result
    ) -> None:
        """Give the slots of leaving bookies, in complete fragments, to other bookies."""
        for slot in slots.slots_of(current.record, leaving):
            moved = await slots.give_away(
                *(self._ledgers, current.record.ledger_id, slot, self._tokens),
                avoid=[*leaving, *now.draining],
                pace=self._pace_of(slot.old),
            )
            result.add(moved)
            if not moved.why:
                log.info("repair: %s", moved)

    async def _place_better(self, ledger_id: int, now: Bookies, result: _Result) -> None:
        """Give each misplaced copy to a better placed bookie, one after the other."""
        while True:
            current = await self._ledgers.record(ledger_id, fresh=True)
            misplaced = slots.misplaced(self._ledgers.cluster, current.record, now.draining)
            if not misplaced:
                return
            moved = await slots.give_away(
                *(self._ledgers, ledger_id, misplaced[0], self._tokens),
                avoid=now.draining,
                better=True,
                pace=self._pace_of(""),
            )
            result.add(moved)
            if moved.why:
                return
            log.info("repair: a better place: %s", moved)

    async def _is_still_listed(
        self, reason: Reason, current: VersionedRecord, may_place_better: bool, result: _Result
    ) -> bool:
        """Whether the ledger stays listed for this reason; brings back the entries that a staying
        bookie lacks."""
        if reason.why is Cause.MISPLACED:
            return may_place_better and bool(result.why)
        if reason.why is Cause.JOINING or not current.record.names(reason.bookie_id):
            return False  # other bookies have its copies
        if reason.why.goes or not current.record.closed:
            return True
        comparison = await self._bring_back(current, reason)
        result.add(comparison)
        return not comparison.cleared

    async def _bring_back(self, closed: VersionedRecord, reason: Reason) -> limbo.ComparisonResult:
        """Copy to a staying bookie the entries that it lacks."""
        (comparison,) = await limbo.compare_and_repair(
            *(self._ledgers, closed, [reason.bookie_id], self._tokens),
            everything=reason.why != Cause.LIMBO,
            pace=self._pace_of(""),
        )
        if comparison.cleared:
            log.info("repair: %s", comparison)
        return comparison

    async def _withdraw(self, versioned: VersionedRecord, leaving: Collection[str]) -> None:
        """End each joining for the slot of a member that stays."""
        record = versioned.record
        for joining in record.joining:
            if record.fragment_of(joining.first_entry).ensemble[joining.slot] not in leaving:
                await slots.withdraw(self._ledgers, record.ledger_id, joining)

    def _lacks_spares(
        self, versioned: VersionedRecord, leaving: Collection[str], now: Bookies
    ) -> bool:
        """Whether a living writer could not replace the leaving members of its ensemble either."""
        cluster, ensemble = self._ledgers.cluster, versioned.record.last_fragment.ensemble
        writable_ids = {bookie.id for bookie in cluster.directory.writable()} - now.draining
        quorum = Quorum.of(versioned.record)
        return not all(
            slots.can_be_taken(cluster, quorum, ensemble, slot, writable_ids)
            for slot, bookie in enumerate(ensemble)
            if bookie in leaving
        )

    async def _may_close(self, versioned: VersionedRecord) -> bool:
        return _is_in_recovery(versioned) or await self._is_idle(versioned)

    async def _is_idle(self, versioned: VersionedRecord) -> bool:
        """Look at an open ledger; returns whether it has not moved for `_due_s`."""
        reader = AsyncLedgerReader(self._ledgers.cluster, versioned, self._tokens)
        try:
            confirmed = await reader.refresh_last_add_confirmed()
        except LedgerError:  # no bookie responds: only the record shows whether the ledger moves
            confirmed = reader.last_add_confirmed
        state = _LedgerState(reader.version, confirmed, self._now())
        before = self._watched.get(versioned.record.ledger_id)
        if before is None or before[:2] != state[:2]:
            before = self._watched[versioned.record.ledger_id] = state
        return state.since_s - before.since_s >= self._due_s()

    def _due_s(self) -> float:
        """The time after which an open ledger that does not move has no writer that reaches the
        cluster."""
        if self._idle_s is not None:
            return self._idle_s
        return max(IDLE_MIN_S, self._settings.lost_bookie_delay_s * IDLE_SHARE)

    # -- pace ---------------------------------------------------------------------------------

    def _pace_of(self, old: str) -> Pace:
        """The pace for copies that replace the copies of `old`, a lost or drained bookie; "" for
        other copies."""

        async def pace(copied: int) -> None:
            self.copied_bytes += copied
            self._owed_bytes += copied
            while await self._owes():
                rate = self._settings.repair_bytes_per_s
                await asyncio.sleep(min(self._owed_bytes / rate, SETTINGS_S))
            if old:  # after the wait, which may be long
                now = await bookies(self._store)
                if old in now.registered and old not in now.draining:
                    raise NotNeeded("the bookie is registered again")

        return pace

    async def _owes(self) -> bool:
        """Whether the worker has copied more than the present rate allows. Raises NotNeeded,
        StoreError."""
        if not await self._may_work():
            raise NotNeeded("autorecovery is disabled")
        rate, now_s = self._settings.repair_bytes_per_s, self._now()
        paid_bytes = rate * (now_s - self._paid_s) if rate else self._owed_bytes
        self._owed_bytes, self._paid_s = max(0.0, self._owed_bytes - paid_bytes), now_s
        return self._owed_bytes >= 1

    async def _may_work(self) -> bool:
        """Whether the present settings allow repair. Raises StoreError."""
        self._settings = await settings(self._store)
        return self._settings.enabled or self._always

    def _put_off(self, ledger_id: int, *, moved: bool) -> None:
        before = self._waits.get(ledger_id)
        longest_s = min(BACK_OFF_MAX_S, self._settings.lost_bookie_delay_s * IDLE_SHARE)
        pause_s = BACK_OFF_S if before is None or moved else min(2 * before.pause_s, longest_s)
        self._waits[ledger_id] = _Wait(self._now() + pause_s, pause_s)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _still_holds(reason: Reason, now: Bookies) -> bool:
    """Whether the reason still holds, as far as the state of the bookies decides that."""
    if reason.why == Cause.LOST:
        return reason.bookie_id not in now.registered
    return reason.why != Cause.DRAINED or reason.bookie_id in now.draining


def _is_in_recovery(versioned: VersionedRecord) -> bool:
    return versioned.record.state is RecordState.IN_RECOVERY


def _concerns_end(versioned: VersionedRecord, reasons: Collection[Reason]) -> bool:
    """Whether an open ledger must be closed before its reasons can be dropped: a leaving bookie is
    in its last fragment; or a staying bookie lacks entries, which are brought back only once the
    end of the ledger is known."""
    members = versioned.record.last_fragment.ensemble
    return any(
        reason.bookie_id in members if reason.why.goes else reason.why.lacks_copies
        for reason in reasons
    )
