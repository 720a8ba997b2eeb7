"""Mends failed slots of a ledger's ensemble: the member (the bookie of the slot) is replaced, or
tried again; if neither is possible for too long, the adds fail. Members that are down or being
drained are replaced also while the writer appends nothing.

Always true:
- a slot gets a new owner only after the change is in the store. While that write is under way no
  add is confirmed (`change_in_flight`); then `AddPipeline.adopt` gives the slots their new owners;
- without a spare, a writable bookie that is no member, the change is put off as long as every write
  set keeps Qa healthy members. Meanwhile the failed bookie is asked now and then, and gets adds
  again when it responds. The change is made when another bookie registers;
- with ensemble_change = "delayed" every change is put off in this way, even if there is a spare,
  except the replacement of members that are down for too long or drained (`AbsentMembers`);
- if a write set has fewer than Qa healthy members, adds that have waited for `spare_grace_s` fail
  with NotEnoughBookies: that is long enough for a bookie's restart, and not too long for a user;
- a bookie that failed here is no spare for DOUBT_S, nor is a bookie in doubt, so that a ledger does
  not change from one failing bookie to another and back. A bookie in quarantine is the last choice;
- a member that is down is replaced only if this client's session had no break while the member was
  not registered for half of the cluster's `lost_bookie_delay_s`, and for ABSENT_MIN_S at least; a
  read-only member only if the store lists it as drained. A worker of repair waits longer. If a
  ledger then still names this member, the worker concludes that the ledger has no writer
  (repair/worker.py).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress

from bookie_server.api.status import Status
from spark_ledger.bookies.directory import DOUBT_S, BookieInfo
from spark_ledger.errors import LedgerClosed, LedgerError, LedgerFenced, Unavailable
from spark_ledger.ledger.add_pipeline import AddPipeline
from spark_ledger.ledger.records import MoveRefused, OutcomeUnresolved
from spark_ledger.metadata.autorecovery import (
    AutorecoverySettings,
    BadAutorecoverySettings,
    draining_bookies,
    read_settings,
)
from spark_ledger.metadata.ledger_record import LedgerRecord
from spark_ledger.metadata.store import SessionState, StoreError

PAUSE_MIN_S, PAUSE_MAX_S = 0.2, 5.0
SIGN_OF_LIFE_S = 1.0  # how long a failed bookie may take to respond to a small request

_TAKES_NO_ADDS = (Status.WRONG_BOOKIE, Status.SHUTTING_DOWN)  # responses that are no sign of life

log = logging.getLogger(__name__)

# (failed bookies by slot, replacements by slot, first entry) -> the record with the change
CommitChange = Callable[[Mapping[int, str], Mapping[int, str], int], Awaitable[LedgerRecord]]


class EnsembleChange:
    """Mends the failed slots of one pipeline. `commit` writes a change; see CommitChange."""

    def __init__(
        self, pipeline: AddPipeline, commit: CommitChange, read_token: bytes = b""
    ) -> None:
        self._pipeline = pipeline
        self._cluster = pipeline.cluster
        self._commit = commit
        self._read_token = read_token
        config = self._cluster.config
        self._delayed = config.ensemble_change == "delayed" and not pipeline.recovery
        self._fragments_max = float("inf") if pipeline.recovery else config.fragments_max
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._stopping = False
        self._failed_at: dict[str, float] = {}
        self._too_few_since: float | None = None
        self._mend_task: asyncio.Task[None] | None = None
        self._absent_members = AbsentMembers(pipeline)
        pipeline.on_slot_failed = self._slot_failed
        self._cluster.directory.add_listener(self._directory_changed)

    async def stop(self) -> None:
        """Make no further change; return when no change is under way."""
        self._stop_listening()
        self._news.set()
        if self._mend_task is not None:
            await asyncio.gather(self._mend_task)

    # -- events -------------------------------------------------------------------------------

    def _stop_listening(self) -> None:
        if not self._stopping:
            self._stopping = True
            self._absent_members.stop()
            self._cluster.directory.remove_listener(self._directory_changed)

    def _slot_failed(self) -> None:
        self._news.set()
        if self._pipeline.failure is not None:
            self._stop_listening()
        if self._mend_task is None and not self._stopping and self._pipeline.failed_mask():
            self._mend_task = self._loop.create_task(
                self._mend(), name=f"mend ledger {self._pipeline.ledger_id}"
            )

    def _directory_changed(self) -> None:
        self._absent_members.registrations_changed()
        for slot in self._pipeline.slots:
            if slot.failed and self._cluster.directory.is_writable(slot.bookie_id):
                slot.pause_s = 0.0
        self._news.set()

    # -- mending ------------------------------------------------------------------------------

    async def _mend(self) -> None:
        try:
            while self._must_mend():
                self._news.clear()
                self._note_failed()
                replacements = self._choose()
                if not (replacements and await self._replace(replacements)):
                    await self._put_off()
        except LedgerError as failure:
            self._pipeline.fail(failure)
        except Exception as defect:
            self._pipeline.fail(LedgerError(f"an ensemble change ended in {defect!r}"))
            raise
        finally:
            self._mend_task = None

    def _must_mend(self) -> bool:
        over = self._stopping or self._pipeline.failure is not None
        return not over and self._pipeline.failed_mask() != 0

    def _note_failed(self) -> None:
        now = self._loop.time()
        for slot in self._pipeline.slots:
            if slot.failed:
                self._failed_at[slot.bookie_id] = now
        if self._pipeline.quorum.is_writable(self._pipeline.failed_mask()):
            self._too_few_since = None
        elif self._too_few_since is None or self._were_all_confirmed_since(self._too_few_since):
            self._too_few_since = now

    def _were_all_confirmed_since(self, time: float) -> bool:
        """Whether every add that was pending at `time` is confirmed. Only then a lack of bookies
        that began at `time` is over; a slot that is tried again and fails again does not end it."""
        head = self._pipeline.pending.head
        return head is None or head.appended_at > time

    def _choose(self) -> Mapping[int, str]:
        """The replacements, by slot, for as many failed slots as there are spares. {} while the
        store is unreachable: an attempt would keep adds from being confirmed."""
        if self._cluster.records.metadata.session_state is not SessionState.CONNECTED:
            return {}
        slots = self._pipeline.slots
        overdue = any(slot.bookie_id in self._absent_members.overdue_ids for slot in slots)
        if self._delayed and self._too_few_since is None and not overdue:
            return {}
        failed = [index for index, slot in enumerate(slots) if slot.failed]
        directory, taken = self._cluster.directory, self._excluded_bookies()
        owners = {index: directory.info(slot.bookie_id) for index, slot in enumerate(slots)}
        members = {index: owners[index] for index in owners if index not in failed}
        spares = [bookie for bookie in directory.writable() if bookie.id not in taken]
        place, quorum = self._cluster.place, self._pipeline.quorum
        chosen = place(quorum, failed, spares, members)
        if self._cluster.config.racks == "soft" or len(chosen) in (0, len(failed)):
            return chosen
        return self._choose_one_by_one(failed, spares, owners)

    def _choose_one_by_one(
        self, failed: Sequence[int], spares: Sequence[BookieInfo], owners: dict[int, BookieInfo]
    ) -> Mapping[int, str]:
        """The replacements with racks "hard" if not every failed slot can be filled: the bookie of
        a slot that stays unfilled may come back, so no replacement may be on its rack."""
        chosen: dict[int, str] = {}
        for index in failed:
            left = [bookie for bookie in spares if bookie.id not in chosen.values()]
            others = {other: owners[other] for other in owners if other != index}
            placed = self._cluster.place(self._pipeline.quorum, [index], left, others)
            chosen |= placed
            if index in placed:
                owners[index] = next(bookie for bookie in left if bookie.id == placed[index])
        return chosen

    def _excluded_bookies(self) -> Collection[str]:
        """Members, and bookies that failed here or are in doubt: all of them are no spares."""
        now = self._loop.time()
        self._failed_at = {b: at for b, at in self._failed_at.items() if now - at < DOUBT_S}
        members = (slot.bookie_id for slot in self._pipeline.slots)
        doubted = self._cluster.bookies.quarantine.ids_in_doubt()
        return dict.fromkeys((*members, *doubted, *self._failed_at))

    async def _replace(self, replacements: Mapping[int, str]) -> bool:
        """Make the change; False if it was certainly not made, and has to be put off."""
        pipeline = self._pipeline
        first_entry = pipeline.pending.last_add_confirmed + 1
        self._check_fragments(first_entry)
        failed = {index: pipeline.slots[index].bookie_id for index in replacements}
        log.info(
            "ledger %s: from %s on %s -> %s", pipeline.ledger_id, first_entry, failed, replacements
        )
        pipeline.pending.change_in_flight = True
        try:
            record = await self._commit_until_known(failed, replacements, first_entry)
        except MoveRefused as refused:
            raise LedgerFenced(
                f"ledger {pipeline.ledger_id} was taken over: {refused.why}",
                ledger_id=pipeline.ledger_id,
            ) from refused
        except Unavailable as failure:
            log.warning("ledger %s: ensemble change put off: %s", pipeline.ledger_id, failure)
            pipeline.pending.change_in_flight = False
            pipeline.confirm()
            return False
        if pipeline.failure is None:
            pipeline.adopt(record, replacements)
        return True

    async def _commit_until_known(
        self, failed: dict[int, str], replacements: Mapping[int, str], first_entry: int
    ) -> LedgerRecord:
        """Commit the change. While the outcome is unknown, commit again until the store's record
        shows the outcome: a second commit that certainly failed does not decide the outcome of the
        first."""
        unresolved = False
        while True:
            try:
                return await self._commit(failed, replacements, first_entry)
            except Unavailable as failure:
                unresolved = unresolved or isinstance(failure, OutcomeUnresolved)
                if not unresolved or self._stopping or self._pipeline.failure is not None:
                    raise
                await asyncio.sleep(PAUSE_MIN_S)

    def _check_fragments(self, first_entry: int) -> None:
        fragments = self._pipeline.record.fragments
        if len(fragments) >= self._fragments_max and first_entry > fragments[-1].first_entry:
            raise LedgerClosed(
                f"ledger {self._pipeline.ledger_id} has {len(fragments)} fragments, the most"
                " allowed",
                "Close it and go on in a new ledger.",
                ledger_id=self._pipeline.ledger_id,
            )

    # -- putting off --------------------------------------------------------------------------

    async def _put_off(self) -> None:
        """Wait for news, because no change can be made now. Send again to failed bookies that
        respond, and fail the adds if they have waited too long."""
        now = self._loop.time()
        due = [
            index
            for index, slot in enumerate(self._pipeline.slots)
            if slot.failed and slot.failed_at + slot.pause_s <= now
        ]
        if due:
            responding = await asyncio.gather(*(self._retry_if_responding(index) for index in due))
            if any(responding):
                return
        wake_at = min(
            (slot.failed_at + slot.pause_s for slot in self._pipeline.slots if slot.failed),
            default=now,
        )
        give_up_at = self._give_up_at()
        if give_up_at is not None:
            if give_up_at <= self._loop.time():
                self._pipeline.give_up()
                return
            wake_at = min(wake_at, give_up_at)
        with suppress(TimeoutError):
            async with asyncio.timeout_at(wake_at):
                await self._news.wait()

    async def _retry_if_responding(self, index: int) -> bool:
        """Ask the bookie of a failed slot for a sign of life, and send to it again if it responds.
        Whether the slot is healthy or has a new owner now."""
        slot = self._pipeline.slots[index]
        generation = slot.generation
        status = await self._sign_of_life(slot.bookie_id)
        if slot is not self._pipeline.slots[index] or slot.generation != generation:
            return True
        slot.pause_s = min(max(2 * slot.pause_s, PAUSE_MIN_S), PAUSE_MAX_S)
        slot.failed_at = self._loop.time()
        if status is None or status in _TAKES_NO_ADDS:
            return False
        self._pipeline.retry_slot(index)
        return True

    async def _sign_of_life(self, bookie_id: str) -> Status | None:
        """The status of the bookie's response to a small request; None if it does not respond, or
        takes no adds."""
        directory = self._cluster.directory
        if any(bookie.id == bookie_id for bookie in directory.readonly()):
            return None  # alive, but takes no adds
        try:
            async with asyncio.timeout(SIGN_OF_LIFE_S):
                response = await self._cluster.bookies.read_lac(
                    bookie_id, self._pipeline.ledger_id, token=self._read_token
                )
        except TimeoutError:
            return None
        return None if response.status is Status.IO_ERROR else response.status

    def _give_up_at(self) -> float | None:
        """When the pending adds fail for want of an ack quorum; None while every write set has
        one, or no add is pending."""
        head = self._pipeline.pending.head
        if self._too_few_since is None or head is None:
            return None
        config = self._cluster.config
        grace_s = min(config.spare_grace_s, config.add_timeout_s / 2)
        return max(self._too_few_since, head.appended_at) + grace_s


ABSENT_MIN_S, ABSENT_MAX_S = 5.0, 3600.0  # bounds of the pause between two looks
DELAY_SHARE = 0.5  # the part of `lost_bookie_delay_s` after which a member is replaced
DRAINED = "it is being drained"


class AbsentMembers:
    """Watches the members of one pipeline that are down or drained, and fails their slots when
    they have to be replaced."""

    def __init__(self, pipeline: AddPipeline) -> None:
        self._pipeline = pipeline
        self._cluster = pipeline.cluster
        self._loop = asyncio.get_running_loop()
        self._absent_since: dict[str, float] = {}
        self._readonly_ids: list[str] = []
        self._watch_task: asyncio.Task[None] | None = None
        self.overdue_ids: dict[str, None] = {}
        """Ids of the members that are down for too long, or drained."""

    def registrations_changed(self) -> None:
        """The owner calls this when bookies have registered or gone."""
        self._look()
        if (self._absent_since or self._readonly_ids) and self._watch_task is None:
            self._watch_task = self._loop.create_task(
                self._watch(), name=f"absent members of ledger {self._pipeline.ledger_id}"
            )

    def stop(self) -> None:
        if self._watch_task is not None:
            self._watch_task.cancel()

    def _look(self) -> None:
        """Note which members are down, and since when, and which members are read-only."""
        directory, now = self._cluster.directory, self._loop.time()
        if self._cluster.records.metadata.session_state is not SessionState.CONNECTED:
            self._absent_since = dict.fromkeys(self._absent_since, now)
            return
        members = [slot.bookie_id for slot in self._pipeline.slots]
        down = [bookie for bookie in members if not directory.is_registered(bookie)]
        readonly = [bookie for bookie in members if directory.is_readonly(bookie)]
        if self._pipeline.recovery:  # read-only members take the entries that it writes back
            readonly = []
        self._absent_since = {bookie: self._absent_since.get(bookie, now) for bookie in down}
        self._readonly_ids = readonly
        self.overdue_ids = {b: None for b in self.overdue_ids if b in (*down, *readonly)}

    async def _watch(self) -> None:
        try:
            pause_s = ABSENT_MIN_S
            while self._pipeline.failure is None:
                await asyncio.sleep(pause_s)
                self._look()
                if not (self._absent_since or self._readonly_ids):
                    return
                due_s = await self._read_due_s()
                drained = await self._read_drained_ids() if due_s < float("inf") else []
                self._fail_overdue(due_s, drained)
                left = [since + due_s - self._loop.time() for since in self._absent_since.values()]
                if self._readonly_ids:  # a read-only member may be drained later
                    left.append(due_s / 2)
                pause_s = min([s for s in left if 0 < s < ABSENT_MAX_S], default=ABSENT_MIN_S)
        finally:
            self._watch_task = None

    async def _read_due_s(self) -> float:
        """After how many seconds a member that is down is replaced; inf: never."""
        try:
            settings = await read_settings(self._cluster.records.metadata)
        except (StoreError, BadAutorecoverySettings):
            settings = AutorecoverySettings()
        if not settings.enabled:
            return float("inf")
        return max(ABSENT_MIN_S, settings.lost_bookie_delay_s * DELAY_SHARE)

    async def _read_drained_ids(self) -> list[str]:
        """Ids of the read-only members that are being drained, by the store."""
        if not self._readonly_ids:
            return []
        try:
            draining_ids = await draining_bookies(self._cluster.records.metadata)
        except StoreError:
            return []  # the next look reads again
        return [bookie for bookie in self._readonly_ids if bookie in draining_ids]

    def _fail_overdue(self, due_s: float, drained: list[str]) -> None:
        """Fail the slots of members that are down for `due_s` or longer, or drained."""
        now = self._loop.time()
        for index, slot in enumerate(self._pipeline.slots):
            since = self._absent_since.get(slot.bookie_id)
            why = DRAINED if slot.bookie_id in drained else ""
            if since is not None and now - since >= due_s:
                why = f"not registered for {now - since:.0f} s"
            if why:
                self.overdue_ids[slot.bookie_id] = None
                self._pipeline.slot_failed(index, why)
