import random
from dataclasses import replace

import pytest

from spark_ledger import errors
from spark_ledger.topic.log import state
from spark_ledger.topic.log.actions import Append
from spark_ledger.topic.log.records import Commit
from spark_ledger.topic.read.pieces import slices_of
from spark_ledger.topic.read.plan import (
    PACKED_TASKS,
    Cutting,
    LedgerEnd,
    lost_of,
    pack_tasks,
    plan_read,
)
from tests.kit.segments_seen import partitions_of, rows_of_slice
from tests.unit.spark_ledger.topic.stage import segment


def topic_of(*segments, partitions=1):
    topic = state.empty("id", partitions)
    for number, one in enumerate(segments):
        topic = state.apply(topic, number, Commit("", "", "", 0, "", "", (Append((one,)),)), 0)
    return topic


def slices(task):
    return list(slices_of(task.table, task.spans))


def pieces(part):
    """(entry, first row, skip, take, offset) of each piece."""
    return [(entry, *piece[1:]) for entry, some in part.entries for piece in some.tolist()]


def bounds(tasks):
    return [(task.spans[0].lo, task.spans[-1].hi) for task in tasks]


def offsets_of(tasks):
    return [
        offset + row
        for task in tasks
        for part in slices(task)
        for _, _, _, take, offset in pieces(part)
        for row in range(take)
    ]


def one_task_each(*rows):
    """Of topics with so many rows of 100 bytes."""
    topics = [topic_of(segment(n, count)) for n, count in enumerate(rows)]
    plans = [plan_read(one, {0: (0, n)}) for one, n in zip(topics, rows, strict=True)]
    return [task for plan in plans for task in plan]


def test_small_tasks_of_many_topics_are_read_by_few_and_in_order():
    tasks = one_task_each(*[1] * 300)
    groups = pack_tasks(tasks)
    assert PACKED_TASKS <= len(groups) <= PACKED_TASKS + 1
    assert [task for group in groups for task in group] == tasks
    assert len(pack_tasks(tasks, Cutting(100))) == 100
    bounded = pack_tasks(tasks, Cutting(task_rows=5))
    assert {sum(task.rows for task in group) for group in bounded} == {5}


def test_a_large_topic_among_small_ones_is_read_by_itself():
    groups = pack_tasks(one_task_each(*[1] * 50, 1_000_000, *[1] * 50))
    mixed = [group for group in groups if len(group) > 1 and any(one.rows > 1 for one in group)]
    assert not mixed
    assert len(groups) < 50


def test_tasks_of_unequal_size_are_never_fewer_than_asked_for():
    sizes = [1, 1, 1, 1, 500] * 20
    for least in (17, 60, 99, 100):
        assert len(pack_tasks(one_task_each(*sizes), Cutting(least))) >= least


def test_tasks_that_are_cut_by_rows_have_no_empty_span():
    topic = topic_of(segment(1, 5, partition=0), segment(2, 7, partition=1), partitions=2)
    tasks = plan_read(topic, {0: (0, 5), 1: (0, 7)}, cutting=Cutting(task_rows=5))
    assert [task.rows for task in tasks] == [5, 5, 2]
    assert all(span.lo < span.hi for task in tasks for span in task.spans)
    assert all(task.bytes > 0 for task in tasks)


def test_few_topics_have_a_task_each():
    assert [len(group) for group in pack_tasks(one_task_each(*[1] * PACKED_TASKS))] == [1] * 16


@pytest.mark.parametrize("seed", range(20))
def test_every_row_of_the_range_is_planned_once_and_in_order(seed):
    rng = random.Random(seed)
    segments, first = [], 0
    for _ in range(rng.randrange(1, 8)):
        rows = [rng.randrange(1, 50) for _ in range(rng.randrange(1, 6))]
        segments.append(segment(rng.randrange(2), *rows, first=first))
        first += len(rows) + rng.randrange(3)
    topic = topic_of(*segments)
    end = topic.end_offsets()[0]
    lo = rng.randrange(end)
    hi = rng.randrange(lo, end + 1)

    tasks = plan_read(topic, {0: (lo, hi)}, cutting=Cutting(rng.randrange(1, 9)))

    assert offsets_of(tasks) == list(range(lo, hi))
    for task in tasks:
        assert offsets_of([task]) == list(range(task.spans[0].lo, task.spans[-1].hi))
        for part in slices(task):
            ids = [entry.entry_id for entry in part.entries]
            assert ids == sorted(ids)
            assert part.known_confirmed >= ids[-1]


def test_a_piece_says_where_in_its_entry_and_in_its_segment_the_rows_are():
    topic = topic_of(segment(1, 5), segment(2, 10, 10, first=3))

    (task,) = plan_read(topic, {0: (12, 18)}, topic="t")

    (part,) = slices(task)
    assert (part.ledger_id, part.known_confirmed, rows_of_slice(part)) == (2, 4, 6)
    assert pieces(part) == [(3, 0, 7, 3, 12), (4, 10, 0, 3, 15)]


def test_small_batches_in_one_ledger_are_read_as_one_slice():
    topic = topic_of(*(segment(7, 1, first=number) for number in range(100)))

    (task,) = plan_read(topic, {0: (0, 100)})

    (part,) = slices(task)
    assert rows_of_slice(part) == 100


def test_as_many_tasks_as_asked_for_even_out_of_one_entry():
    topic = topic_of(segment(1, 100))

    tasks = plan_read(topic, {0: (0, 100)}, cutting=Cutting(4))

    assert bounds(tasks) == [(0, 25), (25, 50), (50, 75), (75, 100)]


def test_a_cut_goes_to_an_entrys_boundary_when_one_is_near():
    topic = topic_of(segment(1, 48, 52, 47, 53))

    tasks = plan_read(topic, {0: (0, 200)}, cutting=Cutting(4))

    assert [end for _, end in bounds(tasks)] == [48, 100, 147, 200]


def test_a_task_has_about_as_many_bytes_as_it_may():
    topic = topic_of(segment(1, *[100] * 40))  # 400,000 bytes

    tasks = plan_read(topic, {0: (0, 4000)}, cutting=Cutting(task_bytes=100_000))

    assert [task.rows for task in tasks] == [1000] * 4


def test_tasks_are_shared_out_by_bytes_over_partitions():
    topic = topic_of(segment(1, 900), segment(2, 100, partition=1), partitions=3)

    tasks = plan_read(topic, {0: (0, 900), 1: (0, 100), 2: (0, 0)}, cutting=Cutting(10))

    assert [partitions_of(task) for task in tasks] == [[0]] * 9 + [[1]]


@pytest.mark.parametrize(
    "sizes", [[0] * 40, [0] * 30 + [10**6] + [0] * 9, [10**6] + [0] * 39, [0] * 39 + [10**6]]
)
def test_rows_without_bytes_are_cut_into_as_many_tasks_as_asked_for(sizes):
    every = [replace(segment(n, 1), bytes=size) for n, size in enumerate(sizes)]
    topic = topic_of(*every, replace(segment(99, 60), bytes=0))
    for wanted in (1, 2, 3, 7, 39, 40, 41, 59, 60, 61, 99, 100):
        tasks = plan_read(topic, {0: (0, 100)}, cutting=Cutting(wanted))
        assert offsets_of(tasks) == list(range(100))
        assert len(tasks) >= wanted
    assert len(plan_read(topic, {0: (0, 100)}, cutting=Cutting(500))) == 100


def test_a_partition_of_one_large_row_leaves_its_tasks_to_the_others():
    large = replace(segment(1, 1), bytes=10**9)
    topic = topic_of(large, replace(segment(2, 50, partition=1), bytes=50), partitions=2)
    tasks = plan_read(topic, {0: (0, 1), 1: (0, 50)}, cutting=Cutting(8))
    assert len(tasks) == 8
    assert [task.spans for task in tasks] == sorted(task.spans for task in tasks)
    assert offsets_of(tasks) == [0, *range(50)]


@pytest.mark.parametrize("asked", [{0: (0, 11)}, {0: (5, 4)}, {1: (0, 0)}, {0: (-1, 3)}])
def test_a_range_that_the_topic_does_not_have_is_refused(asked):
    with pytest.raises(errors.NoSuchEntry, match=r"LEDGER_OFFSETS.OUT_OF_RANGE"):
        plan_read(topic_of(segment(1, 10)), asked)


def test_rows_beyond_the_end_of_a_closed_ledger_are_lost_rows_with_their_offsets():
    (task,) = plan_read(topic_of(segment(1, 10, 10, 10)), {0: (0, 25)})

    (lost,) = lost_of(task, {1: LedgerEnd(0, 10)})

    assert (lost.start, lost.end) == (10, 25)
    assert (
        lost_of(task, {1: LedgerEnd(2, 30)}) == lost_of(task, {1: None}) == lost_of(task, {}) == []
    )
