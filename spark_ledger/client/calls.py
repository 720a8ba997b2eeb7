"""The blocking calls of one client, which end with it.

Always true: once the client is closed every call under way ends at once with ClientClosed, in
whatever thread it waits, and its work on the loop is cancelled; every later one says the same.
"""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from spark_ledger.errors import ClientClosed
from spark_ledger.process import BackgroundLoop

T = TypeVar("T")


class Calls:
    """Runs coroutines on `background` until it is closed."""

    def __init__(self, background: BackgroundLoop) -> None:
        self._background = background
        self.check_process = background.check_process
        self._under_way: dict[Future[Any], None] = {}
        self._closed = False
        self._lock = threading.Lock()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._background.loop

    def check_open(self) -> None:
        """Raises ClientClosed."""
        if self._closed:
            raise ClientClosed

    def run(self, coro: Coroutine[Any, Any, T]) -> T:
        """BackgroundLoop.run. Raises ClientClosed, too."""
        with self._lock:
            if self._closed:
                coro.close()
                raise ClientClosed
            future = self._background.start(coro)
            self._under_way[future] = None
        try:
            return future.result()
        except CancelledError:
            self.check_open()
            raise
        except BaseException:
            future.cancel()
            raise
        finally:
            with self._lock:
                self._under_way.pop(future, None)

    def submit(self, coro: Coroutine[Any, Any, T]) -> "Future[T]":
        """BackgroundLoop.submit, also when closed: for what is given back."""
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
