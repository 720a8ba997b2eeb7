"""The reader of a ledger: what is confirmed, in order, fetched ahead.

Always true:
- no entry beyond max(last add confirmed heard, what the caller knows is confirmed) or beyond the
  end of a closed ledger is returned; both only ever are lower bounds of what is there;
- each entry's CRCs and ids are checked here again; a damaged or missing copy means the next
  replica;
- an entry that is confirmed and that nobody delivers means: sync, re-read the record, try again
  if it changed, otherwise DataUnavailable. Never end of stream.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from bookie_server.api.entry import NO_ENTRY, Entry
from bookie_server.api.status import Meaning, Status, meaning
from spark_ledger.errors import (
    DataUnavailable,
    DigestMismatch,
    LedgerError,
    NoSuchEntry,
    Unauthorized,
)
from spark_ledger.ledger.answers import as_answered
from spark_ledger.ledger.cluster import Cluster
from spark_ledger.ledger.quorum import Quorum
from spark_ledger.ledger.range_fetch import Chunk, RangeFetch, Refusals
from spark_ledger.ledger.records import VersionedRecord
from spark_ledger.metadata.ledger_record import LedgerRecord
from spark_ledger.metadata.tokens import Tokens

__all__ = ["LedgerReader"]

ENTRIES_PER_REQUEST_MAX = 4096
ENTRY_BYTES_GUESS = 64 * 1024

Entries = AsyncGenerator[tuple[int, Entry], None]


class LedgerReader:
    """Reads one ledger, open or closed. Made by LedgerStore.open."""

    def __init__(self, cluster: Cluster, known: VersionedRecord, tokens: Tokens) -> None:
        self.ledger_id = known.record.ledger_id
        self._cluster = cluster
        self._known = known
        self._token = tokens.read
        self._quorum = Quorum(
            known.record.ensemble_size, known.record.write_quorum, known.record.ack_quorum
        )
        self._lac = NO_ENTRY
        self._fetch = RangeFetch(cluster, self._quorum, self.ledger_id, self._token, self._heard)
        self._entry_bytes = self._guess()

    @property
    def record(self) -> LedgerRecord:
        return self._known.record

    @property
    def version(self) -> int:
        return self._known.version

    @property
    def is_closed(self) -> bool:
        """Whether the ledger was closed when the record was last read: it ends at
        `last_add_confirmed` for ever."""
        return self.record.closed

    @property
    def last_add_confirmed(self) -> int:
        """The last entry known to be confirmed; of a closed ledger, its last entry."""
        end = self.record.last_entry
        return self._lac if end is None else end

    async def refresh_last_add_confirmed(self) -> int:
        """Ask the record and the bookies; returns last_add_confirmed, which never goes back.

        Of an open ledger it is a lower bound: -1 does not mean that nothing was written. Raises
        Unavailable, NoSuchLedger; DataUnavailable when too few bookies answer to learn anything.
        """
        if not self.is_closed:
            self._adopt(await self._cluster.records.read(self.ledger_id))
        if not self.is_closed:
            await self._ask_lac()
        return self.last_add_confirmed

    async def read(self, first: int, last: int, *, known_confirmed: int | None = None) -> "Entries":
        """(entry id, checked entry) of first..last, both included, in order.

        `known_confirmed`: an entry the caller knows to be confirmed by other means (a commit).
        Up to `read_ahead_bytes` are fetched ahead, from several bookies at a time. Raises
        NoSuchEntry beyond what is confirmed, DataUnavailable, DigestMismatch, Unauthorized,
        NoSuchLedger.
        """
        if first < 0:
            raise ValueError(f"entry ids start at 0, got {first}")
        await self._check_confirmed(last, known_confirmed)
        window: deque[tuple[Chunk, asyncio.Task[Refusals]]] = deque()
        loop = asyncio.get_running_loop()
        next_entry = first
        try:
            while next_entry <= last or window:
                while next_entry <= last and self._may_fetch(len(window)):
                    chunk = self._chunk(next_entry, last)
                    window.append((chunk, loop.create_task(self._fetch.fill(chunk))))
                    next_entry = chunk.last + 1
                chunk, fetching = window.popleft()
                async for entry in self._entries(chunk, await fetching):
                    yield entry.header.entry_id, entry
        finally:
            for _, fetching in window:
                fetching.cancel()

    # -- pieces of a read ---------------------------------------------------------------------

    async def _check_confirmed(self, last: int, known_confirmed: int | None) -> None:
        if last > self._limit(known_confirmed):
            await self.refresh_last_add_confirmed()
        limit = self._limit(known_confirmed)
        if last > limit:
            state = self.record.state.value
            raise NoSuchEntry(
                f"entry {last} of ledger {self.ledger_id} ({state}) is beyond the last"
                f" confirmed, {limit}",
                ledger_id=self.ledger_id,
                last_add_confirmed=limit,
            )

    def _limit(self, known_confirmed: int | None) -> int:
        if self.is_closed:
            return self.last_add_confirmed
        return max(self._lac, NO_ENTRY if known_confirmed is None else known_confirmed)

    def _may_fetch(self, under_way: int) -> bool:
        config = self._cluster.config
        request_bytes = max(config.read_request_bytes, self._entry_bytes)
        return under_way == 0 or (under_way + 1) * request_bytes <= config.read_ahead_bytes

    def _chunk(self, first: int, last: int) -> Chunk:
        """The next range to ask for: of one fragment, about one request's bytes."""
        count = self._cluster.config.read_request_bytes // max(1, self._entry_bytes)
        count = min(max(1, count), ENTRIES_PER_REQUEST_MAX)
        record = self.record
        later = [f.first_entry for f in record.fragments if f.first_entry > first]
        end = min([last, first + count - 1, *(begin - 1 for begin in later)])
        return Chunk(first, end, record.fragment_of(first).ensemble, self.version)

    async def _entries(self, chunk: Chunk, refusals: Refusals) -> AsyncIterator[Entry]:
        """The chunk's entries in order, fetching again what its first answers left out."""
        first, last = chunk.first, chunk.last
        for entry_id in range(first, last + 1):
            while entry_id not in chunk.entries:
                if chunk.cut_short(entry_id):
                    refusals = await self._fetch.fill(chunk, entry_id)
                    continue
                if entry_id <= chunk.last:
                    await self._newer_record_or_raise(entry_id, chunk.version, refusals)
                chunk = self._chunk(entry_id, last)
                refusals = await self._fetch.fill(chunk)
            entry = chunk.entries.pop(entry_id)
            self._entry_bytes += (len(entry.payload) - self._entry_bytes) // 8
            yield entry

    async def _newer_record_or_raise(self, entry_id: int, used: int, refusals: Refusals) -> None:
        """Nobody delivers a confirmed entry. Return if the record is newer than version `used`."""
        self._adopt(await self._cluster.records.read(self.ledger_id, fresh=True))
        if self.version == used:
            raise self._unreadable(entry_id, refusals)

    def _unreadable(self, entry_id: int, refusals: Refusals) -> LedgerError:
        said = "; ".join(
            f"{self._cluster.directory.describe(bookie)}: {why}"
            for bookie, why in refusals.get(entry_id, {}).items()
        )
        reasons = list(refusals.get(entry_id, {}).values())
        text = f"entry {entry_id} of ledger {self.ledger_id} cannot be read: {said}"
        kind: type[LedgerError] = DataUnavailable
        if any(why.startswith(Status.UNAUTHORIZED.name) for why in reasons):
            kind = Unauthorized
        elif reasons and all(why.startswith(Status.BAD_DIGEST.name) for why in reasons):
            kind = DigestMismatch
        return kind(text, ledger_id=self.ledger_id, entry_id=entry_id)

    # -- what is known ------------------------------------------------------------------------

    def _adopt(self, found: VersionedRecord) -> None:
        if found.version >= self.version:
            self._known = found

    def _heard(self, lac: int) -> None:
        self._lac = max(self._lac, lac)

    def _guess(self) -> int:
        """Bytes of an entry, about: to ask for what fits one request."""
        record = self.record
        if record.last_entry is None or record.length_bytes is None or record.last_entry < 0:
            return ENTRY_BYTES_GUESS
        return record.length_bytes // (record.last_entry + 1)

    async def _ask_lac(self) -> None:
        """Hear the last fragment's bookies until they cover it."""
        ensemble = self.record.last_fragment.ensemble
        questions = [
            self._cluster.bookies.read_lac(bookie, self.ledger_id, token=self._token)
            for bookie in ensemble
        ]
        silent, reasons = (1 << len(ensemble)) - 1, []
        async with aclosing(as_answered(questions)) as answers:
            async for slot, answer in answers:
                if meaning(answer.status) is Meaning.UNKNOWN:
                    why = f"{answer.status.name} {answer.reason}".strip()
                    reasons.append(f"{self._cluster.directory.describe(ensemble[slot])}: {why}")
                    if answer.status is Status.UNAUTHORIZED:
                        raise Unauthorized(f"the password of ledger {self.ledger_id} is another")
                    continue
                silent &= ~(1 << slot)
                if answer.status is Status.OK:
                    self._heard(answer.last_add_confirmed)
                if self._quorum.covered(silent):
                    return
        if silent == (1 << len(ensemble)) - 1:
            raise DataUnavailable(
                f"no bookie tells how far ledger {self.ledger_id} goes: {'; '.join(reasons)}"
            )
