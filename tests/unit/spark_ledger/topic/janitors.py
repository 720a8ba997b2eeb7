"""Janitors that clean up on a test's clock."""

import random

from spark_ledger.topic.log.actions import Trim
from spark_ledger.topic.upkeep.janitor import Janitor

DELAY_S = 600


async def delayed(stage):
    """The topic's delete delay is DELAY_S."""
    await stage.client.topics.change_policies("t", {"delete_delay_ms": DELAY_S * 1000})


async def janitor_of(stage, **options):
    client = await stage.another()
    return Janitor(client.store, client.ledgers, random.Random(1), **options)


def ledger_of(result):
    return result.segments[0].ledger_id


async def trimmed(stage):
    state = await stage.client.log(stage.topic.id).fold(fresh=True)
    system = await stage.client.intents.open_system_intent("trim", "t")
    action = Trim(tuple(state.end_offsets().items()))
    await stage.client.commit_actions(stage.topic.id, [action], system, finish_intent=True)
