"""Work in the background at a bounded rate, by the loop's clock.

Always true: over any time the work let through is at most `bytes_per_s` times that time, plus
what was asked for last; nobody saves up while there is nothing to do.
"""

import asyncio


class Pace:
    """One budget of bytes per second; shared by those whose sum is to be bounded."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._free_at = 0.0

    async def spend(self, count: int) -> None:
        """Return when `count` bytes more may be worked on: after those spent before."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        start = max(now, self._free_at)
        self._free_at = start + count / self.bytes_per_s
        await asyncio.sleep(start - now)
