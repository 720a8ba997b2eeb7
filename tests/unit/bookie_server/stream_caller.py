"""The caller of a streamed read."""

import asyncio

from bookie_server.api import codec
from bookie_server.api import messages as m
from bookie_server.serve.handler import Credit, EncodedResponse, serve_stream
from tests.unit.bookie_server.node import ID, KIB, Node


class Caller:
    """The other end of one stream."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.credit = Credit()
        self.replies = serve_stream(node.bookie, self.credit)
        self.unsent: list[EncodedResponse] = []

    def begin(self, first: int, last: int, credit: int, **more: object) -> "Caller":
        read = m.ReadRequest(ID, 1, first, last, 8 * KIB)._replace(**more)
        self.credit.put(codec.encode(m.ReadStreamRequest(read, credit)))
        return self

    def grant(self, credit: int) -> None:
        self.credit.put(codec.encode(m.ReadStreamRequest(credit_bytes=credit)))

    def send(self, message: bytes) -> None:
        self.credit.put(message)

    def end(self) -> None:
        self.credit.end()

    async def next(self) -> m.ReadResponse | None:
        """The next response, sent at once; None: none comes."""
        try:
            async with asyncio.timeout(1):
                _, reply = await anext(self.replies)
        except (TimeoutError, StopAsyncIteration):
            return None
        reply.sent()
        response = codec.decode_response("Read", reply.data)
        assert isinstance(response, m.ReadResponse)
        return response
