"""One TCP connection that carries frames, on the event loop; of the bookie and of its clients.

Always true: buffers are handed to the kernel as they are (sendmsg), in the order of `send`, and
bodies come out of it into the buffer they stay in (recv_into); no thread; a peer that has sent more
than the other side takes is not read from until that has changed (`unsent_bytes_max`), and one who
takes nothing at all for STUCK_S is cut off; `on_lost` is called once, whatever ends the connection,
and after it `on_frame` never.
"""

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from bookie_server.api.entry import Buffer
from bookie_server.api.frames import BadFrame, Frame, FrameReader

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
        """Send the buffers, `size` bytes in all, after all that was sent before. `sent` is called
        once: the kernel has them, or the connection is lost."""
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
        """Give the connection up at once; what is not sent is lost."""
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
            done: asyncio.Future[None] = self._loop.create_future()
            mark = self._sent_bytes + self.unsent_bytes
            self._marks.append((mark, partial(_finish, done)))
            await done

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
        """Hand to the kernel what it takes."""
        unsent = self._unsent
        while unsent:
            some = list(unsent) if len(unsent) <= BUFFERS_MAX else _first(unsent)
            try:
                count = self._sock.sendmsg(some)
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


def _finish(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)


def _first(unsent: deque[Buffer]) -> list[Buffer]:
    return [unsent[index] for index in range(BUFFERS_MAX)]


def _tune(sock: socket.socket) -> None:
    """No waiting for more to send; a peer that vanished is noticed. The kernel sizes its buffers
    itself: a size that is set may be smaller than what it grows to."""
    sock.setblocking(False)
    with contextlib.suppress(OSError):  # not TCP, or not Linux
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_EACH_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_COUNT)
