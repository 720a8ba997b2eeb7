"""What a streaming write can do: several topics at once, complete mode, bad records, foreach."""

import os
from pathlib import Path

import pytest
from pyspark.sql.streaming import StreamingQuery

import spark_ledger
from spark_ledger import Admin
from spark_ledger.topic import blocking
from spark_ledger.topic.log.topic_log import fold_agreeing
from tests.spark.topics import (
    SparkTopics,
    error_of,
    files_of_numbers,
    forget_the_newest,
    stream_of_files,
)


def files_in_order(folder: Path, *batches: range) -> None:
    """Files of numbers, of which Spark takes one after the other: it goes by their times."""
    files_of_numbers(folder, *batches)
    for at, path in enumerate(sorted(folder.iterdir())):
        os.utime(path, (1_700_000_000 + at, 1_700_000_000 + at))


@pytest.fixture
def run(topics, tmp_path):
    """`run(rows, **options)`: writes what there is, on a checkpoint of the test's own."""

    def write(rows, mode: str = "append", **options) -> StreamingQuery:
        writer = rows.writeStream.format("ledger").option("serviceUrl", topics.service_url)
        writer = writer.options(**options).outputMode(mode).trigger(availableNow=True)
        query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
        query.awaitTermination(120)
        return query

    return write


@pytest.fixture
def foreach(topics, tmp_path):
    """`foreach(rows, writer)`: the same with a foreach writer, one file a micro-batch."""

    def write(rows, writer, mode: str = "append") -> None:
        stream = rows.writeStream.foreach(writer).outputMode(mode).trigger(availableNow=True)
        stream.option("checkpointLocation", str(tmp_path / "checkpoint")).start().awaitTermination(
            120
        )

    return write


def test_a_micro_batch_is_in_all_its_topics_or_in_none(spark, topics, topic, run, tmp_path):
    files_in_order(tmp_path / "in", range(20), range(20, 50), range(50, 60))
    rows = stream_of_files(spark, tmp_path / "in").selectExpr(
        f"concat('{topic}-', value % 2) AS topic", "key", "value"
    )
    cluster, seen = blocking.topics(topics.service_url), []
    writer = rows.writeStream.format("ledger").option("serviceUrl", topics.service_url)
    writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
    started = writer.trigger(availableNow=True).start()

    async def rows_of_both() -> list[int]:
        found = [await cluster.client.topics.find(f"{topic}-{i}") for i in range(2)]
        if None in found:
            return []
        logs = [cluster.client.log(info.id) for info in found if info is not None]
        states = await fold_agreeing(logs, fresh=True)
        return [sum(one.end_offset for one in state.partitions) for state in states]

    while not started.awaitTermination(0.1):
        seen.append(cluster.run(rows_of_both()))
    seen.append(cluster.run(rows_of_both()))
    assert seen[-1] == [30, 30]
    assert all(counts in ([], [0, 0], [10, 10], [25, 25], [30, 30]) for counts in seen)
    forget_the_newest(tmp_path / "checkpoint" / "commits")
    writer.trigger(availableNow=True).start().awaitTermination(120)
    assert cluster.run(rows_of_both()) == [30, 30]


def test_complete_mode_replaces_the_topic_with_each_batch(spark, topics, topic, run, tmp_path):
    source = tmp_path / "in"
    files_in_order(source, range(10), range(10, 30))
    counts = stream_of_files(spark, source).groupBy("key").count()
    rows = counts.selectExpr("key", "cast(count AS string) AS value")
    for expected in (6, 7):
        run(rows, "complete", topic=topic, partitions=2)
        found = {r.key: r.value for r in topics.read(topic, "key STRING, value STRING").collect()}
        assert found == {f"k{i}": str(expected) for i in range(5)}
        files_in_order(source, range(5))


def test_complete_mode_stops_at_rows_that_a_subscription_holds_unless_they_may_go(
    spark, topics, topic, run, tmp_path
):
    source = tmp_path / "in"
    files_in_order(source, range(10))
    counts = stream_of_files(spark, source).groupBy("key").count()
    rows = counts.selectExpr("key", "cast(count AS string) AS value")
    run(rows, "complete", topic=topic)
    with Admin(topics.service_url) as admin:
        admin.create_subscription(topic, "live", at="latest")
    files_in_order(source, range(5))
    run(rows, "complete", topic=topic)  # the subscription has passed all that this replaces
    files_in_order(source, range(5))
    said = error_of(lambda: run(rows, "complete", topic=topic))
    assert "[LEDGER_SUBSCRIPTION.BUSY]" in said and "'live' holds partition 0 from" in said
    assert set(topics.values(topic)) == {"3"}
    run(rows, "complete", topic=topic, overwriteHeld=True)
    assert set(topics.values(topic)) == {"4"}


def test_complete_mode_needs_the_topic_as_an_option(spark, topics, topic, run, tmp_path):
    files_in_order(tmp_path / "in", range(5))
    counts = stream_of_files(spark, tmp_path / "in").groupBy("key").count()
    rows = counts.selectExpr(f"'{topic}' AS topic", "cast(count AS string) AS value")
    assert "[LEDGER_OPTION.MISSING]" in error_of(lambda: run(rows, "complete"))


def test_bad_rows_of_a_stream_say_which_query_and_batch(spark, topics, topic, run, tmp_path):
    files_in_order(tmp_path / "in", range(4), range(4, 10))
    rows = stream_of_files(spark, tmp_path / "in").selectExpr(
        f"if(value = 7, NULL, '{topic}') AS topic", "value"
    )
    query = run(rows, badRecordsTopic=f"{topic}-bad", userMetadata="told")
    assert topics.numbers(topic) == [0, 1, 2, 3, 4, 5, 6, 8, 9]
    columns = "value STRING, headers ARRAY<STRUCT<key: STRING, value: BINARY>>"
    (row,) = topics.read(f"{topic}-bad", columns).collect()
    told = {one.key: one.value and bytes(one.value).decode() for one in row.headers}
    assert row.value == "7"
    assert (told["queryId"], told["batchId"]) == (query.id, "1")
    assert told["reason"].startswith("[LEDGER_NULL_TOPIC_IN_DATA]")


@pytest.mark.parametrize(
    ("column", "options", "expected"),
    [
        ("CAST(NULL AS STRING) AS topic", {}, "[LEDGER_NULL_TOPIC_IN_DATA]"),
        ("1.5 AS price", {"topic": "TOPIC"}, "[LEDGER_SCHEMA.UNKNOWN_COLUMN] column 'price'"),
        ("9 AS partition", {"topic": "TOPIC"}, "[LEDGER_WRITE.PARTITION_INVALID]"),
    ],
)
def test_what_cannot_be_written_stops_a_stream(
    spark, topics, topic, run, tmp_path, column, options, expected
):
    files_in_order(tmp_path / "in", range(4))
    rows = stream_of_files(spark, tmp_path / "in").selectExpr("value", column)
    options = {name: topic if text == "TOPIC" else text for name, text in options.items()}
    assert expected in error_of(lambda: run(rows, **options))


def test_typed_rows_are_written_by_a_stream(spark, topics, topic, run, tmp_path):
    files_in_order(tmp_path / "in", range(8))
    rows = stream_of_files(spark, tmp_path / "in").selectExpr(
        "key AS __key", "cast(value AS INT) n"
    )
    run(rows, topic=topic, valueFormat="json", schemaMode="none")
    assert sorted(topics.values(topic)) == [f'{{"n":{i}}}' for i in range(8)]


def test_foreach_writes_what_update_mode_gives_and_repeats_nothing(
    spark, topics, topic, foreach, tmp_path
):
    source = tmp_path / "in"
    files_in_order(source, range(10), range(3))
    counts = stream_of_files(spark, source).groupBy("key").count()
    rows = counts.selectExpr("key", "cast(count AS string) AS value")
    writer = spark_ledger.foreach_writer(topic, serviceUrl=topics.service_url, partitions=2)
    foreach(rows, writer, "update")
    expected = sorted([(f"k{i}", "2") for i in range(5)] + [(f"k{i}", "3") for i in range(3)])

    def found(of: SparkTopics) -> list[tuple[str, str]]:
        return sorted(map(tuple, of.read(topic, "key STRING, value STRING").collect()))

    assert found(topics) == expected
    forget_the_newest(tmp_path / "checkpoint" / "commits")
    foreach(rows, writer, "update")
    assert found(topics) == expected


def test_a_task_of_foreach_that_fails_adds_nothing_that_is_lost_later(
    spark, topics, topic, foreach, tmp_path
):
    files_in_order(tmp_path / "in", range(2000))
    marker = tmp_path / "broken"
    marker.touch()
    path = str(marker)

    def fails_once(batches):
        for batch in batches:
            yield batch.slice(0, 700)
            if Path(path).exists():
                raise RuntimeError("a task that breaks")
            yield batch.slice(700)

    rows = stream_of_files(spark, tmp_path / "in").mapInArrow(
        fails_once, "key STRING, value STRING"
    )
    writer = spark_ledger.foreach_writer(topic, schema=rows.schema, serviceUrl=topics.service_url)
    assert "a task that breaks" in error_of(lambda: foreach(rows, writer))
    marker.unlink()
    foreach(rows, writer)
    assert set(topics.numbers(topic)) == set(range(2000))  # at least once


def test_a_foreach_writer_that_cannot_work_is_refused_at_once(topics):
    assert "[LEDGER_OPTION.UNKNOWN]" in error_of(
        lambda: spark_ledger.foreach_writer("t", topci="t")
    )
    said = error_of(lambda: spark_ledger.foreach_writer("t", valueFormat="arrow"))
    assert "[LEDGER_OPTION.MISSING] schema is not given" in said
    shape = "value STRING, price DOUBLE"
    said = error_of(lambda: spark_ledger.foreach_writer("t", schema=shape))
    assert "[LEDGER_SCHEMA.UNKNOWN_COLUMN]" in said
