"""`spark-ledger subscription list|create|seek|delete|lag`."""

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from spark_ledger.cli.common import (
    App,
    JsonOption,
    UrlOption,
    answer,
    by_partition,
    print_json,
    print_table,
    target_of,
    tell_unreadable,
    with_topics,
)
from spark_ledger.errors import LedgerError

if TYPE_CHECKING:
    from spark_ledger.topic.client import TopicClient
    from spark_ledger.topic.subscription.lag import PartitionLag
    from spark_ledger.topic.subscription.subscriptions import SubscriptionInfo, Subscriptions

T = TypeVar("T")

app = App(help="Subscriptions: the positions of readers of a topic.", no_args_is_help=True)
Topic = Annotated[str, typer.Argument(help="The topic.")]
Name = Annotated[str, typer.Argument(help="The subscription.")]
To = Annotated[
    str | None, typer.Option("--to", help="earliest, latest, or a time: ISO 8601 or ms.")
]
ToOffset = Annotated[
    list[str] | None, typer.Option(help="PARTITION=OFFSET. Repeat it for each partition.")
]
Force = Annotated[bool, typer.Option("--force", help="Also one that a query is using.")]


@app.command("list")
def list_subscriptions(
    topic: Topic, json: JsonOption = False, service_url: UrlOption = None
) -> None:
    """Every subscription of a topic, and its position."""
    unreadable: dict[str, LedgerError] = {}

    def listed(every: "Subscriptions", topic_id: str) -> "Awaitable[list[SubscriptionInfo]]":
        return every.list(topic_id, exact=True, unreadable=unreadable)

    subscriptions = _done(service_url, topic, listed)
    if json:
        print_json([_plain(info) for info in subscriptions])
        tell_unreadable("subscription", unreadable)
        return
    columns = ("SUBSCRIPTION", "KIND", "IN USE", "QUERY", "OFFSETS")
    rows = [
        (
            info.name,
            info.kind.value,
            "yes" if info.live else "no",
            info.query_id,
            _offsets(info.positions),
        )
        for info in subscriptions
    ]
    print_table(columns, rows, "no subscriptions")
    tell_unreadable("subscription", unreadable)


@app.command()
def create(
    topic: Topic,
    name: Name,
    to: To = None,
    to_offset: ToOffset = None,
    json: JsonOption = False,
    service_url: UrlOption = None,
) -> None:
    """Make a subscription (at the latest row, unless --to or --to-offset is given): it keeps all
    rows from there on."""
    target = target_of(to if to or to_offset else "latest", to_offset or [])
    at = _done(service_url, topic, lambda all_, id_: all_.create(id_, name, target))
    _print_positions(topic, name, at, json)


@app.command()
def seek(
    topic: Topic,
    name: Name,
    to: To = None,
    to_offset: ToOffset = None,
    force: Force = False,
    json: JsonOption = False,
    service_url: UrlOption = None,
) -> None:
    """Move a subscription to another position. `--to here --force` leaves its position, and takes
    it from the query or the consumers that use it."""
    target = {} if to == "here" and not to_offset else target_of(to, to_offset or [])
    at = _done(service_url, topic, lambda all_, id_: all_.seek(id_, name, target, force=force))
    _print_positions(topic, name, at, json)


@app.command()
def delete(
    topic: Topic,
    name: Name,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    force: Force = False,
    json: JsonOption = False,
    service_url: UrlOption = None,
) -> None:
    """Delete a subscription: it no longer keeps rows."""
    if not yes:
        typer.confirm(f"Delete subscription {name} of topic {topic}?", abort=True)
    _done(service_url, topic, lambda all_, id_: all_.delete(id_, name, force=force))
    answer(
        json,
        {"topic": topic, "subscription": name},
        f"subscription {name} of topic {topic} deleted",
    )


@app.command()
def lag(topic: Topic, name: Name, json: JsonOption = False, service_url: UrlOption = None) -> None:
    """How far a subscription is behind the end of its topic."""

    async def work(every: "Subscriptions", topic_id: str) -> "dict[int, PartitionLag]":
        from spark_ledger.metadata.store_calls import store_now_ms

        return await every.lag(topic_id, name, await store_now_ms(every.store))

    lags = _done(service_url, topic, work)
    rows = [(p, of.position, of.end, of.rows, of.bytes, of.millis) for p, of in lags.items()]
    if json:
        names = ("partition", "position", "end", "rows", "bytes", "millis")
        print_json([dict(zip(names, row, strict=True)) for row in rows])
        return
    columns = ("PARTITION", "POSITION", "END", "ROWS BEHIND", "BYTES", "MS")
    print_table(columns, rows, "no partitions")


def _done(
    service_url: str | None, topic: str, work: "Callable[[Subscriptions, str], Awaitable[T]]"
) -> T:
    """The result of `work` on the subscriptions of a topic; `work` gets the topic's id."""

    async def opened(client: "TopicClient") -> T:
        return await work(client.subscriptions, (await client.topics.open(topic)).id)

    return with_topics(service_url, opened)


def _print_positions(topic: str, name: str, positions: Mapping[int, int], json: bool) -> None:
    plain = {"topic": topic, "subscription": name, "offsets": by_partition(positions)}
    answer(json, plain, f"subscription {name} of topic {topic} is at {_offsets(positions)}")


def _plain(info: "SubscriptionInfo") -> dict[str, object]:
    return {
        "subscription": info.name,
        "kind": info.kind.value,
        "in_use": info.live,
        "query_id": info.query_id,
        "run_id": info.run_id,
        "created_ms": info.created_ms,
        "ledger": info.ledger_id,
        "offsets": by_partition(info.positions),
    }


def _offsets(positions: Mapping[int, int]) -> str:
    return ", ".join(f"{p}={offset}" for p, offset in sorted(positions.items()))
