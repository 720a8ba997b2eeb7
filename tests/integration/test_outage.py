"""Tasks, commits and polls while ZooKeeper is away for longer than one answer may take."""

import threading
import uuid
from collections.abc import Iterator
from functools import partial

import pyarrow as pa
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import StringType, StructField, StructType

from spark_ledger import errors
from spark_ledger.config import client_config
from spark_ledger.local.cluster import ROOT
from spark_ledger.spark.options.options import (
    batch_read_options,
    stream_read_options,
    stream_write_options,
)
from spark_ledger.spark.read.source import LedgerBatchReader, LedgerStreamReader
from spark_ledger.spark.rows.columns import DEFAULT_SCHEMA
from spark_ledger.spark.write.job import WriteJob
from spark_ledger.spark.write.tasks import commit_rows, query_intent, write_rows
from spark_ledger.spark.write.topic_writers import Task
from spark_ledger.topic import blocking
from spark_ledger.topic.commit.commit import CommitKind
from tests.kit.processes import eventually
from tests.spark.exactly_once.zookeeper_proxy import ZooKeeperProxy, is_commit

ANSWER_S = 0.2
AWAY_S = 1.0
IN_FLIGHT = 4 << 20
BATCHES = 150
VALUE = StructType([StructField("value", StringType())])
ROWS = pa.record_batch({"value": ["x" * 100] * 1000})


@pytest.fixture
def zookeeper(cluster, monkeypatch) -> Iterator[ZooKeeperProxy]:
    """A way to it that can be cut, for clients that wait ANSWER_S for an answer."""
    impatient = partial(client_config, metadata_timeout_s=ANSWER_S)
    monkeypatch.setattr(blocking, "client_config", impatient)
    with ZooKeeperProxy(int(cluster.zookeeper.address.rpartition(":")[2])) as proxy:
        yield proxy


@pytest.fixture
def topic() -> str:
    return f"away-{uuid.uuid4().hex}"


def given(zookeeper, topic, **options) -> dict[str, str]:
    return {"topic": topic, "serviceUrl": f"zk://{zookeeper.address}{ROOT}", **options}


def away(zookeeper, before_its_end=lambda: None) -> None:
    """It is, from now on, for AWAY_S."""
    zookeeper.cut()
    threading.Timer(AWAY_S, lambda: (before_its_end(), zookeeper.heal())).start()


def job_of(options) -> WriteJob:
    return WriteJob.of(stream_write_options(options), VALUE)


def append(job, version: int, batches=(ROWS,)):
    """A micro-batch of one task."""
    intent = query_intent(job, "query", "run")
    written = write_rows(job, Task(intent, 0, 0, {}), batches, version=version)
    return commit_rows(job, intent, version, [written], ends_intent=False)


def read(options) -> int:
    reader = LedgerBatchReader(batch_read_options(options), DEFAULT_SCHEMA)
    return sum(rows.num_rows for part in reader.partitions() for rows in reader.read(part))


def test_a_task_that_needs_a_new_ledger_takes_few_rows_meanwhile_and_they_are_committed_once(
    zookeeper, topic
):
    taken, meanwhile = 0, []

    def rows():
        nonlocal taken
        away(zookeeper, lambda: meanwhile.append(taken))
        for _ in range(BATCHES):
            taken += ROWS.nbytes
            yield ROWS

    options = given(zookeeper, topic)
    stored = {"maxInFlightBytes": f"{IN_FLIGHT >> 20}m", "compression": "none"}
    job = job_of({**options, **stored})
    append(job, 0, [ROWS.slice(0, 10)])  # which the commit itself holds: there is no ledger yet
    assert append(job, 1, rows()).kind is CommitKind.COMMITTED
    assert ROWS.nbytes < meanwhile[0] <= IN_FLIGHT < BATCHES * ROWS.nbytes
    assert read(options) == 10 + BATCHES * ROWS.num_rows


def test_a_task_waits_before_its_end_so_that_its_commit_need_not(zookeeper, topic):
    options, job = given(zookeeper, topic), job_of(given(zookeeper, topic))
    append(job, 0)  # what a task asks for is kept for a while
    cluster = blocking.topics(job.options.service_url, job.options.outage_timeout_s)

    def rows():
        yield ROWS.slice(0, 10)
        away(zookeeper)
        assert eventually(lambda: cluster.is_disconnected)

    intent = query_intent(job, "query", "run")
    written = write_rows(job, Task(intent, 0, 0, {}), rows(), version=1)
    assert not cluster.is_disconnected
    commit_rows(job, intent, 1, [written], ends_intent=False)
    assert read(options) == ROWS.num_rows + 10


def test_a_commit_whose_answer_is_lost_is_found_when_zookeeper_is_back(zookeeper, topic):
    options, job = given(zookeeper, topic), job_of(given(zookeeper, topic))
    append(job, 0)
    cluster = blocking.topics(job.options.service_url, job.options.outage_timeout_s)
    topic_id = cluster.run(cluster.client.topics.open(topic)).id

    with zookeeper.trap(is_commit(topic_id), hold="answer") as trap:
        threading.Thread(target=lambda: (trap.wait(), away(zookeeper))).start()
        assert append(job, 1).kind is CommitKind.COMMITTED
        assert trap.caught
    assert append(job, 1).kind is CommitKind.ALREADY
    assert read(options) == 2 * ROWS.num_rows


def test_tasks_that_read_wait_and_then_read_every_row(zookeeper, topic):
    options = given(zookeeper, topic)
    append(job_of(options), 0, [ROWS] * 50)
    reader = LedgerBatchReader(batch_read_options(options), DEFAULT_SCHEMA)
    parts = reader.partitions()
    away(zookeeper)
    assert sum(rows.num_rows for one in parts for rows in reader.read(one)) == 50 * ROWS.num_rows


@pytest.fixture
def soon_old(monkeypatch) -> None:
    """What a source knows is too old after moments."""
    monkeypatch.setattr("spark_ledger.topic.read.follower.REREAD_S", ANSWER_S)
    monkeypatch.setattr("spark_ledger.topic.read.follower.UNCONFIRMED_REREADS", 2)


@pytest.mark.usefixtures("soon_old")
def test_a_poll_waits_rather_than_to_go_by_an_old_state_and_gives_what_came_meanwhile(
    cluster, zookeeper, topic
):
    options = given(zookeeper, topic, startingOffsets="earliest")
    append(job_of(given(zookeeper, topic)), 0)
    source = LedgerStreamReader(stream_read_options(options), DEFAULT_SCHEMA)
    first = source.latestOffset(source.initialOffset(), ReadAllAvailable())

    away(zookeeper)
    others = {**given(zookeeper, topic), "serviceUrl": cluster.service_url}
    append(job_of(others), 1)
    while source.latestOffset(first, ReadAllAvailable()) == first:
        pass  # what is known is not yet too old, then ZooKeeper is back: never below, nor old
    assert source.latestOffset(first, ReadAllAvailable())[topic]["0"] == 2 * ROWS.num_rows
    source.stop()


@pytest.mark.usefixtures("soon_old")
def test_a_poll_in_an_outage_of_more_than_the_option_says_is_an_error_that_names_it(
    zookeeper, topic
):
    append(job_of(given(zookeeper, topic)), 0)
    options = given(zookeeper, topic, startingOffsets="earliest", outageTimeout="3s")
    source = LedgerStreamReader(stream_read_options(options), DEFAULT_SCHEMA)
    start = source.latestOffset(source.initialOffset(), ReadAllAvailable())
    zookeeper.cut()
    with pytest.raises(errors.Unavailable, match=r"option outageTimeout is 3 s"):
        while source.latestOffset(start, ReadAllAvailable()) == start:
            pass
    zookeeper.heal()
    source.stop()
