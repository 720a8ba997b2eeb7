"""Topics: T1, T2, T3, T5."""

from typing import Any

from tests.simulation.ghost import Ghost
from tests.simulation.invariants.judge import invariant, require


@invariant("T1")
def a_commit_that_returned_is_in_the_log_once(
    ghost: Ghost, key: tuple[str, int], times: int
) -> None:
    """A commit that returned success is in every later fold, once."""
    require(times == 1, "T1", f"{key} returned success and is {times} times in the log")


@invariant("T2")
def a_version_contributes_rows_at_most_once(ghost: Ghost, key: tuple[str, int], times: int) -> None:
    """Each (transaction key, version) contributes rows at most once."""
    require(times <= 1, "T2", f"{key} contributes rows {times} times")


@invariant("T3")
def an_offset_is_one_row_for_ever(
    ghost: Ghost, known: dict[Any, Any], place: tuple[str, int, int], row: Any
) -> None:
    """Offset -> row is a function for ever, per topic id."""
    first = known.setdefault(place, row)
    require(first == row, "T3", f"{place} read as {row!r}, was {first!r}")


@invariant("T3")
def offsets_are_dense(ghost: Ghost, partition: int, offsets: list[int], end: int) -> None:
    """Offsets of a partition are 0 .. end-1, each once, in order."""
    require(
        offsets == list(range(end)),
        "T3",
        f"partition {partition} ends at {end} and reads as {len(offsets)} offsets {offsets[-5:]}",
    )


@invariant("T5")
def every_row_read_was_committed(ghost: Ghost, committed: bool, row: Any) -> None:
    """No reader returns a row that is in no commit: never one of a failed, aborted or condemned
    attempt."""
    require(committed, "T5", f"row {row!r} was read and is in no commit")
