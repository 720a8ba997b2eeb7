"""Merging small segments changes where rows are, and nothing that a reader sees of them."""

import asyncio
from dataclasses import replace

import pyarrow as pa
import pytest

from spark_ledger import errors
from spark_ledger.topic.entry.batch_encoder import SHARE_BYTES
from spark_ledger.topic.log.actions import Trim
from spark_ledger.topic.read.plan import plan_read
from spark_ledger.topic.subscription.seek_target import offset_since
from spark_ledger.topic.upkeep import compactor, merge_encoding
from spark_ledger.topic.upkeep.admin import TopicAdmin
from spark_ledger.topic.upkeep.compactor import (
    GROUP_BYTES,
    Compaction,
    CompactionResult,
    compact,
    group_merges,
)
from spark_ledger.topic.upkeep.janitor import LEASE_S
from spark_ledger.topic.upkeep.merge_plan import Merge, MergeLimits
from tests.kit.loop_task import LoopTask
from tests.kit.segments_seen import end_of
from tests.kit.slices import read_task
from tests.unit.spark_ledger.topic.merged_segments import all_merged, seen, segments
from tests.unit.spark_ledger.topic.stage import NOW_MS, TO_A_LEDGER, play


async def micro_batches(stage, intent, *rows):
    """A commit for each, in ledgers of their own."""
    for version, row in enumerate(rows):
        stage.now_ms = NOW_MS + version
        await stage.commit(intent, version, await stage.written(intent, [row] * 2))
        await stage.client.cache.close()


def test_many_small_segments_become_one_and_every_row_stays_as_it_was():
    async def act(stage):
        intent = await stage.intent()
        await micro_batches(stage, intent, b"a", b"b", b"c", b"d")
        before, times = await seen(stage), [p.commit_ms for p in await segments(stage)]

        done = await compact(stage.client, "t")

        assert (done.segments, done.merged, done.commits) == (4, 1, 1)
        assert await seen(stage) == before
        (merged,) = await segments(stage)
        assert (merged.base, end_of(merged), merged.commit_ms) == (0, 8, max(times))
        assert (merged.segment.min_ms, merged.segment.max_ms) == (NOW_MS, NOW_MS + 3)
        assert await compact(stage.client, "t") == CompactionResult()

    play(act)


def test_rows_of_many_commits_become_one_entry_with_the_time_of_each():
    async def act(stage):
        intent = await stage.intent()
        for version in range(30):
            stage.now_ms = NOW_MS + version % 7  # clocks go back, too
            await asyncio.sleep(1)
            await stage.commit(intent, version, await stage.written(intent, [b"%d" % version]))
        last_ms = (await segments(stage))[-1].commit_ms
        times = range(last_ms - 32_000, last_ms + 1_000, 500)
        before, since = await seen(stage), await found_by_time(stage, times)
        assert len(set(since.values())) == 31

        await compact(stage.client, "t")

        (merged,) = await segments(stage)
        assert merged.segment.entry_rows == (30,)
        assert await seen(stage) == before
        assert await found_by_time(stage, times) == since

    play(act)


async def found_by_time(stage, times):
    """The first offset committed since each of the times."""
    (held,) = (await stage.client.log(stage.topic.id).fold(fresh=True)).partitions
    return {ms: offset_since(held, ms) for ms in times}


def test_what_is_merged_can_be_merged_again_with_what_came_since():
    async def act(stage):
        intent = await stage.intent()
        await micro_batches(stage, intent, b"a", b"b", b"c")
        await compact(stage.client, "t")
        await stage.commit(intent, 9, await stage.written(intent, [b"d"]))
        trimming = await stage.client.intents.open_system_intent("trim", "t")
        await stage.client.commit_actions(stage.topic.id, [Trim(((0, 1),))], trimming)
        before = await seen(stage)

        done = await compact(stage.client, "t")

        assert (done.segments, done.merged) == (2, 1)
        assert await seen(stage) == before
        (merged,) = await segments(stage)
        assert merged.segment.entry_rows == (6,)

    play(act)


def test_times_that_are_too_many_for_an_entry_make_another(monkeypatch):
    monkeypatch.setattr(merge_encoding, "TIMES_MAX", 3)

    async def act(stage):
        intent = await stage.intent()
        await micro_batches(stage, intent, *[b"%d" % n for n in range(8)])
        before = await seen(stage)
        await compact(stage.client, "t")
        (merged,) = await segments(stage)
        assert merged.segment.entry_rows == (6, 6, 4)
        assert await seen(stage) == before

    play(act)


def test_what_it_read_from_is_dropped_and_goes_after_the_delete_delay():
    async def act(stage):
        intent = await stage.client.intents.open_batch_intent("app", "r", "t")
        results = [await stage.written(intent, [b"%d" % n], n) for n in range(2)]
        await stage.commit(intent, 0, *results, finish_intent=True)
        ledgers = sorted({s.ledger_id for r in results for s in r.segments})
        await stage.client.topics.change_policies("t", {"delete_delay_ms": 600_000})

        await compact(stage.client, "t")
        early = await stage.janitor.clean()
        await asyncio.sleep(601)
        late = await stage.janitor.clean()

        assert (early.deleted, list(late.deleted)) == ((), ledgers)
        assert [row["value"] for _, _, row in await seen(stage)] == [b"0", b"1"]

    play(act)


def test_headers_event_times_and_absent_columns_are_kept_as_they_are():
    async def act(stage):
        intent = await stage.client.intents.open_batch_intent("app", "r", "t")
        times = pa.array([1_000_000], pa.timestamp("us", tz="UTC"))
        headers = pa.array([[{"key": "h", "value": b"1"}]])
        results = []
        for n, extra in enumerate(({}, {"event_times": times}, {"headers": headers})):
            writer = LoopTask(stage.client, stage.topic, intent, task_index=n)
            await writer.write(None, pa.array([None if n else b"v"], pa.binary()), **extra)
            results.append(await writer.finish())
        await stage.commit(intent, 0, *results, finish_intent=True)
        before = [(o, w, known(row)) for o, w, row in await seen(stage)]

        await compact(stage.client, "t")

        after = [(o, w, known(row)) for o, w, row in await seen(stage)]
        assert after == before
        assert {name for _, _, row in after for name in row} == {"value", "event_time", "headers"}

    play(act)


def known(row):
    """The columns that are not null: one that is null in each row may be left out."""
    return {name: value for name, value in row.items() if value is not None}


def test_a_topics_own_columns_are_merged_too():
    async def act(stage):
        intent = await stage.client.intents.open_batch_intent("app", "r", "t")
        results = []
        for n in range(2):
            writer = LoopTask(stage.client, stage.topic, intent, task_index=n)
            own = pa.RecordBatch.from_pydict({"carrier": ["AA", "UA"], "delay": [n, None]})
            await writer.write(pa.array([b"k", None], pa.binary()), own)
            results.append(await writer.finish())
        await stage.commit(intent, 0, *results, finish_intent=True)
        before = await seen(stage)

        await compact(stage.client, "t")

        assert await seen(stage) == before
        assert len(await segments(stage)) == 1

    play(act)


def test_rows_of_several_versions_of_a_schema_and_without_one_stay_what_they_are():
    async def act(stage):
        intent = await stage.client.intents.open_batch_intent("app", "r", "t")
        columns = [{"n": [1, 2]}, {"n": [3, 4], "s": ["a", None]}, {"n": [5, 6]}]
        keys = pa.array([b"k", b"l"], pa.binary())
        results = []
        for task, (version, own) in enumerate(zip((1, 2, 1), columns, strict=True)):
            settings = replace(TO_A_LEDGER, schema_version=version)
            writer = LoopTask(stage.client, stage.topic, intent, task_index=task, settings=settings)
            await writer.write(keys, pa.RecordBatch.from_pydict(own))
            results.append(await writer.finish())
        results.append(await stage.written(intent, [b"k", b"l"], 3))
        await stage.commit(intent, 0, *results, finish_intent=True)

        async def versions(partition):
            client = await stage.another()
            state = await client.log(stage.topic.id).fold(fresh=True)
            (task,) = plan_read(state, {partition: (0, state.partitions[partition].end_offset)})
            return [
                (rows.typed, rows.schema_version) async for rows in read_task(client.ledgers, task)
            ]

        before = [await seen(stage, p) for p in range(2)]
        kinds = [await versions(p) for p in range(2)]

        await compact(stage.client, "t")

        assert [await seen(stage, p) for p in range(2)] == before
        assert [await versions(p) for p in range(2)] == kinds
        assert (True, 2) in kinds[0] + kinds[1]

    play(act, partitions=2)


async def shared_batches(stage, batches, rows):
    """Commits of one task each, whose entries three partitions share."""
    intent = await stage.intent()
    for n in range(batches):
        stage.now_ms = NOW_MS + n
        result = await stage.written(intent, rows(n))
        assert all(one.shared for one in result.segments)
        await stage.commit(intent, n, result)
        await stage.client.cache.close()
    assert [len(await segments(stage, p)) for p in range(3)] == [batches] * 3


def test_small_merges_of_several_partitions_share_entries_with_the_times_of_each_row():
    async def act(stage):
        await shared_batches(stage, 5, lambda n: [b"%d-%d" % (n, i) for i in range(10 + n)])
        before = [await seen(stage, p) for p in range(3)]

        done = await compact(stage.client, "t")

        assert [await seen(stage, p) for p in range(3)] == before
        assert len({written for _, written, _ in before[0]}) == 5
        assert (done.segments, done.merged, done.commits) == (15, 3, 1)
        merged = [(await segments(stage, p))[0].segment for p in range(3)]
        assert len({(one.ledger_id, one.entries) for one in merged}) == 1, "one entry has all"
        assert all(one.shared for one in merged)
        assert await compact(stage.client, "t") == CompactionResult()

    play(act, partitions=3)


def test_merges_are_done_together_that_are_small_or_read_shared_entries():
    def sized(partition, start, size, shared=False):
        return Merge(partition, start, start + 1, 2, size, (), (), shared)

    small = [sized(p, n, 40_000) for p in range(100) for n in range(2)]
    shared = [sized(p, 9, 1 << 20, shared=True) for p in range(100)]
    large = sized(7, 5, SHARE_BYTES)

    alone, *groups = group_merges([*small, large, *shared])

    assert alone == [large]
    assert sorted((one.partition, one.start) for some in groups for one in some) == sorted(
        (one.partition, one.start) for one in [*small, *shared]
    )
    for some in groups:
        assert len({one.partition for one in some}) == len(some)
        assert sum(one.bytes for one in some) <= GROUP_BYTES
    assert len(groups) == 6, "one for each of two turns, four for the third"


def test_small_merges_of_partitions_some_of_whose_rows_went_meanwhile_are_planned_again():
    async def act(stage):
        await shared_batches(stage, 3, lambda n: [b"%d-%d" % (n, i) for i in range(10)])
        compaction = Compaction(stage.client, stage.topic)
        (task,) = await compaction.plan()
        other = await stage.client.intents.open_system_intent("trim", "t")
        firsts = [(await segments(stage, p))[0] for p in range(3)]
        trim = Trim(tuple((p, end_of(first)) for p, first in enumerate(firsts)))
        await stage.client.commit_actions(stage.topic.id, [trim], other)
        await stage.client.ledgers.delete(firsts[0].segment.ledger_id)
        before = [await seen(stage, p) for p in range(3)]

        made = await compactor.merge(stage.client, stage.topic, compaction.intent, task)
        await compaction.commit(made)
        (task,) = await compaction.plan()
        made = await compactor.merge(stage.client, stage.topic, compaction.intent, task)
        await compaction.commit(made)

        assert compaction.total.segments == 6
        assert [await seen(stage, p) for p in range(3)] == before

    play(act, partitions=3)


def test_rows_that_come_and_go_meanwhile_make_it_plan_again_and_none_is_lost():
    async def act(stage):
        intent = await stage.intent()
        await micro_batches(stage, intent, b"a", b"b", b"c", b"d")
        compaction = Compaction(stage.client, stage.topic)
        merged = await all_merged(stage, compaction)
        await stage.commit(intent, 9, await stage.written(intent, [b"appended"]))
        other = await stage.client.intents.open_system_intent("trim", "t")
        await stage.client.commit_actions(stage.topic.id, [Trim(((0, 3),))], other)

        await compaction.commit(merged)
        assert compaction.total == CompactionResult()
        before = await seen(stage)
        done = await compact(stage.client, "t")

        assert await seen(stage) == before
        assert (before[0][0], before[-1][0], done.segments) == (3, 8, 4)

    play(act)


def test_of_several_merges_only_those_that_still_hold_are_committed(monkeypatch):
    async def act(stage):
        intent = await stage.intent()
        await micro_batches(stage, intent, b"a", b"b", b"c", b"d")
        size = (await segments(stage))[0].segment.bytes
        monkeypatch.setattr(MergeLimits, "small_bytes", 8 * size)
        pairs = MergeLimits(bytes_max=2 * size)
        compaction = Compaction(stage.client, stage.topic, pairs)
        merged = await all_merged(stage, compaction)
        other = await stage.client.intents.open_system_intent("trim", "t")
        await stage.client.commit_actions(stage.topic.id, [Trim(((0, 1),))], other)
        before = await seen(stage)

        await compaction.commit(merged)

        assert (compaction.total.segments, compaction.total.commits) == (2, 1)
        assert await seen(stage) == before
        assert [(p.base, end_of(p)) for p in await segments(stage)] == [(0, 2), (2, 4), (4, 8)]

    play(act)


def test_rows_that_are_gone_when_they_are_to_be_merged_are_left_out():
    async def act(stage):
        intent = await stage.intent()
        await micro_batches(stage, intent, b"a", b"b")
        compaction = Compaction(stage.client, stage.topic)
        (task,) = await compaction.plan()
        other = await stage.client.intents.open_system_intent("trim", "t")
        await stage.client.commit_actions(stage.topic.id, [Trim(((0, 4),))], other)
        for ledger_id in task.merges[0].ledgers:
            await stage.client.ledgers.delete(ledger_id)

        made = await compactor.merge(stage.client, stage.topic, compaction.intent, task)
        await compaction.commit([])

        assert made == []
        assert (await compaction.plan(), compaction.total) == ((), CompactionResult())

    play(act)


def test_of_a_task_that_is_tried_again_one_attempt_counts_and_the_other_leaves_nothing():
    async def act(stage):
        intent = await stage.client.intents.open_batch_intent("app", "r", "t")
        results = [await stage.written(intent, [b"%d" % n], n) for n in range(3)]
        await stage.commit(intent, 0, *results, finish_intent=True)
        before, other = await seen(stage), await stage.another()
        compaction = Compaction(stage.client, stage.topic)
        (task,) = await compaction.plan()
        (failed,) = await compactor.merge(other, stage.topic, compaction.intent, task)
        made = await compactor.merge(stage.client, stage.topic, compaction.intent, task)

        await compaction.commit(made)
        await compaction.aclose()
        await stage.client.cache.close()
        await other.cache.close()
        cleaned = await stage.janitor.clean()

        assert cleaned.deleted == tuple(one.ledger_id for one in failed.segments)
        assert await seen(stage) == before

    play(act)


def test_a_driver_that_dies_before_its_commit_leaves_nothing_and_the_next_one_goes_on():
    async def act(stage):
        intent = await stage.client.intents.open_batch_intent("app", "r", "t")
        results = [await stage.written(intent, [b"%d" % n], n) for n in range(3)]
        await stage.commit(intent, 0, *results, finish_intent=True)
        before, dying = await seen(stage), await stage.another()
        compaction = Compaction(dying, stage.topic)
        (task,) = await compaction.plan()
        (lost,) = await compactor.merge(dying, stage.topic, compaction.intent, task)

        await stage.janitor.clean()
        await asyncio.sleep(LEASE_S + 1)
        cleaned = await stage.janitor.clean()
        done = await compact(stage.client, "t")

        assert cleaned.deleted == tuple(one.ledger_id for one in lost.segments)
        assert (done.segments, done.merged) == (3, 1)
        assert await seen(stage) == before

    play(act)


def test_appends_meanwhile_do_not_hinder_it():
    async def act(stage):
        intent = await stage.intent()
        await micro_batches(stage, intent, b"a", b"b")
        compaction = Compaction(stage.client, stage.topic)
        merged = await all_merged(stage, compaction)
        await stage.commit(intent, 9, await stage.written(intent, [b"appended"]))
        before = await seen(stage)

        await compaction.commit(merged)

        assert await seen(stage) == before
        assert len(await segments(stage)) == 2

    play(act)


def test_an_intent_that_was_condemned_meanwhile_changes_nothing():
    async def act(stage):
        intent = await stage.intent()
        await micro_batches(stage, intent, b"a", b"b")
        before = await seen(stage)
        compaction = Compaction(stage.client, stage.topic)
        merged = await all_merged(stage, compaction)
        await stage.client.cache.close()
        await stage.janitor.clean(condemn=[compaction.intent.id])

        with pytest.raises(errors.LedgerFenced):
            await compaction.commit(merged)

        assert await seen(stage) == before

    play(act)


def test_it_works_in_rounds_and_keeps_its_pace(monkeypatch):
    monkeypatch.setattr(compactor, "ROUND_MERGES_MAX", 1)

    async def act(stage):
        intent = await stage.intent()
        await micro_batches(stage, intent, *[b"%02d" % n for n in range(18)])
        before = await seen(stage)
        size = (await segments(stage))[0].segment.bytes
        began_s = asyncio.get_running_loop().time()
        limits = MergeLimits(bytes_max=8 * size + 8)

        done = await compact(stage.client, "t", limits=limits, bytes_per_s=size / 100)

        assert await seen(stage) == before
        assert (done.segments, done.merged, done.commits) == (18, 3, 3)
        assert asyncio.get_running_loop().time() - began_s >= 1800

    play(act)


@pytest.mark.parametrize("shared", [False, True])
def test_no_two_rounds_of_merges_write_to_one_ledger(monkeypatch, shared):
    monkeypatch.setattr(compactor, "ROUND_MERGES_MAX", 1)

    async def act(stage):
        intent = await stage.intent()
        await micro_batches(stage, intent, *[b"%02d" % n for n in range(18)])
        size = (await segments(stage))[0].segment.bytes
        own = await stage.client.intents.open_system_intent("merge", "topics")

        async def one_for_all():
            return own

        compaction = Compaction(
            *(stage.client, stage.topic, MergeLimits(bytes_max=8 * size + 8)),
            open_intent=one_for_all if shared else None,
        )
        while tasks := await compaction.plan():
            await compaction.carry_out(tasks, compactor.MergePace(None))
        await compaction.aclose()

        assert compaction.total.commits == 3
        assert len({one.segment.ledger_id for one in await segments(stage)}) == 3
        left = [one for one in await stage.intents() if one.app_id.startswith("compact-")]
        assert [one.is_open for one in left] == ([] if shared else [False] * 3)

    play(act)


def test_an_administrator_sees_what_became_of_it():
    async def act(stage):
        intent = await stage.intent()
        await micro_batches(stage, intent, b"a", b"b", b"c")
        admin = TopicAdmin(stage.client)
        before = await admin.describe("t")
        await compact(stage.client, "t")
        after = await admin.describe("t")

        assert [one.partitions[0].segments for one in (before, after)] == [3, 1]
        assert before.rows == after.rows == 6
        assert after.reclaimable == before.ledgers

    play(act)
