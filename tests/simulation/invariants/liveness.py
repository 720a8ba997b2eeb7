"""After faults stop, within a stated bound: 34, 35, 36, 37; and that a run repeats: 33."""

from tests.simulation.ghost import Ghost, LedgerGhost
from tests.simulation.invariants.judge import invariant, require


@invariant("33")
def the_same_seed_gives_the_same_run(
    ghost: Ghost, seed: int, first: tuple[str, int], second: tuple[str, int]
) -> None:
    """A second run of the same seed gives the same trace hash (and number of steps)."""
    require(first == second, "33", f"seed {seed} gave {first} and then {second}")


@invariant("34", over_budget=True)
def everything_under_way_ends(ghost: Ghost, waiting: list[str], within_s: float) -> None:
    """Every add, read, open, close and long poll completes or fails with a reason."""
    require(not waiting, "34", f"not over {within_s} s after healing: {waiting}")


@invariant("34")
def a_healthy_cluster_takes_what_is_pending(
    ghost: Ghost, ledger_id: int, entry_id: int, healthy_s: float, bound_s: float
) -> None:
    """An add that times out as a whole although every bookie has answered for longer than
    `bound_s` was waiting for nothing: it hung."""
    require(
        healthy_s <= bound_s,
        "34",
        f"ledger {ledger_id} entry {entry_id} timed out {healthy_s:.1f} s after all was well",
    )


@invariant("34")
def a_waiting_reader_is_told(ghost: Ghost, what: str, took_s: float, bound_s: float) -> None:
    """A reader that waits for an open ledger hears of what is confirmed once it is announced, and
    of the end, wherever in the ensemble the announcement went."""
    require(
        took_s <= bound_s,
        "34",
        f"a waiting reader was told of {what} after {took_s:.1f} s, not {bound_s} s",
    )


@invariant("34")
def a_core_is_enough(ghost: Ghost, took_s: float, bound_s: float, problem: str) -> None:
    """Where ways stay cut for ever beside a core of bookies that every ensemble fits into, whatever
    is begun ends well, within the time-outs that it meets."""
    require(
        took_s <= bound_s and not problem,
        "34",
        f"beside {[*ghost.cut_off]}, cut off for ever, it took {took_s:.1f} s to write,"
        f" close and read a ledger, at most {bound_s:.1f} s are allowed: {problem}",
    )


@invariant("35")
def every_ledger_can_be_closed(
    ghost: Ghost, ledger: LedgerGhost, error: BaseException | None, within_s: float
) -> None:
    """No ledger stays IN_RECOVERY if coverage is reachable, as it is after healing."""
    require(
        error is None,
        "35",
        f"ledger {ledger.ledger_id} after healing, for {within_s} s: {error!r}",
    )


@invariant("36")
def a_hung_bookie_blocks_nothing(
    ghost: Ghost, what: str, took_s: float, bound_s: float, failure: BaseException | None
) -> None:
    """One hung (not dead) bookie blocks nothing past its time-out: what needs no answer of it
    succeeds (`failure` is None), within the time-outs that it meets one after the other."""
    require(
        took_s <= bound_s and failure is None,
        "36",
        f"{what} with one bookie hung took {took_s:.1f} s, at most {bound_s:.1f} s are allowed:"
        f" {failure!r}",
    )


@invariant("37")
def what_is_in_limbo_is_repaired(ghost: Ghost, left: list[str], within_s: float) -> None:
    """Closed ledgers return to whole copies where a bookie may have lost some, and the lists of
    what is in limbo drain."""
    require(not left, "37", f"in limbo still, {within_s:.0f} s after all was closed: {left}")


@invariant("37")
def what_was_cleared_is_whole(
    ghost: Ghost, bookie_id: str, ledger_id: int, lacking: list[int]
) -> None:
    """A bookie whose limbo was cleared has every entry that belongs to it by the write sets."""
    require(
        not lacking,
        "37",
        f"{bookie_id} was told that ledger {ledger_id} is whole there, and lacks {lacking}",
    )
