"""The janitor: closes ledgers that writers left open, and deletes ledgers that were made for topics
and that no topic needs.

Always true: a pass first condemns stale intents, by compare-and-set; then it closes ledgers; then
it syncs the store and folds the topics; and it deletes only ledgers of which fate_of (garbage.py)
decides *after these steps* that they may go. Every commit checks its intent in its multi, so either
the commit or the janitor loses (hazard 4). Under an open intent a checkpoint may be published at
any time. So a multi that deletes a ledger of an open intent checks that no checkpoint was published
since the fold. A listing that fails ends the pass, and no further ledger is deleted. A ledger that
cannot be closed is kept and reported, and so are the ledgers of a topic that cannot be read. An
intent, a block of ledger ids, or a ledger's record that cannot be read is logged and left out: its
ledgers are neither closed nor deleted, and no tree is removed, since its topic is unknown. Two
janitors may run at the same time.

The multi that publishes a checkpoint sets the topic's checkpoint node and checks the records of the
ledgers that the checkpoint newly names (checkpointer.py). So either this multi or the multi that
deletes such a ledger fails, however long either multi was under way.

The tree of a deleted topic is removed, the topic's own node last: after that no ledger is made for
the topic (ledger/records.py). But a ledger that was made just before may be missing from the
listing of this pass. So the node that records the deletion is removed only by a pass that began
without the tree and lists no ledger of the topic. The next pass continues a removal that ended
early. No process needs these nodes: the topic takes no commit, its ledgers are gone, and a process
that still has its id gets TopicNotFound. The tree's removal includes the record of the brokers that
have the topic's partitions. A broker may write this record late, so the record of a topic without a
tree is removed too.

A ledger or tree is deleted only in the session in which the pass decided so: in another session the
store may have gone back in time, to a state in which a topic refers to the ledger, or is not
deleted.
"""

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from spark_ledger import errors
from spark_ledger.ledger.client import LedgerStore
from spark_ledger.metadata import cluster, paths
from spark_ledger.metadata.store import (
    ANY_VERSION,
    Check,
    Create,
    Delete,
    MetadataStore,
    NoNode,
    NotEmpty,
    Operation,
    OutcomeUnknown,
    SessionState,
)
from spark_ledger.metadata.store_calls import (
    LONG_AGO_MS,
    call_each,
    look_up,
    names_in,
    read,
    store_now_ms,
    unavailable_while,
)
from spark_ledger.topic.log import records
from spark_ledger.topic.log.intents import STALE, Intent, Intents, Sighting
from spark_ledger.topic.log.names import escape
from spark_ledger.topic.log.policies import TopicPolicies
from spark_ledger.topic.upkeep import garbage
from spark_ledger.topic.upkeep.garbage import (
    Fate,
    IntentSeen,
    LedgerSeen,
    TopicSeen,
    fate_of,
)
from spark_ledger.topic.upkeep.ledger_inventory import LedgerInventory, References

LEASE_S = 900.0
DELETED_PER_PASS = 2_000
CLOSED_PER_PASS = 500
CLOSING_AT_ONCE = 8
DELETING_AT_ONCE = 16
NODES_PER_CALL = 5_000


@dataclass(frozen=True, slots=True)
class CleanReport:
    """The results of a pass: the intents that it condemned, the ledgers that it closed and deleted
    (with `dry_run`: the intents and ledgers that a pass would condemn, close and delete). `kept`
    are ledgers to which a topic refers. `waiting` are ledgers that stay for now, and `unclosed`
    ledgers that could not be closed, each with the reason. `refused` is the reason why ledgers
    without a reference were not deleted, `alarm` the reason why silent writers were not condemned.
    `topics` are the deleted topics whose trees were removed."""

    dry_run: bool
    condemned: tuple[str, ...] = ()
    closed: tuple[int, ...] = ()
    deleted: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    refused: str = ""
    alarm: str = ""
    waiting: Mapping[int, str] = field(default_factory=dict)
    unclosed: Mapping[int, str] = field(default_factory=dict)
    topics: tuple[str, ...] = ()

    @property
    def is_eventful(self) -> bool:
        """Whether the pass did something, or failed to do something."""
        actions = self.condemned or self.closed or self.deleted or self.topics
        return bool(actions or self.refused or self.alarm or self.unclosed)


class Janitor:
    """Remembers heartbeats from pass to pass: an intent is stale when this janitor saw no new
    heartbeat for a whole lease, in one unbroken session (hazard 44)."""

    def __init__(
        self,
        store: MetadataStore,
        ledgers: LedgerStore,
        rng: random.Random,
        *,
        lease_s: float = LEASE_S,
    ) -> None:
        self.store = store
        self._ledgers = ledgers
        self._intents = Intents(store, ledgers, rng)
        self._references = References(store, ledgers)
        self._inventory = LedgerInventory(store)
        self._lease_s = lease_s
        self._ended_intents: dict[str, Intent] = {}
        self._sightings: dict[str, Sighting] = {}
        self._silent_since_s: float | None = None
        self._has_unreadable = False  # whether this pass has met an intent that cannot be read
        self._session = 0
        self._sessions_lost = 0  # after each loss the store may be an older copy
        self._sessions_lost_before = 0  # the number when the pass began
        self._cluster: cluster.ClusterRecord | None = None
        self._has_checked_cluster = False
        store.add_session_listener(self._session_changed)

    async def clean(
        self, *, dry_run: bool = False, force: bool = False, condemn: Sequence[str] = ()
    ) -> CleanReport:
        """One pass. `condemn` names intents that count as stale at once. With `force` the pass may
        delete more than a tenth of all ledgers as never referred to.

        Raises errors.Unavailable.
        """
        with unavailable_while("cleaning"):
            self._sessions_lost_before = self._sessions_lost
            self._has_unreadable = False
            await self._check_cluster()
            # read before the ledgers of these topics are listed
            without_tree = await self._references.without_tree()
            intents = await self._all_intents()
            silence = await self._silence(intents, condemn)
            if not dry_run:
                intents = await self._condemn(intents, silence.condemn)
            a_pass = await self._read_all(intents, silence.condemn, without_tree)
            report = CleanReport(dry_run, silence.condemn, alarm=silence.alarm)
            report = await self._close(a_pass, report)
            await self._note_closed(a_pass)
            topic_ids = sorted({ledger.topic for ledger in a_pass.closed_ledgers()})
            topics = await self._references.of(topic_ids, a_pass.deleted)
            await self._check_cluster()
            report = await self._delete(a_pass, topics, report, force)
            return await self._remove_topics(a_pass, report)

    # -- reading ------------------------------------------------------------------------------

    async def _check_cluster(self) -> None:
        """Checks that the store still has the cluster with which this janitor began (hazard 50),
        and is not held. If a person has accepted an older store, the janitor forgets what it has
        seen."""
        await self.store.sync()
        node = await read(self.store, paths.CLUSTER)
        try:
            current = None if node is None else cluster.decode(node.value)
        except cluster.BadClusterRecord:
            current = cluster.ClusterRecord("")
        if (refusal := cluster.hold_error(current)) is not None:
            raise refusal
        before, self._cluster = self._cluster, current
        if not self._has_checked_cluster or before == current:
            self._has_checked_cluster = True
            return
        if before is None or current is None or before.cluster_id != current.cluster_id:
            self._cluster = before
            raise errors.Unavailable(
                "the metadata store has another cluster than before",
                "Check the service URL; nothing is deleted until it is right.",
            )
        self._references = References(self.store, self._ledgers)
        self._inventory = LedgerInventory(self.store)
        self._ended_intents, self._sightings, self._silent_since_s = {}, {}, None

    def _check_session(self) -> None:
        """Raises errors.Unavailable if this pass may have read another copy of the store."""
        if self._sessions_lost != self._sessions_lost_before:
            raise errors.Unavailable(
                "the session with the metadata store was lost during the pass",
                "The next pass reads everything again.",
            )

    async def _all_intents(self) -> list[Intent]:
        """All intents. Reads each ended intent only once, as an ended intent does not change."""
        if await read(self.store, paths.INTENTS) is None:
            return []
        by_id = {
            name: self._ended_intents.get(name) for name in await self.store.children(paths.INTENTS)
        }
        unread = [name for name, ended in by_id.items() if ended is None]
        by_id.update(zip(unread, await call_each(self._intent, unread), strict=True))
        intents = [intent for intent in by_id.values() if intent is not None]
        self._ended_intents = {intent.id: intent for intent in intents if not intent.is_open}
        return intents

    async def _intent(self, intent_id: str) -> Intent | None:
        """The intent; None if it was removed meanwhile, or cannot be read."""
        node = await read(self.store, paths.intent(intent_id))
        if node is None:
            return None
        record = records.readable(f"intent {intent_id}", node, records.decode_intent)
        if record is None:
            self._has_unreadable = True
            return None
        return Intent(intent_id, record, node.version)

    async def _silence(self, intents: Sequence[Intent], condemn: Sequence[str]) -> garbage.Silence:
        """The open intents to condemn in this pass."""
        open_intents = [intent for intent in intents if intent.is_open]
        open_ids = [intent.id for intent in open_intents]
        silent_flags = await call_each(self._is_silent, open_intents)
        silent = [
            intent for intent, is_silent in zip(open_ids, silent_flags, strict=True) if is_silent
        ]
        now_s = asyncio.get_running_loop().time()
        silence = garbage.judge(len(open_ids), silent, self._silent_since_s, now_s, self._lease_s)
        self._silent_since_s = silence.since_s
        self._sightings = {id_: at for id_, at in self._sightings.items() if id_ in open_ids}
        stale = [intent for intent in open_ids if intent in condemn or intent in silence.condemn]
        return replace(silence, condemn=tuple(stale))

    async def _is_silent(self, intent: Intent) -> bool:
        """Whether this janitor has seen the intent's heartbeat stand still for a lease."""
        node = await read(self.store, paths.intent_heartbeat(intent.id))
        if node is None:
            records.log_unreadable(f"the heartbeat of intent {intent.id}", "there is no such node")
            return False
        now_s = asyncio.get_running_loop().time()
        sighting = self._sightings.get(intent.id)
        if sighting is None or not sighting.matches(node.version, self._session):
            self._sightings[intent.id] = Sighting(node.version, now_s, self._session)
            return False
        is_connected = self.store.session_state is SessionState.CONNECTED
        lease_s = garbage.intent_lease_s(intent.record.kind, node.version, self._lease_s)
        return is_connected and now_s - sighting.since_s >= lease_s

    async def _condemn(self, intents: Sequence[Intent], stale: Sequence[str]) -> list[Intent]:
        return [
            await self._intents.condemn(intent.id, STALE) if intent.id in stale else intent
            for intent in intents
        ]

    async def _read_all(
        self, intents: Sequence[Intent], stale: Sequence[str], without_tree: frozenset[str]
    ) -> "_Pass":
        """Reads intents, ledgers and deleted topics, after intents were condemned. In a dry run the
        stale intents count as condemned."""
        intents_seen = {
            intent.id: IntentSeen(
                intent.id, intent.record.kind, intent.is_open and intent.id not in stale
            )
            for intent in intents
        }
        deleted = await self._references.deleted() | dict.fromkeys(without_tree, LONG_AGO_MS)
        listed = await self._inventory.look(intents, reread_ended=bool(without_tree))
        now_ms = await store_now_ms(self.store)
        by_id = {intent.id: intent for intent in intents}
        ledgers = {ledger.id: ledger for ledger in listed}
        return _Pass(now_ms, by_id, intents_seen, ledgers, deleted, without_tree)

    # -- closing ------------------------------------------------------------------------------

    async def _close(self, a_pass: "_Pass", report: CleanReport) -> CleanReport:
        """Recovers the ledgers that no writer will close. Afterwards no writer can add to them."""
        all_ledgers = a_pass.ledgers.values()
        topic_ids = sorted({ledger.topic for ledger in all_ledgers if not ledger.closed})
        policies = await call_each(self._references.policies, topic_ids)
        topics_seen = {
            id_: TopicSeen(
                id_, topic_policies or TopicPolicies(), deleted_ms=a_pass.deleted.get(id_)
            )
            for id_, topic_policies in zip(topic_ids, policies, strict=True)
        }
        ledgers = list(a_pass.ledgers.values())
        to_recover = sorted(
            garbage.abandoned_ledgers(ledgers, a_pass.intents_seen, topics_seen, a_pass.now_ms)
        )
        if report.dry_run:
            a_pass.assumed_closed = dict.fromkeys(to_recover)
            return replace(report, closed=tuple(to_recover))
        problems = await call_each(self._recover, to_recover[:CLOSED_PER_PASS], CLOSING_AT_ONCE)
        outcomes = dict(zip(to_recover, problems, strict=False))
        closed_ids = [ledger for ledger, problem in outcomes.items() if not problem]
        await call_each(lambda ledger: self._read_closed(a_pass, ledger), closed_ids)
        unclosed = {ledger: problem for ledger, problem in outcomes.items() if problem}
        return replace(report, closed=tuple(closed_ids), unclosed=unclosed)

    async def _read_closed(self, a_pass: "_Pass", ledger_id: int) -> None:
        before = a_pass.ledgers[ledger_id]
        ledger = await self._inventory.read(ledger_id, before.intent)
        a_pass.ledgers[ledger_id] = ledger or replace(before, closed=True, stuck=False)
        if ledger_id in self._inventory.unreadable:
            del a_pass.ledgers[ledger_id]

    async def _recover(self, ledger_id: int) -> str:
        """Closes the ledger; returns why the ledger could not be closed, or an empty text."""
        try:
            await self._ledgers.recover(ledger_id)
        except errors.NoSuchLedger:
            return "it is gone"
        except errors.LedgerError as error:
            return str(error)
        return ""

    async def _note_closed(self, a_pass: "_Pass") -> None:
        """Notes when ledgers were first seen CLOSED, and which transactions of the store have the
        last commits of their intents. Must run before any fold, so that the fold has these commits.
        """
        counting = [
            intent for intent in a_pass.intents.values() if a_pass.intents_seen[intent.id].in_order
        ]
        commits = await call_each(self._committed_in, counting)
        for intent, committed_in in zip(counting, commits, strict=True):
            seen = a_pass.intents_seen[intent.id]
            a_pass.intents_seen[intent.id] = replace(seen, committed_in=committed_in)
        a_pass.note_first_seen()
        closed = [ledger for ledger in a_pass.ledgers.values() if ledger.closed]
        self._inventory.learn(ledger for ledger in closed if ledger.closed_in)

    async def _committed_in(self, intent: Intent) -> int:
        path = paths.txn(escape(intent.app_id), escape(intent.target))
        node = await look_up(self.store, path)
        txn = records.readable(path, node, records.decode_txn)
        return (
            0 if node is None or txn is None or txn.version == records.NO_VERSION else node.set_in
        )

    # -- deleting -----------------------------------------------------------------------------

    async def _delete(
        self,
        a_pass: "_Pass",
        topics: Mapping[str, TopicSeen],
        report: CleanReport,
        force: bool,
    ) -> CleanReport:
        verdicts = [
            fate_of(ledger, a_pass.intents_seen[ledger.intent], topics[ledger.topic], a_pass.now_ms)
            for ledger in a_pass.closed_ledgers()
        ]
        never_referred = [
            verdict.ledger for verdict in verdicts if verdict.fate is Fate.NEVER_REFERRED
        ]
        refused = (
            "" if force else garbage.refusal_to_delete(len(never_referred), len(a_pass.ledgers))
        )
        doomed = [verdict.ledger for verdict in verdicts if verdict.fate is Fate.RECLAIMED]
        doomed = sorted(doomed if refused else [*doomed, *never_referred])[:DELETED_PER_PASS]
        waiting = {
            verdict.ledger: verdict.why for verdict in verdicts if verdict.fate is Fate.WAITS
        }
        if not report.dry_run:
            doomed = await self._delete_ledgers(a_pass, topics, doomed, waiting)
        for ledger_id in doomed:
            del a_pass.ledgers[ledger_id]
        return replace(
            report,
            deleted=tuple(doomed),
            kept=tuple(verdict.ledger for verdict in verdicts if verdict.fate is Fate.KEPT),
            waiting=waiting,
            refused=refused,
        )

    async def _delete_ledgers(
        self,
        a_pass: "_Pass",
        topics: Mapping[str, TopicSeen],
        doomed: Sequence[int],
        waiting: dict[int, str],
    ) -> list[int]:
        """Deletes the ledgers in `doomed`. Returns the deleted ledgers; adds the others to
        `waiting`, with the reason."""

        async def delete(ledger_id: int) -> bool:
            self._check_session()
            ledger = a_pass.ledgers[ledger_id]
            topic = topics[ledger.topic]
            conditions: list[Operation] = []
            if a_pass.intents_seen[ledger.intent].open and topic.deleted_ms is None:
                conditions = _unchanged(paths.topic_checkpoint(topic.id), topic.checkpoint)
            waiting[ledger_id] = "a checkpoint that may name the ledger was published meanwhile"
            try:
                return await self._ledgers.delete(ledger_id, conditions)
            except errors.UnsupportedFormat as damage:  # maybe the list of deleted ledgers is bad
                waiting[ledger_id] = damage.what
                return False

        outcomes = await call_each(delete, doomed, DELETING_AT_ONCE)
        deleted_ids = [id_ for id_, is_gone in zip(doomed, outcomes, strict=True) if is_gone]
        self._inventory.forget(deleted_ids)
        for ledger_id in deleted_ids:
            del waiting[ledger_id]
        return deleted_ids

    async def _remove_topics(self, a_pass: "_Pass", report: CleanReport) -> CleanReport:
        """Removes the trees of deleted topics whose delete delay is over and whose ledgers are
        gone. If a topic's tree was removed before this pass listed ledgers, removes the node that
        records the topic's deletion."""
        topics_with_ledgers = {ledger.topic for ledger in a_pass.ledgers.values()}
        removed = []
        is_all_read = not (self._has_unreadable or self._inventory.has_unreadable)
        for topic_id, deleted_ms in a_pass.deleted.items() if is_all_read else ():
            if topic_id in topics_with_ledgers:
                continue
            policies = await self._references.policies(topic_id) or TopicPolicies()
            if a_pass.now_ms < deleted_ms + policies.delete_delay_ms:
                continue
            self._check_session()
            if topic_id not in a_pass.without_tree:
                if report.dry_run or await remove_tree(self.store, topic_id):
                    removed.append(topic_id)
            elif not report.dry_run:
                await _delete(self.store, paths.topic_deleted(topic_id))
        if not report.dry_run:
            await self._remove_owners()
        return replace(report, topics=tuple(removed))

    async def _remove_owners(self) -> None:
        """Removes brokers' records of topics that do not exist. A topic is made before its record,
        so the records are listed before the topics. If the folder of topics is missing, no record
        is removed."""
        recorded = await names_in(self.store, paths.BROKERS_TOPICS)
        if not recorded:
            return
        topic_ids = {*await names_in(self.store, paths.TOPIC_IDS)}
        deleted = [id_ for id_ in recorded if id_ not in topic_ids] if topic_ids else []
        nodes = [paths.brokers_of_topic(id_) for id_ in deleted[:DELETED_PER_PASS]]
        await call_each(lambda path: _delete(self.store, path), nodes, DELETING_AT_ONCE)

    def _session_changed(self, state: SessionState) -> None:
        self._session += 1
        self._sessions_lost += state is SessionState.LOST


@dataclass(slots=True)
class _Pass:
    """The intents, ledgers and topics that one pass has read, by id. `deleted` are deleted topics,
    with the time of the deletion; `without_tree` are deleted topics that had no tree when the pass
    began; `assumed_closed` are ledgers that count as closed in a dry run."""

    now_ms: int
    intents: Mapping[str, Intent]
    intents_seen: dict[str, IntentSeen]
    ledgers: dict[int, LedgerSeen]
    deleted: dict[str, int]
    without_tree: frozenset[str]
    assumed_closed: dict[int, None] = field(default_factory=dict)

    def note_first_seen(self) -> None:
        """Sets `closed_ms` of CLOSED ledgers to now, unless an earlier pass saw them CLOSED, or the
        store's time is missing."""
        for id_, ledger in self.ledgers.items():
            if ledger.closed and ledger.closed_ms is None and self.now_ms != LONG_AGO_MS:
                self.ledgers[id_] = replace(ledger, closed_ms=self.now_ms)

    def closed_ledgers(self) -> list[LedgerSeen]:
        """The closed ledgers, and the ledgers that count as closed, ordered by id."""
        ordered = (self.ledgers[id_] for id_ in sorted(self.ledgers))
        closed = (ledger for ledger in ordered if ledger.closed or ledger.id in self.assumed_closed)
        return [replace(ledger, closed=True) for ledger in closed]


def _unchanged(path: str, version: int | None) -> list[Operation]:
    """Operations that check that the node has this version (None: that the node does not exist).
    The store has no check that a node does not exist: the multi makes the node and deletes it, and
    no read ever sees the node."""
    if version is None:
        return [Create(path), Delete(path, ANY_VERSION)]
    return [Check(path, version)]


async def remove_tree(store: MetadataStore, topic_id: str) -> bool:
    """Removes the topic's node and all nodes below it, NODES_PER_CALL nodes at most. Returns
    whether all nodes are gone; if not, the caller calls this again.

    Raises StoreUnavailable.
    """
    return await _remove(store, paths.topic(topic_id), NODES_PER_CALL) > 0


async def _remove(store: MetadataStore, path: str, budget: int) -> int:
    """Removes the node and all nodes below it, `budget` nodes at most. Returns the rest of the
    budget, or 0 if a node is left."""
    try:
        names = await store.children(path)
    except NoNode:
        return budget
    for name in names:
        budget = await _remove(store, f"{path}/{name}", budget)
        if budget <= 0:
            return 0
    return budget - 1 if await _delete(store, path) else 0


async def _delete(store: MetadataStore, path: str) -> bool:
    """Deletes the node; returns whether it is certain that the node does not exist afterwards."""
    try:
        await store.delete(path)
    except NoNode:
        return True
    except (NotEmpty, OutcomeUnknown):
        return False
    return True
