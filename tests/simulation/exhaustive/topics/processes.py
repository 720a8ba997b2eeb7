"""A process: production code alone in a loop of its own, given one answer of the store at a time.

Always true: what a process does is a function of the answers it was given, in their order (its
local history), so production code is run once for each local history, whatever the others did
meanwhile; that the same history asks for the same things again is asserted at every replay. Its
requests are carried out in their order, and an answer comes at once: what may come between is
another's request, and that is as well carried out before. When it waits for no answer its next
timer fires: a pause may take any time.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from spark_ledger.metadata.store import (
    ANY_VERSION,
    MultiFailed,
    SessionState,
    StoreError,
    Versioned,
    Watcher,
)
from spark_ledger.metadata.store import Operation as StoreOperation
from tests.simulation.exhaustive.actor_loop import ActorLoop
from tests.simulation.exhaustive.topics.worlds import Answer, Failure, Operation

TIMERS_MAX = 200  # without an answer in between; more is a livelock
Note = tuple[Any, ...]
Program = Callable[["Process"], Awaitable[None]]


class Ids(random.Random):
    """Draws that do not depend on how often a race was lost: ids are counted, pauses are equal."""

    def __init__(self, name: str) -> None:
        super().__init__(0)
        self._drawn = 0
        self._first = random.Random(name).getrandbits(96) << 32

    def getrandbits(self, bits: int) -> int:
        self._drawn += 1
        return self._first + self._drawn

    def uniform(self, low: float, high: float) -> float:
        return high


class Process:
    """What a program is given: `store` (a MetadataStore), `ask` for the rest, `note` for judges."""

    session_state = SessionState.CONNECTED
    connections = 1
    session_id = 1

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop) -> None:
        self.name = name
        self.rng = Ids(name)
        self.waiting: list[tuple[Operation, asyncio.Future[Any]]] = []
        """What it asked for, oldest first."""
        self.first: dict[str, Versioned] = {}
        """The store's first answer for each node."""
        self._notes: list[Note] = []
        self._loop = loop

    def note(self, *facts: Hashable) -> None:
        """Tell the judge."""
        self._notes.append(facts)

    def take_notes(self) -> tuple[Note, ...]:
        notes, self._notes = tuple(self._notes), []
        return notes

    async def ask(self, *operation: Any) -> Any:
        answered = self._loop.create_future()
        self.waiting.append((operation, answered))
        return await answered

    # -- MetadataStore -----------------------------------------------------------------------

    def add_session_listener(self, listener: Callable[[SessionState], None]) -> None: ...

    async def get(self, path: str, watch: Watcher | None = None) -> Versioned:
        found: Versioned = await self.ask("get", path)
        return self.first.setdefault(path, found) if path not in self.first else found

    async def children(self, path: str, watch: Watcher | None = None) -> list[str]:
        return list(await self.ask("children", path))

    async def create(
        self, path: str, value: bytes = b"", *, ephemeral: bool = False, parents: bool = False
    ) -> None:
        await self.ask("create", path, bytes(value), parents)

    async def set(self, path: str, value: bytes, version: int) -> int:
        return await self.ask("set", path, bytes(value), version)

    async def delete(self, path: str, version: int = ANY_VERSION) -> None:
        await self.ask("delete", path, version)

    async def multi(self, operations: Sequence[StoreOperation]) -> None:
        await self.ask("multi", tuple(operations))

    async def sync(self, path: str = "/") -> None:
        await self.ask("sync", path)

    async def close(self) -> None: ...


def _error(kind: type[StoreError], arguments: tuple[Any, ...]) -> StoreError:
    if kind is MultiFailed:
        index, cause = arguments
        assert isinstance(cause, Failure)
        return MultiFailed(index, cause.kind())
    return kind(*arguments)


class Live:
    """A process that runs: what it asks for first is `operation` (None: it has ended)."""

    def __init__(self, name: str, program: Program) -> None:
        self._loop = ActorLoop(float("inf"))
        with self._loop.entered():
            self.process = Process(name, self._loop)
            self._task = self._loop.create_task(program(self.process))
        self._rest()

    @property
    def operation(self) -> Operation | None:
        return self.process.waiting[0][0] if self.process.waiting else None

    def answer(self, answer: Answer) -> None:
        """The first operation was carried out."""
        _, answered = self.process.waiting.pop(0)
        with self._loop.entered():
            if answer[0] == "raised":
                answered.set_exception(_error(answer[1], answer[2]))
            else:
                answered.set_result(answer[1])
        self._rest()

    def _rest(self) -> None:
        self._loop.settle()
        for _ in range(TIMERS_MAX):
            if self.process.waiting or self._task.done():
                break
            assert self._loop.grace, f"{self.process.name} waits for nothing: a deadlock"
            self._loop.fire()
            self._loop.settle()
        else:
            raise AssertionError(f"{self.process.name} does not come to rest")
        if self._task.done():
            self._task.result()
            assert not self.process.waiting, "who has ended asks for nothing"

    def discard(self) -> None:
        self._loop.discard()


@dataclass(eq=False)
class Moment:
    """A process after a local history: what it asks for next, None when it has ended. `after`: by
    the answer the moment that follows, and what the judge is told then."""

    number: int
    operation: Operation | None
    before: "Moment | None" = None
    answer: Answer = ()
    after: "dict[Answer, tuple[Moment, tuple[Note, ...]]]" = field(default_factory=dict)
    live: Live | None = None

    def answers(self) -> list[Answer]:
        """The local history."""
        found: list[Answer] = []
        moment = self
        while moment.before is not None:
            found.append(moment.answer)
            moment = moment.before
        return found[::-1]


class Learner:
    """All that is known of one process; it is learnt as the search comes there. All its ends are
    one moment: what it told was judged by then."""

    def __init__(self, name: str, program: Program) -> None:
        self.name = name
        self.runs = 0
        """How often production code was begun from nothing."""
        self.moments: list[Moment] = []
        self._program = program
        self._end = self._moment(None)
        live = self._begin()
        assert not live.process.take_notes(), "who has asked nothing has nothing to tell"
        self.first = self._moment(live)

    def after(self, moment: Moment, answer: Answer) -> tuple[Moment, tuple[Note, ...]]:
        """The moment that follows once what was asked for is answered, and what was told then."""
        found = moment.after.get(answer)
        if found is None:
            live, moment.live = moment.live or self._again(moment), None
            live.answer(answer)
            then = self._end if live.operation is None else self._moment(live, moment, answer)
            found = moment.after[answer] = then, live.process.take_notes()
            if then is self._end:
                live.discard()
        return found

    def discard(self) -> None:
        for moment in self.moments:
            if moment.live is not None:
                moment.live.discard()
                moment.live = None

    def _begin(self) -> Live:
        self.runs += 1
        return Live(self.name, self._program)

    def _again(self, moment: Moment) -> Live:
        way: list[Moment] = []
        one: Moment | None = moment
        while one is not None:
            way.append(one)
            one = one.before
        way.reverse()
        live = self._begin()
        for earlier, later in pairwise(way):
            assert live.operation == earlier.operation, "the same history asks for the same things"
            live.answer(later.answer)
        live.process.take_notes()
        return live

    def _moment(
        self, live: Live | None, before: Moment | None = None, answer: Answer = ()
    ) -> Moment:
        operation = None if live is None else live.operation
        moment = Moment(len(self.moments), operation, before, answer, live=live)
        self.moments.append(moment)
        return moment
