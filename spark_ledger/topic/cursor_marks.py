"""What a subscription holds against retention: its lowest position of a grace period ago. Pure.

A mark says where a subscription was at a time, by the store's clock (the mark node's own): one is
made with the subscription, one whenever it goes back, one now and then by who asks what is held.
Always true: between two marks a subscription only goes forward; so what it may have been at since
`now - grace` is never below the newest mark that is older than that, the marks after it and where
it is now, and the lowest of these is held (hazard 38). Older marks are forgotten, never that one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

from spark_ledger.topic.subscription_moves import earlier
from spark_ledger.topic.subscription_records import Positions

GRACE_MS = 3_600_000
MARKS_PER_GRACE = 4


@dataclass(frozen=True, slots=True)
class Mark:
    """Where the subscription was at `created_ms`, by the store's clock."""

    number: int
    created_ms: int
    positions: Positions


@dataclass(frozen=True, slots=True)
class Held:
    """The lowest positions of the grace period; a partition left out may have been anywhere.
    `forget` are marks that count no more, `add` the number of a mark to make now (None: none)."""

    positions: Positions
    forget: tuple[int, ...] = ()
    add: int | None = None


def held(marks: Sequence[Mark], floor: Positions, now_ms: int, grace_ms: int) -> Held:
    """`marks` as they were made, `floor` where the subscription is or was lately, `now_ms` by the
    store's clock. Without a mark nothing is known of the time before, and all is held."""
    if not marks:
        return Held({}, add=0)
    old = [at for at, mark in enumerate(marks) if mark.created_ms <= now_ms - grace_ms]
    base = old[-1] if old else 0
    counted = [mark.positions for mark in marks[base:]]
    newest = marks[-1]
    due = now_ms - newest.created_ms >= grace_ms // MARKS_PER_GRACE
    add = newest.number + 1 if due and dict(newest.positions) != dict(floor) else None
    return Held(
        reduce(earlier, counted, floor),
        tuple(mark.number for mark in marks[:base]),
        add,
    )


def needed_before_going_back(marks: Sequence[Mark], positions: Positions) -> int | None:
    """The number of the mark that a step back to `positions` must make, None if the newest mark
    says as much already."""
    newest = marks[-1]
    lowest = earlier(newest.positions, positions)
    return None if lowest == dict(newest.positions) else newest.number + 1
