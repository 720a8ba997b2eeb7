"""What `spark-ledger topic tail` prints of rows."""

import json
from datetime import date
from decimal import Decimal

import pyarrow as pa
import pytest

from spark_ledger.cli.rows import print_row, rows_of
from tests.kit.rows import Rows
from tests.kit.segments_seen import block_of

PLAIN = pa.record_batch({"key": pa.array([b"k", None]), "value": pa.array([b"v", b"\xff"])})
TYPED = pa.record_batch(
    {
        "__key": pa.array([b"k", None]),
        "id": pa.array([1, 2]),
        "raw": pa.array([b"\xff", b"text"]),
        "day": pa.array([date(2026, 1, 2), None]),
        "price": pa.array([Decimal("1.50"), None]),
    }
)


def printed(capsys, batch, *, typed, as_json):
    for row in rows_of(block_of(Rows(3, 40, 7, batch, typed))):
        print_row(row, as_json)
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("as_json", [False, True])
def test_rows_of_bytes_are_shown_as_text_or_hexadecimal_digits(capsys, as_json):
    lines = printed(capsys, PLAIN, typed=False, as_json=as_json)
    if as_json:
        row = {"partition": 3, "offset": 40, "timestamp_ms": 7, "key": "k", "value": "v"}
        assert list(map(json.loads, lines)) == [
            row,
            {**row, "offset": 41, "key": None, "value": "0xff"},
        ]
    else:
        assert lines == ["3\t40\tk\tv", "3\t41\tnull\t0xff"]


@pytest.mark.parametrize("as_json", [False, True])
def test_typed_rows_are_shown_with_their_keys_and_their_columns(capsys, as_json):
    first = {"id": 1, "raw": "0xff", "day": "2026-01-02", "price": "1.50"}
    second = {"id": 2, "raw": "text", "day": None, "price": None}
    lines = printed(capsys, TYPED, typed=True, as_json=as_json)
    if as_json:
        found = [(row["key"], row["value"]) for row in map(json.loads, lines)]
        assert found == [("k", first), (None, second)]
    else:
        keys = [line.split("\t")[2] for line in lines]
        assert keys == ["k", "null"]
        assert [json.loads(line.split("\t")[3]) for line in lines] == [first, second]
