"""Adds from the queue to the bookies and back: send, count responses, confirm in order.

Used by the writer of a ledger and, with the recovery flag, by a recovery. A slot is a position in
the ensemble; its owner is the bookie that has this position now.

Always true:
- an acknowledgement counts for a slot only if it comes from the slot's owner; a failure counts only
  if the slot got no new owner and no new try since the add was sent;
- the pipeline sends nothing to a failed slot until ensemble_change.py mends the slot: gives it a
  new owner, or tries the old one again;
- FENCED, UNAUTHORIZED, LEDGER_DELETED and a conflicting entry end the pipeline: every pending add
  fails, and no add is ever confirmed afterwards;
- an entry's bytes count as in flight until the entry is confirmed. Confirmed entries that still
  wait for responses count only beyond the first `inflight_bytes` of them (a setting), so memory is
  bounded by twice that setting.
"""

import asyncio
from asyncio import InvalidStateError
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import InvalidStateError as ThreadInvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

from bookie_server.api.messages import AddResult
from bookie_server.api.status import Status
from spark_ledger.bookies.bookie_client import AddLane, OnResults
from spark_ledger.errors import (
    ClientClosed,
    LedgerClosed,
    LedgerError,
    LedgerFenced,
    MessageTooBig,
    NoSuchLedger,
    NotEnoughBookies,
    TimedOut,
    Unauthorized,
)
from spark_ledger.ledger.cluster import Cluster, status_text
from spark_ledger.ledger.quorum import PendingAdd, PendingAdds, Quorum
from spark_ledger.metadata.ledger_record import LedgerRecord

RETRY_AFTER_S = 0.05  # after a refusal that names no time
ROOM_AGAIN = 0.75  # callers that wait for room go on below this part of `inflight_bytes`

_TRY_AGAIN = (Status.BUSY, Status.METADATA_UNAVAILABLE)


class SlotState(Enum):
    """The state of a slot of the ensemble."""

    HEALTHY = "healthy"
    FAILED = "failed"
    """The pipeline sends nothing to it until it is mended."""


_HEALTHY = SlotState.HEALTHY
_MOVES = {
    SlotState.HEALTHY: (SlotState.FAILED,),  # its bookie did not take an add
    SlotState.FAILED: (SlotState.HEALTHY,),  # tried again; a new owner is another Slot
}


@dataclass(slots=True)
class Slot:
    """A slot of the ensemble and its owner. `why` is the reason of its failure, for people.
    `generation` counts owners and tries, so that a late failure of an earlier owner or try is
    recognised. `on_results` takes the responses to adds that are sent for the first time. The owner
    of a failed slot is asked again `pause_s` after `failed_at`."""

    bookie_id: str
    lane: AddLane
    on_results: OnResults
    generation: int = 0
    state: SlotState = SlotState.HEALTHY
    why: str = ""
    failed_at: float = 0.0
    pause_s: float = 0.0

    @property
    def failed(self) -> bool:
        return self.state is SlotState.FAILED

    def move(self, state: SlotState) -> None:
        assert state in _MOVES[self.state], f"a slot goes from {self.state} to {state}"
        self.state = state


class AddPipeline:
    """The adds of one ledger that are under way. It calls `on_slot_failed` when a slot fails, and
    `on_confirmed` after adds were confirmed."""

    def __init__(
        self,
        cluster: Cluster,
        record: LedgerRecord,
        last_add_confirmed: int,
        *,
        recovery: bool = False,
    ) -> None:
        self.cluster = cluster
        self.recovery = recovery
        self.ledger_id = record.ledger_id
        self.record = record
        self.quorum = Quorum.of(record)
        self.pending = PendingAdds(self.quorum, last_add_confirmed)
        ensemble = record.last_fragment.ensemble
        self.slots = [self._new_slot(index, bookie, 0) for index, bookie in enumerate(ensemble)]
        self._lacked: dict[str, int] = {}  # bookie -> last entry that it has no copy of
        self._unconfirmed_bytes = 0
        self._lagging_bytes = 0  # of confirmed adds that not all bookies have responded to
        self.confirmed_bytes = 0
        self.confirmed_rows = 0
        self.failure: LedgerError | None = None
        self._ended_at, self._brief = 0.0, ""
        self.on_slot_failed: Callable[[], None] = lambda: None
        self.on_confirmed: Callable[[], None] = lambda: None
        self._loop = asyncio.get_running_loop()
        self._write_sets = [self.quorum.write_set(e) for e in range(self.quorum.ensemble_size)]
        self._outstanding: dict[int, PendingAdd] = {}  # by entry id: not confirmed, or sent still
        self._waiters: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []
        self._add_timer: asyncio.TimerHandle | None = None

    # -- pushing ------------------------------------------------------------------------------

    def push(self, add: PendingAdd) -> None:
        """Queue an add and send it to the healthy slots of its write set."""
        assert self.failure is None
        self.pending.push(add)
        self._outstanding[add.entry_id] = add
        self._unconfirmed_bytes += add.size
        if self._add_timer is None:
            self._arm_add_timer(add.appended_at)
        for index in self._write_sets[add.entry_id % self.quorum.ensemble_size]:
            slot = self.slots[index]
            if slot.state is _HEALTHY:  # does not call `failed`: this line runs for each copy
                add.sends += 1
                slot.lane.submit(add, slot.on_results)

    def fail(self, failure: LedgerError, brief: str = "") -> None:
        """End the pipeline: every pending add fails with `failure`, every later add with the error
        of `late_add_error`, which repeats `brief` (by default the text of `failure`)."""
        if self.failure is not None:
            return
        self.failure = failure
        self._ended_at, self._brief = self._loop.time(), brief or failure.what
        for add in self.pending.fail_all():
            self._release(add)
            _resolve(add, failure)
        if self._add_timer is not None:
            self._add_timer.cancel()
        self._wake()
        self.on_slot_failed()  # the ensemble change has no slot left to mend

    def late_add_error(self) -> LedgerError | None:
        """The error of an add that comes after `fail`; None before."""
        failure = self.failure
        if failure is None or isinstance(failure, LedgerClosed | ClientClosed):
            return failure
        ago_s = self._loop.time() - self._ended_at
        text = f"the writer of ledger {self.ledger_id} ended {ago_s:.1f} s ago: {self._brief}"
        remedy = failure.remedy
        if isinstance(failure, NotEnoughBookies):
            remedy += " Then close this writer and go on in a new ledger."
        elif isinstance(failure, TimedOut):
            remedy = "Close it and go on in a new ledger."
        return type(failure)(text, remedy, ledger_id=self.ledger_id)

    def give_up(self) -> None:
        """End the pipeline: for too long, too few bookies took its entries."""
        quorum = f"{self.quorum.ack_quorum} of {self.quorum.write_quorum} bookies"
        brief = "; ".join([f"fewer than {quorum} took an entry", *self._reasons()])
        self.fail(self.not_enough_bookies(), brief)

    @property
    def inflight_bytes(self) -> int:
        """Bytes of adds that are not confirmed, and the excess over the setting `inflight_bytes` of
        confirmed adds that wait for responses: a bookie slows the writer only if it lags so far."""
        lagging = self._lagging_bytes - self.cluster.config.inflight_bytes
        return self._unconfirmed_bytes + max(0, lagging)

    @property
    def held_bytes(self) -> int:
        """Bytes of the adds in memory: those that are not confirmed, or lack a response."""
        return self._unconfirmed_bytes + self._lagging_bytes

    async def held_below(self, bytes_max: int) -> None:
        """Return when `bytes_max` or less are held, or the client is closed. The last response
        comes within `replica_timeout_s`."""
        await self._until(
            lambda: self.held_bytes <= bytes_max or isinstance(self.failure, ClientClosed)
        )

    async def room(self) -> None:
        """Return when less than the setting `inflight_bytes` are in flight, or the pipeline has
        ended."""
        limit = self.cluster.config.inflight_bytes
        if self.inflight_bytes >= limit:
            await self._until(
                lambda: self.inflight_bytes <= limit * ROOM_AGAIN or self.failure is not None
            )

    async def wait_until_drained(self) -> None:
        """Return when every add is confirmed, or has failed."""
        await self._until(lambda: not self.pending)

    async def wait_for_responses(self, timeout_s: float) -> None:
        """Return when each bookie has responded to the adds that are confirmed now, after
        `timeout_s` at the latest."""
        target = self.pending.last_add_confirmed
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._until(lambda: next(iter(self._outstanding), target + 1) > target)

    def awaiting_response(self) -> list[PendingAdd]:
        """Confirmed adds that still wait for a response, in id order."""
        return [add for add in self._outstanding.values() if add.confirmed]

    def lacking(self, first_entry: int) -> list[str]:
        """The bookies, sorted, that should keep a confirmed entry from `first_entry` on and have
        not acknowledged it."""
        bookies = {bookie for bookie, last in self._lacked.items() if last >= first_entry}
        waiting = (add for add in self.awaiting_response() if add.entry_id >= first_entry)
        return sorted(bookies.union(*map(self._lacking, waiting)))

    # -- slots, for the ensemble change -------------------------------------------------------

    def failed_mask(self) -> int:
        return sum(1 << index for index, slot in enumerate(self.slots) if slot.failed)

    def slot_failed(self, index: int, why: str) -> None:
        """Send nothing more to the slot until it is mended."""
        slot = self.slots[index]
        if not slot.failed:
            slot.move(SlotState.FAILED)
            slot.why, slot.failed_at = why or "unknown", self._loop.time()
            self.on_slot_failed()

    def adopt(self, record: LedgerRecord, replacements: Mapping[int, str]) -> None:
        """End the ensemble change in flight, and give the slots their new owners, which `record`
        names: drop the old owners' acknowledgements, then resend, then confirm.

        A writer has written the record to the store already; a recovery writes it when it closes
        the ledger.
        """
        self.record = record
        mask = sum(1 << index for index in replacements)
        self.pending.drop_acks(mask)
        for index, bookie in replacements.items():
            self.slots[index] = self._new_slot(index, bookie, self.slots[index].generation + 1)
        self.pending.change_in_flight = False
        for index in replacements:
            self._resend(index)
        self.confirm()

    def retry_slot(self, index: int) -> None:
        """The slot's bookie responds again: send it what it has not acknowledged."""
        slot = self.slots[index]
        slot.move(SlotState.HEALTHY)
        slot.why, slot.generation = "", slot.generation + 1
        slot.on_results = self._result_handler(index, slot.bookie_id, slot.generation)
        self._resend(index)

    def confirm(self) -> None:
        """Confirm every add that may be confirmed, in id order."""
        confirmed = self.pending.confirm()
        if not confirmed:
            return
        self.confirmed_bytes = confirmed[-1].cumulative_bytes
        self.confirmed_rows = confirmed[-1].cumulative_rows
        for add in confirmed:
            self._unconfirmed_bytes -= add.size
            self._lagging_bytes += add.size
            _resolve(add, None)
            if not add.sends:
                self._finish(add)
        self.on_confirmed()
        if self._waiters:
            self._wake()

    def failed_bookies(self) -> str:
        """The failed slots for an error text: their bookies, with addresses and reasons."""
        return "; ".join(
            f"{self.cluster.describe(slot.bookie_id)}: {slot.why}"
            for slot in self.slots
            if slot.failed
        )

    def _reasons(self) -> list[str]:
        """The failed slots in short: each reason with the ids of its bookies."""
        bookies: dict[str, list[str]] = {}
        for slot in self.slots:
            if slot.failed:
                bookies.setdefault(slot.why, []).append(slot.bookie_id)
        return [f"{', '.join(sorted(ids))}: {why}" for why, ids in sorted(bookies.items())]

    def not_enough_bookies(self) -> NotEnoughBookies:
        """The error when some write set has fewer than Qa healthy slots."""
        members = [slot.bookie_id for slot in self.slots]
        failed = [slot.bookie_id for slot in self.slots if slot.failed]
        writable = [bookie.id for bookie in self.cluster.directory.writable()]
        spares = [self.cluster.describe(b) for b in writable if b not in members]
        text = (
            f"ledger {self.ledger_id} needs {self.quorum.ack_quorum} of"
            f" {self.quorum.write_quorum} bookies to take an entry ({len(writable)} registered"
            f" as writable); these do not: {self.failed_bookies()}"
        )
        if spares:
            text += f"; no spare (racks = {self.cluster.config.racks!r}): {'; '.join(spares)}"
        remedy = self.cluster.remedy_for(failed)
        if spares and self.cluster.config.racks == "hard":
            remedy = (
                'Start the bookies named, or others on racks of their own, or set racks = "soft".'
            )
        return NotEnoughBookies(
            text,
            remedy,
            ledger_id=self.ledger_id,
            needed=self.quorum.ack_quorum,
            writable=writable,
            bookies=failed,
        )

    # -- sending and responses -----------------------------------------------------------------

    def _new_slot(self, index: int, bookie_id: str, generation: int) -> Slot:
        on_results = self._result_handler(index, bookie_id, generation)
        lane = self.cluster.bookies.lane(bookie_id, recovery=self.recovery)
        return Slot(bookie_id, lane, on_results, generation)

    def _result_handler(
        self, index: int, bookie_id: str, generation: int, since: float | None = None
    ) -> OnResults:
        """What takes the results of adds that are sent from `since` on; None: when appended."""
        return partial(self._take_results, index, bookie_id, generation, since)

    def _resend(self, index: int) -> None:
        slot, now = self.slots[index], self._loop.time()
        on_results = self._result_handler(index, slot.bookie_id, slot.generation, now)
        for add in self.pending.without_ack_of(index):
            add.sends += 1
            slot.lane.submit(add, on_results)

    def _take_results(
        self,
        index: int,
        bookie_id: str,
        generation: int,
        since: float | None,
        adds: Sequence[PendingAdd],
        results: Sequence[AddResult],
    ) -> None:
        """Take the results of one frame. What follows the `if` is the usual case: the slot's owner
        stored all adds, and they are in the last fragment."""
        slot = self.slots[index]
        first_entry = self.record.last_fragment.first_entry
        if (
            slot.bookie_id != bookie_id
            or adds[0].entry_id < first_entry
            or results.count(_STORED) < len(results)
        ):
            for add, result in zip(adds, results, strict=True):
                sent_at = add.appended_at if since is None else since
                self._take_result(add, index, bookie_id, generation, sent_at, result)
            return
        slot.pause_s = 0.0
        for add in adds:
            add.sends -= 1
        if self.pending.note_acks(adds, index):
            self.confirm()
        for add in adds:
            if add.confirmed and not add.sends:
                self._finish(add)

    def _take_result(
        self,
        add: PendingAdd,
        index: int,
        bookie_id: str,
        generation: int,
        since: float,
        result: AddResult,
    ) -> None:
        add.sends -= 1
        slot = self.slots[index]
        if result.status is Status.OK:
            if slot.bookie_id == bookie_id:
                slot.pause_s = 0.0
            if self._owner(add, index) == bookie_id and self.pending.note_acks((add,), index):
                self.confirm()
        elif generation == slot.generation and not slot.failed:
            self._handle_refusal(add, index, since, result)
        if add.confirmed and not add.sends:
            self._finish(add)

    def _handle_refusal(self, add: PendingAdd, index: int, since: float, result: AddResult) -> None:
        why = status_text(result)
        failure = _terminal_error(self.ledger_id, add, result.status, why)
        if failure is not None:
            self.fail(failure)
        elif result.status in _TRY_AGAIN and (
            self._loop.time() - since < self.cluster.config.replica_timeout_s
        ):
            add.sends += 1
            pause_s = result.retry_after_ms / 1000 or RETRY_AFTER_S
            generation = self.slots[index].generation
            self._loop.call_later(pause_s, self._send_again, add, index, generation, since)
        else:
            self.slot_failed(index, why)

    def _send_again(self, add: PendingAdd, index: int, generation: int, since: float) -> None:
        add.sends -= 1
        slot = self.slots[index]
        if (
            slot.generation == generation
            and not slot.failed
            and self._outstanding.get(add.entry_id)
        ):
            add.sends += 1
            on_results = self._result_handler(index, slot.bookie_id, slot.generation, since)
            slot.lane.submit(add, on_results)
        elif add.confirmed and not add.sends:
            self._finish(add)

    def _finish(self, add: PendingAdd) -> None:
        """Note the copies that are missing: no further response to the add will come."""
        if self._release(add):
            if add.acks != self.pending.write_mask(add.entry_id):
                for bookie in self._lacking(add):
                    self._lacked[bookie] = max(add.entry_id, self._lacked.get(bookie, -1))
            if self._waiters:
                self._wake()

    def _owner(self, add: PendingAdd, index: int) -> str:
        """The bookie whose acknowledgement counts for the add: the slot's owner; for a confirmed
        add, the member of its fragment."""
        if add.confirmed:
            return self.record.fragment_of(add.entry_id).ensemble[index]
        return self.slots[index].bookie_id

    def _lacking(self, add: PendingAdd) -> list[str]:
        """The bookies that should keep the add and have not acknowledged it."""
        lacking = self.pending.write_mask(add.entry_id) & ~add.acks
        slots = range(len(self.slots))
        return [self._owner(add, index) for index in slots if lacking >> index & 1]

    def _release(self, add: PendingAdd) -> bool:
        if self._outstanding.pop(add.entry_id, None) is None:
            return False
        if add.confirmed:
            self._lagging_bytes -= add.size
        else:
            self._unconfirmed_bytes -= add.size
        return True

    # -- waiting ------------------------------------------------------------------------------

    async def _until(self, condition: Callable[[], bool]) -> None:
        if not condition():
            woken = self._loop.create_future()
            self._waiters.append((condition, woken))
            await woken

    def _wake(self) -> None:
        waiting = self._waiters
        self._waiters = []
        for condition, woken in waiting:
            if woken.done():
                continue
            if condition():
                woken.set_result(None)
            else:
                self._waiters.append((condition, woken))

    def _arm_add_timer(self, appended_at: float) -> None:
        deadline = appended_at + self.cluster.config.add_timeout_s
        self._add_timer = self._loop.call_at(deadline, self._head_may_be_late)

    def _head_may_be_late(self) -> None:
        self._add_timer = None
        head = self.pending.head
        if head is None:
            return
        timeout_s = self.cluster.config.add_timeout_s
        if head.appended_at + timeout_s > self._loop.time():
            self._arm_add_timer(head.appended_at)
        elif not self.quorum.is_writable(self.failed_mask()):
            self.give_up()
        else:
            brief = (
                f"entry {head.entry_id} of ledger {self.ledger_id} was not acknowledged"
                f" within {timeout_s:g} s"
            )
            text = f"{brief}. {self.failed_bookies()}".rstrip()
            self.fail(TimedOut(text, ledger_id=self.ledger_id), brief)


_STORED = AddResult(Status.OK)


def _terminal_error(
    ledger_id: int, add: PendingAdd, status: Status, why: str
) -> LedgerError | None:
    """The error that ends the pipeline on this status; None if only a slot failed."""
    if status is Status.FENCED:
        return LedgerFenced(f"ledger {ledger_id} was fenced", ledger_id=ledger_id)
    if status is Status.UNAUTHORIZED:
        return Unauthorized(f"wrong password for ledger {ledger_id}", ledger_id=ledger_id)
    if status is Status.LEDGER_DELETED:
        return NoSuchLedger(f"ledger {ledger_id} was deleted", ledger_id=ledger_id)
    if status is Status.TOO_LARGE:
        return MessageTooBig(
            f"a bookie refused an entry of ledger {ledger_id}: {why}", entry_id=add.entry_id
        )
    if status is Status.CONFLICTING_ENTRY:
        return LedgerError(f"ledger {ledger_id} has two writers: {why}", ledger_id=ledger_id)
    return None


def _resolve(add: PendingAdd, failure: LedgerError | None) -> None:
    """Give the add's waiter the outcome; a waiter that was cancelled is no error."""
    waiter, add.waiter = add.waiter, None
    if waiter is None:
        return
    if failure is not None:
        fail_future(waiter, failure)
        return
    try:  # `suppress` would be three calls for each entry
        waiter.set_result(add.entry_id)
    except (InvalidStateError, ThreadInvalidStateError):
        return


def fail_future(future: Any, failure: Exception) -> None:
    """Fail a future of asyncio or concurrent.futures, unless it was cancelled."""
    with suppress(InvalidStateError, ThreadInvalidStateError):
        future.set_exception(failure)
        future.exception()  # marks it as retrieved: not every caller looks at every add
