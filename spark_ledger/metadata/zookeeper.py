"""The metadata store in ZooKeeper; the only file that uses the library kazoo.

Always true:
- responses, watch events and changes of the session reach the event loop in the order in which
  ZooKeeper sent them: kazoo's connection thread hands over all three, one after another;
- a request so large that ZooKeeper would close the connection raises ValueTooBig here;
- a write is sent at most once. If the connection or session is lost, or the time is over, the write
  raises OutcomeUnknown if it was sent, else StoreUnavailable;
- two watches by the same function on the same path are one watch;
- in an outage, reads, and writes that were not sent, wait as outage.py decides;
- a server that closes every connection without a greeting *refuses*: it has no quorum, or its data
  are older than what this process has read (a restored backup). Errors name this. After
  FORGET_SESSIONS times the session's timeout, this process accepts a server with older data: it
  then has a new session, and reads again which cluster the store has.
"""

import asyncio
import logging
import math
import select
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kazoo import exceptions as zk
from kazoo.client import KazooClient, TransactionRequest
from kazoo.handlers.threading import SequentialThreadingHandler
from kazoo.handlers.utils import fileobj_to_fd
from kazoo.protocol import serialization as jute
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
"""How long a process waits for the end of its session. If it takes longer, ZooKeeper reads the
request later, or the session times out."""
SYNC_WAIT_S = 0.05
"""How long a sync waits for the sync before it, so that more calls share it."""
HANDSHAKE_S = 2.0
"""How long to wait for a server's greeting; doubled after each wait in vain, up to the session's
timeout. A server that is just starting may accept a connection and never respond on it."""
FORGET_SESSIONS = 1.5
"""In timeouts of the session: by then, each session in an older copy of the store has ended."""
READS_AT_ONCE = 256
"""So many nodes are read by one request. Nodes that are read together are small, as a rule."""
RECONNECT = {"max_tries": -1, "delay": 0.05, "backoff": 2, "max_delay": 1.0}

_log = logging.getLogger(__name__)
_LOST_CONTACT = (zk.ConnectionLoss, zk.SessionExpiredError, zk.OperationTimeoutError)
_STORE_ERRORS: tuple[tuple[type[Exception], type[StoreError]], ...] = (
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
    """A store for the cluster at `service_url`; with `make_root` the cluster's root is made if it
    is missing. A call waits `call_timeout_s` for a response or, if that is longer, until
    `outage_timeout_s` after an outage began.

    Raises errors.Unavailable if there is no response in `connect_timeout_s`, and errors.BadConfig
    for a text that is no service URL.
    """
    url = parse(service_url)
    store = ZooKeeperStore(url, session_timeout_s, call_timeout_s, outage_timeout_s)
    try:
        async with asyncio.timeout(connect_timeout_s):
            await store.start(make_root)
    except (TimeoutError, StoreError) as error:
        is_refused = store.is_refused
        store.abandon()
        within = f"within {connect_timeout_s:g} s"
        what = f"ZooKeeper at {url} closes every connection without a greeting, {within}"
        raise Unavailable(
            what if is_refused else f"no ZooKeeper answers at {url} {within}",
            "Its quorum is missing, or it is starting: see its own log." if is_refused else None,
            service_url=str(url),
        ) from error
    except BaseException:
        store.abandon()
        raise
    return store


class _OrderedHandler(SequentialThreadingHandler):  # type: ignore[misc]
    """Runs callbacks at once, on the connection's thread (kazoo has a thread for each kind), so
    that no watch event overtakes a response that was sent earlier. Our callbacks only hand over to
    the event loop.

    Waits only HANDSHAKE_S at first for a connection and its greeting: kazoo would wait for the
    whole timeout of the session, and so lose the session.

    `refused_since_s`: the time (monotonic) since which the server closes each connection without a
    greeting; None while it greets, hangs or cannot be reached. After `forget_after_s` of refusals,
    calls `forget` on the connection's thread, before the next connection."""

    def __init__(self, forget_after_s: float, forget: Callable[[], None]) -> None:
        super().__init__()
        self.refused_since_s: float | None = None
        self._forget_after_s = forget_after_s
        self._forget = forget
        self._is_greeted = False
        self._awaits_greeting = False
        self._patience_s = HANDSHAKE_S

    def on_session_change(self, connected: bool) -> None:
        """Note that the session was connected, or lost its connection."""
        self._is_greeted = connected
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
        """Note it if the server closed the last connection without a greeting."""
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
        """Kazoo waits some five times for each request, and would make and close an epoll for each
        wait."""
        limit = timeout if self._is_greeted else min(timeout, self._patience_s)
        poll = select.poll()
        for sockets, mask in ((readers, select.POLLIN), (writers, select.POLLOUT)):
            for sock in sockets:
                poll.register(fileobj_to_fd(sock), mask)
        ready = {descriptor for descriptor, _ in poll.poll(math.ceil(limit * 1000))}
        if not ready and not self._is_greeted:
            self._patience_s *= 2
            self._awaits_greeting, self.refused_since_s = False, None
        return *(
            [sock for sock in sockets if sock.fileno() in ready] for sockets in (readers, writers)
        ), []

    @property
    def running(self) -> bool:
        return False

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def dispatch_callback(self, callback: Any) -> None:
        callback.func(*callback.args)


class _Watch:
    """A watcher in the form that kazoo takes. Two of the same watcher are equal, so that kazoo
    keeps one."""

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


class _Reads:
    """ZooKeeper's request `multiRead` (since 3.6), which kazoo lacks: the values and stats of many
    nodes. A read of 10,000 nodes takes a tenth of the time of 10,000 requests."""

    type = 22

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths

    def serialize(self) -> bytes:
        """As the request `multi`: a header before each read, and a header that ends the request."""
        head = jute.multiheader_struct.pack(jute.GetData.type, False, -1)
        reads = [head + jute.GetData(path, None).serialize() for path in self._paths]
        return b"".join([*reads, jute.multiheader_struct.pack(-1, True, -1)])

    @staticmethod
    def deserialize(response: bytes, offset: int) -> list[Any]:
        """The value and stat of each node, None for a missing node. Raises kazoo's exceptions."""
        nodes: list[Any] = []
        while True:
            header, offset = jute.MultiHeader.deserialize(response, offset)
            if header.done:
                return nodes
            if header.type == jute.GetData.type:
                nodes.append(jute.GetData.deserialize(response, offset))
                offset += 4 + len(nodes[-1][0] or b"") + jute.stat_struct.size
            elif header.err == zk.NoNodeError.code:
                nodes.append(None)
                offset += 4
            else:
                raise zk.EXCEPTIONS[header.err]


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
        self._last_sync: asyncio.Task[None] | None = None
        self._next_sync: asyncio.Task[None] | None = None
        self._closed = False
        self._server_name = f"ZooKeeper at {url}"
        self._outage = Outage(self._describe_server, call_timeout_s, outage_timeout_s)
        self._handler = _OrderedHandler(FORGET_SESSIONS * session_timeout_s, self._forget_seen)
        self._client = KazooClient(
            hosts=",".join(url.hosts),
            timeout=session_timeout_s,
            handler=self._handler,
            connection_retry=RECONNECT,
        )
        self._client.add_listener(self._on_session_state)

    async def start(self, make_root: bool = True) -> None:
        """Open the session, however long it takes, and make the cluster's root."""
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
    def is_refused(self) -> bool:
        """Whether the server accepts connections and closes each without a greeting."""
        return self._handler.refused_since_s is not None

    def _describe_server(self) -> str:
        if self.is_refused:
            return (
                f"{self._server_name} closes every connection (it has no quorum, or its data are"
                " older than what this process has read: a restored backup) and"
            )
        return self._server_name

    def _forget_seen(self) -> None:
        """Forget the newest transaction that this process has seen: else a server with older data
        would refuse this process for ever."""
        _log.warning(
            "%s did not take the session; it is tried as a new process would",
            self._describe_server(),
        )
        self._client.last_zxid = 0

    def _on_session_state(self, state: str) -> None:
        self._handler.on_session_change(state == KazooState.CONNECTED)
        identity = self._client.client_id  # known while connected
        self._deliver(self._change_state, _STATES[state], int(identity[0]) if identity else 0)

    def _change_state(self, state: SessionState, session_id: int) -> None:
        self._state = state
        if state is SessionState.CONNECTED:
            self._session_id = session_id
            self._connections += 1
            self._connected.set()
            self._outage.on_contact()
        elif not self._closed:
            self._connected.clear()
            self._outage.on_contact_lost()
        for listener in list(self._listeners):
            listener(state)

    def _deliver(self, function: Callable[..., None], *arguments: object) -> None:
        """Call `function` on the event loop. Kazoo's thread may outlive the loop: then drop the
        call."""
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    # -- reads ------------------------------------------------------------------------------

    async def get(self, path: str, watch: Watcher | None = None) -> Versioned:
        full, kazoo_watch = self._full(path), self._watch(watch)
        while True:
            try:
                value, stat = await self._read(
                    path, lambda: self._client.get_async(full, kazoo_watch)
                )
                return _versioned(value, stat)
            except NoNode:
                if watch is None:
                    raise
                # A failed get sets no watch in ZooKeeper; a failed exists does.
                if not await self._read(path, lambda: self._client.exists_async(full, kazoo_watch)):
                    raise

    async def get_many(self, paths: Sequence[str]) -> list[Versioned | None]:
        full = list(map(self._full, paths))
        starts = range(0, len(full), READS_AT_ONCE)
        requests = [_Reads(full[start : start + READS_AT_ONCE]) for start in starts]
        reads = (self._read(paths[0], partial(self._send, request)) for request in requests)
        nodes = [node for part in await asyncio.gather(*reads) for node in part]
        return [None if node is None else _versioned(*node) for node in nodes]

    async def children(self, path: str, watch: Watcher | None = None) -> list[str]:
        full, kazoo_watch = self._full(path), self._watch(watch)
        names = await self._read(path, lambda: self._client.get_children_async(full, kazoo_watch))
        return sorted(names)

    async def sync(self, path: str = "/") -> None:
        """Calls that come while a sync is under way share the next sync, which is sent after it."""
        if self._next_sync is None:
            sync = self._sync_after(self._last_sync, path)
            self._next_sync = self._loop.create_task(sync)
            self._next_sync.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(self._next_sync)

    async def _sync_after(self, before: "asyncio.Task[None] | None", path: str) -> None:
        if before is not None:
            await asyncio.wait([before], timeout=SYNC_WAIT_S)
        self._last_sync, self._next_sync = self._next_sync, None  # later calls need another one
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
                raise MultiFailed(index, _store_error(result, operations[index].path))

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
        """The response; sends the read again after a loss of contact. Raises StoreUnavailable."""
        with self._outage.call(path) as began_s:
            while True:
                await self._contact(path, began_s)
                try:
                    async with asyncio.timeout_at(self._outage.deadline_s(began_s)):
                        return await self._response(send)
                except _LOST_CONTACT:
                    continue
                except TimeoutError as error:
                    if self._outage.is_over(began_s):
                        raise StoreUnavailable(self._outage.error_text(path, began_s)) from error
                except zk.ZookeeperError as error:
                    raise _store_error(error, path) from error

    async def _write(self, path: str, send: Callable[[], Any]) -> Any:
        """The response. Raises OutcomeUnknown if the response to the sent write was lost."""
        with self._outage.call(path) as began_s:
            await self._contact(path, began_s)
            try:
                async with asyncio.timeout(self._call_timeout_s):
                    return await self._response(send)
            except (TimeoutError, *_LOST_CONTACT) as error:
                what = f"the answer to a write of {path} was lost: {error!r}"
                raise OutcomeUnknown(what) from error
            except zk.ZookeeperError as error:
                raise _store_error(error, path) from error

    async def _contact(self, path: str, began_s: float) -> None:
        """Wait for contact to the store. Raises StoreUnavailable."""
        while not self._connected.is_set():
            try:
                async with asyncio.timeout_at(self._outage.deadline_s(began_s)):
                    await self._connected.wait()
            except TimeoutError as error:
                if self._outage.is_over(began_s):
                    raise StoreUnavailable(self._outage.error_text(path, began_s)) from error
        if self._closed:
            raise StoreUnavailable("the store is closed")

    def _send(self, request: _Reads) -> Any:
        result = self._client.handler.async_result()
        self._client._call(request, result)
        return result

    async def _response(self, send: Callable[[], Any]) -> Any:
        """Send a request; returns its result. Raises kazoo's exceptions."""
        response: asyncio.Future[Any] = self._loop.create_future()
        send().rawlink(lambda result: self._deliver(_resolve, response, result))
        try:
            return await response
        finally:
            lost = response.cancelled() or isinstance(response.exception(), _LOST_CONTACT)
            if not lost:
                self._outage.on_response()

    def _full(self, path: str) -> str:
        return self._root if path == "/" else self._root + path

    def _watch(self, watcher: Watcher | None) -> _Watch | None:
        return _Watch(self._deliver, watcher) if watcher else None

    # -- the end ----------------------------------------------------------------------------

    async def close(self) -> None:
        """End the session; wait at most CLOSE_TIMEOUT_S for ZooKeeper's response."""
        if self._closed:
            return
        ended = asyncio.Event()
        self.abandon(lambda: self._deliver(ended.set))
        await woken(ended, CLOSE_TIMEOUT_S)  # else ZooKeeper ends the silent session later

    def abandon(self, then: Callable[[], None] = lambda: None) -> None:
        """End the session in the background, on a thread, because kazoo blocks meanwhile. Calls
        `then` at the end, on that thread."""
        self._closed = True
        self._outage.close()
        self._connected.set()  # a waiting call then finds the store closed

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


def _resolve(response: "asyncio.Future[Any]", result: Any) -> None:
    if response.done():
        return
    try:
        response.set_result(result.get_nowait())
    except Exception as error:
        response.set_exception(error)


def _store_error(error: Exception, path: str) -> StoreError:
    for kazoo_class, store_class in _STORE_ERRORS:
        if isinstance(error, kazoo_class):
            return store_class(path)
    return StoreError(f"ZooKeeper refused {path}: {error!r}")


def _quieten_kazoo() -> None:
    """kazoo warns at every attempt to reconnect: log only its errors, unless the user set a
    level."""
    logger = logging.getLogger("kazoo")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.ERROR)
