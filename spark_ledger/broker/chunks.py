"""Chunked messages on their way in: held until the last chunk came, then stored as one batch.

Always true: a chunked message is stored with all its chunks or not at all (one batch in one entry),
and only then have its chunks their receipts, all with its id. So who sends a later chunk without
the first has had receipts before: the message is stored, and the producer is told so. What is held
is bounded: a message by what an entry takes, those of a broker by HELD_BYTES_MAX; a message whose
producer goes or sends another before its last chunk is given up, counted and logged.
"""

import logging
from collections.abc import Callable
from typing import Any

from spark_ledger import errors
from spark_ledger.broker.broker import HeldChunks
from spark_ledger.broker.names import NOWHERE
from spark_ledger.broker.producer import OVERHEAD_BYTES, Producer, SentBatch
from spark_ledger.broker.wire.commands import Refusal, ServerError, receipt
from spark_ledger.broker.wire.frames import encode
from spark_ledger.topic.entry import pulsar_batch

HELD_BYTES_MAX = 128 << 20
"""Of all chunks that a broker holds; beyond that a producer is sent away and comes again."""

_log = logging.getLogger(__name__)


class ChunksOfProducer:
    """The message that a producer sends in chunks now, if it does. `drop` is the error by which its
    client drops a message."""

    def __init__(self, producer: Producer, held: HeldChunks, drop: ServerError) -> None:
        self._producer = producer
        self._held = held
        self._drop = drop
        self._uuid: str | None = None
        self._count = 0
        self._chunks: list[bytes] = []
        self._sequence_id = 0
        self._bytes = 0
        self._refused: str | None = None
        self._damaged = False

    def take(
        self,
        send: Any,
        data: bytes,
        parsed: pulsar_batch.Batch,
        append: Callable[[SentBatch], None],
    ) -> None:
        """Hold the chunk; with the last one `append` what is to be stored."""
        said = parsed.metadata
        if said.uuid != self._uuid and self._uuid is not None:
            self.give_up("it sent another message")
        if not said.chunk_id:
            self._damaged = False
        try:
            self._check(parsed, data)
        except Refusal as why:
            self._refused = said.uuid
            self._refuse_held(why)
            self._producer.refuse(send.sequence_id, why)
            return
        if said.chunk_id and self._uuid is None:
            last = send.highest_sequence_id
            _send_receipt(self._producer, send.sequence_id, last, NOWHERE, NOWHERE)
            return
        self._uuid, self._count = said.uuid, said.num_chunks_from_msg
        self._chunks.append(data)
        self._sequence_id = send.sequence_id
        self._bytes += len(data)
        self._held.bytes += len(data)
        if len(self._chunks) == self._count:
            whole = pulsar_batch.joined(self._chunks)
            chunks = self._forget()
            append(SentChunks(self._producer, send, whole, parsed, chunks))
        elif self._held.bytes > HELD_BYTES_MAX:
            _log.warning("too many chunked messages at a time: a producer is to come again")
            self._forget()
            self._producer.send_away()

    def damaged(self) -> None:
        """A chunk cannot be taken: its message is refused, and the chunks that follow it."""
        self.give_up("one that is damaged")
        self._damaged = True

    def forget(self) -> None:
        """The producer goes and will send the message again."""
        self._forget()

    def give_up(self, why: str, *, refuse: bool = True) -> None:
        """Its last chunk will not come."""
        if self._uuid is None:
            return
        self._held.given_up += 1
        what = (
            f"a chunked message of producer '{self._producer.name}' is incomplete:"
            f" {len(self._chunks)} of {self._count} chunks came, then {why}"
        )
        _log.warning("%s; %d such messages since the start", what, self._held.given_up)
        if refuse:
            self._refuse_held(Refusal(self._drop, what))
        else:
            self._forget()

    def _refuse_held(self, why: Refusal) -> None:
        sequence_id = self._sequence_id
        for _ in range(self._forget()):
            self._producer.refuse(sequence_id, why)

    def _check(self, parsed: pulsar_batch.Batch, data: bytes) -> None:
        """Raises Refusal."""
        said = parsed.metadata
        if self._damaged or (self._refused is not None and said.uuid == self._refused):
            raise Refusal(self._drop, "a chunk of a message that was refused")
        bytes_max = self._held.message_bytes_max
        each = parsed.payload_at + 16
        size = said.total_chunk_msg_size + said.num_chunks_from_msg * each
        if max(size, self._bytes + len(data) + each) > bytes_max:
            raise Refusal(
                self._drop,
                f"a chunked message of {size} bytes, at most {bytes_max} are taken:"
                " entry_bytes_max says so",
            )
        expected = len(self._chunks)
        known = self._uuid is not None
        if parsed.batched or not 0 <= said.chunk_id < said.num_chunks_from_msg:
            raise Refusal(self._drop, f"chunk {said.chunk_id} of {said.num_chunks_from_msg}")
        if known and (said.chunk_id, said.num_chunks_from_msg) != (expected, self._count):
            raise Refusal(
                self._drop,
                f"chunk {said.chunk_id} of {said.num_chunks_from_msg}, where chunk {expected} of"
                f" {self._count} was to come",
            )

    def _forget(self) -> int:
        """How many chunks were held."""
        count = len(self._chunks)
        self._held.bytes -= self._bytes
        self._uuid, self._chunks, self._bytes, self._count = None, [], 0, 0
        return count


class SentChunks(SentBatch):
    """A chunked message until its receipts, one for each chunk."""

    __slots__ = ("_chunks",)

    def __init__(
        self, producer: Producer, send: Any, data: bytes, last: pulsar_batch.Batch, chunks: int
    ) -> None:
        super().__init__(producer, send, data, last)
        self.waiting_bytes += OVERHEAD_BYTES * chunks
        self._chunks = chunks
        for _ in range(chunks):
            producer.came()

    def _received(self, ledger: int, entry: int) -> None:
        producer = self.producer
        for _ in range(self._chunks):
            _send_receipt(producer, self.sequence_id, self.highest, ledger, entry)
            producer.received()
        producer.connection.stored(self.waiting_bytes)

    def failed(self, error: errors.LedgerError) -> None:
        if isinstance(error, errors.TopicTerminated):
            code = ServerError.TOPIC_TERMINATED
            for _ in range(self._chunks - 1):
                self.producer.connection.send_error(
                    self.producer.id, self.sequence_id, code, str(error)
                )
        super().failed(error)


def _send_receipt(
    producer: Producer, sequence_id: int, highest: int, ledger: int, entry: int
) -> None:
    at = (ledger, entry, producer.shown_partition)
    producer.connection.send(encode(receipt(producer.id, sequence_id, highest, *at)))
