"""The janitor: closes ledgers that writers left open, and deletes ledgers that were made for topics
and that no topic needs.

Always true: a stale intent is condemned by compare-and-set first; then ledgers are closed; then the
store is synced and the topics are folded; and only ledgers that fate_of (garbage.py) lets go *then*
are deleted. Every commit checks its intent in its multi, so either the commit or the janitor loses
(hazard 4). A checkpoint may come under an open intent at any time: then a ledger goes only in a
multi that checks that no checkpoint came since the fold. Any listing that fails ends the pass, and
nothing more is deleted; a ledger that cannot be closed is kept and reported, and so are the ledgers
of a topic that cannot be read. Two janitors may run.

A multi publishes a checkpoint: it sets the topic's checkpoint node and checks the records of the
ledgers that the checkpoint newly names (checkpointer.py). So either that multi or the multi that
deletes such a ledger fails, however long either was under way.

The tree of a deleted topic is removed, its own node last: after that no ledger is made for the
topic (ledger/records.py). A ledger made just before may be in no listing yet. So the node that
records the deletion goes only when a listing of ledgers that began without a tree has none of the
topic's ledgers, and a removal that ended early is continued. No process needs these nodes: the
topic takes no commit, its ledgers are gone, and a process that still has its id gets TopicNotFound.
The record of the brokers that have its partitions goes with the tree; it is also removed for a
topic whose tree went earlier, as a broker may write it late.

A deletion is done only in the session in which it was judged: in another session the store may have
gone back in time, to a state in which a topic refers to the ledger, or is not deleted.
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
    reachable,
    read,
    store_now_ms,
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
    """The results of the pass, or with `dry_run` what it would do: intents condemned, ledgers
    closed and deleted. `kept` are ledgers to which a topic refers, `waiting` those that will go or
    may go, each with the reason, `unclosed` those that could not be closed. `refused` is the reason
    why ledgers without a reference were not deleted, `alarm` the reason why silent writers were not
    condemned. `topics` are the deleted topics whose trees it removed."""

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
    def eventful(self) -> bool:
        """Whether there is something to report."""
        did = self.condemned or self.closed or self.deleted or self.topics
        return bool(did or self.refused or self.alarm or self.unclosed)


class Janitor:
    """Remembers from pass to pass what it saw: an intent is stale when this observer saw no
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
        self._ended: dict[str, Intent] = {}
        self._seen: dict[str, Sighting] = {}
        self._silent_since_s: float | None = None
        self._session = 0
        self._lost = 0  # sessions; each time the store may be an older copy
        self._lost_before = 0  # when the pass began
        self._cluster: cluster.ClusterRecord | None = None
        self._looked = False
        store.add_session_listener(self._session_changed)

    async def clean(
        self, *, dry_run: bool = False, force: bool = False, condemn: Sequence[str] = ()
    ) -> CleanReport:
        """One pass. `condemn` names intents that count as stale now; with `force` the pass may
        delete more than a tenth of its ledgers only because no topic refers to them.

        Raises errors.Unavailable, and errors.UnsupportedFormat for records of a later version.
        """
        with reachable("cleaning"):
            self._lost_before = self._lost
            await self._check_cluster()
            bare = await self._references.bare()  # before any listing of what it may own
            intents = await self._all_intents()
            silence = await self._silence(intents, condemn)
            if not dry_run:
                intents = await self._condemn(intents, silence.condemn)
            a_pass = await self._look(intents, silence.condemn, bare)
            report = CleanReport(dry_run, silence.condemn, alarm=silence.alarm)
            report = await self._close(a_pass, report)
            await self._learn_of_closed(a_pass)
            judged = sorted({ledger.topic for ledger in a_pass.judged()})
            topics = await self._references.of(judged, a_pass.deleted)
            await self._check_cluster()
            report = await self._delete(a_pass, topics, report, force)
            return await self._remove_topics(a_pass, report)

    # -- reading ------------------------------------------------------------------------------

    async def _check_cluster(self) -> None:
        """Checks that the store is still that of the cluster with which this janitor began (hazard
        50), and is not held. Once a person has accepted an older store, the janitor forgets
        everything that it remembers from before."""
        await self.store.sync()
        node = await read(self.store, paths.CLUSTER)
        try:
            current = None if node is None else cluster.decode(node.value)
        except cluster.BadClusterRecord:
            current = cluster.ClusterRecord("")
        if (refusal := cluster.held(current)) is not None:
            raise refusal
        before, self._cluster = self._cluster, current
        if not self._looked or before == current:
            self._looked = True
            return
        if before is None or current is None or before.cluster_id != current.cluster_id:
            self._cluster = before
            raise errors.Unavailable(
                "the metadata store holds another cluster than before",
                "Check the service URL; nothing is deleted until it is right.",
            )
        self._references = References(self.store, self._ledgers)
        self._inventory = LedgerInventory(self.store)
        self._ended, self._seen, self._silent_since_s = {}, {}, None

    def _check_session(self) -> None:
        """Raises errors.Unavailable if this pass may have judged by another copy of the store."""
        if self._lost != self._lost_before:
            raise errors.Unavailable(
                "the session with the metadata store was lost while it was cleaned",
                "The next pass reads everything again.",
            )

    async def _all_intents(self) -> list[Intent]:
        """An intent that has ended does not change, and is read once."""
        if await read(self.store, paths.INTENTS) is None:
            return []
        by_id = {name: self._ended.get(name) for name in await self.store.children(paths.INTENTS)}
        asked = [name for name, ended in by_id.items() if ended is None]
        by_id.update(zip(asked, await call_each(self._intent, asked), strict=True))
        intents = [intent for intent in by_id.values() if intent is not None]
        self._ended = {intent.id: intent for intent in intents if not intent.is_open}
        return intents

    async def _intent(self, intent_id: str) -> Intent | None:
        """None if it was removed just now."""
        node = await read(self.store, paths.intent(intent_id))
        if node is None:
            return None
        return Intent(intent_id, records.decode_intent(node.value), node.version)

    async def _silence(self, intents: Sequence[Intent], condemn: Sequence[str]) -> garbage.Silence:
        """The open intents that are condemned in this pass."""
        beating = [intent for intent in intents if intent.is_open]
        opened = [intent.id for intent in beating]
        expired = await call_each(self._expired, beating)
        silent = [intent for intent, is_silent in zip(opened, expired, strict=True) if is_silent]
        now_s = asyncio.get_running_loop().time()
        judged = garbage.judge(len(opened), silent, self._silent_since_s, now_s, self._lease_s)
        self._silent_since_s = judged.since_s
        self._seen = {intent: self._seen[intent] for intent in opened}
        stale = [intent for intent in opened if intent in condemn or intent in judged.condemn]
        return replace(judged, condemn=tuple(stale))

    async def _expired(self, intent: Intent) -> bool:
        """Whether this observer has seen its heartbeat stand still for a lease."""
        node = await self.store.get(paths.intent_heartbeat(intent.id))
        now_s = asyncio.get_running_loop().time()
        seen = self._seen.get(intent.id)
        if seen is None or not seen.matches(node.version, self._session):
            self._seen[intent.id] = Sighting(node.version, now_s, self._session)
            return False
        connected = self.store.session_state is SessionState.CONNECTED
        lease_s = garbage.lease_s(intent.record.kind, node.version, self._lease_s)
        return connected and now_s - seen.since_s >= lease_s

    async def _condemn(self, intents: Sequence[Intent], stale: Sequence[str]) -> list[Intent]:
        return [
            await self._intents.condemn(intent.id, STALE) if intent.id in stale else intent
            for intent in intents
        ]

    async def _look(
        self, intents: Sequence[Intent], stale: Sequence[str], bare: frozenset[str]
    ) -> "_Pass":
        """Intents, ledgers and deleted topics, after intents were condemned. In a dry run the stale
        intents count as condemned."""
        seen = {
            intent.id: IntentSeen(
                intent.id, intent.record.kind, intent.is_open and intent.id not in stale
            )
            for intent in intents
        }
        deleted = await self._references.deleted() | dict.fromkeys(bare, LONG_AGO_MS)
        listed = await self._inventory.look(intents, every=bool(bare))
        now_ms = await store_now_ms(self.store)
        by_id = {intent.id: intent for intent in intents}
        ledgers = {ledger.id: ledger for ledger in listed}
        return _Pass(now_ms, by_id, seen, ledgers, deleted, bare)

    # -- closing ------------------------------------------------------------------------------

    async def _close(self, a_pass: "_Pass", report: CleanReport) -> CleanReport:
        """Recovers the ledgers that no writer will close: after this no writer adds to any of
        them."""
        every = a_pass.ledgers.values()
        opened = sorted({ledger.topic for ledger in every if not ledger.closed})
        policies = await call_each(self._references.policies, opened)
        seen = {
            id_: TopicSeen(id_, its or TopicPolicies(), deleted_ms=a_pass.deleted.get(id_))
            for id_, its in zip(opened, policies, strict=True)
        }
        ledgers = list(a_pass.ledgers.values())
        closing = sorted(garbage.to_close(ledgers, a_pass.intents, seen, a_pass.now_ms))
        if report.dry_run:
            a_pass.assumed = dict.fromkeys(closing)
            return replace(report, closed=tuple(closing))
        problems = await call_each(self._recover, closing[:CLOSED_PER_PASS], CLOSING_AT_ONCE)
        outcomes = dict(zip(closing, problems, strict=False))
        done = [ledger for ledger, problem in outcomes.items() if not problem]
        await call_each(lambda ledger: self._see_closed(a_pass, ledger), done)
        unclosed = {ledger: problem for ledger, problem in outcomes.items() if problem}
        return replace(report, closed=tuple(done), unclosed=unclosed)

    async def _see_closed(self, a_pass: "_Pass", ledger_id: int) -> None:
        before = a_pass.ledgers[ledger_id]
        seen = await self._inventory.read(ledger_id, before.intent)
        a_pass.ledgers[ledger_id] = seen or replace(before, closed=True, stuck=False)

    async def _recover(self, ledger_id: int) -> str:
        """Closes the ledger; returns why it could not be closed, or an empty text."""
        try:
            await self._ledgers.recover(ledger_id)
        except errors.NoSuchLedger:
            return "it is gone"
        except errors.LedgerError as error:
            return str(error)
        return ""

    async def _learn_of_closed(self, a_pass: "_Pass") -> None:
        """Notes when ledgers were first seen CLOSED, and the store's transactions in which their
        intents committed last. It reads them before any fold, so that the fold has these commits.
        """
        counting = [intent for intent in a_pass.by_id.values() if a_pass.intents[intent.id].counts]
        commits = await call_each(self._committed_in, counting)
        for intent, committed_in in zip(counting, commits, strict=True):
            seen = a_pass.intents[intent.id]
            a_pass.intents[intent.id] = replace(seen, committed_in=committed_in)
        a_pass.note_first_seen()
        closed = [ledger for ledger in a_pass.ledgers.values() if ledger.closed]
        self._inventory.learn(ledger for ledger in closed if ledger.closed_in)

    async def _committed_in(self, intent: Intent) -> int:
        node = await look_up(self.store, paths.txn(escape(intent.app_id), escape(intent.target)))
        if node is None or records.decode_txn(node.value).version == records.NO_VERSION:
            return 0
        return node.set_in

    # -- deleting -----------------------------------------------------------------------------

    async def _delete(
        self,
        a_pass: "_Pass",
        topics: Mapping[str, TopicSeen],
        report: CleanReport,
        force: bool,
    ) -> CleanReport:
        verdicts = [
            fate_of(ledger, a_pass.intents[ledger.intent], topics[ledger.topic], a_pass.now_ms)
            for ledger in a_pass.judged()
        ]
        never = [verdict.ledger for verdict in verdicts if verdict.fate is Fate.NEVER_REFERRED]
        refused = "" if force else garbage.too_many(len(never), len(a_pass.ledgers))
        going = [verdict.ledger for verdict in verdicts if verdict.fate is Fate.RECLAIMED]
        going = sorted(going if refused else [*going, *never])[:DELETED_PER_PASS]
        waiting = {
            verdict.ledger: verdict.why for verdict in verdicts if verdict.fate is Fate.WAITS
        }
        if not report.dry_run:
            going = await self._deleted(a_pass, topics, going, waiting)
        for ledger_id in going:
            del a_pass.ledgers[ledger_id]
        return replace(
            report,
            deleted=tuple(going),
            kept=tuple(verdict.ledger for verdict in verdicts if verdict.fate is Fate.KEPT),
            waiting=waiting,
            refused=refused,
        )

    async def _deleted(
        self,
        a_pass: "_Pass",
        topics: Mapping[str, TopicSeen],
        going: Sequence[int],
        waiting: dict[int, str],
    ) -> list[int]:
        """Deletes the ledgers in `going`; returns those that went, and puts the others to
        `waiting`."""

        async def gone(ledger_id: int) -> bool:
            self._check_session()
            ledger = a_pass.ledgers[ledger_id]
            topic = topics[ledger.topic]
            only_if: list[Operation] = []
            if a_pass.intents[ledger.intent].open and topic.deleted_ms is None:
                only_if = _unchanged(paths.topic_checkpoint(topic.id), topic.checkpoint)
            waiting[ledger_id] = "a checkpoint that may name it was published since it was judged"
            try:
                return await self._ledgers.delete(ledger_id, only_if)
            except errors.UnsupportedFormat as damage:  # perhaps of the set of deleted ledgers
                waiting[ledger_id] = damage.what
                return False

        outcomes = await call_each(gone, going, DELETING_AT_ONCE)
        went = [id_ for id_, is_gone in zip(going, outcomes, strict=True) if is_gone]
        self._inventory.forget(went)
        for ledger_id in went:
            del waiting[ledger_id]
        return went

    async def _remove_topics(self, a_pass: "_Pass", report: CleanReport) -> CleanReport:
        """Removes the trees of topics that were deleted long enough ago and have no ledger any
        more; and the nodes that record the deletion of those whose tree was gone before this pass
        listed ledgers."""
        having = {ledger.topic for ledger in a_pass.ledgers.values()}
        removed = []
        for topic_id, deleted_ms in a_pass.deleted.items():
            if topic_id in having:
                continue
            policies = await self._references.policies(topic_id)
            delay_ms = 0 if policies is None else policies.delete_delay_ms
            if a_pass.now_ms < deleted_ms + delay_ms:
                continue
            self._check_session()
            if topic_id not in a_pass.bare:
                if report.dry_run or await remove_tree(self.store, topic_id):
                    removed.append(topic_id)
            elif not report.dry_run:
                await _delete(self.store, paths.topic_deleted(topic_id))
        if not report.dry_run:
            await self._remove_owners()
        return replace(report, topics=tuple(removed))

    async def _remove_owners(self) -> None:
        """Removes the records of brokers' topics for topics that do not exist any more. A topic is
        made before its record, so the records are listed first; if the folder of topics is missing,
        nothing is removed."""
        recorded = await names_in(self.store, paths.BROKERS_TOPICS)
        if not recorded:
            return
        topic_ids = {*await names_in(self.store, paths.TOPIC_IDS)}
        gone = [id_ for id_ in recorded if id_ not in topic_ids] if topic_ids else []
        nodes = [paths.brokers_of_topic(id_) for id_ in gone[:DELETED_PER_PASS]]
        await call_each(lambda path: _delete(self.store, path), nodes, DELETING_AT_ONCE)

    def _session_changed(self, state: SessionState) -> None:
        self._session += 1
        self._lost += state is SessionState.LOST


@dataclass(slots=True)
class _Pass:
    """What one pass has read, by id. `bare` are deleted topics that had no tree when it began,
    `assumed` are ledgers that count as closed in a dry run."""

    now_ms: int
    by_id: Mapping[str, Intent]
    intents: dict[str, IntentSeen]
    ledgers: dict[int, LedgerSeen]
    deleted: dict[str, int]
    bare: frozenset[str]
    assumed: dict[int, None] = field(default_factory=dict)

    def note_first_seen(self) -> None:
        """Notes for CLOSED ledgers when they were first seen so: now, unless they were seen CLOSED
        before or the store's time is missing."""
        for id_, ledger in self.ledgers.items():
            if ledger.closed and ledger.closed_ms is None and self.now_ms != LONG_AGO_MS:
                self.ledgers[id_] = replace(ledger, closed_ms=self.now_ms)

    def judged(self) -> list[LedgerSeen]:
        """The closed ledgers, and those that count as closed, by id."""
        ordered = (self.ledgers[id_] for id_ in sorted(self.ledgers))
        closed = (ledger for ledger in ordered if ledger.closed or ledger.id in self.assumed)
        return [replace(ledger, closed=True) for ledger in closed]


def _unchanged(path: str, version: int | None) -> list[Operation]:
    """Checks that the node has the version. With None it checks that there is no such node: as the
    store has no such check, the multi makes the node and deletes it, so no read ever sees it."""
    if version is None:
        return [Create(path), Delete(path, ANY_VERSION)]
    return [Check(path, version)]


async def remove_tree(store: MetadataStore, topic_id: str) -> bool:
    """Removes the topic's node and all below it, NODES_PER_CALL nodes at most. Returns whether all
    is gone; if not, the caller calls it again.

    Raises StoreUnavailable.
    """
    return await _remove(store, paths.topic(topic_id), NODES_PER_CALL) > 0


async def _remove(store: MetadataStore, path: str, budget: int) -> int:
    """Removes the node and all below it; returns the rest of the budget, 0 if nodes are left."""
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
    """Whether the node is gone."""
    try:
        await store.delete(path)
    except NoNode:
        return True
    except (NotEmpty, OutcomeUnknown):
        return False
    return True
