"""Brokers whose work in the background a test runs."""

from spark_ledger.broker.broker import Broker
from spark_ledger.broker.log.ownership import Ownership


class Brokers:
    """Of one cluster, with their background; those in `dead` do not answer."""

    def __init__(self, stage):
        self.stage, self.dead = stage, set()

    async def new(self, name, url=None):
        async def answers(at):
            return at not in self.dead

        process = await self.stage.world.client(f"process of {name}")
        url = url or f"pulsar://{name}:1"
        made = Broker(process.ledgers, process.rng, url)
        made.id = made.cursors.broker_id = name
        made.ownership = Ownership(process.ledgers.metadata, name, url, answers)
        await made.start()
        return made

    async def owner(self, a):
        return (await a.ownership.owners("t", fresh=True)).of(0).broker
