"""One client's connection: bytes and back-pressure.

Always true: the bytes that wait for one connection are bounded. A connection is not read while more
than CONNECTION_BYTES_MAX of its batches are not stored, while the broker is crowded and any of them
are not stored, while the client does not take its responses, while REQUESTS_MAX requests are under
way, or while a partition's rate lets it send no more. presence.py judges whether the client lives.
"""

import asyncio
import logging
from collections.abc import Callable

from spark_ledger.async_tasks import woken
from spark_ledger.broker.broker import Broker
from spark_ledger.broker.serve.client import Client
from spark_ledger.broker.serve.committers import CommitterConnection
from spark_ledger.broker.serve.presence import Presence
from spark_ledger.broker.wire.frames import MalformedFrame, PulsarFrameReader
from spark_ledger.topic.commit.hand_over import MAGIC

CONNECTION_BYTES_MAX = 16 << 20
UNSENT_BYTES_MAX = 1 << 20
TURN_BYTES_MAX = 64 << 10
"""Frames that are sent in one turn of the loop are written together, up to this size."""
CLOSE_S = 1.0

_log = logging.getLogger(__name__)


class Connection(asyncio.Protocol):
    def __init__(self, broker: Broker, on_end: Callable[["Connection"], None]) -> None:
        self.open = False
        self.has_room = asyncio.Event()
        self.has_room.set()
        self.room_listeners: dict[object, asyncio.Event] = {}
        self.client = Client(self, broker)
        self._broker = broker
        self._presence = Presence(self)
        self._is_client = False
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._frames = PulsarFrameReader()
        self._transport: asyncio.Transport
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._is_flush_due = False
        self._end_event = asyncio.Event()

    @property
    def address(self) -> str:
        host, port = self._transport.get_extra_info("peername")[:2]
        return f"/{host}:{port}"

    # -- bytes -------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(high=UNSENT_BYTES_MAX)
        self.open = True
        self._presence.begin()

    def data_received(self, data: bytes) -> None:
        if not self._is_client and data[:1] == MAGIC[:1]:
            self._switch_to_committer(data)
            return
        self._is_client = True
        self._presence.heard_s = self._loop.time()
        self._presence.heard.set()
        self._take(lambda: self.client.take(*self._frames.split(data)))

    def go_on(self) -> None:
        """Take commands that wait: fewer commands are under way than before."""
        if self.open and not self._transport.is_closing():
            self._take(self.client.take_more)

    def _take(self, take: Callable[[], None]) -> None:
        try:
            take()
        except MalformedFrame as error:
            _log.warning("a connection ends: %s", error)
            self.close()
        except Exception:
            _log.exception("a connection ends: a defect")
            self.close()
        self.read_or_not()

    def _switch_to_committer(self, data: bytes) -> None:
        """Serve the peer as a committer: the peer is not a client of Pulsar."""
        committer = CommitterConnection(self._broker, self._transport)
        self._transport.set_protocol(committer)
        self.connection_lost(exc=None)
        committer.data_received(data)

    def pause_writing(self) -> None:
        self.has_room.clear()
        self.read_or_not()

    def resume_writing(self) -> None:
        self.has_room.set()
        for listener in self.room_listeners.values():
            listener.set()
        self.read_or_not()

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        self._end_event.set()
        self._presence.end()
        self.has_room.set()
        self.client.end()
        self._on_end(self)

    def close(self) -> None:
        if self.open:
            self.flush()
            self._transport.close()

    def send(self, frame: bytes) -> None:
        """Send the frame together with the other frames of this turn of the loop. Frames of
        TURN_BYTES_MAX and more are written at once, so that `room` soon makes the sender wait."""
        if not self.open:
            return
        self._out.append(frame)
        self._out_bytes += len(frame)
        if self._out_bytes >= TURN_BYTES_MAX:
            self.flush()
        elif not self._is_flush_due:
            self._is_flush_due = True
            self._loop.call_soon(self.flush)

    async def room(self) -> None:
        await self.has_room.wait()

    def flush(self) -> None:
        self._is_flush_due = False
        out, self._out, self._out_bytes = self._out, [], 0
        if self.open and out:
            self._transport.write(out[0] if len(out) == 1 else b"".join(out))

    @property
    def is_read(self) -> bool:
        return self.open and self._transport.is_reading()

    @property
    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def abort(self) -> None:
        self._transport.abort()

    def read_or_not(self) -> None:
        if not self.open or self._transport.is_closing():
            return
        waiting_bytes = self.client.intake.waiting_bytes
        is_full = (
            waiting_bytes > CONNECTION_BYTES_MAX
            or not self.has_room.is_set()
            or self.client.is_busy
            or self.client.intake.rests
        )
        if self._broker.is_crowded and waiting_bytes:
            is_full = True
            self._broker.wait_for_relief(self.read_or_not)
        if is_full and self._presence.is_asked:
            is_full = False
        if is_full and self._transport.is_reading():
            self._transport.pause_reading()
            self._presence.start_pongs()
        elif not is_full and not self._transport.is_reading():
            self._transport.resume_reading()

    async def answers(self) -> bool:
        """Whether the client lives; if not, the connection has ended when this method returns."""
        return await self._presence.answers(self._end_event)

    async def close_and_wait(self) -> None:
        self.close()
        await woken(self._end_event, CLOSE_S)
