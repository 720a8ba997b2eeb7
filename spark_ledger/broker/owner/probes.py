"""Whether another broker answers, asked by the protocol that it serves.

Always true: a broker is taken for dead whose port refuses, or which misses PROBES_MAX probes of
PROBE_S, NEXT_S apart (who asks and stood still itself gives the last of them its whole time): one
that is stopped or hung has a port that accepts, and a session that lives on, but its loop
answers nothing. To be wrong does no harm: who writes is decided by the fence. A broker is asked
once at a time however many want to know, and not again for FRESH_S after it has answered.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from enum import Enum

from spark_ledger.broker.wire.commands import PROTOCOL_VERSION, command, name_of
from spark_ledger.broker.wire.frames import FrameReader, MalformedFrame, encode

PROBE_S = 1.0
PROBES_MAX = 2
NEXT_S = 0.5
FRESH_S = 0.4
NEIGHBOURS_MAX = 3
_READ_BYTES = 4096


class Heard(Enum):
    ANSWER = "answer"
    REFUSAL = "refusal"
    NOTHING = "nothing"


async def connects(url: str) -> Heard:
    """CONNECT, which a broker answers by CONNECTED from its loop."""
    host, _, port = url.rpartition("://")[2].rpartition(":")
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(PROBE_S):
            reader, writer = await asyncio.open_connection(host, int(port))
            asked = command(
                "connect",
                client_version="Spark Ledger probe",
                protocol_version=PROTOCOL_VERSION,
            )
            writer.write(encode(asked))
            frames = FrameReader()
            while data := await reader.read(_READ_BYTES):
                if any(name_of(frame.command) == "connected" for frame in frames.feed(data)):
                    return Heard.ANSWER
            return Heard.NOTHING
    except ConnectionRefusedError:
        return Heard.REFUSAL
    except (TimeoutError, OSError, MalformedFrame):
        return Heard.NOTHING
    finally:
        if writer is not None:
            writer.close()
            with suppress(OSError):
                writer.transport.abort()


class Probes:
    """Of one broker. On one event loop."""

    def __init__(self, ask: Callable[[str], Awaitable[Heard]] = connects) -> None:
        self._ask = ask
        self._answered_s: dict[str, float] = {}
        self._asking: dict[str, asyncio.Task[bool]] = {}

    async def answers(self, url: str) -> bool:
        """Whether a broker lives at that URL."""
        now_s = asyncio.get_running_loop().time()
        if now_s < self._answered_s.get(url, float("-inf")) + FRESH_S:
            return True
        task = self._asking.get(url)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._probe(url))
            self._asking[url] = task
            task.add_done_callback(lambda _: self._asking.pop(url, None))
        return await asyncio.shield(task)

    async def _probe(self, url: str) -> bool:
        self._answered_s.pop(url, None)
        loop = asyncio.get_running_loop()
        asked = [loop.create_task(self._ask_later(url, n * NEXT_S)) for n in range(PROBES_MAX)]
        try:
            for one in asyncio.as_completed(asked):
                heard = await one
                if heard is Heard.ANSWER:
                    self._answered_s[url] = loop.time()
                if heard is not Heard.NOTHING:
                    return heard is Heard.ANSWER
            return False
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    async def _ask_later(self, url: str, after_s: float) -> Heard:
        await asyncio.sleep(after_s)
        return await self._ask(url)


def neighbours(broker_id: str, others: Iterable[str]) -> list[str]:
    """Those that a broker probes: the next ones in the ring of ids. So each is probed by
    NEIGHBOURS_MAX others at most, however many there are, and by one at least."""
    ordered = sorted(others)
    after = [one for one in ordered if one > broker_id]
    return [*after, *(one for one in ordered if one < broker_id)][:NEIGHBOURS_MAX]
