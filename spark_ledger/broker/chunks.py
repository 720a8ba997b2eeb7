"""Chunked messages on their way in: each chunk is stored as it comes, the message is there with its
last one.

Always true: the chunks of a message have their receipts once all are stored, all with the id of the
last one. So a producer that is sent away in the middle sends the message again from its first
chunk, to whoever owns the partition then, and what was stored of it before is of no message; and
who sends a later chunk without the first has had receipts before: the message is stored, and the
producer is told so. A message whose producer goes or sends another before its last chunk is given
up, counted and logged.
"""

import logging
from collections.abc import Callable

from spark_ledger.broker.broker import Incomplete
from spark_ledger.broker.names import NOWHERE
from spark_ledger.broker.owner.waiting import Chunk
from spark_ledger.broker.producer import NO_ID, Producer, Run
from spark_ledger.broker.wire.commands import Refusal, ServerError
from spark_ledger.broker.wire.sends import Send, receipts
from spark_ledger.topic.entry import pulsar_batch

_log = logging.getLogger(__name__)


class ChunksOfProducer:
    """The message that a producer sends in chunks now, if it does. `drop` is the error by which its
    client drops a message."""

    def __init__(self, producer: Producer, incomplete: Incomplete, drop: ServerError) -> None:
        self._producer = producer
        self._incomplete = incomplete
        self._drop = drop
        self._uuid: str | None = None
        self._count = 0
        self._offsets: list[int] = []
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
        """`append` the chunk, as a run by itself."""
        metadata = parsed.metadata
        if metadata.uuid != self._uuid and self._uuid is not None:
            self.give_up("it sent another message")
        if not metadata.chunk_id:
            self._damaged = False
        try:
            self._check(parsed)
        except Refusal as why:
            self._refused = metadata.uuid
            self._refuse_all(why)
            self._producer.refuse(send.sequence_id, why)
            return
        if metadata.chunk_id and self._uuid is None:
            answer = receipts([(send, NOWHERE)], NOWHERE, self._producer.shown_partition)
            self._producer.connection.send(answer)
            return
        self._uuid, self._count = metadata.uuid, metadata.num_chunks_from_msg
        self._sequence_id = send.sequence_id
        self._bytes += len(data) - parsed.payload_at
        run = ChunkRun(self._producer, send, data, parsed, self._offsets)
        self._offsets.append(NOWHERE)
        if len(self._offsets) == self._count:
            self.forget()
        append(run)

    def damaged(self) -> None:
        """A chunk cannot be taken: its message is refused, and the chunks that follow it."""
        self.give_up("one that is damaged")
        self._damaged = True

    def forget(self) -> int:
        """The message is whole, or its producer goes and will send it again; how many of its chunks
        came."""
        count = len(self._offsets)
        self._uuid, self._offsets, self._bytes, self._count = None, [], 0, 0
        return count

    def give_up(self, why: str, *, refuse: bool = True) -> None:
        """Its last chunk will not come."""
        if self._uuid is None:
            return
        self._incomplete.count += 1
        what = (
            f"a chunked message of producer '{self._producer.name}' is incomplete:"
            f" {len(self._offsets)} of {self._count} chunks came, then {why}"
        )
        _log.warning("%s; %d such messages since the start", what, self._incomplete.count)
        if refuse:
            self._refuse_all(Refusal(self._drop, what))
        else:
            self.forget()

    def _refuse_all(self, why: Refusal) -> None:
        """Those that came have no receipts."""
        sequence_id = self._sequence_id
        for _ in range(self.forget()):
            self._producer.refuse(sequence_id, why)

    def _check(self, parsed: pulsar_batch.Batch) -> None:
        """Raises Refusal."""
        said = parsed.metadata
        if self._damaged or (self._refused is not None and said.uuid == self._refused):
            raise Refusal(self._drop, "a chunk of a message that was refused")
        came = self._bytes + len(parsed.data) - parsed.payload_at
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
        expected = len(self._offsets)
        known = self._uuid is not None
        if known and (said.chunk_id, count) != (expected, self._count):
            raise Refusal(
                self._drop,
                f"chunk {said.chunk_id} of {count}, where chunk {expected} of {self._count} was to"
                " come",
            )


class ChunkRun(Run):
    """A chunk, until it is stored; the last one has the receipts of all. `offsets` are those of the
    message's chunks, of which each notes its own when it is sent; the last one is stored with those
    before it."""

    __slots__ = ("_data", "_index", "_offsets")

    def __init__(
        self,
        producer: Producer,
        send: Send,
        data: bytes,
        parsed: pulsar_batch.Batch,
        offsets: list[int],
    ) -> None:
        said = parsed.metadata
        count, name = said.num_chunks_from_msg, said.producer_name
        last = said.chunk_id == count - 1
        super().__init__(producer, name, batched=False, chunks=count if last else 0)
        self.chunk = Chunk.LAST if last else Chunk.EARLIER
        sequence_id = parsed.last_sequence_id if producer.deduplicates else NO_ID
        stored = data if last else pulsar_batch.earlier_chunk(data)
        self.add(send, stored, name, False, 1, sequence_id)
        self._data, self._index, self._offsets = data, said.chunk_id, offsets

    def sent(self, offset: int) -> None:
        if self.chunk is Chunk.LAST:
            before = self._offsets[: self._index]
            assert NOWHERE not in before, "the chunks before the last one were sent before it"
            self.batches = [pulsar_batch.last_chunk(before, self._data)]
        else:
            self._offsets[self._index] = offset
