"""A real event loop whose clock a test puts forward: a time limit of the product ends when the test
decides, never before, however slow the machine is."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class ForwardLoop(asyncio.SelectorEventLoop):
    """One whose time a test puts forward."""

    ahead_s = 0.0

    def time(self) -> float:
        return super().time() + self.ahead_s


def run(main: Coroutine[Any, Any, T]) -> T:
    """As asyncio.run, on such a loop."""
    with asyncio.Runner(loop_factory=ForwardLoop) as runner:
        return runner.run(main)


def forward(seconds: float) -> None:
    """Of the running loop: its clock shows so much more, and timers that are due by then fire."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, ForwardLoop)
    loop.ahead_s += seconds
