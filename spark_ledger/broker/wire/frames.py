"""Frames of Pulsar's binary protocol, out of bytes and into bytes. Pure.

    4            4              command size
    +------------+--------------+-------------+
    | frame size | command size | BaseCommand |                          a command
    +------------+--------------+-------------+------------------------+
    | frame size | command size | BaseCommand | a batch (pulsar_batch) | SEND, MESSAGE
    +------------+--------------+-------------+------------------------+

Big-endian; the frame size counts the bytes after it. Always true: a reader keeps at most one
incomplete frame, of FRAME_BYTES_MAX at most. After a MalformedFrame the connection has to end: the
reader cannot tell where the next frame begins.
"""

import struct
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from bookie_server.api.entry import Buffer
from spark_ledger.broker.wire.commands import BaseCommand

MESSAGE_BYTES_MAX = 5 << 20
"""The largest batch, as its producer sends it: Pulsar's default."""
FRAME_BYTES_MAX = MESSAGE_BYTES_MAX + (64 << 10)
_SIZE = struct.Struct(">I")
SIZES = struct.Struct(">II")


Span = tuple[int, int, int]
"""The positions of a frame: where its command begins, where its batch begins, and where it ends."""


class MalformedFrame(Exception):
    """The bytes are not a frame of the protocol: the connection has to end."""


@dataclass(frozen=True, slots=True)
class PulsarFrame:
    """A decoded frame. `batch` has the bytes after the command; None: the command ends the
    frame."""

    command: BaseCommand
    batch: bytes | None = None


class PulsarFrameReader:
    """Reads the frames of one connection."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, received: bytes) -> list[PulsarFrame]:
        """The frames that are complete now. Raises MalformedFrame."""
        data, spans = self.split(received)
        return [frame_of(data, *span) for span in spans]

    def split(self, received: bytes) -> tuple[bytes, list[Span]]:
        """The received bytes, after the rest of earlier calls, and the spans of the complete frames
        in these bytes. Raises MalformedFrame."""
        if self._rest:
            self._rest += received
            data = bytes(self._rest) if self._has_frame() else b""
            if not data:
                return b"", []
            self._rest.clear()
        else:
            data = received
        spans, at, end = list[Span](), 0, len(data)
        while end - at >= SIZES.size:
            size, command_size = SIZES.unpack_from(data, at)
            if not _SIZE.size <= size <= FRAME_BYTES_MAX:
                raise _no_frame(size)
            begin, after = at + SIZES.size, at + _SIZE.size + size
            if after > end:
                break
            if begin + command_size > after:
                raise MalformedFrame(f"a command of {command_size} bytes in a frame of {size}")
            spans.append((begin, begin + command_size, after))
            at = after
        if at < end:
            self._rest += memoryview(data)[at:]
            self._has_frame()
        return data, spans

    def _has_frame(self) -> bool:
        """Whether `_rest` has a complete frame: a large frame comes in many pieces. Raises
        MalformedFrame."""
        if len(self._rest) < _SIZE.size:
            return False
        size: int = _SIZE.unpack_from(self._rest)[0]
        if not _SIZE.size <= size <= FRAME_BYTES_MAX:
            raise _no_frame(size)
        return len(self._rest) - _SIZE.size >= size


def _no_frame(size: int) -> MalformedFrame:
    return MalformedFrame(f"a frame of {size} bytes, at most {FRAME_BYTES_MAX} are allowed")


def frame_of(data: bytes, begin: int, batch_at: int, end: int) -> PulsarFrame:
    """The frame at a span of the bytes. Raises MalformedFrame."""
    try:
        command = BaseCommand.FromString(data[begin:batch_at])
    except DecodeError as error:
        raise MalformedFrame(f"a command that cannot be read: {error}") from error
    return PulsarFrame(command, data[batch_at:end] or None)


def encode(command: BaseCommand, batch: Buffer = b"") -> bytes:
    """The frame of a command, which a batch may follow."""
    return with_batch(command.SerializeToString(), batch)


def with_batch(command: bytes, batch: Buffer) -> bytes:
    """The frame of an encoded command that a batch follows."""
    sizes = SIZES.pack(len(command) + _SIZE.size + len(batch), len(command))
    return b"".join((sizes, command, batch))
