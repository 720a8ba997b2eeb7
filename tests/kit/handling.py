"""Work that a running bookie does in the background or over a connection, done at once."""

from bookie_server.bookie import Bookie
from bookie_server.serve.handler import respond


async def handle_bytes(bookie: Bookie, method: str, request: bytes) -> bytes:
    """Carry out the request of bookie.proto's `method`. Raises ValueError for an unknown method."""
    reply = await respond(bookie, method, request)
    reply.sent()
    return reply.data


async def reclaim_once(bookie: Bookie, below: float = 1.0) -> None:
    """One pass of everything but the scrub: sweep, collection, and compaction of every log with a
    live share under `below`."""
    await bookie.reclaim.redo()
    await bookie.reclaim.collect(sweep=True, surplus=True)
    await bookie.reclaim.compact(below)
