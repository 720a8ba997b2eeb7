"""When a cursor writes, and where to: into its record or its ledger. Pure.

Always true: writes are a second apart at least; who moves seldom keeps no ledger (its position is
in the record), so a thousand queries that trigger every two minutes hold none open; what is small
is brought into the record now and then, so that who does not read the ledger is not far behind.
"""

from dataclasses import dataclass
from enum import Enum

WRITE_EVERY_S = 1.0
OFTEN_S = 30.0
"""A write that comes sooner after the last one goes to a ledger."""
IDLE_S = 120.0
"""A ledger without a write for that long is left. OFTEN_S is less: else who moves regularly would
open and leave a ledger with every write."""
FLOOR_EVERY_S = 300.0


class Step(Enum):
    NOTHING = "nothing"
    INLINE = "inline"  # into the record, which names no ledger then
    FLOOR = "floor"  # into the record, which goes on naming the ledger
    APPEND = "append"  # to the ledger at hand
    NEW_LEDGER = "new ledger"  # to another one, and its name into the record
    LEAVE = "leave"  # close the ledger, whose last entry says where the cursor is


@dataclass(frozen=True, slots=True)
class Situation:
    """Times by the loop's clock. `dirty`: there is a position that is not durable; `behind`: the
    record's floor is not the position; `small`: the position fits into the record; `refused`: no
    ledger could be had lately; `open` and `full` of the ledger at hand."""

    now_s: float
    written_s: float
    floor_s: float
    dirty: bool
    behind: bool
    small: bool
    refused: bool = False
    open: bool = False
    full: bool = False


def next_step(now: Situation) -> Step:
    """What to do now; at `next_look_s` it is to be asked again."""
    seldom = now.refused or (not now.open and now.now_s >= now.written_s + OFTEN_S)
    if now.open and now.small and now.behind and now.now_s >= now.floor_s + FLOOR_EVERY_S:
        return Step.INLINE if now.full else Step.FLOOR
    if now.dirty and now.open and not now.full:
        return Step.APPEND
    if now.dirty:
        return Step.INLINE if now.small and seldom else Step.NEW_LEDGER
    if now.open and now.now_s >= now.written_s + IDLE_S:
        return Step.INLINE if now.small else Step.LEAVE
    return Step.NOTHING


def next_look_s(now: Situation) -> float:
    """Until when `next_step` stays as it is if nothing happens; a write's pause has passed."""
    soonest_s = now.written_s + WRITE_EVERY_S
    if now.dirty:
        return soonest_s
    if not now.open:
        return float("inf")
    idle_s = now.written_s + IDLE_S
    floor_s = now.floor_s + FLOOR_EVERY_S if now.small and now.behind else idle_s
    return max(soonest_s, min(idle_s, floor_s))
