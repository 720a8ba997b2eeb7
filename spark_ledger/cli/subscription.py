"""`spark-ledger subscription list|create|seek|delete|lag`, `skip|clear|expire|reset`, which move a
subscription while consumers use it, and `peek`, which shows the next rows."""

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

import typer

from spark_ledger import units
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
from spark_ledger.cli.rows import print_row, rows_from
from spark_ledger.cli.stats import counts_of, stats_by_partition, stats_of, type_of
from spark_ledger.errors import BadConfig, LedgerError

if TYPE_CHECKING:
    from spark_ledger.topic.client import TopicClient
    from spark_ledger.topic.subscription.lag import PartitionLag
    from spark_ledger.topic.subscription.listing import SubscriptionInfo
    from spark_ledger.topic.subscription.subscriptions import Subscriptions
    from spark_ledger.topic.upkeep.subscription_moves import SubscriptionMoves

T = TypeVar("T")

app = App(help="Subscriptions: the positions of readers of a topic.", no_args_is_help=True)
Topic = Annotated[str, typer.Argument(help="The topic.")]
Name = Annotated[str, typer.Argument(help="The subscription.")]
To = Annotated[
    str | None, typer.Option("--to", help="earliest, latest, or a time: ISO 8601 or ms.")
]
ToOrHere = Annotated[
    str | None,
    typer.Option(
        "--to", help="earliest, latest, here (where it is now), or a time: ISO 8601 or ms."
    ),
]
ToOffset = Annotated[
    list[str] | None, typer.Option(help="PARTITION=OFFSET. Repeat the option for each partition.")
]
Force = Annotated[
    bool, typer.Option("--force", help="Also a subscription that a query or a consumer uses.")
]


class _Listed(NamedTuple):
    subscriptions: "list[SubscriptionInfo]"
    stats: dict[str, Any]
    now_ms: int


class _LagRow(NamedTuple):
    """`floor_age_ms`: the age of the position in the metadata store; None: the position is from the
    partition's owner."""

    partition: int
    position: int
    end: int
    rows: int
    bytes: int
    millis: int
    floor_age_ms: int | None


@app.command("list")
def list_subscriptions(
    topic: Topic, json: JsonOption = False, service_url: UrlOption = None
) -> None:
    """Every subscription of a topic, and its position. A broker adds what only the owners of the
    partitions have in memory: the type and number of the consumers, and the numbers of messages
    that are sent and not acknowledged, sent again, or delayed. Without a broker the command shows
    the age of the position in the metadata store instead: a newer position may be in a ledger. KIND
    is - until a query or consumers use the subscription, TYPE is - without consumers."""
    unreadable: dict[str, LedgerError] = {}

    async def listed(client: "TopicClient") -> "_Listed":
        from spark_ledger.metadata.store_calls import store_now_ms

        info = await client.topics.open(topic)
        infos = await client.subscriptions.list(info.id, exact=True, unreadable=unreadable)
        topic_stats = await stats_of(client, info)
        stats = {} if topic_stats is None else topic_stats["subscriptions"]
        is_old = any(subscription.name not in stats for subscription in infos)
        return _Listed(infos, stats, await store_now_ms(client.store) if is_old else 0)

    subscriptions, stats, now_ms = with_topics(service_url, listed)
    if json:
        print_json(
            [_subscription_facts(info, stats.get(info.name), now_ms) for info in subscriptions]
        )
        tell_unreadable("subscription", unreadable)
        return
    columns = ("SUBSCRIPTION", "KIND", "IN USE", "QUERY", "OFFSETS", "AGE", *IN_MEMORY)
    rows = [_row_of(info, stats.get(info.name), now_ms) for info in subscriptions]
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
    """Make a subscription, at the end of the topic unless --to or --to-offset is given. The topic
    keeps all rows from this position on."""
    target = target_of(to if to or to_offset else "latest", to_offset or [])
    positions = _work_on(service_url, topic, lambda all_, id_: all_.create(id_, name, target))
    _print_positions(topic, name, positions, json)


@app.command()
def seek(
    topic: Topic,
    name: Name,
    to: ToOrHere = None,
    to_offset: ToOffset = None,
    force: Force = False,
    json: JsonOption = False,
    service_url: UrlOption = None,
) -> None:
    """Move a subscription to another position. `--to here --force` does not move the subscription,
    but takes it from the query or the consumers that use it."""
    target = {} if to == "here" and not to_offset else target_of(to, to_offset or [])
    positions = _work_on(
        service_url, topic, lambda all_, id_: all_.seek(id_, name, target, force=force)
    )
    _print_positions(topic, name, positions, json)


@app.command()
def reset(
    topic: Topic,
    name: Name,
    to: To = None,
    to_offset: ToOffset = None,
    json: JsonOption = False,
    service_url: UrlOption = None,
) -> None:
    """Move a subscription to the earliest row, or to the given position. Connected consumers are
    sent away, and come back at the new position. A query's subscription does not move."""
    target = target_of(to if to or to_offset else "earliest", to_offset or [])
    _move(service_url, topic, name, json, lambda moves: moves.reset(name, target))


@app.command()
def clear(
    topic: Topic, name: Name, json: JsonOption = False, service_url: UrlOption = None
) -> None:
    """Move a subscription to the end, past all remaining messages. Connected consumers are sent
    away, and come back; a query's subscription does not move."""
    _move(service_url, topic, name, json, lambda moves: moves.clear(name))


@app.command()
def skip(
    topic: Topic,
    name: Name,
    count: Annotated[int, typer.Argument(help="How many messages.")],
    partition: Annotated[
        int | None, typer.Option(help="The partition; needed if the topic has several.")
    ] = None,
    json: JsonOption = False,
    service_url: UrlOption = None,
) -> None:
    """Move a subscription past messages of a partition, up to its end at most. Connected consumers
    are sent away, and come back; a query's subscription does not move."""
    _move(service_url, topic, name, json, lambda moves: moves.skip(name, count, partition))


@app.command()
def expire(
    topic: Topic,
    name: Name,
    age: Annotated[str, typer.Argument(help="Messages older than this: 30s, 90m, 12h or 7d.")],
    json: JsonOption = False,
    service_url: UrlOption = None,
) -> None:
    """Move a subscription past messages older than this age, never back. Connected consumers are
    sent away, and come back."""
    age_ms = _age_of(age)

    async def work(client: "TopicClient") -> dict[int, int]:
        from spark_ledger.metadata.store_calls import store_now_ms
        from spark_ledger.topic.subscription.seek_target import CommittedSince

        before_ms = await store_now_ms(client.store) - age_ms
        return await (await _moves(client, topic)).expire(name, CommittedSince(before_ms))

    _print_positions(topic, name, with_topics(service_url, work), json)


def _age_of(text: str) -> int:
    """The age in milliseconds. Raises errors.BadConfig, also for a number without a unit: whether
    it is in seconds, as with Pulsar's admin API, would be a guess."""
    age_ms = None if text.strip().isdecimal() else units.parse(text, units.MS)
    if age_ms is None:
        raise BadConfig(
            f"'{text}' is not an age with a unit",
            f"Give a number with {', '.join(units.MS)}, e.g. 3600s or 1h.",
        )
    if age_ms == 0:
        raise BadConfig(
            f"every message is older than '{text}'",
            "To pass all messages, use `spark-ledger subscription clear TOPIC NAME`.",
        )
    return age_ms


@app.command()
def peek(
    topic: Topic,
    name: Name,
    count: Annotated[int, typer.Option(help="How many rows of each partition.", min=1)] = 10,
    json: JsonOption = False,
    service_url: UrlOption = None,
) -> None:
    """Print the next rows of a subscription (partition, offset, key, value); the subscription does
    not move. Rows that consumers have acknowledged beyond its position are printed too."""

    async def work(client: "TopicClient") -> None:
        info = await client.topics.open(topic)
        positions = await client.subscriptions.positions(info.id, name)
        printed: Counter[int] = Counter()
        async for row in rows_from(client, topic, positions, follow=False):
            printed[row.partition] += 1
            if printed[row.partition] <= count:
                print_row(row, json)
            elif len(positions) == 1:
                return

    with_topics(service_url, work)


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
    _work_on(service_url, topic, lambda all_, id_: all_.delete(id_, name, force=force))
    answer(
        json,
        {"topic": topic, "subscription": name},
        f"subscription {name} of topic {topic} deleted",
    )


@app.command()
def lag(topic: Topic, name: Name, json: JsonOption = False, service_url: UrlOption = None) -> None:
    """The lag of a subscription behind the end of its topic: the rows that are not acknowledged.
    The owners of the partitions have the newest positions. Without a broker, positions come from
    ledgers and the metadata store, and AGE is the age of the position in the metadata store."""

    async def work(client: "TopicClient") -> list[_LagRow]:
        from spark_ledger.metadata.store_calls import store_now_ms

        info = await client.topics.open(topic)
        now_ms = await store_now_ms(client.store)
        lags = await client.subscriptions.lag(info.id, name, now_ms)
        stats = await stats_by_partition(client, info)
        infos = await client.subscriptions.list(info.id, unreadable={})
        ages = [_age_ms(listed, now_ms) for listed in infos if listed.name == name]
        age_ms = ages[0] if ages else None
        return [
            _lag_row(part, stats.get(number), name, number, age_ms) for number, part in lags.items()
        ]

    rows = with_topics(service_url, work)
    if json:
        print_json([row._asdict() for row in rows])
        return
    columns = ("PARTITION", "POSITION", "END", "ROWS BEHIND", "BYTES", "MS", "AGE")
    ages = ["-" if row.floor_age_ms is None else f"{row.floor_age_ms // 1000}s" for row in rows]
    shown = [(*row[:-1], age) for row, age in zip(rows, ages, strict=True)]
    print_table(columns, shown, "no partitions")


def _lag_row(
    lag: "PartitionLag", stats: dict[str, Any] | None, name: str, number: int, age_ms: int | None
) -> _LagRow:
    """The row of a partition; `stats` are from its owner (None: no broker answers), `age_ms` is the
    age of the position in the metadata store."""
    subscription = (stats or {}).get("subscriptions", {}).get(name)
    if subscription is None:
        return _LagRow(number, lag.position, lag.end, lag.rows, lag.bytes, lag.millis, age_ms)
    position, rows = int(subscription["position"]), int(subscription["msgBacklog"])
    size, millis = int(subscription["backlogSize"]), lag.millis if rows else 0
    return _LagRow(number, position, max(position, lag.end), rows, size, millis, None)


def _work_on(
    service_url: str | None, topic: str, work: "Callable[[Subscriptions, str], Awaitable[T]]"
) -> T:
    """The result of `work` on the subscriptions of a topic; `work` gets the topic's id."""

    async def open_and_work(client: "TopicClient") -> T:
        return await work(client.subscriptions, (await client.topics.open(topic)).id)

    return with_topics(service_url, open_and_work)


def _move(
    service_url: str | None,
    topic: str,
    name: str,
    json: bool,
    move: "Callable[[SubscriptionMoves], Awaitable[dict[int, int]]]",
) -> None:
    async def work(client: "TopicClient") -> dict[int, int]:
        return await move(await _moves(client, topic))

    _print_positions(topic, name, with_topics(service_url, work), json)


async def _moves(client: "TopicClient", topic: str) -> "SubscriptionMoves":
    from spark_ledger.topic.upkeep.subscription_moves import SubscriptionMoves

    return SubscriptionMoves(client, (await client.topics.open(topic)).id)


def _print_positions(topic: str, name: str, positions: Mapping[int, int], json: bool) -> None:
    facts = {"topic": topic, "subscription": name, "offsets": by_partition(positions)}
    stands = f"is at {_offsets(positions)}" if positions else "does not move"
    answer(json, facts, f"subscription {name} of topic {topic} {stands}")


def _row_of(
    info: "SubscriptionInfo", stats: "dict[str, Any] | None", now_ms: int
) -> tuple[object, ...]:
    is_of_consumers = info.kind.value == "consumer"
    is_used = is_of_consumers or info.query_id
    return (
        info.name,
        info.kind.value if is_used else "-",
        "yes" if info.live else "no",
        "" if is_of_consumers else info.query_id,
        _offsets(info.positions),
        "-" if stats is not None else f"{_age_ms(info, now_ms) // 1000}s",
        *(_in_memory(stats) if stats is None else (type_of(stats), *_in_memory(stats)[1:])),
    )


IN_MEMORY = ("TYPE", "CONSUMERS", "UNACKED", "REDELIVERED", "DELAYED", "PAUSED")


def _in_memory(stats: "dict[str, Any] | None") -> tuple[object, ...]:
    """The values of the columns IN_MEMORY."""
    if stats is None:
        return ("-",) * len(IN_MEMORY)
    paused_by = stats.get("pausedBy") or "no"
    return (stats["type"], len(stats["consumers"]), *counts_of(stats)[1:], paused_by)


def _age_ms(info: "SubscriptionInfo", now_ms: int) -> int:
    return max(0, now_ms - info.floor_ms)


def _subscription_facts(
    info: "SubscriptionInfo", stats: "dict[str, Any] | None", now_ms: int
) -> dict[str, object]:
    names = [name.lower() for name in IN_MEMORY]
    in_memory = dict(zip(names, _in_memory(stats), strict=True)) if stats is not None else {}
    return {
        "asked": stats is not None,
        **dict.fromkeys(names),
        **in_memory,
        "subscription": info.name,
        "kind": info.kind.value,
        "in_use": info.live,
        "query_id": info.query_id,
        "run_id": info.run_id,
        "created_ms": info.created_ms,
        "ledger": info.ledger_id,
        "offsets": by_partition(info.positions),
        "floor_age_ms": None if stats is not None else _age_ms(info, now_ms),
    }


def _offsets(positions: Mapping[int, int]) -> str:
    return ", ".join(f"{p}={offset}" for p, offset in sorted(positions.items()))
