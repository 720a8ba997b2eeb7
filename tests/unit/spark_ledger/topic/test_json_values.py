import datetime
import decimal
import json
import re
import subprocess
import sys

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_ledger import errors
from spark_ledger.topic.entry.json_values import (
    check_schema,
    decode_json,
    encode_for_clients,
    encode_json,
)

UTC = datetime.UTC
ROWS = {
    "i": pa.array([1, None, -3], pa.int32()),
    "s": ['a"b\\\n\x01é', None, ""],
    "f": [0.1, 1e300, None],
    "b": [True, None, False],
    "d": [datetime.date(2024, 1, 2), None, datetime.date(1960, 1, 1)],
    "t": pa.array([0, None, -1], pa.timestamp("us", "UTC")),
    "n": pa.array([0, None, -1], pa.timestamp("us")),
    "dec": pa.array([decimal.Decimal("1.50"), None, decimal.Decimal("-0.01")]).cast(
        pa.decimal128(10, 2)
    ),
    "l": pa.array([[1, None], None, []], pa.list_(pa.field("element", pa.int64()))),
    "st": [{"x": 1, "y": "p"}, None, {"x": None, "y": None}],
    'q"': [1, 2, 3],
}


def texts(*rows):
    return pa.array(rows, pa.binary())


def schema(*fields):
    return pa.schema([pa.field(*field) for field in fields])


A32 = ("a", pa.int32())
A = schema(A32)


def test_a_row_is_an_object_of_its_columns_without_the_null_ones():
    found = encode_json(pa.RecordBatch.from_pydict(ROWS))

    assert found.type == pa.binary()
    assert found[0].as_py().decode() == (
        '{"i":1,"s":"a\\"b\\\\\\n\\u0001é","f":0.1,"b":true,"d":"2024-01-02",'
        '"t":"1970-01-01T00:00:00.000000Z","n":"1970-01-01T00:00:00.000000","dec":1.50,'
        '"l":[1,null],"st":{"x":1,"y":"p"},"q\\"":1}'
    )
    assert json.loads(found[1].as_py()) == {"f": 1e300, 'q"': 2}
    assert json.loads(found[2].as_py())["st"] == {}


def test_clients_get_what_has_no_form_in_json_as_text():
    pairs = pa.array([[("k", b"q")], None, []], pa.map_(pa.string(), pa.binary()))
    floats = [float("nan"), float("-inf"), 0.5]
    batch = pa.RecordBatch.from_pydict(
        {"b": [b"\x00q", None, b""], "m": pairs, "f": floats, "l": [[float("inf")], None, []]}
    )

    rows = encode_for_clients(batch).to_pylist()

    assert [json.loads(text) for text in rows] == [
        {"b": "AHE=", "m": {"k": "cQ=="}, "f": "NaN", "l": ["Infinity"]},
        {"f": "-Infinity"},
        {"b": "", "m": {}, "f": 0.5, "l": []},
    ]
    assert encode_for_clients(batch.slice(1)).to_pylist() == rows[1:]


def test_clients_get_decimals_as_text_and_all_else_as_spark_writes_json():
    rows = encode_for_clients(pa.RecordBatch.from_pydict(ROWS)).to_pylist()
    as_written = encode_json(pa.RecordBatch.from_pydict(ROWS)).to_pylist()

    assert rows == [re.sub(rb'"dec":([-0-9.]+)', rb'"dec":"\1"', text) for text in as_written]
    assert rows != as_written


@pytest.mark.parametrize("start", [0, 1, 2, 3])
def test_what_was_packed_is_parsed_to_the_same_rows(start):
    batch = pa.RecordBatch.from_pydict(ROWS).slice(start)

    found = decode_json(encode_json(batch), batch.schema)

    assert found.equals(batch)
    whole = encode_json(pa.RecordBatch.from_pydict(ROWS))
    assert decode_json(whole.slice(start), batch.schema).equals(batch)


def test_rows_of_nulls_only_are_rows():
    batch = pa.RecordBatch.from_pydict({"a": pa.array([None, 1, None], pa.int8())})

    assert encode_json(batch).to_pylist() == [b"{}", b'{"a":1}', b"{}"]
    inner = pa.array([{"a": None}, None, {"a": 1}], pa.struct([("a", pa.int8())]))
    nested = pa.RecordBatch.from_pydict({"s": inner})
    assert encode_json(nested).to_pylist() == [b'{"s":{}}', b"{}", b'{"s":{"a":1}}']


def test_fields_that_are_not_asked_for_are_left_aside_and_others_are_null():
    found = decode_json(texts(b'{"x":[{}],"a":1}', b'{"b":"t"}'), schema(A32, ("b", pa.string())))

    assert found.to_pylist() == [{"a": 1, "b": None}, {"a": None, "b": "t"}]


def test_a_value_that_is_null_or_blank_is_a_row_of_nulls():
    found = decode_json(texts(b'{"a":1}', None, b"", b" \n", b' {"a":\r\n5}\t'), A)

    assert found.column("a").to_pylist() == [1, None, None, None, 5]
    assert decode_json(pa.array([None, None], pa.binary()), A).column("a").to_pylist() == [
        None,
        None,
    ]
    assert decode_json(texts(), A).num_rows == 0


def test_without_a_column_to_read_nothing_is_parsed():
    assert decode_json(texts(b"no json", None), schema()).num_rows == 2


@pytest.mark.parametrize(
    "bad",
    [
        b'{"a":1}{"a":2}',
        b'{"a":1} {"a":2}',
        b'{"a":',
        b"1}",
        b'{"a":"x"}',
        b'{"a":1.5}',
        b'{"a":3000000000}',
        b'{"a":{"b":1}',
        b'{"a":{"b":1}}',
        b'{"a":1,}',
        b'{"a":1 "b":2}',
        b'{"b":"line\nbreak"}',
        b'{"b":"\xff"}',
        b"[1]",
        b"null",
        b"7",
        b'{"a":1}x',
        b'\xef\xbb\xbf{"a":1}',
        b'{"a":1,"a":2}',
    ],
)
@pytest.mark.parametrize("at", [0, 5, 9])
def test_a_row_that_does_not_fit_is_named(bad, at):
    rows = [b'{"a":%d}' % n for n in range(10)]
    rows[at] = bad

    with pytest.raises(errors.SchemaIncompatible, match=f"value of row {at} does not fit") as found:
        decode_json(texts(*rows), A)

    assert found.value.facts["row"] == at


def test_an_object_never_reaches_over_the_end_of_its_row():
    """Two halves of one object and two objects in one row: as many objects as rows."""
    for rows in (
        [b'{"a":1,"b":{}', b'}{"a":2}'],
        [b'{"a":1}{"a":2}', b'{"a":3,"b":{}', b',"c":1}'],
        [b'{"a":1}{"b":', b'{"c":1}}'],
        [b'{"a":1}{"a":2}', b'{"b":[{}', b"{}]}"],
    ):
        with pytest.raises(errors.SchemaIncompatible):
            decode_json(texts(*rows), A)


def test_times_are_read_with_their_zones_and_dates_must_be_dates():
    stamp = schema(("t", pa.timestamp("us", "UTC")), ("d", pa.date32()))
    rows = texts(
        b'{"t":"2024-01-01T02:00:00.5+02:00","d":"2024-02-29"}', b'{"t":"2024-01-01 00:00:00"}'
    )

    found = decode_json(rows, stamp).to_pylist()

    assert found[0]["t"] == datetime.datetime(2024, 1, 1, 0, 0, 0, 500_000, UTC)
    assert found[1]["t"] == datetime.datetime(2024, 1, 1, tzinfo=UTC)
    assert found[0]["d"] == datetime.date(2024, 2, 29)
    with pytest.raises(errors.SchemaIncompatible, match=r"column 'd' is a date.*2024-13-01"):
        decode_json(texts(b'{"d":"2024-13-01"}'), stamp)


def test_a_text_that_is_no_date_is_named_by_where_it_is_inside_a_column():
    inner = pa.struct([("n", pa.int64()), ("d", pa.date32())])
    deep = schema(("s", inner), ("l", pa.list_(inner)))
    good = '{"n": 1, "d": "2024-05-01"}'
    for text, path in (
        ('{"s": {"d": "nope"}}', "s.d"),
        (f'{{"s": {good}, "l": [{good}, null, {{"d": "nope"}}]}}', "l.element.d"),
    ):
        with pytest.raises(errors.SchemaIncompatible, match=rf"column '{path}' is a date.*nope"):
            decode_json(texts(b"{}", text.encode()), deep)


def test_a_null_for_a_column_that_is_not_null_is_an_error():
    with pytest.raises(errors.SchemaIncompatible, match="column 'a' is NOT NULL"):
        decode_json(texts(b'{"a":1}', b"{}"), schema(("a", pa.int32(), False)))


@pytest.mark.parametrize(
    "kind",
    [
        pa.binary(),
        pa.map_(pa.string(), pa.int8()),
        pa.duration("us"),
        pa.time64("ns"),
        pa.struct([("x", pa.list_(pa.binary()))]),
    ],
)
def test_a_column_without_a_form_in_json_is_refused_before_any_row(kind):
    with pytest.raises(errors.SchemaTypeMismatch, match=r"column 'a.*' of type .* no form in JSON"):
        check_schema(schema(("a", kind)))
    with pytest.raises(errors.SchemaTypeMismatch):
        encode_json(pa.RecordBatch.from_pydict({"a": pa.array([], kind)}))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_json_does_not_have_is_refused(number):
    column = pa.array([1.0, None, number])

    with pytest.raises(errors.SchemaTypeMismatch, match=r"'s\.x' has a NaN or infinity"):
        encode_json(pa.RecordBatch.from_pydict({"s": pa.StructArray.from_arrays([column], ["x"])}))


TEXT = st.text(st.characters(exclude_categories=["Cs"]))
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
ROW = st.fixed_dictionaries(
    {
        "s": st.none() | TEXT,
        "f": st.none() | NUMBERS,
        "g": st.none() | st.floats(allow_nan=False, allow_infinity=False, width=32),
        "i": st.none() | st.integers(-(2**63), 2**63 - 1),
        "l": st.none()
        | st.lists(st.none() | st.fixed_dictionaries({"x": st.none() | st.lists(TEXT)})),
        "t": st.none() | st.datetimes(timezones=st.just(UTC)),
        "d": st.none() | st.dates(),
    }
)
EVERY = schema(
    ("s", pa.string()),
    ("f", pa.float64()),
    ("g", pa.float32()),
    ("i", pa.int64()),
    ("l", pa.list_(pa.field("element", pa.struct([("x", pa.list_(pa.string()))])))),
    ("t", pa.timestamp("us", "UTC")),
    ("d", pa.date32()),
)


@settings(deadline=None, max_examples=60)
@given(st.lists(ROW, max_size=6))
def test_any_rows_are_json_to_python_and_the_same_rows_when_parsed(rows):
    batch = pa.RecordBatch.from_pylist(rows, EVERY)

    text = encode_json(batch)

    for row, kept in zip(text.to_pylist(), rows, strict=True):
        plain = json.loads(row)
        for name in ("s", "f", "i"):
            assert plain.get(name) == kept[name]
    assert decode_json(text, EVERY).equals(batch)


def test_rows_become_json_without_loading_pandas():
    """pyarrow loads it, where it is installed, to make an Arrow value of one of Python's: 0.2 s in
    the loop of a broker that shows typed rows to its first consumer."""
    code = """
import sys
import numpy as np
import pyarrow as pa
from spark_ledger.topic.entry.arrow_arrays import of_list
from spark_ledger.topic.entry.json_values import decode_json, encode_for_clients
kinds = {"n": (pa.float64(), [1.5, float("nan"), None]), "t": (pa.string(), ["a", '"', None])}
kinds |= {"l": (pa.list_(pa.string()), [["x"], [], None])}
kinds |= {"s": (pa.struct([("i", pa.int64())]), [{"i": 1}, {"i": None}, None])}
columns = [of_list(values, kind) for kind, values in kinds.values()]
rows = encode_for_clients(pa.RecordBatch.from_arrays(columns, names=list(kinds)))
assert rows[0].as_py() == b'{"n":1.5,"t":"a","l":["x"],"s":{"i":1}}', rows
assert rows[1].as_py() == b'{"n":"NaN","t":"\\\\"","l":[],"s":{}}', rows
decode_json(rows.slice(0, 1), pa.schema([("t", pa.string())]))
assert "pandas" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
