"""One scope explored: its actors learnt, put together, and every state met, on several cores.

Always true: a scope with a crash is cut into as many parts as it has bookies, by who crashes: what
happens before the crash is met by every part, what comes after it by one.
"""

import gc
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.simulation.exhaustive import counting
from tests.simulation.exhaustive.behaviour import ENDLESS, Behaviours
from tests.simulation.exhaustive.search import Composition, Found
from tests.simulation.exhaustive.stage import Scope, Stage

SCOPES = {
    "A": (Scope("A", 3, 2),),
    "A2": (Scope("A2", 3, 2, closes=True),),
    "B": (Scope("B", 2, 2, entries=2), Scope("B1", 2, 1, entries=2)),
    "B1": (Scope("B1", 2, 1, entries=2),),
    "C": (Scope("C", 3, 2, crash=True, resets=True),),
}
"""By the name on the command line."""


@dataclass
class Report:
    """What one part of a scope came to."""

    scope: Scope
    crashing: str | None
    histories: dict[str, int]
    kinds: dict[str, int]
    code_runs: int
    learning_s: float
    found: Found
    ghosts: int
    judged: dict[str, int] = field(default_factory=dict)
    unlearnt: bool = False
    """Time was over before all actors were learnt: nothing was explored."""


@dataclass(frozen=True)
class Limits:
    """How far an exploration goes. `events_max`: no actor's history is followed beyond so many
    events, and final states are then not judged. `deadline`: of time.monotonic(), for learning and
    exploring. `only`: the one
    invariant that is judged (see Judge). `count`: runs and traces are counted."""

    events_max: int = ENDLESS
    states_max: int = 1 << 60
    deadline: float = float("inf")
    only: str = ""
    count: bool = False


def explore(scope: Scope, limits: Limits = Limits()) -> Report:
    """The scope in this process, all its crashes together."""
    with quiet_collector():
        return explored_part(*_learnt(scope, limits), limits)


def explore_all(scopes: Sequence[Scope], limits: Limits, jobs: int) -> Iterator[Report]:
    """The reports of all scopes and their parts, each as it is ready."""
    with quiet_collector():
        plain = [scope for scope in scopes if not scope.crash]
        yield from _mapped(_whole, [(scope, limits) for scope in plain], jobs)
        for scope in scopes:
            if scope.crash:
                behaviours, learning_s = _learnt(scope, limits)
                if behaviours.unfinished:
                    yield _unlearnt(behaviours, learning_s)
                    continue
                _shared[:] = behaviours, learning_s
                yield from _mapped(_crashing, [(name, limits) for name in scope.addresses], jobs)


@contextmanager
def quiet_collector() -> Iterator[None]:
    """No collection but those that are asked for, and what is there by now is left out of them."""
    collecting = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if collecting:
            gc.enable()


_shared: list[Any] = []
"""Behaviours and the seconds they took: what forked workers find."""


def _mapped(work: Any, tasks: Sequence[Any], jobs: int) -> Iterator[Report]:
    if jobs <= 1 or len(tasks) <= 1:
        yield from map(work, tasks)
        return
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        yield from pool.map(work, tasks)


def _whole(task: tuple[Scope, Limits]) -> Report:
    scope, limits = task
    return explored_part(*_learnt(scope, limits), limits)


def _crashing(task: tuple[str, Limits]) -> Report:
    crashing, limits = task
    behaviours, learning_s = _shared
    return explored_part(behaviours, learning_s, limits, crashing)


def _learnt(scope: Scope, limits: Limits) -> tuple[Behaviours, float]:
    began = time.perf_counter()
    behaviours = Behaviours(Stage(scope), limits.events_max, limits.deadline).learn()
    gc.collect()
    return behaviours, time.perf_counter() - began


def explored_part(
    behaviours: Behaviours, learning_s: float, limits: Limits, crashing: str | None = None
) -> Report:
    if behaviours.unfinished:
        return _unlearnt(behaviours, learning_s)
    final = None if behaviours.complete else _unjudged
    composition = Composition(behaviours, crashing, final, limits.only)
    seconds = limits.deadline - time.monotonic()
    found = composition.explore(seconds=seconds, states_max=limits.states_max)
    found.complete = found.complete and behaviours.complete
    if limits.count and found.complete:
        found.runs, found.traces = counting.runs(composition), counting.traces(composition)
    return Report(
        behaviours.stage.scope,
        crashing,
        {name: len(learner.all) for name, learner in behaviours.learners.items()},
        {name: len(learner.kinds) for name, learner in behaviours.learners.items()},
        behaviours.runs,
        learning_s,
        found,
        len(composition.judge),
        composition.judge.judged,
    )


def _unlearnt(behaviours: Behaviours, learning_s: float) -> Report:
    numbers = {name: len(learner.all) for name, learner in behaviours.learners.items()}
    runs = behaviours.runs
    kinds = dict.fromkeys(numbers, 0)
    scope = behaviours.stage.scope
    return Report(scope, None, numbers, kinds, runs, learning_s, Found(), 0, unlearnt=True)


def _unjudged(*_: Any) -> tuple[str, str]:
    return "not followed to the end", ""
