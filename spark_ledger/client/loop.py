"""One event loop in a background thread per process, for callers that block.

Always true: the loop belongs to the process that made it; after a fork the child makes its own,
and nothing of the parent's is touched. The thread is a daemon: it never keeps a process alive.
"""

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


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


_forks = 0  # since this module was loaded, on the way to this process; each append compares it
_loop: BackgroundLoop | None = None
_making = threading.Lock()


def background_loop() -> BackgroundLoop:
    """The loop of this process, made at the first call."""
    global _loop
    if _loop is None or _loop.inherited:
        with _making:
            if _loop is None or _loop.inherited:
                _loop = BackgroundLoop()
    return _loop


def _after_fork() -> None:
    global _making, _forks
    _making = threading.Lock()  # the parent's may have been held
    _forks += 1


os.register_at_fork(after_in_child=_after_fork)
