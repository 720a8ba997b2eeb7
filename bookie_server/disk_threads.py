"""Threads that make blocking calls for the event loop, at a third less than run_in_executor costs.

Always true: at most `count` threads, made when they are needed; calls are begun in the order they
came; one whose caller has given up before it was begun is not made; the outcome is told on the loop
of the caller, and if that is gone nobody is told. The threads stay until `shut_down`, which waits
for them; without it they hold up no exit of the process.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class _Call(NamedTuple):
    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[Any]
    call: Callable[..., Any]
    arguments: tuple[Any, ...]


class DiskThreads:
    """`name` begins the threads' names."""

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self._threads: list[threading.Thread] = []
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._free = threading.Semaphore(0)  # threads that wait for a call, and none was given yet
        self._ended = False

    def run(self, call: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        """The call's result, or what it raised. Raises RuntimeError after `shut_down`, and when
        there is no thread and none can be made: then the call is not made."""
        if self._ended:
            raise RuntimeError(f"the threads {self._name} have ended")
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        if not self._free.acquire(blocking=False) and len(self._threads) < self._count:
            self._add_thread()
        self._calls.put(_Call(loop, done, call, arguments))
        return done

    def _add_thread(self) -> None:
        """Where the system allows no more of them the calls wait for those there are."""
        name = f"{self._name}_{len(self._threads)}"
        thread = threading.Thread(target=self._work, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError:
            if not self._threads:
                raise
        else:
            self._threads.append(thread)

    def shut_down(self) -> None:
        """End the threads; calls under way, and those that wait, end first."""
        self._ended = True
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (wanted := self._calls.get()) is not None:
            loop, done, call, arguments = wanted
            if not done.cancelled():
                try:
                    tell: tuple[Any, ...] = (_tell, done, call(*arguments))
                except BaseException as error:
                    tell = (_tell_error, done, error)
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(*tell)
                del tell
            del wanted, loop, done, call, arguments  # nothing is kept while this waits
            self._free.release()


def _tell(done: asyncio.Future[Any], result: Any) -> None:
    if not done.done():
        done.set_result(result)


def _tell_error(done: asyncio.Future[Any], error: BaseException) -> None:
    if not done.done():
        done.set_exception(error)
