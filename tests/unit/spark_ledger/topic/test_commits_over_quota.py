"""A commit of Spark to a topic whose subscriptions leave too much unread."""

import asyncio

import pytest

from spark_ledger import errors
from spark_ledger.topic.client import POLICIES_S
from spark_ledger.topic.commit.draft import CommitKind
from spark_ledger.topic.subscription.seek_target import End
from spark_ledger.topic.write import TaskResult
from tests.unit.spark_ledger.topic.stage import play, segment


def result(stage, intent, number, partition=0):
    rows = segment(100 + number, 10, partition=partition)
    return TaskResult(stage.topic.id, intent.id, 0, 0, (rows,))


async def limited(stage, **policies):
    await stage.client.topics.change_policies(stage.topic.name.full, policies)
    await stage.client.subscriptions.create(stage.topic.id, "slow", End.EARLIEST)


@pytest.mark.parametrize("on_backlog", ["hold", "exception"])
def test_a_commit_over_the_quota_is_refused_until_the_slowest_subscription_has_moved(on_backlog):
    async def act(stage):
        await limited(stage, backlog_bytes_max=1500, on_backlog=on_backlog)
        intent = await stage.intent()
        for version in range(2):  # 1,000 bytes each: the first leaves the quota
            await stage.commit(intent, version, result(stage, intent, version))
        refused = rf"of topic {stage.topic.name.short} .*backlog_bytes_max=1500.*'slow'"
        with pytest.raises(errors.BacklogQuotaExceeded, match=refused):
            await stage.commit(intent, 2, result(stage, intent, 2))
        await stage.commit(intent, 2, result(stage, intent, 2, partition=1))
        again = await stage.commit(intent, 1, result(stage, intent, 1))
        assert again.kind is CommitKind.ALREADY

        await stage.client.subscriptions.seek(stage.topic.id, "slow", End.LATEST)
        await stage.commit(intent, 3, result(stage, intent, 3))
        state = await stage.client.log(stage.topic.id).fold(fresh=True)
        assert state.end_offsets() == {0: 30, 1: 10}

    play(act, partitions=2)


def test_a_quota_that_evicts_takes_every_commit():
    async def act(stage):
        await limited(stage, backlog_bytes_max=1, on_backlog="eviction")
        intent = await stage.intent()
        for version in range(3):
            await stage.commit(intent, version, result(stage, intent, version))

    play(act)


def test_a_quota_that_is_set_later_counts_a_minute_later():
    async def act(stage):
        intent = await stage.intent()
        await stage.commit(intent, 0, result(stage, intent, 0))
        await limited(stage, backlog_bytes_max=1)
        await asyncio.sleep(POLICIES_S)
        await stage.client.intents.heartbeat(intent)
        with pytest.raises(errors.BacklogQuotaExceeded):
            await stage.commit(intent, 1, result(stage, intent, 1))

    play(act)
