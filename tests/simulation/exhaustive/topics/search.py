"""Every state of a scope's processes together: each choice of whose request is carried out next,
and what becomes of it.

Always true: a state is the world, each process after its local history, and how many faults may
still come: nothing else can matter, so a state met again is not followed again. From every state
every choice is taken, but that a request which commutes with all that the others may ever do is
carried out at once, alone: a `sync`, a read of what no process that still runs can write, a write
below `Scope.own` (only the maker of such a node ever touches it, which is asserted). No state can
be met twice on one way, as histories only grow. States are met in the order of steps, so the first
violation has a shortest story.
"""

import time
from array import array
from dataclasses import dataclass, field
from typing import Any

from tests.simulation.exhaustive.topics.judge import Judge
from tests.simulation.exhaustive.topics.processes import Learner, Moment, Note
from tests.simulation.exhaustive.topics.scope import Scope
from tests.simulation.exhaustive.topics.worlds import (
    APPLIED,
    LOST_AFTER,
    LOST_BEFORE,
    READS,
    REFUSED,
    WRITES,
    Operation,
    World,
    Worlds,
    paths_of,
    written,
)

FATES = (APPLIED, LOST_AFTER, LOST_BEFORE, REFUSED)
_State = tuple[Any, ...]
"""The world's number, faults left, and the number of each process' moment."""


@dataclass
class Found:
    """The result of an exploration. `story`: the requests, each with its process and its fate, in
    order, up to the violation."""

    states: int = 0
    steps: int = 0
    worlds: int = 0
    longest: int = 0
    histories: dict[str, int] = field(default_factory=dict)
    code_runs: int = 0
    complete: bool = False
    violation: str = ""
    story: list[tuple[str, Operation, str]] = field(default_factory=list)
    ends: int = 0
    """Final states."""
    last: dict[int, World] = field(default_factory=dict)
    """The worlds in which nothing happens any more, by number."""
    told: dict[str, int] = field(default_factory=dict)
    """What processes reported, and in how many different worlds."""
    judged: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0


class Search:
    """One exploration of one scope. With `every` nothing is left out because it commutes."""

    def __init__(self, scope: Scope, *, every: bool = False) -> None:
        self._scope = scope
        self._every = every
        self._judge = Judge(scope)
        self._worlds = Worlds()
        self._learners = [Learner(actor.name, actor.program) for actor in scope.actors]
        self._writes = [actor.writes for actor in scope.actors]
        self._owners: dict[str, int] = {}
        self._operations: dict[Operation, int] = {}
        self._outcomes: dict[tuple[int, int, str], tuple[int, Any]] = {}
        self._quiet: dict[tuple[int, tuple[bool, ...]], bool] = {}
        self._found = Found()

    def explore(self, *, seconds: float = float("inf"), states_max: int = 10**9) -> Found:
        """Look at every state, for so long and so many at most."""
        began, found = time.perf_counter(), self._found
        try:
            self._explore(began + seconds, states_max)
        finally:
            for learner in self._learners:
                learner.discard()
        found.told = self._judge.told
        found.judged = self._judge.judged
        found.worlds = len(self._worlds.met)
        found.histories = {one.name: len(one.moments) for one in self._learners}
        found.code_runs = sum(one.runs for one in self._learners)
        found.seconds = time.perf_counter() - began
        return found

    def _explore(self, deadline: float, states_max: int) -> None:
        found, first = self._found, self._first()
        order, numbers = [first], {first: 0}
        parents, choices, depths = array("q", [0]), array("q", [0]), array("i", [0])
        at = 0
        while at < len(order) and not found.violation:
            if len(order) > states_max or time.perf_counter() > deadline:
                break
            for who, fate, after, problem in self._next(order[at]):
                found.steps += 1
                choice = who * len(FATES) + FATES.index(fate)
                if after not in numbers:
                    numbers[after] = len(order)
                    order.append(after)
                    parents.append(at)
                    choices.append(choice)
                    depths.append(depths[at] + 1)
                if problem:
                    found.violation = problem
                    found.story = self._story(at, choice, order, parents, choices)
                    break
            at += 1
        found.complete = at == len(order) and not found.violation
        found.states, found.longest = len(order), max(depths)

    # -- steps -------------------------------------------------------------------------------

    def _first(self) -> _State:
        world = self._worlds.number(self._scope.world)
        return (world, self._scope.faults, *(one.first.number for one in self._learners))

    def _next(self, state: _State) -> list[tuple[int, str, _State, str]]:
        """(process, fate, the state after it, the violation) of every choice."""
        world, faults, *numbers = state
        moments = [one.moments[n] for one, n in zip(self._learners, numbers, strict=True)]
        running = [who for who, moment in enumerate(moments) if moment.operation is not None]
        if not running:
            return self._ended(state)
        alive = tuple(moment.operation is not None for moment in moments)
        for who in [] if self._every else running:
            if self._commutes(who, moments[who], alive):
                running = [who]
                break
        found = []
        for who in running:
            for fate in self._fates(moments[who].operation, faults):
                found.append(self._step(state, who, moments[who], world, faults, fate))
        return found

    def _step(
        self, state: _State, who: int, moment: Moment, world: int, faults: int, fate: str
    ) -> tuple[int, str, _State, str]:
        after, answer = self._carried_out(world, moment.operation, fate)
        then, notes = self._learners[who].after(moment, answer)
        left = faults if fate == APPLIED else faults - 1
        numbers = (*state[2 : 2 + who], then.number, *state[3 + who :])
        problem = self._judged(world, after, who, notes)
        return who, fate, (after, left, *numbers), problem

    def _judged(self, world: int, after: int, who: int, notes: tuple[Note, ...]) -> str:
        met, name = self._worlds.met, self._learners[who].name
        problem = ""
        if after != world:
            problem = self._judge.step((world, after), met[world], met[after])
        for note in notes:
            problem = problem or self._judge.note(after, met[after], name, note)
        return problem

    def _ended(self, state: _State) -> list[tuple[int, str, _State, str]]:
        self._found.ends += 1
        self._found.last[state[0]] = self._worlds.met[state[0]]
        problem = self._judge.final(state[0], self._worlds.met[state[0]])
        return [(0, APPLIED, state, problem)] if problem else []

    def _carried_out(self, world: int, operation: Operation, fate: str) -> tuple[int, Any]:
        key = (world, self._operations.setdefault(operation, len(self._operations)), fate)
        found = self._outcomes.get(key)
        if found is None:
            found = self._outcomes[key] = self._worlds.step(world, operation, fate)
        return found

    def _fates(self, operation: Operation, faults: int) -> tuple[str, ...]:
        if not faults:
            return FATES[:1]
        return (
            FATES if operation[0] in WRITES else FATES[:3] if operation[0] == "add" else FATES[:1]
        )

    # -- what commutes -----------------------------------------------------------------------

    def _commutes(self, who: int, moment: Moment, alive: tuple[bool, ...]) -> bool:
        """Whether what is asked for commutes with all that the others may do from now on."""
        operation = moment.operation
        key = (who, self._operations.setdefault(operation, len(self._operations)), alive)
        found = self._quiet.get(key)
        if found is None:
            found = self._quiet[key] = self._alone(who, operation, alive)
        return found

    def _alone(self, who: int, operation: Operation, alive: tuple[bool, ...]) -> bool:
        self._check(who, operation)
        kind = operation[0]
        if kind == "sync":
            return True
        if kind not in READS and kind not in WRITES:
            return False
        changes = written(operation)
        if any(not path.startswith(self._scope.own) for path in changes):
            return False
        others = [writes for i, writes in enumerate(self._writes) if i != who and alive[i]]
        read = [path for path in paths_of(operation) if path not in changes]
        return not any(
            path.startswith(prefixes) or (kind == "children" and _above(path, prefixes))
            for path in read
            if not path.startswith(self._scope.own)
            for prefixes in others
        )

    def _check(self, who: int, operation: Operation) -> None:
        """Check that the process keeps to what the scope declares of it."""
        actor, own = self._scope.actors[who], self._scope.own
        if operation[0] == "children" and _above(operation[1], own):
            raise AssertionError(f"{actor.name} lists {operation[1]}, where others have their own")
        for path in paths_of(operation):
            if path.startswith(own) and self._owners.setdefault(path, who) != who:
                raise AssertionError(f"{actor.name} meets {path}, which is another's own")
        for path in written(operation):
            if not path.startswith((*actor.writes, *own)):
                raise AssertionError(f"{actor.name} writes {path}: not what its scope says")

    def _story(
        self, at: int, last: int, order: list[_State], parents: array, choices: array
    ) -> list[tuple[str, Operation, str]]:
        """What led to the state, and the choice `last` on top."""
        way = [(at, last)]
        while at:
            way.append((parents[at], choices[at]))
            at = parents[at]
        told = []
        for state, choice in reversed(way):
            who, fate = divmod(choice, len(FATES))
            learner = self._learners[who]
            moment = learner.moments[order[state][2 + who]]
            if moment.operation is not None:
                told.append((learner.name, moment.operation, FATES[fate]))
        return told


def _above(path: str, prefixes: tuple[str, ...]) -> bool:
    """Whether a node may come to be right below the path."""
    return any(prefix.startswith(f"{path}/") for prefix in prefixes)
