"""Overwriting beside subscriptions: what one holds is replaced on demand only."""

import asyncio

import pytest

from spark_ledger import errors
from spark_ledger.metadata.store import Check
from spark_ledger.topic.commit import draft as commit_draft
from spark_ledger.topic.commit.draft import CommitKind
from spark_ledger.topic.log import state
from spark_ledger.topic.log.actions import Append, Overwrite, SealLive
from spark_ledger.topic.log.holds import Holds
from spark_ledger.topic.log.records import Commit
from spark_ledger.topic.subscription.seek_target import End
from spark_ledger.topic.write import TaskResult
from tests.simulation.loop import current
from tests.unit.spark_ledger.topic.stage import QUERY, TARGET, play, segment
from tests.unit.spark_ledger.topic.subscription_stage import fill, subscriptions_of


async def overwriting(stage):
    return await stage.client.intents.open_query_intent(
        QUERY, "run-1", TARGET, overwrites=[stage.topic.id]
    )


async def overwritten(stage, intent, version=0, **options):
    written = TaskResult(stage.topic.id, intent.id, 0, 0, (segment(77 + version, 5),))
    return await stage.commit(intent, version, written, overwrite=True, **options)


async def subscribed(stage, at, name="live"):
    some = subscriptions_of(await stage.another())
    return (await some.create(stage.topic.id, name, at))[0]


async def bounds(stage):
    now = await (await stage.another()).log(stage.topic.id).fold(fresh=True)
    return [(one.start_offset, one.end_offset) for one in now.partitions]


def test_rows_that_a_subscription_holds_are_replaced_on_demand_only():
    async def act(stage):
        await fill(stage, 20)
        await subscribed(stage, {0: 12})
        intent = await overwriting(stage)

        with pytest.raises(errors.SubscriptionBusy) as refused:
            await overwritten(stage, intent)

        assert "'live' holds partition 0 from offset 12 on" in str(refused.value)
        assert "end at 20" in str(refused.value) and "overwriteHeld=true" in str(refused.value)
        assert await bounds(stage) == [(0, 20)]
        await overwritten(stage, intent, overwrite_held=True)
        assert await bounds(stage) == [(20, 25)]

    play(act)


def test_an_overwrite_goes_by_beside_subscriptions_that_hold_no_row():
    async def act(stage):
        await fill(stage, 20)
        await subscribed(stage, End.LATEST)
        intent = await overwriting(stage)
        await overwritten(stage, intent)
        assert await bounds(stage) == [(20, 25)]

        with pytest.raises(errors.SubscriptionBusy, match="from offset 20 on"):
            await overwritten(stage, intent, version=1)

    play(act)


def test_a_topic_without_rows_is_overwritten_whatever_its_subscriptions_hold():
    async def act(stage):
        await subscribed(stage, End.EARLIEST)
        await overwritten(stage, await overwriting(stage))
        assert await bounds(stage) == [(0, 5)]

    play(act)


def test_a_subscription_that_comes_while_the_commit_is_made_keeps_its_rows():
    async def act(stage):
        await fill(stage, 20)
        intent = await overwriting(stage)
        holds, asked = stage.client.committer.holds, []

        async def comes_meanwhile(*what):
            found = await holds(*what)
            if not asked:
                await subscribed(stage, End.EARLIEST)
            asked.append(found.offsets)
            return found

        stage.client.committer.holds = comes_meanwhile
        with pytest.raises(errors.SubscriptionBusy, match="from offset 0 on"):
            await overwritten(stage, intent)

        assert asked[0] == {} and asked[-1] == {0: 0}
        assert await bounds(stage) == [(0, 20)]

    play(act)


def test_an_overwrite_that_was_committed_is_one_whatever_is_held_since():
    async def act(stage):
        await fill(stage, 20)
        intent = await overwriting(stage)
        await overwritten(stage, intent)
        await subscribed(stage, End.EARLIEST)

        again = await overwritten(stage, intent)

        assert again.kind is CommitKind.ALREADY
        assert await bounds(stage) == [(20, 25)]

    play(act)


def test_an_overwrite_beside_a_subscription_that_is_made_leaves_every_row_that_is_promised():
    async def act(stage):
        rng = current().random_for("overwrite")
        await fill(stage, 1000)
        intent = await overwriting(stage)

        async def overwrites():
            await asyncio.sleep(rng.uniform(0, 0.03))
            try:
                await overwritten(stage, intent)
            except errors.SubscriptionBusy:
                return False
            return True

        async def subscribes():
            await asyncio.sleep(rng.uniform(0, 0.03))
            return await subscribed(stage, {0: 100})

        replaced, promised = await asyncio.gather(overwrites(), subscribes())
        ((start, _),) = await bounds(stage)
        assert promised >= start
        assert replaced == (start == 1000)
        return replaced

    assert {play(act, seed=seed) for seed in range(16)} == {True, False}


def held_from(offset):
    return Holds({0: offset}, Check("/subscriptions", 0), {0: "s"})


def test_rows_that_the_commit_seals_before_it_overwrites_them_are_held_too():
    ten_rows = Commit("c", "app", "t", 0, "run", "intent", (Append((segment(1, 10),)),))
    topic = state.apply(state.empty("t", 1), 0, ten_rows, 0)
    actions = (SealLive(0, 9, segment(9, 5)), Overwrite((), 0))

    commit_draft.check_no_subscription_holds(topic, actions, held_from(15), "t")
    with pytest.raises(errors.SubscriptionBusy, match="from offset 12 on"):
        commit_draft.check_no_subscription_holds(topic, actions, held_from(12), "t")
    commit_draft.check_no_subscription_holds(topic, actions[:1], held_from(0), "t")
