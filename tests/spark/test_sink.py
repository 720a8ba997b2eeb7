"""What a batch write can do: columns, topics, overwriting, bad records, all in one commit."""

import json

import pytest
from pyspark.sql import DataFrame

from spark_ledger import Admin
from spark_ledger.topic import blocking
from tests.spark.topics import SparkTopics, error_of


def save(topics: SparkTopics, rows: DataFrame, mode: str = "append", **options) -> None:
    """A write whose rows name their topics."""
    writer = rows.write.format("ledger").option("serviceUrl", topics.service_url)
    writer.options(**options).mode(mode).save()


def state_of(topics: SparkTopics, topic: str):
    """The topic, and what is in its log."""
    cluster = blocking.topics(topics.service_url)
    info = cluster.run(cluster.client.topics.open(topic))
    return info, cluster.run(cluster.client.log(info.id).fold(fresh=True))


def is_there(topics: SparkTopics, topic: str) -> bool:
    cluster = blocking.topics(topics.service_url)
    return cluster.run(cluster.client.topics.find(topic)) is not None


@pytest.fixture
def mixed(spark, topic):
    """`mixed(rows)`: numbered rows that name topic -0, -1 and -2 in turn."""

    def make(rows: int, tasks: int = 2) -> DataFrame:
        return spark.range(0, rows, 1, tasks).selectExpr(
            f"concat('{topic}-', id % 3) AS topic", "cast(id AS string) AS value"
        )

    return make


def test_rows_go_to_the_topics_that_they_name_in_one_commit(topics, topic, mixed):
    save(topics, mixed(300), userMetadata="nightly")
    others = []
    for i in range(3):
        assert topics.numbers(f"{topic}-{i}") == list(range(i, 300, 3))
        info, state = state_of(topics, f"{topic}-{i}")
        others.append(info.id)
        assert state.next == 1
    assert len(set(others)) == 3


def test_the_option_goes_before_the_column_topic(topics, topic, mixed):
    topics.write(mixed(6), f"{topic}-all")
    assert topics.numbers(f"{topic}-all") == list(range(6))
    assert not is_there(topics, f"{topic}-0")


def test_a_row_without_a_topic_fails_the_whole_write(spark, topics, topic):
    rows = spark.sql(f"SELECT * FROM VALUES ('{topic}', 'a'), (NULL, 'b') AS t(topic, value)")
    said = error_of(lambda: save(topics, rows.coalesce(1)))
    assert "[LEDGER_NULL_TOPIC_IN_DATA]" in said
    assert not is_there(topics, topic)


def test_several_topics_are_idempotent_under_one_version(topics, topic, mixed):
    for _ in range(2):
        save(topics, mixed(30), txnAppId=topic, txnVersion=3)
    save(topics, mixed(90), txnAppId=topic, txnVersion=2)
    assert [len(topics.numbers(f"{topic}-{i}")) for i in range(3)] == [10, 10, 10]


def test_one_name_and_version_count_for_each_topic_of_an_option_and_once_for_rows_that_name_theirs(
    topics, topic, keyed, mixed
):
    once = {"txnAppId": topic, "txnVersion": 1}
    for name in ("a", "b"):
        topics.write(keyed(5), f"{topic}-{name}", **once)
        assert topics.numbers(f"{topic}-{name}") == list(range(5))
    save(topics, mixed(30).where("topic LIKE '%-0'"), **once)
    assert topics.numbers(f"{topic}-0") == list(range(0, 30, 3))
    save(topics, mixed(30).where("topic LIKE '%-1'"), **once)
    assert not is_there(topics, f"{topic}-1")


def test_a_partition_column_says_where_a_row_goes(spark, topics, topic):
    rows = spark.range(40).selectExpr(
        "cast(id AS string) AS value", "cast(id % 4 AS int) partition"
    )
    topics.write(rows, topic, partitions=4)
    read = topics.read(topic, "value STRING, partition INT").collect()
    assert all(int(row.value) % 4 == row.partition for row in read) and len(read) == 40
    said = error_of(lambda: topics.write(rows.selectExpr("value", "9 AS partition"), topic))
    assert "[LEDGER_WRITE.PARTITION_INVALID]" in said
    topics.write(rows.selectExpr("value", "9 AS partition"), topic, routing="single")
    assert topics.numbers(topic) == sorted([*range(40), *range(40)])


@pytest.mark.parametrize(
    ("routing", "by_partition"),
    [("roundRobin", [5, 5, 5, 5]), ("single", [20, 0, 0, 0]), ("spark", [20, 0, 0, 0])],
)
def test_routing_shares_rows_out_as_it_says(spark, topics, topic, routing, by_partition):
    rows = spark.range(0, 20, 1, 1).selectExpr("cast(id AS string) AS value")
    topics.write(rows, topic, partitions=4, routing=routing)
    _, state = state_of(topics, topic)
    assert [one.end_offset for one in state.partitions] == by_partition


def test_headers_and_event_time_come_back(spark, topics, topic):
    rows = spark.sql(
        "SELECT 'v' AS value, map('trace', 'abc') AS headers, TIMESTAMP'2024-02-03 04:05:06.789Z' "
        "AS eventTime"
    )
    topics.write(rows, topic)
    columns = "value STRING, headers ARRAY<STRUCT<key: STRING, value: BINARY>>, eventTime TIMESTAMP"
    row = topics.read(topic, columns).selectExpr("headers", "cast(eventTime AS double) AS at")
    found = row.collect()[0]
    assert [(one.key, bytes(one.value)) for one in found.headers] == [("trace", b"abc")]
    assert found.at == 1706933106.789


def test_overwriting_takes_the_place_of_all_rows(topics, topic, keyed):
    topics.write(keyed(50), topic, partitions=2)
    topics.write(keyed(7, start=100), topic, mode="overwrite")
    assert topics.numbers(topic) == list(range(100, 107))
    topics.write(keyed(7).limit(0), topic, mode="overwrite")
    assert topics.values(topic) == []
    topics.write(keyed(3), f"{topic}-new", mode="overwrite", partitions=2)
    assert topics.numbers(f"{topic}-new") == [0, 1, 2]


def test_rows_that_a_subscription_holds_are_overwritten_on_demand_only(spark, topics, topic, keyed):
    topics.write(keyed(5), topic)
    with Admin(topics.service_url) as admin:
        admin.create_subscription(topic, "live", at={0: 3})
    table = topic.replace("-", "_")
    spark.sql(f"CREATE TABLE {table} (key STRING, value STRING) USING ledger")
    insert = f"INSERT OVERWRITE {table} WITH (topic '{topic}', serviceUrl '{topics.service_url}'"
    ways = (
        lambda: topics.write(keyed(7), topic, mode="overwrite"),
        lambda: spark.sql(f"{insert}) VALUES ('k', '7')"),
    )
    for way in ways:
        said = error_of(way)
        assert "[LEDGER_SUBSCRIPTION.BUSY]" in said
        assert "'live' holds partition 0 from offset 3 on" in said
        assert "overwriteHeld=true" in said
    assert topics.numbers(topic) == [0, 1, 2, 3, 4]
    spark.sql(f"{insert}, overwriteHeld 'true') VALUES ('k', '7')")
    assert topics.numbers(topic) == [7]
    said = error_of(lambda: topics.write(keyed(7), topic, overwriteHeld=True))
    assert "[LEDGER_OPTION.CONFLICT] overwriteHeld is true, but the write only adds rows" in said


def test_overwriting_is_refused_when_another_wrote_meanwhile(spark, topics, topic, keyed):
    topics.write(keyed(5), topic)
    url = topics.service_url

    def writes_too(batches):
        from spark_ledger.spark.options import options
        from spark_ledger.spark.write import sink
        from spark_ledger.spark.write.tasks import commit_rows, write_rows
        from spark_ledger.spark.write.topic_writers import Task

        for batch in batches:
            from pyspark.sql.types import StringType, StructField, StructType

            shape = StructType(
                [StructField("key", StringType()), StructField("value", StringType())]
            )
            wanted = options.batch_write_options({"topic": topic, "serviceUrl": url})
            other = sink.open_batch_writer(wanted, shape, False)
            task = Task(other.intent, 0, 0, {})
            written = write_rows(other.job, task, [batch], version=0)
            commit_rows(other.job, other.intent, 0, [written], ends_intent=True)
            yield batch

    rows = keyed(3, tasks=1, start=10).mapInArrow(writes_too, "key STRING, value STRING")
    said = error_of(lambda: topics.write(rows, topic, mode="overwrite"))
    assert "[LEDGER_TXN.CONFLICT]" in said
    assert topics.numbers(topic) == [0, 1, 2, 3, 4, 10, 11, 12]


def test_what_is_overwritten_is_named_by_the_option(topics, mixed):
    said = error_of(lambda: save(topics, mixed(3), mode="overwrite"))
    assert "[LEDGER_OPTION.MISSING] the write replaces rows" in said


def test_bad_records_are_set_aside_with_their_reason_in_the_same_commit(spark, topics, topic):
    bad = f"{topic}-bad"
    rows = spark.sql(
        f"SELECT * FROM VALUES ('{topic}', 'good', 0), (NULL, 'nowhere', 0),"
        f" ('no good', 'named', 0), ('{topic}', 'far', 7) AS t(topic, value, partition)"
    )
    big = spark.sql(f"SELECT '{topic}' topic, repeat('x', 17 * 1024 * 1024) value, 0 partition")
    save(topics, rows.union(big), badRecordsTopic=bad, txnAppId=topic, txnVersion=4)
    assert topics.values(topic) == ["good"]
    columns = "value STRING, headers ARRAY<STRUCT<key: STRING, value: BINARY>>"
    found = {}
    for row in topics.read(bad, columns).collect():
        told = {one.key: one.value and bytes(one.value).decode() for one in row.headers}
        assert (told["txnAppId"], told["txnVersion"]) == (topic, "4")
        found[row.value[:8]] = (told["reason"].split("]")[0][1:], told["topic"], told["partition"])
    assert found == {
        "nowhere": ("LEDGER_NULL_TOPIC_IN_DATA", None, "0"),
        "named": ("LEDGER_TOPIC.INVALID_NAME", "no good", "0"),
        "far": ("LEDGER_WRITE.PARTITION_INVALID", topic, "7"),
        "xxxxxxxx": ("LEDGER_WRITE.MESSAGE_TOO_BIG", topic, "0"),
    }
    (_, one), (_, other) = state_of(topics, topic), state_of(topics, bad)
    assert one.commit_ms == other.commit_ms


def test_typed_rows_are_written_as_columns_and_those_that_do_not_fit_are_set_aside(
    spark, topics, topic
):
    rows = spark.range(10).selectExpr(
        "id", "concat('n', id) AS name", "cast(id AS string) AS __key"
    )
    topics.write(rows, topic, valueFormat="arrow", partitions=2)
    cluster = blocking.topics(topics.service_url)
    info, state = state_of(topics, topic)
    assert len(cluster.run(cluster.client.schemas.of(info)).versions) == 1
    assert sum(one.end_offset for one in state.partitions) == 10
    said = error_of(lambda: topics.write(rows.drop("name"), topic, valueFormat="arrow"))
    assert "[LEDGER_SCHEMA.INCOMPATIBLE]" in said
    wider = rows.selectExpr("*", "1.5D AS price")
    topics.write(wider, topic, valueFormat="arrow", mergeSchema=True)
    assert len(cluster.run(cluster.client.schemas.of(info)).versions) == 2
    absent = lambda: topics.write(rows, f"{topic}-x", valueFormat="schema")  # noqa: E731
    assert "[LEDGER_SCHEMA.NOT_REGISTERED]" in error_of(absent)
    assert not is_there(topics, f"{topic}-x")
    odd = spark.sql("SELECT 'NaN' AS name, double('NaN') AS d UNION ALL SELECT 'one', 1.0D")
    topics.write(odd, f"{topic}-j", valueFormat="json", badRecordsTopic=f"{topic}-j-bad")
    assert [json.loads(text) for text in topics.values(f"{topic}-j")] == [{"name": "one", "d": 1.0}]
    assert len(topics.read(f"{topic}-j-bad").collect()) == 1


def test_quorums_and_durability_hold_for_the_ledgers_of_one_write(spark, topics, topic):
    rows = spark.range(0, 3000, 1, 1).selectExpr("repeat('x', 100) AS value")
    topics.write(rows, topic)
    topics.write(rows, topic, ensembleSize=2, writeQuorum=2, ackQuorum=1, durability="page-cache")
    cluster = blocking.topics(topics.service_url)
    _, state = state_of(topics, topic)
    found = []
    for ledger in sorted(state.ledgers()):
        record = cluster.run(cluster.client.ledgers.record(ledger)).record
        quorums = (record.ensemble_size, record.write_quorum, record.ack_quorum)
        found.append((quorums, record.durability))
    assert found == [((3, 3, 2), "synced"), ((2, 2, 1), "page-cache")]


def test_partitions_of_a_topic_that_is_there_cannot_be_asked_otherwise(topics, topic, keyed):
    topics.write(keyed(4), topic, partitions=2)
    said = error_of(lambda: topics.write(keyed(4), topic, partitions=3))
    assert "[LEDGER_OPTION.CONFLICT] partitions is 3" in said
    topics.write(keyed(4, start=4), topic, partitions=2)
    assert topics.numbers(topic) == list(range(8))


def test_what_is_refused_at_once_makes_no_topic(topics, topic, keyed):
    rows = keyed(3).selectExpr("value", "1.5 AS price")
    assert "[LEDGER_SCHEMA.UNKNOWN_COLUMN] column 'price'" in error_of(
        lambda: topics.write(rows, topic)
    )
    said = error_of(lambda: topics.write(keyed(3), topic, userMetadata="€" * 8000))
    assert "[LEDGER_OPTION.INVALID_VALUE]" in said
    broken = keyed(3).selectExpr("CAST(raise_error('broken row') AS STRING) AS value")
    assert "broken row" in error_of(lambda: topics.write(broken, topic))
    assert not is_there(topics, topic)


def test_a_task_that_may_hold_little_writes_many_topics_whole(spark, topics, topic):
    rows = spark.range(0, 40_000, 1, 1).selectExpr(
        f"concat('{topic}-', id % 40) AS topic", "concat(id, repeat('x', 300)) AS value"
    )
    save(topics, rows, maxInFlightBytes="1m")
    reader = spark.read.format("ledger").option("serviceUrl", topics.service_url)
    read = reader.option("subscribePattern", f"{topic}-.*").load()
    counts = {row.topic: row["count"] for row in read.groupBy("topic").count().collect()}
    assert counts == {f"{topic}-{i}": 1000 for i in range(40)}
