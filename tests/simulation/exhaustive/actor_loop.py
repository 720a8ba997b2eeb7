"""The event loop of one actor: it runs what is ready, and then waits to be told what happens next.

Always true:
- an actor runs in a loop of its own and alone: no object of another actor can be reached from it,
  so what it does is a function of what happened to it and of nothing else;
- its clock stands still but for `fire`, which moves it to the next timer that matters: one set no
  longer than `grace_s` ahead (graces in which a late answer may come). Longer ones, the time-outs,
  never fire.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import Context, copy_context
from typing import Any

from tests.simulation import loop as simulated
from tests.simulation.loop import Handle, SimLoop

CALLBACKS_MAX = 20_000  # between two events; more is a livelock
_ROUNDING_S = 1e-6


class Defect(AssertionError):
    """A callback of an actor raised, or it never came to rest."""


class ActorLoop(SimLoop):
    """`settle` runs all that is ready, `fire` the next timer; nothing else moves."""

    def __init__(self, grace_s: float) -> None:
        super().__init__()
        self._grace_s = grace_s
        self._soon: deque[Handle] = deque()
        self._graces: list[Handle] = []

    def time(self) -> float:
        return self.now

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Handle:
        handle = Handle(callback, args, copy_context() if context is None else context)
        self._soon.append(handle)
        return handle

    def call_later(
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> Handle:
        return self.call_at(self.now + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> Handle:
        known = copy_context() if context is None else context
        handle = Handle(callback, args, known, when)
        if when <= self.now:
            self._soon.append(handle)
        elif when <= self.now + self._grace_s + _ROUNDING_S:
            self._graces.append(handle)
        return handle

    @property
    def grace(self) -> bool:
        """Whether a timer that matters is set."""
        return any(not handle.cancelled() for handle in self._graces)

    def fire(self) -> None:
        """The clock moves to the next timer that matters, and all of that moment run."""
        living = [handle for handle in self._graces if not handle.cancelled()]
        self.now = min(handle.when() for handle in living)
        self._soon.extend(handle for handle in living if handle.when() <= self.now)
        self._graces = [handle for handle in living if handle.when() > self.now]

    def settle(self) -> None:
        """Run until nothing is ready. Raises Defect."""
        with self.entered():
            for _ in range(CALLBACKS_MAX):
                if not self._soon:
                    break
                handle = self._soon.popleft()
                if not handle.cancelled():
                    handle._context.run(handle._callback, *handle._args)
            else:
                raise Defect(f"does not come to rest; {self.waiting()}")
        if self.failures:
            raise Defect(str(self.failures[0]))

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Code in this block runs as the loop's own."""
        asyncio._set_running_loop(self)
        simulated._running = self
        try:
            yield
        finally:
            simulated._running = None
            asyncio._set_running_loop(None)

    def discard(self) -> None:
        """End every task and forget it."""
        self._closed = True
        with self.entered():
            for _ in range(100):
                for task in self._tasks.alive():
                    task.cancel()
                while self._soon:
                    handle = self._soon.popleft()
                    with suppress(Exception):
                        handle._context.run(handle._callback, *handle._args)
                if not self._tasks.alive():
                    break
