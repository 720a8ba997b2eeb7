"""Deeds of a broker: it takes over from one that died, serves, and stops, and meets its fate at
each of its calls, while producers and a consumer use its topic; then another one serves them."""

import asyncio

from spark_ledger.broker.produce import live_writer
from spark_ledger.broker.settings import BrokerSettings
from spark_ledger.broker.wire.commands import SubscriptionType
from tests.simulation.brokers.consumer import ConsumerModel
from tests.simulation.brokers.process import ENTRY_BYTES_MAX, BrokerProcess
from tests.simulation.brokers.producer import ProducerModel
from tests.simulation.brokers.work import BrokerWork
from tests.simulation.points.enumerate import Deed
from tests.simulation.points.fates import ALONE, Fate
from tests.simulation.points.stage import Stage
from tests.simulation.world import Client

BATCHES = 14
SERVES_S, BEFORE_S = 2.5, 1.0
SETTINGS = BrokerSettings(roll_entries=4)


class BrokerStage(Stage):
    """One topic with deduplication, of one partition; nobody dies but the victim."""

    deduplicates = True
    settings = SETTINGS

    def __init__(self) -> None:
        super().__init__()
        work = self.brokers = BrokerWork(self.work)
        work.partitions, work.brokers.blind, work.brokers.apart = 1, 0.0, 0.0
        work.chased = work.drivers_die = work.seeks = 0.0
        work.truth.deduplicates = self.deduplicates
        self.users: list[asyncio.Task[None]] = []
        self.served: BrokerProcess | None = None

    async def serves(self, client: Client, seconds: float) -> BrokerProcess:
        """A broker begins, and serves for a while."""
        broker = self.brokers.made(client, self.settings)
        await broker.start()
        await asyncio.sleep(seconds)
        return broker

    def begins(self) -> None:
        work = self.brokers
        producers = [ProducerModel(work, name, 0) for name in ("ann", "bob")]
        for one in producers:
            one.left, one.rest_s, one.silent_s, one.dies = BATCHES, 0.1, 3.0, 0.0
        consumer = ConsumerModel(work, "c", 0, "failing-over", SubscriptionType.FAILOVER)
        self.users = work.begin_with(producers, [consumer])

    async def judge(self) -> None:
        await super().judge()
        self.brokers.audit()


class WithoutDeduplication(BrokerStage):
    deduplicates = False


async def a_topic_whose_broker_died(stage: Stage) -> None:
    """Its ledger is open, batches have no receipts, and messages are not acknowledged."""
    assert isinstance(stage, BrokerStage)
    await stage.brokers.make_topic()
    stage.begins()
    client = await stage.world.client("broker")
    broker = await client.run(stage.serves(client, BEFORE_S), "serves")
    broker.kill()


async def takes_over_and_serves(stage: Stage, client: Client) -> None:
    assert isinstance(stage, BrokerStage)
    broker = await stage.serves(client, SERVES_S)
    await broker.stop()


async def another_serves(stage: Stage) -> None:
    """A batch of Spark comes, too; all come to the end, and it stops."""
    assert isinstance(stage, BrokerStage)
    client = await stage.world.client("broker")
    broker = await client.run(stage.serves(client, 0.5), "serves")
    await stage.patiently("driver", stage.brokers.spark_batch)
    stage.brokers.over = True
    stage.world.observers.well_since = stage.world.loop.now
    await stage.brokers.come_to_the_end(stage.users)
    await client.run(broker.stop(), "stops")


FATES = (*ALONE, Fate.BESIDE)
SMALL = {(live_writer, "ENTRY_BYTES_MAX"): ENTRY_BYTES_MAX}
DEEDS = (
    Deed(
        *("broker", a_topic_whose_broker_died, takes_over_and_serves, another_serves),
        fates=FATES,
        small=SMALL,
        stage=BrokerStage,
    ),
    Deed(
        *("broker without deduplication", a_topic_whose_broker_died, takes_over_and_serves),
        *(another_serves,),
        fates=FATES,
        small=SMALL,
        stage=WithoutDeduplication,
    ),
)
