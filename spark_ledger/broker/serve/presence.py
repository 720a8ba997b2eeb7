"""Whether a client lives, by the bytes that come from it.

Always true: a client that is silent for SILENT_S, although it got PINGs, loses its connection. If
another client asks for the place of a client (as the only producer or consumer), the client with
the place gets a PING at once, and has ANSWER_S to answer. While a connection is not read, its
client gets a PONG every HELD_PONG_S, without having sent a PING: else the client would take the
broker for dead, connect again, and send everything again.
"""

import asyncio
import logging

from spark_ledger.broker.wire.commands import command
from spark_ledger.broker.wire.frames import encode
from spark_ledger.broker.wire.link import Link

ASK_S, SILENT_S = 30.0, 90.0
HELD_PONG_S = 2.0
"""How often the client of a connection that is not read gets a PONG. Clients wait some 30 s for the
answer to a PING, or for any other frame."""
ANSWER_S = 5.0
"""How long a client may take to answer a PING when another client asks for its place."""

_log = logging.getLogger(__name__)


class Presence:
    """The presence of the client of one connection."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._loop = asyncio.get_running_loop()
        self.heard_s = self._loop.time()
        self.heard = asyncio.Event()
        self._askers = 0  # the number of callers that wait for a sign of the client
        self._timer: asyncio.TimerHandle | None = None
        self._pong_timer: asyncio.TimerHandle | None = None  # while the connection is not read

    @property
    def is_asked(self) -> bool:
        """Whether the client was asked and has not answered; the answer may wait to be read."""
        return bool(self._askers) and not self.heard.is_set()

    def begin(self) -> None:
        self._timer = self._loop.call_later(ASK_S, self._ask)

    def end(self) -> None:
        """Stop: the connection has ended."""
        self.heard.set()
        if self._timer is not None:
            self._timer.cancel()

    def start_pongs(self) -> None:
        """Send PONGs from now on, as long as the connection is not read."""
        if self._pong_timer is None:
            self._pong_timer = self._loop.call_later(HELD_PONG_S, self._pong_unread)

    def _pong_unread(self) -> None:
        self._pong_timer = None
        link = self._link
        if not link.open or link.is_closing or link.is_read:
            return
        if link.has_room.is_set():
            link.send(encode(command("pong")))
        self.start_pongs()

    def _ask(self) -> None:
        silent_s, link = self._loop.time() - self.heard_s, self._link
        is_blocked = link.is_closing or not link.has_room.is_set()
        if silent_s >= SILENT_S and (is_blocked or link.is_read):
            self._abort(silent_s)
            return
        if silent_s >= ASK_S:
            link.send(encode(command("ping")))
        self._timer = self._loop.call_later(ASK_S, self._ask)

    def _abort(self, silent_s: float) -> None:
        """Abort the connection: a close would wait until the client takes what is sent."""
        _log.info("a connection ends: nothing was heard for %.0f s", silent_s)
        self._link.abort()

    async def answers(self, end_event: asyncio.Event) -> bool:
        """Ask the client for a sign of life, and wait ANSWER_S at most. The connection of a silent
        client is aborted; this method then waits for `end_event`, the connection's end."""
        link = self._link
        link.send(encode(command("ping")))
        link.flush()
        self.heard.clear()
        self._askers += 1
        link.read_or_not()
        try:
            async with asyncio.timeout(ANSWER_S):
                while link.open and not self.heard.is_set():
                    await self.heard.wait()
        except TimeoutError:
            # if this process stood still, the answer may have come together with the timeout
            if link.open and not self.heard.is_set():
                self._abort(ANSWER_S)
                await end_event.wait()
        finally:
            self._askers -= 1
            link.read_or_not()
        return link.open
