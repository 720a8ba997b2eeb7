"""Batch reads and writes through a real cluster."""

import json
import os
import subprocess
import sys
import threading
import warnings
from datetime import UTC, datetime, timedelta

import pyspark.sql.functions as F
import pytest

import spark_ledger
from tests.spark.scene import error_of

OFFSETS = "value STRING, partition INT, offset BIGINT"


def test_what_is_written_is_read_with_kafkas_schema(topics, topic, keyed):
    before = datetime.now(UTC) - timedelta(seconds=1)
    topics.write(keyed(10), topic)
    read = topics.read(topic)
    assert read.dtypes == [
        ("key", "binary"),
        ("value", "binary"),
        ("topic", "string"),
        ("partition", "int"),
        ("offset", "bigint"),
        ("timestamp", "timestamp"),
        ("timestampType", "int"),
    ]
    rows = sorted(read.collect(), key=lambda row: row.offset)
    assert sorted(int(row.value.decode()) for row in rows) == list(range(10))
    assert {row.key.decode() for row in rows} == {f"k{i}" for i in range(5)}
    assert [row.offset for row in rows] == list(range(10))
    assert {(row.topic, row.partition, row.timestampType) for row in rows} == {(topic, 0, 0)}
    written = {row.timestamp.astimezone(UTC) for row in rows}
    assert all(before < at < datetime.now(UTC) for at in written)


def test_binary_null_and_empty_keys_and_values_come_back_as_they_were(spark, topics, topic):
    given = [(b"\x00\xff", b""), (None, b"v"), (b"", None), (None, None)]
    rows = spark.createDataFrame([(k, v) for k, v in given], "key BINARY, value BINARY")
    topics.write(rows.coalesce(1), topic)
    read = topics.read(topic).orderBy("offset").collect()
    assert [(row.key and bytes(row.key), row.value) for row in read] == [
        (bytes(k) if k else k, v) for k, v in given
    ]
    assert [row.key is None for row in read] == [key is None for key, _ in given]


def test_rows_without_a_key_column_are_written(topics, topic, keyed):
    topics.write(keyed(7).select("value"), topic, partitions=3)
    assert topics.numbers(topic) == list(range(7))
    assert topics.read(topic).where("key IS NOT NULL").count() == 0


def test_a_keys_rows_are_in_one_partition_in_the_order_they_were_written(topics, topic, keyed):
    topics.write(keyed(20_000, keys=23, tasks=1), topic, partitions=4)
    read = topics.read(topic, "key STRING, value STRING, partition INT, offset BIGINT")
    by_key: dict[str, list] = {}
    for row in sorted(read.collect(), key=lambda row: (row.partition, row.offset)):
        by_key.setdefault(row.key, []).append((row.partition, int(row.value)))
    assert len(by_key) == 23
    assert len({partition for rows in by_key.values() for partition, _ in rows}) == 4
    for rows in by_key.values():
        assert len({partition for partition, _ in rows}) == 1
        assert [value for _, value in rows] == sorted(value for _, value in rows)


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
def test_every_compression_gives_the_rows_back(topics, topic, keyed, compression):
    topics.write(keyed(5_000), topic, partitions=2, compression=compression)
    assert topics.numbers(topic) == list(range(5_000))


def test_offsets_are_dense_over_several_writes_and_partitions(topics, topic, keyed):
    for start in (0, 100, 200):
        topics.write(keyed(100, start=start), topic, partitions=2)
    read = topics.read(topic, OFFSETS).groupBy("partition")
    for row in read.agg(F.count("*"), F.min("offset"), F.max("offset")).collect():
        _, count, first, last = row
        assert (first, last) == (0, count - 1)
    assert topics.numbers(topic) == list(range(300))


def test_a_declared_schema_reads_a_subset_as_text(topics, topic, keyed):
    topics.write(keyed(3), topic)
    read = topics.read(topic, "offset BIGINT, VALUE STRING")
    assert read.columns == ["offset", "VALUE"]
    assert sorted(row.VALUE for row in read.collect()) == ["0", "1", "2"]
    assert topics.read(topic).selectExpr("count(*)").collect()[0][0] == 3


def test_starting_and_ending_offsets_cut_the_read(topics, topic, keyed):
    topics.write(keyed(10, tasks=1), topic)
    at = lambda first: json.dumps({topic: {"0": first}})  # noqa: E731
    assert len(topics.values(topic, startingOffsets=at(4))) == 6
    assert len(topics.values(topic, startingOffsets=at(4), endingOffsets=at(7))) == 3
    assert len(topics.values(topic, startingOffsets=at(-2), endingOffsets=at(-1))) == 10
    assert topics.values(topic, startingOffsets="latest") == []
    assert topics.values(topic, endingOffsets="earliest") == []
    assert [int(value) for value in topics.values(topic, startingOffsets=at(8))] == [8, 9]


def test_min_partitions_splits_one_partition_into_tasks(topics, topic, keyed):
    topics.write(keyed(1_000, tasks=1), topic)
    read = topics.read(topic, OFFSETS, minPartitions=4)
    assert read.rdd.getNumPartitions() >= 4
    assert topics.numbers(topic, minPartitions=4) == list(range(1_000))


def test_an_empty_topic_and_an_empty_write_are_no_errors(spark, topics, topic, keyed):
    topics.write(keyed(5).limit(0), topic, partitions=3)
    assert topics.values(topic) == []
    topics.write(keyed(2), topic)
    assert topics.numbers(topic) == [0, 1]


def test_several_topics_are_read_together(topics, topic, keyed):
    one, two = f"{topic}-one", f"{topic}-two"
    topics.write(keyed(3), one)
    topics.write(keyed(4), two, partitions=2)
    reader = topics.spark.read.format("ledger").option("serviceUrl", topics.service_url)
    counts = reader.option("subscribe", f"{one},{two}").load().groupBy("topic").count().collect()
    assert {row.topic: row["count"] for row in counts} == {one: 3, two: 4}


def test_the_same_app_id_and_version_is_committed_once(topics, topic, keyed):
    for _ in range(2):
        topics.write(keyed(10), topic, txnAppId="job", txnVersion=1)
    assert topics.numbers(topic) == list(range(10))
    topics.write(keyed(10, start=10), topic, txnAppId="job", txnVersion=2)
    topics.write(keyed(10, start=99), topic, txnAppId="job", txnVersion=1)
    topics.write(keyed(5, start=20), topic, txnAppId="other", txnVersion=1)
    assert topics.numbers(topic) == list(range(25))


def test_a_topic_made_anew_has_none_of_the_versions_of_the_one_before(topics, topic, keyed):
    with spark_ledger.Admin(topics.service_url) as admin:
        for start in (0, 10):
            for _ in range(2):
                rows = keyed(5, start=start)
                topics.write(rows, topic, txnAppId="again", txnVersion=7, partitions=2)
            assert topics.numbers(topic) == list(range(start, start + 5))
            admin.delete_topic(topic)


def test_a_job_that_fails_leaves_nothing_visible(topics, topic, keyed):
    topics.write(keyed(5), topic)
    broken = keyed(50_000, tasks=4, start=100).withColumn(
        "value", F.expr("IF(value = '40100', raise_error('broken row'), value)")
    )
    with pytest.raises(Exception, match="broken row"):
        topics.write(broken, topic)
    assert topics.numbers(topic) == list(range(5))
    topics.write(keyed(5, start=5), topic)
    assert topics.numbers(topic) == list(range(10))


def test_a_read_can_be_written_to_another_topic_as_it_is(topics, topic, keyed):
    topics.write(keyed(40, keys=20), topic, partitions=3)
    whole = topics.read(topic, includeHeaders=True, includeMetadata=True)
    topics.write(whole, f"{topic}-same", partitions=3)
    narrow = topics.read(topic)
    topics.write(narrow, f"{topic}-two", partitions=2, routing="murmur2")
    said = error_of(lambda: topics.write(narrow, f"{topic}-one"))
    assert "[LEDGER_WRITE.PARTITION_INVALID]" in said and "give option routing, as hash" in said
    for copy, columns in (("same", ["key", "value", "partition"]), ("two", ["key", "value"])):
        rows = topics.read(f"{topic}-{copy}").select(*columns)
        assert sorted(rows.collect()) == sorted(narrow.select(*columns).collect())
    times = topics.read(f"{topic}-two", "value STRING, eventTime TIMESTAMP").collect()
    assert sorted(times) == sorted(narrow.selectExpr("string(value)", "timestamp").collect())


def test_a_limit_that_ends_the_read_early_is_no_error(topics, topic, keyed):
    topics.write(keyed(50_000, tasks=1), topic)
    assert len(topics.read(topic).limit(3).collect()) == 3
    assert topics.read(topic).count() == 50_000


def test_sql_reads_a_topic_by_a_view(spark, topics, topic, keyed):
    topics.write(keyed(10), topic)
    spark.sql(
        f"CREATE OR REPLACE TEMPORARY VIEW flights USING ledger "
        f"OPTIONS (subscribe '{topic}', serviceUrl '{topics.service_url}')"
    )
    counted = spark.sql("SELECT count(*), max(offset) FROM flights").collect()
    assert [tuple(row) for row in counted] == [(10, 9)]


def test_a_thread_of_a_session_writes_and_reads_as_its_session_does(spark, topics, topic, keyed):
    numbers: list[list[int]] = []

    def copy() -> None:
        topics.write(keyed(5), topic)
        numbers.append(topics.numbers(topic))

    spark_ledger.register(spark)
    spark_ledger.register(spark)
    with warnings.catch_warnings(action="error"):
        thread = threading.Thread(target=spark_ledger.in_session(spark, copy))
    thread.start()
    thread.join()
    assert numbers == [[0, 1, 2, 3, 4]]


IN_JUPYTER = """
import sys
import spark_ledger
from pyspark.sql import SparkSession

url, topic = sys.argv[1:]
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
spark.sparkContext.setLogLevel("OFF")

def write_and_read():
    rows = spark.range(5).selectExpr("string(id) AS value")
    rows.write.format("ledger").option("serviceUrl", url).mode("append").save(topic)
    return spark.read.format("ledger").option("serviceUrl", url).load(topic).count()

try:
    write_and_read()
except Exception as error:
    print("[DATA_SOURCE_NOT_FOUND]" in str(error))
spark_ledger.register(spark)
print(write_and_read())
"""


@pytest.mark.slow
def test_a_session_whose_driver_python_is_jupyter_knows_the_format_once_it_is_registered(
    cluster, topic, tmp_path
):
    jupyter = tmp_path / "jupyter"
    jupyter.write_text("#!/bin/sh\nexit 1\n")
    jupyter.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", IN_JUPYTER, cluster.service_url, topic],
        cwd=tmp_path,
        env=os.environ | {"PYSPARK_DRIVER_PYTHON": str(jupyter), "SPARK_LOCAL_IP": "127.0.0.1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=240,
    )
    assert done.stdout.splitlines() == ["True", "5"]
