"""One task's rows to its topics, with writers that note what they are given."""

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace

import pyarrow as pa
import pytest
from pyspark.sql.types import DoubleType, IntegerType, StringType, StructField, StructType

from spark_ledger import errors
from spark_ledger.spark.options.options import stream_write_options
from spark_ledger.spark.write.job import WriteJob, WrittenTopic
from spark_ledger.spark.write.topic_writers import Task, TopicWriters
from spark_ledger.topic.log.names import parse_topic
from spark_ledger.topic.log.policies import TopicPolicies
from spark_ledger.topic.log.topics import TopicInfo

MIB = 1 << 20
KINDS = {
    "value": StringType(),
    "topic": StringType(),
    "partition": IntegerType(),
    "price": DoubleType(),
    "__topic": StringType(),
}


@dataclass
class Noted:
    """A BlockingTaskWriter that holds all it is given until it is drained."""

    settings: object
    partitions: int
    values: list = field(default_factory=list)
    reasons: list = field(default_factory=list)
    held_bytes: int = 0
    drained: int = 0
    settled: int = 0
    aborted: bool = False

    def write(self, keys, values, *, event_times=None, headers=None, partitions=None):
        self.values += values.to_pylist()
        self.held_bytes += values.nbytes
        for row in headers.to_pylist() if headers is not None else ():
            told = {one["key"]: one["value"] for one in row}
            self.reasons.append({name: text and text.decode() for name, text in told.items()})

    def drain(self):
        self.drained += 1
        self.held_bytes = 0

    def drain_copies(self):
        self.settled += 1
        self.held_bytes = 0

    def start_finish(self):
        return lambda: tuple(self.values)

    def abort(self):
        self.aborted = True


class Stand:
    """TopicWriters of a job with these columns and options, over noted writers by topic."""

    def __init__(self, *columns, partitions=2, **options):
        self.written = {}
        self.closed = False
        self.opened = []
        self.partitions = partitions
        given = stream_write_options({"serviceUrl": "zk://x/y", **options})
        shape = StructType([StructField(name, KINDS[name]) for name in columns])
        self.job = WriteJob.of(given, shape)
        config = SimpleNamespace(entry_bytes_max=MIB)
        ledgers, cache = SimpleNamespace(config=config), SimpleNamespace(close=self.close_ledgers)
        client = SimpleNamespace(
            ledgers=ledgers, schemas=None, cache=cache, log=self.log, topics=self
        )
        cluster = SimpleNamespace(client=client, task_writer=self.task_writer, run=self.run)
        task = Task(SimpleNamespace(id="i"), 0, 0, {"queryId": "q"})
        self.writers = TopicWriters(cluster, self.job, task, self.find)

    async def close_ledgers(self, timeout_s):
        self.closed = True

    def find(self, names):
        self.opened += names
        infos = {
            name: TopicInfo(f"id-{name}", parse_topic(name), 1, TopicPolicies(5, 4, 3))
            for name in names
        }
        return {name: WrittenTopic(info, self.partitions) for name, info in infos.items()}

    def log(self, topic_id):
        """Topics whose names begin with `old` have commits."""

        async def fold(fresh):
            return SimpleNamespace(next=int(topic_id.startswith("id-old")), deleted=False)

        return SimpleNamespace(fold=fold)

    async def name_of(self, topic_id):
        return parse_topic(topic_id.removeprefix("id-"))

    def task_writer(self, info, intent, *, task_index, attempt, partitions, settings):
        return self.written.setdefault(info.name.short, Noted(settings, partitions))

    def run(self, coroutine):
        return asyncio.run(coroutine)

    def write(self, **columns):
        self.writers.write(self.job.plan.rows(pa.record_batch(columns)))

    def values(self):
        return {name: one.values for name, one in self.written.items()}


def test_each_row_goes_to_its_topic_which_is_found_once():
    stand = Stand("topic", "value")
    for _ in range(2):
        stand.write(topic=["a", "b", "a"], value=["1", "2", "3"])
    assert stand.values() == {"a": ["1", "3", "1", "3"], "b": ["2", "2"]}
    assert stand.opened == ["a", "b"]
    assert stand.writers.finish() == (("1", "3", "1", "3"), ("2", "2"))


def test_a_writer_has_the_partitions_of_today_and_the_quorums_asked_for():
    stand = Stand("value", topic="t", writeQuorum="2", routing="roundRobin", partitions=7)
    stand.write(value=["x"])
    (one,) = stand.written.values()
    assert one.partitions == 7
    policies = one.settings.policies
    assert (policies.ensemble_size, policies.write_quorum, policies.ack_quorum) == (5, 2, 2)
    assert one.settings.routing.value == "roundRobin"


def test_a_row_without_a_topic_is_an_error_unless_there_is_a_topic_for_such():
    rows = {"topic": pa.array(["a", None, "no good"]), "value": pa.array(["1", "2", "3"])}
    with pytest.raises(errors.NullTopic):
        Stand("topic", "value").write(**rows)
    stand = Stand("topic", "value", badRecordsTopic="bad")
    stand.write(**rows)
    assert stand.values() == {"a": ["1"], "bad": [b"2", b"3"]}
    none, named = stand.written["bad"].reasons
    assert none["reason"].startswith("[LEDGER_NULL_TOPIC_IN_DATA]") and none["topic"] is None
    assert named["reason"].startswith("[LEDGER_TOPIC.INVALID_NAME]") and named["topic"] == "no good"
    assert none["queryId"] == named["queryId"] == "q"


def test_a_row_cannot_name_the_topic_for_bad_records():
    stand = Stand("__topic", "price", valueFormat="json", schemaMode="none", badRecordsTopic="bad")
    names = pa.array(["bad", "persistent://public/default/bad", "t"])
    rows = pa.record_batch({"__topic": names, "price": pa.array([1.0, 2.0, 3.0])})
    stand.writers.write(stand.job.plan.rows(rows))
    assert [bytes(value) for value in stand.values()["t"]] == [b'{"price":3}']
    reasons = [one["reason"][:23] for one in stand.written["bad"].reasons]
    assert reasons == ["[LEDGER_OPTION.CONFLICT"] * 2


def test_rows_too_large_or_for_no_partition_are_set_aside_with_the_topic_they_were_for():
    stand = Stand("value", "partition", topic="t", badRecordsTopic="bad")
    big = "x" * 2 * MIB
    stand.write(value=["good", big, "far"], partition=pa.array([1, 0, 2], pa.int32()))
    assert stand.values()["t"] == ["good"]
    reasons = [(one["reason"][:27], one["topic"]) for one in stand.written["bad"].reasons]
    assert reasons == [("[LEDGER_WRITE.MESSAGE_TOO_B", "t"), ("[LEDGER_WRITE.PARTITION_INV", "t")]
    assert [len(value) for value in stand.values()["bad"]] == [64 << 10, 3]


def test_typed_rows_that_json_cannot_have_are_set_aside():
    stand = Stand("price", topic="t", valueFormat="json", schemaMode="none", badRecordsTopic="bad")
    stand.write(price=[1.5, float("nan"), 2.0])
    assert [bytes(value) for value in stand.values()["t"]] == [b'{"price":1.5}', b'{"price":2}']
    assert stand.values()["bad"] == [None]


def test_no_topic_is_found_for_a_batch_without_rows():
    stand = Stand("topic", "value")
    stand.write(topic=pa.array([], pa.string()), value=pa.array([], pa.string()))
    alone = Stand("value", topic="t")
    alone.write(value=pa.array([], pa.string()))
    assert stand.opened == alone.opened == []


def test_many_topics_together_hold_no_more_than_one_alone():
    stand = Stand("topic", "value", maxInFlightBytes="2m")
    for n in range(300):
        stand.write(topic=[f"t{n % 30}"], value=["x" * 50_000])
        assert sum(one.held_bytes for one in stand.written.values()) <= 3 * MIB // 2
    assert any(one.drained for one in stand.written.values())
    assert not any(one.settled for one in stand.written.values())
    assert all(one.settings.inflight_bytes_max == MIB // 2 for one in stand.written.values())


def test_copies_that_a_bookie_owes_to_many_topics_are_waited_for_when_they_take_too_much(
    monkeypatch,
):
    monkeypatch.setattr(Noted, "drain", lambda one: None)  # all that is acknowledged is owed
    stand = Stand("topic", "value", maxInFlightBytes="2m")
    for n in range(300):
        stand.write(topic=[f"t{n % 30}"], value=["x" * 50_000])
        assert sum(one.held_bytes for one in stand.written.values()) <= 3 * MIB // 2
    assert any(one.settled for one in stand.written.values())


def test_a_topic_and_that_of_its_bad_records_share_what_the_task_may_hold():
    stand = Stand("value", "partition", topic="t", badRecordsTopic="bad", maxInFlightBytes="1m")
    stand.write(value=["good", "far"], partition=pa.array([1, 2], pa.int32()))
    assert sum(one.settings.inflight_bytes_max for one in stand.written.values()) == MIB


def test_small_rows_for_many_topics_are_not_sent_before_the_end():
    stand = Stand("topic", "value")
    for n in range(300):
        stand.write(topic=[f"t{n}"], value=["x"])
    assert not any(one.drained for one in stand.written.values())


def test_of_rows_for_more_topics_than_one_commit_takes_no_topic_is_made():
    stand = Stand("topic", "value")
    with pytest.raises(errors.CommitOverTooManyTopics, match=r"501 topics or more.* takes 500"):
        stand.write(topic=[f"t{n}" for n in range(501)], value=["x"] * 501)
    assert stand.opened == []


def test_a_task_that_meets_too_many_topics_later_makes_no_more_and_names_those_that_are_empty():
    stand = Stand("topic", "value")
    stand.write(topic=[f"{'old' if n % 2 else 'new'}{n}" for n in range(500)], value=["x"] * 500)
    with pytest.raises(errors.CommitOverTooManyTopics, match="'one-more'") as refused:
        stand.write(topic=["new0", "one-more"], value=["x", "x"])
    assert len(stand.opened) == 500
    assert "250 of its topics have no row: 'new0', 'new2', " in refused.value.what
    assert refused.value.what.endswith("'new496', 'new498'")
    assert "spark-ledger topic delete NAME" in str(refused.value)


def test_an_abort_reaches_every_topic_and_closes_ledgers_for_the_worker_ends():
    stand = Stand("topic", "value")
    stand.write(topic=["a", "b"], value=["1", "2"])
    stand.writers.abort()
    assert all(one.aborted for one in stand.written.values())
    assert stand.closed


def test_what_is_kept_is_forgotten_after_its_time_and_when_there_is_too_much(monkeypatch):
    from spark_ledger.spark import worker

    now = [0.0]
    monkeypatch.setattr(worker.time, "monotonic", lambda: now[0])
    held = worker.TtlCache[str, int](10.0, entries_max=2)
    held.put("a", 1)
    now[0] = 9.0
    assert held.get("a") == 1
    assert (held.put("b", 2), held.put("c", 3)) == (2, 3)
    assert (held.get("a"), held.get("b"), held.get("c")) == (None, 2, 3)
    now[0] = 19.0
    assert held.get("c") is None
