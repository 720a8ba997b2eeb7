"""The bookie on the network: gRPC in, bytes of bookie.proto to the handler; the only grpc server.

Always true: messages are not decoded here (the handler does that, without protobuf's copies), so
the methods take and give bytes; reflection tells anybody what the messages are.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from grpc_reflection.v1alpha import reflection

from bookie_server.api import bookie_pb2
from bookie_server.api.messages import METHODS
from bookie_server.bookie import Bookie
from bookie_server.handler import handle_bytes

SERVICE: str = bookie_pb2.DESCRIPTOR.services_by_name["Bookie"].full_name
log = logging.getLogger(__name__)


class CannotListen(Exception):
    """The address is taken, or is none of this machine."""


class BookieService:
    """Serves one bookie; `message_bytes_max` is the largest message either way."""

    def __init__(self, bookie: Bookie, message_bytes_max: int) -> None:
        self._bookie = bookie
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", message_bytes_max),
                ("grpc.max_send_message_length", message_bytes_max),
                ("grpc.so_reuseport", 0),  # a taken port is an error, not a second server
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_recv_ping_interval_without_data_ms", 5000),
            ]
        )
        handlers = {
            method: grpc.unary_unary_rpc_method_handler(self._method(method)) for method in METHODS
        }
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, handlers),)
        )
        reflection.enable_server_reflection((SERVICE, reflection.SERVICE_NAME), self._server)

    async def start(self, listen: str) -> int:
        """Serve at `listen` ("host:port", port 0: any free one); returns the port.

        Raises CannotListen.
        """
        try:
            port = self._server.add_insecure_port(listen)
        except RuntimeError as error:
            raise CannotListen(f"cannot listen on {listen}: {error}") from error
        if port == 0:
            raise CannotListen(f"cannot listen on {listen}")
        await self._server.start()
        return port

    async def stop(self, grace_s: float) -> None:
        """Take no new calls; those under way get `grace_s` to end."""
        await self._server.stop(grace_s)

    def _method(self, method: str) -> Callable[[bytes, Any], Awaitable[bytes]]:
        async def call(request: bytes, _context: Any) -> bytes:
            try:
                return await handle_bytes(self._bookie, method, request)
            except Exception:
                log.exception("%s failed", method)
                raise

        return call
