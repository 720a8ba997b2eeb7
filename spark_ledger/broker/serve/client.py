"""One client: its commands, its producers and its consumers.

Always true: a request gets one response, the requested one or one of Pulsar's error codes. Before a
request is carried out, the client's earlier SENDs are handed on to the partitions' writers, and its
earlier ACKs are carried out.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from typing import Any

from spark_ledger.async_tasks import BackgroundTasks
from spark_ledger.broker.broker import Broker
from spark_ledger.broker.dispatch.acking import AckHandler, ConnectedConsumer
from spark_ledger.broker.dispatch.dispatcher import Consumer
from spark_ledger.broker.produce.intake import Intake
from spark_ledger.broker.serve.commands import COMMANDS, AtOnce, Request, refusal_of
from spark_ledger.broker.serve.topic_watches import TopicWatches
from spark_ledger.broker.wire.commands import (
    SEND,
    Refusal,
    ServerError,
    command,
    name_of,
    not_text,
)
from spark_ledger.broker.wire.frames import MalformedFrame, PulsarFrame, Span, encode, frame_of
from spark_ledger.broker.wire.link import ClientFacts, Link, is_cpp, properties_of

REQUESTS_MAX = 1000
FRAMES_MAX = 500
"""How many commands are begun in one step of the loop; SENDs that come together do not count."""

_log = logging.getLogger(__name__)


class Client:
    """The client of one connection, as long as the connection is open."""

    def __init__(self, link: Link, broker: Broker) -> None:
        self.link = link
        self.broker = broker
        self.connected = False
        self._version = ""
        self.intake = Intake(link, broker, broker.message_bytes_max)
        self.consumers: dict[int, ConnectedConsumer] = {}
        self.subscribing: dict[int, int] = {}
        self.topic_watches = TopicWatches(link)
        self.ack_handler = AckHandler(
            *(self.consumers, link.send, refusal_of, link.go_on),
            awaits_durable=broker.settings.ack_receipt == "durable",
        )
        self._requests = BackgroundTasks(ended=self.link.go_on)
        self._waiting_frames: deque[tuple[bytes, Sequence[Span]]] = deque()
        self._next_span = 0  # in the first item of `_waiting_frames`

    @property
    def is_busy(self) -> bool:
        """Whether so many commands are under way or wait that the connection must not be read."""
        return self._is_full or bool(self._waiting_frames)

    @property
    def _is_full(self) -> bool:
        return len(self._requests) >= REQUESTS_MAX or self.ack_handler.is_busy

    def end(self) -> None:
        """Forget the client's producers, consumers and requests: its connection is gone."""
        self._waiting_frames.clear()
        self.intake.remove_all()
        for consuming in list(self.consumers.values()):
            self.forget_consumer(consuming.consumer)
        self._requests.cancel()
        self.ack_handler.drop()
        self.topic_watches.close_all()

    # -- commands ----------------------------------------------------------------------------

    def take(self, data: bytes, spans: Sequence[Span]) -> None:
        """Begin the commands in the order in which they came. Raises MalformedFrame."""
        if spans:
            self._waiting_frames.append((data, spans))
            self.take_more()

    def take_more(self) -> None:
        """Take waiting commands in their order. Stop when too many are under way, or when this step
        of the loop has taken enough: FRAMES_MAX commands, or fewer if batches take long. Batches
        that a producer sent together are handed on together. Raises MalformedFrame."""
        taken = 0
        self.intake.begin_step()
        try:
            while (
                self._waiting_frames
                and not self._is_full
                and taken < FRAMES_MAX
                and not self.intake.step_is_over
            ):
                data, spans = self._waiting_frames[0]
                sends = self.intake.take_alike(data, spans, self._next_span)
                if not sends:
                    self._take(frame_of(data, *spans[self._next_span]))
                    taken += 1
                self._next_span += sends or 1
                if self._next_span >= len(spans):
                    self._waiting_frames.popleft()
                    self._next_span = 0
        finally:
            self.intake.hand_on()
        if self._waiting_frames and (taken == FRAMES_MAX or self.intake.step_is_over):
            asyncio.get_running_loop().call_soon(self.link.go_on)

    def _take(self, frame: PulsarFrame) -> None:
        if frame.command.type == SEND and self.connected and frame.command.HasField("send"):
            self.intake.take(frame.command.send, frame.batch or b"")
            return
        self.intake.hand_on()
        name = name_of(frame.command)
        if name is None:
            raise MalformedFrame(f"the unknown command {frame.command.type}")
        part = getattr(frame.command, name)
        if not self.connected and name != "connect":
            raise MalformedFrame(f"{name} before CONNECT")
        damaged_field = not_text(part)
        match COMMANDS.get(name):
            case Request() as request if damaged_field is not None:
                refusal = Refusal(ServerError.NOT_ALLOWED, f"{damaged_field} is not UTF-8")
                request.refuse(self, part, refusal)
            case Request() as request:
                self._requests.start(self._carry_out(request, part))
            case _ if damaged_field is not None:
                raise MalformedFrame(f"{name} with a {damaged_field} that is not UTF-8")
            case AtOnce() as at_once:
                at_once.carry_out(self, part)
            case None:
                raise MalformedFrame(f"{name}, which a client does not send")

    async def _carry_out(self, request: Request, part: Any) -> None:
        try:
            await request.carry_out(self, part)
        except Exception as error:
            refusal = refusal_of(error)
            if refusal.code is ServerError.UNKNOWN:
                _log.exception("a request has failed")
            request.refuse(self, part, refusal)

    def set_version(self, version: str) -> None:
        """Note that the client sent CONNECT with this name and version. The C++ client drops a
        message that is refused by ChecksumError; after any other error the client connects again,
        and sends the message again. The remaining clients drop a message that is refused by
        NotAllowedError."""
        self.connected = True
        self._version = version
        if is_cpp(version):
            self.intake.drop = ServerError.CHECKSUM

    def facts(self, properties: Any) -> ClientFacts:
        """What statistics show of this client, for a producer or consumer with these
        properties."""
        since_ms = self.broker.clock.now_ms()
        return ClientFacts(self.link, self._version, since_ms, properties_of(properties))

    # -- producers and consumers ---------------------------------------------------------------

    def forget_consumer(self, consumer: Consumer) -> bool:
        """Take the consumer out of its subscription; returns whether the client had it."""
        consuming = self.consumers.get(consumer.id)
        if consuming is None or consuming.consumer is not consumer:
            return False
        del self.consumers[consumer.id]
        consuming.subscriptions.leave(consuming.name, consumer)
        return True

    def send_consumer_away(self, consumer: Consumer) -> None:
        """End the consumer; the client then looks the topic up again."""
        if self.forget_consumer(consumer):
            away = command("close_consumer", consumer_id=consumer.id, request_id=0)
            self.link.send(encode(away))
