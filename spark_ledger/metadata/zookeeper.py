"""The metadata store in ZooKeeper, over kazoo; the only file that knows kazoo.

Always true:
- responses, watch events and changes of the session reach the event loop in the order in which
  ZooKeeper sent them: all three are handed over by kazoo's connection thread, one after another;
- what ZooKeeper would cut the connection for is refused here: ValueTooBig;
- a write is sent at most once; once sent, losing the connection, the session or patience before
  its response is OutcomeUnknown; before it is sent, StoreUnavailable;
- a watch asked for twice by the same function on the same path is one watch;
- while ZooKeeper is away reads, and writes that were not sent, wait as outage.py has it;
- a server that closes every connection without a greeting refuses, which errors say: it has no
  quorum, or its data are older than what this process has seen (a restored backup). After
  FORGET_SESSIONS times the session's timeout this process no longer insists on what it has seen:
  the session is then another one, and what it reads shows which store that is.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kazoo import exceptions as zk
from kazoo.client import KazooClient, TransactionRequest
from kazoo.handlers.threading import SequentialThreadingHandler
from kazoo.protocol.states import KazooState

from spark_ledger.async_tasks import woken
from spark_ledger.config import DEFAULTS, ServiceUrl, parse
from spark_ledger.errors import Unavailable
from spark_ledger.metadata.outage import Outage
from spark_ledger.metadata.store import (
    ANY_VERSION,
    VALUE_BYTES_MAX,
    BadVersion,
    Check,
    Create,
    Delete,
    MultiFailed,
    NodeExists,
    NoNode,
    NotEmpty,
    Operation,
    OutcomeUnknown,
    SessionState,
    Set,
    StoreError,
    StoreUnavailable,
    ValueTooBig,
    Versioned,
    Watcher,
)

CLOSE_TIMEOUT_S = 1.0
"""What a process that ends waits: ZooKeeper reads the request later, or the session times out."""
HANDSHAKE_S = 2.0
"""Patience for an address to greet; doubled each time it is in vain, up to the session's timeout.
A server that is just starting may take a connection and never respond on it."""
FORGET_SESSIONS = 1.5
"""A session of an older store, which its snapshot may hold, has ended by then."""
RECONNECT = {"max_tries": -1, "delay": 0.05, "backoff": 2, "max_delay": 1.0}

_log = logging.getLogger(__name__)
_LOST_CONTACT = (zk.ConnectionLoss, zk.SessionExpiredError, zk.OperationTimeoutError)
_MEANINGS: tuple[tuple[type[Exception], type[StoreError]], ...] = (
    (zk.NoNodeError, NoNode),
    (zk.NodeExistsError, NodeExists),
    (zk.BadVersionError, BadVersion),
    (zk.NotEmptyError, NotEmpty),
)
_STATES = {
    KazooState.CONNECTED: SessionState.CONNECTED,
    KazooState.SUSPENDED: SessionState.SUSPENDED,
    KazooState.LOST: SessionState.LOST,
}


async def connect(
    service_url: str,
    *,
    session_timeout_s: float = DEFAULTS.session_timeout_s,
    connect_timeout_s: float = DEFAULTS.connect_timeout_s,
    call_timeout_s: float = DEFAULTS.metadata_timeout_s,
    outage_timeout_s: float = DEFAULTS.outage_timeout_s,
    make_root: bool = True,
) -> "ZooKeeperStore":
    """A store over the cluster that `service_url` names; its root is made if absent, unless the
    caller would rather not write anything. Calls wait `call_timeout_s` for a response, and
    `outage_timeout_s` if that is longer, counted from the beginning of an outage.

    Raises errors.Unavailable, which names the URL, when there is no response in
    `connect_timeout_s`, and errors.BadConfig when it is no service URL.
    """
    url = parse(service_url)
    store = ZooKeeperStore(url, session_timeout_s, call_timeout_s, outage_timeout_s)
    try:
        async with asyncio.timeout(connect_timeout_s):
            await store.start(make_root)
    except (TimeoutError, StoreError) as error:
        refused = store.refused
        store.abandon()
        within = f"within {connect_timeout_s:g} s"
        what = f"ZooKeeper at {url} closes every connection without a greeting, {within}"
        raise Unavailable(
            what if refused else f"no ZooKeeper answers at {url} {within}",
            "Its quorum is missing, or it is starting: see its own log." if refused else None,
            service_url=str(url),
        ) from error
    except BaseException:
        store.abandon()
        raise
    return store


class _InOrder(SequentialThreadingHandler):  # type: ignore[misc]
    """Runs callbacks at once, on the connection's thread, instead of on a thread for each kind:
    a watch event then never overtakes the response that was sent before it. Our callbacks only
    hand over to the event loop.

    Waits for a connection to be made and greeted only HANDSHAKE_S at first: kazoo would wait for
    the whole timeout of the session, and so lose it.

    `refused_since_s` (monotonic): since when the server closes each connection without a greeting;
    None while it greets, hangs or cannot be reached. `forget` is called once that has lasted
    `forget_after_s`, on the connection's thread, before it connects again."""

    def __init__(self, forget_after_s: float, forget: Callable[[], None]) -> None:
        super().__init__()
        self.refused_since_s: float | None = None
        self._forget_after_s = forget_after_s
        self._forget = forget
        self._greeted = False
        self._awaits_greeting = False
        self._patience_s = HANDSHAKE_S

    def met(self, connected: bool) -> None:
        """The session is connected now, or no longer."""
        self._greeted = connected
        if connected:
            self._patience_s = HANDSHAKE_S
            self._awaits_greeting, self.refused_since_s = False, None

    def create_connection(self, *args: Any, timeout: float, **kwargs: Any) -> Any:
        self._note_refusal()
        limit = min(timeout, self._patience_s)
        try:
            connection = super().create_connection(*args, timeout=limit, **kwargs)
        except TimeoutError:
            self._patience_s *= 2
            self.refused_since_s = None
            raise
        except OSError:
            self.refused_since_s = None
            raise
        self._awaits_greeting = True
        return connection

    def _note_refusal(self) -> None:
        """The connection before this one, if the server closed it without a greeting."""
        if not self._awaits_greeting:
            return
        self._awaits_greeting = False
        now_s = time.monotonic()
        if self.refused_since_s is None:
            self.refused_since_s = now_s
        elif now_s - self.refused_since_s >= self._forget_after_s:
            self.refused_since_s = now_s
            self._forget()

    def select(self, readers: Any, writers: Any, others: Any, timeout: float) -> Any:
        if self._greeted:
            return super().select(readers, writers, others, timeout)
        ready = super().select(readers, writers, others, min(timeout, self._patience_s))
        if not any(ready):
            self._patience_s *= 2
            self._awaits_greeting, self.refused_since_s = False, None
        return ready

    @property
    def running(self) -> bool:
        return False

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def dispatch_callback(self, callback: Any) -> None:
        callback.func(*callback.args)


class _Watch:
    """A watcher as kazoo keeps it: equal for the same watcher, so that it is kept once."""

    __slots__ = ("_deliver", "_watcher")

    def __init__(self, deliver: Callable[..., None], watcher: Watcher) -> None:
        self._deliver = deliver
        self._watcher = watcher

    def __call__(self, _event: object) -> None:
        self._deliver(self._watcher)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Watch) and other._watcher == self._watcher

    def __hash__(self) -> int:
        return hash(self._watcher)


class _Several:
    """What kazoo will hold of several reads, as if it were of one: the event loop hears once."""

    def __init__(self, read: Callable[[str], Any], paths: Sequence[str]) -> None:
        self._read = read
        self._paths = paths
        self._left = len(paths)
        self._counting = threading.Lock()
        self._results: list[Any] = []

    def rawlink(self, callback: Callable[["_Several"], None]) -> None:
        """Read; `callback` is called by kazoo's connection thread when all have responded."""
        self._results = list(map(self._read, self._paths))

        def responded(_: object) -> None:
            with self._counting:
                self._left -= 1
                over = not self._left
            if over:
                callback(self)

        for result in self._results:
            result.rawlink(responded)

    def get_nowait(self) -> list[Any]:
        """Values and stats, None for a missing node. Raises kazoo's exceptions."""
        nodes: list[Any] = []
        for result in self._results:
            try:
                nodes.append(result.get_nowait())
            except zk.NoNodeError:
                nodes.append(None)
        return nodes


class ZooKeeperStore:
    """A MetadataStore (see store.py) of one event loop and one ZooKeeper session at a time."""

    def __init__(
        self,
        url: ServiceUrl,
        session_timeout_s: float,
        call_timeout_s: float,
        outage_timeout_s: float,
    ) -> None:
        _quieten_kazoo()
        self._root = url.root
        self._call_timeout_s = call_timeout_s
        self._loop = asyncio.get_running_loop()
        self._connected = asyncio.Event()
        self._state = SessionState.LOST
        self._session_id = self._connections = 0
        self._listeners: list[Callable[[SessionState], None]] = []
        self._closed = False
        self._where = f"ZooKeeper at {url}"
        self._outage = Outage(self._why_silent, call_timeout_s, outage_timeout_s)
        self._handler = _InOrder(FORGET_SESSIONS * session_timeout_s, self._forget_seen)
        self._client = KazooClient(
            hosts=",".join(url.hosts),
            timeout=session_timeout_s,
            handler=self._handler,
            connection_retry=RECONNECT,
        )
        self._client.add_listener(self._heard_of_session)

    async def start(self, make_root: bool = True) -> None:
        """Open the session and make the cluster's root. Without a bound of its own."""
        self._client.start_async()
        with self._outage.call("a session"):
            await self._connected.wait()
        if make_root:
            await self._make_parents(f"{self._root}/")

    # -- the session ------------------------------------------------------------------------

    @property
    def session_state(self) -> SessionState:
        return self._state

    @property
    def session_id(self) -> int:
        return self._session_id

    @property
    def connections(self) -> int:
        return self._connections

    def add_session_listener(self, listener: Callable[[SessionState], None]) -> None:
        self._listeners.append(listener)

    @property
    def refused(self) -> bool:
        """Whether the server takes connections and closes each without a greeting."""
        return self._handler.refused_since_s is not None

    def _why_silent(self) -> str:
        if self.refused:
            return (
                f"{self._where} closes every connection (it has no quorum, or its data are older"
                " than what this process has read: a restored backup) and"
            )
        return self._where

    def _forget_seen(self) -> None:
        """Let a server take this process whose last transaction is an earlier one than this
        process has seen: ZooKeeper refuses it for ever otherwise."""
        _log.warning(
            "%s did not take the session; it is tried as a new process would", self._why_silent()
        )
        self._client.last_zxid = 0

    def _heard_of_session(self, state: str) -> None:
        self._handler.met(state == KazooState.CONNECTED)
        identity = self._client.client_id  # known while connected
        self._deliver(self._change_state, _STATES[state], int(identity[0]) if identity else 0)

    def _change_state(self, state: SessionState, session_id: int) -> None:
        self._state = state
        if state is SessionState.CONNECTED:
            self._session_id = session_id
            self._connections += 1
            self._connected.set()
            self._outage.regained()
        elif not self._closed:
            self._connected.clear()
            self._outage.lost()
        for listener in list(self._listeners):
            listener(state)

    def _deliver(self, function: Callable[..., None], *arguments: object) -> None:
        """Run on the event loop; kazoo's thread may outlive the loop; then the call is dropped."""
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    # -- reads ------------------------------------------------------------------------------

    async def get(self, path: str, watch: Watcher | None = None) -> Versioned:
        full, kept = self._full(path), self._watch(watch)
        while True:
            try:
                value, stat = await self._read(path, lambda: self._client.get_async(full, kept))
                return _versioned(value, stat)
            except NoNode:
                if watch is None:
                    raise
                # A failed get leaves no watch behind in ZooKeeper; a failed exists does.
                if not await self._read(path, lambda: self._client.exists_async(full, kept)):
                    raise

    async def get_many(self, paths: Sequence[str]) -> list[Versioned | None]:
        if not paths:
            return []
        full = list(map(self._full, paths))
        nodes = await self._read(paths[0], lambda: _Several(self._client.get_async, full))
        return [None if node is None else _versioned(*node) for node in nodes]

    async def children(self, path: str, watch: Watcher | None = None) -> list[str]:
        full, kept = self._full(path), self._watch(watch)
        names = await self._read(path, lambda: self._client.get_children_async(full, kept))
        return sorted(names)

    async def sync(self, path: str = "/") -> None:
        full = self._full(path)
        await self._read(path, lambda: self._client.sync_async(full))

    # -- writes -----------------------------------------------------------------------------

    async def create(
        self, path: str, value: bytes = b"", *, ephemeral: bool = False, parents: bool = False
    ) -> None:
        full = self._full(path)
        _check_size(path, len(value))

        def send() -> Any:
            return self._client.create_async(full, value, ephemeral=ephemeral)

        try:
            await self._write(path, send)
        except NoNode:
            if not parents:
                raise
            await self._make_parents(full)
            await self._write(path, send)

    async def _make_parents(self, full: str) -> None:
        names = full.split("/")[1:-1]
        for depth in range(1, len(names) + 1):
            parent = "/" + "/".join(names[:depth])
            try:
                await self._write(parent, partial(self._client.create_async, parent))
            except NodeExists:
                continue

    async def set(self, path: str, value: bytes, version: int) -> int:
        full = self._full(path)
        _check_size(path, len(value))
        stat = await self._write(path, lambda: self._client.set_async(full, value, version))
        return int(stat.version)

    async def delete(self, path: str, version: int = ANY_VERSION) -> None:
        full = self._full(path)
        await self._write(path, lambda: self._client.delete_async(full, version))

    async def multi(self, operations: Sequence[Operation]) -> None:
        if not operations:
            return
        sizes = [len(each.value) for each in operations if isinstance(each, Create | Set)]
        _check_size(operations[0].path, sum(sizes))
        results = await self._write(
            operations[0].path, lambda: self._transaction(operations).commit_async()
        )
        for index, result in enumerate(results):
            if isinstance(result, Exception) and not isinstance(result, zk.RolledBackError):
                raise MultiFailed(index, _meaning(result, operations[index].path))

    def _transaction(self, operations: Sequence[Operation]) -> TransactionRequest:
        request = self._client.transaction()
        for operation in operations:
            full = self._full(operation.path)
            match operation:
                case Create(_, value):
                    request.create(full, value)
                case Set(_, value, version):
                    request.set_data(full, value, version)
                case Delete(_, version):
                    request.delete(full, version)
                case Check(_, version):
                    request.check(full, version)
        return request

    # -- calls ------------------------------------------------------------------------------

    async def _read(self, path: str, send: Callable[[], Any]) -> Any:
        """The response; asked again when contact was lost. Raises StoreUnavailable."""
        with self._outage.call(path) as began_s:
            while True:
                await self._contact(path, began_s)
                try:
                    async with asyncio.timeout_at(self._outage.until(began_s)):
                        return await self._response(send)
                except _LOST_CONTACT:
                    continue
                except TimeoutError as error:
                    if self._outage.over(began_s):
                        raise StoreUnavailable(self._outage.why(path, began_s)) from error
                except zk.ZookeeperError as error:
                    raise _meaning(error, path) from error

    async def _write(self, path: str, send: Callable[[], Any]) -> Any:
        """The response. Raises OutcomeUnknown if it was lost after the write was sent."""
        with self._outage.call(path) as began_s:
            await self._contact(path, began_s)
            try:
                async with asyncio.timeout(self._call_timeout_s):
                    return await self._response(send)
            except (TimeoutError, *_LOST_CONTACT) as error:
                what = f"the answer to a write of {path} was lost: {error!r}"
                raise OutcomeUnknown(what) from error
            except zk.ZookeeperError as error:
                raise _meaning(error, path) from error

    async def _contact(self, path: str, began_s: float) -> None:
        """Return once there is contact, as far as is known. Raises StoreUnavailable."""
        while not self._connected.is_set():
            try:
                async with asyncio.timeout_at(self._outage.until(began_s)):
                    await self._connected.wait()
            except TimeoutError as error:
                if self._outage.over(began_s):
                    raise StoreUnavailable(self._outage.why(path, began_s)) from error
        if self._closed:
            raise StoreUnavailable("the store is closed")

    async def _response(self, send: Callable[[], Any]) -> Any:
        """Send; what kazoo's result will hold. Raises kazoo's exceptions."""
        response: asyncio.Future[Any] = self._loop.create_future()
        send().rawlink(lambda result: self._deliver(_settle, response, result))
        try:
            return await response
        finally:
            lost = response.cancelled() or isinstance(response.exception(), _LOST_CONTACT)
            if not lost:
                self._outage.responded()

    def _full(self, path: str) -> str:
        return self._root if path == "/" else self._root + path

    def _watch(self, watcher: Watcher | None) -> _Watch | None:
        return _Watch(self._deliver, watcher) if watcher else None

    # -- the end ----------------------------------------------------------------------------

    async def close(self) -> None:
        """End the session, waiting at most CLOSE_TIMEOUT_S for ZooKeeper to say so."""
        if self._closed:
            return
        ended = asyncio.Event()
        self.abandon(lambda: self._deliver(ended.set))
        await woken(ended, CLOSE_TIMEOUT_S)  # ZooKeeper ends a session from which it hears nothing

    def abandon(self, then: Callable[[], None] = lambda: None) -> None:
        """End the session in the background; kazoo blocks while it does."""
        self._closed = True
        self._outage.close()
        self._connected.set()  # a call that waits to send meets the closed client

        def end() -> None:
            self._client.stop()
            self._client.close()
            then()

        threading.Thread(target=end, name="zookeeper-close", daemon=True).start()


def _versioned(value: bytes, stat: Any) -> Versioned:
    times = (stat.ctime, stat.ephemeralOwner, stat.mtime, stat.mzxid)
    return Versioned(value, stat.version, *times)


def _check_size(path: str, size: int) -> None:
    if size > VALUE_BYTES_MAX:
        raise ValueTooBig(f"{path}: {size} bytes in one write, {VALUE_BYTES_MAX} are allowed")


def _settle(response: "asyncio.Future[Any]", result: Any) -> None:
    if response.done():
        return
    try:
        response.set_result(result.get_nowait())
    except Exception as error:
        response.set_exception(error)


def _meaning(error: Exception, path: str) -> StoreError:
    for theirs, ours in _MEANINGS:
        if isinstance(error, theirs):
            return ours(path)
    return StoreError(f"ZooKeeper refused {path}: {error!r}")


def _quieten_kazoo() -> None:
    """kazoo warns at every attempt to reconnect; a user who wants that sets a level."""
    logger = logging.getLogger("kazoo")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.ERROR)
