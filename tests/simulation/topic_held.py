"""Rows that subscriptions hold, beside what replaces all rows of a topic."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tests.simulation import invariants
from tests.simulation.ghost import Ghost

if TYPE_CHECKING:
    from tests.simulation.topic_ghost import LogGhost


def held_rows_stay(
    ghost: Ghost, log: "LogGhost", ends: Mapping[int, int], since_s: float, *, asked: bool
) -> None:
    """An overwrite takes away rows up to `ends`, of the log as it was before: none that a
    subscription had since `since_s`, unless that was asked for."""
    if asked:
        ghost.meet("held rows replaced on demand")
        return
    for held in log.state.partitions:
        if held.start_offset == ends[held.number]:
            continue
        for name, subscription in log.subscriptions.items():
            at = subscription.at_most(held.number, since_s)
            invariants.no_held_row_is_replaced(ghost, name, held.number, ends[held.number], at)
