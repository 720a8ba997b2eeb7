"""The lanes in which requests travel through a node; how the node refuses requests when too many
bytes are under way (a refusal has the time until the next try); and the rate of background work.

Always true: recovery (fences, fencing reads, recovery's and repair's adds) has its own lane, its
own disk threads, a place in the journal's next batch, and a reserve beyond every budget. So it
never waits behind bulk adds or reads, and has room however many bytes other requests have. The lane
of a request is set once, when the request arrives, and every task that works for the request
inherits it. Any single request fits an unused budget. The more bytes are under way, the longer is
the time until the next try, up to RETRY_AFTER_MS_MAX. In any period a Pace permits at most
`bytes_per_s` times the period, plus the last request.
"""

import asyncio
from contextvars import ContextVar
from enum import Enum

RETRY_AFTER_MS_MAX = 1000
CALLER_SHARE = 0.5  # of a budget, for one caller: a caller that is slow to read blocks no other
_WEIGHT = 0.3  # of the last work in the estimate of the rate


class Lane(Enum):
    """How the journal writes the records of a request, and which disk threads read for it."""

    BULK = "bulk"
    """Normal adds and reads. Acknowledged when synced."""
    PAGE_CACHE = "page-cache"
    """Normal adds of ledgers with page-cache durability: acknowledged when written, synced soon."""
    RECOVERY = "recovery"
    """Acknowledged when synced, and never behind waiting records of other ledgers."""


request_lane: ContextVar[Lane] = ContextVar("lane", default=Lane.BULK)
"""The lane of the request that the running task works for."""


calling: ContextVar[str] = ContextVar("caller", default="")
"""The connection from which the request of `request_lane` came; empty: unknown."""


def in_recovery_lane() -> bool:
    """Whether the running task carries out a request of recovery."""
    return request_lane.get() is Lane.RECOVERY


class Budget:
    """Counts bytes under way: `bytes_max` at most, and for recovery `reserve_bytes` more."""

    def __init__(self, bytes_max: int, reserve_bytes: int) -> None:
        self.used = 0
        self._bytes_max = bytes_max
        self._reserve_bytes = reserve_bytes
        self._by_caller: dict[str, int] = {}

    def has_room(self, count: int, *, recovery: bool = False, caller: str = "") -> bool:
        """Whether `count` more bytes may be taken. Without `recovery`, a `caller` gets at most
        CALLER_SHARE of the budget."""
        limit = self._bytes_max + (self._reserve_bytes if recovery else 0)
        taken = self._by_caller.get(caller, 0)
        if taken and not recovery and taken + count > CALLER_SHARE * self._bytes_max:
            return False
        return not self.used or self.used + count <= limit

    def fits(self, count: int, *, recovery: bool = False) -> bool:
        """Whether `has_room` would allow the last `count` bytes, which are taken already."""
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
    """The bytes that a kind of work does in a second: an average in which recent work counts
    most."""

    def __init__(self) -> None:
        self._bytes_per_s = 0.0

    def note(self, count: int, seconds: float) -> None:
        """Note work on `count` bytes that took so many seconds."""
        rate = count / max(seconds, 1e-4)
        old = self._bytes_per_s
        self._bytes_per_s = old + _WEIGHT * (rate - old) if old else rate

    def seconds_for(self, count: int) -> float | None:
        """Seconds that work on `count` bytes should take; None if no work was done yet."""
        return count / self._bytes_per_s if self._bytes_per_s else None


class Work:
    """Estimates when the work under way should end, from the rate of earlier work of its kind."""

    def __init__(self) -> None:
        self._throughput = Throughput()
        self._bytes = 0
        self._begun_s: float | None = None

    def begin(self, count: int, now_s: float) -> None:
        self._bytes, self._begun_s = count, now_s

    def end(self, now_s: float) -> None:
        assert self._begun_s is not None
        if self._bytes:
            self._throughput.note(self._bytes, now_s - self._begun_s)
        self._begun_s = None

    def left_s(self, now_s: float, behind_bytes: int = 0) -> float:
        """Seconds until the work under way and `behind_bytes` after it should be done. Work that
        takes longer than expected, or is the first of its kind, is expected to go on for half of
        the time that has passed."""
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
        """Wait until work on `count` more bytes may begin."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        start = max(now, self._free_at)
        self._free_at = start + count / self.bytes_per_s
        await asyncio.sleep(start - now)


def retry_after_ms(wait_s: float, least_ms: int) -> int:
    """The `retry_after_ms` of a refusal, if there should be room in `wait_s`."""
    return max(least_ms, min(round(wait_s * 1000), RETRY_AFTER_MS_MAX))
