"""The verbs of the product, found by reflection, and which of them a run called.

Always true: a verb is a public function of a module of VERBS, or a public method of a class of it;
nobody keeps a list of them. A run counts each verb that it called in the ghost ("verb: ..."), so a
new one that no actor uses is missed by `test_every_public_verb_is_called_in_runs`, unless it is in
EXCEPTIONS with the reason why no seed calls it. Production code is whole again after the run.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from bookie_server import bookie, read_stream, rebuild
from bookie_server.api import messages
from spark_ledger.bookies import bookie_client
from spark_ledger.ledger import client, reader, writer
from spark_ledger.repair import forget, limbo, limbo_janitor
from spark_ledger.topic import (
    admin,
    agreement,
    checkpointer,
    compactor,
    cursor,
    follower,
    intents,
    janitor,
    live,
    retention,
    schema_registry,
    subscriptions,
    task_writer,
    topic_log,
    topics,
    upkeep,
    views,
)
from spark_ledger.topic import client as topic_client
from tests.simulation.ghost import Ghost

VERBS: tuple[ModuleType, ...] = (
    *(client, writer, reader, bookie_client, limbo, limbo_janitor, forget),
    *(topic_client, topics, intents, subscriptions, cursor, janitor, checkpointer, admin),
    *(compactor, live, follower, task_writer, topic_log, agreement, retention, schema_registry),
    *(upkeep, views, bookie, rebuild),
)
"""What clients, the command line, Spark's source and sink and the upkeep of a cluster call."""

EXCEPTIONS: Mapping[str, str] = {
    "Bookie.abandon": "ends a bookie as a crash would: here the process is killed",
    "Checkpointer.idle": "tests wait by it",
    "LedgerWriter.held_below": "a task holds too many bytes: rows of a run are too few for that"
    " (test_task_writing.py)",
    "schema_registry.not_registered": "the text of an error",
}
"""By verb: why no seed calls it."""


class Verb(NamedTuple):
    owner: Any
    """The class or module that has it."""
    attribute: str
    function: Callable[..., Any]

    @property
    def name(self) -> str:
        owner = self.owner
        return f"{owner.__name__.rpartition('.')[2]}.{self.attribute}"


def verbs() -> list[Verb]:
    """All of them, in the order of their modules."""
    return [verb for module in VERBS for verb in _of_module(module)]


def requests() -> list[str]:
    """The names of the requests that the wire's api has."""
    return [request.__name__ for request, _ in (messages.METHODS | messages.STREAMS).values()]


def names() -> list[str]:
    return [*(verb.name for verb in verbs()), *requests()]


def missing(met: Mapping[str, int]) -> list[str]:
    """The verbs that runs which met this did not call, but for the exceptions."""
    return [name for name in names() if not met.get(f"verb: {name}") and name not in EXCEPTIONS]


@contextmanager
def counted(ghost: Ghost) -> Iterator[None]:
    """Count each verb that is called meanwhile."""
    met = ghost.met
    changed: list[tuple[Any, str, Any]] = []
    try:
        modules = _our_modules(len(sys.modules))
        for owner, attribute, name in _NAMED:
            original = owner.__dict__[attribute]
            counting = _like(original, _counting(met, name, getattr(original, "__func__", original)))
            is_class = inspect.isclass(owner)
            for place in [owner] if is_class else _users(modules, attribute, original):
                changed.append((place, attribute, original))
                setattr(place, attribute, counting)
        original = bookie.Bookie.__dict__["handle"]
        changed.append((bookie.Bookie, "handle", original))
        bookie.Bookie.handle = _counting_requests(met, original)  # type: ignore[method-assign]
        serve, ((asked, _),) = read_stream.serve_stream, messages.STREAMS.values()
        for place in _users(modules, "serve_stream", serve):
            changed.append((place, "serve_stream", serve))
            place.serve_stream = _counting(met, f"verb: {asked.__name__}", serve)
        yield
    finally:
        for place, attribute, original in reversed(changed):
            setattr(place, attribute, original)


def _of_module(module: ModuleType) -> Iterator[Verb]:
    for name, found in vars(module).items():
        if name.startswith("_") or getattr(found, "__module__", "") != module.__name__:
            continue
        if inspect.isclass(found):
            for attribute, member in vars(found).items():
                plain = getattr(member, "__func__", member)  # of class and static methods
                if isinstance(plain, FunctionType) and not attribute.startswith("_"):
                    yield Verb(found, attribute, plain)
        elif isinstance(found, FunctionType):
            yield Verb(module, name, found)


@lru_cache(maxsize=1)
def _our_modules(imported: int) -> list[ModuleType]:
    """Of the product and the simulation, as long as so many modules are imported."""
    ours = ("spark_ledger.", "bookie_server.", "tests.simulation.")
    return [module for name, module in list(sys.modules.items()) if name.startswith(ours)]


def _users(
    modules: Sequence[ModuleType], attribute: str, function: Callable[..., Any]
) -> list[ModuleType]:
    """The modules that know the function by its name."""
    return [module for module in modules if module.__dict__.get(attribute) is function]


def _counting(met: dict[str, int], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        met[name] = met.get(name, 0) + 1
        return function(*args, **kwargs)

    return called


def _counting_requests(met: dict[str, int], handle: Callable[..., Any]) -> Callable[..., Any]:
    def handled(self: Any, request: Any) -> Any:
        name = f"verb: {type(request).__name__}"
        met[name] = met.get(name, 0) + 1
        return handle(self, request)

    return handled


def _like(original: Any, function: Callable[..., Any]) -> Any:
    """A class or static method stays one."""
    kind = type(original)
    return kind(function) if kind in (classmethod, staticmethod) else function


_NAMED = [(verb.owner, verb.attribute, f"verb: {verb.name}") for verb in verbs()]
"""Where each is, and how it is counted."""
