"""Commit: the rows of a batch become visible in its topics, all at once, exactly once.

One multi checks the cluster's record (a hold raises its version: metadata/hold.py), sets the
transaction record, checks or ends the intent, and for each topic sets head and creates log/<n>.
Each node must have the version that the commit read. Always true: all topics get the commit or none
does, and the loser of a race changes nothing. After a lost response the commit first syncs and
reads the transaction record; the log does not show the outcome (hazards 1, 2). A version at or
below the recorded version changes nothing, unless a query plans this version again and the user
wants the new rows: then the record goes back to this version. The first try uses the views of this
process (commit/views.py); a guard's refusal counts only if the commit has read after a sync.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

from spark_ledger import errors
from spark_ledger.metadata import paths
from spark_ledger.metadata.cluster import ClusterGuard
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
from spark_ledger.metadata.store_calls import call_each, pause_s, unavailable_while
from spark_ledger.topic.commit import draft as commit_draft
from spark_ledger.topic.commit import guards
from spark_ledger.topic.commit import views as commit_views
from spark_ledger.topic.commit.draft import (
    INLINE_COMMIT_BYTES_MAX,
    MULTI_BYTES_MAX,
    NEXT_VERSION,
    Actions,
    CommitKind,
    CommitOutcome,
    CommitRequest,
    TxnKey,
)
from spark_ledger.topic.commit.views import LOSSES_MAX, CommitViews, Turns
from spark_ledger.topic.log import records
from spark_ledger.topic.log.blobs import Blobs, BlobWriter, pack, stored_segments
from spark_ledger.topic.log.intents import Intent
from spark_ledger.topic.log.names import escape
from spark_ledger.topic.log.producers import with_fewer_producers
from spark_ledger.topic.log.records import Commit, Head, IntentState, SpilledBody, TxnRecord
from spark_ledger.topic.log.segment_table import TableChunk
from spark_ledger.topic.log.state import Tables, TopicState
from spark_ledger.topic.log.topic_log import TopicLog
from spark_ledger.topic.log.topics import read_policies

__all__ = ["CommitKind", "CommitOutcome", "Committer", "TxnKey", "CommitRequest"]

_log = logging.getLogger(__name__)
OPERATION_BYTES = 64  # that an operation takes beside path and value, at most
_CHECKS_AT = 2  # index of the caller's checks, after those of transaction record and intent

LoadChunks = Callable[[Sequence[TableChunk]], Awaitable[Tables]]


class Committer:
    """Makes the commits of one process. `load` reads the chunks of a checkpoint; `holds` reads the
    rows that subscriptions hold; `forget` drops the folded states of all topics."""

    def __init__(
        self,
        store: MetadataStore,
        log: Callable[[str], TopicLog],
        blobs: Blobs,
        load: LoadChunks,
        holds: guards.HoldsOf,
        rng: random.Random,
        forget: Callable[[], None],
    ) -> None:
        self.store = store
        self._log = log
        self._forget = forget
        self.blobs = blobs
        self.load = load
        self.holds = holds
        self.rng = rng
        self.views = CommitViews(store, log)
        self.guard = ClusterGuard(store)

    async def commit(self, request: CommitRequest, timeout_s: float = 60.0) -> CommitOutcome:
        """Makes the commit; returns when the commit is durable.

        Version NEXT_VERSION is for an app id that has one committer: each call is then a new
        commit. Raises errors.SubscriptionBusy (an overwrite would take away rows that a
        subscription holds), errors.LedgerFenced (the intent ended, or another run recorded the
        version), errors.TxnConflict (the state for which an action was planned has changed, or a
        check fails), errors.CheckpointBehind, errors.ReplayDiffers, errors.TopicDeleted,
        errors.TopicTerminated, errors.CommitContended, errors.CommitTooBig,
        errors.CommitOutcomeUnknown (a response was lost before the deadline: replay the commit),
        errors.Unavailable and errors.MetadataHeld (nothing was committed), the errors of writing to
        ledgers, ValueError for an action that no state allows.
        """
        txn = request.txn
        commit = _Commit(self, request)
        purpose = f"committing version {txn.version} of '{txn.app_id}' to '{txn.target}'"
        with unavailable_while(purpose):
            try:
                if txn.version != NEXT_VERSION:
                    return await commit.run(timeout_s)
                async with self.views.one_at_a_time(f"{txn.app_id}@{txn.target}"):
                    return await commit.run(timeout_s)
            except errors.LedgerFenced:  # if the store went back in time, it may lack the intent
                await self.check_cluster_epoch()
                raise

    async def check_cluster_epoch(self) -> None:
        """Raises errors.MetadataHeld; errors.LedgerFenced if a person accepted an older store
        since this process began. The store may lack ledgers and commits of this process, so the
        process forgets its views and states, and later commits read the store."""
        if not await self.guard.refresh():
            self.views = CommitViews(self.store, self._log)
            self._forget()
            raise errors.LedgerFenced(
                "the metadata store went back in time, and a person accepted the store meanwhile",
                "Run the job again: the store has no record of the ledgers that it wrote before.",
            )


class _ViewTooOld(Exception):
    """A view that was not read after a sync shows a refusal: the commit reads again."""


@dataclass(frozen=True, slots=True)
class _View:
    """What an attempt reads first (`fresh`: after a sync). `record_version` is the version of the
    transaction record's node."""

    fresh: bool
    intent: Intent
    txn: TxnKey
    record_version: int


@dataclass(frozen=True, slots=True)
class _Step:
    """The commit in one topic: `after` is the state after `commit` took number `before.next`."""

    before: TopicState
    commit: Commit
    after: TopicState


class _Commit:
    """One commit, tried until its outcome is known."""

    def __init__(self, process: Committer, request: CommitRequest) -> None:
        self._request = request
        self._process = process
        self._store = process.store
        self._views = process.views
        self._rng = process.rng
        self._commit_id = f"{process.rng.getrandbits(128):032x}"
        self._topic_ids = sorted(request.drafts)
        self._txn_path = paths.txn(escape(request.txn.app_id), escape(request.txn.target))
        self._turns = Turns(self._store, self._commit_id, self._topic_ids)
        self._payloads = CommitPayloads(self._store, process.blobs, self._commit_id)
        self._losses = 0
        self._response_lost = False

    async def run(self, timeout_s: float) -> CommitOutcome:
        try:
            return await self._try_until(asyncio.get_running_loop().time() + timeout_s, timeout_s)
        finally:
            await self._payloads.release()
            await self._turns.give_back()

    async def _try_until(self, deadline: float, timeout_s: float) -> CommitOutcome:
        loop = asyncio.get_running_loop()
        fresh, tries = False, 0
        while True:
            problem: Exception | None = None
            try:
                outcome = await self._attempt(fresh=fresh)
                if outcome is not None:
                    return outcome
                self._losses += 1
            except _ViewTooOld:
                fresh = True
                continue
            except OutcomeUnknown as error:
                self._response_lost, problem = True, error
            except errors.MetadataHeld:  # only a person ends a hold
                raise
            except (StoreUnavailable, errors.Unavailable) as error:
                problem = error
            fresh = True
            if loop.time() >= deadline:
                raise self._timeout_error(timeout_s, problem)
            await asyncio.sleep(pause_s(self._rng, tries))
            tries = 0 if self._losses >= LOSSES_MAX else tries + 1  # no long pause during a turn

    async def _attempt(self, *, fresh: bool) -> CommitOutcome | None:
        """Reads, then sends the multi once. None: the commit lost a race and changed nothing."""
        if fresh:
            await self._store.sync(self._txn_path)
        try:
            intent = await self._views.intent(self._request.intent_id, fresh=fresh)
        except errors.LedgerFenced:
            return await self._outcome_without_intent()
        record, version = await self._record(fresh)  # after the intent: see _recorded_outcome
        txn = self._request.txn
        if txn.version == NEXT_VERSION:
            txn = replace(txn, version=record.version + 1)
        view = _View(fresh, intent, txn, version)
        outcome = self._recorded_outcome(view, record)
        if outcome is not None:
            await self._check_not_superseded(outcome, record)
            return outcome
        if self._request.batch is not None and record.version >= txn.version:
            _log.warning(
                "batch %d of '%s' is committed to '%s' again, with %d rows: the record goes back to"
                " it from %d",
                *(txn.version, txn.app_id, txn.target),
                *(self._request.batch.content.rows, record.version),
            )
        drafts = await self._payloads.move_large_payloads(intent, self._request.drafts)
        ids_to_fold = [id_ for id_ in self._topic_ids if fresh or self._views.needs_fold(id_)]
        if self._losses >= LOSSES_MAX:
            await self._turns.take()
        else:
            await self._turns.wait_for_others(ids_to_fold)
        async with AsyncExitStack() as topic_locks:
            for topic_id in self._topic_ids:
                await topic_locks.enter_async_context(self._views.one_at_a_time(topic_id))
            steps = await self._plan_steps(view, drafts, ids_to_fold)
            return await self._send(view, drafts, steps)

    async def _check_not_superseded(self, outcome: CommitOutcome, record: TxnRecord) -> None:
        """Raises errors.LedgerFenced if another run set the record back after this run began. Such
        a run has ended this run's intent. The record alone does not show this: its version may be
        at or below `w0`, the version when this run's intent was made."""
        if outcome.kind is CommitKind.COMMITTED or record.run_id == self._request.txn.run_id:
            return
        intent = await self._views.intent(self._request.intent_id, fresh=True)
        if not intent.is_open:
            raise intent.ended_error()

    async def _outcome_without_intent(self) -> CommitOutcome:
        """The outcome by the transaction record alone: an intent is removed some time after its end
        (hazard 12)."""
        recorded = await self._views.txn(self._txn_path, fresh=True)
        if recorded is None:
            txn = self._request.txn
            raise errors.CommitOutcomeUnknown(
                f"neither the intent nor the transaction record of '{txn.app_id}' for"
                f" '{txn.target}' exists any more: the run ended long ago"
            )
        if recorded[0].commit_id == self._commit_id:
            return CommitOutcome(CommitKind.COMMITTED, recorded[0].topics())
        raise errors.LedgerFenced(f"there is no intent {self._request.intent_id} any more")

    async def _record(self, fresh: bool) -> tuple[TxnRecord, int]:
        recorded = await self._views.txn(self._txn_path, fresh=fresh)
        if recorded is None and not fresh:
            raise _ViewTooOld
        if recorded is None:
            raise errors.LedgerFenced(
                f"'{self._request.txn.app_id}' has no transaction record for"
                f" '{self._request.txn.target}': its intent was made for another target"
            )
        return recorded

    def _recorded_outcome(self, view: _View, record: TxnRecord) -> CommitOutcome | None:
        """The outcome, None if the record does not show an outcome. The record was read *after* the
        intent: if a multi of this commit ended the intent, the record has the commit."""
        try:
            outcome = commit_draft.recorded_outcome(
                record,
                self._commit_id,
                self._request.txn,
                view.intent.record.w0,
                self._request.batch,
            )
            if outcome is None and not view.intent.is_open:
                raise view.intent.ended_error()
            if outcome is None:
                commit_draft.check_all_rows_written(self._request.batch, self._request.drafts)
        except errors.LedgerError as error:
            raise (error if view.fresh else _ViewTooOld()) from error
        if outcome is not None and not view.fresh:
            raise _ViewTooOld
        return outcome

    # -- the commit in each topic --------------------------------------------------------------

    async def _plan_steps(
        self, view: _View, drafts: Mapping[str, Actions], ids_to_fold: Sequence[str]
    ) -> dict[str, _Step]:
        """The steps in the topics that take a number. Raises as commit_draft.check_guards."""
        reads = [
            self._views.state(id_, fold=id_ in ids_to_fold, fresh=view.fresh)
            for id_ in self._topic_ids
        ]
        states = dict(zip(self._topic_ids, await asyncio.gather(*reads), strict=True))
        changed_ids = [id_ for id_ in self._topic_ids if commit_draft.takes_number(drafts[id_])]
        try:
            for id_ in self._topic_ids:
                commit_draft.check_guards(
                    states[id_], view.txn.app_id, self._actions_of(view, id_, drafts)
                )
            return {
                id_: await self._plan_step(
                    view, states[id_], self._actions_of(view, id_, drafts), changed_ids
                )
                for id_ in changed_ids
            }
        except (errors.LedgerError, ValueError) as error:
            raise (error if view.fresh else _ViewTooOld()) from error

    def _actions_of(self, view: _View, topic_id: str, drafts: Mapping[str, Actions]) -> Actions:
        snapshot = view.intent.record.snapshots.get(topic_id)
        actions = with_fewer_producers(drafts[topic_id])
        return commit_draft.with_snapshots(actions, snapshot)

    async def _plan_step(
        self, view: _View, state: TopicState, actions: Actions, changed_ids: Sequence[str]
    ) -> _Step:
        tables = await self._process.load(commit_draft.chunks_needed(state, actions))
        commit = Commit(
            self._commit_id,
            view.txn.app_id,
            view.txn.target,
            view.txn.version,
            view.txn.run_id,
            view.intent.id,
            commit_draft.with_dropped_ledgers(state, actions, tables),
            others=tuple(id_ for id_ in changed_ids if id_ != state.topic_id),
            user_metadata=self._request.user_metadata,
        )
        return _Step(state, commit, commit_views.state_after(state, commit))

    async def _guard_operations(
        self, view: _View, steps: Mapping[str, _Step]
    ) -> tuple[list[Check], dict[str, list[Operation]]]:
        """Checks that no subscription holds rows that an overwrite takes away, and by topic the
        operations on schemas that the rows need. Raises as the functions of guards.py."""
        names = {id_: _name_of(id_, view) for id_ in self._topic_ids}
        changes = {id_: (step.before, step.commit.actions) for id_, step in steps.items()}
        try:
            epoch, creators = self._process.guard.epoch, self._request.creators
            await guards.check_ledgers(self._store, epoch, changes, creators)
            await guards.check_quotas(self._request, changes)
            hold_checks: list[Check] = []
            if not self._request.overwrite_held:
                hold_checks = await guards.checks_of_holds(self._process.holds, changes, names)
            return hold_checks, await guards.schema_operations(
                self._views, self._request.row_kinds, changes, names, fresh=view.fresh
            )
        except errors.LedgerError as error:
            raise (error if view.fresh else _ViewTooOld()) from error

    # -- the multi ---------------------------------------------------------------------------

    async def _send(
        self, view: _View, drafts: Mapping[str, Actions], steps: Mapping[str, _Step]
    ) -> CommitOutcome | None:
        numbers = {topic_id: step.before.next for topic_id, step in steps.items()}
        record = commit_draft.txn_record(
            view.txn, self._commit_id, numbers, drafts, self._request.batch
        )
        cluster_checks = await self._process.guard.checks()
        operations: list[Operation] = [
            *cluster_checks,
            Set(self._txn_path, records.encode_txn(record), view.record_version),
            self._intent_operation(view.intent),
            *self._request.checks,
        ]
        heads = [self._head(step) for step in steps.values()]
        bodies = {topic_id: records.encode_commit(step.commit) for topic_id, step in steps.items()}
        nodes = await self._payloads.nodes(view.intent, bodies, _bytes_of([*operations, *heads]))
        hold_checks, schemas = await self._guard_operations(view, steps)
        try:
            checks = await self._payloads.checks()
        except (errors.NoSuchLedger, errors.RowsLost):
            await self._payloads.release()  # a janitor took a ledger: write the payloads again
            return None
        operations += [*checks, *hold_checks]
        operations += [operation for of_topic in schemas.values() for operation in of_topic]
        heads_at = len(operations)
        for topic_id, head in zip(steps, heads, strict=True):
            log_path = paths.topic_log(topic_id, numbers[topic_id])
            operations += [head, Create(log_path, nodes[topic_id].value)]
        size = _bytes_of(operations)
        if size > MULTI_BYTES_MAX:
            raise errors.CommitTooBig(
                f"a commit to {len(self._topic_ids)} topics takes {size} bytes of metadata, at"
                f" most {MULTI_BYTES_MAX} fit",
                bytes=size,
            )
        try:
            await self._store.multi(operations)
        except MultiFailed as failed:
            if failed.index < len(cluster_checks):
                await self._process.check_cluster_epoch()
            else:
                self._note_lost_race(failed, len(cluster_checks), heads_at, list(steps))
            return None
        self._turns.forget()
        for topic_id, schema_operations in schemas.items():
            if isinstance(schema_operations[0], Set):
                self._views.forget_schema(topic_id)
        self._update_views(view, record, steps, {id_: node.ledger for id_, node in nodes.items()})
        return CommitOutcome(CommitKind.COMMITTED, record.topics())

    def _head(self, step: _Step) -> Set:
        path = paths.topic_head(step.before.topic_id)
        return Set(path, records.encode_head(Head(step.after.next)), step.before.head_version)

    def _intent_operation(self, intent: Intent) -> Operation:
        path = paths.intent(intent.id)
        if not self._request.finish_intent:
            return Check(path, intent.version)
        return Set(path, records.encode_intent(_ended_intent(intent).record), intent.version)

    def _note_lost_race(
        self, failed: MultiFailed, cluster_check_count: int, heads_at: int, topic_ids: Sequence[str]
    ) -> None:
        """Notes the topic in which the commit lost a race. Raises errors.TxnConflict if one of the
        caller's checks failed: a node never has an earlier version again, so no try would pass."""
        checks, first_check = self._request.checks, cluster_check_count + _CHECKS_AT
        if first_check <= failed.index < first_check + len(checks):
            path = checks[failed.index - first_check].path
            raise errors.TxnConflict(
                f"{path} has changed since the commit was planned", path=path
            ) from failed
        if failed.index >= heads_at:
            self._views.note_contention(topic_ids[(failed.index - heads_at) // 2])

    def _update_views(
        self,
        view: _View,
        record: TxnRecord,
        steps: Mapping[str, _Step],
        body_ledgers: Mapping[str, int | None],
    ) -> None:
        """Puts the result of the multi into the views."""
        self._views.set_txn(self._txn_path, record, view.record_version + 1)
        if self._request.finish_intent:
            self._views.set_intent(_ended_intent(view.intent))
        for topic_id, step in steps.items():
            ledger, after = body_ledgers[topic_id], step.after
            if ledger is not None:
                after = replace(after, bodies={**after.bodies, ledger: step.before.next})
            self._views.set_state(after)

    def _timeout_error(self, timeout_s: float, problem: Exception | None) -> errors.LedgerError:
        txn = self._request.txn
        what = f"the commit of version {txn.version} of '{txn.app_id}' to '{txn.target}'"
        if self._response_lost:
            return errors.CommitOutcomeUnknown(
                f"{what} was sent, its response was lost, and its outcome could not be read in"
                f" {timeout_s} s"
            )
        if problem is not None:
            return errors.Unavailable(f"{what} was not made in {timeout_s} s: {problem}")
        return errors.CommitContended(f"{what} lost every race for {timeout_s} s")


def _name_of(topic_id: str, view: _View) -> str:
    """The topic in error texts: its name if the target has the name, else its id."""
    name = view.txn.target.removesuffix(f"@{topic_id}")
    return topic_id if name == view.txn.target else name


def _ended_intent(intent: Intent) -> Intent:
    """The intent after the commit that ends it."""
    return Intent(intent.id, replace(intent.record, state=IntentState.DONE), intent.version + 1)


def _bytes_of(operations: Sequence[Operation]) -> int:
    """About how many bytes of a request the operations take."""
    return sum(
        OPERATION_BYTES + len(op.path) + len(op.value if isinstance(op, Create | Set) else b"")
        for op in operations
    )


# -- payloads and bodies that are too big for the commit itself ------------------------------------
#
# Always true: if the payloads of the whole commit take more than INLINE_COMMIT_BYTES_MAX, they are
# written once, to ledgers of their topics, and committed as ordinary segments. A body that is too
# large is compressed and written to a ledger. No other writer has the ledgers until `release`. The
# multi checks their records, so it fails if a janitor recovered or deleted one of the ledgers.

BODY_BYTES_MAX = 64 * 1024 * 1024
LEDGERS_AT_ONCE = 32  # for a commit over many topics
POINTER_BYTES_MAX = 512
"""The size of a node whose body is in a ledger, at most."""


@dataclass(frozen=True, slots=True)
class LogNode:
    """The value of log/<n>, and the ledger of the body (None: the body is in the value)."""

    value: bytes
    ledger: int | None = None


class CommitPayloads:
    """The payloads and bodies of one commit."""

    def __init__(self, store: MetadataStore, blobs: Blobs, commit_id: str) -> None:
        self._store = store
        self._commit_id = commit_id
        self._blobs = blobs
        self._stack = AsyncExitStack()
        self._writers: dict[str, BlobWriter] = {}
        self._moved_drafts: Mapping[str, Actions] | None = None
        self._spilled: dict[str, tuple[bytes, LogNode]] = {}

    async def move_large_payloads(
        self, intent: Intent, drafts: Mapping[str, Actions]
    ) -> Mapping[str, Actions]:
        """The actions, with payloads in ledgers if these take more than INLINE_COMMIT_BYTES_MAX.

        Raises errors.LedgerFenced, errors.NotEnoughBookies, errors.Unavailable.
        """
        if commit_draft.inline_bytes(drafts) <= INLINE_COMMIT_BYTES_MAX:
            return drafts
        if self._moved_drafts is None:
            moved_actions = await call_each(
                lambda draft: self._move(intent, *draft), drafts.items(), LEDGERS_AT_ONCE
            )
            self._moved_drafts = dict(zip(drafts, moved_actions, strict=True))
        return self._moved_drafts

    async def nodes(
        self, intent: Intent, bodies: Mapping[str, bytes], other_bytes: int
    ) -> dict[str, LogNode]:
        """The log node of each topic. The multi's other operations take `other_bytes`. Raises as
        `move_large_payloads`, and errors.CommitTooBig."""
        for topic_id, body in bodies.items():
            if len(body) > BODY_BYTES_MAX:
                raise errors.CommitTooBig(
                    f"the body of a commit to topic {topic_id} takes {len(body)} bytes, at most"
                    f" {BODY_BYTES_MAX} fit",
                    bytes=len(body),
                )
        topics = commit_draft.topics_to_spill(bodies, other_bytes + POINTER_BYTES_MAX * len(bodies))
        nodes = {topic_id: LogNode(body) for topic_id, body in bodies.items()}
        spilled_nodes = await call_each(
            lambda id_: self._spill(intent, id_, bodies[id_]), topics, LEDGERS_AT_ONCE
        )
        return {**nodes, **dict(zip(topics, spilled_nodes, strict=True))}

    async def checks(self) -> list[Check]:
        """For the multi: checks that fail if the record of a ledger of this commit has changed
        since this call. Raises errors.NoSuchLedger, errors.RowsLost if a ledger was deleted or lost
        entries: the caller then calls `release` and writes again."""
        by_topic = await call_each(lambda writer: writer.checks(), self._writers.values())
        return [check for checks in by_topic for check in checks]

    async def release(self) -> None:
        """Gives the ledgers back, and forgets the payloads and bodies that they hold."""
        self._writers.clear()
        self._spilled.clear()
        self._moved_drafts = None
        await self._stack.aclose()

    async def _move(self, intent: Intent, topic_id: str, actions: Actions) -> Actions:
        inline = commit_draft.inline_segments(actions)
        if not inline:
            return actions
        writer = await self._writer_for(intent, topic_id)
        payloads = [payload for segment in inline for payload in segment.inline]
        row_counts = [count for segment in inline for count in segment.entry_rows]
        stored = await writer.store(payloads, row_counts)
        return commit_draft.with_stored_segments(actions, stored_segments(inline, stored))

    async def _spill(self, intent: Intent, topic_id: str, body: bytes) -> LogNode:
        """Writes the body to a ledger, unless the last call for this topic wrote the same body."""
        last_spilled = self._spilled.get(topic_id)
        if last_spilled is not None and last_spilled[0] == body:
            return last_spilled[1]
        writer = await self._writer_for(intent, topic_id)
        pointer = await writer.write(pack(body))
        value = records.encode_spilled(SpilledBody(self._commit_id, pointer))
        assert len(value) <= POINTER_BYTES_MAX, "a pointer is small"
        self._spilled[topic_id] = (body, LogNode(value, pointer.ledger_id))
        return self._spilled[topic_id][1]

    async def _writer_for(self, intent: Intent, topic_id: str) -> BlobWriter:
        if topic_id not in self._writers:
            checked = await read_policies(self._store, topic_id)
            self._writers[topic_id] = await self._stack.enter_async_context(
                self._blobs.writer(intent, topic_id, checked.policies)
            )
        return self._writers[topic_id]
