"""Whether a client is there, by what is heard from it.

Always true: a client that is silent for SILENT_S, although it was asked by a PING, has lost its
connection; one whose place another client asks for is asked at once, and has ANSWER_S. A client
whose connection is held, and not read, has its PINGs answered unread: else it would take the broker
for dead, connect again, and send all again.
"""

import asyncio
import logging

from spark_ledger.broker.wire.commands import command
from spark_ledger.broker.wire.frames import encode
from spark_ledger.broker.wire.link import Link

ASK_S, SILENT_S = 30.0, 90.0
HELD_PONG_S = 2.0
"""Clients wait some 30 s for the answer to a PING, or for anything else that comes."""
ANSWER_S = 5.0
"""A client whose place another one asks for has so long to answer a PING."""

_log = logging.getLogger(__name__)


class Presence:
    """Of the client of one connection."""

    def __init__(self, link: Link) -> None:
        self._link = link
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
        link = self._link
        if not link.open or link.is_closing or link.is_read:
            return
        if link.has_room.is_set():
            link.send(encode(command("pong")))
        self.is_held()

    def _ask(self) -> None:
        silent_s, link = self._loop.time() - self.heard_s, self._link
        takes_nothing = link.is_closing or not link.has_room.is_set()
        if silent_s >= SILENT_S and (takes_nothing or link.is_read):
            self._abort(silent_s)
            return
        if silent_s >= ASK_S:
            link.send(encode(command("ping")))
        self._timer = self._loop.call_later(ASK_S, self._ask)

    def _abort(self, silent_s: float) -> None:
        """Not a close, which would wait until the client takes what is sent."""
        _log.info("a connection ends: nothing was heard for %.0f s", silent_s)
        self._link.abort()

    async def answers(self, gone: asyncio.Event) -> bool:
        """Whether the client is there: it is asked, and has ANSWER_S. The connection of one that is
        silent ends; then this returns once it is `gone`."""
        link = self._link
        link.send(encode(command("ping")))
        link.flush()
        self.heard.clear()
        self._asking += 1
        link.read_or_not()
        try:
            async with asyncio.timeout(ANSWER_S):
                while link.open and not self.heard.is_set():
                    await self.heard.wait()
        except TimeoutError:
            if link.open and not self.heard.is_set():  # else both came after a standstill
                self._abort(ANSWER_S)
                await gone.wait()
        finally:
            self._asking -= 1
            link.read_or_not()
        return link.open
