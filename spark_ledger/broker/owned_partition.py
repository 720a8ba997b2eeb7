"""A partition in this broker's hands: the end of its log, what is read of it, its producers.

Always true: what takes over a producer's place gets receipts only once nothing more of that
producer is stored; a partition that is left takes no producer any more.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from spark_ledger.broker.owner.partition import Partition
from spark_ledger.broker.produce.admission import Admission
from spark_ledger.broker.produce.live_writer import LiveWriter
from spark_ledger.broker.produce.producer import Producer
from spark_ledger.broker.produce.waiting import RefusedMessages
from spark_ledger.broker.wire.commands import AccessMode, Refusal, ServerError
from spark_ledger.topic.log.topics import TopicInfo

FENCED_S = 1.0
"""So long bookies are asked whether a ledger is fenced: one of them may hang."""

_log = logging.getLogger(__name__)


def elsewhere(topic: TopicInfo, partition: int) -> Refusal:
    """The client is to look the partition up."""
    why = f"another broker has partition {partition} of topic {topic.name}: look it up"
    return Refusal(ServerError.SERVICE_NOT_READY, why)


class OwnedPartition:
    """`beside` runs what goes on beside the caller."""

    def __init__(
        self,
        topic: TopicInfo,
        log: Partition,
        writer: LiveWriter,
        epoch: int,
        beside: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self.number = log.number
        self.log = log
        self.writer = writer
        self.refused = RefusedMessages()
        self.is_left = False
        """It is another broker's, or is closed: what is under way is decided still."""
        self._topic = topic
        self._beside = beside
        self._admission: Admission[Producer] = Admission(str(topic.name), epoch)

    def producers_before(self, producer: Producer) -> list[Producer]:
        """Those on other connections because of which it cannot come, or has to wait."""
        return self._admission.barring(producer)

    def add_producer(self, producer: Producer) -> bool:
        """Whether it may send; else it waits until it is the only one, and hears of it then. Raises
        Refusal."""
        if self.is_left:
            raise elsewhere(self._topic, self.number)
        if self.log.is_terminated:
            raise Refusal(ServerError.TOPIC_TERMINATED, f"topic {self._topic.name} is terminated")
        replaced = self._admission.replace(producer)
        try:
            admitted = self._admission.admit(producer)
            self._displace(admitted.fenced)
            return admitted.may_send
        finally:
            self._displace(replaced)

    def _displace(self, producers: list[Producer]) -> None:
        """What they sent and is not stored, or comes on their connections still, they send again,
        where they may."""
        for producer in producers:
            producer.send_away()
        if producers:
            self.writer.backlog.drop(producers)

    async def only(self, producer: Producer) -> None:
        """Let it send once nothing more is stored of those whose place it has: of all that have
        gone, or, if it shares the partition, of those of its name. Raises Refusal where another
        has its place by then, and where this broker gives the partition up: what was under way
        may be stored yet."""
        there = self._admission.there

        def has_gone(other: Any) -> bool:
            alone = producer.mode is not AccessMode.SHARED
            return other not in there and (alone or other.name == producer.name)

        settled = await self.writer.until_decided(has_gone)
        if producer in there:
            if settled:
                producer.ready()
                return
            self.remove_producer(producer)
            producer.send_away()
        if not self.is_left and self._admission.is_fenced(producer):
            raise self._admission.fenced(producer)
        what = f"producer '{producer.name}' of topic {self._topic.name} was sent away meanwhile"
        raise Refusal(ServerError.SERVICE_NOT_READY, what)

    def remove_producer(self, producer: Producer) -> None:
        self._admission.remove(producer)
        while not self.is_left and (following := self._admission.following()) is not None:
            if following in self._admission.there:
                self._beside(self._follows(following))
            else:  # it was fenced while it waited, and hears so when it is back
                following.send_away()

    async def _follows(self, producer: Producer) -> None:
        with suppress(Refusal):  # it was sent away meanwhile
            await self.only(producer)

    def send_producers_away(self) -> None:
        for producer in self._admission.clear():
            producer.send_away()

    async def is_fenced(self) -> bool:
        """Whether bookies answer within FENCED_S that its live ledger is fenced."""
        try:
            async with asyncio.timeout(FENCED_S):
                return await self.writer.is_fenced()
        except TimeoutError:
            return False
        except Exception as error:  # of this ledger alone
            _log.error(
                "bookies cannot be asked for a fence of topic %s: %r", self._topic.name, error
            )
            return False
