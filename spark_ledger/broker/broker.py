"""A broker: which partitions it has, where clients are sent, what may wait in its memory.

Always true: a topic is opened once, however many clients ask for it, and a partition of it only
while the record names this broker as its owner. At most WAITING_BYTES_MAX bytes from producers wait
to be stored; beyond that the broker does not read from connections.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, NamedTuple

from spark_ledger import errors
from spark_ledger.async_tasks import SharedTasks, cancel, woken
from spark_ledger.broker.names import PartitionName
from spark_ledger.broker.owned_partition import OwnedPartition, elsewhere
from spark_ledger.broker.owned_topic import REREAD_S, OwnedTopic
from spark_ledger.broker.owner.ownership import Owners, Ownership, UrlTaken
from spark_ledger.broker.owner.tail import TailBudget
from spark_ledger.broker.owner.topic_commits import RollLimits, TopicCommits
from spark_ledger.broker.produce.live_writer import LiveWriter
from spark_ledger.broker.settings import DEFAULTS, BrokerSettings
from spark_ledger.broker.wire.commands import Refusal, ServerError
from spark_ledger.broker.wire.frames import MESSAGE_BYTES_MAX
from spark_ledger.ledger.client import LedgerStore
from spark_ledger.metadata.cluster import ClusterGuard
from spark_ledger.metadata.store import SessionState, StoreError
from spark_ledger.metadata.store_calls import each, store_now_ms
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.log.names import DEFAULT_NAMESPACE, DEFAULT_TENANT, TopicName
from spark_ledger.topic.log.policies import NamespacePolicies
from spark_ledger.topic.log.topics import TopicInfo
from spark_ledger.topic.subscription.consumer_cursors import ConsumerCursors

TICK_S = 2.0
PROBE_EVERY_S = 0.5
FENCED_EVERY_S, RETURN_S = 2.0, 5.0
CLUSTER_EVERY_S = 10.0
"""So often the cluster's record is read: whether a person accepted an older store."""
TOPICS_ASKED_AT_ONCE = 32
"""Of each up to 8 ledgers, 1 s at most: so a thousand partitions are looked at in 5 s."""
SEAL_S, AWAY_S, AWAY_LOOK_S = 5.0, 1.0, 0.2
SETTLE_S = 30.0
"""Partitions move to the brokers on which they fall once these have been the same for so long."""
GIVE_EVERY_S, GIVE_MAX = 2.0, 10
CLOCK_EVERY_S = 300.0
CLOCK_TRIES, CLOCK_WITHIN_MS = 5, 20
WAITING_BYTES_MAX = 256 << 20
ENTRY_OVERHEAD_BYTES = 48 << 10
"""Beside a message of the largest size: its metadata, and the offsets of other chunks of it."""

_log = logging.getLogger(__name__)


class StoreClock:
    """The metadata store's time, about: this machine's clock and how far it was off."""

    def __init__(self) -> None:
        self._off_ms = 0
        self._measured_s = float("-inf")

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000 + self._off_ms

    async def measure(self, client: TopicClient) -> None:
        """Measure again, CLOCK_EVERY_S after the last time. The clock may be wrong by half of what
        the answer took: after an answer that took longer than CLOCK_WITHIN_MS the store is asked
        again, and the fastest answer counts. Raises StoreError if the store never answers."""
        now_s = asyncio.get_running_loop().time()
        if now_s < self._measured_s + CLOCK_EVERY_S:
            return
        samples: list[tuple[int, int]] = []
        for _ in range(CLOCK_TRIES):
            asked_ms, asked_ns = time.time_ns() // 1_000_000, time.monotonic_ns()
            try:
                store_ms = await store_now_ms(client.store)
            except StoreError:
                if not samples:
                    raise
                break
            took_ms = (time.monotonic_ns() - asked_ns) // 1_000_000
            if store_ms:
                samples.append((took_ms, store_ms - asked_ms - took_ms // 2))
            if store_ms and took_ms <= CLOCK_WITHIN_MS:
                break
        if samples:
            _, self._off_ms = min(samples)
            self._measured_s = now_s


class NamedPartition(NamedTuple):
    """A partition of a topic, and how many there are."""

    info: TopicInfo
    number: int
    partitions: int


class Broker:
    """On one event loop. `url` is the address that clients get."""

    def __init__(
        self,
        ledgers: LedgerStore,
        rng: random.Random,
        url: str,
        settings: BrokerSettings | None = None,
    ) -> None:
        self.settings = settings or DEFAULTS
        self.id = f"{rng.getrandbits(64):016x}"
        self.clock = StoreClock()
        self.client = TopicClient(ledgers, rng, self.clock.now_ms)
        self.ownership = Ownership(ledgers.metadata, self.id, url)
        self.cursors = ConsumerCursors(ledgers.metadata, self.client.subscriptions, self.id, rng)
        self.waiting_bytes = 0
        self.message_bytes_max = min(
            MESSAGE_BYTES_MAX, ledgers.config.entry_bytes_max - ENTRY_OVERHEAD_BYTES
        )
        self._relieved: dict[Callable[[], None], None] = {}
        self._budget = TailBudget(self.settings.tail_bytes)
        self._topics = SharedTasks[str, OwnedTopic](keep=True)
        self._names = 0
        self._background: list[asyncio.Task[None]] = []
        self._starting = self._closing = False
        self._store_is_away = False
        self._guard, self._cluster_s = ClusterGuard(ledgers.metadata), float("-inf")
        self._others_return_s = float("-inf")
        """Until then no broker counts as dead: all brokers may have lost the store, and register
        again."""
        self.failure: errors.BadConfig | None = None
        """Why the process is to end, although no signal asked for it."""
        self.on_failure: Callable[[], None] = lambda: None

    async def start(self, listen: Callable[[], None] = lambda: None) -> None:
        """`listen` is called before others see this broker: they bury one that does not answer.
        Raises errors.BadConfig (another broker has its URL), errors.Unavailable."""
        await self.clock.measure(self.client)
        self.ownership.since_ms = self.clock.now_ms()
        await self.ownership.check_url()
        self._starting = True
        listen()
        await self.ownership.register()
        self._starting = False
        loop = asyncio.get_running_loop()
        doing = self._tick(), self._watch(), self._without_store()
        self._background = [loop.create_task(each) for each in doing]

    async def seal(self) -> None:
        """Take no more, and store and seal what there is, before others are to take over."""
        self._closing = True
        await cancel(*self._background)
        with suppress(TimeoutError):
            async with asyncio.timeout(SEAL_S):
                await self._as_far_as_the_store_is_there(self._seal())

    async def _seal(self) -> None:
        await asyncio.gather(*(one.seal() for one in self.opened()))

    def opened(self) -> list[OwnedTopic]:
        """The topics that this broker has."""
        return [one for one in map(self._topics.kept, self._topics) if one is not None]

    @property
    def _without_contact(self) -> bool:
        return self.client.store.session_state is not SessionState.CONNECTED

    async def close(self) -> None:
        """Store what waits, seal every live segment, release every subscription."""
        await self.seal()
        await self._as_far_as_the_store_is_there(self._close())
        await self._as_far_as_the_store_is_there(self.client.close())

    async def _as_far_as_the_store_is_there(self, doing: Coroutine[Any, Any, None]) -> None:
        """Until it is done, or the store gives no answer for AWAY_S, whatever its session looks
        like: the rest is left as a crash would leave it, and the next owner decides it."""
        task = asyncio.get_running_loop().create_task(doing)
        try:
            while not (await asyncio.wait([task], timeout=AWAY_LOOK_S))[0]:
                if not await self._answers():
                    break
        finally:
            if task.cancel():
                _log.warning("not all is sealed and released: the next owner decides what is left")
            (outcome,) = await asyncio.gather(task, return_exceptions=True)
        if isinstance(outcome, Exception):
            raise outcome

    async def _answers(self) -> bool:
        """Whether the store gives an answer within AWAY_S. Once it did not, it is not asked
        again."""
        if not self._store_is_away:
            try:
                async with asyncio.timeout(AWAY_S):
                    await self.client.store.sync()
            except (TimeoutError, StoreError):
                self._store_is_away = True
        return not self._store_is_away

    async def _close(self) -> None:
        with suppress(StoreError, errors.LedgerError):
            await self.ownership.leave()
        await self._topics.idle()
        closes = (topic.close() for topic in self.opened())
        for failed in await asyncio.gather(*closes, return_exceptions=True):
            if isinstance(failed, BaseException):
                _log.warning("a topic is left as a crash would leave it: %s", failed)
        await self.cursors.close()

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

    def waits(self, size: int) -> None:
        """So many bytes of clients wait from now on, or wait no more where it is negative."""
        self.waiting_bytes += size
        if self._relieved and not self.crowded:
            waiting, self._relieved = list(self._relieved), {}
            for resume in waiting:
                resume()

    # -- topics ------------------------------------------------------------------------------

    async def find(self, name: TopicName, *, create: bool) -> TopicInfo:
        """The topic, made where settings and the client allow it. Raises Refusal,
        errors.Unavailable."""
        info = await self.client.topics.find(name.full)
        if info is not None:
            return info
        partitions = await self._partitions_to_be(name, create=create)
        with suppress(errors.TopicExists):
            own = {"partitioned": partitions > 0}
            return await self.client.topics.create(name.full, max(1, partitions), own)
        return await self.client.topics.open(name.full)

    async def _partitions_to_be(self, name: TopicName, *, create: bool) -> int:
        """How many partitions a topic that is not there gets once a client makes it: 0 of one that
        is not partitioned. Raises Refusal where no client makes it, errors.Unavailable."""
        namespace = f"{name.tenant}/{name.namespace}"
        policies = await self.client.topics.namespace(namespace)
        if policies is None and namespace != f"{DEFAULT_TENANT}/{DEFAULT_NAMESPACE}":
            raise Refusal(
                ServerError.TOPIC_NOT_FOUND,
                f"there is no namespace '{namespace}': `spark-ledger namespace set` makes it",
            )
        may, partitions = self._auto_create(policies or NamespacePolicies())
        if not (create and may):
            raise Refusal(ServerError.TOPIC_NOT_FOUND, f"there is no topic '{name}'")
        return partitions

    def _auto_create(self, namespace: NamespacePolicies) -> tuple[bool, int]:
        """Whether a topic is made by naming it, and with how many partitions."""
        may, partitions = namespace.auto_create, namespace.auto_create_partitions
        settings = self.settings
        return (
            settings.auto_create if may is None else may,
            settings.auto_create_partitions if partitions is None else partitions,
        )

    async def partitions_of(self, name: PartitionName, *, create: bool) -> int:
        """As clients count them: 0 of a topic that is not partitioned, and of a partition. Of a
        topic that is not there those that it gets; with `create` one that gets some is made, since
        its producers and consumers come by the names of partitions. Raises as `find`."""
        if name.partition is not None:
            return 0
        info = await self.client.topics.find(name.topic.full)
        if info is None:
            if not await self._partitions_to_be(name.topic, create=create):
                return 0
            info = await self.find(name.topic, create=create)
        if not info.policies.partitioned:
            return 0
        return len((await self.client.log(info.id).fold()).partitions)

    async def names_in(self, namespace: str) -> list[str]:
        """The topics of `tenant/namespace`; those that are partitioned by the name of their first
        partition, of which clients cut that off. One that cannot be read is left out."""
        return [
            f"{info.name.full}-partition-0" if info.policies.partitioned else info.name.full
            for info in await self.client.topics.list({})
            if f"{info.name.tenant}/{info.name.namespace}" == namespace
        ]

    async def lookup(self, name: PartitionName, *, authoritative: bool) -> tuple[str, bool]:
        """The URL of the broker that has the partition, and whether that is this one. No topic is
        made: of one that a producer or a consumer may make it is this broker. Raises Refusal,
        errors of the topic layer."""
        if name.partition is None and await self.client.topics.find(name.topic.full) is None:
            self._check_open()
            await self._partitions_to_be(name.topic, create=True)
            return self.ownership.url, True
        info, number, partitions = await self._named(name, create=False)
        owner = await self.ownership.choose(info.id, number, partitions, here=authoritative)
        topic = self._topics.kept(info.id)
        if topic is not None and owner.broker == self.id:
            topic.learn(number, owner.epoch)
        return owner.url, owner.broker == self.id

    async def partition(
        self, name: PartitionName, *, create: bool = True
    ) -> tuple[OwnedTopic, OwnedPartition]:
        """The partition in this broker's hands, of a topic that is made where it is not there and
        settings allow it. Raises Refusal (another broker has it), errors of the topic layer."""
        info, number, partitions = await self._named(name, create=create)
        topic = self._topics.kept(info.id)
        if topic is None or not topic.has(number):
            # one that was made here, or looked up at a broker that saw that it falls on this one
            owner = await self.ownership.choose(info.id, number, partitions, here=False)
            if owner.broker != self.id:
                raise elsewhere(info, number)
            topic = await self._topic(info)
            owners = await self.ownership.owners(info.id, fresh=True)
            failed = await topic.own(owners.epochs_of(self.id))
            if number in failed:
                raise await self._passed_on(info, number, failed[number])
        return topic, topic.partition(number)

    async def _passed_on(
        self, info: TopicInfo, number: int, failure: BaseException
    ) -> BaseException:
        """Why this broker does not have the partition: where a later version wrote what is live
        there, another broker has its turn from now on."""
        later = isinstance(failure, errors.UnsupportedFormat)
        if not later or isinstance(failure, errors.BadEntry):
            return failure
        if not await self.ownership.pass_on(info.id, number):
            return failure
        _log.warning("partition %d of %s is passed on: %s", number, info.name, failure)
        return elsewhere(info, number)

    def _check_open(self) -> None:
        if self._starting or self._closing:
            does = "starting" if self._starting else "stopping"
            raise Refusal(ServerError.SERVICE_NOT_READY, f"the broker is {does}")

    async def _named(self, name: PartitionName, *, create: bool) -> NamedPartition:
        """The partition; of a name without its number the topic's only one. Raises as `find`."""
        self._check_open()
        number = name.partition
        info = await self.find(name.topic, create=create and number is None)
        log = self.client.log(info.id)
        count = len((await log.fold()).partitions)
        if number is not None and number >= count:
            count = len((await log.fold(fresh=True)).partitions)
        if number is None and count == 1:
            number = 0
        if number is None or not 0 <= number < count:
            raise Refusal(
                ServerError.TOPIC_NOT_FOUND,
                f"topic {info.name} has {count} partitions, not partition {number}",
            )
        return NamedPartition(info, number, count)

    async def _topic(self, info: TopicInfo) -> OwnedTopic:
        return await self._topics.result(info.id, lambda: self._open(info))

    def live_writer(self, topic_id: str, partition: int) -> LiveWriter | None:
        """The open end of a partition, None if it is not in this broker's hands."""
        topic = self._topics.kept(topic_id)
        return topic.partition(partition).writer if topic and topic.has(partition) else None

    async def _open(self, info: TopicInfo) -> OwnedTopic:
        commits = TopicCommits(self.client, info, self.ownership, self.clock.now_ms)
        follower = await self.client.follow(info.id, info.name.short, REREAD_S)
        limits = RollLimits.of(self.settings, info.policies)
        made = OwnedTopic(
            *(commits, self.cursors, follower, self._budget, limits, self._ended, self._closed)
        )
        await made.start()
        return made

    def _ended(self, topic: OwnedTopic) -> None:
        self._topics.pop(topic.info.id)

    async def _closed(self, topic: OwnedTopic) -> None:
        """Follow it no more, unless this broker opens it again or has done so."""
        if topic.info.id not in self._topics:
            await self.client.unfollow(topic.info.id)

    async def _tick(self) -> None:
        while True:
            await woken(self.ownership.stirred, TICK_S)
            self.ownership.stirred.clear()
            try:
                if await self.ownership.keep():
                    _log.warning("the broker was taken for dead, and registers again")
                    self.cursors.doubt_all()
                    for topic in self.opened():
                        await topic.look()
                await self.clock.measure(self.client)
                await self._look_at_cluster()
            except (errors.LedgerError, StoreError) as error:
                _log.warning("the broker cannot register now: %s", error)
            except Exception:
                _log.exception("the broker cannot register now: a defect")

    async def _look_at_cluster(self) -> None:
        """Begin anew with each topic once a person accepted an older metadata store: what this
        broker has in memory of them may be of commits that are not there. Raises StoreError."""
        now_s = asyncio.get_running_loop().time()
        if now_s < self._cluster_s + CLUSTER_EVERY_S:
            return
        self._cluster_s = now_s
        with suppress(errors.MetadataHeld):  # each commit reports it
            if await self._guard.look():
                return
            self.client.forget_logs()
            accepted = errors.LedgerFenced("an older metadata store was accepted")
            self.cursors.fail_all(accepted)
            for topic in self.opened():
                topic.give_up(accepted)

    async def _watch(self) -> None:
        """See other brokers die, and take what falls on this one of what they had; see others
        come, and give them what falls on them."""
        alive_before: frozenset[str] = frozenset()
        loop = asyncio.get_running_loop()
        give_s = loop.time() + SETTLE_S
        while True:
            try:
                if loop.time() < self._others_return_s:
                    await asyncio.sleep(PROBE_EVERY_S)
                    continue
                alive = await self.ownership.probe()
                if alive_before - alive or self.ownership.has_buried:
                    await self.take_over()
                if alive_before != alive:
                    give_s = loop.time() + SETTLE_S
                alive_before = alive
                if loop.time() >= give_s:
                    gave = await self.give()
                    give_s = loop.time() + GIVE_EVERY_S if gave else float("inf")
            except UrlTaken as error:
                self.failure = error
                self.on_failure()
                return
            except (errors.LedgerError, StoreError) as error:
                _log.warning("other brokers are not watched now: %s", error)
                await asyncio.sleep(TICK_S)
            except Exception:
                _log.exception("other brokers are not watched now: a defect")
                await asyncio.sleep(TICK_S)
            await asyncio.sleep(PROBE_EVERY_S)

    async def _without_store(self) -> None:
        """While the store cannot be reached, ask bookies whether the live ledgers are fenced: only
        another owner does that, or a commit past them. What is not fenced is served on."""
        was_away = False
        while True:
            await asyncio.sleep(FENCED_EVERY_S)
            try:
                if self._without_contact and was_away:
                    self._others_return_s = asyncio.get_running_loop().time() + RETURN_S
                    await each(OwnedTopic.leave_fenced, self.opened(), TOPICS_ASKED_AT_ONCE)
            except Exception:
                _log.exception("bookies are not asked for fences now: a defect")
            was_away = self._without_contact

    async def give(self) -> int:
        """Give partitions to brokers that have fewer, some of each topic; returns how many."""
        count = 0
        for topic in self.opened():
            try:
                given = await self.ownership.give(topic.info.id, GIVE_MAX)
                if given:
                    count += given
                    await topic.look()
            except errors.UnsupportedFormat as error:
                _log.warning("no partition of topic %s is given: %s", topic.info.name, error)
        return count

    async def take_over(self) -> None:
        """Serve the partitions of brokers that are gone, and those without an owner."""
        for topic_id, owners in (await self.ownership.take_over()).items():
            try:
                await self._serve(topic_id, owners)
            except errors.LedgerError as error:  # a client's lookup leads here, and it tries again
                _log.warning("topic %s is not served yet: %s", topic_id, error)
            except Exception:
                _log.exception("topic %s is not served yet: a defect", topic_id)

    async def _serve(self, topic_id: str, owners: Owners) -> None:
        name = await self.client.topics.name_of(topic_id)
        info = None if name is None else await self.client.topics.find(name.full)
        if info is None or info.id != topic_id:
            return  # it was deleted
        topic = await self._topic(info)
        for number, failure in (await topic.own(owners.epochs_of(self.id))).items():
            error = await self._passed_on(info, number, failure)
            _log.warning("partition %d of %s is not served yet: %s", number, name, error)
