"""Failed slots are replaced, tried again, or given up. Members that are no longer registered, or
that are being drained, are replaced also while the writer appends nothing.

Always true:
- a slot gets a new owner only after the change is in the store; while that write is under way no
  add is confirmed (`change_in_flight`), and `adopt` then does its two passes;
- without a spare bookie the change is put off as long as every write set keeps Qa members that
  respond: it is made when a bookie registers; meanwhile the failed bookie is asked now and then,
  and taken back when it responds;
- `delayed` (ensemble_change = "delayed") puts off every change in this way, spare or not, except
  for members that are not registered for so long that they are replaced at once and in any case
  (`AbsentMembers`);
- with fewer than Qa, adds that have waited for spare_grace_s fail with NotEnoughBookies: long
  enough for a bookie to restart, short enough for the user to learn of it;
- a bookie that failed here is no spare for DOUBT_S, nor is a bookie in doubt: so a change cannot
  go round in circles faster. A bookie in quarantine is a spare when there is no other;
- an absent member is replaced only if this client saw it not registered, in a session without
  a break, for half of the cluster's `lost_bookie_delay_s` and ABSENT_MIN_S, or if it is read-only
  and the store names it as drained. This comes before a worker of repair concludes that a ledger
  which still names this member has no writer (repair/worker.py).
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
    draining,
    read_settings,
)
from spark_ledger.metadata.ledger_record import LedgerRecord
from spark_ledger.metadata.store import SessionState, StoreError

PAUSE_MIN_S, PAUSE_MAX_S = 0.2, 5.0
ASK_S = 1.0

_GONE = (Status.WRONG_BOOKIE, Status.SHUTTING_DOWN)

log = logging.getLogger(__name__)

# (failed slots, replacements, first entry) -> the record with the change in it
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
        self._rejected: dict[str, float] = {}
        self._short_since: float | None = None
        self._mending: asyncio.Task[None] | None = None
        self._absent = AbsentMembers(pipeline)
        pipeline.on_slot_failed = self._slot_failed
        self._cluster.directory.add_listener(self._directory_changed)

    async def stop(self) -> None:
        """Make no further change; return when the one under way, if any, has ended."""
        self._stop_listening()
        self._news.set()
        if self._mending is not None:
            await asyncio.gather(self._mending)

    # -- events -------------------------------------------------------------------------------

    def _stop_listening(self) -> None:
        if not self._stopping:
            self._stopping = True
            self._absent.stop()
            self._cluster.directory.remove_listener(self._directory_changed)

    def _slot_failed(self) -> None:
        self._news.set()
        if self._pipeline.failure is not None:
            self._stop_listening()
        if self._mending is None and not self._stopping and self._pipeline.failed_mask():
            self._mending = self._loop.create_task(
                self._mend(), name=f"mend ledger {self._pipeline.ledger_id}"
            )

    def _directory_changed(self) -> None:
        self._absent.changed()
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
            self._mending = None

    def _must_mend(self) -> bool:
        over = self._stopping or self._pipeline.failure is not None
        return not over and self._pipeline.failed_mask() != 0

    def _note_failed(self) -> None:
        now = self._loop.time()
        for slot in self._pipeline.slots:
            if slot.failed:
                self._rejected[slot.bookie_id] = now
        if self._pipeline.quorum.is_writable(self._pipeline.failed_mask()):
            self._short_since = None
        elif self._short_since is None or self._was_enough_since(self._short_since):
            self._short_since = now

    def _was_enough_since(self, time: float) -> bool:
        """Whether every add that was pending at `time` is confirmed: then that lack of bookies is
        over. A slot that was tried again in vain in between does not end it."""
        head = self._pipeline.pending.head
        return head is None or head.appended_at > time

    def _choose(self) -> Mapping[int, str]:
        """Replacements for as many failed slots as there are spares, by slot; {} while the store is
        out of reach, because a change that cannot be written stops confirmations."""
        if self._cluster.records.metadata.session_state is not SessionState.CONNECTED:
            return {}
        slots = self._pipeline.slots
        overdue = any(slot.bookie_id in self._absent.overdue for slot in slots)
        if self._delayed and self._short_since is None and not overdue:
            return {}
        failed = [index for index, slot in enumerate(slots) if slot.failed]
        directory, taken = self._cluster.directory, self._no_spares()
        owners = {index: directory.info(slot.bookie_id) for index, slot in enumerate(slots)}
        members = {index: owners[index] for index in owners if index not in failed}
        spares = [bookie for bookie in directory.writable() if bookie.id not in taken]
        place, quorum = self._cluster.place, self._pipeline.quorum
        chosen = place(quorum, failed, spares, members)
        if self._cluster.config.racks == "soft" or len(chosen) in (0, len(failed)):
            return chosen
        return self._one_by_one(failed, spares, owners)

    def _one_by_one(
        self, failed: Sequence[int], spares: Sequence[BookieInfo], owners: dict[int, BookieInfo]
    ) -> Mapping[int, str]:
        """With racks "hard", if not all failed slots can be filled: a member that is not replaced
        may come back, so its rack counts as taken."""
        chosen: dict[int, str] = {}
        for index in failed:
            left = [bookie for bookie in spares if bookie.id not in chosen.values()]
            others = {other: owners[other] for other in owners if other != index}
            placed = self._cluster.place(self._pipeline.quorum, [index], left, others)
            chosen |= placed
            if index in placed:
                owners[index] = next(bookie for bookie in left if bookie.id == placed[index])
        return chosen

    def _no_spares(self) -> Collection[str]:
        """Bookies that are no spares: members, and those that failed here or are in doubt."""
        now = self._loop.time()
        self._rejected = {b: at for b, at in self._rejected.items() if now - at < DOUBT_S}
        members = (slot.bookie_id for slot in self._pipeline.slots)
        doubted = self._cluster.bookies.quarantine.in_doubt()
        return dict.fromkeys((*members, *doubted, *self._rejected))

    async def _replace(self, replacements: Mapping[int, str]) -> bool:
        """Make the change; False if it certainly was not made, and must wait."""
        pipeline = self._pipeline
        first_entry = pipeline.pending.last_add_confirmed + 1
        self._check_fragments(first_entry)
        failed = {index: pipeline.slots[index].bookie_id for index in replacements}
        log.info(
            "ledger %s: from %s on %s -> %s", pipeline.ledger_id, first_entry, failed, replacements
        )
        pipeline.pending.change_in_flight = True
        try:
            record = await self._committed(failed, replacements, first_entry)
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

    async def _committed(
        self, failed: dict[int, str], replacements: Mapping[int, str], first_entry: int
    ) -> LedgerRecord:
        """Commit; while the outcome is unknown, try again until the record shows it. A later
        attempt that was certainly not made does not decide the outcome of an earlier one."""
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
        """Without a spare: take back bookies that respond, or wait for news; fail the adds when
        they have waited too long."""
        now = self._loop.time()
        due = [
            index
            for index, slot in enumerate(self._pipeline.slots)
            if slot.failed and slot.failed_at + slot.pause_s <= now
        ]
        if due:
            responding = await asyncio.gather(*(self._responds(index) for index in due))
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

    async def _responds(self, index: int) -> bool:
        """Ask the bookie of a failed slot for a sign of life; if it responds, send to it again."""
        slot = self._pipeline.slots[index]
        generation = slot.generation
        status = await self._sign_of_life(slot.bookie_id)
        if slot is not self._pipeline.slots[index] or slot.generation != generation:
            return True
        slot.pause_s = min(max(2 * slot.pause_s, PAUSE_MIN_S), PAUSE_MAX_S)
        slot.failed_at = self._loop.time()
        if status is None or status in _GONE:
            return False
        self._pipeline.retry_slot(index)
        return True

    async def _sign_of_life(self, bookie_id: str) -> Status | None:
        directory = self._cluster.directory
        if any(bookie.id == bookie_id for bookie in directory.readonly()):
            return None  # alive, but takes no adds
        try:
            async with asyncio.timeout(ASK_S):
                response = await self._cluster.bookies.read_lac(
                    bookie_id, self._pipeline.ledger_id, token=self._read_token
                )
        except TimeoutError:
            return None
        return None if response.status is Status.IO_ERROR else response.status

    def _give_up_at(self) -> float | None:
        """When pending adds will have waited long enough for an ack quorum; None while every write
        set has one."""
        head = self._pipeline.pending.head
        if self._short_since is None or head is None:
            return None
        config = self._cluster.config
        grace_s = min(config.spare_grace_s, config.add_timeout_s / 2)
        return max(self._short_since, head.appended_at) + grace_s


ABSENT_MIN_S, ABSENT_MAX_S = 5.0, 3600.0  # between looks
SHARE = 0.5  # of the delay
DRAINED = "it is being drained"


class AbsentMembers:
    """The absent and the drained members of one pipeline. Call `changed` when registrations have
    changed."""

    def __init__(self, pipeline: AddPipeline) -> None:
        self._pipeline = pipeline
        self._cluster = pipeline.cluster
        self._loop = asyncio.get_running_loop()
        self._since: dict[str, float] = {}
        self._readonly: list[str] = []
        self._watching: asyncio.Task[None] | None = None
        self.overdue: dict[str, None] = {}
        """The members that are absent too long, or drained."""

    def changed(self) -> None:
        self._look()
        if (self._since or self._readonly) and self._watching is None:
            self._watching = self._loop.create_task(
                self._watch(), name=f"absent members of ledger {self._pipeline.ledger_id}"
            )

    def stop(self) -> None:
        """End the watching."""
        if self._watching is not None:
            self._watching.cancel()

    def _look(self) -> None:
        """Note which members are absent, and since when, and which take no adds."""
        directory, now = self._cluster.directory, self._loop.time()
        if self._cluster.records.metadata.session_state is not SessionState.CONNECTED:
            self._since = dict.fromkeys(self._since, now)
            return
        members = [slot.bookie_id for slot in self._pipeline.slots]
        down = [bookie for bookie in members if not directory.is_registered(bookie)]
        readonly = [bookie for bookie in members if directory.is_readonly(bookie)]
        if self._pipeline.recovery:  # read-only members take the entries that it writes back
            readonly = []
        self._since = {bookie: self._since.get(bookie, now) for bookie in down}
        self._readonly = readonly
        self.overdue = {b: None for b in self.overdue if b in (*down, *readonly)}

    async def _watch(self) -> None:
        try:
            pause_s = ABSENT_MIN_S
            while self._pipeline.failure is None:
                await asyncio.sleep(pause_s)
                self._look()
                if not (self._since or self._readonly):
                    return
                due_s = await self._due_s()
                drained = await self._drained() if due_s < float("inf") else []
                self._fail_overdue(due_s, drained)
                left = [since + due_s - self._loop.time() for since in self._since.values()]
                if self._readonly:  # for another reason; the member may be drained later
                    left.append(due_s / 2)
                pause_s = min([s for s in left if 0 < s < ABSENT_MAX_S], default=ABSENT_MIN_S)
        finally:
            self._watching = None

    async def _due_s(self) -> float:
        """After how many seconds an absent member is replaced; inf: never."""
        try:
            settings = await read_settings(self._cluster.records.metadata)
        except (StoreError, BadAutorecoverySettings):
            settings = AutorecoverySettings()
        if not settings.enabled:
            return float("inf")
        return max(ABSENT_MIN_S, settings.lost_bookie_delay_s * SHARE)

    async def _drained(self) -> list[str]:
        """The read-only members that are being drained."""
        if not self._readonly:
            return []
        try:
            named = await draining(self._cluster.records.metadata)
        except StoreError:
            return []  # the next look asks again
        return [bookie for bookie in self._readonly if bookie in named]

    def _fail_overdue(self, due_s: float, drained: list[str]) -> None:
        """Fail the slots of members that are absent too long, or drained."""
        now = self._loop.time()
        for index, slot in enumerate(self._pipeline.slots):
            since = self._since.get(slot.bookie_id)
            why = DRAINED if slot.bookie_id in drained else ""
            if since is not None and now - since >= due_s:
                why = f"not registered for {now - since:.0f} s"
            if why:
                self.overdue[slot.bookie_id] = None
                self._pipeline.slot_failed(index, why)
