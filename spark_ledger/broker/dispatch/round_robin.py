"""The consumers of a Shared subscription take turns. Pure."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from pyroaring import BitMap64

from bookie_server.api.entry import Buffer
from spark_ledger.broker.dispatch.acks import BatchPart, part_of
from spark_ledger.broker.dispatch.sharing import LoneGroup, Member
from spark_ledger.broker.log.tail import Stored
from spark_ledger.topic.acks.sets import Range, next_row, within

TURN_PARTS_MAX = 20
"""How many parts a consumer gets before the next consumer has its turn."""


class RoundRobin:
    """The ReceiverChoice (sharing.py) of Shared subscriptions. The available consumers with the
    best priority (the lowest number) have turns. In a turn a consumer gets TURN_PARTS_MAX parts at
    most, and no more than its permits probably allow: the average size of its parts gives an
    estimate. Each read begins a new turn, so messages that arrive singly go to different consumers.

    Any consumer may get any row, so keys have no slots (0), and nothing is kept of waiting or
    pending rows."""

    def __init__(self) -> None:
        self._levels: dict[int, deque[Member]] = {}
        self._turn_of: Member | None = None
        self._turn_parts = 0
        self._waiting = BitMap64()

    def set_waiting(self, waiting: BitMap64) -> None:
        self._waiting = waiting

    @property
    def bytes(self) -> int:
        return 0

    def forget_below(self, mark: int) -> None:
        pass

    def join(self, member: Member) -> None:
        levels = self._levels
        levels.setdefault(member.priority, deque()).append(member)
        self._levels = {priority: levels[priority] for priority in sorted(levels)}

    def leave(self, member: Member) -> None:
        level = self._levels[member.priority]
        level.remove(member)
        if not level:
            del self._levels[member.priority]
        if self._turn_of is member:
            self._turn_of = None

    def sort_waiting(self) -> Iterator[None]:
        return iter(())

    def parts_of(
        self, batch: Stored, missing: list[Range], to_send: list[Range]
    ) -> Iterable[BatchPart]:
        return (part_of(batch, missing, to_send),)

    def begin_read(self) -> None:
        self._turn_of = None

    def slots_of_lone(self, batches: Sequence[Stored]) -> list[int]:
        return [0] * len(batches)

    def receiver_of(self, part: BatchPart) -> Member | None:
        return self._receiver()

    def lone_groups(
        self, offsets: list[int], slots: list[int], messages_max_of: Callable[[Member], int]
    ) -> list[LoneGroup]:
        member = self._receiver()
        if member is None:
            return []
        count = min(len(offsets), self._turn_parts, messages_max_of(member))
        return [LoneGroup(member, offsets[:count], slots[:count])]

    def _receiver(self) -> Member | None:
        turn_of = self._turn_of
        for priority, level in self._levels.items():
            if (
                turn_of is not None
                and turn_of.priority == priority
                and self._turn_parts > 0
                and turn_of.is_available
            ):
                return turn_of
            for _ in range(len(level)):
                member = level[0]
                level.rotate(-1)
                if member.is_available:
                    parts = int(member.permits / member.messages_per_part)
                    self._turn_of = member
                    self._turn_parts = max(1, min(parts, TURN_PARTS_MAX))
                    return member
        return None

    def cut(self, batch: Stored, part: BatchPart, *, is_lone: bool) -> Buffer:
        raise AssertionError("Shared never cuts a batch: it sends the whole entry and masks rows")

    def note_pending(self, member: Member, part: BatchPart) -> None:
        if member is self._turn_of:
            self._turn_parts -= 1

    def note_lone_pending(self, group: LoneGroup) -> None:
        if group.member is self._turn_of:
            self._turn_parts -= len(group.offsets)

    def note_not_pending(self, member: Member, part: BatchPart) -> None:
        pass

    def note_lone_not_pending(self, slots: Iterable[int]) -> None:
        pass

    def note_waiting(self, part: BatchPart) -> None:
        pass

    def note_lone_waiting(self, slots: Mapping[int, int]) -> None:
        pass

    def next_replay(self, at: int) -> int | None:
        return next_row(self._waiting, at) if self.may_read_on() else None

    def replays_in(self, lo: int, hi: int) -> Iterable[int]:
        return within(self._waiting, lo, hi)

    def awaits_new_rows(self) -> bool:
        return False  # any consumer may get any waiting row

    def may_read_on(self) -> bool:
        return any(member.is_available for level in self._levels.values() for member in level)

    def forget(self) -> None:
        self._turn_of = None
