"""Messages in chunks: how a producer cuts one, how a consumer joins one, and what is stored of one.

Always true: the chunks of a message have its sequence id and a uuid made of that and the producer's
name, as Java's client makes it, so the next program of that name may use it again; the row of a
message is at the offset of its last chunk, and the offsets of the chunks before it have none.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from spark_ledger.topic.entry import pulsar_batch
from spark_ledger.topic.entry.message_batch import Rowless, decode_header
from spark_ledger.topic.entry.pulsar_batch import Batch
from spark_ledger.topic.entry.pulsar_columns import decode_batches
from tests.kit.pulsar_batches import chunked
from tests.simulation import invariants
from tests.simulation.ghost import Ghost

if TYPE_CHECKING:
    from spark_ledger.topic.log.segments import LiveSegment

SHARE = 0.3
"""Of the batches of a run with chunks: so many are one message in chunks."""
COUNTS = (2, 2, 3, 5)
ZLIB = 2

Name = tuple[str, int, int]
"""Of a chunk: its message's uuid, its number, and how many chunks the message has."""


def cut(rng: Any, value: bytes, producer: str, sequence_id: int) -> list[bytes]:
    """The chunks of a message, compressed or not."""
    compressed = rng.random() < 0.3
    return chunked(
        value,
        rng.choice(COUNTS),
        uuid=f"{producer}-{sequence_id}",
        producer=producer,
        sequence_id=sequence_id,
        compression=ZLIB if compressed else 0,
        compress=zlib.compress if compressed else bytes,
    )


def values_of(batch: Batch) -> list[bytes]:
    """The values of a batch's messages."""
    return list(decode_batches([batch]).column("value").to_pylist())


def name_of(batch: Batch) -> Name:
    metadata = batch.metadata
    return metadata.uuid, metadata.chunk_id, metadata.num_chunks_from_msg


def names_of_all(last: Name) -> list[Name]:
    """The chunks of the message whose last one has that name; of one that is not the last, those up
    to it."""
    return [(last[0], number, last[2]) for number in range(last[1] + 1)]


@dataclass
class Joining:
    """Chunks of a message that came to a consumer, in one session."""

    ghost: Ghost
    who: str
    names: list[Name] = field(default_factory=list)
    payloads: list[bytes] = field(default_factory=list)
    offset: int = -1

    def whole(self, data: bytes, offset: int) -> Batch | None:
        """The batch, or the message of which this is the last chunk; None: other chunks of it are
        to come."""
        batch = pulsar_batch.parse(data)
        names, must = [*self.names, name_of(batch)], [name_of(batch)]
        if batch.is_chunk:
            must = names_of_all(name_of(batch))
        if self.names and offset != self.offset:
            must = [*self.names]  # chunks of one message have one id
        if batch.is_chunk or self.names:
            invariants.a_message_in_chunks_is_whole(self.ghost, self.who, names, must)
        if not batch.is_chunk:
            return batch
        self.names, self.offset = names, offset
        self.payloads.append(bytes(memoryview(batch.data)[batch.payload_at :]))
        if len(self.names) < self.names[0][2]:
            return None
        whole = Batch(b"".join(self.payloads), batch.metadata, 0)
        self.forget()
        self.ghost.meet("message in chunks consumed")
        return whole

    def forget(self) -> None:
        """The connection is another one."""
        self.names, self.payloads, self.offset = [], [], -1


@dataclass
class StoredChunks:
    """Of one topic, by partition and offset."""

    ghost: Ghost
    any_sent: bool = False
    _chunks: dict[tuple[int, int], tuple[Name, bytes]] = field(default_factory=dict)
    """Earlier chunks."""
    _sealed: dict[tuple[int, int], None] = field(default_factory=dict)
    """Offsets without a row, of sealed segments."""
    _open: dict[int, "OpenSegment"] = field(default_factory=dict)

    def messages(self, partition: int, offset: int, data: memoryview) -> list[bytes | None]:
        """What a stored batch that begins at the offset has at each of its offsets: None of an
        earlier chunk, the message of the last one."""
        if pulsar_batch.is_earlier_chunk(data):
            chunk = pulsar_batch.parse(pulsar_batch.chunk_in(data))
            payload = bytes(pulsar_batch.payload_of_chunk(data))
            self._chunks[partition, offset] = name_of(chunk), payload
            return [None]
        if not pulsar_batch.is_last_chunk(data):
            return [*values_of(pulsar_batch.parse(bytes(data)))]
        name = name_of(pulsar_batch.parse(pulsar_batch.chunk_in(data)))
        places = [(partition, at) for at in pulsar_batch.earlier_offsets(data)]
        earlier = [self._chunks.get(place, (("nothing", 0, 0), b"")) for place in places]
        names = [*(name for name, _ in earlier), name]
        who = f"what is stored at offset {offset} of partition {partition}"
        invariants.a_message_in_chunks_is_whole(self.ghost, who, names, names_of_all(name))
        payloads = [payload for _, payload in earlier]
        return [*values_of(pulsar_batch.join_chunks(payloads, data))]

    def sealed(self, live: "LiveSegment", rows: Sequence[bytes | None], rowless: Rowless) -> None:
        """A segment is, with these rows; its seal counts the offsets without a row right (B5)."""
        are = Rowless()
        for at, row in enumerate(rows):
            if row is None:
                are = are.with_next(at)
                self._sealed[live.partition, live.base + at] = None
        invariants.a_seal_says_what_its_entries_are(self.ghost, live.ledger_id, rowless, are)
        self._open.pop(live.partition, None)
        if are.number:
            self.ghost.meet("chunks sealed")

    def has_row(
        self, partition: int, offset: int, live: "LiveSegment | None", submitted: list[bytes]
    ) -> bool:
        """Of an offset that is confirmed."""
        if not self.any_sent:
            return True
        if live is not None and offset >= live.base:
            known = self._open.get(partition)
            if known is None or known.opened != live.opened:
                known = OpenSegment(live.opened, live.first_entry, live.base)
                self._open[partition] = known
            known.read(submitted)
            return offset not in known.rowless
        return (partition, offset) not in self._sealed


@dataclass
class OpenSegment:
    """The live segment that a commit `opened`: which of its offsets have no row, as its owner sent
    them. Those of entries that it lost are other ones in the next segment."""

    opened: int
    entry: int
    offset: int
    rowless: dict[int, None] = field(default_factory=dict)

    def read(self, submitted: list[bytes]) -> None:
        for payload in submitted[self.entry :]:
            header = decode_header(payload)
            body = memoryview(payload)[header.body_at :]
            if header.chunks and pulsar_batch.is_earlier_chunk(
                next(pulsar_batch.split_frames(body, header.rows))[1]
            ):
                self.rowless[self.offset] = None
            self.offset += header.rows
            self.entry += 1
