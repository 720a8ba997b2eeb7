"""The verbs of the product, found by reflection, and which of them a run called.

Always true: nobody keeps a list of verbs, nor of the modules that have them. In PACKAGES each
public coroutine is a verb, and so is each public method of a class that has one. A function that
waits for nothing, and a class of such, computes, whatever is beside it: unit tests are for it. A
run notes each verb that it called in the ghost ("verb: ...", once a run), so a new one that no
actor uses is missed by `test_every_public_verb_is_called_in_runs`, unless it is in EXCEPTIONS or
RARE, or its module in REPLACED, with the reason. A verb that was called costs the rest of the run
nothing; production code is whole again after the run.
"""

import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from bookie_server import bookie
from bookie_server.api import messages
from bookie_server.serve import handler
from tests.simulation.ghost import Ghost

PACKAGES = (
    "spark_ledger.topic",
    "spark_ledger.ledger",
    "spark_ledger.repair",
    "spark_ledger.bookies",
    "bookie_server",
)
"""Not `spark_ledger.client`, which blocks a thread on these (tests/integration)."""

API = "bookie_server.api"
"""How what is said on the wire is written: no verbs, but for its requests."""

HANDLED = (bookie.Bookie, "handle")
"""Noted by the requests that it is given."""

REPLACED: Mapping[str, str] = {
    "bookie_server.serve.frames": "a port: the simulated network calls the handler",
    "bookie_server.disk.identity": "a file of the start of the program (test_bookie_start.py)",
    "bookie_server.disk.line_file": "as that (test_lineage.py)",
    "bookie_server.disk.seen_links": "as that (test_lineage.py)",
    "bookie_server.disk.starts": "as that (test_twins_starts.py)",
    "bookie_server.ledgers.lineage": "of the program: the simulated store never goes back; a bookie"
    " that meets an older one is the fault 'older store' (test_lineage.py, test_older_store.py)",
    "bookie_server.serve.twin": "of the program: a simulated disk has one process (test_twin.py,"
    " test_twins_starts.py)",
    "bookie_server.start.opening": "how the program opens real directories; world.py does here",
    "bookie_server.start.self_test": "real disks (test_self_test.py)",
    "bookie_server.disk.os_disk": "the real disk: disk.py",
    "bookie_server.serve.registration": "of the program: registering.py",
    "bookie_server.logs.rocks_index": "the real index: index.py, held to the same tests",
    "bookie_server.serve.gateway": "a port: the simulated network calls the handler",
    "spark_ledger.bookies.frame_network": "a real network: network.py",
}
"""By module: what is in its place here, so that none of its verbs is called."""

EXCEPTIONS: Mapping[str, str] = {
    "bookie_server.Bookie.abandon": "ends a bookie as a crash would: here the process is killed",
    "bookie_server.Bookie.run_in_background": "of the program, for its watch for a twin"
    " (test_twin.py)",
    "bookie_server.Bookie.put_all_in_limbo": "a twin was beside it (test_limbo.py, test_twin.py)",
    "bookie_server.Journal.abandon": "as that",
    "bookie_server.Journals.abandon": "as that",
    "bookie_server.LedgerStorage.abandon": "as that",
    "bookie_server.DirectLog.abandon": "as that",
    "bookie_server.LedgerHandles.store_went_back": "the store went back in time, and was accepted"
    " (test_ids_given_again.py)",
    "bookie_server.peers.no_response": "of a bookie that asks no other: world.py has one that does",
    "bookie_server.LateRecordApplier.apply": "no journal directory is away at a start and back"
    " (test_late_replay.py)",
    "bookie_server.handler.respond": "of the gRPC port: the simulation calls respond_counted",
    "bookies.HostFiles.read": "the host's real files: local_files.py",
    "ledger.AddPipeline.held_below": "a task holds too many bytes: rows of a run are too few for"
    " that (test_task_writing.py)",
    "ledger.AsyncLedgerWriter.held_below": "as that",
    "repair.audit.audit": "counts for an operator and changes nothing; the auditor calls"
    " `check_ledger` (test_audit.py)",
    "repair.audit.audit_batch": "as that",
    "repair.copies.unpaced": "of the command: the worker has a pace (test_limbo.py)",
    "repair.decommission.begin": "of an operator: healing.py makes the node that says that a bookie"
    " drains (test_decommission.py)",
    "repair.decommission.cancel": "as that",
    "repair.decommission.decommission": "as that",
    "repair.service.repair_once": "of the command `ledger limbo --repair` (test_limbo.py)",
    "repair.Worker.is_waiting_to_close": "as that",
    "repair.status.change_settings": "of an operator; healing.py sets these (test_status.py)",
    "repair.status.enable": "as that",
    "repair.status.status": "tells an operator (test_status.py)",
    "repair.status.underreplicated": "as that",
    "topic.ledger_inventory.referred_by": "of `ledger audit` and its Spark job (test_audit.py)",
    "topic.Checkpointer.idle": "tests wait by it",
    "topic.EntrySender.drain": "of the blocking writer of a task of Spark (test_task_writing.py)",
    "topic.EntrySender.wait_for_copies": "as that",
    "topic.TopicLog.forget": "the store went back in time (test_commit_tokens.py)",
    "topic.Topics.set_namespace": "of an operator (test_topics.py)",
    "topic.Topics.change_namespace": "of an operator (test_admin_policies.py)",
    "topic.Topics.namespaces": "as that",
    "topic.live_repair.repair": "of an operator, for bytes that no owner can open"
    " (test_foreign_entries.py)",
    "topic.hand_over.ask_over_tcp": "a real network: brokers/process.py asks over its own",
    "topic.task_reader.read_blocks": "of Spark's tasks and the command (test_chunked_messages.py)",
    "topic.parts.commit_part": "of Spark's foreach: at points (points/background.py)",
}
"""By verb: why no seed calls it."""

RARE: Mapping[str, str] = {
    "bookie_server.EntryLogs.abandon_copy": "the disk fails while a log is copied",
    "bookie_server.EntryLogs.discard_copy": "the disk fails while a log is copied",
    "bookie_server.Journal.fail": "one of two journals fails in the midst of a write",
    "bookie_server.Journal.set_aside": "a journal's segment rotted, and its node started again",
    "bookie_server.Journals.set_aside": "as that",
    "bookie_server.LedgerHandles.check_fence": "an add before the end of the walk of a torn start",
    "bookies.BookieDirectory.ids_with_address": "an error text: too few bookies for a ledger",
    "ledger.AsyncLedgerWriter.is_fenced": "the session of a broker with a live ledger has ended",
    "topic.ConsumerCursor.use_again": "a broker does not hear whether a subscription was deleted",
    "topic.ConsumerCursors.delete": "the last consumer of a subscription deletes it, where brokers"
    " serve",
    "topic.Subscriptions.used_by_consumers": "a query opens a subscription that a broker serves",
    "topic.SubscriptionNodes.without_shares": "a query takes over what consumers had",
    "topic.Turns.take": "a commit loses five races",
    "topic.live.find_stored_since": "a consumer seeks to a time within a live segment",
    "topic.live.first_stored_since": "as that",
}
"""By verb: when seeds call it, too seldom for few of them."""


class Verb(NamedTuple):
    package: str
    owner: Any
    """The class or module that has it."""
    attribute: str
    function: Callable[..., Any]

    @property
    def name(self) -> str:
        package, owner = (n.rpartition(".")[2] for n in (self.package, self.owner.__name__))
        return f"{package}.{owner}.{self.attribute}"


def modules(package: str) -> list[ModuleType]:
    """All that it has, in the order of their names, but for the wire's api and programs."""
    found = pkgutil.walk_packages(import_module(package).__path__, f"{package}.")
    named = sorted(name for _, name, _ in found if not name.endswith(".__main__"))
    return [import_module(name) for name in named if not name.startswith(API)]


def verbs() -> list[Verb]:
    """All of them, in the order of their modules."""
    return [
        verb
        for package in PACKAGES
        for module in modules(package)
        if module.__name__ not in REPLACED
        for verb in _of_module(package, module)
    ]


def requests() -> list[str]:
    """The names of the requests that the wire's api has."""
    return [request.__name__ for request, _ in (messages.METHODS | messages.STREAMS).values()]


def names() -> list[str]:
    return [*(verb.name for verb in verbs()), *requests()]


def missing(met: Mapping[str, int]) -> list[str]:
    """The verbs that runs which met this did not call, but for the exceptions."""
    excused = EXCEPTIONS.keys() | RARE.keys()
    return [name for name in names() if not met.get(f"verb: {name}") and name not in excused]


@contextmanager
def counted(ghost: Ghost) -> Iterator[None]:
    """Note each verb that is called meanwhile."""
    met = ghost.met
    changed: list[tuple[Any, str, Any, Any]] = []

    def replace(place: Any, attribute: str, noting: Callable[..., Any]) -> None:
        original = place.__dict__[attribute]
        put = _like(original, noting)
        changed.append((place, attribute, original, put))
        setattr(place, attribute, put)

    try:
        for place, attribute, told in _places():
            replace(place, attribute, _noting(met, told, place, attribute))
        replace(bookie.Bookie, "handle", _noting_requests(met, bookie.Bookie.handle))
        yield
    finally:
        for place, attribute, original, put in reversed(changed):
            if place.__dict__[attribute] is put:
                setattr(place, attribute, original)


def _of_module(package: str, module: ModuleType) -> Iterator[Verb]:
    for owner in (module, *_classes(module)):
        found = [
            Verb(package, owner, attribute, plain)
            for attribute, member in vars(owner).items()
            if isinstance(plain := getattr(member, "__func__", member), FunctionType)
            and not attribute.startswith("_")
            and (owner is not module or plain.__module__ == module.__name__)
        ]
        waiting = [verb for verb in found if _waits(verb)]
        yield from found if waiting and owner is not module else waiting


def _classes(module: ModuleType) -> list[type]:
    """Its own, but for protocols: others carry those out."""
    return [
        found
        for name, found in vars(module).items()
        if inspect.isclass(found)
        and found.__module__ == module.__name__
        and not name.startswith("_")
        and not getattr(found, "_is_protocol", False)
    ]


def _waits(verb: Verb) -> bool:
    plain = verb.function
    return inspect.iscoroutinefunction(plain) or inspect.isasyncgenfunction(plain)


@lru_cache(maxsize=1)
def _places() -> list[tuple[Any, str, list[str]]]:
    """Where each verb is looked up when it is called, and as what it is noted: once a process."""
    found: list[tuple[Any, str, list[str]]] = []
    for verb in verbs():
        told = [verb.name]
        if verb.function is handler.serve_stream:
            told += [asked.__name__ for asked, _ in messages.STREAMS.values()]
        owner, attribute = verb.owner, verb.attribute
        places = [owner] if inspect.isclass(owner) else _users(attribute, verb.function)
        found += [(place, attribute, told) for place in places if (place, attribute) != HANDLED]
    return found


def _users(attribute: str, function: Callable[..., Any]) -> list[ModuleType]:
    """The modules that know the function by its name."""
    return [
        module
        for name, module in list(sys.modules.items())
        if name.startswith(("spark_ledger.", "bookie_server.", "tests.simulation."))
        and vars(module).get(attribute) is function
    ]


def _noting(met: dict[str, int], told: list[str], place: Any, attribute: str) -> Callable[..., Any]:
    """What notes the first call, and puts what was there before in its own place again."""
    original = place.__dict__[attribute]
    function = getattr(original, "__func__", original)

    def noted(*args: Any, **kwargs: Any) -> Any:
        for name in told:
            met[f"verb: {name}"] = 1
        put = place.__dict__[attribute]
        if getattr(put, "__func__", put) is noted:
            setattr(place, attribute, original)
        return function(*args, **kwargs)

    return noted


def _noting_requests(met: dict[str, int], handle: Callable[..., Any]) -> Callable[..., Any]:
    seen: set[type] = set()

    def handled(self: Any, request: Any) -> Any:
        kind = type(request)
        if kind not in seen:
            seen.add(kind)
            met[f"verb: {kind.__name__}"] = 1
            met["verb: bookie_server.Bookie.handle"] = 1
        return handle(self, request)

    return handled


def _like(original: Any, function: Callable[..., Any]) -> Any:
    """A class or static method stays one."""
    kind = type(original)
    return kind(function) if kind in (classmethod, staticmethod) else function
