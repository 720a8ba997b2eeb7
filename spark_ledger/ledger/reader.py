"""The reader of a ledger: confirmed entries, in order, fetched ahead.

Always true:
- no entry is returned beyond the end of a closed ledger, nor beyond the larger of the last add
  confirmed that was heard and the entry that the caller knows to be confirmed; both are only lower
  bounds of what is confirmed;
- the reader checks each entry's CRCs and ids again; after a damaged or missing copy it asks the
  next replica;
- if no bookie delivers a confirmed entry, the reader syncs, reads the record again, and tries again
  if the record changed; otherwise it raises DataUnavailable, and never ends the stream. It raises
  NoSuchEntry, too, only after such a re-read;
- what is fetched ahead or twice stays within `read_ahead_bytes` (one entry is always read, however
  large): chunks are requested while there is room for them and for Qw - 1 responses more. Those are
  the other copies of the chunk that the caller waits for, the only one that is requested of several
  replicas at once.
"""

import asyncio
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from itertools import pairwise

from bookie_server.api.entry import HEADER_BYTES, NO_ENTRY, Entry
from bookie_server.api.messages import EntryIds, has, neat, since, spans_of
from bookie_server.api.status import Status
from spark_ledger.errors import (
    DataUnavailable,
    DigestMismatch,
    LedgerError,
    NoSuchEntry,
    Unauthorized,
    Unavailable,
)
from spark_ledger.ledger.cluster import Cluster, Undelivered
from spark_ledger.ledger.ledger_view import Entries, EntryStream, LedgerView, News
from spark_ledger.ledger.range_fetch import LongRead, RangeFetch, ReadChunk, Refusals
from spark_ledger.ledger.records import VersionedRecord
from spark_ledger.metadata.ledger_record import LedgerRecord, Tokens
from spark_ledger.metadata.store import StoreError

ENTRIES_PER_REQUEST_MAX = 4096
ENTRY_BYTES_GUESS = 64 * 1024
NEAR_ENTRY_BYTES = 32 * 1024  # a bookie sends smaller entries also to clients on its host
RESTORE = "Its bookies answer, but find every copy damaged or unreadable: restore their disks."
BLOCK = 64  # entry ids: one response has all their locations; replicas share a ledger's blocks
CHUNKS_AHEAD = 3
BACK_MAX = 512  # entries of a window of `read_back`

Runs = AsyncGenerator[list[Entry], None]
"""Checked entries in order, several at a time."""
Back = AsyncGenerator[tuple[int, Entry | LedgerError], None]
"""(entry id, checked entry or why it cannot be read), ids falling."""


class AsyncLedgerReader:
    """Reads one ledger, open or closed. Made by LedgerStore.open."""

    def __init__(self, cluster: Cluster, versioned: VersionedRecord, tokens: Tokens) -> None:
        self.ledger_id = versioned.record.ledger_id
        self._cluster = cluster
        self._view = LedgerView(cluster, versioned, tokens.read)
        self._news = News(self._view)
        self._fetch = RangeFetch(self._view)
        self._entry_bytes = self._guess()

    @property
    def record(self) -> LedgerRecord:
        return self._view.record

    @property
    def version(self) -> int:
        return self._view.version

    @property
    def is_closed(self) -> bool:
        """Whether the ledger was closed when the record was last read: then it ends at
        `last_add_confirmed` for ever."""
        return self.record.closed

    @property
    def last_add_confirmed(self) -> int:
        """The last entry known to be confirmed; of a closed ledger, its last entry. It never goes
        back. Every response to a read may move it."""
        return self._view.last_add_confirmed

    @property
    def last_taken(self) -> int:
        """The last entry that a bookie had taken when it was asked, confirmed or not. After a
        refresh, no entry beyond it was acknowledged before the refresh. While the writer lives,
        readers hear a moment later that the entry is confirmed; after the writer's death recovery
        decides that."""
        return self._view.last_taken

    # -- how far it goes ----------------------------------------------------------------------

    async def refresh_last_add_confirmed(self) -> int:
        """Read the record and ask the bookies; returns last_add_confirmed, which never goes back.
        A metadata store that does not respond delays the call by `read_timeout_s` at most.

        Of an open ledger it is a lower bound: -1 does not mean that nothing was written. Raises
        NoSuchLedger, Unauthorized; DataUnavailable when no bookie responds; RowsLost when the
        ledger was closed before an entry that was confirmed.
        """
        await self._view.refresh()
        return self.last_add_confirmed

    async def refresh_record(self) -> None:
        """Read the record again: see `is_closed`. Raises NoSuchLedger, Unavailable, RowsLost."""
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
            await self._news.wait_beyond(after, timeout_s)
        elif self.last_add_confirmed <= after:
            await self._view.refresh()
        return self.last_add_confirmed

    async def wait_for_entry(self, entry_id: int) -> int:
        """Wait, for as long as it takes, until `entry_id` is confirmed, or the ledger is closed
        before it; returns last_add_confirmed.

        Raises what `wait_beyond` raises: DataUnavailable once no bookie has responded for a while.
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
        NoSuchEntry for an entry that is not confirmed (Unavailable if the metadata store does not
        respond and so cannot decide that), DataUnavailable, DigestMismatch, Unauthorized,
        NoSuchLedger.
        """
        _check_id(first)
        ids = range(first, last + 1)
        return EntryStream(first, lambda at: _each(self._runs(since(ids, at), known_confirmed)))

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
    ) -> Runs:
        """As `read`, for these entries, whose ids rise, in runs as they arrive: one request asks
        for several entries apart. `entry_bytes`: about how large an entry's payload is, if the
        caller knows it."""
        ids = neat(entry_ids)
        _check_id(ids[0] if ids else 0)
        if not isinstance(ids, range) and any(a >= b for a, b in pairwise(ids)):
            raise ValueError("the ids of the entries to be read rise")
        if entry_bytes is not None:
            self._entry_bytes = HEADER_BYTES + entry_bytes
        return self._runs(ids, known_confirmed)

    async def read_back(self, last: int, first: int, *, known_confirmed: int | None = None) -> Back:
        """The entries from `last` down to `first`: for a caller that looks for the last one of a
        kind. They are read in windows; each window is twice as large as the one before, and keeps
        `read_request_bytes` at most. After a window that fails, the next entry is read alone.
        Raises as `read`, but returns DataUnavailable and DigestMismatch in the entry's place."""
        width = 1
        while last >= first:
            begin = max(first, last - width + 1)
            try:
                entries = await self._end_of(range(begin, last + 1), known_confirmed)
            except (DataUnavailable, DigestMismatch) as why:
                if begin == last:
                    yield last, why
                    last -= 1
                width = 1
                continue
            width = min(2 * len(entries), BACK_MAX)
            while entries:
                yield last, entries.pop()
                last -= 1

    async def _end_of(self, ids: range, known_confirmed: int | None) -> deque[Entry]:
        """The last of these entries, at least one, up to `read_request_bytes` of them."""
        entries, size = deque[Entry](), 0
        async with aclosing(self.read_entries(ids, known_confirmed=known_confirmed)) as runs:
            async for run in runs:
                entries += run
                size += sum(len(entry.payload) for entry in run)
                while size > self._cluster.config.read_request_bytes and len(entries) > 1:
                    size -= len(entries.popleft().payload)
        return entries

    async def read_when_confirmed(self, after: int, timeout_s: float) -> list[tuple[int, Entry]]:
        """Entries after `after`, in order, as soon as any are confirmed: at least one, up to
        `read_request_bytes` of them. `after` -1: from the first entry on.

        The call takes `timeout_s` at most, and then returns the entries that have arrived. With
        `timeout_s` 0 each bookie is asked once, and the call takes `read_timeout_s` at most. []
        means that no entry arrived in time (no entry is confirmed, or bookies do not respond), or
        that the ledger has ended (`is_closed`). Raises what `wait_beyond` and `read` raise.
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

    async def _follow(self, first: int) -> Entries:
        while (last := await self.wait_for_entry(first)) >= first:
            async with aclosing(self.read(first, last)) as entries:
                async for numbered in entries:
                    yield numbered
            first = last + 1

    # -- pieces of a read ---------------------------------------------------------------------

    async def _check_confirmed(self, last: int, known_confirmed: int | None) -> None:
        """Check that `last` may be read; ask how far the ledger is confirmed if `last` is beyond
        the limit known so far. Raises NoSuchEntry, Unavailable."""
        responded = last <= self._limit(known_confirmed) or await self._view.refresh()
        if last > self._limit(known_confirmed) and not self.is_closed:
            if not responded:
                raise Unavailable(
                    f"whether ledger {self.ledger_id} goes on after entry"
                    f" {self._limit(known_confirmed)} is not known: the metadata store does not"
                    " answer",
                    ledger_id=self.ledger_id,
                )
            await self._view.reread(fresh=True)  # it may have been recovered since
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
        if self.is_closed or known_confirmed is None:
            return self.last_add_confirmed
        return max(self.last_add_confirmed, known_confirmed)

    async def _runs(self, ids: EntryIds, known_confirmed: int | None) -> Runs:
        """The entries, fetched ahead, in runs as they arrive: a long part of a fragment comes in a
        stream from one bookie, other entries chunk by chunk."""
        if ids:
            await self._check_confirmed(ids[-1], known_confirmed)
        quorum, ahead_bytes = self._view.quorum, self._cluster.config.read_ahead_bytes
        tries, request_bytes = quorum.ensemble_size, self._request_bytes(ahead_bytes)
        while ids:
            long = None
            count = self._count_short(ids, ahead_bytes) if tries else len(ids)
            if not count:
                long = self._long_read(*spans_of(ids)[0])
                try:
                    while run := await long.next_run(request_bytes, ahead_bytes):
                        self._entry_bytes = self._estimate(run)
                        ids = since(ids, run[-1].header.entry_id + 1)
                        yield run
                finally:
                    long.give_up()
                if not has(ids, long.last):
                    continue
                tries -= 1
                self._fetch.avoided = long.bookie_id
                count = len(self._chunk(range(ids[0], long.last + 1), request_bytes).ids)
            window, ids = Window(ids[:count], request_bytes, ahead_bytes), ids[count:]
            try:
                while run := await self._next_run(window):
                    if long is not None:
                        self._others_delivered(long)
                        long = None
                    yield run
            finally:
                window.give_up()

    def _long_read(self, first: int, last: int) -> LongRead:
        """A stream of the part of the range that is in its first fragment."""
        ensemble = self.record.fragment_of(first).ensemble
        bookie = ensemble[self._fetch.order(ensemble)[0]]
        return LongRead(self._view, bookie, first, self._fragment_end(first, last))

    def _others_delivered(self, long: LongRead) -> None:
        """Note that other bookies delivered what this stream's bookie did not."""
        self._fetch.avoided = ""
        if long.silent and self._view.quorum.ensemble_size > 1:
            self._cluster.bookies.quarantine.overtaken(long.bookie_id)

    def _count_short(self, ids: EntryIds, ahead_bytes: int) -> int:
        """How many entries come before the next consecutive ones that are worth a stream."""
        count = 0
        for first, last in spans_of(ids):
            if self._is_long(first, last, ahead_bytes):
                break
            count += last - first + 1
        return count

    def _is_long(self, first: int, last: int, ahead_bytes: int) -> bool:
        """Whether the part of the range that is in the fragment of `first` is worth a stream from
        one bookie: each bookie has all of it, it is larger than `ahead_bytes`, and this client can
        not read the entries from a bookie's file."""
        quorum = self._view.quorum
        count = self._fragment_end(first, last) - first + 1
        if quorum.write_quorum < quorum.ensemble_size or count * self._entry_bytes <= ahead_bytes:
            return False
        large = self._entry_bytes >= NEAR_ENTRY_BYTES
        return not (large and self._fetch.near(self.record.fragment_of(first).ensemble))

    def _fragment_end(self, first: int, last: int) -> int:
        """The last entry up to `last` that is in the same fragment as `first`."""
        later = (f.first_entry for f in self.record.fragments if f.first_entry > first)
        return min([last, *(begin - 1 for begin in later)])

    async def _next_run(self, window: "Window") -> list[Entry]:
        """The next entries of the window, all of them confirmed; [] after the last. Requests as
        many chunks as there is room for, and requests again the entries that responses left out."""
        loop = asyncio.get_running_loop()
        while window.ids:
            while window.to_ask and self._room(window):
                chunk = self._chunk(window.to_ask[:ENTRIES_PER_REQUEST_MAX], window.request_bytes)
                window.ask(chunk, loop.create_task(self._fetch.fill(chunk)))
            chunk, fetching = window.chunks[0]
            chunk.hurry()
            refusals = await fetching
            if run := chunk.take(window.ids):
                self._entry_bytes = self._estimate(run)
                window.taken(len(run))
                return run
            if chunk.cut_short(window.ids[0]):
                left = since(chunk.ids, window.ids[0])
                window.chunks[0] = chunk, loop.create_task(self._fetch.fill(chunk, left))
            else:
                await self._look_again_or_raise(window.ids[0], chunk, refusals)
                window.give_up()  # the loop requests again, by the record as it is now
        return []

    def _request_bytes(self, ahead_bytes: int) -> int:
        """Bytes of one request: the chunks under way and the other copies of one fit into
        `ahead_bytes`."""
        responses = CHUNKS_AHEAD + self._view.quorum.write_quorum - 1
        return max(1, min(self._cluster.config.read_request_bytes, ahead_bytes // responses))

    def _room(self, window: "Window") -> bool:
        """Whether one chunk more may be requested; there must be room left for the speculative
        responses."""
        response_bytes = max(window.request_bytes, self._entry_bytes)
        responses = len(window.chunks) + self._view.quorum.write_quorum
        return not window.chunks or responses * response_bytes <= window.ahead_bytes

    def _chunk(self, ids: EntryIds, request_bytes: int) -> ReadChunk:
        """The chunk to request next: the first of these entries, of one fragment, about as many as
        one response may bring."""
        quorum, record = self._view.quorum, self.record
        copies = len(quorum.cover(0)) * quorum.write_quorum  # of E entries: more than E if striped
        count = request_bytes * quorum.ensemble_size // (max(1, self._entry_bytes) * copies)
        ids = ids[: bisect_right(ids, self._fragment_end(ids[0], ids[-1]))]
        count = min(max(1, count), ENTRIES_PER_REQUEST_MAX)
        following, ids = ids[count:], neat(ids[:count])
        ensemble = record.fragment_of(ids[0]).ensemble
        chunk = ReadChunk(ids, ensemble, self.version, request_bytes, self._addresses(ensemble))
        if self._entry_bytes >= NEAR_ENTRY_BYTES:
            chunk.block = ids[0] // BLOCK
            end = (chunk.block + 1) * BLOCK
            chunk.later = neat(following[: bisect_left(following, end)])
        return chunk

    def _addresses(self, ensemble: tuple[str, ...]) -> tuple[str | None, ...]:
        return tuple(map(self._cluster.directory.address, ensemble))

    async def _look_again_or_raise(
        self, entry_id: int, chunk: ReadChunk, refusals: Refusals
    ) -> None:
        """No bookie delivers a confirmed entry. Return if the chunk was requested by an older
        record, or at addresses that its bookies have left: they returned elsewhere before this
        client heard of it. Otherwise raise."""
        await self._view.reread(fresh=True)
        if self.version != chunk.version:
            return
        with suppress(StoreError):
            await self._cluster.directory.refresh()
        if self._addresses(chunk.ensemble) == chunk.addresses:
            raise self._unreadable(entry_id, refusals.of(entry_id))

    def _unreadable(self, entry_id: int, refusals: dict[str, Undelivered]) -> LedgerError:
        reasons = list(refusals.values())
        refusing = [why.status for why in reasons].count(Status.UNAUTHORIZED)
        text = f"entry {entry_id} of ledger {self.ledger_id} cannot be read: "
        text += self._cluster.explained({bookie: why.text for bookie, why in refusals.items()})
        kind: type[LedgerError] = DataUnavailable
        remedy = None
        if refusing >= self._view.quorum.ack_quorum:
            kind = Unauthorized
        elif reasons and all(why.status is Status.BAD_DIGEST for why in reasons):
            kind = DigestMismatch
        damaged = bool(reasons) and all(why.of_copy for why in reasons)
        if kind is DataUnavailable and damaged:
            remedy = RESTORE
        facts = {"ledger_id": self.ledger_id, "entry_id": entry_id, "damaged": damaged}
        return kind(text, remedy, **facts)

    def _estimate(self, run: list[Entry]) -> int:
        """Expected bytes of an entry: the longer the run, the more its mean counts."""
        mean = HEADER_BYTES + sum(len(entry.payload) for entry in run) // len(run)
        weight = min(len(run), 8)
        return self._entry_bytes + (mean - self._entry_bytes) * weight // 8

    def _guess(self) -> int:
        """About how many bytes an entry has, before the first has arrived."""
        record = self.record
        if record.last_entry is None or record.length_bytes is None or record.last_entry < 0:
            return ENTRY_BYTES_GUESS
        return HEADER_BYTES + record.length_bytes // (record.last_entry + 1)


class Window:
    """Entries that are fetched chunk by chunk, and the chunks that are under way, in order."""

    def __init__(self, ids: EntryIds, request_bytes: int, ahead_bytes: int) -> None:
        self.ids = self.to_ask = ids
        """`ids`: entries not returned yet. `to_ask`: those of them that were not requested yet."""
        self.request_bytes = request_bytes
        self.ahead_bytes = ahead_bytes
        self.chunks: deque[tuple[ReadChunk, asyncio.Task[Refusals]]] = deque()

    def ask(self, chunk: ReadChunk, filling: asyncio.Task[Refusals]) -> None:
        self.chunks.append((chunk, filling))
        self.to_ask = self.to_ask[len(chunk.ids) :]

    def taken(self, count: int) -> None:
        self.ids = self.ids[count:]
        if not self.ids or self.ids[0] > self.chunks[0][0].last:
            self.chunks.popleft()

    def give_up(self) -> None:
        """Cancel the requests under way; all entries not returned yet must be requested again."""
        for _, fetching in self.chunks:
            fetching.cancel()
        self.chunks.clear()
        self.to_ask = self.ids


async def _each(runs: Runs) -> Entries:
    async with aclosing(runs):
        async for run in runs:
            for entry in run:
                yield entry.header.entry_id, entry


def _check_id(first: int) -> None:
    if first < 0:
        raise ValueError(f"entry ids start at 0, got {first}")
