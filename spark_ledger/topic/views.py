"""A cluster's contents as tables: topics, partitions, segments, ledgers, subscriptions, lag,
commits, bookies. SCHEMAS has the columns of each table; docs/spark.md explains them.

Always true: a view is planned as parts that fit into memory. Each part is read by itself, maybe in
another process, so a view is not a snapshot: it leaves out objects that are deleted between plan
and read. A listing changes nothing, and keeps no state of the topics that it read. Times are by the
store's clock. No row of a table has offsets that were trimmed or are in a hole. A segment that was
trimmed in part is listed with its remaining offsets and rows, but with all its bytes and entries.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark_ledger import errors
from spark_ledger.bookies import directory
from spark_ledger.metadata import paths
from spark_ledger.metadata.ledger_record import LedgerRecord
from spark_ledger.metadata.store import NoNode
from spark_ledger.metadata.store_calls import Tries, call_each, store_now_ms, unavailable_while
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.entry.arrow_arrays import of_list, of_numpy
from spark_ledger.topic.log import actions
from spark_ledger.topic.log.records import Commit
from spark_ledger.topic.log.segment_table import SegmentTable, TableChunk
from spark_ledger.topic.log.segments import INLINE, OffsetRange
from spark_ledger.topic.log.state import Tables, TopicState
from spark_ledger.topic.log.topic_log import TopicLog
from spark_ledger.topic.log.topics import TopicInfo
from spark_ledger.topic.read.live import ends_of
from spark_ledger.topic.subscription.lag import topic_lag

T = TypeVar("T")

TOPICS_PER_PART = 200
LEDGERS_PER_PART = 5_000
CHUNKS_PER_PART = 8  # of 1 MiB at most: some 50,000 segments each
CALLS_AT_ONCE = 16
TRIES_MAX = 5

_TIME = pa.timestamp("us", "UTC")
_TYPES: Mapping[str, pa.DataType] = {
    "text": pa.string(),
    "texts": pa.list_(pa.string()),
    "int": pa.int32(),
    "long": pa.int64(),
    "flag": pa.bool_(),
    "time": _TIME,
}


def _schema(columns: str) -> pa.Schema:
    """The schema of a list of names and types such as "topic text, partitions int"."""
    pairs = (column.split() for column in columns.split(","))
    return pa.schema([(name, _TYPES[kind]) for name, kind in pairs])


SCHEMAS: Mapping[str, pa.Schema] = {
    "topics": _schema(
        "topic text, topicId text, partitions int, rows long, bytes long, createdAt time, "
        "commits long, committedAt time, terminated flag, retentionMs long, "
        "retentionBytes long, schemaVersion int"
    ),
    "partitions": _schema(
        "topic text, partition int, earliestOffset long, latestOffset long, rows long, "
        "bytes long, liveLedgerId long, writer text"
    ),
    "segments": _schema(
        "topic text, partition int, firstOffset long, lastOffset long, rows long, bytes long, "
        "entries int, ledgerId long, shared flag, commit long, committedAt time, "
        "minTimestamp time, maxTimestamp time"
    ),
    "ledgers": _schema(
        "ledgerId long, topic text, state text, lastEntry long, rows long, bytes long, "
        "ensembleSize int, writeQuorum int, ackQuorum int, durability text, fragments int, "
        "ensemble texts, underReplicated flag, intent text"
    ),
    "subscriptions": _schema(
        "topic text, subscription text, kind text, inUse flag, queryId text, runId text, "
        "epoch long, createdAt time, cursorLedgerId long"
    ),
    "lag": _schema(
        "topic text, subscription text, partition int, committedOffset long, "
        "latestOffset long, rowsBehind long, bytesBehind long, millisBehind long"
    ),
    "commits": _schema(
        "topic text, commit long, at time, kinds texts, rows long, bytes long, appId text, "
        "version long, runId text, target text, commitId text, userMetadata text, "
        "otherTopicIds texts, bodyLedgerId long"
    ),
    "bookies": _schema(
        "bookieId text, state text, address text, rack text, freeBytes long, totalBytes long, "
        "limboLedgers long, version text, why text"
    ),
}
Row = tuple[Any, ...]
"""The values of a row, in the order of the view's columns."""


@dataclass(frozen=True, slots=True)
class ViewPart:
    """A part of a view. Picklable. `topics` are the topics to list. In the view "segments",
    `ranges` are the offsets whose segments are listed. In the view "ledgers", `ledgers` are the ids
    to list; with `only_topics`, ledgers of other topics than `topics` are left out."""

    view: str
    topics: tuple[TopicInfo, ...] = ()
    ranges: tuple[OffsetRange, ...] = ()
    ledgers: tuple[int, ...] = ()
    only_topics: bool = False


async def plan(
    client: TopicClient, view: str, names: Iterable[str] | None = None
) -> list[ViewPart]:
    """The parts of a view of these topics (None: of all topics); the list may be empty.

    Raises errors.TopicNotFound for a named topic that does not exist, errors.Unavailable.
    """
    with unavailable_while(f"listing {view}"):
        return await _plan(client, view, names)


async def _plan(client: TopicClient, view: str, names: Iterable[str] | None) -> list[ViewPart]:
    if view == "bookies":
        return [ViewPart(view)]
    topics = client.topics
    named_topics = None if names is None else tuple([await topics.open(name) for name in names])
    if view == "ledgers":
        ids = [ledger_id async for ledger_id in client.ledgers.list()]
        runs = _batches(ids, LEDGERS_PER_PART)
        return [
            ViewPart(view, named_topics or (), (), tuple(few), named_topics is not None)
            for few in runs
        ]
    infos = tuple(await topics.list()) if named_topics is None else named_topics
    if view == "segments":
        parts_by_topic = await call_each(
            lambda info: _segment_parts(client, info), infos, CALLS_AT_ONCE
        )
        return [part for parts in parts_by_topic for part in parts]
    return [ViewPart(view, tuple(few)) for few in _batches(infos, TOPICS_PER_PART)]


async def read(client: TopicClient, part: ViewPart) -> list[pa.RecordBatch]:
    """The part's rows, sorted by topic, then by the next columns. Raises errors.Unavailable,
    errors.UnsupportedFormat, errors.DataUnavailable, errors.DigestMismatch."""
    with unavailable_while(f"listing {part.view}"):
        if part.view == "segments":
            return [await _segments(client, part)]
        if part.view == "ledgers":
            return [_table("ledgers", await _ledgers(client, part))]
        if part.view == "bookies":
            bookies = await directory.registered(client.store)
            return [_table("bookies", map(_bookie_row, bookies))]
        rows_of_topic = _TOPIC_VIEWS[part.view]
        rows_by_topic = await call_each(
            lambda info: _unless_deleted(rows_of_topic(client, info)), part.topics, CALLS_AT_ONCE
        )
        return [_table(part.view, rows) for rows in rows_by_topic if rows]


# -- of one topic ------------------------------------------------------------------------------


async def _topic(client: TopicClient, info: TopicInfo) -> list[Row]:
    state = await _state(client, info)
    node = await client.store.get(paths.topic(info.id))
    schema = await client.schemas.of(info, fresh=False)
    partitions, commits = state.partitions, state.next  # commits have the numbers 0, 1, ...
    row = (
        *(info.name.short, info.id, len(partitions)),
        sum(p.rows_between(p.start_offset, p.end_offset) for p in partitions),
        sum(p.bytes_between(p.start_offset, p.end_offset) for p in partitions),
        *(_us(node.created_ms), commits, _us(state.commit_ms) if commits else None),
        *(state.terminated, info.policies.retention_ms, info.policies.retention_bytes),
        schema.head.current,  # the newest version
    )
    return [row]


async def _partitions(client: TopicClient, info: TopicInfo) -> list[Row]:
    state = await _state(client, info)
    rows = []
    for partition in state.partitions:
        start, end, live = partition.start_offset, partition.end_offset, partition.live
        rows.append(
            (
                *(info.name.short, partition.number, start, end),
                *(partition.rows_between(start, end), partition.bytes_between(start, end)),
                *((None, None) if live is None else (live.ledger_id, live.owner)),
            )
        )
    return rows


async def _subscriptions(client: TopicClient, info: TopicInfo) -> list[Row]:
    subscriptions = await client.subscriptions.list(info.id)
    return [
        (
            *(info.name.short, subscription.name, subscription.kind.value, subscription.live),
            *(
                subscription.query_id or None,
                subscription.run_id or None,
                subscription.epoch,
                _us(subscription.created_ms),
            ),
            subscription.ledger_id,
        )
        for subscription in subscriptions
    ]


async def _lag(client: TopicClient, info: TopicInfo) -> list[Row]:
    subscriptions = await client.subscriptions.list(info.id, exact=True)  # with cursor ledgers
    if not subscriptions:
        return []
    now_ms = await store_now_ms(client.store)
    state = await _state(client, info)
    live_ends = await ends_of(client.ledgers, state)
    rows: list[Row] = []
    for subscription in subscriptions:
        for partition, lag in topic_lag(
            *(state, subscription.positions, now_ms),
            live_ends=live_ends,
            acked=subscription.acked_beyond,
        ).items():
            cells = (lag.position, lag.end, lag.rows, lag.bytes, lag.millis)
            rows.append((info.name.short, subscription.name, partition, *cells))
    return rows


async def _commits(client: TopicClient, info: TopicInfo) -> list[Row]:
    log = TopicLog(client.store, info.id, client.ledgers)
    return [_commit_row(info, *logged) async for logged in log.commits()]


def _commit_row(info: TopicInfo, number: int, created_ms: int, commit: Commit) -> Row:
    added_segments = [
        segment
        for action in commit.actions
        if not isinstance(action, actions.Replace)
        for segment in actions.segments_of(action)
    ]
    return (
        *(info.name.short, number, _us(created_ms)),
        list(dict.fromkeys(actions.name_of(action) for action in commit.actions)),
        *(
            sum(segment.rows for segment in added_segments),
            sum(segment.bytes for segment in added_segments),
        ),
        *(commit.app_id, commit.version, commit.run_id, commit.target, commit.commit_id),
        *(commit.user_metadata or None, list(commit.others), commit.body_ledger),
    )


_TOPIC_VIEWS: Mapping[str, Callable[[TopicClient, TopicInfo], Awaitable[list[Row]]]] = {
    "topics": _topic,
    "partitions": _partitions,
    "subscriptions": _subscriptions,
    "lag": _lag,
    "commits": _commits,
}


# -- segments ------------------------------------------------------------------------------------


async def _segment_parts(client: TopicClient, info: TopicInfo) -> list[ViewPart]:
    """A part for the offsets whose segments are in no chunk, and parts with several chunks each."""
    state = await _unless_deleted(_state(client, info))
    if state is None:
        return []
    by_chunk = _ranges_by_chunk(state)
    runs = [[None], *_batches([chunk for chunk in by_chunk if chunk is not None], CHUNKS_PER_PART)]
    ranges = [tuple(r for chunk in run for r in by_chunk.get(chunk, ())) for run in runs]
    return [ViewPart("segments", (info,), offsets) for offsets in ranges if offsets]


async def _segments(client: TopicClient, part: ViewPart) -> pa.RecordBatch:
    (info,) = part.topics
    tries = Tries(tries_max=TRIES_MAX)
    while (state := await _unless_deleted(_state(client, info))) is not None:
        try:
            tables = await client.chunks.load(_chunks_needed(state, part.ranges))
            return _of_ranges(state, info.name.short, part.ranges, tables)
        except errors.NoSuchLedger as gone:  # a newer checkpoint replaced a chunk
            await tries.retry_or_raise(gone)
    return _joined_batch([], info.name.short)


def _ranges_by_chunk(state: TopicState) -> dict[TableChunk | None, list[OffsetRange]]:
    """The offsets whose segments are in a chunk, by chunk; by None the offsets whose segments are
    in no chunk."""
    by_chunk: dict[TableChunk | None, list[OffsetRange]] = {}
    for partition in state.partitions:
        for interval in partition.intervals.between(partition.start_offset, partition.end_offset):
            if interval.source is not None:
                chunk = interval.source if isinstance(interval.source, TableChunk) else None
                lo = max(interval.lo, partition.start_offset)
                by_chunk.setdefault(chunk, []).append(
                    OffsetRange(partition.number, lo, interval.hi)
                )
    return by_chunk


def _chunks_needed(state: TopicState, ranges: Iterable[OffsetRange]) -> list[TableChunk]:
    """The chunks that `_of_ranges` needs in `tables`."""
    partitions = state.partitions
    chunk_lists = (
        partitions[p].chunks_between(max(lo, partitions[p].start_offset), hi)
        for p, lo, hi in ranges
    )
    return list(dict.fromkeys(chunk for chunks in chunk_lists for chunk in chunks))


def _of_ranges(
    state: TopicState, topic: str, ranges: Iterable[OffsetRange], tables: Tables
) -> pa.RecordBatch:
    """The segments with a row in the ranges, in the order of the ranges."""
    parts = []
    for partition, lo, hi in ranges:
        partition_state = state.partitions[partition]
        for stretch in partition_state.stretches(max(lo, partition_state.start_offset), hi, tables):
            parts.append(_part(stretch.table, partition, stretch.lo, stretch.hi))
    return _joined_batch(parts, topic)


def _part(table: SegmentTable, partition: int, lo: int, hi: int) -> pa.RecordBatch:
    """The segments with a row in [lo, hi), without the column `topic`."""
    part = table.between(partition, lo, hi)
    first, last = np.maximum(part.bases, lo), np.minimum(part.ends, hi) - 1
    column = part.batch.column
    ledgers = of_numpy(part.ledgers)
    arrays = [
        column("partition"),
        of_numpy(first),
        of_numpy(last),
        of_numpy(last - first + 1),
        column("bytes"),
        of_numpy(part.entry_counts),
        pc.if_else(pc.equal(ledgers, INLINE), None, ledgers),
        column("shared"),
        column("commit"),
        *(pc.multiply(column(ms), 1000).cast(_TIME) for ms in ("commit_ms", "min_ms", "max_ms")),
    ]
    return pa.RecordBatch.from_arrays(arrays, names=SCHEMAS["segments"].names[1:])


def _joined_batch(parts: Iterable[pa.RecordBatch], topic: str) -> pa.RecordBatch:
    schema = SCHEMAS["segments"]
    batches = [part for part in parts if part.num_rows]
    if not batches:
        return pa.RecordBatch.from_pylist([], schema=schema)
    joined = pa.Table.from_batches(batches).combine_chunks()
    names = of_list([topic], pa.string()).take(of_numpy(np.zeros(len(joined), dtype=np.int64)))
    table = joined.add_column(0, "topic", names).cast(schema)
    (batch,) = table.combine_chunks().to_batches()
    return batch


# -- ledgers and bookies ---------------------------------------------------------------------------


async def _ledgers(client: TopicClient, part: ViewPart) -> list[Row]:
    await client.store.sync()
    alive_bookies = await directory.alive(client.store)

    async def record_of(ledger_id: int) -> LedgerRecord | None:
        try:
            return (await client.ledgers.record(ledger_id)).record
        except errors.NoSuchLedger:  # deleted meanwhile
            return None

    records = [
        record
        for record in await call_each(record_of, part.ledgers, CALLS_AT_ONCE)
        if record is not None
    ]
    if part.only_topics:
        topic_ids = {info.id for info in part.topics}
        records = [record for record in records if record.topic in topic_ids]
    ids = [topic_id for topic_id in dict.fromkeys(record.topic for record in records) if topic_id]
    topic_names = await call_each(client.topics.name_of, ids, CALLS_AT_ONCE)
    pairs = zip(ids, topic_names, strict=True)
    names = {id_: id_ if name is None else name.short for id_, name in pairs}
    return [_ledger_row(record, names, alive_bookies) for record in records]


def _ledger_row(record: LedgerRecord, names: Mapping[str, str], alive: frozenset[str]) -> Row:
    bookies = (bookie for fragment in record.fragments for bookie in fragment.ensemble)
    return (
        *(record.ledger_id, names.get(record.topic), record.state.value),
        *(record.last_entry, record.rows, record.length_bytes),
        *(record.ensemble_size, record.write_quorum, record.ack_quorum, record.durability),
        *(len(record.fragments), list(record.last_fragment.ensemble)),
        *(not alive.issuperset(bookies), record.intent or None),
    )


def _bookie_row(bookie: dict[str, Any]) -> Row:
    status = directory.listed_status(bookie)
    names = ("id", "state", "address", "rack", "free_bytes", "total_bytes", "limbo_ledgers")
    return (*(status[name] for name in names), status["version"], status["why"] or None)


# -- for all views -----------------------------------------------------------------------------


async def _state(client: TopicClient, info: TopicInfo) -> TopicState:
    """The topic's state, folded for this listing only: the process does not keep the state."""
    state = await TopicLog(client.store, info.id, client.ledgers).fold(fresh=True)
    if state.deleted:
        raise errors.TopicDeleted(f"topic {info.name} was deleted", topic=info.name.full)
    return state


async def _unless_deleted(listing: Awaitable[T]) -> T | None:
    """The result; None for a topic that was deleted meanwhile."""
    try:
        return await listing
    except (errors.TopicNotFound, errors.TopicDeleted, NoNode):
        return None


def _batches(items: Sequence[T], size: int) -> list[Sequence[T]]:
    return [items[at : at + size] for at in range(0, len(items), size)]


def _us(ms: int) -> int:
    return ms * 1000


def _table(view: str, rows: Iterable[Row]) -> pa.RecordBatch:
    schema = SCHEMAS[view]
    columns = list(zip(*rows, strict=True)) or [()] * len(schema)
    arrays = [pa.array(cells, field.type) for cells, field in zip(columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
