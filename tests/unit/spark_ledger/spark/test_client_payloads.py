"""Values of clients in a read with valueFormat=schema: which rows a task gives, and by what."""

import logging
import pickle
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from types import SimpleNamespace

import pyarrow as pa
import pytest

from spark_ledger import errors
from spark_ledger.spark.rows.client_values import ClientPayloads, read_schema_of
from spark_ledger.spark.rows.other_format import OnOtherFormat, OtherRows
from spark_ledger.spark.rows.typed_values import ValueReader, spark_payload
from spark_ledger.topic.log.names import parse_topic
from spark_ledger.topic.schema.client_schemas import ClientVersion
from spark_ledger.topic.schema.records import SchemaHead, canonical, version_of
from spark_ledger.topic.schema.registry import CachedVersions, TopicSchema
from spark_ledger.topic.schema.rules import nullable
from tests.kit.client_values import block_of, json_text, record, schema_of

TOPIC = SimpleNamespace(id="id-1", name=parse_topic("flights"))
FLIGHT = record(("number", "int"), ("carrier", ["null", "string"]))
LATER = record(("number", "long"), ("carrier", ["null", "string"]), ("gate", "string", "-"))


def schema_with(*plain, versions=(), has_text=False, in_force=False, deleted=-1, erased=-1):
    first = len(versions) + 1
    schemas = [schema_of(one) if isinstance(one, str) else schema_of("JSON", one) for one in plain]
    declared = [ClientVersion(first + i, schema) for i, schema in enumerate(schemas)]
    last = len(versions) + len(plain)
    head = SchemaHead(last, has_text=has_text, in_force=in_force, deleted=deleted, erased=erased)
    cached = CachedVersions((*versions, *declared), 0, head)
    return TopicSchema(head, tuple(versions), 0, (), cached)


def payloads(schema, other=OnOtherFormat.FAIL, bad="fail", declared=None):
    read = read_schema_of([(TOPIC, schema)], declared, {})
    columns = read.columns if declared is None else declared
    values = ValueReader.of("schema", spark_payload(columns), read.columns, read.clients)
    values = pickle.loads(pickle.dumps(values))
    return ClientPayloads(values, OtherRows(other, typed=True), bad), values


def rows_of(payload, names):
    batch = pa.RecordBatch.from_arrays(payload.columns, names=names)
    return (batch if payload.kept is None else batch.filter(payload.kept)).to_pylist()


def test_columns_are_those_of_the_newest_version_beside_the_typed_rows_columns():
    typed = version_of(1, canonical(pa.schema([("gate", pa.string()), ("number", pa.int32())])))
    read = read_schema_of([(TOPIC, schema_with(FLIGHT, versions=[typed]))], None, {})
    assert read.columns.names == ["number", "carrier", "gate"]  # those of the newest first
    read = read_schema_of([(TOPIC, schema_with(FLIGHT, LATER))], None, {})
    assert read.columns == pa.schema(
        [("number", pa.int64()), ("carrier", pa.string()), ("gate", pa.string())]
    )
    assert not read.with_version
    with pytest.raises(errors.SchemaNotRegistered, match="valueFormat=binary"):
        read_schema_of([(TOPIC, schema_with())], None, {})


DAY = date(2024, 5, 1)
OF_COLUMNS = {
    "flag": (pa.bool_(), True, True),
    "tiny": (pa.int8(), 5, 5),
    "short": (pa.int16(), 5, 5),
    "number": (pa.int32(), 5, 5),
    "big": (pa.int64(), 2**53 + 1, 2**53 + 1),
    "ratio": (pa.float32(), 0.5, 0.5),
    "exact": (pa.float64(), "-Infinity", float("-inf")),
    "price": (pa.decimal128(9, 2), "12.50", Decimal("12.50")),
    "text": (pa.string(), "é", "é"),
    "data": (pa.binary(), "AHE=", b"\0q"),
    "day": (pa.date32(), "2024-05-01", DAY),
    "at": (
        *(pa.timestamp("us", "UTC"), "2024-05-01T12:00:00.5+02:00"),
        datetime(2024, 5, 1, 10, 0, 0, 500000, UTC),
    ),
    "local": (pa.timestamp("us"), "2024-05-01T12:00:00", datetime(2024, 5, 1, 12)),
    "clock": (pa.time64("ns"), "12:00:00.000007000", time(12, 0, 0, 7)),
    "lasting": (pa.duration("us"), 1_000_000, timedelta(seconds=1)),
    "place": (
        *(pa.struct([("day", pa.date32()), ("n", pa.int8())]), {"day": "2024-05-01"}),
        {"day": DAY, "n": None},
    ),
    "days": (pa.list_(pa.date32()), ["2024-05-01", None], [DAY, None]),
    "counts": (pa.map_(pa.string(), pa.date32()), {"x": "2024-05-01"}, [("x", DAY)]),
    "by_day": (pa.map_(pa.date32(), pa.int8()), {"2024-05-01": 7}, [(DAY, 7)]),
    "by_data": (pa.map_(pa.binary(), pa.int8()), {"AHE=": 7}, [(b"\0q", 7)]),
    "by_lasting": (pa.map_(pa.duration("us"), pa.int8()), {"-5": 7}, [(-timedelta(0, 0, 5), 7)]),
    "by_place": (
        pa.map_(pa.struct([("day", pa.date32())]), pa.int8()),
        [{"key": {"day": "2024-05-01"}, "value": 7}],
        [({"day": DAY}, 7)],
    ),
    "no name of Avro's": (pa.int32(), 5, 5),
}


def columns_of_spark(version=1, /, **types):
    kinds = types or {name: kind for name, (kind, _, _) in OF_COLUMNS.items()}
    return version_of(version, canonical(pa.schema(list(kinds.items()))))


def test_json_beside_columns_of_every_type_is_read_as_these_columns():
    typed = columns_of_spark()
    reader, values = payloads(schema_with(versions=[typed], in_force=True))
    assert values.payload == nullable(typed.schema)
    row = {name: plain for name, (_, plain, _) in OF_COLUMNS.items()}
    expected = {name: value for name, (_, _, value) in OF_COLUMNS.items()}
    found = reader.of(block_of([json_text(row), b"{}", None, json_text(row)]), "flights")
    nothing = dict.fromkeys(expected)
    assert rows_of(found, values.payload.names) == [expected, nothing, nothing, expected]


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"tiny": 500}, "tiny: 500 is no int8"),
        ({"day": "yesterday"}, "day: 'yesterday' is no date32[day]"),
        ({"at": "2024-05-01T12:00:00"}, "at: '2024-05-01T12:00:00' is no timestamp[us, tz=UTC]"),
        ({"clock": "25:00"}, "clock: '25:00' is no time64[ns]"),
        ({"price": "1.555"}, "price: '1.555' is no decimal128(9, 2)"),
        ({"price": "1" * 999}, f"price: '{'1' * 99} is no decimal128(9, 2)"),
        ({"data": "%"}, "data: '%' is not base64"),
        ({"place": {"n": -200}}, "place: n: -200 is no int8"),
        ({"days": ["2024-05-01", "x"]}, "days: 'x' is no date32[day]"),
        ({"by_day": {"x": 7}}, "by_day: 'x' is no date32[day]"),
        ({"by_data": {"%": 7}}, "by_data: '%' is no binary"),
        ({"by_lasting": {"x": 7}}, "by_lasting: 'x' is no duration[us]"),
        ({"by_place": [{"value": 7}]}, "by_place: None is no key of map<"),
    ],
)
def test_json_that_a_column_does_not_hold_is_a_bad_row_whose_field_is_named(wrong, named):
    schema = schema_with(versions=[columns_of_spark()])
    reader, values = payloads(schema, bad="skip")
    good = b'{"tiny":1,"by_day":{"2024-05-01":7}}'
    block = block_of([good, json_text(wrong), good])
    found = reader.of(block, "flights")
    assert [row["tiny"] for row in rows_of(found, values.payload.names)] == [1, 1]
    with pytest.raises(errors.BadEntry) as raised:
        payloads(schema)[0].of(block, "flights")
    assert "offset 1" in str(raised.value) and f": {named}" in str(raised.value)


def test_columns_and_fields_of_clients_are_read_together_in_the_wider_type():
    inner = record(("CITY", "string"), ("floor", ["null", "int"]), name="Place")
    declared = record(
        ("number", "long"),
        ("Day", "string"),
        ("place", ["null", inner]),
        ("places", {"type": "array", "items": "Place"}),
        ("more", ["null", "string"], None),
    )
    place = pa.struct([("city", pa.string())])
    types = {"number": pa.int32(), "day": pa.date32(), "place": place, "places": pa.list_(place)}
    first, later = columns_of_spark(**types), columns_of_spark(2, **types, gate=pa.int8())
    schema = schema_with(declared, versions=[first, later], in_force=True)
    reader, values = payloads(schema)
    of_client = json_text(
        {"number": 2**40, "Day": "2024-05-01", "place": {"CITY": "Bern", "floor": 2}, "places": []}
    )
    of_columns = json_text({"number": 1, "day": "2024-05-01", "gate": 3})
    found = reader.of(block_of([of_client, of_columns], [2, 1]), "flights")
    rest = {"more": None, "gate": None}
    assert rows_of(found, values.payload.names) == [
        {"number": 2**40, "day": DAY, "place": {"city": "Bern", "floor": 2}, "places": []} | rest,
        {"number": 1, "day": DAY, "place": None, "places": None} | rest | {"gate": 3},
    ]
    assert values.payload.field("number").type == pa.int64()
    assert values.payload.field("gate").type == pa.int8()
    kept = pa.schema([("gate", pa.int8()), ("day", pa.date32())])
    reader, _ = payloads(schema, declared=kept)
    found = reader.of(block_of([of_client, of_columns], [2, 1]), "flights")
    assert rows_of(found, kept.names) == [{"gate": None, "day": DAY}, {"gate": 3, "day": DAY}]


def read_back(schema, values, numbers, **given):
    reader, read = payloads(schema, **given)
    return rows_of(reader.of(block_of(values, numbers), "flights"), read.payload.names)


@pytest.mark.parametrize("has_text", [False, True])
def test_rows_are_read_in_the_same_columns_before_and_after_their_schema_was_deleted(has_text):
    first = int(has_text)
    values = [b'{"number":1,"carrier":"AA"}', b'{"number":2,"gate":"G"}', b"text"][: 2 + first]
    numbers = [first, first + 1, 0][: 2 + first]
    before, after = (
        read_back(schema_with(FLIGHT, LATER, has_text=has_text, deleted=d), values, numbers, **skip)
        for d, skip in ((-1, {"bad": "skip"}), (2, {}))
    )
    assert after[:2] == [
        {"number": 1, "carrier": "AA", "gate": "-"} | ({"value": None} if has_text else {}),
        {"number": 2, "carrier": None, "gate": "G"} | ({"value": None} if has_text else {}),
    ]
    assert [{name: row[name] for name in before[0]} for row in after[:2]] == before
    assert not has_text or after[2]["value"] == "text"


def test_rows_of_a_deleted_schema_stay_readable_beside_columns_of_spark():
    typed = columns_of_spark(number=pa.int32())
    schema = schema_with(FLIGHT, versions=[typed], deleted=2)
    rows = read_back(schema, [b'{"number":1}', b'{"number":2,"carrier":"AA"}'], [0, 1])
    assert rows == [{"number": 1, "carrier": None}, {"number": 2, "carrier": "AA"}]


def test_after_a_deletion_the_columns_are_those_of_the_old_and_the_new_versions():
    schema = schema_with(FLIGHT, LATER, "STRING", deleted=2)
    rows = read_back(schema, [b'{"number":1}', b'{"number":2,"gate":"G"}', b"now"], [0, 1, 2])
    lacks = {"value": None, "number": None, "carrier": None, "gate": None}
    assert rows == [
        lacks | {"number": 1, "gate": "-"},
        lacks | {"number": 2, "gate": "G"},
        lacks | {"value": "now", "gate": "-"},  # as its schema says for rows that lack it
    ]
    again = schema_with(FLIGHT, "STRING", record(("b", "boolean")), deleted=2)
    rows = read_back(again, [b'{"number":1}', b"now", b'{"b":true}'], [0, 1, 2])
    lacks = dict.fromkeys(("b", "value", "number", "carrier"))
    assert rows == [lacks | {"number": 1}, lacks | {"value": "now"}, lacks | {"b": True}]
    declared = pa.schema([("number", pa.int64()), ("value", pa.string())])
    rows = read_back(again, [b'{"number":1}', b"now"], [0, 1], declared=declared)
    assert rows == [{"number": 1, "value": None}, {"number": None, "value": "now"}]


def test_a_new_version_after_a_deletion_has_other_names_and_types_within_the_old_ones():
    array, enum = {"type": "array"}, {"type": "enum", "name": "E"}
    old = record(
        ("Number", "long"),
        ("place", ["null", record(("city", "string"), ("floor", "int"), name="P")]),
        ("places", {**array, "items": record(("a", "int"), name="Q")}),
        ("sort", {**enum, "symbols": ["A"]}),
    )
    new = record(
        ("number", "int"),
        ("place", record(("city", "string"), ("zip", "string"), name="P")),
        ("places", {**array, "items": record(("b", "int"), name="Q")}),
        ("sort", {**enum, "symbols": ["B"]}),
    )
    of_old = {"place": {"city": "B", "floor": 2}, "places": [{"a": 1}], "sort": "A"}
    of_new = {"place": {"city": "B", "zip": "3"}, "places": [{"b": 1}], "sort": "B"}
    texts = [json_text({"Number": 2**40} | of_old), json_text({"number": 5} | of_new)]
    expected = [
        {"number": 2**40, "place": {"city": "B", "zip": None, "floor": 2}}
        | {"places": [{"b": None, "a": 1}], "sort": "A"},
        {"number": 5, "place": {"city": "B", "zip": "3", "floor": None}}
        | {"places": [{"b": 1, "a": None}], "sort": "B"},
    ]
    assert read_back(schema_with(old, new, deleted=1), texts, [0, 1]) == expected


def test_a_deleted_version_that_cannot_be_columns_hinders_no_other_version():
    unfit = [record(("next", ["null", "R"])), record(("a", "int"), ("A", "int")), record()]
    schema = schema_with(*unfit, FLIGHT, deleted=4)
    assert read_back(schema, [b'{"number":1}'], [3]) == [{"number": 1, "carrier": None}]
    schema = schema_with(FLIGHT, *unfit, deleted=4)
    assert read_back(schema, [b'{"number":1}'], [0]) == [{"number": 1, "carrier": None}]
    typed = columns_of_spark(number=pa.int32())
    schema = schema_with(*unfit, versions=[typed], deleted=4)
    assert read_back(schema, [b'{"number":1}'], [0]) == [{"number": 1}]


def test_a_version_that_was_deleted_with_force_is_an_error_that_tells_so():
    for erased in ({"deleted": 1, "erased": 1}, {"deleted": 2, "erased": 1}):
        schema = schema_with(FLIGHT, LATER, **erased)
        says = "the topic has no version 0 of its schema: it was deleted with force"
        with pytest.raises(errors.BadEntry, match=says):
            read_back(schema, [b'{"number":1}', b'{"number":2,"gate":"G"}'], [0, 1])
        (row,) = read_back(schema, [b'{"number":2,"gate":"G"}'], [1])
        assert row["number"] == 2
    kept, declared = {}, pa.schema([("number", pa.int64())])
    read_schema_of([(TOPIC, schema_with(FLIGHT))], declared, kept)
    read = read_schema_of(
        [(TOPIC, schema_with(FLIGHT, LATER, deleted=1, erased=1))], declared, kept
    )
    assert read.clients["flights"].number == 1
    with pytest.raises(errors.SchemaNotRegistered, match="any more: it was deleted with force"):
        read_schema_of([(TOPIC, schema_with(FLIGHT, deleted=1, erased=1))], None, {})


def test_a_run_of_a_query_keeps_its_version_when_a_newer_one_comes():
    kept = {}
    declared = pa.schema([("number", pa.int32())])
    first = read_schema_of([(TOPIC, schema_with(FLIGHT))], declared, kept)
    second = read_schema_of([(TOPIC, schema_with(FLIGHT, LATER))], declared, kept)
    assert (first.clients["flights"].number, second.clients["flights"].number) == (0, 0)
    assert sorted(second.clients["flights"].versions) == [0, 1]
    again = read_schema_of([(TOPIC, schema_with(FLIGHT, LATER))], declared, {})
    assert again.clients["flights"].number == 1


def test_a_bad_value_ends_the_read_with_its_place_or_is_left_out(caplog):
    rows = block_of([b'{"number":1}', b'{"number":"x"}', b'{"number":3}'])
    reader, _ = payloads(schema_with(FLIGHT))
    place = r"topic 'flights', partition 0, offset 1 \(ledger 0, entry 0\): the value cannot be"
    with pytest.raises(errors.BadEntry, match=place + ' decoded: number: "x" is no int'):
        reader.of(rows, "flights")
    reader, values = payloads(schema_with(FLIGHT), bad="skip")
    with caplog.at_level(logging.WARNING):
        payload = reader.of(rows, "flights")
        reader.end()
    assert [row["number"] for row in rows_of(payload, values.payload.names)] == [1, 3]
    assert "offset 1" in caplog.text
    assert "of 1 offsets were not decoded" in caplog.text


@pytest.mark.parametrize(("policy", "numbers"), [("skip", [1, 3]), ("null", [1, None, 3])])
def test_bytes_without_a_version_are_rows_of_the_other_format(policy, numbers, caplog):
    values = [b'{"number":1}', b"bytes", b'{"number":3}']
    rows = block_of(values, [0, None, 0])
    reader, _ = payloads(schema_with(FLIGHT))
    with pytest.raises(errors.SchemaIncompatible, match="partition 0, offset 1: the row is bytes"):
        reader.of(rows, "flights")
    reader, values = payloads(schema_with(FLIGHT), OnOtherFormat(policy))
    with caplog.at_level(logging.WARNING):
        payload = reader.of(rows, "flights")
    assert [row["number"] for row in rows_of(payload, values.payload.names)] == numbers
    assert "offsets 1 to 1: rows that are bytes" in caplog.text


@pytest.mark.parametrize(("has_text", "numbers"), [(False, [1, 2, 0]), (True, [1, 2, 0])])
def test_rows_have_the_topics_numbers_of_their_versions(has_text, numbers):
    first = 1 if has_text else 0
    rows = block_of([json_text({"number": 1}), b"{}", None], [first, first + 1, None])
    reader, _ = payloads(schema_with(FLIGHT, LATER, has_text=has_text))
    versions = reader.of(rows, "flights").rows.record_batch.column("client_version")
    assert versions.fill_null(0).to_pylist() == numbers


def test_a_declared_type_that_is_narrower_is_taken_and_a_value_beyond_it_has_a_place():
    declared = pa.schema([("number", pa.int32())])
    reader, _ = payloads(schema_with(LATER), declared=declared)
    assert reader.of(block_of([b'{"number":7}']), "flights").columns[0].to_pylist() == [7]
    with pytest.raises(errors.SchemaIncompatible, match="topic 'flights', partition 0, offset"):
        reader.of(block_of([b'{"number":99999999999}']), "flights")


def test_a_topic_that_has_none_of_the_declared_columns_gives_nulls():
    read = read_schema_of([(TOPIC, schema_with(FLIGHT))], pa.schema([("x", pa.int32())]), {})
    wanted = spark_payload(pa.schema([("x", pa.int32())]))
    values = ValueReader.of("schema", wanted, None, read.clients)
    reader = ClientPayloads(values, OtherRows(OnOtherFormat.FAIL, typed=True), "fail")
    assert reader.of(block_of([b"no JSON", b"x"]), "flights").columns[0].to_pylist() == [None] * 2
    assert values.entry_columns(wanted) is None
