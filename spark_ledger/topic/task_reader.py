"""Reading a task to its end although the topic changes meanwhile.

Always true: the rows of each partition come in order of offsets, each row once. If a ledger is
gone, the reader folds the topic again, plans the remaining rows again (*replans*), and goes on in
each partition at the next offset. It reads moved rows from their new ledgers. If rows were trimmed,
it raises errors.RowsTrimmed with their number; if the topic still has rows in the missing ledger,
it raises errors.RowsLost. A reader that accepts losses (`lossy`) gets exactly the other rows.

The chunks of a message are joined here: the row of a last chunk has the bytes of all chunks.

    an entry with a last chunk -> the offsets of earlier chunks that the last chunk names -> these
    chunks, cached by this read or read now -> the row

A message is one row, at its last chunk's offset, also if a read begins between its chunks: the
reader reads the earlier chunks from the ledger that has their offsets now. A message that lost a
chunk (by retention, or in a hole) has no row. A read caches at most CHUNK_CACHE_BYTES of chunks,
and reads other chunks again.
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Collection, Iterator
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import NamedTuple

from bookie_server.api.entry import Buffer
from spark_ledger import errors
from spark_ledger.process import LruCache
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.entry.message_batch import VALUE, Header, decode_header
from spark_ledger.topic.entry.routing import Hashes
from spark_ledger.topic.log.segment_table import NO_SEGMENTS
from spark_ledger.topic.log.segments import OffsetRange
from spark_ledger.topic.log.state import PartitionState, Tables, TopicState
from spark_ledger.topic.read.bad_entries import BadEntries
from spark_ledger.topic.read.pieces import LiveRows
from spark_ledger.topic.read.plan import (
    EMPTY_LEDGER_END,
    LISTED_MAX,
    ReadTask,
    lost_of,
    plan_read,
    rows_lost,
    segments_in,
    without_rows,
)
from spark_ledger.topic.read.row_blocks import Block
from spark_ledger.topic.read.slice_reader import FetchedEntry, FetchedRuns, fetch_task

FOLDS_MAX = 20
PAUSE_S = 0.05

CHUNK_CACHE_BYTES = 64 << 20
CHUNK_OVERHEAD_BYTES = 256
"""The memory that a cached chunk takes beside its payload."""
_log = logging.getLogger(__name__)


def fetch_with_replans(
    client: TopicClient, task: ReadTask, *, keys: Hashes | None = None, lossy: bool = False
) -> FetchedRuns:
    """The entries of the task, in order, in lists, not decoded yet; replans the task if the topic
    changes. With `keys` (hashes), entries that certainly have none of these keys are left out.

    Raises errors.RowsTrimmed and errors.RowsLost (neither if `lossy`), errors.TopicDeleted,
    errors.NoSuchLedger if after each of FOLDS_MAX folds a ledger is gone,
    errors.DataUnavailable, errors.DigestMismatch, errors.UnsupportedFormat, errors.Unavailable.
    """
    tries = itertools.count()

    async def replan(remaining: ReadTask, error: errors.NoSuchLedger | errors.RowsLost) -> ReadTask:
        if isinstance(error, errors.RowsLost):
            if not lossy:
                raise error
            return _without_lost(remaining, error)
        try_number = next(tries)
        if try_number >= FOLDS_MAX:
            raise error
        replanned = await _replan(client, remaining, error, lossy)
        await asyncio.sleep(PAUSE_S * try_number)
        return replanned

    return fetch_task(client.ledgers, task, keys, replan)


def _without_lost(task: ReadTask, error: errors.RowsLost) -> ReadTask:
    """The task without the rows that the error names. Raises the error if it names no rows."""
    ended, start, end = (error.facts.get(name) for name in ("ended", "start", "end"))
    if isinstance(ended, tuple):
        return without_rows(task, lost_of(task, dict([ended])))
    if isinstance(start, int) and isinstance(end, int):
        return _live_until(task, start, error)
    raise error


async def _replan(
    client: TopicClient, task: ReadTask, error: errors.NoSuchLedger, lossy: bool
) -> ReadTask:
    """The rest of the task, planned for the newest state."""
    remaining = [OffsetRange(span.partition, span.lo, span.hi) for span in task.spans]
    if task.live is not None:
        remaining.append(OffsetRange(task.live.live.partition, task.live.start, task.live.end))
    state, read = await _newest_state(client, task, remaining)
    starts = state.start_offsets()
    trimmed = [OffsetRange(p, lo, min(hi, starts[p])) for p, lo, hi in remaining if lo < starts[p]]
    trimmed = [offsets for offsets in trimmed if task.acked.unacked_count(*offsets)]
    if trimmed and not lossy:
        raise _rows_trimmed(task, trimmed)
    live = None
    if task.live is not None:
        live = _live_part(state.partitions[task.live.live.partition], task.live)
        end_in_topic = _end_in_topic(state, task.live, live)
        lost = (task.live.live.partition, end_in_topic, task.live.end)
        if task.acked.unacked_count(*lost) and not lossy:
            raise _confirmed_lost(task, task.live, end_in_topic)
    spans, table = segments_in(state, _committed_part(state, remaining), read)
    return _without_ledger(replace(task, spans=spans, table=table, live=live), error, lossy)


async def _newest_state(
    client: TopicClient, task: ReadTask, remaining: list[OffsetRange]
) -> tuple[TopicState, Tables]:
    """The topic's newest state, and the tables for the remaining rows. If a chunk is deleted before
    it is read, folds again."""
    for tries in range(FOLDS_MAX):
        if (state := await _fold(client, task.topic_id)) is None:
            raise errors.TopicDeleted(
                f"topic {task.topic!r} (id {task.topic_id}) was deleted", topic=task.topic
            )
        ranges: dict[int, tuple[int, int]] = {}
        for p, lo, hi in _committed_part(state, remaining):
            first, last = ranges.get(p, (lo, hi))
            ranges[p] = (min(first, lo), max(last, hi))
        try:
            return await client.state_with_tables(state, ranges)
        except (errors.NoSuchLedger, errors.NoSuchEntry):
            await asyncio.sleep(PAUSE_S * tries)
    raise errors.DataUnavailable(f"topic {task.topic!r} changes faster than its chunks can be read")


async def _fold(client: TopicClient, topic_id: str) -> TopicState | None:
    """The state; None if the topic was deleted."""
    try:
        state = await client.log(topic_id).fold(fresh=True)
    except (errors.TopicDeleted, errors.TopicNotFound):
        return None
    return None if state.deleted else state


def _committed_part(state: TopicState, remaining: list[OffsetRange]) -> list[OffsetRange]:
    """Those of the offsets that are in commits and not trimmed."""
    committed = []
    for p, lo, hi in remaining:
        state_now = state.partitions[p]
        lo, hi = max(lo, state_now.start_offset), min(hi, state_now.end_offset)
        if lo < hi:
            committed.append(OffsetRange(p, lo, hi))
    return committed


def _live_part(state_now: PartitionState, live: LiveRows) -> LiveRows | None:
    """Those of the live rows that no commit has yet; None if there are no such rows."""
    start = max(live.start, state_now.end_offset)
    live_now, before = state_now.live, live.live
    if start >= live.end or live_now is None or live_now.ledger_id != before.ledger_id:
        return None
    return replace(live, start=start) if live_now.origin == before.origin else None


def _end_in_topic(state: TopicState, live_rows: LiveRows, live: LiveRows | None) -> int:
    """The end of those of `live_rows` that are in a commit, or still in the live segment
    (`live`)."""
    state_now = state.partitions[live_rows.live.partition]
    end = (
        max(live_rows.start, state_now.start_offset, state_now.end_offset)
        if live is None
        else live_rows.end
    )
    return min(end, live_rows.end)


def _confirmed_lost(task: ReadTask, live: LiveRows, start: int) -> errors.RowsLost:
    rows = task.acked.unacked_count(live.live.partition, start, live.end)
    return errors.RowsLost(
        f"{rows} confirmed rows are gone: offsets {start} to {live.end - 1} of"
        f" partition {live.live.partition} of topic {task.topic!r}, whose live segment ended"
        " before these rows",
        rows=rows,
    )


def _rows_trimmed(task: ReadTask, trimmed: list[OffsetRange]) -> errors.RowsTrimmed:
    rows = sum(task.acked.unacked_count(*offsets) for offsets in trimmed)
    listed = [f"offsets {lo} to {hi - 1} of partition {p}" for p, lo, hi in trimmed[:LISTED_MAX]]
    more = ", ..." if len(trimmed) > LISTED_MAX else ""
    return errors.RowsTrimmed(
        f"{rows} rows to be read were removed: {', '.join(listed)}{more} of topic {task.topic!r}",
        rows=rows,
    )


def _live_until(task: ReadTask, start: int, lost: errors.RowsLost) -> ReadTask:
    """The task without the rows of its live segment from `start` on, if these rows are lost."""
    live, last = task.live, lost.facts.get("last_entry")
    if live is None or not live.start <= start < live.end or not isinstance(last, int):
        return task
    return replace(
        task, live=replace(live, end=start, last_entry=last) if start > live.start else None
    )


def _without_ledger(task: ReadTask, error: errors.NoSuchLedger, lossy: bool) -> ReadTask:
    """The task without the rows in the missing ledger. Raises errors.RowsLost if there are such
    rows, unless `lossy`."""
    ledger_id = error.facts.get("ledger_id")
    if not isinstance(ledger_id, int):
        return task
    lost = lost_of(task, {ledger_id: EMPTY_LEDGER_END})
    if lost and not lossy:
        raise rows_lost(lost)
    return without_rows(task, lost)


def with_chunks(
    client: TopicClient,
    task: ReadTask,
    runs: FetchedRuns,
    columns: Collection[str] | None = None,
    *,
    lossy: bool = False,
) -> FetchedRuns:
    """The task's entries. The chunks of messages are joined if `columns` has the value; an entry
    with chunks is a list by itself. FetchedEntry.blocks handles messages that cannot be joined, and
    entries that cannot be decoded. Raises as fetch_with_replans."""
    if not task.chunked:
        return runs
    value = columns is None or VALUE in columns
    return _join_chunks(runs, _ChunkJoiner(client, task, value=value, lossy=lossy))


async def _join_chunks(runs: FetchedRuns, joiner: "_ChunkJoiner") -> FetchedRuns:
    async with aclosing(runs):
        async for run in runs:
            without_chunks: list[FetchedEntry] = []
            for fetched in run:
                chunks = _chunks_in(fetched)
                if not chunks:
                    without_chunks.append(fetched)
                    continue
                if without_chunks:
                    yield without_chunks
                without_chunks = []
                yield [await joiner.join(fetched, chunks)]
            if without_chunks:
                yield without_chunks


async def read_blocks(client: TopicClient, task: ReadTask) -> AsyncGenerator[Block, None]:
    """The rows of a task; the rows of each partition are in order. Raises as fetch_with_replans,
    and errors.BadEntry."""
    bad = BadEntries(task.topic)
    async with aclosing(with_chunks(client, task, fetch_with_replans(client, task))) as runs:
        async for run in runs:
            for fetched in run:
                for block in fetched.blocks(bad=bad):
                    yield block


class _ChunkJoiner:
    """Joins the chunks of the messages of one read."""

    def __init__(self, client: TopicClient, task: ReadTask, *, value: bool, lossy: bool) -> None:
        self._client = client
        self._task = task
        self._needs_value = value
        self._lossy = lossy
        self._earlier_chunks = LruCache[tuple[int, int], Buffer](
            CHUNK_CACHE_BYTES, lambda b: CHUNK_OVERHEAD_BYTES + len(b)
        )

    async def join(self, fetched: FetchedEntry, chunks: "list[_Chunk]") -> FetchedEntry:
        from spark_ledger.topic.entry import pulsar_batch  # only if an entry has chunks
        from spark_ledger.topic.entry.pulsar_parts import Chunks

        earlier_chunks: dict[int, list[Buffer]] = {}
        faults: dict[int, errors.UnsupportedFormat] = {}
        partition = int(fetched.pieces["partition"][0])
        for offset, row, data in chunks:
            try:
                if pulsar_batch.is_earlier_chunk(data):
                    payload = pulsar_batch.payload_of_chunk(data)
                    self._earlier_chunks.put(
                        (partition, offset), payload if self._needs_value else b""
                    )
                    continue
                needed_offsets = pulsar_batch.earlier_offsets(data)
                if any(earlier >= offset for earlier in needed_offsets):
                    raise errors.BadEntry(
                        f"a chunk at offset {offset} names the later offset {max(needed_offsets)}"
                    )
                earlier_payloads = await self._earlier_payloads(
                    fetched, partition, offset, needed_offsets
                )
            except errors.BadEntry as error:  # a bad earlier chunk fails again at the last chunk
                faults[row] = error
                continue
            if earlier_payloads is None:
                _log.warning(
                    "a message of %d chunks is left out: its last chunk is at offset %d of"
                    " partition %d of topic %s, and earlier chunks are gone",
                    *(len(needed_offsets) + 1, offset, partition, self._task.topic),
                )
            else:
                earlier_chunks[row] = earlier_payloads
        return replace(fetched, chunks=Chunks(earlier_chunks, faults))

    async def _earlier_payloads(
        self, fetched: FetchedEntry, partition: int, last: int, needed_offsets: Collection[int]
    ) -> list[Buffer] | None:
        """The payloads of the chunks at these offsets; None if the topic lost one of the chunks."""
        payloads: dict[int, Buffer] = {}
        for offset in needed_offsets:
            payload = self._earlier_chunks.pop((partition, offset))
            if payload is not None:
                payloads[offset] = payload
        missing_offsets = [offset for offset in needed_offsets if offset not in payloads]
        if missing_offsets:
            await self._read_missing(fetched, partition, missing_offsets, payloads)
        if len(payloads) < len(needed_offsets):
            return None
        return [payloads[offset] for offset in needed_offsets]

    async def _read_missing(
        self,
        fetched: FetchedEntry,
        partition: int,
        missing_offsets: list[int],
        payloads: dict[int, Buffer],
    ) -> None:
        """Reads the missing chunks that the topic still has, and adds their payloads to
        `payloads`."""
        state = await self._client.log(self._task.topic_id).fold(fresh=True)
        if missing_offsets[0] < state.partitions[partition].start_offset:
            return
        try:
            for lo, hi in _consecutive_ranges(missing_offsets):
                for task in await self._plan_reads(state, fetched, partition, lo, hi):
                    await self._read_task(task, payloads)
        except errors.RowsTrimmed:
            return

    async def _read_task(self, task: ReadTask, payloads: dict[int, Buffer]) -> None:
        from spark_ledger.topic.entry import pulsar_batch

        async with aclosing(fetch_with_replans(self._client, task, lossy=self._lossy)) as runs:
            async for run in runs:
                for fetched in run:
                    for offset, _, data in _chunks_in(fetched):
                        if pulsar_batch.is_earlier_chunk(data):
                            payload = pulsar_batch.payload_of_chunk(data)
                            payloads[offset] = payload if self._needs_value else b""

    async def _plan_reads(
        self, state: TopicState, fetched: FetchedEntry, partition: int, lo: int, hi: int
    ) -> list[ReadTask]:
        """The reads of the offsets [lo, hi), all before the entry. Committed offsets are read as in
        any plan; the other offsets are in the entry's live ledger."""
        name, state_now = self._task.topic, state.partitions[partition]
        tasks: list[ReadTask] = []
        if lo < state_now.end_offset:
            ranges = {partition: (lo, min(hi, state_now.end_offset))}
            state, tables = await self._client.state_with_tables(state, ranges)
            tasks += plan_read(state, ranges, topic=name, read=tables)
        live, place = state_now.live, fetched.entry.header
        if hi > state_now.end_offset:
            if live is None or live.ledger_id != place.ledger_id:
                raise errors.DataUnavailable(
                    f"offsets up to {hi} of partition {partition} of topic {name} are in no commit"
                    " yet, and not in its live ledger",
                    "Read again.",
                )
            rows = LiveRows(live, max(lo, live.base), hi, place.entry_id)
            tasks.append(ReadTask(name, state.topic_id, (), NO_SEGMENTS, rows))
        return tasks


class _Chunk(NamedTuple):
    """A chunk in an entry; `row` is its number among the entry's rows."""

    offset: int
    row: int
    data: memoryview


def _chunks_in(fetched: FetchedEntry) -> list[_Chunk]:
    """The chunks in the pieces of an entry; none if the entry cannot be decoded."""
    with suppress(errors.UnsupportedFormat):
        header = decode_header(fetched.entry.payload)
        if header.chunks:
            return list(_chunks_of_pieces(fetched, header))
    return []


def _chunks_of_pieces(fetched: FetchedEntry, header: Header) -> Iterator[_Chunk]:
    """Raises errors.BadEntry."""
    from spark_ledger.topic.entry import pulsar_batch

    body = memoryview(fetched.entry.payload)[header.body_at :]
    row_ranges = [
        (skip, skip + take, offset - skip) for _, _, skip, take, offset in fetched.pieces.tolist()
    ]
    at = 0
    for messages, data in pulsar_batch.split_frames(body, header.rows):
        if pulsar_batch.is_earlier_chunk(data) or pulsar_batch.is_last_chunk(data):
            for first, end, base in row_ranges:
                if first <= at < end:
                    yield _Chunk(base + at, at, data)
        at += messages


def _consecutive_ranges(offsets: list[int]) -> Iterator[tuple[int, int]]:
    """The ranges of consecutive offsets."""
    start = end = offsets[0]
    for offset in offsets:
        if offset != end:
            yield start, end
            start = offset
        end = offset + 1
    yield start, end
