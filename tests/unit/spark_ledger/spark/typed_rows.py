"""Rows of every type that a column of Spark may have."""

import pyarrow as pa
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    DoubleType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from spark_ledger.spark.rows import columns
from spark_ledger.topic.entry import message_batch
from spark_ledger.topic.read.row_blocks import Block
from tests.kit.rows import Rows
from tests.kit.segments_seen import block_of

HEADERS = [[{"key": "h", "value": b"1"}, {"key": "h", "value": None}], None, []]


KINDS: dict[str, DataType] = {
    "BINARY": BinaryType(),
    "STRING": StringType(),
    "INT": IntegerType(),
    "BIGINT": LongType(),
    "DOUBLE": DoubleType(),
    "TIMESTAMP": TimestampType(),
    "HEADERS": columns.HEADERS_TYPE,
    "TEXTS": ArrayType(
        StructType([StructField("key", StringType()), StructField("value", StringType())])
    ),
    "MAP": MapType(StringType(), StringType()),
}


def ddl(text: str) -> StructType:
    """Columns written as in SQL (pyspark's own parser needs a JVM)."""
    columns = (column.split() for column in text.split(","))
    return StructType([StructField(name, KINDS[kind]) for name, kind in columns])


def rows(*names: str) -> Block:
    """Rows 40 to 42 of partition 3, of which the entry has the columns named (all by default)."""
    made = {
        "key": pa.array([b"a", None, b"c"], pa.binary()),
        "value": pa.array([b"1", b"23", None], pa.binary()),
        "event_time": pa.array([1, None, 3], message_batch.TYPES["event_time"]),
        "headers": pa.array(HEADERS, message_batch.HEADERS_TYPE),
    }
    batch = pa.record_batch({name: made[name] for name in names or made})
    place = {"ledger_id": 7, "entry_id": 5, "entry_row": 2}
    return block_of(Rows(3, 40, 1_700_000_000_123, batch, **place))


def typed_rows() -> Block:
    made = {
        "__key": pa.array([b"a", None], pa.binary()),
        "__messageProperties": pa.array(HEADERS[:2], message_batch.HEADERS_TYPE),
        "price": pa.array([1.5, None]),
    }
    return block_of(Rows(3, 40, 1000, pa.record_batch(made), True, 4, 7, 5, 2))
