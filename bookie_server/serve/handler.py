"""Bytes in, bytes out: what both services and the simulated network call.

Always true: the bytes of a request count from its arrival to its response, those of a response
until it is sent; a request beyond the budget gets BUSY before its entries are decoded, but for
recovery's, which have a reserve.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from bookie_server.api import codec
from bookie_server.api import messages as m
from bookie_server.api.entry import Buffer
from bookie_server.api.status import Status
from bookie_server.bookie import Bookie
from bookie_server.lanes import calling

REQUEST_OVERHEAD_BYTES = 2048  # what Python and gRPC keep for a call, however small


class EncodedResponse(NamedTuple):
    """The `size` bytes of a response; call `sent` once, when they have left or never will."""

    buffers: Sequence[Buffer]
    size: int
    sent: Callable[[], None]

    @property
    def data(self) -> bytes:
        """All of them, copied."""
        return b"".join(self.buffers)


async def respond(bookie: Bookie, method: str, request: Buffer) -> EncodedResponse:
    """Carry out the request of bookie.proto's `method`; the bytes of the response count
    as under way until they are `sent`.

    Bytes that are no such request get BAD_REQUEST (to Add: no results at all). Raises
    ValueError when there is no such method.
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
    """BUSY for everything in a request, whose `size` is counted already, that there is no room for.
    Raises BadMessage."""
    received = bookie.received
    if received.fits(size) or method == "Info":  # Info always gets its response
        return None
    wait_ms = bookie.retry_after_ms
    refusal: m.Response
    if method == "Add":
        count, recovery = codec.glance_at_adds(request)
        refusal = m.AddResponse([m.AddResult(Status.BUSY, wait_ms)] * count)
    else:  # small: it is decoded to see whose it is
        recovery = getattr(codec.decode_request(method, request), "fence", True)
        refusal = m.METHODS[method][1](status=Status.BUSY, retry_after_ms=wait_ms)
    return None if received.fits(size, recovery=recovery) else refusal


def _bad_request(method: str, reason: str) -> m.Response:
    if method == "Add":
        return m.AddResponse([])
    kind = m.METHODS[method][1]
    response: m.Response = kind(status=Status.BAD_REQUEST, reason=reason)
    return response
