"""Checkpoints: a topic's state in a small form, stored in place of all commits before it. Pure.

Always true: decoding a root (the head of a checkpoint, which names its chunks) gives the state that
was encoded. A checkpoint gives every row the offset, segment and commit time that the commits gave
to the row: fold(checkpoint + later commits) is fold(all commits). Segments are in chunks, which
never change, or in the tail, which each root stores again; a chunk's segments do not overlap.
docs/topics.md ("Checkpoint") has the format.
"""

import json
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from bookie_server.api.entry import payload_crc
from spark_ledger import errors
from spark_ledger.topic.entry.arrow_arrays import as_numpy, of_list, of_numpy
from spark_ledger.topic.entry.arrow_stream import read_batch
from spark_ledger.topic.entry.message_batch import Rowless
from spark_ledger.topic.log import records
from spark_ledger.topic.log.blobs import StoredEntries, pack, unpack
from spark_ledger.topic.log.records import READER_VERSION, pointer_from_json
from spark_ledger.topic.log.segment_table import (
    SCHEMA,
    BlobPointer,
    Interval,
    Intervals,
    SegmentTable,
    Source,
    Stretch,
    TableChunk,
)
from spark_ledger.topic.log.segments import INLINE, NO_ENTRY, NO_TOKEN, LiveSegment
from spark_ledger.topic.log.state import NO_TABLES, PartitionState, SharedCommit, Tables, TopicState

MAGIC = b"SLR1"
TAIL_BYTES_MAX = 512 * 1024
CHUNK_BYTES_MAX = 1024 * 1024
SPARSE_BYTES_MAX = 8 * 1024 * 1024  # of the chunks that one checkpoint reads to merge them
_HOLE_SOURCE, _TAIL_SOURCE = -1, -2
SCALAR_FIELDS = ("topic_id", "next", "terminated", "commit_ms", "min_writer", "last_of_others")
_INTERVAL_FIELDS = ("lo", "hi", "bytes", "first_ms", "last_ms")
_PARTITION_FIELDS = ("start_offset", "end_offset", "rearranged")
_POINTER_FIELDS = ("ledger_id", "metadata_version", "first", "last", "bytes", "crc")
IntervalLists = list[list[Interval]]
"""For each partition the list of its intervals."""


@dataclass(frozen=True, slots=True)
class Root:
    """`earlier_ledgers` are the ledgers with the chunks and the root of the checkpoint before this
    checkpoint."""

    state: TopicState
    earlier_ledgers: tuple[int, ...] = ()


# -- making a state small ----------------------------------------------------------------------


def sparse_chunks(state: TopicState) -> list[TableChunk]:
    """Chunks that have lost more than half of their rows, SPARSE_BYTES_MAX together at most. The
    checkpoint puts their segments that still have rows back into the tail."""
    kept_rows: dict[TableChunk, int] = {}
    for partition in state.partitions:
        for interval in partition.intervals:
            if isinstance(interval.source, TableChunk):
                rows = interval.hi - interval.lo
                kept_rows[interval.source] = kept_rows.get(interval.source, 0) + rows
    sparse, size = [], 0
    for chunk, rows in kept_rows.items():
        if 2 * rows < chunk.rows and size + chunk.pointer.bytes <= SPARSE_BYTES_MAX:
            sparse.append(chunk)
            size += chunk.pointer.bytes
    return sparse


def merge_intervals(partition: PartitionState, tables: Tables = NO_TABLES) -> list[Interval]:
    """The partition's rows and holes in as few intervals as possible. An interval with a table in
    memory gets only the segments of its own rows; an interval of a chunk in `tables` gets the
    chunk's table."""
    groups: list[list[Interval]] = []
    for interval in partition.intervals:
        source = interval.source
        if isinstance(source, TableChunk):
            source = tables.get(source, source)
        if isinstance(source, SegmentTable):
            source = source.between(partition.number, interval.lo, interval.hi)
        interval = replace(interval, source=source)
        if groups and _can_join(groups[-1][-1], interval):
            groups[-1].append(interval)
        else:
            groups.append([interval])
    return [_join(group) for group in groups]


def _can_join(left: Interval, right: Interval) -> bool:
    if isinstance(left.source, SegmentTable) and isinstance(right.source, SegmentTable):
        return int(left.source.ends[-1]) == left.hi and int(right.source.bases[0]) == right.lo
    return left.source == right.source and not isinstance(left.source, SegmentTable)


def _join(group: list[Interval]) -> Interval:
    if len(group) == 1:
        return group[0]
    sources = (interval.source for interval in group)
    tables = [source for source in sources if isinstance(source, SegmentTable)]
    return Interval(
        group[0].lo,
        group[-1].hi,
        SegmentTable.join(tables) if tables else group[0].source,
        sum(interval.bytes for interval in group),
        min(interval.first_ms for interval in group),
        max(interval.last_ms for interval in group),
    )


def inline_payloads(by_partition: IntervalLists) -> tuple[list[bytes], list[int]]:
    """The payloads of all inline segments in memory, in the order in which `with_inline_moved`
    expects the stored entries, and the number of rows of each payload."""
    payloads: list[bytes] = []
    rows: list[int] = []
    for table in _tables(by_partition):
        payloads += table.batch.column("inline").flatten().to_pylist()
        kept = table.batch.column("entry_rows").filter(of_numpy(table.ledgers == INLINE))
        rows += kept.flatten().to_pylist()
    return payloads, rows


def with_inline_moved(by_partition: IntervalLists, stored: StoredEntries) -> IntervalLists:
    """The intervals, changed so that inline segments refer to the stored entries with their
    payloads."""
    first = stored.first
    moved: IntervalLists = []
    for intervals in by_partition:
        moved.append([])
        for interval in intervals:
            source = interval.source
            if isinstance(source, SegmentTable):
                count = len(source.batch.column("inline").flatten())
                if count:
                    interval = replace(interval, source=_move_inline(source, stored, first))
                first += count
            moved[-1].append(interval)
    assert first == stored.last + 1, "each payload has an entry"
    return moved


def _move_inline(table: SegmentTable, stored: StoredEntries, first: int) -> SegmentTable:
    inline = table.ledgers == INLINE
    counts = as_numpy(table.batch.column("inline").value_lengths())[inline]
    firsts = first + np.cumsum(counts) - counts
    ranges = np.stack([firsts, firsts + counts - 1], axis=1).ravel()
    offsets = np.arange(0, len(ranges) + 1, 2, dtype=np.int32)
    kind = SCHEMA.field("entries").type
    new = pa.ListArray.from_arrays(offsets, of_numpy(ranges)).cast(kind)
    old = table.batch.column("entries").filter(of_numpy(~inline))
    new_order = np.argsort(
        np.argsort(inline, kind="stable"), kind="stable"
    )  # from old + new to the table's rows
    columns = {
        "entries": pa.concat_arrays([old, new]).take(of_numpy(new_order)),
        "ledger": _with_value(table, "ledger", inline, stored.ledger_id),
        "version": _with_value(table, "version", inline, stored.metadata_version),
        "filter_entry": _with_value(table, "filter_entry", inline, NO_ENTRY),
        "inline": of_list([[]] * len(table), SCHEMA.field("inline").type),
    }
    arrays = [columns.get(name, table.batch.column(name)) for name in SCHEMA.names]
    return SegmentTable(pa.RecordBatch.from_arrays(arrays, schema=SCHEMA))


def _with_value(table: SegmentTable, name: str, mask: Any, value: int) -> pa.Array:
    kept = as_numpy(table.batch.column(name))
    return of_numpy(np.where(mask, value, kept).astype(kept.dtype))


# -- chunks ------------------------------------------------------------------------------------


def tail_table(by_partition: IntervalLists) -> SegmentTable:
    """All segments in memory, by partition and interval."""
    batches = [table.batch for table in _tables(by_partition)]
    if not batches:
        return SegmentTable.of(())
    whole = pa.Table.from_batches(batches, SCHEMA).combine_chunks()
    return SegmentTable(whole.to_batches()[0])


def cut_into_chunks(by_partition: IntervalLists, stored_bytes: int) -> list[IntervalLists]:
    """The intervals in memory, divided into the contents of chunks. `stored_bytes` is the size of
    all their segments together once they are stored."""
    total = sum(len(table) for table in _tables(by_partition))
    size = max(1, int(total * CHUNK_BYTES_MAX * 0.8) // max(1, stored_bytes))
    chunks: list[IntervalLists] = []
    segments_left = 0
    for p, intervals in enumerate(by_partition):
        for interval in intervals:
            if not isinstance(interval.source, SegmentTable):
                continue
            at = 0
            while at < len(interval.source):
                if segments_left == 0 or (chunks and _overlaps(chunks[-1][p], interval)):
                    chunks.append([[] for _ in by_partition])
                    segments_left = size
                piece = _piece(interval, at, min(at + segments_left, len(interval.source)))
                chunks[-1][p].append(piece)
                count = len(_table(piece))
                at, segments_left = at + count, segments_left - count
    return chunks


def with_chunk(
    by_partition: IntervalLists, chunk: IntervalLists, stored: TableChunk
) -> IntervalLists:
    """The intervals, changed so that those in `chunk` have the stored chunk as their source."""
    changed: IntervalLists = []
    for before, chunk_intervals in zip(by_partition, chunk, strict=True):
        intervals = Intervals(list(before))
        for group in _runs(chunk_intervals):
            joined = _join([replace(interval, source=stored) for interval in group])
            intervals = intervals.with_replaced(replace(joined, source=stored))
        changed.append(list(intervals))
    return changed


def rows_of(by_partition: IntervalLists) -> int:
    """How many rows the intervals hold."""
    return sum(interval.hi - interval.lo for intervals in by_partition for interval in intervals)


def _runs(intervals: Sequence[Interval]) -> Iterator[list[Interval]]:
    """The intervals in groups, each without a gap between its intervals."""
    group: list[Interval] = []
    for interval in intervals:
        if group and group[-1].hi != interval.lo:
            yield group
            group = []
        group.append(interval)
    if group:
        yield group


def _overlaps(intervals: list[Interval], interval: Interval) -> bool:
    return bool(intervals) and int(_table(intervals[-1]).ends[-1]) > int(_table(interval).bases[0])


def _piece(interval: Interval, start: int, end: int) -> Interval:
    """The interval of the segments [start, end) of `interval`."""
    table = _table(interval).part(start, end)
    if len(table) == len(_table(interval)):
        return interval
    lo, hi = max(interval.lo, int(table.bases[0])), min(interval.hi, int(table.ends[-1]))
    times = table.commits_ms
    size = Stretch(lo, hi, table).bytes()
    return Interval(lo, hi, table, size, int(times.min()), int(times.max()))


def _table(interval: Interval) -> SegmentTable:
    assert isinstance(interval.source, SegmentTable)
    return interval.source


def _tables(by_partition: IntervalLists) -> Iterator[SegmentTable]:
    for intervals in by_partition:
        for interval in intervals:
            if isinstance(interval.source, SegmentTable):
                yield interval.source


# -- the root ----------------------------------------------------------------------------------


def chunk_ledgers(state: TopicState) -> list[int]:
    """The ledgers that hold the state's chunks, ascending."""
    sources = (
        interval.source for partition in state.partitions for interval in partition.intervals
    )
    return sorted(
        {source.pointer.ledger_id for source in sources if isinstance(source, TableChunk)}
    )


def checkpoint_state(
    state: TopicState,
    by_partition: IntervalLists,
    *,
    trimmed: int,
    unnamed_ledgers: Iterable[int],
    deleted_ledgers: Iterable[int],
) -> TopicState:
    """The state that a checkpoint stores, with these intervals. From now on these ledgers count as
    dropped: ledgers that hold only bodies of commits below `trimmed`, and ledgers of
    `unnamed_ledgers` (which the newest checkpoint does not name) without a chunk. The state forgets
    the ledgers in `deleted_ledgers`."""
    partitions = zip(state.partitions, by_partition, strict=True)
    changed = replace(
        state,
        partitions=tuple(
            replace(p, intervals=Intervals(list(intervals))) for p, intervals in partitions
        ),
        bodies={ledger: last for ledger, last in state.bodies.items() if last >= trimmed},
    )
    needed = {*chunk_ledgers(changed), *changed.bodies}
    unneeded = [ledger for ledger in (*state.bodies, *unnamed_ledgers) if ledger not in needed]
    dropped = {**state.dropped, **dict.fromkeys(unneeded, state.commit_ms)}
    for ledger in deleted_ledgers:
        dropped.pop(ledger, None)
    return replace(changed, dropped=dropped)


def encode_root(root: Root) -> bytes:
    """The root's bytes, compressed. The state's head version is not in the bytes."""
    state = root.state
    by_partition = [list(partition.intervals) for partition in state.partitions]
    chunks = {chunk: n for n, chunk in enumerate(state.chunks())}
    partition_columns = {
        name: [getattr(p, name) for p in state.partitions] for name in _PARTITION_FIELDS
    }
    chunk_columns = {
        name: [getattr(chunk.pointer, name) for chunk in chunks] for name in _POINTER_FIELDS
    }
    chunk_columns |= {
        name: [getattr(chunk, name) for chunk in chunks] for name in ("segments", "rows")
    }
    streams = [
        _encode_columns(partition_columns),
        _encode_columns(_interval_columns(by_partition, chunks)),
        _encode_columns(chunk_columns),
        tail_table(by_partition).encode(),
    ]
    plain = {
        "min_reader": min(state.min_writer, READER_VERSION),  # both versions rise together
        **{name: getattr(state, name) for name in SCALAR_FIELDS},
        "dropped": {str(ledger): ms for ledger, ms in state.dropped.items()},
        "bodies": {str(ledger): last for ledger, last in state.bodies.items()},
        "across": [
            [last.commit_id, last.number, list(last.others)] for last in state.shared_commits
        ],
        "last_of_app": list(state.last_of_app),
        "live": [
            _live_to_json(partition.live)
            for partition in state.partitions
            if partition.live is not None
        ],
        "before": list(root.earlier_ledgers),
        "streams": [len(stream) for stream in streams],
    }
    live_tokens = {str(p.number): p.live.token for p in state.partitions if p.live is not None}
    plain["tokens"] = {
        "live": {number: token for number, token in live_tokens.items() if token},
        "end": {str(p.number): p.end_token for p in state.partitions if p.end_token},
    }
    producers = {str(p.number): dict(p.producers) for p in state.partitions if p.producers}
    if producers:
        plain["producers"] = producers
    rowless = {str(p.number): [list(run) for run in p.rowless] for p in state.partitions}
    if any(rowless.values()):
        plain["rowless"] = {number: runs for number, runs in rowless.items() if runs}
    head = json.dumps(plain, separators=(",", ":")).encode()
    return pack(b"".join([MAGIC, len(head).to_bytes(4, "little"), head, *streams]))


def _live_to_json(live: LiveSegment) -> dict[str, Any]:
    plain = asdict(live)
    del plain["token"]  # older software refuses a field that it does not know
    later = ("deduplicated", "first_entry", "rows_before", "bytes_before")
    return {name: value for name, value in plain.items() if value or name not in later}


def decode_root(value: bytes) -> Root:
    """The root that `encode_root` encoded; the state has head version 0. Raises
    errors.UnsupportedFormat."""
    raw = memoryview(unpack(value))
    if bytes(raw[:4]) != MAGIC:
        raise errors.UnsupportedFormat(
            f"not a checkpoint's root: it begins with {bytes(raw[:4])!r}"
        )
    try:
        end = 8 + int.from_bytes(raw[4:8], "little")
        plain = json.loads(bytes(raw[8:end]))
        if int(plain["min_reader"]) > READER_VERSION:
            raise errors.UnsupportedFormat(
                f"a checkpoint's root needs reader version {plain['min_reader']}, this is version"
                f" {READER_VERSION}"
            )
        streams = []
        for size in plain["streams"]:
            streams.append(raw[end : end + size])
            end += size
        if end != len(raw) or len(streams) != 4:
            raise errors.UnsupportedFormat(f"a checkpoint's root of {len(raw)} bytes, not {end}")
        return Root(_decode_state(plain, streams), tuple(plain["before"]))
    except (*errors.MALFORMED, pa.ArrowException) as error:
        raise errors.UnsupportedFormat(f"not a checkpoint's root: {error!r}") from error


def _decode_state(plain: dict[str, Any], streams: Sequence[memoryview]) -> TopicState:
    partitions, intervals, chunks = (_decode_columns(stream) for stream in streams[:3])
    pointers = zip(*(chunks[name] for name in _POINTER_FIELDS), strict=True)
    sizes = zip(chunks["segments"], chunks["rows"], strict=True)
    stored = [TableChunk(BlobPointer(*at), *size) for at, size in zip(pointers, sizes, strict=True)]
    tail = SegmentTable.decode(bytes(streams[3]))
    by_partition: IntervalLists = [[] for _ in partitions["start_offset"]]
    for row in zip(*intervals.values(), strict=True):
        p, source, first, count, lo, hi, *rest = row
        by_partition[p].append(Interval(lo, hi, _source(source, stored, tail, first, count), *rest))
    tokens = plain.get("tokens", {"live": {}, "end": {}})
    live = {
        fields["partition"]: LiveSegment(
            **fields, token=int(tokens["live"].get(str(fields["partition"]), NO_TOKEN))
        )
        for fields in plain["live"]
    }
    producers, rowless = plain.get("producers", {}), plain.get("rowless", {})
    partition_states = tuple(
        PartitionState(
            *(p, start, end, Intervals(by_partition[p]), live.get(p), rearranged),
            producers=producers.get(str(p), {}),
            rowless=tuple(Rowless(*run) for run in rowless.get(str(p), ())),
            end_token=int(tokens["end"].get(str(p), NO_TOKEN)),
        )
        for p, (start, end, rearranged) in enumerate(
            zip(*(partitions[name] for name in _PARTITION_FIELDS), strict=True)
        )
    )
    app_id, number = plain["last_of_app"]
    return TopicState(
        partitions=partition_states,
        dropped={int(ledger): ms for ledger, ms in plain["dropped"].items()},
        bodies={int(ledger): last for ledger, last in plain["bodies"].items()},
        shared_commits=tuple(
            SharedCommit(id_, at, tuple(others)) for id_, at, others in plain["across"]
        ),
        last_of_app=(app_id, number),
        **{name: plain[name] for name in SCALAR_FIELDS},
    )


def _source(
    source: int, chunks: Sequence[TableChunk], tail: SegmentTable, first: int, count: int
) -> Source:
    if source == _HOLE_SOURCE:
        return None
    return tail.part(first, first + count) if source == _TAIL_SOURCE else chunks[source]


def _interval_columns(
    by_partition: IntervalLists, chunks: dict[TableChunk, int]
) -> dict[str, list[int]]:
    names = ("partition", "source", "first", "count", *_INTERVAL_FIELDS)
    columns: dict[str, list[int]] = {name: [] for name in names}
    first = 0
    for p, intervals in enumerate(by_partition):
        for interval in intervals:
            count = len(interval.source) if isinstance(interval.source, SegmentTable) else 0
            source = _TAIL_SOURCE if count else _HOLE_SOURCE
            if isinstance(interval.source, TableChunk):
                source = chunks[interval.source]
            row = (p, source, first, count, *(getattr(interval, name) for name in _INTERVAL_FIELDS))
            for name, value in zip(names, row, strict=True):
                columns[name].append(value)
            first += count
    return columns


def _encode_columns(columns: dict[str, list[int]]) -> bytes:
    """An Arrow IPC stream of 64-bit columns."""
    batch = pa.record_batch({name: of_list(values, pa.int64()) for name, values in columns.items()})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    return bytes(sink.getvalue())


def _decode_columns(stream: memoryview) -> dict[str, list[int]]:
    _, batch = read_batch(stream)
    if batch is None or any(kind != pa.int64() for kind in batch.schema.types):
        raise errors.BadEntry("a table in a checkpoint's root has columns that are not numbers")
    return {name: as_numpy(batch.column(name)).tolist() for name in batch.schema.names}


# -- the record: the checkpoint that counts, and where the log begins ------------------------------
#
# At /topic-ids/<id>/checkpoint. Always true: `trimmed` <= `previous` < `next`; `next` and `trimmed`
# only rise; the log has the commits from `trimmed` on, and no earlier commit. A root of 64 KiB at
# most is in the record itself, a larger root is a blob. The record also names the root of the
# previous checkpoint as long as the log has all commits after that root, so the topic survives if
# the newest root cannot be read.

ROOT_INLINE_BYTES_MAX = 64 * 1024
StoredRoot = bytes | BlobPointer
"""An encoded root, or the pointer of its blob."""


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """`next` is the number of the first commit that the root does not have. `previous` is the
    `next` of the previous checkpoint (0: there was no checkpoint). `previous_root` is the previous
    checkpoint's root; None if there was no checkpoint, or if `root` is in this record, so that it
    cannot be lost alone. `intent` is the id of the intent that made the checkpoint."""

    next: int
    root: StoredRoot
    previous: int = 0
    previous_root: StoredRoot | None = None
    trimmed: int = 0
    intent: str = ""

    def root_ledgers(self) -> list[int]:
        """The ledgers that hold the roots."""
        roots = (self.root, self.previous_root)
        return [root.ledger_id for root in roots if isinstance(root, BlobPointer)]


def next_record(
    before: CheckpointRecord | None, next_: int, root: StoredRoot, intent: str
) -> CheckpointRecord:
    """The record that replaces `before`. ValueError if `next_` does not rise (hazard 6)."""
    if before is None:
        return CheckpointRecord(next_, root, intent=intent)
    if next_ <= before.next:
        raise ValueError(
            f"a checkpoint up to commit {next_} does not follow a checkpoint to {before.next}"
        )
    previous_root = before.root if isinstance(root, BlobPointer) else None
    return CheckpointRecord(next_, root, before.next, previous_root, before.trimmed, intent)


def encode_record(record: CheckpointRecord) -> bytes:
    return records.dump(
        {
            "next": record.next,
            "previous": record.previous,
            "trimmed": record.trimmed,
            "intent": record.intent,
            "root": _root_json(record.root),
            "previous_root": _root_json(record.previous_root),
        }
    )


def decode_record(value: bytes) -> CheckpointRecord:
    """Raises errors.UnsupportedFormat."""

    def build(plain: dict[str, Any]) -> CheckpointRecord:
        before = plain["previous_root"]
        return CheckpointRecord(
            next=int(plain["next"]),
            root=_root_from_json(plain["root"]),
            previous=int(plain["previous"]),
            previous_root=None if before is None else _root_from_json(before),
            trimmed=int(plain["trimmed"]),
            intent=plain["intent"],
        )

    return records.load(value, "checkpoint", build)


def _root_json(root: StoredRoot | None) -> dict[str, Any] | None:
    if root is None:
        return None
    if isinstance(root, BlobPointer):
        return asdict(root)
    return {"inline": b64encode(root).decode(), "crc": payload_crc([root])}


def _root_from_json(plain: Mapping[str, Any]) -> StoredRoot:
    if "inline" not in plain:
        return pointer_from_json(plain)
    root = b64decode(plain["inline"], validate=True)
    if payload_crc([root]) != plain["crc"]:
        raise ValueError("the root's checksum differs from the checksum in the record")
    return root
