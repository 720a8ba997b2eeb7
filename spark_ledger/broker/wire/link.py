"""A client's connection (serve/connection.py), as the rooms below it use it."""

import asyncio
from typing import Protocol


class Link(Protocol):
    """`has_room`: what was sent before has gone out, all but a bounded rest."""

    open: bool
    has_room: asyncio.Event

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
