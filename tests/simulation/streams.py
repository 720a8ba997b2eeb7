"""Streams of the simulated network: messages in order, each way with delays, cuts and losses.

Always true:
- messages of one way arrive in the order they were sent; after one that was lost nothing arrives
  that way any more, as with a connection that is dead and does not know it;
- whoever waits hears of that only at his own time-out; of a server that was killed at once, or not;
- a stream that was given up ends at its server some time later.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, Protocol

from spark_ledger.bookies.bookie_client import CallFailed, TooLate
from tests.simulation.loop import Process, SimLoop

StreamHandler = Callable[[str, AsyncIterator[bytes]], AsyncGenerator[tuple[bytes, bytes], None]]
"""(method, messages) -> (the request that a message answers, the message), as they are sent."""


class Ways(Protocol):
    """What a stream needs of the network."""

    def streams_at(self, address: str) -> "tuple[Any, StreamHandler, Process | None] | None":
        """Who serves there: a mark (another one after a restart), its handler, its process."""

    def lost(self, sender: str, receiver: str) -> bool: ...

    def travel(self, sender: str, receiver: str, after: float, arrive: Callable[[], None]) -> float:
        """Let it arrive, not before `after`; returns when it will."""

    def told(self, stream: "SimStream", request: bytes, answer: bytes, begun: int) -> bytes:
        """A message leaves its server; returns it as it will arrive."""

    def waits_s(self, address: str) -> float:
        """How long what arrives there waits before it is begun."""

    def next_moment(self) -> int: ...

    def defect(self, error: Exception) -> None: ...

    def forget(self, stream: "SimStream") -> None: ...


class SimStream:
    """spark_ledger.bookies.bookie_client.Stream, and what is at its other end."""

    def __init__(self, ways: Ways, caller: str, address: str, method: str) -> None:
        self.caller, self.address, self.method = caller, address, method
        self.server: Any = None
        self._ways = ways
        self._up_at = self._down_at = 0.0
        self._up_broken = self._down_broken = False
        self._begun = self._over = False
        self._arrived: asyncio.Queue[bytes | CallFailed | None] = asyncio.Queue()
        self._messages: asyncio.Queue[bytes | None] = asyncio.Queue()

    # -- the caller's end ---------------------------------------------------------------------

    async def send(self, message: bytes) -> None:
        if self._over:
            raise CallFailed("the stream was given up")
        if not self._up_broken:
            self._up(lambda: self._message(bytes(message)))

    async def receive(self, timeout_s: float) -> bytes | None:
        try:
            async with asyncio.timeout(timeout_s):
                arrived = await self._arrived.get()
        except TimeoutError:
            self.give_up()
            raise TooLate(f"{self.method} to {self.address}: silent for {timeout_s} s") from None
        except asyncio.CancelledError:
            self.give_up()
            raise
        if isinstance(arrived, CallFailed):
            raise arrived
        return arrived

    def give_up(self) -> None:
        if not self._over:
            self._over = True
            self._ways.forget(self)
            self._ways.travel(self.caller, self.address, self._up_at, self._end)

    def fail(self, why: str) -> None:
        """The caller is told that it has broken."""
        self._arrived.put_nowait(CallFailed(f"{self.method} to {self.address}: {why}"))

    def _up(self, arrive: Callable[[], None]) -> None:
        if self._ways.lost(self.caller, self.address):
            self._up_broken = True
        else:
            self._up_at = self._ways.travel(self.caller, self.address, self._up_at, arrive)

    # -- the server's end ---------------------------------------------------------------------

    def _message(self, message: bytes) -> None:
        if not self._begun:
            self._begun = True
            self._begin()
        self._messages.put_nowait(message)

    def _end(self) -> None:
        self._messages.put_nowait(None)

    def _begin(self) -> None:
        loop = asyncio.get_running_loop()
        outside = loop.outside if isinstance(loop, SimLoop) else None
        loop.call_later(self._ways.waits_s(self.address), self._start, context=outside)

    def _start(self) -> None:
        found = self._ways.streams_at(self.address)
        if found is None:
            self.fail("refused the connection")
            return
        self.server, handler, process = found
        work = self._work(handler)
        if process is not None:
            process.spawn(work, name=f"{self.method} at {self.address}")
        else:
            asyncio.get_running_loop().create_task(work)

    async def _work(self, handler: StreamHandler) -> None:
        begun = self._ways.next_moment()
        try:
            async with aclosing(handler(self.method, self._requests())) as answers:
                async for request, answer in answers:
                    found = self._ways.streams_at(self.address)
                    if found is None or found[0] is not self.server:
                        return  # killed meanwhile
                    arriving = self._ways.told(self, request, bytes(answer), begun)
                    self._down(arriving)
                    begun = self._ways.next_moment()
        except Exception as error:
            self._ways.defect(error)
            self.fail(f"failed: {error!r}")

    async def _requests(self) -> AsyncGenerator[bytes, None]:
        while (message := await self._messages.get()) is not None:
            yield message

    def _down(self, answer: bytes) -> None:
        if self._down_broken or self._ways.lost(self.address, self.caller):
            self._down_broken = True
            return

        def arrive() -> None:
            if not self._over:
                self._arrived.put_nowait(answer)

        self._down_at = self._ways.travel(self.address, self.caller, self._down_at, arrive)
