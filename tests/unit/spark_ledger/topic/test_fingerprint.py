import datetime
import decimal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_ledger.topic.commit.fingerprint import Fingerprint, batch_content, row_hashes
from spark_ledger.topic.log.records import Content

HEADER = st.fixed_dictionaries({"key": st.text(max_size=3), "value": st.binary(max_size=3)})
KINDS = {
    "binary": (pa.binary(), st.binary(max_size=40)),
    "large": (pa.large_binary(), st.binary(max_size=20)),
    "text": (pa.string(), st.text(max_size=20)),
    "int": (pa.int32(), st.integers(-(1 << 31), (1 << 31) - 1)),
    "short": (pa.int16(), st.integers(-5, 5)),
    "long": (pa.int64(), st.integers(-(1 << 63), (1 << 63) - 1)),
    "double": (pa.float64(), st.floats(allow_nan=False)),
    "bool": (pa.bool_(), st.booleans()),
    "date": (pa.date32(), st.dates()),
    "decimal": (pa.decimal128(20, 2), st.integers(0, 10**6).map(decimal.Decimal)),
    "time": (
        pa.timestamp("us", "UTC"),
        st.datetimes(datetime.datetime(1990, 1, 1), datetime.datetime(2050, 1, 1)),
    ),
    "list": (pa.list_(pa.int32()), st.lists(st.none() | st.integers(0, 9), max_size=4)),
    "headers": (
        pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
        st.lists(HEADER, max_size=3),
    ),
    "map": (
        pa.map_(pa.string(), pa.int32()),
        st.dictionaries(st.text(max_size=3), st.integers(0, 9), max_size=3).map(
            lambda d: list(d.items())
        ),
    ),
    "struct": (
        pa.struct([("a", pa.int32()), ("b", pa.string())]),
        st.fixed_dictionaries({"a": st.none() | st.integers(0, 9), "b": st.text(max_size=3)}),
    ),
}  # fmt: skip
ROW = st.tuples(*(st.none() | values for _, values in KINDS.values()))


def batch(rows):
    columns = [
        pa.array([row[at] for row in rows], kind) for at, (kind, _) in enumerate(KINDS.values())
    ]
    return pa.RecordBatch.from_arrays(columns, list(KINDS))


def content(*batches):
    made = Fingerprint()
    for one in batches:
        made.add(one)
    return made.content


def values(*some):
    return pa.RecordBatch.from_arrays([pa.array(some, pa.binary())], ["value"])


@settings(max_examples=25, deadline=None)
@given(st.lists(ROW, min_size=1, max_size=12), st.data())
def test_the_same_rows_have_one_fingerprint_in_any_order_and_over_any_tasks(rows, data):
    whole = batch(rows)
    shuffled = batch(data.draw(st.permutations(rows)))
    cut = data.draw(st.integers(0, len(rows)))
    columns = data.draw(st.permutations(list(KINDS)))

    tasks = [content(shuffled.slice(0, cut)), content(shuffled.slice(cut).select(columns))]

    assert batch_content(tasks) == content(whole)


@settings(max_examples=60, deadline=None)
@given(st.lists(ROW, min_size=1, max_size=5), st.lists(ROW, min_size=1, max_size=5))
def test_other_rows_have_another_fingerprint(some, others):
    same = sorted(map(repr, some)) == sorted(map(repr, others))

    assert (content(batch(some)) == content(batch(others))) == same


def test_a_value_hashes_alike_whatever_lies_beside_it():
    lengths = [0, 1, 7, 8, 9, 63, 200, 4095, 4096, 4097, 9000, 100_000]
    some = [bytes(i % 251 for i in range(length)) for length in lengths]

    together_ = row_hashes(values(*some))

    assert together_.tolist() == [int(row_hashes(values(one))[0]) for one in some]
    assert len(set(together_.tolist())) == len(some)


@pytest.mark.parametrize("count", [10_000, 100_000])
@pytest.mark.parametrize("kind", [pa.binary(), pa.large_string()])
def test_short_values_among_many_empty_ones_hash_as_they_do_alone(count, kind):
    column = pa.array([None] * (count - 4) + ["ERR00001", "", "DE", "unknown"], kind)
    rows = pa.RecordBatch.from_arrays([column], ["value"])

    assert row_hashes(rows)[-4:].tolist() == row_hashes(rows.slice(count - 4)).tolist()
    assert content(rows) == batch_content(
        content(rows.slice(at, 1000)) for at in range(0, count, 1000)
    )


def test_one_long_value_among_many_short_ones_is_not_padded_to():
    rows = values(*[b"x"] * 20_000, b"y" * (1 << 20))

    before = pa.total_allocated_bytes()
    made = content(rows)

    assert pa.total_allocated_bytes() == before
    assert made == batch_content([content(rows.slice(0, 20_000)), content(rows.slice(20_000))])


def test_what_differs_in_one_byte_or_in_zeros_at_the_end_is_another_value():
    one = bytearray(b"x" * 5000)
    seen = {int(row_hashes(values(bytes(one)))[0])}
    for at in range(0, 5000, 7):
        changed = bytearray(one)
        changed[at] ^= 0x80
        seen.add(int(row_hashes(values(bytes(changed)))[0]))
    for zeros in range(1, 20):
        seen.add(int(row_hashes(values(bytes(one) + bytes(zeros)))[0]))

    assert len(seen) == 1 + len(range(0, 5000, 7)) + 19


def test_two_bytes_in_the_last_places_of_words_do_not_cancel_out():
    """The upper byte of a product modulo 2**64 has eight bits of its factor only."""
    seen = set()
    for first in range(64):
        for second in range(64):
            one = bytearray(16)
            one[7], one[15] = first, second
            seen.add(int(row_hashes(values(bytes(one)))[0]))

    assert len(seen) == 64 * 64


def test_values_that_change_places_between_rows_make_another_batch():
    def pairs(*some):
        keys, others = zip(*some, strict=True)
        columns = [pa.array(keys, pa.string()), pa.array(others, pa.string())]
        return content(pa.RecordBatch.from_arrays(columns, ["key", "value"]))

    assert pairs(("a", "on"), ("b", "off")) != pairs(("a", "off"), ("b", "on"))
    assert pairs(("a", "b")) != pairs(("b", "a"))


def test_the_numbers_are_the_same_in_every_process_for_ever():
    rows = pa.RecordBatch.from_arrays(
        [
            pa.array([b"k1", None, b"a longer key"], pa.binary()),
            pa.array([b"one", b"two" * 3000, b""], pa.binary()),
            pa.array(np.array([1, -1, 1 << 40])),
        ],
        ["key", "value", "eventTime"],
    )

    assert content(rows) == Content(3, "1-8770c50233e8c75b")
    assert content() == Content(0, "1-0000000000000000")
