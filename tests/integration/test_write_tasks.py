"""What a Python worker that writes keeps from task to task, and when it looks again."""

import logging
import traceback
import uuid

import pyarrow as pa
import pytest

from spark_ledger import errors
from spark_ledger.process import background_loop
from spark_ledger.spark.options.options import stream_write_options
from spark_ledger.spark.write import tasks
from spark_ledger.spark.write.job import WriteJob
from spark_ledger.spark.write.tasks import commit_rows, query_intent, write_rows
from spark_ledger.spark.write.topic_writers import Task
from spark_ledger.topic import blocking
from spark_ledger.topic.commit import commit as topic_commit
from spark_ledger.topic.commit.commit import CommitKind
from spark_ledger.topic.commit.replay import OnReplay
from spark_ledger.topic.log.intents import STALE
from tests.integration.topic_rows import VALUE
from tests.kit.processes import eventually

ROWS = pa.record_batch({"value": ["x" * 100] * 1000})
OTHERS = pa.record_batch({"value": ["y" * 100] * 500})
TELLS = (tasks.__name__, topic_commit.__name__)


@pytest.fixture
def job(cluster):
    given = {"topic": f"w-{uuid.uuid4().hex}", "serviceUrl": cluster.service_url}
    return WriteJob.of(stream_write_options(given), VALUE)


def write(job, *, again: bool = False):
    """A task of the query's run."""
    intent = query_intent(job, "query", "run", is_retry=again)
    return intent, write_rows(job, Task(intent, 0, int(again), {}), [ROWS], version=0)


def commit(job, run_id: str, version: int, rows=ROWS, on_replay: OnReplay | None = None):
    """A micro-batch of that run."""
    intent = query_intent(job, "query", run_id)
    task = Task(intent, 0, 0, {})
    written = write_rows(job, task, [rows], version=version, on_replay=on_replay)
    return commit_rows(job, intent, version, [written], ends_intent=False)


def rows_of(job) -> int:
    client = blocking.topics(job.options.service_url).client
    return sum(state_of(client, job.options.topic).end_offsets().values())


def state_of(client, name: str):
    async def fold():
        info = await client.topics.open(name)
        return await client.log(info.id).fold(fresh=True)

    return background_loop().run(fold())


def condemn(job, intent):
    topics = blocking.topics(job.options.service_url)
    topics.run(topics.client.intents.condemn(intent.id, STALE))


def test_a_task_that_failed_under_a_condemned_intent_is_followed_by_one_with_the_next(job):
    kept = query_intent(job, "query", "run")
    condemn(job, kept)
    with pytest.raises(errors.LedgerFenced):
        write(job)
    intent, written = write(job)
    assert intent.is_open
    assert (kept.record.generation, intent.record.generation) == (0, 1)
    assert sum(one.rows for result in written.results for one in result.segments) == ROWS.num_rows


def test_a_repeated_attempt_looks_for_its_intent_though_its_worker_keeps_one(job):
    kept = query_intent(job, "query", "run")
    condemn(job, kept)
    intent, _ = write(job, again=True)
    assert (intent.is_open, intent.record.generation) == (True, 1)


def test_a_batch_repeated_after_its_topic_was_made_anew_is_in_the_new_one(job):
    commit(job, "run", 6)
    assert commit(job, "run-2", 6).kind is CommitKind.ALREADY
    topics = blocking.topics(job.options.service_url).client.topics
    background_loop().run(topics.delete(job.options.topic))
    again = commit(job, "run-3", 6)
    assert (again.kind, rows_of(job)) == (CommitKind.COMMITTED, ROWS.num_rows)
    assert commit(job, "run-4", 6).kind is CommitKind.ALREADY
    commit(job, "run-4", 7)
    assert rows_of(job) == 2 * ROWS.num_rows


def test_a_topic_deleted_under_a_query_is_named_and_a_restart_goes_on_in_one_made_again(job):
    name = job.options.topic
    commit(job, "run", 6)
    topics = blocking.topics(job.options.service_url).client.topics
    intent, written = write(job)
    gone = background_loop().run(topics.delete(name))
    with pytest.raises(errors.TopicDeleted) as caught:
        commit_rows(job, intent, 7, [written], ends_intent=False)
    assert str(caught.value) == (
        f"[LEDGER_DATA_LOSS.TOPIC_DELETED] topic '{name}' (id {gone.id}) was deleted. Write again,"
        " or restart the query from the same checkpoint: this makes the topic again."
    )
    shown = "".join(traceback.format_exception(caught.value))
    assert "new checkpoint" not in shown, "what a reader does is not told beside it"
    commit(job, "run-2", 7)
    assert rows_of(job) == ROWS.num_rows


@pytest.mark.parametrize("on_replay", [OnReplay.FAIL, OnReplay.SKIP, OnReplay.REPLACE])
def test_a_batch_below_the_recorded_version_is_refused_before_a_row_is_taken(job, on_replay):
    commit(job, "run", 7)
    intent = query_intent(job, "query", "run-2")

    def rows():
        raise AssertionError("a row was taken")
        yield ROWS

    task = Task(intent, 0, 0, {})
    with pytest.raises(errors.CheckpointBehind):
        write_rows(job, task, rows(), version=6, on_replay=on_replay)


@pytest.mark.parametrize(
    ("version", "rows", "on_replay", "said"),
    [
        (6, OTHERS, OnReplay.IGNORE, "500 rows were not written: {6}, or a later one, is {in}"),
        (7, ROWS, OnReplay.IGNORE, "1000 rows were not written: {7}, or a later one, is {in}"),
        (7, OTHERS, OnReplay.SKIP, "500 rows were not written: {7} is {in} with other rows"),
        (7, ROWS, OnReplay.SKIP, "1000 rows were not written again: {7} is {in}"),
        (7, ROWS, OnReplay.FAIL, "1000 rows were not written again: {7} is {in}"),
        (
            *(6, OTHERS, OnReplay.APPEND),
            "batch 6 of 'query' is {in} again, with 500 rows: the record goes back to it from 7",
        ),
    ],
    ids=["earlier job", "job again", "other rows", "replay, skip", "replay", "appended"],
)
def test_what_becomes_of_a_batch_that_is_committed_already_is_told_by_a_warning(
    job, caplog, version, rows, on_replay, said
):
    commit(job, "run", 7, ROWS, OnReplay.FAIL)
    target = query_intent(job, "query", "run-2").target
    with caplog.at_level(logging.WARNING, "spark_ledger"):
        commit(job, "run-2", version, rows, on_replay)
    words = {"in": f"committed to '{target}'"}
    words |= {str(number): f"version {number} of 'query'" for number in (6, 7)}
    for name, text in words.items():
        said = said.replace(f"{{{name}}}", text)
    ours = [one for one in caplog.records if one.name in TELLS]  # clients of other tests go on
    assert [one.getMessage() for one in ours] == [said]
    added = rows.num_rows if on_replay is OnReplay.APPEND else 0
    assert rows_of(job) == ROWS.num_rows + added


def test_a_task_that_fails_leaves_no_ledger_open(job):
    intent = query_intent(job, "query", "run")
    many = pa.record_batch({"value": ["x" * 1000] * 20_000})
    ledgers = blocking.topics(job.options.service_url).client.ledgers

    async def found():
        records = [(await ledgers.record(one)).record async for one in ledgers.list()]
        return [record.closed for record in records if record.intent == intent.id]

    def rows():
        yield many
        assert eventually(lambda: background_loop().run(found()) != [])
        raise ValueError("the query fails")

    with pytest.raises(ValueError, match="the query fails"):
        write_rows(job, Task(intent, 0, 0, {}), rows(), version=0)
    assert set(background_loop().run(found())) == {True}
