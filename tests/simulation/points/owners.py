"""Deeds of those of whom there is one at a time, and of whoever takes over from them: owners of a
subscription and of a live segment; who recovers a ledger, and who repairs one in limbo."""

import asyncio

from spark_ledger.errors import LedgerError, SubscriptionNotFound
from spark_ledger.repair.auditor import Auditor
from spark_ledger.repair.worker import Worker
from spark_ledger.topic.subscription import cursor
from tests.simulation.limbo_work import TOKENS
from tests.simulation.points.deeds import cleans, two_batches
from tests.simulation.points.enumerate import Deed
from tests.simulation.points.stage import Stage
from tests.simulation.topic_cursors import NAME
from tests.simulation.topic_ghost import Whereabouts
from tests.simulation.world import Client

IDLE_S = 20.0
SILENT_TOGETHER = 14
"""So many passes a janitor makes until it takes an owner for gone that fell silent with others."""


async def a_subscription_in_use(stage: Stage) -> None:
    """Its owner has a cursor ledger, and lives."""
    await two_batches(stage)
    owner = await stage.world.client("subscriber")
    owner.run(stage.subscribes(owner, 1, 12), "subscribes")
    await asyncio.sleep(9)


async def takes_it_over(stage: Stage, client: Client) -> None:
    await stage.subscribes(client, 2, 12)


async def others_take_it_over(stage: Stage) -> None:
    """Rows are trimmed; one more dies with a cursor ledger, and what is left over is cleaned."""
    await stage.patiently("subscriber", lambda client: stage.subscribes(client, 3, 8))
    await stage.batches([2])
    trim = lambda client: stage.trim(client, 0.4)  # noqa: E731
    await stage.patiently("trimmer", trim, LedgerError)
    await stage.patiently("retainer", stage.retain)
    owner = await stage.world.client("subscriber")
    work = owner.run(stage.subscribes(owner, 4, 60), "subscribes")
    await asyncio.sleep(8)
    owner.kill()
    await asyncio.gather(work, return_exceptions=True)
    await stage.patiently("janitor", lambda client: cleans(stage, client, SILENT_TOGETHER))
    await stage.patiently("subscriber", lambda client: stage.subscribes(client, 5, 4))


async def seeks(stage: Stage, client: Client) -> None:
    await stage.cursors.seek(client)


async def deletes_it(stage: Stage, client: Client) -> None:
    log = stage.log()
    stage.cursors.known.clear()
    log.subscriptions.pop(NAME, None)
    await stage.topics(client).subscriptions.delete(log.topic_id, NAME, force=True)


async def others_delete_it(stage: Stage) -> None:
    async def delete(client: Client) -> None:
        subscriptions = stage.topics(client).subscriptions
        await subscriptions.delete(stage.log().topic_id, NAME, force=True)

    await stage.patiently("deleter", delete, SubscriptionNotFound)
    stage.log().subscriptions.pop(NAME, None)


async def a_subscription_at_the_end(stage: Stage) -> None:
    """Nobody uses it."""
    await two_batches(stage)
    client, log = await stage.world.client("founder"), stage.log()
    await client.run(stage.topics(client).subscriptions.create(log.topic_id, NAME))
    log.subscriptions[NAME] = Whereabouts()
    log.subscriptions[NAME].is_at(stage.world.loop.now, log.state.end_offsets())


async def trims_what_is_read(stage: Stage, client: Client) -> None:
    await stage.trim(client, 0.6)


async def others_seek_it(stage: Stage) -> None:
    client = await stage.world.client("seeker")
    await client.run(stage.cursors.seek(client))


async def retains_what_is_not_read(stage: Stage, client: Client) -> None:
    await stage.retain(client)


async def a_live_segment(stage: Stage) -> None:
    owner = await stage.world.client("owner")
    await owner.run(stage.owns(owner, 5), "owns")
    owner.kill()


async def owns_it(stage: Stage, client: Client) -> None:
    await stage.owns(client, 5)


async def others_own_it(stage: Stage) -> None:
    for _ in range(2):
        await stage.patiently("owner", lambda client: stage.owns(client, 5))


async def an_open_ledger(stage: Stage) -> None:
    """Of a task; its writer lives, and has it in its cache."""
    await stage.batches([0, 1])


async def recovers(stage: Stage, client: Client) -> None:
    for ledger_id, ledger in list(stage.world.ghost.ledgers.items()):
        if not ledger.closed:
            await client.ledgers.recover(ledger_id)


async def others_recover(stage: Stage) -> None:
    await stage.patiently("recoverer", lambda client: recovers(stage, client))
    await stage.batches([2])


async def a_ledger_in_limbo(stage: Stage) -> None:
    """A bookie lost its only ledger directory, with a closed and an open ledger."""
    await stage.batches([0, 1])
    client = await stage.world.client("recoverer")
    await recovers(stage, client)
    await stage.batches([2])
    node = stage.world.nodes[0]
    node.kill("all")
    node.lose_directory()
    await node.start()


async def repairs(stage: Stage, client: Client) -> None:
    auditor, worker = Auditor(client.ledgers, TOKENS), Worker(client.ledgers, TOKENS)
    for _ in range(4):
        await auditor.look()
        await worker.round()
        await asyncio.sleep(IDLE_S)


async def others_repair(stage: Stage) -> None:
    await stage.batches([3])
    await stage.patiently("repairer", _repairs_once)


async def _repairs_once(client: Client) -> None:
    await Auditor(client.ledgers, TOKENS).look()
    await Worker(client.ledgers, TOKENS).round()


OFTEN_A_FLOOR = {(cursor, "FLOOR_EVERY_S"): 2.0}
"""A cursor writes its position into the record, too, while the ledger goes on."""
DEEDS = (
    Deed("take-over of a cursor", a_subscription_in_use, takes_it_over, others_take_it_over),
    Deed(
        *("take-over of a cursor with a floor", a_subscription_in_use, takes_it_over),
        *(others_take_it_over, OFTEN_A_FLOOR),
    ),
    Deed("seek", a_subscription_in_use, seeks, others_take_it_over),
    Deed("deletion of a cursor", a_subscription_in_use, deletes_it, others_delete_it),
    Deed("trim of rows read", a_subscription_at_the_end, trims_what_is_read, others_seek_it),
    Deed(
        *("retention of rows read", a_subscription_at_the_end, retains_what_is_not_read),
        *(others_seek_it,),
        policies={"retention_ms": 1},
    ),
    Deed("live segment", a_live_segment, owns_it, others_own_it),
    Deed("recovery", an_open_ledger, recovers, others_recover),
    Deed("repair of limbo", a_ledger_in_limbo, repairs, others_repair),
)
