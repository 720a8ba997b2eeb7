"""A proxy before ZooKeeper that sees whole requests and can hold one, or its answer.

    with proxy.trap(is_commit(topic_id), hold="answer") as trap:
        ...
        trap.wait()         # ZooKeeper has done it; the client does not know
        proxy.cut()         # the client never hears of it

What is held when the trap is left, and was not passed on, is lost with its connection. Always true:
requests of one connection reach ZooKeeper in their order, so what follows a held one waits too.

Frames of ZooKeeper's protocol: a length (4 bytes, big-endian), then for a request its number and
its kind, for an answer the number of its request (4 bytes each).
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Literal

from tests.integration.proxy import Proxy, _Link

MULTI = 14
WAIT_S = 120.0
Matches = Callable[[bytes], bool]


def is_commit(topic_id: str) -> Matches:
    """A multi that creates a node of the topic's log."""
    created = f"/topic-ids/{topic_id}/log/".encode()
    return lambda request: _kind(request) == MULTI and created in request


def names(text: str) -> Matches:
    """Any request with these bytes."""
    return lambda request: text.encode() in request


class Trap:
    """Springs once, at the first request that matches. One that holds requests holds every further
    one that matches, too: a client that hears nothing for the most of its session's time-out sends
    again on another connection."""

    def __init__(
        self, matches: Matches, hold: Literal["request", "answer"], loop: asyncio.AbstractEventLoop
    ) -> None:
        self._matches = matches
        self._hold = hold
        self._loop = loop
        self._sprung: tuple[_Link, bytes] | None = None  # the connection and the request's number
        self._caught = threading.Event()
        self._open = asyncio.Event()
        self._passed = False

    @property
    def caught(self) -> bool:
        return self._caught.is_set()

    def wait(self, seconds: float = WAIT_S) -> None:
        """Until it holds something."""
        assert self._caught.wait(seconds), f"no such request came in {seconds} s"

    def pass_on(self) -> None:
        """What is held goes on its way, and nothing is held any more."""
        self._passed = True
        self._loop.call_soon_threadsafe(self._open.set)

    def leave(self) -> None:
        self._loop.call_soon_threadsafe(self._open.set)

    # -- on the proxy's loop --------------------------------------------------------------------

    async def let_request(self, link: _Link, request: bytes) -> bool:
        """Whether it may go on, as soon as that is decided."""
        if self._open.is_set() or not self._matches(request):
            return True
        if self._hold == "request":
            return await self._held()
        if self._sprung is None:
            self._sprung = (link, request[:4])
        return True

    async def let_answer(self, link: _Link, answer: bytes) -> bool:
        if self._hold == "answer" and self._sprung == (link, answer[:4]):
            return await self._held()
        return True

    async def _held(self) -> bool:
        self._caught.set()
        await self._open.wait()
        return self._passed


class ZooKeeperProxy(Proxy):
    def __init__(self, upstream_port: int) -> None:
        self._traps: list[Trap] = []
        super().__init__(upstream_port)

    @contextlib.contextmanager
    def trap(self, matches: Matches, hold: Literal["request", "answer"]) -> Iterator[Trap]:
        trap = Trap(matches, hold, self._loop)
        self._traps.append(trap)
        try:
            yield trap
        finally:
            self._traps.remove(trap)
            trap.leave()

    def close(self) -> None:
        self.cut()
        self._run(self._emptied())
        super().close()

    async def _emptied(self) -> None:
        serving = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        await asyncio.gather(*serving, return_exceptions=True)

    async def _forward(
        self, link: _Link, way: str, source: asyncio.StreamReader, target: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = await source.readexactly(4)
                frame = await source.readexactly(int.from_bytes(head))
                for trap in list(self._traps):
                    let = trap.let_request if way == "requests" else trap.let_answer
                    link.lost |= not await let(link, frame)
                if link.lost or target.transport.is_closing():
                    break
                self.forwarded_bytes += len(head) + len(frame)
                target.write(head + frame)
                await target.drain()
        link.reset()


def _kind(request: bytes) -> int:
    return int.from_bytes(request[4:8])
