"""What a mutant is: one production function, what takes its place, and the runs that catch it.

Always true: a mutant that fails by itself is not caught but broken (MutantBroken), whatever
invariant its exception made fail on the way: production code has moved on from under it.
"""

import json
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
)
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from inspect import isasyncgen, iscoroutine
from pathlib import Path
from traceback import walk_tb
from types import FunctionType
from typing import Any

from tests.simulation.chaos import draw_plan
from tests.simulation.invariants import Violation
from tests.simulation.loop import SimLoop
from tests.simulation.plan import within_budget
from tests.simulation.scenario import SeedFailed, run_seed

SEEDS_FILE = Path(__file__).with_name("seeds.json")
UNLESS_SAID: Mapping[str, Any] = {
    "topics": False,
    "page_cache": False,
    "healing": False,
    "brokers": False,
}
"""What the plans of mutants' runs have if the mutant says nothing of it."""
DEFECTS = ("no defect", "only known errors")
"""Violations that are no invariants: an exception that nobody expected."""
SEEDS_MAX = 200  # tried when a mutant's own seed does not catch it any more


class MutantBroken(Exception):
    """The mutant's own code raised: it does not do what its report describes."""


@dataclass(frozen=True)
class Mutant:
    """`owner.attribute` is replaced by `make(the original)`. `report` is where the bug is told."""

    name: str
    report: str
    owner: Any
    attribute: str
    make: Callable[[Any], Any]
    changes: Mapping[str, Any] | None = field(default_factory=dict)
    """What the plan of its runs has beside UNLESS_SAID, whatever the seed draws; None: just what it
    draws."""

    @contextmanager
    def applied(self) -> Iterator[None]:
        original = self.owner.__dict__[self.attribute]
        plain = original.__func__ if isinstance(original, staticmethod) else original
        own = _Own(self.make.__code__.co_filename)
        setattr(self.owner, self.attribute, own.watched(self.make(plain)))
        try:
            yield
            if own.raised:
                error = own.raised[0]
                raise MutantBroken(f"'{self.name}' raised {error!r} in its own code") from error
        finally:
            setattr(self.owner, self.attribute, original)

    @property
    def plan_changes(self) -> Mapping[str, Any]:
        """What its runs' plans have, whatever the seed draws."""
        return {} if self.changes is None else {**UNLESS_SAID, **self.changes}

    def caught(self, seed: int) -> str | None:
        """The invariant that fails under the mutant in this seed; None if none does. Raises
        MutantBroken."""
        with self.applied():
            try:
                return run_changed(seed, self.changes)
            except SeedFailed:
                return None

    def clean(self, seed: int) -> bool:
        """Whether the same run keeps every invariant without the mutant."""
        try:
            return run_changed(seed, self.changes) is None
        except SeedFailed:
            return False

    def catching_seed(self) -> int | None:
        """Its stored seed, or when the code has moved on since, the first other one that catches
        it."""
        own = stored_seeds().get(self.name, {}).get("seed", 0)
        tried = (seed for seed in (own, *range(SEEDS_MAX)) if self.caught(seed))
        return next(tried, None)


def stored_seeds() -> dict[str, dict[str, Any]]:
    """By mutant: a seed that caught it, and what else was found then."""
    found: dict[str, dict[str, Any]] = json.loads(SEEDS_FILE.read_text())
    return found


def run_changed(seed: int, changes: Mapping[str, Any] | None) -> str | None:
    """Run a seed with a plan changed (and UNLESS_SAID); the number of the invariant that failed, if
    one did."""
    plan = draw_plan(SimLoop(seed).random_for("plan"))
    if changes is not None:
        plan = within_budget(replace(plan, **{**UNLESS_SAID, **changes}))
    try:
        run_seed(seed, plan)
    except SeedFailed as failure:
        if isinstance(failure.cause, Violation) and failure.cause.name not in DEFECTS:
            return failure.cause.name
        raise
    return None


class _Own:
    """Watches the functions of one file: which errors of Python itself (AttributeError, say) were
    raised in their code, and not in what they called. Errors of ours a report may describe."""

    def __init__(self, file: str) -> None:
        self._files = (file, __file__)  # this one calls them, with arguments that may not fit
        self.raised: list[Exception] = []

    def watched(self, made: Any) -> Any:
        """What behaves as `made`."""
        if isinstance(made, FunctionType) and made.__code__.co_filename in self._files:
            return self._function(made)
        if iscoroutine(made) and made.cr_code.co_filename in self._files:
            return self._coroutine(made)
        if isasyncgen(made) and made.ag_code.co_filename in self._files:
            return self._generator(made)
        return made

    def _function(self, made: FunctionType) -> Callable[..., Any]:
        @wraps(made)
        def called(*args: Any, **options: Any) -> Any:
            with self._watching():
                result = made(*args, **options)
            if made.__name__ == "made":  # in the place of an __init__: it put others into `self`
                for name, value in vars(args[0]).items():
                    vars(args[0])[name] = self.watched(value)
            return self.watched(result)

        return called

    async def _coroutine(self, made: Coroutine[Any, Any, Any]) -> Any:
        with self._watching():
            return await made

    async def _generator(self, made: AsyncGenerator[Any, None]) -> AsyncIterator[Any]:
        with self._watching():
            async with aclosing(made):
                async for each in made:
                    yield each

    @contextmanager
    def _watching(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            *_, (last, _) = walk_tb(error.__traceback__)
            of_python = type(error).__module__ == "builtins" and not isinstance(error, OSError)
            if of_python and last.f_code.co_filename in self._files:
                self.raised.append(error)
            raise
