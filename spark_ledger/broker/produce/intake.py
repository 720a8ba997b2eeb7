"""What producers of one connection send: SENDs that came together become runs.

Always true: runs are handed on to the writer of the partition (LiveWriter) in the order in which
their SENDs came, and before the next request of the connection is carried out. The answer to a
refused batch comes between the receipts of the batches before and after that batch. Only this file
counts the bytes of the connection's batches that are not stored.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from spark_ledger import errors
from spark_ledger.broker.names import fault_of_name
from spark_ledger.broker.produce.chunks import ChunksOfProducer
from spark_ledger.broker.produce.live_writer import LiveWriter
from spark_ledger.broker.produce.producer import (
    NO_ID,
    PartitionOfProducer,
    Producer,
    Run,
    close_command,
)
from spark_ledger.broker.wire.commands import NO_TRANSACTIONS, Refusal, ServerError
from spark_ledger.broker.wire.frames import MalformedFrame, Span, encode
from spark_ledger.broker.wire.link import Link
from spark_ledger.broker.wire.sends import KEY_BYTES, Send, Shape
from spark_ledger.metrics import Counter
from spark_ledger.rates import Allowance
from spark_ledger.topic.entry import pulsar_batch
from spark_ledger.topic.entry.pulsar_batch import WALKED_MESSAGES_MAX

METADATA_BYTES_MAX = 10 << 10
"""Limit of the metadata that a batch has beside a message of the largest size."""
BYTES_AS_A_MESSAGE = 400
"""To decompress this number of bytes by ZLIB takes as long as to read the metadata of one message
in a batch (to walk the message). Other codecs are faster."""
SHAPES_MAX = 1_000
"""How many shapes of lone messages are kept. A shape is the form of a frame, by which messages of
this form are read without protobuf."""
REST_S = 1.0
"""How soon a connection at rest sees that the rate has changed."""


class ThisBroker(Protocol):
    """The broker of the connection."""

    @property
    def incomplete(self) -> Counter:
        """Counts the chunked messages that this broker's producers left incomplete."""

    def count_waiting(self, size: int) -> None:
        """Add `size`, which may be negative, to the bytes that wait to be stored."""


class Intake:
    """The producers of one connection, by the producer ids of this connection. An Intake is the
    ProducersLink of its producers."""

    def __init__(self, link: Link, broker: ThisBroker, message_bytes_max: int) -> None:
        self.producers: dict[int, Producer] = {}
        self.waiting_bytes = 0
        self.drop = ServerError.NOT_ALLOWED
        self.send, self.answers = link.send, link.answers
        self._link = link
        self._broker = broker
        self._bytes_max = message_bytes_max + METADATA_BYTES_MAX
        self._chunks: dict[Producer, ChunksOfProducer] = {}  # of producers that have sent a chunk
        self._runs: dict[int, Run] = {}  # not handed on yet, by producer id
        self._shapes: dict[bytes, Shape] = {}
        self._walked = 0  # number of messages walked in this step
        self._ids_away: dict[int, None] = {}  # of producers sent away that are not back
        self._resting: dict[Allowance, None] = {}  # the rates that let no more pass now

    @property
    def is_read(self) -> bool:
        return self._link.is_read

    @property
    def rests(self) -> bool:
        """Whether the rate of a partition lets the connection send no more now."""
        return bool(self._resting)

    def _rest(self, rate: Allowance) -> None:
        """Rest as long as the rate lets no more pass; the rate may change meanwhile."""
        self._resting.pop(rate, None)
        wait_s = rate.wait_s(asyncio.get_running_loop().time())
        if wait_s and self._link.open:
            self._resting[rate] = None
            self.later(min(wait_s, REST_S), partial(self._rest, rate))
        self._link.read_or_not()

    def later(self, seconds: float, do: Callable[[], None]) -> object:
        return asyncio.get_running_loop().call_later(seconds, do)

    def stored(self, size: int) -> None:
        self.waiting_bytes -= size
        self._broker.count_waiting(-size)
        self._link.read_or_not()

    def add(self, producer: Producer) -> None:
        self._ids_away.pop(producer.id, None)
        self.producers[producer.id] = producer

    def remove(self, producer: Producer) -> bool:
        """End the producer; returns whether the connection had it."""
        producer.leave(producer)
        chunks = self._chunks.pop(producer, None)
        if self.producers.get(producer.id) is not producer:
            return False
        del self.producers[producer.id]
        if chunks is not None:
            chunks.give_up("the producer left", refuse=False)
        return True

    def remove_all(self) -> None:
        """Remove all producers, because the connection has ended. On another connection the client
        sends messages without a receipt again."""
        gone_producers: dict[LiveWriter, list[Producer]] = {}
        for producer in list(self.producers.values()):
            self.remove(producer)
            gone_producers.setdefault(producer.partition.writer, []).append(producer)
        for writer, producers in gone_producers.items():
            writer.backlog.drop(producers)

    def send_producer_away(self, producer: Producer) -> None:
        """End the producer; its client then looks the topic up again."""
        if producer in self._chunks:
            self._chunks[producer].forget()  # the client sends these messages again
        if self.remove(producer):
            self._ids_away[producer.id] = None
            self.send(encode(close_command(producer.id)))

    def take_alike(self, data: bytes, spans: Sequence[Span], at: int) -> int:
        """Take the successive SENDs, from span `at` on, that have the shape of an earlier lone
        message; returns the number of SENDs taken."""
        begin = spans[at][0]
        shape = self._shapes.get(data[begin : begin + KEY_BYTES])
        producer = None if shape is None else self.producers.get(shape.producer_id)
        if shape is None or producer is None or producer in self._chunks:
            return 0
        if not producer.may_send or producer.partition.send_limits.delay_ms_max is not None:
            return 0
        run = self._runs.get(producer.id)
        if run is None:
            run = Run(producer, shape.name, batched=False)
        elif run.batched or run.producer_name != shape.name or not run.takes_alike:
            return 0
        size_max = min(run.room, self._bytes_max)
        limit = producer.partition.send_limits.batch_bytes_max or size_max
        alike = shape.read(data, spans, at, size_max, run.after, limit)
        if alike.sends:
            run.extend(alike)
            self._runs[producer.id] = run
        return len(alike.sends)

    def begin_step(self) -> None:
        """Count the work of one step of the loop from now on."""
        self._walked = 0

    @property
    def step_is_over(self) -> bool:
        """Whether so many messages were walked for sequence ids that the step has to end."""
        return self._walked >= WALKED_MESSAGES_MAX

    def take(self, part: Any, batch: bytes) -> None:
        """Take the batch of a SEND with the fields `part`. Raises MalformedFrame."""
        producer = self.producers.get(part.producer_id)
        if producer is None or not producer.may_send:
            if part.producer_id not in self._ids_away:
                self.send(encode(close_command(part.producer_id)))
            return  # the client of a producer that was sent away sends the batch again
        if not batch:
            raise MalformedFrame("SEND without a batch")
        ids = (part.producer_id, part.sequence_id, part.highest_sequence_id)
        send = Send(*ids, part.is_chunk)
        if part.HasField("txnid_most_bits"):
            self.hand_on()
            producer.refuse(send.sequence_id, Refusal(self.drop, NO_TRANSACTIONS))
            return
        parsed = self._parsed(producer, send, batch)
        if parsed is None:
            return
        name, batched = parsed.metadata.producer_name, parsed.batched
        unpacked = pulsar_batch.unpacked_bytes(parsed)
        last_sequence_id = NO_ID
        if producer.partition.log.deduplicates:
            last_sequence_id = parsed.last_sequence_id
            if parsed.needs_walk:
                self._walked += parsed.messages + unpacked // BYTES_AS_A_MESSAGE
        arguments = (send, batch, name, batched, parsed.messages, last_sequence_id)
        run = self._runs.get(producer.id)
        if run is None or not run.add(*arguments, unpacked):
            if run is not None:
                self._append(run)
            run = self._runs[producer.id] = Run(producer, name, batched)
            run.add(*arguments, unpacked)
        if not batched:
            self._learn(Shape.of(send, part.HasField("num_messages"), name))

    def _learn(self, shape: Shape | None) -> None:
        """Note the shape of a producer's lone message; later messages are read by this shape."""
        if shape is not None:
            if len(self._shapes) >= SHAPES_MAX:  # some are of producers that have left
                self._shapes.clear()
            self._shapes[shape.key] = shape

    def _parsed(self, producer: Producer, send: Send, batch: bytes) -> pulsar_batch.Batch | None:
        """The parsed batch. None: the batch was refused here, or it is a chunk and was taken."""
        try:
            parsed = self._checked(batch, producer.partition)
        except Refusal as refusal:
            self.hand_on()
            if send.is_chunk:
                self._chunks_of(producer).note_damaged_chunk()
            producer.refuse(send.sequence_id, refusal)
            return None
        if parsed.is_chunk:
            self.hand_on()
            self._chunks_of(producer).take(send, batch, parsed, self._append)
            return None
        if producer in self._chunks:
            self._chunks[producer].note_other_message()
        return parsed

    def _checked(self, batch: bytes, partition: PartitionOfProducer) -> pulsar_batch.Batch:
        """Raises Refusal."""
        most = partition.send_limits.batch_bytes_max
        if most is not None and len(batch) > most:
            what = f"Exceed maximum message size: {len(batch)} bytes, the topic's policy"
            raise Refusal(self.drop, f"{what} message_bytes_max allows {most}")
        if len(batch) > self._bytes_max:
            limit = self._bytes_max - METADATA_BYTES_MAX
            raise Refusal(self.drop, f"a batch of {len(batch)} bytes, at most {limit} are allowed")
        try:
            parsed = pulsar_batch.parse(batch, check=True)
        except errors.BadEntry as error:
            raise Refusal(ServerError.CHECKSUM, error.what) from error
        if parsed.metadata.HasField("txnid_most_bits"):
            raise Refusal(self.drop, NO_TRANSACTIONS)
        if not isinstance(parsed.metadata.producer_name, str):
            raise Refusal(self.drop, "the producer's name in the batch is not UTF-8")
        fault = fault_of_name("producer", parsed.metadata.producer_name)
        fault = fault or fault_of_name("chunked message", parsed.metadata.uuid)
        fault = fault or pulsar_batch.fault_of(parsed, whole=not parsed.is_chunk)
        fault = fault or pulsar_batch.fault_of_publish_time(parsed)
        if partition.send_limits.delay_ms_max is not None:
            fault = fault or partition.send_limits.fault_of(parsed.metadata)
        if partition.log.deduplicates and fault is None:
            fault = pulsar_batch.fault_of_walk(parsed)
        if fault is not None:
            raise Refusal(self.drop, fault)
        return parsed

    def hand_on(self) -> None:
        runs, self._runs = self._runs, {}
        for run in runs.values():
            self._append(run)

    def _append(self, run: Run) -> None:
        self.waiting_bytes += run.waiting_bytes
        self._broker.count_waiting(run.waiting_bytes)
        run.number_sends()
        partition = run.producer.partition
        partition.writer.append(run)
        rate = partition.send_limits.rate
        if rate.rate is not None:
            rate.take(run.messages, run.size)
            if rate not in self._resting:
                self._rest(rate)

    def _chunks_of(self, producer: Producer) -> ChunksOfProducer:
        if producer not in self._chunks:
            chunks = ChunksOfProducer(producer, self._broker.incomplete, self.drop)
            self._chunks[producer] = chunks
        return self._chunks[producer]
