"""Merging segments born live: producers' batches are copied as they are."""

from spark_ledger.topic.log.actions import Trim
from spark_ledger.topic.read.plan import plan_read
from spark_ledger.topic.subscription.seek_target import CommittedSince, exactly
from spark_ledger.topic.upkeep.compactor import compact
from spark_ledger.topic.upkeep.merge_encoding import StoredRows, with_stored_times
from spark_ledger.topic.upkeep.merge_plan import Merge
from tests.unit.spark_ledger.topic.batches import batches_of, numbered, produced, rows_of
from tests.unit.spark_ledger.topic.stage import play


def test_merging_keeps_producers_batches_byte_for_byte_and_their_boundaries():
    async def act(stage):
        owners = await produced(stage, (5, 2, 4), (3,), (6, 1))
        state = await stage.client.log(stage.topic.id).fold(fresh=True)
        before = await batches_of(stage.client, state)
        assert [data for _, data in before] == [data for one in owners for data in one.sent]

        done = await compact(stage.client, "t")

        assert (done.segments, done.merged) == (3, 1)
        state = await stage.client.log(stage.topic.id).fold(fresh=True)
        assert await batches_of(stage.client, state) == before
        assert [value for _, value in await stage.rows()] == [b"%d" % n for n in range(21)]
        (merged,) = list(next(iter(state.partitions[0].intervals)).source)
        assert merged.segment.entry_rows == (21,)

    play(act)


def test_what_is_left_of_a_batch_that_a_trim_went_through_becomes_columns():
    async def act(stage):
        await produced(stage, (8, 2), (3,))
        intent = await stage.client.intents.open_system_intent("trim", "t")
        await stage.client.commit_actions(stage.topic.id, [Trim(((0, 1),))], intent)
        state = await stage.client.log(stage.topic.id).fold(fresh=True)
        before = await batches_of(stage.client, state)

        await compact(stage.client, "t")

        state = await stage.client.log(stage.topic.id).fold(fresh=True)
        assert await batches_of(stage.client, state) == before[1:]
        found = []
        for task in plan_read(state, {0: (1, 13)}):
            found += await rows_of(stage.client, task)
        assert found == numbered((1, 13))

    play(act)


def test_a_time_means_the_same_row_after_rows_born_live_were_merged():
    async def act(stage):
        await produced(stage, (5, 2, 4), (3,), (6, 1))
        state = await stage.client.log(stage.topic.id).fold(fresh=True)
        first_ms = int(next(iter(state.partitions[0].intervals)).source.min_ms[0])
        times = [first_ms + at for at in range(-500, 8000, 250)]
        before = [await exactly(stage.client.ledgers, state, CommittedSince(ms)) for ms in times]
        assert len({one[0] for one in before}) == 7

        await compact(stage.client, "t")

        state = await stage.client.log(stage.topic.id).fold(fresh=True)
        after = [await exactly(stage.client.ledgers, state, CommittedSince(ms)) for ms in times]
        assert after == before

    play(act)


def test_of_many_times_a_merge_keeps_some_each_the_last_of_its_stretch():
    planned = Merge(0, 100, 1150, 2, 1, (7,), ((1000, 9985), (50, 11_000)))
    stored = [StoredRows(100 + n, 1, 10 * n) for n in range(1000)]
    runs = with_stored_times(planned, stored)
    assert sum(rows for rows, _ in runs) == 1050
    assert len(runs) == 251
    assert runs[0] == (4, 30)
    assert runs[-1] == (50, 11_000)
    assert max(ms for _, ms in runs[:-1]) == 9985  # never later than planned
    assert list(runs) == sorted(runs, key=lambda run: run[1])
