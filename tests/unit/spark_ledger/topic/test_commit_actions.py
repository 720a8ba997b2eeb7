"""Commits of any actions: maintenance, overwriting, and the guards that may refuse them."""

import asyncio
from dataclasses import replace

import pytest

from spark_ledger import errors
from spark_ledger.metadata import paths
from spark_ledger.metadata.store import Check, OutcomeUnknown
from spark_ledger.topic.commit.draft import CommitKind
from spark_ledger.topic.log import records
from spark_ledger.topic.log.actions import (
    Append,
    Grow,
    Hole,
    OpenLive,
    Replace,
    SealLive,
    Terminate,
    Trim,
)
from spark_ledger.topic.log.intents import STALE
from spark_ledger.topic.write import TaskResult
from tests.kit.segments_seen import segments_of
from tests.unit.spark_ledger.topic.stage import QUERY, TARGET, before_the_first_multi, play, segment


def result(stage, intent, *segments, task=0):
    return TaskResult(stage.topic.id, intent.id, task, 0, segments)


async def appended(stage, *ledgers, app_id="app"):
    """Ten rows in each ledger, one commit each."""
    intent = await stage.client.intents.open_batch_intent(app_id, "r", TARGET)
    for n, ledger in enumerate(ledgers):
        await stage.commit(intent, n, result(stage, intent, segment(ledger, 10)))


async def system(stage, purpose="maintain"):
    return await stage.client.intents.open_system_intent(purpose, stage.topic.id)


async def committed(stage, *actions, intent=None, **options):
    intent = intent or await system(stage)
    return await stage.client.commit_actions(stage.topic.id, actions, intent, **options)


async def state_of(stage):
    return await (await stage.another()).log(stage.topic.id).fold(fresh=True)


def in_log(stage, number):
    node = stage.world.store.peek(paths.topic_log(stage.topic.id, number))
    return records.decode_commit(node.value)


def ranges(held):
    return [
        (one.lo, one.hi, [p.segment.ledger_id for p in one.source] if one.source else None)
        for one in held.intervals
    ]


# -- every kind of action ----------------------------------------------------------------------


def test_trims_holes_and_replacements_name_the_ledgers_that_lose_rows():
    async def act(stage):
        await appended(stage, 1, 2, 3, 4)
        intent = await system(stage)
        await committed(stage, Trim(((0, 12),)), intent=intent)
        await committed(stage, Hole(0, 15, 25), intent=intent)
        await committed(stage, Replace(0, 25, 40, (segment(9, 15),), 6), intent=intent)

        state = await state_of(stage)
        assert [in_log(stage, n).actions[0].dropped for n in (4, 5, 6)] == [(1, 2), (2, 3), (3, 4)]
        assert list(state.dropped) == [1, 2, 3, 4]
        assert ranges(state.partitions[0]) == [(12, 15, [2]), (15, 25, None), (25, 40, [9])]
        assert state.ledgers() == [2, 9]

    play(act)


def test_a_topic_grows_is_opened_sealed_and_terminated():
    async def act(stage):
        intent = await system(stage)
        await committed(stage, Grow(3), intent=intent)
        await committed(stage, OpenLive(2, 7, 0, "owner", 1), intent=intent)
        live = (await state_of(stage)).partitions[2].live
        sealed = SealLive(2, 7, segment(7, 5, partition=2))
        await committed(stage, sealed, OpenLive(2, 8, 0, "owner", 1), intent=intent)
        await committed(stage, SealLive(2, 8, None), intent=intent)
        await committed(stage, Terminate(), intent=intent)

        state = await state_of(stage)
        assert (live.ledger_id, live.base) == (7, 0)
        assert [p.end_offset for p in state.partitions] == [0, 0, 5]
        assert state.partitions[2].live is None
        with pytest.raises(errors.TopicTerminated):
            await appended(stage, 1)
        await committed(stage, Trim(((2, 5),)), intent=intent)

    play(act)


def test_what_no_state_could_take_is_refused_and_not_written():
    async def act(stage):
        await appended(stage, 1)
        short = Replace(0, 0, 10, (segment(9, 9),), 1)

        with pytest.raises(errors.LedgerError, match="replaces other rows than it has"):
            await committed(stage, short)
        with pytest.raises(ValueError, match="partition 5 of 1"):
            await committed(stage, Hole(5, 0, 1))

        assert (await state_of(stage)).next == 1

    play(act)


# -- guards ------------------------------------------------------------------------------------


def test_a_replacement_that_loses_to_a_trim_brings_no_row_back():
    async def act(stage):
        await appended(stage, 1, 2)
        other = replace(stage, client=await stage.another())
        intent = await system(stage)

        before_the_first_multi(stage.client.store, lambda: committed(other, Trim(((0, 10),))))
        with pytest.raises(errors.TxnConflict, match="starts at 10 now"):
            await committed(stage, Replace(0, 0, 20, (segment(9, 20),), 2), intent=intent)

        assert ranges((await state_of(stage)).partitions[0]) == [(10, 20, [2])]

    play(act)


def test_a_replacement_of_rows_that_a_trim_keeps_is_made_behind_it():
    async def act(stage):
        await appended(stage, 1, 2)
        other = replace(stage, client=await stage.another())
        intent = await system(stage)

        before_the_first_multi(stage.client.store, lambda: committed(other, Trim(((0, 10),))))
        await committed(stage, Replace(0, 10, 20, (segment(9, 10),), 2), intent=intent)

        assert ranges((await state_of(stage)).partitions[0]) == [(10, 20, [9])]

    play(act)


def test_a_replacement_that_loses_to_another_is_refused():
    async def act(stage):
        await appended(stage, 1, 2)
        other = replace(stage, client=await stage.another())
        intent = await system(stage)
        faster = Replace(0, 0, 20, (segment(8, 20),), 2)

        before_the_first_multi(stage.client.store, lambda: committed(other, faster))
        with pytest.raises(errors.TxnConflict, match="rearranged by commit 2"):
            await committed(stage, Replace(0, 0, 20, (segment(9, 20),), 2), intent=intent)

        assert ranges((await state_of(stage)).partitions[0]) == [(0, 20, [8])]

    play(act)


def test_a_replacement_that_loses_to_an_append_is_made_behind_it():
    async def act(stage):
        await appended(stage, 1, 2)
        other = replace(stage, client=await stage.another())
        intent = await system(stage)

        before_the_first_multi(stage.client.store, lambda: appended(other, 3, app_id="late"))
        outcome = await committed(stage, Replace(0, 0, 20, (segment(9, 20),), 2), intent=intent)

        assert outcome.number == 3
        assert ranges((await state_of(stage)).partitions[0]) == [(0, 20, [9]), (20, 30, [3])]

    play(act)


def test_a_trim_that_loses_to_a_replacement_names_the_ledgers_that_are_there_now():
    async def act(stage):
        await appended(stage, 1, 2)
        other = replace(stage, client=await stage.another())
        intent = await system(stage)

        before_the_first_multi(
            stage.client.store,
            lambda: committed(other, Replace(0, 0, 20, (segment(9, 20),), 2)),
        )
        await committed(stage, Trim(((0, 20),)), intent=intent)

        assert in_log(stage, 3).actions == (Trim(((0, 20),), (9,)),)
        assert list((await state_of(stage)).dropped) == [1, 2, 9]

    play(act)


def test_a_node_that_moved_since_the_commit_was_planned_refuses_it_for_good():
    async def act(stage):
        await appended(stage, 1)
        store = stage.client.store
        await store.create("/watched")
        check = Check("/watched", 0)
        intent = await system(stage)
        await committed(stage, Trim(((0, 2),)), intent=intent, checks=[check])
        await store.set("/watched", b"moved", 0)

        with pytest.raises(errors.TxnConflict, match="/watched has changed"):
            await committed(stage, Trim(((0, 5),)), intent=intent, checks=[check])

        assert (await state_of(stage)).partitions[0].start_offset == 2
        await committed(stage, Trim(((0, 5),)), intent=intent, checks=[Check("/watched", 1)])

    play(act)


def test_maintenance_under_a_condemned_intent_changes_nothing():
    async def act(stage):
        await appended(stage, 1)
        intent = await system(stage)
        await committed(stage, Trim(((0, 1),)), intent=intent)
        await (await stage.another()).intents.condemn(intent.id, STALE)

        with pytest.raises(errors.LedgerFenced, match="is condemned"):
            await committed(stage, Trim(((0, 5),)), intent=intent)

        assert (await state_of(stage)).partitions[0].start_offset == 1

    play(act)


def test_a_system_intent_can_end_with_its_last_commit():
    async def act(stage):
        await appended(stage, 1)
        intent = await system(stage)

        await committed(stage, Trim(((0, 1),)), intent=intent, finish_intent=True)

        ended = await stage.client.intents.get(intent.id)
        assert ended.record.state is records.IntentState.DONE

    play(act)


@pytest.mark.parametrize("seed", range(10))
def test_maintenance_whose_answers_are_lost_is_done_once_each(seed):
    async def act(stage):
        intent = await system(stage)
        store = stage.world.store
        store.faults.unknown, store.faults.lag_s = 0.5, 1.0
        appends = [Append((segment(n, n + 1),)) for n in range(6)]
        outcomes = await asyncio.gather(
            *(committed(stage, one, intent=intent, timeout_s=300) for one in appends)
        )
        store.faults.unknown = 0.0

        state = await state_of(stage)
        assert sorted(outcome.number for outcome in outcomes) == list(range(6))
        assert {outcome.kind for outcome in outcomes} == {CommitKind.COMMITTED}
        held = [placed.segment for placed in segments_of(state.partitions[0])]
        assert sorted((one.ledger_id, one.rows) for one in held) == [(n, n + 1) for n in range(6)]
        assert [in_log(stage, n).version for n in range(6)] == list(range(6))

    play(act, seed=seed)


def test_maintenance_that_gave_up_without_knowing_is_not_mistaken_for_the_next():
    async def act(stage):
        intent = await system(stage)
        multi = stage.client.store.multi

        async def unheard(operations):
            await multi(operations)
            stage.world.store.stall(100)
            raise OutcomeUnknown("the answer was lost")

        stage.client.store.multi = unheard
        with pytest.raises(errors.CommitOutcomeUnknown):
            await committed(stage, Append((segment(1, 5),)), intent=intent, timeout_s=20)
        stage.client.store.multi = multi
        await asyncio.sleep(200)

        outcome = await committed(stage, Append((segment(2, 7),)), intent=intent)

        assert (outcome.number, outcome.rows) == (1, {0: 7})
        assert (await state_of(stage)).end_offsets() == {0: 12}

    play(act)


# -- overwriting -------------------------------------------------------------------------------


async def complete(stage, run_id="run-1"):
    return await stage.client.intents.open_query_intent(
        QUERY, run_id, TARGET, overwrites=[stage.topic.id]
    )


def test_each_batch_of_complete_mode_takes_the_place_of_the_one_before():
    async def act(stage):
        await appended(stage, 1)
        intent = await complete(stage)
        for version in range(3):
            written = result(stage, intent, segment(2 + version, 5))
            await stage.commit(intent, version, written, overwrite=True)
        empty = await stage.commit(intent, 3, overwrite=True)

        state = await state_of(stage)
        assert [in_log(stage, n).actions[0].dropped for n in (1, 2, 3, 4)] == [
            (1,),
            (2,),
            (3,),
            (4,),
        ]
        assert empty.number == 4, "a result without rows is one too"
        assert (state.start_offsets(), state.end_offsets()) == ({0: 25}, {0: 25})

    play(act)


def test_rows_that_another_adds_during_a_run_are_not_overwritten():
    async def act(stage):
        intent = await complete(stage)
        await stage.commit(intent, 0, result(stage, intent, segment(2, 5)), overwrite=True)
        await appended(replace(stage, client=await stage.another()), 7)

        with pytest.raises(errors.TxnConflict, match="of another writer came after commit"):
            await stage.commit(intent, 1, result(stage, intent, segment(3, 5)), overwrite=True)

        assert ranges((await state_of(stage)).partitions[0]) == [(0, 5, [2]), (5, 15, [7])]
        newer = await complete(stage, "run-2")
        await stage.commit(newer, 1, result(stage, newer, segment(4, 5)), overwrite=True)
        assert ranges((await state_of(stage)).partitions[0]) == [(15, 20, [4])]

    play(act)


def test_an_overwrite_that_loses_a_race_to_an_append_is_a_conflict_and_to_a_merge_is_not():
    async def act(stage):
        await appended(stage, 1, 2)
        other = replace(stage, client=await stage.another())

        async def merged():
            await committed(other, Replace(0, 0, 20, (segment(9, 20),), 2))

        for run, happens, refused in (("a", merged, False), ("b", None, True)):
            intent = await stage.client.intents.open_batch_intent(
                f"job-{run}", run, TARGET, overwrites=[stage.topic.id]
            )
            written = result(stage, intent, segment(20 + refused, 1))
            act_then = happens or (lambda: appended(other, 3, app_id="late"))
            before_the_first_multi(stage.client.store, act_then)
            if refused:
                with pytest.raises(errors.TxnConflict):
                    await stage.commit(intent, 0, written, overwrite=True, finish_intent=True)
            else:
                await stage.commit(intent, 0, written, overwrite=True, finish_intent=True)

        assert in_log(stage, 3).actions[0].dropped == (9,)
        assert ranges((await state_of(stage)).partitions[0]) == [(20, 21, [20]), (21, 31, [3])]

    play(act)


def test_an_intent_that_was_not_made_for_overwriting_does_not_overwrite():
    async def act(stage):
        intent = await stage.intent()
        with pytest.raises(ValueError, match="was not opened for overwriting this topic"):
            await stage.commit(intent, 0, result(stage, intent, segment(1, 5)), overwrite=True)

    play(act)


def test_a_replayed_overwrite_is_done_once():
    async def act(stage):
        first = await complete(stage)
        await stage.commit(first, 0, result(stage, first, segment(1, 5)), overwrite=True)
        await appended(stage, 7)
        second = await complete(stage, "run-2")

        again = await stage.commit(second, 0, result(stage, second, segment(2, 5)), overwrite=True)

        assert again.kind is CommitKind.ALREADY
        assert ranges((await state_of(stage)).partitions[0]) == [(0, 5, [1]), (5, 15, [7])]

    play(act)


def test_a_commit_keeps_what_its_user_says_of_it():
    async def act(stage):
        intent = await stage.intent()
        written = result(stage, intent, segment(1, 5))
        await stage.commit(intent, 0, written, user_metadata="nightly, part 3")

        assert in_log(stage, 0).user_metadata == "nightly, part 3"

    play(act)
