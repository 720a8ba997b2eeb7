"""The lanes in which requests travel through a node.

Always true: recovery (fences, fencing reads, recovery's and repair's adds) has budgets, a place in
the journal's next batch and disk threads of its own, so it never waits behind bulk adds or reads.
The lane of a request is set once, where the request comes in, and inherited by every task that
works for it.
"""

from contextvars import ContextVar
from enum import Enum


class Lane(Enum):
    """How records are written by the journal, and which disk threads read for a request."""

    BULK = "bulk"
    """Normal adds and reads. Acknowledged when synced."""
    PAGE_CACHE = "page-cache"
    """Normal adds of ledgers with that durability: acknowledged when written, synced soon."""
    RECOVERY = "recovery"
    """Acknowledged when synced, and never behind what other ledgers have waiting."""


travelling: ContextVar[Lane] = ContextVar("lane", default=Lane.BULK)
"""The lane of the request that the running task works for."""


calling: ContextVar[str] = ContextVar("caller", default="")
"""The connection by which that request came; empty: unknown."""


def in_recovery() -> bool:
    """Whether the running task works for recovery."""
    return travelling.get() is Lane.RECOVERY
