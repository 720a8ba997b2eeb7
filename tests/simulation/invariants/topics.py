"""Topics: T1, T2, T3, T4, T5, T6, T14."""

from typing import Any

from tests.simulation.ghost import Ghost, LedgerGhost
from tests.simulation.invariants.judge import invariant, require


@invariant("T1")
def a_commit_that_returned_is_in_the_log_once(
    ghost: Ghost, key: tuple[str, int], times: int
) -> None:
    """A commit that returned success is in every later fold, once."""
    require(times == 1, "T1", f"{key} returned success and is {times} times in the log")


@invariant("T1")
def what_was_committed_is_all_there(ghost: Ghost, attempt: str, there: int, rows: int) -> None:
    """Every row of a committed task attempt is in the final fold, once."""
    require(there == rows, "T1", f"attempt {attempt}: {there} of {rows} committed rows")


@invariant("T2")
def success_is_of_ones_own_or_earlier_rows(
    ghost: Ghost, run: str, author: str, later: bool
) -> None:
    """A success or no-op of a run means that its own rows or those of an earlier run are there."""
    require(not later, "T2", f"{run} was told success of the rows of {author}, which began later")


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


@invariant("T3")
def a_tasks_rows_keep_their_order(ghost: Ghost, partition: int, before: int, row: int) -> None:
    """In a partition the rows of one task attempt come in the order it wrote them."""
    require(row > before, "T3", f"partition {partition}: row {row} of a task after its {before}")


@invariant("T4")
def what_a_commit_names_is_there(ghost: Ghost, ledger_id: int, deleted: bool) -> None:
    """No ledger reachable from a fold is ever deleted, before or after its commit."""
    require(not deleted, "T4", f"ledger {ledger_id} is in a commit and was deleted")


@invariant("T5")
def every_row_read_was_committed(ghost: Ghost, committed: bool, row: Any) -> None:
    """No reader returns a row that is in no commit: never one of a failed, aborted or condemned
    attempt."""
    require(committed, "T5", f"row {row!r} was read and is in no commit")


@invariant("T6")
def what_is_committed_was_acked(ghost: Ghost, ledger: LedgerGhost, last_entry: int) -> None:
    """At the commit every entry in every range was acked to its writer; a later (or earlier)
    CLOSED.last_entry >= the range's end."""
    what = f"ledger {ledger.ledger_id} entry {last_entry} was committed"
    require(last_entry <= ledger.acked, "T6", f"{what}, acked is {ledger.acked}")
    end = ledger.record.last_entry
    require(end is None or last_entry <= end, "T6", f"{what}, CLOSED at {end}")


@invariant("T14")
def every_committer_ends(ghost: Ghost, what: str, done: bool) -> None:
    """Liveness: every creation and every batch is committed within a bounded number of runs."""
    require(done, "T14", f"{what} was not committed")
