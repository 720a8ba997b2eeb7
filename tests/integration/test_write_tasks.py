"""What a Python worker that writes keeps from task to task, and when it looks again."""

import traceback
import uuid

import pyarrow as pa
import pytest
from pyspark.sql.types import StringType, StructField, StructType

from spark_ledger import errors
from spark_ledger.client.loop import background_loop
from spark_ledger.spark.options import stream_write_options
from spark_ledger.spark.topic_writers import Task
from spark_ledger.spark.write_job import WriteJob
from spark_ledger.spark.write_tasks import commit_rows, query_intent, write_rows
from spark_ledger.topic import blocking
from spark_ledger.topic.commit import CommitKind
from spark_ledger.topic.intents import STALE

VALUE = StructType([StructField("value", StringType())])
ROWS = pa.record_batch({"value": ["x" * 100] * 1000})


@pytest.fixture
def job(cluster):
    given = {"topic": f"w-{uuid.uuid4().hex}", "serviceUrl": cluster.service_url}
    return WriteJob.of(stream_write_options(given), VALUE)


def write(job, *, again: bool = False):
    """A task of the query's run."""
    intent = query_intent(job, "query", "run", again=again)
    return intent, write_rows(job, Task(intent, 0, int(again), {}), [ROWS], version=0)


def commit(job, run_id: str, version: int):
    """A micro-batch of that run."""
    intent = query_intent(job, "query", run_id)
    written = write_rows(job, Task(intent, 0, 0, {}), [ROWS], version=version)
    return commit_rows(job, intent, version, [written], last=False)


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
    assert intent.open
    assert (kept.record.generation, intent.record.generation) == (0, 1)
    assert sum(one.rows for result in written.results for one in result.segments) == ROWS.num_rows


def test_a_repeated_attempt_looks_for_its_intent_though_its_worker_keeps_one(job):
    kept = query_intent(job, "query", "run")
    condemn(job, kept)
    intent, _ = write(job, again=True)
    assert (intent.open, intent.record.generation) == (True, 1)


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
        commit_rows(job, intent, 7, [written], last=False)
    assert str(caught.value) == (
        f"[LEDGER_DATA_LOSS.TOPIC_DELETED] topic '{name}' (id {gone.id}) was deleted. Write again,"
        " or restart the query from the same checkpoint: the topic is made again then."
    )
    shown = "".join(traceback.format_exception(caught.value))
    assert "new checkpoint" not in shown, "what a reader does is not told beside it"
    commit(job, "run-2", 7)
    assert rows_of(job) == ROWS.num_rows


def test_a_task_that_fails_leaves_no_ledger_open(job):
    intent = query_intent(job, "query", "run")
    many = pa.record_batch({"value": ["x" * 1000] * 20_000})

    def rows():
        yield many
        raise ValueError("the query fails")

    with pytest.raises(ValueError, match="the query fails"):
        write_rows(job, Task(intent, 0, 0, {}), rows(), version=0)
    ledgers = blocking.topics(job.options.service_url).client.ledgers

    async def found():
        records = [(await ledgers.record(one)).record async for one in ledgers.list()]
        return [record.closed for record in records if record.intent == intent.id]

    closed = background_loop().run(found())
    assert closed
    assert all(closed)
