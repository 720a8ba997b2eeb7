"""The future of one append: concurrent.futures.Future without a lock and a condition of its own.

Always true: it is a Future in all it does and takes part in concurrent.futures.wait and
as_completed; only a waiting thread pays for the waiting. A thousand appends in flight are a
thousand of these: made the usual way each is ten objects, which cost a fifth of an append of 1 KiB,
most of it in the garbage collector (docs/performance-trials.md).
"""

import threading
from concurrent.futures import Future
from concurrent.futures._base import PENDING
from typing import Any

_RLock = type(threading.RLock())


class SharedLock(_RLock):  # type: ignore[misc, valid-type]
    """What the futures of one writer have in place of their conditions; no thread waits on it."""

    def notify_all(self) -> None:
        """A callback of the future's own woke the waiting thread."""

    def wait(self, _timeout: float | None = None) -> bool:
        """The waiting is over when a result is asked for."""
        return False


class AppendFuture(Future[int]):
    """Made by the writer, which gives all its futures the same lock."""

    def __init__(self, lock: SharedLock) -> None:
        # What Future.__init__ makes, but for the condition.
        self._condition = lock
        self._state = PENDING
        self._result = None
        self._exception = None
        self._waiters = []
        self._done_callbacks: list[Any] = []

    def result(self, timeout: float | None = None) -> int:
        self._wait(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._wait(timeout)
        return super().exception(0)

    def _wait(self, timeout: float | None) -> None:
        if not self.done():
            ended = threading.Event()
            self.add_done_callback(lambda _: ended.set())
            ended.wait(timeout)
