"""Frames: bookie.proto's messages over plain TCP, many calls on one connection; and a connection
for frames on the event loop, which the bookie and its clients use (`FrameConnection`).

Always true of frames, whose code makes no I/O: a frame is a head and a body; the body's length is
in the head; the body of a message is the same as in gRPC. A body is received into a buffer of its
own, which is made when the receiver admits the head; a body that is not admitted is skipped and
never in memory as a whole. A malformed head ends the connection, since the start of the next head
is unknown.

     0        4     5      6        7       8        12            16
    +--------+-----+------+--------+-------+--------+-------------+-------------- -- -
    | "SLF1" | ver | kind | method | flags | call   | body length | body
    +--------+-----+------+--------+-------+--------+-------------+-------------- -- -

All integers are little-endian and unsigned. The bookie sends a HELLO first. Then the caller sends
CALLs, each with a number that no other call under way on this connection has, and the bookie sends
one ANSWER to each CALL, in any order. CANCEL ends a call or a stream without a response. The first
STREAM begins a stream; END from either side ends the stream. Instead of an ANSWER (or a STREAM) the
bookie may send BUSY: the request was not carried out; the body is the time to wait in ms (4 bytes).
Or it may send REFUSED, with a text as its body: the request counts as if no process had listened.

Always true of a connection: the kernel gets buffers without a copy (sendmsg), in the order of
`send`, and writes each body into the buffer in which it stays (recv_into); there is no thread.
While more than `unsent_bytes_max` are unsent, nothing is read from the peer; a peer that takes no
byte for STUCK_S is disconnected. `on_lost` is called once, whatever ends the connection; after that
call `on_frame` is not called.
"""

import asyncio
import contextlib
import ctypes
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from enum import IntEnum
from itertools import islice
from typing import NamedTuple

from bookie_server.api.entry import Buffer

MAGIC = b"SLF1"
VERSION = 1
HEAD_BYTES = 16
SCRATCH_BYTES = 16 << 10  # a buffer for heads; smaller bodies are received there and copied
RECOVERY = 1  # flag of a recovery's request or a fence, which may use a reserve of every budget

_HEAD = struct.Struct("<4sBBBBII")
_WAIT = struct.Struct("<I")
_HTTP2_SETTINGS = 4  # the type of the frame with which a gRPC server begins
assert _HEAD.size == HEAD_BYTES


class FrameKind(IntEnum):
    """The kinds of frames. The caller sends CALL, CANCEL, STREAM and END; the bookie sends HELLO,
    ANSWER, STREAM, END, BUSY and REFUSED."""

    HELLO = 1
    CALL = 2
    ANSWER = 3
    CANCEL = 4
    STREAM = 5
    END = 6
    BUSY = 7
    REFUSED = 8


METHOD_NUMBERS = {
    "Add": 1,
    "Read": 2,
    "ReadLac": 3,
    "WriteLac": 4,
    "ClearLimbo": 5,
    "Info": 6,
    "ReadStream": 7,
    "Stored": 8,
}
METHOD_NAMES = {number: name for name, number in METHOD_NUMBERS.items()}
_KINDS = {int(kind): kind for kind in FrameKind}
_WITH_BODY = (FrameKind.CALL, FrameKind.ANSWER, FrameKind.STREAM, FrameKind.BUSY, FrameKind.REFUSED)


_new_bytearray = ctypes.pythonapi.PyByteArray_FromStringAndSize
_new_bytearray.restype = ctypes.py_object
_new_bytearray.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t)


class BadFrame(ValueError):
    """The bytes do not parse as a frame. The connection cannot be used any more."""


class FrameHead(NamedTuple):
    """The head of a frame. `method` is 0 in frames of a call or stream that has begun already."""

    kind: FrameKind
    call: int = 0
    length: int = 0
    method: int = 0
    flags: int = 0


class Frame(NamedTuple):
    """A received frame. `body` is None if the receiver did not admit it."""

    head: FrameHead
    body: memoryview | None


def pack_head(
    kind: FrameKind, call: int = 0, length: int = 0, method: int = 0, flags: int = 0
) -> bytes:
    """The 16 bytes of a head."""
    return _HEAD.pack(MAGIC, VERSION, kind, method, flags, call, length)


def unpack_head(data: bytes | bytearray | memoryview, at: int, body_bytes_max: int) -> FrameHead:
    """The head at `at`. Raises BadFrame."""
    magic, version, kind, method, flags, call, length = _HEAD.unpack_from(data, at)
    if magic[:2] == b"\0\0" and magic[3] == _HTTP2_SETTINGS:
        raise BadFrame("gRPC is served there; frames have a port of their own")
    if magic != MAGIC or version != VERSION:
        raise BadFrame(f"not a frame: {magic!r} version {version}")
    if kind not in _KINDS:
        raise BadFrame(f"no kind of frame is {kind}")
    if length > body_bytes_max:
        raise BadFrame(f"a body has {length} bytes; the limit is {body_bytes_max}")
    if length and _KINDS[kind] not in _WITH_BODY:
        raise BadFrame(f"a {_KINDS[kind].name} of {length} bytes")
    return FrameHead(_KINDS[kind], call, length, method, flags)


def pack_wait(wait_ms: int) -> bytes:
    """The body of a BUSY."""
    return _WAIT.pack(wait_ms)


def unpack_wait(body: memoryview) -> int:
    """Raises BadFrame."""
    if len(body) != _WAIT.size:
        raise BadFrame(f"a BUSY of {len(body)} bytes")
    wait_ms: int = _WAIT.unpack(body)[0]
    return wait_ms


class FrameReader:
    """Turns bytes into frames: the caller puts bytes into `buffer()` and calls `take`.

    It calls `admit` once for each head, before it makes a buffer for the body.
    """

    def __init__(self, body_bytes_max: int, admit: Callable[[FrameHead], bool]) -> None:
        self._body_bytes_max = body_bytes_max
        self._admit = admit
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._scratch_end = 0
        self._head: FrameHead | None = None  # of a body that has not arrived fully
        self._body: memoryview | None = None  # None: not admitted
        self._missing_bytes = 0  # of the body

    def give_up(self) -> None:
        """Free a body that has not arrived fully: at once, not at the next garbage collection. The
        caller calls this when the connection is lost."""
        self._head = self._body = None

    def buffer(self) -> memoryview:
        """The memory for the next bytes: one byte or more. The caller need not fill all of it."""
        if self._head is None:
            return self._scratch[self._scratch_end :]
        if self._body is None:
            return self._scratch[: self._missing_bytes]
        return self._body[len(self._body) - self._missing_bytes :]

    def take(self, count: int) -> list[Frame]:
        """Take `count` bytes that were put into `buffer()`; returns the frames that are complete
        now. Raises BadFrame; then the reader cannot be used any more."""
        if self._head is None:
            self._scratch_end += count
            return self._parse()
        self._missing_bytes -= count
        if self._missing_bytes:
            return []
        body = None if self._body is None else self._body.toreadonly()
        frame = Frame(self._head, body)
        self._head = self._body = None
        return [frame]

    def _parse(self) -> list[Frame]:
        """The complete frames in the scratch buffer. If the buffer ends inside a head, these bytes
        stay at its beginning."""
        frames: list[Frame] = []
        scratch, at, end = self._scratch, 0, self._scratch_end
        while end - at >= HEAD_BYTES and self._head is None:
            head = unpack_head(scratch, at, self._body_bytes_max)
            at += HEAD_BYTES
            body_bytes = min(end - at, head.length)
            is_admitted = self._admit(head)
            if body_bytes == head.length:
                body = memoryview(bytes(scratch[at : at + body_bytes])) if is_admitted else None
                frames.append(Frame(head, body))
            else:
                self._head, self._missing_bytes = head, head.length - body_bytes
                if is_admitted:
                    self._body = memoryview(_new_buffer(head.length))
                    self._body[:body_bytes] = scratch[at : at + body_bytes]
            at += body_bytes
        rest_bytes = end - at
        if rest_bytes and at:
            scratch[:rest_bytes] = bytes(scratch[at:end])
        self._scratch_end = rest_bytes
        return frames


def _new_buffer(length: int) -> bytearray:
    """A bytearray that is not filled with zeros: with large adds, filling would take a tenth of a
    bookie's time. It becomes a frame's body only when each of its bytes was received."""
    buffer: bytearray = _new_bytearray(None, length)
    return buffer


READS_MAX = 16  # of one connection in a row, before other connections are read
BUFFERS_MAX = 1024  # IOV_MAX of Linux
STUCK_S = 60.0
KEEPALIVE_IDLE_S, KEEPALIVE_EACH_S, KEEPALIVE_COUNT = 20, 5, 2
_SMALL_BYTES = 4096  # buffers up to this average size are joined: one copy costs less


class FrameConnection:
    """A connection on `sock`, which is connected and now belongs to this object."""

    def __init__(
        self,
        sock: socket.socket,
        reader: FrameReader,
        on_frame: Callable[[Frame], None],
        on_lost: Callable[[str], None],
        unsent_bytes_max: int,
    ) -> None:
        self.is_lost = False
        self.received_at = 0.0
        """When bytes were received last, by the loop's clock."""
        self.unsent_bytes = 0
        self._sock = sock
        self._reader = reader
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._unsent_bytes_max = unsent_bytes_max
        self._loop = asyncio.get_running_loop()
        self._unsent: deque[Buffer] = deque()
        self._sent_bytes = 0
        self._callbacks: deque[tuple[int, Callable[[], None]]] = deque()
        self._stuck_timer: asyncio.TimerHandle | None = None
        self._is_reading = False
        _tune(sock)
        self._start_reading()

    def send(
        self, buffers: Sequence[Buffer], size: int, sent: Callable[[], None] | None = None
    ) -> None:
        """Send the buffers, `size` bytes together, after all earlier buffers. `sent` is called
        once: when the kernel has the bytes, or the connection is lost."""
        if self.is_lost:
            if sent is not None:
                sent()
            return
        if size <= _SMALL_BYTES * len(buffers):
            buffers = (b"".join(buffers),)
        has_unsent = bool(self._unsent)
        self._unsent.extend(buffers)
        self.unsent_bytes += size
        if sent is not None:
            self._callbacks.append((self._sent_bytes + self.unsent_bytes, sent))
        if not has_unsent:
            self._write()
            if self._unsent and not self.is_lost:
                self._loop.add_writer(self._sock, self._writable)
                self._start_stuck_timer()
        if self.unsent_bytes > self._unsent_bytes_max and self._is_reading:
            self._is_reading = False
            self._loop.remove_reader(self._sock)

    def close(self, why: str = "closed") -> None:
        """Close the connection at once; unsent bytes are lost."""
        if self.is_lost:
            return
        self.is_lost = True
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        if self._stuck_timer is not None:
            self._stuck_timer.cancel()
        self._sock.close()
        self._reader.give_up()
        self._unsent.clear()
        self.unsent_bytes = 0
        while self._callbacks:
            self._callbacks.popleft()[1]()
        self._on_lost(why)

    async def wait_until_sent(self) -> None:
        """Return when all bytes are sent, or the connection is lost."""
        if self._unsent:
            done = asyncio.Event()
            self._callbacks.append((self._sent_bytes + self.unsent_bytes, done.set))
            await done.wait()

    # -- sending ------------------------------------------------------------------------------

    def _writable(self) -> None:
        unsent_before = self.unsent_bytes
        self._write()
        if self.is_lost:
            return
        if not self._unsent:
            self._loop.remove_writer(self._sock)
            if self._stuck_timer is not None:
                self._stuck_timer.cancel()
                self._stuck_timer = None
        elif self.unsent_bytes < unsent_before:
            self._start_stuck_timer()
        if not self._is_reading and self.unsent_bytes * 2 <= self._unsent_bytes_max:
            self._start_reading()

    def _write(self) -> None:
        """Give the kernel as many bytes as it takes."""
        unsent = self._unsent
        while unsent:
            buffers = list(islice(unsent, BUFFERS_MAX))
            try:
                count = self._sock.sendmsg(buffers)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self._loop.call_soon(self.close, f"{error}")
                return
            self._sent_bytes += count
            self.unsent_bytes -= count
            self._drop_sent(count)
            while self._callbacks and self._callbacks[0][0] <= self._sent_bytes:
                self._callbacks.popleft()[1]()

    def _drop_sent(self, count: int) -> None:
        unsent = self._unsent
        while count:
            size = len(unsent[0])
            if size > count:
                unsent[0] = memoryview(unsent[0])[count:]
                return
            unsent.popleft()
            count -= size
        while unsent and not len(unsent[0]):
            unsent.popleft()

    def _start_stuck_timer(self) -> None:
        if self._stuck_timer is not None:
            self._stuck_timer.cancel()
        why = f"the other side took no byte for {STUCK_S:g} s"
        self._stuck_timer = self._loop.call_later(STUCK_S, self.close, why)

    # -- receiving ----------------------------------------------------------------------------

    def _start_reading(self) -> None:
        self._is_reading = True
        self._loop.add_reader(self._sock, self._readable)

    def _readable(self) -> None:
        reader = self._reader
        for _ in range(READS_MAX):
            buffer = reader.buffer()
            try:
                count = self._sock.recv_into(buffer)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self.close(f"{error}")
                return
            if not count:
                self.close("the other side closed the connection")
                return
            self.received_at = self._loop.time()
            try:
                for frame in reader.take(count):
                    self._on_frame(frame)
                    if self.is_lost:
                        return
            except BadFrame as error:
                self.close(f"{error}")
                return
            if count < len(buffer) or not self._is_reading:
                return


def _tune(sock: socket.socket) -> None:
    """Set the options to send without delay, and to notice a peer that has vanished. The sizes of
    the kernel's buffers are not set, as they grow beyond a size that could be set."""
    sock.setblocking(False)
    with contextlib.suppress(OSError):  # not TCP, or not Linux
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_EACH_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_COUNT)
