"""Chunked messages on their way in: held until the last chunk came, then stored as one batch.

Always true: a chunked message is stored with all its chunks or not at all (one batch in one entry),
and only then have its chunks their receipts, all with its id. So who sends a later chunk without
the first has had receipts before: the message is stored, and the producer is told so. What is held
is bounded: a message by what an entry takes, those of a broker by HELD_BYTES_MAX; a message whose
producer goes or sends another before its last chunk is given up, counted and logged.
"""

import logging
from collections.abc import Callable

from spark_ledger.broker.broker import HeldChunks
from spark_ledger.broker.names import NOWHERE
from spark_ledger.broker.producer import NO_ID, Producer, Run
from spark_ledger.broker.wire.commands import Refusal, ServerError
from spark_ledger.broker.wire.sends import Send, receipts
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
        send: Send,
        data: bytes,
        parsed: pulsar_batch.Batch,
        append: Callable[[Run], None],
    ) -> None:
        """Hold the chunk; with the last one `append` what is to be stored."""
        metadata = parsed.metadata
        if metadata.uuid != self._uuid and self._uuid is not None:
            self.give_up("it sent another message")
        if not metadata.chunk_id:
            self._damaged = False
        try:
            self._check(parsed, data)
        except Refusal as why:
            self._refused = metadata.uuid
            self._refuse_held(why)
            self._producer.refuse(send.sequence_id, why)
            return
        if metadata.chunk_id and self._uuid is None:
            answer = receipts([(send, NOWHERE)], NOWHERE, self._producer.shown_partition)
            self._producer.connection.send(answer)
            return
        self._uuid, self._count = metadata.uuid, metadata.num_chunks_from_msg
        self._chunks.append(data)
        self._sequence_id = send.sequence_id
        self._bytes += len(data)
        self._held.bytes += len(data)
        if len(self._chunks) == self._count:
            whole = pulsar_batch.joined(self._chunks)
            append(self._run(send, whole, parsed))
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

    def _run(self, send: Send, whole: bytes, last: pulsar_batch.Batch) -> Run:
        producer, name = self._producer, last.metadata.producer_name
        run = Run(producer, name, batched=False, chunks=self._forget())
        last_sequence_id = last.last_sequence_id if producer.deduplicates else NO_ID
        run.add(send, whole, name, False, 1, last_sequence_id)
        return run

    def _forget(self) -> int:
        """How many chunks were held."""
        count = len(self._chunks)
        self._held.bytes -= self._bytes
        self._uuid, self._chunks, self._bytes, self._count = None, [], 0, 0
        return count
