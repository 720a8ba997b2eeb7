"""The content of a commit, and the checks whether it may follow on a state. Pure.

Always true: two segments have an entry in common only if the entry is shared and their partitions
differ; segments are in the order of Spark's task index, then as the task wrote them. The
transaction record alone decides whether a version was committed (hazards 2, 10). A version never
counts as done if another run recorded it after this run had begun, or if it is a query's batch with
other rows (hazard 11): both are errors. The rows that an action takes away are computed on the
state that it follows, so the action names every ledger that loses rows.
"""

import itertools
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType
from typing import ClassVar

from spark_ledger import errors
from spark_ledger.metadata.store import Check
from spark_ledger.topic.commit import replay
from spark_ledger.topic.commit.replay import QueryBatch
from spark_ledger.topic.log import records
from spark_ledger.topic.log.actions import (
    Action,
    Append,
    CheckQuotas,
    Grow,
    Hole,
    OpenLive,
    Overwrite,
    Replace,
    SealLive,
    Terminate,
    Trim,
    adds_rows,
    segments_of,
)
from spark_ledger.topic.log.holds import GRACE_MS, Holds
from spark_ledger.topic.log.records import WRITER_VERSION, TopicRows, TxnRecord
from spark_ledger.topic.log.segment_table import TableChunk
from spark_ledger.topic.log.segments import INLINE, OffsetRange, Segment
from spark_ledger.topic.log.state import NO_TABLES, PartitionState, Tables, TopicState, is_seal_of
from spark_ledger.topic.schema import rules as schema_rules
from spark_ledger.topic.schema.records import SchemaHead, SchemaVersion
from spark_ledger.topic.write import TaskResult

TOPICS_MAX = 500
MULTI_BYTES_MAX = 512 * 1024
BODY_INLINE_BYTES_MAX = 64 * 1024
"""A larger body goes to a ledger."""
INLINE_COMMIT_BYTES_MAX = 32 * 1024
"""Payloads go to ledgers if those of the whole commit take more bytes."""
USER_METADATA_BYTES_MAX = 16 * 1024
NEXT_VERSION = -2
"""In a TxnKey: the version after the recorded version."""
SNAPSHOT_OF_INTENT = -1
"""In an Overwrite: the snapshot that the intent noted."""


@dataclass(frozen=True, slots=True)
class RowKind:
    """Columns under these versions of the schema, or bytes; beside columns only OBJECTS: values of
    clients whose JSON schemas fit. With `evolves` a proposed version may come beside others."""

    versions: frozenset[int] = frozenset()
    evolves: bool = False
    fits_columns: bool = False

    BYTES: ClassVar["RowKind"]
    OBJECTS: ClassVar["RowKind"]


RowKind.BYTES, RowKind.OBJECTS = RowKind(), RowKind(fits_columns=True)

Actions = tuple[Action, ...]


@dataclass(frozen=True, slots=True)
class TxnKey:
    """The version to be committed, and the transaction record's (app_id, target). For a streaming
    query the app id is the query id, the target is the sink's topic with its id (`*` if a column
    names the topic), and the version is the batch id. For a batch job, app id and version are
    txnAppId and txnVersion, or a random app id and 0; the run id is the intent's."""

    app_id: str
    target: str
    version: int
    run_id: str


class CommitKind(Enum):
    COMMITTED = "committed"
    ALREADY = "already"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class CommitOutcome:
    """The rows that each topic got. ALREADY: an earlier commit of the version added them; `topics`
    is empty if a later version was committed since. SKIPPED: an earlier commit of the version added
    them, and this commit has other rows. Very large commits leave the numbers of rows out."""

    kind: CommitKind
    topics: Mapping[str, TopicRows] = field(default_factory=dict)

    @property
    def number(self) -> int:
        """The commit's number in the log of the first topic (NO_COMMIT: no rows, no number)."""
        return next(iter(self.topics.values()), TopicRows()).number

    @property
    def rows(self) -> Mapping[int, int]:
        """Rows of the first topic, by partition."""
        return next(iter(self.topics.values()), TopicRows()).rows


@dataclass(frozen=True, slots=True)
class CommitRequest:
    """A commit as its caller requests it: the actions on each topic (by id), the version and the
    intent. The multi has the `checks`, and with `finish_intent` it ends the intent. `batch` is the
    content that a streaming query's tasks counted; if None, a recorded version counts as done,
    whatever rows it has. `overwrite_held`: an overwrite also takes away rows that a subscription
    holds. `row_kinds`: by topic id; rows of other topics are not checked against a schema.
    `creators`: the creator tokens of the ledgers that tasks wrote, as far as the caller has the
    tokens. `check_quotas` is called before the multi, with the topics that take rows. Raises
    errors.CommitOverTooManyTopics, errors.OptionInvalid, ValueError (see check_claims)."""

    txn: TxnKey
    intent_id: str
    drafts: Mapping[str, Actions]
    finish_intent: bool = False
    checks: tuple[Check, ...] = ()
    user_metadata: str = ""
    batch: QueryBatch | None = None
    overwrite_held: bool = False
    row_kinds: Mapping[str, RowKind] = field(default_factory=dict)
    creators: Mapping[int, str] = field(default_factory=dict)
    check_quotas: CheckQuotas | None = None

    def __post_init__(self) -> None:
        if len(self.drafts) > TOPICS_MAX:
            raise errors.CommitOverTooManyTopics(
                f"a commit to {len(self.drafts)} topics, at most {TOPICS_MAX} fit into one",
                topics=len(self.drafts),
            )
        size = len(self.user_metadata.encode())
        if size > USER_METADATA_BYTES_MAX:
            raise errors.OptionInvalid(
                f"userMetadata has {size} bytes, at most {USER_METADATA_BYTES_MAX} are allowed",
                "Give a shorter text.",
            )
        check_claims(s for actions in self.drafts.values() for a in actions for s in segments_of(a))


def ordered_segments(
    topic_id: str, intent_id: str, results: Sequence[TaskResult]
) -> tuple[Segment, ...]:
    """The results' segments, by task index and then in the task's order. Raises
    errors.TopicRecreated for a result of another topic, errors.LedgerFenced for a result of another
    intent, ValueError for two results of one task."""
    for result in results:
        if result.topic_id != topic_id:
            raise errors.TopicRecreated(
                f"task {result.task_index} wrote for topic {result.topic_id}, not {topic_id}"
            )
        if result.intent_id != intent_id:
            raise errors.LedgerFenced(
                f"task {result.task_index} wrote under intent {result.intent_id}, the commit is"
                f" {intent_id}'s"
            )
    tasks = [result.task_index for result in results]
    if len(set(tasks)) != len(tasks):
        raise ValueError(f"two results of one task: {sorted(tasks)}")
    by_task = sorted(results, key=lambda result: result.task_index)
    return tuple(segment for result in by_task for segment in result.segments)


def check_one_attempt(results: Iterable[TaskResult]) -> None:
    """Checks that all results of a task are of one attempt of the task. Raises ValueError."""
    attempts: dict[int, int] = {}
    for result in results:
        other = attempts.setdefault(result.task_index, result.attempt)
        if other != result.attempt:
            raise ValueError(
                f"attempts {other} and {result.attempt} of task {result.task_index} in one commit"
            )


def check_claims(segments: Iterable[Segment]) -> None:
    """Checks that an entry is in one segment, or in several shared segments of different
    partitions. Raises ValueError."""
    claims = sorted(
        (s.ledger_id, first, last, s.shared, s.partition)
        for s in segments
        if s.ledger_id != INLINE
        for first, last in s.entries
    )
    for ledger, group in itertools.groupby(claims, key=lambda claim: claim[0]):
        end, end_shared = -1, -1
        ends_by_partition: dict[int, int] = {}
        for _, first, last, shared, partition in group:
            claimed = max(end, -1 if shared else end_shared, ends_by_partition.get(partition, -1))
            if first <= claimed:
                raise ValueError(
                    f"entries {first}..{min(claimed, last)} of ledger {ledger} are claimed twice"
                )
            if shared:
                end_shared = max(end_shared, last)
            else:
                end = max(end, last)
            ends_by_partition[partition] = last


def recorded_outcome(
    record: TxnRecord, commit_id: str, txn: TxnKey, w0: int, batch: QueryBatch | None = None
) -> CommitOutcome | None:
    """The commit's outcome by the transaction record. None: the version is not committed yet, or is
    to be committed again.

    Raises errors.LedgerFenced if another run recorded the version after this run had begun;
    errors.CheckpointBehind, errors.ReplayDiffers for a query's batch that was planned again.
    """
    if record.commit_id == commit_id:
        return CommitOutcome(CommitKind.COMMITTED, record.topics())
    if txn.version == NEXT_VERSION or record.version < txn.version:
        return None
    if not (record.run_id == txn.run_id or txn.version <= w0):
        raise errors.LedgerFenced(
            f"version {txn.version} of '{txn.app_id}' on '{txn.target}' was committed by"
            f" run {record.run_id}, after run {txn.run_id} had begun",
            recorded_version=record.version,
            recorded_by=record.run_id,
        )
    if batch is not None and not replay.is_done(record, txn.app_id, txn.version, batch):
        return None
    same_version = record.version == txn.version
    if same_version and batch is not None and not replay.is_same_batch(record, batch.content):
        return CommitOutcome(CommitKind.SKIPPED, record.topics())
    return CommitOutcome(CommitKind.ALREADY, record.topics() if same_version else {})


def takes_number(actions: Actions) -> bool:
    """Whether the actions change the topic. An append without segments changes nothing, so the
    commit takes no number in the topic's log."""
    return any(not isinstance(action, Append) or action.segments for action in actions)


def rows_by_partition(actions: Actions) -> dict[int, int]:
    """The number of new rows by partition; rows of a merge or of a live segment are not new."""
    rows: Counter[int] = Counter()
    for action in actions:
        for segment in () if isinstance(action, Replace | SealLive) else segments_of(action):
            rows[segment.partition] += segment.rows
    return dict(sorted(rows.items()))


def check_all_rows_written(batch: QueryBatch | None, drafts: Mapping[str, Actions]) -> None:
    """Checks that a query commits all rows that its tasks counted. Raises errors.LedgerFenced if
    some tasks wrote no rows: they compared their rows with a commit that is no longer the last."""
    if batch is None:
        return
    rows = sum(sum(rows_by_partition(actions).values()) for actions in drafts.values())
    if rows != batch.content.rows:
        raise errors.LedgerFenced(
            f"the tasks counted {batch.content.rows} rows and wrote {rows}: for some tasks the"
            " batch was a replay, and it is not a replay any more"
        )


def txn_record(
    txn: TxnKey,
    commit_id: str,
    numbers: Mapping[str, int],
    drafts: Mapping[str, Actions],
    batch: QueryBatch | None = None,
) -> TxnRecord:
    """The version's record: each topic's new rows, and the commit's number in the topic's log."""
    rows_by_topic = {
        topic: TopicRows(numbers.get(topic, records.NO_COMMIT), rows_by_partition(actions))
        for topic, actions in drafts.items()
    }
    first, *others = rows_by_topic or {"": TopicRows()}
    return TxnRecord(
        txn.version,
        txn.run_id,
        commit_id,
        first,
        rows_by_topic.get(first, TopicRows()).number,
        rows_by_topic.get(first, TopicRows()).rows,
        {topic: rows_by_topic[topic] for topic in others},
        None if batch is None else batch.content,
    )


# -- actions on the state that they follow ------------------------------------------------------


def with_snapshots(actions: Actions, snapshot: int | None) -> Actions:
    """The actions, with the intent's `snapshot` in the overwrites that need a snapshot. Raises
    ValueError if `snapshot` is None: the intent was not opened for overwriting this topic."""
    new_actions: list[Action] = []
    for action in actions:
        if isinstance(action, Overwrite) and action.snapshot == SNAPSHOT_OF_INTENT:
            if snapshot is None:
                raise ValueError("the intent was not opened for overwriting this topic")
            action = replace(action, snapshot=snapshot)
        new_actions.append(action)
    return tuple(new_actions)


def removed_ranges(state: TopicState, action: Action) -> list[OffsetRange]:
    """The offsets whose rows the action takes away or moves."""
    match action:
        case Overwrite():
            return [OffsetRange(p.number, p.start_offset, p.end_offset) for p in state.partitions]
        case Trim():
            starts = state.start_offsets()
            return [OffsetRange(p, starts[p], end) for p, end in action.offsets]
        case Hole() | Replace():
            return [OffsetRange(action.partition, action.start, action.end)]
    return []


def chunks_needed(state: TopicState, actions: Actions) -> list[TableChunk]:
    """The chunks whose tables `with_dropped_ledgers` needs."""
    ranges = [range_ for action in actions for range_ in removed_ranges(state, action)]
    by_range = (state.partitions[p].chunks_between(lo, hi) for p, lo, hi in ranges)
    return list(dict.fromkeys(chunk for chunks in by_range for chunk in chunks))


def with_dropped_ledgers(
    state: TopicState, actions: Actions, tables: Tables = NO_TABLES
) -> Actions:
    """The actions, each with the ledgers that lose rows by the action, without the ledgers of its
    new segments. `tables` has the tables of `chunks_needed`. `check_guards` must allow the actions
    on the state."""
    return tuple(_with_dropped_ledgers(state, action, tables) for action in actions)


def _with_dropped_ledgers(state: TopicState, action: Action, tables: Tables) -> Action:
    if not isinstance(action, Overwrite | Trim | Hole | Replace):
        return action
    losing_ledgers: dict[int, None] = {}
    for partition, lo, hi in removed_ranges(state, action):
        for part in state.partitions[partition].stretches(lo, hi, tables):
            losing_ledgers |= dict.fromkeys(part.table.ledger_ids())
    still_used = {segment.ledger_id for segment in segments_of(action)}
    return replace(action, dropped=tuple(sorted(losing_ledgers.keys() - still_used)))


# -- sizes -----------------------------------------------------------------------------------------


def inline_segments(actions: Actions) -> list[Segment]:
    return [s for action in actions for s in segments_of(action) if s.inline]


def inline_bytes(drafts: Mapping[str, Actions]) -> int:
    """How many bytes the payloads in the commit itself take."""
    inline = (segment for actions in drafts.values() for segment in inline_segments(actions))
    return sum(len(payload) for segment in inline for payload in segment.inline)


def with_stored_segments(actions: Actions, stored: Sequence[Segment]) -> Actions:
    """The actions; each inline segment is replaced by the next segment of `stored`."""
    next_stored = iter(stored)

    def replace_inline(segments: Iterable[Segment]) -> tuple[Segment, ...]:
        return tuple(next(next_stored) if segment.inline else segment for segment in segments)

    new_actions = []
    for action in actions:
        if isinstance(action, Append | Replace | Overwrite):
            action = replace(action, segments=replace_inline(action.segments))
        elif isinstance(action, SealLive) and action.segment is not None:
            action = replace(action, segment=replace_inline([action.segment])[0])
        new_actions.append(action)
    return tuple(new_actions)


def topics_to_spill(bodies: Mapping[str, bytes], other_bytes: int) -> list[str]:
    """The topics whose bodies go to ledgers: bodies above BODY_INLINE_BYTES_MAX, then the largest
    bodies until the other bodies and `other_bytes` take MULTI_BYTES_MAX at most in the multi."""
    sizes = {topic: len(body) for topic, body in bodies.items()}
    topics = [topic for topic, size in sizes.items() if size > BODY_INLINE_BYTES_MAX]
    total = other_bytes + sum(sizes[topic] for topic in sizes if topic not in topics)
    for topic in sorted(sizes.keys() - set(topics), key=lambda topic: (-sizes[topic], topic)):
        if total <= MULTI_BYTES_MAX:
            break
        topics.append(topic)
        total -= sizes[topic]
    return topics


# -- guards (hazard 9) -----------------------------------------------------------------------------
#
# Always true: a guard is evaluated on the state before the new commit, and the multi sets head at
# this state's version of head, so the action follows on the state that the guard read.


def check_guards(state: TopicState, app_id: str, actions: tuple[Action, ...]) -> None:
    """Checks that a commit of these actions by app `app_id` may follow on the state.

    Raises errors.TopicDeleted, errors.TopicTerminated, errors.UnsupportedFormat (the topic needs
    another writer version), errors.TxnConflict (the state for which the action was planned has
    changed: plan again), ValueError for an action that no state allows.
    """
    if state.deleted:
        raise errors.TopicDeleted(f"topic {state.topic_id} was deleted", topic_id=state.topic_id)
    if state.min_writer > WRITER_VERSION:
        raise errors.UnsupportedFormat(
            f"topic {state.topic_id} needs writer version {state.min_writer}, this is version"
            f" {WRITER_VERSION}"
        )
    if state.terminated and any(adds_rows(action) for action in actions):
        raise errors.TopicTerminated(f"topic {state.topic_id} takes no more rows")
    rows_sealed = {
        action.partition: 0 if action.segment is None else action.segment.rows
        for action in actions
        if isinstance(action, SealLive)
    }
    for action in actions:
        _check_guard(state, app_id, action, rows_sealed)


def _check_guard(
    state: TopicState, app_id: str, action: Action, rows_sealed: Mapping[int, int]
) -> None:
    """`rows_sealed`: the rows that the same commit seals, by partition."""
    match action:
        case Append() | Overwrite():
            for segment in action.segments:
                _check_not_live(_partition(state, segment.partition), rows_sealed)
        case Replace():
            _check_replaced(_partition(state, action.partition), action)
        case Trim():
            for number, offset in action.offsets:
                end = _partition(state, number).end_offset
                if offset > end:
                    raise errors.TxnConflict(
                        f"partition {number} ends at {end}: it cannot be trimmed to {offset}"
                    )
        case Hole():
            partition = _partition(state, action.partition)
            end = partition.end_offset + rows_sealed.get(partition.number, 0)
            if not partition.start_offset <= action.start < action.end <= end:
                raise errors.TxnConflict(f"{action} is not within the rows that the topic keeps")
        case Grow():
            if action.partitions <= len(state.partitions):
                raise errors.TxnConflict(
                    f"topic {state.topic_id} has {len(state.partitions)} partitions, so it cannot"
                    f" grow to {action.partitions}"
                )
        case OpenLive():
            live = _partition(state, action.partition).live
            if live is not None and action.partition not in rows_sealed:
                raise errors.TxnConflict(
                    f"partition {action.partition} has the live ledger {live.ledger_id}"
                )
        case SealLive():
            if not is_seal_of(action, _partition(state, action.partition).live):
                raise errors.TxnConflict(
                    f"the live segment that commit {action.opened} opened in ledger"
                    f" {action.ledger_id} has ended",
                    live=True,
                )
        case Terminate():
            for partition in state.partitions:
                _check_not_live(partition, rows_sealed)
    if isinstance(action, Overwrite) and state.last_commit_of_others(app_id) >= action.snapshot:
        raise errors.TxnConflict(
            f"commit {state.last_commit_of_others(app_id)} of another writer came after commit"
            f" {action.snapshot - 1}, the last that was to be overwritten"
        )


def check_takes_bytes(head: SchemaHead, topic: str, topic_id: str | None = None) -> None:
    """Raises errors.SchemaIncompatible."""
    if not head.takes_bytes:
        raise errors.SchemaIncompatible(
            f"topic '{topic}' has a schema (version {head.current}), and the rows are bytes: no"
            " reader could read a topic with both",
            "Write columns with valueFormat=arrow or valueFormat=json, or write bytes with"
            " schemaMode=none, which checks no schema, or withdraw the schema: spark-ledger topic"
            " schema TOPIC --withdraw.",
            topic_id=topic_id,
        )


def schema_after(
    head: SchemaHead,
    kind: RowKind,
    state: TopicState,
    actions: Actions,
    topic: str,
    registered: Mapping[int, SchemaVersion] = MappingProxyType({}),
) -> SchemaHead | None:
    """The topic's schema after the actions added rows of this kind; None: it does not change.
    `registered` has the schema's versions by number, needed if a version of the rows is only
    proposed. Raises errors.SchemaIncompatible, errors.SchemaNotRegistered."""
    if not kind.versions:
        if not kind.fits_columns:
            check_takes_bytes(head, topic, state.topic_id)
        return None
    after = head
    for number in sorted(kind.versions):
        after = schema_rules.committed_head(topic, after, number, registered, evolves=kind.evolves)
    if head.takes_bytes:
        check_takes_columns(state, actions, topic)
        after = replace(after, in_force=True)
    return None if after == head else after


def check_takes_columns(
    state: TopicState, actions: Actions, topic: str, follow: str = "no schema"
) -> None:
    """Checks that the topic's schema may come into force with these actions: they leave no row that
    was written without the schema, and no broker appends. `follow` says what such rows follow.
    Raises errors.SchemaIncompatible."""
    obstacle = None
    for partition in state.partitions:
        rows = partition.rows_between(partition.start_offset, partition.end_offset)
        if partition.live is not None:
            obstacle = f"{partition.live.owner} has partition {partition.number} open to producers"
        elif rows and not overwrites(actions):
            obstacle = f"partition {partition.number} has {rows} rows that follow {follow}"
        if obstacle is not None:
            break
    if obstacle is not None:
        raise errors.SchemaIncompatible(
            f"topic '{topic}' takes no columns: {obstacle}, and no reader could read a topic with"
            " both",
            "Write to another topic, or first stop the producers and take the old rows away (mode"
            " overwrite, spark-ledger topic truncate), or write columns with schemaMode=none, which"
            " registers no schema. Admin.register_schema brings back a withdrawn schema.",
            topic_id=state.topic_id,
        )


def overwrites(actions: Actions) -> bool:
    return any(isinstance(action, Overwrite) for action in actions)


def check_no_subscription_holds(
    state: TopicState, actions: Actions, holds: Holds, topic: str
) -> None:
    """Checks that an overwrite among the actions takes away no row of `topic` that a subscription
    holds, also no row that the same commit seals. Raises errors.SubscriptionBusy."""
    rows_sealed: Counter[int] = Counter()
    for action in actions:
        if isinstance(action, SealLive) and action.segment is not None:
            rows_sealed[action.partition] += action.segment.rows
    overwritten = {
        p.number: (p.start_offset, p.end_offset + rows_sealed[p.number]) for p in state.partitions
    }
    held = holds.first_held(overwritten) if overwrites(actions) else None
    if held is None:
        return
    partition, offset = held
    name = holds.holders[partition]
    raise errors.SubscriptionBusy(
        f"the rows of topic '{topic}' cannot be replaced: subscription {name!r} holds partition"
        f" {partition} from offset {offset} on, its lowest position in the last"
        f" {GRACE_MS // 60_000} minutes, and the rows to be replaced end at"
        f" {overwritten[partition][1]}",
        "Wait until the subscription has been past these rows that long, delete the subscription"
        " (spark-ledger subscription delete TOPIC NAME), or write with overwriteHeld=true.",
        subscription=name,
        partition=partition,
        offset=offset,
    )


def _check_not_live(partition: PartitionState, sealed_partitions: Container[int]) -> None:
    if partition.live is not None and partition.number not in sealed_partitions:
        raise errors.TxnConflict(
            f"partition {partition.number} has the live ledger {partition.live.ledger_id}: a commit"
            " has to seal its segment first",
            live=True,
        )


def _check_replaced(partition: PartitionState, action: Replace) -> None:
    if partition.start_offset > action.start:
        raise errors.TxnConflict(
            f"partition {partition.number} starts at {partition.start_offset} now: rows from"
            f" {action.start} on cannot be replaced"
        )
    if partition.rearranged >= action.snapshot:
        raise errors.TxnConflict(
            f"partition {partition.number} was rearranged by commit {partition.rearranged}, the"
            f" replacement was planned on the commits before {action.snapshot}"
        )


def _partition(state: TopicState, partition: int) -> PartitionState:
    if not 0 <= partition < len(state.partitions):
        raise ValueError(f"partition {partition} of {len(state.partitions)} was written")
    return state.partitions[partition]
