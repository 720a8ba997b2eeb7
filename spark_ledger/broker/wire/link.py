"""A client's connection (serve/connection.py), as the rooms below it use it."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

PROPERTIES_BYTES_MAX = 64 << 10


class Link(Protocol):
    """`has_room`: what was sent before has gone out, all but a bounded rest."""

    open: bool
    has_room: asyncio.Event
    room_listeners: dict[object, asyncio.Event]
    """By the consumer that waits: the event that is set when there is room again."""

    @property
    def address(self) -> str:
        """The other end, as "/host:port"."""

    @property
    def is_read(self) -> bool:
        """Whether the broker reads from it now."""

    @property
    def is_closing(self) -> bool: ...

    def send(self, frame: bytes) -> None: ...

    def flush(self) -> None:
        """Hand on what was sent in this turn of the loop."""

    async def room(self) -> None:
        """Wait for `has_room`."""

    async def answers(self) -> bool:
        """Whether its client is there; if not, it has ended by then."""

    def read_or_not(self) -> None:
        """What decides whether it is read has changed."""

    def go_on(self) -> None:
        """What is under way has become less: take what waits, and read more."""

    def abort(self) -> None:
        """End it, whatever waits to be sent."""


@dataclass(frozen=True, slots=True)
class ClientFacts:
    """What is shown of the client of a producer or a consumer: its version, since when it has been
    connected (ms since the epoch), and the properties that it gave."""

    link: Link
    version: str = ""
    since_ms: int = 0
    properties: dict[str, str] = field(default_factory=dict)


def properties_of(pairs: Iterable[Any]) -> dict[str, str]:
    """The properties that a client sent, PROPERTIES_BYTES_MAX at most: the first ones."""
    kept: dict[str, str] = {}
    size = 0
    for pair in pairs:
        size += len(pair.key) + len(pair.value)
        if size > PROPERTIES_BYTES_MAX:
            break
        kept[pair.key.decode(errors="replace")] = pair.value.decode(errors="replace")
    return kept
