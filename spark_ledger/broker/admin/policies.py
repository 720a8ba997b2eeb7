"""Policies of a namespace: from Pulsar's JSON to NamespacePolicies, and back. Pure.

Always true: an accepted policy is enforced. A policy that is not built is refused, unless it has
the value that Pulsar uses for "not set": then there is nothing to enforce. Grants to `anonymous`
are accepted but not stored: as long as there are no rights, every client may do everything.
"""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from spark_ledger.broker.admin.access import HttpRefusal
from spark_ledger.topic.log.policies import INHERIT, SCHEMA_STRATEGIES, NamespacePolicies
from spark_ledger.topic.log.topics import PARTITIONS_MAX

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
}
"""The values that a client sends for a policy that is not set, beside null and empty lists and
objects."""
ON_BACKLOG = {
    "producer_request_hold": "hold",
    "producer_exception": "exception",
    "consumer_backlog_eviction": "eviction",
}
STORAGE, AGE = "destination_storage", "message_age"
QUOTAS = {STORAGE: "backlog_bytes_max", AGE: "backlog_ms_max"}
"""The policy that has the limit of each type of quota."""
NO_LIMIT = -1
SCHEMA_STRATEGY, UNDEFINED = "schema_compatibility", "undefined"
SCHEMA_AUTO_UPDATE, SCHEMA_VALIDATION = "schema_auto_update", "schema_validation_enforced"
KEEPS_ALL = {"retentionTimeInMinutes": -1, "retentionSizeInMB": -1}
NO_BUNDLES = {"boundaries": ["0x00000000", "0xffffffff"], "numBundles": 1}


def from_pulsar(plain: Any, cluster: str) -> NamespacePolicies:
    """Raises HttpRefusal."""
    creation: dict[str, Any] = {}
    topics: dict[str, Any] = {}
    for name, value in _object({} if plain is None else plain).items():
        if value is None or value == {} or value == [] or name == "bundles":
            continue  # a namespace is not divided into bundles: each partition has its owner
        if name == "replication_clusters":
            check_clusters(value, cluster)
        elif name == "auth_policies":
            _check_grants(value)
        elif name == "deduplicationEnabled":
            topics["deduplication"] = checked_bool(value)
        elif name == "message_ttl_in_seconds":
            topics |= message_ttl(value)
        elif name == "backlog_quota_map":
            for kind, quota in _object(value).items():
                topics |= backlog_quota(kind, quota, topics)
        elif name == "schema_compatibility_strategy":
            strategy = schema_strategy_named(value)
            topics |= {} if strategy == INHERIT else {SCHEMA_STRATEGY: strategy}
        elif name == "schema_validation_enforced":
            topics[SCHEMA_VALIDATION] = checked_bool(value)
        elif name == "is_allow_auto_update_schema":
            topics[SCHEMA_AUTO_UPDATE] = checked_bool(value)
        elif name == "autoTopicCreationOverride":
            creation = auto_creation(value)
        elif not (name == "retention_policies" and value == KEEPS_ALL) and not any(
            value is unset or (type(value) is type(unset) and value == unset)
            for unset in UNSET.get(name, ())
        ):
            raise HttpRefusal(
                HTTPStatus.NOT_IMPLEMENTED, f"the policy {name} is not built yet: leave it out"
            )
    return NamespacePolicies(topics=topics).with_changes(creation)


def to_pulsar(policies: NamespacePolicies, cluster: str) -> dict[str, Any]:
    return {
        "auth_policies": {
            "namespace_auth": {},
            "destination_auth": {},
            "subscription_auth_roles": {},
        },
        "replication_clusters": [cluster],
        "bundles": NO_BUNDLES,
        "backlog_quota_map": quotas(policies),
        "message_ttl_in_seconds": ttl_of(policies),
        "deduplicationEnabled": policies.topics.get("deduplication"),
        "autoTopicCreationOverride": auto_creation_of(policies),
        "deleted": False,
        "encryption_required": False,
        "subscription_auth_mode": "None",
        "schema_compatibility_strategy": schema_strategy_of(policies),
        "schema_validation_enforced": policies.topics.get(SCHEMA_VALIDATION, False),
        "is_allow_auto_update_schema": policies.topics.get(SCHEMA_AUTO_UPDATE),
    }


def schema_strategy_of(policies: NamespacePolicies) -> str:
    return str(policies.topics.get(SCHEMA_STRATEGY, UNDEFINED)).upper()


def schema_strategy_named(value: Any) -> str:
    """The policy's value for one of Pulsar's names. Raises HttpRefusal."""
    strategy = value.lower() if isinstance(value, str) else value
    if strategy in ("", UNDEFINED):
        return INHERIT
    if strategy not in SCHEMA_STRATEGIES:
        raise HttpRefusal(
            HTTPStatus.BAD_REQUEST, f"there is no schemaCompatibilityStrategy {value!r}"[:200]
        )
    return str(strategy)


def check_clusters(clusters: Any, cluster: str) -> None:
    """Raises HttpRefusal unless the list names this cluster alone."""
    if not isinstance(clusters, list) or not all(isinstance(name, str) for name in clusters):
        raise HttpRefusal(HTTPStatus.BAD_REQUEST, f"clusters are a list of names, not {clusters!r}")
    others = [name for name in clusters if name != cluster]
    if others:
        raise HttpRefusal(
            HTTPStatus.PRECONDITION_FAILED,
            f"Cluster {others[0]} does not exist: this is cluster {cluster}, and there is no"
            " replication to others",
        )


def checked_bool(value: Any) -> bool:
    """Raises HttpRefusal."""
    if not isinstance(value, bool):
        raise HttpRefusal(HTTPStatus.BAD_REQUEST, f"true or false is needed, not {value!r}")
    return value


def _object(plain: Any) -> dict[str, Any]:
    if not isinstance(plain, dict):
        raise HttpRefusal(HTTPStatus.BAD_REQUEST, f"an object is needed, not {plain!r}")
    return plain


def message_ttl(seconds: Any) -> dict[str, Any]:
    """The changes to a namespace's policies for this TTL; 0: messages do not expire. Raises
    HttpRefusal."""
    if type(seconds) is not int or not 0 <= seconds < 2**31:
        raise HttpRefusal(
            HTTPStatus.PRECONDITION_FAILED, f"Invalid value for message TTL: {seconds!r}"
        )
    return {"message_ttl_ms": seconds * 1000 or None}


def ttl_of(policies: NamespacePolicies) -> int | None:
    """The TTL in seconds; 0: messages do not expire; None: the policy is not set."""
    if "message_ttl_ms" not in policies.topics:
        return None
    return (policies.topics["message_ttl_ms"] or 0) // 1000


def backlog_quota(kind: str, plain: Any, topics: Mapping[str, Any]) -> dict[str, Any]:
    """The changes to a namespace's policies for this quota; `topics` has the present policies. In
    `plain`, `limit` is an older name of `limitSize`; older clients send its value as text. Raises
    HttpRefusal."""
    if kind not in QUOTAS:
        raise HttpRefusal(HTTPStatus.BAD_REQUEST, f"there is no backlogQuotaType '{kind}'")
    quota = _object(plain)
    on_backlog = ON_BACKLOG.get(str(quota.get("policy")))
    if on_backlog is None:
        raise HttpRefusal(HTTPStatus.BAD_REQUEST, f"there is no policy {quota.get('policy')!r}")
    names = ("limitSize", "limit") if kind == STORAGE else ("limitTime",)
    limit = next((quota[name] for name in names if name in quota), NO_LIMIT)
    try:
        number = int(limit)
    except (ValueError, TypeError, OverflowError):
        raise HttpRefusal(HTTPStatus.BAD_REQUEST, f"the limit {limit!r} is not a number") from None
    others = [QUOTAS[other] for other in QUOTAS if other != kind]
    if any(topics.get(other) is not None for other in others) and (
        topics.get("on_backlog", "hold") != on_backlog
    ):
        raise HttpRefusal(
            HTTPStatus.NOT_IMPLEMENTED,
            f"{STORAGE} and {AGE} share one policy here, which is now {topics.get('on_backlog')}:"
            " give the same policy for both",
        )
    scale = 1 if kind == STORAGE else 1000
    limited = None if number < 0 else number * scale
    return {QUOTAS[kind]: limited, "on_backlog": on_backlog}


def quotas(policies: NamespacePolicies) -> dict[str, Any]:
    topics, plain = policies.topics, {}
    pulsars = {ours: name for name, ours in ON_BACKLOG.items()}
    for kind, name in QUOTAS.items():
        limit = topics.get(name)
        if limit is not None:
            plain[kind] = {
                "limit": limit if kind == STORAGE else NO_LIMIT,
                "limitSize": limit if kind == STORAGE else NO_LIMIT,
                "limitTime": limit // 1000 if kind == AGE else NO_LIMIT,
                "policy": pulsars[topics.get("on_backlog", "hold")],
            }
    return plain


def auto_creation_of(policies: NamespacePolicies) -> dict[str, Any] | None:
    creates, partitions = policies.auto_create, policies.auto_create_partitions
    if creates is None and partitions is None:
        return None
    return {
        "allowAutoTopicCreation": creates is not False,
        "topicType": "partitioned" if partitions else "non-partitioned",
        "defaultNumPartitions": partitions or None,
    }


def auto_creation(plain: Any) -> dict[str, Any]:
    """The changes to a namespace's policies. Raises HttpRefusal."""
    _object(plain)
    changes: dict[str, Any] = {"auto_create": checked_bool(plain.get("allowAutoTopicCreation"))}
    kind, partitions = plain.get("topicType"), plain.get("defaultNumPartitions")
    if kind == "partitioned":
        if type(partitions) is not int or not 1 <= partitions <= PARTITIONS_MAX:
            raise HttpRefusal(
                HTTPStatus.NOT_ACCEPTABLE, f"defaultNumPartitions must not be {partitions!r}"
            )
        changes["auto_create_partitions"] = partitions
    elif kind in ("non-partitioned", None):
        changes["auto_create_partitions"] = 0
    else:
        raise HttpRefusal(HTTPStatus.NOT_ACCEPTABLE, f"there is no topicType {kind!r}")
    return changes


def _check_grants(plain: Any) -> None:
    grants = plain.get("namespace_auth") or {} if isinstance(plain, dict) else None
    if not isinstance(grants, dict):
        raise HttpRefusal(HTTPStatus.BAD_REQUEST, f"grants are an object, not {plain!r}")
    roles = set(grants)
    others = {name: value for name, value in plain.items() if value and name != "namespace_auth"}
    if roles - {ANONYMOUS} or others:
        raise HttpRefusal(
            HTTPStatus.NOT_IMPLEMENTED,
            f"rights are not built yet: only {ANONYMOUS} may have grants",
        )
