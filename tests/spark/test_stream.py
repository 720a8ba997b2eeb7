"""Streaming reads and writes through a real cluster: limits, checkpoints, exactly once."""

import json
import time

import pytest

from spark_ledger.topic import blocking
from tests.spark.topics import (
    files_of_numbers,
    forget_the_newest,
    stream_of_files,
    wait_until,
)


def test_available_now_reads_everything_there_is_and_ends(topics, topic, keyed, tmp_path):
    topics.write(keyed(1_000), topic, partitions=3)
    rows = topics.stream(topic, startingOffsets="earliest").select("key", "value")
    query = topics.copy(rows, f"{topic}-copy", tmp_path / "checkpoint", partitions=2)
    assert query.exception() is None
    assert topics.numbers(f"{topic}-copy") == list(range(1_000))


@pytest.mark.spark42
def test_the_static_side_of_a_join_stays_as_its_first_micro_batch_read_it(
    spark, topics, topic, keyed, tmp_path
):
    """Spark plans it once for the query; a load within foreachBatch reads what is there then."""
    names, loaded = f"{topic}-names", []
    topics.write(spark.sql("SELECT 'k0' AS key, 'old' AS value"), names)
    topics.write(keyed(1, keys=1), topic)
    static = topics.read(names, "key STRING, value STRING").withColumnRenamed("value", "name")
    stream = topics.stream(topic, startingOffsets="earliest")
    joined = stream.selectExpr("CAST(key AS STRING) AS key").join(static, "key")
    seen = []

    def each(rows, _):
        seen.append(sorted(row.name for row in rows.collect()))
        fresh = topics.read(names, "key STRING, value STRING")
        loaded.append(sorted(row.value for row in fresh.collect()))

    writer = joined.writeStream.foreachBatch(each).option("checkpointLocation", str(tmp_path))
    query = writer.start()
    try:
        query.processAllAvailable()
        topics.write(spark.sql("SELECT 'k0' AS key, 'new' AS value"), names)
        topics.write(keyed(1, keys=1), topic)
        query.processAllAvailable()
    finally:
        query.stop()
    assert seen == [["old"], ["old"]], "Spark plans the static side anew: the docs may change"
    assert loaded == [["old"], ["new", "old"]]


def test_a_trigger_takes_at_most_what_is_allowed_pro_rata(topics, topic, keyed, tmp_path):
    topics.write(keyed(100, keys=50), topic, partitions=3)
    rows = topics.stream(topic, startingOffsets="earliest", maxOffsetsPerTrigger=30)
    query = topics.copy(rows.select("value"), f"{topic}-copy", tmp_path / "checkpoint")
    assert [p["numInputRows"] for p in query.recentProgress if p["numInputRows"]] == [
        30,
        30,
        30,
        10,
    ]
    assert topics.numbers(f"{topic}-copy") == list(range(100))


def test_a_query_goes_on_from_its_checkpoint(topics, topic, keyed, tmp_path):
    topics.write(keyed(10), topic)
    for start in (10, 20):
        rows = topics.stream(topic, startingOffsets="earliest").select("key", "value")
        topics.copy(rows, f"{topic}-copy", tmp_path / "checkpoint")
        topics.write(keyed(10, start=start), topic)
    assert topics.numbers(f"{topic}-copy") == list(range(20))


def test_an_idle_query_sees_new_rows_and_stays_idle_otherwise(topics, topic, keyed, tmp_path):
    topics.write(keyed(5), topic)
    rows = topics.stream(topic).select("key", "value")
    copy = f"{topic}-copy"
    query = topics.start_copy(rows, copy, tmp_path / "checkpoint", once=False)
    try:
        query.processAllAvailable()
        batches = query.lastProgress["batchId"] if query.lastProgress else 0
        topics.write(keyed(7, start=5), topic)
        wait_until(lambda: len(topics.numbers(copy)) == 7)
        assert topics.numbers(copy) == list(range(5, 12))  # latest: nothing of the first five

        def reached() -> dict[str, int]:
            progress = json.loads(query.lastProgress.json)
            assert progress["batchId"] <= batches + 2
            return progress["sources"][0]["endOffset"][topic]

        wait_until(lambda: reached() == {"0": 12})  # Spark tells of a batch after its commit
        time.sleep(1.0)  # a hundred polls, none of which may make a batch
        assert reached() == {"0": 12}
    finally:
        query.stop()


def test_a_batch_whose_commit_spark_forgot_is_in_the_topic_once(spark, topics, topic, tmp_path):
    source, checkpoint = tmp_path / "in", tmp_path / "checkpoint"
    files_of_numbers(source, range(100), range(100, 150), range(150, 250))
    topics.copy(stream_of_files(spark, source), topic, checkpoint, partitions=2)
    assert topics.numbers(topic) == list(range(250))
    for _ in range(2):
        forget_the_newest(checkpoint / "commits")
        topics.copy(stream_of_files(spark, source), topic, checkpoint)
        assert topics.numbers(topic) == list(range(250))
    files_of_numbers(source, range(250, 300))
    topics.copy(stream_of_files(spark, source), topic, checkpoint)
    assert topics.numbers(topic) == list(range(300))


def test_a_batch_that_failed_half_way_is_replayed_without_a_trace(spark, topics, topic, tmp_path):
    source, checkpoint, marker = tmp_path / "in", tmp_path / "checkpoint", tmp_path / "broken"
    files_of_numbers(source, range(100), range(100, 30_000))
    marker.touch()
    path = str(marker)

    def fails_once(batches):
        import os

        for batch in batches:
            values = batch.column("value").to_pylist()
            if "25000" in values and os.path.exists(path):
                raise RuntimeError("a row that breaks the task")
            yield batch

    rows = stream_of_files(spark, source).mapInArrow(fails_once, "key STRING, value STRING")
    query = topics.start_copy(rows, topic, checkpoint)
    with pytest.raises(Exception, match="a row that breaks the task"):
        query.awaitTermination(120)
    assert topics.numbers(topic) == list(range(100))
    marker.unlink()
    topics.copy(rows, topic, checkpoint)
    assert topics.numbers(topic) == list(range(30_000))


@pytest.mark.parametrize(
    ("starting", "expected"),
    [
        ("latest", range(0)),
        ('{"%s":{"0":4}}', range(4, 10)),
        ('{"%s":{"0":-2}}', range(10)),
    ],
)
def test_a_stream_starts_where_it_is_told(topics, topic, keyed, tmp_path, starting, expected):
    topics.write(keyed(10, tasks=1), topic)
    starting = starting % topic if "%" in starting else starting
    rows = topics.stream(topic, startingOffsets=starting).select("value")
    topics.copy(rows, f"{topic}-copy", tmp_path / "checkpoint")
    assert topics.numbers(f"{topic}-copy") == list(expected)


@pytest.mark.spark42
def test_a_query_that_began_at_latest_and_died_in_batch_0_begins_there_again(
    topics, topic, keyed, tmp_path
):
    topics.write(keyed(5), topic)
    rows = topics.stream(topic).select("key", "value")
    checkpoint, copy = tmp_path / "checkpoint", f"{topic}-copy"
    topics.copy(rows, copy, checkpoint)
    forget_the_newest(checkpoint / "commits")
    topics.write(keyed(7, start=5), topic)
    topics.copy(rows, copy, checkpoint)
    assert topics.numbers(copy) == list(range(5, 12))


def test_min_partitions_cuts_a_micro_batch_into_tasks(spark, topics, topic, keyed, tmp_path):
    topics.write(keyed(1_000, tasks=1), topic)
    rows = topics.stream(topic, startingOffsets="earliest", minPartitions=4)
    rows = rows.selectExpr("cast(spark_partition_id() as string) AS key", "value")
    topics.copy(rows, f"{topic}-copy", tmp_path / "checkpoint")
    copied = topics.read(f"{topic}-copy", "key STRING, value STRING")
    assert copied.select("key").distinct().count() == 4
    assert topics.numbers(f"{topic}-copy") == list(range(1_000))


def test_many_small_batches_do_not_make_many_ledgers(spark, topics, topic, tmp_path):
    source = tmp_path / "in"
    files_of_numbers(source, *(range(n, n + 1) for n in range(12)))
    topics.copy(stream_of_files(spark, source), topic, tmp_path / "checkpoint")
    cluster = blocking.topics(topics.service_url)
    info = cluster.run(cluster.client.topics.open(topic))
    state = cluster.run(cluster.client.log(info.id).fold(fresh=True))
    assert topics.numbers(topic) == list(range(12))
    assert len(state.ledgers()) <= 4  # one for each of Spark's Python workers at most
