"""Deeds of a broker that shares a topic with another one, which takes a partition from it while
consumers of a subscription seek; and of a janitor that takes a broker for gone which lives.

Always true: each of the two brokers has a partition in which the subscription is used, so what
either knows of it is not cleared away when the other takes a partition.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from spark_ledger.broker import watch
from spark_ledger.broker.log import keeping
from spark_ledger.broker.produce import live_writer
from spark_ledger.broker.settings import BrokerSettings
from spark_ledger.broker.wire.commands import MessageId, SubscriptionType
from spark_ledger.errors import UnsupportedFormat
from spark_ledger.topic.upkeep.janitor import Janitor
from tests.simulation import invariants
from tests.simulation.brokers.consumer import ENDS, ConsumerModel
from tests.simulation.brokers.link import Link, Lost
from tests.simulation.brokers.process import ENTRY_BYTES_MAX, BrokerProcess
from tests.simulation.brokers.producer import ProducerModel
from tests.simulation.points.brokers import BrokerStage
from tests.simulation.points.enumerate import Deed
from tests.simulation.points.fates import ALONE, Fate
from tests.simulation.points.stage import LEASE_S, Stage
from tests.simulation.world import Client

SUBSCRIPTION = "failing-over"
PARTITIONS = 6
SERVES_S, SLICE_S, SOON_S = 3.0, 0.1, 0.1
AWAY_S = 7.0
"""So long a broker stands still: another one takes its partitions, and its session lives on."""
NOTICED_S, COMES_S, SEEKS_S, SETTLES_S = 2.5, 2.5, 2.0, 3.0


class Seeker(ConsumerModel):
    """A consumer of partition 0. It seeks the beginning when its case asks for it, and at no other
    time while it knows its position."""

    def __init__(self, stage: "TakenOver", name: str) -> None:
        super().__init__(stage.brokers, name, 0, SUBSCRIPTION, SubscriptionType.FAILOVER)
        self.stage = stage
        self.seeks, self.stay_s = 0.0, 60.0
        self.is_to_seek = False

    @property
    def _may_seek(self) -> float:
        return float(self.is_to_seek) or super()._may_seek

    def _wanted(self) -> tuple[float, dict[str, Any]]:
        self.is_to_seek = False
        return 0, {"message_id": MessageId(ledgerId=ENDS[0], entryId=ENDS[0])}


class Follower(Seeker):
    """It comes when its case asks for it, acknowledges nothing before the end, and a broker that
    has answered its seek dies."""

    def __init__(self, stage: "TakenOver") -> None:
        super().__init__(stage, stage.followed_by)
        self.comes = asyncio.Event()

    async def run(self) -> None:
        await self.comes.wait()
        await super().run()

    async def _seek(self, link: Link) -> None:
        told = self.is_to_seek
        await super()._seek(link)
        if told:
            self.stage.dies(link.server)

    def _acknowledge(self, link: Link) -> None:
        if self.work.over:
            super()._acknowledge(link)


class TakenOver(BrokerStage):
    """Partition 0 is the victim's, and some others are not."""

    followed_by = "z"
    """Of two consumers in a place that of the lower name is active: here the one that was sent away
    by a seek."""

    def __init__(self) -> None:
        super().__init__()
        work = self.brokers
        work.partitions, work.brokers.avoids_paused = PARTITIONS, True
        self.follower, self.seeker = Follower(self), Seeker(self, "c0")
        self.sought = asyncio.Event()

    async def begins_at(self, broker: BrokerProcess) -> None:
        """This broker has partition 0 and the others that fall on it; then all clients of the topic
        come."""
        work = self.brokers
        link = Link(self.world.loop, broker, self.follower.process)
        try:
            await link.ask("lookup", topic=work.partition_name(0), authoritative=True)
        except Lost:
            return
        finally:
            link.close()
        producer = ProducerModel(work, "ann", 0)
        producer.left, producer.rest_s, producer.silent_s, producer.dies = 60, 0.1, 3.0, 0.0
        some = [
            ConsumerModel(work, f"c{n}", n, SUBSCRIPTION, SubscriptionType.FAILOVER)
            for n in range(1, PARTITIONS)
        ]
        for one in some:
            one.seeks, one.stay_s = 0.0, 60.0
        self.users = work.begin_with([producer], [self.seeker, *some, self.follower])

    async def follower_comes(self) -> None:
        """While the victim stands still, to the one that takes over from it once it has noticed."""
        await asyncio.sleep(NOTICED_S)
        self.follower.comes.set()
        await self._until(lambda: self.follower.at > 0, COMES_S)

    async def seeker_seeks(self) -> None:
        """Where it has been all the while: at the victim."""
        self.seeker.is_to_seek = True
        await asyncio.sleep(SEEKS_S)
        self.seeker.is_to_seek = False

    async def follower_seeks(self) -> None:
        """And the broker that has answered dies at once."""
        self.follower.is_to_seek = True
        await self._until(self.sought.is_set, SEEKS_S)
        self.follower.is_to_seek = False

    def dies(self, broker: BrokerProcess) -> None:
        self.sought.set()
        broker.kill()

    async def _until(self, there: Any, patience_s: float) -> None:
        until_s = self.world.loop.now + patience_s
        while not there() and self.world.loop.now < until_s:  # noqa: ASYNC110
            await asyncio.sleep(SOON_S)

    async def finale(self) -> None:
        """The victim goes on beside the other; then they die, after one more seek."""
        await asyncio.sleep(SETTLES_S)
        await self.follower_seeks()
        self._all_die()

    async def judge(self) -> None:
        await self.finale()
        self.brokers.over = True
        self.world.observers.well_since = self.world.loop.now
        self.follower.comes.set()
        await self.brokers.come_to_the_end(self.users)
        self._all_die()
        await super().judge()

    def _all_die(self) -> None:
        for one in self.brokers.brokers.listening():
            one.kill()


class ComesBack(TakenOver):
    """The broker that took over dies, and the victim has partition 0 once more. The watches of the
    victim miss all changes in between."""

    followed_by = "a"
    victim: Client | None = None

    def misses_its_watches(self) -> None:
        if self.victim is not None:
            self.victim.session.data_watches.clear()

    async def finale(self) -> None:
        await asyncio.sleep(SETTLES_S)


async def another_broker(stage: Stage) -> None:
    assert isinstance(stage, TakenOver)
    await stage.brokers.make_topic()
    client = await stage.world.client("broker")
    await client.run(stage.serves(client, 0.3), "serves")


async def serves_a_part(stage: Stage, client: Client) -> None:
    assert isinstance(stage, TakenOver)
    served = await stage.serves(client, 0.0)
    if isinstance(stage, ComesBack):
        stage.victim = client
    stage.follower.process.spawn(stage.begins_at(served))
    for _ in range(int(SERVES_S / SLICE_S)):  # of its own time: it may stand still
        await asyncio.sleep(SLICE_S)
    await served.stop()


async def the_other_takes_over(stage: Stage) -> None:
    assert isinstance(stage, TakenOver)
    await stage.follower_comes()
    await stage.seeker_seeks()


async def the_other_takes_over_and_dies(stage: Stage) -> None:
    assert isinstance(stage, ComesBack)
    stage.misses_its_watches()
    await stage.follower_comes()
    await stage.follower_seeks()


# -- a janitor -------------------------------------------------------------------------------------


class Condemned(BrokerStage):
    """Two partitions, one of which needs ledgers more often; batches of Spark are handed them."""

    async def begins_here(self) -> None:
        work = self.brokers
        work.partitions = 2
        await work.make_topic()
        client = await self.world.client("broker")
        self.broker = await client.run(self.serves(client, 0.2), "serves")
        producers = [ProducerModel(work, name, n) for n, name in enumerate(("ann", "bob"))]
        for one, rest_s in zip(producers, (0.05, 1.0), strict=True):
            one.left, one.rest_s, one.silent_s, one.dies = 80, rest_s, 3.0, 0.0
        self.users = work.begin_with(producers, [])
        await asyncio.sleep(1.0)
        await self.patiently("driver", work.spark_batch)
        await asyncio.sleep(0.5)

    async def judge(self) -> None:
        work = self.brokers
        work.over = True
        self.world.observers.well_since = self.world.loop.now
        await work.come_to_the_end(self.users)
        await self.broker.client.run(self.broker.stop(), "stops")
        await super().judge()


class OneLedger(Condemned):
    """Where nothing but a commit past it ends a segment."""

    settings = BrokerSettings()


async def a_broker_committed_past(stage: Stage) -> None:
    """It has both partitions, and Spark has committed past the segments before."""
    assert isinstance(stage, Condemned)
    await stage.begins_here()


async def takes_it_for_gone(stage: Stage, client: Client) -> None:
    assert isinstance(stage, Condemned)
    janitor = Janitor(client.session, client.ledgers, client.rng, lease_s=LEASE_S)
    await janitor.clean(condemn=stage.brokers.intents_of_brokers(), force=True)
    await janitor.clean(force=True)


async def commits_past_its_segments(stage: Stage, client: Client) -> None:
    """A late committer plans again: what the owner did meanwhile is no reason to give up."""
    assert isinstance(stage, Condemned)
    try:
        await stage.brokers.spark_batch(client, 1)
    except UnsupportedFormat as error:
        invariants.every_committer_ends(stage.world.ghost, f"driver: {error}", False)


async def the_broker_goes_on(stage: Stage) -> None:
    await asyncio.sleep(SERVES_S)


class SeveralOpen(BrokerStage):
    """A broker's intent ends, and then several of its partitions need ledgers at once, about."""

    async def begins_at(self, served: BrokerProcess) -> None:
        work = self.brokers
        names = [f"p{n}" for n in range(PARTITIONS)]
        producers = [ProducerModel(work, name, n) for n, name in enumerate(names)]
        for one in producers:
            one.left, one.rest_s, one.silent_s, one.dies = 6, 0.1, 3.0, 0.0
        self.users = work.begin_with(producers[:1], [])
        await asyncio.sleep(0.5)
        client = await self.world.client("janitor")
        await client.run(self.cleans(client, work.intents_of_brokers()), "cleans")
        self.users += work.begin_with(producers[1:], [])

    async def cleans(self, client: Client, condemned: Sequence[str] = ()) -> None:
        janitor = Janitor(client.session, client.ledgers, client.rng, lease_s=LEASE_S)
        await janitor.clean(condemn=condemned, force=True)

    async def judge(self) -> None:
        work = self.brokers
        work.over = True
        self.world.observers.well_since = self.world.loop.now
        await work.come_to_the_end(self.users)
        for one in work.brokers.listening():
            one.kill()
        await super().judge()


async def a_topic(stage: Stage) -> None:
    assert isinstance(stage, BrokerStage)
    stage.brokers.partitions = PARTITIONS
    await stage.brokers.make_topic()


async def serves_all_of_it(stage: Stage, client: Client) -> None:
    assert isinstance(stage, SeveralOpen)
    served = await stage.serves(client, 0.0)
    stage.world.loop.process("who begins").spawn(stage.begins_at(served))
    for _ in range(int(SERVES_S / SLICE_S)):
        await asyncio.sleep(SLICE_S)
    await served.stop()


async def a_janitor_cleans(stage: Stage) -> None:
    assert isinstance(stage, SeveralOpen)
    client = await stage.world.client("janitor")
    await client.run(stage.cleans(client), "cleans")


SMALL = {(live_writer, "ENTRY_BYTES_MAX"): ENTRY_BYTES_MAX}
LATE: dict[Any, Any] = {**SMALL, (keeping, "FIRST_LOOK_S"): 600.0, (watch, "TICK_S"): 60.0}
"""A broker does not look by itself whether it has its partitions still: their record has to do.
(It learns by a watch that another broker took it for dead, and ComesBack has it miss that.)"""
DEEDS = (
    Deed(
        *("broker beside its successor", another_broker, serves_a_part, the_other_takes_over),
        fates=(*ALONE, Fate.BESIDE),
        small=SMALL,
        stage=TakenOver,
        away_s=AWAY_S,
    ),
    Deed(
        *("broker that comes back", another_broker, serves_a_part, the_other_takes_over_and_dies),
        small=LATE,
        stage=ComesBack,
        away_s=AWAY_S,
    ),
    Deed(
        *("janitor of a broker", a_broker_committed_past, takes_it_for_gone, the_broker_goes_on),
        fates=(*ALONE, Fate.BESIDE),
        small=SMALL,
        stage=Condemned,
    ),
    Deed(
        *("commit past an owner", a_broker_committed_past, commits_past_its_segments),
        *(the_broker_goes_on,),
        fates=(*ALONE, Fate.BESIDE),
        small=SMALL,
        stage=OneLedger,
    ),
    Deed(
        *("broker whose intent ended", a_topic, serves_all_of_it, a_janitor_cleans),
        fates=(Fate.KILLED, Fate.BESIDE),
        small=SMALL,
        stage=SeveralOpen,
    ),
)
