"""The network as everything above it sees it: a call or a stream, bytes for bytes, to an address.

Always true: an exception says nothing about whether the bookie carried the request out; messages of
a stream arrive in the order they were sent, or not at all, and then nothing after them does.
"""

from collections.abc import Sequence
from typing import Protocol

from bookie_server.api.entry import Buffer


class CallFailed(Exception):
    """No response came: refused, lost, too late. The request may have been carried out."""


class TooLate(CallFailed):
    """Nothing was heard in the time that the caller allowed."""


class Unreachable(Exception):
    """A bookie gave no response, or a malformed one; what was stored is unknown."""


class Stream(Protocol):
    """Messages in both directions, bytes of bookie.proto; of one task at a time."""

    async def send(self, message: bytes) -> None:
        """Raises CallFailed."""

    async def receive(self, timeout_s: float) -> Buffer | None:
        """The next message; None: the bookie has ended the stream. Raises CallFailed (TooLate
        after `timeout_s`); the stream is over then."""

    def give_up(self) -> None:
        """Tell the bookie that the stream is over. May be called twice, and at the end."""


class Network(Protocol):
    """Calls to bookies. Implementations: frame_network.py and the simulated one of the tests."""

    async def call(
        self, address: str, method: str, request: Sequence[Buffer], timeout_s: float
    ) -> Buffer:
        """Send the buffers, one after the other the bytes of bookie.proto's request of `method`,
        and return the response's.

        `address` is "host:port". Raises CallFailed after `timeout_s` at the latest.
        """

    def stream(self, address: str, method: str) -> Stream:
        """Begin a stream of `method`; nothing is sent before the first message is."""

    def is_here(self, address: str) -> bool:
        """Whether the bookie at the address is on this host, as far as is known by now."""

    async def close(self) -> None:
        """Give connections back; calls under way fail."""
