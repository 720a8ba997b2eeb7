"""Threads that make blocking calls for the event loop, at a third less than run_in_executor costs,
and the deadline after which a call has failed.

Always true of the threads: at most `count` are made, when they are needed; calls are begun in the
order they came; one whose caller has given up before it was begun is not made; the outcome is told
on the loop of the caller, and dropped if that is gone. The threads stay until `shut_down`,
which waits for them; without it they hold up no exit of the process.

Always true of the deadline:
- a call that was asked for longer ago than `limit_s` raises DiskHung; the thread that hangs in it
  is left behind, and what it still returns is dropped;
- once a call that alters something has hung, all that follows on that disk or index fails at once:
  no call waits behind the thread that hangs, and nothing overtakes what it may still do;
- a read that hangs fails alone: it says nothing of what is written;
- the time goes by in parts, as the loop sees them: a process that was stopped for a while, or a
  loop that was busy, makes no disk hang; a call has up to a part more than the limit;
- what takes the longer, the more there is (all states, all ledger ids) has no limit.
"""

import asyncio
import contextlib
import math
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

from bookie_server.disk.interface import DiskHung

PARTS = 5  # of the time limit
T = TypeVar("T")


class IoDeadline:
    """Of one disk or index, on one event loop; `limit_s` is the longest time a call may take."""

    def __init__(self, limit_s: float = math.inf) -> None:
        self._limit_s = limit_s
        self._hung: DiskHung | None = None
        self._ticks = 0
        self._ticking = False  # it ticks for all calls together, and not while there are none
        self._under_way: dict[asyncio.Future[Any], tuple[int, bool]] = {}

    @property
    def has_hung(self) -> bool:
        """Whether a call that alters something has hung."""
        return self._hung is not None

    def check(self) -> None:
        """Called before each call is begun. Raises DiskHung."""
        if self._hung is not None:
            raise DiskHung(f"not used any more: {self._hung}")

    def watch(self, done: asyncio.Future[Any], *, alters: bool) -> None:
        """A call was begun: `done` fails with DiskHung after PARTS parts and what is left of the
        part under way, unless it is done before."""
        if self._limit_s == math.inf:
            return
        self._under_way[done] = (self._ticks + PARTS + self._ticking, alters)
        if not self._ticking:
            self._tick_later()

    def ended(self, done: asyncio.Future[Any]) -> None:
        """The call that was watched returned, or no caller waits for it."""
        self._under_way.pop(done, None)

    def _tick_later(self) -> None:
        self._ticking = True
        asyncio.get_running_loop().call_later(self._limit_s / PARTS, self._tick)

    def _tick(self) -> None:
        self._ticks += 1
        for done, (last_tick, alters) in list(self._under_way.items()):
            if self._ticks >= last_tick:
                del self._under_way[done]
                if not done.done():
                    hung = DiskHung(f"a call did not return for {self._limit_s:g} s")
                    done.set_exception(hung)
                    if alters:
                        self._hung = hung
        self._ticking = False
        if self._under_way:
            self._tick_later()


class _Call(NamedTuple):
    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[Any]
    call: Callable[..., Any]
    arguments: tuple[Any, ...]
    unwanted: Callable[[Any], None] | None


class DiskThreads:
    """`name` begins the threads' names; `deadline` may be shared with others of the same disk."""

    def __init__(self, count: int, name: str, deadline: IoDeadline | None = None) -> None:
        self._count = count
        self._name = name
        self._deadline = deadline or IoDeadline()
        self._threads: list[threading.Thread] = []
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._free = threading.Semaphore(0)  # threads that wait for a call, and none was given yet
        self._ended = False

    def run(
        self,
        call: Callable[..., T],
        *arguments: Any,
        alters: bool = False,
        limited: bool = True,
        unwanted: Callable[[T], None] | None = None,
    ) -> asyncio.Future[T]:
        """The call's result, or what it raised, or DiskHung. A result for which nobody waits any
        more is `unwanted`. Without `limited` the deadline does not count.

        Raises DiskHung after a call that `alters` something has hung; RuntimeError after
        `shut_down`, and when there is no thread and none can be made. Then the call is not made.
        """
        if self._ended:
            raise RuntimeError(f"the threads {self._name} have ended")
        if limited:
            self._deadline.check()
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        if not self._free.acquire(blocking=False) and len(self._threads) < self._count:
            self._add_thread()
        self._calls.put(_Call(loop, done, call, arguments, unwanted))
        if limited:
            self._deadline.watch(done, alters=alters)
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
            loop, done, call, arguments, unwanted = wanted
            if not done.done():
                try:
                    tell: tuple[Any, ...] = (self._tell, done, call(*arguments), unwanted)
                except BaseException as error:
                    tell = (self._tell_error, done, error)
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(*tell)
                del tell
            del wanted, loop, done, call, arguments, unwanted  # nothing is kept while this waits
            self._free.release()

    def _tell(
        self, done: asyncio.Future[T], result: T, unwanted: Callable[[T], None] | None
    ) -> None:
        self._deadline.ended(done)
        if not done.done():
            done.set_result(result)
        elif unwanted is not None:
            unwanted(result)

    def _tell_error(self, done: asyncio.Future[Any], error: BaseException) -> None:
        self._deadline.ended(done)
        if not done.done():
            done.set_exception(error)
