"""Bugs of commits to topics, and of what checkpoints, trims and cleans them: each is a rule of the
topic layer's hazards taken out."""

import asyncio
from dataclasses import replace
from typing import Any

from bookie_server.api.entry import NO_ENTRY
from spark_ledger.ledger.reader import AsyncLedgerReader
from spark_ledger.metadata.store import ANY_VERSION, OutcomeUnknown
from spark_ledger.spark.options import offsets
from spark_ledger.topic import checkpointer, client
from spark_ledger.topic.checkpointer import Checkpointer
from spark_ledger.topic.commit import commit, replay
from spark_ledger.topic.commit import draft as commit_draft
from spark_ledger.topic.commit.draft import CommitKind, CommitOutcome
from spark_ledger.topic.commit.views import CommitViews
from spark_ledger.topic.log import checkpoint, topic_log
from spark_ledger.topic.log.records import IntentState
from spark_ledger.topic.log.state import NEVER, TopicState
from spark_ledger.topic.log.topic_log import TopicLog
from spark_ledger.topic.read.follower import TopicFollower
from spark_ledger.topic.subscription import records as subscription_records
from spark_ledger.topic.subscription.cursor import Cursor
from spark_ledger.topic.subscription.nodes import SubscriptionNodes
from spark_ledger.topic.subscription.subscriptions import Subscriptions
from spark_ledger.topic.upkeep import garbage, retention
from spark_ledger.topic.upkeep.merge_encoding import _Encoding
from tests.simulation.mutants.mutant import Mutant

TOPIC = {
    "topics": True,
    "churn": False,
    "also": (),
    "faults": ("client killed", "unknown outcomes"),
    "between_s": 0.5,
    "writers": 0,
    "recoverers": 0,
    "tailers": 0,
}
CONDEMNED = {
    **TOPIC,
    "faults": ("pause", "expiry", "slow network"),
    "between_s": 0.3,
    "chaos_s": 25.0,
}
LONG = {**TOPIC, "chaos_s": 25.0}
CHURN = {**LONG, "churn": True}
ZOMBIES = {**CHURN, "faults": ("pause", "suspension"), "between_s": 0.3}
MISSED = {**CHURN, "faults": ("missed watches",)}
CUT_OFF = {**CHURN, "faults": ("suspension",), "chaos_s": 60.0}
SOURCES = {**LONG, "also": ("sources",)}
REWINDS = {**LONG, "also": ("rewinds",)}
OVERWRITES = {**CHURN, "also": ("overwrites",)}
REPLACEMENTS = {**CHURN, "also": ("replacements",)}
LAGGING = {**LONG, "faults": ("lagging store", "pause")}
BEHIND = {**LONG, "faults": ("lagging store", "slow store")}


def never_settled(recorded_outcome: Any) -> Any:
    return lambda record, commit_id, txn, w0, batch=None: None


def always_of_this_run(record_of: Any) -> Any:
    """Whoever recorded the version, it is a no-op."""

    async def taken_for_its_own(self: Any, fresh: bool) -> Any:
        record, version = await record_of(self, fresh)
        return replace(record, run_id=self._request.txn.run_id), version

    return taken_for_its_own


def same_whatever_it_is(same: Any) -> Any:
    return lambda record, content: True


def same_number_of_rows(same: Any) -> Any:
    return lambda record, content: same(record, replace(content, fingerprint=""))


def believes_its_intent_open(intent: Any) -> Any:
    async def opened(self: Any, intent_id: str, *, fresh: bool) -> Any:
        found = await intent(self, intent_id, fresh=fresh)
        record = replace(found.record, state=IntentState.OPEN)
        return replace(found, record=record, version=ANY_VERSION)

    return opened


def sets_head_whatever_it_is(head: Any) -> Any:
    return lambda self, step: replace(head(self, step), version=ANY_VERSION)


def takes_a_lost_answer_for_success(send: Any) -> Any:
    async def sent(self: Any, view: Any, drafts: Any, steps: Any) -> Any:
        try:
            return await send(self, view, drafts, steps)
        except OutcomeUnknown:
            return CommitOutcome(CommitKind.COMMITTED)

    return sent


def publishes_whatever_is_there(set_: Any) -> Any:
    async def goes_back(
        self: Any, topic_id: str, record: Any, version: Any, intent: Any, held: Any
    ) -> bool:
        any_version = None if version is None else ANY_VERSION
        done: bool = await set_(self, topic_id, record, any_version, intent, held)
        return done

    return goes_back


def trims_to_the_newest(trim_some: Any) -> Any:
    async def all_of_it(store: Any, topic_id: str, record: Any, version: int) -> Any:
        return await trim_some(store, topic_id, replace(record, previous=record.next), version)

    return all_of_it


def a_missing_commit_is_the_end(applied: Any) -> Any:
    async def until_one_is_missing(self: Any, folded: Any, end: int) -> Any:
        while folded.next < end:
            try:
                folded = await applied(self, folded, folded.next + 1)
            except Exception:
                return replace(folded, next=end)
        return folded

    return until_one_is_missing


def never_torn(torn: Any) -> Any:
    return lambda states: []


def deletes_at_once(delay: Any) -> Any:
    return lambda left_ms, what: ""


def asks_no_intent(waits_for: Any) -> Any:
    def careless(ledger: Any, intent: Any, topic: Any, now_ms: int) -> Any:
        return waits_for(ledger, replace(intent, open=False), topic, now_ms)

    return careless


def holds_nothing(held: Any) -> Any:
    return lambda record, since, partitions: {}


def replaces_what_is_held(check_no_subscription_holds: Any) -> Any:
    return lambda *what: None


def keeps_by_another_clock(trim_points: Any) -> Any:
    def an_hour_ahead(state: Any, policies: Any, now_ms: int, *rest: Any) -> Any:
        return trim_points(state, policies, now_ms + 3_600_000, *rest)

    return an_hour_ahead


def rows_out_of_order(add: Any) -> Any:
    def reversed_rows(self: Any, rows: Any) -> Any:
        batch = rows.record_batch
        back = list(reversed(range(batch.num_rows)))
        return add(self, replace(rows, record_batch=batch.take(back)))

    return reversed_rows


def confirms_before_it_writes(write: Any) -> Any:
    async def at_once(self: Any, step: Any) -> None:
        self.confirmed = dict(self._positions)
        self._durable.set()
        await write(self, step)

    return at_once


def forgets_what_was_dropped(checkpoint_state: Any) -> Any:
    """What a checkpoint does not name any more was never dropped."""

    def forgetful(state: Any, parts: Any, **options: Any) -> Any:
        return replace(checkpoint_state(state, parts, **options), dropped={})

    return forgetful


def accepts_rows_of_a_namesake(ordered: Any) -> Any:
    def under_any_id(topic_id: str, intent_id: str, results: Any) -> Any:
        return ordered(topic_id, intent_id, [replace(one, topic_id=topic_id) for one in results])

    return under_any_id


def believes_that_it_is_there(check: Any) -> Any:
    def careless(state: Any, app_id: str, actions: Any) -> None:
        check(replace(state, deleted=False), app_id, actions)

    return careless


def knows_of_no_others(last_commit_of_others: Any) -> Any:
    """An overwrite takes away whatever is there."""
    return lambda self, app_id: NEVER


def counts_no_versions(is_before: Any) -> Any:
    """What no topic refers to is not waited for while its query is at work."""
    return lambda closed_in, committed_in: True


def goes_back_without_a_word(holds: Any) -> Any:
    """A trim that takes its time does not hear who came or went back meanwhile."""

    async def unheard(self: Any, *what: Any) -> Any:
        found = await holds(self, *what)
        await asyncio.sleep(2.0)
        return replace(found, check=replace(found.check, version=ANY_VERSION))

    return unheard


def goes_back_without_a_mark(going_back: Any) -> Any:
    """What it was ahead of is held no more once it is ahead again."""
    return lambda self, name, marks, positions: [self.touch()]


def holds_where_it_is(held: Any) -> Any:
    """Where a subscription was a moment ago is not asked."""
    return lambda marks, floor, now_ms, grace_ms: subscription_records.LowestPositions(
        floor, add=None
    )


def reads_what_was_announced(read_entries: Any) -> Any:
    """A committed range is no proof that it is confirmed."""

    def unproven(self: Any, entry_ids: Any, **told: Any) -> Any:
        return read_entries(self, entry_ids, **{**told, "known_confirmed": NO_ENTRY})

    return unproven


def waits_for_its_watch(wait: Any) -> Any:
    async def for_ever(self: Any) -> None:
        await self._changed.wait()

    return for_ever


def answers_whatever_it_knows(state: Any) -> Any:
    return lambda self: self._latest[0]


def goes_on_with_the_last_row(decode: Any) -> Any:
    """A saved position is taken for the row that was read last."""

    def one_too_low(offset: Any, known: Any, **options: Any) -> Any:
        found = decode(offset, known, **options)
        return {t: {p: max(0, at - 1) for p, at in parts.items()} for t, parts in found.items()}

    return one_too_low


MUTANTS = (
    Mutant(
        "recorded version ignored", "T2", commit_draft, "recorded_outcome", never_settled, TOPIC
    ),
    Mutant(
        "intent believed open", "T4", CommitViews, "intent", believes_its_intent_open, CONDEMNED
    ),
    Mutant(
        *("head set at any version", "hazard 1", commit._Commit, "_head"),
        *(sets_head_whatever_it_is, LAGGING),
    ),
    Mutant(
        *("lost answer taken for success", "hazard 2", commit._Commit, "_send"),
        *(takes_a_lost_answer_for_success, TOPIC),
    ),
    Mutant(
        *("checkpoint set at any version", "hazard 6", Checkpointer, "_set"),
        *(publishes_whatever_is_there, LAGGING),
    ),
    Mutant(
        *("missing commit taken for the end", "hazard 7", TopicLog, "_apply_commits"),
        *(a_missing_commit_is_the_end, LAGGING),
    ),
    Mutant(
        *("merge reverses rows", "hazard 9, 39", _Encoding, "add", rows_out_of_order, LONG),
    ),
    Mutant(
        *("no-op whichever run recorded the version", "hazard 11", commit._Commit, "_record"),
        *(always_of_this_run, ZOMBIES),
    ),
    Mutant(
        *("replay whatever its rows", "hazard 11", replay, "is_same_batch"),
        *(same_whatever_it_is, REWINDS),
    ),
    Mutant(
        *("replay recognised by its number of rows", "hazard 11", replay, "is_same_batch"),
        *(same_number_of_rows, REWINDS),
    ),
    Mutant(
        *("log trimmed to the newest checkpoint", "hazard 6, 8", checkpointer, "_trim_batch"),
        *(trims_to_the_newest, CHURN),
    ),
    Mutant("no delete delay", "hazard 34", garbage, "_delay", deletes_at_once, CHURN),
    Mutant(
        *("ledgers of open intents deleted", "hazard 4, 5", garbage, "_reason_to_wait"),
        *(asks_no_intent, CHURN),
    ),
    Mutant(
        *("subscriptions hold nothing", "hazard 37", subscription_records, "held_offsets"),
        *(holds_nothing, CHURN),
    ),
    Mutant(
        *("overwrite asks no subscription", "hazard 37"),
        *(commit_draft, "check_no_subscription_holds"),
        *(replaces_what_is_held, OVERWRITES),
    ),
    Mutant(
        *("retention by another clock", "hazard 35", retention, "trim_points"),
        *(keeps_by_another_clock, CHURN),
    ),
    Mutant(
        *("step back that no trim sees", "hazard 37", Subscriptions, "holds"),
        *(goes_back_without_a_word, CHURN),
    ),
    Mutant(
        *("step back without its mark", "hazard 38", SubscriptionNodes, "step_back"),
        *(goes_back_without_a_mark, CHURN),
    ),
    Mutant(
        *("nothing held of the hour before", "hazard 38", subscription_records, "lowest_positions"),
        *(holds_where_it_is, CHURN),
    ),
    Mutant(
        *("cursor durable before it is written", "hazard 40", Cursor, "_write"),
        *(confirms_before_it_writes, CHURN),
    ),
    Mutant(
        *("checkpoint forgets what was dropped", "hazard 9, 34", checkpoint, "checkpoint_state"),
        *(forgets_what_was_dropped, CHURN),
    ),
    Mutant(
        *("rows of a deleted topic for its namesake", "hazard 36", client, "ordered_segments"),
        *(accepts_rows_of_a_namesake, REPLACEMENTS),
    ),
    Mutant(
        *("commit to a deleted topic", "hazard 36", commit_draft, "check_guards"),
        *(believes_that_it_is_there, REPLACEMENTS),
    ),
    Mutant(
        *("committed taken for unconfirmed", "hazard 18", AsyncLedgerReader, "read_entries"),
        *(reads_what_was_announced, CHURN),
    ),
    Mutant(
        *("watch trusted for ever", "hazard 47", TopicFollower, "_wait_for_change"),
        *(waits_for_its_watch, MISSED),
    ),
    Mutant(
        *("old state given out", "hazard 47", TopicFollower, "state"),
        *(answers_whatever_it_knows, CUT_OFF),
    ),
    Mutant(
        *("saved position is the last row read", "invariant 32", offsets, "decode"),
        *(goes_on_with_the_last_row, SOURCES),
    ),
    Mutant(
        *("overwrite of what came since", "hazard 9", TopicState, "last_commit_of_others"),
        *(knows_of_no_others, OVERWRITES),
    ),
    Mutant(
        *("ledgers of the batch under way deleted", "hazard 5", garbage, "is_before"),
        *(counts_no_versions, OVERWRITES),
    ),
    Mutant(
        *("topics folded one by one", "hazard 14", topic_log, "disagreeing_topics"),
        *(never_torn, BEHIND),
    ),
)
