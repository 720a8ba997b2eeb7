"""Things that a process has once: an event loop in a background thread, its connections to clusters
(ZooKeeper for metadata, frames to the bookies), and other values in an `OncePerProcess`; and a
cache of bounded size (`LruCache`).

Always true: all of them belong to the process that made them; after a fork the child makes its own
and uses nothing of the parent. The loop's thread is a daemon: it never keeps a process alive. A
connection that could not be made is tried again at the next call. When a client is closed
(`Calls`), its calls in all threads end at once with ClientClosed, and their work on the loop is
cancelled; every later call raises ClientClosed, too.
"""

import asyncio
import os
import random
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Hashable
from concurrent.futures import CancelledError, Future
from typing import Any, Generic, TypeVar

from spark_ledger.bookies.bookie_client import BookieClient
from spark_ledger.bookies.directory import BookieDirectory
from spark_ledger.config import DEFAULTS, ClientConfig, client_config, resolve_service_url
from spark_ledger.errors import ClientClosed, Unavailable, UnsupportedFormat
from spark_ledger.ledger.client import LedgerStore
from spark_ledger.ledger.placement import resolve
from spark_ledger.metadata import cluster
from spark_ledger.metadata.store import MetadataStore, StoreError

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

ORPHANED = 5  # the exit status; a bookie uses the same
_forks = 0  # a forked child has 1 more than its parent; compared at each append
_kept: "list[OncePerProcess[Any, Any]]" = []


class OncePerProcess(Generic[K, T]):
    """Values by key, each made once in a process, by one thread at a time."""

    def __init__(self) -> None:
        self._made: dict[K, T] = {}
        self._making = threading.Lock()
        _kept.append(self)

    def get(self, key: K, make: Callable[[], T], usable: Callable[[T], bool] = lambda _: True) -> T:
        """The value of the key if it is there and `usable`, otherwise a new value from `make`. For
        a value that is there it takes no lock, so a signal handler may call it."""
        value = self._made.get(key)
        if value is None or not usable(value):
            with self._making:
                value = self._made.get(key)
                if value is None or not usable(value):
                    value = self._made[key] = make()
        return value

    def values(self) -> list[T]:
        """The values made so far."""
        return list(self._made.values())

    def forget(self, unwanted: Callable[[T], bool]) -> list[T]:
        """Take out the values that are `unwanted`."""
        with self._making:
            keys = [key for key, value in self._made.items() if unwanted(value)]
            return [self._made.pop(key) for key in keys]

    def reset_after_fork(self) -> None:
        """Begin anew in the child: a thread of the parent may have held the lock."""
        self._making = threading.Lock()
        self._made = {}


class LruCache(Generic[K, T]):
    """The values that were put or read last. `most` bounds the sum of their sizes (by default their
    number): the value that was used longest ago is dropped first. For one thread."""

    def __init__(self, most: int, size_of: Callable[[T], int] = lambda _: 1) -> None:
        self.size = 0
        self._most = most
        self._size_of = size_of
        self._kept: OrderedDict[K, T] = OrderedDict()

    def get(self, key: K) -> T | None:
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def put(self, key: K, value: T) -> None:
        self.pop(key)
        self._kept[key] = value
        self.size += self._size_of(value)
        while self.size > self._most:
            self.pop(next(iter(self._kept)))

    def pop(self, key: K) -> T | None:
        value = self._kept.pop(key, None)
        if value is not None:
            self.size -= self._size_of(value)
        return value


class BackgroundLoop:
    """An asyncio loop that runs in a daemon thread of its own."""

    def __init__(self) -> None:
        self._forks = _forks
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._work, name="ledger-loop", daemon=True)
        self._thread.start()

    def run(self, coro: Coroutine[Any, Any, T]) -> T:
        """Run `coro` on the loop and wait for its result. Ctrl-C cancels it.

        Raises RuntimeError when called from the loop's own thread, which would wait for itself.
        """
        future = self.start(coro)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def start(self, coro: Coroutine[Any, Any, T]) -> "Future[T]":
        """As `submit`; the caller will wait. Raises RuntimeError in the loop's own thread, too."""
        if threading.current_thread() is self._thread:
            coro.close()
            raise RuntimeError("a blocking call on the ledger's own event loop")
        return self.submit(coro)

    def submit(self, coro: Coroutine[Any, Any, T]) -> "Future[T]":
        """Run `coro` on the loop. Raises RuntimeError in a forked child."""
        if self.inherited:
            coro.close()
        self.check_process()
        return asyncio.run_coroutine_threadsafe(coro, self.loop)

    @property
    def inherited(self) -> bool:
        """Whether the loop belongs to a process from which this one was forked."""
        return self._forks != _forks

    def check_process(self) -> None:
        """Raises RuntimeError in a forked child: the loop's thread stayed with the parent."""
        if self._forks != _forks:
            raise RuntimeError("connections do not survive a fork; connect again in the child")

    def _work(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()


class Calls:
    """Runs a client's blocking calls as coroutines on `background`, until the client is closed."""

    def __init__(self, background: BackgroundLoop) -> None:
        self._background = background
        self.check_process = background.check_process
        self._under_way: dict[Future[Any], None] = {}
        self._closed = False
        self._lock = threading.Lock()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._background.loop

    def run(self, coro: Coroutine[Any, Any, T]) -> T:
        """As BackgroundLoop.run. Also raises ClientClosed."""
        with self._lock:
            if self._closed:
                coro.close()
                raise ClientClosed
            future = self._background.start(coro)
            self._under_way[future] = None
        try:
            return future.result()
        except CancelledError:
            if self._closed:
                raise ClientClosed from None
            raise
        except BaseException:
            future.cancel()
            raise
        finally:
            with self._lock:
                self._under_way.pop(future, None)

    def submit(self, coro: Coroutine[Any, Any, T]) -> "Future[T]":
        """As BackgroundLoop.submit, also after `close`: for work that releases resources."""
        return self._background.submit(coro)

    def close(self) -> bool:
        """End all calls; False if that was done before."""
        with self._lock:
            if self._closed:
                return False
            self._closed = True
            under_way = list(self._under_way)
        for future in under_way:
            future.cancel()
        return True


_loops: OncePerProcess[None, BackgroundLoop] = OncePerProcess()
_stores: OncePerProcess[tuple[str, float], LedgerStore] = OncePerProcess()


def background_loop() -> BackgroundLoop:
    """The loop of this process, made at the first call."""
    return _loops.get(None, BackgroundLoop)


def ledger_store(service_url: str | None = None, config: ClientConfig | None = None) -> LedgerStore:
    """The process's LedgerStore of the cluster at `service_url` (see `resolve_service_url`), on
    `background_loop()`. Each `outage_timeout_s` has its own store; the rest of `config` only has an
    effect on the first connection. Raises BadConfig, Unavailable.
    """
    url = resolve_service_url(service_url, config)
    key = (url, (config or DEFAULTS).outage_timeout_s)
    return _stores.get(key, lambda: background_loop().run(connect(url, config)))


async def connect(service_url: str, config: ClientConfig | None = None) -> LedgerStore:
    """Connect to the cluster at `service_url` (zk://host:port[,host:port]/root).

    Raises BadConfig for a malformed URL or a `placement` that is no function; Unavailable if
    ZooKeeper is unreachable; and what `cluster_at` raises, except StoreError.
    """
    from spark_ledger.bookies.frame_network import FrameNetwork
    from spark_ledger.metadata import zookeeper

    settings = config or client_config(service_url=service_url)
    placement = resolve(settings.placement)
    metadata = await zookeeper.connect(
        service_url,
        session_timeout_s=settings.session_timeout_s,
        connect_timeout_s=settings.connect_timeout_s,
        call_timeout_s=settings.metadata_timeout_s,
        outage_timeout_s=settings.outage_timeout_s,
        make_root=False,
    )
    directory = BookieDirectory(metadata, settings.directory_refresh_s)
    try:
        await cluster_at(metadata, service_url)
        await directory.start()
    except BaseException as failure:  # also if the caller cancels: the session must end
        await metadata.close()
        if isinstance(failure, StoreError):
            text = f"the bookies of {service_url} cannot be listed: {failure!r}"
            raise Unavailable(text) from failure
        raise
    bookies = BookieClient(FrameNetwork(), directory, settings)
    rng = random.Random(os.urandom(16))
    return LedgerStore(metadata, bookies, directory, settings, rng, placement)


async def cluster_at(metadata: MetadataStore, service_url: str) -> cluster.ClusterRecord:
    """The cluster at the root of the store that `service_url` names. Raises Unavailable if there is
    no cluster, UnsupportedFormat if its record is damaged or of a later version, StoreError."""
    try:
        here = await cluster.read(metadata)
    except cluster.BadClusterRecord as error:
        raise UnsupportedFormat(f"the cluster at {service_url}: {error}") from error
    if here is None:
        raise Unavailable(
            f"ZooKeeper answers, but there is no cluster at {service_url}",
            "Check the root, the part after the port.",
        )
    return here


def end_with_parent() -> None:
    """End this process when its standard input is closed, that is, when the process that started it
    has ended. Other processes take over the work that is under way."""

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        os._exit(ORPHANED)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def _after_fork() -> None:
    global _forks
    _forks += 1
    for kept in _kept:
        kept.reset_after_fork()


os.register_at_fork(after_in_child=_after_fork)
