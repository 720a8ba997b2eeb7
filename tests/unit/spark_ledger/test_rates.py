"""Rates as text, and what may pass at a rate: beside a sum over the time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_ledger.rates import Allowance, Rate

NUMBERS = st.none() | st.integers(1, 2**63 - 1)
RATES = st.builds(Rate, NUMBERS, NUMBERS, NUMBERS, st.integers(1, 10**6), st.booleans())


@given(RATES)
def test_a_rate_is_read_back_from_its_text(rate):
    is_limit = (rate.messages, rate.bytes, rate.requests) != (None, None, None)
    assert Rate.parse(str(rate)) == (rate if is_limit else None)


@pytest.mark.parametrize(
    "text",
    [
        *("", "5", "messages", "0 messages", "-1 bytes", "1.5 bytes", "5 messages,3 bytes", "30 s"),
        *("relative", "5 messages, 6 messages", "9223372036854775808 bytes", "5 messages, late"),
        *("05 messages", "٣ messages", None, 5, ["5 messages"]),
    ],
)
def test_other_texts_are_no_rates(text):
    assert Rate.parse(text) is None


@given(
    st.integers(1, 50),
    st.integers(1, 1000),
    st.integers(1, 10),
    st.lists(st.tuples(st.floats(0, 3), st.integers(1, 20), st.integers(1, 400)), max_size=60),
)
def test_no_more_passes_than_the_rate_allows_and_who_waits_as_told_may_pass(
    messages, size, seconds, asks
):
    allowance, now_s, passed = Allowance(), 100.0, [0, 0]
    allowance.change(Rate(messages, size, s=seconds), now_s)
    for pause_s, count, many in asks:
        now_s += pause_s
        if (wait_s := allowance.wait_s(now_s)) > 0:
            now_s += wait_s + 1e-6
            assert allowance.wait_s(now_s) == 0
        last = passed
        allowance.take(count, many)
        passed = [passed[0] + count, passed[1] + many]
        periods = 1 + (now_s - 100) / seconds
        assert last[0] < messages * periods + 1e-3 and last[1] < size * periods + 1e-3


def test_what_is_not_used_is_not_kept_for_later():
    allowance = Allowance()
    allowance.change(Rate(messages=10), 0)
    allowance.take(10, 0)
    assert allowance.wait_s(3600) == 0
    allowance.take(10, 0)
    assert 0 < allowance.wait_s(3600) <= 0.11


def test_a_rate_that_stays_goes_on_and_another_begins_anew():
    allowance = Allowance()
    assert allowance.wait_s(0) == 0
    allowance.change(Rate(messages=10, s=10), 0)
    allowance.take(10, 0)
    allowance.change(Rate(messages=10, s=10), 1)
    assert allowance.wait_s(0.5) > 0
    allowance.change(Rate(messages=20, s=10), 1)
    assert allowance.wait_s(1) == 0
    allowance.take(1000, 0)
    allowance.change(None, 1)
    assert allowance.wait_s(1) == 0


def test_a_relative_rate_allows_as_many_beside_as_came():
    came = (0, 0)
    allowance = Allowance(lambda: came)
    allowance.change(Rate(messages=10, relative=True), 0)
    allowance.take(10, 0)
    assert allowance.wait_s(0) > 0
    came = (100, 5000)
    assert allowance.wait_s(0) == 0
    allowance.take(99, 0)
    assert allowance.wait_s(0) == 0
    allowance.take(1, 0)
    assert allowance.wait_s(0) > 0


def test_what_came_at_once_may_pass_in_many_steps_and_not_much_later():
    came = (0, 0)
    allowance = Allowance(lambda: came)
    allowance.change(Rate(messages=10, relative=True), 0)
    came = (1000, 0)
    for _ in range(10):
        assert allowance.wait_s(0.5) == 0
        allowance.take(100, 0)
    came = (2000, 0)
    assert allowance.wait_s(1) == 0
    assert allowance.wait_s(2) == 0
    allowance.take(10, 0)
    assert allowance.wait_s(2) > 0
