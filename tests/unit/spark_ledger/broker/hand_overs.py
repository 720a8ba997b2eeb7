"""A live segment between its owner and the committers that ask for it."""

import asyncio
from dataclasses import replace

from spark_ledger.metadata import paths
from spark_ledger.topic.commit import hand_over


class Port:
    """Where an owner is asked, as a broker's."""

    def __init__(self, owner):
        self.owner = owner

    def live_writer(self, topic_id, partition):
        mine = (topic_id, partition) == (self.owner.stage.topic.id, 0)
        return self.owner.writer if mine else None


def reached(owner):
    """The owner answers who asks it."""
    owner.stage.owners.brokers[owner.ownership.url] = Port(owner)
    return owner


async def dies(owner):
    task = owner.writer._task
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def by_spark(stage, version=1, value=b"of spark", **options):
    intent = await stage.intent()
    return await stage.commit(intent, version, await stage.written(intent, [value]), **options)


def before_the_commit(stage, act):
    """Let `act` happen when the next commit's multi is about to be sent."""
    multi = stage.client.store.multi

    async def interrupted(operations):
        if any(one.path == paths.topic_head(stage.topic.id) for one in operations):
            stage.client.store.multi = multi
            await act()
        return await multi(operations)

    stage.client.store.multi = interrupted


def now_s():
    return asyncio.get_running_loop().time()


async def another_process(stage):
    return replace(stage, client=await stage.another())


async def values(stage):
    return [value for _, value in await stage.rows()]


async def live_segment(owner):
    return (await owner.commits.state()).partitions[0].live


async def request_for(owner):
    held = await live_segment(owner)
    asked = (owner.stage.topic.id, 0, held.ledger_id, held.opened)
    return hand_over.encode_request([asked], 2.0)
