"""One client's connection: bytes and back-pressure.

Always true: what a connection makes wait is bounded: it is not read while CONNECTION_BYTES_MAX of
its batches are not stored, while the broker is crowded, while it does not take its answers, or with
REQUESTS_MAX requests under way; meanwhile its PINGs are answered. One that is silent for SILENT_S,
although it was asked, is closed; one whose place another client asks for is asked at once, and
closed after ANSWER_S.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from spark_ledger.broker.broker import Broker
from spark_ledger.broker.produce.producer import Producer
from spark_ledger.broker.serve.client import Client
from spark_ledger.broker.serve.committers import CommitterConnection
from spark_ledger.broker.wire.commands import ServerError, command
from spark_ledger.broker.wire.frames import MalformedFrame, PulsarFrameReader, encode
from spark_ledger.topic.commit.hand_over import MAGIC

CONNECTION_BYTES_MAX = 16 << 20
UNSENT_BYTES_MAX = 1 << 20
TURN_BYTES_MAX = 64 << 10
"""What is sent in one turn of the loop goes out together, up to so many bytes."""
ASK_S, SILENT_S, CLOSE_S = 30.0, 90.0, 1.0
HELD_PONG_S = 2.0
"""Clients wait some 30 s for the answer to a PING, or for anything else that comes."""
ANSWER_S = 5.0
"""A client whose place another one asks for has so long to answer a PING."""

_log = logging.getLogger(__name__)


class Connection(asyncio.Protocol):
    def __init__(self, broker: Broker, on_end: Callable[["Connection"], None]) -> None:
        self.open = False
        self.drop = ServerError.NOT_ALLOWED
        self.client = Client(self, broker)
        self._broker = broker
        self._begun = False
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._frames = PulsarFrameReader()
        self._transport: asyncio.Transport
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._flushing = False
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._gone = asyncio.Event()
        self._waiting_bytes = 0
        self._heard_s = self._loop.time()
        self._heard = asyncio.Event()
        self._asking = 0  # how many wait for it to be heard
        self._timer: asyncio.TimerHandle | None = None
        self._held: asyncio.TimerHandle | None = None  # while it is not read

    # -- bytes -------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(high=UNSENT_BYTES_MAX)
        self.open = True
        self._timer = self._loop.call_later(ASK_S, self._ask)

    def data_received(self, data: bytes) -> None:
        if not self._begun and data[:1] == MAGIC[:1]:
            self._becomes_a_committers(data)
            return
        self._begun = True
        self._heard_s = self._loop.time()
        self._heard.set()
        self._take(lambda: self.client.take(*self._frames.whole(data)))

    def go_on(self) -> None:
        """What is under way has become less."""
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

    def _becomes_a_committers(self, data: bytes) -> None:
        """The peer is no client of Pulsar, but a committer that commits past live segments."""
        other = CommitterConnection(self._broker, self._transport)
        self._transport.set_protocol(other)
        self.connection_lost(None)
        other.data_received(data)

    def pause_writing(self) -> None:
        self._has_room.clear()
        self.read_or_not()

    def resume_writing(self) -> None:
        self._has_room.set()
        self.read_or_not()

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        self._gone.set()
        self._heard.set()
        self._has_room.set()
        if self._timer is not None:
            self._timer.cancel()
        self.client.end()
        self._on_end(self)

    def close(self) -> None:
        if self.open:
            self._flush()
            self._transport.close()

    def send(self, frame: bytes) -> None:
        """Send it with what else is sent in this turn of the loop; much goes at once, so that the
        sender sees by `room` that it is much."""
        if not self.open:
            return
        self._out.append(frame)
        self._out_bytes += len(frame)
        if self._out_bytes >= TURN_BYTES_MAX:
            self._flush()
        elif not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    async def room(self) -> None:
        await self._has_room.wait()

    def _flush(self) -> None:
        self._flushing = False
        out, self._out, self._out_bytes = self._out, [], 0
        if self.open and out:
            self._transport.write(out[0] if len(out) == 1 else b"".join(out))

    @property
    def is_read(self) -> bool:
        return self.open and self._transport.is_reading()

    def later(self, seconds: float, do: Callable[[], None]) -> object:
        return self._loop.call_later(seconds, do)

    def waits(self, size: int) -> None:
        """So many bytes of this connection's batches wait from now on, until `stored`."""
        self._waiting_bytes += size
        self._broker.waits(size)

    def stored(self, size: int) -> None:
        """So many bytes of them wait no more."""
        self._waiting_bytes -= size
        self._broker.waits(-size)
        self.read_or_not()

    def send_producer_away(self, producer: Producer) -> None:
        self.client.intake.send_away(producer)

    def read_or_not(self) -> None:
        if not self.open or self._transport.is_closing():
            return
        full = (
            self._waiting_bytes > CONNECTION_BYTES_MAX
            or not self._has_room.is_set()
            or self.client.is_busy
        )
        if self._broker.crowded and self._waiting_bytes:
            full = True
            self._broker.wait_for_relief(self.read_or_not)
        if self._asking and not self._heard.is_set():
            full = False  # the answer may wait to be read
        if full and self._transport.is_reading():
            self._transport.pause_reading()
            if self._held is None:
                self._held = self._loop.call_later(HELD_PONG_S, self._answer_while_held)
        elif not full and not self._transport.is_reading():
            self._transport.resume_reading()

    def _answer_while_held(self) -> None:
        """A PING may wait behind what is not read. It is answered unread: else the client takes
        the broker for dead, connects again, and sends all again."""
        self._held = None
        if not self.open or self._transport.is_closing() or self._transport.is_reading():
            return
        if self._has_room.is_set():
            self.send(encode(command("pong")))
        self._held = self._loop.call_later(HELD_PONG_S, self._answer_while_held)

    def _ask(self) -> None:
        silent_s, transport = self._loop.time() - self._heard_s, self._transport
        takes_nothing = transport.is_closing() or not self._has_room.is_set()
        if silent_s >= SILENT_S and (takes_nothing or transport.is_reading()):
            self._abort(silent_s)
            return
        if silent_s >= ASK_S:
            self.send(encode(command("ping")))
        self._timer = self._loop.call_later(ASK_S, self._ask)

    def _abort(self, silent_s: float) -> None:
        """Not `close`, which would wait until the client takes what is sent."""
        _log.info("a connection ends: nothing was heard for %.0f s", silent_s)
        self._transport.abort()

    async def answers(self) -> bool:
        """Whether its client is there: it is asked, and has ANSWER_S. The connection of one that is
        silent ends, whatever waits to be sent."""
        self.send(encode(command("ping")))
        self._flush()
        self._heard.clear()
        self._asking += 1
        self.read_or_not()
        try:
            async with asyncio.timeout(ANSWER_S):
                while self.open and not self._heard.is_set():
                    await self._heard.wait()
        except TimeoutError:
            if self.open and not self._heard.is_set():  # else both came after a standstill
                self._abort(ANSWER_S)
                await self._gone.wait()
        finally:
            self._asking -= 1
            self.read_or_not()
        return self.open

    async def close_and_wait(self) -> None:
        self.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._gone.wait()
