"""Which producers of a partition may send, wait or are fenced.

Always true: two exclusive producers, or two of one name, are never there together; a producer that
was exclusive before another one is fenced, also when it comes back. Nothing here reads a clock or a
socket: the caller sends the fenced producers away, and stores nothing more of them.
"""

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from spark_ledger.broker.wire.commands import AccessMode, Refusal, ServerError

EPOCH_BITS = 32  # of an epoch of exclusive producers, below the owner's


class Candidate(Protocol):
    """A producer, as its admission is decided. `epoch`: how often its client connected it.
    `topic_epoch`: of an exclusive one which of those that followed each other it is; 0 of a new
    one, until it is admitted."""

    name: str
    mode: AccessMode
    epoch: int
    topic_epoch: int

    @property
    def connection(self) -> object: ...


P = TypeVar("P", bound=Candidate)


@dataclass(frozen=True, slots=True)
class Admitted(Generic[P]):
    """A producer `may_send`, or waits until it is the only one. `fenced` are those that go."""

    may_send: bool
    fenced: list[P]


class Admission(Generic[P]):
    """Of one partition of `topic`, in the hands of an owner of that epoch."""

    def __init__(self, topic: str, owner_epoch: int) -> None:
        self.there: list[P] = []
        self.waiting: list[P] = []
        self._topic = topic
        self._first_epoch = owner_epoch << EPOCH_BITS
        self._exclusive_epoch = 0

    def barring(self, producer: P) -> list[P]:
        """Those on other connections because of which it cannot come, or has to wait."""
        if producer.mode is AccessMode.EXCLUSIVE_WITH_FENCING:
            return []
        alone = producer.mode is not AccessMode.SHARED
        barring = []
        for other in self.there:
            same = other.name == producer.name
            bars = producer.epoch <= other.epoch if same else alone or is_exclusive(other)
            if bars and other.connection is not producer.connection:
                barring.append(other)
        return barring

    def replace(self, producer: P) -> list[P]:
        """Take out those of its name, which it replaces. Raises Refusal where one of them is not
        the same producer that comes again, but another of its name."""
        replaced = [other for other in (*self.there, *self.waiting) if other.name == producer.name]
        for other in replaced:
            if producer.epoch <= other.epoch:
                raise Refusal(
                    ServerError.PRODUCER_BUSY,
                    f"producer '{other.name}' is connected to topic {self._topic} already",
                )
        for producers in (self.there, self.waiting):
            producers[:] = [other for other in producers if other not in replaced]
        return replaced

    def admit(self, producer: P) -> Admitted[P]:
        """Raises Refusal."""
        exclusive = any(map(is_exclusive, self.there))
        if self.is_fenced(producer):
            raise self.fenced(producer)
        if producer.mode is AccessMode.EXCLUSIVE_WITH_FENCING:
            fenced, self.there[:] = list(self.there), [producer]
            self._note_exclusive(producer)
            return Admitted(True, fenced)
        if producer.mode is AccessMode.WAIT_FOR_EXCLUSIVE and self.there:
            self.waiting.append(producer)
            return Admitted(False, [])
        if producer.mode is AccessMode.SHARED and exclusive:
            raise Refusal(
                ServerError.PRODUCER_BUSY, f"topic {self._topic} has an exclusive producer"
            )
        if producer.mode is AccessMode.EXCLUSIVE and self.there:
            raise Refusal(
                ServerError.PRODUCER_FENCED,
                f"topic {self._topic} has {'an exclusive' if exclusive else 'another'} producer",
            )
        self.there.append(producer)
        self._note_exclusive(producer)
        return Admitted(True, [])

    def remove(self, producer: P) -> None:
        for producers in (self.there, self.waiting):
            if producer in producers:
                producers.remove(producer)

    def following(self) -> P | None:
        """The producer that waited longest, once no other is there. It is there now, unless it was
        fenced while it waited: then the caller sends it away."""
        if self.there or not self.waiting:
            return None
        following = self.waiting.pop(0)
        if not self.is_fenced(following):
            self.there.append(following)
            self._note_exclusive(following)
        return following

    def clear(self) -> list[P]:
        """Take all out, those that wait first."""
        producers = [*self.waiting, *self.there]
        self.waiting.clear()
        self.there.clear()
        return producers

    def is_fenced(self, producer: P) -> bool:
        """Whether another has been the only one since it was."""
        return 0 < producer.topic_epoch < self._exclusive_epoch

    def fenced(self, producer: P) -> Refusal:
        return Refusal(
            ServerError.PRODUCER_FENCED,
            f"another producer has taken topic {self._topic} from '{producer.name}'",
        )

    def _note_exclusive(self, producer: P) -> None:
        """It is the only one from now on: those before it are fenced, also where they come back."""
        if not is_exclusive(producer):
            return
        if not producer.topic_epoch:
            producer.topic_epoch = max(self._exclusive_epoch, self._first_epoch) + 1
        self._exclusive_epoch = max(self._exclusive_epoch, producer.topic_epoch)


def is_exclusive(producer: Candidate) -> bool:
    return producer.mode is not AccessMode.SHARED
