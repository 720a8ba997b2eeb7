"""The topic layer's records in the metadata store: JSON objects, readable with any client.

Always true: every record says the lowest version of the reader and of the writer that may use it
(`min_reader`, `min_writer`). A record that asks for more than this version, an action it does not
know, or bytes that are no such record raise errors.UnsupportedFormat: nothing is skipped, for an
action left out would move every later offset (hazard 17). Unknown *fields* are allowed: what must
not be ignored raises `min_reader`.

docs/topics.md shows every record.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any, TypeVar

from spark_ledger import errors
from spark_ledger.topic import actions, policies
from spark_ledger.topic.actions import Action
from spark_ledger.topic.intervals import BlobPointer
from spark_ledger.topic.policies import TopicPolicies

T = TypeVar("T")

_COMMIT_TEXTS = ("commit_id", "app_id", "target", "version", "run_id", "intent", "min_writer")

READER_VERSION = 1
WRITER_VERSION = 1
NO_VERSION = -1  # of a transaction: nothing committed yet
NO_COMMIT = -1  # number of a commit that brought no rows and so took no number


class TopicLife(Enum):
    OPEN = "open"
    DELETED = "deleted"


class IntentState(Enum):
    OPEN = "open"
    DONE = "done"
    CONDEMNED = "condemned"


@dataclass(frozen=True, slots=True)
class TopicRecord:
    """/topic-ids/<id>: what was fixed when the topic was created. Partitions grow in its log."""

    name: str
    partitions: int
    policies: TopicPolicies = field(default_factory=TopicPolicies)


@dataclass(frozen=True, slots=True)
class Head:
    """/topic-ids/<id>/head: the number the next commit takes. Only head serializes commits."""

    next: int
    life: TopicLife = TopicLife.OPEN


@dataclass(frozen=True, slots=True)
class Commit:
    """/topic-ids/<id>/log/<n>, or where that points to. Holds no offsets of what it adds: a loser
    of the race for n commits it as it is. `others` are the other topics of a commit over several,
    `user_metadata` a text of the user's; `body_ledger` is the ledger that the body was read from,
    None if it is in the node."""

    commit_id: str
    app_id: str
    target: str
    version: int
    run_id: str
    intent: str
    actions: tuple[Action, ...]
    min_writer: int = WRITER_VERSION
    others: tuple[str, ...] = ()
    user_metadata: str = ""
    body_ledger: int | None = None


@dataclass(frozen=True, slots=True)
class Spilled:
    """/topic-ids/<id>/log/<n> of a commit whose body is in a ledger."""

    commit_id: str
    body: BlobPointer


@dataclass(frozen=True, slots=True)
class TxnRecord:
    """/txns/<app id>/<target>: the highest version committed, by which run, where, how many rows
    of each partition. `commit_id` tells the commit whose answer was lost."""

    version: int = NO_VERSION
    run_id: str = ""
    commit_id: str = ""
    topic_id: str = ""
    number: int = NO_COMMIT
    rows: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class IntentRecord:
    """/intents/<id>. `w0` is the version recorded for (app id, target) when it was made."""

    kind: str  # "query" or "batch"
    app_id: str
    run_id: str
    target: str
    w0: int
    generation: int = 0
    state: IntentState = IntentState.OPEN
    why: str = ""


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


def encode_topic(record: TopicRecord) -> bytes:
    plain = {"name": record.name, "partitions": record.partitions}
    return _dump({**plain, "policies": policies.to_json(record.policies)})


def decode_topic(value: bytes) -> TopicRecord:
    def build(plain: dict[str, Any]) -> TopicRecord:
        kept = policies.from_json(plain["policies"])
        return TopicRecord(plain["name"], plain["partitions"], kept)

    return _load(value, "topic", build)


def encode_topic_pointer(topic_id: str) -> bytes:
    return _dump({"id": topic_id})


def decode_topic_pointer(value: bytes) -> str:
    return _load(value, "topic pointer", lambda plain: str(plain["id"]))


def encode_head(head: Head) -> bytes:
    return _dump({"next": head.next, "state": head.life.value})


def decode_head(value: bytes) -> Head:
    return _load(value, "head", lambda plain: Head(int(plain["next"]), TopicLife(plain["state"])))


def encode_commit(commit: Commit) -> bytes:
    plain: dict[str, Any] = {name: getattr(commit, name) for name in _COMMIT_TEXTS}
    plain["actions"] = [actions.to_json(action) for action in commit.actions]
    if commit.others:
        plain["others"] = list(commit.others)
    if commit.user_metadata:
        plain["user_metadata"] = commit.user_metadata
    return _dump(plain)


def encode_spilled(spilled: Spilled) -> bytes:
    return _dump({"commit_id": spilled.commit_id, "body": asdict(spilled.body)})


def decode_commit(value: bytes) -> Commit | Spilled:
    """A commit, or where its body is. Raises errors.UnsupportedFormat."""

    def build(plain: dict[str, Any]) -> Commit | Spilled:
        if "body" in plain:
            return Spilled(plain["commit_id"], pointer_from_json(plain["body"]))
        return Commit(
            actions=tuple(actions.from_json(action) for action in plain["actions"]),
            others=tuple(plain.get("others", ())),
            user_metadata=plain.get("user_metadata", ""),
            **{name: plain[name] for name in _COMMIT_TEXTS},
        )

    return _load(value, "commit", build)


def pointer_from_json(plain: Mapping[str, Any]) -> BlobPointer:
    """Raises KeyError, TypeError or ValueError when `plain` is no pointer."""
    return BlobPointer(**{name: int(at) for name, at in _fields(BlobPointer, plain).items()})


def encode_txn(record: TxnRecord) -> bytes:
    return _dump({**asdict(record), "rows": {str(p): n for p, n in sorted(record.rows.items())}})


def decode_txn(value: bytes) -> TxnRecord:
    def build(plain: dict[str, Any]) -> TxnRecord:
        rows = {int(partition): count for partition, count in plain["rows"].items()}
        return TxnRecord(**{**_fields(TxnRecord, plain), "rows": rows})

    return _load(value, "transaction record", build)


def encode_intent(record: IntentRecord) -> bytes:
    return _dump({**asdict(record), "state": record.state.value})


def decode_intent(value: bytes) -> IntentRecord:
    def build(plain: dict[str, Any]) -> IntentRecord:
        state = IntentState(plain["state"])
        return IntentRecord(**{**_fields(IntentRecord, plain), "state": state})

    return _load(value, "intent", build)


def encode_query_pointer(pointer: QueryPointer) -> bytes:
    return _dump(asdict(pointer))


def decode_query_pointer(value: bytes) -> QueryPointer:
    return _load(value, "query pointer", lambda plain: QueryPointer(**_fields(QueryPointer, plain)))


def encode_block(block: IdBlock) -> bytes:
    return _dump(asdict(block))


def decode_block(value: bytes) -> IdBlock:
    return _load(value, "ledger id block", lambda plain: IdBlock(**_fields(IdBlock, plain)))


def _fields(kind: type, plain: Mapping[str, Any]) -> dict[str, Any]:
    return {name: plain[name] for name in kind.__dataclass_fields__}  # type: ignore[attr-defined]


def _dump(plain: Mapping[str, Any]) -> bytes:
    versions = {"min_reader": READER_VERSION, "min_writer": WRITER_VERSION}
    return json.dumps({**versions, **plain}, sort_keys=True, separators=(",", ":")).encode()


def _load(value: bytes, what: str, build: Callable[[dict[str, Any]], T]) -> T:
    try:
        plain = json.loads(value)
        needed = int(plain["min_reader"])
        if needed > READER_VERSION:
            raise errors.UnsupportedFormat(
                f"a {what} needs reader version {needed}, this is version {READER_VERSION}"
            )
        return build(plain)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise errors.UnsupportedFormat(f"not a {what}: {error!r}") from error
