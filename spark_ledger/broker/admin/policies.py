"""The table of Pulsar's policies that a broker takes: from Pulsar's JSON to the policies of a
namespace or a topic (topic/log/policies.py), and back. Pure.

Always true: an accepted policy is enforced. A policy that is not implemented is refused, unless it
has the value that Pulsar uses for "not set": then there is nothing to enforce. Grants to
`anonymous` are accepted but not stored: as long as there are no rights, every client may do
everything.
"""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from spark_ledger.broker.admin.policy_shapes import (
    DELAYS,
    INT_MAX,
    LONG_MAX,
    NO_LIMIT,
    PulsarPolicy,
    Values,
    checked_bool,
    checked_object,
    rate,
    refused,
    whole_number,
    wrong_shape,
)
from spark_ledger.topic.log.policies import (
    ACKNOWLEDGED,
    INHERIT,
    PARTITIONS_MAX,
    QUORUM_NAMES,
    SCHEMA_STRATEGIES,
    NamespacePolicies,
    TopicPolicies,
)

ANONYMOUS = "anonymous"
UNSET: Mapping[str, tuple[Any, ...]] = {
    "deleted": (False,),
    "encryption_required": (False,),
    "migrated": (False,),
    "offload_threshold": (-1, 0),
    "offload_threshold_in_seconds": (-1,),
    "antiAffinityGroup": ("",),
    "subscription_auth_mode": ("None", ""),
    "schema_auto_update_compatibility_strategy": ("Full", ""),
    **dict.fromkeys(("allowed_clusters", "clusterDispatchRate", "replicatorDispatchRate"), ()),
    **dict.fromkeys(("latency_stats_sample_rate", "inactive_topic_policies", "entryFilters"), ()),
    **dict.fromkeys(("compaction_threshold", "offload_deletion_lag_ms", "offload_policies"), ()),
    **dict.fromkeys(("subscription_types_enabled", "resource_group_name"), ()),
    "dispatcherPauseOnAckStatePersistentEnabled": (),
}
"""The policies of Pulsar that are not implemented, with the values that a client sends for a policy
that is not set, beside null and empty lists and objects."""
ON_BACKLOG = {
    "producer_request_hold": "hold",
    "producer_exception": "exception",
    "consumer_backlog_eviction": "eviction",
}
STORAGE, AGE = "destination_storage", "message_age"
QUOTAS = {STORAGE: "backlog_bytes_max", AGE: "backlog_ms_max"}
"""The policy that has the limit of each type of quota."""
UNDEFINED = "undefined"
NO_BUNDLES = {"boundaries": ["0x00000000", "0xffffffff"], "numBundles": 1}
MINUTE_MS, MIB = 60_000, 1 << 20
RATE_MIN = 1.0
"""Brokers write positions once a second, at most: a higher limit is kept whatever its value."""
ENTRIES_READ_MIN = 100
"""A segment is sealed after so many entries at the earliest: a seal is a commit."""
DEFAULTS = TopicPolicies()


# -- switches and numbers --------------------------------------------------------------------------


def _switch(ours: str, namespace: str, topic: str, record: str, **fields: Any) -> PulsarPolicy:
    def take(plain: Any) -> dict[str, Any]:
        return {ours: checked_bool(plain)}

    def show(values: Values) -> Any:
        return values.get(ours)

    return PulsarPolicy(namespace, topic, (ours,), take, show, record, **fields)


def _limit(
    ours: str,
    namespace: str,
    topic: str,
    record: str,
    *,
    none: Any = None,
    unset: Any = None,
    least: int = 1,
    unit: int = 1,
    below_0: str = "",
) -> PulsarPolicy:
    """A number from 0 on; `none` is the value here for 0, which means no limit. A number below
    `least` is not implemented. `unit`: 1 is so many here. `below_0` are the words that refuse a
    negative number, where programs compare them."""
    name = namespace or topic

    def take(plain: Any) -> dict[str, Any]:
        number = whole_number(plain, name)
        if number < 0:
            raise refused(HTTPStatus.PRECONDITION_FAILED, below_0 or f"{name} must be 0 or more")
        if 0 < number < least:
            reason = f"a {name} of {number} is refused: give {least} or more, or 0"
            raise refused(HTTPStatus.NOT_IMPLEMENTED, reason)
        return {ours: number * unit or none}

    def show(values: Values) -> Any:
        return None if ours not in values else _units(values[ours] or 0, unit)

    return PulsarPolicy(namespace, topic, (ours,), take, show, record, unset)


# -- policies with a shape of their own ------------------------------------------------------------


def _take_ttl(seconds: Any) -> dict[str, Any]:
    """0: messages do not expire."""
    if type(seconds) is not int:
        raise wrong_shape(f"a whole number of seconds is needed, not {seconds!r}"[:200])
    if not 0 <= seconds <= INT_MAX:
        raise refused(HTTPStatus.PRECONDITION_FAILED, f"Invalid value for message TTL: {seconds}")
    return {"message_ttl_ms": seconds * 1000 or None}


def _show_ttl(values: Values) -> Any:
    return None if "message_ttl_ms" not in values else _units(values["message_ttl_ms"] or 0, 1000)


def _units(amount: int, unit: int) -> int:
    """How many units the amount is, rounded up: 0 has a meaning of its own."""
    return -(-amount // unit)


_RETENTION_FIELDS = ("retentionTimeInMinutes", "retentionSizeInMB")


def _take_retention(plain: Any) -> dict[str, Any]:
    retention = checked_object(plain, _RETENTION_FIELDS)
    age, size = (retention.get(name) for name in _RETENTION_FIELDS)
    minutes = whole_number(age, _RETENTION_FIELDS[0])
    if type(size) is not int or not NO_LIMIT <= size <= LONG_MAX // MIB or minutes < NO_LIMIT:
        raise refused(
            HTTPStatus.PRECONDITION_FAILED,
            f"a retention of {minutes} minutes and {size!r} MB is refused: give whole numbers from"
            " 1 on, or -1 for no limit",
        )
    if (minutes == 0) != (size == 0):
        raise refused(
            HTTPStatus.PRECONDITION_FAILED,
            "a retention of 0 minutes or of 0 MB alone is refused: give 0 for both, or -1 for no"
            " limit",
        )
    return {
        "retention": ACKNOWLEDGED if minutes == 0 else DEFAULTS.retention,
        "retention_ms": minutes * MINUTE_MS if minutes > 0 else None,
        "retention_bytes": size * MIB if size > 0 else None,
    }


def _show_retention(values: Values) -> Any:
    age, size = values.get("retention_ms"), values.get("retention_bytes")
    if age is None and size is None and values.get("retention") == ACKNOWLEDGED:
        age = size = 0
    elif "retention_ms" not in values and "retention_bytes" not in values:
        return None
    minutes = NO_LIMIT if age is None else _units(age, MINUTE_MS)
    megabytes = NO_LIMIT if size is None else _units(size, MIB)
    return dict(zip(_RETENTION_FIELDS, (minutes, megabytes), strict=True))


_PERSISTENCE = ("bookkeeperEnsemble", "bookkeeperWriteQuorum", "bookkeeperAckQuorum")
_MARK_RATE = "managedLedgerMaxMarkDeleteRate"


def _take_persistence(plain: Any) -> dict[str, Any]:
    persistence = checked_object(plain, (*_PERSISTENCE, _MARK_RATE))
    rate = persistence.get(_MARK_RATE) or 0
    if isinstance(rate, bool) or not isinstance(rate, int | float):
        raise wrong_shape(f"{_MARK_RATE} is a number, not {rate!r}")
    sizes = [whole_number(persistence.get(name), name) for name in _PERSISTENCE]
    if not sizes[0] >= sizes[1] >= sizes[2] >= 1 or rate < 0:
        raise refused(
            HTTPStatus.PRECONDITION_FAILED,
            f"Bookkeeper-Ensemble >= WriteQuorum >= AckQuorum >= 1 does not hold for {sizes}, or"
            f" {_MARK_RATE} {rate} is below 0",
        )
    if 0 < rate < RATE_MIN:
        raise refused(
            HTTPStatus.NOT_IMPLEMENTED,
            f"{_MARK_RATE} {rate} is refused: positions are written once a second, give 1 or more,"
            " or 0 for no limit",
        )
    return dict(zip(QUORUM_NAMES, sizes, strict=True))


def _show_persistence(values: Values) -> Any:
    if not any(name in values for name in QUORUM_NAMES):
        return None
    sizes = [values.get(name, getattr(DEFAULTS, name)) for name in QUORUM_NAMES]
    return {**dict(zip(_PERSISTENCE, sizes, strict=True)), _MARK_RATE: 0.0}


_ALLOWS_TOPICS, _PARTITIONS = "allowAutoTopicCreation", "defaultNumPartitions"


def _take_creation(plain: Any) -> dict[str, Any]:
    """Programs compare the words of a refusal."""
    given = checked_object(plain, (_ALLOWS_TOPICS, "topicType", _PARTITIONS))
    creates = checked_bool(given.get(_ALLOWS_TOPICS))
    kind, partitions = given.get("topicType") or "non-partitioned", given.get(_PARTITIONS)
    fault = None
    if kind not in ("partitioned", "non-partitioned"):
        fault = f"Unknown topic type [{kind}]"[:200]
    elif kind == "non-partitioned":
        if partitions is not None:
            fault = f"[{_PARTITIONS}] is not allowed to be set when the type is non-partition."
    elif partitions is None:
        fault = f"[{_PARTITIONS}] cannot be null when the type is partitioned."
    elif type(partitions) is not int or partitions < 1:
        fault = f"[{_PARTITIONS}] cannot be less than 1 for partition type."
    elif partitions > PARTITIONS_MAX:
        fault = f"[{_PARTITIONS}] cannot be larger than {PARTITIONS_MAX}."
    if fault is not None and creates:
        raise refused(
            HTTPStatus.NOT_ACCEPTABLE,
            f"Invalid configuration for autoTopicCreationOverride. the detail is {fault}",
        )
    is_partitioned = fault is None and kind == "partitioned"
    return {"auto_create": creates, "auto_create_partitions": partitions if is_partitioned else 0}


def _show_creation(values: Values) -> Any:
    creates, partitions = values.get("auto_create"), values.get("auto_create_partitions")
    if creates is None and partitions is None:
        return None
    return {
        _ALLOWS_TOPICS: creates is not False,
        "topicType": "partitioned" if partitions else "non-partitioned",
        _PARTITIONS: partitions or None,
    }


_ALLOWS = "allowAutoSubscriptionCreation"


def _take_subscriptions(plain: Any) -> dict[str, Any]:
    return {
        "auto_create_subscriptions": checked_bool(checked_object(plain, (_ALLOWS,)).get(_ALLOWS))
    }


def _show_subscriptions(values: Values) -> Any:
    creates = values.get("auto_create_subscriptions")
    return None if creates is None else {_ALLOWS: creates}


def _take_strategy(value: Any) -> dict[str, Any]:
    strategy = value.lower() if isinstance(value, str) else value
    if strategy in ("", UNDEFINED):
        return {"schema_compatibility": INHERIT}
    if strategy not in SCHEMA_STRATEGIES:
        raise wrong_shape(f"there is no schemaCompatibilityStrategy {value!r}"[:200])
    return {"schema_compatibility": str(strategy)}


def _show_strategy(values: Values) -> Any:
    strategy = values.get("schema_compatibility")
    return None if strategy is None else strategy.upper()


# -- the table -------------------------------------------------------------------------------------

_RETENTION = ("retention_ms", "retention_bytes", "retention")
POLICIES = (
    _switch("deduplication", "deduplication", "deduplicationEnabled", "deduplicationEnabled"),
    PulsarPolicy(
        *("messageTTL", "messageTTL", ("message_ttl_ms",), _take_ttl, _show_ttl),
        record="message_ttl_in_seconds",
    ),
    PulsarPolicy(
        *("retention", "retention", _RETENTION, _take_retention, _show_retention),
        record="retention_policies",
    ),
    PulsarPolicy(
        *("persistence", "persistence", QUORUM_NAMES, _take_persistence, _show_persistence),
        record="persistence",
    ),
    PulsarPolicy(
        "autoTopicCreation",
        "",
        ("auto_create", "auto_create_partitions"),
        *(_take_creation, _show_creation),
        record="autoTopicCreationOverride",
    ),
    PulsarPolicy(
        "autoSubscriptionCreation",
        "autoSubscriptionCreation",
        ("auto_create_subscriptions",),
        *(_take_subscriptions, _show_subscriptions),
        record="autoSubscriptionCreationOverride",
    ),
    PulsarPolicy(
        "schemaCompatibilityStrategy",
        "schemaCompatibilityStrategy",
        ("schema_compatibility",),
        *(_take_strategy, _show_strategy),
        record="schema_compatibility_strategy",
        unset=UNDEFINED.upper(),
        verbs=("GET", "PUT"),
    ),
    _switch(
        "schema_validation_enforced",
        "schemaValidationEnforced",
        "schemaValidationEnforced",
        "schema_validation_enforced",
        unset=False,
        verbs=("GET", "POST"),
    ),
    _switch(
        "schema_auto_update",
        "isAllowAutoUpdateSchema",
        "",
        "is_allow_auto_update_schema",
        unset=True,
        verbs=("GET", "POST"),
    ),
    _limit("producers_max", "maxProducersPerTopic", "maxProducers", "max_producers_per_topic"),
    _limit("consumers_max", "maxConsumersPerTopic", "maxConsumers", "max_consumers_per_topic"),
    _limit(
        "subscription_consumers_max",
        "maxConsumersPerSubscription",
        "maxConsumersPerSubscription",
        "max_consumers_per_subscription",
    ),
    _limit(
        "subscriptions_max",
        "maxSubscriptionsPerTopic",
        "maxSubscriptionsPerTopic",
        "max_subscriptions_per_topic",
    ),
    _limit(
        "consumer_unacked_max",
        "maxUnackedMessagesPerConsumer",
        "maxUnackedMessagesOnConsumer",
        "max_unacked_messages_per_consumer",
        none=0,
    ),
    _limit(
        "subscription_unacked_max",
        "maxUnackedMessagesPerSubscription",
        "maxUnackedMessagesOnSubscription",
        "max_unacked_messages_per_subscription",
        none=0,
    ),
    _limit("topics_max", "maxTopicsPerNamespace", "", "max_topics_per_namespace", unset=0),
    _limit(
        "subscription_expiry_ms",
        "subscriptionExpirationTime",
        "",
        "subscription_expiration_time_minutes",
        unit=MINUTE_MS,
        below_0="Invalid value for subscription expiration time",
    ),
    DELAYS,
    _limit(
        "deduplication_entries_max",
        "deduplicationSnapshotInterval",
        "deduplicationSnapshotInterval",
        "deduplicationSnapshotIntervalSeconds",
        least=ENTRIES_READ_MIN,
    ),
    rate("publish_rate", "publishRate", "publishMaxMessageRate"),
    rate("dispatch_rate", "dispatchRate", "topicDispatchRate"),
    rate("subscription_dispatch_rate", "subscriptionDispatchRate", "subscriptionDispatchRate"),
    rate("subscribe_rate", "subscribeRate", "clusterSubscribeRate"),
    _limit("message_bytes_max", "", "maxMessageSize", ""),
)
"""Every policy that is taken, except quotas, which a query parameter divides in two."""

NOT_IMPLEMENTED: Mapping[str, Any] = {
    **dict.fromkeys(("compactionThreshold", "inactiveTopicPolicies", "replicatorDispatchRate")),
    **dict.fromkeys(("offloadPolicies", "entryFilters")),
}
"""Policies of namespaces and topics that cannot be set here, with the value that a policy has which
is not set."""
NOT_IMPLEMENTED_OF_NAMESPACES: Mapping[str, Any] = {
    "offloadThreshold": -1,
    "offloadThresholdInSeconds": -1,
    "offloadDeletionLagMs": None,
}
NOT_IMPLEMENTED_OF_TOPICS: Mapping[str, Any] = {"replication": None}


# -- quotas ----------------------------------------------------------------------------------------


_QUOTA_FIELDS = ("limitSize", "limit", "limitTime", "policy")


def backlog_quota(kind: str, plain: Any, present: Values) -> dict[str, Any]:
    """The changes for this quota; `present` has the policies that count now. In `plain`, `limit` is
    an older name of `limitSize`; older clients send its value as text. Raises HttpRefusal."""
    name, quota = quota_named(kind), checked_object(plain, _QUOTA_FIELDS)
    on_backlog = ON_BACKLOG.get(str(quota.get("policy")))
    if on_backlog is None:
        raise wrong_shape(f"there is no policy {quota.get('policy')!r}")
    fields = ("limitSize", "limit") if kind == STORAGE else ("limitTime",)
    limit = next((quota[field] for field in fields if field in quota), NO_LIMIT)
    try:
        number = int(limit) if type(limit) in (int, str) else None
    except ValueError:
        number = None
    scale = 1 if kind == STORAGE else 1000
    if number is None or abs(number) > LONG_MAX // scale:
        raise wrong_shape(f"the limit {limit!r} is not a whole number"[:200])
    if _other_quota(kind, present) is not None and present.get("on_backlog", "hold") != on_backlog:
        raise refused(
            HTTPStatus.NOT_IMPLEMENTED,
            f"{STORAGE} and {AGE} share one policy here, which is now {present.get('on_backlog')}:"
            " give the same policy for both",
        )
    return {name: None if number < 0 else number * scale, "on_backlog": on_backlog}


def no_backlog_quota(kind: str, present: Values) -> dict[str, Any]:
    """The changes that unset this quota. Raises HttpRefusal."""
    name = quota_named(kind)
    is_last = _other_quota(kind, present) is None
    return dict.fromkeys((name, "on_backlog") if is_last else (name,), INHERIT)


def quota_named(kind: str) -> str:
    if kind not in QUOTAS:
        raise wrong_shape(f"there is no backlogQuotaType '{kind}'")
    return QUOTAS[kind]


def _other_quota(kind: str, values: Values) -> Any:
    return values.get(QUOTAS[AGE if kind == STORAGE else STORAGE])


def quotas(values: Values) -> dict[str, Any]:
    plain = {}
    pulsars = {ours: name for name, ours in ON_BACKLOG.items()}
    for kind, name in QUOTAS.items():
        limit = values.get(name)
        if limit is not None:
            plain[kind] = {
                "limit": limit if kind == STORAGE else NO_LIMIT,
                "limitSize": limit if kind == STORAGE else NO_LIMIT,
                "limitTime": _units(limit, 1000) if kind == AGE else NO_LIMIT,
                "policy": pulsars[values.get("on_backlog", "hold")],
            }
    return plain


# -- the object of all policies --------------------------------------------------------------------


def from_pulsar(plain: Any, cluster: str) -> NamespacePolicies:
    """Raises HttpRefusal, errors.BadConfig."""
    taken = {policy.record: policy for policy in POLICIES if policy.record}
    changes: dict[str, Any] = {}
    for name, value in checked_object({} if plain is None else plain).items():
        if value is None or value == {} or value == [] or name == "bundles":
            continue  # a namespace is not divided into bundles: each partition has its owner
        if name in taken:
            if taken[name].by_cluster:
                check_clusters(list(checked_object(value)), cluster)
                value = value[cluster]
            changes |= taken[name].take(value)
        elif name == "replication_clusters":
            check_clusters(value, cluster)
        elif name == "auth_policies":
            _check_grants(value)
        elif name == "backlog_quota_map":
            for kind, quota in checked_object(value).items():
                changes |= backlog_quota(kind, quota, changes)
        elif name == "properties":
            changes[name] = checked_object(value)
        elif name not in UNSET:
            raise wrong_shape(f"there is no policy {name[:100]!r}")
        elif not any(
            value is unset or (type(value) is type(unset) and value == unset)
            for unset in UNSET[name]
        ):
            raise refused(
                HTTPStatus.NOT_IMPLEMENTED,
                f"the policy {name} is not implemented yet: leave it out",
            )
    return NamespacePolicies().with_changes(changes)


def to_pulsar(values: Values, cluster: str) -> dict[str, Any]:
    """The object of all policies of a namespace with these values."""
    return {
        "auth_policies": {
            "namespace_auth": {},
            "destination_auth": {},
            "subscription_auth_roles": {},
        },
        "replication_clusters": [cluster],
        "bundles": NO_BUNDLES,
        "backlog_quota_map": quotas(values),
        "deleted": False,
        "encryption_required": False,
        "subscription_auth_mode": "None",
        "properties": values.get("properties") or {},
        **{
            policy.record: _recorded(policy, values, cluster)
            for policy in POLICIES
            if policy.record
        },
    }


def _recorded(policy: PulsarPolicy, values: Values, cluster: str) -> Any:
    shown = policy.of_namespace(values)
    if policy.by_cluster:
        return {} if shown is None else {cluster: shown}
    return shown


def check_clusters(clusters: Any, cluster: str) -> None:
    """Raises HttpRefusal unless the list names this cluster alone."""
    if not isinstance(clusters, list) or not all(isinstance(name, str) for name in clusters):
        raise wrong_shape(f"clusters are a list of names, not {clusters!r}")
    others = [name for name in clusters if name != cluster]
    if others:
        raise refused(
            HTTPStatus.PRECONDITION_FAILED,
            f"Cluster {others[0]} does not exist: this is cluster {cluster}, and there is no"
            " replication to others",
        )


def _check_grants(plain: Any) -> None:
    grants = plain.get("namespace_auth") or {} if isinstance(plain, dict) else None
    if not isinstance(grants, dict):
        raise wrong_shape(f"grants are an object, not {plain!r}")
    roles = set(grants)
    others = {name: value for name, value in plain.items() if value and name != "namespace_auth"}
    if roles - {ANONYMOUS} or others:
        raise refused(
            HTTPStatus.NOT_IMPLEMENTED,
            f"rights are not implemented yet: only {ANONYMOUS} may have grants",
        )
