"""An asyncio event loop whose clock jumps to the next timer, so a run is fast and repeats exactly.

Always true:
- time moves only when nothing is ready to run, and then to the earliest timer; equal timers run in
  the order they were set;
- nothing outside the run is met: no sockets, no threads, no executors, no wall clock;
- a run in which nothing is ready and no timer is set, while the main coroutine has not ended, is a
  deadlock and raises `Deadlock`;
- the same coroutine and seed run the same steps in the same order. The garbage collector is off
  during a run, for a collection at another moment would end generators in another order.

    def test_something():
        async def main() -> None:
            await asyncio.sleep(3600)  # takes no time
            assert current().time() == 3600
        run(main(), seed=7)

A `Process` groups tasks, so that they can be killed together: every task made by a task of the
process belongs to it. A killed process runs its `finally` blocks (Python gives no way round that),
so the caller of a kill shuts its doors first: disk, network and store refuse a dead process.
"""

import asyncio
import gc
import heapq
import random
import secrets
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from contextvars import Context, ContextVar, copy_context
from functools import partial
from itertools import repeat
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")

STEPS_MAX = 5_000_000  # callbacks of one run; more is a livelock

_PROCESS: ContextVar["Process | None"] = ContextVar("simulated process", default=None)


class Deadlock(AssertionError):
    """Nothing can ever happen again, and the run has not ended."""


class Livelock(AssertionError):
    """The run did not end within its number of steps or its simulated time."""


class RealWorld(RuntimeError):
    """Simulated code asked for a thread, a socket or another thing outside the run."""


class Handle:
    """A callback that waits for its turn or its time: asyncio.Handle without its debug mode, which
    costs more than the callback."""

    __slots__ = ("_args", "_callback", "_cancelled", "_context", "_when")

    def __init__(
        self, callback: Callable[..., object], args: Any, context: Context, when: float = 0.0
    ) -> None:
        self._callback = callback
        self._args = args
        self._context = context
        self._when = when
        self._cancelled = False

    def cancel(self) -> None:
        self._cancelled = True
        self._callback, self._args = _nothing, ()

    def cancelled(self) -> bool:
        return self._cancelled

    def when(self) -> float:
        """The simulated second of a timer."""
        return self._when

    def __repr__(self) -> str:
        return f"<Handle {self._callback!r}>"


def _nothing(*_: object) -> None: ...


class Tasks:
    """Tasks that may be alive, in the order of their making. The ended are dropped now and then,
    all at once: a callback for each would be a fifth of a run's steps."""

    __slots__ = ("_dropped_at", "_tasks")

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[Any]] = []
        self._dropped_at = 64

    def add(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.append(task)
        if len(self._tasks) > self._dropped_at:
            self._tasks = self.alive()
            self._dropped_at = 2 * len(self._tasks) + 64

    def alive(self) -> "list[asyncio.Task[Any]]":
        return [task for task in self._tasks if not task.done()]


class Process:
    """Tasks that live and die together; made by `SimLoop.process`."""

    def __init__(self, loop: "SimLoop", name: str) -> None:
        self.name = name
        self.alive = True
        self.paused = False
        self.ahead_s = 0.0
        """By how much its clock is ahead of the loop's."""
        self.backlog: list[Handle] = []
        self._loop = loop
        self._tasks = Tasks()
        self._context: Context = copy_context()
        self._context.run(_PROCESS.set, self)

    def spawn(self, coro: Coroutine[Any, Any, T], name: str = "") -> "asyncio.Task[T]":
        """Run `coro` as a task of this process. A dead process runs nothing (the task ends
        cancelled)."""
        return self._loop.create_task(coro, name=name or None, context=self._context)

    def call_at(self, when: float, callback: Callable[..., object], *args: Any) -> None:
        """Call it in this process at that second of the loop; of a dead process nothing is."""
        self._loop.call_at(when + self.ahead_s, self._call, callback, args, context=self._context)

    def _call(self, callback: Callable[..., object], args: Any) -> None:
        if self.alive:
            callback(*args)

    def kill(self) -> None:
        """Cancel every task, in the order of their making; further ones are still-born."""
        self.resume()
        self.alive = False
        for task in self._tasks.alive():
            task.cancel()

    def pause(self) -> None:
        """As SIGSTOP: nothing of the process runs, and what becomes ready waits, until `resume`."""
        if self.alive and not self.paused:
            self.paused = True
            self._loop.paused += 1

    def resume(self) -> None:
        """As SIGCONT: all that became ready meanwhile runs, in its order."""
        if self.paused:
            self.paused = False
            self._loop.paused -= 1
            self._loop.requeue(self.backlog)
            self.backlog.clear()

    def jump(self, seconds: float) -> None:
        """Its clock jumps ahead: `time()` shows it the later time, and its timers fire as much
        earlier."""
        if self.alive:
            self.ahead_s += seconds
            self._loop.hasten(self, seconds)

    def let_go(self) -> None:
        """Forget the tasks, once the run is over."""
        self._tasks = Tasks()
        self.backlog.clear()

    def adopt(self, task: "asyncio.Task[Any]") -> None:
        """Called by the loop for each task made inside this process."""
        self._tasks.add(task)
        if not self.alive:
            task.cancel()


def current_process() -> Process | None:
    """The process the running task belongs to; None for the test itself."""
    return _PROCESS.get()


class SimLoop(asyncio.AbstractEventLoop):
    """The loop. `seed` only feeds `random_for`; order never depends on chance."""

    def __init__(self, seed: int = 0, *, steps_max: int = STEPS_MAX) -> None:
        self.seed = seed
        self.steps = 0
        self.failures: list[dict[str, Any]] = []
        """Contexts of callbacks that raised and of tasks whose exception was never retrieved."""
        self._generators: list[tuple[str, random.Random]] = []
        self._chance = str(seed)
        self.outside = Context()
        """The context of what belongs to no process: messages on their way."""
        self.paused = 0
        """How many processes are paused."""
        self._steps_max = steps_max
        self._jumped = False
        self.now = 0.0
        """The one true time, the same for every process."""
        self._sequence = 0
        self._ready: deque[Handle] = deque()
        self._timers: list[tuple[float, int, Handle]] = []
        self._tasks = Tasks()
        self._processes: list[Process] = []
        self.create_future = partial(asyncio.Future, loop=self)  # no frame of our own in between
        self._running = False
        self._closed = False
        self._tokens = self.random_for("tokens")

    def random_for(self, name: str) -> random.Random:
        """A generator of its own for each part, so that a new draw in one reshuffles no other."""
        return self.keep(name, random.Random(f"{self._chance}/{name}"))

    def keep(self, name: str, generator: random.Random) -> random.Random:
        """Let `reseed` reach this generator too."""
        self._generators.append((name, generator))
        return generator

    def reseed(self, seed: int) -> None:
        """From now on every draw of the run is another one, by `seed`."""
        self._chance = f"{self._chance} {seed}"
        for number, (name, generator) in enumerate(self._generators):
            generator.seed(f"{self._chance}/{name}/{number}")

    def process(self, name: str) -> Process:
        process = Process(self, name)
        self._processes.append(process)
        return process

    # -- what asyncio asks of a loop -------------------------------------------------------

    def time(self) -> float:
        """What the clock of the process that asks shows."""
        if not self._jumped:
            return self.now
        process = _PROCESS.get()
        return self.now if process is None else self.now + process.ahead_s

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Handle:
        handle = Handle(callback, args, copy_context() if context is None else context)
        self._ready.append(handle)
        return handle

    def call_later(
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> Handle:
        when = self.now + delay if delay > 0.0 else self.now
        known = copy_context() if context is None else context  # an empty context is false
        handle = Handle(callback, args, known, when)
        self._sequence = sequence = self._sequence + 1
        heapq.heappush(self._timers, (when, sequence, handle))
        return handle

    def call_at(
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> Handle:
        """`when` is by the clock of the process that the callback belongs to."""
        if self._jumped:
            process = context.get(_PROCESS) if context is not None else _PROCESS.get()
            when -= process.ahead_s if process is not None else 0.0
        known = copy_context() if context is None else context
        handle = Handle(callback, args, known, when)
        self._sequence = sequence = self._sequence + 1
        heapq.heappush(self._timers, (when, sequence, handle))
        return handle

    def create_task(
        self,
        coro: Coroutine[Any, Any, T],
        *,
        name: str | None = None,
        context: Context | None = None,
        **_: Any,
    ) -> "asyncio.Task[T]":
        self._sequence += 1
        label = name or f"task {self._sequence}"
        task = asyncio.Task(coro, loop=self, name=label, context=context)
        process = context.get(_PROCESS) if context is not None else _PROCESS.get()
        if process is not None:
            process.adopt(task)
        self._tasks.add(task)
        return task

    get_debug = bool
    """False, which is bool(): every future asks, and a function in Python would cost."""

    def set_debug(self, enabled: bool) -> None:
        """Not offered: debug mode reads the wall clock."""

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return self._closed

    def stop(self) -> None:
        raise RealWorld("a simulated run ends when its main coroutine ends")

    def close(self) -> None:
        self._closed = True

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self._closed:
            self.failures.append(context)

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        self.failures.append(context)

    async def shutdown_asyncgens(self) -> None: ...

    async def shutdown_default_executor(self, timeout: float | None = None) -> None: ...

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> NoReturn:  # type: ignore[override]
        raise RealWorld(f"{func} wants a thread; simulated code has none")

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> NoReturn:
        raise RealWorld(f"{callback} comes from another thread; simulated code has none")

    # -- running ---------------------------------------------------------------------------

    def run_until_complete(self, main: Any, *, time_max_s: float = float("inf")) -> Any:
        """Run until `main` ends; returns its result or raises its exception, Deadlock, Livelock."""
        with self._in_charge():
            task = main if isinstance(main, asyncio.Future) else self.create_task(main, name="main")
            self._run_until(task, time_max_s)
            return task.result()

    @contextmanager
    def _in_charge(self) -> Iterator[None]:
        """Inside, this is the running loop. asyncio's own way to say so asks the kernel for the
        process' id each time, some 8,000 times a run."""
        global _running
        told: dict[str, Any] = dict.fromkeys(_ASKED, repeat(self).__next__)  # without a frame
        told["_get_event_loop"] = lambda **_: self
        told["current_task"] = lambda loop=None: _CURRENT_TASK(self)
        told["all_tasks"] = lambda loop=None: set(self._tasks.alive())
        asyncio._set_running_loop(self)
        self._running, _running = True, self
        _tell(told)
        secrets.token_hex = self._drawn_token
        _ALL_TASKS.add = _nothing
        try:
            yield
        finally:
            del _ALL_TASKS.add
            secrets.token_hex = _TOKEN_HEX
            _tell({**_ASKED, "current_task": _CURRENT_TASK, "all_tasks": _ALIVE})
            self._running, _running = False, None
            asyncio._set_running_loop(None)

    def _drawn_token(self, nbytes: int | None = None) -> str:
        """A token of the metadata store's chain, say: the same one each time the seed is run."""
        return self._tokens.randbytes(nbytes or 32).hex()

    def _run_until(self, task: "asyncio.Future[Any]", time_max_s: float) -> None:
        ready = self._ready
        while not task.done():
            if not ready:
                self._advance(time_max_s)
            for _ in range(len(ready)):
                handle = ready.popleft()
                if not handle._cancelled and not (self.paused and _held_back(handle)):
                    self.steps += 1
                    try:
                        handle._context.run(handle._callback, *handle._args)
                    except Exception as error:
                        self._raised(handle, error)
            if self.steps > self._steps_max:
                raise Livelock(f"{self.steps} steps by simulated second {self.now:.3f}")

    def _raised(self, handle: Handle, error: Exception) -> None:
        message = f"a callback raised: {handle}"
        self.failures.append({"message": message, "exception": error, "handle": handle})

    def _advance(self, time_max_s: float) -> None:
        """Jump to the next timer and make every timer of that moment ready."""
        timers = self._timers
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
        if not timers:
            raise Deadlock(f"nothing is scheduled at {self.now:.3f} s; waiting: {self.waiting()}")
        self.now = max(self.now, timers[0][0])
        if self.now > time_max_s:
            raise Livelock(f"not done by simulated second {time_max_s}; waiting: {self.waiting()}")
        while timers and timers[0][0] <= self.now:
            self._ready.append(heapq.heappop(timers)[2])

    def hasten(self, process: Process, seconds: float) -> None:
        """Let every timer of the process fire so much earlier, but none before now."""
        self._jumped = True
        for place, (when, sequence, handle) in enumerate(self._timers):
            if handle._context.get(_PROCESS) is process:
                self._timers[place] = (max(self.now, when - seconds), sequence, handle)
        heapq.heapify(self._timers)

    def requeue(self, handles: list[Handle]) -> None:
        self._ready.extend(handles)

    def waiting(self) -> list[str]:
        """Names of the tasks that have not ended, in the order of their making."""
        return [f"{task.get_name()}: {_where(task)}" for task in self._tasks.alive()]

    def shut(self) -> None:
        """Cancel what is left and let it end; then the loop is closed."""
        try:
            with self._in_charge():
                self._cancel_all()
        finally:
            self.close()
            self._let_go()

    def _cancel_all(self) -> None:
        for _ in range(100):
            left = self._tasks.alive()
            if not left:
                break
            for task in left:
                task.cancel()
            while self._ready:
                handle = self._ready.popleft()
                with suppress(Exception):
                    handle._context.run(handle._callback, *handle._args)

    def _let_go(self) -> None:
        """Nothing runs any more: what hung on tasks and timers is freed at once, not by the next
        garbage collection, which would cost a twentieth of the run."""
        self._timers.clear()
        self._ready.clear()
        self._tasks = Tasks()
        for process in self._processes:
            process.let_go()


_running: SimLoop | None = None
_ASKED: dict[str, Any] = {
    name: getattr(asyncio.events, name)
    for name in ("get_running_loop", "_get_running_loop", "_get_event_loop")
}
_CURRENT_TASK: Any = asyncio.current_task
_ALIVE: Any = asyncio.all_tasks
_TOKEN_HEX = secrets.token_hex
_ALL_TASKS: Any = asyncio.tasks._all_tasks  # type: ignore[attr-defined]
"""asyncio's weak set of all tasks, in which a run keeps none: it has `Tasks`, and a weak reference
for each task is the twentieth part of what a task costs."""


def _tell(answers: dict[str, Any]) -> None:
    """Put these functions where asyncio and our code look for them."""
    for name, answer in answers.items():
        for module in (asyncio, asyncio.events, asyncio.tasks):
            if hasattr(module, name):
                setattr(module, name, answer)


def _held_back(handle: Handle) -> bool:
    """Keep the handle for later if it belongs to a paused process."""
    process = handle._context.get(_PROCESS)
    if process is None or not process.paused:
        return False
    process.backlog.append(handle)
    return True


def _where(task: "asyncio.Task[Any]") -> str:
    frames = task.get_stack(limit=1)
    return f"{frames[-1].f_code.co_qualname}:{frames[-1].f_lineno}" if frames else "?"


def current() -> SimLoop:
    """The simulated loop that runs now."""
    assert _running is not None, "this needs the simulated loop: use simulation.loop.run"
    return _running


def running() -> SimLoop | None:
    """The running loop, or None if no loop runs. (asyncio.get_running_loop asks the kernel for the
    process' id each time.)"""
    return _running


def run(
    main: Coroutine[Any, Any, T],
    seed: int = 0,
    *,
    time_max_s: float = float("inf"),
    steps_max: int = STEPS_MAX,
) -> T:
    """Run a coroutine in simulated time and return its result.

    `seed` is what `current().random_for(name)` splits. Raises what the coroutine raises; Deadlock,
    Livelock; AssertionError when a callback raised, because no other code would see it.
    """
    loop = SimLoop(seed, steps_max=steps_max)
    collecting = gc.isenabled()
    gc.disable()
    try:
        result = loop.run_until_complete(main, time_max_s=time_max_s)
        raised = [f for f in loop.failures if f.get("handle") is not None]
        assert not raised, f"a callback raised: {raised}"
        return result
    finally:
        loop.shut()
        if collecting:
            gc.enable()
