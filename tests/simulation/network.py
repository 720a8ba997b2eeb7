"""A network that delays, loses, repeats and cuts, call by call.

Always true:
- a caller learns of a loss only by CallFailed at its own time-out; the request may have been
  carried out (the answer was lost) or not (the request was);
- calls overtake each other: each way of each call has its own delay;
- what is sent to a killed server is never carried out, and its answers never arrive;
- a handler that raises is a defect: the caller meets CallFailed and `defects` keeps the exception.

    network = SimNetwork(random.Random(7))
    network.serve("b1:1", functools.partial(handle_bytes, bookie), process)
    client = network.client("writer")          # a spark_ledger.bookies.bookie_client.Network
    answer = await client.call("b1:1", "Add", request, timeout_s=5)
    network.cut("writer", "b1:1")              # requests are lost; cut("b1:1", "writer"): answers
    network.heal()
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from bookie_server.api.entry import Buffer
from spark_ledger.bookies.bookie_client import CallFailed
from spark_ledger.bookies.local_reads import HostFiles
from tests.simulation.garble import garble
from tests.simulation.loop import Process, SimLoop, current_process
from tests.simulation.streams import SimStream, StreamHandler

Handler = Callable[[str, bytes], Awaitable[bytes]]
ANY = "*"


@dataclass
class NetworkFaults:
    """Delays in simulated seconds, one way; the rest are chances between 0 and 1 of one way."""

    delay_s: tuple[float, float] = (0.0002, 0.002)
    slow: float = 0.0
    slow_s: tuple[float, float] = (0.05, 8.0)
    loss: float = 0.0
    duplicate: float = 0.0
    """The request is carried out twice; the second answer goes nowhere."""
    late: float = 0.0
    """How many of the duplicates come late, by `late_s`, to whoever serves there then."""
    late_s: tuple[float, float] = (0.5, 30.0)
    astray: float = 0.0
    """How many requests go to another address than theirs."""
    garbled: float = 0.0
    """How many answers to reads bring a damaged entry."""
    reset: float = 0.8
    """How often a caller is told at once that the server died under its call."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request and its answer, as its server saw them. `begun` and `ended` are moments: numbers
    that rise with every beginning and ending at any server."""

    caller: str
    address: str
    method: str
    request: bytes
    answer: bytes
    begun: int
    ended: int


@dataclass
class _Server:
    handler: Handler
    process: Process | None
    streams: StreamHandler | None = None


_Parcel = tuple[Callable[..., object], tuple[Any, ...]]
"""What happens when something arrives, and with what."""


class _Call:
    """One call under way."""

    __slots__ = ("address", "answer", "caller", "method", "request", "server")

    def __init__(
        self, caller: str, address: str, method: str, request: bytes, answer: "asyncio.Future[Any]"
    ) -> None:
        self.caller = caller
        self.address = address
        self.method = method
        self.request = request
        self.answer = answer
        self.server: _Server | None = None


class SimNetwork:
    """All addresses and callers. All chance comes from `rng`."""

    def __init__(
        self, rng: random.Random | None = None, faults: NetworkFaults | None = None
    ) -> None:
        self.faults = faults or NetworkFaults()
        self.defects: list[BaseException] = []
        self.calls = 0
        self.taps: list[Callable[[Exchange], None]] = []
        """Called with every answer as it leaves its server, lost on the way or not."""
        self.deliveries: list[Callable[[Exchange], None]] = []
        """Called with every answer that its caller, who still waits, is given."""
        self.moment = 0
        self._rng = rng or random.Random(0)
        self._servers: dict[str, _Server] = {}
        self._cuts: dict[tuple[str, str], None] = {}
        self._clogs: dict[tuple[str, str], list[_Parcel]] = {}
        self._sluggish: dict[str, tuple[float, float]] = {}
        self._under_way: dict[_Call, None] = {}
        self._streams: dict[SimStream, None] = {}

    # -- servers -----------------------------------------------------------------------------

    def serve(
        self,
        address: str,
        handler: Handler,
        process: Process | None = None,
        streams: StreamHandler | None = None,
    ) -> None:
        """`handler(method, request)` answers for the address, as tasks of `process` if given;
        `streams(method, messages)` likewise."""
        self._servers[address] = _Server(handler, process, streams)

    def down(self, address: str) -> None:
        """Nobody answers at the address any more; calls under way there fail, soon or at their
        time-out."""
        server = self._servers.pop(address, None)
        for call in list(self._under_way):
            if server is not None and call.server is server:
                call.server = None
                if self._rng.random() < self.faults.reset:
                    self._later(self._fail, call, f"{address} reset the connection")
        for stream in list(self._streams):
            if server is not None and stream.server is server:
                stream.server = None
                if self._rng.random() < self.faults.reset:
                    self._later(stream.fail, f"{address} reset the connection")

    def under_way(self, but: Collection[str] = ()) -> int:
        """Calls whose caller still waits, but for those to these addresses."""
        return sum(call.address not in but for call in self._under_way)

    def next_moment(self) -> int:
        self.moment += 1
        return self.moment

    def client(self, caller: str) -> "SimClient":
        """The network as the process `caller` sees it."""
        return SimClient(self, caller)

    # -- faults ------------------------------------------------------------------------------

    def cut(self, sender: str, receiver: str) -> None:
        """Lose everything from one to the other, one way; ANY stands for everybody."""
        self._cuts[sender, receiver] = None

    def heal(self, sender: str = ANY, receiver: str = ANY) -> None:
        """Undo the cuts that match."""
        for pair in list(self._cuts):
            if sender in (ANY, pair[0]) and receiver in (ANY, pair[1]):
                del self._cuts[pair]

    def clog(self, sender: str, receiver: str) -> None:
        """Hold everything back that one sends to the other, one way, until `unclog`."""
        self._clogs.setdefault((sender, receiver), [])

    def unclog(self, sender: str, receiver: str) -> None:
        """Everything that was held back arrives at once, in the order it was sent."""
        loop = asyncio.get_running_loop()
        for callback, args in self._clogs.pop((sender, receiver), ()):
            loop.call_soon(callback, *args, context=_outside(loop))

    def slow_down(self, address: str, between_s: tuple[float, float]) -> None:
        """The address begins every request so much later, until `quicken`."""
        self._sluggish[address] = between_s

    def quicken(self, address: str) -> None:
        self._sluggish.pop(address, None)

    def calm(self) -> None:
        """No losses, no cuts, no slow ways: for the healing phase."""
        self.faults = NetworkFaults()
        self._cuts.clear()
        self._sluggish.clear()
        for pair in list(self._clogs):
            self.unclog(*pair)

    # -- one call ------------------------------------------------------------------------------

    async def call(
        self, caller: str, address: str, method: str, request: bytes, timeout_s: float
    ) -> bytes:
        loop = asyncio.get_running_loop()
        self.calls += 1
        call = _Call(caller, address, method, bytes(request), loop.create_future())
        self._under_way[call] = None
        timer = loop.call_later(timeout_s, self._fail, call, f"no answer in {timeout_s} s")
        if not self._lost(caller, address):
            self._send(caller, address, self._arrive, call)
        try:
            return await call.answer
        finally:
            timer.cancel()
            self._under_way.pop(call, None)
            del call  # or an error would hold, by this frame, the future that holds it

    # -- streams -------------------------------------------------------------------------------

    def stream(self, caller: str, address: str, method: str) -> SimStream:
        self.calls += 1
        stream = SimStream(self, caller, address, method)
        self._streams[stream] = None
        return stream

    def forget(self, stream: SimStream) -> None:
        self._streams.pop(stream, None)

    def streams_at(self, address: str) -> tuple[Any, StreamHandler, Process | None] | None:
        server = self._servers.get(address)
        if server is None or server.streams is None:
            return None
        return server, server.streams, server.process

    def waits_s(self, address: str) -> float:
        between_s = self._sluggish.get(address)
        return 0.0 if between_s is None else self._rng.uniform(*between_s)

    def lost(self, sender: str, receiver: str) -> bool:
        return self._lost(sender, receiver)

    def defect(self, error: Exception) -> None:
        self.defects.append(error)

    def travel(self, sender: str, receiver: str, after: float, arrive: Callable[[], None]) -> float:
        loop = asyncio.get_running_loop()
        for pair in _pairs(sender, receiver):
            if pair in self._clogs:
                self._clogs[pair].append((self._not_before, (after, arrive)))
                return max(after, loop.time())
        return self._not_before(max(after, loop.time() + self._delay_s()), arrive)

    def _not_before(self, at: float, arrive: Callable[[], None]) -> float:
        loop = asyncio.get_running_loop()
        at = max(at, loop.time())
        loop.call_at(at, arrive, context=_outside(loop))
        return at

    def told(self, stream: SimStream, request: bytes, answer: bytes, begun: int) -> bytes:
        where = (stream.caller, stream.address, "Read")
        exchange = Exchange(*where, request, answer, begun, self.next_moment())
        for tap in self.taps:
            tap(exchange)
        if self.faults.garbled and self._rng.random() < self.faults.garbled:
            return garble("Read", answer, self._rng)
        return answer

    # -- one call on its way ---------------------------------------------------------------------

    def _arrive(self, call: _Call) -> None:
        if self.faults.astray and self._rng.random() < self.faults.astray:
            call.address = self._rng.choice(sorted(self._servers) or [call.address])
        between_s = self._sluggish.get(call.address)
        if between_s is None:
            self._begin(call)
            return
        loop = asyncio.get_running_loop()
        loop.call_later(self._rng.uniform(*between_s), self._begin, call, context=_outside(loop))

    def _begin(self, call: _Call) -> None:
        server = self._servers.get(call.address)
        if server is None:
            self._later(self._fail, call, f"{call.address} refused the connection")
            return
        call.server = server
        self._start(call, server)
        if self.faults.duplicate and self._rng.random() < self.faults.duplicate:
            self._duplicate(call)

    def _duplicate(self, call: _Call) -> None:
        if not self.faults.late or self._rng.random() >= self.faults.late:
            self._later(self._again, call)
            return
        loop = asyncio.get_running_loop()
        after_s = self._rng.uniform(*self.faults.late_s)
        loop.call_later(after_s, self._again, call, context=_outside(loop))

    def _again(self, call: _Call) -> None:
        server = self._servers.get(call.address)
        if server is not None:
            self._start(call, server, answers=False)

    def _start(self, call: _Call, server: _Server, answers: bool = True) -> None:
        work = self._work(call, server, answers)
        if server.process is not None:
            server.process.spawn(work, name=f"{call.method} at {call.address}")
        else:
            asyncio.get_running_loop().create_task(work)

    async def _work(self, call: _Call, server: _Server, answers: bool) -> None:
        begun = self.next_moment()
        try:
            answer = bytes(await server.handler(call.method, call.request))
        except Exception as error:
            if self._servers.get(call.address) is server:
                self.defects.append(error)
                self._later(self._fail, call, f"{call.address} failed: {error!r}")
            return
        if self._servers.get(call.address) is not server:
            return  # killed meanwhile
        where = (call.caller, call.address, call.method)
        exchange = Exchange(*where, call.request, answer, begun, self.next_moment())
        try:
            for tap in self.taps:
                tap(exchange)
        except Exception as error:  # else it is lost with this task, and so is the answer
            self.defects.append(error)
            raise
        if answers and not self._lost(call.address, call.caller):
            self._send(call.address, call.caller, self._answer, call, exchange)

    def _answer(self, call: _Call, exchange: Exchange) -> None:
        if not call.answer.done():
            answer = exchange.answer
            if self.faults.garbled and self._rng.random() < self.faults.garbled:
                answer = garble(call.method, answer, self._rng)
            call.answer.set_result(answer)
            for tap in self.deliveries:
                tap(exchange)

    def _fail(self, call: _Call, why: str) -> None:
        if not call.answer.done():
            call.answer.set_exception(CallFailed(f"{call.method} to {call.address}: {why}"))

    def _lost(self, sender: str, receiver: str) -> bool:
        if self.faults.loss and self._rng.random() < self.faults.loss:
            return True
        return bool(self._cuts) and any(pair in self._cuts for pair in _pairs(sender, receiver))

    def _send(self, sender: str, receiver: str, callback: Callable[..., None], *args: Any) -> None:
        """Let `callback` happen when what `sender` sends now arrives."""
        if self._clogs:
            for pair in _pairs(sender, receiver):
                if pair in self._clogs:
                    self._clogs[pair].append((callback, args))
                    return
        self._later(callback, *args)

    def _later(self, callback: Callable[..., None], *args: Any) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(self._delay_s(), callback, *args, context=_outside(loop))

    def _delay_s(self) -> float:
        between = self.faults.delay_s
        if self.faults.slow and self._rng.random() < self.faults.slow:
            between = self.faults.slow_s
        shortest, longest = between
        return shortest + (longest - shortest) * self._rng.random()  # as uniform, which costs


def _pairs(sender: str, receiver: str) -> tuple[tuple[str, str], ...]:
    """The names under which the way from one to the other may be cut or clogged."""
    return ((sender, receiver), (sender, ANY), (ANY, receiver), (ANY, ANY))


def _outside(loop: asyncio.AbstractEventLoop) -> Any:
    """What is on its way belongs to no process: in simulated time, the loop's own context."""
    return loop.outside if isinstance(loop, SimLoop) else None


class SimClient:
    """spark_ledger.bookies.bookie_client.Network for one caller."""

    local_files: HostFiles | None = None
    """What it sees of the files of bookies on its host."""

    def __init__(self, network: SimNetwork, caller: str) -> None:
        self._network = network
        self._caller = caller
        self._closed = False

    async def call(
        self, address: str, method: str, request: Sequence[Buffer], timeout_s: float
    ) -> bytes:
        process = current_process()
        if self._closed or (process is not None and not process.alive):
            raise CallFailed("the network is closed")
        whole = b"".join(request)
        return await self._network.call(self._caller, address, method, whole, timeout_s)

    def stream(self, address: str, method: str) -> SimStream:
        process = current_process()
        if self._closed or (process is not None and not process.alive):
            raise CallFailed("the network is closed")
        return self._network.stream(self._caller, address, method)

    def is_here(self, address: str) -> bool:
        return False

    async def close(self) -> None:
        """Calls made from now on fail."""
        self._closed = True
