import asyncio

import pytest

from spark_ledger import errors
from spark_ledger.metadata import paths
from tests.unit.spark_ledger.topic.stage import play


async def heard(follower):
    for _ in range(10_000):
        if follower.is_behind:
            return
        await asyncio.sleep(0.001)
    raise AssertionError("nothing was heard")


def test_a_commit_is_known_soon_after_and_idle_polls_ask_nobody():
    async def act(stage):
        reader = await stage.another()
        follower = await reader.follow(stage.topic.id)
        intent = await stage.intent()
        asked = []
        get = reader.store.get

        async def counted(path, watch=None):
            asked.append(path)
            return await get(path, watch)

        reader.store.get = counted
        assert [follower.state().end_offsets() for _ in range(1000)] == [{0: 0}] * 1000
        assert asked == []

        await stage.commit(intent, 0, await stage.written(intent, [b"a"]))
        await asyncio.sleep(0.2)

        assert follower.state().end_offsets() == {0: 1}
        assert (await reader.follow(stage.topic.id)) is follower
        await reader.close()

    play(act)


def test_a_change_that_was_heard_of_is_behind_until_it_is_folded():
    async def act(stage):
        reader = await stage.another()
        follower = await reader.follow(stage.topic.id)
        intent = await stage.intent()
        states = []
        for version in range(3):  # the last two within the pause between two looks
            await stage.commit(intent, version, await stage.written(intent, [b"a"]))
            for _ in range(100):
                await asyncio.sleep(0.001)
                states.append((follower.is_behind, follower.state().end_offsets()[0]))
        assert (True, 0) in states and (True, 3) not in states
        assert states[-1] == (False, 3)
        await reader.close()

    play(act)


def test_an_idle_topic_is_read_again_every_ten_seconds_under_one_watch():
    async def act(stage):
        reader = await stage.another()
        watches, reads = [], []
        get = reader.store.get

        async def counted(path, watch=None):
            if path == paths.topic_head(stage.topic.id):
                reads.append(path)
                watches.extend([watch] if watch else [])
            return await get(path, watch)

        reader.store.get = counted
        await reader.follow(stage.topic.id)
        await asyncio.sleep(100)

        assert 9 <= len(reads) <= 12
        assert len(watches) == 1
        await reader.close()

    play(act)


def test_a_state_that_could_not_be_confirmed_for_long_is_an_error_until_the_store_is_back():
    async def act(stage):
        reader = await stage.another()
        follower = await reader.follow(stage.topic.id, "t")
        reader.store.suspend(60)
        await asyncio.sleep(5)
        follower.state()

        await asyncio.sleep(50)
        said = rf"topic 't' \(id {stage.topic.id}\) could not be read for 30 s"
        with pytest.raises(errors.Unavailable, match=said):
            follower.state()

        await asyncio.sleep(60)
        assert follower.state().end_offsets() == {0: 0}
        await reader.close()

    play(act)


def test_a_read_that_an_outage_kept_waiting_is_repeated_at_once_for_it_confirms_little():
    async def act(stage):
        reader = await stage.another()
        follower = await reader.follow(stage.topic.id)
        get, back = reader.store.get, asyncio.Event()

        async def waits(path, watch=None):
            await back.wait()
            return await get(path, watch)

        reader.store.get = waits
        await asyncio.sleep(60)
        with pytest.raises(errors.Unavailable):
            follower.state()
        back.set()
        await asyncio.sleep(1)
        follower.state()
        await reader.close()

    play(act)


def test_a_deleted_topic_is_seen_to_be_deleted():
    async def act(stage):
        reader = await stage.another()
        follower = await reader.follow(stage.topic.id)

        await stage.client.topics.delete("t")
        await asyncio.sleep(1)

        assert follower.state().deleted
        await reader.close()

    play(act)


def test_a_topic_that_is_not_there_is_not_followed():
    async def act(stage):
        with pytest.raises(errors.TopicNotFound):
            await stage.client.follow("no-such-id")

    play(act)


def test_what_ends_the_following_is_told_by_every_later_poll():
    async def act(stage):
        reader = await stage.another()
        follower = await reader.follow(stage.topic.id)
        intent = await stage.intent()
        written = await stage.written(intent, [b"a"])
        reader.store.suspend(1.0)  # it sees the commit only once that is damaged
        await stage.commit(intent, 0, written)
        path = paths.topic_log(stage.topic.id, 0)
        stage.world.store.write("", lambda write: write.set(path, b"damaged", 0))
        await asyncio.sleep(5)

        with pytest.raises(errors.UnsupportedFormat, match="not a commit"):
            follower.state()
        await reader.close()

    play(act)


def test_what_was_heard_of_can_be_waited_for_and_not_for_ever():
    async def act(stage):
        reader = await stage.another()
        follower = await reader.follow(stage.topic.id)
        intent = await stage.intent()
        for version in range(3):
            await stage.commit(intent, version, await stage.written(intent, [b"a"]))
            await heard(follower)
            await follower.catch_up(1)
            assert follower.state().end_offsets() == {0: version + 1}
        reader.store.suspend(60)
        await heard(follower)
        await follower.catch_up(1)
        assert follower.is_behind
        await reader.close()

    play(act)


def test_a_commit_that_was_heard_of_is_read_beside_head():
    async def act(stage):
        reader = await stage.another()
        follower = await reader.follow(stage.topic.id)
        intent = await stage.intent()
        await asyncio.sleep(0.2)
        get, begun, most = reader.store.get, [], []

        async def slowly(path, watch=None):
            begun.append(path)
            most.append(len(begun))
            await asyncio.sleep(0.001)
            try:
                return await get(path, watch)
            finally:
                begun.remove(path)

        reader.store.get = slowly
        await stage.commit(intent, 0, await stage.written(intent, [b"a"]))
        await asyncio.sleep(0.2)
        assert follower.state().end_offsets() == {0: 1}
        assert most == [1, 2]
        await reader.close()

    play(act)
