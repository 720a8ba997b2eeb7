"""Tasks that outlive the call that starts them, for every room.

Always true:
- each caller of shared work gets its result; a caller that is cancelled ends only its own wait;
- a task is kept until it is done, so that the event loop does not drop it;
- each error reaches a caller, or the event loop's exception handler.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

K = TypeVar("K")
T = TypeVar("T")


async def cancel(*tasks: "asyncio.Future[Any]") -> None:
    """Cancel the tasks and wait until they have ended. Their results and errors are dropped."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def woken(event: asyncio.Event, within_s: float | None) -> bool:
    """Wait until the event is set, `within_s` at most; returns whether it is set. (Unlike
    asyncio.wait_for, which may ignore a cancellation.)"""
    try:
        async with asyncio.timeout(within_s):
            return await event.wait()
    except TimeoutError:
        return False


class SharedTasks(Generic[K, T]):
    """Work that is done once, however many callers ask for it: a task for each key, which all
    callers share until it is done. With `keep` a task that succeeded stays, until `pop`."""

    def __init__(self, *, keep: bool = False) -> None:
        self._keep = keep
        self._tasks: dict[K, asyncio.Task[T]] = {}

    def __contains__(self, key: K) -> bool:
        return key in self._tasks

    def __iter__(self) -> Iterator[K]:
        return iter(self._tasks)

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, key: K, work: Callable[[], Coroutine[Any, Any, T]]) -> "asyncio.Task[T]":
        """The task of the key, started now if the key has no task. Wait for it with
        `asyncio.shield`, or call `result`."""
        task = self._tasks.get(key)
        if task is None or (task.done() and _failed(task)):
            task = self._tasks[key] = asyncio.get_running_loop().create_task(work())
            task.add_done_callback(lambda done: self._ended(key, done))
        return task

    async def result(self, key: K, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of the work, which is started now if it is not under way. Raises its error."""
        return await asyncio.shield(self.start(key, work))

    def kept(self, key: K) -> T | None:
        """The result of the key's task; None if there is no result yet."""
        task = self._tasks.get(key)
        return None if task is None or not task.done() or _failed(task) else task.result()

    def pop(self, key: K) -> "asyncio.Task[T] | None":
        """Take out the key's task, so that no later caller shares it."""
        return self._tasks.pop(key, None)

    async def idle(self) -> None:
        """Wait for the tasks that are under way; if this call is cancelled, so are they."""
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def close(self) -> list[T]:
        """Cancel the tasks that are under way, also those that begin meanwhile, and return the kept
        results."""
        results: list[T] = []
        while self._tasks:
            tasks = dict(self._tasks)
            await cancel(*tasks.values())
            for key, task in tasks.items():
                if self._tasks.get(key) is task:
                    del self._tasks[key]
            results += [task.result() for task in tasks.values() if not _failed(task)]
        return results

    def _ended(self, key: K, task: "asyncio.Task[T]") -> None:
        failed = _failed(task)  # marks the error as retrieved: perhaps no caller waits any more
        if self._tasks.get(key) is task and (failed or not self._keep):
            del self._tasks[key]


class SharedReads(Generic[K, T]):
    """Reads by key. Callers that ask for a key at once share a read. A caller that asks while a
    read of the key is under way gets the next read, so no result is older than the call."""

    def __init__(self, read: Callable[[K], Awaitable[T]]) -> None:
        self._read = read
        self._next = SharedTasks[K, T]()
        self._locks: WeakValueDictionary[K, asyncio.Lock] = WeakValueDictionary()
        """The locks of keys, only while a read of the key is under way or waits."""

    async def __call__(self, key: K) -> T:
        return await self._next.result(key, lambda: self._work(key))

    async def _work(self, key: K) -> T:
        async with self._locks.setdefault(key, asyncio.Lock()):
            self._next.pop(key)  # later callers need the next read
            return await self._read(key)


class BackgroundTasks:
    """Tasks whose results no caller awaits, kept until they are done. Errors go to `failed`, or to
    the event loop's exception handler without it. `ended` is called after each task."""

    def __init__(
        self,
        failed: Callable[[BaseException], None] | None = None,
        ended: Callable[[], None] | None = None,
    ) -> None:
        self._failed = failed
        self._on_end = ended
        self._tasks: dict[asyncio.Task[Any], None] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def __contains__(self, name: str) -> bool:
        """Whether a task of that name is under way."""
        return any(task.get_name() == name for task in self._tasks)

    def start(self, work: Coroutine[Any, Any, T], *, name: str | None = None) -> "asyncio.Task[T]":
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks[task] = None
        task.add_done_callback(self._ended)
        return task

    def cancel(self) -> None:
        """Cancel all, without waiting for their end."""
        for task in list(self._tasks):
            task.cancel()

    async def idle(self) -> None:
        """Wait until these tasks have ended; if this call is cancelled, they go on."""
        await asyncio.gather(*map(asyncio.shield, self._tasks), return_exceptions=True)

    async def close(self) -> None:
        """Cancel all, and wait for their end."""
        await cancel(*self._tasks)

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        del self._tasks[task]
        error = None if task.cancelled() else task.exception()
        if error is not None and self._failed is not None:
            self._failed(error)
        elif error is not None:
            context = {"message": f"{task.get_name()} has failed", "exception": error, "task": task}
            asyncio.get_running_loop().call_exception_handler(context)
        if self._on_end is not None:
            self._on_end()


def _failed(task: "asyncio.Task[Any]") -> bool:
    return task.cancelled() or task.exception() is not None
