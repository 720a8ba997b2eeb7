"""Which bookies count as lost: what one observer decides from what it saw, in one unbroken session.

Always true: a bookie is lost when the observer saw it not registered for the whole delay, without a
break of its session; losing several does not shorten that; a bookie that is back begins anew, also
one that was back between two looks, which may be far apart; when more than a third of the bookies
that hold anything are lost together, none counts until an operator says that they are.
"""

from collections.abc import Callable, Collection, Set
from typing import NamedTuple


class Judgement(NamedTuple):
    """`lost`: their copies are to be made elsewhere. `too_many`: lost all the same, but more than
    a third, so that it may be the observer, or the network."""

    lost: frozenset[str]
    too_many: frozenset[str] = frozenset()


class Absence:
    """Of one observer; times are those of its clock, in seconds."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        self._session = 0

    def look(
        self, now_s: float, session: int, known: Collection[str], registered: Collection[str]
    ) -> None:
        """What was seen now. `session` is another number after each break of the session."""
        if session != self._session:
            self._session, self._since = session, {}
        here = set(registered)
        self._since = {
            bookie: self._since.get(bookie, now_s) for bookie in known if bookie not in here
        }

    def back(self, is_registered: Callable[[str], bool]) -> None:
        """What was heard since the last look: those that are registered begin anew."""
        self._since = {b: since for b, since in self._since.items() if not is_registered(b)}

    def since(self, bookie_id: str) -> float | None:
        """Since when it was seen absent; None: it is registered, or was never seen."""
        return self._since.get(bookie_id)

    def gone(self, now_s: float, delay_s: float) -> frozenset[str]:
        """Those that were absent all through the delay."""
        return frozenset(b for b, since in self._since.items() if now_s - since >= delay_s)


def judge(gone: Set[str], holding: Set[str], registered: Set[str], accepted: Set[str]) -> Judgement:
    """Of those that are gone, `holding` anything by the ledgers' records. `accepted`: an operator
    said that these are lost."""
    lost = gone & holding
    unsaid = lost - accepted
    if 3 * len(unsaid) > len(registered | holding):
        return Judgement(frozenset(lost & accepted), frozenset(unsaid))
    return Judgement(frozenset(lost))
