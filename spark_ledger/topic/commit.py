"""Commit: a batch's segments become visible in a topic, all at once, exactly once.

One multi: set head at the version it was folded from, create log/<n>, set the transaction record
at its known version, check (or end) the intent. Always true: whoever loses a race changes
nothing; a lost answer is resolved only by sync and the transaction record, never from the log and
never by sending again first (hazards 1, 2); a version at or below the recorded one changes
nothing, and is silent only if this run or one before this run's beginning recorded it (hazard 11).
"""

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from spark_ledger import errors
from spark_ledger.metadata import paths
from spark_ledger.metadata.store import (
    Check,
    Create,
    MetadataStore,
    MultiFailed,
    Operation,
    OutcomeUnknown,
    Set,
    StoreUnavailable,
)
from spark_ledger.topic import actions, guards, records
from spark_ledger.topic.actions import Append
from spark_ledger.topic.intents import Intent
from spark_ledger.topic.names import escape
from spark_ledger.topic.records import Commit, Head, IntentState, TxnRecord
from spark_ledger.topic.segments import Segment
from spark_ledger.topic.state import TopicState
from spark_ledger.topic.store_calls import look_up, pause_s, reachable
from spark_ledger.topic.task_writer import TaskResult
from spark_ledger.topic.topic_log import TopicLog

BODY_BYTES_MAX = 900 * 1024  # ZooKeeper's limit for a request is 1 MiB; later: spilled bodies


@dataclass(frozen=True, slots=True)
class TxnKey:
    """(app id, target) name the transaction record, `version` is what is committed to it.
    Streaming: query id, the sink's target as written by the user, batch id, run id of the query.
    Batch: txnAppId and txnVersion, or a random app id and version 0; the intent's run id."""

    app_id: str
    target: str
    version: int
    run_id: str


class CommitKind(Enum):
    COMMITTED = "committed"
    ALREADY = "already"


@dataclass(frozen=True, slots=True)
class CommitOutcome:
    """`number` in the topic's log (-1: no rows, no number); `rows` by partition."""

    kind: CommitKind
    number: int
    rows: Mapping[int, int]


async def commit(
    store: MetadataStore,
    log: TopicLog,
    *,
    txn: TxnKey,
    intent_id: str,
    results: Sequence[TaskResult],
    rng: random.Random,
    finish_intent: bool = False,
    timeout_s: float = 60.0,
) -> CommitOutcome:
    """Commit the tasks' results in order of task index. Returns when it is durable.

    `finish_intent` sets the intent to done in the same multi: a batch job's only commit.
    Raises errors.LedgerFenced (intent ended, another run recorded the version, results of another
    intent), errors.TopicDeleted, errors.TopicRecreated (results of another topic),
    errors.CommitContended, errors.CommitTooBig, errors.CommitOutcomeUnknown (the deadline passed
    with an answer lost: replay it), errors.Unavailable (nothing was sent), ValueError for results
    that claim a task or an entry twice.
    """
    segments = ordered_segments(log.topic_id, intent_id, results)
    commit_id = f"{rng.getrandbits(128):032x}"
    draft = Commit(
        commit_id, txn.app_id, txn.target, txn.version, txn.run_id, intent_id, (Append(segments),)
    )
    committer = _Committer(store, log, draft, finish_intent)
    with reachable(f"committing version {txn.version} of '{txn.app_id}' to '{txn.target}'"):
        return await committer.run(rng, timeout_s)


def ordered_segments(
    topic_id: str, intent_id: str, results: Sequence[TaskResult]
) -> tuple[Segment, ...]:
    """The results' segments, by task index and then in the task's order; checked to be of this
    topic and intent and to claim nothing twice. Raises as `commit`."""
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
    segments = tuple(segment for result in by_task for segment in result.segments)
    _check_claims(segments)
    return segments


def settled(record: TxnRecord, draft: Commit, w0: int) -> CommitOutcome | None:
    """What the transaction record says of the draft: its outcome, or None: not committed yet.

    Raises errors.LedgerFenced when another run recorded the version after this run had begun.
    """
    if record.version < draft.version:
        return None
    mine = record.commit_id == draft.commit_id
    if not (mine or record.run_id == draft.run_id or draft.version <= w0):
        raise errors.LedgerFenced(
            f"version {draft.version} of '{draft.app_id}' on '{draft.target}' was committed by"
            f" run {record.run_id}, after run {draft.run_id} had begun",
            recorded_version=record.version,
            recorded_by=record.run_id,
        )
    exact = record.version == draft.version
    kind = CommitKind.COMMITTED if mine else CommitKind.ALREADY
    return CommitOutcome(
        kind, record.number if exact else records.NO_COMMIT, record.rows if exact else {}
    )


class _Committer:
    """One commit, tried until its outcome is known."""

    def __init__(
        self, store: MetadataStore, log: TopicLog, draft: Commit, finish_intent: bool
    ) -> None:
        self._store = store
        self._log = log
        self._draft = draft
        self._finish_intent = finish_intent
        self._body = records.encode_commit(draft)
        self._segments = tuple(s for a in draft.actions for s in actions.segments_of(a))
        self._rows = dict(sorted(_rows_by_partition(self._segments).items()))
        self._txn_path = paths.txn(escape(draft.app_id), escape(draft.target))
        self._answer_lost = False
        if len(self._body) > BODY_BYTES_MAX:
            raise errors.CommitTooBig(
                f"a commit of {len(self._segments)} segments takes {len(self._body)} bytes, at"
                f" most {BODY_BYTES_MAX} fit",
                bytes=len(self._body),
            )

    async def run(self, rng: random.Random, timeout_s: float) -> CommitOutcome:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        tries = 0
        while True:
            problem: Exception | None = None
            try:
                outcome = await self._attempt(fresh=tries > 0)
                if outcome is not None:
                    return outcome
            except OutcomeUnknown as error:
                self._answer_lost, problem = True, error
            except StoreUnavailable as error:
                problem = error
            if loop.time() >= deadline:
                raise self._gave_up(timeout_s, problem)
            await asyncio.sleep(pause_s(rng, tries))
            tries += 1

    async def _attempt(self, *, fresh: bool) -> CommitOutcome | None:
        """Look, then send the multi once. None: a race was lost, nothing was changed."""
        if fresh:
            await self._store.sync(self._txn_path)
        intent = await self._intent()
        record, version = await self._record()  # after the intent: see _intent
        outcome = settled(record, self._draft, intent.record.w0)
        if outcome is not None:
            return outcome
        if not intent.open:
            raise intent.ended()
        state = await self._log.fold(fresh=fresh)
        self._check_topic(state)
        number = state.next if self._segments else records.NO_COMMIT
        done = TxnRecord(
            self._draft.version,
            self._draft.run_id,
            self._draft.commit_id,
            self._log.topic_id,
            number,
            self._rows,
        )
        try:
            await self._store.multi(self._operations(state, done, version, intent))
        except MultiFailed:
            return None
        return CommitOutcome(CommitKind.COMMITTED, number, self._rows)

    def _operations(
        self, state: TopicState, done: TxnRecord, txn_version: int, intent: Intent
    ) -> list[Operation]:
        topic_id = self._log.topic_id
        operations: list[Operation] = [
            Set(self._txn_path, records.encode_txn(done), txn_version),
            self._intent_operation(intent),
        ]
        if self._segments:
            head = records.encode_head(Head(state.next + 1))
            operations += [
                Set(paths.topic_head(topic_id), head, state.head_version),
                Create(paths.topic_log(topic_id, state.next), self._body),
            ]
        return operations

    def _intent_operation(self, intent: Intent) -> Operation:
        path = paths.intent(intent.id)
        if not self._finish_intent:
            return Check(path, intent.version)
        done = replace(intent.record, state=IntentState.DONE)
        return Set(path, records.encode_intent(done), intent.version)

    async def _intent(self) -> Intent:
        """The intent, read *before* the transaction record: if this commit's own multi, whose
        answer was lost, ended the intent, the record read after it says so."""
        path = paths.intent(self._draft.intent)
        node = await look_up(self._store, path)
        if node is None:
            raise errors.LedgerFenced(f"there is no intent {self._draft.intent}")
        return Intent(self._draft.intent, records.decode_intent(node.value), node.version)

    async def _record(self) -> tuple[TxnRecord, int]:
        node = await look_up(self._store, self._txn_path)
        if node is None:
            raise errors.LedgerFenced(
                f"'{self._draft.app_id}' has no transaction record for '{self._draft.target}':"
                " its intent was made for another"
            )
        return records.decode_txn(node.value), node.version

    def _check_topic(self, state: TopicState) -> None:
        wanted = self._draft.actions if self._segments else ()
        guards.check(state, self._draft.app_id, wanted)

    def _gave_up(self, timeout_s: float, problem: Exception | None) -> errors.LedgerError:
        draft = self._draft
        what = f"the commit of version {draft.version} of '{draft.app_id}' to '{draft.target}'"
        if self._answer_lost:
            return errors.CommitOutcomeUnknown(
                f"{what} was sent and its answer lost; it could not be looked up in {timeout_s} s"
            )
        if problem is not None:
            return errors.Unavailable(f"{what} was not made in {timeout_s} s: {problem}")
        return errors.CommitContended(f"{what} lost every race for {timeout_s} s")


def _rows_by_partition(segments: Sequence[Segment]) -> Counter[int]:
    rows: Counter[int] = Counter()
    for segment in segments:
        rows[segment.partition] += segment.rows
    return rows


def _check_claims(segments: Sequence[Segment]) -> None:
    """No entry is in two segments."""
    claims = sorted((s.ledger_id, first, last) for s in segments for first, last in s.entries)
    for one, other in itertools.pairwise(claims):
        if one[0] == other[0] and other[1] <= one[2]:
            raise ValueError(f"entries {other[1]}..{one[2]} of ledger {one[0]} are claimed twice")
