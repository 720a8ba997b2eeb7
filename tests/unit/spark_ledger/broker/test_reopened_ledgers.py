"""Live segments that begin within a ledger, because its owner went on in it after a batch of Spark:
who reads them, by an old log too; who takes them over; and when the ledger goes."""

import asyncio
import json
from dataclasses import replace

import pytest

from spark_ledger import errors
from spark_ledger.broker.log.topic_commits import RollLimits
from spark_ledger.topic.commit.seal import seal_live_segment
from spark_ledger.topic.entry.message_batch import Rowless
from spark_ledger.topic.log import actions, checkpoint, records
from spark_ledger.topic.log.actions import OpenLive, SealLive
from spark_ledger.topic.log.segment_table import NO_SEGMENTS, SegmentTable
from spark_ledger.topic.log.segments import LiveSegment, PlacedSegment, Segment
from spark_ledger.topic.log.state import apply, empty
from spark_ledger.topic.read.live import LiveEnds, first_stored_since
from spark_ledger.topic.read.pieces import LiveRows, Span, live_rows, pieces_of
from spark_ledger.topic.read.plan import Cutting, LedgerEnd, ReadTask, lost_of, plan_read
from spark_ledger.topic.subscription.lag import topic_lag
from spark_ledger.topic.subscription.seek_target import End
from spark_ledger.topic.task_reader import fetch_with_replans
from spark_ledger.topic.upkeep.admin import TopicAdmin
from tests.kit.rows import parts_of
from tests.unit.spark_ledger.broker.hand_overs import (
    before_the_commit,
    by_spark,
    dies,
    live_segment,
    now_s,
    reached,
    values,
)
from tests.unit.spark_ledger.broker.owners import (
    Owner,
    another_of,
    deduplicating,
    owner_of,
    sent_by,
)
from tests.unit.spark_ledger.topic.stage import play

SPARK = b"of spark"


async def reopened(stage, *rounds):
    """An owner that stored so many entries of two rows each, and a batch of Spark after each round
    but the last: offsets are values of rows, but where Spark's are."""
    owner, offset = reached(await owner_of(stage)), 0
    for version, entries in enumerate(rounds):
        if version:
            await by_spark(stage, version)
            offset += 1
        for _ in range(entries):
            rows = [b"%d" % n for n in range(offset, offset + 2)]
            assert await owner.all_stored(owner.send(rows)) == [[offset]]
            offset += 2
    return owner


async def folded(stage):
    return await stage.client.log(stage.topic.id).fold(fresh=True)


async def read(client, task, **options):
    found = []
    async for run in fetch_with_replans(client, task, **options):
        for rows in (r for fetched in run for b in fetched.blocks() for r in parts_of(b)):
            found += enumerate(rows.record_batch.column("value").to_pylist(), rows.offset)
    return found


def right(found):
    """Whether the rows are those that were sent with these offsets."""
    return all(value in (SPARK, b"%d" % offset) for offset, value in found)


async def heard(stage, live, seconds=10):
    """What a process that knows only this live segment hears of it."""
    ends = LiveEnds((await stage.another()).ledgers)
    await asyncio.sleep(seconds)
    await ends.refresh([live])
    return ends.end_of(live)


# -- a reader whose log is old ---------------------------------------------------------------------


def test_who_knows_of_no_batch_of_spark_hears_of_no_row_after_it():
    async def act(stage):
        owner = await reopened(stage, 3)
        old = await live_segment(owner)
        await by_spark(stage)
        for entries in (0, 1, 4, 9):
            await owner.all_stored(owner.send(*[[b"x", b"y"]] * entries))
            known = await heard(stage, old)
            assert (known.last_entry, known.rows, known.closed) == (2, 6, entries > 0)
        now = await live_segment(owner)
        assert (now.ledger_id, now.first_entry, now.base) == (old.ledger_id, 3, 7)
        assert (await heard(stage, now)).rows == 2 * (1 + 4 + 9)
        await owner.writer.close()

    play(act)


def test_who_follows_a_segment_stops_where_the_batch_of_spark_came():
    async def act(stage):
        owner = await reopened(stage, 3)
        old = await live_segment(owner)
        ends = LiveEnds(stage.client.ledgers)
        ends.follow([old])
        await asyncio.sleep(10)
        assert ends.end_of(old).rows == 6
        await owner.all_stored(owner.send([b"6", b"7"]))
        await by_spark(stage)
        await owner.all_stored(owner.send([b"9", b"10"], [b"11", b"12"]))
        await asyncio.sleep(20)
        assert (ends.end_of(old).rows, ends.end_of(old).closed) == (8, True)
        new = await live_segment(owner)
        ends.follow([new])
        await asyncio.sleep(10)
        assert (ends.end_of(new).rows, ends.end_of(new).closed) == (4, False)
        await ends.close()
        await owner.writer.close()

    play(act)


@pytest.mark.parametrize("first", [0, 2])
def test_a_segment_that_took_nothing_is_told_from_the_next_one_that_begins_at_the_same_entry(first):
    async def act(stage):
        owner = await reopened(stage, first, 0)  # that Spark found open, or not
        if not first:
            (sent,) = owner.send([b"a"])
            await owner.all_stored([sent])
        before = await live_segment(owner)
        await by_spark(stage, 7)
        empty_one = await live_segment(owner)
        assert empty_one.base > before.base
        await by_spark(stage, 8)
        await owner.all_stored(owner.send([b"b"]))
        now = await live_segment(owner)
        assert (now.first_entry, now.rows_before) == (empty_one.first_entry, empty_one.rows_before)
        assert now.base == empty_one.base + 1
        known = await heard(stage, empty_one)
        assert (known.rows, known.closed) == (0, True)
        assert (await heard(stage, now)).rows == 1
        await owner.writer.close()

    play(act)


def test_a_ledger_without_an_entry_is_told_from_itself_after_a_batch_of_spark():
    async def act(stage):
        owner = reached(await owner_of(stage, limits=RollLimits(entries=1)))
        await owner.all_stored(owner.send([b"0"]))
        await asyncio.sleep(1)
        old = await live_segment(owner)  # it was rolled
        await by_spark(stage)
        assert await owner.all_stored(owner.send([b"2"])) == [[2]]
        await asyncio.sleep(1)
        table = (await folded(stage)).partitions[0].stretches(2, 3)[0].table
        assert table.ledgers.tolist() == [old.ledger_id]
        assert (await heard(stage, old)).rows == 0
        await owner.writer.close()
        assert await values(stage) == [b"0", SPARK, b"2"]

    play(act)


def test_an_entry_is_no_row_where_the_log_would_have_it_at_another_offset():
    async def act(stage):
        owner = await reopened(stage, 2, 3)
        live = await live_segment(owner)
        wrong = replace(live, base=live.base - 1)
        rows = LiveRows(wrong, wrong.base, wrong.base + 6, 4, 6)
        task = ReadTask("t", stage.topic.id, (), NO_SEGMENTS, rows)
        with pytest.raises(errors.UnsupportedFormat, match="topic's log records"):
            await read(stage.client, task)
        await owner.writer.close()

    play(act)


def test_a_task_planned_before_a_batch_of_spark_reads_its_rows_after_it():
    async def act(stage):
        owner = await reopened(stage, 4)
        old = await live_segment(owner)
        known = await heard(stage, old)
        rows = LiveRows(old, 1, 7, known.last_entry, known.rows)
        task = ReadTask("t", stage.topic.id, (), NO_SEGMENTS, rows)
        await by_spark(stage)
        await owner.all_stored(owner.send([b"9", b"10"]))
        found = await read(stage.client, task)
        assert [offset for offset, _ in found] == [*range(1, 7)]
        assert right(found)
        await owner.writer.close()

    play(act)


# -- what is sealed of a ledger that is open -------------------------------------------------------


@pytest.mark.parametrize("tasks", [1, 3, 11])
def test_sealed_pieces_of_an_open_ledger_are_read_in_any_slices(tasks):
    async def act(stage):
        owner = await reopened(stage, 3, 1, 5, 4)
        state = await folded(stage)
        end = state.partitions[0].end_offset
        assert (end, state.partitions[0].live.first_entry) == (21, 9)
        for lo, hi in ((0, end), (3, 17), (7, 8), (9, 10), (10, 20)):
            plan = plan_read(state, {0: (lo, hi)}, cutting=Cutting(tasks))
            found = [row for task in plan for row in await read(stage.client, task)]
            assert [offset for offset, _ in found] == [*range(lo, hi)]
            assert right(found)
        record = (await stage.client.ledgers.record(state.partitions[0].live.ledger_id)).record
        assert not record.closed
        await owner.writer.close()
        assert len(await values(stage)) == 2 * 13 + 3

    play(act)


def test_a_time_is_looked_for_among_the_entries_of_the_segment_alone():
    async def act(stage):
        owner = await reopened(stage, 3, 4, 2)
        state = await folded(stage)
        (stretch,) = state.partitions[0].stretches(7, 15)
        wanted = live_rows(stretch.table, 0, Span(0, 7, 15, 0, 1))
        assert (wanted.live.first_entry, wanted.live.rows_before) == (3, 6)
        reader = stage.client.ledgers
        assert await first_stored_since(reader, wanted, 0) == 7
        assert await first_stored_since(reader, wanted, 2**60) == 15
        await owner.writer.close()

    play(act)


def test_rows_that_the_ledger_lost_are_counted_from_where_the_segment_begins():
    one = Segment(0, 7, 0, ((3, 9),), (), 70, 700, 1, 2, rows_before=6)
    table = SegmentTable.of([PlacedSegment(one, 100, 4, 5)])
    task = ReadTask("t", "id", (Span(0, 110, 170, 0, 1),), table)
    for end, start in (((5, 36), 130), ((2, 6), 110), ((0, 2), 110)):
        (lost,) = lost_of(task, {7: LedgerEnd(*end)})
        assert (lost.start, lost.end) == (start, 170)
    assert lost_of(task, {7: None}) == lost_of(task, {7: LedgerEnd(9, 76)}) == []
    assert table.entry_counts.tolist() == [7]
    pieces = pieces_of(table, task.spans)
    assert (int(pieces.entry.min()), int(pieces.entry.max())) == (4, 9)


def test_a_lag_counts_the_rows_of_the_segment_that_is_open_now_alone():
    async def act(stage):
        owner = await reopened(stage, 3, 2)
        state = await folded(stage)
        live = state.partitions[0].live
        known = await heard(stage, live)
        assert known.rows == 4
        assert topic_lag(state, {0: 0}, 0, live_ends={0: known})[0].rows == 7 + 4
        whole = await heard(stage, replace(live, first_entry=0, rows_before=0, bytes_before=0))
        assert 0 < known.bytes < whole.bytes
        await owner.writer.close()

    play(act)


def test_a_ledger_is_kept_while_it_is_live_or_a_segment_names_it_and_goes_then():
    async def act(stage):
        owner = await reopened(stage, 3, 2)
        ledger = (await live_segment(owner)).ledger_id
        admin = TopicAdmin(stage.client)
        await admin.trim("t", {0: 6})
        assert ledger in (await folded(stage)).ledgers()
        await stage.janitor.clean()
        assert not (await stage.client.ledgers.record(ledger)).record.closed
        assert await owner.all_stored(owner.send([b"11"])) == [[11]]
        await owner.writer.close()
        await owner.commits.close()
        assert ledger in (await folded(stage)).ledgers()
        await admin.trim("t", End.LATEST)
        state = await folded(stage)
        assert (ledger in state.ledgers(), ledger in state.dropped) == (False, True)

    play(act)


# -- owners ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("entries", [0, 3])
def test_a_successor_seals_only_what_came_since_the_last_batch_of_spark(entries):
    async def act(stage):
        old = await reopened(stage, 2, 3, entries)
        live = await live_segment(old)
        new = await (await another_of(stage)).take()
        state = await folded(stage)
        assert (state.partitions[0].live, state.partitions[0].end_offset) == (
            None,
            12 + 2 * entries,
        )
        assert (await stage.client.ledgers.record(live.ledger_id)).record.closed
        rows = [b"%d" % (12 + 2 * entries)]
        assert await new.all_stored(new.send(rows)) == [[12 + 2 * entries]]
        await new.writer.close()
        found = await stage.rows()
        assert len(found) == 13 + 2 * entries
        assert right(found)

    play(act)


def test_a_successor_knows_how_far_producers_came_in_each_segment():
    async def act(stage):
        old = reached(await deduplicating(Owner(stage, stage.client, "a")))
        for version, first in enumerate((0, 2, 4), 1):
            assert await sent_by(old, first) == [False]
            await by_spark(stage, version)
        assert await sent_by(old, 6) == [False]
        state = await folded(stage)
        assert state.partitions[0].producers == {"p": 5}
        new = await (await another_of(stage)).take()
        assert new.writer.backlog.sequence_ids.last("p") == 7
        assert await sent_by(new, 0, 4, 6, 8) == [True, True, True, False]
        await new.writer.close()

    play(act)


def test_an_owner_that_is_fenced_in_a_later_segment_doubles_nothing():
    async def act(stage):
        owner = await reopened(stage, 2, 2)
        live = await live_segment(owner)
        sent = owner.send(*([b"x%d" % n] for n in range(20)))
        await stage.client.ledgers.recover(live.ledger_id)
        offsets = await owner.all_stored(sent)
        assert sorted(offsets) == [[9 + n] for n in range(20)]
        await owner.writer.close()
        assert [value for _, value in await stage.rows()][9:] == [b"x%d" % n for n in range(20)]

    play(act)


def test_a_seal_of_an_earlier_segment_of_the_ledger_is_refused():
    async def act(stage):
        owner = await reopened(stage, 2)
        old = await live_segment(owner)
        intent = await stage.client.intents.open_system_intent("late", stage.topic.id)

        async def late():
            await by_spark(stage)
            await owner.all_stored(owner.send([b"5"]))

        await late()
        seal = SealLive(0, old.ledger_id, None, (), old.opened)
        with pytest.raises(errors.TxnConflict, match="has ended"):
            await stage.client.commit_actions(stage.topic.id, [seal], intent)
        assert await owner.all_stored(owner.send([b"6"])) == [[6]]
        await owner.writer.close()
        assert await values(stage) == [b"0", b"1", b"2", b"3", SPARK, b"5", b"6"]

    play(act)


def test_an_owner_that_went_on_by_itself_is_safe_from_the_batch_that_comes_late():
    async def act(stage):
        owner = await reopened(stage, 2, 1)
        client = await stage.another()
        sent = []

        async def late():
            sent.extend(owner.send([b"late"]))
            await asyncio.sleep(3)  # the hold is over
            assert [one.offsets for one in sent] == [[7]]

        other = replace(stage, client=client)
        before_the_commit(other, late)
        await by_spark(other, 9, b"then")
        assert await owner.all_stored(owner.send([b"x"])) == [[9]]
        await owner.writer.close()
        assert (await values(stage))[4:] == [SPARK, b"5", b"6", b"late", b"then", b"x"]

    play(act)


def test_who_asks_before_the_owner_read_the_last_batch_back_is_not_refused():
    async def act(stage):
        owner = await reopened(stage, 2)
        intent = await stage.intent()
        past = owner.commits.past

        async def slowly(*asked):
            state = await past(*asked)
            await asyncio.sleep(0.2)
            return state

        owner.commits.past = slowly
        recovered = []
        recover = stage.client.ledgers.open

        async def noted(ledger_id, *, recover, **options):
            recovered.extend([ledger_id] * recover)
            return await opened(ledger_id, recover=recover, **options)

        opened, stage.client.ledgers.open = recover, noted
        ledger = (await live_segment(owner)).ledger_id
        sent = []
        for version in range(1, 6):
            await stage.commit(intent, version, await stage.written(intent, [SPARK]))
            sent += owner.send([b"p%d" % version])
        await owner.all_stored(sent)
        assert ledger not in recovered
        assert (await live_segment(owner)).ledger_id == ledger
        await owner.writer.close()

    play(act)


def test_an_owner_that_dies_while_it_is_held_leaves_all_to_its_successor():
    async def act(stage):
        old = await reopened(stage, 2, 2)
        before_the_commit(stage, lambda: dies(old))
        await by_spark(stage, 8)
        new = await (await another_of(stage)).take()
        assert await new.all_stored(new.send([b"10"])) == [[10]]
        await new.writer.close()
        assert right(await stage.rows())

    play(act)


# -- what is stored --------------------------------------------------------------------------------

OPEN_OF_BEFORE = {
    "action": "open",
    "partition": 0,
    "ledger": 7,
    "version": 1,
    "owner": "broker a",
    "epoch": 4,
}
SEAL_OF_BEFORE = {
    "action": "seal",
    "partition": 0,
    "ledger": 7,
    "segment": {
        "partition": 0,
        "ledger": 7,
        "version": 3,
        "entries": [[0, 2]],
        "rows": 9,
        "bytes": 900,
        "written_ms": [1, 2],
    },
}


def state_of(*commits):
    state = empty("t", 1)
    for some in commits:
        commit = records.Commit("c", "a", "t", 1, "r", "i", tuple(some))
        state = apply(state, state.next, records.decode_commit(records.encode_commit(commit)), 5)
    return state


def test_a_log_of_before_is_read_and_written_as_it_was():
    opened, seal = actions.from_json(OPEN_OF_BEFORE), actions.from_json(SEAL_OF_BEFORE)
    assert opened == OpenLive(0, 7, 1, "broker a", 4)
    assert (seal.opened, seal.segment.rows_before) == (actions.ANY_OPENING, 0)
    assert actions.to_json(opened) == OPEN_OF_BEFORE
    assert actions.to_json(seal) == SEAL_OF_BEFORE
    state = state_of([opened], [seal], [replace(opened, ledger_id=8)])
    assert state.partitions[0].live == LiveSegment(0, 8, 1, 9, 2, "broker a", 4)
    assert state.min_writer == 2
    root = checkpoint.encode_root(checkpoint.Root(state))
    again = checkpoint.decode_root(root).state
    assert again.partitions[0].live == state.partitions[0].live
    assert next(iter(again.partitions[0].intervals.last()[0].source)).segment == seal.segment


def test_a_ledger_that_goes_on_asks_for_a_reader_that_knows_of_it():
    opened = OpenLive(0, 7, 1, "broker a", 4)
    seal = SealLive(0, 7, Segment(0, 7, 3, ((0, 2),), (), 9, 900, 1, 2), (), 0)
    on = OpenLive(0, 7, 3, "broker a", 4, False, 3, 9, 900)
    more = Segment(0, 7, 3, ((3, 4),), (), 2, 200, 3, 4, rows_before=9)
    empty_seal = SealLive(0, 7, None, (), 0)
    needed = [
        json.loads(records.encode_commit(records.Commit("c", "a", "t", 1, "r", "i", some)))
        for some in (
            (opened,),
            (seal,),
            (seal, on),
            (SealLive(0, 7, more, (), 1),),
            (empty_seal, opened),
            (empty_seal, replace(opened, ledger_id=8)),
            (replace(seal, rowless=Rowless(0, 2, 2)),),
        )
    ]
    assert [one["min_reader"] for one in needed] == [1, 2, 3, 3, 3, 1, 3]
    state = state_of([opened], [seal, on], [SealLive(0, 7, more, (), 1)])
    assert (state.min_writer, state.partitions[0].end_offset) == (3, 11)
    again = checkpoint.decode_root(checkpoint.encode_root(checkpoint.Root(state))).state
    table = again.partitions[0].intervals.last()[0].source
    assert table.rows_before.tolist()[-1] == 9
    state = state_of([opened], [seal, on])
    again = checkpoint.decode_root(checkpoint.encode_root(checkpoint.Root(state))).state
    assert again.partitions[0].live == state.partitions[0].live
    assert state.partitions[0].live.origin == 0


def test_a_table_without_such_segments_is_stored_as_it_was():
    whole = Segment(0, 7, 3, ((0, 2),), (), 9, 900, 1, 2)
    part = replace(whole, entries=((3, 5),), rows_before=9)
    tables = [SegmentTable.of([PlacedSegment(one, 0, 1, 2)]) for one in (whole, part)]
    assert b"rows_before" not in tables[0].encode()
    for table in tables:
        again = SegmentTable.decode(table.encode())
        assert list(again) == list(table)
        assert again.rows_before.tolist() == table.rows_before.tolist()


@pytest.mark.parametrize(("first", "rows"), [(0, 1), (3, 2), (3, 0)])
def test_rows_that_cannot_be_before_a_segment_are_refused(first, rows):
    with pytest.raises(ValueError, match="rows before entry"):
        Segment(0, 7, 3, ((first, first + 1),), (), 9, 900, 1, 2, rows_before=rows)
    with pytest.raises(ValueError, match="rows before entry"):
        actions.from_json({**OPEN_OF_BEFORE, "after": [first, rows, 10]})


def test_a_successor_does_not_seal_a_ledger_that_ended_before_the_segment():
    async def act(stage):
        owner = await reopened(stage, 2, 1)
        live = await live_segment(owner)
        wrong = replace(live, first_entry=9, rows_before=18)
        with pytest.raises(errors.UnsupportedFormat, match="ended at entry"):
            await seal_live_segment(stage.client.ledgers, wrong)

    play(act)


def test_what_has_nothing_under_way_is_handed_over_at_once_and_other_segments_when_all_is_stored():
    async def act(stage):
        owner = reached(await owner_of(stage))
        await owner.all_stored(owner.send([b"a"]))
        rows = []
        for under_way in (False, True, False):
            await asyncio.sleep(0.1)
            segment = await live_segment(owner)
            sent = owner.send([b"b"]) if under_way else []
            await asyncio.sleep(0)  # it is sent
            hold = owner.writer.hand_over(segment.ledger_id, segment.opened, now_s() + 2)
            assert hold.answer.done() != under_way
            rows.append((await hold.answer).seal.segment)
            hold.leave()
            await owner.all_stored([*sent, *owner.send([b"c"])])
        assert [one.rows for one in rows] == [1, 2, 1]
        await owner.writer.close()
        assert await values(stage) == [b"a", b"c", b"b", b"c", b"c"]

    play(act)


def test_a_ledger_that_is_reopened_again_and_again_is_left_at_its_age():
    async def act(stage):
        owner = reached(await owner_of(stage, limits=RollLimits(age_s=100.0)))
        ledgers, offset = [], 0
        for version in range(1, 7):  # a batch of Spark each 30 s
            await owner.all_stored(owner.send([b"%d" % offset]))
            ledgers.append((await live_segment(owner)).ledger_id)
            await asyncio.sleep(30)
            await by_spark(stage, version)
            offset += 2
        await owner.all_stored(owner.send([b"last"]))
        assert ledgers[0] == ledgers[2]
        assert ledgers[-1] != ledgers[0]
        await owner.writer.close()

    play(act)
