"""Statistics of clients and subscriptions in Pulsar's JSON, and sums of statistics. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

from spark_ledger.broker.dispatch.dispatcher import Consumer
from spark_ledger.broker.produce.producer import Producer
from spark_ledger.broker.wire.commands import AccessMode
from spark_ledger.broker.wire.link import ClientFacts
from spark_ledger.topic.acks.sets import Range
from spark_ledger.topic.log.topics import TopicInfo

_RATES = {"msgRateOut": 0.0, "msgThroughputOut": 0.0}
_OF_SENT = {
    **_RATES,
    **dict.fromkeys(("bytesOutCounter", "msgOutCounter"), 0),
    **dict.fromkeys(("msgRateRedeliver", "messageAckRate", "chunkedMessageRate"), 0.0),
    **dict.fromkeys(("lastConsumedFlowTimestamp", "lastConsumedTimestamp"), 0),
    **dict.fromkeys(("lastAckedTimestamp", "drainingHashesCount"), 0),
    **dict.fromkeys(("drainingHashesClearedTotal", "drainingHashesUnackedMessages"), 0),
    **dict.fromkeys(("firstMessagesSentTimestamp", "firstConsumedFlowTimestamp"), 0),
}
_OF_SUBSCRIPTION = {
    **_OF_SENT,
    **dict.fromkeys(("msgRateExpired",), 0.0),
    **dict.fromkeys(("msgInReplay", "msgExpired", "totalMsgExpired", "lastExpireTimestamp"), 0),
    **dict.fromkeys(("lastMarkDeleteAdvancedTimestamp", "delayedMessageIndexSizeInBytes"), 0),
    **dict.fromkeys(("filterProcessedMsgCount",), 0),
    **dict.fromkeys(("nonContiguousDeletedMessagesRangesSerializedSize",), 0),
    **dict.fromkeys(("filterAcceptedMsgCount", "filterRejectedMsgCount"), 0),
    **dict.fromkeys(("filterRescheduledMsgCount",), 0),
    **{
        f"dispatchThrottled{what}EventsBy{of}Limit": 0
        for what in ("Msg", "Bytes")
        for of in ("Subscription", "Topic", "Broker")
    },
}
_OF_TOPIC = {
    **_RATES,
    **dict.fromkeys(("msgRateIn", "msgThroughputIn"), 0.0),
    **dict.fromkeys(("bytesOutCounter", "msgOutCounter", "bytesOutInternalCounter"), 0),
    **dict.fromkeys(("systemTopicBytesInCounter", "publishRateLimitedTimes"), 0),
    **dict.fromkeys(("offloadedStorageSize", "lastOffloadLedgerId"), 0),
    **dict.fromkeys(("lastOffloadSuccessTimeStamp", "lastOffloadFailureTimeStamp"), 0),
    **dict.fromkeys(("ongoingTxnCount", "abortedTxnCount", "committedTxnCount"), 0),
    **dict.fromkeys(("nonContiguousDeletedMessagesRanges", "waitingPublishers"), 0),
    **dict.fromkeys(("nonContiguousDeletedMessagesRangesSerializedSize",), 0),
    **dict.fromkeys(("delayedMessageIndexSizeInBytes",), 0),
}
"""The numbers of Pulsar's JSON that are not measured here. They are there because programs expect
them."""
_NO_COMPACTION = {
    **dict.fromkeys(("lastCompactionRemovedEventCount", "lastCompactionSucceedTimestamp"), 0),
    **dict.fromkeys(("lastCompactionFailedTimestamp", "lastCompactionDurationTimeInMills"), 0),
}
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
    """The rows that a partition keeps, from offset `start` to `end`; `last_ms`: when the last one
    was stored (0: not known)."""

    rows: int
    bytes: int
    start: int = 0
    end: int = 0
    last_ms: int = 0


@dataclass(frozen=True, slots=True)
class SubscriptionFacts:
    """A subscription in one partition. `type` is the subscription type of its consumers; "None": no
    consumer is connected. `backlog` counts the messages that are not acknowledged, `unacked` those
    of them that were sent, `redelivered` the entries that a client asked for again. `is_blocked`:
    so many messages are unacknowledged that no message is sent. `position` is the first offset that
    is not acknowledged, and `since_ms` the time of the first message from there on (0: there is
    none). `acked`: the first ranges of offsets that are acknowledged beyond the position. `pause`:
    why no new message is read ("": messages are read). `active` is
    the consumer that gets all messages; None if several consumers share them."""

    type: str
    is_durable: bool
    backlog: int
    backlog_bytes: int
    position: int
    since_ms: int = 0
    unacked: int = 0
    redelivered: int = 0
    delayed: int = 0
    is_blocked: bool = False
    pause: str = ""
    acked: tuple[Range, ...] = ()
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
        "chunkedMessageRate": 0.0,
        "supportsPartialProducer": False,
        **_client_stats(producer.client),
    }


def _client_stats(client: ClientFacts | None) -> dict[str, Any]:
    if client is None:
        return {"address": "", "clientVersion": "", "connectedSince": "", "metadata": {}}
    return {
        "address": client.link.address,
        "clientVersion": client.version,
        "connectedSince": time_text(client.since_ms),
        "metadata": client.properties,
    }


def subscription_stats(facts: SubscriptionFacts) -> dict[str, Any]:
    """`position`, `acknowledgedRanges`, `redeliveredMessages` and `pausedBy` are fields that
    Pulsar's JSON lacks."""

    def unacked_of(consumer: Consumer) -> int:
        return facts.unacked if consumer is facts.active else consumer.unacked

    return {
        **_OF_SUBSCRIPTION,
        "consumersAfterMarkDeletePosition": {},
        "msgBacklog": facts.backlog,
        "msgBacklogNoDelayed": facts.backlog - facts.delayed,
        "backlogSize": facts.backlog_bytes,
        "earliestMsgPublishTimeInBacklog": facts.since_ms,
        "lastConsumedFlowTimestamp": max((c.asked_ms for c in facts.consumers), default=0),
        "msgDelayed": facts.delayed,
        "unackedMessages": facts.unacked,
        "redeliveredMessages": facts.redelivered,
        "blockedSubscriptionOnUnackedMsgs": facts.is_blocked,
        "type": _TYPES.get(facts.type, facts.type),
        "activeConsumerName": facts.active.name if facts.active is not None else "",
        "isDurable": facts.is_durable,
        "durable": facts.is_durable,
        "replicated": False,
        "isReplicated": False,
        "allowOutOfOrderDelivery": False,
        "subscriptionProperties": dict(facts.properties),
        "position": facts.position,
        "acknowledgedRanges": facts.acked,
        "nonContiguousDeletedMessagesRanges": len(facts.acked),
        "pausedBy": facts.pause,
        "consumers": [
            {
                **_OF_SENT,
                "avgMessagesPerEntry": 0,
                "lastConsumedFlowTimestamp": consumer.asked_ms,
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
    now_ms: int,
) -> dict[str, Any]:
    """`firstOffset` and `endOffset` are fields that Pulsar's JSON lacks."""
    since = (sub["earliestMsgPublishTimeInBacklog"] for sub in subscriptions.values())
    since_ms = min(filter(None, since), default=0)
    return {
        **_OF_TOPIC,
        "bytesInCounter": size.bytes,
        "msgInCounter": size.rows,
        "averageMsgSize": size.bytes / size.rows if size.rows else 0.0,
        "storageSize": size.bytes,
        "backlogSize": max((sub["backlogSize"] for sub in subscriptions.values()), default=0),
        "backlogQuotaLimitSize": info.policies.backlog_bytes_max or -1,
        "backlogQuotaLimitTime": (info.policies.backlog_ms_max or -1000) // 1000,
        "earliestMsgPublishTimeInBacklogs": since_ms,
        "oldestBacklogMessageAgeSeconds": (now_ms - since_ms) // 1000 if since_ms else -1,
        "msgChunkPublished": False,
        "firstOffset": size.start,
        "endOffset": size.end,
        "lastPublishTimeStamp": size.last_ms,
        "topicCreationTimeStamp": info.created_ms,
        "publishers": publishers,
        "subscriptions": subscriptions,
        "replication": {},
        "compaction": _NO_COMPACTION,
        "deduplicationStatus": "Enabled" if info.policies.deduplication else "Disabled",
    }


SUMMED = (
    *("msgRateIn", "msgThroughputIn", "msgRateOut", "msgThroughputOut", "msgRateRedeliver"),
    *("msgRateExpired", "msgBacklog", "msgBacklogNoDelayed", "backlogSize", "msgDelayed"),
    "nonContiguousDeletedMessagesRanges",
    *("unackedMessages", "redeliveredMessages", "storageSize", "bytesInCounter", "msgInCounter"),
)
LATEST = (*("lastPublishTimeStamp", "lastConsumedFlowTimestamp", "oldestBacklogMessageAgeSeconds"),)
EARLIEST = ("earliestMsgPublishTimeInBacklog", "earliestMsgPublishTimeInBacklogs")


def merged(stats: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The sum of partitions, or of one subscription in several partitions. Numbers are added, lists
    of clients are joined. The type is the first that is not "None", the reason of a pause the first
    that is not empty; any other field has the first partition's value."""
    parts = list(stats)
    whole: dict[str, Any] = dict(parts[0]) if parts else {}
    for name in ("position", "acknowledgedRanges", "firstOffset", "endOffset"):
        whole.pop(name, None)
    for name in whole.keys() & {*SUMMED, *LATEST, *EARLIEST}:
        # the owner of a partition may be of a version that does not give this number
        values = [part.get(name, 0) for part in parts]
        if name in SUMMED:
            whole[name] = sum(values)
        else:
            whole[name] = max(values) if name in LATEST else min(filter(None, values), default=0)
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


def without(
    stats: Mapping[str, Any], *, publishers: bool, consumers: bool, times: bool
) -> dict[str, Any]:
    """The statistics of a partition or topic without its publishers, consumers, or times of the
    backlog."""
    shown = dict(stats)
    if publishers:
        shown["publishers"] = []
    if times:
        shown["earliestMsgPublishTimeInBacklogs"] = 0
    less: dict[str, Any] = {"consumers": []} if consumers else {}
    less |= {"earliestMsgPublishTimeInBacklog": 0} if times else {}
    shown["subscriptions"] = {name: sub | less for name, sub in stats["subscriptions"].items()}
    return shown


# -- internal statistics ---------------------------------------------------------------------------


def internal_stats(ledger: int, stats: Mapping[str, Any], *, terminated: bool) -> dict[str, Any]:
    """Of a partition, as if it were the one ledger that its message ids name."""
    rows, size, end = stats["msgInCounter"], stats["storageSize"], stats["endOffset"]
    return {
        "entriesAddedCounter": end,
        "numberOfEntries": rows,
        "totalSize": size,
        "currentLedgerEntries": rows,
        "currentLedgerSize": size,
        "lastLedgerCreatedTimestamp": time_text(stats["topicCreationTimeStamp"]),
        "waitingCursorsCount": 0,
        "pendingAddEntriesCount": 0,
        "lastConfirmedEntry": f"{ledger}:{end - 1}",
        "state": "Terminated" if terminated else "LedgerOpened",
        "ledgers": [_ledger(ledger, rows, size)],
        "cursors": {
            name: _cursor(ledger, subscription)
            for name, subscription in stats["subscriptions"].items()
        },
        "properties": {},
        "schemaLedgers": [],
        "compactedLedger": _ledger(-1, -1, -1),
    }


def _ledger(ledger: int, rows: int, size: int) -> dict[str, Any]:
    of_size = {"ledgerId": ledger, "entries": rows, "size": size}
    return of_size | {"offloaded": False, "underReplicated": False}


def _cursor(ledger: int, subscription: Mapping[str, Any]) -> dict[str, Any]:
    position, unacked = subscription["position"], subscription["unackedMessages"]
    acked = subscription.get("acknowledgedRanges", ())  # an owner of an earlier version gives none
    ranges = ",".join(f"({ledger}:{lo - 1}..{ledger}:{hi - 1}]" for lo, hi in acked)
    return {
        "markDeletePosition": f"{ledger}:{position - 1}",
        "readPosition": f"{ledger}:{position + unacked}",
        "waitingReadOp": False,
        "pendingReadOps": 0,
        "messagesConsumedCounter": position,
        "cursorLedger": -1,
        "cursorLedgerLastEntry": -1,
        "individuallyDeletedMessages": f"[{ranges}]",
        "lastLedgerSwitchTimestamp": "",
        "state": "Open",
        "active": bool(subscription["consumers"]),
        "numberOfEntriesSinceFirstNotAckedMessage": subscription["msgBacklog"],
        "totalNonContiguousDeletedMessagesRange": len(acked),
        "subscriptionHavePendingRead": False,
        "subscriptionHavePendingReplayRead": False,
        "properties": {},
    }


def internal_info(ledger: int, stats: Mapping[str, Any]) -> dict[str, Any]:
    created = time_text(stats["topicCreationTimeStamp"])
    dates = {"creationDate": created, "modificationDate": created}
    return {
        "version": 0,
        **dates,
        "ledgers": [
            {
                "ledgerId": ledger,
                "entries": stats["msgInCounter"],
                "size": stats["storageSize"],
                "timestamp": stats["lastPublishTimeStamp"],
                "isOffloaded": False,
            }
        ],
        "cursors": {
            name: {
                "version": 0,
                **dates,
                "cursorsLedgerId": -1,
                "markDelete": {"ledgerId": ledger, "entryId": subscription["position"] - 1},
            }
            for name, subscription in stats["subscriptions"].items()
        },
    }


def time_text(ms: int) -> str:
    """The time in ISO 8601, of a time that this software noted."""
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds")
