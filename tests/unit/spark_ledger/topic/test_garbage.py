"""What becomes of a ledger, case by case."""

from dataclasses import replace

import pytest

from spark_ledger.broker.log.topic_commits import RollLimits
from spark_ledger.topic.log.policies import ROLL_AGE_S_MAX, TopicPolicies
from spark_ledger.topic.upkeep import garbage
from spark_ledger.topic.upkeep.garbage import Fate, IntentSeen, LedgerSeen, TopicSeen, fate_of

DAY_MS = 24 * 3600 * 1000
NOW_MS = 100 * DAY_MS
CLOSED = LedgerSeen(7, "i", "t", closed=True, closed_in=50, closed_ms=0)
OPEN = LedgerSeen(7, "i", "t", closed=False)
ENDED = IntentSeen("i", "query", open=False, committed_in=40)
RUNNING = IntentSeen("i", "query", open=True, committed_in=40)
EMPTY = TopicSeen("t")


def judged(ledger, intent, topic, now_ms=NOW_MS):
    return fate_of(ledger, intent, topic, now_ms).fate


def test_what_a_topic_refers_to_is_kept_however_its_writer_ended():
    topic = replace(EMPTY, referred={7}, dropped={7: 0})

    assert judged(CLOSED, ENDED, topic) is Fate.KEPT
    assert judged(OPEN, RUNNING, topic) is Fate.KEPT


def test_what_an_ended_writer_left_and_no_topic_ever_had_goes_at_once():
    assert judged(CLOSED, ENDED, EMPTY) is Fate.NEVER_REFERRED


def test_nothing_goes_before_it_is_closed():
    assert judged(OPEN, ENDED, EMPTY) is Fate.WAITS
    assert judged(OPEN, ENDED, replace(EMPTY, deleted_ms=0)) is Fate.WAITS


@pytest.mark.parametrize(
    ("passed_ms", "fate"), [(0, Fate.WAITS), (DAY_MS - 1, Fate.WAITS), (DAY_MS, Fate.RECLAIMED)]
)
def test_what_a_topic_dropped_waits_for_the_delete_delay(passed_ms, fate):
    topic = replace(EMPTY, dropped={7: NOW_MS - passed_ms})

    assert judged(CLOSED, ENDED, topic) is fate


def test_the_delete_delay_is_the_topics_own():
    topic = TopicSeen("t", TopicPolicies(delete_delay_ms=0), dropped={7: NOW_MS})

    assert judged(CLOSED, ENDED, topic) is Fate.RECLAIMED


@pytest.mark.parametrize(
    ("closed_in", "committed_in", "fate"),
    [
        (50, 0, Fate.WAITS),
        (50, 49, Fate.WAITS),
        (50, 51, Fate.NEVER_REFERRED),
        (0, 51, Fate.WAITS),  # closed by the observer itself: it looks again
    ],
)
def test_under_an_open_intent_a_version_must_follow_on_the_close(closed_in, committed_in, fate):
    ledger, intent = (
        replace(CLOSED, closed_in=closed_in),
        replace(RUNNING, committed_in=committed_in),
    )

    assert judged(ledger, intent, EMPTY) is fate


def test_under_an_open_intent_what_a_checkpoint_may_be_about_to_name_waits():
    intent, closed = replace(RUNNING, committed_in=99), replace(CLOSED, closed_ms=NOW_MS)

    for passed_ms, fate in (
        (garbage.UNPUBLISHED_MS - 1, Fate.WAITS),
        (garbage.UNPUBLISHED_MS, Fate.NEVER_REFERRED),
    ):
        assert judged(closed, intent, EMPTY, NOW_MS + passed_ms) is fate
    assert judged(closed, ENDED, EMPTY) is Fate.NEVER_REFERRED


def test_under_an_open_intent_the_delete_delay_holds_too():
    topic = replace(EMPTY, dropped={7: NOW_MS - 1})

    assert judged(CLOSED, replace(RUNNING, committed_in=99), topic) is Fate.WAITS


@pytest.mark.parametrize("kind", ["batch", "system", "cursor", "of a later version"])
def test_what_no_topic_referred_to_stays_while_a_writer_is_at_work_whose_versions_say_nothing(kind):
    intent = IntentSeen("i", kind, open=True, committed_in=99)

    assert judged(CLOSED, intent, EMPTY) is Fate.WAITS
    assert judged(CLOSED, replace(intent, open=False), EMPTY) is Fate.NEVER_REFERRED


@pytest.mark.parametrize("kind", ["batch", "system"])
def test_what_a_topic_dropped_goes_after_its_delay_though_its_writer_is_at_work_for_months(kind):
    writer = IntentSeen("i", kind, open=True)
    just, due = NOW_MS - DAY_MS + 1, NOW_MS - DAY_MS

    assert judged(CLOSED, writer, replace(EMPTY, dropped={7: just})) is Fate.WAITS
    assert judged(CLOSED, writer, replace(EMPTY, dropped={7: due})) is Fate.RECLAIMED
    assert judged(OPEN, writer, replace(EMPTY, dropped={7: due})) is Fate.WAITS


@pytest.mark.parametrize("kind", ["cursor", "of a later version"])
def test_of_a_writer_of_whose_commits_nothing_is_known_what_was_dropped_stays_too(kind):
    topic = replace(EMPTY, dropped={7: 0})

    assert judged(CLOSED, IntentSeen("i", kind, open=True), topic) is Fate.WAITS


def test_what_a_deleted_topic_had_goes_after_its_delay_whoever_wrote_it():
    topic = replace(EMPTY, referred={7}, deleted_ms=NOW_MS - DAY_MS)

    assert judged(CLOSED, RUNNING, topic) is Fate.RECLAIMED
    assert judged(CLOSED, RUNNING, replace(topic, deleted_ms=NOW_MS - 1)) is Fate.WAITS


def test_of_a_topic_that_cannot_be_folded_nothing_goes():
    verdict = fate_of(CLOSED, ENDED, TopicSeen("t", problem="of a later version"), NOW_MS)

    assert (verdict.fate, verdict.why) == (Fate.WAITS, "of a later version")


def closed_ones(ledger, intent, topic=EMPTY):
    return garbage.abandoned_ledgers([ledger], {"i": intent}, {"t": topic}, NOW_MS)


def test_open_ledgers_of_ended_writers_and_deleted_topics_are_closed_also_if_referred_to():
    referred = replace(EMPTY, referred={7})
    young = replace(OPEN, made_ms=NOW_MS)

    assert closed_ones(young, ENDED, referred) == [7]
    assert closed_ones(young, RUNNING, replace(referred, deleted_ms=NOW_MS)) == [7]
    assert closed_ones(young, RUNNING, referred) == []


def test_no_ledger_is_open_for_twice_its_roll_age():
    policies = TopicPolicies(ledger_age_s_max=100)
    old = replace(OPEN, made_ms=NOW_MS - 150_001)

    assert closed_ones(old, RUNNING, TopicSeen("t", policies)) == [7]
    assert (
        closed_ones(replace(old, made_ms=NOW_MS - 150_000), RUNNING, TopicSeen("t", policies)) == []
    )
    assert garbage.open_ms_max(policies) < 2 * policies.ledger_age_s_max * 1000
    for kind in ("system", "cursor"):
        other = IntentSeen("i", kind, open=True)
        assert closed_ones(old, other, TopicSeen("t", policies)) == []
        older = replace(old, made_ms=NOW_MS - garbage.open_ms_max(policies, kind) - 1)
        assert closed_ones(older, other, TopicSeen("t", policies)) == [7]


@pytest.mark.parametrize("roll_s", [1, 3600, ROLL_AGE_S_MAX, 30 * ROLL_AGE_S_MAX])
def test_no_live_ledger_of_a_broker_at_work_is_fenced_for_its_age(roll_s):
    policies = TopicPolicies(ledger_age_s_max=roll_s)
    oldest_ms = int(RollLimits().age_s * 1000)
    broker = IntentSeen("i", "system", open=True)
    live = replace(OPEN, made_ms=NOW_MS - oldest_ms - oldest_ms // 2)

    assert closed_ones(live, broker, TopicSeen("t", policies, referred={7})) == []
    assert garbage.open_ms_max(policies, "system") >= 1.5 * oldest_ms


def test_a_recovery_that_does_not_end_is_taken_over_and_a_closed_ledger_is_left_alone():
    young = replace(OPEN, made_ms=NOW_MS)

    assert closed_ones(replace(young, stuck=True), RUNNING) == [7]
    assert closed_ones(CLOSED, ENDED) == []


def test_the_lack_of_references_deletes_only_a_small_part_at_once():
    def refused(count, known):
        return garbage.refusal_to_delete(count, known)

    assert refused(20, 20) == refused(100, 1000) == ""
    assert "101 of 1000 ledgers" in refused(101, 1000)
    assert "21 of 21" in refused(21, 21)
