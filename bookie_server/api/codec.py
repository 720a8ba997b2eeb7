"""Messages to bytes and back, in the protobuf encoding of bookie.proto.

Always true: what is written here is what the generated code would read, and the other way round
(a test compares). Add and Read are encoded by hand, because the generated code copies each payload
several times: here a message is one join of buffers, and what is decoded are views into it.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from bookie_server.api import bookie_pb2
from bookie_server.api import messages as m
from bookie_server.api.entry import Buffer
from bookie_server.api.status import Status, StopReason

pb: Any = bookie_pb2  # its classes are made at import, out of sight of type checkers
_VARINT, _LENGTH = 0, 2
_STATUSES = {int(status): status for status in Status}  # several times as fast as Status(value)
_STOPS = {int(stop): stop for stop in StopReason}
_BYTE = [bytes((value,)) for value in range(0x80)]


class BadMessage(ValueError):
    """Bytes that are no message of the named method."""


def encode(message: m.Request | m.Response) -> bytes:
    """The bytes of a request or a response."""
    return _ENCODERS[type(message)](message)


def decode_request(method: str, data: Buffer) -> m.Request:
    """The request of `method` in `data`; buffers in it are views into `data`.

    Raises BadMessage when the bytes are no such request.
    """
    return _decode(method, 0, data)  # type: ignore[no-any-return]


def decode_response(method: str, data: Buffer) -> m.Response:
    """The response of `method` in `data`; buffers in it are views into `data`.

    Raises BadMessage when the bytes are no such response.
    """
    return _decode(method, 1, data)  # type: ignore[no-any-return]


def _decode(method: str, side: int, data: Buffer) -> Any:
    try:
        return _DECODERS[m.METHODS[method][side]](memoryview(data))
    except (ValueError, IndexError, KeyError) as error:
        raise BadMessage(f"{method}: {error}") from error
    except Exception as error:  # protobuf's DecodeError derives from Exception alone
        raise BadMessage(f"{method}: {error}") from error


# -- the protobuf wire, as far as it is needed ------------------------------------------------


def _varint(value: int) -> bytes:
    if 0 <= value < 0x80:
        return _BYTE[value]
    if value < 0:
        value += 1 << 64
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _zigzag(value: int) -> int:
    return (value << 1) ^ (value >> 63)


def _unzigzag(value: int) -> int:
    return (value >> 1) ^ -(value & 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _field(number: int, value: int) -> bytes:
    """A varint field; proto3 leaves zeros out."""
    return _BYTE[number << 3 | _VARINT] + _varint(value) if value else b""


def _header(number: int, length: int) -> bytes:
    return _BYTE[number << 3 | _LENGTH] + _varint(length)


def _bytes(number: int, value: bytes) -> bytes:
    return _header(number, len(value)) + value if value else b""


def _read_varint(data: memoryview, at: int) -> tuple[int, int]:
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


def _fields(data: memoryview) -> list[tuple[int, Any]]:
    """(field number, int or memoryview) in the order of the wire; fixed-size fields are skipped.

    Most keys, lengths and values are one byte long: those are read without a call."""
    fields: list[tuple[int, Any]] = []
    at, end = 0, len(data)
    while at < end:
        key = data[at]
        at += 1
        if key >= 0x80:
            key, at = _read_varint(data, at - 1)
        kind = key & 7
        if kind in (1, 5):
            at += 8 if kind == 1 else 4
            continue
        value = data[at]
        at += 1
        if value >= 0x80:
            value, at = _read_varint(data, at - 1)
        if kind == _LENGTH:
            start, at = at, at + value
            if at > end:
                raise ValueError("a field is longer than its message")
            fields.append((key >> 3, data[start:at]))
        elif kind == _VARINT:
            fields.append((key >> 3, value))
        else:
            raise ValueError(f"unknown wire type {kind}")
    return fields


def _text(view: memoryview) -> str:
    return str(view, "utf-8")


# -- Add --------------------------------------------------------------------------------------


def _encode_add_request(request: m.AddRequest) -> bytes:
    out: list[Buffer] = [_bytes(1, request.bookie_id.encode())]
    for add in request.adds:
        out.append(_add_prefix(add.recovery, add.token, sum(map(len, add.entry))))
        out.extend(add.entry)
    return b"".join(out)


@lru_cache(maxsize=1024)
def _add_prefix(recovery: bool, token: bytes, length: int) -> bytes:
    """What comes before an entry of `length` bytes; much the same for many entries in a row."""
    prefix = _field(1, recovery) + _bytes(2, token) + _header(3, length)
    return _header(2, len(prefix) + length) + prefix


def _decode_add_request(data: memoryview) -> m.AddRequest:
    bookie_id, adds = "", []
    for number, value in _fields(data):
        if number == 1:
            bookie_id = _text(value)
        elif number == 2:
            adds.append(_decode_add(value))
    return m.AddRequest(bookie_id, adds)


def _decode_add(data: memoryview) -> m.Add:
    recovery, token, entry = False, b"", memoryview(b"")
    for number, value in _fields(data):
        if number == 1:
            recovery = bool(value)
        elif number == 2:
            token = bytes(value)
        elif number == 3:
            entry = value
    return m.Add([entry], recovery, token)


def _encode_add_response(response: m.AddResponse) -> bytes:
    out = []
    for result in response.results:
        body = _field(1, result.status) + _field(2, result.retry_after_ms)
        body += _bytes(3, result.reason.encode())
        out.append(_header(1, len(body)) + body)
    return b"".join(out)


def _decode_add_response(data: memoryview) -> m.AddResponse:
    return m.AddResponse(
        [_decode_add_result(value) for number, value in _fields(data) if number == 1]
    )


_ADDED = m.AddResult(Status.OK)


def _decode_add_result(data: memoryview) -> m.AddResult:
    if not data:
        return _ADDED
    status, retry, reason = Status.OK, 0, ""
    for number, value in _fields(data):
        if number == 1:
            status = _STATUSES[value]
        elif number == 2:
            retry = value
        elif number == 3:
            reason = _text(value)
    return m.AddResult(status, retry, reason)


# -- Read -------------------------------------------------------------------------------------


def _encode_read_request(request: m.ReadRequest) -> bytes:
    return b"".join(
        (
            _bytes(1, request.bookie_id.encode()),
            _field(2, request.ledger_id),
            _field(3, request.first_entry),
            _field(4, request.last_entry),
            _field(5, request.max_bytes),
            _field(6, request.fence),
            _bytes(7, request.token),
        )
    )


def _decode_read_request(data: memoryview) -> m.ReadRequest:
    values = dict(_fields(data))
    return m.ReadRequest(
        bookie_id=_text(values.get(1, memoryview(b""))),
        ledger_id=_signed(values.get(2, 0)),
        first_entry=_signed(values.get(3, 0)),
        last_entry=_signed(values.get(4, 0)),
        max_bytes=values.get(5, 0),
        fence=bool(values.get(6, 0)),
        token=bytes(values.get(7, b"")),
    )


def _encode_read_response(response: m.ReadResponse) -> bytes:
    out: list[Buffer] = [
        _field(1, response.status)
        + _field(2, response.retry_after_ms)
        + _bytes(3, response.reason.encode())
        + _field(4, _zigzag(response.last_add_confirmed))
    ]
    for result in response.results:
        prefix, length = _field(1, result.status), len(result.entry)
        prefix += _header(2, length) if length else b""
        out.append(_header(5, len(prefix) + length) + prefix)
        out.append(result.entry)
    out.append(_field(6, response.stop))
    return b"".join(out)


def _decode_read_response(data: memoryview) -> m.ReadResponse:
    status, retry, reason, lac = Status.OK, 0, "", 0
    results, stop = [], StopReason.END_OF_RANGE
    for number, value in _fields(data):
        if number == 5:
            results.append(_decode_entry_result(value))
        elif number == 1:
            status = _STATUSES[value]
        elif number == 2:
            retry = value
        elif number == 3:
            reason = _text(value)
        elif number == 4:
            lac = _unzigzag(value)
        elif number == 6:
            stop = _STOPS[value]
    return m.ReadResponse(status, results, lac, stop, retry, reason)


def _decode_entry_result(data: memoryview) -> m.EntryResult:
    status, entry = Status.OK, memoryview(b"")
    for number, value in _fields(data):
        if number == 1:
            status = _STATUSES[value]
        elif number == 2:
            entry = value
    return m.EntryResult(status, entry)


# -- the rest, through the generated code -----------------------------------------------------


def _encode_read_lac_request(r: m.ReadLacRequest) -> bytes:
    return bytes(
        pb.ReadLacRequest(
            bookie_id=r.bookie_id,
            ledger_id=r.ledger_id,
            fence=r.fence,
            token=r.token,
            previous_lac=r.previous_lac,
            wait_ms=r.wait_ms,
        ).SerializeToString()
    )


def _decode_read_lac_request(data: memoryview) -> m.ReadLacRequest:
    r = pb.ReadLacRequest.FromString(bytes(data))
    return m.ReadLacRequest(r.bookie_id, r.ledger_id, r.fence, r.token, r.previous_lac, r.wait_ms)


def _encode_read_lac_response(r: m.ReadLacResponse) -> bytes:
    return bytes(
        pb.ReadLacResponse(
            status=int(r.status),
            retry_after_ms=r.retry_after_ms,
            reason=r.reason,
            last_add_confirmed=r.last_add_confirmed,
            fenced=r.fenced,
        ).SerializeToString()
    )


def _decode_read_lac_response(data: memoryview) -> m.ReadLacResponse:
    r = pb.ReadLacResponse.FromString(bytes(data))
    return m.ReadLacResponse(
        Status(r.status), r.last_add_confirmed, r.fenced, r.retry_after_ms, r.reason
    )


def _encode_write_lac_request(r: m.WriteLacRequest) -> bytes:
    return bytes(
        pb.WriteLacRequest(
            bookie_id=r.bookie_id,
            ledger_id=r.ledger_id,
            last_add_confirmed=r.last_add_confirmed,
            token=r.token,
        ).SerializeToString()
    )


def _decode_write_lac_request(data: memoryview) -> m.WriteLacRequest:
    r = pb.WriteLacRequest.FromString(bytes(data))
    return m.WriteLacRequest(r.bookie_id, r.ledger_id, r.last_add_confirmed, r.token)


def _encode_write_lac_response(r: m.WriteLacResponse) -> bytes:
    return bytes(
        pb.WriteLacResponse(
            status=int(r.status), retry_after_ms=r.retry_after_ms, reason=r.reason
        ).SerializeToString()
    )


def _decode_write_lac_response(data: memoryview) -> m.WriteLacResponse:
    r = pb.WriteLacResponse.FromString(bytes(data))
    return m.WriteLacResponse(Status(r.status), r.retry_after_ms, r.reason)


def _encode_info_request(r: m.InfoRequest) -> bytes:
    return bytes(pb.InfoRequest(bookie_id=r.bookie_id).SerializeToString())


def _decode_info_request(data: memoryview) -> m.InfoRequest:
    return m.InfoRequest(pb.InfoRequest.FromString(bytes(data)).bookie_id)


def _encode_info_response(r: m.InfoResponse) -> bytes:
    return bytes(
        pb.InfoResponse(
            status=int(r.status),
            bookie_id=r.bookie_id,
            state=r.state,
            reason=r.reason,
            free_bytes=r.free_bytes,
            total_bytes=r.total_bytes,
            ledgers=r.ledgers,
            entry_bytes_max=r.entry_bytes_max,
            version=r.version,
        ).SerializeToString()
    )


def _decode_info_response(data: memoryview) -> m.InfoResponse:
    r = pb.InfoResponse.FromString(bytes(data))
    return m.InfoResponse(
        Status(r.status),
        r.bookie_id,
        r.state,
        r.reason,
        r.free_bytes,
        r.total_bytes,
        r.ledgers,
        r.entry_bytes_max,
        r.version,
    )


_ENCODERS: dict[type, Callable[[Any], bytes]] = {
    m.AddRequest: _encode_add_request,
    m.AddResponse: _encode_add_response,
    m.ReadRequest: _encode_read_request,
    m.ReadResponse: _encode_read_response,
    m.ReadLacRequest: _encode_read_lac_request,
    m.ReadLacResponse: _encode_read_lac_response,
    m.WriteLacRequest: _encode_write_lac_request,
    m.WriteLacResponse: _encode_write_lac_response,
    m.InfoRequest: _encode_info_request,
    m.InfoResponse: _encode_info_response,
}
_DECODERS: dict[type, Callable[[memoryview], Any]] = {
    m.AddRequest: _decode_add_request,
    m.AddResponse: _decode_add_response,
    m.ReadRequest: _decode_read_request,
    m.ReadResponse: _decode_read_response,
    m.ReadLacRequest: _decode_read_lac_request,
    m.ReadLacResponse: _decode_read_lac_response,
    m.WriteLacRequest: _decode_write_lac_request,
    m.WriteLacResponse: _decode_write_lac_response,
    m.InfoRequest: _decode_info_request,
    m.InfoResponse: _decode_info_response,
}
