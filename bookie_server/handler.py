"""Bytes in, bytes out: what the gRPC service and the simulated network both call."""

from bookie_server.api import codec
from bookie_server.api import messages as m
from bookie_server.api.status import Status
from bookie_server.bookie import Bookie


async def handle_bytes(bookie: Bookie, method: str, request: bytes) -> bytes:
    """Carry out the request of bookie.proto's `method` and return the bytes of its response.

    Bytes that are no such request answer BAD_REQUEST (to Add: no results at all). Raises
    ValueError when there is no such method.
    """
    if method not in m.METHODS:
        raise ValueError(f"bookie.proto has no method {method!r}")
    try:
        decoded = codec.decode_request(method, request)
    except codec.BadMessage as error:
        return codec.encode(_bad_request(method, str(error)))
    return codec.encode(await bookie.handle(decoded))


def _bad_request(method: str, reason: str) -> m.Response:
    if method == "Add":
        return m.AddResponse([])
    kind = m.METHODS[method][1]
    response: m.Response = kind(status=Status.BAD_REQUEST, reason=reason)
    return response
