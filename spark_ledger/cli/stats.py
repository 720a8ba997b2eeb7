"""Statistics of a topic, which brokers give by HTTP.

Always true: a broker that does not answer is passed over, as any broker can answer for all; a
broker's error ends no command that can do without statistics.
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
    from spark_ledger import http
    from spark_ledger.broker.log.membership import brokers_alive

    verb = "partitioned-stats?perPartition=false" if info.policies.partitioned else "stats"
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
        (name, subscription["type"], len(subscription["consumers"]), *counts_of(subscription))
        for name, subscription in sorted(stats["subscriptions"].items())
    ]
    print_table(columns, rows, "no subscriptions")


def counts_of(subscription: dict[str, Any]) -> tuple[int, ...]:
    """The numbers of messages: not acknowledged, sent and not acknowledged, redelivered,
    delayed."""
    names = ("msgBacklog", "unackedMessages", "redeliveredMessages", "msgDelayed")
    return tuple(int(subscription.get(name, 0)) for name in names)
