"""Which producers of a partition may send, wait or are fenced.

Always true: a partition never has two exclusive producers, or two producers of one name, at a time.
When a producer becomes exclusive, every earlier exclusive producer is fenced, even if it comes back
later. Nothing here reads a clock or a socket: the caller sends the fenced producers away, and
stores no more of their messages.
"""

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from spark_ledger.broker.wire.commands import AccessMode, Refusal, ServerError

EPOCH_BITS = 32
"""A producer's `topic_epoch` is the partition owner's epoch << EPOCH_BITS, plus the number of the
exclusive producer, counted from 1 under this owner."""


class Candidate(Protocol):
    """A producer that asks for admission. `epoch`: how often its client connected it: the same
    producer comes back on a new connection with a higher epoch. `topic_epoch` (EPOCH_BITS) rises
    with each exclusive producer of the partition; a new producer has 0 until it is admitted as
    exclusive."""

    name: str
    mode: AccessMode
    epoch: int
    topic_epoch: int

    @property
    def connection(self) -> object: ...


P = TypeVar("P", bound=Candidate)


@dataclass(frozen=True, slots=True)
class Admitted(Generic[P]):
    """The producer `may_send`, or waits until it is the only producer. `fenced`: the producers that
    the caller has to send away."""

    may_send: bool
    fenced: list[P]


class Admission(Generic[P]):
    """The producers of one partition of `topic`. `owner_epoch` is the epoch of the partition's
    owner, the broker that has this object."""

    def __init__(self, topic: str, owner_epoch: int) -> None:
        self.present: list[P] = []
        self.waiting: list[P] = []
        self._topic = topic
        self._first_epoch = owner_epoch << EPOCH_BITS
        self._exclusive_epoch = 0

    def blockers_of(self, producer: P) -> list[P]:
        """The producers on other connections because of which this producer would be refused, or
        would have to wait. Before the caller calls `admit`, it checks that these connections still
        live."""
        if producer.mode is AccessMode.EXCLUSIVE_WITH_FENCING:
            return []
        must_be_alone = is_exclusive(producer)
        blockers = []
        for other in self.present:
            has_same_name = other.name == producer.name
            is_later = producer.epoch > other.epoch
            blocks = not is_later if has_same_name else must_be_alone or is_exclusive(other)
            if blocks and other.connection is not producer.connection:
                blockers.append(other)
        return blockers

    def replace(self, producer: P) -> list[P]:
        """Take out and return the producers of the same name, which this producer replaces. Raises
        Refusal if the epoch of such a producer is not lower than this producer's."""
        present = self.present
        replaced = [other for other in (*present, *self.waiting) if other.name == producer.name]
        for other in replaced:
            if producer.epoch <= other.epoch:
                raise Refusal(
                    ServerError.PRODUCER_BUSY,
                    f"producer '{other.name}' is connected to topic {self._topic} already",
                )
        for producers in (self.present, self.waiting):
            producers[:] = [other for other in producers if other not in replaced]
        return replaced

    def admit(self, producer: P, producers_max: int | None = None) -> Admitted[P]:
        """Let the producer send or wait. Raises Refusal, for example if `producers_max` producers
        are present."""
        has_exclusive = any(map(is_exclusive, self.present))
        if self.is_fenced(producer):
            raise self.refusal_of_fenced(producer)
        if producer.mode is AccessMode.EXCLUSIVE_WITH_FENCING:
            fenced, self.present[:] = list(self.present), [producer]
            self._note_exclusive(producer)
            return Admitted(may_send=True, fenced=fenced)
        if producer.mode is AccessMode.WAIT_FOR_EXCLUSIVE and self.present:
            self.waiting.append(producer)
            return Admitted(may_send=False, fenced=[])
        if producer.mode is AccessMode.SHARED and has_exclusive:
            raise Refusal(
                ServerError.PRODUCER_BUSY, f"topic {self._topic} has an exclusive producer"
            )
        if producer.mode is AccessMode.EXCLUSIVE and self.present:
            other = "an exclusive" if has_exclusive else "another"
            raise Refusal(ServerError.PRODUCER_FENCED, f"topic {self._topic} has {other} producer")
        if producers_max is not None and len(self.present) >= producers_max:
            raise Refusal(
                ServerError.PRODUCER_BUSY,
                f"Topic {self._topic} reached max producers limit: {producers_max}",
            )
        self.present.append(producer)
        self._note_exclusive(producer)
        return Admitted(may_send=True, fenced=[])

    def remove(self, producer: P) -> None:
        for producers in (self.present, self.waiting):
            if producer in producers:
                producers.remove(producer)

    def take_next(self) -> P | None:
        """If no producer is present, return the producer that has waited longest. This producer is
        then in `present` and may send. If it is not in `present`, another producer has fenced it,
        and the caller sends it away."""
        if self.present or not self.waiting:
            return None
        following = self.waiting.pop(0)
        if not self.is_fenced(following):
            self.present.append(following)
            self._note_exclusive(following)
        return following

    def clear(self) -> list[P]:
        """Take out and return all producers, the waiting ones first."""
        producers = [*self.waiting, *self.present]
        self.waiting.clear()
        self.present.clear()
        return producers

    def is_fenced(self, producer: P) -> bool:
        """Whether the producer was exclusive, and another producer became exclusive later."""
        return 0 < producer.topic_epoch < self._exclusive_epoch

    def refusal_of_fenced(self, producer: P) -> Refusal:
        return Refusal(
            ServerError.PRODUCER_FENCED,
            f"another producer has taken topic {self._topic} from '{producer.name}'",
        )

    def _note_exclusive(self, producer: P) -> None:
        """If the producer is exclusive, fence all earlier exclusive producers. A fenced producer
        stays fenced when it comes back."""
        if not is_exclusive(producer):
            return
        if not producer.topic_epoch:
            producer.topic_epoch = max(self._exclusive_epoch, self._first_epoch) + 1
        self._exclusive_epoch = max(self._exclusive_epoch, producer.topic_epoch)


def is_exclusive(producer: Candidate) -> bool:
    return producer.mode is not AccessMode.SHARED
