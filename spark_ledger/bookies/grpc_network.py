"""The network over gRPC. The only file of the client that imports grpc.

Always true: one channel per address; a call that fails, for whatever cause, raises CallFailed;
calls never wait for a connection longer than it takes to refuse one; a process forked from one that
had connected is refused at once, for gRPC does not survive a fork. A bookie that restarts on
another port is met at its new address at the next call, since the address comes with each call.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import grpc
import grpc.aio

from spark_ledger.bookies.forks import refuse_after_fork
from spark_ledger.bookies.network import CallFailed, TooLate

SERVICE = "spark_ledger.bookie.v1.Bookie"
MESSAGE_BYTES_MAX = 64 * 1024 * 1024
CHANNELS_MAX = 256

Stub = Callable[..., Awaitable[bytes]]  # identity serializers: bytes for bytes
StreamCall = grpc.aio.StreamStreamCall[bytes, bytes]

_OPTIONS = (
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2_000),  # how long one attempt may take
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.http2.lookahead_bytes", 4 * 1024 * 1024),
    ("grpc.http2.max_frame_size", 4 * 1024 * 1024),
    ("grpc.http2.write_buffer_size", 4 * 1024 * 1024),
)


class GrpcNetwork:
    """Implements Network. Belongs to the event loop it is first used on."""

    def __init__(self) -> None:
        """Raises Unavailable in a process forked from one that made a network."""
        refuse_after_fork()
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._calls: dict[tuple[str, str], Stub] = {}
        self._closed = False

    async def call(self, address: str, method: str, request: bytes, timeout_s: float) -> bytes:
        """See Network.call."""
        if self._closed:  # whoever is still at work meets it, instead of connecting again
            raise CallFailed("the connections were closed")
        stub = self._calls.get((address, method)) or await self._stub(address, method)
        try:
            return await stub(request, timeout=timeout_s, wait_for_ready=False)
        except grpc.aio.AioRpcError as failure:
            raise CallFailed(f"{failure.code().name}: {failure.details()}") from None
        except (grpc.aio.UsageError, grpc.aio.InternalError, ValueError) as failure:
            raise CallFailed(f"the connection was given up: {failure}") from None
        except asyncio.CancelledError:
            if _cancelled_from_outside():
                raise
            raise CallFailed("the connection was given up") from None

    def stream(self, address: str, method: str) -> "GrpcStream":
        """See Network.stream."""

        async def begin() -> StreamCall:
            if self._closed:
                raise CallFailed("the connections were closed")
            channel = self._channels.get(address) or await self._connect(address)
            call = cast(Any, channel.stream_stream(f"/{SERVICE}/{method}", None, None))
            return cast(StreamCall, call(wait_for_ready=False))

        return GrpcStream(begin)

    async def close(self) -> None:
        """See Network.close."""
        self._closed = True
        channels = list(self._channels.values())
        self._channels.clear()
        self._calls.clear()
        await asyncio.gather(*(channel.close(None) for channel in channels))

    async def _stub(self, address: str, method: str) -> Stub:
        channel = self._channels.get(address) or await self._connect(address)
        stub = cast(Stub, channel.unary_unary(f"/{SERVICE}/{method}", None, None))
        self._calls[address, method] = stub
        return stub

    async def _connect(self, address: str) -> grpc.aio.Channel:
        await self._give_back_oldest()
        channel = self._channels[address] = grpc.aio.insecure_channel(address, options=_OPTIONS)
        return channel

    async def _give_back_oldest(self) -> None:
        if len(self._channels) < CHANNELS_MAX:
            return
        oldest = next(iter(self._channels))
        channel = self._channels.pop(oldest)
        self._calls = {key: call for key, call in self._calls.items() if key[0] != oldest}
        await channel.close(None)


class GrpcStream:
    """Implements Stream."""

    def __init__(self, begin: Callable[[], Awaitable[StreamCall]]) -> None:
        self._begin = begin
        self._call: StreamCall | None = None

    async def send(self, message: bytes) -> None:
        """See Stream.send."""
        if self._call is None:
            self._call = await self._begin()
        await self._do(self._call.write(message))

    async def receive(self, timeout_s: float) -> bytes | None:
        """See Stream.receive."""
        assert self._call is not None, "the first message is sent before anything is received"
        try:
            async with asyncio.timeout(timeout_s):
                message = await self._do(self._call.read())
        except TimeoutError:
            self.give_up()
            raise TooLate(f"silent for {timeout_s} s") from None
        return message if isinstance(message, bytes) else None  # grpc.aio.EOF

    def give_up(self) -> None:
        """See Stream.give_up."""
        if self._call is not None:
            self._call.cancel()

    async def _do(self, doing: Awaitable[Any]) -> Any:
        try:
            return await doing
        except grpc.aio.AioRpcError as failure:
            raise CallFailed(f"{failure.code().name}: {failure.details()}") from None
        except (grpc.aio.UsageError, grpc.aio.InternalError, ValueError) as failure:
            raise CallFailed(f"the connection was given up: {failure}") from None
        except asyncio.InvalidStateError as failure:  # a write to a call that has ended
            raise CallFailed(f"the stream has ended: {failure}") from None
        except asyncio.CancelledError:
            if _cancelled_from_outside():
                raise
            raise CallFailed("the connection was given up") from None


def _cancelled_from_outside() -> bool:
    """Closing a channel ends its calls as if their callers had been cancelled; they were not."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
