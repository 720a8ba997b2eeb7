import pytest

from spark_ledger import errors
from spark_ledger.topic.commit import draft as commit_draft
from spark_ledger.topic.commit.draft import CommitKind, TxnKey
from spark_ledger.topic.commit.replay import OnReplay, QueryBatch, TaskWork, task_work
from spark_ledger.topic.log import records
from spark_ledger.topic.log.actions import Append
from spark_ledger.topic.log.records import Content, TopicRows, TxnRecord
from tests.unit.spark_ledger.topic.stage import segment

TXN = TxnKey("q", "t@1", 7, "run-2")
SAME, OTHER = Content(11, "1-aa"), Content(11, "1-bb")


def recorded(version, content=SAME, run_id="run-1"):
    return TxnRecord(version, run_id, "c", "a", 3, {0: 5}, {"b": TopicRows(4, {1: 6})}, content)


def recorded_outcome(record, content, on_replay=OnReplay.FAIL, w0=9):
    return commit_draft.recorded_outcome(record, "mine", TXN, w0, QueryBatch(content, on_replay))


@pytest.mark.parametrize("on_replay", OnReplay)
def test_a_batch_with_the_rows_that_were_committed_is_done_already(on_replay):
    outcome = recorded_outcome(recorded(7), SAME, on_replay)

    assert outcome.kind is CommitKind.ALREADY
    assert outcome.topics == {"a": TopicRows(3, {0: 5}), "b": TopicRows(4, {1: 6})}


@pytest.mark.parametrize("content", [OTHER, Content(10, "1-aa"), Content(12, "2-aa")])
def test_a_batch_with_other_rows_under_a_number_that_is_used_up_is_refused(content):
    with pytest.raises(
        errors.ReplayDiffers, match=r"restored or lost files, the query was"
    ) as told:
        recorded_outcome(recorded(7), content)

    assert "committed with 11 rows (1-aa)" in str(told.value)
    assert "onReplay=skip" in str(told.value) and "onReplay=append" in str(told.value)


def test_such_a_batch_is_skipped_appended_or_replaced_where_that_is_wanted():
    assert recorded_outcome(recorded(7), OTHER, OnReplay.SKIP).kind is CommitKind.SKIPPED
    assert recorded_outcome(recorded(7), OTHER, OnReplay.APPEND) is None
    assert recorded_outcome(recorded(7), OTHER, OnReplay.REPLACE) is None


@pytest.mark.parametrize("on_replay", [OnReplay.FAIL, OnReplay.SKIP, OnReplay.REPLACE])
def test_a_batch_below_the_last_committed_one_is_refused_whatever_its_rows(on_replay):
    with pytest.raises(errors.CheckpointBehind, match=r"batch 7 of query q is behind batch 8"):
        recorded_outcome(recorded(8), SAME, on_replay)
    with pytest.raises(errors.CheckpointBehind):
        task_work(recorded(8), "q", 7, on_replay)


def test_a_batch_below_the_last_committed_one_is_appended_where_that_is_wanted():
    assert recorded_outcome(recorded(8), SAME, OnReplay.APPEND) is None
    assert task_work(recorded(8), "q", 7, OnReplay.APPEND) is TaskWork.WRITE


def test_a_job_outside_queries_changes_nothing_at_or_below_the_recorded_version():
    told = [
        recorded_outcome(recorded(v), c, OnReplay.IGNORE)
        for v, c in ((7, SAME), (7, OTHER), (8, OTHER))
    ]

    assert [one.kind.value for one in told] == ["already", "skipped", "already"]
    for version in (7, 8):
        assert task_work(recorded(version), "q", 7, OnReplay.IGNORE) is TaskWork.COMPARE


@pytest.mark.parametrize(
    ("version", "on_replay", "work"),
    [
        (6, OnReplay.FAIL, TaskWork.WRITE),
        (7, OnReplay.FAIL, TaskWork.COMPARE),
        (7, OnReplay.SKIP, TaskWork.COMPARE),
        (7, OnReplay.APPEND, TaskWork.WRITE),
        (7, OnReplay.REPLACE, TaskWork.WRITE),
    ],
)
def test_a_task_writes_unless_its_rows_are_only_to_be_compared(version, on_replay, work):
    assert task_work(recorded(version), "q", 7, on_replay) is work


def test_without_a_fingerprint_or_with_one_of_another_kind_rows_alone_are_compared():
    old = recorded(7, content=None)

    assert recorded_outcome(old, OTHER).kind is CommitKind.ALREADY
    assert recorded_outcome(recorded(7, Content(11, "0-aa")), OTHER).kind is CommitKind.ALREADY
    with pytest.raises(errors.ReplayDiffers):
        recorded_outcome(old, Content(10, "1-aa"))


def test_a_large_record_of_an_older_version_has_nothing_to_compare_with():
    old = TxnRecord(7, "run-1", "c", "a", 3, {}, {"b": TopicRows(4)})

    assert recorded_outcome(old, Content(10, "1-aa")).kind is CommitKind.ALREADY


def test_a_version_that_another_run_recorded_since_this_one_began_is_fenced_first():
    with pytest.raises(errors.LedgerFenced):
        recorded_outcome(recorded(7), OTHER, OnReplay.APPEND, w0=6)


def test_what_is_committed_again_takes_the_record_back_to_its_number():
    drafts = {"a": (Append((segment(1, 11),)),)}

    made = commit_draft.txn_record(TXN, "c2", {"a": 10}, drafts, QueryBatch(OTHER))

    assert (made.version, made.run_id, made.content) == (7, "run-2", OTHER)
    assert records.decode_txn(records.encode_txn(made)) == made


def test_tasks_that_compared_and_wrote_nothing_are_not_committed():
    drafts = {"a": (Append((segment(1, 4),)),)}

    commit_draft.check_all_rows_written(QueryBatch(Content(4, "1-aa")), drafts)
    commit_draft.check_all_rows_written(None, drafts)
    with pytest.raises(errors.LedgerFenced, match=r"counted 11 rows and wrote 4"):
        commit_draft.check_all_rows_written(QueryBatch(SAME), drafts)


def test_a_record_that_was_written_without_content_is_read():
    value = records.encode_txn(recorded(7, content=None))

    assert b"content" not in value
    assert records.decode_txn(value) == recorded(7, content=None)
