"""Frames: bookie.proto's messages over plain TCP, many calls on one connection; and the connection
that carries them, on the event loop (`FrameConnection`), of the bookie and of its clients.

Always true of frames, which are bytes without I/O: a frame is a head and a body, whose length is in
the head; the body of a message is the same as in gRPC; a body is received into a buffer of its own,
which is made once the head has come and the receiver admits it; a body that is not admitted is
skipped and never kept; a malformed head ends the connection, since the start of the next head is
unknown.

     0        4     5      6        7       8        12            16
    +--------+-----+------+--------+-------+--------+-------------+-------------- -- -
    | "SLF1" | ver | kind | method | flags | call   | body length | body
    +--------+-----+------+--------+-------+--------+-------------+-------------- -- -

All integers are little-endian and unsigned. The bookie sends a HELLO first; then the caller sends
CALLs, each with a number of its choice that none of its calls under way has, and the bookie one
ANSWER to each, in any order. CANCEL gives a call or a stream up: then no response is due. A
stream is begun by its first STREAM; either side's END ends it. Instead of an ANSWER (or a STREAM)
a BUSY may come: the request was not carried out, its body is the time to wait in ms (4 bytes); or a
REFUSED, whose body is a text: as if no process had listened.

Always true of a connection: buffers are handed to the kernel as they are (sendmsg), in the order of
`send`, and bodies come out of it into the buffer in which they stay (recv_into); no thread; while
more than `unsent_bytes_max` wait for a peer to take them, nothing is read from it; a peer that
takes nothing at all for STUCK_S is cut off; `on_lost` is called once, whatever ends the connection,
and after it `on_frame` never.
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
RECOVERY = 1  # flag: recovery's or a fence, which has a reserve of every budget

_HEAD = struct.Struct("<4sBBBBII")
_WAIT = struct.Struct("<I")
_HTTP2_SETTINGS = 4  # the type of the frame with which a gRPC server begins
assert _HEAD.size == HEAD_BYTES


class FrameKind(IntEnum):
    """The kinds of frames; the caller sends CALL, CANCEL, STREAM and END, the bookie the others,
    and STREAM and END too."""

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
    """Bytes that do not parse as a frame; no byte after them can be parsed."""


class FrameHead(NamedTuple):
    """The head of a frame. `method` is 0 if the call's number determines it."""

    kind: FrameKind
    call: int = 0
    length: int = 0
    method: int = 0
    flags: int = 0


class Frame(NamedTuple):
    """`body` is None if it was not admitted, and so was skipped."""

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
        raise BadFrame(f"a body of {length} bytes, {body_bytes_max} is the most")
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
    """Turns bytes into frames: the caller puts them into `buffer()` and calls `received`.

    It calls `admit` once for each head, before it makes a buffer for the body.
    """

    def __init__(self, body_bytes_max: int, admit: Callable[[FrameHead], bool]) -> None:
        self._body_bytes_max = body_bytes_max
        self._admit = admit
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._scratch_end = 0
        self._head: FrameHead | None = None  # of the body on its way
        self._body: memoryview | None = None  # None: it was not admitted
        self._missing = 0  # bytes of it

    def give_up(self) -> None:
        """The connection is lost: free a half-received body now, not at a garbage collection."""
        self._head = self._body = None

    def buffer(self) -> memoryview:
        """Where to put the next bytes: room for at least one; not all of it need be used."""
        if self._head is None:
            return self._scratch[self._scratch_end :]
        if self._body is None:
            return self._scratch[: self._missing]
        return self._body[len(self._body) - self._missing :]

    def received(self, count: int) -> list[Frame]:
        """So many bytes were put into `buffer()`; returns the frames that are whole now.

        Raises BadFrame; the reader is useless then.
        """
        if self._head is None:
            self._scratch_end += count
            return self._cut()
        self._missing -= count
        if self._missing:
            return []
        body = None if self._body is None else self._body.toreadonly()
        frame = Frame(self._head, body)
        self._head = self._body = None
        return [frame]

    def _cut(self) -> list[Frame]:
        """The frames in the scratch buffer; of the last one only the beginning may be there."""
        frames: list[Frame] = []
        scratch, at, end = self._scratch, 0, self._scratch_end
        while end - at >= HEAD_BYTES and self._head is None:
            head = unpack_head(scratch, at, self._body_bytes_max)
            at += HEAD_BYTES
            here = min(end - at, head.length)
            admitted = self._admit(head)
            if here == head.length:
                body = memoryview(bytes(scratch[at : at + here])) if admitted else None
                frames.append(Frame(head, body))
            else:
                self._head, self._missing = head, head.length - here
                if admitted:
                    self._body = memoryview(_new_buffer(head.length))
                    self._body[:here] = scratch[at : at + here]
            at += here
        left = end - at
        if left and at:
            scratch[:left] = bytes(scratch[at:end])
        self._scratch_end = left
        return frames


def _new_buffer(length: int) -> bytearray:
    """A bytearray without zeros written first, which takes a tenth of a bookie's time for large
    adds. It is handed on only when each of its bytes was received."""
    made: bytearray = _new_bytearray(None, length)
    return made


READS_MAX = 16  # of one connection before others have their turn
BUFFERS_MAX = 1024  # IOV_MAX of Linux
STUCK_S = 60.0
KEEPALIVE_IDLE_S, KEEPALIVE_EACH_S, KEEPALIVE_COUNT = 20, 5, 2
_SMALL_BYTES = 4096  # buffers up to this size are joined: cheaper than one by one


class FrameConnection:
    """Owns `sock`, which is connected."""

    def __init__(
        self,
        sock: socket.socket,
        reader: FrameReader,
        on_frame: Callable[[Frame], None],
        on_lost: Callable[[str], None],
        unsent_bytes_max: int,
    ) -> None:
        self.lost = False
        self.heard_at = 0.0
        """When bytes came last, by the loop's clock."""
        self.unsent_bytes = 0
        self._sock = sock
        self._reader = reader
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._unsent_bytes_max = unsent_bytes_max
        self._loop = asyncio.get_running_loop()
        self._unsent: deque[Buffer] = deque()
        self._sent_bytes = 0
        self._marks: deque[tuple[int, Callable[[], None]]] = deque()
        self._stuck: asyncio.TimerHandle | None = None
        self._reading = False
        _tune(sock)
        self._read_on()

    def send(
        self, buffers: Sequence[Buffer], size: int, sent: Callable[[], None] | None = None
    ) -> None:
        """Send the buffers, `size` bytes in all, after all earlier ones. `sent` is called once:
        when the kernel has them, or the connection is lost."""
        if self.lost:
            if sent is not None:
                sent()
            return
        if size <= _SMALL_BYTES * len(buffers):
            buffers = (b"".join(buffers),)
        waiting = bool(self._unsent)
        self._unsent.extend(buffers)
        self.unsent_bytes += size
        if sent is not None:
            self._marks.append((self._sent_bytes + self.unsent_bytes, sent))
        if not waiting:
            self._write()
            if self._unsent and not self.lost:
                self._loop.add_writer(self._sock, self._writable)
                self._watch()
        if self.unsent_bytes > self._unsent_bytes_max and self._reading:
            self._reading = False
            self._loop.remove_reader(self._sock)

    def close(self, why: str = "closed") -> None:
        """Give the connection up at once; unsent bytes are lost."""
        if self.lost:
            return
        self.lost = True
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        if self._stuck is not None:
            self._stuck.cancel()
        self._sock.close()
        self._reader.give_up()
        self._unsent.clear()
        self.unsent_bytes = 0
        while self._marks:
            self._marks.popleft()[1]()
        self._on_lost(why)

    async def drained(self) -> None:
        """Return when all is sent, or the connection lost."""
        if self._unsent:
            done = asyncio.Event()
            self._marks.append((self._sent_bytes + self.unsent_bytes, done.set))
            await done.wait()

    # -- out ----------------------------------------------------------------------------------

    def _writable(self) -> None:
        before = self.unsent_bytes
        self._write()
        if self.lost:
            return
        if not self._unsent:
            self._loop.remove_writer(self._sock)
            if self._stuck is not None:
                self._stuck.cancel()
                self._stuck = None
        elif self.unsent_bytes < before:
            self._watch()
        if not self._reading and self.unsent_bytes * 2 <= self._unsent_bytes_max:
            self._read_on()

    def _write(self) -> None:
        """Hand as many bytes to the kernel as it takes."""
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
            self._drop(count)
            while self._marks and self._marks[0][0] <= self._sent_bytes:
                self._marks.popleft()[1]()

    def _drop(self, count: int) -> None:
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

    def _watch(self) -> None:
        if self._stuck is not None:
            self._stuck.cancel()
        why = f"the other side took nothing for {STUCK_S:g} s"
        self._stuck = self._loop.call_later(STUCK_S, self.close, why)

    # -- in -----------------------------------------------------------------------------------

    def _read_on(self) -> None:
        self._reading = True
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
                self.close("the other side closed it")
                return
            self.heard_at = self._loop.time()
            try:
                for frame in reader.received(count):
                    self._on_frame(frame)
                    if self.lost:
                        return
            except BadFrame as error:
                self.close(f"{error}")
                return
            if count < len(buffer) or not self._reading:
                return


def _tune(sock: socket.socket) -> None:
    """Send without delay, and notice a peer that vanished. The kernel sizes its buffers itself: a
    fixed size may be smaller than the size to which they grow."""
    sock.setblocking(False)
    with contextlib.suppress(OSError):  # not TCP, or not Linux
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_EACH_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_COUNT)
