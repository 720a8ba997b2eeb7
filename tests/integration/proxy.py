"""A TCP proxy that makes a network bad: it stands between the address that a bookie advertises and
the one it listens on.

    with Proxy(upstream_port) as proxy:
        proxy.delay(0.2)            # every chunk, both ways
        proxy.drop(requests=True)   # bytes towards the bookie vanish; connections stay
        proxy.cut()                 # connections are reset, new ones refused
        proxy.heal()

Always true: bytes of one connection and direction keep their order, and what is dropped is the
rest of that connection: TCP never loses bytes in the middle, so `heal` ends the connections that
lost some.
"""

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self

CHUNK = 64 * 1024


class _Link:
    """One accepted connection and its counterpart at the bookie."""

    def __init__(self, client: asyncio.StreamWriter, bookie: asyncio.StreamWriter) -> None:
        self.ends = (client, bookie)
        self.lost = False

    def reset(self) -> None:
        for end in self.ends:
            end.transport.abort()


class Proxy:
    """Forwards 127.0.0.1:`port` to 127.0.0.1:`upstream_port`, on a thread of its own."""

    def __init__(self, upstream_port: int) -> None:
        self.port = 0
        self.upstream_port = upstream_port
        self.forwarded_bytes = 0
        self.lost = threading.Event()
        """Set once bytes were dropped: their connection, if still open, never says a word again."""
        self._delay_s = 0.0
        self._dropped = {"requests": False, "answers": False}
        self._cut = False
        self._links: dict[_Link, None] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self._server = self._run(self._listen())

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def delay(self, seconds: float) -> None:
        """From now on every chunk waits so long, each way."""
        self._delay_s = seconds

    def drop(self, *, requests: bool = False, answers: bool = False) -> None:
        """From now on what goes to the bookie (`requests`) or comes from it vanishes."""
        self._dropped = {"requests": requests, "answers": answers}

    def cut(self) -> None:
        """Reset every connection and refuse new ones."""
        self._cut = True
        self._run(self._reset(everything=True))

    def reset(self) -> None:
        """Reset every connection; new ones are as good or bad as those were."""
        self._run(self._reset(everything=True))

    def heal(self) -> None:
        """A good network again; connections that lost bytes are reset."""
        self._delay_s, self._cut = 0.0, False
        self._dropped = {"requests": False, "answers": False}
        self._run(self._reset(everything=False))

    def close(self) -> None:
        self._server.close()
        self._run(self._reset(everything=True))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- on the loop ---------------------------------------------------------------------------

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _listen(self) -> asyncio.Server:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        return server

    async def _accept(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        if self._cut:
            client.transport.abort()
            return
        try:
            opened = await asyncio.open_connection("127.0.0.1", self.upstream_port)
        except OSError:
            client.transport.abort()
            return
        answers, bookie = opened
        link = _Link(client, bookie)
        self._links[link] = None
        try:
            await asyncio.gather(
                self._forward(link, "requests", reader, bookie),
                self._forward(link, "answers", answers, client),
            )
        finally:
            link.reset()
            self._links.pop(link, None)

    async def _forward(
        self, link: _Link, way: str, source: asyncio.StreamReader, target: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(OSError):
            while chunk := await source.read(CHUNK):
                if self._delay_s:
                    await asyncio.sleep(self._delay_s)
                if self._dropped[way] or link.lost:
                    link.lost = True
                    self.lost.set()
                    continue
                self.forwarded_bytes += len(chunk)
                target.write(chunk)
                await target.drain()
        link.reset()

    async def _reset(self, *, everything: bool) -> None:
        for link in list(self._links):
            if everything or link.lost:
                link.reset()
