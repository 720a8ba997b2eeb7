"""Rows on a terminal: `spark-ledger produce`, `consume`, and the rows that `topic tail` and
`subscription peek` print.

Always true: a row is printed once; rows of a partition are printed in their order. `consume` moves
its subscription past a row after the row is printed. So after a crash a row may be printed again,
and no row is missed.
"""

import asyncio
import os
import random
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing
from itertools import islice
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from spark_ledger.async_tasks import woken
from spark_ledger.cli.common import (
    JsonOption,
    UrlOption,
    answer,
    in_json,
    print_json,
    readable,
    with_topics,
)
from spark_ledger.errors import BadConfig

if TYPE_CHECKING:
    from spark_ledger.topic.client import TopicClient
    from spark_ledger.topic.read.row_blocks import Block
    from spark_ledger.topic.subscription.cursor import Cursor

LIVE_LOOK_S = 0.5
"""The time between two looks at the ends of live segments."""
LINES_AT_ONCE = 10_000
LINE_BYTES_MAX = 1 << 20
APP_ID = "spark-ledger-produce"

Start = Callable[[int, int], int]
"""Gets the first offset of a partition and its end; returns the offset at which to begin."""


class ShownRow(NamedTuple):
    """A row to print. The `value` of a typed row has its columns by name."""

    partition: int
    offset: int
    written_ms: int
    key: bytes | None
    value: bytes | dict[str, object] | None


# -- rows of a topic -------------------------------------------------------------------------------


async def rows_from(
    client: "TopicClient", name: str, start: Start | Mapping[int, int], *, follow: bool
) -> AsyncIterator[ShownRow]:
    """The rows of each partition from `start` on: rows of commits, and confirmed rows of live
    segments. The rows end at the present end, or, with `follow`, never."""
    from spark_ledger.topic.read.live import LiveEnds, live_task
    from spark_ledger.topic.read.plan import plan_read
    from spark_ledger.topic.task_reader import read_blocks

    info = await client.topics.open(name)
    log = client.log(info.id)
    change = asyncio.Event()
    state = await log.fold(fresh=True, watch=change.set)
    live_ends = LiveEnds(client.ledgers)
    starts: dict[int, int] | None = None
    while True:
        live = [partition.live for partition in state.partitions if partition.live is not None]
        await live_ends.refresh(live)
        confirmed = {segment.partition: live_ends.end_of(segment) for segment in live}
        ends = state.end_offsets()
        live_rows = {p: live_end.rows for p, live_end in confirmed.items()}
        row_ends = {p: end + live_rows.get(p, 0) for p, end in ends.items()}
        if starts is None:
            starts = _starts_of(state.start_offsets(), row_ends, start)
        at = {p: starts.get(p, 0) for p in ends}
        ranges = {p: (min(at[p], end), end) for p, end in ends.items()}
        tables = await client.tables(state, ranges)  # segments that are in chunks
        tasks = plan_read(state, ranges, topic=info.name.full, read=tables)
        topic = info.name.full
        live_tasks = (live_task(topic, state, p, at[p], end) for p, end in confirmed.items())
        for task in (*tasks, *(task for task in live_tasks if task is not None)):
            async for block in read_blocks(client, task):
                for row in rows_of(block):
                    yield row
        if not follow:
            return
        starts = {p: max(at[p], end) for p, end in row_ends.items()}
        await woken(change, LIVE_LOOK_S if live else None)  # sooner if a commit comes
        if change.is_set():
            change.clear()
            state = await log.fold(watch=change.set)


def _starts_of(
    firsts: Mapping[int, int], ends: Mapping[int, int], start: Start | Mapping[int, int]
) -> dict[int, int]:
    if isinstance(start, Mapping):
        return {p: max(first, start.get(p, first)) for p, first in firsts.items()}
    return {p: start(first, ends[p]) for p, first in firsts.items()}


def rows_of(block: "Block") -> Iterator[ShownRow]:
    keys, values = _keys_and_values(block)
    places = block.row_values("partition"), block.row_numbers("offset"), block.row_times_ms()
    columns = (column.tolist() for column in places)
    for partition, offset, written_ms, key, value in zip(*columns, keys, values, strict=True):
        yield ShownRow(partition, offset, written_ms, key, value)


def print_row(row: ShownRow, json: bool) -> None:
    if not json:
        text = in_json(row.value) if isinstance(row.value, dict) else readable(row.value)
        print(f"{row.partition}\t{row.offset}\t{readable(row.key)}\t{text}", flush=True)
        return
    facts: dict[str, object] = {
        "partition": row.partition,
        "offset": row.offset,
        "timestamp_ms": row.written_ms,
    }
    facts["key"] = None if row.key is None else readable(row.key)
    facts["value"] = readable(row.value) if isinstance(row.value, bytes) else row.value
    print_json(facts)
    sys.stdout.flush()


def _keys_and_values(
    block: "Block",
) -> tuple[list[bytes | None], list[bytes | None] | list[dict[str, object]]]:
    """The keys and values to show. The value of a typed row is its payload: its columns without
    those of TYPED_NAMES (key, event time, headers)."""
    from spark_ledger.topic.entry.message_batch import KEY, TYPED_NAMES, VALUE, column_of

    batch = block.record_batch
    if not block.typed:
        return column_of(batch, KEY).to_pylist(), column_of(batch, VALUE).to_pylist()
    payload = [name for name in batch.schema.names if name not in TYPED_NAMES.values()]
    return column_of(batch, TYPED_NAMES[KEY]).to_pylist(), batch.select(payload).to_pylist()


# -- produce ---------------------------------------------------------------------------------------


def produce(
    topic: Annotated[str, typer.Argument(help="The topic, which must exist.")],
    lines: Annotated[
        list[str] | None, typer.Argument(help="The values; else the lines of standard input.")
    ] = None,
    key: Annotated[str | None, typer.Option(help="The key of all rows.")] = None,
    json: JsonOption = False,
    service_url: UrlOption = None,
) -> None:
    """Write lines of text as rows, for a quick try. Each 10,000 lines are one commit; at a terminal
    each line is one. Programs write with Spark, or with Pulsar's clients."""

    async def work(client: "TopicClient") -> int:
        await client.topics.open(topic)
        count = 0
        for group in _lines_of_commits(lines):
            await _commit_lines(client, topic, group, key)
            count += len(group)
        return count

    count = with_topics(service_url, work)
    answer(json, {"topic": topic, "rows": count}, f"{count} rows were written to topic {topic}")


def _lines_of_commits(lines: list[str] | None) -> Iterator[list[bytes]]:
    """The lines in groups; each group becomes one commit. Raises errors.BadConfig."""
    if lines:
        yield [_checked_line(line.encode()) for line in lines]
        return
    source = iter(sys.stdin.buffer.readline, b"")
    at_once = 1 if sys.stdin.isatty() else LINES_AT_ONCE
    while group := [_checked_line(line.rstrip(b"\r\n")) for line in islice(source, at_once)]:
        yield group


def _checked_line(line: bytes) -> bytes:
    if len(line) > LINE_BYTES_MAX:
        raise BadConfig(
            f"a line of {len(line)} bytes is too long", f"Give {LINE_BYTES_MAX} bytes at most."
        )
    return line


async def _commit_lines(
    client: "TopicClient", topic: str, lines: list[bytes], key: str | None
) -> None:
    import pyarrow as pa

    from spark_ledger.topic.commit.draft import TxnKey
    from spark_ledger.topic.write import DEFAULT_SETTINGS, TaskResult, inline_segments

    info = await client.topics.open(topic)
    partitions = len((await client.log(info.id).fold()).partitions)
    run = uuid.UUID(bytes=os.urandom(16)).hex
    target = info.name.full
    intent = await client.intents.open_batch_intent(f"{APP_ID}-{run}", run, target, random=True)
    sender = client.sender(info, intent)
    try:
        encoder = client.encoder(info, random.randrange(partitions), partitions)
        values = pa.array(lines, pa.binary())
        keys = None if key is None else pa.array([key.encode()] * len(lines), pa.binary())
        for entry in encoder.add(keys, values):
            await sender.send(entry)
        small = encoder.flush_small(DEFAULT_SETTINGS.inline_bytes_max)  # None: use a ledger
        for entry in encoder.flush() if small is None else ():
            await sender.send(entry)
        segments = await sender.finish() if small is None else inline_segments(small)
        creators = dict(sender.creators)  # by ledger id, the token of its creator
        task, attempt = 0, 0
        result = TaskResult(info.id, intent.id, task, attempt, segments, creators)
        txn = TxnKey(intent.app_id, target, 0, run)
        await client.commit_topics({info.id: [result]}, txn, intent.id, finish_intent=True)
    except BaseException:
        await client.intents.try_finish(intent)
        raise


# -- consume ---------------------------------------------------------------------------------------


def consume(
    topic: Annotated[str, typer.Argument(help="The topic.")],
    subscription: Annotated[str, typer.Option("--subscription", "-s", help="The subscription.")],
    count: Annotated[int, typer.Option(help="End after this number of rows; 0: never.", min=0)] = 0,
    follow: Annotated[bool, typer.Option(help="Wait for more rows, until Ctrl-C.")] = True,
    earliest: Annotated[
        bool, typer.Option("--earliest", help="A new subscription begins at the first row.")
    ] = False,
    json: JsonOption = False,
    service_url: UrlOption = None,
) -> None:
    """Print rows (partition, offset, key, value) and move a subscription past them, for a quick
    try. No query or client can use the subscription meanwhile. Programs read with Spark, or with
    Pulsar's clients."""

    async def work(client: "TopicClient") -> None:
        from spark_ledger.topic.subscription.seek_target import End

        info = await client.topics.open(topic)
        run = uuid.UUID(bytes=os.urandom(16)).hex
        start = End.EARLIEST if earliest else End.LATEST
        query = f"spark-ledger consume {run[:8]}"
        cursor = await client.subscriptions.open(info, subscription, query, run, start=start)
        try:
            await _consume(client, topic, cursor, count, follow, json)
        finally:
            await cursor.release()

    with_topics(service_url, work)


async def _consume(
    client: "TopicClient", topic: str, cursor: "Cursor", count: int, follow: bool, json: bool
) -> None:
    from spark_ledger.topic.subscription.acked_now import acked_now

    printed = 0
    info = await client.topics.open(topic)
    now = await acked_now(client.ledgers, info.id, cursor.name)
    recovered = await cursor.recovered()
    positions = {p: max(at, now.positions.get(p, at)) for p, at in recovered.items()}
    async with aclosing(rows_from(client, topic, positions, follow=follow)) as rows:  # type: ignore[type-var]
        async for row in rows:
            cursor.check()  # raises if the subscription was taken over or deleted
            if row.offset in now.acked.get(row.partition, ()):
                continue
            print_row(row, json)
            cursor.advance({row.partition: row.offset + 1})
            printed += 1
            if printed == count:
                return
