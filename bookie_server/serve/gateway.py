"""The bookie's gRPC server: it passes the bytes of each message of bookie.proto to the handler.

Always true: the handler decodes messages, without protobuf's copies, so the methods here take and
return bytes; reflection describes the messages to every client; before the bookie is ready, Info
responds "starting" and every other call gets UNAVAILABLE, as if no process listened. A call's
context is in a reference cycle of grpc, which only the garbage collector frees; so no object that
the context refers to holds a response's bytes.
"""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, NoReturn

import grpc
from grpc_reflection.v1alpha import reflection

from bookie_server.api import bookie_pb2
from bookie_server.api.messages import METHODS
from bookie_server.bookie import LONG_POLLS_MAX, Bookie
from bookie_server.lanes import calling
from bookie_server.serve.handler import STARTING, Credit, receive_credit, respond, serve_stream
from spark_ledger import net
from spark_ledger.async_tasks import cancel

LARGE_MESSAGES = (
    ("grpc.http2.max_frame_size", 4 << 20),
    ("grpc.http2.lookahead_bytes", 8 << 20),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.experimental.tcp_read_chunk_size", 1 << 20),
    ("grpc.experimental.tcp_max_read_chunk_size", 4 << 20),
)
"""A megabyte arrives in a few pieces instead of sixty-four, which saves 4 % of a bookie's time."""
CONNECTIONS_SHARE = 0.1
"""The share of the file descriptors for connections of gRPC; a connection beyond it is closed at
once. The listener of frames leaves room for this share and for files."""
CALLS_MAX = 2 * LONG_POLLS_MAX
"""Calls of gRPC under way on all connections; beyond it the response is RESOURCE_EXHAUSTED."""
SERVICE: str = bookie_pb2.DESCRIPTOR.services_by_name["Bookie"].full_name
log = logging.getLogger(__name__)


class CannotListen(Exception):
    """The address is taken, or not an address of this machine."""


class BookieService:
    """Serves one bookie (None: `serve` gives it later); `message_bytes_max` bounds requests and
    responses."""

    def __init__(self, bookie: Bookie | None, message_bytes_max: int) -> None:
        self._ready_bookie = bookie
        self._streams: dict[Credit, None] = {}
        self._is_stopping = False
        self._server = grpc.aio.server(
            maximum_concurrent_rpcs=CALLS_MAX,
            options=[
                ("grpc.max_receive_message_length", message_bytes_max),
                ("grpc.max_send_message_length", message_bytes_max),
                ("grpc.so_reuseport", 0),  # a taken port is an error, not a second server
                (
                    "grpc.max_allowed_incoming_connections",
                    max(1, int(net.descriptor_limit() * CONNECTIONS_SHARE)),
                ),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_recv_ping_interval_without_data_ms", 5000),
                *LARGE_MESSAGES,
            ],
        )
        handlers = {
            method: grpc.unary_unary_rpc_method_handler(self._method(method)) for method in METHODS
        }
        handlers["ReadStream"] = grpc.stream_stream_rpc_method_handler(self._read_stream)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, handlers),)
        )
        reflection.enable_server_reflection((SERVICE, reflection.SERVICE_NAME), self._server)

    async def start(self, listen: str) -> int:
        """Serve at `listen` ("host:port", port 0: any free one); returns the port.

        Raises CannotListen.
        """
        for sock in await sockets_at(listen, "listen"):  # gRPC gives no reason for its failure
            sock.close()
        try:
            port = self._server.add_insecure_port(listen)
        except RuntimeError as error:
            raise CannotListen(f"cannot listen on {listen}: {error}") from error
        if port == 0:
            raise CannotListen(f"cannot listen on {listen}")
        await self._server.start()
        return port

    def serve(self, bookie: Bookie) -> None:
        """Serve this bookie from now on."""
        self._ready_bookie = bookie

    async def stop(self, grace_s: float) -> None:
        """Take no new calls; calls under way get `grace_s` to end."""
        self._is_stopping = True
        for credit in self._streams:  # else a stream that waits for credit would delay the stop
            credit.end()
        await self._server.stop(grace_s)

    def _method(self, method: str) -> Callable[[bytes, Any], Awaitable[bytes]]:
        async def call(request: bytes, context: Any) -> bytes:
            if self._ready_bookie is None and method == "Info":
                return STARTING
            bookie = self._ready_bookie or await _refuse(context)
            calling.set(context.peer())
            try:
                response = await respond(bookie, method, request)
            except Exception:
                log.exception("%s failed", method)
                raise
            data, sent = response.data, response.sent
            context.add_done_callback(lambda _: sent())  # sent, or the caller has disconnected
            return data

        return call

    async def _read_stream(self, requests: AsyncIterator[bytes], context: Any) -> None:
        bookie = self._ready_bookie or await _refuse(context)
        calling.set(context.peer())
        credit = Credit()
        self._streams[credit] = None
        if self._is_stopping:
            credit.end()
        receive_task = asyncio.ensure_future(receive_credit(requests, credit))
        try:
            async with aclosing(serve_stream(bookie, credit)) as responses:
                async for _, response in responses:
                    try:
                        await context.write(response.data)
                    finally:
                        response.sent()
        except Exception:
            log.exception("ReadStream failed")
            raise
        finally:
            del self._streams[credit]
            await cancel(receive_task)


async def sockets_at(listen: str, setting: str) -> list[socket.socket]:
    """Sockets bound to `listen`, the value of `setting`. Raises CannotListen."""
    try:
        return await net.bound(*net.split(listen))
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise CannotListen(
            f"cannot listen on {listen}: {why}. Stop the process that listens there, or set"
            f" {setting} to an address of this machine that is free"
        ) from error


async def _refuse(context: Any) -> NoReturn:
    await context.abort(grpc.StatusCode.UNAVAILABLE, "the bookie is starting")
    raise AssertionError("abort raises")
