"""What a process has once: an event loop in a background thread, its connections to clusters, and
whatever else it keeps in an `OncePerProcess`.

Always true: all of it belongs to the process that made it; after a fork the child makes its own,
and nothing of the parent's is touched. The loop's thread is a daemon: it never keeps a process
alive. A connection that could not be made is tried again at the next call.
"""

import asyncio
import concurrent.futures
import os
import sys
import threading
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

from spark_ledger.config import ClientConfig, resolve_service_url
from spark_ledger.ledger.client import LedgerStore

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

ORPHANED = 5  # exit status, as a bookie's
_forks = 0  # since this module was loaded, on the way to this process; each append compares it
_kept: "list[OncePerProcess[Any, Any]]" = []


class OncePerProcess(Generic[K, T]):
    """Values by key, each made once in a process, by one thread at a time."""

    def __init__(self) -> None:
        self._made: dict[K, T] = {}
        self._making = threading.Lock()
        _kept.append(self)

    def get(self, key: K, make: Callable[[], T], usable: Callable[[T], bool] = lambda _: True) -> T:
        """What was made for the key while it is `usable`, else what `make` returns now. It takes
        no lock for what is there: a signal's handler may ask."""
        found = self._made.get(key)
        if found is None or not usable(found):
            with self._making:
                found = self._made.get(key)
                if found is None or not usable(found):
                    found = self._made[key] = make()
        return found

    def values(self) -> list[T]:
        """Those made so far."""
        return list(self._made.values())

    def forget(self, unwanted: Callable[[T], bool]) -> list[T]:
        """Take out the values that are `unwanted`."""
        with self._making:
            keys = [key for key, value in self._made.items() if unwanted(value)]
            return [self._made.pop(key) for key in keys]

    def forked(self) -> None:
        """In a child: the parent may have held the lock."""
        self._making = threading.Lock()
        self._made = {}


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

    def start(self, coro: Coroutine[Any, Any, T]) -> "concurrent.futures.Future[T]":
        """`submit`, for a thread that will wait for the future. Raises what `run` raises."""
        if threading.current_thread() is self._thread:
            coro.close()
            raise RuntimeError("a blocking call on the ledger's own event loop")
        return self.submit(coro)

    def submit(self, coro: Coroutine[Any, Any, T]) -> "concurrent.futures.Future[T]":
        """Run `coro` on the loop; the future may be waited for by any thread.

        Raises RuntimeError in a forked child: the loop's thread stayed with the parent.
        """
        if self.inherited:
            coro.close()
        self.check_process()
        return asyncio.run_coroutine_threadsafe(coro, self.loop)

    @property
    def inherited(self) -> bool:
        """Whether it is that of a process from which this one was forked."""
        return self._forks != _forks

    def check_process(self) -> None:
        """Raises RuntimeError in a forked child: the loop's thread stayed with the parent."""
        if self._forks != _forks:
            raise RuntimeError("connections do not survive a fork; connect again in the child")

    def _work(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()


_loops: OncePerProcess[None, BackgroundLoop] = OncePerProcess()
_stores: OncePerProcess[tuple[str, float], LedgerStore] = OncePerProcess()


def background_loop() -> BackgroundLoop:
    """The loop of this process, made at the first call."""
    return _loops.get(None, BackgroundLoop)


def ledger_store(service_url: str | None = None, config: ClientConfig | None = None) -> LedgerStore:
    """The process's LedgerStore of the cluster (None: as `config`, LEDGER_SERVICE_URL or the
    default say).

    It lives on `background_loop()`. Stores whose `outage_timeout_s` differs are two; the rest of
    `config` counts for the first connection only. Raises BadConfig, Unavailable.
    """
    from spark_ledger.ledger.connect import connect

    url = resolve_service_url(service_url, config)
    key = (url, 0.0 if config is None else config.outage_timeout_s)
    return _stores.get(key, lambda: background_loop().run(connect(url, config)))


def end_with_parent() -> None:
    """End this process when its standard input is closed: the one that began it has gone. What is
    under way is taken up by others."""

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        os._exit(ORPHANED)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def _after_fork() -> None:
    global _forks
    _forks += 1
    for kept in _kept:
        kept.forked()


os.register_at_fork(after_in_child=_after_fork)
