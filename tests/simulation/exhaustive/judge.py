"""What the simulation's observers think of it: their ghost, as an automaton like the actors.

Always true: a ghost is a value here: it has a number, equal ones (but for counters and the order in
which things were noted) have the same, and its successor after an observation is computed once, by
the observers themselves, and remembered.

A moment (ghost.py) is, here, how many answers the bookie in question had given by then, counted
from 1 again when nothing is under way at it: all moments before are then 0, for nothing that began
before them will ever end. Moments of different bookies are never compared. The answers that a
recoverer got are forgotten once the ledger is closed: nothing is judged by them any more.
`Situations` judge nothing and are left out.
"""

import dataclasses
import pickle
from collections.abc import Hashable, Mapping, Sequence
from enum import Enum
from typing import Any

from bookie_server.api import codec
from bookie_server.api import messages as m
from bookie_server.api.entry import NO_ENTRY
from tests.simulation import invariants
from tests.simulation.exhaustive.actor_loop import ActorLoop
from tests.simulation.exhaustive.messages import Commit, Exchange, Seen
from tests.simulation.ghost import BookieGhost, Ghost
from tests.simulation.invariants import Violation
from tests.simulation.observers import Observers

JUDGED = (
    *(str(number) for number in (*range(1, 11), *range(12, 21), *range(22, 26))),
    *("29", "34", "35", "38", "T13"),
)
"""The invariants that are judged here."""
_COUNTERS = ("checks", "met")


class _NoTrace:
    def note(self, who: str, what: str) -> None: ...


class _Done:
    """An append's future, as the observers look at it."""

    def __init__(self, outcome: int | type[BaseException]) -> None:
        self._outcome = outcome

    def cancelled(self) -> bool:
        return False

    def exception(self) -> BaseException | None:
        if isinstance(self._outcome, int):
            return None
        return self._outcome.__new__(self._outcome)

    def result(self) -> Any:
        return self._outcome


class _Handle:
    """A writer, as the observers look at it."""

    def __init__(self, last_add_confirmed: int) -> None:
        self.last_add_confirmed = last_add_confirmed


class Judge:
    """Ghosts by number, and what follows each when something is seen. With `only`, the other
    invariants may be broken: to see what a bug leads to that one of them finds early."""

    def __init__(self, only: str = "") -> None:
        self.violations: list[Violation] = []
        self._only = only
        self.judged: dict[str, int] = {}
        """How often each invariant was judged; what was only remembered is not counted."""
        self._ids: dict[Hashable, int] = {}
        self._ghosts: list[bytes] = []
        self._after: dict[tuple[int, tuple[Seen, ...]], int] = {}
        self._loop = ActorLoop(0.0)
        self.first = self._number(Ghost())

    def __len__(self) -> int:
        return len(self._ghosts)

    def ghost(self, number: int) -> Ghost:
        """A copy of it, which has counted nothing yet."""
        return pickle.loads(self._ghosts[number])

    def count(self, ghost: Ghost) -> None:
        """Add what was judged with a copy."""
        for name, times in ghost.checks.items():
            self.judged[name] = self.judged.get(name, 0) + times

    def after(self, number: int, seen: tuple[Seen, ...]) -> int:
        """The ghost after the observers saw all of this, in order; -1 when an invariant does not
        hold (`violations` names it)."""
        key = (number, seen)
        found = self._after.get(key)
        if found is None:
            found = self._after[key] = self._told(number, seen)
        return found

    def _told(self, number: int, seen: tuple[Seen, ...]) -> int:
        ghost = self.ghost(number)
        observers = Observers(ghost, _NoTrace())
        with self._loop.entered():
            for what, facts in seen:
                try:
                    getattr(self, what)(observers, *facts)
                except Violation as violation:
                    observers.violations.append(violation)
        self.count(ghost)
        broken = [v for v in observers.violations if self._only in ("", v.name)]
        if broken:
            self.violations += broken
            return -1
        return self._number(ghost)

    def _number(self, ghost: Ghost) -> int:
        for ledger in ghost.ledgers.values():
            for told in ledger.recoveries.values() if ledger.closed else ():
                told.fenced, told.said = {}, {NO_ENTRY: {}}
        key = frozen(ghost)
        number = self._ids.get(key)
        if number is None:
            number = self._ids[key] = len(self._ghosts)
            ghost.checks, ghost.met = {}, {}
            self._ghosts.append(pickle.dumps(ghost))
        return number

    # -- what can be seen ----------------------------------------------------------------------

    def exchange(self, observers: Observers, exchange: Exchange, idle: bool) -> None:
        """An answer left its bookie; `idle`: no other request is under way there."""
        observers.exchange(exchange)
        if idle:
            request = codec.decode_request(exchange.method, exchange.request)
            _all_past(observers.ghost.bookie(request.bookie_id))

    def delivered(self, observers: Observers, exchange: Exchange) -> None:
        """Note that the caller took an answer."""
        request = codec.decode_request(exchange.method, exchange.request)
        if isinstance(request, m.ReadRequest | m.ReadLacRequest) and request.fence:
            response = codec.decode_response(exchange.method, exchange.answer)
            observers._fencing[exchange.ended] = (request, response)
            observers.delivered(exchange)

    def committed(self, observers: Observers, commit: Commit) -> None:
        observers.committed(commit)

    def submitted(self, observers: Observers, ledger_id: int, payload: bytes, rows: int) -> None:
        observers.submitted(ledger_id, payload, rows)

    def appended(
        self,
        observers: Observers,
        ledger_id: int,
        entry_id: int,
        outcome: int | type[BaseException],
        confirmed: int,
    ) -> None:
        """`outcome`: the id, or the error; `confirmed`: the value of the writer's handle then."""
        observers.writes(ledger_id, _Handle(confirmed))
        observers.appended(ledger_id, entry_id, _Done(outcome))

    def opened(self, observers: Observers, ledger_id: int, last_entry: int) -> None:
        """An open with recovery, or the writer's close, returned: the ledger ends there."""
        ghost = observers.ghost
        invariants.all_opens_end_at_the_same_entry(ghost, ghost.ledgers[ledger_id], last_entry)

    def restarted(
        self, observers: Observers, bookie_id: str, ledger_id: int, lac: bytes, read: bytes
    ) -> None:
        """What a bookie that has started again still knows, against all that it ever promised."""
        ghost = observers.ghost
        mine = ghost.bookie(bookie_id)
        _all_past(mine)
        state = codec.decode_response("ReadLac", lac)
        assert isinstance(state, m.ReadLacResponse)
        if ledger_id in mine.fence_replied:
            invariants.a_fence_survives_a_crash(ghost, mine, ledger_id, state.fenced)
        entries = codec.decode_response("Read", read)
        assert isinstance(entries, m.ReadResponse)
        for known_id, entry_id in mine.stored:
            known = known_id == ledger_id and entry_id < len(entries.results)
            status = entries.results[entry_id].status.name if known else entries.status.name
            invariants.an_acknowledged_add_survives_a_crash(ghost, mine, known_id, entry_id, status)


def _all_past(bookie: BookieGhost) -> None:
    """Make every moment of the bookie earlier than any moment that will be compared with it."""
    for moments in vars(bookie).values():
        if isinstance(moments, dict):
            moments.update(dict.fromkeys(moments, 0))


def frozen(value: Any) -> Hashable:
    """The value as something that is equal when it is, in whatever order it was put together."""
    if isinstance(value, (int, float, str, bytes, Enum)) or value is None:
        return value
    if dataclasses.is_dataclass(value):
        names = (f.name for f in dataclasses.fields(value) if f.name not in _COUNTERS)
        return tuple(frozen(getattr(value, name)) for name in names)
    if isinstance(value, Mapping):
        return frozenset((frozen(key), frozen(one)) for key, one in value.items())
    assert isinstance(value, Sequence), f"{value!r} of a ghost cannot be compared"
    return tuple(frozen(one) for one in value)
