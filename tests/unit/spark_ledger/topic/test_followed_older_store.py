"""A topic that is followed beside a metadata store that goes back in time, also where versions and
numbers are as high again by the time of the look."""

import asyncio

import pytest

from tests.simulation.restoring import copied
from tests.unit.spark_ledger.topic.older_store import accepted_older, committed
from tests.unit.spark_ledger.topic.stage import play


@pytest.mark.parametrize("pause_s", [0.1, 1, 100])
@pytest.mark.parametrize("commits", [1, 2, 3])
def test_a_follower_has_what_an_accepted_older_store_has_and_hears_of_each_commit(pause_s, commits):
    async def act(stage):
        before, after = await stage.another(), None
        follower = await (await stage.another()).follow(stage.topic.id, "t", 60.0)
        await committed(stage, before, "r1", 0, [b"a"])
        copy = copied(stage.world.store)
        for version in (1, 2):
            await committed(stage, before, "r1", version, [b"lost"] * 100)
        await asyncio.sleep(130)
        assert follower.state().partitions[0].end_offset == 201
        heard = asyncio.create_task(follower.wait_for_commit(follower.state().next))

        await accepted_older(stage, copy, pause_s)
        after = await stage.another()
        for version in range(1, commits + 1):
            await committed(stage, after, "r2", version, [b"new"] * 5)
        await asyncio.sleep(130)

        truth = await (await stage.another()).log(stage.topic.id).fold(fresh=True)
        assert follower.state().partitions[0].end_offset == 1 + 5 * commits
        followed = follower.state()
        assert (followed.next, followed.head_version) == (truth.next, truth.head_version)
        assert followed.partitions[0].end_token == truth.partitions[0].end_token
        assert heard.done()  # it went back: consumers are to look again

    play(act)


def test_a_connection_to_the_same_store_reads_one_commit_and_folds_none_anew(caplog):
    async def act(stage):
        client = await stage.another()
        for version in range(3):
            await committed(stage, client, "r1", version, [b"a"])
        log = client.log(stage.topic.id)
        before, gets = await log.fold(fresh=True), []
        plain = client.store.get

        async def get(path, *of):
            if stage.topic.id in path:
                gets.append(path.rpartition("/")[2].lstrip("0"))
            return await plain(path, *of)

        client.store.get = get
        client.store.suspend(1)
        await asyncio.sleep(5)
        assert await log.fold() == before
        assert gets == ["head", "2"]
        assert await log.fold() == before
        assert gets == ["head", "2", "head"]

    play(act)
    assert "older" not in caplog.text
