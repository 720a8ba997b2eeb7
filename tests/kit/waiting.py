"""Waiting for a condition on the event loop, not for a time."""

import asyncio
from collections.abc import Callable

PATIENCE_S = 60


async def until(condition: Callable[[], object]) -> None:
    """Return once the condition holds. Raises AssertionError after PATIENCE_S."""
    for _ in range(100 * PATIENCE_S):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come about")
