"""Segments born live: the log has the number of their rows, their entries' headers count them."""

import json
import random
from dataclasses import replace

import pytest

from spark_ledger import errors
from spark_ledger.ledger.records import VersionedRecord
from spark_ledger.metadata.ledger_record import Fragment, LedgerRecord, RecordState
from spark_ledger.topic.commit.seal import closed_extent, seal_action, seal_live_segment
from spark_ledger.topic.log import checkpoint, records
from spark_ledger.topic.log.actions import Append, OpenLive, SealLive
from spark_ledger.topic.log.policies import TopicPolicies
from spark_ledger.topic.log.segment_table import SegmentTable
from spark_ledger.topic.log.segments import LiveSegment, PlacedSegment, Segment
from spark_ledger.topic.log.state import apply, empty
from spark_ledger.topic.read.live import EntryStarts, find_stored_since, first_piece, starts_of
from spark_ledger.topic.read.pieces import CountedSlice, LiveRows, Span, pieces_of, slices_of
from spark_ledger.topic.read.plan import Cutting, LedgerEnd, lost_of, plan_read
from spark_ledger.topic.subscription.lag import topic_lag
from spark_ledger.topic.subscription.seek_target import (
    CommittedSince,
    exactly,
    offset_since,
    rows_around,
)
from spark_ledger.topic.upkeep.retention import trim_points
from tests.unit.spark_ledger.topic.batches import appended, numbered, rows_of
from tests.unit.spark_ledger.topic.live_segments import Owner
from tests.unit.spark_ledger.topic.stage import play, segment


def counted(ledger_id: int, entries: int, rows: int, *, first_ms: int = 1, last_ms: int = 1):
    ends = ((0, entries - 1),)
    return Segment(0, ledger_id, 0, ends, (), rows, 100 * rows, first_ms, last_ms)


def commit_of(*actions):
    return records.Commit("c", "a", "t", 1, "r", "i", actions)


def state_of(*steps):
    """Each step: the store's time, and the actions of a commit."""
    state = empty("t", 1)
    for ms, *actions in steps:
        state = apply(state, state.next, commit_of(*actions), ms)
    return state


async def a_sealed_one(stage, *sizes):
    """After 4 rows of Spark a segment born live with such entries, and 3 rows of Spark."""
    intent = await stage.intent()
    await stage.commit(intent, 1, await stage.written(intent, [b"%d" % n for n in range(4)]))
    owner = Owner(stage)
    await owner.open(4)
    await appended(stage, owner, *sizes)
    end = 4 + sum(sizes)
    more = [b"%d" % n for n in range(end, end + 3)]
    await stage.commit(intent, 2, await stage.written(intent, more))
    return await stage.client.log(stage.topic.id).fold(fresh=True)


def test_the_seal_of_a_million_entries_is_a_small_record():
    known = VersionedRecord(
        record_closed(last_entry=999_999, rows=1_000_000, length_bytes=200_000_000), 3
    )
    live = LiveSegment(0, 1, 0, 5, 8, "owner", 1)
    seal = seal_action(live, 3, closed_extent(known, 1_000_000, 1_000_000), [1, 2])
    value = records.encode_commit(commit_of(seal))
    assert len(value) < 700
    assert records.decode_commit(value).actions == (seal,)


def record_closed(**ends):
    members = (Fragment(0, ("a", "b", "c")),)
    return LedgerRecord(1, 3, 3, 2, members, RecordState.CLOSED, **ends)


def test_only_a_commit_that_needs_it_asks_for_the_version_that_counts():
    plain = json.loads(records.encode_commit(commit_of(SealLive(0, 7, counted(7, 3, 9)))))
    assert (plain["min_reader"], plain["min_writer"]) == (2, 2)
    plain = json.loads(records.encode_commit(commit_of(Append((segment(1, 4),)))))
    assert (plain["min_reader"], plain["min_writer"]) == (1, 1)


def test_a_topic_asks_for_that_version_from_then_on_and_so_does_its_checkpoint():
    opened = OpenLive(0, 7, 0, "owner", 1)
    before = state_of((1, Append((segment(1, 4),))), (2, opened))
    after = apply(before, 2, commit_of(SealLive(0, 7, counted(7, 3, 9))), 3)
    assert (before.min_writer, after.min_writer) == (1, 2)
    for state in (before, after):
        again = checkpoint.decode_root(checkpoint.encode_root(checkpoint.Root(state))).state
        assert again.min_writer == state.min_writer
        found, meant = (
            [(i.first_ms, i.last_ms, list(i.source)) for i in one.partitions[0].intervals]
            for one in (again, state)
        )
        assert found == meant


@pytest.mark.parametrize(
    "wrong",
    [
        {"entries": ((0, 1), (3, 3))},
        {"rows": 2},
        {"shared": True},
        {"filter_entry": 9},
    ],
)
def test_a_segment_that_lists_no_rows_is_a_whole_ledger_of_one_partition(wrong):
    with pytest.raises(ValueError, match="without row counts"):
        replace(counted(7, 3, 9), **wrong)


@pytest.mark.parametrize("tasks", [1, 3, 7, 40])
def test_rows_are_read_once_and_in_order_however_a_plan_is_cut(tasks):
    async def act(stage):
        state = await a_sealed_one(stage, 5, 1, 1, 1, 9, 1, 2, 2, 7, 1)
        ranges = {0: (0, 37)}
        plan = plan_read(state, ranges, cutting=Cutting(tasks))
        assert len(plan) == min(tasks, 37)
        found = [row for task in plan for row in await rows_of(stage.client, task)]
        assert found == numbered((0, 37))

    play(act)


def test_any_slice_in_the_middle_has_exactly_its_rows():
    async def act(stage):
        state = await a_sealed_one(stage, *[3] * 12)
        rng = random.Random(5)
        for _ in range(12):
            lo = rng.randrange(0, 42)
            hi = rng.randrange(lo + 1, 44)
            for task in plan_read(state, {0: (lo, hi)}):
                assert await rows_of(stage.client, task) == numbered((lo, hi))

    play(act)


def test_the_first_entry_of_a_slice_is_found_by_a_few_reads():
    async def act(stage):
        owner = Owner(stage)
        await owner.open(0)
        await owner.append(*[2] * 200)
        record = await owner.writer.close()
        ledger_id = owner.writer.ledger_id
        live = (await stage.client.log(stage.topic.id).fold(fresh=True)).partitions[0].live
        reader = await stage.client.ledgers.open(ledger_id, recover=False)
        reads = []
        read = reader.read

        def counting(*place, **more):
            reads.append(place)
            return read(*place, **more)

        reader.read = counting
        for row in (0, 1, 155, 398, 399):
            wanted = LiveRows(live, row, 400, record.last_entry, 400)
            assert await first_piece(reader, wanted, EntryStarts(1)) == (row // 2, row // 2 * 2)
        assert len(reads) <= 10

    play(act)


def test_rows_that_a_ledger_lost_are_told_exactly_and_may_be_left_out():
    async def act(stage):
        state = await a_sealed_one(stage, 5, 7, 1)
        (task,) = plan_read(state, {0: (4, 17)})
        one = task.table[0]
        more = replace(one.segment, rows=21, entries=((0, 4),))  # as if there had been two more
        table = SegmentTable.of([replace(one, segment=more)])
        task = replace(task, spans=(Span(0, 6, 24, 0, 1),), table=table)

        with pytest.raises(errors.RowsLost, match="offsets 17 to 23"):
            await rows_of(stage.client, task)
        assert await rows_of(stage.client, task, lossy=True) == numbered((6, 17))
        ledger = more.ledger_id
        (lost,) = lost_of(task, {ledger: LedgerEnd(0, 5)})
        assert (lost.start, lost.end) == (9, 24)
        assert lost_of(task, {ledger: LedgerEnd(4, 21)}) == lost_of(task, {ledger: None}) == []

    play(act)


def test_to_plan_with_a_segment_counts_as_entries_of_as_many_rows_each():
    others, own = segment(3, 5, 5), counted(7, 100, 1000)
    table = SegmentTable.of([PlacedSegment(others, 0, 0, 0), PlacedSegment(own, 10, 1, 0)])
    pieces = pieces_of(table, (Span(0, 3, 1010, 0, 2),))
    assert int(pieces.take.sum()) == 1007
    assert len(pieces) == 2 + 64
    assert bool((pieces.offset[1:] == (pieces.offset + pieces.take)[:-1]).all())
    kinds = [type(one) for one in slices_of(table, (Span(0, 3, 1010, 0, 2),))]
    assert kinds[-1] is CountedSlice
    assert len(kinds) == 2


# -- time --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first_ms", "last_ms", "told"),
    [(150, 250, (150, 250)), (10, 20, (100, 100)), (150, 9000, (150, 300)), (400, 500, (300, 300))],
)
def test_a_sealed_segments_rows_have_their_owners_times_within_those_of_commits(
    first_ms, last_ms, told
):
    opened = OpenLive(0, 7, 0, "owner", 1)
    seal = SealLive(0, 7, counted(7, 3, 9, first_ms=first_ms, last_ms=last_ms))
    state = state_of((100, Append((segment(1, 4),))), (120, opened), (300, seal))
    last = list(state.partitions[0].intervals)[-1]
    assert (last.first_ms, last.last_ms) == told
    assert int(last.source.commits_ms[0]) == told[1]


def test_a_time_in_the_middle_of_a_sealed_segment_is_the_row_stored_then():
    async def act(stage):
        state = await a_sealed_one(stage, 5, 1, 1, 9, 2)
        held, ledgers = state.partitions[0], stage.client.ledgers
        first_ms = int(held.intervals.between(4, 5)[0].source.min_ms[0])
        for at, offset in ((0, 4), (1, 9), (1000, 9), (1001, 10), (2500, 11), (4000, 20)):
            target = CommittedSince(first_ms + at)
            assert await exactly(ledgers, state, target) == {0: offset}
            assert offset_since(held, first_ms + at) <= offset

    play(act)


def test_a_time_in_the_middle_of_an_open_segment_is_the_row_stored_then():
    async def act(stage):
        owner = Owner(stage)
        await owner.open(0)
        first_ms = await appended(stage, owner, *[2] * 8)
        live = (await stage.client.log(stage.topic.id).fold(fresh=True)).partitions[0].live
        reader = await stage.client.ledgers.open(live.ledger_id, recover=False)
        wanted = LiveRows(live, 0, 14, 6, 14)
        for at, offset in ((-5, 0), (0, 0), (1, 2), (3000, 6), (5999, 12), (6001, 14)):
            assert await find_stored_since(reader, wanted, first_ms + at) == offset

    play(act)


def test_what_was_stored_before_is_not_looked_for_in_entries():
    state = state_of(
        (100, OpenLive(0, 7, 0, "owner", 1)),
        (300, SealLive(0, 7, counted(7, 3, 9, first_ms=150, last_ms=250))),
    )
    held = state.partitions[0]
    assert rows_around(held, 150) is None
    assert rows_around(held, 251) is None
    assert (rows_around(held, 151).start, rows_around(held, 151).end) == (0, 9)
    assert (offset_since(held, 150), offset_since(held, 251)) == (0, 9)


def test_a_successor_reads_the_first_and_the_last_entry_only():
    async def act(stage):
        owner = Owner(stage)
        await owner.open(0)
        await owner.append(*[2] * 50)
        live = (await stage.client.log(stage.topic.id).fold(fresh=True)).partitions[0].live
        real, reads = stage.client.ledgers.open, []

        async def counting(ledger_id, **options):
            reader = await real(ledger_id, **options)
            read, read_entries = reader.read, reader.read_entries

            def noted(first, last, **more):
                reads.append([*range(first, last + 1)])
                return read(first, last, **more)

            def noted_entries(ids, **more):
                reads.append([*ids])
                return read_entries(ids, **more)

            reader.read, reader.read_entries = noted, noted_entries
            return reader

        stage.client.ledgers.open = counting
        found = await seal_live_segment(stage.client.ledgers, live)
        assert (found.segment.rows, found.segment.entries) == (100, ((0, 49),))
        assert reads == [[49], [0]]

    play(act)


def test_retention_lets_rows_go_by_when_they_were_stored_not_by_the_seal():
    seal = SealLive(0, 7, counted(7, 3, 9, first_ms=150, last_ms=250))
    state = state_of((100, OpenLive(0, 7, 0, "owner", 1)), (90_000, seal))
    kept = TopicPolicies(retention_ms=1000)
    assert trim_points(state, kept, 1250) == {}
    assert trim_points(state, kept, 1251) == {0: 9}


@pytest.mark.parametrize(("position", "millis"), [(0, 850), (3, 817), (6, 784), (9, 0)])
def test_a_lag_in_time_takes_rows_of_a_segment_as_stored_evenly(position, millis):
    seal = SealLive(0, 7, counted(7, 3, 9, first_ms=150, last_ms=250))
    state = state_of((100, OpenLive(0, 7, 0, "owner", 1)), (900, seal))
    assert topic_lag(state, {0: position}, 1000)[0].millis == millis
    assert state.partitions[0].intervals.last()[0].source.entry_counts.tolist() == [3]


def test_whoever_reads_on_where_a_read_ended_looks_for_nothing():
    async def act(stage):
        sizes = [3, 1, 2] * 10
        state = await a_sealed_one(stage, *sizes)
        (task,) = plan_read(state, {0: (4, 13)})
        assert await rows_of(stage.client, task) == numbered((4, 13))
        starts = starts_of(stage.client.ledgers)
        (((ledger_id, row), entry_id),) = starts._kept.items()
        assert sum(sizes[:entry_id]) == row < 60

        reader = await stage.client.ledgers.open(ledger_id, recover=False)
        reader.read = None  # nothing is read
        live = LiveSegment(0, ledger_id, 0, 4, 0, "", 0)
        wanted = LiveRows(live, 4 + row, 64, 29, 60)
        assert await first_piece(reader, wanted, starts) == (entry_id, row)

    play(act)
