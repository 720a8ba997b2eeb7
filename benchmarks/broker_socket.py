"""A producer and a reader on a plain socket, for where Pulsar's own client would be the limit.

They say what a client says and nothing more: frames are made before the clock runs, receipts and
messages are counted by their frames, PING is answered. Every batch of a topic has the same number
of messages, which is how a reader counts them.
"""

import os
import random
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from spark_ledger.broker.wire.commands import BaseCommand, MessageId, command
from spark_ledger.broker.wire.frames import PulsarFrame, PulsarFrameReader, encode
from spark_ledger.topic.entry import pulsar_batch
from spark_ledger.topic.entry.pulsar_message_pb2 import MessageMetadata, SingleMessageMetadata

_SIZE = struct.Struct(">I")
_RECEIPT, _MESSAGE, _PING = 7, 9, 18
CHUNK_BYTES, CHUNK_FRAMES = 256 << 10, 100
TIMEOUT_S = 60.0
EARLIEST = MessageId(ledgerId=2**64 - 1, entryId=2**64 - 1)


def batch_of(messages: int, message_bytes: int, *, keys: bool = False, key: str = "") -> bytes:
    """So many messages of random bytes as a producer sends them; 0: a lone one, not batched. With
    `keys` each message has a random key, with `key` all have that key."""
    metadata = MessageMetadata(
        producer_name="socket", sequence_id=0, publish_time=int(time.time() * 1000)
    )
    if key:
        metadata.partition_key = key
    if not messages:
        return pulsar_batch.build_batch(metadata, os.urandom(message_bytes))
    parts: list[bytes] = []
    for number in range(messages):
        said = SingleMessageMetadata(payload_size=message_bytes, sequence_id=number)
        if keys or key:
            said.partition_key = key or str(random.randrange(10**6))
        head = said.SerializeToString()
        parts += (_SIZE.pack(len(head)), head, os.urandom(message_bytes))
    metadata.num_messages_in_batch = messages
    payload = b"".join(parts)
    metadata.uncompressed_size = len(payload)
    return pulsar_batch.build_batch(metadata, payload)


@dataclass
class Link:
    """One connection, one producer or reader on it."""

    url: str
    _frames: PulsarFrameReader = field(default_factory=PulsarFrameReader)
    _kept: bytes = b""

    def __post_init__(self) -> None:
        host, _, port = self.url.removeprefix("pulsar://").rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        asked = command("connect", client_version="benchmark", protocol_version=19)
        self.ask(asked, "connected")

    def close(self) -> None:
        self._socket.close()

    def ask(self, asked: BaseCommand, answer: str) -> BaseCommand:
        """What is answered; other commands that come before it are passed over."""
        self._socket.sendall(encode(asked))
        while True:
            for frame in self._frames.feed(self._received()):
                if frame.command.HasField(answer):
                    return frame.command
                for refused in ("error", "send_error"):
                    if frame.command.HasField(refused):
                        raise RuntimeError(str(getattr(frame.command, refused)))

    def found(self, topic: str) -> None:
        """Look the topic up, as who uses it has to: its owner has it open then."""
        self.ask(
            command("partitioned_metadata", topic=topic, request_id=1),
            "partitioned_metadata_response",
        )
        self.ask(command("lookup", topic=topic, request_id=2), "lookup_response")

    def produce_on(self, topic: str, producer_id: int = 0) -> None:
        self.found(topic)
        asked = command("producer", topic=topic, producer_id=producer_id, request_id=3)
        self.ask(asked, "producer_success")

    def read_on(self, topic: str, consumer_id: int = 0) -> None:
        """A reader from the topic's beginning."""
        self.found(topic)
        asked = command(
            "subscribe",
            topic=topic,
            subscription=f"socket-{random.getrandbits(48):x}",
            subType=0,
            consumer_id=consumer_id,
            request_id=4,
            durable=False,
            start_message_id=EARLIEST,
            initialPosition=1,
        )
        self.ask(asked, "success")

    def subscribe_to(self, topic: str, name: str, sub_type: int, consumer_id: int) -> None:
        """A consumer of a durable subscription that begins at the topic's beginning."""
        self.found(topic)
        asked = command(
            "subscribe",
            topic=topic,
            subscription=name,
            subType=sub_type,
            consumer_id=consumer_id,
            request_id=4,
            consumer_name=f"c{consumer_id}",
            initialPosition=1,
        )
        self.ask(asked, "success")

    def fileno(self) -> int:
        return self._socket.fileno()

    def message_ids(self) -> list[MessageId]:
        """Wait for bytes; the ids of the MESSAGEs that are whole now."""
        ids = []
        for frame in self._frames.feed(self._received()):
            if frame.command.type == _MESSAGE:
                ids.append(frame.command.message.message_id)
            elif frame.command.type == _PING:
                self._socket.sendall(encode(command("pong")))
        return ids

    def flow(self, permits: int, consumer_id: int = 0) -> None:
        self._socket.sendall(
            encode(command("flow", consumer_id=consumer_id, messagePermits=permits))
        )

    def send(self, frames: bytes) -> None:
        self._socket.sendall(frames)

    def messages(self) -> Iterator[PulsarFrame]:
        """The MESSAGEs as they come, whole."""
        while True:
            for frame in self._frames.feed(self._received()):
                if frame.command.type == _MESSAGE:
                    yield frame
                elif frame.command.type == _PING:
                    self._socket.sendall(encode(command("pong")))

    def counted(self, wanted: int) -> int:
        """Waits for bytes; how many frames of that type are whole now."""
        data = self._kept + self._received()
        at, end, count = 0, len(data), 0
        while end - at >= 4:
            (size,) = _SIZE.unpack_from(data, at)
            if end - at - 4 < size:
                break
            kind = data[at + 9]  # the type is a command's first field
            if kind == wanted:
                count += 1
            elif kind == _PING:
                self._socket.sendall(encode(command("pong")))
            else:
                raise RuntimeError(f"a command of type {kind} came")
            at += 4 + size
        self._kept = data[at:]
        return count

    def _received(self) -> bytes:
        data = self._socket.recv(1 << 20)
        if not data:
            raise ConnectionError(f"{self.url} has closed the connection")
        return data


def frames_of(batches: Sequence[bytes], count: int, messages: int) -> Iterator[tuple[int, bytes]]:
    """The SENDs of the batches, in turn: how many are together, and their bytes."""
    chunk: list[bytes] = []
    for number in range(count):
        sent = command("send", producer_id=0, sequence_id=number, num_messages=max(1, messages))
        batch = batches[number % len(batches)]
        chunk.append(encode(sent, batch))
        if len(chunk) == CHUNK_FRAMES or len(chunk) * len(batch) >= CHUNK_BYTES:
            yield len(chunk), b"".join(chunk)
            chunk = []
    if chunk:
        yield len(chunk), b"".join(chunk)


def produce(url: str, topic: str, batch: bytes, count: int, messages: int, window: int) -> float:
    """Seconds for so many batches, each with its receipt, about `window` without one at most."""
    return produce_in_turn(url, topic, [batch], count, messages, window)


def produce_in_turn(
    url: str, topic: str, batches: Sequence[bytes], count: int, messages: int, window: int
) -> float:
    """As `produce`, of several batches in turn."""
    chunks = list(frames_of(batches, count, messages))
    link = Link(url)
    link.produce_on(topic)
    began = time.perf_counter()
    waiting = 0
    for sent, frames in chunks:
        link.send(frames)
        waiting += sent
        while waiting >= window:
            waiting -= link.counted(_RECEIPT)
    while waiting:
        waiting -= link.counted(_RECEIPT)
    took = time.perf_counter() - began
    link.close()
    return took


@dataclass(frozen=True)
class Kept:
    """What became of a rate that was offered: messages/s with a receipt, and ms until it."""

    rate: float
    p99_ms: float


def paced(url: str, topic: str, batch: bytes, messages: int, rate: float, seconds: float) -> Kept:
    """Offer `rate` messages a second. As a client does whose queue is full, it waits while those of
    half a second have no receipt, and does not catch up what it did not send meanwhile."""
    link = Link(url)
    link.produce_on(topic)
    began = time.perf_counter()
    due, waiting, done = began, 0, 0
    times_ms: list[float] = []
    sent_s: deque[float] = deque()
    for sent, frames in frames_of([batch], int(seconds * rate / messages), messages):
        while waiting and (waiting * messages > rate / 2 or time.perf_counter() < due):
            for _ in range(link.counted(_RECEIPT)):
                times_ms.append(1e3 * (time.perf_counter() - sent_s.popleft()))
            waiting, done = len(sent_s), len(times_ms)
        now = time.perf_counter()
        if now > began + seconds:
            break
        time.sleep(max(0.0, due - now))
        due = max(due, now - 0.1) + sent * messages / rate
        link.send(frames)
        sent_s.extend([time.perf_counter()] * sent)
        waiting += sent
    took = time.perf_counter() - began
    link.close()
    times_ms.sort()
    return Kept(done * messages / took, times_ms[int(0.99 * done)])


def read(url: str, topic: str, batches: int, messages: int, permits: int = 10_000) -> float:
    """Seconds until a reader has seen so many batches, from its first permits on."""
    link = Link(url)
    link.read_on(topic)
    began = time.perf_counter()
    link.flow(permits)
    seen, owed, each = 0, 0, max(1, messages)
    while seen < batches:
        count = link.counted(_MESSAGE)
        seen += count
        owed += count * each
        if owed >= permits // 2:
            link.flow(owed)
            owed = 0
    took = time.perf_counter() - began
    link.close()
    return took
