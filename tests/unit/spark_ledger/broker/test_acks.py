"""What a subscription has acknowledged, compared with a set of offsets."""

from collections import Counter
from itertools import pairwise, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyroaring import BitMap64

from spark_ledger.broker.dispatch import acks as rules
from spark_ledger.broker.dispatch.acks import (
    Acks,
    SentBatches,
    SentEntries,
    ack_set,
    acked_in,
    after_unacknowledged,
)
from spark_ledger.topic.acks.sets import AckBudget, Counts

OFFSETS = st.integers(0, 60)
RANGES = st.lists(st.tuples(OFFSETS, OFFSETS), max_size=30)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 20), RANGES, st.tuples(OFFSETS, OFFSETS))
def test_acks_are_what_a_set_of_offsets_says(mark, some, asked):
    acks, model = Acks(mark), set(range(mark))
    for start, end in some:
        if end % 3:
            acks.add(start, end)
        else:
            acks.add_each(range(start, end))
        if start <= acks.mark or start < end:
            model |= set(range(start, end))
    assert acks.mark not in model
    lo, hi = min(asked), max(asked)
    missing = {n for start, end in acks.missing(lo, hi) for n in range(start, end)}
    assert missing == set(range(lo, hi)) - model
    ranges = list(acks.ranges)
    assert ranges == sorted(ranges)
    assert all(a[1] < b[0] for a, b in pairwise(ranges))


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 9), st.lists(st.tuples(st.integers(0, 59), st.integers(1, 9), st.booleans())))
def test_what_is_durable_is_past_the_last_acknowledged_row_and_never_goes_back(mark, some):
    """Of offsets whose ten's digit is odd none has a row."""
    acks, rows = Acks(mark), set()
    for start, length, up_to in some:
        durable = acks.durable
        if start // 10 % 2:
            acks.pass_over(start, min(start + length, start // 10 * 10 + 10))
        elif up_to:
            acks.add_up_to(start + 1)
            rows.add(start)
        else:
            end = min(start + length, start // 10 * 10 + 10)
            acks.add(start, end)
            rows |= set(range(start, end))
        assert acks.durable >= durable
    assert acks.durable == max([mark, *(row + 1 for row in rows if row < acks.mark)])


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_chunks_of_a_message_that_is_not_whole_stay_behind_rows_acknowledged_in_any_order(order):
    acks = Acks(5)
    steps = [(acks.add, 5, 6), (acks.add, 6, 7), (acks.pass_over, 7, 9)]
    for step, start, end in (steps[i] for i in order):
        step(start, end)
    assert (acks.mark, acks.durable) == (9, 7)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 9), RANGES, st.integers(0, 30), st.integers(0, 60))
def test_skipping_counts_the_messages_that_are_not_acknowledged(mark, some, count, end):
    acks = Acks(mark)
    for start, stop in some:
        acks.add(start, stop)
    unacked = [n for lo, hi in acks.missing(acks.mark, end) for n in range(lo, hi)]
    target = after_unacknowledged(acks, count, end)
    assert [n for n in unacked if n < target] == unacked[:count]
    assert acks.mark <= target <= max(end, acks.mark)


def test_a_cumulative_ack_swallows_what_was_acknowledged_one_by_one():
    acks = Acks(0)
    assert not acks.add(5, 7)
    assert acks.add_up_to(5)
    assert (acks.mark, list(acks.ranges)) == (7, [])
    assert not acks.add_up_to(3)


def test_no_acknowledgement_is_forgotten_and_dispatch_stops_beyond_the_budget():
    whole = AckBudget(2 << 20)
    budgets = [AckBudget(4 << 20, whole) for _ in range(3)]
    acks, other, third = (Acks(0, budget=budget) for budget in budgets)
    for start in range(1, 60_000_000, 400):
        acks.add(start, start + 1)
    assert acks.memory.bytes == budgets[0].bytes == whole.bytes > 200_000
    assert acks.may_send(acks.end)
    for start in range(1, 16_000_000, 41):
        other.add(start, start + 1)
    assert whole.bytes == acks.memory.bytes + other.memory.bytes > 2 << 20
    assert not other.may_send(other.end) and not acks.may_send(acks.end)
    assert other.may_send(other.end - 1), "what fills a gap is sent"
    assert third.may_send(0), "a subscription without gaps takes nothing"
    assert len(list(other.ranges)) == len(range(1, 16_000_000, 41))
    acks.memory.drop()
    acks.add(0, 70_000_000)
    acks.memory.measure()
    assert whole.bytes == budgets[1].bytes == other.memory.bytes
    assert other.may_send(other.end)
    other.reset(0)
    assert whole.bytes == other.memory.bytes == 0


def test_a_subscription_that_frees_memory_and_rests_pauses_no_other():
    whole = AckBudget(2 << 20)
    resting, other = (Acks(0, budget=AckBudget(8 << 20, whole)) for _ in range(2))
    for acks, end in (resting, 40_000_000), (other, 8_000_000):
        for start in range(1, end, 41):
            acks.add(start, start + 1)
        acks.memory.measure()
    assert not other.may_send(other.end)
    resting.add(0, 50_000_000)  # its last acknowledgement
    other.memory.budget.measure()
    assert other.may_send(other.end)


def test_a_subscription_is_over_its_own_budget_in_all_its_partitions():
    whole = AckBudget(1 << 30)
    budget, free = AckBudget(1 << 20, whole), AckBudget(1 << 20, whole)
    first, second = Acks(0, budget=budget), Acks(0, budget=budget)
    for start in range(1, 24_000_000, 41):
        first.add(start, start + 1)
    second.add(3, 4)
    assert not first.may_send(first.end) and not second.may_send(second.end)
    assert Acks(0, budget=free).may_send(0)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 9), st.lists(st.tuples(st.sampled_from("aempart"), OFFSETS, OFFSETS)))
def test_the_changes_that_were_taken_give_the_same_rows_as_the_whole(mark, steps):
    acks, rows = Acks(mark), BitMap64()
    for step, start, length in [*steps, ("t", 0, 0)]:
        if step == "a":
            acks.add(start, start + length % 7)
        elif step == "e":
            acks.add_each(range(start, start + length % 9, 2))
        elif step == "m":
            acks.add_up_to(start)
        elif step == "p":
            acks.pass_over(start, start + length % 5)
        elif step == "r":
            acks.reset(start)
        else:
            changes = acks.take_changes()
            rows = (BitMap64() if changes.was_reset else rows) | changes.added
            rows.remove_range(0, acks.mark)
            assert rows == acks.rows
            again = Acks(acks.durable, BitMap64(rows))
            unacked = {n for lo, hi in again.missing(0, 99) for n in range(lo, hi)}
            assert unacked == set(range(acks.durable, 99)) - set(rows)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 100), st.integers(1, 150), st.data())
def test_an_ack_set_says_which_messages_of_a_batch_are_left(start, messages, data):
    acked = data.draw(st.sets(st.integers(start, start + messages - 1)))
    acks = Acks(0)
    for offset in sorted(acked):
        acks.add(offset, offset + 1)
    acks.add_up_to(start)
    words = ack_set(acks.missing(start, start + messages), start, messages)
    assert all(-(2**63) <= word < 2**63 for word in words)
    assert acks.durable <= acks.mark
    if not acked:
        assert words == []  # a whole batch needs no set
    else:
        found = acked_in(words, start, messages)
        assert {n for lo, hi in found for n in range(lo, hi)} == acked


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 100), st.integers(1, 150), st.integers(0, 250), st.data())
def test_of_a_set_only_messages_count_that_were_not_acknowledged_before(start, messages, at, data):
    offsets = st.sets(st.integers(start, start + messages - 1))
    before, named = data.draw(offsets), data.draw(offsets)
    acks, batch = Acks(0), range(start, start + messages)
    acks.add_up_to(min(at, start + messages))
    for offset in before:
        acks.add(offset, offset + 1)
    left = {offset for offset in batch if offset >= acks.mark and offset not in acks.rows}
    assert acks.missing_count(start, start + messages) == len(left)
    bits = sum(1 << (offset - start) for offset in batch if offset not in named)
    words = [bits >> (64 * i) & (2**64 - 1) for i in range(-(-messages // 64))]
    words = [word - 2**64 if word >> 63 else word for word in words]
    ranges = acked_in(words, start, messages, acks)
    assert {n for lo, hi in ranges for n in range(lo, hi)} == named & left


def test_a_set_says_nothing_of_messages_that_its_batch_does_not_have():
    assert acked_in([0b101], 10, 3) == [(11, 12)]
    assert acked_in([0b101, 0, 0], 10, 3) == [(11, 12)]
    assert acked_in([], 10, 3) == [(10, 13)]  # clients leave out words that are 0
    assert acked_in([0], 10, 0) == []


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 5))))
def test_what_was_sent_is_known_by_where_it_begins_also_after_it_was_sent_again(batches):
    sent, model = SentBatches(), {}
    for start, messages in batches:
        sent.note(start, messages)
        model[start] = messages
    assert {at: sent.message_count(at) for at in range(51) if sent.message_count(at)} == model


def test_of_too_many_batches_the_lowest_are_forgotten(monkeypatch):
    monkeypatch.setattr(rules, "SENT_BATCHES_MAX", 4)
    sent = SentBatches()
    for start in range(5):
        sent.note(start, 1)
    assert [sent.message_count(start) for start in range(5)] == [None, None, 1, 1, 1]


@given(st.lists(st.tuples(st.sampled_from("aaaf"), st.integers(0, 9), st.integers(0, 4))))
def test_counts_of_offsets_are_those_of_a_dictionary(steps):
    counts, plain = Counts(), Counter()
    for step, offset, more in steps:
        if step == "a":
            counts.add(offset)
            plain[offset] += 1
        else:
            counts.forget(offset, offset + more)
            for gone in range(offset, offset + more):
                plain.pop(gone, None)
        assert [counts[at] for at in range(14)] == [plain[at] for at in range(14)]
        assert len(counts) == len([at for at in plain if plain[at]])
    assert bool(counts.bytes) == bool(counts)


def test_what_is_kept_of_sent_entries_below_the_mark_is_forgotten(monkeypatch):
    monkeypatch.setattr(rules, "BATCH_MESSAGES_MAX", 10)
    sent = SentEntries()
    for entry in range(50):
        sent.masked.add(entry)
        sent.redeliveries.add(entry)
    sent.forget_below(5)
    assert (len(sent.masked), len(sent.redeliveries)) == (50, 50)
    sent.forget_below(40)
    assert (sent.masked.min(), sent.redeliveries[29], sent.redeliveries[30]) == (30, 0, 1)
    sent.forget_below(100)
    assert sent.bytes == 0


def test_acknowledgements_that_stay_in_memory_are_kept_once():
    durable, in_memory = Acks(0), Acks(0)
    in_memory.keeps_changes = False
    for acks in (durable, in_memory):
        for start in range(1, 1_000_000, 40):
            acks.add(start, start + 1)
        acks.memory.measure()
    assert durable.memory.bytes == 2 * in_memory.memory.bytes
