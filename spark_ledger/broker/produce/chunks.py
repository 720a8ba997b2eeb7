"""Messages that come in chunks, from their first chunk until all have their receipts.

Always true: each chunk is stored as it comes, and the message is there with its last one. The
chunks have their receipts once all are stored, all with the id of the last one. So a producer that
is sent away in the middle sends the message again from its first chunk, to the broker that owns the
partition then, and what was stored of it before is of no message. A producer that sends a later
chunk without the first has had receipts before: the message is stored.

A producer may send other messages, also in chunks, between the chunks of one, and a chunk again,
which is not stored twice. A message whose producer goes before its last chunk, or sends others and
no chunk of it for GIVE_UP_S, is given up, counted and logged. Where sequence ids are looked at
(deduplication), messages are whole in the order of these, so another message gives up the one
before it at once.
"""

import logging
from collections.abc import Callable, Iterable

from spark_ledger.broker.names import NOWHERE
from spark_ledger.broker.produce.producer import NO_ID, Producer, Run
from spark_ledger.broker.produce.waiting import Chunk
from spark_ledger.broker.wire.commands import Refusal, ServerError
from spark_ledger.broker.wire.sends import Send
from spark_ledger.metrics import Counter
from spark_ledger.topic.entry import pulsar_batch

GIVE_UP_S = 2.0
BEGUN_MAX = 16
"""Messages in chunks that a producer has begun; of more the oldest is given up."""
KEPT_RATIO_MAX = 10_000
"""Of a producer's answers that wait for a message in chunks; beyond that it is given up."""

_log = logging.getLogger(__name__)


class ChunkedMessage:
    """A message of `count` chunks that has begun to come: the offsets of the chunks, each NOWHERE
    until the chunk is sent to a ledger, and their SENDs with their numbers, repeated ones too."""

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
        """No chunk of the message has come since the last look."""

    def stored(self, offset: int) -> None:
        """The message is stored: all its chunks get their receipts, with the id of the last one;
        NOWHERE: it was stored before."""
        for send, number in self.sends:
            self.producer.answer(number, 1, self.producer.receipt(send, offset))

    def refused(self, why: Refusal) -> None:
        """No chunk of the message gets a receipt, and later chunks are refused."""
        self.forget(self.uuid, why)
        sends, self.sends = self.sends, []
        for send, number in sends:
            self.producer.answer(number, 1, self.producer.error(send.sequence_id, why))


class ChunksOfProducer:
    """The messages that a producer sends in chunks now. `drop` is the error by which its client
    drops a message; `incomplete` counts the messages that are given up."""

    def __init__(self, producer: Producer, incomplete: Counter, drop: ServerError) -> None:
        self._producer = producer
        self._refused = producer.partition.refused
        self._incomplete = incomplete
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
        """The producer sends a message that is not in chunks."""
        self._others_come(None)

    def damaged(self) -> None:
        """A chunk is damaged, and its message unknown: the messages that were begun are refused,
        and later chunks of a message that was not begun."""
        self.give_up("one that is damaged")
        self._damaged = True

    def forget(self) -> None:
        """The producer goes; its client sends again the messages without a receipt."""
        self._begun.clear()

    def give_up(self, why: str, *, refuse: bool = True) -> None:
        """The last chunks of the messages that were begun will not come."""
        for message in list(self._begun.values()):
            self._give_up(message, why, refuse=refuse)

    def _others_come(self, uuid: str | None) -> None:
        """Another message, or a chunk of it, comes between the chunks of those that were begun."""
        others = [message for message in self._begun.values() if message.uuid != uuid]
        if not others:
            return
        full = len(others) >= BEGUN_MAX and uuid not in self._begun
        if self._producer.partition.log.deduplicates:
            for message in others:
                self._give_up(message, "it sent another message")
        elif full or self._producer.held > KEPT_RATIO_MAX:
            self._give_up(others[0], "many others")
        elif not self._looks:
            self._looks = True
            self._producer.connection.later(GIVE_UP_S, self._look)

    def _look(self) -> None:
        """Give up messages without a chunk since the last look, if later SENDs have come."""
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
        self._incomplete.add()
        what = (
            f"a chunked message of producer '{self._producer.name}' is incomplete:"
            f" {len(message.offsets)} of {message.count} chunks came, then {why}"
        )
        _log.warning("%s; %d such messages since the start", what, self._incomplete.value)
        if refuse:
            self._refuse(message.uuid, Refusal(self._drop, what))
        else:
            del self._begun[message.uuid]

    def _refuse(self, uuid: str, why: Refusal) -> None:
        """The chunks of the message that came get no receipts, and later ones are refused."""
        self._refused.add(self._producer.name, uuid)
        message = self._begun.pop(uuid, None)
        if message is not None:
            message.refused(why)

    def _check(self, parsed: pulsar_batch.Batch, message: ChunkedMessage | None) -> None:
        """Raises Refusal."""
        metadata = parsed.metadata
        refused = self._damaged or self._refused.has(self._producer.name, metadata.uuid)
        if message is None and metadata.chunk_id > 0 and refused:
            raise Refusal(self._drop, "a chunk of a message that was refused")
        came = len(parsed.data) - parsed.payload_at + (0 if message is None else message.bytes)
        size = max(metadata.total_chunk_msg_size, metadata.uncompressed_size, came)
        if size > pulsar_batch.CHUNKED_BYTES_MAX:
            most = pulsar_batch.CHUNKED_BYTES_MAX
            raise Refusal(
                self._drop, f"a message of {size} bytes in chunks, at most {most} are taken"
            )
        count = metadata.num_chunks_from_msg
        if count > pulsar_batch.CHUNKS_MAX:
            most = pulsar_batch.CHUNKS_MAX
            raise Refusal(self._drop, f"a message in {count} chunks, at most {most} are taken")
        if parsed.batched or not 0 <= metadata.chunk_id < count:
            raise Refusal(self._drop, f"chunk {metadata.chunk_id} of {count}")
        if message is None:
            return
        expected = len(message.offsets)
        if metadata.chunk_id > expected or count != message.count:
            raise Refusal(
                self._drop,
                f"chunk {metadata.chunk_id} of {count}, where chunk {expected} of {message.count}"
                " was to come",
            )


class ChunkRun(Run):
    """A chunk until it is stored; its message is stored with the last chunk. Each chunk notes its
    offset when it is sent, and the last one is stored with the offsets of the others."""

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
        sequence_id = parsed.last_sequence_id if producer.partition.log.deduplicates else NO_ID
        stored = data if last else pulsar_batch.earlier_chunk(data)
        self.add(send, stored, name, False, 1, sequence_id)

    def hand_on(self) -> None:
        """The chunk's number is in its message."""

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
