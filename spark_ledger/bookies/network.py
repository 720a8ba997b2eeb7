"""The network as everything above it sees it: one call, bytes for bytes, to an address.

Always true: an exception says nothing about whether the bookie carried the request out.
"""

from typing import Protocol


class CallFailed(Exception):
    """No answer came: refused, lost, too late. The request may have been carried out."""


class Network(Protocol):
    """Calls to bookies. Implementations: grpc_network.py, and the simulated one of the tests."""

    async def call(self, address: str, method: str, request: bytes, timeout_s: float) -> bytes:
        """Send `request` (bytes of bookie.proto's request of `method`) and return the answer's.

        `address` is "host:port". Raises CallFailed after `timeout_s` at the latest.
        """

    async def close(self) -> None:
        """Give connections back; calls under way fail."""
