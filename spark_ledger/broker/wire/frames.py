"""Frames of Pulsar's binary protocol, out of bytes and into bytes. Pure.

    4            4              command size
    +------------+--------------+-------------+
    | frame size | command size | BaseCommand |                          a command
    +------------+--------------+-------------+------------------------+
    | frame size | command size | BaseCommand | a batch (pulsar_batch) | SEND, MESSAGE
    +------------+--------------+-------------+------------------------+

Big-endian; the frame size counts what follows it. Always true: what is kept of a connection is one
frame that is not whole yet, of FRAME_BYTES_MAX at most; a frame that cannot be understood raises
MalformedFrame, after which nothing of the connection can be.
"""

import struct
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from bookie_server.api.entry import Buffer
from spark_ledger.broker.wire.commands import BaseCommand

MESSAGE_BYTES_MAX = 5 << 20
"""Of a batch, as its producer sends it: Pulsar's default."""
FRAME_BYTES_MAX = MESSAGE_BYTES_MAX + (64 << 10)
_SIZE = struct.Struct(">I")
_SIZES = struct.Struct(">II")


class MalformedFrame(Exception):
    """Bytes that are no frame: the connection ends."""


@dataclass(frozen=True, slots=True)
class Frame:
    """`batch` is what follows the command, None where nothing does."""

    command: BaseCommand
    batch: bytes | None = None


class FrameReader:
    """Of one connection."""

    def __init__(self) -> None:
        self._kept = bytearray()

    def feed(self, received: bytes) -> list[Frame]:
        """The frames that are whole now. Raises MalformedFrame."""
        if self._kept:
            self._kept += received
            data = bytes(self._kept) if self._whole() else b""
            if not data:
                return []
            self._kept.clear()
        else:
            data = received
        found, at, end = [], 0, len(data)
        while end - at >= _SIZE.size:
            (size,) = _SIZE.unpack_from(data, at)
            _check_size(size)
            if end - at - _SIZE.size < size:
                break
            found.append(_frame(data, at + _SIZE.size, size))
            at += _SIZE.size + size
        if at < end:
            self._kept += memoryview(data)[at:]
        return found

    def _whole(self) -> bool:
        """Whether the first frame kept is: a large one comes in many pieces."""
        if len(self._kept) < _SIZE.size:
            return False
        size: int = _SIZE.unpack_from(self._kept)[0]
        _check_size(size)
        return len(self._kept) - _SIZE.size >= size


def _check_size(size: int) -> None:
    if not _SIZE.size <= size <= FRAME_BYTES_MAX:
        raise MalformedFrame(f"a frame of {size} bytes, at most {FRAME_BYTES_MAX} are taken")


def _frame(data: bytes, at: int, size: int) -> Frame:
    (command_size,) = _SIZE.unpack_from(data, at)
    begin, end = at + _SIZE.size, at + size
    if begin + command_size > end:
        raise MalformedFrame(f"a command of {command_size} bytes in a frame of {size}")
    try:
        command = BaseCommand.FromString(data[begin : begin + command_size])
    except DecodeError as error:
        raise MalformedFrame(f"a command that cannot be read: {error}") from error
    batch = data[begin + command_size : end]
    return Frame(command, batch or None)


def encode(command: BaseCommand) -> bytes:
    """The frame of a command."""
    body: bytes = command.SerializeToString()
    return _SIZES.pack(len(body) + _SIZE.size, len(body)) + body


def encode_with_batch(command: BaseCommand, batch: Buffer) -> bytes:
    """The frame of a command that a batch follows."""
    body = command.SerializeToString()
    return b"".join((_SIZES.pack(len(body) + _SIZE.size + len(batch), len(body)), body, batch))
