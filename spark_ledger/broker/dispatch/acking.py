"""Acknowledgements of one connection's consumers, in the order in which they came.

Always true: one ACK is carried out at a time, in bounded steps, so no ACK blocks the loop for long;
until it is done, no later command of its client is taken (serve/client.py).
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from spark_ledger import errors
from spark_ledger.broker.dispatch.dispatcher import Consumer
from spark_ledger.broker.dispatch.subscriptions import TopicSubscriptions
from spark_ledger.broker.wire.commands import NO_TRANSACTIONS, Refusal, ServerError, command
from spark_ledger.broker.wire.frames import encode

ACK_STEPS_MAX = 2000
"""Ids, or stretches of their sets, that are acknowledged in one step of the loop; an ACK with more
takes several steps."""
_WORDS_PER_STEP = 16  # of an id's set: to unpack them takes the time of a stretch


class Consuming(NamedTuple):
    """A consumer of a connection, and its subscription's name among those of its topic."""

    consumer: Consumer
    subscriptions: TopicSubscriptions
    name: str


class Acking:
    """`consumers` by their ids; `refusal_of` makes an error one of Pulsar's; `on_idle` is called
    when an ACK of several steps is done."""

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
        self._steps: Iterator[None] | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether an ACK is not done yet: no other is to be added."""
        return self._steps is not None

    def add(self, part: Any) -> None:
        """Carry an ACK out, at once where one step is enough."""
        steps = self._in_steps(part)
        if next(steps, self) is not self:
            self._steps = steps
            self._task = asyncio.get_running_loop().create_task(self._rest(steps))

    def drop(self) -> None:
        """The connection is gone: the client acknowledges on the next one."""
        self._steps = None

    async def _rest(self, steps: Iterator[None]) -> None:
        try:
            await asyncio.sleep(0)
            for _ in steps:
                await asyncio.sleep(0)
                if self._steps is not steps:
                    return
        finally:  # also after a defect: else its connection would never be read again
            if self._steps is steps:
                self._steps = None
                self._on_idle()

    def _in_steps(self, part: Any) -> Iterator[None]:
        consuming = self._consumers.get(part.consumer_id)
        refused: Refusal | None = None
        if consuming is None:  # it was sent away, for example: its messages come again
            what = f"there is no consumer {part.consumer_id}"
            refused = Refusal(ServerError.CONSUMER_NOT_FOUND, what)
        else:
            try:
                yield from self._acknowledge(part, consuming)
            except Exception as error:
                refused = self._refusal_of(error)
                if isinstance(error, errors.LedgerFenced | errors.SubscriptionNotFound):
                    consuming.consumer.end()  # the subscription is another broker's, or deleted
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
        consumer, moved, cost = consuming.consumer, False, 0
        for message_id in part.message_id:
            cost += len(message_id.ack_set) // _WORDS_PER_STEP
            for moves in consumer.dispatcher.acknowledge(consumer, message_id, part.ack_type):
                moved |= moves
                cost += 1
                if cost < ACK_STEPS_MAX:
                    continue
                cost = 0
                yield
                if self._consumers.get(consumer.id, (None,))[0] is not consumer:
                    return  # it was sent away, for example by a seek
        if moved:
            consumer.dispatcher.moved()
