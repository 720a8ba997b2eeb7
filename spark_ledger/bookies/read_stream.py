"""A long read of one bookie, response after response, as credit is granted.

Always true: a missing, late or malformed response is an exception,
and the stream is over then; nothing here is taken for a negative.
"""

from collections.abc import Callable
from typing import cast

from bookie_server.api import codec
from bookie_server.api.messages import ReadRequest, ReadResponse, ReadStreamRequest
from spark_ledger.bookies.add_lane import Unreachable
from spark_ledger.bookies.network import CallFailed, Stream, TooLate


class Silent(Unreachable):
    """Nothing came in the time allowed; that alone is no failure of the bookie."""


class ReadStream:
    """Made by BookieClient.read_stream. Used by one task; `give_up` when done, always."""

    def __init__(self, stream: Stream, told: Callable[[bool], None]) -> None:
        """`told` is called with whether the bookie responded, each time that is known."""
        self._stream = stream
        self._told = told
        self.received_bytes = 0
        """Of messages, as credit counts them."""

    async def begin(self, request: ReadRequest, credit_bytes: int) -> None:
        """Raises CallFailed."""
        await self._stream.send(codec.encode(ReadStreamRequest(request, credit_bytes)))

    async def grant(self, credit_bytes: int) -> None:
        """Let so many bytes more come. Raises Unreachable."""
        try:
            await self._stream.send(codec.encode(ReadStreamRequest(credit_bytes=credit_bytes)))
        except CallFailed as failure:
            self._told(False)
            raise Unreachable(str(failure)) from failure

    async def next(self, timeout_s: float) -> ReadResponse:
        """The next response. Raises Silent after `timeout_s`, Unreachable."""
        try:
            message = await self._stream.receive(timeout_s)
            if message is None:
                raise CallFailed("the bookie ended the stream")
            response = codec.decode_response("Read", message)
        except TooLate as failure:
            raise Silent(str(failure)) from failure
        except (CallFailed, codec.BadMessage) as failure:
            self._told(False)
            raise Unreachable(str(failure)) from failure
        self._told(True)
        self.received_bytes += len(message)
        return cast(ReadResponse, response)

    def give_up(self) -> None:
        """End the stream; what still comes is dropped."""
        self._stream.give_up()
