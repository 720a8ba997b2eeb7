"""When the acknowledgements of a partition are written, and to which place. Pure.

Always true: a write for a receipt is made at once, unless no ledger can be made; other writes are
WRITE_EVERY_S apart. The metadata store gets a write only when a ledger begins or ends, or at a
limited rate (INLINE_EVERY_S, REFUSED_EVERY_S). So a partition in use costs the store less than one
write a minute, and a partition without use costs nothing.
"""

from dataclasses import dataclass
from enum import Enum

from spark_ledger.ledger.recovery import TAIL_ENTRIES
from spark_ledger.topic.log.policies import ROLL_AGE_S_MAX

WRITE_EVERY_S = 1.0
INLINE_EVERY_S = 120.0
"""A change needs no ledger if the last write of the node is this long ago and the states are small.
"""
REFUSED_S = 10.0
"""How long, after a ledger could not be made or written, changes go into the node."""
REFUSED_EVERY_S = 2.0
IDLE_S = 120.0
"""A ledger without a write for this time is left: later writes go elsewhere."""
INLINE_BYTES_MAX = 32 << 10
LEDGER_ENTRIES_MAX = 500_000
ENTRIES_READ_MAX = 2_000
BYTES_READ_MAX = 2 << 20
"""After about this many entries or bytes since the last snapshot, the next snapshot is written. So
these numbers bound what a reader of the ledger reads."""
TAIL_SNAPSHOTS = 4
"""A write is a snapshot as soon as the last one is not among the TAIL_ENTRIES that come with the
fence of a recovery, and the changes since are as large as this many snapshots."""


@dataclass(slots=True)
class AckTimes:
    """By the loop's clock, the times of the last write, of the last write of the node, and of the
    last failure of a ledger."""

    written_s: float = float("-inf")
    node_s: float = float("-inf")
    refused_s: float = float("-inf")


class AckStep(Enum):
    NOTHING = "nothing"
    APPEND = "append"  # append the changes to the open ledger
    SNAPSHOT = "snapshot"  # append all states to the open ledger
    NEW_LEDGER = "new ledger"  # append all states to a new ledger, and write its id into the node
    INLINE = "inline"  # write all states into the node, which then names no ledger
    LEAVE = "leave"  # close the ledger; the node still names it


@dataclass(frozen=True, slots=True)
class AckSituation:
    """What `next_ack_step` decides by. The times are those of AckTimes. `dirty`: a change is not
    durable.
    `urgent`: a receipt waits for this change. `small`: the states fit into the node. `open`: there
    is an open ledger; `full`: it takes no more entries; `long`: a snapshot is due. `whole`: the
    change needs a snapshot."""

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
        """The earliest time for the next write."""
        soonest_s = float("-inf") if self.urgent else self.written_s + WRITE_EVERY_S
        if not self.open and self.is_refused:
            pause_s = REFUSED_EVERY_S if self.small else REFUSED_S
            return max(soonest_s, max(self.node_s, self.refused_s) + pause_s)
        return soonest_s


@dataclass(frozen=True, slots=True)
class AckLedgerSize:
    """The size of an open ledger: its entries, the entries and bytes since the begin of its last
    snapshot, and the bytes of this snapshot."""

    entries: int
    entries_since: int
    bytes_since: int
    snapshot_bytes: int
    opened_s: float
    fragments: int

    def is_full(self, now_s: float, fragments_max: int) -> bool:
        return (
            self.entries >= LEDGER_ENTRIES_MAX
            or now_s - self.opened_s >= ROLL_AGE_S_MAX
            or self.fragments >= fragments_max
        )

    @property
    def is_long(self) -> bool:
        """Whether a snapshot is due."""
        is_small = self.bytes_since >= TAIL_SNAPSHOTS * self.snapshot_bytes
        if self.entries_since >= TAIL_ENTRIES and is_small:
            return True
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
    """The time until which `next_ack_step` does not change if nothing happens."""
    if now.dirty:
        return now.write_at_s
    return now.written_s + IDLE_S if now.open else float("inf")
