"""Batches as a Pulsar producer makes them."""

import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from spark_ledger.topic.entry.message_batch import Header, Longs
from spark_ledger.topic.entry.pulsar_batch import build_batch, split_frames
from spark_ledger.topic.entry.pulsar_message_pb2 import MessageMetadata, SingleMessageMetadata
from spark_ledger.topic.entry.pulsar_parts import BadBatch, parts_of


@dataclass(frozen=True)
class Message:
    value: bytes | None
    key: str | None = None
    properties: Mapping[str, str] = field(default_factory=dict)
    event_ms: int = 0
    base64: bool = False


message = Message


def _fill(metadata, message: Message) -> None:
    if message.key is not None:
        metadata.partition_key = message.key
        metadata.partition_key_b64_encoded = message.base64
    if message.event_ms:
        metadata.event_time = message.event_ms
    if message.value is None:
        metadata.null_value = True
    for key, value in message.properties.items():
        metadata.properties.add(key=key, value=value)


def batch_of(
    messages: Sequence[Message],
    *,
    producer: str = "p",
    sequence_id: int = 0,
    publish_ms: int = 1,
    compression: int = 0,
    compress: Callable[[bytes], bytes] = bytes,
    count: int | None = None,
    uncompressed: int | None = None,
    encrypted: bool = False,
    names_highest: bool = True,
    key: str | None = None,
    schema_version: bytes = b"",
) -> bytes:
    """A batch of these messages; `count`: the number of messages in its metadata, if it is another.
    `names_highest`: as Java's client, not as the one in C++. `key`: all messages have it, and a
    client that makes batches by keys names it in the metadata."""
    parts = []
    for i, message in enumerate(messages):
        single = SingleMessageMetadata(
            payload_size=len(message.value or b""), sequence_id=sequence_id + i
        )
        _fill(single, message)
        head = single.SerializeToString()
        parts += [struct.pack(">I", len(head)), head, message.value or b""]
    payload = b"".join(parts)
    metadata = MessageMetadata(
        producer_name=producer,
        sequence_id=sequence_id,
        highest_sequence_id=sequence_id + len(messages) - 1 if names_highest else None,
        publish_time=publish_ms,
        num_messages_in_batch=len(messages) if count is None else count,
        compression=compression,
        uncompressed_size=len(payload) if uncompressed is None else uncompressed,
        encryption_keys=[b"k"] if encrypted else [],
        partition_key=key,
        schema_version=schema_version or None,
    )
    return build_batch(metadata, compress(payload))


def lone(
    message: Message,
    *,
    producer: str = "p",
    sequence_id: int = 0,
    publish_ms: int = 1,
    deliver_at_ms: int | None = None,
) -> bytes:
    """A message that was sent by itself, without batching."""
    metadata = MessageMetadata(
        producer_name=producer,
        sequence_id=sequence_id,
        publish_time=publish_ms,
        deliver_at_time=deliver_at_ms,
    )
    _fill(metadata, message)
    return build_batch(metadata, message.value or b"")


def chunked(
    value: bytes,
    chunks: int,
    *,
    uuid: str = "u",
    key: str | None = None,
    producer: str = "p",
    sequence_id: int = 5,
    compression: int = 0,
    compress: Callable[[bytes], bytes] = bytes,
) -> list[bytes]:
    """A message in `chunks` chunks."""
    payload = compress(value)
    size = -(-len(payload) // chunks)
    entries = []
    for i in range(chunks):
        metadata = MessageMetadata(
            producer_name=producer,
            sequence_id=sequence_id,
            publish_time=1,
            uuid=uuid,
            num_chunks_from_msg=chunks,
            total_chunk_msg_size=len(payload),
            chunk_id=i,
            compression=compression,
            uncompressed_size=len(value),
        )
        if key is not None:
            metadata.partition_key = key
        entries.append(build_batch(metadata, payload[i * size : (i + 1) * size]))
    return entries


def whole_of(chunks: Sequence[bytes]) -> bytes:
    """A chunked message as brokers stored it before each chunk had an offset: as one entry."""
    sized = (struct.pack(">I", len(chunk)) + chunk for chunk in chunks)
    return b"\x0e\x43" + b"".join(sized)


def decode_entry(
    payload: bytes, header: Header, columns: Collection[str] | None = None
) -> tuple[pa.RecordBatch, Longs]:
    """All rows of an entry of batches that is one part, and when each was published. Raises the
    error of a part that cannot be decoded."""
    body = memoryview(payload)[header.body_at :]
    parts = list(parts_of(split_frames(body, header.rows), (0, header.rows), columns))
    for part in parts:
        if isinstance(part, BadBatch):
            raise part.why
    ((rows, times, _),) = parts
    return rows, times
