"""A test on a bookie of the simulation that a coroutine has made ready."""

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from tests.simulation.loop import run

T = TypeVar("T")
TIME_MAX_S = 1_000_000.0
"""Of simulated time: bookies wait for days for what they scrub, sweep and collect."""


def on_a_node(test: Callable[[T], Awaitable[None]], ready: Coroutine[Any, Any, T]) -> None:
    """Run `test(node)` in simulated time, on the node that `ready` starts."""

    async def whole() -> None:
        await test(await ready)

    run(whole(), seed=1, time_max_s=TIME_MAX_S)
