"""A partition's next ledger while bookies are away."""

import asyncio

import pytest

from tests.unit.spark_ledger.broker.owners import another_of, owner_of
from tests.unit.spark_ledger.topic.stage import play


@pytest.mark.parametrize("left", [1, 2])
def test_the_first_message_and_that_after_an_idle_while_need_an_ack_quorum_of_bookies(left):
    """Of four bookies so many are left: a new ledger's ensemble of three lacks one, or two."""

    async def act(stage):
        owner = await owner_of(stage)
        await owner.all_stored(owner.send([b"a"]))
        await asyncio.sleep(70)
        assert (await owner.commits.state()).partitions[0].live is None
        for node in stage.world.nodes[left:]:
            node.kill()
        await asyncio.sleep(30)  # by then they are not registered any more
        sent = owner.send([b"b"])
        if left == 1:
            await asyncio.sleep(30)
            assert not sent[0].over.is_set()
            return
        async with asyncio.timeout(1):
            assert await owner.all_stored(sent) == [[1]]
        await owner.writer.close()
        successor = await (await another_of(stage)).take()
        async with asyncio.timeout(1):
            assert await successor.all_stored(successor.send([b"c"])) == [[2]]
        await successor.writer.close()

    play(act)
