"""When delayed messages are due: the index beside plain dictionaries."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_ledger.broker.dispatch.delays import MESSAGE_BYTES, DelayIndex

OFFSETS = st.integers(0, 40)
TIMES = st.integers(0, 5_000)
DELAYED = st.dictionaries(OFFSETS, TIMES)


def index_of(delayed):
    index = DelayIndex()
    for offset, due_ms in delayed.items():
        index.add(offset, due_ms)
    return index


@given(DELAYED, TIMES, TIMES)
def test_what_became_due_between_two_times_is_found_whatever_the_order_of_adding(
    delayed, after_ms, until_ms
):
    due = [offset for offset, ms in delayed.items() if after_ms < ms <= until_ms]
    assert index_of(delayed).due_between(after_ms, until_ms) == sorted(due)


@given(DELAYED, TIMES)
def test_the_next_time_is_the_first_one_after_that_time(delayed, after_ms):
    later = [ms for ms in delayed.values() if ms > after_ms]
    assert index_of(delayed).next_due_ms(after_ms) == min(later, default=None)


@given(DELAYED, TIMES, TIMES, OFFSETS)
def test_what_is_forgotten_is_what_is_due_and_what_is_below(delayed, due_ms, after_ms, offset):
    index = index_of(delayed)
    index.forget_due(due_ms)
    index.forget_below(offset)
    kept = {o: ms for o, ms in delayed.items() if ms > due_ms and o >= offset}
    assert dict(zip(*(column.tolist() for column in index.columns()), strict=True)) == kept
    assert index.due_between(due_ms, 10_000) == sorted(kept)
    assert index.next_due_ms(max(after_ms, due_ms)) == min(
        (ms for ms in kept.values() if ms > max(after_ms, due_ms)), default=None
    )
    assert index.bytes == MESSAGE_BYTES * len(kept)


@given(DELAYED, OFFSETS, TIMES)
def test_a_reader_passes_over_the_run_of_messages_that_it_would_hold(delayed, offset, now_ms):
    end = offset
    while delayed.get(end, now_ms) > now_ms:
        end += 1
    assert index_of(delayed).held_until(offset, now_ms) == end


@given(DELAYED)
def test_a_snapshot_has_the_whole_index(delayed):
    index, loaded = index_of(delayed), DelayIndex()
    loaded.load(*index.columns())
    assert [loaded.due_of(offset) for offset in range(41)] == [
        delayed.get(offset) for offset in range(41)
    ]


def test_a_message_that_is_added_twice_is_due_once():
    index = index_of({3: 50})
    index.add(3, 50)
    assert index.due_between(0, 100) == [3]


@pytest.mark.parametrize(
    ("ranges", "covered"),
    [
        ([(0, 5), (5, 9)], (0, 9)),
        ([(0, 5), (3, 4)], (0, 5)),
        ([(4, 8), (2, 5)], (2, 8)),
        ([(0, 5), (7, 9)], (7, 9)),
        ([(7, 9), (0, 5)], (0, 5)),
    ],
)
def test_the_covered_range_grows_by_what_follows_it_and_is_never_more_than_was_added(
    ranges, covered
):
    index = DelayIndex()
    for lo, hi in ranges:
        index.cover(lo, hi)
    assert index.covered == covered
