"""An opening of which a broker does not know the outcome: others may have ended and deleted the
ledger meanwhile, so the next opening names another (hazard 94)."""

import asyncio
from dataclasses import replace

import pytest

from spark_ledger import errors
from spark_ledger.metadata import paths
from spark_ledger.topic.log.actions import OpenLive
from spark_ledger.topic.log.policies import TopicPolicies
from tests.unit.spark_ledger.broker.hand_overs import another_process
from tests.unit.spark_ledger.broker.owners import Owner
from tests.unit.spark_ledger.topic.janitors import janitor_of
from tests.unit.spark_ledger.topic.stage import play


@pytest.mark.parametrize("ended", [False, True])
def test_a_ledger_is_not_opened_again_after_an_opening_of_unknown_outcome(ended):
    """`ended`: a batch seals the ledger, which has no row, and a janitor deletes it."""

    async def act(stage):
        policies = TopicPolicies(delete_delay_ms=0)
        stage = replace(stage, topic=await stage.client.topics.create("u", policies=policies))
        owner = await Owner(stage, stage.client, "a").take()
        commit, opened, deleted = stage.client.commit_actions, [], []

        async def lost(topic_id, actions, intent, **options):
            opened.extend(one.ledger_id for one in actions if isinstance(one, OpenLive))
            await commit(topic_id, actions, intent, **options)
            stage.client.commit_actions = commit
            if ended:
                batches = await another_process(stage)
                query = await batches.intent()
                await batches.commit(query, 1, await batches.written(query, [b"of spark"]))
                deleted.extend((await (await janitor_of(stage)).clean()).deleted)
            raise errors.CommitOutcomeUnknown("the store was away for a minute")

        stage.client.commit_actions = lost
        async with asyncio.timeout(600):
            offsets = await owner.all_stored(owner.send([b"a"]))

        assert deleted == (opened if ended else [])
        assert offsets == [[int(ended)]]
        assert owner.writer.open_end.live.ledger_id not in opened
        assert (
            stage.world.store.peek(paths.ledger(owner.writer.open_end.live.ledger_id)) is not None
        )
        await owner.writer.close()
        await owner.commits.close()
        assert [value for _, value in await stage.rows()] == [b"of spark"] * ended + [b"a"]

    play(act)
