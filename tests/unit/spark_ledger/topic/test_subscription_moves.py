"""A subscription moved by an operator."""

import pytest

from spark_ledger import errors
from spark_ledger.topic.subscription.seek_target import CommittedSince, End
from spark_ledger.topic.upkeep.subscription_moves import SubscriptionMoves
from tests.unit.spark_ledger.topic.stage import play


async def with_rows(stage, *batches):
    """A commit for each batch, of one row a value; the moves of the topic's subscription `s`, which
    stands at the beginning."""
    for version, values in enumerate(batches):
        intent = await stage.intent(run_id=f"run-{version}")
        await stage.commit(intent, version, await stage.written(intent, values))
    await stage.client.subscriptions.create(stage.topic.id, "s", End.EARLIEST)
    return SubscriptionMoves(stage.client, stage.topic.id)


def test_messages_are_skipped_to_the_end_at_most():
    async def act(stage):
        moves = await with_rows(stage, [b"a", b"b", b"c"])
        assert await moves.skip("s", 2) == {0: 2}
        assert await moves.skip("s", 0) == {0: 2}
        assert await moves.skip("s", 9, 0) == {0: 3}
        assert await moves.reset("s", End.EARLIEST) == {0: 0}
        assert await moves.clear("s") == {0: 3}
        for count, partition in ((1, 1), (-1, 0), (1, -1)):
            with pytest.raises(errors.BadConfig):
                await moves.skip("s", count, partition)

    play(act)


def test_of_several_partitions_the_one_is_named():
    async def act(stage):
        info = await stage.client.topics.create("two", 2)
        await stage.client.subscriptions.create(info.id, "s")
        moves = SubscriptionMoves(stage.client, info.id)
        with pytest.raises(errors.BadConfig, match="of 0 to 1, not of all"):
            await moves.skip("s", 1)
        assert (await moves.skip("s", 1, 1))[1] == 0

    play(act)


def test_what_is_older_expires_and_no_position_goes_back():
    async def act(stage):
        moves = await with_rows(stage, [b"a", b"b"], [b"c"])
        state = await stage.client.log(stage.topic.id).fold(fresh=True)
        assert await moves.expire("s", CommittedSince(0)) == {}
        assert await moves.expire("s", CommittedSince(state.commit_ms)) == {0: 2}
        assert await moves.expire("s", CommittedSince(state.commit_ms + 1)) == {0: 3}
        assert await moves.expire("s", CommittedSince(0)) == {}
        assert await stage.client.subscriptions.positions(stage.topic.id, "s") == {0: 3}

    play(act)


def test_a_query_keeps_its_subscription_and_a_missing_one_is_said():
    async def act(stage):
        moves = await with_rows(stage, [b"a"])
        cursor = await stage.client.subscriptions.open(stage.topic, "s", "query", "run")
        for verb in (
            lambda name: moves.clear(name),
            lambda name: moves.skip(name, 1),
            lambda name: moves.expire(name, CommittedSince(0)),
            lambda name: moves.reset(name, End.EARLIEST),
            lambda name: moves.delete(name),
        ):
            with pytest.raises(errors.SubscriptionBusy, match="query query"):
                await verb("s")
            with pytest.raises(errors.SubscriptionNotFound):
                await verb("gone")
        cursor.check()
        await cursor.release()
        await moves.delete("s")
        assert await stage.client.subscriptions.list(stage.topic.id) == []

    play(act)
