"""The metadata store as one broker sees it: the store's clock, and whether the store responds."""

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import Any

from spark_ledger.metadata.store import MetadataStore, SessionState, StoreError
from spark_ledger.metadata.store_calls import store_now_ms
from spark_ledger.topic.client import TopicClient

CLOCK_EVERY_S = 300.0
CLOCK_TRIES, CLOCK_WITHIN_MS = 5, 20
DRIFT = 1e-4
"""This machine's clock may run faster than the store's by this share: 30 ms between two
measurements."""
AWAY_S, AWAY_LOOK_S = 1.0, 0.2
"""A store that gives no response for AWAY_S counts as silent; it is asked every AWAY_LOOK_S."""

_log = logging.getLogger(__name__)


class StoreClock:
    """An estimate of the metadata store's time: this machine's clock plus a measured offset."""

    def __init__(self) -> None:
        self._offset_ms = 0
        self._measured_s = float("-inf")
        self._earliest: tuple[int, int] | None = None

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000 + self._offset_ms

    def earliest_ms(self) -> int | None:
        """A time that the store's clock has certainly passed: the store's time in a measured
        response, plus the time since then by this machine's monotonic clock, less DRIFT. None
        before the first response."""
        if self._earliest is None:
            return None
        store_ms, at_ns = self._earliest
        passed_ms = (time.monotonic_ns() - at_ns) // 1_000_000
        return store_ms + passed_ms - int(passed_ms * DRIFT)

    async def measure(self, client: TopicClient) -> None:
        """Measure the offset, unless the last measurement is younger than CLOCK_EVERY_S. An offset
        may be wrong by half of the time that the response took. So after a response that took
        longer than CLOCK_WITHIN_MS the store is asked again, and the fastest response counts. There
        is no offset if every response might come from a store with this machine's clock: where the
        clocks are equal, slow responses do not make the time wrong. Raises StoreError if the store
        never responds."""
        now_s = asyncio.get_running_loop().time()
        if now_s < self._measured_s + CLOCK_EVERY_S:
            return
        samples: list[tuple[int, int]] = []
        bounds: list[tuple[int, int]] = []
        seem_equal = True
        for _ in range(CLOCK_TRIES):
            asked_ms, asked_ns = time.time_ns() // 1_000_000, time.monotonic_ns()
            try:
                store_ms = await store_now_ms(client.store)
            except StoreError:
                if not samples:
                    raise
                break
            answered_ns = time.monotonic_ns()
            took_ms = (answered_ns - asked_ns) // 1_000_000
            if store_ms:
                bounds.append((store_ms, answered_ns))
                samples.append((took_ms, store_ms - asked_ms - took_ms // 2))
                seem_equal &= asked_ms <= store_ms <= asked_ms + took_ms + 1
            if store_ms and took_ms <= CLOCK_WITHIN_MS:
                break
        if samples:
            self._offset_ms = 0 if seem_equal else min(samples)[1]
            self._earliest = max(bounds, key=lambda bound: bound[0] * 1_000_000 - bound[1])
            self._measured_s = now_s


class StoreContact:
    """Whether the store responds to one broker."""

    def __init__(self, store: MetadataStore) -> None:
        self._store = store
        self._is_silent = False

    @property
    def is_lost(self) -> bool:
        return self._store.session_state is not SessionState.CONNECTED

    async def run_until_silent(self, work: Coroutine[Any, Any, None]) -> None:
        """Run the coroutine until it is done. If the store gives no response for AWAY_S, whatever
        the state of the session, the coroutine is cancelled: it then leaves what a crash would
        leave, and the next owner of each partition decides what that is."""
        task = asyncio.get_running_loop().create_task(work)
        try:
            while not (await asyncio.wait([task], timeout=AWAY_LOOK_S))[0]:
                if not await self._responds():
                    break
        finally:
            if task.cancel():
                _log.warning("not all is sealed and released: the next owner decides what is left")
            (outcome,) = await asyncio.gather(task, return_exceptions=True)
        if isinstance(outcome, Exception):
            raise outcome

    async def _responds(self) -> bool:
        """Whether the store responds within AWAY_S. After one silence the store is not asked
        again."""
        if not self._is_silent:
            try:
                async with asyncio.timeout(AWAY_S):
                    await self._store.sync()
            except (TimeoutError, StoreError):
                self._is_silent = True
        return not self._is_silent
