"""What an invariant is: a function with a number that reads and raises.

Always true: a function of this package only reads the ghost and what it is given, and raises
Violation; it is called on every event that can break it, so it must cost little.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from spark_ledger.ledger.quorum import Quorum
from spark_ledger.metadata.ledger_record import LedgerRecord
from tests.simulation.ghost import Ghost

F = TypeVar("F", bound=Callable[..., None])


class Violation(AssertionError):
    """An invariant does not hold. `name` is its number: "8", "T2", "liveness"."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(f"invariant {name}: {what}")
        self.name = name


def invariant(name: str) -> Callable[[F], F]:
    """Count in the ghost how often the invariant `name` was judged; its first argument is the
    ghost."""

    def decorate(judge: F) -> F:
        @wraps(judge)
        def counted(ghost: Ghost, *args: Any) -> None:
            ghost.checks[name] = ghost.checks.get(name, 0) + 1
            judge(ghost, *args)

        counted.number = name  # type: ignore[attr-defined]
        return counted  # type: ignore[return-value]

    return decorate


def require(holds: bool, name: str, what: str) -> None:
    """Raises Violation of the invariant `name` unless `holds`."""
    if not holds:
        raise Violation(name, what)


def write_set(record: LedgerRecord, entry_id: int) -> list[str]:
    """The bookies that the record lists for an entry."""
    quorum = Quorum(record.ensemble_size, record.write_quorum, record.ack_quorum)
    ensemble = record.fragment_of(entry_id).ensemble
    return [ensemble[slot] for slot in quorum.write_set(entry_id)]
