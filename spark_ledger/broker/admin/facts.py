"""Statistics of clients and subscriptions in Pulsar's JSON, and sums of statistics. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

from spark_ledger.broker.dispatch.dispatcher import Consumer
from spark_ledger.broker.produce.producer import Producer
from spark_ledger.broker.wire.commands import AccessMode
from spark_ledger.broker.wire.link import ClientFacts
from spark_ledger.topic.log.topics import TopicInfo

_RATES = {"msgRateOut": 0.0, "msgThroughputOut": 0.0}
_TYPES = {
    "EXCLUSIVE": "Exclusive",
    "FAILOVER": "Failover",
    "SHARED": "Shared",
    "KEY_SHARED": "Key_Shared",
}
_MODES = {
    AccessMode.SHARED: "Shared",
    AccessMode.EXCLUSIVE: "Exclusive",
    AccessMode.WAIT_FOR_EXCLUSIVE: "WaitForExclusive",
    AccessMode.EXCLUSIVE_WITH_FENCING: "ExclusiveWithFencing",
}


class PartitionSize(NamedTuple):
    rows: int
    bytes: int


@dataclass(frozen=True, slots=True)
class SubscriptionFacts:
    """A subscription in one partition. `type` is the subscription type of its consumers; "None": no
    consumer is connected. `backlog` counts the messages that are not acknowledged, `unacked` those
    of them that were sent, `redelivered` the entries that a client asked for again. `is_blocked`:
    so many messages are unacknowledged that no message is sent. `position` is the first offset that
    is not acknowledged. `pause`: why no new message is read ("": messages are read). `active` is
    the consumer that gets all messages; None if several consumers share them."""

    type: str
    is_durable: bool
    backlog: int
    backlog_bytes: int
    position: int
    unacked: int = 0
    redelivered: int = 0
    delayed: int = 0
    is_blocked: bool = False
    pause: str = ""
    consumers: tuple[Consumer, ...] = ()
    active: Consumer | None = None
    properties: Mapping[str, str] = field(default_factory=dict)


def publisher_stats(producer: Producer) -> dict[str, Any]:
    return {
        "accessMode": _MODES[producer.mode],
        "producerId": producer.id,
        "producerName": producer.name,
        "msgRateIn": 0.0,
        "msgThroughputIn": 0.0,
        "averageMsgSize": 0.0,
        "encrypted": producer.client is not None and producer.client.encrypts,
        **_client_stats(producer.client),
    }


def _client_stats(client: ClientFacts | None) -> dict[str, Any]:
    if client is None:
        return {"address": "", "clientVersion": "", "connectedSince": "", "metadata": {}}
    since = datetime.fromtimestamp(client.since_ms / 1000, UTC)
    return {
        "address": client.link.address,
        "clientVersion": client.version,
        "connectedSince": since.isoformat(timespec="milliseconds"),
        "metadata": client.properties,
    }


def subscription_stats(facts: SubscriptionFacts) -> dict[str, Any]:
    """`position`, `redeliveredMessages` and `pausedBy` are fields that Pulsar's JSON lacks."""

    def unacked_of(consumer: Consumer) -> int:
        return facts.unacked if consumer is facts.active else consumer.unacked

    return {
        **_RATES,
        "msgRateRedeliver": 0.0,
        "msgRateExpired": 0.0,
        "msgBacklog": facts.backlog,
        "msgBacklogNoDelayed": facts.backlog - facts.delayed,
        "backlogSize": facts.backlog_bytes,
        "msgDelayed": facts.delayed,
        "unackedMessages": facts.unacked,
        "redeliveredMessages": facts.redelivered,
        "blockedSubscriptionOnUnackedMsgs": facts.is_blocked,
        "type": _TYPES.get(facts.type, facts.type),
        "activeConsumerName": facts.active.name if facts.active is not None else "",
        "isDurable": facts.is_durable,
        "isReplicated": False,
        "allowOutOfOrderDelivery": False,
        "subscriptionProperties": dict(facts.properties),
        "position": facts.position,
        "pausedBy": facts.pause,
        "consumers": [
            {
                **_RATES,
                "msgRateRedeliver": 0.0,
                "consumerName": consumer.name,
                "availablePermits": consumer.permits,
                "unackedMessages": unacked_of(consumer),
                "blockedConsumerOnUnackedMsgs": consumer.is_blocked,
                **_client_stats(consumer.client),
            }
            for consumer in facts.consumers
        ],
    }


def partition_stats(
    info: TopicInfo,
    size: PartitionSize,
    publishers: list[dict[str, Any]],
    subscriptions: dict[str, dict[str, Any]],
) -> dict[str, Any]:
    return {
        **_RATES,
        "msgRateIn": 0.0,
        "msgThroughputIn": 0.0,
        "averageMsgSize": size.bytes / size.rows if size.rows else 0.0,
        "storageSize": size.bytes,
        "backlogSize": max((sub["backlogSize"] for sub in subscriptions.values()), default=0),
        "publishers": publishers,
        "subscriptions": subscriptions,
        "replication": {},
        "deduplicationStatus": "Enabled" if info.policies.deduplication else "Disabled",
    }


SUMMED = (
    *("msgRateIn", "msgThroughputIn", "msgRateOut", "msgThroughputOut", "msgRateRedeliver"),
    *("msgRateExpired", "msgBacklog", "msgBacklogNoDelayed", "backlogSize", "msgDelayed"),
    *("unackedMessages", "redeliveredMessages", "storageSize"),
)


def merged(stats: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The sum of partitions, or of one subscription in several partitions. Numbers are added, lists
    of clients are joined. The type is the first that is not "None", the reason of a pause the first
    that is not empty; any other field has the first partition's value."""
    parts = list(stats)
    whole: dict[str, Any] = dict(parts[0]) if parts else {}
    whole.pop("position", None)
    for name in SUMMED:
        if name in whole:
            whole[name] = sum(part[name] for part in parts)
    for name in ("publishers", "consumers"):
        if name in whole:
            whole[name] = [client for part in parts for client in part[name]]
    if "type" in whole:
        whole["type"] = next((part["type"] for part in parts if part["type"] != "None"), "None")
        whole["pausedBy"] = next(filter(None, (part.get("pausedBy") for part in parts)), "")
    if "subscriptions" in whole:
        names = dict.fromkeys(name for part in parts for name in part["subscriptions"])
        whole["subscriptions"] = {
            name: merged(
                part["subscriptions"][name] for part in parts if name in part["subscriptions"]
            )
            for name in names
        }
    return whole
