"""The actors: bookies, clients and the metadata store, each running production code alone.

Always true: an actor gets one event at a time (`do`), runs until it is at rest, and returns what it
sent and what observers would have seen. The same events give the same steps: an actor is a
deterministic automaton, whatever the others do meanwhile.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Hashable
from typing import Any

from bookie_server.api import codec
from bookie_server.api import messages as m
from bookie_server.bookie import Bookie
from bookie_server.storage.directories import Directories, JournalDirectory, LedgerDirectory
from spark_ledger.bookies.bookie_client import BookieClient
from spark_ledger.bookies.directory import BookieDirectory
from spark_ledger.ledger.client import LedgerStore
from spark_ledger.metadata.store import MultiFailed, StoreError
from tests.kit.budgets import CLIENT, STORAGE
from tests.kit.handling import handle_bytes
from tests.kit.settings import with_settings
from tests.simulation.exhaustive.actor_loop import ActorLoop
from tests.simulation.exhaustive.doors import Calls, GatedDisk, NetworkDoor, StoreDoor
from tests.simulation.exhaustive.messages import (
    CRASH,
    RESTART,
    STORE,
    SYNC,
    TIMER,
    Asked,
    Commit,
    Event,
    Exchange,
    Message,
    Seen,
    Step,
)
from tests.simulation.index import SimIndex
from tests.simulation.store import EPOCH_MS
from tests.simulation.store_tree import Tree, Write

_QUESTIONS = ("Read", "ReadLac")
GRACE_S = 1.0  # timers set no longer ahead are events; longer ones are time-outs
STORAGE_QUIET = with_settings(STORAGE, flush_interval_s=1e9)


class Actor:
    """One automaton. `begin` ends the set-up; from then on the explorer chooses."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._seen: list[Seen] = []

    def start(self) -> None:
        """Come up."""

    def begin(self) -> None:
        """The set-up is over."""

    def do(self, event: Event) -> Step:
        """Let the event happen, and run until the actor is at rest. Raises Defect."""
        raise NotImplementedError

    def choices(self) -> tuple[str, ...]:
        """The events of its own that may happen to it now."""
        return ()

    def waits_for(self, asked: Asked) -> bool:
        """Whether an answer to this would matter to it."""
        return True

    def waiting(self) -> frozenset[Asked] | None:
        """The requests whose answers a client waits for; None for an actor that is asked."""
        return None

    def facts(self) -> Any:
        """What the final judgement wants to know of it."""
        return None

    def identity(self) -> Hashable:
        """The whole state of the actor, if it is known: equal ones have the same future. Else
        None."""
        return None

    def discard(self) -> None:
        """Free what it holds."""

    def _take_seen(self) -> tuple[Seen, ...]:
        seen, self._seen = tuple(self._seen), []
        return seen


class BookieActor(Actor):
    """A bookie: the real Bookie behind handle_bytes, on simulated disks whose syncs are events."""

    def __init__(
        self, name: str, bookie_id: str, ledger_id: int, entries: int, crash: bool, reset: bool
    ) -> None:
        super().__init__(name)
        self.bookie_id = bookie_id
        self._ledger_id = ledger_id
        self._last_probed = entries
        self._may_crash = crash
        self._resets = reset
        self._disks = (GatedDisk(), GatedDisk())
        self._moment = 1  # answers given while something was under way, and 1
        self._under_way: dict[Asked, None] = {}
        self._sent: list[Message] = []
        self.down = False

    def start(self) -> None:
        self._boot()

    def begin(self) -> None:
        for disk in self._disks:
            disk.free = False

    def do(self, event: Event) -> Step:
        if isinstance(event, Message):
            self._deliver(event)
        elif event == SYNC:
            next(disk for disk in self._disks if disk.syncing).end_sync()
            self._loop.settle()
        elif event == CRASH:
            self._crash()
        else:
            assert event == RESTART
            self._restart()
        sent, self._sent = tuple(self._sent), []
        return Step(sent + self._calls.take_sent(), self._take_seen())

    def choices(self) -> tuple[str, ...]:
        if self.down:
            return (RESTART,)
        sync = (SYNC,) if any(disk.syncing for disk in self._disks) else ()
        return (*sync, CRASH) if self._may_crash else sync

    def facts(self) -> Any:
        """What it answers to unfenced questions for the ledger's state and entries."""
        if self.down:
            return "down"
        lac = m.ReadLacRequest(self.bookie_id, self._ledger_id)
        read = m.ReadRequest(self.bookie_id, self._ledger_id, 0, self._last_probed, 1 << 20)
        return self._ask(lac), self._ask(read)

    def identity(self) -> Hashable:
        """Of a dead one, its disks: what it will be is what boots from them."""
        if not self.down:
            return None
        return tuple(tuple((path, d.content(path)) for path in d.paths()) for d in self._disks)

    def discard(self) -> None:
        self._loop.discard()

    # -- life ----------------------------------------------------------------------------------

    def set_free(self) -> None:
        """From now on syncs take no time, those under way included."""
        for disk in self._disks:
            disk.free = True
            while disk.syncing:
                disk.end_sync()
        self._loop.settle()

    def _boot(self) -> None:
        self._loop = ActorLoop(grace_s=0.0)
        self._calls = Calls(self.name, self._loop)
        booting = self._run(self._booted())
        self.bookie = booting.result()

    async def _booted(self) -> Bookie:
        journal_disk, ledger_disk = self._disks
        index = await SimIndex.open(ledger_disk)
        store = StoreDoor(self._calls)
        directories = Directories(
            [JournalDirectory("journal", journal_disk)],
            [LedgerDirectory("ledger", ledger_disk, index)],
        )
        return await Bookie.start(self.bookie_id, directories, store, STORAGE_QUIET)

    def _crash(self) -> None:
        """The power fails: what was not synced is gone, and whatever was under way."""
        self.down, self._may_crash = True, False
        for disk in self._disks:
            disk.crash("none")
        self._loop.discard()
        self._reset(*self._under_way)
        self._under_way.clear()
        self._moment = 1
        self._sent = [message for message in self._sent if message.body is None]

    def _restart(self) -> None:
        """Boot in one go (no client hears of it before it serves), and note what it still knows."""
        self.down = False
        for disk in self._disks:
            disk.free = True
        self._boot()
        self._seen.append(Seen("restarted", (self.bookie_id, self._ledger_id, *self.facts())))
        self.begin()

    def _reset(self, *asked: Asked) -> None:
        """Answer the callers of questions that the connection broke. A client that adds gets no
        answer: it would try again, and again, and its time-out is far."""
        if self._resets:
            self._sent += [Message(one, True) for one in asked if one.call.method in _QUESTIONS]

    # -- requests ------------------------------------------------------------------------------

    def _deliver(self, message: Message) -> None:
        if message.answer:
            self._calls.answered(message)
            self._loop.settle()
        elif self.down:
            self._reset(message.asked)
        else:
            self._run(self._work(message))

    async def _work(self, message: Message) -> None:
        asked, begun = message.asked, self._moment
        call, request = asked
        self._under_way[asked] = None
        answer = await handle_bytes(self.bookie, call.method, request)
        del self._under_way[asked]
        where = (call.caller, self.name, call.method, request, bytes(answer))
        exchange = Exchange(*where, begun, self._moment + 1)
        self._seen.append(Seen("exchange", (exchange, not self._under_way)))
        self._moment = self._moment + 1 if self._under_way else 1
        self._sent.append(Message(asked, True, bytes(answer)))

    def _ask(self, request: m.Request) -> bytes:
        """The answer to a question that changes nothing."""
        return codec.encode(self._run(self.bookie.handle(request)).result())

    def _run(self, work: Any) -> "asyncio.Task[Any]":
        with self._loop.entered():
            task = self._loop.create_task(work)
        self._loop.settle()
        return task


Program = Callable[["ClientActor"], Awaitable[Any]]


class ClientActor(Actor):
    """A client: the real LedgerStore and what is below it, up to the network's and store's doors.
    `prepare` is its part in the set-up, `program` what it does afterwards."""

    def __init__(self, name: str, prepare: Program, program: Program) -> None:
        super().__init__(name)
        self._prepare = prepare
        self._program = program
        self._loop = ActorLoop(GRACE_S)
        self._calls = Calls(name, self._loop)
        self._ended: Hashable = None
        self.told: list[Hashable] = []
        """What the program has learned so far, for the final judgement."""
        self.kept: Any = None
        """What `prepare` made, for `program`."""

    def start(self) -> None:
        self._spawn(self._come_up(), self._prepared)

    def begin(self) -> None:
        self._spawn(self._program(self), self._done)

    def do(self, event: Event) -> Step:
        if isinstance(event, Message):
            self._note_taken(event)
            self._calls.answered(event)
        else:
            assert event == TIMER
            self._loop.fire()
        self._loop.settle()
        return Step(self._calls.take_sent(), self._take_seen())

    def _note_taken(self, message: Message) -> None:
        call, request = message.asked
        if call.callee != STORE and message.body is not None:
            where = (call.caller, call.callee, call.method, request, message.body)
            self.see("delivered", Exchange(*where, 0, 0))

    def choices(self) -> tuple[str, ...]:
        return (TIMER,) if self._loop.grace else ()

    def waits_for(self, asked: Asked) -> bool:
        return asked in self._calls.open

    def facts(self) -> Any:
        return (*self.told, self._ended)

    def waiting(self) -> frozenset[Asked]:
        return frozenset(self._calls.open)

    def sent(self) -> tuple[Message, ...]:
        return self._calls.take_sent()

    def see(self, what: str, *facts: Any) -> None:
        """Tell the observers."""
        self._seen.append(Seen(what, facts))

    def take_seen(self) -> tuple[Seen, ...]:
        return self._take_seen()

    def discard(self) -> None:
        self._loop.discard()

    async def _come_up(self) -> None:
        metadata = StoreDoor(self._calls)
        directory = BookieDirectory(metadata, CLIENT.directory_refresh_s)
        await directory.start()
        self.bookies = BookieClient(NetworkDoor(self._calls), directory, CLIENT)
        rng = random.Random(self.name)
        self.ledgers = LedgerStore(metadata, self.bookies, directory, CLIENT, rng)
        await self._prepare(self)

    def _spawn(self, work: Any, done: Callable[[Any], None]) -> None:
        with self._loop.entered():
            self._loop.create_task(work).add_done_callback(done)
        self._loop.settle()

    def _prepared(self, task: "asyncio.Task[Any]") -> None:
        if not task.cancelled():
            task.result()

    def _done(self, task: "asyncio.Task[Any]") -> None:
        if not task.cancelled():
            error = task.exception()
            self._ended = (
                ("ended", task.result()) if error is None else ("raised", type(error).__name__)
            )


class StoreActor(Actor):
    """The metadata store: one operation at a time, in the order of arrival."""

    def __init__(self, tree: Tree, watched: str) -> None:
        super().__init__(STORE)
        self._tree = tree
        self._watched = watched
        self._commits = 0

    def do(self, event: Event) -> Step:
        assert isinstance(event, Message)
        operation, *args = event.asked.body
        write = Write(self._tree, EPOCH_MS)
        try:
            outcome = ("ok", _OPERATIONS[operation](self._tree, write, *args))
        except StoreError as error:
            write.undo()
            outcome = ("raised", type(error), error.args)
        if write.changes:
            self._commits += 1
            commit = Commit(self._commits, 0.0, event.call.caller, tuple(write.changes))
            self._seen.append(Seen("committed", (commit,)))
        return Step((Message(event.asked, True, outcome),), self._take_seen())

    def facts(self) -> Any:
        return self._tree.nodes.get(self._watched)


def _create(_: Tree, write: Write, path: str, value: bytes, parents: bool) -> None:
    if parents:
        write.create_parents(path)
    write.create(path, value, 0)


def _multi(_: Tree, write: Write, operations: tuple[Any, ...]) -> None:
    for index, operation in enumerate(operations):
        try:
            write.run(operation)
        except StoreError as error:
            raise MultiFailed(index, error) from error


def _children(tree: Tree, _: Write, path: str) -> tuple[str, ...]:
    tree.get(path)
    return tuple(sorted(tree.children[path]))


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "get": lambda tree, _, path: tree.get(path),
    "children": _children,
    "create": _create,
    "set": lambda _, write, *args: write.set(*args),
    "delete": lambda _, write, *args: write.delete(*args),
    "multi": _multi,
    "sync": lambda *_: None,
}
