"""A producer on its connection, and its batches until their receipts.

Always true: a batch gets one receipt, with an id that never changes, or its producer is sent away:
then the client looks the topic up again, and sends the batches without a receipt again. Receipts
and refusals go out in the order of the producer's SENDs: a client drops a refused batch only if no
older batch waits for its answer.
"""

from collections.abc import Callable, Iterable
from itertools import accumulate, repeat
from typing import NamedTuple, Protocol

from spark_ledger import errors
from spark_ledger.broker.limits import SendLimits
from spark_ledger.broker.log.partition import Partition
from spark_ledger.broker.names import NOWHERE
from spark_ledger.broker.produce.live_writer import LiveWriter
from spark_ledger.broker.produce.waiting import Chunk, RefusedMessages
from spark_ledger.broker.wire.commands import (
    AccessMode,
    BaseCommand,
    Refusal,
    ServerError,
    command,
)
from spark_ledger.broker.wire.frames import encode
from spark_ledger.broker.wire.link import ClientFacts
from spark_ledger.broker.wire.sends import UNPACKED_MAX, Alike, Send, receipts

NO_ID = -1
RUN_BYTES_MAX = 256 << 10
RUN_UNPACKED_MAX = 8 << 20
RUN_MESSAGES_MAX = 1 << 24
"""Limits of a run of several batches; a single batch may be larger. The number of
messages is the number that the client declares."""
OVERHEAD_BYTES = 1024
"""About the memory that a waiting batch takes beside its bytes."""


class ProducersLink(Protocol):
    """The connection of one client (intake.py), as its producers use it."""

    def send(self, frame: bytes) -> None: ...

    def stored(self, size: int) -> None:
        """Count off `size` bytes of batches, which wait no more."""

    async def answers(self) -> bool:
        """Whether the client lives; if not, the connection has ended when this method returns."""

    def send_producer_away(self, producer: "Producer") -> None:
        """End the producer; its client then looks the topic up again."""

    drop: ServerError
    """The error by which the client drops a message, and does not send it again."""

    @property
    def is_read(self) -> bool:
        """Whether the broker reads from this connection now."""

    def later(self, seconds: float, do: Callable[[], None]) -> object:
        """Call `do` after this time."""


class PartitionOfProducer(Protocol):
    """A partition at its owner (owned_partition.py), as its producers use it."""

    log: Partition
    writer: LiveWriter
    refused: RefusedMessages
    send_limits: SendLimits


class DeclaredSchema(NamedTuple):
    """What is known of a producer's messages by its schema: their version, and whether their values
    are objects under a JSON schema. `beside_columns`: the topic's rows are columns, beside which
    only such values may stand."""

    schema_version: bytes = b""
    are_objects: bool = False
    beside_columns: bool = False


NO_SCHEMA = DeclaredSchema()


class Producer:
    """A producer of one partition, on one connection. `epoch`: how often its client connected it
    again.
    `topic_epoch` rises with each exclusive producer of the partition. `leave` takes the producer
    out of the partition."""

    def __init__(
        self,
        connection: ProducersLink,
        producer_id: int,
        request_id: int,
        name: str,
        mode: AccessMode,
        epoch: int,
        topic_epoch: int,
        partition: PartitionOfProducer,
        leave: Callable[["Producer"], None],
        declared: DeclaredSchema = NO_SCHEMA,
    ) -> None:
        self.connection = connection
        self.id = producer_id
        self.request_id = request_id
        self.name = name
        self.mode = mode
        self.epoch = epoch
        self.topic_epoch = topic_epoch
        self.partition = partition
        self.leave = leave
        self.declared = declared
        self.client: ClientFacts | None = None
        self.may_send = False
        """Whether the producer may send. Its client gets the answer in the same turn of the
        loop."""
        self.sends = 0
        """The number of SENDs that came. Each SEND has its number, and the answers go out in the
        order of these numbers."""
        self._answered = 0
        self._held: dict[int, tuple[int, bytes]] = {}  # answers that wait for earlier answers

    @property
    def sends_objects(self) -> bool:
        return self.declared.are_objects

    def ready(self) -> None:
        """Let the producer send, and answer its client's request."""
        self.may_send = True
        response = command(
            "producer_success",
            request_id=self.request_id,
            producer_name=self.name,
            last_sequence_id=self.partition.writer.backlog.sequence_ids.last(self.name),
            schema_version=self.declared.schema_version,
            producer_ready=True,
        )
        if self.topic_epoch:
            response.producer_success.topic_epoch = self.topic_epoch
        self.connection.send(encode(response))

    def send_away(self) -> None:
        """End the producer: its client looks the topic up again, and sends the messages without a
        receipt again."""
        self.connection.send_producer_away(self)

    def refuse(self, sequence_id: int, refusal: Refusal) -> None:
        """Refuse a batch for good, after the answers to the batches before it."""
        self.answer(self.number_sends(1), 1, self.error(sequence_id, refusal))

    def number_sends(self, count: int) -> int:
        """Give the next `count` SENDs their numbers; returns the first number."""
        first = self.sends
        self.sends += count
        return first

    def answer(self, number: int, count: int, frames: bytes) -> None:
        """Answer `count` SENDs from this number on, after all earlier SENDs are answered."""
        if number != self._answered:
            self._held[number] = (count, frames)
            return
        self.connection.send(frames)
        self._answered += count
        while self._held and (held := self._held.pop(self._answered, None)) is not None:
            self.connection.send(held[1])
            self._answered += held[0]

    @property
    def held_count(self) -> int:
        """The number of answers that wait for an earlier answer."""
        return len(self._held)

    def receipt(self, send: Send, offset: int) -> bytes:
        """The receipt of a SEND; with offset NOWHERE, of a message that was stored before."""
        ledger = NOWHERE if offset == NOWHERE else self.partition.log.ledger
        return receipts([(send, offset)], ledger, self.partition.log.number_in_ids)

    def error(self, sequence_id: int, refusal: Refusal) -> bytes:
        ids = {"producer_id": self.id, "sequence_id": sequence_id}
        return encode(command("send_error", **ids, error=refusal.code, message=refusal.message))


class Run:
    """Batches of a producer that came together, until their receipts. The batches of a run are
    stored together. `producer_name` is the name in the batches' metadata."""

    __slots__ = (
        "_last_sequence_ids",
        "_number",
        "_sends",
        "batched",
        "batches",
        "chunk",
        "counts",
        "messages",
        "producer",
        "producer_name",
        "size",
        "unpacked",
    )

    def __init__(self, producer: Producer, producer_name: str, batched: bool) -> None:
        self.producer = producer
        self.chunk: Chunk | None = None
        self.producer_name = producer_name
        self.batched = batched
        self.batches: list[bytes] = []
        self.counts: list[int] = []
        self.size = self.unpacked = self.messages = 0
        self._sends: list[Send] = []
        self._last_sequence_ids: list[int] = []
        self._number = 0

    def number_sends(self) -> None:
        """Give the SENDs of the run their numbers, before the run is stored."""
        self._number = self.producer.number_sends(len(self.batches))

    @property
    def first_sequence_id(self) -> int:
        return self._last_sequence_ids[0]

    @property
    def last_sequence_id(self) -> int:
        return self._last_sequence_ids[-1]

    @property
    def waiting_bytes(self) -> int:
        return self.size + OVERHEAD_BYTES * len(self.batches)

    def add(
        self,
        send: Send,
        data: bytes,
        producer_name: str,
        batched: bool,
        messages: int,
        last_sequence_id: int,
        unpacked: int = 0,
    ) -> bool:
        """Add a batch, which has `unpacked` bytes decompressed. False: the batch does not fit into
        this run, and has to begin another run."""
        unpacked = max(unpacked, len(data))
        if self.batches and (
            self.size + len(data) > RUN_BYTES_MAX
            or self.unpacked + unpacked > RUN_UNPACKED_MAX
            or self.messages + messages > RUN_MESSAGES_MAX
            or self.producer_name != producer_name
            or self.batched != batched
            or (last_sequence_id != NO_ID and last_sequence_id <= self._last_sequence_ids[-1])
        ):
            return False
        self.batches.append(data)
        self.counts.append(messages)
        self.size += len(data)
        self.unpacked += unpacked
        self.messages += messages
        self._sends.append(send)
        self._last_sequence_ids.append(last_sequence_id)
        return True

    @property
    def room(self) -> int:
        """How many more bytes of batches the run takes."""
        return RUN_BYTES_MAX - self.size

    @property
    def takes_alike(self) -> bool:
        """Whether the run has room for the lone messages that one call of Shape.read may return,
        by the size that these messages have decompressed."""
        return self.unpacked + RUN_BYTES_MAX + UNPACKED_MAX <= RUN_UNPACKED_MAX

    @property
    def after(self) -> int | None:
        """The number that the next sequence id must exceed (NO_ID: any id is allowed). None: the
        topic has no deduplication."""
        if not self.producer.partition.log.deduplicates:
            return None
        return self._last_sequence_ids[-1] if self.batches else NO_ID

    def extend(self, alike: Alike) -> None:
        """Add lone messages of the producer, within `room` and above `after`."""
        count = len(alike.sends)
        self._sends += alike.sends
        self.batches += alike.batches
        self.counts += [1] * count
        self.messages += count
        size = sum(map(len, alike.batches))
        self.size += size
        self.unpacked += size + alike.unpacked
        sequence_ids = (
            alike.sequence_ids if self.producer.partition.log.deduplicates else repeat(NO_ID, count)
        )
        self._last_sequence_ids += sequence_ids

    def each(self) -> "list[Run]":
        """The run's batches, each as a run by itself."""
        runs = list[Run]()
        columns = (self._sends, self.batches, self.counts, self._last_sequence_ids)
        for send, data, messages, last in zip(*columns, strict=True):
            run = Run(self.producer, self.producer_name, self.batched)
            unpacked = self.unpacked * len(data) // self.size  # about
            run.add(send, data, self.producer_name, self.batched, messages, last, unpacked)
            run._number = self._number + len(runs)
            runs.append(run)
        return runs

    def sent(self, offset: int) -> None:
        """Nothing to do: only a chunk needs its offset when it is sent."""

    def stored(self, offset: int) -> None:
        ledger = self.producer.partition.log.ledger
        self._send_receipts(ledger, accumulate(self.counts, initial=offset))

    def duplicate(self) -> None:
        self._send_receipts(NOWHERE, repeat(NOWHERE))

    def _send_receipts(self, ledger: int, offsets: Iterable[int]) -> None:
        producer = self.producer
        sent: Iterable[tuple[Send, int]] = zip(self._sends, offsets, strict=False)
        frames = receipts(sent, ledger, producer.partition.log.number_in_ids)
        producer.answer(self._number, len(self._sends), frames)
        producer.connection.stored(self.waiting_bytes)

    def failed(self, error: errors.LedgerError) -> None:
        """Refuse batches that are too large; after any other error send the producer away. Its
        client comes back with PRODUCER, and sends the batches again, unless the answer to PRODUCER
        is an error. The client for Go learns only by this answer that a topic is terminated."""
        producer = self.producer
        if isinstance(error, errors.MessageTooBig):
            self._refuse(Refusal(producer.connection.drop, str(error)))
        else:
            producer.send_away()
        producer.connection.stored(self.waiting_bytes)

    def _refuse(self, refusal: Refusal) -> None:
        frames = [self.producer.error(send.sequence_id, refusal) for send in self._sends]
        self.producer.answer(self._number, len(frames), b"".join(frames))


def close_command(producer_id: int) -> BaseCommand:
    """The command that ends a client's producer: the client then looks the topic up again."""
    return command("close_producer", producer_id=producer_id, request_id=0)
