"""Rows of several versions of clients' schemas in one read, and the columns of each type."""

import pyarrow as pa
import pytest

from spark_ledger import errors
from tests.kit.client_values import (
    avro_bytes,
    block_of,
    json_text,
    reader_of,
    record,
    rows_of,
    schema_of,
)


def test_rows_of_several_versions_keep_their_order_and_are_of_the_newest_version():
    old, new = record(("a", "int")), record(("a", "long"), ("b", "string", "-"))
    reader = reader_of(schema_of("JSON", old), schema_of("JSON", new))
    numbers = [i % 2 for i in range(1000)]
    text = [json_text({"a": i} | ({"b": str(i)} if n else {})) for i, n in enumerate(numbers)]
    found = reader.read(block_of(text, numbers))
    assert found.columns.to_pylist() == [
        {"a": i, "b": str(i) if n else "-"} for i, n in enumerate(numbers)
    ]
    assert not found.bad
    assert not found.without_version.any()


def test_nulls_have_columns_of_nulls_and_rows_without_version_are_marked():
    reader = reader_of(schema_of("JSON", record(("a", "int"))))
    values = [b'{"a":1}', None, None, b"bytes", b'{"a":2}', b'{"a":3}']
    found = reader.read(block_of(values, [0, 0, None, None, 7, -1]))
    assert found.columns.column(0).to_pylist()[:3] == [1, None, None]
    assert found.without_version.tolist() == [False, False, False, True, False, False]
    assert sorted(found.bad) == [4, 5]
    assert "no version 7" in found.bad[4]


def test_a_query_is_read_by_the_newest_version_that_has_its_columns():
    versions = [
        schema_of("JSON", record(("a", "int"), ("b", "string"))),
        schema_of("JSON", record(("a", "long"), ("b", "string"))),
        schema_of("JSON", record(("a", "long"))),
    ]

    def chosen(**columns):
        return reader_of(*versions, declared=pa.schema(list(columns.items()))).number

    assert reader_of(*versions).number == 2
    assert chosen(a=pa.int64()) == 2
    assert chosen(a=pa.int64(), b=pa.string()) == 1
    assert chosen(a=pa.int32(), b=pa.string()) == 1  # a narrower type reads the wider
    assert chosen(other=pa.int32()) == 2


def test_key_and_value_are_two_columns_from_the_value_or_from_the_messages_key():
    key, value = json_text(record(("id", "long"))), json_text(record(("n", "int")))
    data = b"".join(len(part).to_bytes(4, "big") + part for part in (key, value))
    types = {"key.schema.type": "AVRO", "value.schema.type": "JSON"}
    inline = schema_of("KEY_VALUE", data=data, properties=types | {"kv.encoding.type": "INLINE"})
    separated = schema_of(
        "KEY_VALUE", data=data, properties=types | {"kv.encoding.type": "SEPARATED"}
    )
    encoded = avro_bytes(record(("id", "long")), {"id": 300})
    text = b'{"n":5}'
    joined = b"".join(len(part).to_bytes(4, "big") + part for part in (encoded, text))
    row = {"key": {"id": 300}, "value": {"n": 5}}
    half = {"key": {"id": 300}, "value": None}
    no_value = len(encoded).to_bytes(4, "big") + encoded + b"\xff\xff\xff\xff"
    values = [joined, no_value, joined[:-1], b"\0\0", joined + b"x", b""]
    assert rows_of(reader_of(inline), values) == [row, half, None, None, None, None]
    keys = [encoded, encoded, b""]
    assert rows_of(reader_of(separated), [text, None, text], None, keys) == [row, half, None]
    assert reader_of(inline).entry_columns == {"value", "client_version"}
    assert reader_of(separated).entry_columns == {"key", "value", "client_version"}


FIELDS = {
    "counts": ({"type": "map", "values": "int"}, [("k", 1)]),
    "data": ("bytes", b"\0q"),
    "text": (["null", "string"], "x"),
    "more": ({"type": "map", "values": "string"}, [("a", "b")]),
    "place": (
        record(("city", "string"), ("floor", "int"), name="Place"),
        {"city": "B", "floor": 2},
    ),
    "number": ("long", 7),
    "mixed": (["null", "string", "long"], {"member0": None, "member1": 3}),
}
IN_JSON = {"counts": {"k": 1}, "data": "AHE=", "more": {"a": "b"}, "mixed": 3}


@pytest.mark.parametrize("left_out", [[], ["mixed"], ["mixed", "counts"], ["mixed", "more"]])
@pytest.mark.parametrize("encoding", ["INLINE", "SEPARATED"])
def test_a_pairs_fields_of_json_keep_their_names_wherever_maps_are_among_them(encoding, left_out):
    names = [name for name in FIELDS if name not in left_out]
    for turn in range(len(names)):
        order = names[turn:] + names[:turn]
        part = json_text(record(*((name, FIELDS[name][0]) for name in order)))
        types = {"key.schema.type": "JSON", "value.schema.type": "JSON"}
        data = 2 * (len(part).to_bytes(4, "big") + part)
        schema = schema_of("KEY_VALUE", None, data, types | {"kv.encoding.type": encoding})
        text = json_text({name: IN_JSON.get(name, FIELDS[name][1]) for name in reversed(names)})
        row = {name: FIELDS[name][1] for name in order}
        joined = 2 * (len(text).to_bytes(4, "big") + text)
        values, keys = ([joined], None) if encoding == "INLINE" else ([text], [text])
        assert rows_of(reader_of(schema), values, None, keys) == [{"key": row, "value": row}]


PLAIN = {
    "STRING": (b"\xc3\xa9", "é", b"\xff"),
    "BOOLEAN": (b"\1", True, b""),
    "INT8": (b"\xff", -1, b"\0\0"),
    "INT16": (b"\1\0", 256, b"\0"),
    "INT32": (b"\xff\xff\xff\xfe", -2, b"\0"),
    "INT64": (b"\0\0\0\0\0\0\1\0", 256, b""),
    "FLOAT": (b"\x3f\xc0\0\0", 1.5, b"\0"),
    "DOUBLE": (b"\x3f\xf8\0\0\0\0\0\0", 1.5, b"\0"),
    "PROTOBUF_NATIVE": (b"\x08\1", b"\x08\1", None),
    "INSTANT": (bytes(12), bytes(12), None),
}


@pytest.mark.parametrize("kind", PLAIN)
def test_values_without_fields_are_one_column(kind):
    good, expected, bad = PLAIN[kind]
    reader = reader_of(schema_of(kind))
    rows = rows_of(reader, [good, bad, None])
    no_value = {"value": None}
    assert rows == [{"value": expected}, no_value if bad is None else None, no_value]
    assert reader.has_columns == (kind not in ("PROTOBUF_NATIVE", "INSTANT"))


def test_avro_and_json_that_are_no_record_are_one_column():
    reader = reader_of(schema_of("AVRO", {"type": "array", "items": "string"}))
    data = avro_bytes({"type": "array", "items": "string"}, ["a", "b"])
    assert rows_of(reader, [data]) == [{"value": ["a", "b"]}]
    assert rows_of(reader_of(schema_of("JSON", "long")), [b"5", b"x"]) == [{"value": 5}, None]


ERRORS = {
    "by case": (record(("a", "int"), ("A", "int")), errors.SchemaUnknownColumn, "two columns 'A'"),
    "nested by case": (
        record(("r", record(("a", "int"), ("A", "int"), name="I"))),
        errors.SchemaUnknownColumn,
        "'r.A'",
    ),
    "metadata": (record(("__offset", "int")), errors.SchemaReservedColumn, "'__offset'"),
    "empty": (record(("", "int")), errors.SchemaTypeMismatch, "non-empty name"),
    "within itself": (
        record(("next", ["null", "R"])),
        errors.SchemaTypeMismatch,
        "record 'R' of the client's schema has itself",
    ),
    "endless": (
        record(
            *(
                (f"r{i}", record(*((f"f{k}", inner) for k in range(10)), name=f"D{i}"))
                for i, inner in enumerate(["int", *(f"D{n}" for n in range(8))])
            )
        ),
        errors.SchemaTypeMismatch,
        "more than 10000 parts",
    ),
    "no field": (record(), errors.SchemaMissingColumn, "no column"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_a_schema_that_spark_cannot_have_is_an_error_when_the_read_is_planned(case):
    plain, error, words = ERRORS[case]
    with pytest.raises(error, match=words):
        reader_of(schema_of("JSON", plain))
