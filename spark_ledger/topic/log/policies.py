"""Policies: quorums, durability and sizes of a topic's ledgers, and how long it keeps its rows.

Always true: E >= Qw >= Qa >= 1; times and sizes are positive; None keeps rows for ever. Policies
can be changed later; changed quorums, durability and limits hold for ledgers made after the change.
The policies that were set on a topic are its own policies. For any other policy the topic has the
present value of its namespace, or else the default. The three quorums are set together, so that
they always fit. Two task ledgers are interchangeable only if their policies are equal, so the
policies are part of the ledger cache's key.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from spark_ledger import errors, units
from spark_ledger.rates import Rate

PARTITIONS_MAX = 100_000
PROPERTIES_BYTES_MAX = 16 << 10
"""How many bytes the names and values of a namespace's properties may take."""
SYNCED, PAGE_CACHE = DURABILITIES = ("synced", "page-cache")
DELETE_DELAY_MS = 24 * 3600 * 1000
ROLL_AGE_S_MAX = 4 * 3600
"""At this age at the latest a broker or a cursor closes its ledger and goes on in a new ledger,
whatever the policies. Maintenance fences a ledger that is open for longer (garbage.open_ms_max)."""
PASS_BYTES = 128 << 20
"""How much maintenance copies in one pass (one a minute) to merge small segments."""
NONE_MEANINGS = {
    "retention_ms": "to keep rows for ever",
    "retention_bytes": "to keep rows for ever",
    "message_ttl_ms": "for messages that never expire",
    "backlog_bytes_max": "for no quota",
    "backlog_ms_max": "for no quota",
    "producers_max": "for no limit",
    "consumers_max": "for no limit",
    "subscription_consumers_max": "for no limit",
    "subscriptions_max": "for no limit",
    "subscription_expiry_ms": "for subscriptions that stay",
    "consumer_unacked_max": "for the broker's setting",
    "subscription_unacked_max": "for the broker's setting",
    "message_bytes_max": "for the broker's setting",
    "delay_ms_max": "for no limit",
    "deduplication_entries_max": "for the broker's setting",
    "publish_rate": "for no limit",
    "dispatch_rate": "for no limit",
    "subscription_dispatch_rate": "for no limit",
    "subscribe_rate": "for no limit",
}
"""The policies that may be None, and what None means for each."""
MAY_BE_0 = ("delete_delay_ms", "consumer_unacked_max", "subscription_unacked_max")
ON_LOST_ROWS = ("pause", "skip")
ACKNOWLEDGED = "acknowledged"
RETENTIONS = ("limits", ACKNOWLEDGED)
ON_BACKLOGS = ("hold", "exception", "eviction")
SCHEMA_STRATEGIES = (
    *("always_incompatible", "always_compatible", "backward", "forward", "full"),
    *("backward_transitive", "forward_transitive", "full_transitive"),
)
CHOICES = {
    "durability": DURABILITIES,
    "on_lost_rows": ON_LOST_ROWS,
    "retention": RETENTIONS,
    "on_backlog": ON_BACKLOGS,
    "schema_compatibility": SCHEMA_STRATEGIES,
}
TEXT_NAMES = tuple(CHOICES)
RATES = {
    "publish_rate": "200 messages, 1048576 bytes",
    "dispatch_rate": "200 messages, 1048576 bytes, 30 s, relative",
    "subscription_dispatch_rate": "200 messages, 1048576 bytes, 30 s, relative",
    "subscribe_rate": "10 requests, 30 s",
}
"""The policies that are rates (rates.py), with an example that has all that the policy may have."""
_NO_RATE = tuple(asdict(Rate()).values())
SWITCH_VALUES = {"true": True, "false": False}
SWITCH_NAMES = (
    *("merging", "deduplication", "partitioned"),
    *("schema_auto_update", "schema_validation_enforced", "auto_create_subscriptions"),
    "delayed_delivery",
)
ENSEMBLE_SIZE = "ensemble_size"
QUORUM_NAMES = (ENSEMBLE_SIZE, "write_quorum", "ack_quorum")
ALWAYS_OWN = ("partitioned", "retention")
"""Policies that are always a topic's own, so that a change of the namespace neither changes an
existing topic for clients nor takes away rows that the topic should keep."""
INHERIT = "inherit"
"""The value of a change that unsets a policy."""


@dataclass(frozen=True, slots=True)
class TopicPolicies:
    """Quorums, durability, and the limits of a task ledger, which is rolled at the first limit that
    it reaches.

    `retention_ms`: maintenance may trim rows that were committed longer ago. `retention_bytes`:
    maintenance may trim the oldest rows of a partition that has more bytes. Maintenance trims whole
    segments, and no segment that a subscription still holds. `delete_delay_ms`: how long a ledger
    to which no commit refers any more stays on the bookies, so that reads that were planned earlier
    still find the ledger; at least as long as the longest read. `merging`: the cluster's
    maintenance merges small segments without a request (upkeep.py). `deduplication`: no message of
    a Pulsar producer is stored twice (live_writer.py). `partitioned`: false of a topic that has one
    partition and must not grow; Pulsar's clients treat it as a topic without partitions.
    `on_lost_rows`: what a broker's consumers do at rows that no bookie has any more: they `pause`
    in that partition, or `skip` the rows. `retention` counts only without `retention_ms` and
    `retention_bytes`: with `acknowledged`, maintenance trims the rows that every subscription of
    the topic has passed, if there is a subscription; with `limits` it keeps all rows.

    `message_ttl_ms`: the subscriptions of Pulsar's consumers pass messages that were stored longer
    ago. `backlog_bytes_max` and `backlog_ms_max`: how much of a partition a subscription may leave
    unread, and for how long. `on_backlog`: what a broker does when a subscription leaves more: it
    holds producers back (`hold`), refuses them (`exception`), or moves the slowest subscription
    forward (`eviction`).

    `schema_compatibility`: which schema Pulsar's clients may declare after another (schema/
    client_rules.py). Without `schema_auto_update` no producer or consumer adds a version, nor
    the first one. With `schema_validation_enforced` a producer must declare a schema where there is
    one.

    Maintenance deletes a subscription that Pulsar's consumers have not used for
    `subscription_expiry_ms` (upkeep/subscription_expiry.py).

    A broker lets in no more than `producers_max` producers and `consumers_max` consumers of a
    partition, and `subscription_consumers_max` consumers of a subscription in it. Clients make no
    subscription beyond `subscriptions_max` of the topic, and none without
    `auto_create_subscriptions`. `consumer_unacked_max` and `subscription_unacked_max` count in
    place of the broker's settings of these names; 0: no limit. A broker refuses batches, and chunks
    of messages, of more than `message_bytes_max`, metadata included; the broker's setting of this
    name counts too.

    Without `delayed_delivery` a broker sends delayed messages at once. It stores none that is to
    wait for more than `delay_ms_max`. With `deduplication` the next owner of a partition reads
    `deduplication_entries_max` entries at most. The rates are texts (rates.py): what producers send
    to a partition (`publish_rate`), what consumers of a partition get together (`dispatch_rate`)
    and those of each subscription in it (`subscription_dispatch_rate`), and how often one consumer
    may subscribe (`subscribe_rate`)."""

    ensemble_size: int = 3
    write_quorum: int = 3
    ack_quorum: int = 2
    durability: str = "synced"
    ledger_bytes_max: int = 1 << 30
    ledger_age_s_max: int = 3600
    retention_ms: int | None = None
    retention_bytes: int | None = None
    delete_delay_ms: int = DELETE_DELAY_MS
    merging: bool = True
    deduplication: bool = False
    partitioned: bool = True
    on_lost_rows: str = "pause"
    retention: str = "limits"
    message_ttl_ms: int | None = None
    backlog_bytes_max: int | None = None
    backlog_ms_max: int | None = None
    on_backlog: str = "hold"
    schema_compatibility: str = "full"
    schema_auto_update: bool = True
    schema_validation_enforced: bool = False
    producers_max: int | None = None
    consumers_max: int | None = None
    subscription_consumers_max: int | None = None
    subscriptions_max: int | None = None
    consumer_unacked_max: int | None = None
    subscription_unacked_max: int | None = None
    auto_create_subscriptions: bool = True
    message_bytes_max: int | None = None
    delayed_delivery: bool = True
    delay_ms_max: int | None = None
    deduplication_entries_max: int | None = None
    publish_rate: str | None = None
    dispatch_rate: str | None = None
    subscription_dispatch_rate: str | None = None
    subscribe_rate: str | None = None
    subscription_expiry_ms: int | None = None

    @property
    def trims(self) -> bool:
        """Whether maintenance may trim rows of the topic."""
        limited = self.retention_ms is not None or self.retention_bytes is not None
        return limited or self.retention == ACKNOWLEDGED

    def __post_init__(self) -> None:
        for name in POLICY_NAMES:
            _check(name, getattr(self, name))
        if not self.ensemble_size >= self.write_quorum >= self.ack_quorum >= 1:
            raise errors.BadConfig(
                f"quorums {self.ensemble_size}/{self.write_quorum}/{self.ack_quorum}:"
                " ensemble >= write quorum >= ack quorum >= 1 does not hold"
            )


@dataclass(frozen=True, slots=True)
class NamespacePolicies:
    """The policies of a namespace. `topics` has policies of its topics, by the policy's name; a
    topic's own policies override them. `auto_create`: whether a broker makes a missing topic that a
    client names, and `auto_create_partitions`: with how many partitions (0: a topic that is not
    partitioned); if None, the broker's settings decide. No topic is made beyond `topics_max`
    partitions of all topics, as many as they had when they were made; None: no limit. `properties`
    are texts of the user."""

    auto_create: bool | None = None
    auto_create_partitions: int | None = None
    topics_max: int | None = None
    properties: Mapping[str, str] | None = None
    topics: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        with_changes(TopicPolicies(), self.topics)
        if self.auto_create not in (None, True, False):
            raise errors.BadConfig(
                f"auto_create must be true or false, got {self.auto_create!r}",
                "Give auto_create=true or auto_create=false.",
            )
        for name, least in (("auto_create_partitions", 0), ("topics_max", 1)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                raise errors.BadConfig(
                    f"{name} must not be {value!r}", f"Give a number from {least} on."
                )
        _check_properties(self.properties or {})

    def with_changes(self, changes: Mapping[str, Any]) -> "NamespacePolicies":
        """The policies after these changes (values by policy). Raises errors.BadConfig."""
        _check_names("a namespace", changes, (*NAMESPACE_NAMES, *POLICY_NAMES))
        partitions = changes.get("auto_create_partitions")
        if type(partitions) is int and partitions > PARTITIONS_MAX:  # no topic could have them
            raise errors.BadConfig(
                f"auto_create_partitions must not be {partitions}",
                f"Give a number from 0 to {PARTITIONS_MAX}.",
            )
        unset = [name for name, value in changes.items() if value == INHERIT]
        new_values = {name: value for name, value in changes.items() if value != INHERIT}
        own = {name: new_values.get(name) for name in NAMESPACE_NAMES if name in changes}
        topics = {
            **self.topics,
            **{name: new_values[name] for name in new_values if name in POLICY_NAMES},
        }
        kept = {name: value for name, value in topics.items() if name not in unset}
        return replace(self, **own, topics=kept)


def _check_properties(properties: Any) -> None:
    is_mapping = isinstance(properties, Mapping)
    if not is_mapping or not all(isinstance(v, str) for v in [*properties, *properties.values()]):
        raise errors.BadConfig(
            f"properties must not be {properties!r}"[:200], "Give texts by their names."
        )
    size = sum(len(name.encode()) + len(value.encode()) for name, value in properties.items())
    if size > PROPERTIES_BYTES_MAX:
        raise errors.BadConfig(
            f"the properties of a namespace take {size} bytes",
            f"At most {PROPERTIES_BYTES_MAX} are kept: give fewer or shorter ones.",
        )


NAMESPACE_NAMES = ("auto_create", "auto_create_partitions", "topics_max", "properties")
POLICY_NAMES = tuple(policy.name for policy in fields(TopicPolicies))


def with_changes(policies: TopicPolicies, changes: Mapping[str, Any]) -> TopicPolicies:
    """The policies after these changes (values by policy). Raises errors.BadConfig for an unknown
    policy or an invalid value."""
    _check_names("a topic", changes, POLICY_NAMES)
    return replace(policies, **changes)


def _check_names(what: str, changes: Iterable[str], names: Sequence[str]) -> None:
    for name in changes:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"Did you mean '{near[0]}'? " if near else ""
            raise errors.BadConfig(
                f"{what} has no policy '{name}'", f"{hint}Policies are: {', '.join(names)}."
            )


def own_names(set_names: Iterable[str]) -> tuple[str, ...]:
    """The names of a topic's own policies, if the policies in `set_names` were set on the topic."""
    own = {*ALWAYS_OWN, *set_names}
    if not own.isdisjoint(QUORUM_NAMES):
        own.update(QUORUM_NAMES)
    return tuple(name for name in POLICY_NAMES if name in own)


def effective_policies(
    recorded: TopicPolicies, own: Iterable[str], namespace: NamespacePolicies | None
) -> TopicPolicies:
    """The policies that a topic has: of the policies in its record (`recorded`) only those named in
    `own` were set on the topic; the others are the namespace's."""
    inherited = TopicPolicies(**(namespace.topics if namespace is not None else {}))
    return replace(inherited, **{name: getattr(recorded, name) for name in own})


def with_own_changes(
    recorded: TopicPolicies,
    own: Iterable[str],
    namespace: NamespacePolicies | None,
    changes: Mapping[str, Any],
) -> tuple[TopicPolicies, tuple[str, ...]]:
    """The policies for the topic's record after these changes, and the names of its own policies;
    the arguments are as in `effective_policies`. Raises errors.BadConfig."""
    _check_names("a topic", changes, POLICY_NAMES)
    new_values = {name: value for name, value in changes.items() if value != INHERIT}
    unset = changes.keys() - new_values.keys()
    for name in ALWAYS_OWN:
        if name in unset:
            raise errors.BadConfig(f"{name} is a topic's own", f"Give {name}=... with a value.")
    unset_names = own_names(unset) if unset else ()
    own_names_left = [name for name in own if name in ALWAYS_OWN or name not in unset_names]
    policies = with_changes(effective_policies(recorded, own_names_left, namespace), new_values)
    return policies, own_names([*own_names_left, *new_values])


def to_json(policies: TopicPolicies) -> dict[str, Any]:
    return asdict(policies)


def from_json(plain: Mapping[str, Any]) -> TopicPolicies:
    """Leaves out the fields that only a later version knows."""
    return TopicPolicies(**{name: value for name, value in plain.items() if name in POLICY_NAMES})


def _check(name: str, value: object) -> None:
    if name in TEXT_NAMES:
        if value not in CHOICES[name]:
            choices = " or ".join(f"{name}={choice}" for choice in CHOICES[name])
            raise errors.BadConfig(
                f"{name} '{value}' is not one of {CHOICES[name]}", f"Give {choices}."
            )
    elif value is None and name in NONE_MEANINGS:
        return
    elif name in RATES:
        if not _is_rate(name, value):
            raise errors.BadConfig(f"{name} cannot be {value!r}", f"Give '{RATES[name]}', or none.")
    elif name in SWITCH_NAMES:
        if not isinstance(value, bool):
            raise errors.BadConfig(
                f"{name} must be true or false, got {value!r}", f"Give {name}=true or {name}=false."
            )
    elif isinstance(value, bool) or not isinstance(value, int):
        raise errors.BadConfig(
            f"{name} must be a whole number, got {value!r}", f"Give {_allowed_values(name)}."
        )
    elif value < _least_value(name):
        raise errors.BadConfig(f"{name} must not be {value}", f"Give {_allowed_values(name)}.")


def _is_rate(name: str, text: object) -> bool:
    """Whether the text is a rate with no more than the example of the policy has."""
    rate, example = Rate.parse(text), Rate.parse(RATES[name])
    return rate is not None and all(
        value == unset or getattr(example, field) != unset
        for field, value, unset in zip(asdict(rate), asdict(rate).values(), _NO_RATE, strict=True)
    )


def _least_value(name: str) -> int:
    return 0 if name in MAY_BE_0 or name.endswith(("_quorum", "_size")) else 1


def _allowed_values(name: str) -> str:
    or_none = f", or none {NONE_MEANINGS[name]}" if name in NONE_MEANINGS else ""
    return f"a number from {_least_value(name)} on{or_none}"


def value_of_text(name: str, text: str) -> Any:
    """A policy's value from the text that a user types: a number, with a unit if the policy is a
    time (500ms, 30s, 90m, 12h, 7d) or a size (KiB, MiB, GiB, TiB, or k, m, g, t); `none` for no
    limit; `inherit`, which unsets the policy.

    Raises errors.BadConfig. The functions that set policies check that there is such a policy and
    that its value is valid.
    """
    if text.lower() == INHERIT:
        return INHERIT
    if name == "auto_create":
        return SWITCH_VALUES.get(text.lower(), text)
    if name in ("auto_create_partitions", "topics_max") and text.isdecimal():
        return int(text)
    if name in TEXT_NAMES or name not in POLICY_NAMES:
        return text
    if name in RATES and text.lower() != "none":
        return text
    if name in SWITCH_NAMES:
        return SWITCH_VALUES.get(text.lower(), text)
    if text.lower() == "none" and name in NONE_MEANINGS:
        return None
    allowed = _units_of(name)
    amount = units.parse(text, allowed)
    if amount is None:
        kinds = f"a number, without a unit or with {', '.join(allowed)}" if allowed else "a number"
        raise errors.BadConfig(f"{name} cannot be '{text}'", f"Give {kinds}.")
    return amount


def _units_of(name: str) -> Mapping[str, int]:
    if name.endswith(("_ms", "_ms_max")):
        return units.MS
    if name.endswith("_s_max"):
        return units.S
    return units.BYTES if "bytes" in name else {}
