"""Acknowledgements of one connection's consumers, in the order in which they came.

Always true: what a client asks for after its acks finds them carried out; an ack of many ids is
carried out in bounded steps, so the loop stands still for none.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from spark_ledger import errors
from spark_ledger.broker.dispatch.consumers import Consumer, PlaceInPartition, Subscription
from spark_ledger.broker.wire.commands import Refusal, ServerError, command
from spark_ledger.broker.wire.frames import encode

ACK_IDS_MAX = 2000
"""Of one step. A command with more is carried out in several, and its connection is not read until
it is; what its client asked for after it waits for it."""
NO_TRANSACTIONS = "there are no transactions here"


class SubscribedTopic(Protocol):
    """A topic in its owner's hands (owned_topic.py), as its consumers use it."""

    def subscription(self, name: str) -> Subscription: ...

    def leave(self, name: str, consumer: Consumer) -> None: ...

    async def released(self, name: str) -> None: ...

    async def unsubscribe(self, name: str, consumer: Consumer) -> None: ...

    async def seek(self, name: str, place: PlaceInPartition, offset: int) -> None: ...


class Consuming(NamedTuple):
    """A consumer of a connection, and its subscription's name at that topic."""

    consumer: Consumer
    topic: SubscribedTopic
    subscription: str


class Acking:
    """`consumers` by their ids; `refusal_of` makes an error one of Pulsar's; `on_idle` is called
    once none waits."""

    def __init__(
        self,
        consumers: Mapping[int, Consuming],
        send: Callable[[bytes], None],
        refusal_of: Callable[[Exception], Refusal],
        on_idle: Callable[[], None],
    ) -> None:
        self._consumers = consumers
        self._send = send
        self._refusal_of = refusal_of
        self._on_idle = on_idle
        self._waiting: deque[Iterator[None]] = deque()
        self._task: asyncio.Task[None] | None = None

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting)

    def add(self, part: Any) -> None:
        """Carry an ACK out, at once where it is small and none is before it."""
        self._waiting.append(self._in_steps(part))
        if len(self._waiting) == 1 and len(part.message_id) <= ACK_IDS_MAX:
            self.finish()
        elif self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._rest())

    def finish(self) -> None:
        """Carry out what waits."""
        while self._waiting:
            for _ in self._waiting.popleft():
                pass

    def drop(self) -> None:
        """The connection is gone: the client acknowledges on the next one."""
        self._waiting.clear()

    async def _rest(self) -> None:
        while self._waiting:
            if next(self._waiting[0], self) is self:
                self._waiting.popleft()
            await asyncio.sleep(0)
        self._task = None
        self._on_idle()

    def _in_steps(self, part: Any) -> Iterator[None]:
        consuming = self._consumers.get(part.consumer_id)
        refused: Refusal | None = None
        if consuming is None:  # one that was sent away, say: what it has got comes again
            what = f"there is no consumer {part.consumer_id}"
            refused = Refusal(ServerError.CONSUMER_NOT_FOUND, what)
        else:
            try:
                yield from self._acknowledge(part, consuming)
            except Exception as error:
                refused = self._refusal_of(error)
                if isinstance(error, errors.LedgerFenced | errors.SubscriptionNotFound):
                    consuming.consumer.end()  # another has the subscription, or none
        if part.HasField("request_id"):
            response = command(
                "ack_response", consumer_id=part.consumer_id, request_id=part.request_id
            )
            if refused is not None:
                response.ack_response.error = refused.code
                response.ack_response.message = refused.message
            self._send(encode(response))

    def _acknowledge(self, part: Any, consuming: Consuming) -> Iterator[None]:
        if part.HasField("txnid_most_bits"):
            raise Refusal(ServerError.NOT_ALLOWED, NO_TRANSACTIONS)
        consumer = consuming.consumer
        moved = False
        for count, message_id in enumerate(part.message_id, 1):
            moved |= consumer.acknowledge(message_id, part.ack_type)
            if not count % ACK_IDS_MAX:
                yield
                if self._consumers.get(consumer.id, (None,))[0] is not consumer:
                    return  # it was sent away, for a seek, say
        if moved:
            consuming.topic.subscription(consuming.subscription).moved(consumer.place)
