"""Tasks that leave out acknowledged rows: planned, fetched, decoded, lost and trimmed."""

import pickle
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyroaring import BitMap64

from spark_ledger import errors
from spark_ledger.ledger.reader import AsyncLedgerReader
from spark_ledger.topic.log import state
from spark_ledger.topic.log.actions import Append, Trim
from spark_ledger.topic.log.records import Commit
from spark_ledger.topic.log.segment_table import NO_SEGMENTS
from spark_ledger.topic.read.acked import AckedRows, unacked_pieces
from spark_ledger.topic.read.live import LiveEnds
from spark_ledger.topic.read.pieces import PIECE_DTYPE, LiveRows, pieces_of
from spark_ledger.topic.read.plan import Cutting, LedgerEnd, ReadTask, lost_of, plan_read
from spark_ledger.topic.task_reader import fetch_with_replans
from tests.kit.pulsar_batches import batch_of, message
from tests.unit.spark_ledger.topic.fetched_entries import FIRST, of_batches, read
from tests.unit.spark_ledger.topic.live_segments import Owner, deleted, with_live
from tests.unit.spark_ledger.topic.stage import play, segment


def rows(offsets, partition=0):
    return AckedRows({partition: BitMap64(offsets)})


def topic_of(*segments, partitions=1):
    topic = state.empty("id", partitions)
    for number, appended in enumerate(segments):
        commit = Commit("", "", "", 0, "", "", (Append((appended,)),))
        topic = state.apply(topic, number, commit, 0)
    return topic


def given_of(task):
    return [
        (span.partition, offset)
        for span in task.spans
        for offset in range(span.lo, span.hi)
        if not task.acked.count(span.partition, offset, offset + 1)
    ]


SETS = st.lists(st.tuples(st.integers(0, 2000), st.integers(1, 500)), max_size=8).map(
    lambda runs: {n for lo, count in runs for n in range(lo, lo + count)}
)


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 900), min_size=1, max_size=4),
    st.tuples(SETS, SETS),
    st.integers(1, 40),
    st.none() | st.integers(1, 300),
)
def test_a_plan_has_every_row_that_is_given_once_in_as_many_tasks_as_asked_for(
    sizes, sets, tasks_min, task_rows
):
    segments = [segment(n, *[size // 7 + 1] * 7, partition=n % 2) for n, size in enumerate(sizes)]
    topic = topic_of(*segments, partitions=2)
    ranges = {p: (0, partition.end_offset) for p, partition in enumerate(topic.partitions)}
    acked = AckedRows({p: BitMap64(sets[p]) for p in ranges})
    tasks = plan_read(topic, ranges, cutting=Cutting(tasks_min, task_rows=task_rows), acked=acked)
    expected = [(p, n) for p, (lo, hi) in ranges.items() for n in range(lo, hi) if n not in sets[p]]
    given = [row for task in tasks for row in given_of(task)]
    assert sorted(given) == expected
    assert len(tasks) >= min(tasks_min, len(expected))
    assert all(task.rows == len(given_of(task)) > 0 for task in tasks)
    assert task_rows is None or all(task.rows <= task_rows for task in tasks)


def test_tasks_stay_even_although_half_of_a_partition_is_acknowledged():
    topic = topic_of(segment(1, *[100] * 100))
    for acked in (rows(range(5000)), rows(n for n in range(10_000) if n % 500 < 250)):
        tasks = plan_read(topic, {0: (0, 10_000)}, cutting=Cutting(10), acked=acked)
        sizes = [task.rows for task in tasks]
        assert len(sizes) == 10
        assert sum(sizes) == 5000
        assert max(sizes) <= 1.3 * min(sizes), sizes


def test_a_task_has_only_the_acknowledged_rows_among_its_own():
    topic = topic_of(segment(1, *[1000] * 1000))
    acked = rows(range(0, 1_000_000, 3))
    tasks = plan_read(topic, {0: (0, 1_000_000)}, cutting=Cutting(50), acked=acked)
    assert len(tasks) == 50
    assert sum(len(task.acked.of(0)) for task in tasks) == len(acked.of(0))
    more = [len(pickle.dumps(task.acked)) for task in tasks]
    assert max(more) < 2 * 65_536 / 8 + 500, "two blocks of 65,536 bits"


PIECES = st.tuples(st.integers(0, 50), st.integers(1, 60))


@given(st.lists(PIECES, min_size=1, max_size=3), st.sets(st.integers(0, 300)))
def test_pieces_without_acknowledged_rows_have_each_other_row_at_its_place(parts, acked):
    pieces, offset, skip = [], 0, 0
    for gap, take in parts:
        skip, offset = skip + gap, offset + gap
        pieces.append((0, 7, skip, take, offset))
        skip, offset = skip + take, offset + take
    left = unacked_pieces(np.array(pieces, dtype=PIECE_DTYPE), rows(acked))
    places = [(skip + n, offset + n) for _, _, skip, take, offset in pieces for n in range(take)]
    assert [
        (skip + n, offset + n)
        for _, first, skip, take, offset in left.tolist()
        for n in range(take)
    ] == [place for place in places if place[1] not in acked]


@pytest.mark.parametrize("acked", [range(FIRST, FIRST + 200, 2), range(FIRST + 20, FIRST + 150)])
def test_a_batch_of_messages_is_decoded_without_the_acknowledged_ones(acked):
    entry = of_batches((200, batch_of([message(b"v%d" % n, f"k{n}") for n in range(200)])))
    whole, _ = read(entry)
    cut = unacked_pieces(entry.pieces, rows(acked, 2))
    rows_left, _ = read(type(entry)(entry.entry, cut))
    assert rows_left == [row for row in whole if row[0] not in acked]


async def fetched(client, task, **options):
    cells = []
    async for run in fetch_with_replans(client, pickle.loads(pickle.dumps(task)), **options):
        assert run, "an empty list would be the end"
        for entry in run:
            for block in entry.blocks():
                values = block.record_batch.column("value").to_pylist()
                cells += zip(block.row_numbers("offset").tolist(), values, strict=True)
    return cells


def numbered(offsets, start, end):
    return [(n, b"%d" % n) for n in range(start, end) if n not in offsets]


async def write(stage, *entry_rows):
    """An entry of rows, which have their offsets as values, for each number; a ledger for every
    four entries. The topic's state."""
    at = 0
    for version, count in enumerate(entry_rows):
        intent = await stage.intent(f"run-{version // 4}")
        values = [b"%d" % n for n in range(at, at + count)]
        await stage.commit(intent, version, await stage.written(intent, values))
        at += count
    return await stage.client.log(stage.topic.id).fold(fresh=True)


@pytest.fixture
def asked(monkeypatch):
    """How often each entry was asked for."""
    count, read_entries = Counter(), AsyncLedgerReader.read_entries

    def counting(reader, ids, **options):
        count.update((reader.ledger_id, entry_id) for entry_id in ids)
        return read_entries(reader, ids, **options)

    monkeypatch.setattr(AsyncLedgerReader, "read_entries", counting)
    return count


RANDOM = {n for n in range(800) if n % 7 == 3 or n % 11 == 5}


@pytest.mark.parametrize(
    "acked",
    [RANDOM, {*range(100, 700)} | {3}, {*range(99)}, {*range(750, 801)}, {*range(800)} - {400}],
    ids=["scattered", "the middle", "the begin", "the end", "all but one"],
)
def test_what_is_read_is_what_is_not_acknowledged(acked):
    async def act(stage):
        topic = await write(stage, *[100] * 8)
        for tasks_min in (1, 13):
            tasks = plan_read(topic, {0: (0, 800)}, cutting=Cutting(tasks_min), acked=rows(acked))
            given = [row for task in tasks for row in await fetched(stage.client, task)]
            assert given == numbered(acked, 0, 800)
        assert plan_read(topic, {0: (0, 800)}, acked=rows(range(800))) == []

    play(act)


def test_an_entry_of_acknowledged_rows_is_not_fetched(asked):
    async def act(stage):
        topic = await write(stage, *[600] * 8)
        acked = {*range(590, 1210)} | {*range(2400, 3000)} | {n for n in range(4800) if n % 2}
        (task,) = plan_read(topic, {0: (0, 4800)}, acked=rows(acked))
        assert await fetched(stage.client, task) == numbered(acked, 0, 4800)
        (whole,) = plan_read(topic, {0: (0, 4800)})
        entries = pieces_of(whole.table, whole.spans)
        columns = (entries.ledger, entries.entry, entries.offset, entries.take)
        assert set(asked) == {
            (ledger, entry)
            for ledger, entry, offset, take in zip(*columns, strict=True)
            if not acked >= set(range(offset, offset + take))
        }
        assert len(asked) < len(entries)

    play(act)


@pytest.mark.parametrize("inline", [True, False], ids=["in commits", "in a live segment"])
def test_rows_in_commits_and_in_a_live_segment_are_left_out(inline):
    async def act(stage):
        acked = {*range(0, 60, 3)} | {*range(35, 41)}
        intent = await stage.intent()
        values = [b"%d" % n for n in range(30)]
        await stage.commit(intent, 0, await stage.written(intent, values, inline=True))
        if inline:
            state_now = await stage.client.log(stage.topic.id).fold(fresh=True)
            (task,) = plan_read(state_now, {0: (0, 30)}, acked=rows(acked))
            assert await fetched(stage.client, task) == numbered(acked, 0, 30)
            return
        await with_live(stage, 30, 10, 10, 10)
        state_now = await stage.client.log(stage.topic.id).fold(fresh=True)
        live = state_now.partitions[0].live
        ends = LiveEnds(stage.client.ledgers)
        await ends.refresh([live])
        end = ends.end_of(live)
        part = LiveRows(live, 30, 60, end.last_entry, end.rows)
        task = ReadTask("t", stage.topic.id, (), NO_SEGMENTS, part, acked=rows(acked))
        assert await fetched(stage.client, task) == numbered(acked, 30, 60)
        await ends.close()

    play(act)


def test_rows_of_a_sealed_live_segment_are_left_out():
    async def act(stage):
        acked = {*range(25)} | {n for n in range(60) if n % 4 == 1} | {59}
        owner = Owner(stage)
        await owner.open(0)
        await owner.append(20, 20, 20)
        await owner.seal(20, 20, 20)
        state_now = await stage.client.log(stage.topic.id).fold(fresh=True)
        for task in plan_read(state_now, {0: (0, 60)}, cutting=Cutting(3), acked=rows(acked)):
            assert await fetched(stage.client, task) == [(n, b"%d" % n) for _, n in given_of(task)]

    play(act)


async def two_ledgers(stage, acked):
    """Rows 0 to 39 in a ledger and 40 to 79 in another: the task that reads them, and the ids."""
    topic = await write(stage, *[10] * 8)
    whole = plan_read(topic, {0: (0, 80)})[0]
    (task,) = plan_read(topic, {0: (0, 80)}, acked=rows(acked))
    return task, list(dict.fromkeys(whole.table.ledgers.tolist()))


def test_acknowledged_rows_that_are_trimmed_below_a_task_are_no_loss():
    async def act(stage):
        task, ledgers = await two_ledgers(stage, {*range(38), 39, *range(50, 60)})
        intent = await stage.client.intents.open_system_intent("compact", stage.topic.id)
        trim = Trim(((0, 40),), (ledgers[0],))
        await stage.client.commit_actions(stage.topic.id, [trim], intent)
        await deleted(stage, ledgers[0])
        with pytest.raises(errors.RowsTrimmed, match="1 rows to be read were removed"):
            await fetched(stage.client, task)
        left = numbered({*range(50, 60)}, 40, 80)
        assert await fetched(stage.client, task, lossy=True) == left
        needed = replace(task, acked=rows({*range(40), *range(50, 60)}))
        assert await fetched(stage.client, needed) == left

    play(act)


def test_acknowledged_rows_whose_ledger_is_gone_are_no_loss():
    async def act(stage):
        task, ledgers = await two_ledgers(stage, {*range(39)})
        await deleted(stage, ledgers[0])
        with pytest.raises(errors.RowsLost, match="1 committed rows are gone"):
            await fetched(stage.client, task)
        assert await fetched(stage.client, task, lossy=True) == numbered((), 40, 80)

    play(act)


def test_a_ledger_that_is_gone_with_acknowledged_rows_only_is_not_missed():
    async def act(stage):
        topic = await write(stage, *[600] * 8)
        acked = {*range(2399)} | {n for n in range(4800) if n % 2}
        ledgers = plan_read(topic, {0: (0, 4800)})[0].table.ledgers.tolist()
        await deleted(stage, ledgers[0])
        (task,) = plan_read(topic, {0: (0, 4800)}, acked=rows({*acked, *range(2400)}))
        assert await fetched(stage.client, task) == numbered(acked | {*range(2400)}, 0, 4800)

    play(act)


def test_rows_lost_count_without_the_acknowledged_ones():
    topic = topic_of(segment(7, 5, 5), segment(8, 5))
    (task,) = plan_read(topic, {0: (0, 15)}, acked=rows([2, 6, 7, 12]))
    assert lost_of(task, {7: LedgerEnd(1, 10), 8: LedgerEnd(0, 5)}) == []
    assert sum(lost.rows for lost in lost_of(task, {7: LedgerEnd(0, 5)})) == 3
    (task,) = plan_read(topic, {0: (0, 15)}, acked=rows(range(5, 10)))
    assert lost_of(task, {7: LedgerEnd(0, 5)}) == []


def test_rows_lost_in_a_large_range_count_without_the_acknowledged_ones():
    topic = topic_of(segment(7, *[5] * 200))
    (task,) = plan_read(topic, {0: (0, 1000)}, acked=rows(range(0, 1000, 2)))
    assert sum(lost.rows for lost in lost_of(task, {7: LedgerEnd(99, 500)})) == 250
    (task,) = plan_read(topic, {0: (0, 1000)}, acked=rows([*range(0, 990, 2), *range(995, 1000)]))
    assert task.spans[-1].hi == 1000, "so short a run is not cut out"
    assert lost_of(task, {7: LedgerEnd(198, 995)}) == []
