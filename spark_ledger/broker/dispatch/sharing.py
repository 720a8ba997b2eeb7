"""Which consumer gets which rows of a subscription that several consumers share. Pure.

Always true: a row is pending at one consumer at most, in one part; a row that was read is
acknowledged, pending, or waiting to be sent again. A consumer gets a part only while it has
permits, is not blocked by its unacknowledged messages, and its connection has room; its permits
fall below zero by less than the size of one part. When a consumer leaves, its pending rows wait,
and their redelivery counts do not change. When the last consumer leaves, the whole state is
forgotten, and the subscription begins at its mark.

A change of many parts takes several steps (`work`). A consumer whose parts are given back gets no
parts until that change is done. A consumer that leaves is not in `members` from the first step on.
Parts that no step has reached yet still count as unacknowledged, and are not waiting; in Key_Shared
they hold their slots, so no other consumer gets later rows of these slots before them.

A ReceiverChoice decides which consumer gets a part: round robin for Shared (round_robin.py), the
slot of the key for Key_Shared (key_shared.py; `slots` here are always slots of keys).
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from pyroaring import BitMap64

from bookie_server.api.entry import Buffer
from spark_ledger.broker.dispatch.acks import (
    Acks,
    BatchPart,
    PendingParts,
    SentEntries,
    acknowledged_ranges,
    is_unclear,
    never_sent,
    not_sent,
)
from spark_ledger.broker.log.tail import Stored
from spark_ledger.broker.settings import DEFAULTS, BrokerSettings
from spark_ledger.broker.wire.commands import MessageId, signed
from spark_ledger.topic.acks.sets import Measured, Range, bytes_of, common
from spark_ledger.topic.log.policies import TopicPolicies

STEP_PARTS = 500
"""How many parts are given back or updated in one step of the loop: up to 10 us each."""
PENDING_PARTS_MAX = 500_000
"""How many parts of a subscription may be pending in a partition: each takes 100 or 350 bytes,
which no budget counts. Beyond it no more parts are sent, but acknowledgements still count."""
MEMBERS_PER_STEP = 100
"""A search for an id at this number of consumers takes as long as one acknowledgement."""
_NEW_SIZE_SHARE = 0.1
"""The weight of a new part in the average number of messages in its consumer's parts."""
_OLD_SIZE_SHARE = 1 - _NEW_SIZE_SHARE


class UnackedLimits(NamedTuple):
    """How many messages may be sent and not acknowledged: at a consumer, and at all consumers of
    the subscription in a partition. 0: no limit. A consumer that has reached its limit gets more
    messages once only half the limit is unacknowledged."""

    consumer_max: int = DEFAULTS.consumer_unacked_max
    subscription_max: int = DEFAULTS.subscription_unacked_max

    @staticmethod
    def of(settings: BrokerSettings, policies: TopicPolicies) -> "UnackedLimits":
        """The limits of the topic's policies, or else of the settings."""
        consumer_max, most_of_all = policies.consumer_unacked_max, policies.subscription_unacked_max
        return UnackedLimits(
            settings.consumer_unacked_max if consumer_max is None else consumer_max,
            settings.subscription_unacked_max if most_of_all is None else most_of_all,
        )


@dataclass(slots=True, eq=False)
class Member:
    """A consumer of a shared subscription. `has_room` returns whether its connection takes more
    frames. `is_busy`: a message in chunks is being sent to it. `kept_permits` came while it was
    blocked. `returns` counts the changes under way that give its parts back because its client
    asked for that. `ranges` are the slots of keys that its client asks for, first and last; empty:
    the client gives no ranges. `takes_rows`: the client's first FLOW was for one message, so the
    client has no queue, and takes no batches. `messages_per_part` is the average size of the parts
    sent to it; the newest parts weigh most."""

    name: str
    priority: int
    has_room: Callable[[], bool]
    permits: int = 0
    kept_permits: int = 0
    unacked: int = 0
    returns: int = 0
    is_busy: bool = False
    is_blocked: bool = False
    takes_rows: bool = False
    pending: PendingParts = field(default_factory=PendingParts)
    messages_per_part: float = 1.0
    ranges: Sequence[tuple[int, int]] = ()

    @property
    def is_available(self) -> bool:
        """Whether the consumer may get a part."""
        is_held = self.is_blocked or self.is_busy or self.returns > 0
        return self.permits > 0 and not is_held and self.has_room()


class Unacked:
    """How many messages, in how many parts, are sent and not acknowledged. `is_blocked`: they are
    so many that no more are sent."""

    def __init__(self, limits: UnackedLimits) -> None:
        self.messages = self.parts = 0
        self.is_blocked = False
        self.limits = limits

    def clear(self) -> None:
        self.messages = self.parts = 0
        self.is_blocked = False

    def sent(self, member: Member, messages: int, parts: int) -> None:
        member.unacked += messages
        self.messages += messages
        self.parts += parts
        consumer_max, subscription_max = self.limits
        member.is_blocked = 0 < consumer_max <= member.unacked
        if 0 < subscription_max <= self.messages or self.parts >= PENDING_PARTS_MAX:
            self.is_blocked = True

    def taken(self, member: Member, messages: int, parts: int) -> None:
        """Messages are acknowledged, or are to be sent again."""
        member.unacked -= messages
        self.messages -= messages
        self.parts -= parts

    def settle(self, member: Member) -> bool:
        """Unblock the consumer and the subscription, if few enough messages are unacknowledged.
        Returns whether that changed anything."""
        consumer_max, subscription_max = self.limits
        is_few = not consumer_max or member.unacked <= consumer_max // 2
        has_changed = member.is_blocked and is_few
        if has_changed:
            member.is_blocked = False
            member.permits += member.kept_permits
            member.kept_permits = 0
        if (
            self.is_blocked
            and (not subscription_max or self.messages < subscription_max / 2)
            and self.parts <= PENDING_PARTS_MAX // 2
        ):
            self.is_blocked = False
            has_changed = True
        return has_changed


class LoneGroup(NamedTuple):
    """Messages outside of batches that a consumer gets together; without a consumer, they wait.
    `slots` has the slot of each message's key (0: no slot)."""

    member: Member | None
    offsets: list[int]
    slots: list[int]


class ReceiverChoice(Protocol):
    """Decides which consumer gets a part. Its methods are called for each change of a part."""

    def set_waiting(self, waiting: BitMap64) -> None:
        """From now on, `waiting` has the rows that wait. A row enters this set before
        `note_waiting` is called, and leaves it when the row is sent or acknowledged, or does not
        exist any more."""

    @property
    def bytes(self) -> int:
        """About how many bytes of memory the choice's own sets take."""

    def forget_below(self, mark: int) -> None:
        """Forget what is kept of rows below `mark`, which are acknowledged."""

    def join(self, member: Member) -> None: ...

    def leave(self, member: Member) -> None:
        """Remove a consumer. Its pending parts are given back later."""

    def sort_waiting(self) -> Iterator[None]:
        """Find anew, in steps, which consumer may get which waiting rows, after a consumer has
        joined or left."""

    def parts_of(
        self, batch: Stored, missing: list[Range], to_send: list[Range]
    ) -> Iterable[BatchPart]:
        """The parts of a batch that give the ranges `to_send`; `missing` are all ranges of the
        batch that are not acknowledged."""

    def begin_read(self) -> None:
        """Note that a new read begins: the first part of its rows begins a new turn."""

    def receiver_of(self, part: BatchPart) -> Member | None:
        """The available consumer that gets the part; None if the part cannot be sent now."""

    def slots_of_lone(self, batches: Sequence[Stored]) -> list[int]:
        """The slots of messages outside of batches; 0: none."""

    def lone_groups(
        self, offsets: list[int], slots: list[int], messages_max_of: Callable[[Member], int]
    ) -> list[LoneGroup]:
        """The first of these messages, grouped by their consumers; empty if no message may be sent
        now. The messages are outside of batches, and new or from `replays_in`. `messages_max_of`
        returns how many messages a consumer may get."""

    def cut(self, batch: Stored, part: BatchPart, *, is_lone: bool) -> Buffer:
        """The bytes of a cut part: a new batch, or, if `is_lone`, a message outside of a batch."""

    def note_pending(self, member: Member, part: BatchPart) -> None:
        """Note that the part is pending at the consumer, and no longer waiting."""

    def note_lone_pending(self, group: LoneGroup) -> None:
        """As `note_pending`, for each message of the group."""

    def note_not_pending(self, member: Member, part: BatchPart) -> None:
        """Note that the part is no longer pending at the consumer: acknowledged or given back."""

    def note_lone_not_pending(self, slots: Iterable[int]) -> None:
        """As `note_not_pending`, for messages outside of batches with these slots."""

    def note_waiting(self, part: BatchPart) -> None:
        """Note that the unacknowledged rows of the part are waiting, with their slots."""

    def note_lone_waiting(self, slots: Mapping[int, int]) -> None:
        """As `note_waiting`, for messages outside of batches with these offsets and slots."""

    def next_replay(self, at: int) -> int | None:
        """The first waiting row from `at` on that may be sent now."""

    def replays_in(self, lo: int, hi: int) -> Iterable[int]:
        """The waiting rows of [lo, hi) that may be sent now, in rising order."""

    def may_read_on(self) -> bool:
        """Whether a consumer may get rows. Asked before new rows are read, when no waiting row may
        be sent."""

    def awaits_new_rows(self) -> bool:
        """Whether a consumer may get rows, but no waiting row."""

    def forget(self) -> None:
        """Forget all parts: no row is pending or waiting any more."""


class Sharing:
    """The consumers of a subscription in a partition, and the state of the rows that were read.
    `acks` has the subscription's acknowledgements; `wake` is called when rows may be sent that
    could not be sent before."""

    def __init__(
        self,
        acks: Acks,
        limits: UnackedLimits,
        choice: ReceiverChoice,
        wake: Callable[[], None],
        messages_at: Callable[[int], int | None] = lambda _: None,
    ) -> None:
        self._messages_at = messages_at
        self._work: deque[Iterator[None]] = deque()
        """The changes under way, in their order."""
        self.acks = acks
        self.members: list[Member] = []
        self.waiting = BitMap64()
        """The rows that wait to be sent: read, not acknowledged, and pending at no consumer."""
        self.unacked = Unacked(limits)
        self.choice = choice
        choice.set_waiting(self.waiting)
        self.memory = Measured(acks.memory.budget, self._bytes)
        self.wake = wake
        self.sent = SentEntries()

    # -- consumers -----------------------------------------------------------------------------

    def join(self, member: Member) -> None:
        self.members.append(member)
        self.choice.join(member)
        self._begin(self.choice.sort_waiting())
        self.wake()

    def leave(self, member: Member) -> None:
        """Remove a consumer. The redelivery counts of its parts are not raised."""
        self.members.remove(member)
        self.choice.leave(member)
        if self.members:
            self._begin(self.choice.sort_waiting())
            self._begin(_returning(self, member, list(member.pending)))
        else:
            member.pending.clear()
            self.forget()

    def _begin(self, steps: Iterator[None]) -> None:
        """Begin a change after those under way."""
        self._work.append(steps)
        if len(self._work) == 1:
            self.work()
        if self._work:
            self.wake()

    def work(self) -> bool:
        """Take a step of the changes under way. Returns whether there are more steps."""
        while self._work:
            for _ in self._work[0]:
                return True
            self._work.popleft()
        return False

    def forget(self) -> None:
        """Forget all rows: the last consumer is gone, or a seek moved the subscription."""
        self._work.clear()
        for member in self.members:
            member.pending.clear()
            member.unacked = member.returns = 0
            self._settle(member)
        self.waiting.clear()
        self.sent = SentEntries()
        self.unacked.clear()
        self.choice.forget()
        self.memory.measure()

    def flow(self, member: Member, permits: int) -> None:
        """The consumer's client takes `permits` more messages."""
        if member.is_blocked:
            member.kept_permits += permits
            return
        member.permits += permits
        self.wake()

    # -- sending -------------------------------------------------------------------------------

    def next_replay(self, at: int = 0) -> int | None:
        """The first waiting row from `at` on that may be sent now."""
        if self.unacked.is_blocked or not self.waiting:
            return None
        return self.choice.next_replay(at)

    def may_read_on(self) -> bool:
        """Whether new rows may be sent, or read to wait, once no waiting row may be sent."""
        return self.may_send_more() and not self.is_full

    def may_send_more(self) -> bool:
        """Whether a consumer may get rows."""
        return not self.unacked.is_blocked and self.choice.may_read_on()

    @property
    def is_full(self) -> bool:
        """Whether no further rows may wait, as sets take too much memory."""
        return bool(self.waiting) and self.memory.budget.is_over

    def awaits_new_rows(self) -> bool:
        """Whether to read new rows although waiting rows may be sent: there is a consumer that may
        get new rows, but no waiting row."""
        return self.choice.awaits_new_rows() and self.may_read_on()

    def give_lone(self, group: LoneGroup) -> None:
        """As `give`, for messages outside of batches."""
        member, count = group.member, len(group.offsets)
        assert member is not None, "messages that wait have no consumer"
        if self.waiting:
            self.waiting.difference_update(BitMap64(group.offsets))
        member.pending.add_lone(group.offsets, group.slots)
        member.permits -= count
        member.messages_per_part = 1 + (member.messages_per_part - 1) * _OLD_SIZE_SHARE**count
        self.sent.note_lone(group.offsets)
        self.unacked.sent(member, count, count)
        self.choice.note_lone_pending(group)

    def receiver_of(self, part: BatchPart) -> Member | None:
        """The consumer that gets the part; None if the part cannot be sent now. Other rows with the
        same entry may be pending at that consumer (a merge gave the batch other bounds): an id
        without a set would acknowledge both, so the part waits."""
        member = None if self.unacked.is_blocked else self.choice.receiver_of(part)
        if member is None:
            return None
        entry = part.ranges[0][0] if member.takes_rows else part.offset
        return None if entry in member.pending else member

    def give(self, member: Member, part: BatchPart, permits: int) -> None:
        """Note that the part is sent to the consumer, and takes `permits` of its permits."""
        assert part.offset not in member.pending, "a batch is pending in one part at a consumer"
        if self.waiting:
            for lo, hi in part.ranges:
                self.waiting.remove_range(lo, hi)
        member.pending[part.offset] = part
        member.permits -= permits
        member.messages_per_part += _NEW_SIZE_SHARE * (max(1, permits) - member.messages_per_part)
        self.sent.note(part.offset, part.messages)
        if part.is_masked:
            self.sent.masked.add(part.offset)
        if part.is_masked or part.is_cut:
            self.memory.changed()
        self.unacked.sent(member, part.unacked, 1)
        self.choice.note_pending(member, part)

    def wait(self, part: BatchPart) -> None:
        """Let the rows of the part wait: they were read, and cannot be sent now."""
        for lo, hi in part.ranges:
            self.waiting.add_range(lo, hi)
        self.choice.note_waiting(part)
        self.memory.changed()

    def _bytes(self) -> int:
        self.sent.forget_below(self.acks.mark)
        self.choice.forget_below(self.acks.mark)
        return bytes_of(self.waiting) + self.sent.bytes + self.choice.bytes

    def wait_lone(self, slots: Mapping[int, int]) -> None:
        """As `wait`, for messages outside of batches with these offsets and slots (0: none)."""
        self.waiting.update(slots)
        self.choice.note_lone_waiting(slots)
        self.memory.changed()

    def drop(self, lo: int, hi: int) -> None:
        """No row of [lo, hi) waits any more: each is acknowledged, or does not exist any more."""
        if self.waiting and self.waiting.range_cardinality(lo, hi):
            self.waiting.remove_range(lo, hi)

    def passed(self, mark: int) -> None:
        """Note that all rows below `mark` were acknowledged, though not by the consumers."""
        self.drop(0, mark)
        self._begin(_passing(self, mark))

    # -- acknowledged, or given back -------------------------------------------------------------

    def redeliver(self, member: Member, offsets: Iterable[int] | None) -> None:
        """Let these parts wait to be sent again, as the consumer's client asks; None: all its
        parts. Parts that are not pending at this consumer are ignored."""
        asked = list(member.pending if offsets is None else dict.fromkeys(offsets))
        member.returns += 1
        self._begin(_returning(self, member, asked, is_asked=True))

    def acknowledge(
        self, asker: Member, message_id: MessageId, offset: int, end: int
    ) -> Iterator[bool]:
        """Acknowledge the messages that an id names, in steps, as Dispatcher.acknowledge; `offset`
        is that of the id's message, and the partition ends at `end`. A part at another consumer
        than the asker is acknowledged too. Raises Refusal if the message or its batch is not
        known."""
        entry = signed(message_id.entryId)
        if entry < 0 or offset >= end:
            raise never_sent(entry, end)
        if entry not in asker.pending:
            for _ in range(len(self.members) // MEMBERS_PER_STEP):
                yield False
        owner, sent = self._owner(asker, entry), self.sent
        part = None if owner is None else owner.pending[entry]
        messages = self.sent.message_count(entry) if part is None else part.messages
        if messages is None:
            messages = self._messages_at(entry)
        ranges = acknowledged_ranges(message_id, offset, messages, self.acks)
        is_masked = entry in self.sent.masked
        is_unknown = part is None and (is_masked or is_unclear(message_id, messages))
        if part is None and is_masked:
            ranges = []
        elif part is not None and part.is_masked:
            ranges = common(ranges, part.ranges)
        try:
            for lo, hi in ranges:
                yield hi <= end and self._acknowledge(lo, hi)
            if not ranges:
                yield False
        finally:
            if owner is not None and part is not None:
                if sent is self.sent:  # otherwise `forget` was called between two steps
                    self.update(owner, entry)
            elif self.sent.redeliveries and not self.acks.missing(entry, entry + (messages or 1)):
                self.sent.redeliveries.forget(entry, entry + 1)
        if is_unknown:
            raise not_sent(entry)

    def acknowledge_lone(self, asker: Member, entries: Iterable[int]) -> dict[int, int]:
        """Acknowledge those of the entries that are pending at the asker as messages outside of
        batches. Returns these, with their slots."""
        slots = asker.pending.take_lone(entries)
        self.acks.add_each(slots)
        self._forget_lone(asker, slots)
        return slots

    def _forget_lone(self, member: Member, slots: Mapping[int, int]) -> None:
        """Messages outside of batches, which were pending at the consumer, are acknowledged."""
        for entry in slots if self.sent.redeliveries else ():
            self.sent.redeliveries.forget(entry, entry + 1)
        self._count_taken(member, len(slots), len(slots))
        self.choice.note_lone_not_pending(slots.values())
        self._settle(member)

    def _owner(self, asker: Member, entry: int) -> Member | None:
        """The consumer at which the part with this entry in its id is pending. If a part with this
        entry was masked, several consumers may have such parts: then only the asker counts."""
        if entry in asker.pending:
            return asker
        if entry in self.sent.masked:
            return None
        return next((member for member in self.members if entry in member.pending), None)

    def _acknowledge(self, lo: int, hi: int) -> bool:
        has_moved = self.acks.add(lo, hi)
        self.drop(lo, hi)
        return has_moved

    def update(self, member: Member, entry: int) -> None:
        """Count the acknowledged rows of a pending part again."""
        part = member.pending.get(entry)
        if part is None:
            return
        unacked = sum(self.acks.missing_count(lo, hi) for lo, hi in part.ranges)
        if not unacked:
            self._take(member, part)
            if self.sent.redeliveries:
                self.sent.redeliveries.forget(entry, entry + 1)
        else:
            acked = part.unacked - unacked
            member.pending[entry] = part._replace(unacked=unacked)
            self.unacked.taken(member, acked, 0)
        self._settle(member)

    def _take(self, member: Member, part: BatchPart) -> None:
        del member.pending[part.offset]
        self._count_taken(member, part.unacked, 1)
        self.choice.note_not_pending(member, part)

    def _count_taken(self, member: Member, messages: int, parts: int) -> None:
        self.unacked.taken(member, messages, parts)
        if self.waiting:  # rows of the same keys may be sent now
            self.wake()

    def give_back(self, member: Member, entries: Sequence[int]) -> None:
        """Let the parts with these entries wait to be sent again; their redelivery counts stay."""
        slots = member.pending.take_lone(entries)
        self._count_taken(member, len(slots), len(slots))
        self.choice.note_lone_not_pending(slots.values())
        self.wait_lone({row: slots[row] for row in self.acks.missing_of(slots)})
        for part in map(member.pending.get, entries if len(slots) < len(entries) else ()):
            if part is None:
                continue
            self._take(member, part)
            ranges = [gap for lo, hi in part.ranges for gap in self.acks.missing(lo, hi)]
            if ranges:
                self.wait(part._replace(ranges=ranges, unacked=sum(hi - lo for lo, hi in ranges)))
        self._settle(member)
        self.wake()

    def _settle(self, member: Member) -> None:
        if self.unacked.settle(member):
            self.wake()


def _returning(
    sharing: Sharing, member: Member, entries: Sequence[int], *, is_asked: bool = False
) -> Iterator[None]:
    """Let the parts that are pending at the consumer wait to be sent again, in steps. `is_asked`:
    its client asks for that, so the redelivery counts rise."""
    for step in _in_steps(entries):
        pending = [entry for entry in step if entry in member.pending]
        for entry in pending if is_asked else ():
            sharing.sent.redeliveries.add(entry)
        sharing.give_back(member, pending)
        if step[-1] != entries[-1]:
            yield
    member.returns -= is_asked
    sharing.wake()


def _passing(sharing: Sharing, mark: int) -> Iterator[None]:
    """Take out what is pending below `mark`, in steps."""
    for member in list(sharing.members):
        entries = [entry for entry in member.pending if entry < mark]
        for step in _in_steps(entries):
            sharing._forget_lone(member, member.pending.take_lone(step))
            for entry in step:
                sharing.update(member, entry)
            if step[-1] != entries[-1]:
                yield


def _in_steps(entries: Sequence[int]) -> Iterator[Sequence[int]]:
    return (entries[at : at + STEP_PARTS] for at in range(0, len(entries), STEP_PARTS))
