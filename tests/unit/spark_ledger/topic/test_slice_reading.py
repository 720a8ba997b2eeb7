import asyncio
from dataclasses import replace

import pyarrow as pa
import pytest

from spark_ledger import errors
from spark_ledger.topic.log.actions import Hole
from spark_ledger.topic.log.segment_table import SegmentTable
from spark_ledger.topic.read.plan import Cutting, plan_read
from tests.kit.loop_task import LoopTask
from tests.kit.slices import read_task
from tests.unit.spark_ledger.topic.stage import play


async def write_batches(stage, batches, rows=40):
    """`batches` commits of `rows` rows of 1 KB with ten keys each."""
    intent = await stage.intent()
    for version in range(batches):
        task = LoopTask(stage.client, stage.topic, intent, task_index=0)
        keys = pa.array([b"k%d" % (n % 10) for n in range(rows)], pa.binary())
        values = pa.array([b"%d-%d" % (version, n) + b"x" * 1000 for n in range(rows)])
        await task.write(keys, values)
        await stage.commit(intent, version, await task.finish())


def changed(task, **segment):
    """The task as if the topic's log had said that of its segment."""
    (placed,) = task.table
    table = SegmentTable.of([replace(placed, segment=replace(placed.segment, **segment))])
    return replace(task, table=table)


def test_every_partition_is_read_in_order_with_dense_offsets_while_its_ledger_is_open():
    async def act(stage):
        await write_batches(stage, 3)

        seen = []
        for partition in range(3):
            rows = await stage.rows(partition)
            assert [offset for offset, _ in rows] == list(range(len(rows)))
            order = [tuple(map(int, v.rstrip(b"x").split(b"-"))) for _, v in rows]
            assert order == sorted(order)
            seen += order
        assert sorted(seen) == [(v, n) for v in range(3) for n in range(40)]

    play(act, partitions=3)


def test_a_topic_cut_into_many_tasks_reads_the_same():
    async def act(stage):
        await write_batches(stage, 2)
        whole = await stage.rows()

        assert await stage.rows(cutting=Cutting(13)) == whole
        assert await stage.rows(cutting=Cutting(task_bytes=3000)) == whole

    play(act)


def test_a_range_is_read_without_the_rows_around_it():
    async def act(stage):
        await write_batches(stage, 2)
        state = await stage.client.log(stage.topic.id).fold(fresh=True)
        (task,) = plan_read(state, {0: (17, 59)})

        found = [rows async for rows in read_task(stage.client.ledgers, task)]

        assert sum(rows.record_batch.num_rows for rows in found) == 42
        assert found[0].offset == 17
        assert found[0].record_batch["value"][0].as_py().startswith(b"0-17x")

    play(act)


def test_what_is_on_both_sides_of_a_hole_is_read_at_its_offsets():
    async def act(stage):
        await write_batches(stage, 2)
        whole = await stage.rows()
        intent = await stage.client.intents.open_system_intent("by hand", stage.topic.id)
        await stage.client.commit_actions(stage.topic.id, [Hole(0, 17, 59)], intent)

        assert await stage.rows() == whole[:17] + whole[59:]
        assert await stage.rows(cutting=Cutting(13)) == whole[:17] + whole[59:]

    play(act)


def test_a_task_whose_replica_lags_behind_the_drivers_reads_what_was_committed():
    async def act(stage):
        worker = await stage.another()
        await worker.store.sync()
        stage.world.store.faults.lag_s = 30.0
        await write_batches(stage, 1)
        state = await stage.client.log(stage.topic.id).fold(fresh=True)
        (task,) = plan_read(state, {0: (0, 40)})

        found = [rows async for rows in read_task(worker.ledgers, task)]

        assert sum(rows.record_batch.num_rows for rows in found) == 40

    play(act)


def test_a_ledger_that_is_gone_is_an_error_with_its_own_type():
    async def act(stage):
        await write_batches(stage, 1)
        state = await stage.client.log(stage.topic.id).fold(fresh=True)
        (task,) = plan_read(state, {0: (0, 40)})
        gone = changed(task, ledger_id=999_999)

        with pytest.raises(errors.NoSuchLedger):
            [rows async for rows in read_task(stage.client.ledgers, gone)]

    play(act)


def test_a_committed_range_beyond_the_end_of_its_ledger_is_lost_rows_and_no_silent_jump():
    async def act(stage):
        await write_batches(stage, 1)
        await asyncio.sleep(60)  # the idle ledger closes
        state = await stage.client.log(stage.topic.id).fold(fresh=True)
        (task,) = plan_read(state, {0: (0, 40)})
        counts = task.table[0].segment.entry_rows
        there = task.table[0].segment.entries[0][0]
        beyond = changed(task, entries=((there, there), (999, 997 + len(counts))))

        with pytest.raises(errors.RowsLost, match=rf"offsets {counts[0]} to 39 \(ledger"):
            [rows async for rows in read_task(stage.client.ledgers, beyond)]

    play(act)


def test_an_entry_that_is_not_what_the_log_says_is_an_error():
    async def act(stage):
        await write_batches(stage, 1)
        state = await stage.client.log(stage.topic.id).fold(fresh=True)
        (task,) = plan_read(state, {0: (0, 40)})
        counts = (5, *task.table[0].segment.entry_rows)
        ((first, last),) = task.table[0].segment.entries
        wrong = changed(task, entry_rows=counts, rows=45, entries=((first, last + 1),))

        with pytest.raises(errors.UnsupportedFormat, match="but the topic's log records"):
            [rows async for rows in read_task(stage.client.ledgers, wrong)]

    play(act)


def test_a_reader_that_stops_early_leaves_nothing_running():
    async def act(stage):
        await write_batches(stage, 3, rows=100)
        state = await stage.client.log(stage.topic.id).fold(fresh=True)
        before = len(asyncio.all_tasks())
        (task,) = plan_read(state, {1: (0, state.end_offsets()[1])})
        reading = read_task(stage.client.ledgers, task)
        await anext(reading)
        await reading.aclose()
        await asyncio.sleep(5)

        assert len(asyncio.all_tasks()) <= before

    play(act, partitions=4)
