"""A connection between a client and a broker: production's Connection at one end, bytes in order.

Always true: what is sent arrives in its order, each way with delays, as long as the connection
holds; a reset loses what has not arrived; of a broker that was killed its clients hear at once or
some seconds later; what arrives at a process that stands still waits until it goes on.
"""

import asyncio
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.simulation.loop import Process, SimLoop

if TYPE_CHECKING:
    from tests.simulation.brokers.process import BrokerProcess

DELAY_S = (0.0002, 0.004)
SLOW_S = (0.05, 0.6)
SLOW = 0.01
UNTOLD_S = (0.005, 0.005, 4.0)
"""After which clients hear that their broker was killed."""


class Wire:
    """One connection. The client hears by `received`, and once by `lost`."""

    def __init__(
        self,
        loop: SimLoop,
        server: "BrokerProcess",
        client: Process,
        received: Callable[[bytes], None],
        lost: Callable[[], None],
    ) -> None:
        self.server = server
        self.client = client
        self.rng = loop.random_for(f"wire {server.name} {client.name}")
        self._loop = loop
        self._received, self._lost = received, lost
        self._up_s = self._down_s = loop.now
        self._connection: Any = None  # production's Connection, or who committers talk to
        self._end = ServerEnd(self)
        self.broken = False
        self.watched: Callable[[bytes], None] = lambda frame: None
        """Hears of each message when the broker gives it to the connection, which writes it at the
        end of the turn: what decided it may have changed by then."""
        self._told = False
        self._to_server(self._accept)

    # -- the client's end ----------------------------------------

    def send(self, data: bytes) -> None:
        self._to_server(self._arrives, data)

    def close(self) -> None:
        """As the client's process does in good order; it hears nothing any more."""
        self._told = True
        self._to_server(self._break)

    # -- on the way ----------------------------------------

    def _delay_s(self) -> float:
        return self.rng.uniform(*(SLOW_S if self.rng.random() < SLOW else DELAY_S))

    def _to_server(self, callback: Callable[..., None], *args: Any) -> None:
        self._up_s = max(self._up_s, self._loop.now + self._delay_s())
        self.server.process.call_at(self._up_s, callback, *args)

    def _to_client(self, callback: Callable[..., None], *args: Any) -> None:
        self._down_s = max(self._down_s, self._loop.now + self._delay_s())
        self.client.call_at(self._down_s, callback, *args)

    def reset(self) -> None:
        """The network gives it up: each end hears of that in its own time."""
        if not self.broken:
            self.broken = True
            now_s = self._loop.now
            self.server.process.call_at(now_s + self.rng.choice(UNTOLD_S), self._server_lost)
            self.client.call_at(now_s + self.rng.choice(UNTOLD_S), self._tell)

    def server_died(self) -> None:
        self.broken = True
        self.client.call_at(self._loop.now + self.rng.choice(UNTOLD_S), self._tell)

    # -- the server's end ----------------------------------------

    def _accept(self) -> None:
        if not self.server.listening:
            self._to_client(self._tell)
            return
        connection = self._connection = self.server.accept(self)
        send = connection.send

        def watched_send(frame: bytes) -> None:
            if connection.open and not self.broken:
                self.watched(frame)
            send(frame)

        connection.send = watched_send  # type: ignore[method-assign]
        connection.connection_made(self._end)

    def _arrives(self, data: bytes) -> None:
        if self._connection is None or self.broken:
            return
        if self._end.reading:
            self._connection.data_received(data)
        else:
            self._end.held.append(data)

    def becomes(self, protocol: Any) -> None:
        """It turned out to be a connection of another kind."""
        self._connection = protocol

    def goes_on(self) -> None:
        """The server reads again."""
        held, self._end.held = self._end.held, []
        for data in held:
            self._arrives(data)

    def answers(self, data: bytes) -> None:
        """The server writes."""
        if not self.broken:
            self._to_client(self._hears, data)

    def _hears(self, data: bytes) -> None:
        if not (self._told or self.broken):
            self._received(data)

    def server_closes(self) -> None:
        self._to_client(self._tell)
        self.server.process.call_at(self._loop.now, self._break)

    def _break(self) -> None:
        self.broken = True
        self._server_lost()

    def _server_lost(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.connection_lost(None)

    def _tell(self) -> None:
        if not self._told:
            self._told = True
            self._lost()


class ServerEnd(asyncio.Transport):
    """The transport that production's Connection writes to."""

    def __init__(self, wire: Wire) -> None:
        super().__init__()
        self._wire = wire
        self._closing = False
        self.reading = True
        self.held: list[bytes] = []

    def write(self, data: Any) -> None:
        if not self._closing:
            self._wire.answers(bytes(data))

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._wire.server_closes()

    abort = close

    def is_closing(self) -> bool:
        return self._closing

    def is_reading(self) -> bool:
        return self.reading

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True
        self._wire.goes_on()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._wire.becomes(protocol)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """A simulated connection takes what it is given."""


def jitter(rng: random.Random) -> float:
    """A moment, for who tries again."""
    return rng.uniform(0.02, 0.6)
