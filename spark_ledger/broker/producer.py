"""A producer on its connection, and its batches until their receipts.

Always true: a batch has one receipt, with the id that it will always have, or its producer is sent
away: then it looks its topic up again and sends again what has no receipt.

Each chunk of a message is stored as it comes, and the message is there with its last one. The
chunks have their receipts once all are stored, all with the id of the last one. So a producer that
is sent away in the middle sends the message again from its first chunk, to whoever owns the
partition then, and what was stored of it before is of no message; and who sends a later chunk
without the first has had receipts before: the message is stored, and the producer is told so. A
message whose producer goes or sends another before its last chunk is given up, counted and logged.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable
from itertools import accumulate, chain, repeat
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

_log = logging.getLogger(__name__)


class ProducersLink(Protocol):
    """A client's connection, as its producers use it."""

    def send(self, frame: bytes) -> None: ...

    def stored(self, size: int) -> None:
        """So many bytes of a batch wait no more."""

    def send_producer_away(self, producer: "Producer") -> None:
        """It is to look its topic up again."""


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
        self.chunks: ChunksOfProducer | None = None
        """Of the message that it sends in chunks, once it has sent some."""
        self._came = 0
        self._received = 0
        self._refused: deque[tuple[int, int, Refusal]] = deque()

    def ready(self) -> None:
        """It may send: the answer to its request."""
        made = command(
            "producer_success",
            request_id=self.request_id,
            producer_name=self.name,
            last_sequence_id=self.partition.writer.last_sequence_id(self.name),
            schema_version=b"",
            producer_ready=True,
        )
        if self.topic_epoch:
            made.producer_success.topic_epoch = self.topic_epoch
        self.connection.send(encode(made))

    def send_away(self) -> None:
        """It looks its topic up again, and sends again what has no receipt."""
        self.connection.send_producer_away(self)

    def refuse(self, sequence_id: int, why: Refusal) -> None:
        """Refuse a batch for good, after the receipts of those before it: a client drops only the
        oldest of those that it waits for."""
        self._refused.append((self._came, sequence_id, why))
        self._send_refusals()

    def came(self, count: int) -> None:
        """So many more are to have a receipt."""
        self._came += count

    def received(self, count: int) -> None:
        """So many more have their receipts."""
        self._received += count
        self._send_refusals()

    def _send_refusals(self) -> None:
        while self._refused and self._refused[0][0] <= self._received:
            _, sequence_id, why = self._refused.popleft()
            self.send_error(sequence_id, why.code, why.message)

    def send_error(self, sequence_id: int, code: ServerError, why: str) -> None:
        """The batch is refused for good."""
        ids = {"producer_id": self.id, "sequence_id": sequence_id}
        self.connection.send(encode(command("send_error", **ids, error=code, message=why)))


class Run:
    """Batches of a producer that came together, until their receipts: they are stored together.
    `chunks`: each is to have so many receipts, as the last chunk of a message."""

    __slots__ = (
        "_chunks",
        "_last_sequence_ids",
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

    def __init__(
        self, producer: Producer, producer_name: str, batched: bool, chunks: int = 1
    ) -> None:
        self.producer = producer
        self.chunk: Chunk | None = None
        self.producer_name = producer_name
        self.batched = batched
        self.batches: list[bytes] = []
        self.counts: list[int] = []
        self.size = self.unpacked = self.messages = 0
        self._sends: list[Send] = []
        self._last_sequence_ids: list[int] = []
        self._chunks = chunks

    @property
    def first_sequence_id(self) -> int:
        return self._last_sequence_ids[0]

    @property
    def last_sequence_id(self) -> int:
        return self._last_sequence_ids[-1]

    @property
    def receipts(self) -> int:
        """How many it is to have."""
        return len(self.batches) * self._chunks

    @property
    def waiting_bytes(self) -> int:
        return self.size + OVERHEAD_BYTES * self.receipts

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
        found = []
        columns = (self._sends, self.batches, self.counts, self._last_sequence_ids)
        for send, data, messages, last in zip(*columns, strict=True):
            one = Run(self.producer, self.producer_name, self.batched, self._chunks)
            about = self.unpacked * len(data) // self.size
            one.add(send, data, self.producer_name, self.batched, messages, last, about)
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
        if self._chunks > 1:
            said = chain.from_iterable(repeat(one, self._chunks) for one in said)
        if self._chunks:
            producer.connection.send(receipts(said, ledger, producer.partition.shown))
        producer.received(self.receipts)
        producer.connection.stored(self.waiting_bytes)

    def failed(self, error: errors.LedgerError) -> None:
        producer = self.producer
        if isinstance(error, errors.TopicTerminated):
            code, why = ServerError.TOPIC_TERMINATED, str(error)
            for send in self._sends:
                for _ in range(self._chunks):
                    producer.send_error(send.sequence_id, code, why)
        else:
            producer.send_away()
        producer.connection.stored(self.waiting_bytes)


class ChunksOfProducer:
    """The message that a producer sends in chunks now, if it does. `drop` is the error by which its
    client drops a message; what is given up is counted in `ownership`, which says so."""

    def __init__(self, producer: Producer, ownership: Ownership, drop: ServerError) -> None:
        self._producer = producer
        self._ownership = ownership
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
            answer = receipts([(send, NOWHERE)], NOWHERE, self._producer.partition.shown)
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
        self._ownership.incomplete += 1
        what = (
            f"a chunked message of producer '{self._producer.name}' is incomplete:"
            f" {len(self._offsets)} of {self._count} chunks came, then {why}"
        )
        _log.warning("%s; %d such messages since the start", what, self._ownership.incomplete)
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
        sequence_id = parsed.last_sequence_id if producer.partition.deduplicates else NO_ID
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
