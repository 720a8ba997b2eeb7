"""A client's connection (serve/connection.py), as the rooms below it use it."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

PROPERTIES_BYTES_MAX = 64 << 10
_CPP = "Pulsar-CPP"
"""How the version of the C++ client begins, and of clients that are built on it (Python, Node)."""


class Link(Protocol):
    """`has_room` is set while the frames that wait to go out are within the limit of bytes."""

    open: bool
    has_room: asyncio.Event
    room_listeners: dict[object, asyncio.Event]
    """The event of each waiting consumer, which is set when there is room again."""

    @property
    def address(self) -> str:
        """The client's address, as "/host:port"."""

    @property
    def is_read(self) -> bool:
        """Whether the broker reads from the connection now."""

    @property
    def is_closing(self) -> bool: ...

    def send(self, frame: bytes) -> None: ...

    def flush(self) -> None:
        """Write the frames that were sent in this turn of the loop."""

    async def room(self) -> None:
        """Wait for `has_room`."""

    async def answers(self) -> bool:
        """Whether the client lives; if not, the connection has ended when this method returns."""

    def read_or_not(self) -> None:
        """Begin or stop to read, after a change of the conditions for reading."""

    def go_on(self) -> None:
        """Take waiting commands and read on: fewer commands are under way than before."""

    def abort(self) -> None:
        """End the connection at once, without sending the waiting frames."""


@dataclass(frozen=True, slots=True)
class ClientFacts:
    """What statistics show of the client of a producer or consumer. `since_ms`: when the producer
    or consumer was made (ms since the epoch); `properties`: those that the client gave it;
    `encrypts`: whether its client declares that it encrypts messages."""

    link: Link
    version: str = ""
    since_ms: int = 0
    properties: dict[str, str] = field(default_factory=dict)
    encrypts: bool = False

    @property
    def is_cpp(self) -> bool:
        return is_cpp(self.version)


def is_cpp(version: str) -> bool:
    """Whether a client of this version is the C++ client, or built on it."""
    return version.startswith(_CPP)


def all_properties(pairs: Iterable[Any]) -> dict[str, str]:
    """The properties that a client sent."""
    decoded = ((pair.key.decode(errors="replace"), pair.value) for pair in pairs)
    return {key: value.decode(errors="replace") for key, value in decoded}


def properties_of(pairs: Iterable[Any]) -> dict[str, str]:
    """The first properties that a client sent, up to PROPERTIES_BYTES_MAX."""
    kept: dict[str, str] = {}
    size = 0
    for pair in pairs:
        size += len(pair.key) + len(pair.value)
        if size > PROPERTIES_BYTES_MAX:
            break
        kept[pair.key.decode(errors="replace")] = pair.value.decode(errors="replace")
    return kept
