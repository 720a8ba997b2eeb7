"""Columns as Spark's JVM hands them over, through what a topic keeps of them, and back into it."""

import pyarrow as pa
import pytest

from spark_ledger import Admin
from spark_ledger.spark.rows.typed_values import (
    ValueReader,
    ValueWriter,
    arrow_payload,
    spark_payload,
)
from spark_ledger.spark.spark_version import arrow_schema
from tests.kit.rows import Rows
from tests.kit.segments_seen import block_of
from tests.spark.scene import error_of

SIMPLE = """
    CAST(id % 2 = 0 AS BOOLEAN) AS b, CAST(id AS INT) AS i32, id * 1000000007 AS i64,
    CAST(id / 3 AS FLOAT) AS f, id / 7 AS d, CAST(id / 8 AS DECIMAL(20, 3)) AS m,
    concat('"é\\\\', chr(10), CAST(id AS STRING)) AS s, DATE'2024-02-28' + CAST(id AS INT) AS day,
    TIMESTAMP'2024-02-28 23:59:59.123456Z' + make_dt_interval(id) AS t,
    TIMESTAMP_NTZ'1969-12-31 23:59:59.9' AS n,
    transform(sequence(0, id % 3), x -> named_struct('a', CAST(x AS INT), 'b', nullif(x, 1))) AS l,
    if(id % 4 = 0, NULL, named_struct('x', nullif(id, 5), 'y', array(CAST(id AS STRING)))) AS st
"""
MORE = """
    CAST(id % 100 AS TINYINT) AS i8, CAST(id AS SMALLINT) AS i16,
    CAST(CAST(id AS STRING) AS BINARY) AS x,
    map(CAST(id AS STRING), array(id, NULL)) AS mm, make_dt_interval(id) AS v
"""


def frame(spark, columns):
    """Rows of which every fifth is null in all columns but `id`."""
    rows = spark.sql(f"SELECT id, {columns} FROM range(0, 200, 1, 2)")
    others = [f"if(id % 5 = 3, NULL, {name}) AS {name}" for name in rows.columns if name != "id"]
    return rows.selectExpr("id", *others)


def through_a_topic(written, value_format):
    """The rows as a reader makes them of what a writer made of them."""
    writer = ValueWriter.of(value_format, written.schema, "none")
    offered = spark_payload(arrow_payload(written.schema))
    reader = ValueReader.of(value_format, offered, None)

    def pass_through(batches):
        schema = arrow_schema(offered)
        for batch in batches:
            values = writer.values(batch, None)
            typed = isinstance(values, pa.RecordBatch)
            if not typed:
                values = pa.RecordBatch.from_arrays([values], names=["value"])
            columns = reader.columns(block_of(Rows(0, 0, 0, values, typed=typed)), "t")
            yield pa.RecordBatch.from_arrays(columns, schema=schema)

    return written.mapInArrow(pass_through, offered)


@pytest.mark.parametrize(
    ("value_format", "columns"), [("arrow", f"{SIMPLE}, {MORE}"), ("json", SIMPLE)]
)
def test_every_type_of_column_goes_through_a_topic_unchanged(spark, value_format, columns):
    written = frame(spark, columns)

    found = through_a_topic(written, value_format)

    assert found.columns == written.columns
    assert found.orderBy("id").collect() == written.orderBy("id").collect()


def test_spark_reads_the_json_that_is_written_and_its_own_json_is_read(spark):
    written = frame(spark, SIMPLE)
    kind = written.schema.simpleString()
    offered = spark_payload(arrow_payload(written.schema))
    writer = ValueWriter.of("json", written.schema, "none")
    reader = ValueReader.of("json", offered, None)

    def pack(batches):
        for batch in batches:
            yield pa.RecordBatch.from_arrays(
                [writer.values(batch, None).cast(pa.string())], names=["value"]
            )

    def parse(batches):
        schema = arrow_schema(offered)
        for batch in batches:
            values = pa.RecordBatch.from_arrays([batch.column(0).cast(pa.binary())], ["value"])
            columns = reader.columns(block_of(Rows(0, 0, 0, values)), "t")
            yield pa.RecordBatch.from_arrays(columns, schema=schema)

    expected = written.orderBy("id").collect()
    ours = written.mapInArrow(pack, "value STRING").selectExpr(f"from_json(value, '{kind}') AS r")
    assert ours.select("r.*").orderBy("id").collect() == expected
    options = "map('timestampFormat', 'yyyy-MM-dd HH:mm:ss.SSSSSSXXX',"
    options += " 'timestampNTZFormat', 'yyyy-MM-dd HH:mm:ss.SSSSSS')"
    theirs = written.selectExpr(f"to_json(struct(*), {options}) AS value")
    assert theirs.mapInArrow(parse, offered).orderBy("id").collect() == expected


def test_bytes_for_a_topic_with_a_schema_are_refused_and_nothing_of_the_write_is_there(
    spark, topics, topic
):
    columns = spark.range(5).selectExpr("id")
    topics.write(columns, topic, valueFormat="arrow")
    plain = spark.range(3).selectExpr("string(id) AS value")
    named = plain.selectExpr("value", f"'{topic}' AS topic")
    options = {"serviceUrl": topics.service_url}
    by_column = named.write.format("ledger").mode("append").options(**options)
    for write in (lambda: topics.write(plain, topic), by_column.save):
        said = error_of(write)
        assert "[LEDGER_SCHEMA.INCOMPATIBLE]" in said
        assert f"topic '{topic}' has a schema (version 1)" in said
        assert "schemaMode=none" in said
    found = topics.read(topic, valueFormat="arrow").select("id")
    assert found.orderBy("id").collect() == columns.collect()
    topics.write(plain, topic, schemaMode="none")
    said = error_of(topics.read(topic, valueFormat="arrow").select("id").collect)
    assert "offsets 5 to" in said and "the values are bytes" in said


def test_columns_that_are_written_to_rows_of_bytes_are_refused_and_the_topic_goes_on(
    spark, topics, topic
):
    plain = spark.range(5).selectExpr("string(id) AS key", "string(id) AS value")
    columns = spark.range(2).selectExpr("id")
    topics.write(plain, topic)
    named = columns.selectExpr("id", f"'{topic}' AS __topic")
    options = {"serviceUrl": topics.service_url, "valueFormat": "arrow"}
    by_column = named.write.format("ledger").mode("append").options(**options)
    for write in (lambda: topics.write(columns, topic, valueFormat="arrow"), by_column.save):
        said = error_of(write)
        assert f"[LEDGER_SCHEMA.INCOMPATIBLE] topic '{topic}' takes no columns" in said
        assert "partition 0 has 5 rows that follow no schema" in said
    topics.write(plain, topic)
    assert len(topics.values(topic)) == 10
    topics.write(columns, topic, mode="overwrite", valueFormat="arrow")
    assert topics.read(topic, valueFormat="arrow").count() == 2
    assert "[LEDGER_SCHEMA.INCOMPATIBLE]" in error_of(lambda: topics.write(plain, topic))


def test_rows_of_both_kinds_are_read_by_stepping_over_the_others_or_with_nulls(
    spark, topics, topic, tmp_path
):
    plain = spark.range(5).selectExpr("string(id) AS key", "string(id) AS value")
    topics.write(plain, topic)
    columns = spark.range(2).selectExpr("id")
    topics.write(columns, topic, valueFormat="arrow", schemaMode="none")
    topics.write(plain, topic)

    def ids(policy):
        schema = "id BIGINT, __offset BIGINT, __key STRING"
        rows = topics.read(topic, schema, valueFormat="arrow", onOtherFormat=policy).collect()
        return [(row.id, row["__offset"], row["__key"]) for row in rows]

    assert ids("skip") == [(0, 5, None), (1, 6, None)]
    assert [one[0] for one in ids("null")] == [None] * 5 + [0, 1] + [None] * 5
    assert ids("null")[3] == (None, 3, "3")
    assert "the values are bytes" in error_of(lambda: ids("fail"))
    assert topics.values(topic, onOtherFormat="skip") == [*"01234", *"01234"]
    assert topics.values(topic, onOtherFormat="null") == [*"01234", None, None, *"01234"]
    assert "has typed rows" in error_of(lambda: topics.values(topic))
    rows = topics.stream(topic, startingOffsets="earliest", onOtherFormat="skip").select("value")
    topics.copy(rows, f"{topic}-copy", tmp_path / "checkpoint")
    assert len(topics.values(f"{topic}-copy")) == 10


def test_a_schema_comes_with_a_write_without_rows_and_goes_when_it_is_withdrawn(
    spark, topics, topic
):
    plain = spark.range(1).selectExpr("string(id) AS value")
    columns = spark.range(3).selectExpr("id")
    topics.write(columns.limit(0), topic, valueFormat="arrow")
    with Admin(topics.service_url) as admin:
        assert [one.schema.names for one in admin.schema(topic).versions] == [["id"]]
        assert "[LEDGER_SCHEMA.INCOMPATIBLE]" in error_of(lambda: topics.write(plain, topic))
        topics.write(columns, topic, valueFormat="arrow")

        admin.withdraw_schema(topic)

        topics.write(plain, topic)
        said = error_of(lambda: topics.write(columns, topic, valueFormat="arrow"))
        assert "[LEDGER_SCHEMA.INCOMPATIBLE]" in said and "has 4 rows that follow no schema" in said
        assert topics.read(topic, valueFormat="arrow", onOtherFormat="skip").count() == 3
        admin.register_schema(topic, admin.schema(topic).versions[-1].schema)
        topics.write(columns, topic, valueFormat="arrow")
        assert topics.read(topic, valueFormat="arrow", onOtherFormat="skip").count() == 6
