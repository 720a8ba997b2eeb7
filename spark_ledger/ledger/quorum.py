"""Quorum arithmetic: which slots keep an entry, and when enough of them have spoken.

Always true: a write set is `write_quorum` consecutive slots (mod `ensemble_size`) beginning at
the entry's slot; its order is only a preference, the set is what votes. Nothing here knows about
bookies, time or messages. The predicates are those of the protocol's table of quorums: fewer than
Qa silent members in every write set is the same as Qw - Qa + 1 heard in each.
"""

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from bookie_server.api.status import Meaning


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

    @property
    def negatives_needed(self) -> int:
        """So many negatives of one write set prove that the entry was never acknowledged."""
        return self.write_quorum - self.ack_quorum + 1

    def write_set(self, entry_id: int) -> tuple[int, ...]:
        """The slots that keep an entry, in order of read preference."""
        first = entry_id % self.ensemble_size
        return tuple((first + i) % self.ensemble_size for i in range(self.write_quorum))

    def write_masks(self) -> tuple[int, ...]:
        """For each `entry_id % ensemble_size` its write set as a bit mask over slots."""
        return _write_masks(self)

    def acked(self, acks: int) -> bool:
        """Whether the slots in the mask `acks`, all of one write set, make an ack quorum."""
        return acks.bit_count() >= self.ack_quorum

    def covered(self, silent: int) -> bool:
        """Whether the slots *not* in the mask `silent` cover the ensemble: fewer than Qa members
        of every write set are silent, so no entry can be acknowledged, or have been, unseen."""
        return all((mask & silent).bit_count() < self.ack_quorum for mask in self.write_masks())

    def writable(self, failed: int) -> bool:
        """Whether every write set keeps at least Qa members outside the mask `failed`."""
        return all(self.acked(mask & ~failed) for mask in self.write_masks())

    def cover(self, first_slot: int) -> tuple[int, ...]:
        """Few slots, beginning at `first_slot`, that between them keep a copy of every entry."""
        return tuple(
            (first_slot + step) % self.ensemble_size
            for step in range(0, self.ensemble_size, self.write_quorum)
        )


@lru_cache(maxsize=64)
def _write_masks(quorum: Quorum) -> tuple[int, ...]:
    slots = range(quorum.ensemble_size)
    return tuple(sum(1 << slot for slot in quorum.write_set(entry)) for entry in slots)


class Verdict(Enum):
    """What the responses to a recovery read say about one entry."""

    RECOVER = "recover"  # somebody has it
    ABSENT = "absent"  # so many never had it that it was never acknowledged
    WAIT = "wait"  # responses are outstanding and may decide it
    UNDECIDABLE = "undecidable"  # all have responded and it may or may not have been acknowledged


def recovery_verdict(quorum: Quorum, responses: list[Meaning | None]) -> Verdict:
    """Judge the responses of an entry's write set; None is a response still outstanding.

    Negatives prove by their number. TORN (absent, after a torn tail) proves only together with
    all the others: once the whole write set has responded, nobody has the entry and nobody else
    may have it (docs/protocol.md, "Limbo").
    """
    if Meaning.POSITIVE in responses:
        return Verdict.RECOVER
    if responses.count(Meaning.NEGATIVE) >= quorum.negatives_needed:
        return Verdict.ABSENT
    if None in responses:
        return Verdict.WAIT
    return Verdict.UNDECIDABLE if Meaning.UNKNOWN in responses else Verdict.ABSENT
