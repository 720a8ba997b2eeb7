"""Statistics of a topic, which brokers give by HTTP.

Always true: if a broker does not answer, the next one is asked: each broker can answer for all.
Without any answer the functions return None or an empty dict, and do not raise.
"""

from typing import TYPE_CHECKING, Any

from spark_ledger.cli.common import print_facts, print_json, print_table
from spark_ledger.units import shown

if TYPE_CHECKING:
    from spark_ledger.topic.client import TopicClient
    from spark_ledger.topic.log.topics import TopicInfo

NO_STATS = "Start a broker, or ask for `topic describe` and `subscription list`."


async def stats_of(client: "TopicClient", info: "TopicInfo") -> dict[str, Any] | None:
    """The statistics of the whole topic; None: no broker answers."""
    is_partitioned = info.policies.partitioned
    verb = "partitioned-stats?perPartition=false" if is_partitioned else "stats"
    return await _ask_brokers(client, info, verb)


async def stats_by_partition(client: "TopicClient", info: "TopicInfo") -> dict[int, dict[str, Any]]:
    """The statistics of each partition; empty: no broker answers."""
    if not info.policies.partitioned:
        stats = await _ask_brokers(client, info, "stats")
        return {} if stats is None else {0: stats}
    stats = await _ask_brokers(client, info, "partitioned-stats") or {"partitions": {}}
    return {int(name.rpartition("-")[2]): part for name, part in stats["partitions"].items()}


async def _ask_brokers(
    client: "TopicClient", info: "TopicInfo", verb: str
) -> dict[str, Any] | None:
    from spark_ledger import http
    from spark_ledger.broker.log.membership import brokers_alive

    name = info.name
    path = f"admin/v2/persistent/{name.tenant}/{name.namespace}/{name.name}/{verb}"
    for _, broker in sorted((await brokers_alive(client.store, {})).items()):
        if not broker.admin_url:
            continue
        try:
            stats = await http.ask(f"{broker.admin_url}/{path}")
        except http.HttpFailure:
            continue
        if isinstance(stats, dict):
            return stats
    return None


def print_stats(stats: dict[str, Any], json: bool) -> None:
    if json:
        print_json(stats)
        return
    publishers = stats["publishers"]
    facts = {
        "storage": shown(stats["storageSize"]),
        "partitions": (stats.get("metadata") or {}).get("partitions", 1),
        "deduplication": stats["deduplicationStatus"],
        "producers": ", ".join(sorted({producer["producerName"] for producer in publishers}))
        or "none",
    }
    print_facts(facts)
    columns = ("SUBSCRIPTION", "TYPE", "CONSUMERS", "BACKLOG", "UNACKED", "REDELIVERED", "DELAYED")
    rows = [
        (name, type_of(subscription), len(subscription["consumers"]), *counts_of(subscription))
        for name, subscription in sorted(stats["subscriptions"].items())
    ]
    print_table(columns, rows, "no subscriptions")


def type_of(subscription: dict[str, Any]) -> str:
    """The type of its consumers; "-" without consumers."""
    return "-" if subscription["type"] == "None" else str(subscription["type"])


def counts_of(subscription: dict[str, Any]) -> tuple[int, ...]:
    """Numbers of messages: not acknowledged; sent and not acknowledged; sent again; delayed."""
    names = ("msgBacklog", "unackedMessages", "redeliveredMessages", "msgDelayed")
    return tuple(int(subscription.get(name, 0)) for name in names)
