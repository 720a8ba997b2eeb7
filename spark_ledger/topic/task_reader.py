"""Reading a task to its end although the topic changes meanwhile.

Always true: the rows of each partition come in order of offsets, each once. If a ledger is gone,
the reader folds the topic again and goes on in each partition where it was. Rows that were moved
are read at their new place; rows that were trimmed are errors.RowsTrimmed with the count; rows that
the topic still has in the missing ledger are errors.RowsLost. A reader that accepts losses
(`lossy`) gets exactly the other rows.

Chunked messages are put together here: the row of a last chunk has the bytes of all chunks.

    an entry that has a last chunk -> the offsets that it names -> the chunks at these offsets, kept
    by this read, or read for this -> the row

A message is one row, at its last chunk's offset, wherever a read begins: the reader finds the
earlier chunks in the ledger that has their offsets now. A message with a chunk that is gone
(retention took its first ones, or a hole has one) has no row: it went with that chunk. A read keeps
at most KEPT_BYTES of chunks; chunks that it did not keep it reads again.
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
    NAMED_MAX,
    NOTHING,
    ReadTask,
    lost_of,
    plan_read,
    rows_lost,
    segments_in,
    without,
)
from spark_ledger.topic.read.row_blocks import Block
from spark_ledger.topic.read.slice_reader import Fetched, FetchedEntry, fetch_task

FOLDS_MAX = 20
PAUSE_S = 0.05

KEPT_BYTES = 64 << 20
EACH_BYTES = 256
"""The memory that a kept chunk takes beside its payload."""
_log = logging.getLogger(__name__)


def fetch_kept(
    client: TopicClient, task: ReadTask, *, keys: Hashes | None = None, lossy: bool = False
) -> Fetched:
    """The entries of the task, in order, some at a time, not decoded yet; with `keys` (hashes)
    without entries that certainly have none of these keys.

    Raises errors.RowsTrimmed, errors.RowsLost (neither if `lossy`), errors.TopicDeleted,
    errors.NoSuchLedger if a ledger is gone after each of FOLDS_MAX folds,
    errors.DataUnavailable, errors.DigestMismatch, errors.UnsupportedFormat, errors.Unavailable.
    """
    tries = itertools.count()

    async def again(left: ReadTask, error: errors.NoSuchLedger | errors.RowsLost) -> ReadTask:
        if isinstance(error, errors.RowsLost):
            if not lossy:
                raise error
            return _without_lost(left, error)
        tried = next(tries)
        if tried >= FOLDS_MAX:
            raise error
        folded = await _folded_again(client, left, error, lossy)
        await asyncio.sleep(PAUSE_S * tried)
        return folded

    return fetch_task(client.ledgers, task, keys, again)


def _without_lost(task: ReadTask, error: errors.RowsLost) -> ReadTask:
    """The task without the rows that the error names. Raises the error if it names no rows."""
    ended, start, end = (error.facts.get(name) for name in ("ended", "start", "end"))
    if isinstance(ended, tuple):
        return without(task, lost_of(task, dict([ended])))
    if isinstance(start, int) and isinstance(end, int):
        return _live_until(task, start, error)
    raise error


async def _folded_again(
    client: TopicClient, task: ReadTask, gone: errors.NoSuchLedger, lossy: bool
) -> ReadTask:
    """The rest of the task, planned on the newest state."""
    left = [OffsetRange(span.partition, span.lo, span.hi) for span in task.spans]
    if task.live is not None:
        left.append(OffsetRange(task.live.live.partition, task.live.start, task.live.end))
    state, read = await _newest(client, task, left)
    starts = state.start_offsets()
    trimmed = [OffsetRange(p, lo, min(hi, starts[p])) for p, lo, hi in left if lo < starts[p]]
    if trimmed and not lossy:
        raise _rows_trimmed(task, trimmed)
    live = None
    if task.live is not None:
        live = _still_live(state.partitions[task.live.live.partition], task.live)
        nowhere = _end_in_topic(state, task.live, live)
        if nowhere < task.live.end and not lossy:
            raise _confirmed_lost(task, task.live, nowhere)
    spans, table = segments_in(state, _committed(state, left), read)
    return _without_ledger(replace(task, spans=spans, table=table, live=live), gone, lossy)


async def _newest(
    client: TopicClient, task: ReadTask, left: list[OffsetRange]
) -> tuple[TopicState, Tables]:
    """The topic's newest state with the chunks that it needs; folded again if a chunk is gone
    before it was read."""
    for tries in range(FOLDS_MAX):
        if (state := await _folded(client, task.topic_id)) is None:
            raise errors.TopicDeleted(
                f"topic {task.topic!r} (id {task.topic_id}) was deleted", topic=task.topic
            )
        asked: dict[int, tuple[int, int]] = {}
        for p, lo, hi in _committed(state, left):
            first, last = asked.get(p, (lo, hi))
            asked[p] = (min(first, lo), max(last, hi))
        try:
            return await client.readable(state, asked)
        except (errors.NoSuchLedger, errors.NoSuchEntry):
            await asyncio.sleep(PAUSE_S * tries)
    raise errors.DataUnavailable(f"topic {task.topic!r} changes faster than its chunks can be read")


async def _folded(client: TopicClient, topic_id: str) -> TopicState | None:
    """The state; None if the topic was deleted."""
    try:
        state = await client.log(topic_id).fold(fresh=True)
    except (errors.TopicDeleted, errors.TopicNotFound):
        return None
    return None if state.deleted else state


def _committed(state: TopicState, left: list[OffsetRange]) -> list[OffsetRange]:
    """The part of these offsets that commits hold and that is not trimmed."""
    kept = []
    for p, lo, hi in left:
        held = state.partitions[p]
        lo, hi = max(lo, held.start_offset), min(hi, held.end_offset)
        if lo < hi:
            kept.append(OffsetRange(p, lo, hi))
    return kept


def _still_live(held: PartitionState, live: LiveRows) -> LiveRows | None:
    """The rows of the live segment that no commit has yet."""
    start = max(live.start, held.end_offset)
    now, before = held.live, live.live
    if start >= live.end or now is None or now.ledger_id != before.ledger_id:
        return None
    return replace(live, start=start) if now.origin == before.origin else None


def _end_in_topic(state: TopicState, live_rows: LiveRows, live: LiveRows | None) -> int:
    """The end of those of the rows that are in a commit or still live."""
    held = state.partitions[live_rows.live.partition]
    end = (
        max(live_rows.start, held.start_offset, held.end_offset) if live is None else live_rows.end
    )
    return min(end, live_rows.end)


def _confirmed_lost(task: ReadTask, live: LiveRows, start: int) -> errors.RowsLost:
    return errors.RowsLost(
        f"{live.end - start} confirmed rows are gone: offsets {start} to {live.end - 1} of"
        f" partition {live.live.partition} of topic {task.topic!r}, whose live segment ended"
        " before",
        rows=live.end - start,
    )


def _rows_trimmed(task: ReadTask, trimmed: list[OffsetRange]) -> errors.RowsTrimmed:
    rows = sum(hi - lo for _, lo, hi in trimmed)
    named = [f"offsets {lo} to {hi - 1} of partition {p}" for p, lo, hi in trimmed[:NAMED_MAX]]
    more = ", ..." if len(trimmed) > NAMED_MAX else ""
    return errors.RowsTrimmed(
        f"{rows} rows to be read were removed: {', '.join(named)}{more} of topic {task.topic!r}",
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


def _without_ledger(task: ReadTask, gone: errors.NoSuchLedger, lossy: bool) -> ReadTask:
    """The task if it no longer reads the missing ledger; without the ledger's rows if `lossy`."""
    ledger_id = gone.facts.get("ledger_id")
    if not isinstance(ledger_id, int):
        return task
    lost = lost_of(task, {ledger_id: NOTHING})
    if lost and not lossy:
        raise rows_lost(lost)
    return without(task, lost)


def with_chunks(
    client: TopicClient,
    task: ReadTask,
    runs: Fetched,
    columns: Collection[str] | None = None,
    *,
    lossy: bool = False,
) -> Fetched:
    """The task's entries with their chunked messages put together, as far as `columns` need it; an
    entry with such a message comes by itself. FetchedEntry.blocks handles messages that cannot be
    put together, and entries that cannot be decoded. Raises as task_reader.fetch_kept."""
    if not task.chunked:
        return runs
    value = columns is None or VALUE in columns
    return _put_together(runs, _Chunks(client, task, value=value, lossy=lossy))


async def _put_together(runs: Fetched, chunks: "_Chunks") -> Fetched:
    async with aclosing(runs):
        async for run in runs:
            plain: list[FetchedEntry] = []
            for fetched in run:
                in_entry = _chunks_in(fetched)
                if not in_entry:
                    plain.append(fetched)
                    continue
                if plain:
                    yield plain
                plain = []
                yield [await chunks.join_chunks(fetched, in_entry)]
            if plain:
                yield plain


async def read_blocks(client: TopicClient, task: ReadTask) -> AsyncGenerator[Block, None]:
    """The rows of a task, those of each partition in order. Raises as task_reader.fetch_kept, and
    errors.BadEntry."""
    bad = BadEntries(task.topic)
    async with aclosing(with_chunks(client, task, fetch_kept(client, task))) as runs:
        async for run in runs:
            for fetched in run:
                for block in fetched.blocks(bad=bad):
                    yield block


class _Chunks:
    """Puts together the chunked messages of one read."""

    def __init__(self, client: TopicClient, task: ReadTask, *, value: bool, lossy: bool) -> None:
        self._client = client
        self._task = task
        self._value = value
        self._lossy = lossy
        self._kept = LruCache[tuple[int, int], Buffer](KEPT_BYTES, lambda b: EACH_BYTES + len(b))

    async def join_chunks(self, fetched: FetchedEntry, chunks: "list[_Chunk]") -> FetchedEntry:
        from spark_ledger.topic.entry import pulsar_batch  # only if an entry has chunks
        from spark_ledger.topic.entry.pulsar_parts import Chunks

        whole: dict[int, list[Buffer]] = {}
        faults: dict[int, errors.UnsupportedFormat] = {}
        partition = int(fetched.pieces["partition"][0])
        for offset, row, data in chunks:
            try:
                if pulsar_batch.is_earlier_chunk(data):
                    self._keep(partition, offset, pulsar_batch.payload_of_chunk(data))
                    continue
                needed = pulsar_batch.earlier_offsets(data)
                if any(earlier >= offset for earlier in needed):
                    raise errors.BadEntry(f"a chunk at offset {offset} that names {max(needed)}")
                earlier = await self._earlier(fetched, partition, offset, needed)
            except errors.BadEntry as why:  # an earlier chunk's fault is met again at the last one
                faults[row] = why
                continue
            if earlier is None:
                _log.warning(
                    "a message of %d chunks is left out: its last chunk is at offset %d of"
                    " partition %d of topic %s, and chunks before it are gone",
                    *(len(needed) + 1, offset, partition, self._task.topic),
                )
            else:
                whole[row] = earlier
        return replace(fetched, chunks=Chunks(whole, faults))

    def _keep(self, partition: int, offset: int, payload: Buffer) -> None:
        self._kept.put((partition, offset), payload if self._value else b"")

    async def _earlier(
        self, fetched: FetchedEntry, partition: int, last: int, needed: Collection[int]
    ) -> list[Buffer] | None:
        """The payloads of the chunks at these offsets; None if one is gone from the topic."""
        payloads: dict[int, Buffer] = {}
        for offset in needed:
            payload = self._kept.pop((partition, offset))
            if payload is not None:
                payloads[offset] = payload
        missing = [offset for offset in needed if offset not in payloads]
        if missing:
            await self._read(fetched, partition, missing, payloads)
        if len(payloads) < len(needed):
            return None
        return [payloads[offset] for offset in needed]

    async def _read(
        self,
        fetched: FetchedEntry,
        partition: int,
        missing: list[int],
        payloads: dict[int, Buffer],
    ) -> None:
        """Read the missing chunks that the topic still has; add their payloads."""
        state = await self._client.log(self._task.topic_id).fold(fresh=True)
        if missing[0] < state.partitions[partition].start_offset:
            return
        try:
            for lo, hi in _runs_of(missing):
                for task in await self._planned(state, fetched, partition, lo, hi):
                    await self._read_all(task, payloads)
        except errors.RowsTrimmed:
            return

    async def _read_all(self, task: ReadTask, payloads: dict[int, Buffer]) -> None:
        from spark_ledger.topic.entry import pulsar_batch

        async with aclosing(fetch_kept(self._client, task, lossy=self._lossy)) as runs:
            async for run in runs:
                for fetched in run:
                    for offset, _, data in _chunks_in(fetched):
                        if pulsar_batch.is_earlier_chunk(data):
                            payload = pulsar_batch.payload_of_chunk(data)
                            payloads[offset] = payload if self._value else b""

    async def _planned(
        self, state: TopicState, fetched: FetchedEntry, partition: int, lo: int, hi: int
    ) -> list[ReadTask]:
        """Reads of the offsets [lo, hi): from commits, and from the entry's own live ledger, which
        has all offsets before the entry that no commit has."""
        name, held = self._task.topic, state.partitions[partition]
        tasks: list[ReadTask] = []
        if lo < held.end_offset:
            ranges = {partition: (lo, min(hi, held.end_offset))}
            state, tables = await self._client.readable(state, ranges)
            tasks += plan_read(state, ranges, topic=name, read=tables)
        live, place = held.live, fetched.entry.header
        if hi > held.end_offset:
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
    """A chunk in an entry, of which it is row `row`."""

    offset: int
    row: int
    data: memoryview


def _chunks_in(fetched: FetchedEntry) -> list[_Chunk]:
    """The chunks in the pieces of an entry; no chunks if it cannot be decoded."""
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


def _runs_of(offsets: list[int]) -> Iterator[tuple[int, int]]:
    """The ranges of consecutive offsets."""
    start = end = offsets[0]
    for offset in offsets:
        if offset != end:
            yield start, end
            start = offset
        end = offset + 1
    yield start, end
