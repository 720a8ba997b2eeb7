"""What producers of one connection send: SENDs that came together become runs.

Always true: batches of a producer are handed on in the order in which they came, and before what
its connection asks for next; a batch that is refused is answered between the receipts of those
around it. The bytes of its batches that are not stored are counted here alone, up and down.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from spark_ledger import errors
from spark_ledger.broker.names import fault_of_name
from spark_ledger.broker.produce.chunks import ChunksOfProducer
from spark_ledger.broker.produce.live_writer import LiveWriter
from spark_ledger.broker.produce.producer import NO_ID, Producer, Run, closed
from spark_ledger.broker.wire.commands import NO_TRANSACTIONS, Refusal, ServerError
from spark_ledger.broker.wire.frames import MalformedFrame, Span, encode
from spark_ledger.broker.wire.link import Link
from spark_ledger.broker.wire.sends import KEY_BYTES, Send, Shape
from spark_ledger.metrics import Counter
from spark_ledger.topic.entry import pulsar_batch
from spark_ledger.topic.entry.pulsar_batch import WALKED_MESSAGES_MAX

METADATA_BYTES_MAX = 10 << 10  # beside a message of the largest size
BYTES_AS_A_MESSAGE = 400
"""So many bytes take as long to decompress as a message to walk (ZLIB; others are faster)."""
SHAPES_MAX = 1_000
"""How lone messages look, by producer; what is forgotten is read by protobuf once more."""


class ThisBroker(Protocol):
    """This broker, which counts the messages that were given up as `incomplete`."""

    @property
    def incomplete(self) -> Counter: ...

    def count_waiting(self, size: int) -> None:
        """So many bytes of clients wait from now on, or wait no more where it is negative."""


class Intake:
    """Of the producers of one connection, by their ids there; their ProducersLink."""

    def __init__(self, link: Link, broker: ThisBroker, message_bytes_max: int) -> None:
        self.producers: dict[int, Producer] = {}
        self.waiting_bytes = 0
        self.drop = ServerError.NOT_ALLOWED
        self.send, self.answers = link.send, link.answers
        self._link = link
        self._broker = broker
        self._bytes_max = message_bytes_max + METADATA_BYTES_MAX
        self._chunks: dict[Producer, ChunksOfProducer] = {}  # of those here that have sent a chunk
        self._runs: dict[int, Run] = {}  # of the bytes at hand, by producer
        self._shapes: dict[bytes, Shape] = {}
        self._walked = 0  # messages in this step
        self._away: dict[int, None] = {}  # producers that were sent away, and are not back

    @property
    def is_read(self) -> bool:
        return self._link.is_read

    def later(self, seconds: float, do: Callable[[], None]) -> object:
        return asyncio.get_running_loop().call_later(seconds, do)

    def stored(self, size: int) -> None:
        self.waiting_bytes -= size
        self._broker.count_waiting(-size)
        self._link.read_or_not()

    def add(self, producer: Producer) -> None:
        self._away.pop(producer.id, None)
        self.producers[producer.id] = producer

    def remove(self, producer: Producer) -> bool:
        """Whether it was here."""
        producer.leave(producer)
        chunks = self._chunks.pop(producer, None)
        if self.producers.get(producer.id) is not producer:
            return False
        del self.producers[producer.id]
        if chunks is not None:
            chunks.give_up("it left", refuse=False)
        return True

    def remove_all(self) -> None:
        """The connection is gone: its client sends again, on another one, what was not stored."""
        left: dict[LiveWriter, list[Producer]] = {}
        for producer in list(self.producers.values()):
            self.remove(producer)
            left.setdefault(producer.partition.writer, []).append(producer)
        for writer, producers in left.items():
            writer.backlog.drop(producers)

    def send_producer_away(self, producer: Producer) -> None:
        """It is to look its topic up again."""
        if producer in self._chunks:
            self._chunks[producer].forget()  # they come again
        if self.remove(producer):
            self._away[producer.id] = None
            self.send(encode(closed(producer.id)))

    def take_alike(self, data: bytes, spans: Sequence[Span], at: int) -> int:
        """Lone messages of a producer that look as those before; how many there are."""
        begin = spans[at][0]
        shape = self._shapes.get(data[begin : begin + KEY_BYTES])
        producer = None if shape is None else self.producers.get(shape.producer_id)
        if shape is None or producer is None or producer in self._chunks:
            return 0
        if not producer.may_send:
            return 0
        run = self._runs.get(producer.id)
        if run is None:
            run = Run(producer, shape.name, batched=False)
        elif run.batched or run.producer_name != shape.name or not run.takes_alike:
            return 0
        alike = shape.read(data, spans, at, min(run.room, self._bytes_max), run.after)
        if alike.sends:
            run.extend(alike)
            self._runs[producer.id] = run
        return len(alike.sends)

    def begin_step(self) -> None:
        """The loop did what else there was to do."""
        self._walked = 0

    @property
    def step_is_over(self) -> bool:
        """Whether so much was walked for sequence ids that others are to have their turn."""
        return self._walked >= WALKED_MESSAGES_MAX

    def take(self, part: Any, batch: bytes) -> None:
        producer = self.producers.get(part.producer_id)
        if producer is None or not producer.may_send:
            if part.producer_id not in self._away:
                self.send(encode(closed(part.producer_id)))
            return  # one that was sent away sends again
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
        last = NO_ID
        if producer.partition.log.deduplicates:
            last = parsed.last_sequence_id
            if parsed.needs_walk:
                self._walked += parsed.messages + unpacked // BYTES_AS_A_MESSAGE
        given = (send, batch, name, batched, parsed.messages, last)
        run = self._runs.get(producer.id)
        if run is None or not run.add(*given, unpacked):
            if run is not None:
                self._append(run)
            run = self._runs[producer.id] = Run(producer, name, batched)
            run.add(*given, unpacked)
        if not batched:
            self._learn(Shape.of(send, part.HasField("num_messages"), name))

    def _learn(self, shape: Shape | None) -> None:
        """How a producer's lone messages look, for those that follow."""
        if shape is not None:
            if len(self._shapes) >= SHAPES_MAX:  # of producers that left, too: those here come anew
                self._shapes.clear()
            self._shapes[shape.key] = shape

    def _parsed(self, producer: Producer, send: Send, batch: bytes) -> pulsar_batch.Batch | None:
        """What its producer sent; None of what is refused, or a chunk."""
        try:
            parsed = self._checked(batch, producer.partition.log.deduplicates)
        except Refusal as why:
            self.hand_on()
            if send.is_chunk:
                self._chunks_of(producer).damaged()
            producer.refuse(send.sequence_id, why)
            return None
        if parsed.is_chunk:
            self.hand_on()
            self._chunks_of(producer).take(send, batch, parsed, self._append)
            return None
        if producer in self._chunks:
            self._chunks[producer].another()
        return parsed

    def _checked(self, batch: bytes, deduplicates: bool) -> pulsar_batch.Batch:
        """Raises Refusal."""
        if len(batch) > self._bytes_max:
            most = self._bytes_max - METADATA_BYTES_MAX
            raise Refusal(self.drop, f"a batch of {len(batch)} bytes, at most {most} are taken")
        try:
            parsed = pulsar_batch.parse(batch, check=True)
        except errors.BadEntry as error:
            raise Refusal(ServerError.CHECKSUM, error.what) from error
        if parsed.metadata.HasField("txnid_most_bits"):
            raise Refusal(self.drop, NO_TRANSACTIONS)
        if not isinstance(parsed.metadata.producer_name, str):
            raise Refusal(self.drop, "its producer's name is not UTF-8")
        fault = fault_of_name("producer", parsed.metadata.producer_name)
        fault = fault or fault_of_name("chunked message", parsed.metadata.uuid)
        fault = fault or pulsar_batch.fault_of(parsed, whole=not parsed.is_chunk)
        fault = fault or pulsar_batch.fault_of_publish_time(parsed)
        if deduplicates and fault is None:
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
        run.hand_on()
        run.producer.partition.writer.append(run)

    def _chunks_of(self, producer: Producer) -> ChunksOfProducer:
        if producer not in self._chunks:
            made = ChunksOfProducer(producer, self._broker.incomplete, self.drop)
            self._chunks[producer] = made
        return self._chunks[producer]
