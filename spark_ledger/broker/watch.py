"""What a broker watches as long as it runs: its registration, the other brokers, the store.

Always true: a broker that registers again checks each topic, since other brokers may have taken its
partitions. While no broker reaches the store, no broker counts as dead.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Protocol

from spark_ledger import errors
from spark_ledger.async_tasks import cancel, woken
from spark_ledger.broker.log.membership import UrlTaken
from spark_ledger.broker.log.ownership import Owners, Ownership
from spark_ledger.broker.owner.owned_topic import OwnedTopic
from spark_ledger.broker.store_contact import StoreClock, StoreContact
from spark_ledger.metadata.cluster import ClusterGuard
from spark_ledger.metadata.store import MetadataStore, StoreError
from spark_ledger.metadata.store_calls import call_each
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.subscription.consumer_cursors import ConsumerCursors

TICK_S = 2.0
PROBE_EVERY_S = 0.5
FENCED_EVERY_S, RETURN_S = 2.0, 5.0
"""How often bookies are asked for fences while the store is away; how long after that no other
broker counts as dead."""
CLUSTER_EVERY_S = 10.0
"""How often the cluster's record is read, which shows whether a person accepted an older store."""
TOPICS_ASKED_AT_ONCE = 32
"""Bookies are asked about 8 ledgers of each topic at once, for 1 s at most: a thousand partitions
take 5 s."""
SETTLE_S = 30.0
"""Partitions move to the brokers on which they fall after the set of brokers has not changed for
this time."""
GIVE_EVERY_S, GIVE_MAX = 2.0, 10
LOOK_EVERY_S = 10.0
"""How often non-persistent topics are looked at that may be deleted."""

_log = logging.getLogger(__name__)


class WatchedBroker(Protocol):
    """What the watch needs of its broker."""

    client: TopicClient
    clock: StoreClock
    ownership: Ownership
    cursors: ConsumerCursors

    def open_topics(self) -> list[OwnedTopic]: ...

    async def serve(self, topic_id: str, owners: Owners) -> None: ...

    async def look_at_non_persistent(self, others: Iterable[str]) -> None: ...


class Watch:
    """The watch of one broker, from `start` until `stop`."""

    def __init__(self, broker: WatchedBroker, store: MetadataStore, contact: StoreContact) -> None:
        self._broker = broker
        self._contact = contact
        self._tasks: list[asyncio.Task[None]] = []
        self._guard, self._cluster_s = ClusterGuard(store), float("-inf")
        self._others_return_s = float("-inf")
        """Until this time no broker counts as dead: all brokers may have lost the store, and some
        may not have registered again yet."""
        self.failure: errors.BadConfig | None = None
        """Why the process has to end without a signal."""
        self.on_failure: Callable[[], None] = lambda: None

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        loops = self._tick(), self._watch_others(), self._watch_without_store()
        self._tasks = [loop.create_task(coroutine) for coroutine in loops]

    async def stop(self) -> None:
        await cancel(*self._tasks)

    async def _tick(self) -> None:
        while True:
            await woken(self._broker.ownership.membership.stirred, TICK_S)
            self._broker.ownership.membership.stirred.clear()
            try:
                if await self._broker.ownership.membership.keep():
                    _log.warning("other brokers took this broker for dead; it has registered again")
                    self._broker.cursors.reread_all()
                    for topic in self._broker.open_topics():
                        await topic.look()
                await self._broker.clock.measure(self._broker.client)
                await self._look_at_cluster()
            except (errors.LedgerError, StoreError) as error:
                _log.warning("the broker cannot register now: %s", error)
            except Exception:
                _log.exception("the broker cannot register now: a defect")

    async def _look_at_cluster(self) -> None:
        """Give all topics up if a person has accepted an older metadata store: this broker's memory
        of the topics may come from commits that the older store does not have. Raises
        StoreError."""
        now_s = asyncio.get_running_loop().time()
        if now_s < self._cluster_s + CLUSTER_EVERY_S:
            return
        self._cluster_s = now_s
        with suppress(errors.MetadataHeld):  # each commit reports it
            if await self._guard.refresh():
                return
            self._broker.client.forget_logs()
            accepted = errors.LedgerFenced("an older metadata store was accepted")
            self._broker.cursors.fail_all(accepted)
            for topic in self._broker.open_topics():
                topic.give_up(accepted)

    async def _watch_others(self) -> None:
        """When other brokers die, take over those of their partitions that fall on this broker;
        when others come, give them the partitions that fall on them."""
        alive_before: frozenset[str] = frozenset()
        loop = asyncio.get_running_loop()
        give_s, look_s = loop.time() + SETTLE_S, loop.time()
        while True:
            try:
                if loop.time() < self._others_return_s:
                    await asyncio.sleep(PROBE_EVERY_S)
                    continue
                alive = await self._broker.ownership.membership.probe()
                self._broker.cursors.set_older_brokers(self._broker.ownership.membership.has_older)
                if alive_before - alive or self._broker.ownership.membership.has_buried:
                    await self.take_over()
                if alive_before != alive or loop.time() >= look_s:
                    await self._broker.look_at_non_persistent(alive)
                    look_s = loop.time() + LOOK_EVERY_S
                if alive_before != alive:
                    give_s = loop.time() + SETTLE_S
                alive_before = alive
                if loop.time() >= give_s:
                    given = await self.give()
                    give_s = loop.time() + GIVE_EVERY_S if given else float("inf")
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

    async def _watch_without_store(self) -> None:
        """While the store cannot be reached, ask bookies whether the live ledgers are fenced. Only
        another owner, or a commit past the live segment, fences a live ledger. A partition is
        still served if its ledger is not fenced."""
        was_lost = False
        while True:
            await asyncio.sleep(FENCED_EVERY_S)
            try:
                if self._contact.is_lost and was_lost:
                    self._others_return_s = asyncio.get_running_loop().time() + RETURN_S
                    await call_each(
                        OwnedTopic.leave_fenced, self._broker.open_topics(), TOPICS_ASKED_AT_ONCE
                    )
            except Exception:
                _log.exception("bookies are not asked for fences now: a defect")
            was_lost = self._contact.is_lost

    async def give(self) -> int:
        """Give some partitions of each topic to brokers that have fewer; returns how many
        partitions were given."""
        count = 0
        for topic in self._broker.open_topics():
            try:
                given = await self._broker.ownership.give(topic.info.id, GIVE_MAX)
                if given:
                    count += given
                    await topic.look()
            except errors.UnsupportedFormat as error:
                _log.warning("no partition of topic %s is given: %s", topic.info.name, error)
        return count

    async def take_over(self) -> None:
        """Serve the partitions of brokers that are gone, and those without an owner."""
        for topic_id, owners in (await self._broker.ownership.take_over()).items():
            try:
                await self._broker.serve(topic_id, owners)
            except errors.LedgerError as error:  # a client's next lookup opens the topic again
                _log.warning("topic %s is not served yet: %s", topic_id, error)
            except Exception:
                _log.exception("topic %s is not served yet: a defect", topic_id)
