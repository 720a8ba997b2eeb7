"""Two brokers on the simulated cluster, between which partitions move."""

from spark_ledger.broker import names
from spark_ledger.broker.broker import Broker
from spark_ledger.broker.log.ownership import Ownership
from spark_ledger.broker.produce.producer import NO_SCHEMA
from spark_ledger.broker.wire.commands import AccessMode

PARTITIONS = 12


class Producer:
    """Of one partition; notes that it was sent away, or may send."""

    def __init__(self, name, mode=AccessMode.SHARED, epoch=0, topic_epoch=0, connection=None):
        self.connection = self if connection is None else connection
        self.name, self.mode, self.epoch, self.topic_epoch = name, mode, epoch, topic_epoch
        self.away = self.is_ready = False
        self.declared = NO_SCHEMA

    def send_away(self):
        self.away = True

    def ready(self):
        self.is_ready = True


class Brokers:
    """Of one cluster; those in `dead` do not answer."""

    def __init__(self, stage):
        self.stage, self.dead = stage, set()

    async def new(self, name):
        process = await self.stage.world.client(f"process of {name}")
        made = Broker(process.ledgers, process.rng, f"pulsar://{name}:1")
        made.id = made.cursors.broker_id = name

        async def answers(url):
            return url not in self.dead

        made.ownership = Ownership(process.ledgers.metadata, name, f"pulsar://{name}:1", answers)
        await made.ownership.membership.register()
        return made


def named(number):
    return names.parse(f"t-partition-{number}")
