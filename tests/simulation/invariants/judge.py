"""What an invariant is: a function with a number that reads and raises.

Always true: a function of this package only reads the ghost and what it is given (what it must
remember of an event it notes in the ghost), and raises Violation; it is called on every event that
can break it, so it must cost little. In a run over budget only those declared for it are judged.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar

from spark_ledger.metadata.ledger_record import LedgerRecord
from tests.simulation.ghost import Ghost

F = TypeVar("F", bound=Callable[..., None])

ALL: dict[str, list[str]] = {}
"""By number: the functions that judge it."""


class Violation(AssertionError):
    """An invariant does not hold. `name` is its number: "8", "T2", "34"."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(f"invariant {name}: {what}")
        self.name = name


def invariant(
    name: str, *, over_budget: bool = False, when: Callable[[Ghost], bool] | None = None
) -> Callable[[F], F]:
    """Count in the ghost how often the invariant `name` was judged; its first argument is the
    ghost. `over_budget`: it holds however many disks are lost or rotten; `when`: the
    runs that it is about, others are not judged and do not count."""

    def decorate(judge: F) -> F:
        ALL.setdefault(name, []).append(judge.__name__)

        @wraps(judge)
        def counted(ghost: Ghost, *args: Any) -> None:
            if ghost.over_budget and not over_budget:
                return
            if when is not None and not when(ghost):
                return
            ghost.checks[name] = ghost.checks.get(name, 0) + 1
            judge(ghost, *args)

        counted.number = name  # type: ignore[attr-defined]
        return counted  # type: ignore[return-value]

    return decorate


def require(holds: bool, name: str, what: str) -> None:
    """Raises Violation of the invariant `name` unless `holds`. The few invariants that are judged
    with every copy raise by themselves: to say what happened would cost more than to judge it."""
    if not holds:
        raise Violation(name, what)


def write_set(
    record: LedgerRecord, entry_id: int, ensemble: Sequence[str] | None = None
) -> list[str]:
    """The bookies that the record lists for an entry (or those of `ensemble`): by this file's own
    arithmetic, not by that of the code under test."""
    members = record.fragment_of(entry_id).ensemble if ensemble is None else ensemble
    return [members[(entry_id + i) % len(members)] for i in range(record.write_quorum)]
