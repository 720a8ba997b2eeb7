"""When acknowledgements are written, and where to."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_ledger.topic.acks.steps import (
    IDLE_S,
    INLINE_EVERY_S,
    REFUSED_EVERY_S,
    REFUSED_S,
    AckLedgerSize,
    AckSituation,
    AckStep,
    next_ack_look_s,
    next_ack_step,
)

LONG_AGO_S = float("-inf")
AT_REST = AckSituation(1000.0, *[LONG_AGO_S] * 3, dirty=False, urgent=False, small=True)
DIRTY = replace(AT_REST, dirty=True, node_s=999.0)
TIMES = st.floats(0, 2000) | st.just(LONG_AGO_S)
SITUATIONS = st.builds(
    AckSituation,
    *(st.just(1000.0), TIMES, TIMES, TIMES),
    **dict.fromkeys(("dirty", "urgent", "small", "open", "full", "long", "whole"), st.booleans()),
)


@pytest.mark.parametrize(
    ("now", "step"),
    [
        (AT_REST, AckStep.NOTHING),
        (DIRTY, AckStep.NEW_LEDGER),
        (replace(DIRTY, open=True), AckStep.APPEND),
        (replace(DIRTY, open=True, long=True), AckStep.SNAPSHOT),
        (replace(DIRTY, open=True, whole=True), AckStep.SNAPSHOT),
        (replace(DIRTY, open=True, full=True), AckStep.NEW_LEDGER),
        (replace(DIRTY, open=True, written_s=999.5), AckStep.NOTHING),
        (replace(DIRTY, open=True, written_s=999.5, urgent=True), AckStep.APPEND),
        (replace(DIRTY, node_s=1000 - INLINE_EVERY_S), AckStep.INLINE),
        (replace(DIRTY, node_s=1000 - INLINE_EVERY_S, urgent=True), AckStep.NEW_LEDGER),
        (replace(DIRTY, node_s=LONG_AGO_S, small=False), AckStep.NEW_LEDGER),
        (replace(DIRTY, node_s=990.0, refused_s=999.0, urgent=True), AckStep.NOTHING),
        (replace(DIRTY, node_s=990.0, refused_s=997.0, urgent=True), AckStep.INLINE),
        (replace(DIRTY, node_s=990.0, refused_s=997.0, small=False), AckStep.NOTHING),
        (replace(DIRTY, refused_s=1000 - REFUSED_S), AckStep.NEW_LEDGER),
        (replace(AT_REST, open=True, written_s=1000 - IDLE_S), AckStep.INLINE),
        (replace(AT_REST, open=True, small=False, written_s=1000 - IDLE_S), AckStep.LEAVE),
        (replace(AT_REST, open=True, written_s=999.0), AckStep.NOTHING),
    ],
)
def test_the_step_of_a_situation(now, step):
    assert next_ack_step(now) is step


@given(SITUATIONS)
def test_nothing_is_done_before_the_time_of_the_next_look_and_something_at_it(now):
    step, look_s = next_ack_step(now), next_ack_look_s(now)
    assert (step is AckStep.NOTHING) is (look_s > now.now_s)
    if step is AckStep.NOTHING and look_s < float("inf"):
        assert next_ack_step(replace(now, now_s=look_s)) is not AckStep.NOTHING
    if step is AckStep.INLINE:
        assert now.small
        assert now.now_s >= now.node_s + REFUSED_EVERY_S or now.open
    if step in (AckStep.APPEND, AckStep.SNAPSHOT):
        assert now.open


def test_a_snapshot_is_due_by_entries_or_by_bytes_but_not_after_each_large_one():
    size = AckLedgerSize(5000, 10, 100, 100, 0.0, 1)
    assert not size.is_long
    assert replace(size, entries_since=2000).is_long
    assert replace(size, bytes_since=3 << 20).is_long
    assert not replace(size, bytes_since=3 << 20, snapshot_bytes=2 << 20).is_long
    assert replace(size, bytes_since=400, entries_since=8).is_long
    assert not replace(size, bytes_since=400, entries_since=7).is_long
    assert not replace(size, bytes_since=399, entries_since=500).is_long
    assert replace(size, entries=500_000).is_full(10.0, 1000)
    assert replace(size, fragments=1000).is_full(10.0, 1000)
    assert not size.is_full(10.0, 1000)
    assert size.is_full(4 * 3600.0, 1000)
