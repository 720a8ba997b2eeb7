"""Bugs of commit, intents, janitor, checkpoint and cursor take-over as an engineer may make them,
looked for at the points of the deeds named with each (tests/simulation/points), then by seeds."""

from dataclasses import replace
from typing import Any

from spark_ledger.errors import LedgerError
from spark_ledger.metadata import paths
from spark_ledger.metadata.store import ANY_VERSION, Check, OutcomeUnknown, Set
from spark_ledger.topic import checkpointer
from spark_ledger.topic.acks.ledger import discard_ledger
from spark_ledger.topic.checkpointer import Checkpointer
from spark_ledger.topic.commit import commit, draft
from spark_ledger.topic.commit.commit import CommitPayloads
from spark_ledger.topic.log import intents, records
from spark_ledger.topic.log.actions import Grow, OpenLive, Replace, SealLive
from spark_ledger.topic.log.intents import Intent, Intents
from spark_ledger.topic.log.records import IntentState
from spark_ledger.topic.log.topics import Topics
from spark_ledger.topic.subscription import cursor_ledger
from spark_ledger.topic.subscription import records as subscription_records
from spark_ledger.topic.subscription.cursor import Cursor
from spark_ledger.topic.subscription.nodes import SubscriptionNodes
from spark_ledger.topic.subscription.subscriptions import Subscriptions
from spark_ledger.topic.upkeep import janitor
from spark_ledger.topic.upkeep.janitor import Janitor
from spark_ledger.topic.upkeep.ledger_inventory import References
from tests.simulation.mutants.mutant import Mutant
from tests.simulation.mutants.topics import CHURN, CONDEMNED, OVERWRITES, ZOMBIES

# -- commits and intents -------------------------------------------------------------------------


def w0_of_before(check: Any) -> Any:
    """The version noted as w0 may be older than the intent."""

    def unchecked(path: str, version: int) -> Any:
        return check(path, ANY_VERSION if path.startswith(paths.TXNS) else version)

    return unchecked


def a_block_under_any_intent(check: Any) -> Any:
    """Ids are recorded under an intent whether it is open or not."""

    def unchecked(path: str, version: int) -> Any:
        return check(path, ANY_VERSION if path.startswith(paths.INTENTS) else version)

    return unchecked


def the_older_run_goes_on(mint: Any) -> Any:
    """A new run does not end the older one's intent."""

    async def alone(self: Any, intent_id: str, record: Any, others: Any) -> None:
        await mint(self, intent_id, record, [o for o in others if not _ends_an_intent(o)])

    return alone


def _ends_an_intent(operation: Any) -> bool:
    return isinstance(operation, Set) and operation.path.startswith(f"{paths.INTENTS}/")


def condemned_without_looking(end: Any) -> Any:
    """A lost answer to the write that ends an intent is taken for its success."""

    async def ended(self: Any, intent_id: str, state: Any, why: str) -> Any:
        intent = await self.get(intent_id)
        record = replace(intent.record, state=state, why=why)
        if not intent.is_open:
            return intent
        try:
            value = records.encode_intent(record)
            version = await self.store.set(paths.intent(intent_id), value, intent.version)
            return Intent(intent_id, record, version)
        except OutcomeUnknown:
            return Intent(intent_id, record, intent.version + 1)

    return ended


def asks_the_intent_first(recorded_outcome: Any) -> Any:
    """An intent that has ended settles the commit, also where its own multi ended it."""

    def careless(self: Any, view: Any, record: Any) -> Any:
        if not view.intent.is_open and view.fresh:
            raise view.intent.ended_error()
        return recorded_outcome(self, view, record)

    return careless


def drops_without_a_name(with_dropped_ledgers: Any) -> Any:
    """A commit that takes rows away does not name the ledgers that lose them."""
    return lambda state, actions, *read: actions


def minds_no_checks(send: Any) -> Any:
    """The caller's checks are left out of the multi."""

    async def sent(self: Any, view: Any, drafts: Any, steps: Any) -> Any:
        self._request = replace(self._request, checks=())
        return await send(self, view, drafts, steps)

    return sent


def minds_no_intent(operation: Any) -> Any:
    """The multi checks that the intent is there, not that it is open."""

    def unchecked(self: Any, intent: Any) -> Any:
        return replace(operation(self, intent), version=ANY_VERSION)

    return unchecked


def a_replay_is_done_anew(recorded_outcome: Any) -> Any:
    """The record of the version is asked by commit id alone."""

    def by_id(record: Any, commit_id: str, txn: Any, w0: int, *batch: Any) -> Any:
        same = record.commit_id == commit_id
        return recorded_outcome(record, commit_id, txn, w0, *batch) if same else None

    return by_id


def bodies_let_go_before_the_multi(checks: Any) -> Any:
    """The ledger of a body is closed by its writer before the commit names it, and not checked."""

    async def unchecked(self: Any) -> Any:
        await self.release()
        return []

    return unchecked


def grows_to_less(check: Any) -> Any:
    """A topic is given a number of partitions that it has passed meanwhile."""

    def any_number(state: Any, app_id: str, action: Any, sealed: Any) -> None:
        if not isinstance(action, Grow):
            check(state, app_id, action, sealed)

    return any_number


def merges_what_was_rearranged(check: Any) -> Any:
    """A merge that was planned on other rows takes their place."""

    def whatever(state: Any, app_id: str, action: Any, sealed: Any) -> None:
        if not isinstance(action, Replace):
            check(state, app_id, action, sealed)

    return whatever


def opens_a_second(check: Any) -> Any:
    """A live segment is opened where another one is open."""

    def whatever(state: Any, app_id: str, action: Any, sealed: Any) -> None:
        if not isinstance(action, OpenLive):
            check(state, app_id, action, sealed)

    return whatever


def seals_what_is_not_live(check: Any) -> Any:
    """A ledger is sealed that is not, or no longer, the live one."""

    def whatever(state: Any, app_id: str, action: Any, sealed: Any) -> None:
        if not isinstance(action, SealLive):
            check(state, app_id, action, sealed)

    return whatever


# -- checkpoints ---------------------------------------------------------------------------------


def publishes_unchecked(set_: Any) -> Any:
    """Neither the intent nor the ledgers that are named are looked at."""

    async def published(
        self: Any, topic_id: str, record: Any, version: Any, intent: Any, held: Any
    ) -> bool:
        intent = await self._intents.get(intent.id)

        class Nothing:
            async def checks(self) -> list[Check]:
                return []

        done: bool = await set_(self, topic_id, record, version, intent, Nothing())
        return done

    return published


def trims_without_a_mark(trim_some: Any) -> Any:
    """Commits go one by one before the checkpoint's record says so."""

    async def one_by_one(store: Any, topic_id: str, record: Any, version: int) -> Any:
        for number in range(record.trimmed, record.previous):
            await store.delete(paths.topic_log(topic_id, number))
        return await trim_some(store, topic_id, record, version)

    return one_by_one


def names_no_root_before(named: Any) -> Any:
    """A root does not say which ledgers the root before it needs."""
    return lambda newest: []


def forgets_old_roots(unnamed: Any) -> Any:
    """Ledgers that only roots of long ago named are not counted as dropped."""
    return lambda newest: []


def takes_dropped_for_gone(gone: Any) -> Any:
    """A checkpoint forgets what was dropped without looking whether it is deleted."""

    async def all_of_them(self: Any, state: Any) -> list[int]:
        return list(state.dropped)

    return all_of_them


def one_state_for_all(checkpoint_state: Any) -> Any:
    """The checkpoint says that it is one commit further than it is."""

    def further(state: Any, parts: Any, **options: Any) -> Any:
        made = checkpoint_state(state, parts, **options)
        return replace(made, next=made.next + 1)

    return further


# -- the janitor ---------------------------------------------------------------------------------


def condemns_in_memory(condemn: Any) -> Any:
    """The janitor takes silent intents for condemned and does not write it."""

    async def in_memory(self: Any, found: Any, stale: Any) -> Any:
        ended = IntentState.CONDEMNED
        return [
            replace(one, record=replace(one.record, state=ended)) if one.id in stale else one
            for one in found
        ]

    return in_memory


def remembers_the_first_fold(folded_topic: Any) -> Any:
    """What a topic refers to is asked once."""

    async def remembered(self: Any, topic_id: str, policies: Any) -> Any:
        known = self.__dict__.setdefault("_first", {})
        if topic_id not in known:
            known[topic_id] = await folded_topic(self, topic_id, policies)
        return known[topic_id]

    return remembered


def knows_no_cursors(of_subscriptions: Any) -> Any:
    """Cursor ledgers are not among what a topic refers to."""

    async def none(self: Any, topic_id: str) -> frozenset[int]:
        return frozenset()

    return none


def folds_before_it_closes(close: Any) -> Any:
    """Nothing is recovered that an intent that ended has left open: its ledgers stay open."""

    async def left(self: Any, a_pass: Any, report: Any) -> Any:
        return report

    return left


def removes_whatever_was_published(unchanged: Any) -> Any:
    """A ledger is removed whatever checkpoint came since it was judged."""
    return lambda path, version: []


def keeps_no_body(of_rows: Any) -> Any:
    """Bodies of commits are not among what a topic refers to."""

    async def without(self: Any, topic_id: str, folded: Any, newest: Any) -> Any:
        return await of_rows(self, topic_id, replace(folded, bodies={}), newest)

    return without


# -- cursors -------------------------------------------------------------------------------------


def takes_over_without_a_fence(last_positions: Any) -> Any:
    """Who takes a cursor over reads its ledger and does not fence it."""

    async def unfenced(ledgers: Any, record: Any, *, fence: bool) -> Any:
        return await last_positions(ledgers, record, fence=False)

    return unfenced


def stays_in_the_epoch(taken: Any) -> Any:
    """A take-over does not raise the epoch."""
    return lambda record, claim: replace(taken(record, claim), epoch=record.epoch)


def writes_whatever_is_there(write: Any) -> Any:
    """The record of a subscription is written at any version."""

    async def blindly(self: Any, seen: Any, record: Any, *others: Any, **held: Any) -> Any:
        return await write(self, replace(seen, version=ANY_VERSION), record, *others, **held)

    return blindly


def by_the_floor(last: Any) -> Any:
    """Who takes a cursor over goes by the record alone."""

    async def floor(ledgers: Any, record: Any, *, fence: bool) -> Any:
        return record.floor if fence else await last(ledgers, record, fence=False)

    return floor


def discards_before_it_unnames(leave: Any) -> Any:
    """The ledger that is left is deleted at once, not when the record names another."""

    def at_once(self: Any) -> None:
        ledger = self._ledger
        leave(self)
        if ledger is not None:
            doing = discard_ledger(self._context.ledgers, ledger.id)
            task = self._loop.create_task(doing)
            self._aside[task] = None
            task.add_done_callback(lambda done: self._aside.pop(done, None))

    return at_once


def recovers_before_it_owns(open_: Any) -> Any:
    """Where it was is taken from the record that was there before the take-over."""

    async def opened(self: Any, *args: Any, **options: Any) -> Any:
        cursor = await open_(self, *args, **options)
        if not cursor._recovered.done():
            cursor._recovered.set_result(dict(cursor.confirmed))
        return cursor

    return opened


def seeks_under_its_owner(sought: Any) -> Any:
    """A seek neither ends the owner nor raises the epoch."""

    def moved(record: Any, owner: str, positions: Any) -> Any:
        found = sought(record, owner, positions)
        return replace(found, epoch=record.epoch, owner=record.owner, life=record.life)

    return moved


def keeps_the_seekers_ledger(sought: Any) -> Any:
    """After a seek the record goes on naming the ledger, whose last entry then counts."""

    def moved(record: Any, owner: str, positions: Any) -> Any:
        return replace(sought(record, owner, positions), ledger_id=record.ledger_id)

    return moved


def confirms_an_unknown_outcome(put: Any) -> Any:
    """A lost answer to a write of the record is taken for its success."""

    async def written(self: Any, record: Any, *others: Any) -> None:
        try:
            await put(self, record, *others)
        except (OutcomeUnknown, LedgerError):
            self._subscription = replace(self._subscription, record=record)

    return written


def deletes_the_name_first(delete_once: Any) -> Any:
    """The name goes, and then the head is set to deleted."""

    async def name_first(self: Any, info: Any) -> Any:
        await self.store.delete(info.name.path)
        return await delete_once(self, info)

    return name_first


BESIDE = ("commit beside a janitor",)
COMMITS = ("commit", "commit of bodies in ledgers", "overwrite", "commit to two topics")
JANITOR = ("janitor", "janitor and a broker that wakes", "janitor beside a deleted topic")
CURSORS = ("take-over of a cursor", "seek", "deletion of a cursor")


CHECKPOINTS = ("checkpoint", "checkpoint in ledgers", "checkpoint beside a janitor")
T = Mutant
REACHED: tuple[tuple[Mutant, tuple[str, ...]], ...] = (
    (T("w0 of before", "hazard 11", intents, "Check", w0_of_before, ZOMBIES), COMMITS),
    (
        T("block under any intent", "hazard 4", intents, "Check", a_block_under_any_intent, CHURN),
        BESIDE,
    ),
    (T("older run goes on", "hazard 11", Intents, "_make", the_older_run_goes_on, CHURN), COMMITS),
    (
        T("condemned by a lost answer", "T4", Intents, "_end", condemned_without_looking, CHURN),
        ("janitor and a broker that wakes",),
    ),
    (
        T(
            *("intent asked before the record", "hazard 2", commit._Commit, "_recorded_outcome"),
            *(asks_the_intent_first, CHURN),
        ),
        ("growth", "trim"),
    ),
    (
        T("loss without a name", "T4", draft, "with_dropped_ledgers", drops_without_a_name, CHURN),
        ("overwrite", "trim"),
    ),
    (
        T("checks left out", "hazard 37", commit._Commit, "_send", minds_no_checks, CHURN),
        ("trim of rows read", "retention of rows read"),
    ),
    (
        T(
            *("intent only has to be there", "T4", commit._Commit, "_intent_operation"),
            *(minds_no_intent, CONDEMNED),
        ),
        BESIDE,
    ),
    (
        T(
            *("replay known by its id alone", "T2", draft, "recorded_outcome"),
            *(a_replay_is_done_anew, CHURN),
        ),
        COMMITS,
    ),
    (
        T(
            *("bodies unchecked", "hazard 8", CommitPayloads, "checks"),
            *(bodies_let_go_before_the_multi, CHURN),
        ),
        BESIDE,
    ),
    (T("growth to less", "hazard 9", draft, "_check_guard", grows_to_less, CHURN), ("growth",)),
    (
        T(
            *("merge of what was rearranged", "hazard 9", draft, "_check_guard"),
            *(merges_what_was_rearranged, CHURN),
        ),
        ("merge",),
    ),
    (
        T("opened beside a living one", "T7", draft, "_check_guard", opens_a_second, CHURN),
        ("live segment",),
    ),
    (
        T("sealed what is not live", "T7", draft, "_check_guard", seals_what_is_not_live, CHURN),
        ("live segment",),
    ),
    (
        T(
            *("checkpoint published unchecked", "hazard 5", Checkpointer, "_set"),
            *(publishes_unchecked, OVERWRITES),
        ),
        ("checkpoint beside a janitor",),
    ),
    (
        T(
            *("log trimmed before it is recorded", "hazard 6", checkpointer, "_trim_batch"),
            *(trims_without_a_mark, CHURN),
        ),
        CHECKPOINTS,
    ),
    (
        T("root before not named", "hazard 8", checkpointer, "_named", names_no_root_before, CHURN),
        (*CHECKPOINTS, *JANITOR),
    ),
    (
        T("old roots never dropped", "T14", checkpointer, "_unnamed", forgets_old_roots, CHURN),
        CHECKPOINTS,
    ),
    (
        T(
            *("dropped taken for gone", "hazard 34", Checkpointer, "_deleted_ledgers"),
            *(takes_dropped_for_gone, CHURN),
        ),
        CHECKPOINTS,
    ),
    (
        T(
            *("checkpoint one commit too far", "T1", checkpointer.checkpoint, "checkpoint_state"),
            *(one_state_for_all, CHURN),
        ),
        CHECKPOINTS,
    ),
    (T("condemned in memory", "T4", Janitor, "_condemn", condemns_in_memory, CHURN), JANITOR),
    (
        T(
            *("references of the first pass", "hazard 4", References, "_folded_topic"),
            *(remembers_the_first_fold, CHURN),
        ),
        JANITOR,
    ),
    (
        T(
            *("cursors not referred to", "T12", References, "_of_subscriptions"),
            *(knows_no_cursors, CHURN),
        ),
        CURSORS,
    ),
    (T("abandoned ledgers stay open", "T14", Janitor, "_close", folds_before_it_closes), JANITOR),
    (
        T(
            *("removal unchecked", "hazard 5", janitor, "_unchanged"),
            *(removes_whatever_was_published, OVERWRITES),
        ),
        (*JANITOR, "checkpoint in ledgers", "overwrite"),
    ),
    (
        T("bodies not referred to", "hazard 8", References, "_of_rows", keeps_no_body, CHURN),
        ("commit of bodies in ledgers",),
    ),
    (
        T(
            *("take-over without a fence", "T12", cursor_ledger, "last_positions"),
            *(takes_over_without_a_fence, ZOMBIES),
        ),
        CURSORS,
    ),
    (
        T(
            *("take-over in the same epoch", "T12", subscription_records, "taken"),
            *(stays_in_the_epoch, CHURN),
        ),
        CURSORS,
    ),
    (
        T(
            *("record written whatever is there", "T12", SubscriptionNodes, "write"),
            *(writes_whatever_is_there, CHURN),
        ),
        CURSORS,
    ),
    (
        T("position is the floor", "T12", cursor_ledger, "last_positions", by_the_floor, CHURN),
        CURSORS,
    ),
    (
        T(
            *("ledger discarded before it is unnamed", "T12", Cursor, "_leave_ledger"),
            *(discards_before_it_unnames, CHURN),
        ),
        CURSORS,
    ),
    (
        T(
            *("recovered before it is owned", "T12", Subscriptions, "open"),
            *(recovers_before_it_owns, CHURN),
        ),
        CURSORS,
    ),
    (
        T(
            *("seek under its owner", "T12", subscription_records, "sought"),
            *(seeks_under_its_owner, CHURN),
        ),
        CURSORS,
    ),
    (
        T(
            *("seek keeps the ledger's name", "T12", subscription_records, "sought"),
            *(keeps_the_seekers_ledger, CHURN),
        ),
        CURSORS,
    ),
    (
        T(
            *("record confirmed by a lost answer", "T12", Cursor, "_put"),
            *(confirms_an_unknown_outcome, CHURN),
        ),
        CURSORS,
    ),
    (
        T("name gone before the head", "T11", Topics, "_delete_once", deletes_the_name_first),
        ("deletion",),
    ),
)
