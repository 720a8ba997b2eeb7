"""Bytes in, bytes out: both services and the simulated network call this, a request at a time
(`respond`) or a long ranged read as a stream (`serve_stream`).

Always true: the bytes of a request count from its arrival to its response, those of a response
until it is sent; a request beyond the budget gets BUSY before its entries are decoded, except one
of a recovery, which has a reserve.

Always true of a stream:
- each response is one of `Bookie.handle` to a read that begins where the one before stopped, so
  the rules of Read (rights, unknown entries, budgets, BUSY) hold here;
- bytes are sent only on credit; at most one response is read ahead of the one being sent, and
  counts in the budget for responses from the moment that it exists;
- nothing follows the response that ends the range or is not OK; the caller ends the stream: if the
  bookie ended it while the caller sends more credit, it would look broken to the caller.

grpc is not needed here: the caller carries the messages.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import NamedTuple

from bookie_server import __version__
from bookie_server.api import codec
from bookie_server.api import messages as m
from bookie_server.api.entry import Buffer
from bookie_server.api.status import Status, StopReason
from bookie_server.bookie import Bookie
from bookie_server.lanes import calling

REQUEST_OVERHEAD_BYTES = 2048  # memory of Python and gRPC for a call, however small
STARTING = codec.encode(m.InfoResponse(Status.OK, state="starting", version=__version__))
"""The response to Info before the bookie is ready."""


class EncodedResponse(NamedTuple):
    """A response of `size` bytes; call `sent` once, when they have left or never will."""

    buffers: Sequence[Buffer]
    size: int
    sent: Callable[[], None]

    @property
    def data(self) -> bytes:
        """A copy of all bytes."""
        return b"".join(self.buffers)


async def respond(bookie: Bookie, method: str, request: Buffer) -> EncodedResponse:
    """Carry out the request of bookie.proto's `method`; the bytes of the response count as under
    way until they are `sent`.

    A malformed request gets BAD_REQUEST (to Add: no results at all). Raises ValueError when there
    is no such method.
    """
    size = len(request) + REQUEST_OVERHEAD_BYTES
    bookie.received.take(size)
    try:
        return await respond_counted(bookie, method, request)
    finally:
        bookie.received.give_back(size)


async def respond_counted(bookie: Bookie, method: str, request: Buffer) -> EncodedResponse:
    """`respond` for a caller that has counted the request in `bookie.received`, with its overhead,
    before its bytes came."""
    if method not in m.METHODS:
        raise ValueError(f"bookie.proto has no method {method!r}")
    try:
        refusal = _refusal(bookie, method, request, len(request) + REQUEST_OVERHEAD_BYTES)
        if refusal is not None:
            return encoded_response(bookie, refusal)
        return encoded_response(bookie, await bookie.handle(codec.decode_request(method, request)))
    except codec.BadMessage as error:
        return encoded_response(bookie, _bad_request(method, str(error)))


def encoded_response(bookie: Bookie, response: m.Response) -> EncodedResponse:
    """Make the response ready to be sent: its bytes count until they are."""
    buffers = codec.encode_buffers(response)
    size = sum(map(len, buffers))
    caller = calling.get()
    bookie.responses.take(size, caller)
    return EncodedResponse(buffers, size, lambda: bookie.responses.give_back(size, caller))


def _refusal(bookie: Bookie, method: str, request: Buffer, size: int) -> m.Response | None:
    """BUSY for all of a request without room, whose `size` is counted already; None: it has room.
    Raises BadMessage."""
    received = bookie.received
    if received.fits(size) or method == "Info":  # Info always gets its response
        return None
    wait_ms = bookie.retry_after_ms
    refusal: m.Response
    if method == "Add":
        count, recovery = codec.glance_at_adds(request)
        refusal = m.AddResponse([m.AddResult(Status.BUSY, wait_ms)] * count)
    else:  # small: it is decoded to see whether it is a recovery's
        recovery = getattr(codec.decode_request(method, request), "fence", True)
        refusal = m.METHODS[method][1](status=Status.BUSY, retry_after_ms=wait_ms)
    return None if received.fits(size, recovery=recovery) else refusal


def _bad_request(method: str, reason: str) -> m.Response:
    if method == "Add":
        return m.AddResponse([])
    kind = m.METHODS[method][1]
    response: m.Response = kind(status=Status.BAD_REQUEST, reason=reason)
    return response


class Credit:
    """What the caller of a stream has sent: the range to read, and how many bytes may be sent."""

    def __init__(self) -> None:
        self.left = 0
        self.read: m.ReadRequest | None = None
        self.ended = False
        """By the caller, or by a malformed message."""
        self._begun = False
        self._news = asyncio.Event()

    def put(self, data: Buffer) -> None:
        """The caller's next message."""
        try:
            message = codec.decode_stream_request("ReadStream", data)
        except codec.BadMessage:
            self.end()
        if self.ended:
            return
        self.read = self.read if self._begun else message.read
        self._begun = True
        self.left += message.credit_bytes
        self._news.set()

    def end(self) -> None:
        """No more messages come."""
        self.ended = True
        self._news.set()

    async def wait(self) -> bool:
        """Wait for credit; False: none is left, and no more will come."""
        while self.left <= 0 and not self.ended:
            await self._wait()
        return self.left > 0

    async def begun(self) -> m.ReadRequest | None:
        """The range to read, when the first message came; None: the message has none."""
        while not self._begun and not self.ended:
            await self._wait()
        return self.read

    async def until_ended(self) -> None:
        """Wait until the caller has ended."""
        while not self.ended:
            await self._wait()

    async def _wait(self) -> None:
        self._news.clear()
        await self._news.wait()


async def hear(requests: AsyncIterator[Buffer], credit: Credit) -> None:
    """Put all messages."""
    try:
        async for data in requests:
            credit.put(data)
    finally:
        credit.end()


async def serve_stream(
    bookie: Bookie, credit: Credit
) -> AsyncGenerator[tuple[m.ReadRequest, EncodedResponse], None]:
    """What to send in response to the messages of a ReadStream, each with the read that it
    belongs to.

    Call `sent` of each response when it has left, or never will; close the generator to give up.
    """
    reading: asyncio.Task[_StreamResponse] | None = None
    try:
        request = await credit.begun()
        refusal = _refusal_of_stream(request)
        if request is None or refusal:
            bad = m.ReadResponse(Status.BAD_REQUEST, reason=refusal)
            yield request or m.ReadRequest("", 0, 0, 0, 0), encoded_response(bookie, bad)
            await credit.until_ended()
            return
        while await credit.wait():
            response = await (reading or _read(bookie, request, credit))
            reading = None
            credit.left -= response.encoded.size
            following = response.following
            if following is not None and credit.left > 0:
                reading = asyncio.ensure_future(_read(bookie, following, credit))
            yield response.request, response.encoded
            if following is None:
                await credit.until_ended()
                return
            request = following
    finally:
        if reading is not None:  # not needed any more: give back its bytes
            reading.cancel()
            (dropped,) = await asyncio.gather(reading, return_exceptions=True)
            if isinstance(dropped, _StreamResponse):
                dropped.encoded.sent()


class _StreamResponse(NamedTuple):
    """A response made ready to be sent; `following` reads on, None: the range has ended."""

    request: m.ReadRequest
    encoded: EncodedResponse
    following: m.ReadRequest | None


async def _read(bookie: Bookie, request: m.ReadRequest, credit: Credit) -> _StreamResponse:
    limited = request._replace(max_bytes=min(request.max_bytes or credit.left, credit.left))
    response = await bookie.handle(limited)
    assert isinstance(response, m.ReadResponse)
    following, count = None, len(response.results)
    if response.status is Status.OK and response.stop is StopReason.BYTE_LIMIT and count:
        following = request._replace(first_entry=request.first_entry + count)
    return _StreamResponse(request, encoded_response(bookie, response), following)


def _refusal_of_stream(request: m.ReadRequest | None) -> str:
    if request is None:
        return "a stream begins with the range to be read"
    if request.further:
        return "a stream reads one range"
    return "a stream does not fence" if request.fence else ""
