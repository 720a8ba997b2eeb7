"""When the acknowledgements of a partition are written, and where to. Pure.

Always true: a receipt's write waits for no clock, unless no ledger can be made; other writes are
WRITE_EVERY_S apart; the metadata store gets a write only when a ledger begins or ends, or at a
limited rate (INLINE_EVERY_S, REFUSED_EVERY_S); so a partition in use costs it less than one write a
minute, and one that is not used nothing.
"""

from dataclasses import dataclass
from enum import Enum

from spark_ledger.topic.log.policies import OWN_ROLL_S_MAX

WRITE_EVERY_S = 1.0
INLINE_EVERY_S = 120.0
"""A change that comes so long after the last write of the node needs no ledger, if it is small."""
REFUSED_S = 10.0
"""How long, after a ledger could not be made or written, changes go into the node."""
REFUSED_EVERY_S = 2.0
IDLE_S = 120.0
"""A ledger without a write for that long is left."""
INLINE_BYTES_MAX = 32 << 10
LEDGER_ENTRIES_MAX = 500_000
ENTRIES_READ_MAX = 2_000
BYTES_READ_MAX = 2 << 20
"""What a reader of a ledger reads after its last snapshot, about: then another one is written."""


class AckStep(Enum):
    NOTHING = "nothing"
    APPEND = "append"  # the changes, to the open ledger
    SNAPSHOT = "snapshot"  # all states, to the open ledger
    NEW_LEDGER = "new ledger"  # all states to a new one, and its name into the node
    INLINE = "inline"  # all states into the node, which names no ledger then
    LEAVE = "leave"  # close the ledger, which the node goes on naming


@dataclass(frozen=True, slots=True)
class AckSituation:
    """Times by the loop's clock, of the last write, of the last write of the node, and of the last
    failure of a ledger. `dirty`: there is a change that is not durable; `urgent`: a receipt waits
    for it; `small`: the states fit into the node; `whole`: changes alone are not enough for it."""

    now_s: float
    written_s: float
    node_s: float
    refused_s: float
    dirty: bool
    urgent: bool
    small: bool
    open: bool = False
    full: bool = False
    long: bool = False
    whole: bool = False

    @property
    def is_refused(self) -> bool:
        return self.now_s < self.refused_s + REFUSED_S

    @property
    def write_at_s(self) -> float:
        """The soonest time for the next write."""
        soonest_s = float("-inf") if self.urgent else self.written_s + WRITE_EVERY_S
        if not self.open and self.is_refused:
            pause_s = REFUSED_EVERY_S if self.small else REFUSED_S
            return max(soonest_s, max(self.node_s, self.refused_s) + pause_s)
        return soonest_s


@dataclass(frozen=True, slots=True)
class AckLedgerSize:
    """Of an open ledger: its entries, and the entries and bytes since its last snapshot began,
    which has `snapshot_bytes`."""

    entries: int
    entries_since: int
    bytes_since: int
    snapshot_bytes: int
    opened_s: float
    fragments: int

    def is_full(self, now_s: float, fragments_max: int) -> bool:
        return (
            self.entries >= LEDGER_ENTRIES_MAX
            or now_s - self.opened_s >= OWN_ROLL_S_MAX
            or self.fragments >= fragments_max
        )

    @property
    def is_long(self) -> bool:
        """Whether a snapshot is due."""
        bytes_max = max(BYTES_READ_MAX, 2 * self.snapshot_bytes)
        return self.entries_since >= ENTRIES_READ_MAX or self.bytes_since >= bytes_max


def next_ack_step(now: AckSituation) -> AckStep:
    """The step to take now; the caller asks again at `next_ack_look_s`."""
    if now.dirty and now.now_s >= now.write_at_s:
        if now.open and not now.full:
            return AckStep.SNAPSHOT if now.long or now.whole else AckStep.APPEND
        is_seldom = not now.urgent and now.now_s >= now.node_s + INLINE_EVERY_S
        may_inline = now.small and not now.open and (now.is_refused or is_seldom)
        return AckStep.INLINE if may_inline else AckStep.NEW_LEDGER
    if now.open and not now.dirty and now.now_s >= now.written_s + IDLE_S:
        return AckStep.INLINE if now.small else AckStep.LEAVE
    return AckStep.NOTHING


def next_ack_look_s(now: AckSituation) -> float:
    """The time until which `next_ack_step` stays the same if nothing happens."""
    if now.dirty:
        return now.write_at_s
    return now.written_s + IDLE_S if now.open else float("inf")
