"""A model of ZooKeeper: linearizable writes, reads that lag, outcomes that get lost.

Always true:
- writes are applied one at a time in one order (the zxid); each sees all before it;
- a session reads from a replica that may lag behind, never goes back, contains the session's own
  writes, and after `sync` every write acknowledged before the sync was called;
- one session's requests are carried out in the order they were made;
- a write whose answer is lost raises OutcomeUnknown and was applied or not, by chance; it is never
  applied after the session reconnected;
- watches fire once, before the session can read what they announce; a suspended or lost session
  fires them all; ephemerals go when the *server* expires the session: its client may learn later.

    store = SimStore(random.Random(7))
    metadata = store.session("writer")           # a MetadataStore
    store.faults.lag_s = 2.0                     # followers lag up to two seconds
    store.faults.unknown = 0.1                   # one write in ten has an unknown outcome
    metadata.suspend(5.0); metadata.expire(); store.stall(10.0)
    store.peek("/x")                             # the truth, at once
    store.listeners.append(lambda commit: ...)   # every applied write, for checkers
On a real loop its milliseconds are real.
"""

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from spark_ledger.metadata.store import (
    ANY_VERSION,
    MultiFailed,
    Operation,
    OutcomeUnknown,
    SessionState,
    StoreError,
    StoreUnavailable,
    Versioned,
    Watcher,
)
from spark_ledger.metadata.store_calls import call_each, read
from tests.simulation.loop import running
from tests.simulation.network import _outside
from tests.simulation.store_tree import Change, Tree, Write, split

_Watches = dict[str, dict[Watcher, Context]]
"""By path: the watchers, each with the context (process) in which it is called."""
EPOCH_MS = 1_700_000_000_000  # what the store's clock shows when simulated time is 0


@dataclass
class StoreFaults:
    """Times in simulated seconds; `unknown` is a chance between 0 and 1 of each write."""

    delay_s: tuple[float, float] = (0.0002, 0.002)
    lag_s: float = 0.0
    """How far a replica may be behind, at most."""
    unknown: float = 0.0
    missed: float = 0.0
    """The share of watches that never learn of the change that they wait for."""
    session_timeout_s: float = 30.0
    request_timeout_s: float = 10.0


@dataclass(frozen=True, slots=True)
class Commit:
    """One applied write. `session` is the name of the client ("" = the server itself)."""

    zxid: int
    time: float
    session: str
    changes: tuple[Change, ...]


class SimStore:
    """The ensemble: the truth, its history and its sessions. All chance comes from `rng`."""

    def __init__(self, rng: random.Random | None = None, faults: StoreFaults | None = None) -> None:
        self.faults = faults or StoreFaults()
        self.rng = rng or random.Random(0)
        self.log: list[Commit] = []
        self.listeners: list[Callable[[Commit], None]] = []
        self.sessions: list[SimSession] = []
        self.stalled_until = 0.0
        self._held: list[Callable[[], None]] = []
        self.tree = Tree()
        self._next_session = 1

    def session(self, name: str = "session") -> "SimSession":
        """A connected client; `name` shows in commits."""
        session = SimSession(self, name)
        self.sessions.append(session)
        return session

    def stall(self, seconds: float) -> None:
        """Nothing is answered until then; what arrives is carried out afterwards."""
        loop = asyncio.get_running_loop()
        self.stalled_until = max(self.stalled_until, _now() + seconds)
        loop.call_at(self.stalled_until, self.release, context=_outside(loop))

    @property
    def is_stalled(self) -> bool:
        """Whether no client gets an answer now."""
        return _now() < self.stalled_until

    def hold(self, arrival: Callable[[], None]) -> None:
        """Keep a request that arrived while stalled, in order."""
        self._held.append(arrival)

    def release(self) -> None:
        """Carry out what was held, if the stall is over."""
        if not self.is_stalled:
            held, self._held = self._held, []
            for arrival in held:
                arrival()

    def calm(self) -> None:
        """No delay, lag, unknown outcome or stall, every session connected: for the healing."""
        self.faults = StoreFaults(
            session_timeout_s=self.faults.session_timeout_s,
            request_timeout_s=self.faults.request_timeout_s,
        )
        self.stalled_until = 0.0
        self.release()
        for session in self.sessions:
            session.reconnect()

    @property
    def zxid(self) -> int:
        return len(self.log)

    def peek(self, path: str) -> Versioned | None:
        """The truth about a node now, without a session."""
        return self.tree.nodes.get(path)

    def peek_children(self, path: str) -> list[str]:
        return sorted(self.tree.children.get(path, ()))

    def child_count(self, path: str) -> int:
        return len(self.tree.children.get(path, ()))

    def ephemerals_of(self, owner: int) -> list[str]:
        """The paths that go when that session ends."""
        return [path for path, node in self.tree.nodes.items() if node.owner == owner]

    def walk(self, path: str = "/") -> list[tuple[str, Versioned]]:
        """Every node at or below `path`, in the order of paths."""
        prefix = path.rstrip("/") + "/"
        nodes = self.tree.nodes.items()
        return sorted((p, n) for p, n in nodes if p == path or p.startswith(prefix))

    # -- for sessions --------------------------------------------------------------------------

    def new_session_id(self) -> int:
        self._next_session += 1
        return self._next_session

    def write(self, session: str, evaluate: Callable[[Write], Any]) -> Any:
        """Apply one transaction, or raise and change nothing."""
        now = _now()
        write = Write(self.tree, EPOCH_MS + int(now * 1000), self.zxid + 1)
        try:
            result = evaluate(write)
        except StoreError:
            write.undo()
            raise
        if write.changes:
            commit = Commit(self.zxid + 1, now, session, tuple(write.changes))
            self.log.append(commit)
            for other in self.sessions:
                other.notice(commit)
            for listener in self.listeners:
                listener(commit)
        return result

    def drop_ephemerals(self, owner: int) -> None:
        """The server ends a session."""
        mine = [path for path, node in self.tree.nodes.items() if node.owner == owner]
        for path in sorted(mine, reverse=True):
            self.write("", lambda write, path=path: write.delete(path, ANY_VERSION))


@dataclass(eq=False)
class _Request:
    action: Callable[[], Any]
    write: bool
    answer: "asyncio.Future[Any]"
    deadline: float
    dropped: bool = field(default=False)


class SimSession:
    """spark_ledger.metadata.store.MetadataStore for one client."""

    def __init__(self, store: SimStore, name: str) -> None:
        self.name = name
        self._store = store
        self._id = store.new_session_id()
        self._state, self.connections = SessionState.CONNECTED, 1
        self._listeners: list[tuple[Callable[[SessionState], None], Context]] = []
        self.replica = Tree()
        self._seen = 0
        """The zxid the replica has reached."""
        self.data_watches: _Watches = {}
        self._child_watches: _Watches = {}
        self._requests: dict[_Request, None] = {}
        self._last_arrival = self._last_answer = 0.0
        self._expired = False  # by the server; the client may not know yet
        self._ended = False
        self._suspensions = 0

    # -- MetadataStore -------------------------------------------------------------------------

    @property
    def session_state(self) -> SessionState:
        return self._state

    @property
    def session_id(self) -> int:
        return self._id

    def add_session_listener(self, listener: Callable[[SessionState], None]) -> None:
        self._listeners.append((listener, copy_context()))

    async def get(self, path: str, watch: Watcher | None = None) -> Versioned:
        context = copy_context()

        def read() -> Versioned:
            if watch is not None and not self._ended:  # it was killed meanwhile
                _add_watch(self.data_watches, path, watch, context)
            return self.replica.get(path)

        return await self._read(read)  # type: ignore[no-any-return]

    async def get_many(self, paths: Sequence[str]) -> list[Versioned | None]:
        return await call_each(partial(read, self), paths, 128)

    async def children(self, path: str, watch: Watcher | None = None) -> list[str]:
        context = copy_context()

        def read() -> list[str]:
            self.replica.get(path)
            if watch is not None and not self._ended:  # it was killed meanwhile
                _add_watch(self._child_watches, path, watch, context)
            return sorted(self.replica.children[path])

        return await self._read(read)  # type: ignore[no-any-return]

    async def create(
        self, path: str, value: bytes = b"", *, ephemeral: bool = False, parents: bool = False
    ) -> None:
        def evaluate(write: Write) -> None:
            if parents:
                write.create_parents(path)
            write.create(path, value, self._id if ephemeral else 0)

        await self._write(evaluate)

    async def set(self, path: str, value: bytes, version: int) -> int:
        return await self._write(lambda write: write.set(path, value, version))  # type: ignore[no-any-return]

    async def delete(self, path: str, version: int = ANY_VERSION) -> None:
        await self._write(lambda write: write.delete(path, version))

    async def multi(self, operations: Sequence[Operation]) -> None:
        listed = tuple(operations)

        def evaluate(write: Write) -> None:
            for index, operation in enumerate(listed):
                try:
                    write.run(operation)
                except StoreError as error:
                    raise MultiFailed(index, error) from error

        await self._write(evaluate)

    async def sync(self, path: str = "/") -> None:
        await self._submit(lambda: self._catch_up(self._store.zxid), write=False)

    async def close(self) -> None:
        if not self._ended:
            self._ended = True
            self._store.drop_ephemerals(self._id)
            self._drop_requests(StoreUnavailable("the session is closed"))
            self._enter(SessionState.LOST)

    # -- faults --------------------------------------------------------------------------------

    def suspend(self, seconds: float) -> None:
        """Lose the connection for that long; beyond the time-out the server expires the session."""
        if self._ended or self._state is not SessionState.CONNECTED:
            return
        loop = asyncio.get_running_loop()
        self._suspensions += 1
        self._enter(SessionState.SUSPENDED)
        self._interrupt()
        timeout = self._store.faults.session_timeout_s
        if seconds > timeout:
            loop.call_later(timeout, self._expire_at_server, self._id, context=_outside(loop))
        loop.call_later(seconds, self._reconnect, self._suspensions, context=_outside(loop))

    def expire(self) -> None:
        """The server ends the session now; the client learns it at its next request or ping."""
        if self._ended:
            return
        self._expire_at_server(self._id)
        loop = asyncio.get_running_loop()
        ping_s = self._store.rng.uniform(0, self._store.faults.session_timeout_s / 3)
        loop.call_later(ping_s, self._ping, self._id, context=_outside(loop))

    def abandon(self) -> None:
        """The client was killed: nothing more is answered, its ephemerals go at the time-out."""
        if self._ended:
            return
        self._ended = True
        for request in list(self._requests):
            self._decide_lost(request)
        self._requests.clear()
        self.data_watches.clear()
        self._child_watches.clear()
        loop = asyncio.get_running_loop()
        timeout = self._store.faults.session_timeout_s
        loop.call_later(timeout, self._expire_at_server, self._id, context=_outside(loop))

    # -- requests ------------------------------------------------------------------------------

    def _read(self, read: Callable[[], Any]) -> Coroutine[Any, Any, Any]:
        def on_replica() -> Any:
            self._catch_up(self._drawn_zxid())
            return read()

        return self._submit(on_replica, write=False)

    def _write(self, evaluate: Callable[[Write], Any]) -> Coroutine[Any, Any, Any]:
        def on_leader() -> Any:
            try:
                return self._store.write(self.name, evaluate)
            finally:
                self._catch_up(self._store.zxid)

        return self._submit(on_leader, write=True)

    async def _submit(self, action: Callable[[], Any], *, write: bool) -> Any:
        if self._ended:
            raise StoreUnavailable("the session is closed")
        loop = asyncio.get_running_loop()
        deadline = _now() + self._store.faults.request_timeout_s
        request = _Request(action, write, loop.create_future(), deadline)
        self._requests[request] = None
        self._send(request)
        try:
            return await request.answer
        finally:
            self._requests.pop(request, None)
            del request  # or an error would hold, by this frame, the future that holds it

    def _send(self, request: _Request) -> None:
        """Put the request on the wire; while disconnected it waits for the connection."""
        loop = asyncio.get_running_loop()
        if self._state is not SessionState.CONNECTED:
            why = StoreUnavailable("not connected to the metadata store")
            loop.call_at(
                *(request.deadline, self._fail_waiting, request, why, self._suspensions),
                context=_outside(loop),
            )
            return
        self._last_arrival = max(self._last_arrival, _now() + self._delay())
        loop.call_at(
            self._last_arrival, self._arrive, request, self._suspensions, context=_outside(loop)
        )

    def _fail_waiting(self, request: _Request, why: StoreError, suspensions: int) -> None:
        """The request never left: the connection did not come back in time."""
        if self._suspensions == suspensions and self._state is not SessionState.CONNECTED:
            _settle(request, why)

    def _arrive(self, request: _Request, suspensions: int) -> None:
        if request.dropped or suspensions != self._suspensions:
            return
        if self._store.is_stalled:
            loop = asyncio.get_running_loop()
            self._store.hold(partial(self._arrive, request, suspensions))
            loop.call_at(request.deadline, self._time_out, request, context=_outside(loop))
            return
        if self._expired:
            self._learn_expiry()
            return
        if request.write and self._store.rng.random() < self._store.faults.unknown:
            self.suspend(self._store.rng.uniform(0.01, 3.0))
            return
        self._carry_out(request, suspensions)

    def _carry_out(self, request: _Request, suspensions: int) -> None:
        try:
            outcome = request.action()
        except StoreError as error:
            outcome = error.with_traceback(None)  # as from a wire; it would hold itself in a cycle
        request.dropped = True  # decided: never again
        loop = asyncio.get_running_loop()
        self._last_answer = max(self._last_answer, _now() + self._delay())
        loop.call_at(
            self._last_answer, self._deliver, request, outcome, suspensions, context=_outside(loop)
        )

    def _deliver(self, request: _Request, outcome: Any, suspensions: int) -> None:
        if suspensions == self._suspensions and not self._ended:
            _settle(request, outcome)

    def _time_out(self, request: _Request) -> None:
        why = OutcomeUnknown if request.write else StoreUnavailable
        _settle(request, why("the metadata store did not answer in time"))

    def _interrupt(self) -> None:
        """The connection broke: decide what was on its way; reads wait for the next connection."""
        for request in list(self._requests):
            if request.answer.done():
                continue
            if request.write:
                self._decide_lost(request)
                _settle(request, OutcomeUnknown("the connection to the metadata store broke"))
            else:
                request.dropped = False
                self._send(request)

    def _decide_lost(self, request: _Request) -> None:
        """A write whose answer will not come: applied or not, by chance."""
        applies = request.write and not request.dropped and not self._expired
        request.dropped = True
        if applies and self._store.rng.random() < 0.5:
            with _ignored():
                request.action()

    def _drop_requests(self, why: StoreError) -> None:
        for request in list(self._requests):
            request.dropped = True
            _settle(request, why)

    # -- the session's life ----------------------------------------------------------------------

    def reconnect(self) -> None:
        """End a suspension before its time, and let the client learn an expiry."""
        self._reconnect(self._suspensions)
        self._ping(self._id)

    def _ping(self, session_id: int) -> None:
        if session_id == self._id and self._expired and not self._ended:
            self._learn_expiry()

    def _reconnect(self, suspension: int) -> None:
        suspended = self._state is SessionState.SUSPENDED
        if self._ended or not suspended or suspension != self._suspensions:
            return
        if self._expired:
            self._renew()
            return
        self._enter(SessionState.CONNECTED)
        self._resend()

    def _learn_expiry(self) -> None:
        """A request met the news that the session is gone: writes were not applied, but the client
        cannot tell that from a lost answer."""
        self._suspensions += 1
        self._enter(SessionState.SUSPENDED)
        self._interrupt()
        self._renew()

    def _renew(self) -> None:
        self._enter(SessionState.LOST)
        self._expired = False
        self._id = self._store.new_session_id()
        self._enter(SessionState.CONNECTED)
        self._resend()

    def _resend(self) -> None:
        for request in list(self._requests):
            if not request.answer.done() and not request.dropped:
                self._send(request)

    def _expire_at_server(self, session_id: int) -> None:
        if session_id == self._id and not self._expired:
            self._expired = True
            self._store.drop_ephemerals(session_id)

    def _enter(self, state: SessionState) -> None:
        self._state = state
        self.connections += state is SessionState.CONNECTED
        if state is not SessionState.CONNECTED:
            for watches in (self.data_watches, self._child_watches):
                for path in list(watches):
                    self._fire(watches, path)
        loop = asyncio.get_running_loop()
        for listener, context in self._listeners:
            loop.call_soon(listener, state, context=context)

    # -- the replica -------------------------------------------------------------------------

    def notice(self, commit: Commit) -> None:
        """The leader committed: if a watch waits for it, the replica hears in time."""
        if self._ended or not (self.data_watches or self._child_watches):
            return
        if any(self._watched(change) for change in commit.changes):
            loop = asyncio.get_running_loop()
            lag = self._store.rng.uniform(0, self._store.faults.lag_s) + self._delay()
            loop.call_later(lag, self._catch_up, commit.zxid, context=_outside(loop))

    def watched(self) -> list[str]:
        """The paths that this client has watches on."""
        return [*self.data_watches, *self._child_watches]

    def _watched(self, change: Change) -> bool:
        if change.path in self.data_watches:
            return True
        appears_or_goes = (change.before is None) != (change.after is None)
        return appears_or_goes and (
            split(change.path)[0] in self._child_watches or change.path in self._child_watches
        )

    def _drawn_zxid(self) -> int:
        """How far the replica is when a read meets it."""
        lag = self._store.faults.lag_s
        if lag <= 0:
            return self._store.zxid
        horizon = _now() - self._store.rng.uniform(0, lag)
        zxid = self._seen
        while zxid < self._store.zxid and self._store.log[zxid].time <= horizon:
            zxid += 1
        return zxid

    def _catch_up(self, zxid: int) -> None:
        if self._ended:
            return
        while self._seen < zxid:
            commit = self._store.log[self._seen]
            self._seen += 1
            for change in commit.changes:
                self.replica.put(change.path, change.after)
            if self.data_watches or self._child_watches:
                for change in commit.changes:
                    self._fire_for(change)

    def _fire_for(self, change: Change) -> None:
        missed = self._store.faults.missed
        if missed and self._watched(change) and self._store.rng.random() < missed:
            self._forget_watches(change)
            return
        self._fire(self.data_watches, change.path)
        if (change.before is None) != (change.after is None):
            self._fire(self._child_watches, split(change.path)[0])
        if change.after is None:
            self._fire(self._child_watches, change.path)

    def _forget_watches(self, change: Change) -> None:
        """Nobody hears of this change, nor of a later one by the same watch."""
        self.data_watches.pop(change.path, None)
        self._child_watches.pop(change.path, None)
        if (change.before is None) != (change.after is None):
            self._child_watches.pop(split(change.path)[0], None)

    def _fire(self, watches: _Watches, path: str) -> None:
        waiting = watches.pop(path, None)
        if waiting:
            loop = asyncio.get_running_loop()
            for watcher, context in waiting.items():
                loop.call_soon(watcher, context=context)

    def _delay(self) -> float:
        shortest, longest = self._store.faults.delay_s
        return shortest + (longest - shortest) * self._store.rng.random()  # as uniform does


def _add_watch(watches: _Watches, path: str, watch: Watcher, context: Context) -> None:
    """As ZooKeeper's clients do: the same watcher set twice on one path is one watch."""
    watches.setdefault(path, {}).setdefault(watch, context)


def _now() -> float:
    """The true time: the store's own clock never jumps, whichever process asks."""
    loop = running()
    return asyncio.get_running_loop().time() if loop is None else loop.now


def _settle(request: _Request, outcome: Any) -> None:
    if request.answer.done():
        return
    if isinstance(outcome, StoreError):
        request.answer.set_exception(outcome)
    else:
        request.answer.set_result(outcome)


class _ignored:
    """Drops errors of a write whose client does not hear of them."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: object, trace: object) -> bool:
        return isinstance(error, StoreError)
