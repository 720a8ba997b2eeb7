"""The topic layer's records in the metadata store: JSON objects, readable with any client.

Always true: every record has the lowest version of the reader and of the writer that may use it
(`min_reader`, `min_writer`). A record that needs a later version than this software's, an action
that this version does not know, or malformed bytes raise errors.UnsupportedFormat. No action is
skipped, because a skipped action would move every later offset (hazard 17). Unknown *fields* are
allowed: a field that readers must not ignore comes with a higher `min_reader`.

docs/topics.md shows every record.
"""

import json
import logging
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from functools import lru_cache
from typing import Any, TypeVar

from spark_ledger import errors
from spark_ledger.metadata.store import Versioned
from spark_ledger.topic.log import actions, policies
from spark_ledger.topic.log.actions import Action, OpenLive, SealLive
from spark_ledger.topic.log.policies import (
    NAMESPACE_NAMES,
    POLICY_NAMES,
    NamespacePolicies,
    TopicPolicies,
)
from spark_ledger.topic.log.segment_table import BlobPointer

T = TypeVar("T")
_log = logging.getLogger(__name__)

TXN_BYTES_MAX = 64 * 1024
TOPIC_PROPERTIES_BYTES_MAX = 16 << 10
"""How many bytes the names and values of a topic's properties may take."""
UNREADABLE_KEPT = 1_000
_TXN_PLAIN = ("version", "run_id", "commit_id", "topic_id", "number")
_LATER_OF_NAMESPACES = ("topics_max", "properties")
"""Policies of a namespace that its record has only if they are set."""
_COMMIT_PLAIN = ("commit_id", "app_id", "target", "version", "run_id", "intent", "min_writer")

READER_VERSION = 3
WRITER_VERSION = 3
"""The versions of this software."""
FIRST_VERSION = 1
"""The version that a record needs if nothing in it needs a later version."""
COUNTED_VERSION = 2
"""The version for a commit with a `counted` segment, and for all later commits of its topic."""
CONTINUED_VERSION = 3
"""The version for a ledger with several live segments, one after the other, and for rowless
offsets. A checkpoint of an older writer would lose `rowless` and `rows_before` (how many rows the
ledger had before the segment)."""
NO_VERSION = -1  # in a transaction record: nothing committed yet
NO_COMMIT = -1  # in place of a number: the commit added no rows, and so took no number


class TopicLife(Enum):
    OPEN = "open"
    DELETED = "deleted"


class IntentState(Enum):
    OPEN = "open"
    DONE = "done"
    CONDEMNED = "condemned"


@dataclass(frozen=True, slots=True)
class TopicRecord:
    """/topic-ids/<id>: `name`, and `partitions` at the topic's creation, with which its log begins.
    `grown_to`: the number after its growth, which the log has too; 0: it has not grown, or software
    of an earlier version has grown it.
    `own` names the policies that were set on the topic. The other values in `policies` are copies
    of the namespace's values at that time, and do not count. `properties` are texts of the user."""

    name: str
    partitions: int
    policies: TopicPolicies = field(default_factory=TopicPolicies)
    own: tuple[str, ...] = POLICY_NAMES
    properties: Mapping[str, str] = field(default_factory=dict, hash=False)
    grown_to: int = 0


@dataclass(frozen=True, slots=True)
class TenantRecord:
    """/topics/<tenant>: the roles that administer the tenant (nothing checks them yet), and the
    clusters that may have its namespaces (empty: only this cluster)."""

    admin_roles: tuple[str, ...] = ()
    allowed_clusters: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Head:
    """/topic-ids/<id>/head: the number that the next commit takes. Only head serializes commits.
    `turn` is the commit that asks the others to let it go first (commit/views.py), "" if no commit
    asks."""

    next: int
    life: TopicLife = TopicLife.OPEN
    turn: str = ""


@dataclass(frozen=True, slots=True)
class Commit:
    """/topic-ids/<id>/log/<n>, or the body to which that node points. A commit has no offsets of
    the rows that it adds, so a committer that loses the race for n writes the same commit under
    another number. `others` are the other topics of a shared commit. `user_metadata` is a text of
    the user. `body_ledger` is the ledger from which the body was read, None if the body is in the
    node."""

    commit_id: str
    app_id: str
    target: str
    version: int
    run_id: str
    intent: str
    actions: tuple[Action, ...]
    min_writer: int = FIRST_VERSION
    others: tuple[str, ...] = ()
    user_metadata: str = ""
    body_ledger: int | None = None


@dataclass(frozen=True, slots=True)
class SpilledBody:
    """/topic-ids/<id>/log/<n> of a commit whose body is in a ledger."""

    commit_id: str
    body: BlobPointer


@dataclass(frozen=True, slots=True)
class TopicRows:
    """A commit's number in one topic, and the rows that it added to each partition."""

    number: int = NO_COMMIT
    rows: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Content:
    """The number of rows of a query's batch, and their fingerprint (fingerprint.py)."""

    rows: int = 0
    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class TxnRecord:
    """/txns/<app id>/<target>: the highest committed version, with its run, topic, number and rows
    by partition. A committer whose response was lost recognises its commit by `commit_id`. A shared
    commit has its first topic in `topic_id` and the other topics in `others`. Rows are left out if
    the record would be larger than TXN_BYTES_MAX. `content` is the content of a query's whole
    batch."""

    version: int = NO_VERSION
    run_id: str = ""
    commit_id: str = ""
    topic_id: str = ""
    number: int = NO_COMMIT
    rows: Mapping[int, int] = field(default_factory=dict)
    others: Mapping[str, TopicRows] = field(default_factory=dict)
    content: Content | None = None

    def topics(self) -> dict[str, TopicRows]:
        """By topic id; empty if nothing was committed."""
        first = {self.topic_id: TopicRows(self.number, self.rows)} if self.topic_id else {}
        return {**first, **self.others}


@dataclass(frozen=True, slots=True)
class IntentRecord:
    """/intents/<id>. `w0` is the version that was recorded for (app id, target) when the intent was
    made. `snapshots` has, for each topic that the run is to overwrite, the number of the topic's
    next commit at that time. `random`: no other intent ever has this app id."""

    kind: str  # "query", "parts", "batch", "cursor" or "system"
    app_id: str
    run_id: str
    target: str
    w0: int
    generation: int = 0
    state: IntentState = IntentState.OPEN
    why: str = ""  # the reason, if the intent is condemned
    snapshots: Mapping[str, int] = field(default_factory=dict)
    random: bool = False


@dataclass(frozen=True, slots=True)
class QueryPointer:
    """/queries/<query id>@<target>: the intent of the query's current run."""

    intent: str
    run_id: str
    generation: int


@dataclass(frozen=True, slots=True)
class IdBlock:
    """/intents/<id>/blocks/<first>: ledger ids that only this intent may use."""

    first: int
    count: int


def checked_properties(properties: Mapping[str, str]) -> Mapping[str, str]:
    size = sum(len(name.encode()) + len(value.encode()) for name, value in properties.items())
    if size > TOPIC_PROPERTIES_BYTES_MAX:
        raise errors.BadConfig(
            f"the properties of a topic take {size} bytes",
            f"At most {TOPIC_PROPERTIES_BYTES_MAX} are kept: give fewer or shorter ones.",
        )
    return properties


def encode_topic(record: TopicRecord) -> bytes:
    plain = {"name": record.name, "partitions": record.partitions}
    growth = {"grown_to": record.grown_to} if record.grown_to else {}
    own = {} if record.own == POLICY_NAMES else {"own": list(record.own)}
    texts = {"properties": dict(record.properties)} if record.properties else {}
    return dump({**plain, "policies": policies.to_json(record.policies), **growth, **own, **texts})


def decode_topic(value: bytes) -> TopicRecord:
    def build(plain: dict[str, Any]) -> TopicRecord:
        recorded = policies.from_json(plain["policies"])
        own = POLICY_NAMES
        if "own" in plain:
            own = policies.own_names(name for name in plain["own"] if name in POLICY_NAMES)
        properties = plain.get("properties", {})
        grown_to = plain.get("grown_to", 0)
        return TopicRecord(plain["name"], plain["partitions"], recorded, own, properties, grown_to)

    return load(value, "topic", build)


def decode_partitions(value: bytes) -> tuple[int, bool]:
    """Of a topic's record: the number of partitions as far as the record has it, and whether
    clients see a partitioned topic. For lists of many topics: ten times faster than
    `decode_topic`."""

    def build(plain: dict[str, Any]) -> tuple[int, bool]:
        count = max(int(plain["partitions"]), int(plain.get("grown_to", 0)))
        return count, bool(plain["policies"].get("partitioned", True))

    return load(value, "topic", build)


class PartitionsSeen:
    """As `decode_partitions`; a record that was seen before is not decoded again. A list of 10,000
    topics has 8 MB of records."""

    BYTES_MAX = 32 << 20
    """With more bytes of records all are forgotten."""

    def __init__(self) -> None:
        self._by_record: dict[bytes, tuple[int, bool]] = {}
        self._bytes = 0

    def of(self, record: bytes) -> tuple[int, bool]:
        partitions = self._by_record.get(record)
        if partitions is None:
            partitions = decode_partitions(record)
            self._bytes += len(record)
            if self._bytes > self.BYTES_MAX:
                self._by_record.clear()
                self._bytes = len(record)
            self._by_record[record] = partitions
        return partitions


def encode_namespace(namespace: NamespacePolicies) -> bytes:
    own = {name: getattr(namespace, name) for name in NAMESPACE_NAMES}
    later = {name: own.pop(name) for name in _LATER_OF_NAMESPACES}
    set_later = {name: value for name, value in later.items() if value is not None}
    return dump({**own, "topics": dict(namespace.topics), **set_later})


def decode_namespace(value: bytes) -> NamespacePolicies:
    """The policies in a namespace's record. A namespace that was made only for its topics has an
    empty record."""

    def build(plain: dict[str, Any]) -> NamespacePolicies:
        topics = {k: v for k, v in plain["topics"].items() if k in POLICY_NAMES}
        later = {name: plain.get(name) for name in _LATER_OF_NAMESPACES}
        creation = plain["auto_create"], plain["auto_create_partitions"]
        return NamespacePolicies(*creation, topics=topics, **later)

    return load(value, "namespace", build) if value else NamespacePolicies()


def encode_tenant(record: TenantRecord) -> bytes:
    return dump({"admin_roles": record.admin_roles, "allowed_clusters": record.allowed_clusters})


def decode_tenant(value: bytes) -> TenantRecord:
    """A tenant's record, which is empty if the tenant was made only for its namespaces."""

    def build(plain: dict[str, Any]) -> TenantRecord:
        return TenantRecord(
            tuple(map(str, plain["admin_roles"])), tuple(map(str, plain["allowed_clusters"]))
        )

    return load(value, "tenant", build) if value else TenantRecord()


def encode_topic_pointer(topic_id: str) -> bytes:
    return dump({"id": topic_id})


def decode_topic_pointer(value: bytes) -> str:
    return load(value, "topic pointer", lambda plain: str(uuid.UUID(plain["id"])))


def encode_head(head: Head) -> bytes:
    turn = {"turn": head.turn} if head.turn else {}
    return dump({"next": head.next, "state": head.life.value, **turn})


def decode_head(value: bytes) -> Head:
    def build(plain: dict[str, Any]) -> Head:
        return Head(int(plain["next"]), TopicLife(plain["state"]), plain.get("turn", ""))

    return load(value, "head", build)


def encode_commit(commit: Commit) -> bytes:
    plain: dict[str, Any] = {name: getattr(commit, name) for name in _COMMIT_PLAIN}
    plain["actions"] = [actions.to_json(action) for action in commit.actions]
    if commit.others:
        plain["others"] = list(commit.others)
    if commit.user_metadata:
        plain["user_metadata"] = commit.user_metadata
    needed = needed_version(commit.actions)
    plain["min_writer"] = max(commit.min_writer, needed)
    return dump({"min_reader": needed, **plain})


def needed_version(commit_actions: Iterable[Action]) -> int:
    """The version that readers and later writers need for a commit's actions."""
    commit_actions = tuple(commit_actions)
    counted = [s for action in commit_actions for s in actions.segments_of(action) if s.counted]
    seals = (action for action in commit_actions if isinstance(action, SealLive))
    has_rowless = any(seal.rowless.number > 0 for seal in seals)
    has_rows_before = any(segment.rows_before > 0 for segment in counted)
    if has_rowless or has_rows_before or _opens_used_ledger(commit_actions):
        return CONTINUED_VERSION
    return COUNTED_VERSION if counted else FIRST_VERSION


def _opens_used_ledger(commit_actions: Sequence[Action]) -> bool:
    """Whether a live segment begins in a ledger that had another live segment before."""
    sealed_ledgers = {a.ledger_id for a in commit_actions if isinstance(a, SealLive)}
    opens = (action for action in commit_actions if isinstance(action, OpenLive))
    return any(open_.first_entry or open_.ledger_id in sealed_ledgers for open_ in opens)


def encode_spilled(spilled: SpilledBody) -> bytes:
    return dump({"commit_id": spilled.commit_id, "body": asdict(spilled.body)})


def decode_commit(value: bytes) -> Commit | SpilledBody:
    """A commit, or the pointer to its body. Raises errors.UnsupportedFormat."""

    def build(plain: dict[str, Any]) -> Commit | SpilledBody:
        if "body" in plain:
            return SpilledBody(plain["commit_id"], pointer_from_json(plain["body"]))
        return Commit(
            actions=tuple(actions.from_json(action) for action in plain["actions"]),
            others=tuple(plain.get("others", ())),
            user_metadata=plain.get("user_metadata", ""),
            **{name: plain[name] for name in _COMMIT_PLAIN},
        )

    return load(value, "commit", build)


def pointer_from_json(plain: Mapping[str, Any]) -> BlobPointer:
    """Raises KeyError, TypeError or ValueError if `plain` is not a pointer."""
    return BlobPointer(**{name: int(value) for name, value in _fields(BlobPointer, plain).items()})


def encode_txn(record: TxnRecord) -> bytes:
    value = _txn_bytes(record)
    if len(value) <= TXN_BYTES_MAX:
        return value
    others = {topic: TopicRows(rows.number) for topic, rows in record.others.items()}
    return _txn_bytes(replace(record, rows={}, others=others))


def decode_txn(value: bytes) -> TxnRecord:
    def build(plain: dict[str, Any]) -> TxnRecord:
        others, content = plain.pop("others", {}), plain.get("content")
        return TxnRecord(
            content=None if content is None else Content(content["rows"], content["fingerprint"]),
            **{name: plain[name] for name in _TXN_PLAIN},
            rows=_rows_from_json(plain["rows"]),
            others={
                topic: TopicRows(rows["number"], _rows_from_json(rows["rows"]))
                for topic, rows in others.items()
            },
        )

    return load(value, "transaction record", build)


def encode_intent(record: IntentRecord) -> bytes:
    plain = {**asdict(record), "state": record.state.value}
    for name in ("snapshots", "random"):
        if not plain[name]:
            del plain[name]
    return dump(plain)


def decode_intent(value: bytes) -> IntentRecord:
    def build(plain: dict[str, Any]) -> IntentRecord:
        state = IntentState(plain["state"])
        snapshots = {topic: int(number) for topic, number in plain.get("snapshots", {}).items()}
        fields = _fields(IntentRecord, {"random": False, **plain, "snapshots": snapshots})
        return IntentRecord(**{**fields, "state": state})

    return load(value, "intent", build)


def encode_query_pointer(pointer: QueryPointer) -> bytes:
    return dump(asdict(pointer))


def decode_query_pointer(value: bytes) -> QueryPointer:
    return load(value, "query pointer", lambda plain: QueryPointer(**_fields(QueryPointer, plain)))


def encode_block(block: IdBlock) -> bytes:
    return dump(asdict(block))


def decode_block(value: bytes) -> IdBlock:
    return load(value, "ledger id block", lambda plain: IdBlock(**_fields(IdBlock, plain)))


def _txn_bytes(record: TxnRecord) -> bytes:
    plain: dict[str, Any] = {name: getattr(record, name) for name in _TXN_PLAIN}
    plain["rows"] = _rows_to_json(record.rows)
    if record.others:
        plain["others"] = {
            topic: {"number": added.number, "rows": _rows_to_json(added.rows)}
            for topic, added in record.others.items()
        }
    if record.content is not None:
        plain["content"] = asdict(record.content)
    return dump(plain)


def _rows_to_json(rows: Mapping[int, int]) -> dict[str, int]:
    return {str(partition): count for partition, count in sorted(rows.items())}


def _rows_from_json(plain: Mapping[str, int]) -> dict[int, int]:
    return {int(partition): count for partition, count in plain.items()}


def _fields(kind: type, plain: Mapping[str, Any]) -> dict[str, Any]:
    return {name: plain[name] for name in kind.__dataclass_fields__}  # type: ignore[attr-defined]


def dump(plain: Mapping[str, Any]) -> bytes:
    """A record's JSON. Every version may read and write the record, unless `plain` has a higher
    `min_reader` or `min_writer`."""
    versions = {"min_reader": FIRST_VERSION, "min_writer": FIRST_VERSION}
    return json.dumps({**versions, **plain}, sort_keys=True, separators=(",", ":")).encode()


def load(value: bytes, what: str, build: Callable[[dict[str, Any]], T]) -> T:
    """The value that `build` makes of a record's JSON. Raises errors.UnsupportedFormat, whose text
    names the record by `what`."""
    try:
        plain = json.loads(value.decode())
        needed = int(plain["min_reader"])
        if needed > READER_VERSION:
            raise errors.UnsupportedFormat(
                f"a {what} needs reader version {needed}, this is version {READER_VERSION}"
            )
        return build(plain)
    except errors.MALFORMED as error:
        raise errors.UnsupportedFormat(f"not a {what}: {error!r}") from error


def readable(what: str, node: Versioned | None, decode: Callable[[bytes], T]) -> T | None:
    """The decoded record of a node; None without a node, and for a node that cannot be decoded,
    which the log names by `what`, once. So a list of many nodes leaves such a node out."""
    try:
        return None if node is None else decode(node.value)
    except errors.UnsupportedFormat as error:
        log_unreadable(what, str(error)[:200])
        return None


@lru_cache(maxsize=UNREADABLE_KEPT)
def log_unreadable(what: str, error: str) -> None:
    """Logs this once."""
    _log.warning("%s cannot be read, and is left out: %s", what, error)
