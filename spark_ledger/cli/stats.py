"""What brokers know of a topic, asked by HTTP.

Always true: a broker that does not answer is passed over, as each of them can answer for all; no
error of theirs ends a command that can do without them.
"""

from typing import TYPE_CHECKING, Any

from spark_ledger.cli.common import print_facts, print_json, print_table
from spark_ledger.units import shown

if TYPE_CHECKING:
    from spark_ledger.topic.client import TopicClient
    from spark_ledger.topic.log.topics import TopicInfo

NO_STATS = "Start a broker, or ask for `topic describe` and `subscription list`."


async def stats_of(client: "TopicClient", info: "TopicInfo") -> dict[str, Any] | None:
    """The stats of the whole topic; None: no broker answers."""
    from spark_ledger import http
    from spark_ledger.broker.owner.membership import brokers_alive

    what = "partitioned-stats?perPartition=false" if info.policies.partitioned else "stats"
    name = info.name
    path = f"admin/v2/persistent/{name.tenant}/{name.namespace}/{name.name}/{what}"
    for _, broker in sorted((await brokers_alive(client.store, {})).items()):
        if not broker.admin_url:
            continue
        try:
            answered = await http.ask(f"{broker.admin_url}/{path}")
        except http.HttpFailure:
            continue
        if isinstance(answered, dict):
            return answered
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
        "producers": ", ".join(sorted({of["producerName"] for of in publishers})) or "none",
    }
    print_facts(facts)
    columns = ("SUBSCRIPTION", "TYPE", "CONSUMERS", "BACKLOG", "UNACKED", "REDELIVERED", "DELAYED")
    rows = [
        (name, of["type"], len(of["consumers"]), *counts_of(of))
        for name, of in sorted(stats["subscriptions"].items())
    ]
    print_table(columns, rows, "no subscriptions")


def counts_of(subscription: dict[str, Any]) -> tuple[int, ...]:
    """Messages not acknowledged, those of them that are sent, redelivered, delayed."""
    names = ("msgBacklog", "unackedMessages", "redeliveredMessages", "msgDelayed")
    return tuple(int(subscription.get(name, 0)) for name in names)
