"""The network over frames (bookie_server/api/frames.py): one TCP connection for all calls to a
bookie.

Always true:
- a call that fails, for whatever cause, raises CallFailed, and NotConnected if nothing was sent;
- a bookie counts as connected when it has sent HELLO;
- a call waits CONNECT_S at most for a new connection, but RETRY_CONNECT_S at most if the attempt
  before failed; the attempt goes on in the background;
- a call that is given up is cancelled at the bookie;
- if a call gets no response in time, and no bytes arrived during the call, the connection is
  closed, as it may be dead.
"""

import asyncio
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from itertools import count

from bookie_server.api import codec
from bookie_server.api import messages as m
from bookie_server.api.entry import Buffer
from bookie_server.api.frames import (
    HEAD_BYTES,
    METHOD_NUMBERS,
    RECOVERY,
    BadFrame,
    Frame,
    FrameConnection,
    FrameHead,
    FrameKind,
    FrameReader,
    pack_head,
    unpack_wait,
)
from bookie_server.api.status import Status
from spark_ledger import net
from spark_ledger.async_tasks import cancel
from spark_ledger.bookies.bookie_client import CallFailed, TooLate

MESSAGE_BYTES_MAX = 64 * 1024 * 1024
CONNECTIONS_MAX = 256
UNSENT_BYTES_MAX = 1 << 62  # no limit here: the in-flight bytes of writers bound what is unsent
CONNECT_S = 2.0
RETRY_CONNECT_S = 0.05  # enough to connect where a process listens, or to be refused
RETRY_S, RETRY_S_MAX = 0.2, 1.0
_CALL_NUMBERS = 1 << 32

Response = tuple[FrameKind, memoryview]


class NotConnected(CallFailed):
    """There is no connection, so the bookie did not get the request."""


class FrameNetwork:
    """Implements Network, on the event loop of its first use. An attempt to connect may take
    `connect_s`."""

    def __init__(self, connect_s: float = CONNECT_S) -> None:
        self._connect_s = connect_s
        self._peers: dict[str, _Peer] = {}
        self._closed = False

    async def call(
        self, address: str, method: str, request: Sequence[Buffer], timeout_s: float
    ) -> Buffer:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        wire = await self._connected_wire(address, timeout_s)
        return await wire.call(method, request, deadline - loop.time())

    def stream(self, address: str, method: str) -> "FrameStream":
        return FrameStream(lambda: self._connected_wire(address, self._connect_s), method)

    def is_here(self, address: str) -> bool:
        """See Network.is_here. With a connection: whether its two ends have the same address.
        Without one: whether the address is an IP address of this host; a name is not looked up."""
        peer = self._peers.get(address)
        if peer is not None and peer.wire is not None:
            return peer.wire.is_here
        return net.is_own(address)

    async def close(self) -> None:
        self._closed = True
        for peer in list(self._peers.values()):
            await peer.close()
        self._peers.clear()

    async def _connected_wire(self, address: str, timeout_s: float) -> "Wire":
        """Raises NotConnected."""
        if self._closed:  # also for calls that began before `close`
            raise NotConnected("the connections were closed")
        peer = self._peers.get(address)
        if peer is None:
            await self._make_room()
            peer = self._peers.setdefault(address, _Peer(address, self._connect_s))
        wire = peer.wire
        if wire is not None and not wire.is_lost:
            return wire
        return await peer.connect(timeout_s)

    async def _make_room(self) -> None:
        if len(self._peers) >= CONNECTIONS_MAX:
            idle = (address for address, peer in self._peers.items() if peer.is_idle)
            address = next(idle, None) or next(iter(self._peers))
            await self._peers.pop(address).close()


class _Peer:
    """One address: its connection and, without a connection, the time of the next attempt."""

    def __init__(self, address: str, connect_s: float) -> None:
        self._address = address
        self._connect_s = connect_s
        self.wire: Wire | None = None
        self._attempt: asyncio.Task[Wire] | None = None
        self._failures = 0
        self._failure = ""
        self._next_try_at = 0.0

    @property
    def is_idle(self) -> bool:
        return self._attempt is None and (self.wire is None or self.wire.is_idle)

    async def connect(self, timeout_s: float) -> "Wire":
        """Raises NotConnected."""
        loop = asyncio.get_running_loop()
        if self._attempt is None and loop.time() >= self._next_try_at:
            self._attempt = loop.create_task(self._try(), name=f"connects to {self._address}")
            self._attempt.add_done_callback(self._attempt_ended)
        if self._attempt is None:
            raise NotConnected(self._failure)
        try:
            async with asyncio.timeout(
                min(timeout_s, RETRY_CONNECT_S) if self._failures else timeout_s
            ):
                return await asyncio.shield(self._attempt)
        except OSError as error:  # TimeoutError is one
            raise NotConnected(self._failure or self._why(error)) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise NotConnected("the connections were closed") from None

    async def close(self) -> None:
        if self._attempt is not None:
            await cancel(self._attempt)
        if self.wire is not None:
            self.wire.close()

    async def _try(self) -> "Wire":
        """Raises OSError (TimeoutError is one)."""
        async with asyncio.timeout(self._connect_s):
            wire = Wire(await net.dial(self._address, self._connect_s))
            try:
                await wire.hello
            except BaseException:
                wire.close()
                raise
            return wire

    def _attempt_ended(self, attempt: "asyncio.Task[Wire]") -> None:
        self._attempt = None
        if attempt.cancelled():
            return
        error = attempt.exception()
        if error is None:
            self.wire, self._failures, self._failure = attempt.result(), 0, ""
            return
        self._failure = self._why(error)
        pause_s = min(RETRY_S * 2**self._failures, RETRY_S_MAX)
        self._failures = min(self._failures + 1, 10)
        self._next_try_at = asyncio.get_running_loop().time() + pause_s

    def _why(self, error: BaseException) -> str:
        return f"no frames at {self._address}: {f'{error}' or 'no answer'}"


class Wire:
    """A connection and the calls and streams that are under way on it."""

    def __init__(self, sock: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self.is_here = net.ends_where_it_begins(sock)
        self.hello: asyncio.Future[None] = self._loop.create_future()
        self._numbers = count(1)
        self._calls: dict[int, asyncio.Future[Response]] = {}
        self._streams: dict[int, FrameStream] = {}
        self._connection = FrameConnection(
            sock,
            FrameReader(MESSAGE_BYTES_MAX, self._is_awaited),
            self._take_frame,
            self._connection_ended,
            UNSENT_BYTES_MAX,
        )

    @property
    def is_lost(self) -> bool:
        return self._connection.is_lost

    @property
    def is_idle(self) -> bool:
        return not self._calls and not self._streams

    async def call(self, method: str, request: Sequence[Buffer], timeout_s: float) -> Buffer:
        if self.is_lost:
            raise NotConnected("the connection is lost")
        number = next(self._numbers) % _CALL_NUMBERS
        response: asyncio.Future[Response] = self._loop.create_future()
        self._calls[number] = response
        began = self._loop.time()
        flags = RECOVERY if _is_recovery(method, request) else 0
        self.send(FrameKind.CALL, number, request, METHOD_NUMBERS[method], flags)
        timer = self._loop.call_later(timeout_s, _too_late, response, method, timeout_s)
        try:
            kind, body = await response
            if kind is FrameKind.ANSWER:
                return body
            if kind is FrameKind.BUSY:
                return _busy_response(method, request, unpack_wait(body))
            raise CallFailed(str(body, "utf-8", "replace"))
        except TooLate:
            if self._connection.received_at < began:
                self._connection.close("nothing was heard for too long")
            raise
        except (BadFrame, codec.BadMessage) as error:
            raise CallFailed(f"a malformed response: {error}") from None
        finally:
            timer.cancel()
            if self._calls.pop(number, None) is not None and not _has_responded(response):
                self.send(FrameKind.CANCEL, number)

    def send(
        self,
        kind: FrameKind,
        number: int,
        body: Sequence[Buffer] = (),
        method: int = 0,
        flags: int = 0,
    ) -> None:
        """Send a frame; nothing happens on a connection that is lost."""
        size = sum(map(len, body))
        head = pack_head(kind, number, size, method, flags)
        self._connection.send((head, *body), HEAD_BYTES + size)

    def begin(self, stream: "FrameStream") -> int:
        """The stream's number: from now on the stream gets the frames with this number."""
        number = next(self._numbers) % _CALL_NUMBERS
        self._streams[number] = stream
        return number

    def end(self, number: int) -> None:
        """End the stream, also at the bookie."""
        if self._streams.pop(number, None) is not None:
            self.send(FrameKind.CANCEL, number)

    def close(self) -> None:
        self._connection.close("the connections were closed")

    def _is_awaited(self, head: FrameHead) -> bool:
        """Whether a call or stream waits for the frame; frames of calls that were given up are
        skipped."""
        return head.call in self._calls or head.call in self._streams

    def _take_frame(self, frame: Frame) -> None:
        head = frame.head
        if head.kind is FrameKind.HELLO:
            if not self.hello.done():
                self.hello.set_result(None)
        elif (response := self._calls.get(head.call)) is not None:
            if head.kind not in (FrameKind.ANSWER, FrameKind.BUSY, FrameKind.REFUSED):
                self._connection.close(f"{head.kind.name} is no answer to a call")
            elif not response.done() and frame.body is not None:
                response.set_result((head.kind, frame.body))
        elif (stream := self._streams.get(head.call)) is not None:
            stream.take_frame(frame)

    def _connection_ended(self, why: str) -> None:
        if not self.hello.done():
            self.hello.set_exception(OSError(why))
            self.hello.exception()  # marks it as retrieved: perhaps no call waits any more
        for response in list(self._calls.values()):
            if not response.done():
                response.set_exception(CallFailed(f"the connection is lost: {why}"))
        for stream in list(self._streams.values()):
            stream.connection_lost(why)
        self._streams.clear()


class FrameStream:
    """Implements Stream."""

    def __init__(self, connect: "Callable[[], Awaitable[Wire]]", method: str) -> None:
        self._connect = connect
        self._method = method
        self._wire: Wire | None = None
        self._number = 0
        self._end_reason = ""
        self._arrived: deque[Frame] = deque()
        self._news = asyncio.Event()

    async def send(self, message: bytes) -> None:
        if self._wire is None:
            self._wire = await self._connect()
            self._number = self._wire.begin(self)
        if self._end_reason or self._wire.is_lost:
            raise CallFailed(self._end_reason or "the connection is lost")
        self._wire.send(FrameKind.STREAM, self._number, (message,), METHOD_NUMBERS[self._method])

    async def receive(self, timeout_s: float) -> Buffer | None:
        assert self._wire is not None, "the first message is sent before anything is received"
        try:
            async with asyncio.timeout(timeout_s):
                while not self._arrived:
                    if self._end_reason:
                        raise CallFailed(self._end_reason)
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            self.give_up()
            raise TooLate(f"silent for {timeout_s} s") from None
        head, body = self._arrived.popleft()
        if head.kind is FrameKind.STREAM:
            return body
        self.give_up()
        if head.kind is FrameKind.END:
            return None
        raise CallFailed(str(body or b"", "utf-8", "replace"))

    def give_up(self) -> None:
        self._end_reason = self._end_reason or "the stream was given up"
        if self._wire is not None:
            self._wire.end(self._number)

    def take_frame(self, frame: Frame) -> None:
        self._arrived.append(frame)
        self._news.set()

    def connection_lost(self, why: str) -> None:
        self._end_reason = self._end_reason or f"the connection is lost: {why}"
        self._news.set()


def _too_late(response: asyncio.Future[Response], method: str, timeout_s: float) -> None:
    if not response.done():
        response.set_exception(TooLate(f"{method}: no answer within {timeout_s:g} s"))


def _has_responded(response: asyncio.Future[Response]) -> bool:
    """Whether the bookie's response to the call has arrived."""
    return response.done() and not response.cancelled() and response.exception() is None


def _is_recovery(method: str, request: Sequence[Buffer]) -> bool:
    """Whether the request has adds of a recovery. All adds of a lane are of one kind, so the first
    add decides; requests of other methods need no flag."""
    if method != "Add":
        return False
    beginning = b"".join([bytes(memoryview(part)[:64]) for part in request[:2]])
    try:
        return codec.glance_at_adds(beginning)[1]
    except codec.BadMessage:
        return False


def _busy_response(method: str, request: Sequence[Buffer], wait_ms: int) -> bytes:
    """The response of method `method` with status BUSY: the bookie sent only the frame BUSY."""
    if method == "Add":
        adds, _ = codec.glance_at_adds(b"".join(request))
        return codec.encode(m.AddResponse([m.AddResult(Status.BUSY, wait_ms)] * adds))
    response: m.Response = m.METHODS[method][1](status=Status.BUSY, retry_after_ms=wait_ms)
    return codec.encode(response)
