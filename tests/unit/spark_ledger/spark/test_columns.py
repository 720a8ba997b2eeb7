"""The columns of the source and the sink."""

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    BinaryType,
    DoubleType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from spark_ledger.errors import SchemaMissingColumn, SchemaTypeMismatch, SchemaUnknownColumn
from spark_ledger.spark import schema
from spark_ledger.topic.slice_reader import Rows


def rows() -> Rows:
    key = pa.array([b"a", None, b"c"], pa.binary())
    value = pa.array([b"1", b"2", None], pa.binary())
    columns = pa.record_batch({"key": key, "value": value})
    return Rows(3, 40, 1_700_000_000_123, columns)


KINDS = {
    "BINARY": BinaryType(),
    "STRING": StringType(),
    "INT": IntegerType(),
    "BIGINT": LongType(),
    "DOUBLE": DoubleType(),
    "TIMESTAMP": TimestampType(),
}


def ddl(text: str) -> StructType:
    """Columns written as in SQL (pyspark's own parser needs a JVM)."""
    columns = (column.split() for column in text.split(","))
    return StructType([StructField(name, KINDS[kind]) for name, kind in columns])


def arrow(declared: StructType) -> pa.Schema:
    return to_arrow_schema(declared, timezone="UTC")


def test_the_default_schema_is_kafkas():
    kafkas = (
        "key BINARY, value BINARY, topic STRING, partition INT, offset BIGINT, "
        "timestamp TIMESTAMP, timestampType INT"
    )
    assert ddl(kafkas) == schema.DEFAULT_SCHEMA


def test_rows_become_the_columns_of_the_default_schema():
    batch = schema.to_spark(rows(), "t", arrow(schema.DEFAULT_SCHEMA))
    assert batch.schema.equals(arrow(schema.DEFAULT_SCHEMA))
    assert batch.column("key").to_pylist() == [b"a", None, b"c"]
    assert batch.column("value").to_pylist() == [b"1", b"2", None]
    assert batch.column("topic").to_pylist() == ["t"] * 3
    assert batch.column("partition").to_pylist() == [3] * 3
    assert batch.column("offset").to_pylist() == [40, 41, 42]
    assert batch.column("timestamp").cast(pa.int64()).to_pylist() == [1_700_000_000_123_000] * 3
    assert batch.column("timestampType").to_pylist() == [0] * 3


def test_a_declared_schema_is_a_projection_by_name_with_text_as_text():
    declared = ddl("Offset BIGINT, VALUE STRING")
    schema.check_projection(declared)
    batch = schema.to_spark(rows(), "t", arrow(declared))
    assert batch.to_pydict() == {"Offset": [40, 41, 42], "VALUE": ["1", "2", None]}


def test_key_and_value_keep_the_entrys_memory():
    given = rows()
    batch = schema.to_spark(given, "t", arrow(ddl("value BINARY")))
    assert (
        batch.column(0).buffers()[2].address
        == given.record_batch.column("value").buffers()[2].address
    )


def test_a_declared_column_that_no_topic_has_is_refused_by_name():
    with pytest.raises(SchemaUnknownColumn, match="'price'"):
        schema.check_projection(ddl("value BINARY, price DOUBLE"))
    with pytest.raises(SchemaTypeMismatch, match=r"'offset' is STRING, not BIGINT"):
        schema.check_projection(ddl("offset STRING"))


@pytest.mark.parametrize(
    ("declared", "kind", "says"),
    [
        ("key BINARY", SchemaMissingColumn, "'value'"),
        ("value INT", SchemaTypeMismatch, "'value' is INT, not STRING or BINARY"),
        ("key BIGINT, value STRING", SchemaTypeMismatch, "'key' is BIGINT"),
        ("value STRING, price DOUBLE", SchemaUnknownColumn, "'price'"),
        ("value STRING, topic STRING", SchemaUnknownColumn, "'topic'"),
        ("value STRING, VALUE STRING", SchemaUnknownColumn, "two columns 'value'"),
    ],
)
def test_columns_that_cannot_be_written_are_refused_by_name(declared, kind, says):
    with pytest.raises(kind, match=says):
        schema.check_written(ddl(declared))


def test_key_and_value_are_found_whatever_their_order_and_case():
    batch = pa.record_batch({"VALUE": pa.array(["x", None]), "key": pa.array([b"k", None])})
    key, value = schema.key_and_value(batch)
    assert key is not None
    assert (key.to_pylist(), value.to_pylist()) == ([b"k", None], ["x", None])
    assert schema.key_and_value(batch.select(["VALUE"]))[0] is None
