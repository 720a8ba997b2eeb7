"""The columns of the source."""

import pickle

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    StringType,
    StructType,
)

from spark_ledger.errors import (
    SchemaIncompatible,
    SchemaMissingColumn,
    SchemaReservedColumn,
    SchemaTypeMismatch,
    SchemaUnknownColumn,
)
from spark_ledger.spark.options.options import shape_options
from spark_ledger.spark.rows import columns
from spark_ledger.topic.entry import pulsar_batch, pulsar_columns
from spark_ledger.topic.read.row_blocks import RUN, Block, BlockJoiner
from spark_ledger.topic.schema.records import RESERVED_NAMES
from tests.kit.pulsar_batches import batch_of, message
from tests.kit.rows import Rows, parts_of
from tests.kit.segments_seen import block_of
from tests.unit.spark_ledger.spark.typed_rows import HEADERS, ddl, rows, typed_rows


def arrow(declared: StructType) -> pa.Schema:
    return to_arrow_schema(declared, timezone="UTC")


PLACES = pa.schema(
    [
        ("key", pa.binary()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", pa.timestamp("us", tz="UTC")),
        ("timestampType", pa.int32()),
        ("ledgerId", pa.int64()),
        ("entryId", pa.int64()),
        ("batchIndex", pa.int32()),
        ("messageId", pa.string()),
        ("schemaVersion", pa.int32()),
    ]
)


def shape(**given: str):
    return shape_options(given)


def test_the_default_schema_is_kafkas():
    kafkas = (
        "key BINARY, value BINARY, topic STRING, partition INT, offset BIGINT, "
        "timestamp TIMESTAMP, timestampType INT"
    )
    assert ddl(kafkas) == columns.DEFAULT_SCHEMA == columns.read_schema(shape())
    with_headers = columns.read_schema(shape(includeHeaders="true"))
    assert with_headers == ddl(kafkas + ", headers HEADERS")
    text = "array<struct<key:string,value:binary>>"
    assert with_headers["headers"].dataType.simpleString() == text


def test_options_add_columns_to_the_schema():
    assert columns.read_schema(shape(valueFormat="string"))["value"].dataType == StringType()
    assert columns.read_schema(shape(includeMetadata="true")).names[7:] == [
        *("eventTime", "ledgerId", "entryId", "batchIndex", "messageId"),
        *("schemaVersion", "valueSize"),
    ]


def test_the_producer_of_a_row_is_told_on_request():
    declared = columns.read_schema(shape(includeProducer="true"))
    assert declared.names[7:] == ["producerName", "sequenceId"]
    wanted = columns.entry_columns(declared)
    assert {"producer_name", "sequence_id"} <= wanted
    sent = [batch_of([message(b"v"), message(b"w")], producer="p", sequence_id=7)]
    found = pulsar_columns.decode_batches([pulsar_batch.parse(one) for one in sent], wanted)
    batch = columns.to_spark(block_of(Rows(0, 0, 1, found)), "t", arrow(declared))
    assert batch.column("producerName").to_pylist() == ["p", "p"]
    assert batch.column("sequenceId").to_pylist() == [7, 8]


def test_rows_of_spark_have_no_producer_whatever_their_columns_are_called():
    declared = columns.read_schema(shape(includeProducer="true"))
    batch = columns.to_spark(rows(), "t", arrow(declared))
    assert batch.column("producerName").null_count == batch.column("sequenceId").null_count == 3
    own = pa.RecordBatch.from_pydict({"producer_name": ["x"], "sequence_id": [1]})
    asked = columns.read_schema(
        shape(valueFormat="arrow", includeProducer="true"), ddl("producer_name STRING")
    )
    typed = block_of(Rows(0, 0, 1, own, typed=True))
    made = columns.to_spark(typed, "t", arrow(asked), [own.column("producer_name")])
    assert made.column("producer_name").to_pylist() == ["x"]
    assert made.column("__producerName").to_pylist() == [None]
    assert made.column("__sequenceId").to_pylist() == [None]


def test_typed_rows_have_their_own_columns_first_and_metadata_after_them():
    payload = ddl("price DOUBLE, key STRING")
    offered = columns.read_schema(shape(valueFormat="arrow"), payload)
    assert offered == ddl(
        "price DOUBLE, key STRING, __key BINARY, __topic STRING, __partition INT, "
        "__offset BIGINT, __publishTime TIMESTAMP, __eventTime TIMESTAMP, __messageId STRING, "
        "__messageProperties HEADERS"
    )
    more = columns.read_schema(shape(valueFormat="json", includeMetadata="true"), payload)
    assert more.names[10:] == ["__ledgerId", "__entryId", "__batchIndex", "__schemaVersion"]
    assert columns.payload_of(more) == payload
    with pytest.raises(SchemaReservedColumn, match="'__Offset'"):
        columns.read_schema(shape(valueFormat="arrow"), ddl("__Offset DOUBLE"))


def test_reserved_names_are_those_of_the_columns_that_a_typed_read_adds():
    everything = shape(valueFormat="arrow", includeMetadata="true", includeProducer="true")
    added = columns.read_schema(everything, StructType([])).names
    assert {name.lower() for name in added} == RESERVED_NAMES


def test_a_payloads_names_may_begin_with_two_underscores():
    payload = ddl("__op STRING, __v BIGINT")
    offered = columns.read_schema(shape(valueFormat="arrow"), payload)
    assert columns.payload_of(offered) == payload
    columns.check_projection(offered, "arrow")


def test_rows_become_the_columns_of_the_default_schema():
    batch = columns.to_spark(rows(), "t", arrow(columns.DEFAULT_SCHEMA))
    assert batch.schema.equals(arrow(columns.DEFAULT_SCHEMA))
    assert batch.column("key").to_pylist() == [b"a", None, b"c"]
    assert batch.column("value").to_pylist() == [b"1", b"23", None]
    assert batch.column("topic").to_pylist() == ["t"] * 3
    assert batch.column("partition").to_pylist() == [3] * 3
    assert batch.column("offset").to_pylist() == [40, 41, 42]
    assert batch.column("timestamp").cast(pa.int64()).to_pylist() == [1_700_000_000_123_000] * 3
    assert batch.column("timestampType").to_pylist() == [0] * 3


def test_headers_and_the_place_of_a_row_are_columns():
    declared = columns.read_schema(shape(includeHeaders="true", includeMetadata="true"))
    batch = columns.to_spark(rows(), "t", arrow(declared))
    batch.validate(full=True)
    assert batch.column("headers").to_pylist() == HEADERS
    assert batch.column("eventTime").cast(pa.int64()).to_pylist() == [1, None, 3]
    assert batch.column("ledgerId").to_pylist() == [7] * 3
    assert batch.column("entryId").to_pylist() == [5] * 3
    assert batch.column("batchIndex").to_pylist() == [2, 3, 4]
    assert batch.column("messageId").to_pylist() == ["7:5:3:2", "7:5:3:3", "7:5:3:4"]
    assert batch.column("schemaVersion").to_pylist() == [0] * 3
    assert batch.column("valueSize").to_pylist() == [1, 2, None]


def test_what_an_entry_does_not_have_is_null_in_every_row():
    declared = columns.read_schema(shape(includeHeaders="true", includeMetadata="true"))
    batch = columns.to_spark(rows("event_time"), "t", arrow(declared))
    for name in ("key", "value", "headers", "valueSize"):
        assert batch.column(name).null_count == 3, name
    assert batch.column("offset").to_pylist() == [40, 41, 42]


def test_the_metadata_of_typed_rows_stands_beside_the_payload():
    payload = [pa.array([1.5, None]), pa.array(["x", "y"])]
    offered = columns.read_schema(
        shape(valueFormat="arrow", includeMetadata="true"), ddl("price DOUBLE, key STRING")
    )
    batch = columns.to_spark(typed_rows(), "t", arrow(offered), payload)
    assert batch.column("price").to_pylist() == [1.5, None]
    assert batch.column("key").to_pylist() == ["x", "y"]
    assert batch.column("__key").to_pylist() == [b"a", None]
    assert batch.column("__messageProperties").to_pylist() == HEADERS[:2]
    assert batch.column("__eventTime").null_count == 2
    assert batch.column("__offset").to_pylist() == [40, 41]
    assert batch.column("__messageId").to_pylist() == ["7:5:3:2", "7:5:3:3"]
    assert batch.column("__schemaVersion").to_pylist() == [4, 4]


def test_untyped_rows_read_with_a_payload_have_their_key_and_headers_too():
    declared = ddl("price DOUBLE, __key STRING, __messageProperties HEADERS")
    payload = [pa.array([1.0, 2.0, 3.0])]
    batch = columns.to_spark(rows(), "t", arrow(declared), payload)
    assert batch.column("__key").to_pylist() == ["a", None, "c"]
    assert batch.column("__messageProperties").to_pylist() == HEADERS


def test_the_value_of_typed_rows_is_an_error_never_null():
    with pytest.raises(SchemaIncompatible, match="partition 3 of topic 't' has typed rows from"):
        columns.to_spark(typed_rows(), "t", arrow(ddl("value BINARY")))
    with pytest.raises(SchemaIncompatible):
        columns.to_spark(typed_rows(), "t", arrow(ddl("valueSize INT")))
    batch = columns.to_spark(typed_rows(), "t", arrow(ddl("key STRING, offset BIGINT")))
    assert batch.to_pydict() == {"key": ["a", None], "offset": [40, 41]}


def test_a_declared_schema_is_a_projection_by_name_with_text_as_text():
    declared = ddl("Offset BIGINT, VALUE STRING")
    columns.check_projection(declared)
    batch = columns.to_spark(rows(), "t", arrow(declared))
    assert batch.to_pydict() == {"Offset": [40, 41, 42], "VALUE": ["1", "23", None]}


def test_key_and_value_keep_the_entrys_memory():
    given = rows()
    batch = columns.to_spark(given, "t", arrow(ddl("value BINARY")))
    assert (
        batch.column(0).buffers()[2].address
        == given.record_batch.column("value").buffers()[2].address
    )


def test_only_rows_with_a_key_of_the_filter_are_left():
    declared = arrow(ddl("offset BIGINT"))
    made = columns.to_spark(rows(), "t", declared)
    assert columns.with_keys(rows(), made, [b"c", b"x"]).column("offset").to_pylist() == [42]
    assert columns.with_keys(rows("value"), made, [b"c"]).num_rows == 0
    made = columns.to_spark(typed_rows(), "t", declared)
    assert columns.with_keys(typed_rows(), made, [b"a"]).column("offset").to_pylist() == [40]


def test_a_declared_column_that_no_topic_has_is_refused_by_name():
    with pytest.raises(SchemaUnknownColumn, match="'price'"):
        columns.check_projection(ddl("value BINARY, price DOUBLE"))
    with pytest.raises(SchemaTypeMismatch, match=r"'offset' is STRING, not BIGINT"):
        columns.check_projection(ddl("offset STRING"))
    with pytest.raises(SchemaTypeMismatch, match=r"'headers' is MAP<STRING,STRING>, not ARRAY"):
        columns.check_projection(ddl("headers MAP"))
    with pytest.raises(SchemaUnknownColumn, match="two columns 'value'"):
        columns.check_projection(ddl("value STRING, Value BINARY"))
    with pytest.raises(SchemaMissingColumn, match="no column"):
        columns.check_projection(StructType([]))


def test_a_declared_payload_has_any_names_but_those_of_other_columns():
    declared = ddl("price DOUBLE, value STRING, __op STRING, __offset BIGINT")
    columns.check_projection(declared, "arrow")
    assert columns.payload_of(declared) == ddl("price DOUBLE, value STRING, __op STRING")
    with pytest.raises(SchemaTypeMismatch, match="'__offset' is STRING"):
        columns.check_projection(ddl("__offset STRING"), "arrow")


@pytest.mark.parametrize(
    ("declared", "how", "wanted"),
    [
        ("value STRING", {}, {"value"}),
        ("topic STRING, offset BIGINT", {}, set()),
        ("topic STRING", {"with_key": True}, {"key", "__key"}),
        ("valueSize INT, KEY BINARY", {}, {"value", "key", "__key"}),
        (
            "headers HEADERS, eventTime TIMESTAMP",
            {},
            {"headers", "__messageProperties", "event_time", "__eventTime"},
        ),
        ("price DOUBLE, __topic STRING", {"value_format": "json"}, {"value"}),
        ("__topic STRING", {"value_format": "json"}, set()),
        (
            "Price DOUBLE, __key STRING",
            {"value_format": "arrow", "payload_names": ["price", "PRICE", "other"]},
            {"price", "PRICE", "key", "__key"},
        ),
    ],
)
def test_of_an_entry_only_what_the_columns_are_made_of_is_decoded(declared, how, wanted):
    assert columns.entry_columns(ddl(declared), **how) == wanted


def test_an_error_of_the_columns_survives_the_way_from_a_task():
    with pytest.raises(SchemaIncompatible) as caught:
        columns.to_spark(typed_rows(), "t", arrow(ddl("value BINARY")))
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def joined_of(blocks):
    joining = BlockJoiner()
    return [*(one for block in blocks for one in joining.add(block)), *joining.end()]


def test_rows_of_several_partitions_and_entries_have_the_columns_that_each_has():
    """A block of two partitions of one entry, and small blocks put together: as one by one."""
    first, typed = rows(), typed_rows()
    times = np.array([5, 6, 7])
    alike = block_of(Rows(9, 7, 50, first.record_batch, False, 0, 8, 6, 0, times))
    runs = np.array([(1, 10, 1, 4, 3, 2, 99), (2, 20, 2, 4, 3, 0, 99)], dtype=RUN)
    both = Block(runs, first.record_batch)
    ones = runs.copy()
    ones["rows"] = 1
    several = [first, alike, both, typed, Block(ones, typed.record_batch, True, 4)]

    together = joined_of(several)

    assert [block.num_rows for block in together] == [9, 4]
    for blocks, joined in ((several[:3], together[0]), (several[3:], together[1])):
        made = columns.to_spark(joined, "t", PLACES).to_pylist()
        assert made == [
            row
            for block in blocks
            for part in parts_of(block)
            for row in columns.to_spark(block_of(part), "t", PLACES).to_pylist()
        ]
    assert [together[0].place_of(row) for row in (0, 5, 6, 7, 8)] == [
        *((3, 40), (9, 9), (1, 10), (2, 20), (2, 21))
    ]
    nothing = [Block(block.runs, block.record_batch.select([])) for block in several[:3]]
    assert [block.num_rows for block in joined_of(nothing)] == [9]
