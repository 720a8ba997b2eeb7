"""Messages that come in chunks, from their first chunk until all have their receipts.

Always true: each chunk is stored when it comes, and readers see the message after its last chunk is
stored. The chunks get their receipts together, after all are stored, all with the id of the last
chunk. If a producer is sent away before the receipts, it sends the message again from the first
chunk, to the broker that then owns the partition; the chunks that were stored earlier belong to no
message. If a later chunk comes without the first chunk, the producer had a receipt: the message is
stored.

Between the chunks of a message, a producer may send other messages, also in chunks. A chunk that
comes twice is stored once. A message is given up, counted and logged if its producer goes before
the last chunk, or sends other messages and no chunk of this message for GIVE_UP_S. With
deduplication, messages must become complete in the order of their sequence ids: an incomplete
message is given up as soon as its producer sends another message.
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
"""How many messages in chunks of a producer may be incomplete; beyond that the oldest is given
up."""
HELD_ANSWERS_MAX = 10_000
"""How many of a producer's answers may wait for an incomplete message; beyond that the message is
given up."""

_log = logging.getLogger(__name__)


class ChunkedMessage:
    """A message of `count` chunks of which at least one has come. `offsets` has the offset of each
    chunk, NOWHERE until the chunk is sent to a ledger. `sends` has the SENDs of chunks, repeated
    SENDs too, with their numbers among all SENDs of the producer. `on_refusal` refuses the chunks
    that will come."""

    __slots__ = ("bytes", "count", "is_quiet", "offsets", "on_refusal", "producer", "sends", "uuid")

    def __init__(
        self, producer: Producer, uuid: str, count: int, on_refusal: Callable[[str, Refusal], None]
    ) -> None:
        self.producer = producer
        self.on_refusal = on_refusal
        self.uuid = uuid
        self.count = count
        self.offsets: list[int] = []
        self.sends: list[tuple[Send, int]] = []
        self.bytes = 0
        self.is_quiet = False
        """Whether no chunk of the message has come since the last look."""

    def send_receipts(self, offset: int) -> None:
        """Send the receipts of all chunks, with the id of the last chunk; NOWHERE: the message was
        stored before."""
        for send, number in self.sends:
            self.producer.answer(number, 1, self.producer.receipt(send, offset))

    def refuse(self, refusal: Refusal) -> None:
        """Refuse the chunks that came, and the chunks that will come."""
        self.on_refusal(self.uuid, refusal)
        sends, self.sends = self.sends, []
        for send, number in sends:
            self.producer.answer(number, 1, self.producer.error(send.sequence_id, refusal))


class ChunksOfProducer:
    """A producer's messages in chunks that are incomplete. After the error `drop` the client drops
    a message and does not send it again. `incomplete` counts the messages that are given up."""

    def __init__(self, producer: Producer, incomplete: Counter, drop: ServerError) -> None:
        self._producer = producer
        self._refused_messages = producer.partition.refused
        self._incomplete = incomplete
        self._drop = drop
        self._messages: dict[str, ChunkedMessage] = {}
        self._had_damage = False
        self._is_look_due = False

    def take(
        self,
        send: Send,
        data: bytes,
        parsed: pulsar_batch.Batch,
        append: Callable[[Run], None],
    ) -> None:
        """`append` the chunk, as a run by itself."""
        metadata, producer = parsed.metadata, self._producer
        self._check_others(metadata.uuid)
        message = self._messages.get(metadata.uuid)
        try:
            self._check(parsed, message)
        except Refusal as refusal:
            self._refuse(metadata.uuid, refusal)
            producer.refuse(send.sequence_id, refusal)
            return
        if message is None and metadata.chunk_id:
            producer.answer(producer.number_sends(1), 1, producer.receipt(send, NOWHERE))
            return
        if message is None:
            self._refused_messages.remove(producer.name, metadata.uuid)
            count = metadata.num_chunks_from_msg
            message = ChunkedMessage(producer, metadata.uuid, count, self._refuse)
            self._messages[metadata.uuid] = message
        message.is_quiet = False
        message.sends.append((send, producer.number_sends(1)))
        if metadata.chunk_id < len(message.offsets):
            return  # the chunk came before
        message.bytes += len(data) - parsed.payload_at
        run = ChunkRun(send, data, parsed, message)
        message.offsets.append(NOWHERE)
        if len(message.offsets) == message.count:
            del self._messages[message.uuid]
        append(run)

    def note_other_message(self) -> None:
        """Note that the producer sends a message that is not in chunks."""
        self._check_others(uuid=None)

    def note_damaged_chunk(self) -> None:
        """Refuse all incomplete messages: the damaged chunk may be a part of any of them. From now
        on, also refuse the later chunks of a message without its first chunk."""
        self.give_up("a damaged chunk")
        self._had_damage = True

    def forget(self) -> None:
        """Forget the incomplete messages of a producer that goes: its client sends them again."""
        self._messages.clear()

    def give_up(self, event: str, *, refuse: bool = True) -> None:
        """Give up all incomplete messages; `event` came in place of their last chunks."""
        for message in list(self._messages.values()):
            self._give_up(message, event, refuse=refuse)

    def _check_others(self, uuid: str | None) -> None:
        """Give up incomplete messages that must not wait longer. A chunk of the message `uuid`
        comes now (None: a message without chunks comes); this message is not given up."""
        others = [message for message in self._messages.values() if message.uuid != uuid]
        if not others:
            return
        is_full = len(others) >= BEGUN_MAX and uuid not in self._messages
        if self._producer.partition.log.deduplicates:
            for message in others:
                self._give_up(message, "another message")
        elif is_full or self._producer.held_count > HELD_ANSWERS_MAX:
            self._give_up(others[0], "many other messages")
        elif not self._is_look_due:
            self._is_look_due = True
            self._producer.connection.later(GIVE_UP_S, self._look)

    def _look(self) -> None:
        """Give up messages without a chunk since the last look, if later SENDs have come. While
        the broker does not read from the connection, chunks may wait there (`is_read`)."""
        self._is_look_due = False
        is_read = self._producer.connection.is_read
        for message in list(self._messages.values()):
            if message.is_quiet and self._producer.sends > message.sends[-1][1] + 1:
                self._give_up(message, "other messages")
            else:
                message.is_quiet = is_read
        if self._messages:
            self._is_look_due = True
            self._producer.connection.later(GIVE_UP_S, self._look)

    def _give_up(self, message: ChunkedMessage, event: str, *, refuse: bool = True) -> None:
        self._incomplete.add()
        text = (
            f"a chunked message of producer '{self._producer.name}' is incomplete:"
            f" {len(message.offsets)} of {message.count} chunks came, then {event}"
        )
        _log.warning("%s; %d such messages since the start", text, self._incomplete.value)
        if refuse:
            self._refuse(message.uuid, Refusal(self._drop, text))
        else:
            del self._messages[message.uuid]

    def _refuse(self, uuid: str, refusal: Refusal) -> None:
        """Refuse the chunks of the message that came, and the chunks that will come."""
        self._refused_messages.add(self._producer.name, uuid)
        message = self._messages.pop(uuid, None)
        if message is not None:
            message.refuse(refusal)

    def _check(self, parsed: pulsar_batch.Batch, message: ChunkedMessage | None) -> None:
        """Raises Refusal."""
        metadata = parsed.metadata
        was_refused = self._refused_messages.has(self._producer.name, metadata.uuid)
        if message is None and metadata.chunk_id > 0 and (was_refused or self._had_damage):
            raise Refusal(self._drop, "a chunk of a message that was refused")
        bytes_before = 0 if message is None else message.bytes
        received = len(parsed.data) - parsed.payload_at + bytes_before
        size = max(metadata.total_chunk_msg_size, metadata.uncompressed_size, received)
        if size > pulsar_batch.CHUNKED_BYTES_MAX:
            limit = pulsar_batch.CHUNKED_BYTES_MAX
            raise Refusal(
                self._drop, f"a message of {size} bytes in chunks, at most {limit} are allowed"
            )
        count = metadata.num_chunks_from_msg
        if count > pulsar_batch.CHUNKS_MAX:
            limit = pulsar_batch.CHUNKS_MAX
            raise Refusal(self._drop, f"a message in {count} chunks, at most {limit} are allowed")
        if parsed.batched or not 0 <= metadata.chunk_id < count:
            raise Refusal(self._drop, f"chunk {metadata.chunk_id} of {count}")
        if message is None:
            return
        expected = len(message.offsets)
        if metadata.chunk_id > expected or count != message.count:
            raise Refusal(
                self._drop,
                f"chunk {metadata.chunk_id} of {count} in place of chunk {expected} of"
                f" {message.count}",
            )


class ChunkRun(Run):
    """A chunk until it is stored; its message is stored with the last chunk. When a chunk is sent,
    its offset is noted in `ChunkedMessage.offsets`. The last chunk is stored with the offsets of
    all earlier chunks."""

    __slots__ = ("_data", "_index", "_message")

    def __init__(
        self, send: Send, data: bytes, parsed: pulsar_batch.Batch, message: ChunkedMessage
    ) -> None:
        producer, name = message.producer, parsed.metadata.producer_name
        super().__init__(producer, name, batched=False)
        self._data, self._index = data, parsed.metadata.chunk_id
        self._message = message
        is_last = self._index == message.count - 1
        self.chunk = Chunk.LAST if is_last else Chunk.EARLIER
        sequence_id = parsed.last_sequence_id if producer.partition.log.deduplicates else NO_ID
        stored_data = data if is_last else pulsar_batch.earlier_chunk(data)
        self.add(
            *(send, stored_data, name), batched=False, messages=1, last_sequence_id=sequence_id
        )

    def number_sends(self) -> None:
        """Nothing to do: the chunk's SEND has its number already."""

    def sent(self, offset: int) -> None:
        offsets = self._message.offsets
        if self.chunk is Chunk.LAST:
            earlier = offsets[: self._index]
            assert NOWHERE not in earlier, "the earlier chunks were sent before the last chunk"
            self.batches = [pulsar_batch.last_chunk(earlier, self._data)]
        else:
            offsets[self._index] = offset

    def _send_receipts(self, ledger: int, offsets: Iterable[int]) -> None:
        if self.chunk is Chunk.LAST:
            self._message.send_receipts(next(iter(offsets)))
        self.producer.connection.stored(self.waiting_bytes)

    def _refuse(self, refusal: Refusal) -> None:
        self._message.refuse(refusal)
