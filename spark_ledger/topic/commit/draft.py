"""What a commit says, and whether it may be said. Pure.

Always true: no entry is claimed twice, but for shared ones by different partitions; segments are
in the order of Spark's task index, then in the task's own; the transaction record alone says
whether a version was committed (hazards 2, 10), and a version that another run recorded after this
run had begun is an error, never silently done; nor is a query's batch with other rows (hazard 11).
What an action takes away is computed on the state that it follows, so it names every ledger that
loses rows.
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
from spark_ledger.topic.log.segment_table import Chunk
from spark_ledger.topic.log.segments import INLINE, Segment
from spark_ledger.topic.log.state import UNREAD, PartitionState, Tables, TopicState, is_of
from spark_ledger.topic.schema import rules as schema_rules
from spark_ledger.topic.schema.records import SchemaHead, SchemaVersion
from spark_ledger.topic.write import TaskResult

TOPICS_MAX = 500
MULTI_BYTES_MAX = 512 * 1024
BODY_INLINE_BYTES_MAX = 64 * 1024
"""A larger body goes to a ledger."""
INLINE_COMMIT_BYTES_MAX = 32 * 1024
"""More payload bytes than these, over the whole commit, go to ledgers."""
USER_METADATA_BYTES_MAX = 16 * 1024
NEXT_VERSION = -2
"""Of a TxnKey: whatever comes after the version recorded."""
SNAPSHOT_OF_INTENT = -1
"""Of an Overwrite: the snapshot that the intent noted."""


@dataclass(frozen=True, slots=True)
class RowKind:
    """What rows are that come to a topic: columns under these versions of its schema, which is in
    force from the first such commit on, or bytes, of which such a topic takes none. With `evolves`
    a version that was proposed comes beside others."""

    versions: frozenset[int] = frozenset()
    evolves: bool = False

    BYTES: ClassVar["RowKind"]


RowKind.BYTES = RowKind()

Actions = tuple[Action, ...]
Range = tuple[int, int, int]
"""A partition, and the offsets [lo, hi) of it."""


@dataclass(frozen=True, slots=True)
class TxnKey:
    """(app_id, target) name the transaction record, `version` is what is committed to it.
    Streaming: query id, the sink's topic with its id (`*` where a column names the
    topic), batch id, run id of the query. Batch: txnAppId and txnVersion, or a random app id and
    version 0; the intent's run id."""

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
    """What came into each topic. ALREADY: by an earlier commit of the version; no topics where a
    later version was committed since. SKIPPED: by such a commit, and these are other rows. Rows are
    left out of very large commits."""

    kind: CommitKind
    topics: Mapping[str, TopicRows] = field(default_factory=dict)

    @property
    def number(self) -> int:
        """In the log of the first topic (NO_COMMIT: no rows, no number)."""
        return next(iter(self.topics.values()), TopicRows()).number

    @property
    def rows(self) -> Mapping[int, int]:
        """Of the first topic, by partition."""
        return next(iter(self.topics.values()), TopicRows()).rows


@dataclass(frozen=True, slots=True)
class Wanted:
    """A commit as it is asked for: what it does to each topic (by id), under which version and
    intent. `checks` are checked in its multi, `finish_intent` ends the intent there. `batch` is
    what a streaming query's tasks counted, None where a version is done whatever it had.
    `overwrite_held`: an overwrite takes rows away that a subscription holds, too. `kinds` are what
    the rows of a topic are, by its id; of one that is not in it nothing is judged. `creators`: the
    creator tokens of the ledgers that tasks wrote, where they are known. Raises
    errors.CommitOverTooManyTopics, errors.OptionInvalid, ValueError (see check_claims)."""

    txn: TxnKey
    intent_id: str
    drafts: Mapping[str, Actions]
    finish_intent: bool = False
    checks: tuple[Check, ...] = ()
    user_metadata: str = ""
    batch: QueryBatch | None = None
    overwrite_held: bool = False
    kinds: Mapping[str, RowKind] = field(default_factory=dict)
    creators: Mapping[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.drafts) > TOPICS_MAX:
            raise errors.CommitOverTooManyTopics(
                f"a commit to {len(self.drafts)} topics, at most {TOPICS_MAX} fit into one",
                topics=len(self.drafts),
            )
        size = len(self.user_metadata.encode())
        if size > USER_METADATA_BYTES_MAX:
            raise errors.OptionInvalid(
                f"userMetadata has {size} bytes, at most {USER_METADATA_BYTES_MAX} are kept",
                "Give a shorter text.",
            )
        check_claims(s for actions in self.drafts.values() for a in actions for s in segments_of(a))


def ordered_segments(
    topic_id: str, intent_id: str, results: Sequence[TaskResult]
) -> tuple[Segment, ...]:
    """The results' segments, by task index and then in the task's order; checked to be of this
    topic and intent. Raises errors.TopicRecreated, errors.LedgerFenced, ValueError for two results
    of one task."""
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
    """What a task wrote for several topics is of one attempt. Raises ValueError."""
    attempts: dict[int, int] = {}
    for result in results:
        other = attempts.setdefault(result.task_index, result.attempt)
        if other != result.attempt:
            raise ValueError(
                f"attempts {other} and {result.attempt} of task {result.task_index} in one commit"
            )


def check_claims(segments: Iterable[Segment]) -> None:
    """An entry is in one segment, or in several that are all shared and of different partitions.
    Raises ValueError."""
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
            taken = max(end, -1 if shared else end_shared, ends_by_partition.get(partition, -1))
            if first <= taken:
                raise ValueError(
                    f"entries {first}..{min(taken, last)} of ledger {ledger} are claimed twice"
                )
            if shared:
                end_shared = max(end_shared, last)
            else:
                end = max(end, last)
            ends_by_partition[partition] = last


def settled(
    record: TxnRecord, commit_id: str, txn: TxnKey, w0: int, batch: QueryBatch | None = None
) -> CommitOutcome | None:
    """What the transaction record says of the commit: its outcome, or None: not committed yet, or
    to be committed again.

    Raises errors.LedgerFenced when another run recorded the version after this run had begun;
    errors.CheckpointBehind, errors.ReplayDiffers for a query's batch that was planned anew.
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
    exact = record.version == txn.version
    if exact and batch is not None and not replay.same(record, batch.content):
        return CommitOutcome(CommitKind.SKIPPED, record.topics())
    return CommitOutcome(CommitKind.ALREADY, record.topics() if exact else {})


def takes_number(actions: Actions) -> bool:
    """Whether the actions do anything: an append of nothing does not, and has no place in a log."""
    return any(not isinstance(action, Append) or action.segments for action in actions)


def rows_by_partition(actions: Actions) -> dict[int, int]:
    """How many rows they bring in: those of a merge and of a live segment were there before."""
    rows: Counter[int] = Counter()
    for action in actions:
        for segment in () if isinstance(action, Replace | SealLive) else segments_of(action):
            rows[segment.partition] += segment.rows
    return dict(sorted(rows.items()))


def check_whole(batch: QueryBatch | None, drafts: Mapping[str, Actions]) -> None:
    """What a query commits is all that its tasks counted. Raises errors.LedgerFenced: some compared
    their rows with a commit that is not the last any more, and wrote none."""
    if batch is None:
        return
    rows = sum(sum(rows_by_partition(actions).values()) for actions in drafts.values())
    if rows != batch.content.rows:
        raise errors.LedgerFenced(
            f"the tasks counted {batch.content.rows} rows and wrote {rows}: what they took for a"
            " replay is none any more"
        )


def record_of(
    txn: TxnKey,
    commit_id: str,
    numbers: Mapping[str, int],
    drafts: Mapping[str, Actions],
    batch: QueryBatch | None = None,
) -> TxnRecord:
    """The record of the version: what came into which topic under which number."""
    came = {
        topic: TopicRows(numbers.get(topic, records.NO_COMMIT), rows_by_partition(actions))
        for topic, actions in drafts.items()
    }
    first, *others = came or {"": TopicRows()}
    return TxnRecord(
        txn.version,
        txn.run_id,
        commit_id,
        first,
        came.get(first, TopicRows()).number,
        came.get(first, TopicRows()).rows,
        {topic: came[topic] for topic in others},
        None if batch is None else batch.content,
    )


# -- actions on the state that they follow ------------------------------------------------------


def with_snapshots(actions: Actions, snapshot: int | None) -> Actions:
    """With the overwrites' snapshots as the intent noted them. Raises ValueError when it did not:
    the intent was not opened for overwriting this topic."""
    found: list[Action] = []
    for action in actions:
        if isinstance(action, Overwrite) and action.snapshot == SNAPSHOT_OF_INTENT:
            if snapshot is None:
                raise ValueError("the intent does not say that this topic is to be overwritten")
            action = replace(action, snapshot=snapshot)
        found.append(action)
    return tuple(found)


def taken_away(state: TopicState, action: Action) -> list[Range]:
    """The rows that the action takes away from where they are now."""
    match action:
        case Overwrite():
            return [(p.number, p.start_offset, p.end_offset) for p in state.partitions]
        case Trim():
            return [(p, state.partitions[p].start_offset, end) for p, end in action.offsets]
        case Hole() | Replace():
            return [(action.partition, action.start, action.end)]
    return []


def chunks_of(state: TopicState, actions: Actions) -> list[Chunk]:
    """The chunks that `with_dropped` needs."""
    ranges = [one for action in actions for one in taken_away(state, action)]
    found = (state.partitions[p].chunks_between(lo, hi) for p, lo, hi in ranges)
    return list(dict.fromkeys(chunk for some in found for chunk in some))


def with_dropped(state: TopicState, actions: Actions, read: Tables = UNREAD) -> Actions:
    """With the ledgers that lose rows named in each action: among them are all to which nothing
    refers after it. `read` has `chunks_of`. The actions hold on the state (`check_holds`)."""
    return tuple(_with_dropped(state, action, read) for action in actions)


def _with_dropped(state: TopicState, action: Action, read: Tables) -> Action:
    if not isinstance(action, Overwrite | Trim | Hole | Replace):
        return action
    losing: dict[int, None] = {}
    for partition, lo, hi in taken_away(state, action):
        for part in state.partitions[partition].stretches(lo, hi, read):
            losing |= dict.fromkeys(part.table.ledger_ids())
    kept = {segment.ledger_id for segment in segments_of(action)}
    return replace(action, dropped=tuple(sorted(losing.keys() - kept)))


# -- sizes -----------------------------------------------------------------------------------------


def inline_segments(actions: Actions) -> list[Segment]:
    return [s for action in actions for s in segments_of(action) if s.inline]


def inline_bytes(drafts: Mapping[str, Actions]) -> int:
    """Of the payloads that are in the commit itself."""
    some = (segment for actions in drafts.values() for segment in inline_segments(actions))
    return sum(len(payload) for segment in some for payload in segment.inline)


def with_moved(actions: Actions, moved: Sequence[Segment]) -> Actions:
    """With `moved`, in their order, in the place of the inline segments."""
    coming = iter(moved)

    def placed(some: Iterable[Segment]) -> tuple[Segment, ...]:
        return tuple(next(coming) if segment.inline else segment for segment in some)

    found = []
    for action in actions:
        if isinstance(action, Append | Replace | Overwrite):
            action = replace(action, segments=placed(action.segments))
        elif isinstance(action, SealLive) and action.segment is not None:
            action = replace(action, segment=placed([action.segment])[0])
        found.append(action)
    return tuple(found)


def to_spill(bodies: Mapping[str, bytes], other_bytes: int) -> list[str]:
    """The topics whose bodies go to ledgers: those above BODY_INLINE_BYTES_MAX, and the largest
    others until the multi, with `other_bytes` beside bodies, has MULTI_BYTES_MAX at most."""
    sizes = {topic: len(body) for topic, body in bodies.items()}
    spilled = [topic for topic, size in sizes.items() if size > BODY_INLINE_BYTES_MAX]
    total = other_bytes + sum(sizes[topic] for topic in sizes if topic not in spilled)
    for topic in sorted(sizes.keys() - set(spilled), key=lambda topic: (-sizes[topic], topic)):
        if total <= MULTI_BYTES_MAX:
            break
        spilled.append(topic)
        total -= sizes[topic]
    return spilled


# -- guards (hazard 9) -----------------------------------------------------------------------------
#
# Always true: a guard is evaluated on the state folded up to the number that is being created, and
# that number is set from that state's version of head, so what it saw is what the action follows.


def check_holds(state: TopicState, app_id: str, actions: tuple[Action, ...]) -> None:
    """Whether a commit of these actions by that app may follow on the state.

    Raises errors.TopicDeleted, errors.TopicTerminated, errors.UnsupportedFormat (another writer
    version is needed), errors.TxnConflict (what the action was planned on has changed: plan again),
    ValueError for what never held.
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
    sealed = {
        action.partition: 0 if action.segment is None else action.segment.rows
        for action in actions
        if isinstance(action, SealLive)
    }
    for action in actions:
        _check(state, app_id, action, sealed)


def _check(state: TopicState, app_id: str, action: Action, sealed: Mapping[int, int]) -> None:
    """`sealed`: by partition how many rows the same commit seals."""
    match action:
        case Append() | Overwrite():
            for segment in action.segments:
                _check_not_live(_partition(state, segment.partition), sealed)
        case Replace():
            _check_replaced(_partition(state, action.partition), action)
        case Trim():
            for partition, offset in action.offsets:
                end = _partition(state, partition).end_offset
                if offset > end:
                    raise errors.TxnConflict(
                        f"partition {partition} ends at {end}: it cannot be trimmed to {offset}"
                    )
        case Hole():
            held = _partition(state, action.partition)
            end = held.end_offset + sealed.get(held.number, 0)
            if not held.start_offset <= action.start < action.end <= end:
                raise errors.TxnConflict(f"{action} is not within what is kept")
        case Grow():
            if action.partitions <= len(state.partitions):
                raise errors.TxnConflict(
                    f"topic {state.topic_id} has {len(state.partitions)} partitions, not fewer"
                    f" than {action.partitions}"
                )
        case OpenLive():
            live = _partition(state, action.partition).live
            if live is not None and action.partition not in sealed:
                raise errors.TxnConflict(
                    f"partition {action.partition} has the live ledger {live.ledger_id}"
                )
        case SealLive():
            if not is_of(action, _partition(state, action.partition).live):
                raise errors.TxnConflict(
                    f"ledger {action.ledger_id} is not live any more, as commit {action.opened}"
                    " opened it",
                    live=True,
                )
        case Terminate():
            for held in state.partitions:
                _check_not_live(held, sealed)
    if isinstance(action, Overwrite) and state.last_foreign(app_id) >= action.snapshot:
        raise errors.TxnConflict(
            f"commit {state.last_foreign(app_id)} of another writer came after commit"
            f" {action.snapshot - 1}, the last that was to be overwritten"
        )


def check_takes_bytes(head: SchemaHead, topic: str, topic_id: str | None = None) -> None:
    """Raises errors.SchemaIncompatible."""
    if not head.takes_bytes:
        raise errors.SchemaIncompatible(
            f"topic '{topic}' has a schema (version {head.current}), and the rows are bytes: with"
            " both no reader could read all of it",
            "Write columns with valueFormat=arrow or valueFormat=json, write bytes all the same"
            " with schemaMode=none, or withdraw the schema: spark-ledger topic schema TOPIC"
            " --withdraw.",
            topic_id=topic_id,
        )


def schema_after(
    head: SchemaHead,
    kind: RowKind,
    state: TopicState,
    actions: Actions,
    topic: str,
    given_out: Mapping[int, SchemaVersion] = MappingProxyType({}),
) -> SchemaHead | None:
    """The topic's schema once rows of that kind came by the actions; None: as it is. `given_out`
    are its versions by number, needed where the rows' is only proposed. Raises
    errors.SchemaIncompatible, errors.SchemaNotRegistered."""
    if kind == RowKind.BYTES:
        check_takes_bytes(head, topic, state.topic_id)
        return None
    after = head
    for number in sorted(kind.versions):
        after = schema_rules.joined(topic, after, number, given_out, evolves=kind.evolves)
    if head.takes_bytes:
        check_takes_columns(state, actions, topic)
        after = replace(after, in_force=True)
    return None if after == head else after


def check_takes_columns(state: TopicState, actions: Actions, topic: str) -> None:
    """Whether the topic's schema may come into force with these actions: no row is left that was
    written without it, and no broker appends. Raises errors.SchemaIncompatible."""
    what = None
    for held in state.partitions:
        rows = held.rows_between(held.start_offset, held.end_offset)
        if held.live is not None:
            what = f"{held.live.owner} has partition {held.number} open, whose producers send bytes"
        elif rows and not overwrites(actions):
            what = f"partition {held.number} has rows that follow no schema, {rows} in all"
        if what is not None:
            break
    if what is not None:
        raise errors.SchemaIncompatible(
            f"topic '{topic}' takes no columns: {what}, and with both no reader could read all of"
            " it",
            "Write to another topic, or let those rows go first (mode overwrite, spark-ledger topic"
            " truncate, with its producers stopped), or write columns among them with"
            " schemaMode=none, which registers nothing. A schema that was withdrawn comes back by"
            " Admin.register_schema.",
            topic_id=state.topic_id,
        )


def overwrites(actions: Actions) -> bool:
    return any(isinstance(action, Overwrite) for action in actions)


def check_not_held(state: TopicState, actions: Actions, holds: Holds, topic: str) -> None:
    """Whether an overwrite among the actions takes away no row of `topic` that a subscription
    holds. Rows that the commit seals before it overwrites them count too. Raises
    errors.SubscriptionBusy."""
    sealed: Counter[int] = Counter()
    for action in actions:
        if isinstance(action, SealLive) and action.segment is not None:
            sealed[action.partition] += action.segment.rows
    going = {p.number: (p.start_offset, p.end_offset + sealed[p.number]) for p in state.partitions}
    held = holds.first(going) if overwrites(actions) else None
    if held is None:
        return
    partition, offset = held
    name = holds.by[partition]
    raise errors.SubscriptionBusy(
        f"the rows of topic '{topic}' cannot be replaced: subscription {name!r} holds partition"
        f" {partition} from offset {offset} on, the lowest at which it stood in the last"
        f" {GRACE_MS // 60_000} minutes, and the rows to be replaced end at"
        f" {going[partition][1]}",
        "Wait until what it has read is that long ago, delete it (spark-ledger subscription delete"
        " TOPIC NAME), or replace its rows all the same with overwriteHeld=true.",
        subscription=name,
        partition=partition,
        offset=offset,
    )


def _check_not_live(held: PartitionState, sealed: Container[int]) -> None:
    if held.live is not None and held.number not in sealed:
        raise errors.TxnConflict(
            f"partition {held.number} has the live ledger {held.live.ledger_id}: it is sealed"
            " first",
            live=True,
        )


def _check_replaced(held: PartitionState, action: Replace) -> None:
    if held.start_offset > action.start:
        raise errors.TxnConflict(
            f"partition {held.number} starts at {held.start_offset} now: rows from {action.start}"
            " on cannot be replaced"
        )
    if held.rearranged >= action.snapshot:
        raise errors.TxnConflict(
            f"partition {held.number} was rearranged by commit {held.rearranged}, the replacement"
            f" was planned on those before {action.snapshot}"
        )


def _partition(state: TopicState, partition: int) -> PartitionState:
    if not 0 <= partition < len(state.partitions):
        raise ValueError(f"partition {partition} of {len(state.partitions)} was written")
    return state.partitions[partition]
