"""Batch reads with every option of the source, through a real cluster."""

import json
import time
from collections import Counter
from datetime import datetime

import pyspark.sql.functions as F
import pytest

from spark_ledger.topic.log.actions import Trim
from tests.spark.by_hand import Cluster, Owner
from tests.spark.topics import error_of, wait_until

PLACE = "value STRING, partition INT, offset BIGINT"


@pytest.fixture
def by_hand(cluster) -> Cluster:
    return Cluster(cluster.service_url)


def numbers(rows) -> list[int]:
    return sorted(int(row.value) for row in rows.collect())


def read(topics, **options):
    reader = topics.spark.read.format("ledger").option("serviceUrl", topics.service_url)
    return reader.schema(PLACE).options(**options).load()


def test_a_pattern_reads_the_topics_whose_whole_names_it_matches(topics, topic, keyed):
    topics.write(keyed(3), f"{topic}-a")
    topics.write(keyed(4, start=3), f"{topic}-b")
    topics.write(keyed(5, start=90), f"{topic}-other")
    assert numbers(read(topics, subscribePattern=f"{topic}-[ab]")) == list(range(7))
    assert numbers(read(topics, subscribePattern=f"{topic}-none")) == []


def test_assigned_partitions_are_read_and_no_others(topics, topic, keyed):
    topics.write(keyed(100, keys=50), topic, partitions=3)
    found = read(topics, assign=json.dumps({topic: [2, 0]}))
    expected = topics.read(topic, PLACE).where("partition != 1")
    assert numbers(found) == numbers(expected) != []
    said = error_of(read(topics, assign=json.dumps({topic: [3]})).collect)
    assert "[LEDGER_OFFSETS.NOT_ASSIGNED]" in said


def test_times_are_those_of_the_commits(topics, topic, keyed):
    topics.write(keyed(5), topic)
    time.sleep(0.05)
    middle = int(time.time() * 1000)
    time.sleep(0.05)
    topics.write(keyed(5, start=5), topic)
    assert topics.numbers(topic, startingTimestamp=middle) == list(range(5, 10))
    assert topics.numbers(topic, endingTimestamp=middle) == list(range(5))
    told = datetime.fromtimestamp(middle / 1000).isoformat()  # of the machine's zone, and ours
    assert topics.numbers(topic, startingTimestamp=told) == list(range(5, 10))
    by_partition = json.dumps({topic: {"0": middle}})
    assert topics.numbers(topic, startingOffsetsByTimestamp=by_partition) == list(range(5, 10))
    later = middle + 10**9
    said = error_of(lambda: topics.numbers(topic, startingTimestamp=later))
    assert "[LEDGER_OFFSETS.TIMESTAMP_NOT_FOUND]" in said
    found = topics.numbers(
        topic, startingTimestamp=later, startingOffsetsByTimestampStrategy="latest"
    )
    assert found == []


def test_a_read_starts_where_a_subscription_stands(topics, topic, keyed, by_hand):
    topics.write(keyed(10, tasks=1), topic)
    info = by_hand.run(by_hand.client.topics.open(topic))
    by_hand.run(by_hand.client.subscriptions.create(info.id, "mine", {0: 6}))
    assert topics.numbers(topic, startingSubscription="mine") == [6, 7, 8, 9]
    said = error_of(lambda: topics.numbers(topic, startingSubscription="yours"))
    assert "[LEDGER_SUBSCRIPTION.NOT_FOUND]" in said


def test_tasks_have_no_more_rows_and_bytes_than_they_may(topics, topic, keyed):
    rows = keyed(2_000, tasks=1).selectExpr("key", "concat(value, repeat('x', 100)) AS value")
    topics.write(rows, topic, compression="none")  # limits are of stored bytes

    def sizes(**options):
        found = topics.read(topic, PLACE, **options)
        return [row["count"] for row in found.groupBy(F.spark_partition_id()).count().collect()]

    by_rows = sizes(maxRecordsPerPartition=600)
    assert (sum(by_rows), len(by_rows)) == (2_000, 4)
    assert max(by_rows) <= 600
    by_bytes = sizes(maxBytesPerPartition="60k")
    assert sum(by_bytes) == 2_000
    assert 3 <= len(by_bytes) <= 8


def test_headers_and_metadata_are_read_where_they_are_asked_for(topics, topic, keyed):
    headers = "array(named_struct('key', 'h', 'value', cast(value AS binary))) AS headers"
    rows = keyed(4, tasks=1).selectExpr(
        "value", headers, "TIMESTAMP'2024-05-01 10:00:00' AS eventTime"
    )
    topics.write(rows, topic)
    read = topics.read(topic, includeHeaders="true", includeMetadata="true")
    found = read.orderBy("offset").collect()
    assert [bytes(row.headers[0].value) for row in found] == [b"0", b"1", b"2", b"3"]
    assert [row.valueSize for row in found] == [1, 1, 1, 1]
    assert [row.batchIndex for row in found] == [0, 1, 2, 3]
    assert {row.eventTime.isoformat() for row in found} == {"2024-05-01T10:00:00"}
    place = found[3]
    assert place.messageId == f"{place.ledgerId}:{place.entryId}:0:3"
    declared = topics.read(topic, "valueSize INT, offset BIGINT").collect()
    assert sorted(tuple(row) for row in declared) == [(1, n) for n in range(4)]


def test_only_rows_with_the_keys_asked_for_are_read(topics, topic, keyed):
    topics.write(keyed(1_000, keys=40), topic, partitions=2)
    found = numbers(read(topics, subscribe=topic, keyFilter='["k3","k7"]'))
    assert found == [n for n in range(1_000) if n % 40 in (3, 7)]
    assert numbers(read(topics, subscribe=topic, keyFilter="none")) == []


def test_what_was_loaded_once_is_filtered_anew_by_each_query(spark, topics, topic, keyed):
    topics.write(keyed(300, keys=50), topic, partitions=3)
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        rows = topics.read(topic, PLACE)
        some = rows.where("partition = 1 AND offset >= 10 AND offset < 20")
        assert some.count() == 10
        assert rows.count() == 300
        others = rows.where("partition = 2").selectExpr("offset AS other")
        assert some.join(others, some["offset"] == others["other"]).count() == 10
        said = error_of(topics.read(topic, PLACE, filterPushdown="true").collect)
        assert "[LEDGER_OPTION.INVALID_VALUE] filterPushdown" in said
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")


def test_typed_values_are_columns_of_their_own(spark, topics, topic):
    rows = spark.sql(
        "SELECT id, cast(id AS string) AS name, id / 2 AS half FROM range(0, 10, 1, 1)"
    )
    topics.write(rows, topic, valueFormat="arrow")
    read = topics.read(topic, valueFormat="arrow")
    assert read.columns[:3] == ["id", "name", "half"]
    assert "__offset" in read.columns
    assert [row.name for row in read.orderBy("id").collect()] == [str(n) for n in range(10)]
    some = topics.read(topic, "half DOUBLE, __offset BIGINT", valueFormat="arrow")
    assert sorted(tuple(row) for row in some.collect()) == [(n / 2, n) for n in range(10)]
    said = error_of(topics.read(topic, "price DOUBLE", valueFormat="arrow").collect)
    assert "[LEDGER_SCHEMA.MISSING_COLUMN]" in said
    said = error_of(topics.read(topic).collect)
    assert "[LEDGER_SCHEMA.INCOMPATIBLE]" in said


def test_text_and_json_are_read_by_their_formats(spark, topics, topic):
    rows = spark.sql("SELECT id, concat('n', id) AS name FROM range(0, 5, 1, 1)")
    topics.write(rows.selectExpr("to_json(struct(*)) AS value"), topic)
    text = topics.read(topic, valueFormat="string")
    assert dict(text.dtypes)["value"] == "string"
    json_rows = topics.read(topic, "name STRING, id BIGINT", valueFormat="json")
    assert sorted(tuple(row) for row in json_rows.collect()) == [(f"n{n}", n) for n in range(5)]
    said = error_of(lambda: topics.read(topic, valueFormat="schema").collect())
    assert "[LEDGER_SCHEMA.NOT_REGISTERED]" in said


def test_rows_that_were_trimmed_are_out_of_range_for_who_asks_for_them(
    topics, topic, keyed, by_hand
):
    topics.write(keyed(10, tasks=1), topic)
    by_hand.commit(topic, Trim(((0, 4),)))
    assert topics.numbers(topic) == [4, 5, 6, 7, 8, 9]
    at = json.dumps({topic: {"0": 2}})
    said = error_of(lambda: topics.numbers(topic, startingOffsets=at))
    assert "[LEDGER_OFFSETS.OUT_OF_RANGE]" in said
    assert topics.numbers(topic, startingOffsets=at, failOnDataLoss="false") == list(range(4, 10))


def test_many_partitions_are_read_by_few_tasks_each_in_order_once(topics, topic, keyed, tmp_path):
    """200 partitions that share the entries of small tasks, and the options that cut further."""
    long = keyed(6_000, keys=3_000, tasks=4).selectExpr(
        "key", "concat(value, ' ', repeat('x', 40)) AS value"
    )
    topics.write(long, topic, partitions=200)
    topics.write(keyed(300, keys=300, start=6_000), topic)  # so few that the commit has them

    def read(rows):
        found = rows.withColumn("task", F.spark_partition_id()).collect()
        by_partition = {}
        for row in found:
            by_partition.setdefault(row.partition, []).append(row.offset)
        assert sorted(int(row.value.split()[0]) for row in found) == list(range(6_300))
        assert len(by_partition) == 200
        for offsets in by_partition.values():
            assert offsets == list(range(len(offsets)))
        return len({row.task for row in found}), max(Counter(row.task for row in found).values())

    assert read(topics.read(topic, PLACE))[0] <= 17
    assert read(topics.read(topic, PLACE, minPartitions=60))[0] >= 60
    assert read(topics.read(topic, PLACE, maxRecordsPerPartition=250))[1] <= 250
    rows = topics.stream(topic, startingOffsets="earliest", maxOffsetsPerTrigger=4_000)
    topics.copy(rows.select("key", "value"), f"{topic}-copy", tmp_path / "checkpoint")
    copied = topics.read(f"{topic}-copy", "value STRING").collect()
    assert sorted(int(row.value.split()[0]) for row in copied) == list(range(6_300))


def test_rows_of_a_live_segment_have_their_own_times_before_and_after_it_is_sealed(
    topics, topic, by_hand
):
    by_hand.run(by_hand.client.topics.create(topic, 1))
    owner, now_ms = Owner(by_hand, topic, 0), int(time.time() * 1000)
    for ago_s in (40, 30, 20, 10):
        owner.append(3, now_ms - 1000 * ago_s)

    def since(ago_s, **more):
        moment = str(now_ms - 1000 * ago_s)
        return topics.numbers(topic, startingTimestamp=moment, **more)

    for seal in (lambda: None, owner.seal):
        seal()
        wait_until(lambda: since(50) == list(range(12)))  # the last add is announced, or sealed
        assert since(25) == list(range(6, 12))
        assert since(20, endingTimestamp=str(now_ms - 15_000)) == list(range(6, 9))
        assert since(5, startingOffsetsByTimestampStrategy="latest") == []
