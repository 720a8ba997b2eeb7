"""From the bytes of a request to the bytes of its response, for a single request (`respond`) or for
a long range as a stream (`serve_stream`). Both services and the simulated network call this.

Always true: the bytes of a request count from its arrival to its response, the bytes of a response
until it is sent; a request beyond the budget gets BUSY before its entries are decoded; a recovery's
request may also use a reserve.

Always true of a stream:
- each response is `Bookie.handle`'s response to a read that begins where the read before stopped,
  so the rules of Read (rights, unknown entries, budgets, BUSY) hold here;
- bytes are sent only on credit; while a response is being sent, at most one more response is read,
  and it counts in the budget for responses from the moment that it exists;
- a response that ends the range, or is not OK, is the last one. Then the caller ends the stream: if
  the bookie ended it while the caller sends more credit, the caller would see a broken stream.

grpc is not needed here: the caller transports the messages.
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

REQUEST_OVERHEAD_BYTES = 2048  # memory of Python and gRPC for a call, beside the request's bytes
STARTING = codec.encode(m.InfoResponse(Status.OK, state="starting", version=__version__))
"""The response to Info before the bookie is ready."""


class EncodedResponse(NamedTuple):
    """A response of `size` bytes. The caller calls `sent` once, when the bytes are sent or never
    will be."""

    buffers: Sequence[Buffer]
    size: int
    sent: Callable[[], None]

    @property
    def data(self) -> bytes:
        """A copy of all bytes."""
        return b"".join(self.buffers)


async def respond(bookie: Bookie, method: str, request: Buffer) -> EncodedResponse:
    """Carry out the request of bookie.proto's `method`; the bytes of the response count until its
    `sent` is called.

    A malformed request gets BAD_REQUEST; a malformed Add gets a response without results. Raises
    ValueError when there is no such method.
    """
    size = len(request) + REQUEST_OVERHEAD_BYTES
    bookie.received.take(size)
    try:
        return await respond_counted(bookie, method, request)
    finally:
        bookie.received.give_back(size)


async def respond_counted(bookie: Bookie, method: str, request: Buffer) -> EncodedResponse:
    """`respond` for a caller that counts the request's bytes and their overhead in
    `bookie.received` itself, before they arrive."""
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
    """The response, encoded; its bytes count until `sent` is called."""
    buffers = codec.encode_buffers(response)
    size = sum(map(len, buffers))
    caller = calling.get()
    bookie.responses.take(size, caller)
    return EncodedResponse(buffers, size, lambda: bookie.responses.give_back(size, caller))


def _refusal(bookie: Bookie, method: str, request: Buffer, size: int) -> m.Response | None:
    """BUSY for the whole request if there is no room for the request, else None. Its `size` is
    counted already. Raises BadMessage."""
    received = bookie.received
    if received.fits(size) or method == "Info":  # Info always gets its response
        return None
    wait_ms = bookie.retry_after_ms
    refusal: m.Response
    if method == "Add":
        count, recovery = codec.glance_at_adds(request)
        refusal = m.AddResponse([m.AddResult(Status.BUSY, wait_ms)] * count)
    else:  # a small request: it is decoded to see whether a recovery sends it
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
    """The caller's side of a stream: the range to read, and how many bytes may be sent."""

    def __init__(self) -> None:
        self.bytes_left = 0
        self.read: m.ReadRequest | None = None
        self.is_ended = False
        """The caller ended the stream, or sent a malformed message."""
        self._has_begun = False
        self._news = asyncio.Event()

    def put(self, data: Buffer) -> None:
        """Take the caller's next message."""
        try:
            message = codec.decode_stream_request("ReadStream", data)
        except codec.BadMessage:
            self.end()
        if self.is_ended:
            return
        self.read = self.read if self._has_begun else message.read
        self._has_begun = True
        self.bytes_left += message.credit_bytes
        self._news.set()

    def end(self) -> None:
        """No more messages arrive."""
        self.is_ended = True
        self._news.set()

    async def wait(self) -> bool:
        """Wait for credit. False: no credit is left, and no more will arrive."""
        while self.bytes_left <= 0 and not self.is_ended:
            await self._wait()
        return self.bytes_left > 0

    async def first_read(self) -> m.ReadRequest | None:
        """Wait for the first message: the range to read; None if the message has no range."""
        while not self._has_begun and not self.is_ended:
            await self._wait()
        return self.read

    async def until_ended(self) -> None:
        """Wait until the caller has ended the stream."""
        while not self.is_ended:
            await self._wait()

    async def _wait(self) -> None:
        self._news.clear()
        await self._news.wait()


async def receive_credit(requests: AsyncIterator[Buffer], credit: Credit) -> None:
    """Put the caller's messages into `credit`, until the caller ends."""
    try:
        async for data in requests:
            credit.put(data)
    finally:
        credit.end()


async def serve_stream(
    bookie: Bookie, credit: Credit
) -> AsyncGenerator[tuple[m.ReadRequest, EncodedResponse], None]:
    """The responses of a ReadStream, each with the read that it responds to.

    The caller calls `sent` of each response when the response is sent, or never will be, and closes
    the generator to give up.
    """
    read_ahead: asyncio.Task[_StreamResponse] | None = None
    try:
        request = await credit.first_read()
        refusal = _refusal_of_stream(request)
        if request is None or refusal:
            bad = m.ReadResponse(Status.BAD_REQUEST, reason=refusal)
            yield request or m.ReadRequest("", 0, 0, 0, 0), encoded_response(bookie, bad)
            await credit.until_ended()
            return
        while await credit.wait():
            response = await (read_ahead or _read(bookie, request, credit))
            read_ahead = None
            credit.bytes_left -= response.encoded.size
            next_request = response.next_request
            if next_request is not None and credit.bytes_left > 0:
                read_ahead = asyncio.ensure_future(_read(bookie, next_request, credit))
            yield response.request, response.encoded
            if next_request is None:
                await credit.until_ended()
                return
            request = next_request
    finally:
        if read_ahead is not None:  # not needed any more: give back its bytes
            read_ahead.cancel()
            (unsent,) = await asyncio.gather(read_ahead, return_exceptions=True)
            if isinstance(unsent, _StreamResponse):
                unsent.encoded.sent()


class _StreamResponse(NamedTuple):
    """An encoded response; `next_request` continues the range, None: the range has ended."""

    request: m.ReadRequest
    encoded: EncodedResponse
    next_request: m.ReadRequest | None


async def _read(bookie: Bookie, request: m.ReadRequest, credit: Credit) -> _StreamResponse:
    limited = request._replace(
        max_bytes=min(request.max_bytes or credit.bytes_left, credit.bytes_left)
    )
    response = await bookie.handle(limited)
    assert isinstance(response, m.ReadResponse)
    next_request, count = None, len(response.results)
    if response.status is Status.OK and response.stop is StopReason.BYTE_LIMIT and count:
        next_request = request._replace(first_entry=request.first_entry + count)
    return _StreamResponse(request, encoded_response(bookie, response), next_request)


def _refusal_of_stream(request: m.ReadRequest | None) -> str:
    if request is None:
        return "a stream begins with the range to be read"
    if request.further:
        return "a stream reads one range"
    return "a stream does not fence" if request.fence else ""
