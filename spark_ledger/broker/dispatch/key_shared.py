"""Which consumer of a Key_Shared subscription gets a part. Pure.

Always true, unless order is given up (`in_order` false): the rows of a slot that are sent and not
acknowledged are at one consumer, the holder of the slot. If the owner of the slot changes, the new
owner gets rows of the slot once the holder has no such row any more (PIP-379). While rows of a slot
wait, no later row of the slot is sent. A consumer that can take no more messages stops only its own
slots: their rows wait, and the dispatcher reads on for the other consumers, within a limit in
bytes.

A consumer that owns all messages of a batch of Spark gets the batch. Any other consumer gets its
neighbouring rows as a new batch that is cut out: clients acknowledge a batch with masked messages
only if they acknowledge by index, which is off by default. When messages of a cut batch are sent
again, the new batch never has more messages than the cut batch: otherwise a late acknowledgement
would name messages that its client did not have.

Waiting rows are kept twice: by slot, and by the consumer that may get them now. Rows leave these
sets late: the set `Sharing.waiting` decides which rows still wait.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap64

from bookie_server.api.entry import Buffer
from spark_ledger.broker.dispatch.acks import BatchPart, part_of
from spark_ledger.broker.dispatch.key_slots import KeyedBatch, KeyedBatches, keyed, slot_of_lone
from spark_ledger.broker.dispatch.sharing import LoneGroup, Member
from spark_ledger.broker.dispatch.slot_owners import SlotOwners, WaitingBySlot, first_waiting
from spark_ledger.broker.log.tail import Stored
from spark_ledger.topic.acks.sets import Range, bytes_of, next_row, within

STEP_COST, SLOT_COST = 5_000, 20
"""How many waiting rows are sorted in one step of the loop, and for how many rows a slot counts."""
NO_ROWS = BitMap64()
Longs = npt.NDArray[np.int64]


class KeyChoice:
    """The ReceiverChoice (sharing.py) of Key_Shared subscriptions. `keyed` returns the slots of a
    batch's messages, as key_slots.keyed does."""

    def __init__(
        self,
        owners: SlotOwners[Member],
        *,
        in_order: bool,
        keyed: Callable[[Stored], KeyedBatch] = keyed,
    ) -> None:
        self._owners = owners
        self._in_order = in_order
        self._members: list[Member] = []
        self._held: dict[int, tuple[Member, int]] = {}
        """The holder of each slot, and how many parts with rows of the slot are pending at it."""
        self._ready: dict[Member, BitMap64] = {}
        """For each consumer, the waiting rows of the slots that it owns and that no other consumer
        holds."""
        self._waiting = BitMap64()
        self._by_slot = WaitingBySlot(self._waiting)
        self._sorts = 0
        """How often `sort_waiting` was begun."""
        self._keyed_batches = KeyedBatches(keyed)
        self._cut_begins, self._cut_ends = BitMap64(), BitMap64()
        """The offsets at which cut batches begin, and end."""

    def set_waiting(self, waiting: BitMap64) -> None:
        self._waiting = waiting
        self._by_slot = WaitingBySlot(waiting)

    @property
    def bytes(self) -> int:
        sets = (self._cut_begins, self._cut_ends, *self._ready.values())
        return self._by_slot.bytes + sum(map(bytes_of, sets))

    def forget_below(self, mark: int) -> None:
        if not self._waiting:
            self._by_slot.clear()
            self._ready.clear()
        self._cut_begins.remove_range(0, mark)
        self._cut_ends.remove_range(0, mark)

    # -- consumers -----------------------------------------------------------------------------

    def join(self, member: Member) -> None:
        self._members.append(member)
        self._owners.join(member)
        self._ready.clear()

    def leave(self, member: Member) -> None:
        self._members.remove(member)
        self._owners.leave(member)
        self._ready.clear()

    def forget(self) -> None:
        self._held.clear()
        self._by_slot.clear()
        self._ready.clear()
        self._cut_begins.clear()
        self._cut_ends.clear()

    # -- parts ---------------------------------------------------------------------------------

    def parts_of(
        self, batch: Stored, missing: list[Range], to_send: list[Range]
    ) -> Iterable[BatchPart]:
        keyed_batch = self._keyed_batches.of(batch)
        if len(keyed_batch.slots) == 1:
            return (part_of(batch, missing, to_send)._replace(slots=keyed_batch.slots),)
        return self._parts_of_rows(batch, keyed_batch, missing, to_send)

    def _parts_of_rows(
        self, batch: Stored, keyed_batch: KeyedBatch, missing: list[Range], to_send: list[Range]
    ) -> Iterator[BatchPart]:
        """The parts of a batch whose messages have slots of their own."""
        slots = keyed_batch.slots
        rows = _rows_of(to_send)
        indices = keyed_batch.indices[rows - batch.offset]
        firsts = np.full(len(keyed_batch.distinct), -1, dtype=np.int64)
        firsts[indices[::-1]] = rows[::-1]
        receivers: list[Member | None] = [
            self._receiver_of_slot(slot, first) if first >= 0 else None
            for slot, first in zip(keyed_batch.distinct, firsts.tolist(), strict=True)
        ]
        numbers = {member: number for number, member in enumerate(dict.fromkeys(receivers))}
        number_by_row = np.array([numbers[member] for member in receivers])[indices]
        missing_rows = sum(hi - lo for lo, hi in missing)
        for member, number in numbers.items():
            member_rows = rows[number_by_row == number]
            if not len(member_rows):
                continue
            ranges = _ranges_of(member_rows)
            part = BatchPart(
                *(batch.offset, batch.messages, ranges, len(member_rows)),
                is_masked=len(member_rows) < missing_rows,
                slots=slots,
            )
            if member is None or not member.is_available:
                yield part  # it waits
            elif member.takes_rows:
                single_rows = [(row, row + 1) for row in member_rows.tolist()]
                yield from self._cut_parts(batch.offset, single_rows, slots)
            elif not part.is_masked and self._gets_whole(member, batch, keyed_batch):
                yield part
            else:
                yield from self._cut_parts(batch.offset, ranges, slots)

    def _gets_whole(self, member: Member, batch: Stored, keyed_batch: KeyedBatch) -> bool:
        """Whether the consumer gets the whole batch, as it owns every slot of the batch. (A client
        that does not acknowledge by index cannot acknowledge a batch with masked messages.)"""
        is_new = batch.offset not in member.pending and batch.offset not in self._cut_begins
        return is_new and set(self._owners.owners_of(keyed_batch.distinct)) == {member}

    def _cut_parts(
        self, begin: int, ranges: Sequence[Range], slots: tuple[int, ...]
    ) -> Iterator[BatchPart]:
        """The ranges as cut batches; `slots` are the slots of the batch that begins at `begin`."""
        for lo, hi in ranges:
            while lo < hi:
                cut_end = next_row(self._cut_ends, lo + 1) if lo in self._cut_begins else None
                end = hi if cut_end is None else min(hi, cut_end)
                part_slots = slots[lo - begin : end - begin]
                if len(set(part_slots)) == 1:
                    part_slots = part_slots[:1]
                yield BatchPart(lo, end - lo, [(lo, end)], end - lo, False, part_slots, True)
                lo = end

    def cut(self, batch: Stored, part: BatchPart, *, is_lone: bool) -> Buffer:
        if is_lone:
            return self._keyed_batches.lone(batch, part.offset)
        return self._keyed_batches.cut(batch, part.offset, part.messages)

    def begin_read(self) -> None:
        """Nothing to do: a key goes to its consumer, whichever batches are read together."""

    def slots_of_lone(self, batches: Sequence[Stored]) -> list[int]:
        return list(map(slot_of_lone, batches))

    def receiver_of(self, part: BatchPart) -> Member | None:
        slots = _firsts_of(part)
        receivers = {self._receiver_of_slot(slot, first) for slot, first in slots.items()}
        if len(receivers) != 1:
            return None
        (member,) = receivers
        return member if member is not None and member.is_available else None

    def lone_groups(
        self, offsets: list[int], slots: list[int], messages_max_of: Callable[[Member], int]
    ) -> list[LoneGroup]:
        messages_left = {member: messages_max_of(member) for member in self._members}
        members_left = sum(count > 0 for count in messages_left.values())
        groups: dict[Member | None, LoneGroup] = {}
        sent_slots: set[int] = set()  # their first row is in a group, so their next rows may be too
        for offset, slot, owner in zip(offsets, slots, self._owners.owners_of(slots), strict=True):
            if not members_left:
                break
            may_get = slot in sent_slots or self._may_get(owner, slot, offset)
            if owner is not None and may_get and messages_left[owner]:
                sent_slots.add(slot)
                messages_left[owner] -= 1
                members_left -= not messages_left[owner]
            else:
                owner = None
            group = groups.get(owner)
            if group is None:
                group = groups[owner] = LoneGroup(owner, [], [])
            group.offsets.append(offset)
            group.slots.append(slot)
        return list(groups.values())

    def _receiver_of_slot(self, slot: int, first: int) -> Member | None:
        """The owner of the slot; None if the owner may not get rows of the slot now. `first` is the
        first of these rows."""
        owner = self._owners.owner_of(slot)
        return owner if self._may_get(owner, slot, first) else None

    def _may_get(self, owner: Member | None, slot: int, first: int) -> bool:
        """Whether the slot has an owner, and the owner may get rows of the slot now."""
        if owner is None or not self._in_order:
            return owner is not None
        held = self._held.get(slot)
        if held is not None and held[0] is not owner:
            return False
        waiting = self._by_slot.first(slot) if self._waiting else None
        return waiting is None or first <= waiting

    def note_pending(self, member: Member, part: BatchPart) -> None:
        if part.is_cut:
            self._cut_begins.add(part.offset)
            self._cut_ends.add(part.offset + part.messages)
        if self._in_order:
            for slot in _firsts_of(part):
                _, count = self._held.get(slot, (member, 0))
                self._held[slot] = (member, count + 1)

    def note_lone_pending(self, group: LoneGroup) -> None:
        if self._in_order and group.member is not None:
            for slot in group.slots:
                _, count = self._held.get(slot, (group.member, 0))
                self._held[slot] = (group.member, count + 1)

    def note_not_pending(self, member: Member, part: BatchPart) -> None:
        if self._in_order:
            self._let_go(_firsts_of(part))

    def note_lone_not_pending(self, slots: Iterable[int]) -> None:
        if self._in_order:
            self._let_go(slots)

    def _let_go(self, slots: Iterable[int]) -> None:
        for slot in slots:
            holder, count = self._held[slot]
            if count > 1:
                self._held[slot] = (holder, count - 1)
                continue
            del self._held[slot]
            if slot in self._by_slot and holder is not self._owners.owner_of(slot):
                self._make_ready(slot)

    # -- waiting rows --------------------------------------------------------------------------

    def note_waiting(self, part: BatchPart) -> None:
        if len(part.slots) != 1:
            rows = _rows_of(part.ranges).tolist()
            self.note_lone_waiting({row: part.slots[row - part.offset] for row in rows})
            return
        (slot,) = part.slots
        receiver = self._receiver_now(slot)
        ready = None if receiver is None else self._ready.setdefault(receiver, BitMap64())
        for lo, hi in part.ranges:
            self._by_slot.add(slot, lo, hi)
            if ready is not None:
                ready.add_range(lo, hi)

    def note_lone_waiting(self, slots: Mapping[int, int]) -> None:
        ready: dict[Member, list[int]] = {}
        add = self._by_slot.add
        for offset, slot in slots.items():
            add(slot, offset, offset + 1)
            receiver = self._receiver_now(slot)
            if receiver is not None:
                ready.setdefault(receiver, []).append(offset)
        for receiver, rows in ready.items():
            self._ready.setdefault(receiver, BitMap64()).update(rows)

    def next_replay(self, at: int) -> int | None:
        following = [
            row
            for member, rows in self._ready.items()
            if member.is_available and (row := first_waiting(rows, self._waiting, at)) is not None
        ]
        return min(following, default=None)

    def replays_in(self, lo: int, hi: int) -> Iterable[int]:
        sets = [within(rows, lo, hi) for member, rows in self._ready.items() if member.is_available]
        return BitMap64.union(NO_ROWS, *sets) & self._waiting

    def may_read_on(self) -> bool:
        return any(member.is_available for member in self._members)

    def awaits_new_rows(self) -> bool:
        return any(
            member.is_available
            and first_waiting(self._ready.get(member, NO_ROWS), self._waiting) is None
            for member in self._members
        )

    def _receiver_now(self, slot: int) -> Member | None:
        """The owner of the slot; None if another consumer holds the slot."""
        owner = self._owners.owner_of(slot)
        held = self._held.get(slot)
        return owner if held is None or held[0] is owner else None

    def _make_ready(self, slot: int) -> int:
        """Let the slot's owner get the slot's waiting rows; returns their number, or more. This
        takes long for many rows: call it only if the owner could not get the rows before."""
        receiver = self._receiver_now(slot)
        if receiver is None:
            return 0
        rows = self._by_slot.rows(slot)
        self._ready.setdefault(receiver, BitMap64()).update(rows)
        return len(rows)

    def sort_waiting(self) -> Iterator[None]:
        """As ReceiverChoice.sort_waiting. Rows of slots to which no step has come are not sent yet,
        unless the rows begin to wait meanwhile; `_receiver_of_slot` keeps the order in a slot."""
        self._sorts += 1
        return self._sort(self._sorts)

    def _sort(self, sort: int) -> Iterator[None]:
        cost = 0
        for slot in self._by_slot:
            if sort != self._sorts:
                return  # owners have changed again: a later sort does the work
            if self._by_slot.first(slot) is not None:
                cost += SLOT_COST + self._make_ready(slot)
            if cost >= STEP_COST:
                cost = 0
                yield


def _firsts_of(part: BatchPart) -> dict[int, int]:
    """The first row of each slot in the part."""
    if len(part.slots) == 1:
        return {part.slots[0]: part.ranges[0][0]}
    firsts: dict[int, int] = {}
    for lo, hi in reversed(part.ranges):
        slots = part.slots[lo - part.offset : hi - part.offset]
        firsts.update(zip(reversed(slots), range(hi - 1, lo - 1, -1), strict=True))
    return firsts


def _rows_of(ranges: Sequence[Range]) -> Longs:
    return np.concatenate([np.arange(lo, hi, dtype=np.int64) for lo, hi in ranges])


def _ranges_of(rows: Longs) -> list[Range]:
    breaks = np.flatnonzero(np.diff(rows) > 1)
    firsts = rows[np.r_[0, breaks + 1]].tolist()
    lasts = rows[np.r_[breaks, len(rows) - 1]].tolist()
    return [(first, last + 1) for first, last in zip(firsts, lasts, strict=True)]
