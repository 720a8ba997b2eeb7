"""The protobuf encoding, as far as codec.py needs it: varints, and fields of varints and bytes.

Always true: bytes that are no such encoding raise ValueError or IndexError, never give a value.
"""

from typing import Any

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


def signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def int_field(number: int, value: int) -> bytes:
    """A varint field; proto3 leaves zeros out."""
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
    """(field number, int or memoryview) in the order of the wire."""
    fields: list[tuple[int, Any]] = []
    at, end = 0, len(data)
    while at < end:
        number, value, at = next_field(data, at)
        fields.append((number, value))
    return fields


def next_field(data: memoryview, at: int) -> tuple[int, Any, int]:
    """Number and value (int or memoryview) of the field at `at`, and where the next one begins; a
    fixed-size field, of which there are none here, counts as number 0.

    Most keys, lengths and values are one byte long: those are read without a call."""
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
