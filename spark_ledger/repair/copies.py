"""The copies of one ledger at one bookie: finds the entries that the bookie should keep and lacks,
and copies them to the bookie.

Always true:
- an entry of a CLOSED ledger that can be read at the bookie, CRCs checked, is not copied. Every
  other entry is copied from bookies that the record names, by recovery adds, which are synced and
  replace a copy that can no longer be read;
- every entry of an OPEN ledger is copied, since a read at the bookie does not prove that the entry
  is durable: a plain read shows an entry before its add is synced, or after its journal failed;
- an entry that no peer supplies is noted in `unsupplied`, and the other entries are copied;
- the bytes under way are at most one window (read_request_bytes and one entry); after each window
  `pace` is awaited.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import TypeVar

from bookie_server.api.codec import ENTRY_ID_MAX
from bookie_server.api.entry import Entry, pack_header
from bookie_server.api.messages import Add, AddResult, ReadResponse, StoredResponse
from bookie_server.api.status import Status
from spark_ledger.errors import DataUnavailable
from spark_ledger.ledger.cluster import Cluster, has_entry, judge_response, status_text
from spark_ledger.ledger.reader import AsyncLedgerReader
from spark_ledger.ledger.records import VersionedRecord
from spark_ledger.metadata.ledger_record import Tokens, should_keep

R = TypeVar("R", ReadResponse, StoredResponse, ReadResponse | StoredResponse)
UNSUPPLIED_MAX = 16  # entries without a peer that are kept with their reason; others are counted
ENTRIES_AT_ONCE = 1024
BUSY_TRIES = 100

Pace = Callable[[int], Awaitable[None]]
"""Called with the number of copied bytes, with 0 before the first copy; returns when the next bytes
may be copied."""


async def unpaced(_: int) -> None:
    """A pace without a limit."""


class CannotCompare(Exception):
    """The bookie does not respond to the comparison, or does not take a copy."""


class Copies:
    """The copies of the ledger, by its record `versioned`, at the bookie. With `fence`, each
    comparison fences the ledger at the bookie, durably: an earlier writer can add no entry to it,
    and the bookie delivers only synced entries, whatever the ledger's durability. Never use `fence`
    for an OPEN ledger. Without `fence`, the delivered entries are durable once the bookie has
    cleared the ledger's limbo: the bookie's journal has the record of the clearing after these
    entries, and syncs it with them."""

    def __init__(
        self,
        cluster: Cluster,
        versioned: VersionedRecord,
        tokens: Tokens,
        bookie_id: str,
        *,
        fence: bool,
        pace: Pace = unpaced,
    ) -> None:
        self.compared = self.copied = 0
        self.unsupplied: dict[int, str] = {}
        """The first UNSUPPLIED_MAX entries that no peer supplies, and why."""
        self._unsupplied_count = 0
        self._cluster = cluster
        self._record = versioned.record
        self._ledger_id = versioned.record.ledger_id
        self._token = tokens.recover
        self._bookie_id = bookie_id
        self._fence = fence
        self._open = not versioned.record.closed
        self._pace = pace
        self._reader = AsyncLedgerReader(cluster, versioned, tokens)

    async def bring_back(self, entries: range, slot: int) -> None:
        """Give the bookie the confirmed `entries` that `slot` keeps and the bookie lacks. On return
        these entries are durable at the bookie, except the `unsupplied` entries. Raises
        CannotCompare, LedgerError."""
        async for lacking in self._lacking(entries, slot):
            for run in _runs(lacking):
                await self._copy(run)

    async def fence_at(self, entry_id: int) -> None:
        """Fence the ledger at the bookie, durably, by a read of this entry, which need not exist.
        Call this for a ledger without any entry to compare: a comparison fences anyway. Raises
        CannotCompare."""
        response = await self._read(entry_id, entry_id)
        if response.status not in (Status.OK, Status.NO_SUCH_LEDGER):
            raise CannotCompare(status_text(response))

    async def _read(self, first: int, last: int) -> ReadResponse:
        return await self._cluster.bookies.read(
            *(self._bookie_id, self._ledger_id, first, last),
            max_bytes=self._cluster.config.read_request_bytes,
            fence=self._fence,
            token=self._token,
        )

    async def _lacking(self, entries: range, slot: int) -> AsyncIterator[list[int]]:
        """For each window of the `entries`, the entries that the bookie should keep and cannot
        deliver."""

        async def ask(first: int, last: int) -> ReadResponse:
            response = await self._read(first, last)
            if not covered_count(response, first) and response.status is not Status.NO_SUCH_LEDGER:
                raise CannotCompare(status_text(response))
            return response

        async for window, response in ask_in_windows(entries, ask, ENTRIES_AT_ONCE):
            kept = [entry_id for entry_id in window if should_keep(self._record, slot, entry_id)]
            self.compared += len(kept)
            stored = () if self._open else delivered_entries(response, self._ledger_id, window)
            yield [entry_id for entry_id in kept if entry_id not in stored]

    async def _copy(self, run: range) -> None:
        """Give the bookie a run of entries, from bookies that have them."""
        at, read_entries = run.start, len(run)
        while at < run.stop:
            batch: list[Entry] = []
            last = min(at + read_entries, run.stop) - 1
            read_entries *= 2
            try:
                read = self._reader.read(at, last, known_confirmed=last)
                async with aclosing(read) as entries:
                    async for entry_id, entry in entries:
                        at = entry_id + 1
                        batch.append(entry)
                        if _bytes(batch) >= self._cluster.config.read_request_bytes:
                            await self._give(batch)
                            batch = []
            except DataUnavailable as failure:
                self._unsupplied_count += 1
                if len(self.unsupplied) < UNSUPPLIED_MAX:
                    self.unsupplied[at] = failure.what
                at, read_entries = at + 1, 1  # the next entries may lack a peer too
            await self._give(batch)

    async def _give(self, batch: Sequence[Entry]) -> None:
        """Give the bookie the entries, durably. Raises CannotCompare."""
        results = await asyncio.gather(*map(self._give_one, batch))
        refused = [result for result in results if result.status is not Status.OK]
        if refused:
            raise CannotCompare(f"the bookie does not take a copy: {status_text(refused[0])}")
        self.copied += len(batch)
        await self._pace(_bytes(batch))

    async def _give_one(self, entry: Entry) -> AddResult:
        add = Add([pack_header(entry.header), entry.payload], True, self._token)
        for _ in range(BUSY_TRIES):
            result = await self._cluster.bookies.add(self._bookie_id, add)
            if result.status is not Status.BUSY:
                break
            await asyncio.sleep(result.retry_after_ms / 1000 or 0.05)
        return result

    def unsupplied_text(self) -> str:
        """The entries that no peer supplies, for an error text; empty if all were supplied."""
        if not self.unsupplied:
            return ""
        entry_id, why = next(iter(self.unsupplied.items()))
        count = self._unsupplied_count
        return f"no peer supplies {count} of its entries, the first is {entry_id}: {why}"


async def ask_in_windows(
    entries: range, ask: Callable[[int, int], Awaitable[R]], at_once: int = ENTRY_ID_MAX
) -> AsyncIterator[tuple[range, R]]:
    """Ask a bookie about the entries in order, `at_once` entries at a time. Yields for each
    response its window (the entries that it covers) and the response. If a response covers only the
    first entries of its request, the next `ask(first, last)` begins after them. A refusal, which
    covers no entry, counts as the response for all entries of its request."""
    at = entries.start
    while at < entries.stop:
        window = range(at, min(at + at_once, entries.stop))
        response = await ask(at, window.stop - 1)
        window = window[: covered_count(response, at) or len(window)]
        yield window, response
        at = window.stop


def covered_count(response: ReadResponse | StoredResponse, first: int) -> int:
    """The number of entries from `first` on that the response covers; 0 for a refusal."""
    if response.status is not Status.OK:
        return 0
    if isinstance(response, ReadResponse):
        return len(response.results)
    return max(0, response.through + 1 - first)


def delivered_entries(response: ReadResponse, ledger_id: int, window: range) -> frozenset[int]:
    """The entries in the response to a read of the window, checked."""
    results = ((e, judge_response(response, ledger_id, e - window.start, e)) for e in window)
    return frozenset(entry_id for entry_id, result in results if has_entry(result))


def _bytes(batch: Sequence[Entry]) -> int:
    return sum(len(entry.payload) for entry in batch)


def _runs(entry_ids: Sequence[int]) -> list[range]:
    """Ascending ids as ranges without gaps."""
    runs: list[range] = []
    for entry_id in entry_ids:
        if runs and runs[-1].stop == entry_id:
            runs[-1] = range(runs[-1].start, entry_id + 1)
        else:
            runs.append(range(entry_id, entry_id + 1))
    return runs
