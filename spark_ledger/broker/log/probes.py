"""Whether other brokers live, by probes of Pulsar's protocol. And which brokers are alive although
this broker buried them (removed their registration).

Always true: a broker counts as dead when its port refuses a connection, or when it misses
PROBES_MAX probes of PROBE_S, NEXT_S apart. (If the broker that probes stood still, the last probe
still has its whole time.) A broker that is stopped or hangs has a port that accepts and a session
that lives on, but its event loop answers nothing. An answer counts for FRESH_S. A broker is probed
once at a time, however many callers ask.

A wrong decision does no harm to stored data: the fence decides which broker writes. But two brokers
that cannot reach each other's address would bury each other for ever. So a buried broker that
registers again within BACK_S counts as alive. The broker that buried it spares it for SPARED_S,
twice as long after each further burial, SPARED_S_MAX at most. When the session of a spared broker
ends, it is no longer spared: the store has seen that broker die.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum

from spark_ledger import net
from spark_ledger.async_tasks import SharedTasks, cancel
from spark_ledger.broker.wire.commands import PROTOCOL_VERSION, command, name_of
from spark_ledger.broker.wire.frames import MalformedFrame, PulsarFrameReader, encode

PROBE_S = 1.0
PROBES_MAX = 2
NEXT_S = 0.5
FRESH_S = 0.4
NEIGHBOURS_MAX = 3
BACK_S = 5.0
SPARED_S, SPARED_S_MAX = 30.0, 600.0
_READ_BYTES = 4096

_log = logging.getLogger(__name__)


class Heard(Enum):
    ANSWER = "answer"
    REFUSAL = "refusal"
    NOTHING = "nothing"


async def connects(url: str) -> Heard:
    """What a CONNECT to that URL gets: a broker whose event loop works answers CONNECTED."""
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(PROBE_S):
            reader, writer = await net.dial_streams(url)
            request = command(
                "connect",
                client_version="Spark Ledger probe",
                protocol_version=PROTOCOL_VERSION,
            )
            writer.write(encode(request))
            frames = PulsarFrameReader()
            while data := await reader.read(_READ_BYTES):
                if any(name_of(frame.command) == "connected" for frame in frames.feed(data)):
                    return Heard.ANSWER
            return Heard.NOTHING
    except ConnectionRefusedError:
        return Heard.REFUSAL
    except (OSError, MalformedFrame):  # TimeoutError is an OSError
        return Heard.NOTHING
    finally:
        if writer is not None:
            writer.close()
            with suppress(OSError):
                writer.transport.abort()


class Probes:
    """The probes of one broker, on one event loop."""

    def __init__(self, ask: Callable[[str], Awaitable[Heard]] = connects) -> None:
        self._ask = ask
        self._answered_s: dict[str, float] = {}
        self._asking = SharedTasks[str, bool]()

    async def answers(self, url: str) -> bool:
        """Whether a broker lives at that URL."""
        now_s = asyncio.get_running_loop().time()
        if now_s < self._answered_s.get(url, float("-inf")) + FRESH_S:
            return True
        return await self._asking.result(url, lambda: self._probe(url))

    async def _probe(self, url: str) -> bool:
        self._answered_s.pop(url, None)
        loop = asyncio.get_running_loop()
        probes = [loop.create_task(self._ask_later(url, n * NEXT_S)) for n in range(PROBES_MAX)]
        try:
            for probe in asyncio.as_completed(probes):
                outcome = await probe
                if outcome is Heard.ANSWER:
                    self._note_answer(url, loop.time())
                if outcome is not Heard.NOTHING:
                    return outcome is Heard.ANSWER
            return False
        finally:
            await cancel(*probes)

    def _note_answer(self, url: str, now_s: float) -> None:
        """Note an answer, and forget answers that are no longer fresh: brokers come and go, each
        with its own URL."""
        fresh = {other: s for other, s in self._answered_s.items() if now_s < s + FRESH_S}
        self._answered_s = {**fresh, url: now_s}

    async def _ask_later(self, url: str, after_s: float) -> Heard:
        await asyncio.sleep(after_s)
        return await self._ask(url)


def neighbours(broker_id: str, others: Iterable[str]) -> list[str]:
    """The brokers that a broker probes: the next NEIGHBOURS_MAX in the ring of ids. So each broker
    is probed by one to NEIGHBOURS_MAX others, however many brokers there are."""
    ordered = sorted(others)
    after = [other for other in ordered if other > broker_id]
    return [*after, *(other for other in ordered if other < broker_id)][:NEIGHBOURS_MAX]


@dataclass(slots=True)
class _Burial:
    """The last burial of a broker. `session` is the session of its registration after the burial;
    0: the broker has not registered again."""

    at_s: float
    session: int = 0
    spared_until_s: float = float("-inf")
    next_spared_s: float = SPARED_S


class Burials:
    """The other brokers that one broker has buried, and those of them that it spares. All times are
    seconds of one clock."""

    def __init__(self) -> None:
        self._by_broker: dict[str, _Burial] = {}

    def buried(self, broker_id: str, now_s: float) -> None:
        """Note that this broker has removed the registration of `broker_id`."""
        burial = self._by_broker.setdefault(broker_id, _Burial(now_s))
        burial.at_s, burial.session = now_s, 0

    def registered(self, sessions: Mapping[str, int], now_s: float) -> None:
        """Note which brokers are registered now, each with the session that holds its
        registration."""
        for broker_id, burial in list(self._by_broker.items()):
            session = sessions.get(broker_id, 0)
            late = now_s > burial.at_s + BACK_S
            if burial.session and session not in (0, burial.session):
                del self._by_broker[broker_id]  # that session has ended
            elif not burial.session and session and not late:
                burial.session = session
                burial.spared_until_s = now_s + burial.next_spared_s
                burial.next_spared_s = min(2 * burial.next_spared_s, SPARED_S_MAX)
                text = "broker %s registers again: it is alive, and spared for %g s"
                _log.warning(text, broker_id, burial.spared_until_s - now_s)
            elif late and (not session or not burial.session):
                del self._by_broker[broker_id]

    def spares(self, broker_id: str, now_s: float) -> bool:
        """Whether that broker must not be buried now, even if it does not answer."""
        burial = self._by_broker.get(broker_id)
        return burial is not None and now_s < burial.spared_until_s and burial.session != 0

    def answered(self, broker_id: str, now_s: float) -> None:
        """Note that the broker answered a probe. If the broker is no longer spared, its burials are
        forgotten."""
        burial = self._by_broker.get(broker_id)
        if burial is not None and burial.session and now_s >= burial.spared_until_s:
            del self._by_broker[broker_id]
