"""Schemas that Pulsar's clients declare: their records, what they must be, and which may follow
which."""

import base64
import json
import struct

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet

from spark_ledger import errors
from spark_ledger.topic.schema import client_schemas
from spark_ledger.topic.schema.client_rules import Strategy, consumer_misfit, producer_misfit
from spark_ledger.topic.schema.client_schemas import ClientSchema, ClientSchemaType, ClientVersion
from spark_ledger.topic.schema.records import decode_version, encode_version
from tests.kit.client_values import descriptors

T = ClientSchemaType


def record(*fields, kind=T.AVRO, **more):
    plain = {"type": "record", "name": "Flight", "fields": list(fields), **more}
    return ClientSchema(kind, json.dumps(plain).encode())


def field(name, kind="int", **default):
    return {"name": name, "type": kind, **default}


def pair(key, value, encoding="INLINE"):
    data = b"".join(struct.pack(">i", len(part.data)) + part.data for part in (key, value))
    return ClientSchema(
        T.KEY_VALUE,
        data,
        {
            "key.schema.type": key.kind.name,
            "value.schema.type": value.kind.name,
            "kv.encoding.type": encoding,
        },
    )


def protobuf(root, *fields, imports=("q/other.proto",), **more):
    plain = descriptors(root, *fields, imports=imports) | more
    return ClientSchema(T.PROTOBUF_NATIVE, json.dumps(plain).encode())


EMPTY_PAIR = struct.pack(">ii", 0, 0)
A, B = field("a"), field("b")
B_OR_0 = field("b", default=0)
ONE, TWO, TWO_DEFAULT = record(A), record(A, B), record(A, B_OR_0)


@pytest.mark.parametrize(
    "schema",
    [
        ClientSchema(T.STRING),
        ClientSchema(T.JSON, ONE.data, {"__alwaysAllowNull": "true"}, "flight"),
        ClientSchema(T.PROTOBUF_NATIVE, b"\xff\x00\xfe"),
        pair(ClientSchema(T.INT32), ONE),
    ],
)
def test_a_version_that_a_client_declared_survives_its_record(schema):
    version = ClientVersion(3, schema)
    assert decode_version(encode_version(version)) == version


@pytest.mark.parametrize(
    "client",
    [
        {},
        {"type": "ROMAN"},
        {"type": "JSON", "data": 5},
        {"type": "JSON", "data": {"base64": "%"}},
        {"type": "JSON", "properties": {"a": 1}},
        {"type": "JSON", "name": ["a"]},
        [],
        None,
    ],
)
def test_a_record_of_another_shape_is_an_unsupported_format(client):
    value = json.dumps({"min_reader": 1, "min_writer": 1, "version": 1, "client": client}).encode()
    with pytest.raises(errors.UnsupportedFormat):
        decode_version(value)


@pytest.mark.parametrize("kind", [T.JSON, T.AVRO, T.PROTOBUF])
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"5",
        b"null",
        b"[]",
        b"\xff",
        b'{"type":"nope"}',
        b'{"type":"record"}',
        b'{"type":"record","name":"a","fields":5}',
        b'{"type":["int","int"]}',
        b"[" * 10_000,
        b'{"type":' * 70 + b'"int"' + b"}" * 70,
        json.dumps([{"type": "fixed", "name": f"a{i}", "size": 1} for i in range(101)]).encode(),
        record(*(field(f"a{i}") for i in range(1001))).data,
        json.dumps({"type": "enum", "name": "e", "symbols": ["a"] * (100 << 10)}).encode(),
    ],
)
def test_data_that_is_no_schema_of_avro_is_refused_with_the_reason(kind, data):
    with pytest.raises(errors.SchemaUnreadable, match="schema"):
        client_schemas.check(ClientSchema(kind, data))


@pytest.mark.parametrize(
    ("data", "properties", "reason"),
    [
        (b"", {}, "it ends before the length of the key"),
        (struct.pack(">i", 0) + b"xx", {}, "it ends before the length of the value"),
        (struct.pack(">ii", 5, 0), {}, "a key of 5 bytes does not fit into the 4 left"),
        (struct.pack(">ii", 0, 0) + b"x", {}, "1 bytes follow the value"),
        (EMPTY_PAIR, {"key.schema.type": "ROMAN"}, "no key may be of the type 'ROMAN'"),
        (EMPTY_PAIR, {"value.schema.type": "KEY_VALUE"}, "no value may be of the type 'KEY_VALUE'"),
    ],
)
def test_a_key_and_value_that_are_not_whole_are_refused_with_the_reason(data, properties, reason):
    with pytest.raises(errors.SchemaUnreadable, match=reason):
        client_schemas.check(ClientSchema(T.KEY_VALUE, data, properties))


@pytest.mark.parametrize(
    "schema",
    [
        pair(ClientSchema(T.INT32), ClientSchema(T.JSON, b"{")),
        ClientSchema(T.STRING, bytes(200 << 10)),
        ClientSchema(T.STRING, properties={"a": "b" * (70 << 10)}),
        ClientSchema(T.STRING, name="n" * 2000),
    ],
)
def test_a_key_and_value_that_are_no_schemas_and_what_is_too_large_are_refused(schema):
    with pytest.raises(errors.SchemaUnreadable):
        client_schemas.check(schema)


def test_a_length_of_minus_one_is_a_key_without_data():
    schema = ClientSchema(T.KEY_VALUE, struct.pack(">ii", -1, 0), {"key.schema.type": "INT32"})
    client_schemas.check(schema)
    assert client_schemas.key_and_value(schema)[0] == ClientSchema(T.INT32)


def test_schemas_that_differ_in_spaces_or_properties_are_one_schema():
    plain = json.loads(ONE.data)
    spaced = ClientSchema(T.AVRO, json.dumps(plain, indent=4).encode(), {"a": "b"})
    assert spaced.identity == ONE.identity
    assert spaced.identity != ClientSchema(T.JSON, ONE.data).identity
    assert pair(ClientSchema(T.INT32), spaced).identity == pair(ClientSchema(T.INT32), ONE).identity
    assert pair(ClientSchema(T.INT32), ONE).identity != pair(ClientSchema(T.INT64), ONE).identity
    unchecked = ClientSchema(T.PROTOBUF_NATIVE, b"a")
    assert unchecked.identity != ClientSchema(T.PROTOBUF_NATIVE).identity


def test_files_of_descriptors_are_one_schema_in_any_order():
    plain = descriptors("Order", "id")
    files = FileDescriptorSet.FromString(base64.b64decode(plain["fileDescriptorSet"])).file
    turned = base64.b64encode(FileDescriptorSet(file=files[::-1]).SerializeToString()).decode()
    assert protobuf("Order", "id", fileDescriptorSet=turned).data != protobuf("Order", "id").data
    assert protobuf("Order", "id", fileDescriptorSet=turned).identity == (
        protobuf("Order", "id").identity
    )
    client_schemas.check(protobuf("Order", "id", fileDescriptorSet=turned))
    assert protobuf("Order", "id").identity != protobuf("Order", "number").identity


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (ClientSchema(T.PROTOBUF_NATIVE, b"\xff"), "UnicodeDecodeError"),
        (ClientSchema(T.PROTOBUF_NATIVE, b"[]"), "list indices"),
        (protobuf("Order", fileDescriptorSet="%"), "base64"),
        (protobuf("Order", fileDescriptorSet="eHl6"), "no set of descriptors"),
        (protobuf("Order", rootMessageTypeName="q.Other"), "find message q.Other"),
        (protobuf("Order", rootMessageTypeName=5), "5"),
        (protobuf("Order", rootFileDescriptorName="q/other.proto"), "not in q/other.proto"),
        (protobuf("Order", imports=["q/missing.proto"]), "missing.proto"),
        (protobuf("Order", imports=["q/root.proto"]), "cycle"),
        (protobuf("Order", "id", "id"), "duplicate"),
    ],
)
def test_descriptors_that_are_not_complete_are_refused_with_the_reason(schema, reason):
    with pytest.raises(errors.SchemaUnreadable, match=reason):
        client_schemas.check(schema)


STRATEGIES = {
    # new after old: the strategies that take it, of the eight
    "equal": (ONE, [ONE], "AC B F U BT FT UT"),
    "a new field with a default": (TWO_DEFAULT, [ONE], "AC B F U BT FT UT"),
    "a new field without a default": (TWO, [ONE], "AC F FT"),
    "a field less, that had a default": (ONE, [TWO_DEFAULT], "AC B F U BT FT UT"),
    "a field less, that had none": (ONE, [TWO], "AC B BT"),
    "a wider number": (record(field("a", "long")), [ONE], "AC B BT"),
    "a narrower number": (ONE, [record(field("a", "long"))], "AC F FT"),
    "another type of field": (record(field("a", "string")), [ONE], "AC"),
    "fits the latest, not the first": (TWO, [ONE, TWO_DEFAULT], "AC B F U FT"),
    "another kind": (ClientSchema(T.JSON, ONE.data), [ONE], "AC"),
    "a primitive after a record": (ClientSchema(T.INT32), [ONE], "AC"),
    "the same primitive": (ClientSchema(T.INT32), [ClientSchema(T.INT32)], "AC B F U BT FT UT"),
    "another message of protobuf": (protobuf("Order", "id"), [protobuf("Other", "id")], "AC"),
    "other fields of the same message": (
        *(protobuf("Order", "id", "n"), [protobuf("Order", "n")], "AC B F U BT FT UT"),
    ),
    "descriptors after data that nobody checked": (
        *(protobuf("Order"), [ClientSchema(T.PROTOBUF_NATIVE, b"b")], "AC"),
    ),
    "a field of protobuf in Avro's form": (
        *(record(A, B_OR_0, kind=T.PROTOBUF), [record(A, kind=T.PROTOBUF)], "AC B F U BT FT UT"),
    ),
    "a value with a new field": (
        pair(ClientSchema(T.STRING), TWO),
        [pair(ClientSchema(T.STRING), ONE)],
        "AC F FT",
    ),
    "another key": (pair(ClientSchema(T.INT32), ONE), [pair(ClientSchema(T.STRING), ONE)], "AC"),
}
SHORT = {
    "AI": Strategy.ALWAYS_INCOMPATIBLE,
    "AC": Strategy.ALWAYS_COMPATIBLE,
    "B": Strategy.BACKWARD,
    "F": Strategy.FORWARD,
    "U": Strategy.FULL,
    "BT": Strategy.BACKWARD_TRANSITIVE,
    "FT": Strategy.FORWARD_TRANSITIVE,
    "UT": Strategy.FULL_TRANSITIVE,
}


@pytest.mark.parametrize("case", STRATEGIES)
def test_which_strategies_take_a_schema_after_others(case):
    new, earlier, expected = STRATEGIES[case]
    versions = [ClientVersion(number, schema) for number, schema in enumerate(earlier)]
    takes = {
        short for short, strategy in SHORT.items() if not producer_misfit(new, versions, strategy)
    }
    assert takes == set(expected.split())
    assert all(producer_misfit(new, [], strategy) is None for strategy in Strategy)


def test_the_reason_names_the_version_and_the_field():
    versions = [ClientVersion(0, TWO_DEFAULT), ClientVersion(1, ONE)]
    why = producer_misfit(TWO, versions, Strategy.FULL)
    assert why is not None and "cannot read values of version 1" in why
    assert "field 'b' is not in the values, and has no default" in why
    why = producer_misfit(ONE, [ClientVersion(7, TWO)], Strategy.FORWARD)
    assert why is not None and why.startswith("version 7 cannot read values of the new schema")


INNER = {"type": "record", "name": "Inner", "fields": [field("x", ["null", "int"])]}
OTHER_INNER = {"type": "record", "name": "Inner", "fields": [field("x", "string")]}
LIST = {"type": "array", "items": "int"}
MAP = {"type": "map", "values": LIST}
ITSELF = field("next", ["null", "Flight"])


@pytest.mark.parametrize(
    ("values", "reader", "reason"),
    [
        (A, field("a", "string"), "field 'a' is string for the reader, int in the values"),
        (field("a", ["null", "int"]), A, "'a' is int for the reader, null or int in the values"),
        (field("s", INNER), field("s", OTHER_INNER), "'s.x' is string for the reader, null or int"),
        (field("l", LIST), field("l", {**LIST, "items": "string"}), "'l[]' is string for"),
        (field("m", MAP), field("m", {"type": "map", "values": "int"}), "'m{}' is int for"),
        (B, A, "field 'a' is not in the values, and has no default for the reader"),
    ],
)
def test_the_reason_has_the_place_and_the_types(values, reader, reason):
    versions = [ClientVersion(0, record(ITSELF, values))]
    assert reason in (producer_misfit(record(ITSELF, reader), versions, Strategy.BACKWARD) or "")


COLOR = {"type": "enum", "name": "Color", "symbols": ["RED"]}
TWO_BYTES = {"type": "fixed", "name": "Two", "size": 2}


@pytest.mark.parametrize(("before", "after"), [(COLOR, "Hue"), (TWO_BYTES, "Pair")])
def test_names_of_records_do_not_count_but_those_of_enums_and_fixed_do(before, after):
    inner = {"type": "record", "name": "Inner", "namespace": "a.b", "fields": [A]}
    first = record(field("s", ["null", inner]), field("e", before), namespace="a")
    renamed = record(
        field("s", ["null", {**inner, "name": "Place"}]), field("e", before), name="row"
    )
    other = record(field("s", ["null", inner]), field("e", {**before, "name": after}))
    for misfit in (producer_misfit, consumer_misfit):
        assert misfit(renamed, [ClientVersion(0, first)], Strategy.FULL) is None
        why = misfit(other, [ClientVersion(0, first)], Strategy.FULL)
        assert why is not None and f"{before['type']} {after}" in why


def test_a_consumer_must_read_what_the_topic_has_and_may_lack_fields():
    versions = [ClientVersion(0, ONE), ClientVersion(1, TWO)]
    for strategy in (Strategy.FULL, Strategy.BACKWARD, Strategy.FORWARD):
        assert consumer_misfit(ONE, versions, strategy) is None
        assert consumer_misfit(TWO, versions, strategy) is None
    assert consumer_misfit(TWO, versions, Strategy.FULL_TRANSITIVE) is not None
    assert consumer_misfit(TWO, versions, Strategy.ALWAYS_COMPATIBLE) is None
    assert consumer_misfit(TWO, versions, Strategy.ALWAYS_INCOMPATIBLE) is None
    assert consumer_misfit(ONE, versions, Strategy.ALWAYS_INCOMPATIBLE) is not None
    assert "of type AVRO" in (consumer_misfit(ClientSchema(T.INT8), versions, Strategy.FULL) or "")
    assert consumer_misfit(ClientSchema(T.INT8), [], Strategy.FULL) is None


@pytest.mark.parametrize(
    "odd", [{"type": "error", "name": "Flight", "fields": []}, record(field("a", aliases=[{}]))]
)
def test_schemas_that_cannot_be_compared_do_not_fit(odd):
    if isinstance(odd, dict):
        odd = ClientSchema(T.AVRO, json.dumps(odd).encode())
    client_schemas.check(odd)
    plain = record()
    for new, old in ((odd, plain), (plain, odd)):
        assert producer_misfit(new, [ClientVersion(0, old)], Strategy.FULL)
