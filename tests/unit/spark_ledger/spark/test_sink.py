"""The streaming writer as Spark makes it: for the tasks, for commit, and for abort."""

import pickle

import pytest
from pyspark.sql.types import StringType, StructField, StructType

from spark_ledger.errors import SchemaUnknownColumn, TopicTerminated, Unavailable
from spark_ledger.spark.options.options import stream_write_options
from spark_ledger.spark.worker import TtlCache
from spark_ledger.spark.write import sink
from spark_ledger.spark.write.sink import CHECKED_S, LedgerStreamWriter
from spark_ledger.spark.write.tasks import TaskProperties

VALUE = StructType([StructField("value", StringType())])


class Cluster:
    """Refuses what it is asked with `error`, if there is one; counts."""

    client = None
    is_disconnected = False

    def __init__(self, error=None):
        self.error = error
        self.asked = 0

    def run(self, coroutine):
        coroutine.close()
        self.asked += 1
        if self.error is not None:
            raise self.error


@pytest.fixture
def connected(monkeypatch):
    """Makes all who ask meet this cluster."""

    def make(error=None) -> Cluster:
        cluster = Cluster(error)
        monkeypatch.setattr(sink.blocking, "topics", lambda *_, **__: cluster)
        monkeypatch.setattr(sink, "_passed_checks", TtlCache(CHECKED_S))
        return cluster

    return make


def writer() -> LedgerStreamWriter:
    return LedgerStreamWriter(stream_write_options({"topic": "t"}), VALUE, False)


def test_a_writer_made_to_abort_asks_nobody(connected):
    cluster = connected(Unavailable("nobody answers"))
    writer().abort([None], 7)
    assert cluster.asked == 0


@pytest.mark.parametrize("error", [Unavailable("nobody answers"), TopicTerminated("no more rows")])
def test_what_the_cluster_has_against_a_batch_is_raised_by_its_tasks(connected, error):
    cluster = connected(error)
    made = writer()
    for _ in range(2):  # Spark sends it twice
        sent = pickle.loads(pickle.dumps(made))
        with pytest.raises(type(error), match=error.what):
            sent.write(iter(()))
    assert cluster.asked == 1


def test_a_process_that_found_nothing_wrong_does_not_ask_again_for_each_batch(connected):
    cluster = connected()
    for _ in range(3):
        assert pickle.loads(pickle.dumps(writer())).refusal is None
    assert cluster.asked == 1


@pytest.mark.parametrize("batch_id", [0, 1])
def test_who_cannot_connect_leaves_it_to_tasks_which_wait_unless_the_query_only_begins(
    monkeypatch, batch_id
):
    asked = []

    def unreachable(*_, **how):
        asked.append(how)
        raise Unavailable("nobody answers")

    class Waits(Exception):
        pass

    def waits(*_, **__):
        raise Waits

    spark = TaskProperties(0, 0, "query", batch_id, "run")
    monkeypatch.setattr(sink.blocking, "topics", unreachable)
    monkeypatch.setattr(sink, "_passed_checks", TtlCache(CHECKED_S))
    monkeypatch.setattr(sink.TaskProperties, "of", lambda _: spark)
    monkeypatch.setattr(sink, "query_intent", waits)
    made = writer()
    sent = [pickle.loads(pickle.dumps(made)) for _ in range(2)]
    assert asked == [{"fail_fast": True}]
    for one in sent:
        with pytest.raises(Unavailable if batch_id == 0 else Waits):
            one.write(iter(()))


def test_in_an_outage_a_writer_asks_nothing_and_does_so_for_the_next_batch(connected):
    cluster = connected()
    cluster.is_disconnected = True
    assert pickle.loads(pickle.dumps(writer())).refusal is None
    assert cluster.asked == 0
    cluster.is_disconnected = False
    pickle.dumps(writer())
    assert cluster.asked == 1


def test_what_needs_no_cluster_to_be_refused_is_refused_at_once(connected):
    cluster = connected()
    shape = StructType([*VALUE.fields, StructField("price", StringType())])
    with pytest.raises(SchemaUnknownColumn):
        LedgerStreamWriter(stream_write_options({"topic": "t"}), shape, False)
    assert cluster.asked == 0
