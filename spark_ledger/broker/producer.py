"""A producer on its connection, and its batches until their receipts.

Always true: a batch has one receipt, with the id that it will always have, or its producer is sent
away: then it looks its topic up again and sends again what has no receipt.

Receipts and refusals go out in the order in which a producer sent: a client drops only the oldest
of the batches that it waits for.

Each chunk of a message is stored as it comes, and the message is there with its last one. The
chunks have their receipts once all are stored, all with the id of the last one. So a producer that
is sent away in the middle sends the message again from its first chunk, to whoever owns the
partition then, and what was stored of it before is of no message; and who sends a later chunk
without the first has had receipts before: the message is stored, and the producer is told so.

A producer may send other messages, also in chunks, between the chunks of one, and a chunk again,
which is not stored twice. A message whose producer goes before its last chunk, or sends others and
no chunk of it for GIVE_UP_S, is given up, counted and logged. Where sequence ids are looked at
(deduplication), messages are whole in the order of these, so another message gives up the one
before it at once.
"""

import logging
from collections.abc import Callable, Iterable
from itertools import accumulate, repeat
from typing import Protocol

from spark_ledger import errors
from spark_ledger.broker.names import NOWHERE
from spark_ledger.broker.owner.ownership import Ownership
from spark_ledger.broker.owner.partition import Partition
from spark_ledger.broker.owner.waiting import Chunk
from spark_ledger.broker.wire.commands import AccessMode, Refusal, ServerError, command
from spark_ledger.broker.wire.frames import encode
from spark_ledger.broker.wire.sends import UNPACKED_MAX, Alike, Send, receipts
from spark_ledger.topic.entry import pulsar_batch

NO_ID = -1
RUN_BYTES_MAX = 256 << 10
RUN_UNPACKED_MAX = 8 << 20
RUN_MESSAGES_MAX = 1 << 24
"""Of several batches; one may be larger. Messages are what a client says."""
OVERHEAD_BYTES = 1024
"""What a batch that waits takes beside its bytes, about."""
GIVE_UP_S = 2.0
BEGUN_MAX = 16
"""Messages in chunks that a producer has begun; of more the oldest is given up."""
HELD_MAX = 10_000
"""Of a producer's answers that wait for a message in chunks; beyond that it is given up."""

_log = logging.getLogger(__name__)


class ProducersLink(Protocol):
    """A client's connection, as its producers use it."""

    def send(self, frame: bytes) -> None: ...

    def stored(self, size: int) -> None:
        """So many bytes of a batch wait no more."""

    async def answers(self) -> bool:
        """Whether its client is there; if not, it has ended by then."""

    def send_producer_away(self, producer: "Producer") -> None:
        """It is to look its topic up again."""

    drop: ServerError
    """The error by which its client drops a message, and does not send it again."""

    @property
    def is_read(self) -> bool:
        """Whether what its client sends is read now."""

    def later(self, seconds: float, do: Callable[[], None]) -> object:
        """Call it after that time."""


class Producer:
    """Of one partition, on one connection. `topic_epoch`: of an exclusive one which of those that
    followed each other it is, 0 of one that is new. `leave` tells its topic that it has gone."""

    def __init__(
        self,
        connection: ProducersLink,
        producer_id: int,
        request_id: int,
        name: str,
        mode: AccessMode,
        epoch: int,
        topic_epoch: int,
        partition: Partition,
        leave: Callable[["Producer"], None],
        schema_version: bytes = b"",
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
        self.schema_version = schema_version
        self.may_send = False
        """Its client is told so, or will be in this turn of the loop."""
        self.chunks: ChunksOfProducer | None = None
        """Of the messages that it sends in chunks, once it has sent some."""
        self.sends = 0
        """How many came: each has its number, and its answer in that order."""
        self._answered = 0
        self._held: dict[int, tuple[int, bytes]] = {}

    def ready(self) -> None:
        """It may send: the answer to its request."""
        self.may_send = True
        made = command(
            "producer_success",
            request_id=self.request_id,
            producer_name=self.name,
            last_sequence_id=self.partition.writer.last_sequence_id(self.name),
            schema_version=self.schema_version,
            producer_ready=True,
        )
        if self.topic_epoch:
            made.producer_success.topic_epoch = self.topic_epoch
        self.connection.send(encode(made))

    def send_away(self) -> None:
        """It looks its topic up again, and sends again what has no receipt."""
        self.connection.send_producer_away(self)

    def refuse(self, sequence_id: int, why: Refusal) -> None:
        """Refuse a batch for good, after the answers to those before it."""
        self.answer(self.came(1), 1, self.error(sequence_id, why))

    def came(self, count: int) -> int:
        """So many sends more have come; the number of the first."""
        first = self.sends
        self.sends += count
        return first

    def answer(self, number: int, count: int, frames: bytes) -> None:
        """Answer so many sends from that number on, once all before them are."""
        if number != self._answered:
            self._held[number] = (count, frames)
            return
        self.connection.send(frames)
        self._answered += count
        while self._held and (held := self._held.pop(self._answered, None)) is not None:
            self.connection.send(held[1])
            self._answered += held[0]

    @property
    def held(self) -> int:
        """Answers that wait for one before them."""
        return len(self._held)

    def receipt(self, send: Send, offset: int) -> bytes:
        """NOWHERE: of a message that was stored before."""
        ledger = NOWHERE if offset == NOWHERE else self.partition.ledger
        return receipts([(send, offset)], ledger, self.partition.shown)

    def error(self, sequence_id: int, why: Refusal) -> bytes:
        ids = {"producer_id": self.id, "sequence_id": sequence_id}
        return encode(command("send_error", **ids, error=why.code, message=why.message))


class Run:
    """Batches of a producer that came together, until their receipts: they are stored together."""

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

    def hand_on(self) -> None:
        """It is to be stored: its answers come after those to what its producer sent before."""
        self._number = self.producer.came(len(self.batches))

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
        """One more batch of it, which has so many bytes when it is decompressed. False where that
        begins another run."""
        unpacked = max(unpacked, len(data))
        if self.batches and (
            self.size + len(data) > RUN_BYTES_MAX
            or self.unpacked + unpacked > RUN_UNPACKED_MAX
            or self.messages + messages > RUN_MESSAGES_MAX
            or self.producer_name != producer_name
            or self.batched != batched
            or NO_ID != last_sequence_id <= self._last_sequence_ids[-1]
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
        """Bytes of batches that it takes still."""
        return RUN_BYTES_MAX - self.size

    @property
    def takes_alike(self) -> bool:
        """Whether it takes as much of lone messages as are read at a time, decompressed."""
        return self.unpacked + RUN_BYTES_MAX + UNPACKED_MAX <= RUN_UNPACKED_MAX

    @property
    def after(self) -> int | None:
        """Above which the next sequence id is to be; None where nobody looks at them."""
        if not self.producer.partition.deduplicates:
            return None
        return self._last_sequence_ids[-1] if self.batches else NO_ID

    def extend(self, found: Alike) -> None:
        """Lone messages of its producer that `room` and `after` allow."""
        count = len(found.sends)
        self._sends += found.sends
        self.batches += found.batches
        self.counts += [1] * count
        self.messages += count
        size = sum(map(len, found.batches))
        self.size += size
        self.unpacked += size + found.unpacked
        said = found.said if self.producer.partition.deduplicates else repeat(NO_ID, count)
        self._last_sequence_ids += said

    def each(self) -> "list[Run]":
        found = list[Run]()
        columns = (self._sends, self.batches, self.counts, self._last_sequence_ids)
        for send, data, messages, last in zip(*columns, strict=True):
            one = Run(self.producer, self.producer_name, self.batched)
            about = self.unpacked * len(data) // self.size
            one.add(send, data, self.producer_name, self.batched, messages, last, about)
            one._number = self._number + len(found)
            found.append(one)
        return found

    def sent(self, offset: int) -> None:
        """What is stored does not depend on it."""

    def stored(self, offset: int) -> None:
        ledger = self.producer.partition.ledger
        self._received(ledger, accumulate(self.counts, initial=offset))

    def duplicate(self) -> None:
        self._received(NOWHERE, repeat(NOWHERE))

    def _received(self, ledger: int, entries: Iterable[int]) -> None:
        producer = self.producer
        said: Iterable[tuple[Send, int]] = zip(self._sends, entries, strict=False)
        frames = receipts(said, ledger, producer.partition.shown)
        producer.answer(self._number, len(self._sends), frames)
        producer.connection.stored(self.waiting_bytes)

    def failed(self, error: errors.LedgerError) -> None:
        producer = self.producer
        if isinstance(error, errors.TopicTerminated):
            self._refused(Refusal(ServerError.TOPIC_TERMINATED, str(error)))
        elif isinstance(error, errors.MessageTooBig):
            self._refused(Refusal(producer.connection.drop, str(error)))
        else:
            producer.send_away()
        producer.connection.stored(self.waiting_bytes)

    def _refused(self, why: Refusal) -> None:
        frames = [self.producer.error(send.sequence_id, why) for send in self._sends]
        self.producer.answer(self._number, len(frames), b"".join(frames))


class ChunkedMessage:
    """A message of which chunks came, `count` in all: their offsets, each NOWHERE until it is sent
    to a ledger, and how they were sent, with their numbers: those that came again, too."""

    __slots__ = ("bytes", "count", "forget", "offsets", "producer", "quiet", "sends", "uuid")

    def __init__(
        self, producer: Producer, uuid: str, count: int, forget: Callable[[str, Refusal], None]
    ) -> None:
        self.producer = producer
        self.forget = forget
        self.uuid = uuid
        self.count = count
        self.offsets: list[int] = []
        self.sends: list[tuple[Send, int]] = []
        self.bytes = 0
        self.quiet = False
        """No chunk of it has come since that was last looked at."""

    def stored(self, offset: int) -> None:
        """It is, and all chunks have their receipts, with the id of the last one; NOWHERE: it was
        before."""
        for send, number in self.sends:
            self.producer.answer(number, 1, self.producer.receipt(send, offset))

    def refused(self, why: Refusal) -> None:
        """None of its chunks has a receipt, and those that come are refused."""
        self.forget(self.uuid, why)
        sends, self.sends = self.sends, []
        for send, number in sends:
            self.producer.answer(number, 1, self.producer.error(send.sequence_id, why))


class ChunksOfProducer:
    """The messages that a producer sends in chunks now. `drop` is the error by which its client
    drops a message; what is given up is counted in `ownership`, which says so."""

    def __init__(self, producer: Producer, ownership: Ownership, drop: ServerError) -> None:
        self._producer = producer
        self._refused = producer.partition.refused
        self._ownership = ownership
        self._drop = drop
        self._begun: dict[str, ChunkedMessage] = {}
        self._damaged = False
        self._looks = False

    def take(
        self,
        send: Send,
        data: bytes,
        parsed: pulsar_batch.Batch,
        append: Callable[[Run], None],
    ) -> None:
        """`append` the chunk, as a run by itself."""
        metadata, producer = parsed.metadata, self._producer
        self._others_come(metadata.uuid)
        message = self._begun.get(metadata.uuid)
        try:
            self._check(parsed, message)
        except Refusal as why:
            self._refuse(metadata.uuid, why)
            producer.refuse(send.sequence_id, why)
            return
        if message is None and metadata.chunk_id:
            producer.answer(producer.came(1), 1, producer.receipt(send, NOWHERE))
            return
        if message is None:
            self._refused.begins(producer.name, metadata.uuid)
            count = metadata.num_chunks_from_msg
            message = ChunkedMessage(producer, metadata.uuid, count, self._refuse)
            self._begun[metadata.uuid] = message
        message.quiet = False
        message.sends.append((send, producer.came(1)))
        if metadata.chunk_id < len(message.offsets):
            return  # it came again
        message.bytes += len(data) - parsed.payload_at
        run = ChunkRun(send, data, parsed, message)
        message.offsets.append(NOWHERE)
        if len(message.offsets) == message.count:
            del self._begun[message.uuid]
        append(run)

    def another(self) -> None:
        """It sends a message that is in no chunks."""
        self._others_come(None)

    def damaged(self) -> None:
        """A chunk cannot be taken, and of which message it is is not known: those that were begun
        are refused, and the chunks that follow of one that was not."""
        self.give_up("one that is damaged")
        self._damaged = True

    def forget(self) -> None:
        """Its producer goes, and will send again what has no receipt."""
        self._begun.clear()

    def give_up(self, why: str, *, refuse: bool = True) -> None:
        """The last chunks of what it has begun will not come."""
        for message in list(self._begun.values()):
            self._give_up(message, why, refuse=refuse)

    def _others_come(self, uuid: str | None) -> None:
        """Between the chunks of those that were begun comes another message, or a chunk of one."""
        others = [message for message in self._begun.values() if message.uuid != uuid]
        if not others:
            return
        full = len(others) >= BEGUN_MAX and uuid not in self._begun
        if self._producer.partition.deduplicates:
            for message in others:
                self._give_up(message, "it sent another message")
        elif full or self._producer.held > HELD_MAX:
            self._give_up(others[0], "many others")
        elif not self._looks:
            self._looks = True
            self._producer.connection.later(GIVE_UP_S, self._look)

    def _look(self) -> None:
        """Give up those of which no chunk has come since the last look, but others after it."""
        self._looks = False
        read = self._producer.connection.is_read
        for message in list(self._begun.values()):
            if message.quiet and self._producer.sends > message.sends[-1][1] + 1:
                self._give_up(message, "others")
            else:
                message.quiet = read
        if self._begun:
            self._looks = True
            self._producer.connection.later(GIVE_UP_S, self._look)

    def _give_up(self, message: ChunkedMessage, why: str, *, refuse: bool = True) -> None:
        self._ownership.incomplete += 1
        what = (
            f"a chunked message of producer '{self._producer.name}' is incomplete:"
            f" {len(message.offsets)} of {message.count} chunks came, then {why}"
        )
        _log.warning("%s; %d such messages since the start", what, self._ownership.incomplete)
        if refuse:
            self._refuse(message.uuid, Refusal(self._drop, what))
        else:
            del self._begun[message.uuid]

    def _refuse(self, uuid: str, why: Refusal) -> None:
        """The chunks that came have no receipts, and those that come are refused."""
        self._refused.add(self._producer.name, uuid)
        message = self._begun.pop(uuid, None)
        if message is not None:
            message.refused(why)

    def _check(self, parsed: pulsar_batch.Batch, message: ChunkedMessage | None) -> None:
        """Raises Refusal."""
        said = parsed.metadata
        refused = self._damaged or self._refused.has(self._producer.name, said.uuid)
        if message is None and said.chunk_id > 0 and refused:
            raise Refusal(self._drop, "a chunk of a message that was refused")
        came = len(parsed.data) - parsed.payload_at + (0 if message is None else message.bytes)
        size = max(said.total_chunk_msg_size, said.uncompressed_size, came)
        if size > pulsar_batch.CHUNKED_BYTES_MAX:
            most = pulsar_batch.CHUNKED_BYTES_MAX
            raise Refusal(
                self._drop, f"a message of {size} bytes in chunks, at most {most} are taken"
            )
        count = said.num_chunks_from_msg
        if count > pulsar_batch.CHUNKS_MAX:
            most = pulsar_batch.CHUNKS_MAX
            raise Refusal(self._drop, f"a message in {count} chunks, at most {most} are taken")
        if parsed.batched or not 0 <= said.chunk_id < count:
            raise Refusal(self._drop, f"chunk {said.chunk_id} of {count}")
        if message is None:
            return
        expected = len(message.offsets)
        if said.chunk_id > expected or count != message.count:
            raise Refusal(
                self._drop,
                f"chunk {said.chunk_id} of {count}, where chunk {expected} of {message.count} was"
                " to come",
            )


class ChunkRun(Run):
    """A chunk, until it is stored; with the last one its message is. Each notes its offset when it
    is sent, and the last one is stored with those of the chunks before it."""

    __slots__ = ("_data", "_index", "_message")

    def __init__(
        self, send: Send, data: bytes, parsed: pulsar_batch.Batch, message: ChunkedMessage
    ) -> None:
        producer, name = message.producer, parsed.metadata.producer_name
        super().__init__(producer, name, batched=False)
        self._data, self._index = data, parsed.metadata.chunk_id
        self._message = message
        last = self._index == message.count - 1
        self.chunk = Chunk.LAST if last else Chunk.EARLIER
        sequence_id = parsed.last_sequence_id if producer.partition.deduplicates else NO_ID
        stored = data if last else pulsar_batch.earlier_chunk(data)
        self.add(send, stored, name, False, 1, sequence_id)

    def hand_on(self) -> None:
        """Its message has its number."""

    def sent(self, offset: int) -> None:
        offsets = self._message.offsets
        if self.chunk is Chunk.LAST:
            before = offsets[: self._index]
            assert NOWHERE not in before, "the chunks before the last one were sent before it"
            self.batches = [pulsar_batch.last_chunk(before, self._data)]
        else:
            offsets[self._index] = offset

    def _received(self, ledger: int, entries: Iterable[int]) -> None:
        if self.chunk is Chunk.LAST:
            self._message.stored(next(iter(entries)))
        self.producer.connection.stored(self.waiting_bytes)

    def _refused(self, why: Refusal) -> None:
        self._message.refused(why)
