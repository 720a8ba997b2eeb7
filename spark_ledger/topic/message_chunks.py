"""Chunked messages put together where they are read: a last chunk's row has what all chunks hold.

    an entry that has a last chunk -> the offsets that it names -> the chunks there, which this read
    has just met, or which are read by themselves -> the row

Always true: a message is one row, at its last chunk's offset, wherever a read begins: chunks before
that are looked for in whatever ledger has their offsets now. A message of which a chunk is not kept
any more (retention took its first ones, a hole has one) has no row: it went with that chunk. What a
read keeps of chunks that it met is bounded by KEPT_BYTES; what it does not keep it reads again.
"""

import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, Collection, Iterator
from contextlib import aclosing
from dataclasses import replace

from bookie_server.api.entry import Buffer
from spark_ledger import errors
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.entry.message_batch import VALUE, Header, decode_header
from spark_ledger.topic.log.segment_table import NO_SEGMENTS
from spark_ledger.topic.log.state import TopicState
from spark_ledger.topic.read.pieces import LiveRows
from spark_ledger.topic.read.plan import ReadTask, plan_read
from spark_ledger.topic.read.row_blocks import Rows
from spark_ledger.topic.read.slice_reader import Fetched, FetchedEntry
from spark_ledger.topic.task_reader import fetch_kept

KEPT_BYTES = 64 << 20
EACH_BYTES = 256
"""What one that is kept takes beside its payload."""

_log = logging.getLogger(__name__)


async def with_chunks(
    client: TopicClient,
    task: ReadTask,
    runs: Fetched,
    columns: Collection[str] | None = None,
    *,
    lossy: bool = False,
) -> Fetched:
    """The task's entries with their chunked messages put together, as far as `columns` need it; an
    entry with such a message comes by itself. Raises as task_reader.fetch_kept."""
    chunks = _Chunks(client, task, value=columns is None or VALUE in columns, lossy=lossy)
    async with aclosing(runs):
        async for run in runs:
            plain: list[FetchedEntry] = []
            for fetched in run:
                header = decode_header(fetched.entry.payload)
                if not header.chunks:
                    plain.append(fetched)
                    continue
                if plain:
                    yield plain
                plain = []
                yield [await chunks.put_together(fetched, header)]
            if plain:
                yield plain


async def read_rows(client: TopicClient, task: ReadTask) -> AsyncGenerator[Rows, None]:
    """The rows of a task, those of each partition in order. Raises as task_reader.fetch_kept."""
    async with aclosing(with_chunks(client, task, fetch_kept(client, task))) as runs:
        async for run in runs:
            for fetched in run:
                for rows in fetched.block().parts():
                    yield rows


class _Chunks:
    """Of one read."""

    def __init__(self, client: TopicClient, task: ReadTask, *, value: bool, lossy: bool) -> None:
        self._client = client
        self._task = task
        self._value = value
        self._lossy = lossy
        self._kept: OrderedDict[tuple[int, int], Buffer] = OrderedDict()
        self._kept_bytes = 0

    async def put_together(self, fetched: FetchedEntry, header: Header) -> FetchedEntry:
        from spark_ledger.topic.entry import pulsar_batch  # for those alone who meet one

        whole: dict[int, list[Buffer]] = {}
        partition = int(fetched.pieces["partition"][0])
        for offset, row, data in _chunks_in(fetched, header):
            if pulsar_batch.is_earlier_chunk(data):
                self._keep(partition, offset, pulsar_batch.payload_of_chunk(data))
                continue
            needed = pulsar_batch.earlier_offsets(data)
            earlier = await self._earlier(fetched, partition, offset, needed)
            if earlier is None:
                _log.warning(
                    "a message of %d chunks is left out: the one at offset %d of partition %d of"
                    " topic %s is the last, and others before it are not kept any more",
                    *(len(needed) + 1, offset, partition, self._task.topic),
                )
            else:
                whole[row] = earlier
        return replace(fetched, whole=whole)

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
                    header = decode_header(fetched.entry.payload)
                    for offset, _, data in _chunks_in(fetched, header):
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


def _chunks_in(fetched: FetchedEntry, header: Header) -> Iterator[tuple[int, int, memoryview]]:
    """The chunks among what is wanted of an entry: the offset, the row of the entry, the bytes."""
    from spark_ledger.topic.entry import pulsar_batch

    if not header.chunks:
        return
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
