"""A producer on its connection, and its batches until their receipts.

Always true: a batch has one receipt, with the id that it will always have, or its producer is sent
away: then it looks its topic up again and sends again what has no receipt.
"""

from collections import deque
from collections.abc import Iterable
from itertools import accumulate, chain, repeat
from typing import Protocol

from spark_ledger import errors
from spark_ledger.broker.names import NOWHERE
from spark_ledger.broker.owned_topic import OwnedTopic
from spark_ledger.broker.owner.partition import Partition
from spark_ledger.broker.owner.waiting import Chunk
from spark_ledger.broker.wire.commands import (
    AccessMode,
    Refusal,
    ServerError,
    command,
)
from spark_ledger.broker.wire.frames import encode
from spark_ledger.broker.wire.sends import Alike, Send, receipts

NO_ID = -1
RUN_BYTES_MAX = 256 << 10
RUN_MESSAGES_MAX = 1 << 24
"""Of several batches; one may be larger. Messages are what a client says."""
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

    def came(self, count: int) -> None:
        """So many more are to have a receipt."""
        self._came += count

    def received(self, count: int) -> None:
        """So many more have their receipts."""
        self._received += count
        self._send_refusals()

    def _send_refusals(self) -> None:
        while self._refused and self._refused[0][0] <= self._received:
            _, sequence_id, why = self._refused.popleft()
            self.connection.send_error(self.id, sequence_id, why.code, why.message)


class Run:
    """Batches of a producer that came together, until their receipts: they are stored together.
    `chunks`: each is to have so many receipts, as the last chunk of a message (chunks.py)."""

    __slots__ = (
        "_chunks",
        "_last_sequence_ids",
        "_sends",
        "batched",
        "batches",
        "chunk",
        "counts",
        "messages",
        "producer",
        "producer_name",
        "size",
    )

    def __init__(
        self, producer: Producer, producer_name: str, batched: bool, chunks: int = 1
    ) -> None:
        self.producer = producer
        self.chunk: Chunk | None = None
        self.producer_name = producer_name
        self.batched = batched
        self.batches: list[bytes] = []
        self.counts: list[int] = []
        self.size = self.messages = 0
        self._sends: list[Send] = []
        self._last_sequence_ids: list[int] = []
        self._chunks = chunks

    @property
    def first_sequence_id(self) -> int:
        return self._last_sequence_ids[0]

    @property
    def last_sequence_id(self) -> int:
        return self._last_sequence_ids[-1]

    @property
    def receipts(self) -> int:
        """How many it is to have."""
        return len(self.batches) * self._chunks

    @property
    def waiting_bytes(self) -> int:
        return self.size + OVERHEAD_BYTES * self.receipts

    def add(
        self,
        send: Send,
        data: bytes,
        producer_name: str,
        batched: bool,
        messages: int,
        last_sequence_id: int,
    ) -> bool:
        """One more batch of it. False where that begins another run."""
        if self.batches and (
            self.size + len(data) > RUN_BYTES_MAX
            or self.messages + messages > RUN_MESSAGES_MAX
            or self.producer_name != producer_name
            or self.batched != batched
            or NO_ID != last_sequence_id <= self._last_sequence_ids[-1]
        ):
            return False
        self.batches.append(data)
        self.counts.append(messages)
        self.size += len(data)
        self.messages += messages
        self._sends.append(send)
        self._last_sequence_ids.append(last_sequence_id)
        return True

    @property
    def room(self) -> int:
        """Bytes of batches that it takes still."""
        return RUN_BYTES_MAX - self.size

    @property
    def after(self) -> int | None:
        """Above which the next sequence id is to be; None where nobody looks at them."""
        if not self.producer.deduplicates:
            return None
        return self._last_sequence_ids[-1] if self.batches else NO_ID

    def extend(self, found: Alike) -> None:
        """Lone messages of its producer that `room` and `after` allow."""
        count = len(found.sends)
        self._sends += found.sends
        self.batches += found.batches
        self.counts += [1] * count
        self.messages += count
        self.size += sum(map(len, found.batches))
        self._last_sequence_ids += found.said if self.producer.deduplicates else [NO_ID] * count

    def each(self) -> "list[Run]":
        found = []
        columns = (self._sends, self.batches, self.counts, self._last_sequence_ids)
        for send, data, messages, last in zip(*columns, strict=True):
            one = Run(self.producer, self.producer_name, self.batched, self._chunks)
            one.add(send, data, self.producer_name, self.batched, messages, last)
            found.append(one)
        return found

    def sent(self, offset: int) -> None:
        """What is stored does not depend on it."""

    def stored(self, offset: int) -> None:
        topic = self.producer.topic
        self._received(topic.ledger, accumulate(self.counts, initial=offset))

    def duplicate(self) -> None:
        self._received(NOWHERE, repeat(NOWHERE))

    def _received(self, ledger: int, entries: Iterable[int]) -> None:
        producer = self.producer
        said: Iterable[tuple[Send, int]] = zip(self._sends, entries, strict=False)
        if self._chunks > 1:
            said = chain.from_iterable(repeat(one, self._chunks) for one in said)
        if self._chunks:
            producer.connection.send(receipts(said, ledger, producer.shown_partition))
        producer.received(self.receipts)
        producer.connection.stored(self.waiting_bytes)

    def failed(self, error: errors.LedgerError) -> None:
        producer = self.producer
        if isinstance(error, errors.TopicTerminated):
            code, why = ServerError.TOPIC_TERMINATED, str(error)
            for send in self._sends:
                for _ in range(self._chunks):
                    producer.connection.send_error(producer.id, send.sequence_id, code, why)
        else:
            producer.send_away()
        producer.connection.stored(self.waiting_bytes)
