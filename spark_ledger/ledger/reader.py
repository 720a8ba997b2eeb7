"""The reader of a ledger: confirmed entries, in order, fetched ahead.

Always true:
- no entry is returned beyond the end of a closed ledger. Of an open ledger, no entry is returned
  beyond the last add confirmed that bookies sent or the entry that the caller knows to be
  confirmed, whichever is higher;
- the reader checks each entry's CRCs and ids again; after a damaged or missing copy it asks the
  next replica;
- if no bookie delivers a confirmed entry, the reader reads the record again, after a sync of the
  store, and tries again if the record changed; otherwise it raises DataUnavailable, and never ends
  the stream. It raises NoSuchEntry, too, only after such a re-read;
- the responses under way have `read_ahead_bytes` at most (one entry is always read, however large).
  Only the chunk that the caller waits for is requested of several replicas at once, so there is
  always room left for Qw - 1 more copies of that chunk.
"""

import asyncio
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from itertools import pairwise, takewhile

from bookie_server.api.entry import HEADER_BYTES, NO_ENTRY, Entry
from bookie_server.api.messages import EntryIds, as_entry_ids, has_id, ids_from, spans_of
from bookie_server.api.status import Status
from spark_ledger.errors import (
    DataUnavailable,
    DigestMismatch,
    LedgerError,
    NoSuchEntry,
    Unauthorized,
    Unavailable,
)
from spark_ledger.ledger.cluster import Cluster, DeliveryFailure
from spark_ledger.ledger.ledger_view import EntryStream, LedgerView, NewsListener, NumberedEntries
from spark_ledger.ledger.range_fetch import DeliveryFailures, LongRead, RangeFetch, ReadChunk
from spark_ledger.ledger.records import VersionedRecord
from spark_ledger.metadata.ledger_record import LedgerRecord, Tokens
from spark_ledger.metadata.store import StoreError

ENTRIES_PER_REQUEST_MAX = 4096
ENTRY_BYTES_GUESS = 64 * 1024
LOCAL_READ_BYTES_MIN = 32 * 1024  # smaller entries are never read from files of a bookie
RESTORE = "Its bookies answer, but find every copy damaged or unreadable: restore their disks."
BLOCK_ENTRIES = 64  # of a local read: one response has the locations of a block's entries
CHUNKS_AHEAD = 3
READ_BACK_ENTRIES_MAX = 512  # entries of a window of `read_back`

EntryRuns = AsyncGenerator[list[Entry], None]
"""Checked entries in order, several at a time."""
EntriesOrErrors = AsyncGenerator[tuple[int, Entry | LedgerError], None]
"""(entry id, the checked entry or the error of its read), from the highest id to the lowest."""


class AsyncLedgerReader:
    """Reads one ledger, open or closed. Made by LedgerStore.open. `entries`: checked entries of the
    ledger, by id, which a recovery has read."""

    def __init__(
        self,
        cluster: Cluster,
        versioned: VersionedRecord,
        tokens: Tokens,
        entries: Mapping[int, Entry] = {},
    ) -> None:
        self.ledger_id = versioned.record.ledger_id
        self._entries = entries
        self._cluster = cluster
        self._view = LedgerView(cluster, versioned, tokens.read)
        self._news_listener = NewsListener(self._view)
        self._fetch = RangeFetch(self._view)
        self._entry_bytes = self._first_guess_of_entry_bytes()

    @property
    def record(self) -> LedgerRecord:
        return self._view.record

    @property
    def version(self) -> int:
        return self._view.version

    @property
    def is_closed(self) -> bool:
        """Whether the ledger was closed when the record was last read: if so, `last_add_confirmed`
        is its end for ever."""
        return self.record.closed

    @property
    def last_add_confirmed(self) -> int:
        """The last entry known to be confirmed; of a closed ledger, its last entry. It never goes
        back; any response to a read may raise it."""
        return self._view.last_add_confirmed

    @property
    def last_taken(self) -> int:
        """The last entry that any bookie had at the last refresh, confirmed or not. No entry that
        was acknowledged before that refresh is higher."""
        return self._view.last_taken

    # -- how far entries are confirmed ----------------------------------------------------------

    async def refresh_last_add_confirmed(self) -> int:
        """Read the record and ask the bookies; returns last_add_confirmed. A metadata store that
        does not respond delays the call by `read_timeout_s` at most.

        Of an open ledger the result is a lower bound: -1 does not mean that it is empty. Raises
        NoSuchLedger, Unauthorized; DataUnavailable when no bookie responds; RowsLost when the
        ledger was closed before an entry that was confirmed.
        """
        await self._view.refresh()
        return self.last_add_confirmed

    async def refresh_record(self) -> None:
        """Read an open record again. Raises NoSuchLedger, Unavailable, RowsLost."""
        if not self.is_closed:
            await self._view.reread()

    async def wait_beyond(self, after: int, timeout_s: float) -> int:
        """Wait until entries after `after` are confirmed or the ledger is closed, for `timeout_s`
        at most; returns last_add_confirmed. With `timeout_s` 0 the record is read and each bookie
        is asked once.

        Raises what `refresh_last_add_confirmed` raises.
        """
        if after < NO_ENTRY:
            raise ValueError(f"entry ids start at 0, got {after}")
        if timeout_s > 0:
            await self._news_listener.wait_beyond(after, timeout_s)
        elif self.last_add_confirmed <= after:
            await self._view.refresh()
        return self.last_add_confirmed

    async def wait_for_entry(self, entry_id: int) -> int:
        """Wait, for as long as it takes, until `entry_id` is confirmed, or the ledger is closed
        before it; returns last_add_confirmed.

        Raises what `wait_beyond` raises, DataUnavailable if no bookie responds for a while.
        """
        _check_id(entry_id)
        config = self._cluster.config
        while (last := self.last_add_confirmed) < entry_id and not self.is_closed:
            await self.wait_beyond(entry_id - 1, 2 * config.long_poll_s + config.read_timeout_s)
        return last

    # -- reading ------------------------------------------------------------------------------

    def read(self, first: int, last: int, *, known_confirmed: int | None = None) -> EntryStream:
        """(entry id, checked entry) of first..last, both included, in order.

        `known_confirmed`: an entry that the caller knows to be confirmed by other means (a commit).
        Up to `read_ahead_bytes` are fetched ahead, from several bookies at a time. Raises
        NoSuchEntry for an entry that is not confirmed (Unavailable if only the metadata store,
        which does not respond, could decide that), DataUnavailable, DigestMismatch, Unauthorized,
        NoSuchLedger.
        """
        _check_id(first)
        ids = range(first, last + 1)
        return EntryStream(first, lambda at: _each(self._runs(ids_from(ids, at), known_confirmed)))

    async def read_entry(self, entry_id: int, *, known_confirmed: int | None = None) -> Entry:
        """One entry. Raises as `read`."""
        async with aclosing(
            self.read(entry_id, entry_id, known_confirmed=known_confirmed)
        ) as entries:
            async for _, entry in entries:
                return entry
        raise AssertionError("a read of one entry returns it or raises")

    def read_entries(
        self,
        entry_ids: Sequence[int],
        *,
        entry_bytes: int | None = None,
        known_confirmed: int | None = None,
    ) -> EntryRuns:
        """As `read`, for these entries, in runs as they arrive. The ids must rise and may have
        gaps. `entry_bytes`: the expected size of an entry's payload, if the caller knows it."""
        ids = as_entry_ids(entry_ids)
        _check_id(ids[0] if ids else 0)
        if not isinstance(ids, range) and any(a >= b for a, b in pairwise(ids)):
            raise ValueError("the ids of the entries to be read must rise")
        if entry_bytes is not None:
            self._entry_bytes = HEADER_BYTES + entry_bytes
        return self._runs(ids, known_confirmed)

    async def read_back(
        self, last: int, first: int, *, known_confirmed: int | None = None
    ) -> EntriesOrErrors:
        """The entries from `last` down to `first`: for a caller that searches backwards. It reads
        windows of entries, each twice as long as the window before, and keeps `read_request_bytes`
        of a window at most. After a window that fails it reads one entry alone. Raises as `read`,
        but yields a DataUnavailable or DigestMismatch in the place of the entry."""
        width = 1
        while last >= first:
            begin = max(first, last - width + 1)
            try:
                entries = await self._read_last_of(range(begin, last + 1), known_confirmed)
            except (DataUnavailable, DigestMismatch) as why:
                if begin == last:
                    yield last, why
                    last -= 1
                width = 1
                continue
            width = min(2 * len(entries), READ_BACK_ENTRIES_MAX)
            while entries:
                yield last, entries.pop()
                last -= 1

    async def _read_last_of(self, ids: range, known_confirmed: int | None) -> deque[Entry]:
        """The last of these entries: at least one entry, `read_request_bytes` in all at most."""
        entries, size = deque[Entry](), 0
        async with aclosing(self.read_entries(ids, known_confirmed=known_confirmed)) as runs:
            async for run in runs:
                entries += run
                size += sum(len(entry.payload) for entry in run)
                while size > self._cluster.config.read_request_bytes and len(entries) > 1:
                    size -= len(entries.popleft().payload)
        return entries

    async def read_when_confirmed(self, after: int, timeout_s: float) -> list[tuple[int, Entry]]:
        """The entries after entry `after`, in order, as soon as any entry is confirmed: at least
        one entry, `read_request_bytes` in all at most. `after` -1: from the first entry on.

        After `timeout_s` the call returns the entries that have arrived. With `timeout_s` 0 each
        bookie is asked once, and the call takes `read_timeout_s` at most. It returns [] if no entry
        arrived in time (no entry is confirmed, or bookies do not respond), or if a closed ledger
        has no further entry. Raises what `wait_beyond` and `read` raise.
        """
        config, arrived = self._cluster.config, list[tuple[int, Entry]]()
        deadline = asyncio.get_running_loop().time() + (timeout_s or config.read_timeout_s)
        last, left = await self.wait_beyond(after, timeout_s), config.read_request_bytes
        last = min(last, after + max(1, left // max(1, self._entry_bytes - HEADER_BYTES)))
        with suppress(TimeoutError):
            async with (
                asyncio.timeout_at(deadline),
                aclosing(self.read(after + 1, last)) as entries,
            ):
                async for entry_id, entry in entries:
                    left -= len(entry.payload)
                    if left < 0 and arrived:
                        break
                    arrived.append((entry_id, entry))
        return arrived

    def tail(self, first: int = 0) -> EntryStream:
        """(entry id, checked entry) from `first` on, each once and in order, as they are
        confirmed. Ends only when the ledger is closed and every entry was returned.

        Raises what `wait_beyond` and `read` raise. After an error, or a time-out around one entry,
        the caller may go on with the next `anext`.
        """
        _check_id(first)
        return EntryStream(first, self._follow)

    async def _follow(self, first: int) -> NumberedEntries:
        while (last := await self.wait_for_entry(first)) >= first:
            async with aclosing(self.read(first, last)) as entries:
                async for numbered in entries:
                    yield numbered
            first = last + 1

    # -- pieces of a read ---------------------------------------------------------------------

    async def _check_confirmed(self, last: int, known_confirmed: int | None) -> None:
        """Check that the entry `last` may be read; ask the bookies if it is beyond the known limit.
        Raises NoSuchEntry, Unavailable."""
        responded = last <= self._limit(known_confirmed) or await self._view.refresh()
        if last > self._limit(known_confirmed) and not self.is_closed:
            if not responded:
                raise Unavailable(
                    f"ledger {self.ledger_id} may or may not go on after entry"
                    f" {self._limit(known_confirmed)}: the metadata store does not respond",
                    ledger_id=self.ledger_id,
                )
            await self._view.reread(fresh=True)  # a recovery may have closed the ledger
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
        """The last entry that may be read, by what is known now."""
        if self.is_closed or known_confirmed is None:
            return self.last_add_confirmed
        return max(self.last_add_confirmed, known_confirmed)

    async def _runs(self, ids: EntryIds, known_confirmed: int | None) -> EntryRuns:
        """The entries, fetched ahead, in runs as they arrive: a long range of one fragment comes in
        a stream from one bookie, all other entries come chunk by chunk."""
        if ids:
            await self._check_confirmed(ids[-1], known_confirmed)
        if run := [self._entries[id_] for id_ in takewhile(self._entries.__contains__, ids)]:
            yield run
            ids = ids_from(ids, run[-1].header.entry_id + 1)
        quorum, ahead_bytes = self._view.quorum, self._cluster.config.read_ahead_bytes
        tries, request_bytes = quorum.ensemble_size, self._request_bytes(ahead_bytes)
        while ids:
            stream = None
            count = self._count_before_long_range(ids, ahead_bytes) if tries else len(ids)
            if not count:
                stream = self._long_read(*spans_of(ids)[0])
                try:
                    while run := await stream.next_run(request_bytes, ahead_bytes):
                        self._entry_bytes = self._estimate_entry_bytes(run)
                        ids = ids_from(ids, run[-1].header.entry_id + 1)
                        yield run
                finally:
                    stream.give_up()
                if not has_id(ids, stream.last):
                    continue
                tries -= 1  # the stream broke: other bookies deliver a chunk, then a next stream
                self._fetch.avoided_bookie = stream.bookie_id
                count = len(self._chunk(range(ids[0], stream.last + 1), request_bytes).ids)
            window, ids = Window(ids[:count], request_bytes, ahead_bytes), ids[count:]
            try:
                while run := await self._next_run(window):
                    if stream is not None:
                        self._note_delivery_by_others(stream)
                        stream = None
                    yield run
            finally:
                window.give_up()

    def _long_read(self, first: int, last: int) -> LongRead:
        """A stream of the entries of the range that are in the fragment of `first`."""
        ensemble = self.record.fragment_of(first).ensemble
        bookie = ensemble[self._fetch.next_order(ensemble)[0]]
        return LongRead(self._view, bookie, first, self._fragment_end(first, last))

    def _note_delivery_by_others(self, stream: LongRead) -> None:
        """Note that other bookies delivered an entry that the stream's bookie did not deliver."""
        self._fetch.avoided_bookie = ""
        if stream.is_bookie_silent and self._view.quorum.ensemble_size > 1:
            self._cluster.bookies.quarantine.note_overtaken(stream.bookie_id)

    def _count_before_long_range(self, ids: EntryIds, ahead_bytes: int) -> int:
        """How many of the entries come before the first consecutive range that is worth a
        stream."""
        count = 0
        for first, last in spans_of(ids):
            if self._is_long(first, last, ahead_bytes):
                break
            count += last - first + 1
        return count

    def _is_long(self, first: int, last: int, ahead_bytes: int) -> bool:
        """Whether the entries of the range that are in the fragment of `first` are worth a stream
        from one bookie: each bookie has all of them, they are more than `ahead_bytes`, and this
        client cannot read them from a bookie's file."""
        quorum = self._view.quorum
        count = self._fragment_end(first, last) - first + 1
        if quorum.write_quorum < quorum.ensemble_size or count * self._entry_bytes <= ahead_bytes:
            return False
        large = self._entry_bytes >= LOCAL_READ_BYTES_MIN
        return not (large and self._fetch.local_slots(self.record.fragment_of(first).ensemble))

    def _fragment_end(self, first: int, last: int) -> int:
        """The highest entry, `last` at most, that is in the fragment of `first`."""
        later = (f.first_entry for f in self.record.fragments if f.first_entry > first)
        return min([last, *(begin - 1 for begin in later)])

    async def _next_run(self, window: "Window") -> list[Entry]:
        """The next entries of the window; [] after its last entry. Requests as many chunks as there
        is room for, and requests again the entries that were missing in a response."""
        loop = asyncio.get_running_loop()
        while window.ids:
            while window.unrequested_ids and self._has_room(window):
                chunk = self._chunk(
                    window.unrequested_ids[:ENTRIES_PER_REQUEST_MAX], window.request_bytes
                )
                window.add_request(chunk, loop.create_task(self._fetch.fill(chunk)))
            chunk, fetching = window.chunks[0]
            chunk.hurry()
            failures = await fetching
            if run := chunk.take(window.ids):
                self._entry_bytes = self._estimate_entry_bytes(run)
                window.drop_returned(len(run))
                return run
            if chunk.is_cut_short(window.ids[0]):
                left = ids_from(chunk.ids, window.ids[0])
                window.chunks[0] = chunk, loop.create_task(self._fetch.fill(chunk, left))
            else:
                await self._reread_record_or_raise(window.ids[0], chunk, failures)
                window.give_up()  # the loop requests again, by the record as it is now
        return []

    def _request_bytes(self, ahead_bytes: int) -> int:
        """Bytes of one request, so small that CHUNKS_AHEAD chunks and Qw - 1 further copies of one
        chunk fit into `ahead_bytes`."""
        responses = CHUNKS_AHEAD + self._view.quorum.write_quorum - 1
        return max(1, min(self._cluster.config.read_request_bytes, ahead_bytes // responses))

    def _has_room(self, window: "Window") -> bool:
        """Whether one more chunk may be requested, with room for the further copies of the chunk
        that the caller waits for."""
        response_bytes = max(window.request_bytes, self._entry_bytes)
        responses = len(window.chunks) + self._view.quorum.write_quorum
        return not window.chunks or responses * response_bytes <= window.ahead_bytes

    def _chunk(self, ids: EntryIds, request_bytes: int) -> ReadChunk:
        """The chunk to request next: the first of these entries, all of one fragment, about as many
        as `request_bytes` have room for."""
        quorum, record = self._view.quorum, self.record
        # In responses to requests for E entries: more than E if Qw does not divide E.
        copies = len(quorum.covering_slots(0)) * quorum.write_quorum
        count = request_bytes * quorum.ensemble_size // (max(1, self._entry_bytes) * copies)
        ids = ids[: bisect_right(ids, self._fragment_end(ids[0], ids[-1]))]
        count = min(max(1, count), ENTRIES_PER_REQUEST_MAX)
        following, ids = ids[count:], as_entry_ids(ids[:count])
        ensemble = record.fragment_of(ids[0]).ensemble
        chunk = ReadChunk(ids, ensemble, self.version, request_bytes, self._addresses(ensemble))
        if self._entry_bytes >= LOCAL_READ_BYTES_MIN:
            chunk.block_number = ids[0] // BLOCK_ENTRIES
            end = (chunk.block_number + 1) * BLOCK_ENTRIES
            chunk.later_ids = as_entry_ids(following[: bisect_left(following, end)])
        return chunk

    def _addresses(self, ensemble: tuple[str, ...]) -> tuple[str | None, ...]:
        return tuple(map(self._cluster.directory.address, ensemble))

    async def _reread_record_or_raise(
        self, entry_id: int, chunk: ReadChunk, failures: DeliveryFailures
    ) -> None:
        """No bookie delivers a confirmed entry: read the record and the bookies' addresses again.
        Return if either has changed since the chunk was requested, so that another request may
        succeed; otherwise raise."""
        await self._view.reread(fresh=True)
        if self.version != chunk.version:
            return
        with suppress(StoreError):
            await self._cluster.directory.refresh()
        if self._addresses(chunk.ensemble) == chunk.addresses:
            raise self._unreadable_error(entry_id, failures.reasons_for(entry_id))

    def _unreadable_error(self, entry_id: int, failures: dict[str, DeliveryFailure]) -> LedgerError:
        reasons = list(failures.values())
        refusing = [why.status for why in reasons].count(Status.UNAUTHORIZED)
        text = f"entry {entry_id} of ledger {self.ledger_id} cannot be read: "
        text += self._cluster.reasons_text({bookie: why.text for bookie, why in failures.items()})
        kind: type[LedgerError] = DataUnavailable
        remedy = None
        if refusing >= self._view.quorum.ack_quorum:
            kind = Unauthorized
        elif reasons and all(why.status is Status.BAD_DIGEST for why in reasons):
            kind = DigestMismatch
        damaged = bool(reasons) and all(why.is_copy_damaged for why in reasons)
        if kind is DataUnavailable and damaged:
            remedy = RESTORE
        facts = {"ledger_id": self.ledger_id, "entry_id": entry_id, "damaged": damaged}
        return kind(text, remedy, **facts)

    def _estimate_entry_bytes(self, run: list[Entry]) -> int:
        """The expected bytes of an entry: the mean of the run if it has 8 entries or more, else
        between that and the present `_entry_bytes`."""
        mean = HEADER_BYTES + sum(len(entry.payload) for entry in run) // len(run)
        weight = min(len(run), 8)
        return self._entry_bytes + (mean - self._entry_bytes) * weight // 8

    def _first_guess_of_entry_bytes(self) -> int:
        """The expected bytes of an entry before any entry has arrived."""
        record = self.record
        if record.last_entry is None or record.length_bytes is None or record.last_entry < 0:
            return ENTRY_BYTES_GUESS
        return HEADER_BYTES + record.length_bytes // (record.last_entry + 1)


class Window:
    """A part of a read that is fetched chunk by chunk: its entries that were not returned yet, and
    the chunks that are under way, in order."""

    def __init__(self, ids: EntryIds, request_bytes: int, ahead_bytes: int) -> None:
        self.ids = self.unrequested_ids = ids
        """`ids`: entries not returned yet. `unrequested_ids`: entries not requested yet."""
        self.request_bytes = request_bytes
        self.ahead_bytes = ahead_bytes
        self.chunks: deque[tuple[ReadChunk, asyncio.Task[DeliveryFailures]]] = deque()

    def add_request(self, chunk: ReadChunk, fetching: asyncio.Task[DeliveryFailures]) -> None:
        self.chunks.append((chunk, fetching))
        self.unrequested_ids = self.unrequested_ids[len(chunk.ids) :]

    def drop_returned(self, count: int) -> None:
        self.ids = self.ids[count:]
        if not self.ids or self.ids[0] > self.chunks[0][0].last:
            self.chunks.popleft()

    def give_up(self) -> None:
        """Cancel the requests under way: every entry that was not returned is requested again."""
        for _, fetching in self.chunks:
            fetching.cancel()
        self.chunks.clear()
        self.unrequested_ids = self.ids


async def _each(runs: EntryRuns) -> NumberedEntries:
    async with aclosing(runs):
        async for run in runs:
            for entry in run:
                yield entry.header.entry_id, entry


def _check_id(first: int) -> None:
    if first < 0:
        raise ValueError(f"entry ids start at 0, got {first}")
