"""Reading a task to its end although the topic moves on below it.

Always true: the rows of each partition come in order of offsets, each once. A ledger that is not
there any more means: fold the topic again, and go on in each partition where it was. What was put
elsewhere is read there; what was trimmed is errors.RowsTrimmed with the count; what the topic still
says is in that ledger is errors.RowsLost. A reader that accepts losses (`lossy`) gets exactly the
other rows.

Chunked messages are put together here: a last chunk's row has what all chunks hold.

    an entry that has a last chunk -> the offsets that it names -> the chunks there, which this read
    has just met, or which are read by themselves -> the row

A message is one row, at its last chunk's offset, wherever a read begins: chunks before
that are looked for in whatever ledger has their offsets now. A message of which a chunk is not kept
any more (retention took its first ones, a hole has one) has no row: it went with that chunk. What a
read keeps of chunks that it met is bounded by KEPT_BYTES; what it does not keep it reads again.
"""

import asyncio
import itertools
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, Collection, Iterator
from contextlib import aclosing, suppress
from dataclasses import replace

from bookie_server.api.entry import Buffer
from spark_ledger import errors
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.entry.message_batch import VALUE, Header, decode_header
from spark_ledger.topic.entry.routing import Hashes
from spark_ledger.topic.log.segment_table import NO_SEGMENTS
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

Left = list[tuple[int, int, int]]
"""Offsets [start, end) of partitions that are still to be read."""
KEPT_BYTES = 64 << 20
EACH_BYTES = 256
"""What one that is kept takes beside its payload."""
_log = logging.getLogger(__name__)


def fetch_kept(
    client: TopicClient, task: ReadTask, *, keys: Hashes | None = None, lossy: bool = False
) -> Fetched:
    """The entries of the task, in order, some at a time, not decoded yet; with `keys` (hashes)
    without those that are known to have none of them.

    Raises errors.RowsTrimmed, errors.RowsLost (neither if `lossy`), errors.TopicDeleted,
    errors.NoSuchLedger when a ledger is gone whenever the topic is folded again,
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
    """The task without what the error tells. Raises it where it tells no rows."""
    ended, start, end = (error.facts.get(name) for name in ("ended", "start", "end"))
    if isinstance(ended, tuple):
        return without(task, lost_of(task, dict([ended])))
    if isinstance(start, int) and isinstance(end, int):
        return _live_until(task, start, error)
    raise error


async def _folded_again(
    client: TopicClient, task: ReadTask, gone: errors.NoSuchLedger, lossy: bool
) -> ReadTask:
    """The task by the newest state, from where it is."""
    left: Left = [(one.partition, one.lo, one.hi) for one in task.spans]
    if task.live is not None:
        left.append((task.live.live.partition, task.live.start, task.live.end))
    state, read = await _newest(client, task, left)
    starts = state.start_offsets()
    trimmed = [(p, lo, min(hi, starts[p])) for p, lo, hi in left if lo < starts[p]]
    if trimmed and not lossy:
        raise _rows_trimmed(task, trimmed)
    live = None
    if task.live is not None:
        live = _still_live(state.partitions[task.live.live.partition], task.live)
        nowhere = _end_of_known(state, task.live, live)
        if nowhere < task.live.end and not lossy:
            raise _confirmed_lost(task, task.live, nowhere)
    spans, table = segments_in(state, _committed(state, left), read)
    return _without_ledger(replace(task, spans=spans, table=table, live=live), gone, lossy)


async def _newest(client: TopicClient, task: ReadTask, left: Left) -> tuple[TopicState, Tables]:
    """The topic's state with what is needed of chunks; again if those are gone, or rows are,
    before they were read."""
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
    raise errors.DataUnavailable(
        f"topic {task.topic!r} changes faster than what it says can be read"
    )


async def _folded(client: TopicClient, topic_id: str) -> TopicState | None:
    """None: the topic was deleted."""
    try:
        state = await client.log(topic_id).fold(fresh=True)
    except (errors.TopicDeleted, errors.TopicNotFound):
        return None
    return None if state.deleted else state


def _committed(state: TopicState, left: Left) -> Left:
    """What commits hold of it, and keep."""
    found = []
    for p, lo, hi in left:
        held = state.partitions[p]
        lo, hi = max(lo, held.start_offset), min(hi, held.end_offset)
        if lo < hi:
            found.append((p, lo, hi))
    return found


def _still_live(held: PartitionState, live: LiveRows) -> LiveRows | None:
    """The rows of the live segment which no commit has yet."""
    start = max(live.start, held.end_offset)
    now, before = held.live, live.live
    if start >= live.end or now is None or now.ledger_id != before.ledger_id:
        return None
    return replace(live, start=start) if now.origin == before.origin else None


def _end_of_known(state: TopicState, wanted: LiveRows, live: LiveRows | None) -> int:
    """Up to where the rows wanted are in a commit or still live."""
    held = state.partitions[wanted.live.partition]
    known = max(wanted.start, held.start_offset, held.end_offset) if live is None else wanted.end
    return min(known, wanted.end)


def _confirmed_lost(task: ReadTask, live: LiveRows, start: int) -> errors.RowsLost:
    return errors.RowsLost(
        f"{live.end - start} confirmed rows are gone: offsets {start} to {live.end - 1} of"
        f" partition {live.live.partition} of topic {task.topic!r}, whose live segment ended"
        " before",
        rows=live.end - start,
    )


def _rows_trimmed(task: ReadTask, trimmed: Left) -> errors.RowsTrimmed:
    rows = sum(hi - lo for _, lo, hi in trimmed)
    named = [f"offsets {lo} to {hi - 1} of partition {p}" for p, lo, hi in trimmed[:NAMED_MAX]]
    more = ", ..." if len(trimmed) > NAMED_MAX else ""
    return errors.RowsTrimmed(
        f"{rows} rows to be read were removed: {', '.join(named)}{more} of topic {task.topic!r}",
        rows=rows,
    )


def _live_until(task: ReadTask, start: int, lost: errors.RowsLost) -> ReadTask:
    """The task without rows of its live segment from `start` on, if it is these that are lost."""
    live, last = task.live, lost.facts.get("last_entry")
    if live is None or not live.start <= start < live.end or not isinstance(last, int):
        return task
    return replace(
        task, live=replace(live, end=start, last_entry=last) if start > live.start else None
    )


def _without_ledger(task: ReadTask, gone: errors.NoSuchLedger, lossy: bool) -> ReadTask:
    """The task if it does not read that ledger any more; without those rows if `lossy`."""
    ledger_id = gone.facts.get("ledger_id")
    if not isinstance(ledger_id, int):
        return task
    lost = lost_of(task, {ledger_id: NOTHING})
    if lost and not lossy:
        raise rows_lost(lost)
    return without(task, lost)


async def with_chunks(
    client: TopicClient,
    task: ReadTask,
    runs: Fetched,
    columns: Collection[str] | None = None,
    *,
    lossy: bool = False,
) -> Fetched:
    """The task's entries with their chunked messages put together, as far as `columns` need it; an
    entry with such a message comes by itself. What cannot be put together, or be decoded at all, is
    left to FetchedEntry.blocks. Raises as task_reader.fetch_kept."""
    chunks = _Chunks(client, task, value=columns is None or VALUE in columns, lossy=lossy)
    async with aclosing(runs):
        async for run in runs:
            plain: list[FetchedEntry] = []
            for fetched in run:
                found = _chunks_in(fetched)
                if not found:
                    plain.append(fetched)
                    continue
                if plain:
                    yield plain
                plain = []
                yield [await chunks.put_together(fetched, found)]
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
    """Of one read."""

    def __init__(self, client: TopicClient, task: ReadTask, *, value: bool, lossy: bool) -> None:
        self._client = client
        self._task = task
        self._value = value
        self._lossy = lossy
        self._kept: OrderedDict[tuple[int, int], Buffer] = OrderedDict()
        self._kept_bytes = 0

    async def put_together(self, fetched: FetchedEntry, chunks: "list[_Chunk]") -> FetchedEntry:
        from spark_ledger.topic.entry import pulsar_batch  # for those alone who meet one
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
                if any(one >= offset for one in needed):
                    raise errors.BadEntry(f"a chunk at offset {offset} that names {max(needed)}")
                earlier = await self._earlier(fetched, partition, offset, needed)
            except errors.BadEntry as why:  # of an earlier one: met where the last one names it
                faults[row] = why
                continue
            if earlier is None:
                _log.warning(
                    "a message of %d chunks is left out: the one at offset %d of partition %d of"
                    " topic %s is the last, and others before it are not kept any more",
                    *(len(needed) + 1, offset, partition, self._task.topic),
                )
            else:
                whole[row] = earlier
        return replace(fetched, chunks=Chunks(whole, faults))

    def _keep(self, partition: int, offset: int, payload: Buffer) -> None:
        if not self._value:
            payload = b""
        self._kept[partition, offset] = payload
        self._kept_bytes += EACH_BYTES + len(payload)
        while self._kept_bytes > KEPT_BYTES:
            _, oldest = self._kept.popitem(last=False)
            self._kept_bytes -= EACH_BYTES + len(oldest)

    async def _earlier(
        self, fetched: FetchedEntry, partition: int, last: int, needed: Collection[int]
    ) -> list[Buffer] | None:
        """The payloads of the chunks at these offsets; None where one is not kept any more."""
        found: dict[int, Buffer] = {}
        for offset in needed:
            payload = self._kept.pop((partition, offset), None)
            if payload is not None:
                self._kept_bytes -= EACH_BYTES + len(payload)
                found[offset] = payload
        missing = [offset for offset in needed if offset not in found]
        if missing:
            await self._read(fetched, partition, missing, found)
        if len(found) < len(needed):
            return None
        return [found[offset] for offset in needed]

    async def _read(
        self,
        fetched: FetchedEntry,
        partition: int,
        missing: list[int],
        found: dict[int, Buffer],
    ) -> None:
        """Add the payloads of those that are kept still."""
        state = await self._client.log(self._task.topic_id).fold(fresh=True)
        if missing[0] < state.partitions[partition].start_offset:
            return
        try:
            for lo, hi in _runs_of(missing):
                for task in await self._planned(state, fetched, partition, lo, hi):
                    await self._read_all(task, found)
        except errors.RowsTrimmed:
            return

    async def _read_all(self, task: ReadTask, found: dict[int, Buffer]) -> None:
        from spark_ledger.topic.entry import pulsar_batch

        async with aclosing(fetch_kept(self._client, task, lossy=self._lossy)) as runs:
            async for run in runs:
                for fetched in run:
                    for offset, _, data in _chunks_in(fetched):
                        if pulsar_batch.is_earlier_chunk(data):
                            payload = pulsar_batch.payload_of_chunk(data)
                            found[offset] = payload if self._value else b""

    async def _planned(
        self, state: TopicState, fetched: FetchedEntry, partition: int, lo: int, hi: int
    ) -> list[ReadTask]:
        """Reads of the offsets [lo, hi): of commits, and of the live ledger that the entry is in,
        which has before it whatever no commit has."""
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
            wanted = LiveRows(live, max(lo, live.base), hi, place.entry_id)
            tasks.append(ReadTask(name, state.topic_id, (), NO_SEGMENTS, wanted))
        return tasks


_Chunk = tuple[int, int, memoryview]
"""The offset, the row of the entry, the bytes."""


def _chunks_in(fetched: FetchedEntry) -> list[_Chunk]:
    """The chunks among what is wanted of an entry; none where it cannot be decoded."""
    with suppress(errors.UnsupportedFormat):
        header = decode_header(fetched.entry.payload)
        if header.chunks:
            return list(_wanted_chunks(fetched, header))
    return []


def _wanted_chunks(fetched: FetchedEntry, header: Header) -> Iterator[_Chunk]:
    """Raises errors.BadEntry."""
    from spark_ledger.topic.entry import pulsar_batch

    body = memoryview(fetched.entry.payload)[header.body_at :]
    wanted = [(skip, skip + take, offset - skip) for _, _, skip, take, offset in _pieces(fetched)]
    at = 0
    for messages, data in pulsar_batch.unframed(body, header.rows):
        if pulsar_batch.is_earlier_chunk(data) or pulsar_batch.is_last_chunk(data):
            for first, end, base in wanted:
                if first <= at < end:
                    yield base + at, at, data
        at += messages


def _pieces(fetched: FetchedEntry) -> list[tuple[int, int, int, int, int]]:
    found: list[tuple[int, int, int, int, int]] = fetched.pieces.tolist()
    return found


def _runs_of(offsets: list[int]) -> Iterator[tuple[int, int]]:
    """Ranges of offsets that follow each other."""
    start = end = offsets[0]
    for offset in offsets:
        if offset != end:
            yield start, end
            start = offset
        end = offset + 1
    yield start, end
