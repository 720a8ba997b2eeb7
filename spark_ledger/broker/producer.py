"""A producer on its connection, and its batches until their receipts.

Always true: a batch has one receipt, with the id that it will always have, or its producer is sent
away: then it looks its topic up again and sends again what has no receipt.
"""

from collections import deque
from typing import Any, Protocol

from spark_ledger import errors
from spark_ledger.broker.names import NOWHERE
from spark_ledger.broker.owned_topic import OwnedTopic
from spark_ledger.broker.owner.partition import Partition
from spark_ledger.broker.wire.commands import (
    AccessMode,
    Refusal,
    ServerError,
    command,
    receipt,
)
from spark_ledger.broker.wire.frames import encode
from spark_ledger.topic.entry import pulsar_batch

NO_ID = -1
OVERHEAD_BYTES = 1024
"""What a batch that waits takes beside its bytes, about."""


class ProducersLink(Protocol):
    """A client's connection, as its producers use it."""

    def send(self, frame: bytes) -> None: ...

    def stored(self, size: int) -> None:
        """So many bytes of a batch wait no more."""

    def send_error(self, producer_id: int, sequence_id: int, code: ServerError, why: str) -> None:
        """The batch is refused for good."""

    def forget_producer(self, producer: "Producer") -> bool:
        """Whether it was there."""

    def send_producer_away(self, producer: "Producer") -> None:
        """It is to look its topic up again."""

    def add_producer(self, producer: "Producer") -> None: ...


class Producer:
    """Of one partition, on one connection."""

    def __init__(
        self,
        connection: ProducersLink,
        producer_id: int,
        request_id: int,
        name: str,
        mode: AccessMode,
        epoch: int,
        topic_epoch: int,
        topic: OwnedTopic,
        partition: Partition,
    ) -> None:
        self.connection = connection
        self.id = producer_id
        self.request_id = request_id
        self.name = name
        self.mode = mode
        self.epoch = epoch
        self.topic_epoch = topic_epoch
        self.topic = topic
        self.partition = partition.number
        self.shown_partition = partition.shown
        self.deduplicates = topic.info.policies.deduplication
        self._came = 0
        self._received = 0
        self._refused: deque[tuple[int, int, Refusal]] = deque()

    def ready(self) -> None:
        """It may send: the answer to its request."""
        made = command(
            "producer_success",
            request_id=self.request_id,
            producer_name=self.name,
            last_sequence_id=self.topic.last_sequence_id(self.partition, self.name),
            schema_version=b"",
            producer_ready=True,
        )
        if self.topic_epoch:
            made.producer_success.topic_epoch = self.topic_epoch
        self.connection.send(encode(made))

    def send_away(self) -> None:
        """It looks its topic up again, and sends again what has no receipt."""
        self.connection.send_producer_away(self)

    def refuse(self, sequence_id: int, why: Refusal) -> None:
        """Refuse a batch for good, after the receipts of those before it: a client drops only the
        oldest of those that it waits for."""
        self._refused.append((self._came, sequence_id, why))
        self._send_refusals()

    def came(self) -> None:
        """A batch more is to have a receipt."""
        self._came += 1

    def received(self) -> None:
        """A batch more has its receipt."""
        self._received += 1
        self._send_refusals()

    def _send_refusals(self) -> None:
        while self._refused and self._refused[0][0] <= self._received:
            _, sequence_id, why = self._refused.popleft()
            self.connection.send_error(self.id, sequence_id, why.code, why.message)


class SentBatch:
    """A batch of a producer, until its receipt."""

    __slots__ = (
        "batched",
        "data",
        "highest",
        "last_sequence_id",
        "messages",
        "producer",
        "producer_name",
        "sequence_id",
        "waiting_bytes",
    )

    def __init__(
        self, producer: Producer, send: Any, data: bytes, parsed: pulsar_batch.Batch
    ) -> None:
        self.producer = producer
        self.data = data
        self.waiting_bytes = len(data) + OVERHEAD_BYTES
        self.batched = parsed.batched
        self.messages = parsed.messages if self.batched else 1
        self.producer_name: str = parsed.metadata.producer_name
        self.last_sequence_id = parsed.last_sequence_id if producer.deduplicates else NO_ID
        self.sequence_id: int = send.sequence_id
        self.highest: int = send.highest_sequence_id

    def stored(self, offset: int) -> None:
        self._received(self.producer.topic.ledger, offset)

    def duplicate(self) -> None:
        self._received(NOWHERE, NOWHERE)

    def _received(self, ledger: int, entry: int) -> None:
        producer = self.producer
        made = receipt(
            *(producer.id, self.sequence_id, self.highest),
            *(ledger, entry, producer.shown_partition),
        )
        producer.connection.send(encode(made))
        producer.received()
        producer.connection.stored(self.waiting_bytes)

    def failed(self, error: errors.LedgerError) -> None:
        producer = self.producer
        if isinstance(error, errors.TopicTerminated):
            producer.connection.send_error(
                producer.id, self.sequence_id, ServerError.TOPIC_TERMINATED, str(error)
            )
        else:
            producer.send_away()
        producer.connection.stored(self.waiting_bytes)
