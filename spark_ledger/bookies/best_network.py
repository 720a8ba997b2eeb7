"""The network that takes the faster way: frames to bookies that speak them, gRPC to the others.

Always true: a call goes over one of the two, once; over gRPC only when nothing of it was sent as
frames.
"""

import asyncio
from collections.abc import Callable, Sequence

from bookie_server.api.entry import Buffer
from spark_ledger.bookies.frame_network import FrameNetwork, FrameStream, NotConnected
from spark_ledger.bookies.network import CallFailed, Network, Stream


class BestNetwork:
    """Implements ScatterNetwork. `frames_at` says where the bookie at an address speaks frames;
    `make_grpc` is called when the other way is first taken: most processes never take it, and need
    not load grpc."""

    def __init__(
        self,
        frames: FrameNetwork,
        make_grpc: Callable[[], Network],
        frames_at: Callable[[str], str | None],
    ) -> None:
        self._frames = frames
        self._make_grpc = make_grpc
        self._made_grpc: Network | None = None
        self._closed = False
        self._frames_at = frames_at

    @property
    def _grpc(self) -> Network:
        """Raises CallFailed once closed."""
        if self._made_grpc is None:
            if self._closed:
                raise CallFailed("the connections were closed")
            self._made_grpc = self._make_grpc()
        return self._made_grpc

    async def call(self, address: str, method: str, request: bytes, timeout_s: float) -> Buffer:
        """See Network.call."""
        return await self.call_buffers(address, method, (request,), timeout_s)

    async def call_buffers(
        self, address: str, method: str, request: Sequence[Buffer], timeout_s: float
    ) -> Buffer:
        """See ScatterNetwork.call_buffers."""
        where = self._frames_at(address)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        if where is not None:
            try:
                return await self._frames.call_buffers(where, method, request, timeout_s)
            except NotConnected:
                timeout_s = deadline - loop.time()
        return await self._grpc.call(address, method, b"".join(request), timeout_s)

    def stream(self, address: str, method: str) -> Stream:
        """See Network.stream."""
        where = self._frames_at(address)
        if where is None:
            return self._grpc.stream(address, method)
        return _BestStream(
            self._frames.stream(where, method), lambda: self._grpc.stream(address, method)
        )

    def is_here(self, address: str) -> bool:
        """See LocalNetwork.is_here."""
        where = self._frames_at(address)
        return where is not None and self._frames.is_here(where)

    async def close(self) -> None:
        """See Network.close."""
        self._closed = True
        await self._frames.close()
        if self._made_grpc is not None:
            await self._made_grpc.close()


class _BestStream:
    """Frames, until the first message shows that there is no connection."""

    def __init__(self, frames: FrameStream, otherwise: Callable[[], Stream]) -> None:
        self._stream: Stream = frames
        self._otherwise: Callable[[], Stream] | None = otherwise

    async def send(self, message: bytes) -> None:
        """See Stream.send."""
        try:
            await self._stream.send(message)
        except NotConnected:
            if self._otherwise is None:
                raise
            self._stream = self._otherwise()
            await self._stream.send(message)
        self._otherwise = None

    async def receive(self, timeout_s: float) -> Buffer | None:
        """See Stream.receive."""
        return await self._stream.receive(timeout_s)

    def give_up(self) -> None:
        """See Stream.give_up."""
        self._stream.give_up()
