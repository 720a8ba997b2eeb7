"""The acknowledgements of a topic's partitions at one broker, left while they are taken over."""

import asyncio

import pytest

from spark_ledger import errors
from spark_ledger.topic.acks.partition_acks import PartitionAcks
from spark_ledger.topic.acks.topic_acks import TopicAcks
from tests.unit.spark_ledger.topic.ack_owners import Owner, play_here


@pytest.mark.parametrize("epoch_anew", [1, 2])
def test_acknowledgements_left_while_they_were_taken_over_are_not_used(monkeypatch, epoch_anew):
    async def act(stage):
        taker = await Owner(stage, await stage.another(), 1).take_over()
        topic_acks = TopicAcks(taker.context, lambda _: None)
        plain, taken = PartitionAcks.opened, []

        async def opened(*arguments):
            taken.append(await plain(*arguments))
            return taken[-1]

        monkeypatch.setattr(PartitionAcks, "opened", opened)
        early = asyncio.ensure_future(topic_acks.of(0, 1))
        await asyncio.sleep(0)
        topic_acks.leave(0)
        acks = await topic_acks.of(0, epoch_anew)
        with pytest.raises(errors.LedgerFenced):
            await early
        assert acks.failure is None
        assert len(taken) == 2
        assert [made.failure is None for made in taken] == [made is acks for made in taken]
        assert await topic_acks.of(0, epoch_anew) is acks

    play_here(act)
