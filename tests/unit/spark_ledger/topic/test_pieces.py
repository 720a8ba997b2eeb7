"""Any shape of segments, plan and cutting: every row once, in order, entries fetched as seldom as
they can be."""

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_ledger.topic.log import state
from spark_ledger.topic.log.actions import Append, Hole
from spark_ledger.topic.log.records import Commit
from spark_ledger.topic.log.segments import INLINE, Segment
from spark_ledger.topic.read.pieces import slices_of
from spark_ledger.topic.read.plan import Cutting, plan_read, segments_in
from tests.kit.segments_seen import partitions_of


def commit(*actions):
    return Commit("", "", "", 0, "", "", actions)


@st.composite
def topics(draw):
    """A topic of some commits; in each some tasks, each with entries of its ledger, or a commit's
    own, that have rows of one partition or of several."""
    partitions = draw(st.integers(1, 5))
    topic = state.empty("id", partitions)
    next_entry: Counter[int] = Counter()
    for number in range(draw(st.integers(1, 4))):
        segments = []
        for _ in range(draw(st.integers(1, 4))):
            segments += draw(tasks(partitions, next_entry))
        topic = state.apply(topic, number, commit(Append(tuple(segments))), 0)
    for p in draw(st.sets(st.integers(0, partitions - 1), max_size=2)):
        end = topic.end_offsets()[p]
        if end > 2:
            lo = draw(st.integers(0, end - 2))
            hole = Hole(p, lo, draw(st.integers(lo + 1, end - 1)))
            topic = state.apply(topic, topic.next, commit(hole), 0)
    return topic


@st.composite
def tasks(draw, partitions, next_entry):
    wanted = sorted(draw(st.sets(st.integers(0, partitions - 1), min_size=1)))
    if draw(st.booleans()) and draw(st.booleans()):
        return [
            Segment(p, INLINE, 0, ((0, 0),), (2,), 2, 7, 1, 1, inline=(b"%d" % p,)) for p in wanted
        ]
    ledger = draw(st.integers(1, 3))
    entries: dict[int, list[tuple[int, int]]] = {}
    shared = set()
    for _ in range(draw(st.integers(1, 4))):
        some = sorted(draw(st.sets(st.sampled_from(wanted), min_size=1)))
        for p in some:
            entries.setdefault(p, []).append((next_entry[ledger], draw(st.integers(1, 9))))
        shared |= set(some) if len(some) > 1 else set()
        next_entry[ledger] += draw(st.integers(1, 2))
    return [
        Segment(
            p,
            ledger,
            0,
            tuple((entry, entry) for entry, _ in held),
            tuple(rows for _, rows in held),
            sum(rows for _, rows in held),
            sum(rows for _, rows in held) * draw(st.sampled_from((0, 100))),
            1,
            1,
            shared=p in shared,
        )
        for p, held in sorted(entries.items())
    ]


cuttings = st.builds(
    Cutting,
    tasks_min=st.integers(1, 9),
    task_bytes=st.sampled_from((1, 300, 2_000, 1 << 30)),
    task_rows=st.sampled_from((None, None, 1, 7)),
)


def fetched(task):
    """(ledger, entry) of all that is fetched for the task, in order, with the pieces; that of an
    inline segment by its payload."""
    for part in slices_of(task.table, task.spans):
        for i, (entry, pieces) in enumerate(part.entries):
            place = part.payloads[i] if part.ledger_id == INLINE else part.ledger_id
            yield (place, entry), pieces.tolist()


def kept(held, lo, hi):
    return [offset for one in held.stretches(lo, hi) for offset in range(max(lo, one.lo), one.hi)]


@settings(deadline=None)
@given(topics(), st.data(), cuttings)
def test_every_row_of_a_plan_is_read_once_and_in_the_order_of_its_partition(topic, data, cutting):
    ranges = {}
    for p, end in topic.end_offsets().items():
        lo = data.draw(st.integers(0, end))
        ranges[p] = (lo, data.draw(st.integers(lo, end)))
    wanted = {p: kept(topic.partitions[p], *ends) for p, ends in ranges.items()}

    plan = plan_read(topic, ranges, cutting=cutting)

    read = {p: [] for p in ranges}
    for task in plan:
        assert task.rows == sum(piece[3] for _, pieces in fetched(task) for piece in pieces)
        assert cutting.task_rows is None or task.rows <= cutting.task_rows
        for _, pieces in fetched(task):
            assert pieces == sorted(pieces)
            for p, _, skip, take, offset in pieces:
                assert skip >= 0 < take
                read[p] += range(offset, offset + take)
    assert read == wanted
    rows = sum(map(len, wanted.values()))
    assert len(plan) >= min(cutting.tasks_min, rows)


@settings(deadline=None)
@given(topics())
def test_a_task_fetches_an_entry_once_for_all_its_partitions(topic):
    ranges = {p: (0, end) for p, end in topic.end_offsets().items()}
    for task in plan_read(topic, ranges):
        there = [place for place, _ in fetched(task) if isinstance(place[0], int)]
        by_partition = {}
        for place, pieces in fetched(task):
            for p, *_ in pieces:
                by_partition.setdefault(p, []).append(place)
        assert len(there) == len(set(there)) or waits_for_itself(by_partition.values())


def waits_for_itself(orders):
    """Whether no order of the entries has those of each of `orders` in theirs."""
    after: dict = {}
    for order in orders:
        for one, other in itertools.pairwise(order):
            after.setdefault(one, set()).add(other)
    reached = dict(after)
    for _ in range(len(after)):
        reached = {
            one: found | {far for near in found for far in reached.get(near, ())}
            for one, found in reached.items()
        }
    return any(one in found for one, found in reached.items())


def shared_by_all(partitions, entries, rows=5, size=500):
    """One ledger, each of whose entries has rows of every partition."""
    segments = [
        Segment(p, 1, 0, ((n, n),), (rows,), rows, size, 1, 1, shared=True)
        for n in range(entries)
        for p in range(partitions)
    ]
    return state.apply(state.empty("id", partitions), 0, commit(Append(tuple(segments))), 0)


@pytest.mark.parametrize("partitions", [2, 8, 100])
def test_a_plan_over_shared_entries_is_cut_between_them_and_fetches_each_once(partitions):
    topic = shared_by_all(partitions, 200)
    plan = plan_read(topic, {p: (0, 1000) for p in range(partitions)})

    places = [place for task in plan for place, _ in fetched(task)]
    assert len(places) == len(set(places)) == 200
    assert min(partitions, 16) <= len(plan) <= 17
    assert all(partitions_of(task) == list(range(partitions)) for task in plan)


def test_a_shared_entry_is_read_by_several_tasks_where_so_many_are_asked_for():
    topic = shared_by_all(100, 1)
    ranges = {p: (0, 5) for p in range(100)}
    assert len(plan_read(topic, ranges)) == 1
    plan = plan_read(topic, ranges, cutting=Cutting(20))
    assert len(plan) == 20
    assert sum(task.rows for task in plan) == 500


def test_small_partitions_are_packed_and_large_ones_are_not():
    every = [Segment(p, 1, 0, ((p, p),), (9,), 9, 1 << 10, 1, 1) for p in range(1000)]
    large = [Segment(p, 2, 0, ((p, p),), (9,), 9, 100 << 20, 1, 1) for p in (1000, 1001)]
    topic = state.apply(state.empty("id", 1002), 0, commit(Append((*every, *large))), 0)
    ranges = {p: (0, 9) for p in range(1002)}

    plan = plan_read(topic, ranges, cutting=Cutting(task_bytes=256 << 20))
    assert [partitions_of(task) for task in plan[-2:]] == [[1000], [1001]]
    assert len(plan) == 3

    small = {p: (0, 9) for p in range(1000)}
    assert len(plan_read(topic, small)) == 17  # not one: user code is slow where reading is not
    assert len(plan_read(topic, {p: (0, 9) for p in range(8)})) == 8
    assert len(plan_read(topic, small, cutting=Cutting(1000))) == 1000


def test_where_partitions_want_the_same_entries_in_different_orders_each_has_its_own():
    one, other = (
        [Segment(p, ledger, 0, ((0, 0),), (3,), 3, 30, 1, 1, shared=True) for p in range(3)]
        for ledger in (1, 2)
    )
    topic = state.apply(
        state.empty("id", 3), 0, commit(Append((one[0], other[1], one[2], other[2]))), 0
    )
    topic = state.apply(topic, 1, commit(Append((other[0], one[1]))), 0)
    spans, table = segments_in(topic, [(p, 0, 6) for p in range(3)])
    read = {p: [] for p in range(3)}
    for part in slices_of(table, spans):
        for _, pieces in part.entries:
            for p, _, _, take, offset in pieces.tolist():
                read[p] += range(offset, offset + take)
    assert read == {p: list(range(6)) for p in range(3)}
