"""The lanes in which requests travel through a node; how the node pushes back (it counts the bytes
under way, and a refusal has the time until the next try); and the rate of its background work.

Always true: recovery (fences, fencing reads, recovery's and repair's adds) has a lane, a place in
the journal's next batch, disk threads of its own and a reserve beyond every budget, so it never
waits behind bulk adds or reads, and has room however much the others send. The lane of a request
is set once, where the request comes in, and inherited by every task that works for it. One request
always fits an unused budget; the time until the next try is between the least and
RETRY_AFTER_MS_MAX, and the longer, the more bytes are under way; over any time a Pace lets through
at most `bytes_per_s` times that time, plus the last request.
"""

import asyncio
from contextvars import ContextVar
from enum import Enum

RETRY_AFTER_MS_MAX = 1000
CALLER_SHARE = 0.5  # of a budget, for one caller: a caller that takes no bytes blocks no other
_WEIGHT = 0.3  # of the last work in the estimate


class Lane(Enum):
    """How the journal writes the records of a request, and which disk threads read for it."""

    BULK = "bulk"
    """Normal adds and reads. Acknowledged when synced."""
    PAGE_CACHE = "page-cache"
    """Normal adds of ledgers with that durability: acknowledged when written, synced soon."""
    RECOVERY = "recovery"
    """Acknowledged when synced, and never behind waiting records of other ledgers."""


request_lane: ContextVar[Lane] = ContextVar("lane", default=Lane.BULK)
"""The lane of the request that the running task works for."""


calling: ContextVar[str] = ContextVar("caller", default="")
"""The connection of that request; empty: unknown."""


def in_recovery() -> bool:
    """Whether the running task works for recovery."""
    return request_lane.get() is Lane.RECOVERY


class Budget:
    """Bytes under way, `bytes_max` at most; for recovery more."""

    def __init__(self, bytes_max: int, reserve_bytes: int) -> None:
        self.used = 0
        self._bytes_max = bytes_max
        self._reserve_bytes = reserve_bytes
        self._by_caller: dict[str, int] = {}

    def has_room(self, count: int, *, recovery: bool = False, caller: str = "") -> bool:
        """Whether so many bytes more may be taken; for bulk, a `caller` gets no more than its
        share."""
        limit = self._bytes_max + (self._reserve_bytes if recovery else 0)
        taken = self._by_caller.get(caller, 0)
        if taken and not recovery and taken + count > CALLER_SHARE * self._bytes_max:
            return False
        return not self.used or self.used + count <= limit

    def fits(self, count: int, *, recovery: bool = False) -> bool:
        """Whether `has_room` allowed so many of the bytes that are taken already."""
        self.used -= count
        room = self.has_room(count, recovery=recovery)
        self.used += count
        return room

    def take(self, count: int, caller: str = "") -> None:
        self.used += count
        self._count(caller, count)

    def give_back(self, count: int, caller: str = "") -> None:
        self.used -= count
        assert self.used >= 0, "bytes are given back once"
        self._count(caller, -count)

    def _count(self, caller: str, count: int) -> None:
        if caller and count:
            self._by_caller[caller] = self._by_caller.get(caller, 0) + count
            if not self._by_caller[caller]:
                del self._by_caller[caller]


class Throughput:
    """Bytes that a kind of work does in a second, by its last times."""

    def __init__(self) -> None:
        self._bytes_per_s = 0.0

    def did(self, count: int, seconds: float) -> None:
        rate = count / max(seconds, 1e-4)
        old = self._bytes_per_s
        self._bytes_per_s = old + _WEIGHT * (rate - old) if old else rate

    def seconds_for(self, count: int) -> float | None:
        """None: unknown, no work was done yet."""
        return count / self._bytes_per_s if self._bytes_per_s else None


class Work:
    """Pieces of work one after another (flushes), and when the one under way should end."""

    def __init__(self) -> None:
        self._throughput = Throughput()
        self._bytes = 0
        self._begun_s: float | None = None

    def begun(self, count: int, now_s: float) -> None:
        self._bytes, self._begun_s = count, now_s

    def ended(self, now_s: float) -> None:
        assert self._begun_s is not None
        if self._bytes:
            self._throughput.did(self._bytes, now_s - self._begun_s)
        self._begun_s = None

    def left_s(self, now_s: float, behind_bytes: int = 0) -> float:
        """Seconds until the work under way and so many bytes behind it should be done. Work that
        takes longer than expected, or is the first of its kind, should go on for half the time that
        has passed."""
        behind_s = self._throughput.seconds_for(behind_bytes) or 0.0
        if self._begun_s is None:
            return behind_s
        passed_s = now_s - self._begun_s
        expected_s = self._throughput.seconds_for(self._bytes) or 0.0
        return behind_s + max(expected_s - passed_s, passed_s / 2)


class Pace:
    """A budget of bytes per second, shared by all work whose sum is to be bounded."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._free_at = 0.0

    async def spend(self, count: int) -> None:
        """Return when work on `count` more bytes may begin: after the bytes spent before."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        start = max(now, self._free_at)
        self._free_at = start + count / self.bytes_per_s
        await asyncio.sleep(start - now)


def retry_after_ms(wait_s: float, least_ms: int) -> int:
    """The `retry_after_ms` for a caller that would have to wait so long."""
    return max(least_ms, min(round(wait_s * 1000), RETRY_AFTER_MS_MAX))
