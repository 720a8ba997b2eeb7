"""Tasks whose ledgers go away below them, and rows of a partition's open end."""

import asyncio
from functools import partial

import pyarrow as pa
import pytest

from spark_ledger import errors
from spark_ledger.metadata import paths
from spark_ledger.topic.entry.key_filter import hashes_of
from spark_ledger.topic.log.actions import Replace, Trim
from spark_ledger.topic.log.segment_table import NO_SEGMENTS
from spark_ledger.topic.read.live import TAKEN_WAIT_S, LiveEnds
from spark_ledger.topic.read.pieces import LiveRows
from spark_ledger.topic.read.plan import Cutting, ReadTask, plan_read
from spark_ledger.topic.subscription.seek_target import CommittedSince, End
from spark_ledger.topic.task_reader import fetch_with_replans
from spark_ledger.topic.write import TaskSettings
from tests.kit.loop_task import LoopTask
from tests.kit.segments_seen import rows_of
from tests.unit.spark_ledger.topic.live_segments import Owner, deleted, listed
from tests.unit.spark_ledger.topic.stage import play


async def read(client, task, **options):
    found = []
    async for run in fetch_with_replans(client, task, **options):
        for rows in map(rows_of, run):
            found += enumerate(rows.record_batch.column("value").to_pylist(), rows.offset)
    return found


def numbered(start, end):
    return [(n, b"%d" % n) for n in range(start, end)]


async def two_ledgers(stage):
    """Rows 0 to 9 in one ledger, 10 to 19 in another; the task that reads them, and the ledgers."""
    for run, start in (("run-1", 0), ("run-2", 10)):
        intent = await stage.intent(run)
        rows = [b"%d" % n for n in range(start, start + 10)]
        await stage.commit(intent, start, await stage.written(intent, rows))
    state = await stage.client.log(stage.topic.id).fold(fresh=True)
    (task,) = plan_read(state, {0: (0, 20)}, topic="t")
    return task, task.table.ledgers.tolist()


async def maintenance(stage, *actions):
    intent = await stage.client.intents.open_system_intent("compact", stage.topic.id)
    await stage.client.commit_actions(stage.topic.id, actions, intent)
    return intent


def test_rows_that_were_merged_meanwhile_are_read_from_where_they_are_now():
    async def act(stage):
        task, ledgers = await two_ledgers(stage)
        intent = await stage.client.intents.open_system_intent("compact", stage.topic.id)
        merged = await stage.written(intent, [b"%d" % n for n in range(10)])
        state = await stage.client.log(stage.topic.id).fold(fresh=True)
        replaced = Replace(0, 0, 10, merged.segments, state.next - 1, (ledgers[0],))
        await stage.client.commit_actions(stage.topic.id, [replaced], intent)
        await deleted(stage, ledgers[0])

        assert await read(stage.client, task) == numbered(0, 20)

    play(act)


def test_rows_that_were_trimmed_meanwhile_are_told_with_their_number_or_left_out():
    async def act(stage):
        task, ledgers = await two_ledgers(stage)
        await maintenance(stage, Trim(((0, 10),), (ledgers[0],)))
        await deleted(stage, ledgers[0])

        with pytest.raises(errors.RowsTrimmed, match="10 rows to be read were removed"):
            await read(stage.client, task)
        assert await read(stage.client, task, lossy=True) == numbered(10, 20)

    play(act)


def test_a_task_all_of_whose_rows_were_trimmed_tells_their_number_or_reads_none():
    async def act(stage):
        _, ledgers = await two_ledgers(stage)
        state = await stage.client.log(stage.topic.id).fold(fresh=True)
        tasks = plan_read(state, {0: (0, 20)}, topic="t", cutting=Cutting(task_rows=5))
        assert [(task.spans[0].lo, task.spans[-1].hi) for task in tasks] == [
            (0, 5),
            (5, 10),
            (10, 15),
            (15, 20),
        ]
        await maintenance(stage, Trim(((0, 13),), (ledgers[0],)))
        for ledger_id in ledgers:
            await deleted(stage, ledger_id)

        for task, gone in zip(tasks, (5, 5, 3), strict=False):
            with pytest.raises(errors.RowsTrimmed, match=f"{gone} rows to be read were removed"):
                await read(stage.client, task)
        for task in tasks[:2]:
            assert await read(stage.client, task, lossy=True) == []

    play(act)


@pytest.mark.parametrize("forgotten", [False, True], ids=["deleted", "nothing is left of it"])
@pytest.mark.parametrize("lossy", [False, True])
def test_a_task_of_a_topic_that_was_deleted_says_so(forgotten, lossy):
    async def act(stage):
        task, ledgers = await two_ledgers(stage)
        await stage.client.topics.delete("t")
        await deleted(stage, ledgers[0])
        if forgotten:
            for path, _ in reversed(stage.world.store.walk(paths.topic(stage.topic.id))):
                await stage.client.store.delete(path)
        with pytest.raises(errors.TopicDeleted, match=r"topic 't' .* was deleted"):
            await read(stage.client, task, lossy=lossy)

    play(act)


def test_rows_whose_ledger_is_gone_although_the_topic_names_it_are_lost():
    async def act(stage):
        task, ledgers = await two_ledgers(stage)
        await deleted(stage, ledgers[1])

        with pytest.raises(errors.RowsLost, match="10 committed rows are gone: t partition 0"):
            await read(stage.client, task)
        assert await read(stage.client, task, lossy=True) == numbered(0, 10)

    play(act)


def test_rows_trimmed_while_a_task_looks_for_its_chunks_are_told_with_their_number():
    async def act(stage):
        task, ledgers = await two_ledgers(stage)
        await maintenance(stage, Trim(((0, 5),)))
        intent = await stage.client.intents.open_system_intent("compact", stage.topic.id)
        merged = await stage.written(intent, [b"%d" % n for n in range(5, 10)])
        state = await stage.client.log(stage.topic.id).fold(fresh=True)
        replaced = Replace(0, 5, 10, merged.segments, state.next - 1, (ledgers[0],))
        await stage.client.commit_actions(stage.topic.id, [replaced], intent)
        await deleted(stage, ledgers[0])
        ready, calls = stage.client.state_with_tables, []

        async def trimmed_meanwhile(state, ranges):
            calls.append(ranges)
            if len(calls) == 1:
                await maintenance(stage, Trim(((0, 8),)))
                state = await stage.client.log(stage.topic.id).fold(fresh=True)
            return await ready(state, ranges)

        stage.client.state_with_tables = trimmed_meanwhile
        with pytest.raises(errors.RowsTrimmed, match="8 rows to be read were removed"):
            await read(stage.client, task)
        assert calls == [{0: (5, 20)}, {0: (8, 20)}]
        assert await read(stage.client, task, lossy=True) == numbered(8, 20)

    play(act)


def test_entries_that_cannot_hold_a_key_are_not_fetched():
    async def act(stage):
        intent = await stage.intent()
        settings = TaskSettings(inline_bytes_max=0)
        writer = LoopTask(stage.client, stage.topic, intent, task_index=0, settings=settings)
        for n in range(8):
            keys = pa.array([b"key-%d" % n] * 30, pa.binary())
            await writer.write(keys, pa.array([b"v" * 1_000] * 30, pa.binary()))
        await stage.commit(intent, 1, await writer.finish())
        state = await stage.client.log(stage.topic.id).fold(fresh=True)
        (task,) = plan_read(state, {0: (0, 240)}, topic="t")

        async def fetched(keys):
            runs = fetch_with_replans(stage.client, task, keys=keys)
            return [piece async for run in runs for piece in run]

        every, some = await fetched(None), await fetched(hashes_of([b"key-3"]))
        keys = [key for piece in some for key in rows_of(piece).record_batch["key"].to_pylist()]
        assert keys.count(b"key-3") == 30
        assert len(some) < len(every) / 2

    play(act)


async def opened(stage):
    intent = await stage.intent()
    await stage.commit(intent, 1, await stage.written(intent, [b"%d" % n for n in range(10)]))
    owner = Owner(stage)
    await owner.open(10)
    state = await stage.client.log(stage.topic.id).fold(fresh=True)
    return owner, state.partitions[0].live


def test_a_look_has_every_row_that_was_acknowledged_before_it():
    async def act(stage):
        owner, live = await opened(stage)
        ends = LiveEnds(stage.client.ledgers)
        for rows in range(1, 5):  # much closer to each other than announcements
            await owner.append(1)
            await ends.refresh([live])
            assert ends.end_of(live).rows == rows

    play(act)


def test_a_look_waits_a_moment_at_most_for_what_a_dead_writer_left():
    async def act(stage):
        owner, live = await opened(stage)
        await owner.append(1)
        await asyncio.sleep(10)
        await owner.append(1)
        owner.writer.abandon()
        loop, ends = stage.world.loop, LiveEnds(stage.client.ledgers)
        began = loop.now
        await ends.refresh([live])
        assert ends.end_of(live).rows == 1
        assert TAKEN_WAIT_S <= loop.now - began < 2 * TAKEN_WAIT_S

    play(act)


def test_lag_counts_the_confirmed_rows_of_a_live_segment():
    async def act(stage):
        owner, _ = await opened(stage)
        subscriptions = stage.client.subscriptions
        await subscriptions.create(stage.topic.id, "mine")
        before = (await subscriptions.lag(stage.topic.id, "mine", 0))[0]
        await owner.append(7)
        await asyncio.sleep(10)
        after = (await subscriptions.lag(stage.topic.id, "mine", 0))[0]
        assert (before.end, after.end) == (10, 17)
        assert after.rows == before.rows + 7
        told = (await listed(stage.client, "lag"))[0]
        assert (told["latestOffset"], told["rowsBehind"]) == (after.end, after.rows)

    play(act)


def test_a_subscription_is_put_to_the_end_an_offset_or_a_time_of_a_live_segment():
    async def act(stage):
        owner, live = await opened(stage)
        owner.now_ms = (await stage.client.log(stage.topic.id).fold()).commit_ms
        times = []
        for _ in range(3):
            owner.now_ms += 1000
            times.append(owner.now_ms)
            await owner.append(5)
        subscriptions, topic = stage.client.subscriptions, stage.topic.id
        assert live.base == 10
        assert (await subscriptions.create(topic, "mine"))[0] == 25
        seek = partial(subscriptions.seek, topic, "mine")
        assert (await seek({0: 17}))[0] == 17
        assert (await seek(CommittedSince(times[1])))[0] == 15
        assert (await seek(CommittedSince(times[2] + 1)))[0] == 25
        assert (await seek(End.EARLIEST))[0] == 0
        assert (await seek(End.LATEST))[0] == 25
        with pytest.raises(errors.OffsetsOutOfRange, match="ends at 25"):
            await seek({0: 26})
        await subscriptions.reserve(stage.topic, "query's", start={0: 25})
        assert (await subscriptions.positions(topic, "query's"))[0] == 25

    play(act)


def test_rows_of_a_live_segment_are_heard_of_as_they_are_confirmed_and_never_go_back():
    async def act(stage):
        owner, live = await opened(stage)
        ends = LiveEnds(stage.client.ledgers)
        ends.follow([live])
        seen = []
        for size in (5, 7, 1):
            await owner.append(size)
            await asyncio.sleep(10)
            seen.append(ends.end_of(live).rows)
        assert seen == [5, 12, 13]
        await owner.writer.close()
        await asyncio.sleep(60)
        assert ends.end_of(live).closed
        assert ends.end_of(live).rows == 13
        await ends.close()

    play(act)


@pytest.mark.parametrize(("start", "end"), [(10, 23), (10, 11), (14, 16), (15, 22), (22, 23)])
def test_any_rows_of_a_live_segment_are_read_with_their_offsets(start, end):
    async def act(stage):
        owner, live = await opened(stage)
        await owner.append(5, 7, 1)
        ends = LiveEnds(stage.client.ledgers)
        await asyncio.sleep(10)
        await ends.refresh([live])
        known = ends.end_of(live)
        assert known.rows == 13
        rows = LiveRows(live, start, end, known.last_entry)
        task = ReadTask("t", stage.topic.id, (), NO_SEGMENTS, rows)

        assert await read(stage.client, task) == numbered(start, end)

    play(act)


def test_a_task_that_reads_a_live_segment_reads_on_where_its_rows_were_put_after_the_seal():
    async def act(stage):
        owner, live = await opened(stage)
        await owner.append(5, 7)
        ends = LiveEnds(stage.client.ledgers)
        await asyncio.sleep(10)
        await ends.refresh([live])
        rows = LiveRows(live, 12, 22, ends.end_of(live).last_entry)
        task = ReadTask("t", stage.topic.id, (), NO_SEGMENTS, rows)
        await owner.seal(5, 7)
        intent = await stage.client.intents.open_system_intent("compact", stage.topic.id)
        merged = await stage.written(intent, [b"%d" % n for n in range(10, 22)])
        state = await stage.client.log(stage.topic.id).fold(fresh=True)
        replaced = Replace(0, 10, 22, merged.segments, state.next - 1, (live.ledger_id,))
        await stage.client.commit_actions(stage.topic.id, [replaced], intent)
        await deleted(stage, live.ledger_id)

        assert await read(stage.client, task) == numbered(12, 22)

    play(act)


def test_confirmed_rows_that_a_closed_live_ledger_does_not_have_are_told_or_left_out():
    async def act(stage):
        owner, live = await opened(stage)
        await owner.append(5, 7)
        await owner.writer.close()
        rows = LiveRows(live, 12, 30, 3)  # as if entries 2 and 3 had been heard of
        task = ReadTask("t", stage.topic.id, (), NO_SEGMENTS, rows)

        with pytest.raises(errors.RowsLost, match="8 confirmed rows are gone: offsets 22 to 29"):
            await read(stage.client, task)
        assert await read(stage.client, task, lossy=True) == numbered(12, 22)

    play(act)


def test_confirmed_rows_of_a_live_segment_that_its_seal_left_out_are_told_or_left_out():
    async def act(stage):
        owner, live = await opened(stage)
        await owner.append(5, 7)
        rows = LiveRows(live, 12, 25, 2)  # as if rows 22 to 24 had been heard of
        task = ReadTask("t", stage.topic.id, (), NO_SEGMENTS, rows)
        await owner.seal(5, 7)
        intent = await stage.client.intents.open_system_intent("compact", stage.topic.id)
        merged = await stage.written(intent, [b"%d" % n for n in range(10, 22)])
        state = await stage.client.log(stage.topic.id).fold(fresh=True)
        replaced = Replace(0, 10, 22, merged.segments, state.next - 1, (live.ledger_id,))
        await stage.client.commit_actions(stage.topic.id, [replaced], intent)
        await deleted(stage, live.ledger_id)

        with pytest.raises(errors.RowsLost, match="3 confirmed rows are gone: offsets 22 to 24"):
            await read(stage.client, task)
        assert await read(stage.client, task, lossy=True) == numbered(12, 22)

    play(act)


def test_a_live_segment_that_could_not_be_heard_for_any_reason_is_heard_later():
    async def act(stage):
        owner, live = await opened(stage)
        await owner.append(5)
        refusals = [errors.Unauthorized("not now"), errors.NoSuchLedger("not yet")]
        open_ = stage.client.ledgers.open

        class Refusing:
            async def open(self, *arguments, **options):
                if refusals:
                    raise refusals.pop()
                return await open_(*arguments, **options)

        ends = LiveEnds(Refusing())
        ends.follow([live])
        await asyncio.sleep(70)
        assert ends.end_of(live).rows == 5
        await ends.close()

    play(act)
