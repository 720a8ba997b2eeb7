"""One client's connection: its commands carried out, its producers and consumers.

Always true: batches of a producer are handed on in the order in which they came, and before what
its connection asks for next; a request is answered once, by what was asked for or by one of
Pulsar's error codes; what a connection makes wait is bounded: it is not read while
CONNECTION_BYTES_MAX of its batches are not stored, while the broker is crowded, while it does not
take its answers, or with REQUESTS_MAX requests under way; meanwhile its PINGs are answered. One
that is silent for SILENT_S, although it was asked, is closed; one whose place another client asks
for is asked at once, and closed after ANSWER_S.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from spark_ledger import errors
from spark_ledger.broker import names
from spark_ledger.broker.broker import Broker
from spark_ledger.broker.dispatch.consumers import Consumer
from spark_ledger.broker.owned_topic import OwnedTopic
from spark_ledger.broker.produce.chunks import ChunksOfProducer
from spark_ledger.broker.produce.live_writer import LiveWriter
from spark_ledger.broker.produce.producer import NO_ID, ChunkedSends, Producer, Run
from spark_ledger.broker.serve import commands as requests
from spark_ledger.broker.serve.committers import CommitterConnection
from spark_ledger.broker.wire.commands import (
    SEND,
    AckType,
    BaseCommand,
    Refusal,
    ServerError,
    command,
    name_of,
    not_text,
)
from spark_ledger.broker.wire.frames import (
    Frame,
    FrameReader,
    MalformedFrame,
    Span,
    encode,
    frame_of,
)
from spark_ledger.broker.wire.sends import KEY_BYTES, Send, Shape
from spark_ledger.topic.commit.hand_over import MAGIC
from spark_ledger.topic.entry import pulsar_batch

CONNECTION_BYTES_MAX = 16 << 20
UNSENT_BYTES_MAX = 1 << 20
TURN_BYTES_MAX = 64 << 10
"""What is sent in one turn of the loop goes out together, up to so many bytes."""
REQUESTS_MAX = 1000
METADATA_BYTES_MAX = 10 << 10  # beside a message of the largest size
_CPP = "Pulsar-CPP"
"""How the C++ client, on which others are built, calls itself. It drops a message that is refused
by ChecksumError; by another error it connects again, and sends it again. Others drop what is
refused by NotAllowedError."""
ASK_S, SILENT_S, CLOSE_S = 30.0, 90.0, 1.0
HELD_PONG_S = 2.0
"""Clients wait some 30 s for the answer to a PING, or for anything else that comes."""
NO_TRANSACTIONS = "there are no transactions here"
ACK_IDS_MAX = 2000
"""Of one step. A command with more is carried out in several, and its connection is not read until
it is; what its client asked for after it waits for it."""
ANSWER_S = 5.0
"""A client whose place another one asks for has so long to answer a PING."""
SHAPES_MAX = 1_000
"""How lone messages look, by producer; what is forgotten is read by protobuf once more."""

_log = logging.getLogger(__name__)


class Connection(asyncio.Protocol):
    def __init__(self, broker: Broker, on_end: Callable[["Connection"], None]) -> None:
        self.broker = broker
        self.producers: dict[int, Producer] = {}
        self.consumers: dict[int, tuple[Consumer, OwnedTopic, str]] = {}
        self.open = False
        self.connected = False
        self._runs: dict[int, Run] = {}  # of the bytes at hand, by producer
        self._shapes: dict[bytes, Shape] = {}
        self._begun = False
        self._away: dict[int, None] = {}  # producers that were sent away, and are not back
        self.drop = ServerError.NOT_ALLOWED
        self._bytes_max = broker.message_bytes_max + METADATA_BYTES_MAX
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._frames = FrameReader()
        self._transport: asyncio.Transport
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._flushing = False
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._gone = asyncio.Event()
        self._waiting_bytes = 0
        self._requests: dict[asyncio.Task[None], None] = {}
        self._acking: deque[Iterator[None]] = deque()
        self._acks: asyncio.Task[None] | None = None
        self._heard_s = self._loop.time()
        self._heard = asyncio.Event()
        self._asking = 0  # how many wait for it to be heard
        self._timer: asyncio.TimerHandle | None = None
        self._held: asyncio.TimerHandle | None = None  # while it is not read

    # -- bytes -------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(high=UNSENT_BYTES_MAX)
        self.open = True
        self._timer = self._loop.call_later(ASK_S, self._ask)

    def data_received(self, data: bytes) -> None:
        if not self._begun and data[:1] == MAGIC[:1]:
            self._becomes_a_committers(data)
            return
        self._begun = True
        self._heard_s = self._loop.time()
        self._heard.set()
        try:
            self._take_all(*self._frames.whole(data))
        except MalformedFrame as error:
            _log.warning("a connection ends: %s", error)
            self.close()
        except Exception:
            _log.exception("a connection ends: a defect")
            self.close()
        self._read_or_not()

    def _becomes_a_committers(self, data: bytes) -> None:
        """It is no client of Pulsar, but who commits past live segments."""
        other = CommitterConnection(self.broker, self._transport)
        self._transport.set_protocol(other)
        self.connection_lost(None)
        other.data_received(data)

    def pause_writing(self) -> None:
        self._has_room.clear()
        self._read_or_not()

    def resume_writing(self) -> None:
        self._has_room.set()
        self._read_or_not()

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        self._gone.set()
        self._heard.set()
        self._has_room.set()
        if self._timer is not None:
            self._timer.cancel()
        left: dict[LiveWriter, list[Producer]] = {}
        for producer in list(self.producers.values()):
            self.forget_producer(producer)
            left.setdefault(producer.partition.writer, []).append(producer)
        for writer, producers in left.items():
            writer.drop(producers)  # they send it again, on another connection
        for consumer, _, _ in list(self.consumers.values()):
            self.forget_consumer(consumer)
        for task in list(self._requests):
            task.cancel()
        self._acking.clear()  # they come again
        self._on_end(self)

    def close(self) -> None:
        if self.open:
            self._flush()
            self._transport.close()

    def send(self, frame: bytes) -> None:
        """Send it with what else is sent in this turn of the loop; much goes at once, so that the
        sender sees by `room` that it is much."""
        if not self.open:
            return
        self._out.append(frame)
        self._out_bytes += len(frame)
        if self._out_bytes >= TURN_BYTES_MAX:
            self._flush()
        elif not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    async def room(self) -> None:
        await self._has_room.wait()

    def _flush(self) -> None:
        self._flushing = False
        out, self._out, self._out_bytes = self._out, [], 0
        if self.open and out:
            self._transport.write(out[0] if len(out) == 1 else b"".join(out))

    @property
    def is_read(self) -> bool:
        return self.open and self._transport.is_reading()

    def later(self, seconds: float, do: Callable[[], None]) -> object:
        return self._loop.call_later(seconds, do)

    def stored(self, size: int) -> None:
        """So many bytes of this connection's batches wait no more."""
        self._waiting_bytes -= size
        self.broker.forgot(size)
        self._read_or_not()

    def _read_or_not(self) -> None:
        if not self.open or self._transport.is_closing():
            return
        full = (
            self._waiting_bytes > CONNECTION_BYTES_MAX
            or not self._has_room.is_set()
            or len(self._requests) >= REQUESTS_MAX
            or bool(self._acking)
        )
        if self.broker.crowded and self._waiting_bytes:
            full = True
            self.broker.wait_for_relief(self._read_or_not)
        if self._asking and not self._heard.is_set():
            full = False  # the answer may wait to be read
        if full and self._transport.is_reading():
            self._transport.pause_reading()
            if self._held is None:
                self._held = self._loop.call_later(HELD_PONG_S, self._answer_while_held)
        elif not full and not self._transport.is_reading():
            self._transport.resume_reading()

    def _answer_while_held(self) -> None:
        """A PING may wait behind what is not read. It is answered unread: else the client takes
        the broker for dead, connects again, and sends all again."""
        self._held = None
        if not self.open or self._transport.is_closing() or self._transport.is_reading():
            return
        if self._has_room.is_set():
            self.send(encode(command("pong")))
        self._held = self._loop.call_later(HELD_PONG_S, self._answer_while_held)

    def _ask(self) -> None:
        silent_s, transport = self._loop.time() - self._heard_s, self._transport
        takes_nothing = transport.is_closing() or not self._has_room.is_set()
        if silent_s >= SILENT_S and (takes_nothing or transport.is_reading()):
            self._abort(silent_s)
            return
        if silent_s >= ASK_S:
            self.send(encode(command("ping")))
        self._timer = self._loop.call_later(ASK_S, self._ask)

    def _abort(self, silent_s: float) -> None:
        """Not `close`, which would wait until the client takes what is sent."""
        _log.info("a connection ends: nothing was heard for %.0f s", silent_s)
        self._transport.abort()

    async def answers(self) -> bool:
        """Whether its client is there: it is asked, and has ANSWER_S. The connection of one that is
        silent ends, whatever waits to be sent."""
        self.send(encode(command("ping")))
        self._flush()
        self._heard.clear()
        self._asking += 1
        self._read_or_not()
        try:
            async with asyncio.timeout(ANSWER_S):
                while self.open and not self._heard.is_set():
                    await self._heard.wait()
        except TimeoutError:
            if self.open and not self._heard.is_set():  # else both came after a standstill
                self._abort(ANSWER_S)
                await self._gone.wait()
        finally:
            self._asking -= 1
            self._read_or_not()
        return self.open

    # -- commands ----------------------------------------------------------------------------

    def _take_all(self, data: bytes, spans: Sequence[Span]) -> None:
        """Carry out commands, or begin to; what a producer sends in one go is handed on in one.
        Raises MalformedFrame."""
        at = 0
        try:
            while at < len(spans):
                count = self._take_alike(data, spans, at)
                if not count:
                    self._take(frame_of(data, *spans[at]))
                at += count or 1
        finally:
            self._hand_on()

    def _take_alike(self, data: bytes, spans: Sequence[Span], at: int) -> int:
        """Lone messages of a producer that look as those before; how many there are."""
        begin = spans[at][0]
        shape = self._shapes.get(data[begin : begin + KEY_BYTES])
        producer = None if shape is None else self.producers.get(shape.producer_id)
        if shape is None or producer is None or producer.chunks is not None:
            return 0
        if not producer.may_send:
            return 0
        run = self._runs.get(producer.id)
        if run is None:
            run = Run(producer, shape.name, batched=False)
        elif run.batched or run.producer_name != shape.name or not run.takes_alike:
            return 0
        found = shape.read(data, spans, at, min(run.room, self._bytes_max), run.after)
        if found.sends:
            run.extend(found)
            self._runs[producer.id] = run
        return len(found.sends)

    def _take(self, frame: Frame) -> None:
        if frame.command.type == SEND and self.connected and frame.command.HasField("send"):
            self._send(frame.command.send, frame.batch or b"")
            return
        self._hand_on()
        name = name_of(frame.command)
        if name is None:
            raise MalformedFrame(f"the unknown command {frame.command.type}")
        part = getattr(frame.command, name)
        if not self.connected and name != "connect":
            raise MalformedFrame(f"{name} before CONNECT")
        damaged = not_text(part)
        if name in requests.ANSWERS and damaged is not None:
            why = Refusal(ServerError.NOT_ALLOWED, f"{damaged} is not UTF-8")
            requests.ANSWERS[name].refuse(self, part, why)
        elif damaged is not None:
            raise MalformedFrame(f"{name} with a {damaged} that is not UTF-8")
        elif name in _AT_ONCE:
            if name == "redeliver":
                self._finish_acks()
            _AT_ONCE[name](self, part)
        elif name in requests.ANSWERS:
            self._finish_acks()
            self._begin(name, part)
        else:
            raise MalformedFrame(f"{name}, which a client does not send")

    def _begin(self, name: str, part: Any) -> None:
        task = self._loop.create_task(self._answer(requests.ANSWERS[name], part))
        self._requests[task] = None
        task.add_done_callback(self._answered)

    def _answered(self, task: "asyncio.Task[None]") -> None:
        self._requests.pop(task, None)
        self._read_or_not()

    async def _answer(self, answer: "requests.Answer", part: Any) -> None:
        try:
            await answer.carry_out(self, part)
        except Exception as error:
            refused = requests.refusal_of(error)
            if refused.code is ServerError.UNKNOWN:
                _log.exception("a request has failed")
            answer.refuse(self, part, refused)

    def _connect(self, part: Any) -> None:
        self.connected = True
        if part.client_version.startswith(_CPP):
            self.drop = ServerError.CHECKSUM
        size = self.broker.message_bytes_max
        self.send(encode(requests.connected(part.protocol_version, size)))

    def _ping(self, _: Any) -> None:
        self.send(encode(command("pong")))

    def _pong(self, _: Any) -> None:
        """It was heard."""

    def _send(self, part: Any, batch: bytes) -> None:
        producer = self.producers.get(part.producer_id)
        if producer is None or not producer.may_send:
            if part.producer_id not in self._away:
                self.send(encode(_closed(part.producer_id)))
            return  # one that was sent away sends again
        if not batch:
            raise MalformedFrame("SEND without a batch")
        ids = (part.producer_id, part.sequence_id, part.highest_sequence_id)
        send = Send(*ids, part.is_chunk)
        if part.HasField("txnid_most_bits"):
            self._hand_on()
            producer.refuse(send.sequence_id, Refusal(self.drop, NO_TRANSACTIONS))
            return
        parsed = self._parsed(producer, send, batch)
        if parsed is None:
            return
        name, batched = parsed.metadata.producer_name, parsed.batched
        last = parsed.last_sequence_id if producer.partition.log.deduplicates else NO_ID
        given = (send, batch, name, batched, parsed.messages, last)
        unpacked = pulsar_batch.unpacked_bytes(parsed)
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
            parsed = self._checked(batch)
        except Refusal as why:
            self._hand_on()
            if send.is_chunk:
                self._chunks_of(producer).damaged()
            producer.refuse(send.sequence_id, why)
            return None
        if parsed.is_chunk:
            self._hand_on()
            self._chunks_of(producer).take(send, batch, parsed, self._append)
            return None
        if producer.chunks is not None:
            producer.chunks.another()
        return parsed

    def _checked(self, batch: bytes) -> pulsar_batch.Batch:
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
        fault = pulsar_batch.fault_of(parsed, whole=not parsed.is_chunk)
        fault = fault or pulsar_batch.untimely(parsed)
        if fault is not None:
            raise Refusal(self.drop, fault)
        return parsed

    def _hand_on(self) -> None:
        runs, self._runs = self._runs, {}
        for run in runs.values():
            self._append(run)

    def _append(self, run: Run) -> None:
        waiting_bytes = run.waiting_bytes
        self._waiting_bytes += waiting_bytes
        self.broker.waiting_bytes += waiting_bytes
        run.hand_on()
        run.producer.partition.writer.append(run)

    def _chunks_of(self, producer: Producer) -> ChunkedSends:
        if producer.chunks is None:
            producer.chunks = ChunksOfProducer(producer, self.broker.ownership, self.drop)
        return producer.chunks

    def _flow(self, part: Any) -> None:
        if part.consumer_id in self.consumers:
            self.consumers[part.consumer_id][0].flow(part.messagePermits)

    def _ack(self, part: Any) -> None:
        self._acking.append(self._ack_in_steps(part))
        if len(self._acking) == 1 and len(part.message_id) <= ACK_IDS_MAX:
            self._finish_acks()
        elif self._acks is None:
            self._acks = self._loop.create_task(self._ack_rest())

    def _finish_acks(self) -> None:
        while self._acking:
            for _ in self._acking.popleft():
                pass

    async def _ack_rest(self) -> None:
        while self._acking:
            if next(self._acking[0], self) is self:
                self._acking.popleft()
            await asyncio.sleep(0)
        self._acks = None
        self._read_or_not()

    def _ack_in_steps(self, part: Any) -> Iterator[None]:
        found = self.consumers.get(part.consumer_id)
        refused: Refusal | None = None
        if found is None:  # one that was sent away, say: what it has got comes again
            what = f"there is no consumer {part.consumer_id}"
            refused = Refusal(ServerError.CONSUMER_NOT_FOUND, what)
        else:
            try:
                yield from self._acknowledge(part, *found)
            except Exception as error:
                refused = requests.refusal_of(error)
                if isinstance(error, errors.LedgerFenced | errors.SubscriptionNotFound):
                    found[0].end()  # another has the subscription, or nobody
        if part.HasField("request_id"):
            response = command(
                "ack_response", consumer_id=part.consumer_id, request_id=part.request_id
            )
            if refused is not None:
                response.ack_response.error = refused.code
                response.ack_response.message = refused.message
            self.send(encode(response))

    def _acknowledge(
        self, part: Any, consumer: Consumer, topic: OwnedTopic, name: str
    ) -> Iterator[None]:
        if part.HasField("txnid_most_bits"):
            raise Refusal(ServerError.NOT_ALLOWED, NO_TRANSACTIONS)
        place, moved = consumer.place, False
        confirmed = place.partition.end  # nothing beyond was sent
        for count, found in enumerate(part.message_id, 1):
            offset = names.offset_of(found, place.partition.ledger)
            if part.ack_type == AckType.CUMULATIVE:
                end = consumer.acknowledged_up_to(found, offset)
                moved |= end <= confirmed and place.acks.up_to(end)
            else:
                for lo, hi in consumer.acknowledged(found, offset):
                    moved |= hi <= confirmed and place.acks.add(lo, hi)
            if not count % ACK_IDS_MAX:
                yield
                if self.consumers.get(consumer.id, (None,))[0] is not consumer:
                    return  # it was sent away, for a seek, say
        if moved:
            topic.subscription(name).moved(place)

    def _redeliver(self, part: Any) -> None:
        if part.consumer_id in self.consumers:
            epoch = part.consumer_epoch if part.HasField("consumer_epoch") else None
            self.consumers[part.consumer_id][0].redeliver(epoch)

    # -- producers and consumers ---------------------------------------------------------------

    def forget_producer(self, producer: Producer) -> bool:
        """Whether it was here."""
        producer.leave(producer)
        if self.producers.get(producer.id) is not producer:
            return False
        del self.producers[producer.id]
        if producer.chunks is not None:
            producer.chunks.give_up("it left", refuse=False)
        return True

    def forget_consumer(self, consumer: Consumer) -> bool:
        """Whether it was here."""
        found = self.consumers.get(consumer.id)
        if found is None or found[0] is not consumer:
            return False
        del self.consumers[consumer.id]
        found[1].leave(found[2], consumer)
        return True

    def send_producer_away(self, producer: Producer) -> None:
        if producer.chunks is not None:
            producer.chunks.forget()  # they come again
        if self.forget_producer(producer):
            self._away[producer.id] = None
            self.send(encode(_closed(producer.id)))

    def add_producer(self, producer: Producer) -> None:
        self._away.pop(producer.id, None)
        self.producers[producer.id] = producer

    def send_consumer_away(self, consumer: Consumer) -> None:
        if self.forget_consumer(consumer):
            away = command("close_consumer", consumer_id=consumer.id, request_id=0)
            self.send(encode(away))

    async def close_and_wait(self) -> None:
        self.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._gone.wait()


def _closed(producer_id: int) -> BaseCommand:
    """What sends a client's producer away: it is to look its topic up again."""
    return command("close_producer", producer_id=producer_id, request_id=0)


_AT_ONCE: dict[str, Callable[[Connection, Any], None]] = {
    "connect": Connection._connect,
    "ping": Connection._ping,
    "pong": Connection._pong,
    "flow": Connection._flow,
    "ack": Connection._ack,
    "redeliver": Connection._redeliver,
}
