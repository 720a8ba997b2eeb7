"""Which slots keep an entry, when enough of them have responded, and which adds may be confirmed.

A slot is a position in the ensemble of E bookies. Nothing in this file depends on time or messages.

Always true of quorums: a write set is Qw consecutive slots (mod E), beginning at the entry's slot.
The order of the slots is a preference of reads; no rule depends on it. The predicates are those of
the table of quorums in docs/protocol.md: "fewer than Qa members of every write set are silent" is
the same as "at least Qw - Qa + 1 members of every write set responded".

Always true of pending adds:
- entry ids are consecutive; an add is confirmed only when its ack quorum is met by the present
  owners of its slots, every lower one is confirmed, and no ensemble change is in flight;
- when slots change their owner, their acknowledgements are dropped from every pending add before
  any add is confirmed: an acknowledgement of a bookie that the record no longer names protects no
  entry;
- copies of a confirmed add are still counted, until all Qw bookies have acknowledged it or failed.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any, Self

from bookie_server.api.entry import Buffer
from bookie_server.api.status import Meaning
from spark_ledger.metadata.ledger_record import LedgerRecord


@dataclass(frozen=True, slots=True)
class Quorum:
    """E, Qw and Qa of a ledger. Always E >= Qw >= Qa >= 1."""

    ensemble_size: int
    write_quorum: int
    ack_quorum: int

    def __post_init__(self) -> None:
        if not self.ensemble_size >= self.write_quorum >= self.ack_quorum >= 1:
            raise ValueError(
                f"ensemble_size {self.ensemble_size} >= write_quorum {self.write_quorum}"
                f" >= ack_quorum {self.ack_quorum} >= 1 does not hold"
            )

    @classmethod
    def of(cls, record: LedgerRecord) -> Self:
        """The quorum of a ledger."""
        return cls(record.ensemble_size, record.write_quorum, record.ack_quorum)

    @property
    def negatives_needed(self) -> int:
        """How many members of a write set must respond that they never acknowledged an entry, to
        prove that it was not acknowledged."""
        return self.write_quorum - self.ack_quorum + 1

    def write_set(self, entry_id: int) -> tuple[int, ...]:
        """The slots that keep an entry; reads prefer the first."""
        first = entry_id % self.ensemble_size
        return tuple((first + i) % self.ensemble_size for i in range(self.write_quorum))

    def write_masks(self) -> tuple[int, ...]:
        """For each `entry_id % ensemble_size` its write set as a bit mask over slots."""
        return _write_masks(self)

    def is_acked(self, acks: int) -> bool:
        """Whether the slots in the mask `acks`, all of one write set, are Qa or more."""
        return acks.bit_count() >= self.ack_quorum

    def covers_ensemble(self, silent: int) -> bool:
        """Whether the slots *not* in the mask `silent` cover the ensemble: fewer than Qa members
        of every write set are silent, so the silent bookies alone cannot acknowledge an entry."""
        return all((mask & silent).bit_count() < self.ack_quorum for mask in self.write_masks())

    def is_writable(self, failed: int) -> bool:
        """Whether every write set keeps at least Qa members outside the mask `failed`."""
        return all(self.is_acked(mask & ~failed) for mask in self.write_masks())

    def covering_slots(self, first_slot: int) -> tuple[int, ...]:
        """Few slots, beginning at `first_slot`, that together keep a copy of every entry."""
        return tuple(
            (first_slot + step) % self.ensemble_size
            for step in range(0, self.ensemble_size, self.write_quorum)
        )


@lru_cache(maxsize=64)
def _write_masks(quorum: Quorum) -> tuple[int, ...]:
    slots = range(quorum.ensemble_size)
    return tuple(sum(1 << slot for slot in quorum.write_set(entry)) for entry in slots)


class Verdict(Enum):
    """What the responses to a recovery read decide about one entry."""

    RECOVER = "recover"  # a bookie has it
    ABSENT = "absent"  # enough bookies never had it: it was never acknowledged
    WAIT = "wait"  # outstanding responses may decide it
    UNDECIDABLE = "undecidable"  # all have responded, and it may have been acknowledged or not


def recovery_verdict(quorum: Quorum, responses: list[Meaning | None]) -> Verdict:
    """Judge the responses of an entry's write set; None stands for a response that is outstanding.

    `negatives_needed` negatives prove that the entry is absent. If fewer are negative and the
    others are TORN (they lack the entry after an unclean end), the entry is absent only if the
    whole write set has responded (docs/protocol.md, "Limbo").
    """
    if Meaning.POSITIVE in responses:
        return Verdict.RECOVER
    if responses.count(Meaning.NEGATIVE) >= quorum.negatives_needed:
        return Verdict.ABSENT
    if None in responses:
        return Verdict.WAIT
    return Verdict.UNDECIDABLE if Meaning.UNKNOWN in responses else Verdict.ABSENT


@dataclass(slots=True, eq=False)
class PendingAdd:
    """One entry from its append to its last response, encoded for all bookies (`packed`). The
    future `waiter`, of asyncio or concurrent.futures, gets the outcome. `acks` is the mask of the
    slots that acknowledged the entry; `sends` counts the requests without a response."""

    entry_id: int
    packed: Sequence[Buffer]
    size: int
    cumulative_bytes: int
    cumulative_rows: int
    appended_at: float
    waiter: Any = None
    acks: int = 0
    sends: int = 0
    confirmed: bool = False


class PendingAdds:
    """The queue of adds that are not confirmed, in id order."""

    def __init__(self, quorum: Quorum, last_add_confirmed: int) -> None:
        self.quorum = quorum
        self.last_add_confirmed = last_add_confirmed
        self.change_in_flight = False
        self._queue: deque[PendingAdd] = deque()
        self._masks = quorum.write_masks()

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[PendingAdd]:
        return iter(self._queue)

    @property
    def head(self) -> PendingAdd | None:
        return self._queue[0] if self._queue else None

    def write_mask(self, entry_id: int) -> int:
        """The write set of an entry as a bit mask over slots."""
        return self._masks[entry_id % self.quorum.ensemble_size]

    def push(self, add: PendingAdd) -> None:
        """Queue the next entry; its id must follow the last id."""
        last = self._queue[-1].entry_id if self._queue else self.last_add_confirmed
        assert add.entry_id == last + 1, f"entry {add.entry_id} after {last}"
        self._queue.append(add)

    def note_acks(self, adds: Sequence[PendingAdd], slot: int) -> bool:
        """Note that the present owner of `slot` acknowledged these adds. Returns whether `confirm`
        can confirm an add now."""
        bit = 1 << slot
        for add in adds:
            add.acks |= bit
        if self.change_in_flight or not self._queue:
            return False
        head = self._queue[0]
        return head.acks.bit_count() >= self.quorum.ack_quorum and head in adds

    def drop_acks(self, slots: int) -> None:
        """Drop the acknowledgements by the old owners of the slots in the mask `slots`."""
        for add in self._queue:
            add.acks &= ~slots

    def without_ack_of(self, slot: int) -> list[PendingAdd]:
        """Pending adds that the owner of `slot` should keep and has not acknowledged, in id
        order."""
        bit = 1 << slot
        return [
            add for add in self._queue if self.write_mask(add.entry_id) & bit and not add.acks & bit
        ]

    def confirm(self) -> list[PendingAdd]:
        """Take the adds that may be confirmed from the head of the queue, and set
        last_add_confirmed to the last of them."""
        confirmed: list[PendingAdd] = []
        if self.change_in_flight:
            return confirmed
        queue, need = self._queue, self.quorum.ack_quorum
        while queue and queue[0].acks.bit_count() >= need:
            add = queue.popleft()
            assert add.entry_id == self.last_add_confirmed + 1
            self.last_add_confirmed = add.entry_id
            add.confirmed = True
            confirmed.append(add)
        return confirmed

    def fail_all(self) -> list[PendingAdd]:
        """Take out every pending add, in id order: none of them will be confirmed."""
        failed = list(self._queue)
        self._queue.clear()
        return failed
