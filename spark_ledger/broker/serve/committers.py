"""A committer's own connection to the broker's port. The committer (a Spark commit) asks for the
live segments past which it commits, holds them while it commits, and closes the connection.
hand_over.py has the frames.

Always true: a connection has one request, and ends after LASTS_S at the latest. The holds of the
request end with the connection.
"""

import asyncio
import logging
from collections.abc import Iterator

from spark_ledger.broker.broker import Broker
from spark_ledger.broker.log.holds import SegmentHold
from spark_ledger.topic.commit import hand_over
from spark_ledger.topic.commit.hand_over import HandOver, LiveSegmentId

LASTS_S = hand_over.OWNER_HOLD_S_MAX + 2.0

_log = logging.getLogger(__name__)


class CommitterConnection(asyncio.Protocol):
    """The protocol of a committer's connection, from its first byte on."""

    def __init__(self, broker: Broker, transport: asyncio.Transport) -> None:
        self._broker = broker
        self._transport = transport
        self._received = bytearray()
        self._holds: list[SegmentHold] | None = None
        self._answer_task: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(LASTS_S, transport.close)

    def data_received(self, data: bytes) -> None:
        self._received += data
        try:
            request = hand_over.decode_request(bytes(self._received))
        except hand_over.BadHandOverFrame as error:
            _log.warning("a committer's connection ends: %s", error)
            self._transport.close()
            return
        if request is None or self._holds is not None:
            return
        segments, hold_s = request
        loop = asyncio.get_running_loop()
        self._holds = list(self._hold_segments(segments, loop.time() + hold_s))
        pending_answers = [hold.answer for hold in self._holds if not hold.answer.done()]
        if not pending_answers:  # answer before writers that have stopped go on with their work
            self._answer()
            return
        within_s = hand_over.respond_within_s(hold_s, len(segments))
        self._answer_task = loop.create_task(self._answer_within(pending_answers, within_s))

    def _hold_segments(
        self, segments: list[LiveSegmentId], until_s: float
    ) -> Iterator[SegmentHold]:
        for topic_id, partition, ledger_id, opened in segments:
            writer = self._broker.live_writer(topic_id, partition)
            hold = None if writer is None else writer.hand_over(ledger_id, opened, until_s)
            if hold is not None:
                yield hold

    async def _answer_within(
        self, pending_answers: "list[asyncio.Future[HandOver | None]]", within_s: float
    ) -> None:
        await asyncio.wait(pending_answers, timeout=within_s)
        self._answer()

    def _answer(self) -> None:
        """Answer with the segments that are handed over by now; the committer gets no others
        later."""
        answers = [hold.answer.result() for hold in self._holds or () if hold.answer.done()]
        self._transport.write(
            hand_over.encode_response([answer for answer in answers if answer is not None])
        )

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        if self._answer_task is not None:
            self._answer_task.cancel()
        for hold in self._holds or ():
            hold.leave()
