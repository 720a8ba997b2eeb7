"""Messages of Pulsar's producers as Arrow columns. Pure.

    batches -> their payloads, decompressed, in one buffer -> the spans of each message's parts
    (`walk`) -> columns, copied out of the buffer at once

Always true: the rows are exactly the messages in their order. Usual messages are decoded together;
if messages are few or unusual, protobuf decodes them one by one. Only requested columns are made.
The row of a message without a key, or with a null key, has a null key; a null value (a tombstone)
stays null; each property is a header, also a second property of the same name; event time 0 means
no event time. A lone message counts as a batch of one message. An encrypted batch cannot be decoded
here: only a consumer with the key can decode it.
"""

from base64 import b64decode
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain
from struct import Struct
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from bookie_server.api.entry import Buffer
from spark_ledger import errors
from spark_ledger.topic.entry.arrow_arrays import of_list, of_numpy
from spark_ledger.topic.entry.message_batch import (
    CLIENT_VERSION,
    EVENT_TIME,
    HEADERS,
    HEADERS_TYPE,
    KEY,
    PRODUCER_NAME,
    PRODUCERS_TYPES,
    SEQUENCE_ID,
    TYPES,
    VALUE,
    Longs,
    client_version,
)
from spark_ledger.topic.entry.pulsar_batch import TIME_MS_MAX, Batch, messages_in, payload_of
from spark_ledger.topic.entry.pulsar_message_pb2 import MessageMetadata, SingleMessageMetadata

ONE_BY_ONE_MESSAGES_MAX = 128
"""To decode this many messages one by one is as fast as to decode them together."""
BUFFER_BYTES_MAX = 1 << 30  # 32-bit offsets
ALL_TYPES = {**TYPES, **PRODUCERS_TYPES}
Metadata: TypeAlias = MessageMetadata | SingleMessageMetadata
_SIZE, _SIGN_BIT, _RANGE = Struct(">I"), 1 << 63, 1 << 64


def decode_batches(
    batches: Sequence[Batch], columns: Collection[str] | None = None
) -> pa.RecordBatch:
    """The messages of all batches, in order, in columns of ALL_TYPES: the columns among `columns`
    (None: all) that have a value in some row. Raises errors.BadEntry."""
    names = {name for name in ALL_TYPES if columns is None or name in columns}
    if not names:  # a damaged batch is an error for every choice of columns
        return _record_batch(decode_batches(batches, (KEY,)).num_rows, {})
    payloads = [payload_of(batch) for batch in batches]
    if sum(batch.messages for batch in batches) > ONE_BY_ONE_MESSAGES_MAX:
        try:
            return decode_together(batches, payloads, names)
        except OddMessages:
            pass
    return decode_one_by_one(batches, payloads, names)


_OF_BATCH = (PRODUCER_NAME, CLIENT_VERSION)  # columns of one value in all messages of a batch


class KeysAndEnds(NamedTuple):
    """The key of each message of a batch, and the position at which the message ends in the
    payload."""

    keys: list[bytes | None]
    ends: list[int]


def keys_in(batch: Batch) -> KeysAndEnds:
    """The keys and ends of the batch's messages. Raises errors.BadEntry."""
    payload = payload_of(batch)
    if batch.messages > ONE_BY_ONE_MESSAGES_MAX:
        try:
            buffer = b"".join((payload, PADDING))
            fields = walk(buffer, [(batch.messages, len(payload))], properties=False)
            keys: list[bytes | None] = [None] * batch.messages
            if bool(fields.has_key.any()):
                column = copy_spans(pa.py_buffer(buffer), fields.key, fields.has_key)
                if bool((fields.base64 & fields.has_key).any()):
                    column = _from_base64(column, fields.base64)
                keys = column.to_pylist()
            return KeysAndEnds(keys, fields.value[1].tolist())
        except OddMessages:
            pass
    messages = list(messages_in(bytes(payload), batch.messages))
    ends = [begin + message.payload_size for message, begin in messages]
    return KeysAndEnds([_key(message) for message, _ in messages], ends)


def publish_times(batches: Sequence[Batch]) -> Longs:
    """The time at which each batch was published, by its producer's clock, at most TIME_MS_MAX."""
    return np.array([min(batch.metadata.publish_time, TIME_MS_MAX) for batch in batches], np.int64)


def _record_batch(rows: int, arrays: dict[str, pa.Array]) -> pa.RecordBatch:
    if arrays:
        return pa.RecordBatch.from_arrays(list(arrays.values()), names=list(arrays))
    empty = pa.StructArray.from_buffers(pa.struct([]), rows, [None])
    return pa.RecordBatch.from_struct_array(empty)


# -- together ------------------------------------------------------------------------------------


def decode_together(
    batches: Sequence[Batch], payloads: Sequence[Buffer], columns: set[str]
) -> pa.RecordBatch:
    """The same result as `decode_one_by_one`, for batches of usual messages, by work on whole
    columns of numbers. Raises OddMessages for unusual messages."""
    parts: list[Buffer] = []
    ends: list[tuple[int, int]] = []
    messages = total = 0
    for batch, payload in zip(batches, payloads, strict=True):
        head = b"" if batch.batched else _head(batch.metadata, len(payload))
        parts += (head, payload)
        messages += batch.messages
        total += len(head) + len(payload)
        ends.append((messages, total))
    if total > BUFFER_BYTES_MAX:
        raise OddMessages
    buffer = b"".join((*parts, PADDING))
    fields = walk(buffer, ends, properties=HEADERS in columns)
    data, arrays = pa.py_buffer(buffer), dict[str, pa.Array]()
    if KEY in columns and bool(fields.has_key.any()):
        keys = copy_spans(data, fields.key, fields.has_key)
        if bool((fields.base64 & fields.has_key).any()):
            keys = _from_base64(keys, fields.base64)
        arrays[KEY] = keys.view(TYPES[KEY])
    if VALUE in columns and not bool(fields.null_value.all()):
        arrays[VALUE] = copy_spans(data, fields.value, ~fields.null_value)
    if EVENT_TIME in columns and bool(fields.event_ms.any()):
        arrays[EVENT_TIME] = _times(fields.event_ms)
    if HEADERS in columns and bool(fields.properties.any()):
        property_ends = np.concatenate([[0], np.cumsum(fields.properties)])
        names, texts = copy_spans(data, fields.name), copy_spans(data, fields.text)
        arrays[HEADERS] = _headers(property_ends, names.view(pa.string()), texts)
    counts = [batch.messages for batch in batches]
    for name in (name for name in _OF_BATCH if name in columns):
        values = of_list([_of_batch(name, batch) for batch in batches], ALL_TYPES[name])
        if values.null_count < len(values):
            indices = np.repeat(np.arange(len(batches), dtype=np.int32), counts)
            arrays[name] = values.take(of_numpy(indices))
    if SEQUENCE_ID in columns:
        batch_ids = np.repeat([_signed(batch.metadata.sequence_id) for batch in batches], counts)
        ids = np.where(fields.has_sequence_id, fields.sequence_id, batch_ids)
        arrays[SEQUENCE_ID] = of_numpy(ids)
    return _record_batch(messages, arrays)


def _of_batch(name: str, batch: Batch) -> str | int | None:
    is_name, metadata = name == PRODUCER_NAME, batch.metadata
    return metadata.producer_name if is_name else client_version(metadata.schema_version)


def _head(metadata: MessageMetadata, size: int) -> bytes:
    """The bytes that a lone message would have before its value if it were in a batch. Raises
    OddMessages."""
    head = SingleMessageMetadata(payload_size=size, event_time=metadata.event_time)
    if metadata.HasField("partition_key"):
        if not isinstance(metadata.partition_key, str):
            raise OddMessages
        head.partition_key = metadata.partition_key
        head.partition_key_b64_encoded = metadata.partition_key_b64_encoded
    if metadata.properties:
        head.properties.extend(metadata.properties)
    if metadata.null_partition_key:
        head.null_partition_key = True
    if metadata.null_value:
        head.null_value = True
    encoded: bytes = head.SerializeToString()
    return _SIZE.pack(len(encoded)) + encoded


def copy_spans(
    data: pa.Buffer,
    spans: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]],
    valid: npt.NDArray[np.bool_] | None = None,
) -> pa.Array:
    """The spans of the buffer as values of bytes; null where `valid` is false. The spans must
    rise."""
    starts, stops = spans
    count = len(starts)
    offsets = np.empty(2 * count, dtype=np.int32)  # a span, the gap to the next span, a span, ...
    offsets[0::2], offsets[1::2] = starts, stops
    if not count:
        return of_list([], pa.binary())
    buffers = [None, pa.py_buffer(offsets), data]
    pieces = pa.Array.from_buffers(pa.binary(), 2 * count - 1, buffers)
    valid_bits = None if valid is None or bool(valid.all()) else _bits(valid)
    span_indices = pa.py_buffer(np.arange(0, 2 * count, 2, dtype=np.int32))
    return pieces.take(pa.Array.from_buffers(pa.int32(), count, [valid_bits, span_indices]))


def _from_base64(keys: pa.Array, are_base64: npt.NDArray[np.bool_]) -> pa.Array:
    decoded_keys = [
        _key_bytes(key) if encoded and key is not None else key
        for key, encoded in zip(keys.to_pylist(), are_base64.tolist(), strict=True)
    ]
    return of_list(decoded_keys, TYPES[KEY])


# -- one by one ------------------------------------------------------------------------------------


def decode_one_by_one(
    batches: Sequence[Batch], payloads: Sequence[Buffer], columns: set[str]
) -> pa.RecordBatch:
    """These columns of all messages; protobuf parses each message. Raises errors.BadEntry."""
    messages: list[Metadata] = []
    data: list[bytes] = []
    for batch, payload in zip(batches, payloads, strict=True):
        _take_messages(batch, bytes(payload), messages, data)
    arrays: dict[str, pa.Array] = {}
    if KEY in columns:
        arrays[KEY] = of_list([_key(message) for message in messages], TYPES[KEY])
    if VALUE in columns:
        values = [
            None if message.null_value else value
            for message, value in zip(messages, data, strict=True)
        ]
        arrays[VALUE] = of_list(values, TYPES[VALUE])
    if EVENT_TIME in columns:
        times = np.array([message.event_time for message in messages], dtype=np.uint64)
        arrays[EVENT_TIME] = _times(times.view(np.int64))
    if HEADERS in columns:
        ends, pairs = [0], list[Any]()
        for message in messages:
            if properties := message.properties:
                pairs += properties
            ends.append(len(pairs))
        if pairs:
            names = of_list([pair.key for pair in pairs], pa.string())
            texts = of_list([pair.value for pair in pairs], pa.binary())
            arrays[HEADERS] = _headers(np.array(ends), names, texts)
    for name in (name for name in _OF_BATCH if name in columns):
        of_batches = ([_of_batch(name, batch)] * batch.messages for batch in batches)
        arrays[name] = of_list([*chain(*of_batches)], ALL_TYPES[name])
    if SEQUENCE_ID in columns:
        batch_metadata = chain(*([batch.metadata] * batch.messages for batch in batches))
        ids = [
            _signed((message if message.HasField("sequence_id") else of_batch).sequence_id)
            for message, of_batch in zip(messages, batch_metadata, strict=True)
        ]
        arrays[SEQUENCE_ID] = of_list(ids, pa.int64())
    columns_with_values = {
        name: column for name, column in arrays.items() if column.null_count < len(column)
    }
    return _record_batch(len(messages), columns_with_values)


def _take_messages(
    batch: Batch, data: bytes, messages: list[Metadata], values: list[bytes]
) -> None:
    """Append the metadata and the value of each message of the batch. Raises errors.BadEntry."""
    if not batch.batched:
        messages.append(batch.metadata)
        values.append(data)
        return
    for message, begin in messages_in(data, batch.messages):
        messages.append(message)
        values.append(data[begin : begin + message.payload_size])


def _headers(ends: npt.NDArray[np.int64], names: pa.Array, texts: pa.Array) -> pa.Array:
    """For each message the list of its properties, which end at `ends`; null without properties."""
    pairs = pa.StructArray.from_arrays([names, texts], fields=list(HEADERS_TYPE.value_type))
    bits, offsets = _bits(np.diff(ends) > 0), pa.py_buffer(ends.astype(np.int32))
    return pa.Array.from_buffers(HEADERS_TYPE, len(ends) - 1, [bits, offsets], children=[pairs])


def _key(message: Metadata) -> bytes | None:
    if message.null_partition_key or not message.HasField("partition_key"):
        return None
    key: str | bytes = message.partition_key  # bytes: not UTF-8
    text = key.encode() if isinstance(key, str) else key
    return _key_bytes(text) if message.partition_key_b64_encoded else text


def _key_bytes(text: bytes) -> bytes:
    try:
        return b64decode(text, validate=True)
    except ValueError as error:
        raise errors.BadEntry(f"a damaged batch: a key that is not base64: {error}") from error


def _times(ms: Longs) -> pa.Array:
    """The event times in microseconds; null if a message has no event time, or a time out of range
    (294,000 years from 1970). A time that was sent as 2**63 or more is before 1970."""
    valid = (ms != 0) & (ms >= -TIME_MS_MAX) & (ms <= TIME_MS_MAX)
    values = pa.py_buffer(np.ascontiguousarray(np.where(valid, ms, 0) * 1000))
    return pa.Array.from_buffers(TYPES[EVENT_TIME], len(ms), [_bits(valid), values])


def _bits(flags: npt.NDArray[np.bool_]) -> pa.Buffer:
    return pa.py_buffer(np.packbits(flags, bitorder="little"))


def _signed(number: int) -> int:
    return number - _RANGE if number >= _SIGN_BIT else number


# -- the spans of messages' parts ------------------------------------------------------------------
#
#     size (4) | SingleMessageMetadata | value | size (4) | SingleMessageMetadata | value | ...
#
# A message begins where the message before ends, so a usual decoder finds messages only one after
# the other. Here the positions of all messages are guessed at once, by the bytes with which a
# message begins, and each message is read up to the end that it declares. The guesses are right if,
# from the first byte on, each message ends where the next message begins, and the last message ends
# at the end of the payload. Always true: `walk` returns what a decoder of protobuf would return. If
# this is not certain (unknown fields, fields that are not in the order of their numbers, numbers of
# more than 49 bits, damage), `walk` raises OddMessages, and the caller decodes message by message.
# Properties that are not requested are skipped: only their size is read.

PADDING = bytes(16)
"""The bytes after a buffer's last message: eight bytes can be read at every position before
them."""
PROPERTIES_MAX = 64
"""A message with more properties is decoded one by one."""
GUESSES_MAX = 16
"""If there are more guesses for each message, because values look like messages, the messages are
decoded one by one."""

Words = npt.NDArray[np.uint64]
Places = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

_PROPERTIES, _KEY, _PAYLOAD_SIZE = 0x0A, 0x12, 0x18  # tags: a field's number and its kind
_COMPACTED, _EVENT_TIME, _BASE64, _ORDERING_KEY = 0x20, 0x28, 0x30, 0x3A
_SEQUENCE_ID, _NULL_VALUE, _NULL_KEY = 0x40, 0x48, 0x50
_TAGS_AFTER_SIZE = (
    *(_COMPACTED, _EVENT_TIME, _BASE64, _ORDERING_KEY, _SEQUENCE_ID, _NULL_VALUE, _NULL_KEY),
)
_NAME, _TEXT = 0x0A, 0x12
_DELIMITED = frozenset((_PROPERTIES, _KEY, _ORDERING_KEY, _NAME, _TEXT))
_NO_TAG = 0  # past the last field
_TOO_LONG = 0xFF  # in place of a tag: its number takes more than seven bytes
LAST_BITS = np.uint64(0x80808080808080)  # in each of seven bytes: 1 if another byte follows
SEVENS = np.uint64(0x7F7F7F7F7F7F7F)


class OddMessages(Exception):
    """Unusual messages, which must be decoded one by one."""


@dataclass(frozen=True, slots=True)
class MessageFields:
    """The fields of messages, in columns. A span is a start and an end in the buffer; the spans of
    a column rise. If a message lacks a field, the column has an empty span, 0 or False for it;
    `has_...` is whether the message has the field."""

    value: tuple[Places, Places]
    null_value: Flags
    key: tuple[Places, Places]
    has_key: Flags
    base64: Flags
    event_ms: Places
    has_sequence_id: Flags
    sequence_id: Places
    properties: Places
    """The number of properties of each message; `name` and `text` have those of all messages, in
    order."""
    name: tuple[Places, Places]
    text: tuple[Places, Places]


def walk(
    buffer: bytes, ends: Sequence[tuple[int, int]], *, properties: bool = True
) -> MessageFields:
    """The messages in `buffer`, which ends with PADDING. `ends` has the end of each batch, rising:
    the number of messages up to this end, and its position. Without `properties` the messages'
    properties are skipped. Raises OddMessages."""
    messages, total = ends[-1]
    assert len(buffer) == total + len(PADDING), "eight bytes can be read everywhere"
    words = np.ndarray((total + 1,), dtype="<u8", buffer=buffer, strides=(1,))
    guesses = _guesses(np.frombuffer(buffer, dtype=np.uint8, count=total), words, messages)
    at = guesses + 4
    fields = _Fields(words, at, at + _sizes(words[guesses]))
    owners, starts, lengths = _properties(fields, kept=properties)
    key_sizes, has_key = fields.take(_KEY)
    key_starts = fields.span
    has_size = fields.tags == _PAYLOAD_SIZE
    nexts = fields.ends + np.where(has_size, fields.values, total + 1)
    indices = _chain(guesses, nexts, messages, total)
    for count, end in ends[:-1]:
        if count < messages and guesses[indices[count]] != end:
            raise OddMessages
    if len(indices) < len(guesses):
        fields, nexts = fields.select(indices), nexts[indices]
        key_sizes, key_starts, has_key = key_sizes[indices], key_starts[indices], has_key[indices]
        message_of_guess = np.full(len(guesses), -1, dtype=np.int64)
        message_of_guess[indices] = np.arange(len(indices))
        owners = message_of_guess[owners]
        is_message = owners >= 0
        owners, starts, lengths = owners[is_message], starts[is_message], lengths[is_message]
    fields.take(_PAYLOAD_SIZE)
    numbers = {tag: fields.take(tag) for tag in _TAGS_AFTER_SIZE}
    fields.check_ends()
    order = np.argsort(owners, kind="stable")
    name, text = _pairs(words, starts[order], lengths[order])
    null_key = numbers[_NULL_KEY][0] != 0
    return MessageFields(
        value=(fields.ends, nexts),
        null_value=numbers[_NULL_VALUE][0] != 0,
        key=(key_starts, key_starts + key_sizes),
        has_key=has_key & ~null_key,
        base64=numbers[_BASE64][0] != 0,
        event_ms=numbers[_EVENT_TIME][0],
        has_sequence_id=numbers[_SEQUENCE_ID][1],
        sequence_id=numbers[_SEQUENCE_ID][0],
        properties=np.bincount(owners, minlength=messages),
        name=name,
        text=text,
    )


def _guesses(data: npt.NDArray[np.uint8], words: Words, messages: int) -> Places:
    """The positions at which messages may begin: a size below 64 KiB, and a tag with which
    metadata begins."""
    is_zero = data == 0
    candidates = np.flatnonzero(is_zero[:-1] & is_zero[1:])
    first = words[candidates]
    tag = (first >> np.uint64(32)) & np.uint64(0xFF)
    is_guess = (tag == _PAYLOAD_SIZE) | (tag == _KEY) | (tag == _PROPERTIES)
    is_guess &= candidates + 4 + _sizes(first) <= len(data)
    guesses: Places = candidates[is_guess]
    if not len(guesses) or len(guesses) > GUESSES_MAX * messages:
        raise OddMessages
    return guesses


def _sizes(first: Words) -> Places:
    """The size (big-endian, below 64 KiB) with which each message begins."""
    high, low = (first >> np.uint64(8)) & np.uint64(0xFF00), (first >> np.uint64(24))
    return (high | (low & np.uint64(0xFF))).astype(np.int64)


def _chain(guesses: Places, nexts: Places, messages: int, total: int) -> Places:
    """The indices of the messages among the guesses: each begins where the message before ends."""
    if (
        len(guesses) == messages
        and guesses[0] == 0
        and nexts[-1] == total
        and bool((nexts[:-1] == guesses[1:]).all())
    ):
        return np.arange(messages)
    at = np.minimum(np.searchsorted(guesses, nexts), len(guesses) - 1)
    next_indices = np.where(guesses[at] == nexts, at, -1)
    if guesses[0] != 0:
        raise OddMessages
    indices, index, hop = [0], 0, next_indices.tolist()
    for _ in range(messages - 1):
        index = hop[index]
        if index < 0:
            raise OddMessages
        indices.append(index)
    if nexts[index] != total:
        raise OddMessages
    return np.array(indices, dtype=np.int64)


class _Heads(NamedTuple):
    """The tags at some positions, the number after each tag, and the position after the number."""

    tags: Places
    values: Places
    nexts: Places


class _Properties(NamedTuple):
    """Properties: the message, the position and the size of each."""

    owners: Places
    starts: Places
    sizes: Places


class _Fields:
    """The next field of each of many pieces of metadata (of messages, or properties), which end at
    `ends`. `tags` has the field's tag, `values` the number after the tag: a size, if the field is a
    string or a message."""

    def __init__(self, words: Words, at: Places, ends: Places) -> None:
        self._words = words
        self.ends = ends
        self.at = at
        self.span = at
        """For each piece the position at which the value of the last `take` begins or would begin.
        """
        self.tags, self.values, self._nexts = self._read(at, ends)

    def select(self, indices: Places) -> "_Fields":
        selected = object.__new__(_Fields)
        selected._words = self._words
        for name in ("ends", "at", "span", "tags", "values", "_nexts"):
            setattr(selected, name, getattr(self, name)[indices])
        return selected

    def take(self, tag: int) -> tuple[Places, Flags]:
        """Takes the next field of each piece whose next field has this tag. Returns for each piece
        the number after the tag (0 if the next field has another tag), and whether it has the tag.
        """
        has_tag = self.tags == tag
        count = int(np.count_nonzero(has_tag))
        if not count:
            self.span = self.at
            return np.zeros(len(has_tag), dtype=np.int64), has_tag
        if count == len(has_tag):
            values, self.span = self.values, self._nexts
            self.at = self.span + values if tag in _DELIMITED else self.span
            self.tags, self.values, self._nexts = self._read(self.at, self.ends)
            return values, has_tag
        values = np.where(has_tag, self.values, 0)
        self.span = np.where(has_tag, self._nexts, self.at)
        self.at = self.span + values if tag in _DELIMITED else self.span
        indices = np.flatnonzero(has_tag)
        tags, numbers, nexts = self._read(self.at[indices], self.ends[indices])
        self.tags[indices], self._nexts[indices] = tags, nexts
        self.values[indices] = numbers
        return values, has_tag

    def check_ends(self) -> None:
        """Raises OddMessages unless all fields were taken."""
        if not bool((self.at == self.ends).all()):
            raise OddMessages

    def _read(self, at: Places, ends: Places) -> _Heads:
        """The tag and the number of the fields at these positions."""
        is_inside = at < ends
        if not bool(is_inside.any()):
            nothing = np.zeros(len(at), dtype=np.int64)
            return _Heads(nothing, nothing, at)
        words = self._words[np.minimum(at, len(self._words) - 1)]
        tags = (words & np.uint64(0xFF)).view(np.int64)
        tags *= is_inside  # _NO_TAG past the end
        rest = words >> np.uint64(8)
        if not bool((rest & np.uint64(0x80)).any()):  # numbers of one byte each, as is usual
            return _Heads(tags, (rest & np.uint64(0x7F)).view(np.int64), at + 2)
        stop_bits = ~rest & LAST_BITS
        first_stop_bits = stop_bits & (~stop_bits + np.uint64(1))
        below = first_stop_bits - np.uint64(1)  # the bits below the first stop bit
        nexts = at + 2 + (np.bitwise_count(below) >> 3)
        if not bool(stop_bits.all()):
            tags[is_inside & (stop_bits == 0)] = _TOO_LONG
        return _Heads(tags, join_sevens(rest & below & SEVENS).view(np.int64), nexts)


def join_sevens(sevens: Words) -> Words:
    """The numbers made of the low seven bits of each byte."""
    low, high = np.uint64(0x007F007F007F007F), np.uint64(0x7F007F007F007F00)
    joined = (sevens & low) | ((sevens & high) >> np.uint64(1))
    low, high = np.uint64(0x00003FFF00003FFF), np.uint64(0x3FFF00003FFF0000)
    joined = (joined & low) | ((joined & high) >> np.uint64(2))
    low, high = np.uint64(0x000000000FFFFFFF), np.uint64(0x0FFFFFFF00000000)
    return (joined & low) | ((joined & high) >> np.uint64(4))


def _properties(fields: _Fields, *, kept: bool) -> _Properties:
    """Takes all properties of the messages; returns them if `kept`."""
    by_round: list[_Properties] = []
    rounds = 0
    while bool((fields.tags == _PROPERTIES).any()):
        rounds += 1
        if rounds > PROPERTIES_MAX:
            raise OddMessages
        sizes, has_property = fields.take(_PROPERTIES)
        if kept:
            owners = np.flatnonzero(has_property)
            by_round.append(_Properties(owners, fields.span[owners], sizes[owners]))
    if not by_round:
        nothing = np.zeros(0, dtype=np.int64)
        return _Properties(nothing, nothing, nothing)
    return _Properties(*(np.concatenate(parts) for parts in zip(*by_round, strict=True)))


def _pairs(
    words: Words, starts: Places, sizes: Places
) -> tuple[tuple[Places, Places], tuple[Places, Places]]:
    """The names and the texts of properties. Raises OddMessages."""
    if not len(starts):
        return (starts, starts), (starts, starts)
    fields = _Fields(words, starts, starts + sizes)
    name_sizes, _ = fields.take(_NAME)
    name_starts = fields.span
    text_sizes, _ = fields.take(_TEXT)
    text_starts = fields.span
    fields.check_ends()
    return (name_starts, name_starts + name_sizes), (text_starts, text_starts + text_sizes)
