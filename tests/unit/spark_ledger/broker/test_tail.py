"""The newest batches in memory: what they take, and what is given out in a step."""

import sys

import pytest

from spark_ledger.broker.log.tail import (
    BATCH_OVERHEAD_BYTES,
    STEP_BATCHES_MAX,
    Stored,
    Tail,
    TailBudget,
)

MIB = 1 << 20


def offsets(batches):
    return [one.offset for one in batches]


@pytest.mark.parametrize("together", [1, 50, 3000])
def test_small_messages_count_with_what_their_objects_take(together):
    budget = TailBudget(MIB)
    tail, at = Tail(budget), 0
    while at < 30_000:
        tail.add(at, [1] * together, [b"%026d" % (at + i) for i in range(together)], False)
        at += together
    first = next(i for i in range(at) if tail.since(i, 1))
    kept, follows = list[Stored](), first
    while more := tail.since(follows, MIB):
        kept += more
        follows = more[-1].end
    assert budget.bytes <= MIB + together * (26 + BATCH_OVERHEAD_BYTES)
    objects = sum(sys.getsizeof(one.data) + 16 for one in kept)
    assert objects <= budget.bytes
    assert kept[-1].offset == at - 1
    assert offsets(tail.since(at - 10, MIB)) == [*range(at - 10, at)]
    assert len(kept) == at - first


def test_what_is_given_out_at_a_time_is_bounded_in_batches_and_bytes():
    tail = Tail(TailBudget(8 * MIB))
    for at in range(0, 5000, 500):
        tail.add(at, [1] * 500, [b"x" * 10] * 500, False)
    assert len(tail.since(3, MIB)) == STEP_BATCHES_MAX
    assert len(tail.since(3, 55)) == 6


def test_a_message_of_a_quiet_partition_stays_although_those_before_it_go():
    budget = TailBudget(25 * (1000 + BATCH_OVERHEAD_BYTES))
    quiet, busy = Tail(budget), Tail(budget)
    quiet.add(0, [1], [b"first"], False)
    for at in range(15):
        busy.add(at, [1], [b"x" * 1000], False)
    quiet.add(1, [1], [b"second"], False)
    for at in range(15, 30):
        busy.add(at, [1], [b"x" * 1000], False)
    assert quiet.since(0, MIB) == []
    assert offsets(quiet.since(1, MIB)) == [1]


def test_batches_that_were_read_are_found_on_both_sides_of_a_hole():
    tail = Tail(TailBudget(MIB))
    read = [Stored(0, 2, b"a", True), Stored(2, 3, b"b", True), Stored(5, 1, b"c", False)]
    after = [Stored(9, 2, b"d", True), Stored(11, 1, b"e", True)]
    tail.add_read([*read, *after])
    tail.add_read([])
    assert tail.since(0, MIB) == read
    assert tail.since(2, MIB) == read[1:]
    assert tail.since(9, MIB) == after
    for beside in (1, 3, 6, 8, 10, 12):
        assert tail.since(beside, MIB) == []
