import hashlib
import json

import pyarrow as pa
import pytest

from spark_ledger import errors
from spark_ledger.topic.schema import records as schema_records
from spark_ledger.topic.schema.records import Compatibility, SchemaHead

EVERY_TYPE = pa.schema(
    [
        *(pa.field(f"c{i}", kind) for i, kind in enumerate(schema_records.TYPES.values())),
        pa.field("price", pa.decimal128(10, 2), nullable=False),
        pa.field("tags", pa.list_(pa.field("element", pa.string(), nullable=False))),
        pa.field("at", pa.struct([pa.field("x", pa.int32(), nullable=False), ("y", pa.float64())])),
        pa.field("by", pa.map_(pa.string(), pa.list_(pa.field("element", pa.int8())))),
    ]
)


def one(name, kind):
    return pa.schema([(name, kind)])


def test_a_version_is_json_that_any_language_reads():
    schema = pa.schema(
        [
            pa.field("id", pa.int64(), nullable=False),
            pa.field("tags", pa.list_(pa.field("element", pa.string()))),
            pa.field("by", pa.map_(pa.string(), pa.struct([("x", pa.decimal128(4, 1))]))),
        ]
    )
    version = schema_records.version_of(3, schema)

    sorted_by_name = (
        '[{"name":"by","nullable":true,"type":{"map":[{"nullable":false,"type":"string"},'
        '{"nullable":true,"type":{"struct":[{"name":"x","nullable":true,'
        '"type":"decimal128(4, 1)"}]}}]}},'
        '{"name":"id","nullable":false,"type":"int64"},'
        '{"name":"tags","nullable":true,"type":{"list":{"nullable":true,"type":"string"}}}]'
    )
    assert version.fingerprint == hashlib.sha256(sorted_by_name.encode()).hexdigest()
    assert schema_records.encode_version(version).decode() == (
        '{"fields":[{"name":"id","nullable":false,"type":"int64"},'
        '{"name":"tags","nullable":true,"type":{"list":{"nullable":true,"type":"string"}}},'
        '{"name":"by","nullable":true,"type":{"map":[{"nullable":false,"type":"string"},'
        '{"nullable":true,"type":{"struct":[{"name":"x","nullable":true,'
        '"type":"decimal128(4, 1)"}]}}]}}],'
        '"fingerprint":"5687c6beac4ad25e5ab2e96e4024b801f3b8af16d01274a92576c520853da4e0",'
        '"min_reader":1,"min_writer":1,"version":3}'
    )


def test_what_is_current_is_json_with_the_compatibility_by_name():
    head = SchemaHead(7, Compatibility.FULL)

    value = schema_records.encode_head(head)

    assert json.loads(value) == {
        "compatibility": "full",
        "current": 7,
        "min_reader": 1,
        "min_writer": 1,
    }
    assert schema_records.decode_head(value) == head


def test_text_that_clients_declare_is_beside_what_is_current_and_only_where_they_do():
    head = SchemaHead(0, Compatibility.BACKWARD, has_text=True)

    value = schema_records.encode_head(head)

    assert json.loads(value)["clients"] == "string"
    assert schema_records.decode_head(value) == head
    with pytest.raises(errors.UnsupportedFormat):
        schema_records.decode_head(value.replace(b'"string"', b'"text"'))


def test_versions_that_are_only_proposed_are_listed_and_an_old_record_has_none():
    head = SchemaHead(2, proposed=frozenset({3, 1}))
    value = schema_records.encode_head(head)
    assert value == (
        b'{"compatibility":"backward","current":2,"min_reader":1,"min_writer":1,"proposed":[1,3]}'
    )
    assert schema_records.decode_head(value) == head
    assert (head.last, [n for n in range(5) if head.has(n)]) == (3, [2])
    assert head.with_version(3) == SchemaHead(3, proposed=frozenset({1}))
    old = b'{"compatibility":"backward","current":2,"min_reader":1,"min_writer":1}'
    assert schema_records.decode_head(old).has(1)
    first = SchemaHead(proposed=frozenset({1}))
    assert first.takes_bytes and not first.with_version(1).takes_bytes


def test_a_schema_that_is_not_in_force_says_so_and_an_old_record_is_in_force():
    value = schema_records.encode_head(SchemaHead(2, in_force=False))

    assert value == (
        b'{"compatibility":"backward","current":2,"in_force":false,"min_reader":1,"min_writer":1}'
    )
    assert schema_records.decode_head(value).takes_bytes
    old = b'{"compatibility":"backward","current":2,"min_reader":1,"min_writer":1}'
    assert not schema_records.decode_head(old).takes_bytes
    assert SchemaHead().takes_bytes


def test_every_type_a_column_may_have_survives_the_record():
    version = schema_records.version_of(1, schema_records.canonical(EVERY_TYPE))

    decoded = schema_records.decode_version(schema_records.encode_version(version))

    assert decoded == version
    assert decoded.schema.equals(schema_records.canonical(EVERY_TYPE))


def test_the_order_of_columns_and_the_case_of_names_make_no_other_schema():
    schema = pa.schema([("a", pa.int32()), ("s", pa.struct([("x", pa.int8()), ("y", pa.int8())]))])
    other = pa.schema([("S", pa.struct([("Y", pa.int8()), ("x", pa.int8())])), ("A", pa.int32())])

    assert schema_records.fingerprint(schema) == schema_records.fingerprint(other)


@pytest.mark.parametrize(
    "other",
    [
        one("b", pa.int32()),
        one("a", pa.int64()),
        pa.schema([pa.field("a", pa.int32(), nullable=False)]),
        one("a", pa.list_(pa.int32())),
        pa.schema([("a", pa.int32()), ("b", pa.int32())]),
    ],
)
def test_another_name_type_or_null_makes_another_fingerprint(other):
    mark = schema_records.fingerprint(one("a", pa.int32()))

    assert schema_records.fingerprint(schema_records.canonical(other)) != mark


@pytest.mark.parametrize(
    ("kind", "kept"),
    [
        (pa.large_string(), pa.string()),
        (pa.string_view(), pa.string()),
        (pa.large_binary(), pa.binary()),
        (pa.binary(16), pa.binary()),
        (pa.dictionary(pa.int32(), pa.string()), pa.string()),
        (pa.timestamp("us", tz="Europe/Berlin"), pa.timestamp("us", tz="UTC")),
        (pa.large_list(pa.int8()), pa.list_(pa.field("element", pa.int8()))),
        (pa.list_(pa.int8(), 3), pa.list_(pa.field("element", pa.int8()))),
    ],
)
def test_types_that_hold_the_same_have_one_spelling(kind, kept):
    (field,) = schema_records.canonical(pa.schema([pa.field("a", kind, metadata={"x": "y"})]))

    assert field.equals(pa.field("a", kept), check_metadata=True)


@pytest.mark.parametrize(
    "kind",
    [
        pa.uint8(),
        pa.float16(),
        pa.null(),
        pa.timestamp("ns"),
        pa.date64(),
        pa.decimal256(40, 2),
        pa.decimal128(3, -1),
        pa.struct([]),
    ],
)
def test_a_type_that_no_column_may_have_is_refused_with_its_place(kind):
    nested = one("a", pa.struct([("b", pa.list_(kind))]))

    with pytest.raises(errors.SchemaTypeMismatch, match=r"column 'a\.b\.element' is of type"):
        schema_records.canonical(nested)


def test_a_schema_that_cannot_be_stored_is_refused():
    with pytest.raises(errors.SchemaReservedColumn, match="'__Key'"):
        schema_records.canonical(one("__Key", pa.int32()))
    assert schema_records.canonical(one("__op", pa.int32())).names == ["__op"]
    with pytest.raises(errors.SchemaUnknownColumn, match="two columns 'A'"):
        schema_records.canonical(pa.schema([("a", pa.int8()), ("A", pa.int8())]))
    with pytest.raises(errors.SchemaUnknownColumn, match=r"two columns 's\.A'"):
        inner = pa.struct([("a", pa.int8()), ("A", pa.int8())])
        schema_records.canonical(one("s", inner))
    with pytest.raises(errors.SchemaMissingColumn):
        schema_records.canonical(pa.schema([]))
    deep = pa.int8()
    for _ in range(schema_records.DEPTH_MAX + 1):
        deep = pa.list_(deep)
    with pytest.raises(errors.SchemaTypeMismatch, match="deeper than 32 levels"):
        schema_records.canonical(one("a", deep))


def test_a_schema_too_wide_for_its_record_and_a_version_too_many_are_refused():
    wide = pa.schema([(f"column_{n}", pa.int8()) for n in range(10_000)])

    with pytest.raises(errors.SchemaIncompatible, match="10000 columns takes"):
        schema_records.version_of(1, wide)
    with pytest.raises(errors.SchemaIncompatible, match="1000 versions"):
        schema_records.version_of(schema_records.VERSION_MAX + 1, one("a", pa.int8()))


def plain_version():
    record = schema_records.encode_version(schema_records.version_of(1, one("a", pa.int8())))
    return json.loads(record)


@pytest.mark.parametrize(
    "damage",
    [
        {"min_reader": 4},
        {"fingerprint": "0" * 64},
        {"fields": [{"name": "a", "type": "int128", "nullable": True}]},
        {"fields": [{"name": "a", "type": {"set": "int8"}, "nullable": True}]},
        {"fields": [{"name": "a", "type": "int8", "nullable": "yes"}]},
        {"fields": [{"name": "a", "type": "int8"}]},
        {"fields": None},
    ],
)
def test_a_version_that_is_damaged_or_newer_is_not_guessed_at(damage):
    with pytest.raises(errors.UnsupportedFormat):
        schema_records.decode_version(json.dumps({**plain_version(), **damage}).encode())


@pytest.mark.parametrize("value", [b"", b"[]", b'{"min_reader":1}', b'{"min_reader":4}'])
def test_what_is_no_head_is_not_guessed_at(value):
    with pytest.raises(errors.UnsupportedFormat):
        schema_records.decode_head(value)
