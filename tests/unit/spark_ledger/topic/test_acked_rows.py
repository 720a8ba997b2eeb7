"""Which rows a read leaves out, beside plain sets."""

import itertools
import pickle

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap64

from spark_ledger.topic.read import acked
from spark_ledger.topic.read.acked import CUT_WHOLE_ROWS, NO_ACKED, RUNS_CUT_MAX, AckedRows

HIGHEST = 3000
RUNS = st.lists(st.tuples(st.integers(0, HIGHEST), st.integers(1, 400)), max_size=12)
SETS = RUNS.map(lambda runs: {n for lo, rows in runs for n in range(lo, min(lo + rows, HIGHEST))})
RANGES = st.tuples(st.integers(0, HIGHEST), st.integers(0, HIGHEST)).map(sorted)


def rows(offsets, partition=3):
    return AckedRows({partition: BitMap64(offsets)})


def runs_of(numbers):
    """The runs of rising numbers."""
    runs = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number:
            runs[-1] = (runs[-1][0], number + 1)
        else:
            runs.append((number, number + 1))
    return runs


@given(SETS, RANGES)
def test_counts_and_runs_are_those_of_a_plain_set(offsets, limits):
    lo, hi = limits
    given_offsets = set(range(lo, hi)) - offsets
    acked_rows = rows(offsets)
    assert acked_rows.unacked_count(3, lo, hi) == len(given_offsets)
    assert acked_rows.count(3, lo, hi) == hi - lo - len(given_offsets)
    assert acked_rows.unacked_runs(3, lo, hi) == runs_of(given_offsets)
    assert acked_rows.unacked_count(2, lo, hi) == hi - lo
    assert acked_rows.within([(3, lo, hi), (2, 0, 9)]) == rows(offsets & set(range(lo, hi)))


@given(SETS, RANGES)
def test_long_runs_are_cut_out_and_no_row_with_them(offsets, limits):
    lo, hi = limits
    left = rows(offsets).without_long_runs(3, lo, hi)
    assert all(start < end for start, end in left)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(left))
    kept = {offset for start, end in left for offset in range(start, end)}
    assert set(range(lo, hi)) - offsets <= kept <= set(range(lo, hi))
    assert len(left) <= 2 * RUNS_CUT_MAX + 1 or hi - lo <= CUT_WHOLE_ROWS
    remaining = [end - start for start, end in runs_of(kept & offsets)]
    longest_max = 0 if hi - lo <= CUT_WHOLE_ROWS else (hi - lo) // RUNS_CUT_MAX
    assert max(remaining, default=0) <= longest_max


@given(SETS, st.lists(st.integers(0, HIGHEST), min_size=1), st.sampled_from([1, 7, 1000, 1 << 20]))
def test_counts_below_edges_are_those_of_a_plain_set(offsets, edges, window):
    edges.sort()
    before, acked.WINDOW_OFFSETS = acked.WINDOW_OFFSETS, window
    try:
        counts = rows(offsets).counts_below(3, np.array(edges, np.int64))
    finally:
        acked.WINDOW_OFFSETS = before
    assert counts.tolist() == [
        sum(1 for offset in offsets if edges[0] <= offset < edge) for edge in edges
    ]


def test_a_million_holes_reach_a_task_in_little():
    every_other = pickle.dumps(rows(range(0, 2_000_000, 2)))
    assert len(every_other) < 10_000
    at_random = np.random.default_rng(1).random(2_000_000) < 0.5
    holes = rows(np.flatnonzero(at_random).tolist())
    assert len(pickle.dumps(holes)) < 2_000_000 / 8 + 20_000, "a bit for each row"
    assert pickle.loads(pickle.dumps(holes)) == holes


def test_nothing_acknowledged_is_nothing():
    assert not NO_ACKED
    assert not rows([])
    assert rows([1])
    assert AckedRows({3: BitMap64([5]), 9: BitMap64([7])}).ends == {3: 6, 9: 8}
    assert pickle.loads(pickle.dumps(NO_ACKED)) == NO_ACKED
