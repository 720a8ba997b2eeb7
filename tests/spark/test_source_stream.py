"""Streaming reads with every option of the source, through a real cluster."""

import json

import pytest

from spark_ledger.topic.log.actions import Trim
from tests.spark.by_hand import Cluster, Owner
from tests.spark.topics import SparkTopics, nobody_listens, wait_until

IDLE_PROGRESS = "spark.sql.streaming.noDataProgressEventInterval"
"""In milliseconds. Spark keeps the last 100 progresses of a query."""


@pytest.fixture
def by_hand(cluster) -> Cluster:
    return Cluster(cluster.service_url)


def stream(topics, **options):
    reader = topics.spark.readStream.format("ledger").option("serviceUrl", topics.service_url)
    return reader.options(**options).load().select("key", "value")


def sizes(query) -> list[int]:
    return [one["numInputRows"] for one in query.recentProgress if one["numInputRows"]]


def reached(query, topic) -> tuple[int, int]:
    """How far the query of a topic of one partition has read, and how far it could, as it says."""
    said = json.loads(query.lastProgress.json)["sources"][0]
    return said["endOffset"][topic]["0"], said["latestOffset"][topic]["0"]


def failure_of(query) -> str:
    with pytest.raises(Exception) as caught:
        query.awaitTermination(120)
    return str(caught.value)


def test_a_pattern_finds_topics_made_later_and_reads_them_from_their_beginning(
    topics, topic, keyed, tmp_path
):
    topics.write(keyed(5), f"{topic}-a")
    rows = stream(topics, subscribePattern=f"{topic}-[ab]", startingOffsets="latest")
    topics.copy(rows, f"{topic}-copy", tmp_path / "checkpoint")
    topics.write(keyed(5, start=5), f"{topic}-a")
    topics.write(keyed(5, start=10), f"{topic}-b")
    topics.copy(rows, f"{topic}-copy", tmp_path / "checkpoint")
    assert topics.numbers(f"{topic}-copy") == list(range(5, 15))


def test_a_running_query_reads_topics_and_partitions_that_come(
    topics, topic, keyed, tmp_path, by_hand
):
    topics.write(keyed(5), f"{topic}-a")
    rows = stream(topics, subscribePattern=f"{topic}-[ab]", startingOffsets="earliest")
    copy = f"{topic}-copy"
    query = topics.start_copy(rows, copy, tmp_path / "checkpoint", once=False)
    try:
        wait_until(lambda: query.lastProgress is not None)
        by_hand.grow(f"{topic}-a", 3)
        topics.write(keyed(50, keys=50, start=5), f"{topic}-a")
        topics.write(keyed(5, start=55), f"{topic}-b")
        wait_until(lambda: topics.numbers(copy) == list(range(60)))
    finally:
        query.stop()


def test_assigned_partitions_are_followed_and_no_others(topics, topic, keyed, tmp_path):
    topics.write(keyed(60, keys=50), topic, partitions=3)
    rows = stream(topics, assign=json.dumps({topic: [1]}), startingOffsets="earliest")
    topics.copy(rows, f"{topic}-copy", tmp_path / "checkpoint")
    one = topics.read(topic, "value STRING, partition INT").where("partition = 1").collect()
    assert topics.numbers(f"{topic}-copy") == sorted(int(row.value) for row in one) != []


@pytest.mark.spark42
def test_limits_on_rows_and_bytes_hold_together(topics, topic, keyed, tmp_path):
    rows = keyed(100, tasks=1).selectExpr("key", "lpad(value, 1000, '0') AS value")
    topics.write(rows, topic, compression="none")  # limits are of stored bytes
    limited = stream(
        topics,
        subscribe=topic,
        startingOffsets="earliest",
        maxOffsetsPerTrigger=40,
        maxBytesPerTrigger="25k",
    )
    query = topics.copy(limited, f"{topic}-copy", tmp_path / "checkpoint")
    taken = sizes(query)
    assert sum(taken) == 100
    assert max(taken) <= 25
    assert len(taken) >= 4
    assert topics.numbers(f"{topic}-copy") == list(range(100))


@pytest.mark.spark42
def test_fewer_rows_than_the_least_wait_and_come_when_the_delay_is_over(
    spark, topics, topic, keyed, tmp_path
):
    topics.write(keyed(5, tasks=1), topic)
    least = {"subscribe": topic, "startingOffsets": "earliest", "minOffsetsPerTrigger": 10}
    spark.conf.set(IDLE_PROGRESS, 1000)
    started = []
    try:
        for delay in ("1h", "3s"):
            rows = stream(topics, **least, maxTriggerDelay=delay).writeStream.format("noop")
            started.append(rows.option("checkpointLocation", str(tmp_path / delay)).start())
        patient, hasty = started
        wait_until(lambda: sizes(patient) == sizes(hasty) == [5])
        topics.write(keyed(4, tasks=1, start=5), topic)
        wait_until(lambda: sizes(hasty) == [5, 4])
        wait_until(lambda: reached(patient, topic) == (5, 9))
        assert sizes(patient) == [5]
        topics.write(keyed(6, tasks=1, start=9), topic)
        wait_until(lambda: sizes(patient) == [5, 10])
    finally:
        spark.conf.unset(IDLE_PROGRESS)
        for query in started:
            query.stop()


@pytest.mark.spark42
def test_a_subscription_follows_its_query_to_the_end_and_belongs_to_it_alone(
    topics, topic, keyed, tmp_path, by_hand
):
    topics.write(keyed(20, tasks=1), topic)
    options = {"subscribe": topic, "subscription": "mine", "startingOffsets": "earliest"}
    copy, checkpoint = f"{topic}-copy", tmp_path / "checkpoint"
    topics.copy(stream(topics, **options, maxOffsetsPerTrigger=15), copy, checkpoint)
    topic_id = by_hand.info(topic).id
    lag = lambda: by_hand.run(by_hand.client.subscriptions.lag(topic_id, "mine", 0))  # noqa: E731
    assert (lag()[0].position, lag()[0].rows) == (20, 0)
    topics.write(keyed(5, tasks=1, start=20), topic)
    assert lag()[0].rows == 5

    query = topics.start_copy(stream(topics, **options), copy, checkpoint, once=False)
    try:
        wait_until(lambda: topics.numbers(copy) == list(range(25)))
        wait_until(lambda: lag()[0].rows == 0)
        other = topics.start_copy(stream(topics, **options), f"{topic}-2", tmp_path / "other")
        assert "[LEDGER_SUBSCRIPTION.BUSY]" in failure_of(other)
    finally:
        query.stop()
    used = lambda: by_hand.run(by_hand.client.subscriptions.list(topic_id))[0].live  # noqa: E731
    wait_until(lambda: not used())
    topics.write(keyed(5, tasks=1, start=25), topic)
    topics.copy(stream(topics, **options), f"{topic}-2", tmp_path / "another")
    assert topics.numbers(f"{topic}-2") == list(range(30))
    topics.copy(stream(topics, **options), copy, checkpoint)
    assert topics.numbers(copy) == list(range(30))
    assert lag()[0].rows == 0


def test_a_subscription_twice_in_one_query_is_refused(topics, topic, keyed, tmp_path):
    topics.write(keyed(20, tasks=1), topic)
    options = {"subscribe": topic, "subscription": "mine", "startingOffsets": "earliest"}
    both = stream(topics, **options).union(stream(topics, **options))
    said = failure_of(topics.start_copy(both, f"{topic}-copy", tmp_path / "checkpoint"))
    assert "[LEDGER_SUBSCRIPTION.BUSY]" in said
    assert "a query that reads a topic twice needs two" in said


def test_one_query_reads_one_cluster_and_writes_another_and_of_several_hosts_one_may_be_down(
    topics, topic, keyed, tmp_path, fresh_cluster
):
    here = topics.service_url.replace("zk://", f"zk://127.0.0.1:{nobody_listens()},")
    there = SparkTopics(topics.spark, fresh_cluster(bookies=3).service_url)
    topics.write(keyed(20), topic)
    rows = SparkTopics(topics.spark, here).stream(topic, startingOffsets="earliest")
    there.copy(rows.select("key", "value"), topic, tmp_path / "checkpoint")
    there.write(keyed(5, start=20), topic)
    assert there.numbers(topic) == list(range(25))
    assert topics.numbers(topic) == list(range(20))
    both = topics.read(topic, "value STRING").union(there.read(topic, "value STRING"))
    assert sorted(int(row.value) for row in both.collect()) == sorted([*range(20), *range(25)])


@pytest.mark.spark42
def test_a_progress_says_how_far_behind_the_query_is(topics, topic, keyed, tmp_path):
    topics.write(keyed(30, tasks=1), topic)
    rows = stream(topics, subscribe=topic, startingOffsets="earliest", maxOffsetsPerTrigger=10)
    query = topics.copy(rows, f"{topic}-copy", tmp_path / "checkpoint")
    said = [json.loads(one.json)["sources"][0]["latestOffset"] for one in query.recentProgress]
    assert [one["_rowsBehind"] for one in said][:3] == [30, 20, 10]
    assert said[0]["_bytesBehind"] > 0
    assert said[0]["_metrics"]["maxOffsetsBehindLatest"] == "30"


def test_rows_trimmed_before_they_were_read_are_told_with_their_number_or_left_out(
    topics, topic, keyed, tmp_path, by_hand
):
    topics.write(keyed(10, tasks=1), topic)
    rows = stream(topics, subscribe=topic, startingOffsets="earliest")
    topics.copy(rows, f"{topic}-copy", tmp_path / "checkpoint")
    topics.write(keyed(10, tasks=1, start=10), topic)
    by_hand.commit(topic, Trim(((0, 14),)))
    said = failure_of(topics.start_copy(rows, f"{topic}-copy", tmp_path / "checkpoint"))
    assert "[LEDGER_DATA_LOSS.TRIMMED] 4 rows to be read were removed" in said
    lossy = stream(topics, subscribe=topic, startingOffsets="earliest", failOnDataLoss="false")
    topics.copy(lossy, f"{topic}-copy", tmp_path / "checkpoint")
    assert topics.numbers(f"{topic}-copy") == [*range(10), *range(14, 20)]


def test_a_partition_that_a_checkpoint_names_and_nobody_reads_any_more_is_told(
    topics, topic, keyed, tmp_path
):
    topics.write(keyed(20, keys=20), topic, partitions=2)
    both = stream(topics, subscribe=topic, startingOffsets="earliest")
    topics.copy(both, f"{topic}-copy", tmp_path / "checkpoint")
    one = stream(topics, assign=json.dumps({topic: [0]}), startingOffsets="earliest")
    said = failure_of(topics.start_copy(one, f"{topic}-copy", tmp_path / "checkpoint"))
    assert "[LEDGER_DATA_LOSS.PARTITION_REMOVED]" in said


def test_typed_rows_are_streamed_by_their_columns(spark, topics, topic, tmp_path):
    rows = spark.sql("SELECT id, concat('n', id) AS name FROM range(0, 10, 1, 1)")
    topics.write(rows, topic, valueFormat="arrow")
    reader = spark.readStream.format("ledger").option("serviceUrl", topics.service_url)
    read = reader.options(valueFormat="arrow", startingOffsets="earliest").load(topic)
    assert read.columns[:2] == ["id", "name"]
    named = read.selectExpr("name AS key", "cast(id AS string) AS value")
    topics.copy(named, f"{topic}-copy", tmp_path / "checkpoint")
    assert topics.numbers(f"{topic}-copy") == list(range(10))


def test_a_query_follows_a_live_segment_through_its_seal_without_a_row_lost_or_doubled(
    topics, topic, keyed, tmp_path, by_hand
):
    topics.write(keyed(10, tasks=1), topic)
    owner = Owner(by_hand, topic, 10)
    owner.append(5)
    copy = f"{topic}-copy"
    by_hand.run(by_hand.client.topics.create(copy, 1))
    rows = stream(topics, subscribe=topic, startingOffsets="earliest")
    query = topics.start_copy(rows, copy, tmp_path / "checkpoint", once=False)
    try:
        wait_until(lambda: topics.numbers(copy) == list(range(15)))
        owner.append(7)
        owner.append(3)
        wait_until(lambda: topics.numbers(copy) == list(range(25)))
        owner.seal()
        topics.write(keyed(5, tasks=1, start=25), topic)
        wait_until(lambda: topics.numbers(copy) == list(range(30)))
        assert query.exception() is None
    finally:
        query.stop()
    assert topics.numbers(topic) == list(range(30))


def test_a_batch_reads_what_is_confirmed_of_a_live_segment(topics, topic, keyed, by_hand):
    topics.write(keyed(10, tasks=1), topic)
    owner = Owner(by_hand, topic, 10)
    owner.append(5)
    owner.append(7)
    wait_until(lambda: topics.numbers(topic) == list(range(22)))
    at = json.dumps({topic: {"0": 13}})
    assert topics.numbers(topic, startingOffsets=at, minPartitions=3) == list(range(13, 22))
