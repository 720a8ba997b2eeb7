"""A broker: which topics it has, where clients are sent, what may wait in its memory.

Always true: a topic is opened once however many ask for it, and only while the record says that it
is this broker's; bytes that producers sent and that are not stored yet are WAITING_BYTES_MAX at
most, beyond which connections are not read.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from spark_ledger import errors
from spark_ledger.broker.names import PartitionName
from spark_ledger.broker.owned_topic import OwnedTopic
from spark_ledger.broker.owner.live_writer import LiveWriter, RollLimits
from spark_ledger.broker.owner.ownership import Ownership
from spark_ledger.broker.owner.tail import BYTES_MAX, TailBudget
from spark_ledger.broker.owner.topic_commits import TopicCommits
from spark_ledger.broker.wire.commands import Refusal, ServerError
from spark_ledger.broker.wire.frames import MESSAGE_BYTES_MAX
from spark_ledger.ledger.client import LedgerStore
from spark_ledger.metadata.store import StoreError
from spark_ledger.metadata.store_calls import store_now_ms
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.log.names import TopicName
from spark_ledger.topic.log.policies import TopicPolicies
from spark_ledger.topic.log.topics import TopicInfo

TICK_S = 2.0
CLOCK_EVERY_S = 300.0
WAITING_BYTES_MAX = 256 << 20
RETENTION_PARTS = 4
ENTRY_OVERHEAD_BYTES = 16 << 10

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BrokerSettings:
    """`auto_create`: a topic that a client names and that is not there is made, with so many
    partitions (0: one that is not partitioned, as in Pulsar). `tail_bytes`: of batches kept in
    memory for consumers at the end."""

    auto_create: bool = True
    auto_create_partitions: int = 0
    tail_bytes: int = BYTES_MAX
    roll: RollLimits = field(default_factory=RollLimits)


class StoreClock:
    """The metadata store's time, about: this machine's clock and how far it was off."""

    def __init__(self) -> None:
        self._off_ms = 0
        self._measured_s = float("-inf")

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000 + self._off_ms

    async def measure(self, client: TopicClient) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s < self._measured_s + CLOCK_EVERY_S:
            return
        before_ms = time.time_ns() // 1_000_000
        store_ms = await store_now_ms(client.store)
        after_ms = time.time_ns() // 1_000_000
        if store_ms:
            self._off_ms = store_ms - (before_ms + after_ms) // 2
            self._measured_s = now_s


class Broker:
    """On one event loop. `url` is what clients are told."""

    def __init__(
        self,
        ledgers: LedgerStore,
        rng: random.Random,
        url: str,
        settings: BrokerSettings | None = None,
    ) -> None:
        self.settings = settings or BrokerSettings()
        self.id = f"{rng.getrandbits(64):016x}"
        self.clock = StoreClock()
        self.client = TopicClient(ledgers, rng, self.clock.now_ms)
        self.ownership = Ownership(ledgers.metadata, self.id, url)
        self.waiting_bytes = 0
        self.message_bytes_max = min(
            MESSAGE_BYTES_MAX, ledgers.config.entry_bytes_max - ENTRY_OVERHEAD_BYTES
        )
        self._relieved: dict[Callable[[], None], None] = {}
        self._budget = TailBudget(self.settings.tail_bytes)
        self._topics: dict[str, asyncio.Task[OwnedTopic]] = {}
        self._names = 0
        self._ticking: asyncio.Task[None] | None = None
        self._closing = False

    async def start(self) -> None:
        """Raises errors.Unavailable."""
        await self.clock.measure(self.client)
        await self.ownership.register()
        self._ticking = asyncio.get_running_loop().create_task(self._tick())

    async def close(self) -> None:
        """Store what waits, seal every live segment, release every subscription."""
        self._closing = True
        if self._ticking is not None:
            self._ticking.cancel()
            await asyncio.gather(self._ticking, return_exceptions=True)
        with suppress(StoreError, errors.LedgerError):
            await self.ownership.leave()
        opened = await asyncio.gather(*self._topics.values(), return_exceptions=True)
        topics = [one for one in opened if isinstance(one, OwnedTopic)]
        for failed in await asyncio.gather(
            *(one.close() for one in topics), return_exceptions=True
        ):
            if isinstance(failed, BaseException):
                _log.warning("a topic is left as a crash would leave it: %s", failed)
        await self.client.close()

    def new_name(self) -> str:
        """A producer's or consumer's name that no other has."""
        self._names += 1
        return f"sl-{self.id}-{self._names}"

    # -- memory ------------------------------------------------------------------------------

    @property
    def crowded(self) -> bool:
        return self.waiting_bytes > WAITING_BYTES_MAX

    def wait_for_relief(self, resume: Callable[[], None]) -> None:
        """Call `resume` once memory is free again."""
        self._relieved[resume] = None

    def forgot(self, size: int) -> None:
        """So many bytes wait no more."""
        self.waiting_bytes -= size
        if self._relieved and not self.crowded:
            waiting, self._relieved = list(self._relieved), {}
            for resume in waiting:
                resume()

    # -- topics ------------------------------------------------------------------------------

    async def find(self, name: TopicName, *, create: bool) -> TopicInfo:
        """The topic, made where settings and the client allow it. Raises Refusal,
        errors.Unavailable."""
        found = await self.client.topics.find(name.full)
        if found is not None:
            return found
        if not (create and self.settings.auto_create):
            raise Refusal(ServerError.TOPIC_NOT_FOUND, f"there is no topic '{name}'")
        wanted = self.settings.auto_create_partitions
        policies = TopicPolicies(partitioned=wanted > 0)
        with suppress(errors.TopicExists):
            return await self.client.topics.create(name.full, max(1, wanted), policies)
        return await self.client.topics.open(name.full)

    async def partitions(self, info: TopicInfo) -> int:
        """As a client is told: 0 of one that is not partitioned."""
        if not info.policies.partitioned:
            return 0
        return len((await self.client.log(info.id).fold()).partitions)

    async def names_in(self, namespace: str) -> list[str]:
        """The topics of `tenant/namespace`; those that are partitioned by the name of their first
        partition, of which clients cut that off."""
        return [
            f"{info.name.full}-partition-0" if info.policies.partitioned else info.name.full
            for info in await self.client.topics.list()
            if f"{info.name.tenant}/{info.name.namespace}" == namespace
        ]

    async def lookup(self, name: PartitionName, *, authoritative: bool) -> tuple[str, bool]:
        """The URL of the broker that has the topic, and whether that is this one."""
        self._check_open()
        info = await self.find(name.topic, create=True)
        owner = await self.ownership.choose(info.id, here=authoritative)
        return owner.url, owner.broker == self.id

    async def topic(self, name: PartitionName) -> OwnedTopic:
        """The topic in this broker's hands. Raises Refusal (another broker has it), errors of the
        topic layer."""
        self._check_open()
        info = await self.find(name.topic, create=True)
        task = self._topics.get(info.id)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = asyncio.get_running_loop().create_task(self._open(info))
            self._topics[info.id] = task
        return await asyncio.shield(task)

    def live_writer(self, topic_id: str, partition: int) -> LiveWriter | None:
        """The open end of a partition, None if it is not in this broker's hands."""
        task = self._topics.get(topic_id)
        if task is None or not task.done() or task.cancelled() or task.exception() is not None:
            return None
        return task.result().writer(partition)

    def _check_open(self) -> None:
        if self._closing:
            raise Refusal(ServerError.SERVICE_NOT_READY, "the broker is stopping")

    async def _open(self, info: TopicInfo) -> OwnedTopic:
        owner = await self.ownership.owner(info.id, fresh=True)
        if owner is None or owner.broker != self.id:
            raise Refusal(
                ServerError.SERVICE_NOT_READY, f"another broker has topic '{info.name}': look it up"
            )
        commits = TopicCommits(self.client, info, self.ownership, owner.epoch, self.clock.now_ms)
        follower = await self.client.follow(info.id, info.name.short)
        limits = self._limits(info)
        made = OwnedTopic(commits, follower, self._budget, limits, self._ended)
        await made.start()
        return made

    def _limits(self, info: TopicInfo) -> RollLimits:
        """A live ledger is never older than a quarter of what the topic keeps."""
        roll, kept_ms = self.settings.roll, info.policies.retention_ms
        if kept_ms is None:
            return roll
        age_s = min(roll.age_s, max(1.0, kept_ms / 1000 / RETENTION_PARTS))
        return RollLimits(roll.bytes, roll.entries, age_s)

    def _ended(self, topic: OwnedTopic) -> None:
        self._topics.pop(topic.info.id, None)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                await self.ownership.keep()
                await self.clock.measure(self.client)
            except (errors.LedgerError, StoreError) as error:
                _log.warning("the broker cannot register now: %s", error)
