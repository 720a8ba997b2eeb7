"""Every wrong input is an error with its class, what is wrong and what to do, through Spark."""

import json

import pytest

from tests.spark.topics import SparkTopics, error_of

KINDS = ["batched", pytest.param("streamed", marks=pytest.mark.slow)]
"""Options are checked by the same code."""


@pytest.fixture
def streamed(topics, tmp_path):
    """Starts a stream with the options given and returns how it failed."""

    def run(topic=None, **options) -> str:
        reader = topics.spark.readStream.format("ledger").option("serviceUrl", topics.service_url)
        rows = reader.options(**options).load(topic) if topic else reader.options(**options).load()
        writer = rows.writeStream.format("noop").trigger(availableNow=True)
        query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
        return error_of(lambda: query.awaitTermination(120))

    return run


@pytest.fixture
def batched(topics):
    """Reads a batch with the options given and returns how it failed."""

    def run(topic=None, **options) -> str:
        reader = topics.spark.read.format("ledger").option("serviceUrl", topics.service_url)
        reader = reader.options(**options)
        return error_of(lambda: (reader.load(topic) if topic else reader.load()).collect())

    return run


@pytest.fixture(scope="module")
def ten_rows(spark, cluster) -> str:
    """A topic of one partition with ten rows."""
    topics = SparkTopics(spark, cluster.service_url)
    topics.write(spark.range(10).selectExpr("cast(id as string) AS value"), "ten-rows")
    return "ten-rows"


@pytest.mark.parametrize("kind", ["batched", "streamed"])
def test_reading_a_topic_that_is_not_there_names_what_is_near(topics, topic, keyed, request, kind):
    topics.write(keyed(1), f"{topic}-flights")
    said = request.getfixturevalue(kind)(f"{topic}-flihgts")
    assert "[LEDGER_TOPIC.NOT_FOUND]" in said
    assert f"{topic}-flights" in said


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "[LEDGER_OPTION.MISSING] no topic is named"),
        ({"subscribe": "a", "topic": "b"}, "[LEDGER_OPTION.CONFLICT]"),
        ({"topic": "a", "startingOfsets": "earliest"}, "Did you mean startingOffsets?"),
        ({"topic": "a", "minPartitions": "none"}, "[LEDGER_OPTION.INVALID_VALUE] minPartitions"),
        ({"topic": "no/good"}, "[LEDGER_TOPIC.INVALID_NAME]"),
        ({"paths": '["a","b"]'}, "Name several topics in one text: load('a,b')"),
    ],
)
def test_options_that_make_no_sense_are_refused(request, kind, options, expected):
    assert expected in request.getfixturevalue(kind)(**options)


# One option that is not built for each kind of query: tests/unit has them all, of each kind.


@pytest.mark.parametrize("kind", KINDS)
def test_a_read_refuses_what_is_not_built_as_it_does_what_nobody_knows(request, kind):
    said = request.getfixturevalue(kind)("t", readCompacted="true")
    assert "[LEDGER_OPTION.UNKNOWN]" in said and "has no option 'readcompacted'" in said


def test_a_write_refuses_what_is_not_built_too(topics, topic, keyed, ten_rows, tmp_path):
    rows = topics.stream(ten_rows, startingOffsets="earliest").select("value")
    batch = error_of(lambda: topics.write(keyed(1), topic, deliverAt="true"))
    stream = error_of(lambda: topics.copy(rows, topic, tmp_path / "c", deliverAt="true"))
    for said in (batch, stream):
        assert "[LEDGER_OPTION.UNKNOWN]" in said and "has no option 'deliverat'" in said


@pytest.mark.parametrize(
    ("offsets", "expected"),
    [
        ("soon", "[LEDGER_OFFSETS.MALFORMED]"),
        ('{"TOPIC":{"0":"x"}}', "[LEDGER_OFFSETS.MALFORMED]"),
        ('{"TOPIC":{"0":-7}}', "[LEDGER_OFFSETS.MALFORMED]"),
        ('{"TOPIC":{"0":0,"5":0}}', "[LEDGER_OFFSETS.NOT_ASSIGNED]"),
        ('{"other":{"0":0}}', "[LEDGER_OFFSETS.NOT_ASSIGNED]"),
        ('{"TOPIC":{"0":11}}', "[LEDGER_OFFSETS.OUT_OF_RANGE]"),
        ('{"_ids":{"TOPIC":"another"},"TOPIC":{"0":1}}', "[LEDGER_DATA_LOSS.TOPIC_RECREATED]"),
    ],
)
def test_offsets_that_mean_nothing_are_refused(ten_rows, batched, offsets, expected):
    text = offsets.replace("TOPIC", ten_rows)
    assert expected in batched(ten_rows, startingOffsets=text)


@pytest.mark.parametrize(
    ("offsets", "expected"),
    [
        ("soon", "[LEDGER_OFFSETS.MALFORMED]"),
        ('{"TOPIC":{"0":11}}', "[LEDGER_OFFSETS.OUT_OF_RANGE]"),
    ],
)
def test_a_stream_refuses_such_offsets_too(ten_rows, streamed, offsets, expected):
    text = offsets.replace("TOPIC", ten_rows)
    assert expected in streamed(ten_rows, startingOffsets=text)


def test_a_batch_that_ends_before_it_starts_is_refused(ten_rows, batched):
    at = {name: json.dumps({ten_rows: {"0": row}}) for name, row in (("first", 7), ("last", 3))}
    said = batched(ten_rows, startingOffsets=at["first"], endingOffsets=at["last"])
    assert "[LEDGER_OFFSETS.START_AFTER_END]" in said


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (["key"], "[LEDGER_SCHEMA.MISSING_COLUMN] there is no column 'value'"),
        (["1 AS value"], "[LEDGER_SCHEMA.TYPE_MISMATCH] column 'value' is INT"),
        (["value", "2L AS key"], "[LEDGER_SCHEMA.TYPE_MISMATCH] column 'key' is BIGINT"),
        (["value", "1.5 AS price"], "[LEDGER_SCHEMA.UNKNOWN_COLUMN] column 'price'"),
    ],
)
def test_columns_that_cannot_be_written_are_refused(topics, topic, keyed, columns, expected):
    assert expected in error_of(lambda: topics.write(keyed(3).selectExpr(*columns), topic))


def test_a_stream_refuses_such_columns_too(topics, topic, ten_rows, tmp_path):
    rows = topics.stream(ten_rows, startingOffsets="earliest").select("key")
    copied = lambda: topics.copy(rows, topic, tmp_path / "checkpoint")  # noqa: E731
    assert "[LEDGER_SCHEMA.MISSING_COLUMN]" in error_of(copied)


def test_a_declared_column_that_no_topic_has_is_refused(topics, ten_rows):
    said = error_of(lambda: topics.read(ten_rows, "value STRING, price DOUBLE").collect())
    assert "[LEDGER_SCHEMA.UNKNOWN_COLUMN] a topic has no column 'price'" in said


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"compresion": "lz4"}, "Did you mean compression?"),
        ({"compression": "gzip"}, "[LEDGER_OPTION.INVALID_VALUE] compression"),
        ({"partitions": "0"}, "[LEDGER_OPTION.INVALID_VALUE] partitions"),
        ({"txnVersion": "1"}, "[LEDGER_OPTION.MISSING] txnAppId"),
        ({"TOPIC": "elsewhere"}, "[LEDGER_OPTION.CONFLICT]"),
        ({"ensembleSize": "1", "writeQuorum": "2"}, "[LEDGER_OPTION.INVALID_VALUE] ensembleSize"),
    ],
)
def test_write_options_that_make_no_sense_are_refused(topics, topic, keyed, options, expected):
    assert expected in error_of(lambda: topics.write(keyed(3), topic, **options))


def test_a_row_larger_than_an_entry_is_refused_before_anything_is_sent(spark, topics, topic):
    rows = spark.range(0, 1, 1, 1).selectExpr("repeat('x', 17 * 1024 * 1024) AS value")
    small = spark.range(0, 1, 1, 1).selectExpr("'small' AS value")
    said = error_of(lambda: topics.write(small.union(rows).coalesce(1), topic))
    assert "[LEDGER_WRITE.MESSAGE_TOO_BIG]" in said
    assert topics.values(topic) == []
    rows = spark.range(0, 1, 1, 1).selectExpr("repeat('x', 15 * 1024 * 1024) AS value")
    topics.write(rows, topic)
    assert [len(value) for value in topics.values(topic)] == [15 * 1024 * 1024]


def test_a_topic_made_anew_is_not_read_with_old_offsets(topics, topic, keyed, tmp_path):
    from spark_ledger.topic import blocking

    topics.write(keyed(10), topic)
    rows = topics.stream(topic, startingOffsets="earliest").select("value")
    topics.copy(rows, f"{topic}-copy", tmp_path / "checkpoint")
    cluster = blocking.topics(topics.service_url)
    cluster.run(cluster.client.topics.delete(topic))
    topics.write(keyed(20), topic)
    said = error_of(lambda: topics.copy(rows, f"{topic}-copy", tmp_path / "checkpoint"))
    assert "[LEDGER_DATA_LOSS.TOPIC_RECREATED]" in said
    assert topics.numbers(f"{topic}-copy") == list(range(10))
