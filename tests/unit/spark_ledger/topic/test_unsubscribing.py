"""Deleting a subscription for its last consumer, where the store is away or answers are lost."""

import asyncio

import pytest

from spark_ledger import errors
from spark_ledger.metadata.store import Delete, OutcomeUnknown
from tests.unit.spark_ledger.topic.consumers import NAME, broker, opened, play_here

WITHIN_S = 25.0


async def listed(stage):
    return [one.name for one in await stage.client.subscriptions.list(stage.topic.id)]


async def used_at(stage, name="a", partition=0):
    """A broker, its cursor, and how that has failed."""
    made, failures = await broker(stage, name), []
    cursor = await made.open(5)
    await cursor.adopt(partition, 1)
    cursor.advance(partition, 20)
    cursor.on_failure = lambda: failures.append(cursor.failure)
    return made, cursor, failures


@pytest.mark.parametrize("away_s", [0, 5, 12, 20])
def test_when_it_returns_the_subscription_is_gone_also_where_the_store_was_away(away_s):
    async def act(stage):
        a, cursor, failures = await used_at(stage)
        if away_s:
            stage.world.store.stall(away_s)
        await a.cursors.delete(cursor, WITHIN_S)
        assert await listed(stage) == []
        await asyncio.sleep(30)
        assert (failures, await listed(stage)) == ([], [])

    play_here(act)


def test_where_the_store_is_away_for_longer_it_fails_and_the_subscription_is_used_as_before():
    async def act(stage):
        a, cursor, failures = await used_at(stage)
        stage.world.store.stall(60)
        with pytest.raises(errors.Unavailable):
            await a.cursors.delete(cursor, 8)
        await asyncio.sleep(60)
        assert failures == []
        cursor.advance(0, 30)
        await a.cursors.written(cursor, 30)
        (one,) = await stage.client.subscriptions.list(stage.topic.id)
        assert (one.live, one.positions[0]) == (True, 30)

    play_here(act)


@pytest.mark.parametrize("applied", [False, True])
def test_a_deletion_whose_answer_was_lost_is_looked_up(applied):
    async def act(stage):
        a, cursor, failures = await used_at(stage)
        multi, lost = a.client.store.multi, []

        async def losing(operations):
            deletes = any(isinstance(one, Delete) for one in operations)
            if deletes and not lost:
                lost.append(True)
                if applied:
                    await multi(operations)
                raise OutcomeUnknown("the answer was lost")
            return await multi(operations)

        a.client.store.multi = losing
        await a.cursors.delete(cursor, WITHIN_S)
        assert (lost, await listed(stage), failures) == ([True], [], [])

    play_here(act)


def test_while_another_broker_has_consumers_it_stays_and_of_several_that_leave_at_once_it_is_gone():
    async def act(stage):
        (a, one, _), (b, two, _), (c, three, _) = [
            await used_at(stage, name, number) for number, name in enumerate("abc")
        ]
        await a.cursors.delete(one, WITHIN_S)
        assert await listed(stage) == [NAME]
        await asyncio.gather(b.cursors.delete(two, WITHIN_S), c.cursors.delete(three, WITHIN_S))
        assert await listed(stage) == []

    play_here(act)


def test_it_does_not_delete_what_a_query_has_by_then():
    async def act(stage):
        a, cursor, failures = await used_at(stage)
        await stage.client.subscriptions.seek(stage.topic.id, NAME, {0: 0}, force=True)
        query = await opened(stage)
        with pytest.raises(errors.SubscriptionBusy):
            await a.cursors.delete(cursor, WITHIN_S)
        assert len(failures) == 1, "its consumers are sent away"
        assert await listed(stage) == [NAME]
        await query.release()

    play_here(act)
