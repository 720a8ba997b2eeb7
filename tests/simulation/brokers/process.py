"""A broker as a simulated process: production's Broker and Connection, without sockets.

Always true: this is the only module that knows how a broker is put together; the rest speaks
Pulsar's protocol to it. Its clock is the simulated one; whether another broker answers is asked of
the simulated network, which may say no of one that lives.
"""

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from spark_ledger.broker.broker import Broker
from spark_ledger.broker.log.ownership import Ownership
from spark_ledger.broker.log.probes import PROBE_S, Heard, Probes
from spark_ledger.broker.produce import live_writer, step
from spark_ledger.broker.serve.connection import Connection
from spark_ledger.broker.settings import BrokerSettings
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.subscription.consumer_cursors import ConsumerCursors
from tests.simulation.brokers.wire import Wire
from tests.simulation.loop import current, current_process
from tests.simulation.store import EPOCH_MS
from tests.simulation.world import Client

PROBE_DELAY_S = 0.05
PORT = 6650
MESSAGE_BYTES_MAX, ENTRY_BYTES_MAX = 3 << 10, 4 << 10
"""Of budgets.CLIENT's largest entries."""


@contextmanager
def small_entries(inflight: int) -> Iterator[None]:
    """Entries that simulated bookies take, and so many under way at a time."""
    before = live_writer.ENTRY_BYTES_MAX, step.INFLIGHT_ENTRIES_MAX
    live_writer.ENTRY_BYTES_MAX, step.INFLIGHT_ENTRIES_MAX = ENTRY_BYTES_MAX, inflight
    try:
        yield
    finally:
        live_writer.ENTRY_BYTES_MAX, step.INFLIGHT_ENTRIES_MAX = before


class SimClock:
    """The store's time, about: some way off, and other for each broker."""

    def __init__(self, off_ms: int) -> None:
        self._off_ms = off_ms

    def now_ms(self) -> int:
        return EPOCH_MS + int(current().time() * 1000) + self._off_ms

    def earliest_ms(self) -> int:
        """What the store's time has passed for certain."""
        return self.now_ms() - 2 * abs(self._off_ms)

    async def measure(self, client: TopicClient) -> None:
        """It is measured."""


class Brokers:
    """Those of one run, by URL. `blind`: the share of the probes that hear nothing of a broker that
    lives; `apart`: the share of the pairs of which one never reaches the other's address, while
    clients do."""

    def __init__(self, blind: float, rng: random.Random, apart: float = 0.0) -> None:
        self.blind = blind
        self.apart = apart
        self._apart: dict[tuple[str, str], bool] = {}
        self._pairs = current().random_for("brokers apart")
        self._rng = rng
        self.by_url: dict[str, BrokerProcess] = {}
        self.avoids_paused = False
        """Clients look topics up at brokers that answer, where there are such."""

    def listening(self) -> "list[BrokerProcess]":
        return [one for one in self.by_url.values() if one.listening and one.process.alive]

    def asked_first(self) -> "list[BrokerProcess]":
        """Of these a client takes one to look its topic up."""
        there = self.listening()
        awake = [one for one in there if not one.process.paused]
        return awake if awake and self.avoids_paused else there

    async def ask(self, url: str, request: bytes) -> tuple[bytes, Callable[[], None]]:
        """As hand_over.Ask: over a connection of its own to the broker there."""
        there = self.by_url.get(url)
        if there is None or not there.listening or not there.process.alive:
            raise ConnectionRefusedError(f"nobody listens at {url}")
        asked = Asked(there, request)
        try:
            return await asked.answer(), asked.wire.close
        except BaseException:
            asked.wire.close()
            raise

    async def heard(self, url: str) -> Heard:
        """What one broker hears of another that it asks."""
        await asyncio.sleep(self._rng.uniform(0.0, PROBE_DELAY_S))
        there = self.by_url.get(url)
        if there is None or not there.listening or not there.process.alive:
            return Heard.REFUSAL
        if self._is_apart(url):
            await asyncio.sleep(PROBE_S)
            return Heard.NOTHING
        if there.process.paused or self._rng.random() < self.blind:
            await asyncio.sleep(PROBE_S)
            return Heard.NOTHING
        return Heard.ANSWER

    def _is_apart(self, url: str) -> bool:
        """Whether the process that asks never reaches that address."""
        asking = current_process()
        if not self.apart or asking is None:
            return False
        pair = (asking.name, url)
        if pair not in self._apart:
            self._apart[pair] = self._pairs.random() < self.apart
        return self._apart[pair]


class Asked:
    """One connection of who commits past live segments: a request, and an answer with its size."""

    def __init__(self, server: "BrokerProcess", request: bytes) -> None:
        loop, process = current(), current_process()
        assert process is not None
        self._received = bytearray()
        self._whole: asyncio.Future[bytes] = loop.create_future()
        self.wire = Wire(loop, server, process, self._receives, self._lost)
        self.wire.send(request)

    async def answer(self) -> bytes:
        """Raises EOFError."""
        return await self._whole

    def _receives(self, data: bytes) -> None:
        self._received += data
        size = int.from_bytes(self._received[:4], "big")
        whole = len(self._received) >= 4 + size and len(self._received) >= 4
        if whole and not self._whole.done():
            self._whole.set_result(bytes(self._received[4 : 4 + size]))

    def _lost(self) -> None:
        if not self._whole.done():
            self._whole.set_exception(EOFError("the connection is gone"))


class BrokerProcess:
    """One broker, in the process of `client`."""

    def __init__(
        self, brokers: Brokers, client: Client, topics: TopicClient, settings: BrokerSettings
    ) -> None:
        self.name = client.name
        self.client = client
        self.process = client.process
        self.url = f"pulsar://{client.name}:{PORT}"
        self.listening = False
        self.stopping = False
        self.broker: Broker
        self.wires: dict[Wire, None] = {}
        self._brokers = brokers
        self._topics = topics
        self._settings = settings
        self._connections: dict[Connection, None] = {}

    async def start(self) -> None:
        """Runs in its process. Raises errors.Unavailable."""
        rng = self.client.rng
        broker = self.broker = Broker(self.client.ledgers, rng, self.url, self._settings)
        broker.clock = SimClock(rng.choice((-40, 0, 0, 300)))  # type: ignore[assignment]
        broker.client = self._topics
        metadata = self.client.ledgers.metadata
        probes = Probes(self._brokers.heard)
        broker.ownership = Ownership(metadata, broker.id, self.url, probes.answers)
        broker.cursors = ConsumerCursors(metadata, self._topics.subscriptions, broker.id, rng)
        broker.message_bytes_max = MESSAGE_BYTES_MAX
        await broker.start(self._listen)

    def _listen(self) -> None:
        self._brokers.by_url[self.url] = self
        self.listening = True

    def accept(self, wire: Wire) -> Connection:
        """As the broker's server does."""
        made = Connection(self.broker, lambda gone: self._connections.pop(gone, None))
        self._connections[made] = None
        self.wires[wire] = None
        return made

    async def stop(self) -> None:
        """As the broker's server does, in its process."""
        self.stopping = True
        await self.broker.seal()
        self.listening = False
        await self.broker.close()
        await asyncio.gather(*(one.close_and_wait() for one in list(self._connections)))

    def kill(self) -> None:
        """kill -9: its clients hear of it, by and by."""
        self.listening = False
        self.client.kill()
        for wire in self.wires:
            wire.server_died()
        for connection in self._connections:
            connection._presence.end()
