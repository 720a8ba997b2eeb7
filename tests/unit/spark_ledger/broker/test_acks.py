"""What a subscription has acknowledged, compared with a set of offsets."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from spark_ledger.broker import consumers as rules
from spark_ledger.broker.consumers import Acks, ack_set, acked_in

OFFSETS = st.integers(0, 60)
RANGES = st.lists(st.tuples(OFFSETS, OFFSETS), max_size=30)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 20), RANGES, st.tuples(OFFSETS, OFFSETS))
def test_acks_are_what_a_set_of_offsets_says(mark, some, asked):
    acks, model = Acks(mark), set(range(mark))
    for start, end in some:
        acks.add(start, end)
        if start <= acks.mark or start < end:
            model |= set(range(start, end))
    assert acks.mark not in model
    lo, hi = min(asked), max(asked)
    missing = {n for start, end in acks.missing(lo, hi) for n in range(start, end)}
    assert missing == set(range(lo, hi)) - model
    ranges = list(acks.ranges)
    assert ranges == sorted(ranges)
    assert all(a[1] < b[0] for a, b in pairwise(ranges))


def test_a_cumulative_ack_swallows_what_was_acknowledged_one_by_one():
    acks = Acks(0)
    assert not acks.add(5, 7)
    assert acks.up_to(5)
    assert (acks.mark, list(acks.ranges)) == (7, [])
    assert not acks.up_to(3)


def test_too_many_ranges_are_forgotten_from_the_highest(monkeypatch):
    monkeypatch.setattr(rules, "RANGES_MAX", 2)
    acks = Acks(0)
    for start in (2, 4, 6):
        acks.add(start, start + 1)
    assert acks.missing(0, 8) == [(0, 2), (3, 4), (5, 8)]


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 100), st.integers(1, 150), st.data())
def test_an_ack_set_says_which_messages_of_a_batch_are_left(start, messages, data):
    acked = data.draw(st.sets(st.integers(start, start + messages - 1)))
    acks = Acks(0)
    for offset in sorted(acked):
        acks.add(offset, offset + 1)
    acks.up_to(start)
    words = ack_set(acks.missing(start, start + messages), start, messages)
    assert all(-(2**63) <= word < 2**63 for word in words)
    if not acked:
        assert words == []  # a whole batch needs no set
    else:
        found = acked_in(words, start, messages)
        assert {n for lo, hi in found for n in range(lo, hi)} == acked
