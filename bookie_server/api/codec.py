"""Messages to bytes and back, in the protobuf encoding of bookie.proto.

Always true: the generated code reads the bytes written here, and this code reads the bytes of the
generated code (a test compares). Adds and the responses to reads are encoded by hand, because the
generated code copies each payload several times: here the buffers of a message are joined once, and
decoded buffers are views into the message. A malformed encoding raises BadMessage.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

from bookie_server.api import bookie_pb2
from bookie_server.api import messages as m
from bookie_server.api.entry import NO_ENTRY, Buffer
from bookie_server.api.messages import Span
from bookie_server.api.status import Status, StopReason

VARINT, LENGTH = 0, 2
BYTE = [bytes((value,)) for value in range(0x80)]


def varint(value: int) -> bytes:
    if 0 <= value < 0x80:
        return BYTE[value]
    if value < 0:
        value += 1 << 64
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def zigzag(value: int) -> int:
    return (value << 1) ^ (value >> 63)


def unzigzag(value: int) -> int:
    return (value >> 1) ^ -(value & 1)


def int_field(number: int, value: int) -> bytes:
    """A varint field; empty for 0, which proto3 leaves out."""
    return BYTE[number << 3 | VARINT] + varint(value) if value else b""


def bytes_head(number: int, length: int) -> bytes:
    return BYTE[number << 3 | LENGTH] + varint(length)


def bytes_field(number: int, value: bytes) -> bytes:
    return bytes_head(number, len(value)) + value if value else b""


def read_varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a varint is longer than ten bytes")


def fields_of(data: memoryview) -> list[tuple[int, Any]]:
    """The fields in the order of the wire, each as its number and its value (int or memoryview)."""
    fields: list[tuple[int, Any]] = []
    at, end = 0, len(data)
    while at < end:
        number, value, at = next_field(data, at)
        fields.append((number, value))
    return fields


def next_field(data: memoryview, at: int) -> tuple[int, Any, int]:
    """Number and value (int or memoryview) of the field at `at`, and where the next field begins. A
    fixed-size field, which no message here has, gets number 0.

    Most keys, lengths and values have one byte, which is read without a call."""
    key = data[at]
    at += 1
    if key >= 0x80:
        key, at = read_varint(data, at - 1)
    kind = key & 7
    if kind in (1, 5):
        return 0, None, at + (8 if kind == 1 else 4)
    value = data[at]
    at += 1
    if value >= 0x80:
        value, at = read_varint(data, at - 1)
    if kind == VARINT:
        return key >> 3, value, at
    if kind != LENGTH:
        raise ValueError(f"unknown wire type {kind}")
    end = at + value
    if end > len(data):
        raise ValueError("a field is longer than its message")
    return key >> 3, data[at:end], end


def text(view: memoryview) -> str:
    return str(view, "utf-8")


pb: Any = bookie_pb2  # its classes are made at import, so type checkers do not know them
_STATUSES = {int(status): status for status in Status}  # several times as fast as Status(value)
_STOPS = {int(stop): stop for stop in StopReason}
ENTRY_ID_MAX = 2**63 - 1
MAX_BYTES_MAX = 2**32 - 1  # the contract's limit; every response is smaller
JOINED_BYTES_MAX = 16 * 1024  # an add up to this size is one buffer, cheaper than three buffers


class BadMessage(ValueError):
    """The bytes do not parse as a message of the method."""


def encode(message: m.Request | m.PackedAddRequest | m.ReadStreamRequest | m.Response) -> bytes:
    """The bytes of a request or a response."""
    return b"".join(encode_buffers(message))


def encode_buffers(
    message: m.Request | m.PackedAddRequest | m.ReadStreamRequest | m.Response,
) -> Sequence[Buffer]:
    """`encode`, as buffers whose concatenation is the message: entries are not copied."""
    encoder = _ENCODERS.get(type(message))
    return (_encode_generated(message),) if encoder is None else encoder(message)


def decode_request(method: str, data: Buffer) -> m.Request:
    """The request of `method` in `data`; buffers in it are views into `data`.

    Raises BadMessage when the bytes are malformed.
    """
    return _decode(method, 0, data)  # type: ignore[no-any-return]


def decode_stream_request(method: str, data: Buffer) -> m.ReadStreamRequest:
    """One message of a stream. Raises BadMessage."""
    return _decode(method, 0, data)  # type: ignore[no-any-return]


def decode_response(method: str, data: Buffer) -> m.Response:
    """The response of `method` in `data`; buffers in it are views into `data`.

    Raises BadMessage when the bytes are malformed.
    """
    return _decode(method, 1, data)  # type: ignore[no-any-return]


def _decode(method: str, side: int, data: Buffer) -> Any:
    try:
        kind = (m.METHODS.get(method) or m.STREAMS[method])[side]
        decoder = _DECODERS.get(kind)
        return _decode_generated(kind, data) if decoder is None else decoder(memoryview(data))
    except Exception as error:  # protobuf's DecodeError derives from Exception alone
        raise BadMessage(f"{method}: {error}") from error


# -- Add --------------------------------------------------------------------------------------

_OK_RESULT = m.AddResult(Status.OK)
_OK_RESULT_BYTES = BYTE[1 << 3 | LENGTH] + BYTE[0]  # an empty result: all its fields are zero


def encode_add(add: m.Add) -> Sequence[Buffer]:
    """The bytes of the add in an AddRequest, for m.PackedAddRequest: an add for several bookies is
    encoded once. The bytes of a small add are one buffer; a large entry is not copied."""
    entry = add.entry
    length = sum(map(len, entry))
    prefix = _add_prefix(add.recovery, add.token, length)
    if length <= JOINED_BYTES_MAX:
        return (b"".join([prefix, *entry]),)
    return (prefix, *entry)


def _encode_packed_add_request(request: m.PackedAddRequest) -> Sequence[Buffer]:
    return [bytes_field(1, request.bookie_id.encode()), *chain.from_iterable(request.adds)]


def _encode_add_request(request: m.AddRequest) -> Sequence[Buffer]:
    packed = m.PackedAddRequest(request.bookie_id, list(map(encode_add, request.adds)))
    return _encode_packed_add_request(packed)


@lru_cache(maxsize=1024)
def _add_prefix(recovery: bool, token: bytes, length: int) -> bytes:
    """The bytes of an add before its entry of `length` bytes; consecutive adds often have equal
    prefixes."""
    prefix = int_field(1, recovery) + bytes_field(2, token) + bytes_head(3, length)
    return bytes_head(2, len(prefix) + length) + prefix


def _decode_add_request(data: memoryview) -> m.AddRequest:
    """Most adds have the same prefix as the add before: such a prefix is compared, not decoded."""
    bookie_id, adds = "", []
    at, end = 0, len(data)
    while at < end:
        number, value, at = next_field(data, at)
        if number == 1:
            bookie_id = text(value)
        elif number == 2:
            add = _decode_add(value)
            adds.append(add)
            at = _append_similar(data, at, add, adds)
    return m.AddRequest(bookie_id, adds)


def _append_similar(data: memoryview, at: int, add: m.Add, adds: list[m.Add]) -> int:
    """Append the adds from `at` on that have the same prefix as `add`; returns where they end."""
    length, end = len(add.entry[0]), len(data)
    prefix = _add_prefix(add.recovery, add.token, length)
    prefix_bytes, size = len(prefix), len(prefix) + length
    new = tuple.__new__  # m.Add(...) would be a call in Python for each add
    while at + size <= end and data[at : at + prefix_bytes] == prefix:
        entry = data[at + prefix_bytes : at + size]
        adds.append(new(m.Add, ((entry,), add.recovery, add.token)))
        at += size
    return at


def _decode_add(data: memoryview) -> m.Add:
    recovery, token, entry = False, b"", memoryview(b"")
    for number, value in fields_of(data):
        if number == 1:
            recovery = bool(value)
        elif number == 2:
            token = bytes(value)
        elif number == 3:
            entry = value
    return m.Add([entry], recovery, token)


def _encode_add_response(response: m.AddResponse) -> Sequence[Buffer]:
    count = len(response.results)
    if response.results.count(_OK_RESULT) == count:
        return (_OK_RESULT_BYTES * count,)
    return (_encode_generated(response),)


def _decode_add_response(data: memoryview) -> m.AddResponse:
    count = len(data) // len(_OK_RESULT_BYTES)
    if data == _OK_RESULT_BYTES * count:
        return m.AddResponse([_OK_RESULT] * count)
    return _decode_generated(m.AddResponse, data)  # type: ignore[no-any-return]


def glance_at_adds(data: Buffer) -> tuple[int, bool]:
    """How many adds an AddRequest has, and whether any of them is recovery's; for a refusal. No
    entry is decoded: encoders write fields in order, so the recovery flag is an add's first field.

    Raises BadMessage.
    """
    view, at, count, recovery = memoryview(data), 0, 0, False
    try:
        while at < len(view):
            key, at = read_varint(view, at)
            length, at = read_varint(view, at)
            if key & 7 == LENGTH:
                count += key >> 3 == 2
                recovery = recovery or (key >> 3 == 2 and bytes(view[at : at + 2]) == b"\x08\x01")
                at += length
            elif key & 7 != VARINT:
                raise BadMessage(f"Add: a field of type {key & 7}")
    except (ValueError, IndexError) as error:
        raise BadMessage(f"Add: {error}") from error
    return count, recovery


# -- Read -------------------------------------------------------------------------------------


def _encode_read_response(response: m.ReadResponse) -> Sequence[Buffer]:
    out: list[Buffer] = [
        int_field(1, response.status)
        + int_field(2, response.retry_after_ms)
        + bytes_field(3, response.reason.encode())
        + int_field(4, zigzag(response.last_add_confirmed))
    ]
    for result in response.results:
        prefix, length = int_field(1, result.status), len(result.entry)
        prefix += bytes_head(2, length) if length else b""
        if result.location is not None:
            prefix += bytes_field(3, _encode_generated(result.location))
        out.append(bytes_head(5, len(prefix) + length) + prefix)
        out.append(result.entry)
    ahead = (bytes_field(7, _encode_generated(at)) for at in response.ahead)
    out.append(int_field(6, response.stop) + b"".join(ahead) + int_field(8, response.skipped))
    return out


def _decode_read_response(data: memoryview) -> m.ReadResponse:
    status, retry, reason, lac = Status.OK, 0, "", 0
    results, stop, ahead, skipped = [], StopReason.END_OF_RANGE, [], 0
    for number, value in fields_of(data):
        if number == 5:
            results.append(_decode_entry_result(value))
        elif number == 7:
            ahead.append(_decode_generated(m.EntryLocation, value))
        elif number == 1:
            status = _STATUSES[value]
        elif number == 2:
            retry = value
        elif number == 3:
            reason = text(value)
        elif number == 4:
            lac = unzigzag(value)
        elif number == 6:
            stop = _STOPS[value]
        elif number == 8:
            skipped = value
    return m.ReadResponse(status, results, lac, stop, retry, reason, ahead, skipped)


def _decode_entry_result(data: memoryview) -> m.EntryResult:
    status, entry, location = Status.OK, memoryview(b""), None
    for number, value in fields_of(data):
        if number == 1:
            status = _STATUSES[value]
        elif number == 2:
            entry = value
        elif number == 3:
            location = _decode_generated(m.EntryLocation, value)
    return m.EntryResult(status, entry, location)


# -- other messages, through the generated code -----------------------------------------------


def _encode_generated(message: Any) -> bytes:
    return bytes(_TO_GENERATED.get(type(message), _generated)(message).SerializeToString())


def _decode_generated(kind: Any, data: Buffer) -> Any:
    generated = getattr(pb, kind.__name__).FromString(bytes(data))
    special = _OF_GENERATED.get(kind)
    return _of_generated(kind, generated) if special is None else special(generated)


def _generated(message: Any, **other: Any) -> Any:
    """The generated message with the fields of `message`, except the fields in `other`, which
    bookie.proto has in another form."""
    return getattr(pb, type(message).__name__)(**(message._asdict() | other))


def _of_generated(kind: Any, generated: Any, **other: Any) -> Any:
    values = {name: getattr(generated, name) for name in kind._fields if name not in other} | other
    if "status" in values:
        values["status"] = _STATUSES[values["status"]]
    return kind(**values)


def _gaps(last: int, spans: Sequence[Span]) -> list[int]:
    """A pair for each span: how many entries are between the end of the span before (of the first
    span: `last`) and the span, and how many entries the span has. Raises ValueError when the spans
    do not rise."""
    pairs: list[int] = []
    for first, end in spans:
        if not last < first <= end:
            raise ValueError(f"spans of entries rise: {first}..{end} after {last}")
        pairs += (first - last - 1, end - first + 1)
        last = end
    return pairs


def _spans(last: int, pairs: Sequence[int]) -> list[Span]:
    """The inverse of `_gaps`. Raises ValueError."""
    spans: list[Span] = []
    for gap, count in zip(pairs[::2], pairs[1::2], strict=True):
        first = last + 1 + gap
        last += gap + count
        if count < 1 or last > ENTRY_ID_MAX:
            raise ValueError(f"no span of entries: {count} from {first} on")
        spans.append((first, last))
    return spans


def _generated_read(read: m.ReadRequest) -> Any:
    last = read.spans[-1][1]
    further, ahead = _gaps(read.last_entry, read.further), _gaps(last, read.ahead)
    max_bytes = min(read.max_bytes, MAX_BYTES_MAX)
    return _generated(read, max_bytes=max_bytes, further=further, ahead=ahead)


def _read_of_generated(generated: Any) -> m.ReadRequest:
    further = _spans(generated.last_entry, generated.further) if generated.further else ()
    last = further[-1][1] if further else generated.last_entry
    ahead = _spans(last, generated.ahead) if generated.ahead else ()
    read: m.ReadRequest = _of_generated(m.ReadRequest, generated, further=further, ahead=ahead)
    return read


_TO_GENERATED: dict[type, Callable[[Any], Any]] = {
    m.AddResponse: lambda r: _generated(r, results=list(map(_generated, r.results))),
    m.ReadRequest: _generated_read,
    m.ReadStreamRequest: lambda r: _generated(r, read=r.read and _generated_read(r.read)),
    m.InfoResponse: lambda r: _generated(r, directories=list(map(_generated, r.directories))),
    m.StoredResponse: lambda r: pb.StoredResponse(
        status=r.status,
        retry_after_ms=r.retry_after_ms,
        reason=r.reason,
        through=r.through,
        stored=_gaps(NO_ENTRY, r.spans),
    ),
}
_OF_GENERATED: dict[type, Callable[[Any], Any]] = {
    m.AddResponse: lambda r: m.AddResponse([_of_generated(m.AddResult, e) for e in r.results]),
    m.ReadRequest: _read_of_generated,
    m.ReadStreamRequest: lambda r: m.ReadStreamRequest(
        _read_of_generated(r.read) if r.HasField("read") else None, r.credit_bytes
    ),
    m.InfoResponse: lambda r: _of_generated(
        m.InfoResponse, r, directories=[_of_generated(m.DirectoryInfo, e) for e in r.directories]
    ),
    m.StoredResponse: lambda r: _of_generated(
        m.StoredResponse, r, spans=_spans(NO_ENTRY, r.stored)
    ),
}
"""For messages whose fields differ from those of bookie.proto."""
_ENCODERS: dict[type, Callable[[Any], Sequence[Buffer]]] = {
    m.AddRequest: _encode_add_request,
    m.PackedAddRequest: _encode_packed_add_request,
    m.AddResponse: _encode_add_response,
    m.ReadResponse: _encode_read_response,
}
_DECODERS: dict[type, Callable[[memoryview], Any]] = {
    m.AddRequest: _decode_add_request,
    m.AddResponse: _decode_add_response,
    m.ReadResponse: _decode_read_response,
}
"""Encoders and decoders by hand; the generated code handles all other messages."""
