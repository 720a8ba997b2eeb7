"""The consumers of a Shared subscription take turns. Pure."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from pyroaring import BitMap64

from bookie_server.api.entry import Buffer
from spark_ledger.broker.dispatch.acks import BatchPart, part_of
from spark_ledger.broker.dispatch.sharing import LoneTurn, Member
from spark_ledger.broker.log.tail import Stored
from spark_ledger.topic.acks.sets import Range, next_row, within

TURN_PARTS_MAX = 20
"""How many parts a consumer gets before the next consumer has its turn."""


class RoundRobin:
    """The choice for Shared. The available consumers with the best priority (the lowest number)
    have turns: TURN_PARTS_MAX parts at most, or as many as the consumer's permits probably allow. A
    turn also ends with the rows of one read, so that messages that come one by one go round."""

    def __init__(self) -> None:
        self._levels: dict[int, deque[Member]] = {}
        self._turn_of: Member | None = None
        self._turn_parts = 0
        self._waiting = BitMap64()

    def watch(self, waiting: BitMap64) -> None:
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
        self, batch: Stored, missing: list[Range], given: list[Range]
    ) -> Iterable[BatchPart]:
        return (part_of(batch, missing, given),)

    def begin_read(self) -> None:
        self._turn_of = None

    def slots_of_lone(self, batches: Sequence[Stored]) -> list[int]:
        return [0] * len(batches)

    def receiver_of(self, part: BatchPart) -> Member | None:
        return self._receiver()

    def lone_turns(
        self, offsets: list[int], slots: list[int], room_of: Callable[[Member], int]
    ) -> list[LoneTurn]:
        member = self._receiver()
        if member is None:
            return []
        count = min(len(offsets), self._turn_parts, room_of(member))
        return [LoneTurn(member, offsets[:count], slots[:count])]

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
                    expected = int(member.permits / member.part_messages)
                    self._turn_of = member
                    self._turn_parts = max(1, min(expected, TURN_PARTS_MAX))
                    return member
        return None

    def cut(self, batch: Stored, part: BatchPart, *, is_lone: bool) -> Buffer:
        raise AssertionError("batches are sent whole")

    def given(self, member: Member, part: BatchPart) -> None:
        if member is self._turn_of:
            self._turn_parts -= 1

    def given_lone(self, turn: LoneTurn) -> None:
        if turn.member is self._turn_of:
            self._turn_parts -= len(turn.offsets)

    def taken(self, member: Member, part: BatchPart) -> None:
        pass

    def taken_lone(self, slots: Iterable[int]) -> None:
        pass

    def waits(self, part: BatchPart) -> None:
        pass

    def wait_lone(self, slots: Mapping[int, int]) -> None:
        pass

    def next_replay(self, at: int) -> int | None:
        return next_row(self._waiting, at) if self.may_read_on() else None

    def replays_in(self, lo: int, hi: int) -> Iterable[int]:
        return within(self._waiting, lo, hi)

    def awaits_new_rows(self) -> bool:
        return False  # each consumer may get the rows that wait

    def may_read_on(self) -> bool:
        return any(member.is_available for level in self._levels.values() for member in level)

    def forget(self) -> None:
        self._turn_of = None
