"""The bookie's server of frames: it passes the bytes of each message to the handler.

Always true: the same handler serves frames and gRPC; the bytes of a request are counted in
`bookie.received` before a buffer is made for them; a request for which there is no room is skipped
and gets BUSY; the bytes of a response count until the kernel has them; a call is cancelled if its
caller cancels it or its connection is lost; before the bookie is ready, Info responds "starting"
and every other call is refused as if no process listened; a connection needs no thread.
"""

import asyncio
import logging
import socket
from contextlib import aclosing, suppress
from functools import partial

from bookie_server.api import messages as m
from bookie_server.api.frames import (
    HEAD_BYTES,
    METHOD_NAMES,
    METHOD_NUMBERS,
    RECOVERY,
    Frame,
    FrameConnection,
    FrameHead,
    FrameKind,
    FrameReader,
    pack_head,
    pack_wait,
)
from bookie_server.bookie import Bookie
from bookie_server.lanes import calling
from bookie_server.serve.gateway import sockets_at
from bookie_server.serve.handler import (
    REQUEST_OVERHEAD_BYTES,
    STARTING,
    Credit,
    EncodedResponse,
    respond_counted,
    serve_stream,
)
from spark_ledger import net

CALLS_MAX = 10_000  # calls under way on one connection; beyond it the response is BUSY
SMALL_BYTES = 4 << 10  # a request up to this size, as a fence, may use recovery's reserve
UNSENT_BYTES_MAX = 8 << 20  # of responses; beyond it no requests are read from the connection
_NUMBERS = {
    FrameKind.CALL: [METHOD_NUMBERS[name] for name in m.METHODS],
    FrameKind.STREAM: [METHOD_NUMBERS[name] for name in m.STREAMS],
}
log = logging.getLogger(__name__)


class FrameService:
    """Serves one bookie (None: `serve` gives it later); `message_bytes_max` bounds requests and
    responses."""

    def __init__(self, bookie: Bookie | None, message_bytes_max: int, files: int = 0) -> None:
        """`files`: how many descriptors connections must leave for files."""
        self.bookie = bookie
        self.message_bytes_max = message_bytes_max
        self._files = files
        self.connections: dict[_CallerConnection, None] = {}
        self.stopping = False
        self._listener: net.Listener | None = None

    async def start(self, listen: str) -> int:
        """Serve at `listen` ("host:port", port 0: any free one); returns the port.

        Raises CannotListen.
        """
        sockets = await sockets_at(listen, "frames_listen")
        self._listener = net.Listener(sockets, self._add_connection, self._files)
        self._listener.start()
        return self._listener.port

    def serve(self, bookie: Bookie) -> None:
        """Serve this bookie from now on."""
        self.bookie = bookie

    async def stop(self, grace_s: float) -> None:
        """Take no new calls; calls under way get `grace_s` to end and to send their responses."""
        self.stopping = True
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        callers = list(self.connections)
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await asyncio.gather(*(caller.finish() for caller in callers))
        for caller in callers:
            caller.connection.close("the bookie has stopped")

    def _add_connection(self, sock: socket.socket) -> None:
        self.connections[_CallerConnection(self, sock)] = None


class _CallerConnection:
    """One connection and the calls under way on it."""

    def __init__(self, service: FrameService, sock: socket.socket) -> None:
        self._service = service
        self._bookie = service.bookie
        self._name = f"frames {sock.fileno()}"
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._streams: dict[int, Credit] = {}
        self._admitted_bytes = 0
        """Bytes in `bookie.received` of requests that have not arrived fully."""
        self.connection = FrameConnection(
            sock,
            FrameReader(service.message_bytes_max, self._admit),
            self._take_frame,
            self._connection_lost,
            UNSENT_BYTES_MAX,
        )
        self._send(FrameKind.HELLO, 0)

    async def finish(self) -> None:
        """End the streams; return when no call is under way and all responses are sent."""
        for credit in self._streams.values():
            credit.end()
        while self._calls:
            await asyncio.gather(*self._calls.values(), return_exceptions=True)
        await self.connection.wait_until_sent()

    # -- requests -----------------------------------------------------------------------------

    def _admit(self, head: FrameHead) -> bool:
        """Whether the body of the frame may be read. If so, counts its bytes."""
        if head.kind not in _NUMBERS:
            return not head.length
        bookie = self._bookie = self._service.bookie
        if bookie is None or self._service.stopping or head.method not in _NUMBERS[head.kind]:
            return False
        size = head.length + REQUEST_OVERHEAD_BYTES
        is_small = head.length <= SMALL_BYTES
        if head.kind is FrameKind.STREAM:
            has_room = is_small and len(self._calls) < CALLS_MAX
        elif head.method == METHOD_NUMBERS["Info"]:
            has_room = is_small  # Info always gets its response
        else:
            may_use_reserve = is_small or bool(head.flags & RECOVERY)
            has_room = len(self._calls) < CALLS_MAX and bookie.received.has_room(
                size, recovery=may_use_reserve
            )
        if has_room:
            bookie.received.take(size)
            self._admitted_bytes += size
        return has_room

    def _take_frame(self, frame: Frame) -> None:
        head = frame.head
        if head.kind is FrameKind.CALL:
            self._take_call(head, frame.body)
        elif head.kind is FrameKind.STREAM:
            self._take_stream_message(head, frame.body)
        elif head.kind is FrameKind.CANCEL:
            if (task := self._calls.get(head.call)) is not None:
                task.cancel()
        elif head.kind is FrameKind.END:
            if (credit := self._streams.get(head.call)) is not None:
                credit.end()
        else:
            self.connection.close(f"a caller does not send {head.kind.name}")

    def _take_call(self, head: FrameHead, body: memoryview | None) -> None:
        if body is None:
            self._refuse(head)
            return
        bookie, size = self._take_over_bytes(body)
        if head.call in self._calls:
            bookie.received.give_back(size)
            self.connection.close(f"two calls of number {head.call}")
            return
        self._run(bookie, head, size, body)

    def _take_stream_message(self, head: FrameHead, body: memoryview | None) -> None:
        if body is None:
            self._refuse(head)
            return
        bookie, size = self._take_over_bytes(body)
        bookie.received.give_back(size)
        credit = self._streams.get(head.call)
        if credit is None:
            if head.call in self._calls:
                return  # more credit for a stream that has just ended, or a caller's mistake
            credit = self._streams[head.call] = Credit()
            self._run(bookie, head, 0, credit)
        credit.put(body)

    def _take_over_bytes(self, body: memoryview) -> tuple[Bookie, int]:
        """Take a request that has arrived fully out of `_admitted_bytes`. Returns the bookie and
        the request's bytes, which the caller has to give back to `bookie.received`."""
        assert self._bookie is not None
        size = len(body) + REQUEST_OVERHEAD_BYTES
        self._admitted_bytes -= size
        return self._bookie, size

    def _run(
        self, bookie: Bookie, head: FrameHead, size: int, request: memoryview | Credit
    ) -> None:
        task = asyncio.get_running_loop().create_task(self._carry_out(bookie, head, request))
        self._calls[head.call] = task
        task.add_done_callback(partial(self._call_ended, bookie, head.call, size))

    def _call_ended(self, bookie: Bookie, call: int, size: int, task: "asyncio.Task[None]") -> None:
        bookie.received.give_back(size)
        del self._calls[call]
        self._streams.pop(call, None)
        if not task.cancelled():
            task.result()  # a defect of this module goes to the loop's exception handler

    def _connection_lost(self, why: str) -> None:
        log.debug("a connection is lost: %s", why)
        self._service.connections.pop(self, None)
        if self._bookie is not None:
            self._bookie.received.give_back(self._admitted_bytes)
        for task in list(self._calls.values()):
            task.cancel()

    # -- responses ----------------------------------------------------------------------------

    async def _carry_out(
        self, bookie: Bookie, head: FrameHead, request: memoryview | Credit
    ) -> None:
        method = METHOD_NAMES[head.method]
        calling.set(self._name)
        try:
            if isinstance(request, memoryview):
                response = await respond_counted(bookie, method, request)
                self._respond(FrameKind.ANSWER, head.call, response)
            else:
                async with aclosing(serve_stream(bookie, request)) as responses:
                    async for _, response in responses:
                        self._respond(FrameKind.STREAM, head.call, response)
                        await self.connection.wait_until_sent()
                self._send(FrameKind.END, head.call)
        except Exception:
            log.exception("%s failed", method)
            self._send(FrameKind.REFUSED, head.call, b"a defect of the bookie; its log has where")

    def _respond(self, kind: FrameKind, call: int, response: EncodedResponse) -> None:
        buffers = (pack_head(kind, call, response.size), *response.buffers)
        self.connection.send(buffers, HEAD_BYTES + response.size, response.sent)

    def _refuse(self, head: FrameHead) -> None:
        bookie = self._service.bookie
        if bookie is None and head.method == METHOD_NUMBERS["Info"]:
            self._send(FrameKind.ANSWER, head.call, STARTING)
        elif bookie is None:
            self._send(FrameKind.REFUSED, head.call, b"the bookie is starting")
        elif self._service.stopping:
            self._send(FrameKind.REFUSED, head.call, b"the bookie is stopping")
        elif head.method not in _NUMBERS[head.kind]:
            self._send(FrameKind.REFUSED, head.call, b"there is no such method")
        elif head.kind is FrameKind.STREAM:
            self._send(FrameKind.REFUSED, head.call, b"too many calls, or too large a message")
        else:
            self._send(FrameKind.BUSY, head.call, pack_wait(bookie.retry_after_ms))

    def _send(self, kind: FrameKind, call: int, body: bytes = b"") -> None:
        self.connection.send((pack_head(kind, call, len(body)) + body,), HEAD_BYTES + len(body))
