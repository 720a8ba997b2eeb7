"""A broker: which partitions it has, to which broker it sends clients, how many bytes wait in its
memory.

Always true: a topic is opened once, however many clients ask for the topic. A partition is opened
only while its record in the store names this broker as the owner. While more than WAITING_BYTES_MAX
bytes from producers wait to be stored, the broker reads no connection whose batches wait.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Iterable
from contextlib import suppress
from enum import Enum
from functools import cached_property
from typing import NamedTuple

from spark_ledger import errors
from spark_ledger.async_tasks import SharedTasks
from spark_ledger.broker.catalog import Catalog
from spark_ledger.broker.dispatch.shared_dispatcher import SharingRules
from spark_ledger.broker.dispatch.sharing import UnackedLimits
from spark_ledger.broker.log.ownership import Owners, Ownership
from spark_ledger.broker.log.tail import TailBudget
from spark_ledger.broker.log.topic_commits import RollLimits, TopicCommits
from spark_ledger.broker.names import NonPersistentName, PartitionName
from spark_ledger.broker.nonpersistent.topic import PassingTopic
from spark_ledger.broker.nonpersistent.topics import NonPersistentTopics
from spark_ledger.broker.owner.owned_partition import OwnedPartition, owned_elsewhere
from spark_ledger.broker.owner.owned_topic import REREAD_S, OwnedTopic
from spark_ledger.broker.produce.live_writer import LiveWriter
from spark_ledger.broker.settings import DEFAULTS, BrokerSettings
from spark_ledger.broker.store_contact import StoreClock, StoreContact
from spark_ledger.broker.topic_lists import TopicLists
from spark_ledger.broker.watch import Watch
from spark_ledger.broker.wire.commands import Refusal, ServerError
from spark_ledger.ledger.client import LedgerStore
from spark_ledger.metadata.store import StoreError
from spark_ledger.metrics import Counter
from spark_ledger.topic.acks.sets import AckBudget
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.log.names import TopicName
from spark_ledger.topic.log.topics import TopicInfo
from spark_ledger.topic.schema.registry import SchemaRegistry
from spark_ledger.topic.subscription.consumer_cursors import ConsumerCursors

SEAL_S = 5.0
WAITING_BYTES_MAX = 256 << 20
ENTRY_OVERHEAD_BYTES = 48 << 10
"""Room in an entry beside a message of the largest size: for the message's metadata, and for the
offsets of the message's other chunks."""

_log = logging.getLogger(__name__)


class Phase(Enum):
    STARTING = "starting"
    OPEN = "open"
    STOPPING = "stopping"


class Budgets(NamedTuple):
    """A broker's limits of memory: for the newest messages (`tail`), for the sets of acknowledged
    messages (`acks`), and for the times of delayed messages (`delays`)."""

    tail: TailBudget
    acks: AckBudget
    delays: AckBudget

    @staticmethod
    def of(settings: BrokerSettings) -> "Budgets":
        sets = AckBudget(settings.ack_bytes_max), AckBudget(settings.delay_bytes_max)
        return Budgets(TailBudget(settings.tail_bytes), *sets)


class OpenTopics(SharedTasks[str, OwnedTopic]):
    """The topics that are open at a broker, by topic id. `ids` has the topic ids by name."""

    def __init__(self) -> None:
        super().__init__(keep=True)
        self.ids: dict[TopicName, str] = {}

    def named(self, name: TopicName) -> OwnedTopic | None:
        return self.kept(self.ids.get(name, ""))


class Broker:
    """A broker runs on one event loop. `url` is the address that its clients get."""

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
        self._budgets = Budgets.of(self.settings)
        self.cursors = ConsumerCursors(
            *(ledgers.metadata, self.client.subscriptions, self.id, rng, self._budgets.acks)
        )
        self.waiting_bytes = 0
        self.message_bytes_max = min(
            self.settings.message_bytes_max, ledgers.config.entry_bytes_max - ENTRY_OVERHEAD_BYTES
        )
        self._relief_listeners: dict[Callable[[], None], None] = {}
        self._topics = OpenTopics()
        self._names_given = 0
        self._phase = Phase.OPEN
        self._contact = StoreContact(ledgers.metadata)
        self.watch = Watch(self, ledgers.metadata, self._contact)

    @property
    def catalog(self) -> Catalog:
        return Catalog(self.client, self.settings)

    @cached_property
    def topic_lists(self) -> TopicLists:
        return TopicLists(self.client)

    @cached_property
    def non_persistent(self) -> NonPersistentTopics:
        return NonPersistentTopics(self.catalog, self.ownership)

    async def find(self, topic: TopicName) -> TopicInfo:
        """Raises Refusal if there is no such topic, errors.Unavailable."""
        if isinstance(topic, NonPersistentName):
            return await self.non_persistent.existing(topic)
        return await self.catalog.find(topic, create=False)

    def schemas_of(self, topic: TopicInfo) -> SchemaRegistry:
        """The registry that has the schema of the topic."""
        is_stored = not isinstance(topic.name, NonPersistentName)
        return self.client.schemas if is_stored else self.non_persistent.schemas

    async def look_at_non_persistent(self, others: Iterable[str]) -> None:
        """As NonPersistentTopics.look."""
        await self.non_persistent.look(others)

    @property
    def incomplete(self) -> Counter:
        """The number of chunked messages that this broker's producers left incomplete."""
        return self.ownership.membership.incomplete

    async def start(self, listen: Callable[[], None] = lambda: None) -> None:
        """`listen` before this broker registers: other brokers remove a registered broker that does
        not respond. Raises errors.BadConfig (another broker has the URL), errors.Unavailable."""
        await self.clock.measure(self.client)
        self.ownership.membership.since_ms = self.clock.now_ms()
        await self.ownership.membership.check_url()
        self._phase = Phase.STARTING
        listen()
        await self.ownership.membership.register()
        self._phase = Phase.OPEN
        self.watch.start()

    async def seal(self) -> None:
        """Take no more messages; store the waiting ones and seal the live segments, before other
        brokers take over."""
        self._phase = Phase.STOPPING
        await self.watch.stop()
        with suppress(TimeoutError):
            async with asyncio.timeout(SEAL_S):
                await self._contact.run_until_silent(self._seal())

    async def _seal(self) -> None:
        await asyncio.gather(*(topic.seal() for topic in self.open_topics()))

    def open_topics(self) -> list[OwnedTopic]:
        """The topics that are open at this broker."""
        topics = map(self._topics.kept, self._topics)
        return [topic for topic in topics if topic is not None]

    def open_topic(self, topic_id: str) -> OwnedTopic | None:
        return self._topics.kept(topic_id)

    async def close(self) -> None:
        """Store the waiting messages, seal every live segment, release every subscription."""
        await self.seal()
        await self._contact.run_until_silent(self._close())
        await self._contact.run_until_silent(self.client.close())

    async def _close(self) -> None:
        with suppress(StoreError, errors.LedgerError):
            await self.ownership.membership.leave()
        self.topic_lists.stop()
        await self._topics.idle()
        closes = (topic.close() for topic in self.open_topics())
        for outcome in await asyncio.gather(*closes, return_exceptions=True):
            if isinstance(outcome, BaseException):
                _log.warning("a topic was not closed; its next owners recover it: %s", outcome)
        await self.cursors.close()

    def new_name(self) -> str:
        """A new name for a producer or consumer."""
        self._names_given += 1
        return f"sl-{self.id}-{self._names_given}"

    # -- memory ------------------------------------------------------------------------------

    @property
    def is_crowded(self) -> bool:
        return self.waiting_bytes > WAITING_BYTES_MAX

    def wait_for_relief(self, resume: Callable[[], None]) -> None:
        """Call `resume` as soon as the broker is no longer crowded."""
        self._relief_listeners[resume] = None

    def count_waiting(self, size: int) -> None:
        """Add `size`, which may be negative, to the bytes from clients that wait to be stored."""
        self.waiting_bytes += size
        if self._relief_listeners and not self.is_crowded:
            listeners, self._relief_listeners = list(self._relief_listeners), {}
            for resume in listeners:
                resume()

    # -- partitions --------------------------------------------------------------------------

    async def partitions_of(self, name: PartitionName, *, create: bool) -> int:
        """As Catalog.partitions_of."""
        if isinstance(name.topic, NonPersistentName):
            return await self.non_persistent.partitions_of(name, create=create)
        topic = self._topics.named(name.topic)
        served = None if topic is None else topic.info
        return await self.catalog.partitions_of(name, create=create, served=served)

    async def lookup(self, name: PartitionName | None, *, authoritative: bool) -> tuple[str, bool]:
        """The URL of the broker that has the partition, and whether that is this broker. A lookup
        makes no topic. If the topic does not exist and clients may make it, the URL is that of the
        broker that will make and own it: this broker if another broker sent the client here
        (`authoritative`), else the broker on which the name falls. For a pattern (None: each broker
        has all lists of topics) the URL is this broker's. Raises Refusal, errors of the topic
        layer."""
        if name is None:
            self._check_open()
            return self.ownership.url, True
        if isinstance(name.topic, NonPersistentName):
            self._check_open()
            return await self.non_persistent.lookup(name)
        if await self._owned_here(name) is not None:
            self._check_open()
            return self.ownership.url, True
        if name.partition is None and await self.client.topics.find(name.topic.full) is None:
            self._check_open()
            # this call raises if clients may not make the topic
            await self.catalog.partitions_when_made(name.topic, create=True)
            if authoritative:
                return self.ownership.url, True
            maker, url = await self.ownership.broker_for(name.topic.full)
            return url, maker == self.id
        self._check_open()
        info, number, partitions = await self.catalog.find_partition(name, create=False)
        owner = await self.ownership.choose(info.id, number, partitions, here=authoritative)
        topic = self._topics.kept(info.id)
        if topic is not None and owner.broker == self.id:
            topic.learn(number, owner.epoch)
        return owner.url, owner.broker == self.id

    async def partition(
        self, name: PartitionName, *, create: bool = True
    ) -> tuple[OwnedTopic | PassingTopic, OwnedPartition]:
        """The partition, owned by this broker. With `create` a topic that does not exist is made,
        if settings allow it. Raises Refusal (another broker has the partition), errors of the topic
        layer."""
        self._check_open()
        if isinstance(name.topic, NonPersistentName):
            return await self.non_persistent.partition(name, create=create)
        if (owned := await self._owned_here(name)) is not None:
            return owned
        info, number, partitions = await self.catalog.find_partition(name, create=create)
        topic = self._topics.kept(info.id)
        if topic is None or not topic.has(number):
            # this broker made the topic now, or another broker's lookup sent the client here: a
            # client for C++ that is refused would wait until its operation's time is over
            owner = await self.ownership.choose(
                info.id, number, partitions, here=False, first_here=create
            )
            if owner.broker != self.id:
                raise owned_elsewhere(info, number)
            topic = await self._opened(info)
            owners = await self.ownership.owners(info.id, fresh=True)
            failures = await topic.serve_partitions(owners.epochs_of(self.id))
            if number in failures:
                raise await self._pass_on_if_later(info, number, failures[number])
        return topic, topic.partition(number)

    async def _owned_here(self, name: PartitionName) -> tuple[OwnedTopic, OwnedPartition] | None:
        """The partition, if this broker has it; else None. This takes one round trip to the store,
        without a sync. The response may be old: if the topic was deleted or another broker took
        the partition, this broker notices that soon, and sends clients away."""
        topic, number = self._topics.named(name.topic), name.partition
        if topic is None:
            return None
        id_, owners = await asyncio.gather(
            self.client.topics.id_of(name.topic), self.ownership.owners(topic.info.id)
        )
        if number is None and len(topic.state.partitions) == 1:
            number = 0
        owner = None if number is None else owners.of(number)
        if id_ != topic.info.id or number is None or owner is None or owner.broker != self.id:
            return None
        topic.learn(number, owner.epoch)
        return (topic, topic.partition(number)) if topic.has(number) else None

    async def _pass_on_if_later(
        self, info: TopicInfo, number: int, failure: BaseException
    ) -> BaseException:
        """The error that a client gets. If a later version of Spark Ledger wrote the partition's
        live segment, this broker gives the partition to another broker."""
        is_later_version = isinstance(failure, errors.UnsupportedFormat)
        if not is_later_version or isinstance(failure, errors.BadEntry):
            return failure
        if not await self.ownership.pass_on(info.id, number):
            return failure
        _log.warning("partition %d of %s is passed on: %s", number, info.name, failure)
        return owned_elsewhere(info, number)

    def _check_open(self) -> None:
        if self._phase is not Phase.OPEN:
            raise Refusal(ServerError.SERVICE_NOT_READY, f"the broker is {self._phase.value}")

    async def _opened(self, info: TopicInfo) -> OwnedTopic:
        return await self._topics.result(info.id, lambda: self._open(info))

    def live_writer(self, topic_id: str, partition: int) -> LiveWriter | None:
        """The writer of a partition, None if this broker does not own it."""
        topic = self._topics.kept(topic_id)
        return topic.partition(partition).writer if topic and topic.has(partition) else None

    async def _open(self, info: TopicInfo) -> OwnedTopic:
        commits = TopicCommits(self.client, info, self.ownership, self.clock.now_ms)
        follower = await self.client.follow(info.id, info.name.short, REREAD_S)
        limits = RollLimits.of(self.settings, info.policies)
        topic = OwnedTopic(
            commits,
            self.cursors,
            follower,
            self._budgets.tail,
            limits,
            self._drop_topic,
            self._unfollow,
        )
        topic.subscriptions.sharing = SharingRules(
            UnackedLimits.of(self.settings, info.policies),
            self.clock.earliest_ms,
            self._budgets.acks,
            self.settings.subscription_ack_bytes_max,
            delay_budget=self._budgets.delays,
        )
        topic.backlogs.look_s = self.settings.backlog_look_s
        await topic.start()
        self._topics.ids[info.name] = info.id
        return topic

    def _drop_topic(self, topic: OwnedTopic) -> None:
        self._topics.pop(topic.info.id)
        if self._topics.ids.get(topic.info.name) == topic.info.id:
            del self._topics.ids[topic.info.name]

    async def _unfollow(self, topic: OwnedTopic) -> None:
        """Stop following the topic, unless this broker has opened it again or opens it now."""
        if topic.info.id not in self._topics:
            await self.client.unfollow(topic.info.id)

    async def serve(self, topic_id: str, owners: Owners) -> None:
        """Serve the partitions that this broker has of the topic. Raises errors.LedgerError."""
        name = await self.client.topics.name_of(topic_id)
        info = None if name is None else await self.client.topics.find(name.full)
        if info is None or info.id != topic_id:
            return  # the topic was deleted
        topic = await self._opened(info)
        for number, failure in (await topic.serve_partitions(owners.epochs_of(self.id))).items():
            error = await self._pass_on_if_later(info, number, failure)
            _log.warning("partition %d of %s is not served yet: %s", number, name, error)
