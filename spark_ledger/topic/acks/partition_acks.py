"""The acknowledgements of one partition at its owner: made durable together, in its ack ledger.

    changed(key) ... a second, or at once for a receipt ... -> one write for all subscriptions

Always true:
- one write is under way at a time; changes and receipts that come meanwhile share the next write;
- a receipt is given after a write that began after its acknowledgement, and only if the
  subscription is still served then: `verify` has seen its record since the node was read last;
- the owner writes its epoch into the node, then fences the ledger that the node names, then reads
  the ledger. So an earlier owner adds nothing that this owner does not read. If a partition has no
  node, the first write makes the node, and fails if another owner has made it. This object never
  replaces a node that it neither read at its take-over nor wrote: it fails, and the
  acknowledgements are taken over again, unless only successions in the node are new (nodes.py);
- a new ledger has a complete snapshot before the node names it; then the old ledger is deleted;
- after any failure the node is read again, and then the record of every subscription served here;
- the state of a subscription that no consumer uses stays as long as it has gaps: a state without
  gaps is in the broker's share. Acknowledgements from before the subscription's release are
  written, however late.
steps.py decides which step to take, and when.
"""

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import replace

from spark_ledger import errors
from spark_ledger.async_tasks import BackgroundTasks, cancel, woken
from spark_ledger.metadata import paths
from spark_ledger.metadata.store import Check, StoreError
from spark_ledger.metadata.store_calls import call_each, pause_s, unavailable_while
from spark_ledger.topic.acks.context import LONG_AGO_S, AckContext
from spark_ledger.topic.acks.delayed import DelayRecords
from spark_ledger.topic.acks.entries import (
    NO_SNAPSHOT,
    AckKey,
    AckRecord,
    AckState,
    WriteKind,
    encode,
    record_bytes,
    released,
    state_records,
)
from spark_ledger.topic.acks.ledger import OpenAckLedger, discard_ledger
from spark_ledger.topic.acks.nodes import NEW, SUCCESSIONS_MAX, AckNode, AckNodes, AckPointer
from spark_ledger.topic.acks.served import (
    AckedSet,
    IdleStates,
    Receipt,
    Served,
    User,
    wait_for_receipt,
)
from spark_ledger.topic.acks.steps import (
    INLINE_BYTES_MAX,
    REFUSED_S,
    AckSituation,
    AckStep,
    AckTimes,
    next_ack_look_s,
    next_ack_step,
)

VERIFIED_AT_ONCE = 16
FORGET_EVERY_S = 600.0
LOOKED_WITHIN_S = 5.0
INFINITE = float("inf")
MOVED = (errors.LedgerFenced, errors.LedgerClosed)  # also if a move fenced the ledger

_log = logging.getLogger(__name__)


class PartitionAcks:
    """Made by `opened`, on the event loop that it stays on."""

    def __init__(self, context: AckContext, partition: int, epoch: int) -> None:
        self.partition = partition
        self.epoch = epoch
        self.failure: errors.LedgerError | None = None
        self.looked = 0  # AckContext.looks at the last read of the node: older records are outdated
        self._context = context
        self._nodes = AckNodes(context.ledgers, context.topic.id, context.multis)
        self._node = AckNode(AckPointer(epoch), NEW)
        self._moves = 0
        self._states = IdleStates(context.budget)
        # Those of `_states` of which the ledger lacks a part; True: no other place has the part.
        self._unwritten: dict[AckKey, bool] = {}
        self._users: dict[AckKey, User] = {}
        self.delays = DelayRecords(self._start)
        self._receipts: list[tuple[Served | None, Receipt]] = []  # that wait for the next write
        self._under_way: list[tuple[Served | None, Receipt]] | None = None  # for the present write
        self._ledger: OpenAckLedger | None = None
        self._left: dict[int, None] = {}  # ledgers that the node must not name any more
        self._times = AckTimes()
        self._forgot_s = LONG_AGO_S
        self._wake = asyncio.Event()
        self._is_sure = asyncio.Event()  # not set: a call failed, and the node must be read again
        self._is_sure.set()
        self._beside = BackgroundTasks()
        self._task: asyncio.Task[None] | None = None

    @staticmethod
    async def opened(context: AckContext, partition: int, epoch: int) -> "PartitionAcks":
        """Takes the partition's acknowledgements over. Raises errors.LedgerFenced (a later owner
        has them), errors.Unavailable or another errors.LedgerError (they cannot be read now)."""
        acks = PartitionAcks(context, partition, epoch)
        with unavailable_while(f"taking over the acknowledgements of {acks._title}"):
            await acks._take_over()
        acks.looked = next(context.looks)
        return acks

    async def _take_over(self) -> None:
        self._moves, node = await self._nodes.seen_by_owner(self.partition)
        if node is None:
            return  # the first write makes the node
        self._check_epoch(node)
        pointer = replace(node.pointer, epoch=self.epoch)
        version = await self._put(pointer, node.version)
        if version is None:
            await self._context.guard.refresh()  # the guard refuses the write in an accepted store
            raise errors.Unavailable(f"the acknowledgements of {self._title} changed meanwhile")
        node = self._node = AckNode(pointer, version)
        store_epoch = self._context.guard.epoch  # `_put` has checked it
        states = await self._nodes.states_of(node.pointer, fence=True, store_epoch=store_epoch)
        if states is None:
            _log.error(
                "ack ledger %s of %s is not there: subscriptions begin at their shares",
                *(node.pointer.ledger_id, self._title),
            )
        for key, state in (states or {}).items():
            self._states[key] = state
        self.delays.take_from(self._states)
        if node.pointer.ledger_id is not None:
            self._left[node.pointer.ledger_id] = None

    # -- for the subscriptions -----------------------------------------------------------------

    def check(self) -> None:
        """Raises `failure`."""
        if self.failure is not None:
            raise self.failure

    def state(self, key: AckKey) -> AckState | None:
        """A copy of the state of a subscription that is not served here; None without a state."""
        state = self._states.get(key)
        return None if state is None else replace(state, rows=state.rows.copy())

    def states(self) -> dict[AckKey, AckState]:
        """What every subscription acknowledged, durable or not. The sets are not copies."""
        states = dict(self._states)
        for key, user in self._users.items():
            states[key] = AckState(user.acks.durable, user.acks.rows, self.epoch)
        return states

    async def check_node(self) -> None:
        """If another process wrote the node, returns once what it noted counts here. Raises
        errors.Unavailable if that takes long, StoreError."""
        while self.failure is None:
            node = await self._nodes.get(self.partition)
            is_new = node is not None and node.version > self._node.version
            if not is_new or node == self._nodes.last_put:
                return
            self._is_sure.clear()
            self._start()
            if not await woken(self._is_sure, LOOKED_WITHIN_S):
                raise errors.Unavailable(f"subscriptions of {self._title} were moved: try again")

    def serve(self, key: AckKey, served: Served, acks: AckedSet, *, is_state: bool) -> None:
        """Called when consumers begin to use the subscription; `acks` has its acknowledgements.
        `is_state`: they are those that `state` returned, unchanged."""
        is_known = is_state and key in self._states and key not in self._unwritten
        self._states.pop(key, None)
        is_dirty = self._unwritten.pop(key, False)
        self._users[key] = User(served, acks, is_known and self._ledger is not None)
        if is_dirty:
            self.changed(key)

    def release(self, key: AckKey, *, is_written: bool, is_gone: bool = False) -> None:
        """Called when no consumer uses the subscription here any more. `is_written`: its position
        is in the broker's share, so its state is needed only if it has gaps. `is_gone`: the
        subscription was deleted."""
        user = self._users.pop(key, None)
        if user is None or is_gone:
            return
        user.is_dirty |= bool(user.acks.take_changes().added)  # of an ACK that was not carried out
        is_dirty = user.is_dirty or self._under_way is not None  # as is_written
        if user.acks.rows or is_dirty or not is_written:
            rows = user.acks.rows.copy()
            self._states[key] = AckState(user.acks.durable, rows, self.epoch)
            if is_dirty or not user.is_known:
                self._unwritten[key] = user.is_dirty
            if user.is_dirty:
                self._start()

    def changed(self, key: AckKey) -> None:
        """Called when the subscription's acknowledgements changed."""
        user = self._users.get(key)
        if user is not None and not user.is_dirty:
            user.is_dirty = True
            self._start()

    def reset(self, key: AckKey) -> None:
        """Called when the subscription's acknowledgements were reset: a write under way has older
        acknowledgements."""
        user = self._users.get(key)
        if user is not None:
            user.position = None
            self.changed(key)

    def is_written(self, key: AckKey) -> bool:
        """Whether all acknowledgements of the subscription are durable, and no write is under
        way."""
        user = self._users.get(key)
        return user is None or not (user.is_dirty or self._under_way is not None)

    def when_durable(self, key: AckKey, receipt: Receipt) -> None:
        """Calls `receipt` once the present acknowledgements of the subscription are durable."""
        user = self._users.get(key)
        if self.failure is not None or user is None:
            receipt(self.failure or released(key))
        elif user.is_dirty:
            self._receipts.append((user.served, receipt))
            self._start()
        elif self._under_way is not None:
            self._under_way.append((user.served, receipt))
        else:
            receipt(user.served.failure)

    async def rewritten(self, keys: Iterable[AckKey]) -> None:
        """Returns once changes in these `states` without consumers are durable, as `durable`."""
        self._unwritten |= dict.fromkeys(keys, True)
        await wait_for_receipt(self._when_released_durable)

    async def durable(self, key: AckKey) -> None:
        """Waits until the acknowledgements are durable. Raises why they cannot become durable."""
        await wait_for_receipt(lambda receipt: self.when_durable(key, receipt))

    def _when_released_durable(self, receipt: Receipt) -> None:
        """As `when_durable`, for the subscriptions that no consumer uses any more."""
        if self._has_released_dirty:
            self._receipts.append((None, receipt))
            self._start()
        elif self._under_way is not None:
            self._under_way.append((None, receipt))
        else:
            receipt(self.failure)

    @property
    def _has_released_dirty(self) -> bool:
        return any(self._unwritten.values())

    def drop(self, error: errors.LedgerError) -> None:
        """Called when another broker has the partition, or this broker closes it: nothing more is
        written."""
        if self.failure is None:
            self.failure = error
            if self._task is not None and self._task is not asyncio.current_task():
                self._task.cancel()
            if self._ledger is not None:
                self._ledger.writer.abandon()
        self._states.drop()
        self._is_sure.set()  # no caller waits any longer
        receipts = [*(self._under_way or ()), *self._receipts]
        self._receipts, self._under_way = [], None
        for _, receipt in receipts:
            receipt(error)

    async def close(self, timeout_s: float) -> None:
        """Writes the changes that are not durable, closes the ledger, and ends."""
        try:
            async with asyncio.timeout(timeout_s):
                of_released = wait_for_receipt(self._when_released_durable)
                await asyncio.gather(*map(self.durable, list(self._users)), of_released)
                if self._task is not None:
                    await cancel(self._task)
                if self.failure is None:
                    await self._leave()
        except (TimeoutError, errors.LedgerError, StoreError) as error:
            _log.warning("acknowledgements of %s may not all be written: %r", self._title, error)
        self.drop(errors.LedgerFenced(f"the acknowledgements of {self._title} ended here"))
        await self._beside.idle()

    # -- the work ------------------------------------------------------------------------------

    @property
    def _title(self) -> str:
        return f"partition {self.partition} of topic {self._context.topic.name}"

    def _start(self) -> None:
        if self.failure is None and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._work())
        self._wake.set()

    async def _work(self) -> None:
        """Writes in the background. Ends once there is nothing to write and no open ledger."""
        failures = 0
        while self.failure is None:
            self._wake.clear()
            try:
                if not self._is_sure.is_set():
                    await self._look()
                    if self.failure is not None:
                        return
                now = self._situation()
                step = next_ack_step(now)
                if step is not AckStep.NOTHING:
                    await self._take(step)
                failures = 0
            except (errors.LedgerError, StoreError) as error:
                failures += 1
                self._is_sure.clear()
                if failures > 1 or not isinstance(error, MOVED):
                    _log.warning("acknowledgements of %s are written later: %s", self._title, error)
                await asyncio.sleep(pause_s(self._context.rng, failures))
                continue
            except Exception as error:  # a defect
                _log.exception("the acknowledgements of %s end", self._title)
                self._fail(errors.LedgerError(f"acknowledgements of {self._title}: {error!r}"))
                return
            if step is not AckStep.NOTHING:
                continue
            look_s = next_ack_look_s(now)
            if look_s == INFINITE and not self._wake.is_set():
                return
            within_s = None if look_s == INFINITE else max(0.0, look_s - now.now_s)
            await woken(self._wake, within_s)

    def _fail(self, error: errors.LedgerError) -> None:
        self.drop(error)
        for user in list(self._users.values()):
            user.served.fail(error)

    def _situation(self) -> AckSituation:
        now_s, ledger = asyncio.get_running_loop().time(), self._ledger
        is_dirty = any(user.is_dirty for user in self._users.values()) or bool(self._receipts)
        is_dirty |= self._has_released_dirty or self.delays.is_dirty
        fragments_max = self._context.ledgers.config.fragments_max
        size = None if ledger is None else ledger.size
        is_judged_by_size = is_dirty is (ledger is None)
        return AckSituation(
            *(now_s, self._times.written_s, self._times.node_s, self._times.refused_s),
            dirty=is_dirty,
            urgent=bool(self._receipts),
            small=is_judged_by_size and self._is_small(),
            open=size is not None,
            full=size is not None and size.is_full(now_s, fragments_max),
            long=size is not None and size.is_long,
            whole=self._has_released_dirty,
        )

    def _is_small(self) -> bool:
        now_s, bytes_left = asyncio.get_running_loop().time(), INLINE_BYTES_MAX
        if self.delays.bytes > bytes_left and now_s >= self._times.refused_s + REFUSED_S:
            return False  # while ledgers are refused, delays are left out
        for record in state_records(self.states()):
            bytes_left -= record_bytes(record)
            if bytes_left < 0:
                return False
        return True

    async def _look(self) -> None:
        """Reads the node again, and then the records of the subscriptions served here."""
        if not await self._context.guard.refresh():
            self._fail(errors.LedgerFenced("an older metadata store was accepted"))
            return
        moves, node = await self._nodes.seen_by_owner(self.partition)
        try:
            if node is None and self._node.version != NEW:
                raise errors.LedgerFenced(f"the node of {self._title} is gone")
            if node is not None:
                self._check_epoch(node)
                if node not in (self._node, self._nodes.last_put):
                    self._take_successions(node)
        except errors.LedgerFenced as error:
            self._fail(error)
            return
        self._moves = moves
        self._node = AckNode(AckPointer(self.epoch), NEW) if node is None else node
        self.looked = next(self._context.looks)
        users = list(self._users.values())
        await call_each(lambda user: user.served.verify(), users, VERIFIED_AT_ONCE)
        self._is_sure.set()

    def _take_successions(self, node: AckNode) -> None:
        """Applies the successions of the node, which another process noted as it moved
        subscriptions: their acknowledgements count for their new keys. Raises errors.LedgerFenced
        if another owner wrote the node."""
        pointer, states = self._node.pointer, self.states()
        if replace(node.pointer, successions=pointer.successions) != pointer:
            raise errors.LedgerFenced(f"another owner wrote the node of {self._title}")
        is_long = len(node.pointer.successions) > SUCCESSIONS_MAX // 2  # then a write replaces them
        for succession in node.pointer.successions[len(pointer.successions) :]:
            if (before := states.get(succession.before)) is not None:
                after = states[succession.after] = succession.state(before)
                self._states[succession.after] = after
                self._unwritten[succession.after] = is_long
                self._forgot_s = LONG_AGO_S  # the next ledger lacks the state under the old key

    def _check_epoch(self, node: AckNode) -> None:
        if node.pointer.epoch > self.epoch:
            raise errors.LedgerFenced(
                f"{self._title} has an owner of epoch {node.pointer.epoch}; this is {self.epoch}"
            )

    async def _take(self, step: AckStep) -> None:
        try:
            if step in (AckStep.APPEND, AckStep.SNAPSHOT):
                changes_only = step is AckStep.APPEND
                await self._append(WriteKind.CHANGES if changes_only else WriteKind.SNAPSHOT)
            elif step is AckStep.NEW_LEDGER:
                await self._move_to_new_ledger()
            elif step is AckStep.INLINE:
                await self._write_inline()
            else:
                await self._leave()
            self._was_written()
        finally:
            if self._under_way is not None:  # the write failed
                self._receipts = [*self._under_way, *self._receipts]
                self._under_way = None
                self._unwritten |= dict.fromkeys(self._states, True)
                self.delays.is_dirty = True
                for user in self._users.values():
                    user.is_known, user.is_dirty = False, True

    def _was_written(self) -> None:
        self._times.written_s = asyncio.get_running_loop().time()
        receipts, self._under_way = self._under_way or [], None
        for user in list(self._users.values()):
            if user.served.failure is None and user.position is not None:
                user.served.was_durable(self.partition, self.epoch, user.position)
        for served, receipt in receipts:
            receipt(None if served is None else served.failure)

    def _encoded(self, kind: WriteKind, snapshot: int, delays_max: float = INFINITE) -> list[bytes]:
        """The entries of a write that begins now; it has all present acknowledgements."""
        is_changes = kind is WriteKind.CHANGES
        records = self._changes() if is_changes else list(state_records(self.states()))
        records += self.delays.records(self.epoch, delays_max, is_whole=not is_changes)
        for user in self._users.values():
            if not is_changes:
                user.acks.take_changes()
            if user.is_dirty or not is_changes:
                user.position, user.is_known, user.is_dirty = user.acks.durable, True, False
        if not is_changes:
            self._unwritten.clear()
        self._under_way, self._receipts = self._receipts, []
        return encode(kind, self.epoch, records, snapshot)

    def _changes(self) -> list[AckRecord]:
        records = []
        for key, user in self._users.items():
            if user.is_dirty:
                changes = user.acks.take_changes()
                replaces = changes.was_reset or not user.is_known
                rows = user.acks.rows if replaces else changes.added
                record = AckRecord(key, self.epoch, user.acks.durable, rows, replaces)
                records.append(record)
        return records

    async def _append(self, kind: WriteKind) -> None:
        ledger = self._ledger
        assert ledger is not None, "the step is for an open ledger"
        try:
            await ledger.append(kind, self._encoded(kind, ledger.snapshot))
        except errors.LedgerError as error:
            self._leave_ledger()
            self._note_refused(error)
            raise

    def _note_refused(self, error: errors.LedgerError) -> None:
        if not isinstance(error, MOVED):
            self._times.refused_s = asyncio.get_running_loop().time()

    async def _move_to_new_ledger(self) -> None:
        self._leave_ledger()
        await self._forget_unused()
        try:
            made = await self._context.make_ledger()
            ledger = OpenAckLedger(made.writer, asyncio.get_running_loop().time())
            self._left[made.writer.ledger_id] = None
            entries = self._encoded(WriteKind.SNAPSHOT, NO_SNAPSHOT)
            await ledger.append(WriteKind.SNAPSHOT, entries)
        except errors.LedgerError as error:
            self._note_refused(error)
            raise
        check = Check(paths.intent(made.intent.id), made.intent.version)
        try:
            await self._write_node(AckPointer(self.epoch, made.writer.ledger_id), check)
        except BaseException:
            made.writer.abandon()
            raise
        self._ledger = ledger

    async def _write_inline(self) -> None:
        await self._context.pace.turn()
        self._leave_ledger()
        entries = self._encoded(WriteKind.SNAPSHOT, NO_SNAPSHOT, INLINE_BYTES_MAX)
        has_states = bool(self._states or self._users or self.delays.bytes)
        await self._write_node(AckPointer(self.epoch, None, tuple(entries) if has_states else ()))
        for user in self._users.values():
            user.is_known = False

    async def _write_node(self, pointer: AckPointer, *checks: Check) -> None:
        """Writes the node. Raises errors.LedgerFenced if the node was not written, or the outcome
        is unknown."""
        version = await self._put(pointer, self._node.version, *checks)
        if version is None:
            raise errors.LedgerFenced(f"the node of {self._title} has changed, or its intent")
        ledger_before, self._node = self._node.pointer.ledger_id, AckNode(pointer, version)
        self._times.node_s = asyncio.get_running_loop().time()
        if ledger_before is not None:
            self._left[ledger_before] = None
        for ledger_id in [left for left in self._left if left != pointer.ledger_id]:
            self._beside.start(discard_ledger(self._context.ledgers, ledger_id, self._left))
        self._left.clear()

    async def _put(self, pointer: AckPointer, version: int, *checks: Check) -> int | None:
        all_checks = (*await self._context.guard.checks(), *checks)
        return await self._nodes.put(self.partition, pointer, version, self._moves, *all_checks)

    def _leave_ledger(self) -> None:
        """Later appends go to another ledger; this ledger is deleted once the node does not name
        it."""
        if self._ledger is not None:
            self._left[self._ledger.writer.ledger_id] = None
            self._ledger.writer.abandon()
            self._ledger = None

    async def _leave(self) -> None:
        """Closes the ledger; the node still names it."""
        ledger, self._ledger = self._ledger, None
        for user in self._users.values():
            user.is_known = False
        if ledger is not None:
            await ledger.writer.close()

    async def _forget_unused(self) -> None:
        """Drops states of subscriptions that were deleted or moved, and delays without use."""
        now_s = asyncio.get_running_loop().time()
        if now_s < self._forgot_s + FORGET_EVERY_S:
            return
        self._forgot_s = now_s
        is_large = self.delays.bytes > INLINE_BYTES_MAX
        lowest = await self._context.lowest_position(self.partition) if is_large else 0
        self.delays.forget_unused(self._context.now_ms(), lowest)
        states, is_needed = dict(self._states), self._context.is_needed
        unused = [k for k, state in states.items() if not await is_needed(self.partition, k, state)]
        if unused and await self._nodes.get(self.partition) in (None, self._node):
            for key in unused:  # else a succession in the node may begin with one of them
                self._states.pop(key, None)
                self._unwritten.pop(key, None)
