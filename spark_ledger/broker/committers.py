"""Who commits past live segments, on a connection of its own to the broker's port: it asks for
them, holds them while it commits, and closes (hand_over.py has the frames).

Always true: a connection asks once, and ends after LASTS_S whatever happens; when it ends, nothing
is held for it any more.
"""

import asyncio
import logging

from spark_ledger.broker.broker import Broker
from spark_ledger.broker.owner.hold import Hold
from spark_ledger.topic.commit import hand_over
from spark_ledger.topic.commit.hand_over import Handed, Live

LASTS_S = hand_over.HOLDS_S_MAX + 2.0

_log = logging.getLogger(__name__)


class Held:
    """What one committer holds. `until_s` is of the loop's clock."""

    def __init__(self, broker: Broker, lives: list[Live], until_s: float) -> None:
        self._holds: list[Hold] = []
        for topic_id, partition, ledger_id, opened in lives:
            writer = broker.live_writer(topic_id, partition)
            hold = None if writer is None else writer.hand_over(ledger_id, opened, until_s)
            if hold is not None:
                self._holds.append(hold)

    @property
    def stopping(self) -> "list[asyncio.Future[Handed | None]]":
        """Answers that are still to come."""
        return [hold.answer for hold in self._holds if not hold.answer.done()]

    async def answer(self, within_s: float) -> bytes:
        """What is handed over by then; other live segments than those in it are not."""
        stopping = self.stopping
        if stopping:
            await asyncio.wait(stopping, timeout=within_s)
        return self.answered()

    def answered(self) -> bytes:
        """What is handed over by now."""
        some = (hold.answer.result() for hold in self._holds if hold.answer.done())
        return hand_over.encode_answer([one for one in some if one is not None])

    def let_go(self) -> None:
        holds, self._holds = self._holds, []
        for hold in holds:
            hold.leave()


class CommitterConnection(asyncio.Protocol):
    """From the first byte on."""

    def __init__(self, broker: Broker, transport: asyncio.Transport) -> None:
        self._broker = broker
        self._transport = transport
        self._received = bytearray()
        self._held: Held | None = None
        self._answering: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(LASTS_S, transport.close)

    def data_received(self, data: bytes) -> None:
        self._received += data
        try:
            asked = hand_over.decode_request(bytes(self._received))
        except hand_over.NotUnderstood as error:
            _log.warning("a committer's connection ends: %s", error)
            self._transport.close()
            return
        if asked is not None and self._held is None:
            lives, hold_s = asked
            loop = asyncio.get_running_loop()
            self._held = Held(self._broker, lives, loop.time() + hold_s)
            if not self._held.stopping:  # before those that have stopped go on with their work
                self._transport.write(self._held.answered())
                return
            within_s = hand_over.answer_within_s(hold_s, len(lives))
            self._answering = loop.create_task(self._answer(self._held, within_s))

    async def _answer(self, held: Held, within_s: float) -> None:
        self._transport.write(await held.answer(within_s))

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        if self._answering is not None:
            self._answering.cancel()
        if self._held is not None:
            self._held.let_go()
