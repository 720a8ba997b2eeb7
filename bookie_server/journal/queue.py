"""Which records go into the journal's next batch.

Always true:
- records of one ledger leave in the order they came, whatever their lanes;
- what came in the recovery lane leaves ahead of all that waits of other ledgers in other lanes;
  what waits of its own ledger is moved ahead with it;
- the oldest bulk goes along with every batch, or has the next one to itself, so recovery,
  whatever it sends, starves no other;
- an append's future is done when the last of its records is written as its lane asks, not before.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from bookie_server.journal.format import RECORD_HEADER_BYTES, Record, RecordKind, records_bytes
from bookie_server.lanes import Lane

_ANY = 1 << 62  # bytes: whatever its size


class Ack:
    """The waiter of an append: `parts` groups are still to be written."""

    __slots__ = ("done", "parts")

    def __init__(self, done: asyncio.Future[None], parts: int) -> None:
        self.done = done
        self.parts = parts

    def written(self) -> None:
        self.parts -= 1
        if not self.parts and not self.done.done():
            self.done.set_result(None)

    def failed(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)


class Group(NamedTuple):
    """Records of one ledger that are written in one batch; none: only somebody who waits for what
    came before. `ledger_id` None: he waits for whatever is being written."""

    ledger_id: int | None
    records: Sequence[Record]
    bytes: int
    needs_sync: bool
    ack: Ack


class JournalQueue:
    """What waits to be written. A group has at most `group_bytes_max`, or one larger record; a
    batch has at most `batch_bytes_max`."""

    def __init__(self, group_bytes_max: int, batch_bytes_max: int) -> None:
        self._group_bytes_max = group_bytes_max
        self._batch_bytes_max = batch_bytes_max
        self._urgent: deque[Group] = deque()
        self._bulk: deque[Group] = deque()
        self._urgent_groups: dict[int, int] = {}  # by ledger, how many
        self._passed_over = False  # the last batch had no room for the head of the bulk

    def __len__(self) -> int:
        return len(self._urgent) + len(self._bulk)

    def put(
        self,
        records: Sequence[Record],
        lane: Lane,
        after: Sequence[int],
        done: asyncio.Future[None],
    ) -> int:
        """Queue the records; returns their bytes. `done` is set when they are written, and what
        was queued before of their ledgers and of the ledgers `after`; with neither records nor
        ledgers, when all is that was queued before."""
        needs_sync = lane is not Lane.PAGE_CACHE
        assert needs_sync or all(record.kind is RecordKind.ENTRY for record in records)
        barrier = not records and not after
        parts = self._parts(records, self._waiting_ledgers() if barrier else after)
        ack = Ack(done, len(parts) + barrier)
        if barrier:  # for the batch that is being written
            self._bulk.append(Group(None, (), 0, needs_sync, ack))
        total = 0
        for ledger_id, part, size in parts:
            total += size
            self._enqueue(Group(ledger_id, part, size, needs_sync, ack), lane)
        return total

    def take(self) -> list[Group]:
        """The groups of the next batch, at least one if any waits."""
        half = self._group_bytes_max // 2 if self._bulk else self._group_bytes_max
        taken = [] if self._passed_over else _take(self._urgent, half, _ANY)
        for group in taken:
            self._not_urgent_any_more(group)
        used = sum([group.bytes for group in taken])
        room_for_first = self._batch_bytes_max - used if taken else _ANY
        bulk = _take(self._bulk, self._group_bytes_max - used, room_for_first)
        self._passed_over = bool(self._bulk) and not bulk
        return taken + bulk

    def put_back(self, groups: Sequence[Group]) -> None:
        """A batch that failed: its waiters are the first to be told by `fail`."""
        self._bulk.extendleft(reversed(groups))

    def fail(self, error: Exception) -> None:
        """Complete all waiting futures."""
        for queue in (self._bulk, self._urgent):
            while queue:
                queue.popleft().ack.failed(error)
        self._urgent_groups.clear()

    def _parts(
        self, records: Sequence[Record], after: Sequence[int]
    ) -> list[tuple[int, Sequence[Record], int]]:
        parts: list[tuple[int, Sequence[Record], int]] = []
        by_ledger = _by_ledger(records)
        for ledger_id, own in by_ledger.items():
            size = records_bytes(own)
            if size <= self._group_bytes_max:
                parts.append((ledger_id, own, size))
                continue
            split = _split(own, self._group_bytes_max)
            parts += [(ledger_id, part, records_bytes(part)) for part in split]
        parts += [(ledger_id, (), 0) for ledger_id in after if ledger_id not in by_ledger]
        return parts

    def _waiting_ledgers(self) -> list[int]:
        groups = [*self._urgent, *self._bulk]
        return list(dict.fromkeys([g.ledger_id for g in groups if g.ledger_id is not None]))

    def _enqueue(self, group: Group, lane: Lane) -> None:
        assert group.ledger_id is not None
        if lane is Lane.RECOVERY:
            self._move_ahead(group.ledger_id)
        elif group.ledger_id not in self._urgent_groups:
            self._bulk.append(group)
            return
        self._make_urgent(group)

    def _move_ahead(self, ledger_id: int) -> None:
        """What waits of the ledger leaves before the recovery that is about to be queued."""
        if not any(group.ledger_id == ledger_id for group in self._bulk):
            return
        waiting, self._bulk = self._bulk, deque()
        for group in waiting:
            if group.ledger_id == ledger_id:
                self._make_urgent(group)
            else:
                self._bulk.append(group)

    def _make_urgent(self, group: Group) -> None:
        assert group.ledger_id is not None
        self._urgent.append(group)
        self._urgent_groups[group.ledger_id] = self._urgent_groups.get(group.ledger_id, 0) + 1

    def _not_urgent_any_more(self, group: Group) -> None:
        assert group.ledger_id is not None
        left = self._urgent_groups.pop(group.ledger_id) - 1
        if left:
            self._urgent_groups[group.ledger_id] = left


def _take(queue: deque[Group], room: int, room_for_first: int) -> list[Group]:
    """From the head of the queue as much as there is room for; one group has more room."""
    taken: list[Group] = []
    while queue and queue[0].bytes <= (room if taken else room_for_first):
        group = queue.popleft()
        room -= group.bytes
        taken.append(group)
    return taken


def _by_ledger(records: Sequence[Record]) -> dict[int, Sequence[Record]]:
    """Most appends are of one ledger: those are not copied."""
    ledger_ids = dict.fromkeys([record.ledger_id for record in records])
    if len(ledger_ids) == 1:
        return dict.fromkeys(ledger_ids, records)
    by_ledger: dict[int, list[Record]] = {ledger_id: [] for ledger_id in ledger_ids}
    for record in records:
        by_ledger[record.ledger_id].append(record)
    return dict(by_ledger)


def _split(records: Sequence[Record], bytes_max: int) -> list[Sequence[Record]]:
    """Cut into groups of at most `bytes_max` each; a larger record is a group of its own."""
    groups: list[Sequence[Record]] = []
    group: list[Record] = []
    room = bytes_max
    for record in records:
        room -= RECORD_HEADER_BYTES + len(record.body)
        if group and room < 0:
            groups.append(group)
            group, room = [], bytes_max - RECORD_HEADER_BYTES - len(record.body)
        group.append(record)
    return [*groups, group]
