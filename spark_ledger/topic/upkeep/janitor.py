"""The janitor: closes what writers left open, deletes ledgers that were made for topics and are
needed by none.

Always true: a stale intent is condemned by compare-and-set first; then ledgers are closed; then the
store is synced and the topics are folded; and only what fate_of (garbage.py) lets go *then* is
deleted. Every commit checks its intent in its multi, so either the commit or the janitor loses
(hazard 4). A checkpoint may come under an open intent at any time: there a ledger goes only in a
multi that checks that none came since the fold. Any listing that fails ends the pass with nothing
more deleted; a ledger that cannot be closed, or a topic that cannot be read, keeps what is theirs
and is said. Two janitors may run.

A checkpoint is published by a multi that sets its topic's checkpoint node and checks the records of
the ledgers it newly names (checkpointer.py); so of that multi and the one in which a ledger goes
one fails, however long either was under way.

Of a deleted topic its tree goes, its own node last: after that no ledger is made for the topic
(ledger/records.py). A ledger made just before may be in no list yet: so the node that says that the
topic was deleted goes only when a listing of ledgers that began without a tree found none of them,
and a removal that ended early is gone on with. Nobody needs them: the topic takes no commit, its
ledgers are gone, and a process that still has its id gets TopicNotFound. What says which brokers
have partitions goes with the tree; also of a topic whose tree went earlier, as a broker may write
it late.

Nothing is deleted in another session than the one in which it was judged: the store may have gone
back in time in between, to where a topic refers to the ledger, or is not deleted.
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
    each,
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
    """What the pass did, or would do when `dry_run`: intents condemned, ledgers closed and deleted.
    `kept` are ledgers that a topic refers to, `waiting` those that will go or may, each with why,
    `unclosed` those that could not be closed. `refused` says why the ledgers to which nothing
    refers were not deleted, `alarm` why silent writers were not condemned. `topics` are the deleted
    topics whose trees it took."""

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
        """Whether there is something to say of it."""
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
        self._cluster: cluster.Cluster | None = None
        self._looked = False
        store.add_session_listener(self._session_changed)

    async def clean(
        self, *, dry_run: bool = False, force: bool = False, condemn: Sequence[str] = ()
    ) -> CleanReport:
        """One pass. `condemn` names intents to take as stale now; `force` lets the pass delete
        more than a tenth of the ledgers it knows because no topic refers to them.

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
            judged = sorted({one.topic for one in a_pass.judged()})
            topics = await self._references.of(judged, a_pass.deleted)
            await self._check_cluster()
            report = await self._delete(a_pass, topics, report, force)
            return await self._remove_topics(a_pass, report)

    # -- looking ------------------------------------------------------------------------------

    async def _check_cluster(self) -> None:
        """The store is still of the cluster this janitor began with (hazard 50), and not held; of
        what it remembers from before a person accepted an older store nothing counts."""
        await self.store.sync()
        node = await read(self.store, paths.CLUSTER)
        try:
            found = None if node is None else cluster.decode(node.value)
        except cluster.BadClusterRecord:
            found = cluster.Cluster("")
        if (refusal := cluster.held(found)) is not None:
            raise refusal
        before, self._cluster = self._cluster, found
        if not self._looked or before == found:
            self._looked = True
            return
        if before is None or found is None or before.cluster_id != found.cluster_id:
            self._cluster = before
            raise errors.Unavailable(
                "the metadata store holds another cluster than before",
                "Check the service URL; nothing is deleted until it is right.",
            )
        self._references = References(self.store, self._ledgers)
        self._inventory = LedgerInventory(self.store)
        self._ended, self._seen, self._silent_since_s = {}, {}, None

    def _check_session(self) -> None:
        """Raises errors.Unavailable where what this pass judged may have been another copy's."""
        if self._lost != self._lost_before:
            raise errors.Unavailable(
                "the session with the metadata store was lost while it was cleaned",
                "The next pass looks anew.",
            )

    async def _all_intents(self) -> list[Intent]:
        """One that has ended does not change, and is read once."""
        if await read(self.store, paths.INTENTS) is None:
            return []
        found = {name: self._ended.get(name) for name in await self.store.children(paths.INTENTS)}
        asked = [name for name, ended in found.items() if ended is None]
        found.update(zip(asked, await each(self._intent, asked), strict=True))
        intents = [intent for intent in found.values() if intent is not None]
        self._ended = {intent.id: intent for intent in intents if not intent.open}
        return intents

    async def _intent(self, intent_id: str) -> Intent | None:
        """None: it was removed just now."""
        node = await read(self.store, paths.intent(intent_id))
        if node is None:
            return None
        return Intent(intent_id, records.decode_intent(node.value), node.version)

    async def _silence(self, intents: Sequence[Intent], condemn: Sequence[str]) -> garbage.Silence:
        """The open intents that are condemned in this pass."""
        beating = [intent for intent in intents if intent.open]
        opened = [intent.id for intent in beating]
        expired = await each(self._expired, beating)
        silent = [intent for intent, is_silent in zip(opened, expired, strict=True) if is_silent]
        now_s = asyncio.get_running_loop().time()
        judged = garbage.judge(len(opened), silent, self._silent_since_s, now_s, self._lease_s)
        self._silent_since_s = judged.since_s
        self._seen = {intent: self._seen[intent] for intent in opened}
        wanted = [intent for intent in opened if intent in condemn or intent in judged.condemn]
        return replace(judged, condemn=tuple(wanted))

    async def _expired(self, intent: Intent) -> bool:
        """Whether its heartbeat has stood still for a lease under this observer's eyes."""
        node = await self.store.get(paths.intent_heartbeat(intent.id))
        now_s = asyncio.get_running_loop().time()
        seen = self._seen.get(intent.id)
        if seen is None or not seen.same(node.version, self._session):
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
        """Who there is and what, after what was condemned is. In a dry run the stale are taken as
        condemned."""
        seen = {
            one.id: IntentSeen(one.id, one.record.kind, one.open and one.id not in stale)
            for one in intents
        }
        deleted = await self._references.deleted() | dict.fromkeys(bare, LONG_AGO_MS)
        found = await self._inventory.look(intents, every=bool(bare))
        now_ms = await store_now_ms(self.store)
        by_id = {intent.id: intent for intent in intents}
        return _Pass(now_ms, by_id, seen, {one.id: one for one in found}, deleted, bare)

    # -- closing ------------------------------------------------------------------------------

    async def _close(self, a_pass: "_Pass", report: CleanReport) -> CleanReport:
        """Recover what no writer will close: after this no writer adds to any of them."""
        opened = sorted({one.topic for one in a_pass.ledgers.values() if not one.closed})
        policies = await each(self._references.policies, opened)
        seen = {
            id_: TopicSeen(id_, some or TopicPolicies(), deleted_ms=a_pass.deleted.get(id_))
            for id_, some in zip(opened, policies, strict=True)
        }
        ledgers = list(a_pass.ledgers.values())
        wanted = sorted(garbage.to_close(ledgers, a_pass.intents, seen, a_pass.now_ms))
        if report.dry_run:
            a_pass.assumed = dict.fromkeys(wanted)
            return replace(report, closed=tuple(wanted))
        problems = await each(self._recover, wanted[:CLOSED_PER_PASS], CLOSING_AT_ONCE)
        outcomes = dict(zip(wanted, problems, strict=False))
        done = [ledger for ledger, problem in outcomes.items() if not problem]
        await each(lambda ledger: self._see_closed(a_pass, ledger), done)
        unclosed = {ledger: problem for ledger, problem in outcomes.items() if problem}
        return replace(report, closed=tuple(done), unclosed=unclosed)

    async def _see_closed(self, a_pass: "_Pass", ledger_id: int) -> None:
        before = a_pass.ledgers[ledger_id]
        seen = await self._inventory.read(ledger_id, before.intent)
        a_pass.ledgers[ledger_id] = seen or replace(before, closed=True, stuck=False)

    async def _recover(self, ledger_id: int) -> str:
        """Close the ledger; why it could not be."""
        try:
            await self._ledgers.recover(ledger_id)
        except errors.NoSuchLedger:
            return "it is gone"
        except errors.LedgerError as error:
            return str(error)
        return ""

    async def _learn_of_closed(self, a_pass: "_Pass") -> None:
        """When ledgers were seen CLOSED first, and in which transaction their intents committed
        last: before any fold, so that the fold has that commit."""
        counting = [intent for intent in a_pass.by_id.values() if a_pass.intents[intent.id].counts]
        commits = await each(self._committed_in, counting)
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
            fate_of(one, a_pass.intents[one.intent], topics[one.topic], a_pass.now_ms)
            for one in a_pass.judged()
        ]
        never = [one.ledger for one in verdicts if one.fate is Fate.NEVER_REFERRED]
        refused = "" if force else garbage.too_many(len(never), len(a_pass.ledgers))
        going = [one.ledger for one in verdicts if one.fate is Fate.RECLAIMED]
        going = sorted(going if refused else [*going, *never])[:DELETED_PER_PASS]
        waiting = {one.ledger: one.why for one in verdicts if one.fate is Fate.WAITS}
        if not report.dry_run:
            going = await self._deleted(a_pass, topics, going, waiting)
        for ledger in going:
            del a_pass.ledgers[ledger]
        return replace(
            report,
            deleted=tuple(going),
            kept=tuple(one.ledger for one in verdicts if one.fate is Fate.KEPT),
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
        """Those of `going` that went; the others are put to those that wait."""

        async def gone(ledger_id: int) -> bool:
            self._check_session()
            one = a_pass.ledgers[ledger_id]
            topic = topics[one.topic]
            only_if: list[Operation] = []
            if a_pass.intents[one.intent].open and topic.deleted_ms is None:
                only_if = _unchanged(paths.topic_checkpoint(topic.id), topic.checkpoint)
            waiting[ledger_id] = "a checkpoint that may name it was published since it was judged"
            try:
                return await self._ledgers.delete(ledger_id, only_if)
            except errors.UnsupportedFormat as damage:  # of the set of deleted ledgers, say
                waiting[ledger_id] = damage.what
                return False

        outcomes = await each(gone, going, DELETING_AT_ONCE)
        went = [ledger for ledger, is_gone in zip(going, outcomes, strict=True) if is_gone]
        self._inventory.forget(went)
        for ledger_id in went:
            del waiting[ledger_id]
        return went

    async def _remove_topics(self, a_pass: "_Pass", report: CleanReport) -> CleanReport:
        """Of topics deleted long enough ago, that have no ledger any more, their trees; what had
        no tree when this pass began is forgotten."""
        having = {one.topic for one in a_pass.ledgers.values()}
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
                await forget(self.store, topic_id)
        if not report.dry_run:
            await self._remove_owners()
        return replace(report, topics=tuple(removed))

    async def _remove_owners(self) -> None:
        """The records of which brokers have topics that are not there any more. A topic is made
        before its record, so the records are listed first; without the folder of topics nothing is
        known."""
        recorded = await names_in(self.store, paths.BROKERS_TOPICS)
        if not recorded:
            return
        there = {*await names_in(self.store, paths.TOPIC_IDS)}
        gone = [id_ for id_ in recorded if id_ not in there] if there else []
        nodes = [paths.brokers_of_topic(id_) for id_ in gone[:DELETED_PER_PASS]]
        await each(lambda path: _delete(self.store, path), nodes, DELETING_AT_ONCE)

    def _session_changed(self, state: SessionState) -> None:
        self._session += 1
        self._lost += state is SessionState.LOST


@dataclass(slots=True)
class _Pass:
    """What one pass knows, by id. `bare` are deleted topics that had no tree when it began,
    `assumed` ledgers that a dry run takes as closed."""

    now_ms: int
    by_id: Mapping[str, Intent]
    intents: dict[str, IntentSeen]
    ledgers: dict[int, LedgerSeen]
    deleted: dict[str, int]
    bare: frozenset[str]
    assumed: dict[int, None] = field(default_factory=dict)

    def note_first_seen(self) -> None:
        """When the ledgers that are CLOSED were first seen to be: now, if they were not before and
        the time is known."""
        for ledger, one in self.ledgers.items():
            if one.closed and one.closed_ms is None and self.now_ms != LONG_AGO_MS:
                self.ledgers[ledger] = replace(one, closed_ms=self.now_ms)

    def judged(self) -> list[LedgerSeen]:
        """The closed ledgers, and those taken as closed, by id."""
        ordered = (self.ledgers[ledger] for ledger in sorted(self.ledgers))
        return [
            replace(one, closed=True) for one in ordered if one.closed or one.id in self.assumed
        ]


def _unchanged(path: str, version: int | None) -> list[Operation]:
    """That the node has the version; or, where it is None, that there is no such node: the store
    has no such check, but makes it and takes it away in the same multi, so no read ever sees it."""
    if version is None:
        return [Create(path), Delete(path, ANY_VERSION)]
    return [Check(path, version)]


async def remove_tree(store: MetadataStore, topic_id: str) -> bool:
    """Remove the topic's node and all below it, NODES_PER_CALL at most; whether all is gone. False:
    call it again.

    Raises StoreUnavailable.
    """
    return await _remove(store, paths.topic(topic_id), NODES_PER_CALL) > 0


async def forget(store: MetadataStore, topic_id: str) -> None:
    """Remove what says that the topic was deleted, if the store responds. For a topic whose tree
    was gone before its ledgers were listed, none of which is left.

    Raises StoreUnavailable.
    """
    await _delete(store, paths.topic_deleted(topic_id))


async def _remove(store: MetadataStore, path: str, budget: int) -> int:
    """Remove the node and all below it; what is left of the budget, 0 if something is left."""
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
