"""One partition at its owner: batches from any offset on, of Pulsar's producers and of Spark.

    the tail in memory -> the live ledger -> the rows of commits

Always true: a read returns only confirmed rows: rows of commits, and rows of the live ledger that
Qa bookies have synced. Batches are in the order of offsets, and the first batch may begin before
the requested offset. Offsets between two batches are holes. A chunk of a message counts as a batch
here, with its own offset. tail.py keeps the newest batches in memory, for consumers at the end.
entry_batches.py makes batches of stored entries in bounded steps; between two steps the event loop
does other work.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing, suppress
from dataclasses import dataclass

from spark_ledger import errors
from spark_ledger.broker import names
from spark_ledger.broker.log.entry_batches import batches_in, schema_version_of
from spark_ledger.broker.log.tail import RecentBatches, Stored, StoredRun, TailBudget
from spark_ledger.metadata.store import StoreError
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.entry import pulsar_batch
from spark_ledger.topic.log.segment_table import NO_SEGMENTS
from spark_ledger.topic.log.segments import LiveSegment
from spark_ledger.topic.log.state import PartitionState, TopicState
from spark_ledger.topic.log.topics import TopicInfo
from spark_ledger.topic.read.bad_entries import BadEntries, BadRows, OnBadEntry
from spark_ledger.topic.read.live import first_stored_since
from spark_ledger.topic.read.pieces import LiveRows
from spark_ledger.topic.read.plan import ReadTask, plan_read
from spark_ledger.topic.read.slice_reader import FetchedEntry
from spark_ledger.topic.schema.client_schemas import VERSION_NUMBER
from spark_ledger.topic.subscription.seek_target import (
    CommittedSince,
    chunks_needed,
    offset_since,
    rows_around,
)
from spark_ledger.topic.task_reader import fetch_with_replans

READ_BYTES = 2 << 20
READ_BYTES_MAX = 8 << 20
"""A read ends at this size even within an entry; the next read fetches that entry again."""
PLANNED_ROWS_MAX = 200_000
LOST = (errors.RowsLost, errors.NoSuchLedger)
"""The errors for rows that no bookie has any more."""
UNREADABLE = (*LOST, errors.BadEntry)
"""The errors for rows that the policy on_lost_rows=skip passes over: lost rows, and entries with
bytes that no version writes."""
LOOK_S, SEALED_S = 0.02, 10.0
"""How often, and for how long, a read checks whether a ledger that ended was sealed."""


async def _same_history() -> int:
    """The history number of a metadata store that never goes back in time."""
    return 0


def _empty_batch(offset: int) -> Stored:
    return Stored(offset, messages=0, data=b"", batched=False)


@dataclass(slots=True)
class OpenEnd:
    """The open end of a partition: the partition's writer moves this end, and readers read up to
    it. `live` is the live segment to which this owner appends, after the segment was read back.
    `end` is one past the last confirmed offset of that segment, and `last_entry` is its last
    confirmed entry."""

    live: LiveSegment | None = None
    end: int = 0
    last_entry: int = -1

    def open(self, live: LiveSegment) -> None:
        """Begin with the open segment, of which no row is confirmed yet."""
        self.live, self.end, self.last_entry = live, live.base, live.first_entry - 1

    def confirm(self, rows: int) -> int:
        """Note that the next entry, with `rows` rows, is confirmed; returns its first offset."""
        self.end += rows
        self.last_entry += 1
        return self.end - rows

    def close(self) -> None:
        """Note that no segment is open."""
        self.live, self.end, self.last_entry = None, 0, -1


class Partition:
    """`state` returns the newest state of the topic in memory. `catch_up` waits for a short time
    until `state` has the commits that a watch reported, so that trimmed rows are not read from
    memory. It returns the history number: the number changes when the store goes back in time."""

    def __init__(
        self,
        client: TopicClient,
        topic: TopicInfo,
        number: int,
        state: Callable[[], TopicState],
        budget: TailBudget,
        catch_up: Callable[[], Awaitable[int]] = _same_history,
    ) -> None:
        self.number = number
        self.title = f"partition {number} of topic {topic.name}"
        self.number_in_ids = number if topic.policies.partitioned else names.NOT_PARTITIONED
        """The partition's number in its message ids."""
        self.ledger = names.ledger_number(topic.id)
        """The ledger number in the partition's message ids."""
        self.deduplicates = topic.policies.deduplication
        self.open_end = OpenEnd()
        """The open end that the partition's writer moves."""
        self._client = client
        self._topic = topic
        self._state = state
        self._catch_up, self._history = catch_up, 0
        self._recent = RecentBatches(budget)
        self._start = self._end = 0
        self.listeners: dict[asyncio.Event, None] = {}
        """The events that are set whenever there may be more rows than before."""

    @property
    def is_terminated(self) -> bool:
        """Whether the topic takes no more rows."""
        return self._state().terminated

    @property
    def held(self) -> PartitionState:
        return self._state().partitions[self.number]

    @property
    def start(self) -> int:
        """The first offset that the topic keeps: batches below this offset are not read from
        memory. While the metadata store is unreachable `start` does not change."""
        with suppress(errors.Unavailable):
            self._start = max(self._start, self.held.start_offset)
        return self._start

    @property
    def end(self) -> int:
        """One past the last confirmed offset. The end never goes back, even while a ledger that
        ended is not in a commit yet (hazard 33), or the metadata store is unreachable."""
        with suppress(errors.Unavailable):
            self._end = max(self._end, self.held.end_offset)
        self._end = max(self._end, self.open_end.end)
        return self._end

    def wake(self) -> None:
        """Set the listeners: there may be more rows than before."""
        for listener in self.listeners:
            listener.set()

    def add_stored(self, offset: int, run: StoredRun) -> None:
        """Note that the batches of a run are confirmed from this offset on."""
        if offset < self._recent.end:
            self.forget()
        self._recent.add(offset, run)
        self._end = max(self._end, self._recent.end)
        self.wake()

    def came(self) -> tuple[int, int]:
        """How many messages came so far, and of producers how many bytes."""
        return self.end, self._recent.added_bytes

    async def _forget_other_history(self) -> None:
        """Forget the rows in memory if the metadata store went back since the last call. Raises
        errors.LedgerError."""
        history = await self._catch_up()
        if history != self._history:
            self.forget()
            self._history = history

    def forget(self) -> None:
        """Forget all rows, after the metadata store went back in time. The rows in memory are no
        longer rows of the topic, and other rows may have the same offsets."""
        self._recent.forget()
        self._start = self._end = 0

    async def read(
        self, offset: int, bytes_max: int = READ_BYTES, *, lossy: bool = False
    ) -> list[Stored]:
        """Batches from the offset on, about `bytes_max` bytes. At least one batch is returned if a
        row from there on is confirmed, else an empty list. A batch is returned whole, even if some
        of its rows were removed. If rows cannot be read, a read returns the batches before these
        rows; the next read raises the error.

        `lossy`: leave out rows that are lost. An empty batch then marks the end of lost rows, if
        commits have no other rows, and the end of each entry that no version wrote. Raises
        errors.LedgerError."""
        await self._forget_other_history()
        offset = max(offset, self.start)
        batches = self._recent.since(offset, bytes_max)
        if batches:
            return batches
        try:
            await self._fetch(batches, offset, bytes_max, lossy)
        except LOST as error:
            # a read of several ledgers raises this error before its first row
            if not batches and not lossy:
                await self._fetch(batches, offset, bytes_max, lossy=True)
                batches = self._before_gap(batches, offset)
            if not batches:
                raise error
        except Exception:
            if not batches:
                raise
        end = self.held.end_offset
        if lossy and not batches and offset < end:
            following = min(end, offset + PLANNED_ROWS_MAX)
            return await self.read(following, lossy=True) or [_empty_batch(following)]
        return batches

    async def _fetch(self, batches: list[Stored], offset: int, bytes_max: int, lossy: bool) -> None:
        size = 0
        for task in await self._plan(offset):
            async with aclosing(fetch_with_replans(self._client, task, lossy=lossy)) as runs:
                async for run in runs:
                    for fetched in run:
                        version = await self._schema_version_of(fetched)
                        for step in self._batches(fetched, version, lossy):
                            batches += step
                            self._recent.add_read(step)
                            size += sum(len(batch.data) for batch in step)
                            await asyncio.sleep(0)
                            if size >= max(bytes_max, READ_BYTES_MAX):
                                return
                    if size >= bytes_max:
                        return

    def _before_gap(self, batches: list[Stored], offset: int) -> list[Stored]:
        """The batches from the offset on that come before the first lost rows."""
        intervals = self.held.intervals
        for at, batch in enumerate(batches):
            between = intervals.between(offset, batch.offset) if offset < batch.offset else ()
            if any(interval.source is not None for interval in between):
                return batches[:at]
            offset = batch.end
        return batches

    async def skips_lost(self) -> bool:
        """Whether the topic's policy now lets consumers pass over rows that are lost."""
        with suppress(errors.LedgerError, StoreError):
            info = await self._client.topics.find(self._topic.name.full)
            return info is not None and info.policies.on_lost_rows == "skip"
        return False

    async def _schema_version_of(self, fetched: FetchedEntry) -> bytes:
        """The schema version, as clients have it, of rows of Spark in the entry."""
        number = schema_version_of(fetched)
        if not number:
            return b""
        schemas = self._client.schemas
        return VERSION_NUMBER.pack(await schemas.number_for_clients(self._topic, number))

    def _batches(
        self, fetched: FetchedEntry, schema_version: bytes, lossy: bool
    ) -> Iterator[list[Stored]]:
        """The batches of the entry, in steps. `lossy`: an entry that no version wrote gives an
        empty batch at the entry's end. Raises errors.BadEntry, errors.UnsupportedFormat, with the
        ledger and entry."""
        try:
            yield from batches_in(fetched, schema_version)
        except errors.UnsupportedFormat as error:
            place = fetched.entry.header.ledger_id, fetched.entry.header.entry_id
            lo = int(fetched.pieces["offset"][0])
            rows = BadRows(self.number, lo, lo + int(fetched.pieces["take"].sum()), *place)
            policy = OnBadEntry.SKIP if lossy else OnBadEntry.FAIL
            BadEntries(self._topic.name.full, policy).count_or_raise(rows, error)
            yield [_empty_batch(rows.hi)]

    def messages_at(self, offset: int) -> int | None:
        """The number of messages of the batch that begins at the offset; None if the batch is not
        in memory."""
        batches = self._recent.since(offset, 1)
        return batches[0].messages if batches else None

    async def last(self, before: int | None = None) -> Stored | None:
        """The last batch with a confirmed row, of those that end at the offset `before` or earlier;
        None: there is none. Raises errors.LedgerError."""
        await self._forget_other_history()
        until = end = self.end if before is None else before
        last = self._recent.last_before(end)
        if last is not None and not self._is_removed(last.end):
            return last
        while end > self.start:
            if self._is_removed(end):
                end = self._before_hole(end)
                continue
            batches = [batch for batch in await self._read_at(end - 1) if batch.offset < end]
            if batches and batches[-1].has_rows:
                if before is None:
                    self._recent.note_last(batches[-1], until)
                return batches[-1]
            end = batches[-1].offset if batches else self._before_hole(end)
        return None

    def _is_removed(self, end: int) -> bool:
        """Whether the message before the offset `end` was removed."""
        return bool(self.removed(end - 1, end))

    def removed(self, lo: int, hi: int) -> list[tuple[int, int]]:
        """The ranges of [lo, hi) that were trimmed or became holes: no consumer gets them."""
        start = self.start
        ranges = [(lo, min(hi, start))] if lo < start else []
        with suppress(errors.Unavailable):
            intervals = self.held.intervals.between(max(lo, start), hi)
            holes = [interval for interval in intervals if interval.source is None]
            ranges += [(max(lo, hole.lo), min(hi, hole.hi)) for hole in holes]
        return ranges

    async def chunk(self, offset: int) -> Stored | None:
        """The chunk of a message at a confirmed offset; None if the topic does not keep the chunk
        any more. Raises errors.LedgerError."""
        if offset < self.start:
            return None
        batches = await self._read_at(offset, 1)
        chunk = batches[0] if batches else None
        return chunk if chunk and chunk.offset == offset and not chunk.has_rows else None

    async def _read_at(self, offset: int, bytes_max: int = READ_BYTES) -> list[Stored]:
        """Batches from a confirmed offset on: the result is empty only if no batch has the offset.
        Raises errors.LedgerError."""
        batches = await self.read(offset, bytes_max)
        if not batches:
            await self._wait_until_readable(offset)
            batches = await self.read(offset, bytes_max)
        return batches

    def _before_hole(self, end: int) -> int:
        """The end of the last rows below `end` that the topic keeps."""
        intervals = self.held.intervals.between(self.start, min(end, self.held.end_offset))
        with_rows = [interval for interval in intervals if interval.source is not None]
        return max((rows.hi for rows in with_rows if rows.hi < end), default=self.start)

    async def since(self, ms: int) -> int:
        """The first offset whose row has the time `ms` or a later time; the end if no row has. A
        row of Spark has the time of its commit; a row of a producer has the time at which the owner
        wrote it. Raises errors.LedgerError: errors.Unavailable if a ledger that ended is not sealed
        yet."""
        ms = max(0, min(ms, pulsar_batch.TIME_MS_MAX))
        await self._wait_until_readable(self.end - 1)
        live, confirmed = self.open_end.live, self.open_end.end
        last_entry = self.open_end.last_entry
        if live is not None:
            await self._wait_until_readable(live.base - 1)
        state = self._state()
        held = state.partitions[self.number]
        chunks = await self._client.chunks.load(chunks_needed(state, CommittedSince(ms)))
        first, rows = offset_since(held, ms, chunks), rows_around(held, ms, chunks)
        if live is not None and first == held.end_offset < confirmed:  # every commit is earlier
            rows = LiveRows(live, first, confirmed, last_entry)
        return first if rows is None else await first_stored_since(self._client.ledgers, rows, ms)

    async def _wait_until_readable(self, offset: int) -> None:
        """Wait until the offset is in a commit or in the open ledger. For a moment the offset may
        be in a ledger that has ended and is not sealed yet. Raises errors.Unavailable."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + SEALED_S
        while offset >= self.held.end_offset and not self._is_live(offset):
            if loop.time() > until_s:
                raise errors.Unavailable(
                    f"partition {self.number} of topic {self._topic.name} cannot be read at offset"
                    f" {offset} now: its ledger has ended, and is not sealed yet"
                )
            await asyncio.sleep(LOOK_S)

    def _is_live(self, offset: int) -> bool:
        live = self.open_end.live
        return live is not None and live.base <= offset < self.open_end.end

    async def _plan(self, offset: int) -> list[ReadTask]:
        """Plan reads of confirmed rows from the offset on: of rows in commits, or, after the last
        commit, of rows in the live ledger."""
        state = self._state()
        held = state.partitions[self.number]
        end = min(held.end_offset, offset + PLANNED_ROWS_MAX)
        if offset < end:
            ranges = {self.number: (max(offset, held.start_offset), end)}
            state, tables = await self._client.state_with_tables(state, ranges)
            return plan_read(state, ranges, topic=self._topic.name.full, read=tables)
        live, end = self.open_end.live, min(self.open_end.end, offset + PLANNED_ROWS_MAX)
        if live is None or not self._is_live(offset):
            return []
        rows = LiveRows(live, offset, end, self.open_end.last_entry)
        return [ReadTask(self._topic.name.full, self._topic.id, (), NO_SEGMENTS, rows)]
