"""Brokers in a run: several of them serve one topic to producers, consumers and readers, while
Spark commits to the same partitions, and brokers die, stand still, are stopped and come.

Always true: each answer that a client gets is judged at that moment (invariants B1 to B25); when
all is well again each batch gets its receipt and each consumer gets to the end; then the last
broker stops in good order, or is killed.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from spark_ledger.broker.settings import BrokerSettings
from spark_ledger.broker.wire.commands import AccessMode, SubscriptionType
from spark_ledger.errors import LedgerError
from spark_ledger.metadata import paths
from spark_ledger.metadata.ledger_record import RecordState
from spark_ledger.metadata.store import StoreError
from spark_ledger.topic.commit.commit import TxnKey
from spark_ledger.topic.log.policies import TopicPolicies
from spark_ledger.topic.log.topics import TopicInfo
from spark_ledger.topic.upkeep.janitor import Janitor
from tests.simulation import invariants
from tests.simulation.brokers.acked import Acked
from tests.simulation.brokers.batch_reads import BatchReads
from tests.simulation.brokers.consumer import LEAVING, ConsumerModel
from tests.simulation.brokers.living import Living
from tests.simulation.brokers.moves import MovesFromOutside
from tests.simulation.brokers.places import Places, adopting
from tests.simulation.brokers.process import BrokerProcess, Brokers, small_entries
from tests.simulation.brokers.producer import ProducerModel
from tests.simulation.brokers.sharing import consumers_that_share, limits_of_sharing
from tests.simulation.brokers.truth import Truth
from tests.simulation.ghost import LedgerGhost
from tests.simulation.invariants import Violation
from tests.simulation.loop import Process, current_process
from tests.simulation.store import Commit
from tests.simulation.topic_ghost import BROKERED, LogGhost
from tests.simulation.topic_upkeep import LEASE_S
from tests.simulation.topic_work import TopicWork
from tests.simulation.undecided import Undecided
from tests.simulation.world import Client

SPARK = "spark beside brokers"
TOPIC = f"persistent://public/default/{BROKERED}"
DECIDED_S = 20.0
"""Simulated: no other process has closed a ledger for so long."""
END_S = 150.0
"""Simulated: within this time after healing all clients of brokers come to the end."""
FORGOTTEN_S = 20.0
AGAIN_S = 0.5
STOP_S = 20.0
LIVING_SHARE = 0.1
"""Of the runs: brokers come to rest alive."""
SHARED = (AccessMode.SHARED,)
ONLY_ONE = (
    AccessMode.EXCLUSIVE_WITH_FENCING,
    AccessMode.EXCLUSIVE_WITH_FENCING,
    AccessMode.WAIT_FOR_EXCLUSIVE,
    AccessMode.EXCLUSIVE,
)
"""What producers of a partition want: all of them the one, or each one of the others."""


class BrokerWork:
    """Of one run."""

    def __init__(self, work: TopicWork) -> None:
        self.work = work
        self.world = work.world
        self.rng = rng = self.world.loop.random_for("brokers")
        self.partitions = rng.choice((1, 1, 2, 2))
        self.blind = rng.choice((0.0, 0.0, 0.2, 0.6))
        apart = self.world.loop.random_for("a network in parts").choice((0.0, 0.0, 0.0, 1.0))
        self.brokers = Brokers(self.blind, self.world.loop.random_for("probes"), apart)
        work.ask = self._ask
        self.truth = Truth(self.world.ghost, deduplicates=rng.random() < 0.5)
        self.acked: dict[tuple[str, int], Acked] = {}
        self.seeks = rng.choice((0.0, 0.0, 0.02, 0.1))
        self.inflight = rng.choice((1, 2, 8))
        self.at_once = rng.choice((1, 2, 2, 3))
        self.harm_s = rng.choice((0.7, 2.0, 5.0))
        self.spark_s = rng.choice((None, 0.5, 2.0))
        self.drivers_die = rng.choice((0.0, 0.1, 0.5))
        """The share of the requests for a live ledger after which the committer is killed."""
        self.chased = rng.choice((0.0, 0.0, 0.7))
        """The share of the take-overs after which the new owner is harmed soon, and of the pauses
        of a broker at whose end the others are killed."""
        self.condemned_s = rng.choice((None, None, None, 1.5))
        """How often a janitor takes brokers that live for gone."""
        self.lives_on = self.world.loop.random_for("living brokers").random() < LIVING_SHARE
        self.chunks = "chunks" in work.plan.also
        """Producers send some messages in chunks."""
        self.truth.chunks.any_sent = self.chunks
        self.shares = "sharing" in work.plan.also
        """Consumers share a subscription."""
        self.shares_by_key = "keys" in work.plan.also
        """Consumers share a subscription by keys."""
        sharing = self.world.loop.random_for("what consumers that share do")
        self.asks_again = sharing.choice((0.0, 0.2))
        """How often such a consumer asks for messages again, and, when it leaves, deletes the
        subscription (of one partition: a client of several asks for each of them)."""
        self.deletes = sharing.choice((0.0, 0.1)) if self.partitions == 1 else 0.0
        self.delays = (self.shares or self.shares_by_key) and sharing.random() < 0.5
        """Some messages are delayed for consumers that share."""
        self.due_ms: dict[bytes, int] = {}
        """Of delayed messages, by the store's clock."""
        self.keys: dict[bytes, str | None] = {}
        """Of messages, where consumers share a subscription by keys."""
        self.asked_again: dict[tuple[str, int], Counter[int]] = {}
        """By subscription and partition how often a message was asked for again; -1: all
        messages."""
        self.away: dict[str, None] = {}
        """Subscriptions from which consumers keep away, as a query is to have them."""
        self.places: Places
        self.batches = BatchReads(self)
        self.over = False
        """The chaos is: nothing new is sent."""
        self._end = self.world.loop.now + work.plan.chaos_s
        self._all: list[BrokerProcess] = []
        self._drivers: dict[Process, Client] = {}
        self._reading: asyncio.Task[None] | None = None
        self._producers: list[ProducerModel] = []
        self._consumers: list[ConsumerModel] = []

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Production code with limits that fit, and judged where it finds subscriptions."""
        with small_entries(self.inflight), adopting(lambda: self.places):
            yield

    @property
    def log(self) -> LogGhost:
        assert self.truth.log is not None
        return self.truth.log

    @property
    def produced(self) -> bool:
        """Nothing more is stored."""
        return all(one.done for one in self._producers)

    def partition_name(self, partition: int) -> str:
        return f"{TOPIC}-partition-{partition}"

    def judged(self, judge: Callable[..., None], *args: Any) -> None:
        """A Violation is kept: the caller is a callback of a connection."""
        try:
            judge(*args)
        except Violation as violation:
            self.world.observers.violated(violation)
        except Exception as error:
            defect = Violation("no defect", f"{judge.__name__} raised {error!r}")
            self.world.observers.violated(defect)

    def rows_are(self, partition: int, offset: int, values: list[bytes]) -> None:
        """Note that a client learned that these rows begin at the offset."""
        for at, value in enumerate(values, offset):
            place = (self.log.topic_id, partition, at)
            known = self.work.ghost.offsets
            invariants.an_offset_is_one_row_for_ever(self.world.ghost, known, place, value)

    # -- one after the other ----------------------------------------

    async def supervise(self) -> None:
        info = await self.make_topic()
        harm = asyncio.create_task(self._harm(), name="harm to brokers")
        users = self._begin()
        spark = asyncio.create_task(self._spark(info), name="Spark beside brokers")
        moves = MovesFromOutside(self, self._end).go_on() if self.asked_again else asyncio.sleep(0)
        moving = asyncio.create_task(moves, name="moves from outside")
        janitor = asyncio.create_task(self._condemn(), name="a janitor of brokers")
        await asyncio.sleep(max(0.0, self._end - self.world.loop.now))
        self.over = True
        await asyncio.gather(harm, spark, janitor, moving)
        while self.world.observers.well_since is None:  # noqa: ASYNC110
            await asyncio.sleep(AGAIN_S)
        await self.come_to_the_end(users)

    async def ends(self) -> None:
        """Everything is well, and the clients of brokers have come to the end: the brokers stop, in
        some runs after they lived on for hours."""
        if self.lives_on:
            await Living(self).comes_to_rest()
        await self._stop_all()

    async def make_topic(self) -> TopicInfo:
        info = await self._made()
        self.truth.log = self.work.ghost.logs[info.id]
        self.work.ghost.truth = self.truth
        self.places = Places(self.world.ghost, info.id, self.judged)
        self.world.store.listeners += [self.places.written, self._written]
        return info

    async def _made(self) -> TopicInfo:
        policies = TopicPolicies(
            *self.work.plan.quorum,
            deduplication=self.truth.deduplicates,
            partitioned=True,
        )
        while True:
            client = await self.world.client("admin")
            topics = self.work.client(client).topics
            making = client.run(topics.create(BROKERED, self.partitions, policies, exist_ok=True))
            (outcome,) = await asyncio.gather(making, return_exceptions=True)
            if isinstance(outcome, TopicInfo):
                return outcome
            if not isinstance(outcome, LedgerError | StoreError | asyncio.CancelledError):
                raise outcome
            await asyncio.sleep(1)

    def _begin(self) -> "list[asyncio.Task[None]]":
        rng = self.rng
        producers: list[ProducerModel] = []
        consumers: list[ConsumerModel] = []
        for partition in range(self.partitions):
            modes = rng.choice((SHARED, SHARED, SHARED, ONLY_ONE))
            for name in ("ann", "bob", "cy")[: rng.choice((1, 2, 2, 3))]:
                producers.append(ProducerModel(self, name, partition, rng.choice(modes)))
            kinds = [("failing-over", SubscriptionType.FAILOVER)] * rng.choice((0, 1, 2))
            kinds += [("alone", SubscriptionType.EXCLUSIVE)] * rng.choice((0, 1))
            kinds += [("", SubscriptionType.EXCLUSIVE)] * rng.choice((0, 1, 1))
            leaving = f"{LEAVING}-{partition}"
            kinds += [(leaving, SubscriptionType.EXCLUSIVE)] * rng.choice((0, 0, 1))
            for number, (subscription, kind) in enumerate(kinds):
                name = f"{number} of {subscription}"
                consumers.append(ConsumerModel(self, name, partition, subscription, kind))
        consumers += consumers_that_share(self) if self.shares else []
        consumers += consumers_that_share(self, by_key=True) if self.shares_by_key else []
        return self.begin_with(producers, consumers)

    def begin_with(
        self, producers: list[ProducerModel], consumers: list[ConsumerModel]
    ) -> "list[asyncio.Task[None]]":
        """These come, beside those that came before; batches are read from the first call on."""
        self._producers, self._consumers = self._producers + producers, self._consumers + consumers
        if self._reading is None:
            self._reading = asyncio.create_task(self.batches.go_on(), name="batch reads")
        return [one.process.spawn(one.run()) for one in (*producers, *consumers)]

    async def come_to_the_end(self, users: "list[asyncio.Task[None]]") -> None:
        keeping = asyncio.create_task(self._keep_one_going(), name="a broker more")
        deciding = asyncio.create_task(self._decide(), name="operator of undecided ledgers")
        try:
            async with asyncio.timeout(END_S):
                await asyncio.gather(*users)
        except TimeoutError:
            some = (*self._producers, *self._consumers)
            waiting = [one.told() for one in some if not one.done] or ["all are done, and go on"]
            invariants.all_who_use_brokers_come_to_the_end(self.world.ghost, waiting)
        finally:
            keeping.cancel()
            deciding.cancel()
            (_, outcome) = await asyncio.gather(keeping, deciding, return_exceptions=True)
            if isinstance(outcome, Exception):
                raise outcome
            await self._end_batch_reads()
        invariants.all_who_use_brokers_come_to_the_end(self.world.ghost, [])
        await self._nothing_waits()

    async def _end_batch_reads(self) -> None:
        if self._reading is None:
            return  # the one that was to serve died before the first user came
        self._reading.cancel()
        (outcome,) = await asyncio.gather(self._reading, return_exceptions=True)
        if isinstance(outcome, Exception):
            raise outcome

    async def _nothing_waits(self) -> None:
        """What waited in the memory of a broker is forgotten once it is decided, also of one that
        another took over from."""
        left: dict[str, int] = {}
        for _ in range(int(FORGOTTEN_S)):
            living = [one for one in self.living() if one.listening and not one.process.paused]
            left = {one.name: one.broker.waiting_bytes for one in living}
            if not any(left.values()):
                break
            await asyncio.sleep(1.0)
        invariants.what_is_decided_waits_no_more(self.world.ghost, left)

    # -- brokers ----------------------------------------

    async def _start_one(self) -> None:
        client = await self.world.client("broker")
        rng = client.rng
        entries, age_s = rng.choice((2, 5, 20, 1000)), rng.choice((1.0, 5.0, 60.0, 3600.0))
        settings = BrokerSettings(
            tail_bytes=rng.choice((1, 2_000, 1 << 20)),
            roll_entries=entries,
            roll_age_s=age_s,
            roll_entries_read=1 + entries // 4,
            **(limits_of_sharing(self, client.name) if self.shares or self.shares_by_key else {}),
        )
        broker = self.made(client, settings)
        (outcome,) = await asyncio.gather(
            client.run(broker.start(), "starts"), return_exceptions=True
        )
        if isinstance(outcome, LedgerError | StoreError):
            broker.kill()
        elif isinstance(outcome, Exception):
            raise outcome
        self.world.ghost.meet("broker started")

    def made(self, client: Client, settings: BrokerSettings) -> BrokerProcess:
        """A broker in the client's process, which is to be started."""
        broker = BrokerProcess(self.brokers, client, self.work.client(client), settings)
        self._all.append(broker)
        return broker

    def living(self) -> list[BrokerProcess]:
        return [one for one in self._all if one.process.alive and not one.stopping]

    async def _harm(self) -> None:
        """Start brokers; kill, stop, pause them, and cut their connections, as it comes."""
        while self.world.loop.now < self._end:
            while len(self.living()) < self.at_once:
                await self._start_one()
            await asyncio.sleep(self.rng.expovariate(1 / self.harm_s))
            living = self.living()
            if living:
                self._harm_one(self.rng.choice(living))

    def _harm_one(self, broker: BrokerProcess) -> None:
        ways = (self._kill, self._kill, self._pause, self._pause, self._stop, self._cut, self._cut)
        if broker in self.living() and self.world.loop.now < self._end:
            self.rng.choice(ways)(broker)

    def has_sought(self, broker: BrokerProcess) -> None:
        """It has answered a seek, and may be gone at once."""
        loop = self.world.loop
        rng = loop.random_for(f"harm to {broker.name} after a seek {loop.now}")
        if rng.random() < self.chased and loop.now < self._end:
            loop.call_later(0.5 * rng.random(), self._gone, broker, context=loop.outside)

    def _gone(self, broker: BrokerProcess) -> None:
        if broker in self.living():
            self.world.ghost.meet("broker killed once it had sought")
            self._kill(broker)

    def _written(self, written: Commit) -> None:
        """The store has applied it: something may happen at once to an owner that took
        partitions."""
        path, loop = paths.brokers_of_topic(self.log.topic_id), self.world.loop
        if not any(change.path == path for change in written.changes):
            return
        for broker in self.living():
            if broker.name == written.session and self.rng.random() < self.chased:
                self.world.ghost.meet("new owner harmed")
                after_s = self.rng.choice((0.1, 1.0, 3.0)) * self.rng.random()
                loop.call_later(after_s, self._harm_one, broker, context=loop.outside)

    def _kill(self, broker: BrokerProcess) -> None:
        self.world.ghost.meet("broker killed")
        broker.kill()

    def _pause(self, broker: BrokerProcess) -> None:
        """A zombie, if another takes over meanwhile."""
        seconds = self.rng.choice((0.3, 4.0, 12.0, 40.0))
        self.world.trace.note(broker.name, f"stands still for {seconds} s")
        self.world.ghost.meet("broker stood still")
        broker.process.pause()
        self._resume_later(broker, seconds)

    def _resume_later(self, broker: BrokerProcess, seconds: float) -> None:
        loop = self.world.loop
        loop.call_later(seconds, self._goes_on, broker, context=loop.outside)

    def _goes_on(self, broker: BrokerProcess) -> None:
        broker.process.resume()
        if self.world.loop.now < self._end and self.rng.random() < self.chased:
            self.world.ghost.meet("others killed when a broker went on")
            for other in self.living():
                if other is not broker:
                    self._kill(other)

    def _stop(self, broker: BrokerProcess) -> None:
        self.world.ghost.meet("broker stopped")
        self.world.trace.note(broker.name, "stops")
        broker.stopping = True
        broker.client.run(self._stopped(broker), "stops")

    async def _stopped(self, broker: BrokerProcess) -> None:
        try:
            async with asyncio.timeout(STOP_S):
                await broker.stop()
        except (TimeoutError, LedgerError, StoreError) as error:
            self.world.trace.note(broker.name, f"does not stop: {error!r}")
        finally:
            loop = self.world.loop
            loop.call_later(0.0, broker.kill, context=loop.outside)

    def _cut(self, broker: BrokerProcess) -> None:
        wires = [wire for wire in broker.wires if not wire.broken]
        for wire in wires:
            if self.rng.random() < 0.5:
                self.world.ghost.meet("connection to a broker cut")
                wire.reset()

    async def _condemn(self) -> None:
        """Intents of brokers that live are ended, and what they made under them and do not use is
        deleted; they go on under others."""
        while self.condemned_s is not None and self.world.loop.now < self._end:
            client = await self.world.client("janitor of brokers")
            doing = client.run(self._condemns(client, self.condemned_s), "condemns")
            (outcome,) = await asyncio.gather(doing, return_exceptions=True)
            if isinstance(outcome, Exception):
                raise outcome

    async def _condemns(self, client: Client, every_s: float) -> None:
        janitor = Janitor(client.session, client.ledgers, client.rng, lease_s=LEASE_S)
        while self.world.loop.now < self._end:
            await asyncio.sleep(client.rng.uniform(0.0, 2 * every_s))
            known = self.intents_of_brokers()
            some = [client.rng.choice(known)] if known and client.rng.random() < 0.5 else []
            try:
                await janitor.clean(condemn=some, force=True)
            except LedgerError as error:
                self.work.met(client, "clean", error)
            else:
                self.world.ghost.meet("janitor pass beside brokers")

    def intents_of_brokers(self) -> list[str]:
        store, found = self.world.store, []
        for one in store.peek_children(paths.INTENTS):
            node = store.peek(paths.intent(one))
            if node is not None and b'"broker-' in node.value:
                found.append(one)
        return found

    async def _keep_one_going(self) -> None:
        while True:
            if not self.brokers.listening():
                await self._start_one()
            await asyncio.sleep(AGAIN_S)

    async def _decide(self) -> None:
        """Where no process can decide the end of a ledger its partition, or its subscription, waits
        for an operator, who declares the lost bookies gone. Then all come to the end."""
        undecided = Undecided(self.world)
        before: list[LedgerGhost] = []
        while True:
            await asyncio.sleep(DECIDED_S)
            ledgers = [made for made in self.world.ghost.ledgers.values() if not made.deleted]
            stuck = [made for made in ledgers if made.record.state is RecordState.IN_RECOVERY]
            for ledger in stuck:
                if ledger in before and undecided.is_undecidable(ledger):
                    client = await self.world.client("operator of undecided ledgers")
                    self.world.trace.note(
                        client.name, f"declares the lost of {ledger.ledger_id} gone"
                    )
                    await client.run(undecided.recover_without_the_lost(client, ledger), "recovers")
            before = stuck

    async def _stop_all(self) -> None:
        """Some in good order; what they leave open the janitor closes."""
        for broker in self.living():
            if self.rng.random() < 0.6:
                self._stop(broker)
            else:
                broker.kill()
        for _ in range(int(STOP_S + 2)):
            if not any(one.process.alive for one in self._all):
                return
            await asyncio.sleep(1.0)
        for broker in self._all:
            if broker.process.alive:
                broker.kill()

    # -- Spark ----------------------------------------

    async def _spark(self, info: TopicInfo) -> None:
        """A query commits batches to the same partitions, again until each is there."""
        version, last = 0, False
        while self.spark_s is not None and not last:
            last = self.world.loop.now >= self._end  # one more when brokers are left alone
            driver = await self.world.client("driver")
            executor = await self.world.client("executor")
            self._drivers = {driver.process: driver}
            doing = driver.run(self._batch(driver, executor, info, version), "commits")
            (outcome,) = await asyncio.gather(doing, return_exceptions=True)
            if outcome is None:
                version += 1
                self.world.ghost.meet("Spark committed beside brokers")
            elif isinstance(outcome, LedgerError | StoreError):
                self.work.met(driver, "commit beside brokers", outcome)
            elif isinstance(outcome, Exception):
                raise outcome
            await asyncio.sleep(self.rng.uniform(0, 2 * self.spark_s))

    async def _ask(self, url: str, request: bytes) -> tuple[bytes, Callable[[], None]]:
        """As Brokers.ask; a driver may be gone before the commit for which it asked."""
        process = current_process()
        try:
            return await self.brokers.ask(url, request)
        finally:
            driver, loop = self._drivers.get(process) if process else None, self.world.loop
            if driver is not None and self.rng.random() < self.drivers_die:
                self.world.ghost.meet("driver killed after it asked for a live ledger")
                after_s = self.rng.choice((0.02, 0.5)) * self.rng.random()
                loop.call_later(after_s, driver.kill, context=loop.outside)

    async def spark_batch(self, client: Client, version: int = 0) -> None:
        """One, all of it by this process."""
        info = await self.work.client(client).topics.open(BROKERED)
        await self._batch(client, client, info, version)

    async def _batch(self, driver: Client, executor: Client, info: TopicInfo, version: int) -> None:
        topics, tasks = self.work.client(driver), self.work.client(executor)
        run = self.work.next_run()
        intent = await topics.intents.open_query_intent(SPARK, f"run-{run}", BROKERED)
        results = await self.work.run_tasks(executor, tasks, [info], intent, version)
        self.work.ghost.contents[intent.id, version] = ""
        txn = TxnKey(SPARK, BROKERED, version, f"run-{run}")
        outcome = await topics.commit_topics(results, txn, intent.id)
        self.work.judge_commit((SPARK, version, ""), run, outcome)

    # -- the end ----------------------------------------

    def audit(self) -> None:
        self.truth.at_the_end()
