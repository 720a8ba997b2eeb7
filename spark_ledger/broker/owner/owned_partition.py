"""A partition that this broker owns: its log, its writer, its producers.

Always true: a producer that takes another producer's place gets receipts only once no more messages
of that other producer are stored. A producer of bytes and a producer that came beside columns are
never there at a time: a schema came or went between them, so each comes back and is judged anew. A
partition that this broker has left takes no producer.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from spark_ledger.broker.limits import SendLimits
from spark_ledger.broker.log.partition import Partition
from spark_ledger.broker.produce.admission import Admission
from spark_ledger.broker.produce.live_writer import LiveWriter
from spark_ledger.broker.produce.producer import Producer
from spark_ledger.broker.produce.waiting import RefusedMessages, sends_bytes
from spark_ledger.broker.wire.commands import AccessMode, Refusal, ServerError
from spark_ledger.topic.log.topics import TopicInfo

FENCED_S = 1.0
"""How long a broker waits for the bookies that it asks whether a ledger is fenced."""

_log = logging.getLogger(__name__)


def owned_elsewhere(topic: TopicInfo, partition: int) -> Refusal:
    """The refusal after which a client looks the partition up."""
    message = f"another broker has partition {partition} of topic {topic.name}: look it up"
    return Refusal(ServerError.SERVICE_NOT_READY, message)


def _is_beside_columns(producer: Producer) -> bool:
    return producer.declared.beside_columns


class OwnedPartition:
    """`start_task` runs a coroutine as a task, beside the caller."""

    def __init__(
        self,
        topic: TopicInfo,
        log: Partition,
        writer: LiveWriter,
        epoch: int,
        start_task: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self.number = log.number
        self.log = log
        self.writer = writer
        self.refused = RefusedMessages()
        self.send_limits = SendLimits()
        self.is_left = False
        """Whether another broker owns the partition, or this broker has closed it. The writer may
        still have to find out which batches under way are stored."""
        self._topic = topic
        self._start_task = start_task
        self._admission: Admission[Producer] = Admission(str(topic.name), epoch)
        writer.takes_bytes = lambda: any(map(sends_bytes, self._admission.present))

    @property
    def producers(self) -> list[Producer]:
        return list(self._admission.present)

    def producers_before(self, producer: Producer) -> list[Producer]:
        """The producers on other connections because of which this producer is refused or waits."""
        return self._admission.blockers_of(producer)

    def add_producer(self, producer: Producer, producers_max: int | None = None) -> bool:
        """Returns whether the producer may send at once; if not, it waits for its turn, and then
        gets a response. Raises Refusal, also if there are `producers_max` producers."""
        if self.is_left:
            raise owned_elsewhere(self._topic, self.number)
        if self.log.is_terminated:
            raise Refusal(ServerError.TOPIC_TERMINATED, f"topic {self._topic.name} is terminated")
        replaced = self._admission.replace(producer)
        if producer.declared.beside_columns:  # others came before the columns, and are refused now
            replaced += self._take_out(sends_bytes)
        elif sends_bytes(producer) and (beside := self._take_out(_is_beside_columns)):
            self._displace([*replaced, *beside])
            text = f"the schema of topic {self._topic.name} has changed meanwhile: connect again"
            raise Refusal(ServerError.SERVICE_NOT_READY, text)
        try:
            admitted = self._admission.admit(producer, producers_max)
            self._displace(admitted.fenced)
            return admitted.may_send
        finally:
            self._displace(replaced)

    def _take_out(self, matches: Callable[[Producer], bool]) -> list[Producer]:
        """Take the producers that match out, those that wait too, before others follow; returns
        them."""
        admission = self._admission
        producers = [*filter(matches, admission.waiting), *filter(matches, admission.present)]
        for producer in producers:
            admission.remove(producer)
        if producers:
            self._let_next_follow()
        return producers

    def _displace(self, producers: list[Producer]) -> None:
        """Send these producers away, and drop their messages that are not stored yet. A producer
        that comes back sends these messages again."""
        for producer in producers:
            producer.send_away()
        if producers:
            self.writer.backlog.drop(producers)

    async def await_turn(self, producer: Producer) -> None:
        """Let the producer send once no more messages of the producers before it are stored. For a
        producer that shares the partition, only earlier producers of its name count. Raises Refusal
        if another producer takes its place meanwhile, or this broker gives the partition up (then
        batches under way may still be stored)."""
        present = self._admission.present

        def is_earlier(other: Any) -> bool:
            is_exclusive = producer.mode is not AccessMode.SHARED
            return other not in present and (is_exclusive or other.name == producer.name)

        is_decided = await self.writer.until_decided(is_earlier)
        if producer in present:
            if is_decided:
                producer.ready()
                return
            self.remove_producer(producer)
            producer.send_away()
        if not self.is_left and self._admission.is_fenced(producer):
            raise self._admission.refusal_of_fenced(producer)
        message = f"producer '{producer.name}' of topic {self._topic.name} was sent away meanwhile"
        raise Refusal(ServerError.SERVICE_NOT_READY, message)

    def remove_producer(self, producer: Producer) -> None:
        self._admission.remove(producer)
        self._let_next_follow()

    def _let_next_follow(self) -> None:
        while not self.is_left and (following := self._admission.take_next()) is not None:
            if following in self._admission.present:
                self._start_task(self._let_follow(following))
            else:  # another producer fenced it: it is refused when it comes back
                following.send_away()

    async def _let_follow(self, producer: Producer) -> None:
        with suppress(Refusal):  # the producer was sent away meanwhile
            await self.await_turn(producer)

    def send_producers_away(self) -> int:
        """Returns the number of producers sent away."""
        producers = self._admission.clear()
        for producer in producers:
            producer.send_away()
        return len(producers)

    async def is_fenced(self) -> bool:
        """Whether bookies answer within FENCED_S that the partition's live ledger is fenced."""
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
