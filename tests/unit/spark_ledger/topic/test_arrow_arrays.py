"""Arrow arrays without pandas: equal to what pyarrow makes."""

import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_ledger.topic.entry.arrow_arrays import (
    as_numpy,
    distinct_values,
    distinct_with_indices,
    of_list,
    of_numpy,
)

PAIR = pa.struct([pa.field("first", pa.int64()), pa.field("text", pa.string())])
LISTS = {
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.int32(): st.integers(-(2**31), 2**31 - 1),
    pa.float64(): st.floats(allow_nan=False),
    pa.bool_(): st.booleans(),
    pa.binary(): st.binary(max_size=9),
    pa.string(): st.text(max_size=9),
    pa.list_(pa.binary()): st.lists(st.none() | st.binary(max_size=5), max_size=3),
    pa.list_(pa.list_(pa.int64())): st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=3),
    PAIR: st.fixed_dictionaries(
        {"first": st.none() | st.integers(0, 9), "text": st.none() | st.text(max_size=5)}
    ),
}
NUMBERS = [
    np.arange(9),
    np.arange(20, dtype=np.int32)[::2],
    np.array([], dtype=np.uint8),
    np.array([0.5, -1.0]),
    np.array([True, False, True] * 5),
]


@pytest.mark.parametrize("kind", LISTS, ids=str)
def test_a_column_of_python_values_is_what_pyarrow_makes_of_them(kind):
    @settings(deadline=None)  # pyarrow loads pandas on its first call
    @given(st.lists(st.none() | LISTS[kind], max_size=20))
    def same(values):
        made = of_list(values, kind)
        made.validate(full=True)
        assert made.equals(pa.array(values, kind))

    same()


@pytest.mark.parametrize("values", NUMBERS, ids=lambda values: str(values.dtype))
def test_a_column_of_numbers_is_what_pyarrow_makes_of_it(values):
    made = of_numpy(values)
    made.validate(full=True)
    assert made.equals(pa.array(values))


@pytest.mark.parametrize("values", NUMBERS, ids=lambda values: str(values.dtype))
@pytest.mark.parametrize("cut", [(0, None), (2, 3), (9, 4)])
def test_a_column_becomes_the_numbers_that_pyarrow_makes_of_it(values, cut):
    column = pa.array(values).slice(*cut)
    made = as_numpy(column)
    theirs = column.to_numpy(zero_copy_only=False)
    assert made.dtype == theirs.dtype
    assert made.tolist() == theirs.tolist()


def test_moments_become_their_integers():
    moments = pa.array([5, 6, 7], pa.timestamp("us", "UTC"))
    assert as_numpy(moments[1:]).tolist() == [6, 7]


def test_an_empty_column_without_buffers_has_no_numbers():
    assert as_numpy(pa.array([], pa.int64())).tolist() == []
    assert as_numpy(pa.array([], pa.bool_())).tolist() == []


def test_what_is_not_made_here_is_said():
    with pytest.raises(TypeError, match="date32"):
        of_list([None], pa.date32())


def test_a_number_that_does_not_fit_is_an_error():
    with pytest.raises(OverflowError):
        of_list([2**31], pa.int32())


def test_none_of_them_loads_pandas():
    code = (
        "import sys, numpy as np, pyarrow as pa\n"
        "from spark_ledger.topic.entry.arrow_arrays import as_numpy, of_list, of_numpy\n"
        "as_numpy(of_numpy(np.arange(3))), of_list([[b'x'], None], pa.list_(pa.binary()))\n"
        "assert 'pandas' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@given(st.lists(st.integers(-5, 5)))
def test_distinct_numbers_rise_and_each_number_knows_which_it_is(values):
    numbers = np.array(values, dtype=np.int64)

    found, which = distinct_with_indices(numbers)

    assert found.tolist() == distinct_values(numbers).tolist() == sorted(set(values))
    assert found[which].tolist() == values
