"""`spark-ledger topic create|list|describe|delete|tail|clean`."""

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Annotated

import typer

from spark_ledger.cli.common import (
    App,
    JsonOption,
    UrlOption,
    print_facts,
    print_json,
    print_table,
    readable,
    with_topics,
)

if TYPE_CHECKING:
    from spark_ledger.topic.client import TopicClient
    from spark_ledger.topic.janitor import CleanReport
    from spark_ledger.topic.segment_table import Stretch
    from spark_ledger.topic.slice_reader import Rows
    from spark_ledger.topic.state import PartitionState, Tables, TopicState
    from spark_ledger.topic.topics import TopicInfo

app = App(help="Topics: partitioned logs of rows.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(help="name, or persistent://tenant/namespace/name")]


@app.command()
def create(
    name: Name,
    partitions: Annotated[int, typer.Option(help="How many; they can only grow.", min=1)] = 1,
    json: JsonOption = False,
    service_url: UrlOption = None,
) -> None:
    """Make a topic."""

    async def work(client: "TopicClient") -> "TopicInfo":
        return await client.topics.create(name, partitions)

    info = with_topics(service_url, work)
    if json:
        print_json(_plain(info))
    else:
        print(f"topic {info.name.short} made, {info.partitions} partition(s), id {info.id}")


@app.command("list")
def list_topics(json: JsonOption = False, service_url: UrlOption = None) -> None:
    """Every topic."""

    async def work(client: "TopicClient") -> "list[TopicInfo]":
        return await client.topics.list()

    found = with_topics(service_url, work)
    if json:
        print_json([_plain(info) for info in found])
        return
    rows = [(info.name.short, info.partitions, info.id) for info in found]
    print_table(("TOPIC", "PARTITIONS", "ID"), rows, "no topics")


@app.command()
def describe(name: Name, json: JsonOption = False, service_url: UrlOption = None) -> None:
    """A topic's partitions: offsets, segments, bytes."""

    async def work(client: "TopicClient") -> "tuple[TopicInfo, TopicState, Tables]":
        info = await client.topics.open(name)
        state = await client.log(info.id).fold(fresh=True)
        return info, state, await client.chunks.load(state.chunks())

    info, state, read = with_topics(service_url, work)
    partitions = [
        {
            "partition": number,
            "start_offset": partition.start_offset,
            "end_offset": partition.end_offset,
            "segments": sum(len(part.table) for part in _stretches(partition, read)),
            "bytes": partition.bytes_between(partition.start_offset, partition.end_offset),
        }
        for number, partition in enumerate(state.partitions)
    ]
    if json:
        facts = {"commits": state.next, "ledgers": state.ledgers(read), "offsets": partitions}
        print_json({**_plain(info), **facts})
        return
    print_facts(
        {
            "topic": info.name.full,
            "id": info.id,
            "commits": state.next,
            "ledgers": len(state.ledgers(read)),
            "rows": sum(p.end_offset - p.start_offset for p in state.partitions),
        }
    )
    print()
    columns = ("PARTITION", "START", "END", "SEGMENTS", "BYTES")
    print_table(columns, [tuple(row.values()) for row in partitions], "no partitions")


@app.command()
def delete(
    name: Name,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    json: JsonOption = False,
    service_url: UrlOption = None,
) -> None:
    """Delete a topic: nobody can read it or write to it any more."""
    if not yes:
        typer.confirm(f"Delete topic {name} and all its rows?", abort=True)

    async def work(client: "TopicClient") -> "TopicInfo":
        return await client.topics.delete(name)

    info = with_topics(service_url, work)
    if json:
        print_json(_plain(info))
    else:
        print(f"topic {info.name.short} deleted, id {info.id}")


@app.command()
def tail(
    name: Name,
    rows: Annotated[int, typer.Option(help="Rows of each partition to begin with.", min=0)] = 10,
    follow: Annotated[bool, typer.Option(help="Wait for more, until Ctrl-C.")] = True,
    json: JsonOption = False,
    service_url: UrlOption = None,
) -> None:
    """The last rows of a topic, then every new one: partition, offset, key, value."""

    async def work(client: "TopicClient") -> None:
        async for part in _tail(client, name, rows, follow):
            _print_rows(part, json)

    with_topics(service_url, work)


@app.command()
def clean(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Even more than a tenth.")] = False,
    json: JsonOption = False,
    service_url: UrlOption = None,
) -> None:
    """Delete ledgers that writers left behind and no topic refers to."""
    from spark_ledger.topic.janitor import Janitor

    async def work(client: "TopicClient") -> "CleanReport":
        import random

        janitor = Janitor(client.store, client.ledgers, random.Random())
        return await janitor.clean(dry_run=dry_run, force=force)

    report = with_topics(service_url, work)
    facts: dict[str, object] = {
        "dry_run": report.dry_run,
        "condemned": list(report.condemned),
        "closed": list(report.closed),
        "deleted": list(report.deleted),
        "kept": list(report.kept),
        "refused": report.refused,
    }
    if json:
        print_json(facts)
        return
    did = "would be " if report.dry_run else ""
    print(
        f"{len(report.condemned)} abandoned writer(s) {did}ended, {len(report.closed)} ledger(s) "
        f"{did}closed, {len(report.deleted)} {did}deleted, {len(report.kept)} kept"
    )
    if report.refused:
        print(report.refused)


def _stretches(partition: "PartitionState", read: "Tables") -> "list[Stretch]":
    return partition.stretches(partition.start_offset, partition.end_offset, read)


async def _tail(client: "TopicClient", name: str, rows: int, follow: bool) -> AsyncIterator["Rows"]:
    """The last `rows` of each partition and, following, what is committed after them."""
    from spark_ledger.topic.read_plan import plan_read

    info = await client.topics.open(name)
    log = client.log(info.id)
    changed = asyncio.Event()
    state = await log.fold(fresh=True, watch=changed.set)
    starts = {
        number: max(partition.start_offset, partition.end_offset - rows)
        for number, partition in enumerate(state.partitions)
    }
    while True:
        ends = state.end_offsets()
        ranges = {number: (starts.get(number, 0), end) for number, end in ends.items()}
        read = await client.tables(state, ranges)
        for task in plan_read(state, ranges, topic=info.name.full, read=read):
            async for part in client.read(task):
                yield part
        if not follow:
            return
        starts = ends
        await changed.wait()
        changed.clear()
        state = await log.fold(watch=changed.set)


def _print_rows(part: "Rows", json: bool) -> None:
    from spark_ledger.topic.message_batch import KEY, VALUE, column_of

    columns = (column_of(part.record_batch, KEY), column_of(part.record_batch, VALUE))
    pairs = zip(*(column.to_pylist() for column in columns), strict=True)
    for offset, (key, value) in enumerate(pairs, part.offset):
        if json:
            print_json(
                {
                    "partition": part.partition,
                    "offset": offset,
                    "timestamp_ms": part.written_ms,
                    "key": None if key is None else readable(key),
                    "value": None if value is None else readable(value),
                }
            )
        else:
            print(f"{part.partition}\t{offset}\t{readable(key)}\t{readable(value)}", flush=True)


def _plain(info: "TopicInfo") -> dict[str, object]:
    return {"topic": info.name.full, "id": info.id, "partitions": info.partitions}
