"""What Pulsar's clients do to reach a topic's broker: look it up, connect, ask, hear."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from spark_ledger.broker.wire.commands import LookupType, ServerError, command, name_of
from spark_ledger.broker.wire.frames import PulsarFrameReader, encode
from tests.simulation.brokers.process import BrokerProcess, Brokers
from tests.simulation.brokers.wire import Wire
from tests.simulation.invariants import Violation
from tests.simulation.loop import Process, SimLoop

ANSWER_S = 12.0
REDIRECTS_MAX = 5
Heard = Callable[[str, Any, bytes | None], None]


class Lost(Exception):
    """The connection is gone, or what was asked for was refused: look up and try again. `code`: of
    a refusal."""

    def __init__(self, why: str, code: int = -1) -> None:
        super().__init__(why)
        self.code = code


class Link:
    """A client's connection to one broker."""

    def __init__(self, loop: SimLoop, server: BrokerProcess, client: Process) -> None:
        self.server = server
        self.heard: Heard = lambda name, part, batch: None
        self.gone = False
        self.ending = False
        """What is asked for is waited for, and then it is closed."""
        self.heard_s = loop.now
        self._loop = loop
        self._frames = PulsarFrameReader()
        self._asked: dict[int, asyncio.Future[tuple[str, Any]]] = {}
        self._requests = 0
        self.wire = Wire(loop, server, client, self._received, self._lost)
        self.send("connect", client_version="simulated", protocol_version=19)

    def send(self, name: str, batch: bytes | None = None, **fields: Any) -> None:
        made = command(name, **fields)
        self.wire.send(encode(made) if batch is None else encode(made, batch))

    async def ask(self, name: str, **fields: Any) -> tuple[str, Any]:
        """Raises Lost, also where the broker refuses."""
        self._requests += 1
        number = self._requests
        answer = self._asked[number] = self._loop.create_future()
        self.send(name, request_id=number, **fields)
        try:
            async with asyncio.timeout(ANSWER_S):
                found = await answer
        except TimeoutError:
            self.close()
            raise Lost(f"{name}: no answer") from None
        finally:
            self._asked.pop(number, None)
        if self.ending:
            self.close()
        if found[0] == "error":
            raise Lost(f"{name}: {found[1].error} {found[1].message}", found[1].error)
        return found

    def watch(self, watched: Callable[["Link", str, Any], None]) -> None:
        """Tell of each message when the broker sends it."""
        frames = PulsarFrameReader()

        def sent(data: bytes) -> None:
            for frame in frames.feed(data):
                name = name_of(frame.command)
                assert name is not None
                watched(self, name, getattr(frame.command, name))

        self.wire.watched = sent

    def close(self) -> None:
        if not self.gone:
            self.gone = True
            self.wire.close()

    def _received(self, data: bytes) -> None:
        self.heard_s = self._loop.now
        for frame in self._frames.feed(data):
            name = name_of(frame.command)
            assert name is not None
            part = getattr(frame.command, name)
            if name == "ping":
                self.send("pong")
                continue
            waiting = self._asked.get(getattr(part, "request_id", 0) or 0)
            if waiting is not None and not waiting.done():
                waiting.set_result((name, part))
            else:
                self.heard(name, part, frame.batch)

    def _lost(self) -> None:
        self.gone = True
        for waiting in list(self._asked.values()):
            if not waiting.done():
                waiting.set_exception(Lost("the connection is gone"))


async def find(loop: SimLoop, brokers: Brokers, client: Process, rng: Any, topic: str) -> Link:
    """A connection to the broker that has the topic, by Pulsar's lookup. Raises Lost."""
    there = brokers.asked_first()
    if not there:
        raise Lost("no broker listens")
    server, authoritative = rng.choice(there), False
    for _ in range(REDIRECTS_MAX):
        link = Link(loop, server, client)
        try:
            _, told = await link.ask("lookup", topic=topic, authoritative=authoritative)
        except BaseException:
            link.close()
            raise
        if told.response == LookupType.CONNECT:
            return link
        link.close()
        if told.response == LookupType.FAILED:
            raise Lost(f"lookup: {told.error} {told.message}")
        found = brokers.by_url.get(told.brokerServiceUrl)
        if found is None:
            raise Lost(f"nobody is at {told.brokerServiceUrl}")
        server, authoritative = found, told.authoritative
    raise Lost("the lookup goes round")


async def session(
    world: Any,
    brokers: Brokers,
    client: Process,
    rng: Any,
    topic: str,
    work: Callable[[Link], Awaitable[None]],
) -> None:
    """One session with the broker that has the topic, until it ends or the connection is lost. That
    the broker met what nobody expected is a defect."""
    link: Link | None = None
    try:
        link = await find(world.loop, brokers, client, rng, topic)
        await work(link)
    except Lost as lost:
        world.trace.note(client.name, str(lost))
        if lost.code == ServerError.UNKNOWN:
            world.observers.violated(Violation("no defect", f"a broker answered: {lost}"))
    finally:
        if link is not None:
            link.close()
