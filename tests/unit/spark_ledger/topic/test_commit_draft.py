from dataclasses import replace

import pytest

from spark_ledger import errors
from spark_ledger.topic.commit import draft as commit_draft
from spark_ledger.topic.commit.draft import CommitKind, CommitRequest, TxnKey
from spark_ledger.topic.log import state
from spark_ledger.topic.log.actions import Append, Hole, Overwrite, Replace, SealLive, Trim
from spark_ledger.topic.log.records import Commit, TopicRows, TxnRecord
from spark_ledger.topic.write import TaskResult
from tests.unit.spark_ledger.topic.stage import inline, segment

TXN = TxnKey("q", "*", 7, "run-2")


def shared(ledger, *entry_rows, partition, first=0):
    return replace(segment(ledger, *entry_rows, partition=partition, first=first), shared=True)


def recorded(version, run_id, commit_id="other"):
    return TxnRecord(version, run_id, commit_id, "a", 3, {0: 5}, {"b": TopicRows(4, {1: 6})})


# -- the transaction record decides ------------------------------------------------------------


def test_a_version_above_the_recorded_one_is_not_committed_yet():
    assert commit_draft.recorded_outcome(recorded(6, "run-1"), "mine", TXN, w0=6) is None


def test_a_commit_whose_answer_was_lost_is_told_by_its_id_with_all_its_topics():
    outcome = commit_draft.recorded_outcome(recorded(7, "run-2", "mine"), "mine", TXN, w0=6)

    assert outcome.kind is CommitKind.COMMITTED
    assert outcome.topics == {"a": TopicRows(3, {0: 5}), "b": TopicRows(4, {1: 6})}


@pytest.mark.parametrize(
    ("version", "run_id", "w0"), [(7, "run-2", 6), (9, "run-2", 6), (7, "run-1", 7)]
)
def test_a_version_of_this_run_or_from_before_it_began_is_silently_done(version, run_id, w0):
    outcome = commit_draft.recorded_outcome(recorded(version, run_id), "mine", TXN, w0)

    assert outcome.kind is CommitKind.ALREADY
    assert (outcome.number, outcome.rows) == ((3, {0: 5}) if version == 7 else (-1, {}))


def test_a_version_that_another_run_recorded_since_this_one_began_is_an_error():
    with pytest.raises(errors.LedgerFenced, match="committed by run run-1, after run run-2 had"):
        commit_draft.recorded_outcome(recorded(7, "run-1"), "mine", TXN, w0=6)


def test_what_took_the_next_version_is_settled_by_its_id_only():
    following = replace(TXN, version=commit_draft.NEXT_VERSION)

    assert commit_draft.recorded_outcome(recorded(7, "run-1"), "mine", following, w0=-1) is None
    assert (
        commit_draft.recorded_outcome(recorded(7, "x", "mine"), "mine", following, w0=-1)
        is not None
    )


def test_the_record_has_what_came_into_each_topic():
    drafts = {
        "a": (Append((segment(1, 5), segment(2, 6, partition=2))),),
        "b": (Append(()),),
        "c": (Overwrite((segment(3, 1),), 0),),
    }

    record = commit_draft.txn_record(TXN, "c1", {"a": 10, "c": 12}, drafts)

    assert record.topics() == {
        "a": TopicRows(10, {0: 5, 2: 6}),
        "b": TopicRows(-1),
        "c": TopicRows(12, {0: 1}),
    }


# -- claims ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "segments",
    [
        (segment(1, 5), segment(1, 5)),
        (segment(1, 5, 5), segment(1, 5, first=1, partition=1)),
        (segment(1, *[1] * 10), segment(1, 1, first=3), segment(1, 1, first=20)),
        (shared(1, 5, partition=0), segment(1, 5, partition=1)),
        (segment(1, 5, partition=0), shared(1, 5, partition=1)),
        (shared(1, 5, partition=0), shared(1, 5, partition=0)),
        (shared(1, *[1] * 9, partition=0), shared(1, 1, partition=1, first=8),
         segment(1, 1, first=8, partition=2)),
    ],
)  # fmt: skip
def test_an_entry_that_two_segments_claim_is_refused(segments):
    with pytest.raises(ValueError, match=r"of ledger 1 are claimed twice"):
        commit_draft.check_claims(segments)
    with pytest.raises(ValueError, match=r"of ledger 1 are claimed twice"):
        commit_draft.check_claims(reversed(segments))


@pytest.mark.parametrize(
    "segments",
    [
        (segment(1, 5), segment(2, 5), segment(1, 5, first=1)),
        (shared(1, 5, 5, partition=0), shared(1, 5, partition=1), shared(1, 5, partition=2)),
        (shared(1, 5, 5, partition=1), shared(1, 5, partition=0, first=1), segment(1, 5, first=2)),
        (inline(b"a", b"b"), inline(b"c"), inline(b"d", partition=1)),
    ],
)
def test_shared_entries_belong_to_different_partitions_and_inline_ones_to_their_segment(segments):
    commit_draft.check_claims(segments)
    commit_draft.check_claims(reversed(segments))


def test_what_one_task_wrote_for_several_topics_is_of_one_attempt():
    commit_draft.check_one_attempt([TaskResult("a", "i", 1, 2), TaskResult("b", "i", 1, 2)])
    with pytest.raises(ValueError, match="attempts 2 and 3 of task 1"):
        commit_draft.check_one_attempt([TaskResult("a", "i", 1, 2), TaskResult("b", "i", 1, 3)])


# -- what is taken away ---------------------------------------------------------------------------


def topic(*commits, partitions=2):
    found = state.empty("a", partitions)
    for number, segments in enumerate(commits):
        commit = Commit("c", "a", "t", 0, "r", "i", (Append(tuple(segments)),))
        found = state.apply(found, number, commit, 100)
    return found


def dropped(before, *actions):
    assert commit_draft.chunks_needed(before, actions) == []
    return [action.dropped for action in commit_draft.with_dropped_ledgers(before, actions)]


def test_every_ledger_that_loses_rows_is_named():
    before = topic([segment(1, 10), segment(2, 10, partition=1)], [segment(3, 10)])

    assert dropped(before, Overwrite((), 0, (99,))) == [(1, 2, 3)]
    assert dropped(before, Trim(((0, 10),)), Trim(((0, 11), (1, 1)))) == [(1,), (1, 2, 3)]
    assert dropped(before, Hole(0, 5, 15)) == [(1, 3)]
    assert dropped(before, Replace(0, 10, 20, (segment(4, 10),), 2)) == [(3,)]


def test_a_ledger_that_goes_on_in_use_is_not_named():
    before = topic([segment(1, 10), segment(2, 10, partition=1)])

    assert dropped(before, Overwrite((segment(2, 5, first=1),), 0)) == [(1,)]


def test_what_loses_nothing_stays_as_it_is():
    before = topic([segment(1, 10)])
    action = Append((segment(2, 1),))

    assert commit_draft.with_dropped_ledgers(before, (action,)) == (action,)


def test_an_overwrite_asks_the_intent_for_its_snapshot_and_an_intent_without_one_is_refused():
    open_ended = Overwrite((), commit_draft.SNAPSHOT_OF_INTENT)

    assert commit_draft.with_snapshots((open_ended, Overwrite((), 3)), 8) == (
        Overwrite((), 8),
        Overwrite((), 3),
    )
    with pytest.raises(ValueError, match="was not opened for overwriting this topic"):
        commit_draft.with_snapshots((open_ended,), None)


# -- sizes -----------------------------------------------------------------------------------------


def test_inline_segments_give_way_to_those_that_were_stored_in_their_order():
    actions = (
        Append((segment(1, 5), inline(b"a", b"bc"), segment(2, 5))),
        Overwrite((inline(b"d", partition=1),), 0),
        SealLive(1, 9, None),
    )
    moved = [segment(7, 1, 1), segment(7, 1, first=2, partition=1)]

    assert commit_draft.inline_bytes({"a": actions}) == 4
    assert commit_draft.with_stored_segments(actions, moved) == (
        Append((segment(1, 5), moved[0], segment(2, 5))),
        Overwrite((moved[1],), 0),
        SealLive(1, 9, None),
    )


def test_large_bodies_go_to_ledgers_and_the_largest_others_until_the_multi_fits():
    kib = 1024
    bodies = {"a": b"x" * 65 * kib, "b": b"x" * 64 * kib, "c": b"x" * 60 * kib, "d": b"x"}

    assert commit_draft.topics_to_spill(bodies, 0) == ["a"]
    assert commit_draft.topics_to_spill(bodies, 430 * kib) == ["a", "b"]
    assert commit_draft.topics_to_spill(bodies, 512 * kib) == ["a", "b", "c", "d"]


def test_too_many_topics_and_too_long_a_text_are_refused():
    drafts = {f"t{n}": (Append(()),) for n in range(501)}

    with pytest.raises(errors.CommitOverTooManyTopics, match=r"\[LEDGER_OPTION.* 501 topics"):
        CommitRequest(TXN, "i", drafts)
    with pytest.raises(errors.OptionInvalid, match="userMetadata has 16386 bytes"):
        CommitRequest(TXN, "i", {}, user_metadata="ä" * 8193)
    CommitRequest(TXN, "i", {}, user_metadata="ä" * 8192)
