"""`spark-ledger topic create|list|describe|stats|tail`, the verbs that change topics: `grow|set|
trim|truncate|terminate|delete|schema|compact|clean|repair`, `spark-ledger namespace set|show|list`.
"""

import sys
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from spark_ledger.cli.common import (
    App,
    JsonOption,
    UrlOption,
    answer,
    by_partition,
    offsets_of,
    print_facts,
    print_json,
    print_table,
    tell_unreadable,
    time_ms,
    with_topics,
)
from spark_ledger.cli.rows import print_row, rows_from
from spark_ledger.cli.stats import NO_STATS, print_stats, stats_of
from spark_ledger.errors import BadConfig, LedgerError, Unavailable

if TYPE_CHECKING:
    from spark_ledger.topic.client import TopicClient
    from spark_ledger.topic.log.policies import NamespacePolicies
    from spark_ledger.topic.log.topics import TopicInfo
    from spark_ledger.topic.schema.registry import TopicSchema
    from spark_ledger.topic.subscription.seek_target import SeekTarget
    from spark_ledger.topic.upkeep.admin import TopicAdmin
    from spark_ledger.topic.upkeep.live_repair import UnopenedPartition
    from spark_ledger.topic.upkeep.upkeep import UpkeepReport


app = App(help="Topics: partitioned logs of rows.", no_args_is_help=True)
namespaces = App(help="Namespaces: the policies of their topics.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(help="name, or persistent://tenant/namespace/name")]
Namespace = Annotated[str, typer.Argument(help="tenant/name")]
Names = Annotated[list[str], typer.Argument(metavar="NAME...", help="as NAME of other commands")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
Force = Annotated[bool, typer.Option("--force", help="Also rows that a subscription still needs.")]


@app.command()
def create(
    name: Name,
    partitions: Annotated[
        int, typer.Option(help="Number of partitions; it can only grow.", min=1)
    ] = 1,
    policy: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE, as in `topic set`; repeat the option.")
    ] = None,
    json: JsonOption = False,
    service_url: UrlOption = None,
) -> None:
    """Make a topic."""
    policies = parse_policies(policy or [])
    info = with_topics(service_url, lambda t: _admin(t).create(name, partitions, policies))
    answer(
        json,
        _topic_facts(info),
        f"topic {info.name.short} made, {info.partitions} partition(s), id {info.id}",
    )


@app.command("list")
def list_topics(json: JsonOption = False, service_url: UrlOption = None) -> None:
    """Every topic."""
    unreadable: dict[str, LedgerError] = {}
    topics = with_topics(service_url, lambda client: client.topics.list(unreadable))
    if json:
        print_json([_topic_facts(info) for info in topics])
    else:
        rows = [(info.name.short, info.partitions_noted, info.id) for info in topics]
        print_table(("TOPIC", "PARTITIONS", "ID"), rows, "no topics")
    tell_unreadable("topic", unreadable)


@app.command()
def describe(name: Name, json: JsonOption = False, service_url: UrlOption = None) -> None:
    """A topic's partitions (offsets, segments, bytes) and policies."""
    facts = with_topics(service_url, lambda client: _admin(client).describe(name))
    columns = ("partition", "start_offset", "end_offset", "rows", "segments", "bytes")
    partitions = [{name: getattr(row, name) for name in columns} for row in facts.partitions]
    policies = _policy_facts(facts.info)
    if json:
        names = ("commits", "terminated", "rows", "bytes", "ledgers", "reclaimable")
        further = {name: getattr(facts, name) for name in names}
        further |= {"policies": policies, "offsets": partitions}
        print_json({**_topic_facts(facts.info), "partitions": len(partitions), **further})
        return
    print_facts(
        {
            "topic": facts.info.name.full,
            "id": facts.info.id,
            "commits": facts.commits,
            "ledgers": f"{len(facts.ledgers)}, and {len(facts.reclaimable)} to be reclaimed",
            "rows": facts.rows,
            "bytes": facts.bytes,
            **({"terminated": "yes"} if facts.terminated else {}),
            **policies,
        }
    )
    print()
    heads = ("PARTITION", "START", "END", "ROWS", "SEGMENTS", "BYTES")
    print_table(heads, [tuple(row.values()) for row in partitions], "no partitions")


@app.command()
def grow(
    name: Name,
    partitions: Annotated[int, typer.Argument(help="The new number of partitions.", min=1)],
    json: JsonOption = False,
    service_url: UrlOption = None,
) -> None:
    """Give a topic more partitions. Rows stay; keys may go to other partitions from now on."""
    info = with_topics(service_url, lambda client: _admin(client).grow(name, partitions))
    answer(
        json,
        {**_topic_facts(info), "partitions": partitions},
        f"topic {info.name.short} has {partitions} partitions now",
    )


@app.command("set")
def set_policies(
    name: Name,
    policy: Annotated[
        list[str], typer.Argument(help="NAME=VALUE, e.g. retention_ms=7d, retention_bytes=none.")
    ],
    json: JsonOption = False,
    service_url: UrlOption = None,
) -> None:
    """Change a topic's policies, and print them all. Among them are retention, expiry of messages
    (message_ttl_ms), quotas (backlog_bytes_max, backlog_ms_max, on_backlog), limits (names with
    _max), rates (publish_rate, dispatch_rate), quorums and rolling of new ledgers; `topic describe`
    lists every name with its value. A number without a unit has the unit in the policy's name: _ms
    are milliseconds, _s are seconds."""
    from spark_ledger.topic.log.policies import ACKNOWLEDGED

    changes = parse_policies(policy)

    async def change(client: "TopicClient") -> "tuple[TopicInfo, bool]":
        from spark_ledger.topic.subscription.unheld import was_read_lately

        info = await _admin(client).change_policies(name, changes)
        drops_rows = changes.get("retention") == ACKNOWLEDGED
        return info, drops_rows and await was_read_lately(client.store, info.id)

    info, loses_rows = with_topics(service_url, change)
    if loses_rows:
        print(
            f"spark-ledger: a query without subscription=NAME read topic {name} within a day. The"
            " query holds no rows: the topic drops rows that every subscription has passed",
            file=sys.stderr,
        )
    if json:
        print_json({**_topic_facts(info), "policies": _policy_facts(info)})
    else:
        print_facts(_policy_facts(info))


@app.command()
def truncate(
    name: Name,
    yes: Yes = False,
    force: Force = False,
    json: JsonOption = False,
    service_url: UrlOption = None,
) -> None:
    """Remove all rows that a topic has; the next row gets the next offset."""
    from spark_ledger.topic.subscription.seek_target import End

    _trim(name, End.LATEST, f"all rows of topic {name}", yes, force, json, service_url)


@app.command()
def trim(
    name: Name,
    to_offset: Annotated[
        list[str] | None,
        typer.Option(
            help="PARTITION=OFFSET: remove rows below it. Repeat the option for each partition."
        ),
    ] = None,
    before: Annotated[
        str | None, typer.Option(help="Remove rows committed before this time: ISO 8601 or ms.")
    ] = None,
    yes: Yes = False,
    force: Force = False,
    json: JsonOption = False,
    service_url: UrlOption = None,
) -> None:
    """Remove old rows, by offset or by the time at which they were committed."""
    target = _trim_target(to_offset or [], before)
    _trim(name, target, f"these rows of topic {name}", yes, force, json, service_url)


@app.command()
def terminate(
    name: Name, yes: Yes = False, json: JsonOption = False, service_url: UrlOption = None
) -> None:
    """End a topic: it takes no more rows. It can still be read, trimmed, merged and deleted."""
    if not yes:
        typer.confirm(f"End topic {name} for ever?", abort=True)
    info = with_topics(service_url, lambda client: _admin(client).terminate(name))
    answer(
        json,
        {**_topic_facts(info), "terminated": True},
        f"topic {info.name.short} takes no more rows",
    )


@app.command()
def schema(
    name: Name,
    withdraw: Annotated[
        bool, typer.Option("--withdraw", help="Let the topic take bytes again.")
    ] = False,
    json: JsonOption = False,
    service_url: UrlOption = None,
) -> None:
    """The versions of a topic's schema, and whether the schema is in force: then the topic takes
    typed rows only, no bytes."""

    async def work(client: "TopicClient") -> "TopicSchema":
        info = await client.topics.open(name)
        if withdraw:
            await client.schemas.withdraw(info)
        return await client.schemas.of(info)

    schema = with_topics(service_url, work)
    numbers = [version.number for version in schema.versions]
    versions = [
        {column.name: str(column.type) for column in version.schema} for version in schema.versions
    ]
    is_in_force = not schema.head.takes_bytes
    lines = [f"{len(versions)} version(s), {'' if is_in_force else 'not '}in force"]
    for number, columns in zip(numbers, versions, strict=True):
        lines.append(f"{number}: " + ", ".join(f"{key} {kind}" for key, kind in columns.items()))
    facts = {"topic": name, "inForce": is_in_force, "versions": versions, "numbers": numbers}
    answer(json, facts, "\n".join(lines))


@app.command()
def compact(
    name: Name,
    max_mib_per_s: Annotated[
        float | None, typer.Option(help="The highest average rate of copying.", min=0.001)
    ] = None,
    merged_mib: Annotated[int, typer.Option(help="Size of merged segments.", min=1)] = 64,
    json: JsonOption = False,
    service_url: UrlOption = None,
) -> None:
    """Merge a topic's small segments. The command can be stopped at any time and run again."""
    from spark_ledger.topic.upkeep.compactor import compact
    from spark_ledger.topic.upkeep.merge_plan import MergeLimits

    limits = MergeLimits(bytes_max=merged_mib << 20)
    rate = None if max_mib_per_s is None else max_mib_per_s * (1 << 20)
    compact_topic = partial(compact, name=name, limits=limits, bytes_per_s=rate)
    result = with_topics(service_url, compact_topic)
    answer(
        json,
        {"topic": name, **asdict(result)},
        f"{result.segments} segment(s) became {result.merged}, {result.bytes} byte(s) were copied",
    )


@app.command()
def delete(
    names: Names,
    yes: Yes = False,
    json: JsonOption = False,
    service_url: UrlOption = None,
) -> None:
    """Delete topics and their rows, one topic after the other. Stops at the first topic that cannot
    be deleted."""
    if not yes:
        typer.confirm(f"Delete topic {', '.join(names)} and all its rows?", abort=True)

    async def work(client: "TopicClient") -> None:
        for name in names:
            info = await _admin(client).delete(name)
            answer(json, _topic_facts(info), f"topic {info.name.short} deleted, id {info.id}")

    with_topics(service_url, work)


@app.command()
def repair(
    name: Name, yes: Yes = False, json: JsonOption = False, service_url: UrlOption = None
) -> None:
    """Repair partitions that no broker can open. The command shows the bytes at the end of their
    live ledgers, the copies and the repair, and carries the repair out after you confirm. Refused
    while the metadata store is held: no broker opens a partition then."""
    from spark_ledger.topic.upkeep import live_repair

    async def find_unopened(client: "TopicClient") -> "list[UnopenedPartition]":
        return await live_repair.find_unopened(client, await client.topics.open(name))

    unopened = with_topics(service_url, find_unopened)
    if not json:
        texts = map(_text_of_unopened, unopened)
        print("\n".join(texts) or f"topic {name}: every partition can be opened")
    mendable = [partition for partition in unopened if partition.is_repairable]
    if mendable and not yes:
        numbers = ", ".join(str(partition.live.partition) for partition in mendable)
        yes = not json and typer.confirm(f"Repair partition(s) {numbers} of topic {name}?")

    async def mend(client: "TopicClient") -> None:
        info = await client.topics.open(name)
        for partition in mendable:
            await live_repair.repair(client, info, partition)

    if mendable and yes:
        with_topics(service_url, mend)
    if json:
        print_json([{**_facts_of_unopened(p), "done": p.is_repairable and yes} for p in unopened])
    elif mendable:
        print(f"{len(mendable)} partition(s) repaired" if yes else "nothing was changed")


def _facts_of_unopened(unopened: "UnopenedPartition") -> dict[str, object]:
    entries = [
        {**asdict(entry), "begins": None if entry.begins is None else entry.begins.hex()}
        for entry in unopened.entries
    ]
    lo, hi = unopened.offsets
    return {
        "partition": unopened.live.partition,
        "ledger": unopened.live.ledger_id,
        "fault": unopened.fault.value,
        "offsets_given_up": [lo, hi] if lo < hi else [],
        "would": unopened.repair_effect,
        "entries": entries,
    }


def _text_of_unopened(unopened: "UnopenedPartition") -> str:
    live, (lo, hi) = unopened.live, unopened.offsets
    lines = [f"partition {live.partition}, ledger {live.ledger_id}: {unopened.fault.value}"]
    for entry in unopened.entries:
        lines.append(f"  entry {entry.entry_id} on {', '.join(entry.copies)}: {entry.why}")
        if entry.begins is not None:
            first_bytes = f"{entry.begins!r} (hex {entry.begins.hex()})"
            lines.append(f"    {entry.payload_bytes} bytes: {first_bytes}")
    if lo < hi:
        lines.append(f"  offsets {lo} to {hi - 1}")
    return "\n".join([*lines, f"  would be done: {unopened.repair_effect}"])


@app.command()
def tail(
    name: Name,
    rows: Annotated[int, typer.Option(help="Rows of each partition to begin with.", min=0)] = 10,
    follow: Annotated[bool, typer.Option(help="Wait for more rows, until Ctrl-C.")] = True,
    json: JsonOption = False,
    service_url: UrlOption = None,
) -> None:
    """The last rows of a topic, then every new row: partition, offset, key, value. The value of a
    typed row is its columns as JSON."""

    async def work(client: "TopicClient") -> None:
        def start(first: int, end: int) -> int:
            return max(first, end - rows)

        async for row in rows_from(client, name, start, follow=follow):
            print_row(row, json)

    with_topics(service_url, work)


@app.command()
def stats(name: Name, json: JsonOption = False, service_url: UrlOption = None) -> None:
    """A topic's statistics from the brokers: its clients, its subscriptions and their backlogs."""

    async def work(client: "TopicClient") -> dict[str, object]:
        info = await client.topics.open(name)
        stats = await stats_of(client, info)
        if stats is None:
            raise Unavailable(f"no broker gives the stats of topic '{info.name}'", NO_STATS)
        return stats

    print_stats(with_topics(service_url, work), json)


@app.command()
def clean(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print what would be removed.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Even if this deletes more than a tenth of the ledgers.")
    ] = False,
    json: JsonOption = False,
    service_url: UrlOption = None,
) -> None:
    """Do the upkeep that a running cluster does by itself: remove rows that retention does not
    keep, delete ledgers that no topic needs any more, and close ledgers that writers left open."""

    async def work(client: "TopicClient") -> "UpkeepReport":
        from spark_ledger.topic.upkeep.upkeep import Upkeep

        upkeep = Upkeep(client)
        try:
            return await upkeep.once(dry_run=dry_run, force=force)
        finally:
            await upkeep.close()

    report = with_topics(service_url, work)
    if json:
        print_json(_clean_facts(report))
        return
    print(report.summary())
    for warning in report.warnings():
        print(warning)


def _clean_facts(report: "UpkeepReport") -> dict[str, object]:
    clean = report.clean
    return {
        "dry_run": clean.dry_run,
        "trimmed": {
            name: {"starts": by_partition(trimmed.starts), "rows": trimmed.rows}
            for name, trimmed in report.trimmed.items()
        },
        "checkpointed": list(report.checkpointed),
        "condemned": list(clean.condemned),
        "closed": list(clean.closed),
        "deleted": list(clean.deleted),
        "kept": list(clean.kept),
        "waiting": {str(ledger): why for ledger, why in clean.waiting.items()},
        "unclosed": {str(ledger): why for ledger, why in clean.unclosed.items()},
        "topics": list(clean.topics),
        "refused": clean.refused,
        "alarm": clean.alarm,
        "problems": dict(report.problems),
    }


def _admin(client: "TopicClient") -> "TopicAdmin":
    from spark_ledger.topic.upkeep.admin import TopicAdmin

    return TopicAdmin(client)


def parse_policies(texts: list[str]) -> dict[str, object]:
    """Policies by name, from NAME=VALUE texts. Raises errors.BadConfig."""
    from spark_ledger.topic.log.policies import value_of_text

    changes: dict[str, object] = {}
    for policy in texts:
        name, equals, value = policy.partition("=")
        if not equals:
            raise BadConfig(
                f"'{policy}' is not a policy with a value", "Give NAME=VALUE, e.g. retention_ms=7d."
            )
        changes[name] = value_of_text(name, value)
    return changes


def _trim_target(offsets: list[str], before: str | None) -> "SeekTarget":
    """Up to where rows are removed. Raises errors.BadConfig unless the user gave exactly one of
    offsets and a time."""
    from spark_ledger.topic.subscription.seek_target import CommittedSince

    if bool(offsets) == (before is not None):
        raise BadConfig(
            "exactly one end is needed", "Give either --to-offset PARTITION=OFFSET or --before."
        )
    if before is not None:
        return CommittedSince(time_ms(before))
    return offsets_of(offsets)


def _trim(
    name: str,
    target: "SeekTarget",
    rows: str,
    yes: bool,
    force: bool,
    json: bool,
    service_url: str | None,
) -> None:
    if not yes:
        typer.confirm(f"Remove {rows}?", abort=True)
    trimmed = with_topics(service_url, lambda t: _admin(t).trim(name, target, force=force))
    answer(
        json,
        {"topic": name, "starts": by_partition(trimmed.starts), "rows": trimmed.rows},
        f"{trimmed.rows} row(s) of topic {name} were removed",
    )


def _policy_facts(info: "TopicInfo") -> dict[str, object]:
    from spark_ledger.topic.log.policies import to_json

    return to_json(info.policies)


def _topic_facts(info: "TopicInfo") -> dict[str, object]:
    return {"topic": info.name.full, "id": info.id, "partitions": info.partitions_noted}


# -- namespaces --------------------------------------------------------------------


@namespaces.command("set")
def change(
    name: Namespace,
    policy: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME=VALUE]...",
            help="As in `topic set`; and auto_create, auto_create_partitions, topics_max.",
        ),
    ] = None,
    json: JsonOption = False,
    service_url: UrlOption = None,
) -> None:
    """Set policies for the namespace's topics, except topics that set the policy themselves; makes
    the namespace if it does not exist. NAME=inherit: the namespace no longer sets this policy."""
    changes = parse_policies(policy or [])
    _print_namespace(
        with_topics(service_url, lambda t: _admin(t).set_namespace(name, changes)), json
    )


@namespaces.command()
def show(name: Namespace, json: JsonOption = False, service_url: UrlOption = None) -> None:
    """The namespace's policies for its topics; a policy that is not shown has its default."""
    from spark_ledger.topic.log.policies import NamespacePolicies

    policies = with_topics(service_url, lambda client: client.topics.namespace(name))
    _print_namespace(policies or NamespacePolicies(), json)


@namespaces.command("list")
def list_namespaces(json: JsonOption = False, service_url: UrlOption = None) -> None:
    """Every namespace."""
    names = with_topics(service_url, lambda client: client.topics.namespaces())
    if json:
        print_json(names)
    else:
        print_table(("NAMESPACE",), [(name,) for name in names], "no namespaces")


def _print_namespace(policies: "NamespacePolicies", json: bool) -> None:
    creation = {name: getattr(policies, name) for name in ("auto_create", "auto_create_partitions")}
    later = {"topics_max": policies.topics_max, "properties": policies.properties}
    set_later = {name: value for name, value in later.items() if value is not None}
    facts = {**creation, **set_later, **policies.topics}
    if json:
        print_json(facts)
    else:
        texts = {name: "as the broker" if facts[name] is None else facts[name] for name in creation}
        print_facts({**facts, **texts})
