"""Whether a client is there, by what is heard from it.

Always true: a client that is silent for SILENT_S, although it was asked by a PING, has lost its
connection; one whose place another client asks for is asked at once, and has ANSWER_S. A client
whose connection is held, and not read, has its PINGs answered unread: else it would take the broker
for dead, connect again, and send all again.
"""

import asyncio
import logging
from typing import Protocol

from spark_ledger.broker.wire.commands import command
from spark_ledger.broker.wire.frames import encode

ASK_S, SILENT_S = 30.0, 90.0
HELD_PONG_S = 2.0
"""Clients wait some 30 s for the answer to a PING, or for anything else that comes."""
ANSWER_S = 5.0
"""A client whose place another one asks for has so long to answer a PING."""

_log = logging.getLogger(__name__)


class Line(Protocol):
    """A connection, as it is judged by what comes."""

    open: bool
    has_room: asyncio.Event

    @property
    def is_closing(self) -> bool: ...

    @property
    def is_read(self) -> bool: ...

    def send(self, frame: bytes) -> None: ...

    def flush(self) -> None: ...

    def read_or_not(self) -> None: ...

    def abort(self) -> None:
        """End it, whatever waits to be sent."""


class Presence:
    """Of the client of one connection."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._loop = asyncio.get_running_loop()
        self.heard_s = self._loop.time()
        self.heard = asyncio.Event()
        self._asking = 0  # how many wait for it to be heard
        self._timer: asyncio.TimerHandle | None = None
        self._held: asyncio.TimerHandle | None = None  # while it is not read

    @property
    def is_asked(self) -> bool:
        """Whether its answer may wait to be read."""
        return bool(self._asking) and not self.heard.is_set()

    def begin(self) -> None:
        self._timer = self._loop.call_later(ASK_S, self._ask)

    def end(self) -> None:
        """The connection is gone."""
        self.heard.set()
        if self._timer is not None:
            self._timer.cancel()

    def is_held(self) -> None:
        """Its connection is not read from now on."""
        if self._held is None:
            self._held = self._loop.call_later(HELD_PONG_S, self._answer_while_held)

    def _answer_while_held(self) -> None:
        self._held = None
        line = self._line
        if not line.open or line.is_closing or line.is_read:
            return
        if line.has_room.is_set():
            line.send(encode(command("pong")))
        self.is_held()

    def _ask(self) -> None:
        silent_s, line = self._loop.time() - self.heard_s, self._line
        takes_nothing = line.is_closing or not line.has_room.is_set()
        if silent_s >= SILENT_S and (takes_nothing or line.is_read):
            self._abort(silent_s)
            return
        if silent_s >= ASK_S:
            line.send(encode(command("ping")))
        self._timer = self._loop.call_later(ASK_S, self._ask)

    def _abort(self, silent_s: float) -> None:
        """Not a close, which would wait until the client takes what is sent."""
        _log.info("a connection ends: nothing was heard for %.0f s", silent_s)
        self._line.abort()

    async def answers(self, gone: asyncio.Event) -> bool:
        """Whether the client is there: it is asked, and has ANSWER_S. The connection of one that is
        silent ends; then this returns once it is `gone`."""
        line = self._line
        line.send(encode(command("ping")))
        line.flush()
        self.heard.clear()
        self._asking += 1
        line.read_or_not()
        try:
            async with asyncio.timeout(ANSWER_S):
                while line.open and not self.heard.is_set():
                    await self.heard.wait()
        except TimeoutError:
            if line.open and not self.heard.is_set():  # else both came after a standstill
                self._abort(ANSWER_S)
                await gone.wait()
        finally:
            self._asking -= 1
            line.read_or_not()
        return line.open
