"""Values of AVRO and JSON as columns are what Avro's own library and Python's json make of them."""

import base64
import datetime
import decimal
import json
import math
import random
from decimal import Decimal

import avro.errors
import avro.io
import avro.schema
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_ledger.topic.schema.shapes import shape_of
from spark_ledger.topic.values import avro_columns, json_columns
from spark_ledger.topic.values.plain import BadValue, read_avro
from tests.kit.client_values import (
    avro_bytes,
    avro_value,
    block_of,
    json_text,
    reader_of,
    record,
    rows_of,
    schema_of,
)

INTS, LONGS = st.integers(-(2**31), 2**31 - 1), st.integers(-(2**63), 2**63 - 1)
SIMPLE = {
    "null": st.none(),
    "boolean": st.booleans(),
    "int": INTS | st.integers(-70, 70),
    "long": LONGS | st.integers(-70, 70),
    "float": st.floats(width=32, allow_nan=False),
    "double": st.floats(allow_nan=False),
    "bytes": st.binary(max_size=9),
    "string": st.text(max_size=9),
}
FEW = {"max_size": 4}
COUNTS = {"type": "map", "values": "int"}
BRANCHES = {**SIMPLE, "map": st.dictionaries(st.text(max_size=3), INTS, **FEW)}
"""Python's values of these are of one branch only."""


@st.composite
def schemas(draw, depth=3, path="x"):
    """A schema, and a strategy for its values."""
    kinds = [*SIMPLE, "enum", "fixed"]
    if depth:
        kinds += ["record", "array", "map", "nullable", "union"] * 2
    kind = draw(st.sampled_from(kinds))
    if kind in SIMPLE:
        return kind, SIMPLE[kind]
    if kind == "enum":
        symbols = ["A", "B", "C"]
        return {"type": "enum", "name": f"E{path}", "symbols": symbols}, st.sampled_from(symbols)
    if kind == "fixed":
        return {"type": "fixed", "name": f"F{path}", "size": 3}, st.binary(min_size=3, max_size=3)
    if kind == "nullable":
        inner, values = draw(schemas(depth=0, path=path).filter(lambda pair: pair[0] != "null"))
        order = draw(st.permutations(["null", inner]))
        return order, st.none() | values
    if kind == "union":
        branches = {"null": "null", "string": "string", "long": "long", "map": COUNTS}
        names = draw(st.permutations(list(branches)))[: draw(st.integers(1, 4))]
        return [branches[name] for name in names], st.one_of(*(BRANCHES[name] for name in names))
    count = draw(st.integers(1, 3)) if kind == "record" else 1
    inner = [draw(schemas(depth=depth - 1, path=f"{path}{i}")) for i in range(count)]
    if kind == "record":
        plain = record(*((f"f{i}", pair[0]) for i, pair in enumerate(inner)), name=f"R{path}")
        return plain, st.fixed_dictionaries({f"f{i}": pair[1] for i, pair in enumerate(inner)})
    plain, values = inner[0]
    if kind == "array":
        return {"type": "array", "items": plain}, st.lists(values, **FEW)
    return {"type": "map", "values": plain}, st.dictionaries(st.text(max_size=3), values, **FEW)


def as_column(plain, value):
    """What a column has for a value that Avro's library decoded or encodes."""
    kind = plain["type"] if isinstance(plain, dict) else plain
    if isinstance(plain, list):
        others = [branch for branch in plain if branch != "null"]
        if value is None or not others:
            return None
        if len(others) == 1:
            return as_column(others[0], value)
        fits = [avro.io.validate(avro.schema.parse(json.dumps(b)), value) for b in others]
        index = fits.index(True)
        members = {f"member{i}": None for i in range(len(others))}
        return members | {f"member{index}": as_column(others[index], value)}
    if kind == "record":
        return {f["name"]: as_column(f["type"], value[f["name"]]) for f in plain["fields"]}
    if kind == "array":
        return [as_column(plain["items"], item) for item in value]
    if kind == "map":
        return [(key, as_column(plain["values"], item)) for key, item in value.items()]
    return value


@st.composite
def records(draw):
    """A record of some fields, and some values of it."""
    fields = draw(st.lists(schemas(), min_size=1, max_size=4))
    plain = record(*((f"c{i}", pair[0]) for i, pair in enumerate(_renamed(fields))))
    values = st.fixed_dictionaries({f"c{i}": pair[1] for i, pair in enumerate(fields)})
    return plain, draw(st.lists(values, min_size=1, max_size=12))


def _renamed(fields):
    """The fields' schemas, whose named types have names of their own."""
    return [
        (
            json.loads(
                json.dumps(plain)
                .replace('"name": "Ex', f'"name": "Ex{i}x')
                .replace('"name": "Fx', f'"name": "Fx{i}x')
                .replace('"name": "Rx', f'"name": "Rx{i}x')
            ),
            v,
        )
        for i, (plain, v) in enumerate(fields)
    ]


@settings(deadline=None, max_examples=150)
@given(records())
def test_avro_of_any_schema_is_what_avros_library_encoded(plain_and_values):
    plain, values = plain_and_values
    data = [avro_bytes(plain, value) for value in values]
    expected = [as_column(plain, value) for value in values]
    assert rows_of(reader_of(schema_of("AVRO", plain)), data) == expected


RICH = record(
    ("n", "long"),
    ("s", ["null", "string"]),
    ("e", {"type": "enum", "name": "E", "symbols": ["A", "B"]}),
    ("l", {"type": "array", "items": ["null", "int", "string"]}),
    ("m", {"type": "map", "values": {"type": "array", "items": "double"}}),
    ("b", "boolean"),
    ("i", {"type": "array", "items": "int"}),
    ("d", "bytes"),
)


@settings(deadline=None, max_examples=300)
@given(st.lists(st.binary(max_size=60), min_size=1, max_size=6), st.integers(0, 2**32))
def test_damaged_avro_is_bad_by_itself_and_other_rows_stay_as_they_are(noise, seed):
    chance = random.Random(seed)
    good = {"n": 7, "s": "x", "e": "B", "l": [None, 5, "y"], "m": {"k": [1.5]}, "b": True}
    good |= {"i": [300, -1], "d": b"z"}
    data = avro_bytes(RICH, good)
    damaged = []
    for part in noise:
        at = chance.randrange(len(data))
        damaged += [data[:at] + part + data[at + len(part) :], data[:at], part]
    shape = shape_of(schema_of("AVRO", RICH))
    rows = rows_of(reader_of(schema_of("AVRO", RICH)), [data, *damaged, data])
    assert rows[0] == rows[-1] == as_column(RICH, good)
    for row, one in zip(rows[1:-1], damaged, strict=True):
        try:
            alone = read_avro(one, shape)
        except BadValue:
            assert row is None
        else:
            assert row is not None
            assert (row["n"], row["s"], row["e"]) == (alone["n"], alone["s"], alone["e"])
            assert row["i"] == alone["i"]
            assert [key for key, _ in row["m"]] == [key for key, _ in alone["m"]]


@settings(deadline=None, max_examples=150)
@given(records(), st.booleans())
def test_json_parsed_together_is_json_parsed_one_by_one(plain_and_values, indented):
    plain, values = plain_and_values
    shape = shape_of(schema_of("JSON", plain))
    text = []
    for value in values:
        value = _for_json(plain, value)
        text.append(json.dumps(value, indent=indented or None).encode())
    reader = reader_of(schema_of("JSON", plain))
    together = rows_of(reader, text)
    one_by_one = rows_of(reader, [*text, b"no JSON"])
    assert one_by_one[-1] is None
    assert together == one_by_one[:-1]
    assert None not in together
    if all(json_columns.is_usual(field.shape) for field in shape.fields):
        expected = [as_column(plain, value) for value in values]
        assert _without_float_width(together) == _without_float_width(expected)


MAPS = record(
    ("m", {"type": "map", "values": "int"}),
    ("n", ["null", {"type": "map", "values": {"type": "map", "values": "bytes"}}]),
    ("o", {"type": "map", "values": record(("m", "string"), name="O")}),
    ("s", "string"),
    ("b", ["null", "bytes"]),
)
ODD_MAPS = [
    b'{"m":{"a":1,"b":null},"n":{"x":{"y":"eA==","z":null},"w":null},"o":{"p":{"m":"q"}}}',
    b'{"m":{},"s":"{\\"m\\":{\\"a\\":1}}\\\\","n":{"x":{}}}',
    b'{ "s" : "}" , "m" : { "a\\"b" : 2 , "" : 3 } , "n" : null , "b" : "eA==" }',
    b'{"x":{"m":{"a":5}},"o":{"m":{"m":"m:,"}},"y":[{"m":{"a":6}}]}',
    b"{}",
    b'{"mm":{"a":1},"m":{"\\u00e9":1}}',
]


@pytest.mark.parametrize(
    "odd", [None, b'{"\\u006d":{"a":7}}', b'{"m":{"a":1,"a":2}}', b'{"m":{},"m":{"a":1}}']
)
def test_maps_of_json_parsed_together_are_those_parsed_one_by_one(odd):
    reader = reader_of(schema_of("JSON", MAPS))
    text = ODD_MAPS * 3 + ([odd] if odd else [])
    fields = reader.record.fields
    together = json_columns.read_together(pa.array(text), fields)
    assert sorted(together) == ([] if odd else ["b", "m", "n", "o", "s"])
    rows, one_by_one = rows_of(reader, text), rows_of(reader, [*text, b"no JSON"])
    assert rows == one_by_one[:-1]
    assert rows[0] == {
        "m": [("a", 1), ("b", None)],
        "n": [("x", [("y", b"x"), ("z", None)]), ("w", None)],
        "o": [("p", {"m": "q"})],
        "s": None,
        "b": None,
    }
    assert rows[3]["m"] is None and rows[2]["m"] == [('a"b', 2), ("", 3)]


@pytest.mark.parametrize(
    "odd", [b'{"m":[]}', b'{"m":5}', b'{"m":"{}"}', b'{"m":{"a":"x"}}', b'{"b":"%"}']
)
def test_what_is_no_map_is_a_bad_row_and_the_maps_of_other_rows_are_read(odd):
    rows = rows_of(reader_of(schema_of("JSON", MAPS)), [b'{"m":{"a":1}}', odd, b'{"m":{"a":1}}'])
    assert rows[1] is None
    assert rows[0] == rows[2] and rows[0]["m"] == [("a", 1)]


def _for_json(plain, value):
    """The value as a client writes it: bytes in base64."""
    kind = plain["type"] if isinstance(plain, dict) else plain
    if isinstance(plain, list):
        others = [branch for branch in plain if branch != "null"]
        return value if len(others) != 1 or value is None else _for_json(others[0], value)
    if kind == "record":
        return {f["name"]: _for_json(f["type"], value[f["name"]]) for f in plain["fields"]}
    if kind == "array":
        return [_for_json(plain["items"], item) for item in value]
    if kind == "map":
        return {key: _for_json(plain["values"], item) for key, item in value.items()}
    if kind in ("bytes", "fixed"):
        return base64.b64encode(value).decode()
    return value


def _without_float_width(rows):
    return json.loads(json.dumps(rows), parse_float=lambda text: round(float(text), 3))


# -- resolution -----------------------------------------------------------------------------------

ENUM = {"type": "enum", "name": "E"}
RESOLVED = {
    "int to long": ("int", "long", 5),
    "int to double": ("int", "double", 5),
    "int to float": ("int", "float", 5),
    "long to double": ("long", "double", 2**40),
    "float to double": ("float", "double", 1.5),
    "string to bytes": ("string", "bytes", "x"),
    "bytes to string": ("bytes", "string", b"x"),
    "to nullable": ("int", ["null", "int"], 5),
    "from nullable": (["null", "int"], "int", 5),
    "promoted into a union": ("int", ["null", "long"], 5),
    "a wider union": (["null", "string"], ["null", "string", "long"], "x"),
    "items": ({"type": "array", "items": "int"}, {"type": "array", "items": "long"}, [1, 2]),
    "values": ({"type": "map", "values": "int"}, {"type": "map", "values": "double"}, {"k": 1}),
    "dropped and added fields": (
        record(("a", "int"), ("gone", "string"), ("b", "string"), name="N"),
        record(("b", "string"), ("new", "int", 9), ("a", "long"), name="N"),
        {"a": 1, "gone": "x", "b": "y"},
    ),
    "the same symbols": (
        {**ENUM, "symbols": ["A", "B"]},
        {**ENUM, "symbols": ["C", "B", "A"]},
        "B",
    ),
    "a default of a list": (
        record(("a", "int"), name="N"),
        record(("l", {"type": "array", "items": "int"}, [1, 2]), ("a", "int"), name="N"),
        {"a": 1},
    ),
}


PROMOTED = {"string to bytes": b"x", "bytes to string": "x"}


@pytest.mark.parametrize("case", RESOLVED)
def test_a_value_of_an_older_version_is_what_avros_library_resolves(case):
    writer, reader, value = RESOLVED[case]
    writer, reader = record(("x", writer)), record(("x", reader))
    data = avro_bytes(writer, {"x": value})
    columns = reader_of(schema_of("AVRO", writer), schema_of("AVRO", reader))
    try:
        resolved = avro_value(data, writer, reader)
    except avro.errors.SchemaResolutionException:  # it lacks rules of Avro's specification
        resolved = {"x": PROMOTED.get(case, value)}
    expected = as_column(reader, resolved)
    assert rows_of(columns, [data, data], [0, 0]) == [expected, expected]
    newer = avro_bytes(reader, resolved)
    assert rows_of(columns, [newer, data, newer], [1, 0, 1]) == [expected] * 3


def test_a_field_is_found_by_its_alias_and_gets_a_default_of_every_type():
    old = record(("old_name", "string"))
    defaults = {
        "s": ("string", "x"),
        "n": (["null", "string"], None),
        "u": (["string", "null"], "y"),
        "b": ("bytes", "\u00ff"),
        "d": ("double", 2),
        "m": ({"type": "map", "values": "int"}, {"k": 1}),
        "r": (record(("i", "int"), name="Inner"), {"i": 3}),
        "t": ({"type": "long", "logicalType": "timestamp-millis"}, 1500),
        "p": ({"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": 2}, "\u0001"),
    }
    new = record(("name", "string"), *((name, *pair) for name, pair in defaults.items()))
    new["fields"][0]["aliases"] = ["older", "old_name"]
    reader = reader_of(schema_of("AVRO", old), schema_of("AVRO", new))
    (row,) = rows_of(reader, [avro_bytes(old, {"old_name": "z"})], [0])
    assert row == {
        "name": "z",
        "s": "x",
        "n": None,
        "u": "y",
        "b": b"\xff",
        "d": 2.0,
        "m": [("k", 1)],
        "r": {"i": 3},
        "t": datetime.datetime(1970, 1, 1, 0, 0, 1, 500000, datetime.UTC),
        "p": Decimal("0.01"),
    }
    text = reader_of(schema_of("JSON", old), schema_of("JSON", new))
    assert rows_of(text, [b'{"old_name":"z"}'], [0]) == [row]


def test_a_symbol_that_the_query_lacks_is_its_default_or_a_bad_row():
    old = record(("x", {**ENUM, "symbols": ["A", "B"]}))
    new = record(("x", {**ENUM, "symbols": ["A"]}))
    with_default = record(("x", {**ENUM, "symbols": ["A"], "default": "A"}))
    data = [avro_bytes(old, {"x": symbol}) for symbol in "AB"]
    for plain, last in ((new, None), (with_default, {"x": "A"})):
        reader = reader_of(schema_of("AVRO", old), schema_of("AVRO", plain))
        assert rows_of(reader, data, [0, 0]) == [{"x": "A"}, last]
        if last is None:
            (why,) = reader.read(block_of(data, [0, 0])).bad.values()
            assert why.endswith(": x: 'B' is no symbol of ['A']")


def test_a_branch_that_the_query_lacks_is_a_bad_row_also_within_a_list():
    old = record(("x", {"type": "array", "items": ["int", "string"]}))
    new = record(("x", {"type": "array", "items": ["null", "long"]}))
    data = [avro_bytes(old, {"x": value}) for value in ([1, 2], [1, "y"], [])]
    reader = reader_of(schema_of("AVRO", old), schema_of("AVRO", new))
    assert rows_of(reader, data, [0, 0, 0]) == [{"x": [1, 2]}, None, {"x": []}]
    (why,) = reader.read(block_of(data, [0, 0, 0])).bad.values()
    assert why.endswith(" does not fit version 1: x: 'y' is no int64")


@pytest.mark.parametrize(
    ("old", "new"),
    [("string", "int"), ("double", "float"), ({"type": "array", "items": "int"}, "int")],
)
def test_a_version_that_cannot_be_resolved_is_bad_rows_with_both_numbers(old, new):
    reader = reader_of(schema_of("AVRO", record(("x", old))), schema_of("AVRO", record(("x", new))))
    found = reader.read(block_of([b"\0\0\0\0\0\0\0\0"] * 2, [0, 0]))
    assert set(found.bad) == {0, 1}
    assert "version 0 of its schema does not fit version 1: x: " in found.bad[0]


# -- logical types --------------------------------------------------------------------------------


def logical(kind, name, **more):
    return {"type": kind, "logicalType": name, **more}


DECIMAL = logical("bytes", "decimal", precision=6, scale=2)
LOGICAL = {
    "date": (logical("int", "date"), 19_000, datetime.date(2022, 1, 8)),
    "time-millis": (logical("int", "time-millis"), 1_500, datetime.time(0, 0, 1, 500_000)),
    "time-micros": (logical("long", "time-micros"), 1_500, datetime.time(0, 0, 0, 1_500)),
    "timestamp-millis": (
        logical("long", "timestamp-millis"),
        1_500,
        datetime.datetime(1970, 1, 1, 0, 0, 1, 500_000, datetime.UTC),
    ),
    "timestamp-micros": (
        logical("long", "timestamp-micros"),
        -1,
        datetime.datetime(1969, 12, 31, 23, 59, 59, 999_999, datetime.UTC),
    ),
    "local": (
        logical("long", "local-timestamp-millis"),
        1_500,
        datetime.datetime(1970, 1, 1, 0, 0, 1, 500_000),
    ),
    "uuid": (logical("string", "uuid"), "5f1c…", "5f1c…"),
    "unknown": (logical("long", "timestamp-fortnights"), 7, 7),
}


@pytest.mark.parametrize("name", LOGICAL)
def test_a_logical_type_has_a_column_of_its_own(name):
    plain, value, expected = LOGICAL[name]
    data = avro_bytes(record(("x", plain["type"])), {"x": value})
    for schema, values in (("AVRO", [data]), ("JSON", [json_text({"x": value})])):
        reader = reader_of(schema_of(schema, record(("x", plain))))
        found = reader.read(block_of(values))
        assert not found.bad
        (row,) = found.columns.to_pylist()
        assert row["x"] == expected


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(-(10**38) + 1, 10**38 - 1) | st.integers(-999, 999), min_size=1))
def test_decimals_of_every_length_keep_their_digits(numbers):
    plain = record(("x", logical("bytes", "decimal", precision=38, scale=2)))
    size = [max(1, (number.bit_length() + 8) // 8) for number in numbers]
    data = [
        avro_bytes(record(("x", "bytes")), {"x": number.to_bytes(n, "big", signed=True)})
        for number, n in zip(numbers, size, strict=True)
    ]
    with decimal.localcontext(prec=60):
        expected = [{"x": Decimal(number).scaleb(-2)} for number in numbers]
        text = [f'{{"x":{row["x"]:f}}}'.encode() for row in expected]
    assert rows_of(reader_of(schema_of("AVRO", plain)), data) == expected
    assert rows_of(reader_of(schema_of("JSON", plain)), text) == expected


def test_the_reason_of_a_bad_decimal_shows_the_beginning_of_its_value():
    reader = reader_of(schema_of("JSON", record(("x", DECIMAL))))
    (why,) = reader.read(block_of([b'{"x":%s.001}' % (b"1" * 3000)])).bad.values()
    assert len(why) < 500


OUTSIDE = {
    "a decimal of too many digits": (DECIMAL, 10**6, b'{"x":10000.00}'),
    "a decimal after the point": (DECIMAL, None, b'{"x":1.001}'),
    "a decimal without bytes": (DECIMAL, b"", b'{"x":"abc"}'),
    "a time after the day": (logical("int", "time-millis"), 86_400_000, b'{"x":86400000}'),
    "a time before 292,000 BC": (logical("long", "timestamp-millis"), -(2**60), b'{"x":-1e18}'),
    "an int of 64 bits": ("int", 2**40, b'{"x":1099511627776}'),
    "a fraction": ("long", None, b'{"x":1.5}'),
    "text for a number": ("long", None, b'{"x":"5"}'),
    "true for a number": ("long", None, b'{"x":true}'),
    "half of a surrogate pair": ("string", b"\xed\xa0\x80", b'{"x":"\\ud800"}'),
    "bytes that are no base64": ("bytes", None, b'{"x":"*"}'),
    "a number beyond a double": ("double", None, b'{"x":1e999}'),
    "no object": ("long", None, b"[1]"),
    "two objects": ("long", None, b'{"x":1}{"x":2}'),
    "text that is no UTF-8": ("string", b"\xff", b'{"x":"\xff"}'),
    "deep nesting": ("long", None, b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
}


@pytest.mark.parametrize("case", OUTSIDE)
def test_a_value_outside_of_its_type_is_a_bad_row(case):
    plain, number, text = OUTSIDE[case]
    good = {"x": "eA==" if plain in ("string", "bytes") else 1}
    values = [json_text(good), text]
    rows = rows_of(reader_of(schema_of("JSON", record(("x", plain)))), values)
    assert [row is None for row in rows] == [False, True]
    if number is None:
        return
    raw = plain["type"] if isinstance(plain, dict) else plain
    if raw == "bytes" and isinstance(number, int):
        number = number.to_bytes(8, "big", signed=True)
    written = ("long" if isinstance(number, int) else "bytes", number)
    data = avro_bytes(record(("x", written[0])), {"x": written[1]})
    assert rows_of(reader_of(schema_of("AVRO", record(("x", plain)))), [data]) == [None]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        *(("1.001", "1.001"), ('"abc"', "abc"), ("10000.001", "10000.001"), ("true", "True")),
        *(("[0,[1],0]", "[0, [1], 0]"), ("NaN", "nan"), ("1e999", "1E+999")),
        ("0." + "1" * 999, "0." + "1" * 98),
    ],
)
def test_a_decimal_of_json_that_does_not_fit_is_named_in_words(text, shown):
    reader = reader_of(schema_of("JSON", record(("x", DECIMAL))))
    reason = reader.read(block_of([f'{{"x":{text}}}'.encode()])).bad[0]
    assert reason == f"x: {shown} is no decimal of 6 digits, 2 of them after the point"


def test_a_decimal_of_all_its_digits_is_read_beside_a_row_that_arrow_cannot_parse():
    decimal_38 = logical("bytes", "decimal", precision=38, scale=0)
    reader = reader_of(schema_of("JSON", record(("x", decimal_38))))
    largest = Decimal("9" * 38)
    assert rows_of(reader, [b'{"x":' + b"9" * 38 + b"}", b"no JSON"]) == [{"x": largest}, None]


def test_not_a_number_and_infinity_of_json_are_numbers():
    reader = reader_of(schema_of("JSON", record(("x", "double"))))
    text = [b'{"x":NaN}', b'{"x":"Infinity"}', b'{"x":-Infinity}']
    rows = rows_of(reader, text)
    assert math.isnan(rows[0]["x"])
    assert [row["x"] for row in rows[1:]] == [math.inf, -math.inf]


def test_an_enum_of_json_is_the_text_that_the_client_wrote():
    reader = reader_of(schema_of("JSON", record(("x", {**ENUM, "symbols": ["A"]}))))
    assert rows_of(reader, [b'{"x":"A"}', b'{"x":2}', b'{"x":"other"}']) == [
        {"x": "A"},
        {"x": "2"},
        {"x": "other"},
    ]


# -- lists ----------------------------------------------------------------------------------------


def test_blocks_of_a_list_with_their_size_are_one_list():
    reader = reader_of(schema_of("AVRO", record(("x", {"type": "array", "items": "int"}))))
    texts = reader_of(schema_of("AVRO", record(("x", {"type": "array", "items": "string"}))))
    sized = b"\x03\x04\x02\x04" + b"\x02\x06" + b"\0"  # two items in two bytes, then one item
    assert rows_of(reader, [sized, b"\0"]) == [{"x": [1, 2, 3]}, {"x": []}]
    sized = b"\x03\x08\x02a\x02b" + b"\x02\x02c" + b"\0"
    assert rows_of(texts, [sized, b"\0"]) == [{"x": ["a", "b", "c"]}, {"x": []}]


def test_a_list_that_is_much_longer_than_the_others_is_read_by_itself(monkeypatch):
    plain = record(("x", {"type": "array", "items": "string"}), ("y", "int"))
    rows = [{"x": [str(i) for i in range(n)], "y": n} for n in (0, 5000, 3, 40)]
    data = [avro_bytes(plain, row) for row in rows]
    rounds = []
    read = avro_columns.AvroColumns.read

    def counted(self, shape, of_rows=None):
        rounds.append(shape.kind)
        return read(self, shape, of_rows)

    monkeypatch.setattr(avro_columns.AvroColumns, "read", counted)
    assert rows_of(reader_of(schema_of("AVRO", plain)), data) == rows
    assert len(rounds) < 100


def test_a_list_of_more_items_without_bytes_than_its_value_explains_is_bad():
    reader = reader_of(schema_of("AVRO", record(("x", {"type": "array", "items": "null"}))))
    few, many = b"\x06\0", b"\xfe\xff\xff\xff\xff\xff\xff\xff\x7f\0"
    assert rows_of(reader, [few, many]) == [{"x": [None] * 3}, None]
