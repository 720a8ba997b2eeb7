"""The JSON schema of rows of columns: for each type the schema and the value that clients get."""

import datetime
import decimal
import json

import pyarrow as pa
import pytest

from spark_ledger.topic.entry.json_values import encode_for_clients
from spark_ledger.topic.schema import client_schemas
from spark_ledger.topic.schema.client_schemas import ClientSchemaType
from spark_ledger.topic.schema.column_schemas import client_schema
from spark_ledger.topic.schema.records import canonical

UTC = datetime.UTC
NOON = datetime.datetime(2024, 5, 1, 12, 0, 0, 7)
STRUCT = pa.struct([("a", pa.int32()), pa.field("b", pa.string(), nullable=False)])
RECORD = [{"name": "a", "type": ["null", "int"], "default": None}, {"name": "b", "type": "string"}]


def record(name, namespace, fields):
    return {"type": "record", "name": name, "namespace": namespace, "fields": fields}


EVERY_TYPE = {
    "boolean": (pa.bool_(), True, "boolean", True),
    "tinyint": (pa.int8(), -1, "int", -1),
    "smallint": (pa.int16(), 2, "int", 2),
    "int": (pa.int32(), 3, "int", 3),
    "bigint": (pa.int64(), 2**62, "long", 2**62),
    "float": (pa.float32(), 0.5, "float", 0.5),
    "double": (pa.float64(), 0.1, "double", 0.1),
    "not a number": (pa.float64(), float("nan"), "double", "NaN"),
    "decimal": (
        pa.decimal128(38, 2),
        decimal.Decimal("9" * 36 + ".50"),
        "string",
        "9" * 36 + ".50",
    ),
    "string": (pa.string(), 'é"', "string", 'é"'),
    "binary": (pa.binary(), b"\x00q", "bytes", "AHE="),
    "date": (pa.date32(), NOON.date(), "string", "2024-05-01"),
    "timestamp": (
        pa.timestamp("us", "UTC"),
        NOON.replace(tzinfo=UTC),
        "string",
        "2024-05-01T12:00:00.000007Z",
    ),
    "timestamp_ntz": (pa.timestamp("us"), NOON, "string", "2024-05-01T12:00:00.000007"),
    "time": (pa.time64("ns"), NOON.time(), "string", "12:00:00.000007000"),
    "interval": (pa.duration("us"), datetime.timedelta(seconds=1), "long", 1_000_000),
    "struct": (
        STRUCT,
        {"a": None, "b": "x"},
        record("column", "row", RECORD),
        {"b": "x"},
    ),
    "array": (
        pa.list_(STRUCT),
        [{"a": 1, "b": "x"}, None],
        {"type": "array", "items": record("element", "row.column", RECORD)},
        [{"a": 1, "b": "x"}, None],
    ),
    "map": (
        pa.map_(pa.string(), pa.int64()),
        [('a"', 1), ("b", None)],
        {"type": "map", "values": "long"},
        {'a"': 1, "b": None},
    ),
    "map of numbers": (
        pa.map_(pa.int32(), STRUCT),
        [(-1, {"a": 1, "b": "x"})],
        {"type": "map", "values": record("value", "row.column", RECORD)},
        {"-1": {"a": 1, "b": "x"}},
    ),
    "map of days": (
        pa.map_(pa.date32(), pa.bool_()),
        [(NOON.date(), True)],
        {"type": "map", "values": "boolean"},
        {"2024-05-01": True},
    ),
    "map of arrays": (
        pa.map_(pa.list_(pa.int32()), pa.int32()),
        [([1, 2], 3)],
        {
            "type": "array",
            "items": record(
                "element",
                "row.column",
                [
                    {"name": "key", "type": {"type": "array", "items": "int"}},
                    {"name": "value", "type": ["null", "int"], "default": None},
                ],
            ),
        },
        [{"key": [1, 2], "value": 3}],
    ),
}


@pytest.mark.parametrize("case", EVERY_TYPE)
def test_each_type_has_a_schema_and_a_value_that_fits_it(case):
    kind, value, avro, expected = EVERY_TYPE[case]
    columns = canonical(pa.schema([pa.field("column", kind)]))
    batch = pa.record_batch([pa.array([value, None, value], kind)], schema=columns)

    schema = client_schema(columns)
    rows = [json.loads(text) for text in encode_for_clients(batch).to_pylist()]

    client_schemas.check(schema)
    assert schema.kind is ClientSchemaType.JSON
    assert json.loads(schema.data) == {
        "type": "record",
        "name": "row",
        "fields": [{"name": "column", "type": ["null", avro], "default": None}],
    }
    assert rows == [{"column": expected}, {}, {"column": expected}]
    assert rows[1:] == [json.loads(text) for text in encode_for_clients(batch.slice(1)).to_pylist()]


def test_a_column_that_is_never_null_is_no_union_and_a_name_that_avro_lacks_is_left_out():
    fields = [pa.field("id", pa.int64(), nullable=False), pa.field("größe", pa.int64())]
    fields.append(pa.field("s", pa.struct([("a b", pa.int32()), ("c", pa.int32())])))
    plain = json.loads(client_schema(canonical(pa.schema(fields))).data)
    assert [field["name"] for field in plain["fields"]] == ["id", "s"]
    assert plain["fields"][0] == {"name": "id", "type": "long"}
    assert [field["name"] for field in plain["fields"][1]["type"][1]["fields"]] == ["c"]


def test_equal_names_at_several_places_are_several_records():
    inner = pa.struct([("s", pa.struct([("s", pa.int32())]))])
    columns = canonical(pa.schema([("s", inner), ("row", inner), ("l", pa.list_(inner))]))
    client_schemas.check(client_schema(columns))
