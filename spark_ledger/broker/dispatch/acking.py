"""Acknowledgements of one connection's consumers, in the order in which they came.

Always true: one ACK is carried out at a time, in bounded steps, so no ACK blocks the loop for long;
until the ACK is done, no later command of its client is taken (serve/client.py).
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from spark_ledger import errors
from spark_ledger.broker.dispatch.dispatcher import Consumer
from spark_ledger.broker.dispatch.subscriptions import TopicSubscriptions
from spark_ledger.broker.wire.commands import (
    NO_TRANSACTIONS,
    AckType,
    Refusal,
    ServerError,
    checked,
    command,
)
from spark_ledger.broker.wire.frames import encode

ACK_STEPS_MAX = 2000
"""How many ids, or ranges of their sets, are acknowledged in one step of the loop; a larger ACK
takes several steps."""
_WORDS_PER_STEP = 16  # unpacking 16 words of an id's set takes as long as one range


class Consuming(NamedTuple):
    """A consumer of a connection, with the name of its subscription and all subscriptions of its
    topic."""

    consumer: Consumer
    subscriptions: TopicSubscriptions
    name: str


class Acking:
    """`consumers` by their ids; `refusal_of` turns an exception into one of Pulsar's errors;
    `on_idle` is called when an ACK of several steps is done. `awaits_durable`: the receipt of an
    ACK is sent once its acknowledgements are durable; else once they are in memory."""

    def __init__(
        self,
        consumers: Mapping[int, Consuming],
        send: Callable[[bytes], None],
        refusal_of: Callable[[Exception], Refusal],
        on_idle: Callable[[], None],
        *,
        awaits_durable: bool = True,
    ) -> None:
        self._consumers = consumers
        self._send = send
        self._refusal_of = refusal_of
        self._on_idle = on_idle
        self._awaits_durable = awaits_durable
        self._is_dropped = False
        self._steps: Iterator[None] | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether an ACK is not done yet: no other ACK may be added meanwhile."""
        return self._steps is not None

    def add(self, part: Any) -> None:
        """Carry an ACK out, at once if one step is enough."""
        steps = self._answer_in_steps(part)
        if next(steps, self) is not self:
            self._steps = steps
            self._task = asyncio.get_running_loop().create_task(self._finish(steps))

    def drop(self) -> None:
        """Stop, as the connection has ended: the client acknowledges on its next connection."""
        self._steps = None
        self._is_dropped = True

    async def _finish(self, steps: Iterator[None]) -> None:
        try:
            await asyncio.sleep(0)
            for _ in steps:
                await asyncio.sleep(0)
                if self._steps is not steps:
                    return
        finally:  # also after a defect: else the connection would never be read again
            if self._steps is steps:
                self._steps = None
                self._on_idle()

    def _answer_in_steps(self, part: Any) -> Iterator[None]:
        consuming = self._consumers.get(part.consumer_id)
        refusal: Refusal | None = None
        if consuming is None:  # e.g. a consumer that was sent away: its messages are sent again
            text = f"there is no consumer {part.consumer_id}"
            refusal = Refusal(ServerError.CONSUMER_NOT_FOUND, text)
        else:
            try:
                yield from self._acknowledge(part, consuming)
            except Exception as error:
                refusal = self._refusal_of(error)
                if isinstance(error, errors.LedgerFenced | errors.SubscriptionNotFound):
                    consuming.consumer.end()  # the subscription is another broker's, or deleted
        if part.HasField("request_id"):
            if refusal is not None or consuming is None or not self._awaits_durable:
                self._respond(part, refusal)
            else:
                consuming.consumer.dispatcher.when_durable(partial(self._receipt, part, consuming))

    def _receipt(self, part: Any, consuming: Consuming, error: Exception | None) -> None:
        """Answer an ACK whose acknowledgements are durable (`error` None) or cannot become
        durable."""
        if not self._is_dropped:
            self._respond(part, None if error is None else self._refusal_of(error))
            if error is not None:
                consuming.consumer.end()

    def _respond(self, part: Any, refusal: Refusal | None) -> None:
        response = command("ack_response", consumer_id=part.consumer_id, request_id=part.request_id)
        if refusal is not None:
            response.ack_response.error = refusal.code
            response.ack_response.message = refusal.message
        self._send(encode(response))

    def _acknowledge(self, part: Any, consuming: Consuming) -> Iterator[None]:
        if part.HasField("txnid_most_bits"):
            raise Refusal(ServerError.NOT_ALLOWED, NO_TRANSACTIONS)
        ack_type = checked(AckType, part.ack_type, "type of acknowledgements")
        consumer, cost = consuming.consumer, 0
        unclear: Refusal | None = None
        for step in _steps_of(part):
            ids_left = step.message_id
            if ack_type is AckType.INDIVIDUAL:
                ids_left = consumer.dispatcher.acknowledge_lone(consumer, step)
                cost += len(step.message_id) - len(ids_left)
                if cost >= ACK_STEPS_MAX:
                    cost = 0
                    yield
                    self._check_is_there(consumer)
            for message_id in ids_left:
                cost += len(message_id.ack_set) // _WORDS_PER_STEP
                steps = consumer.dispatcher.acknowledge(consumer, message_id, ack_type)
                is_refused = False
                while not is_refused:
                    try:
                        next(steps)
                    except StopIteration:
                        break
                    except Refusal as refusal:  # the other ids still count
                        unclear, is_refused = refusal, True
                    cost += 1
                    if cost >= ACK_STEPS_MAX:
                        cost = 0
                        yield
                        self._check_is_there(consumer)
        consumer.dispatcher.save_position()
        if unclear is not None:
            raise unclear

    def _check_is_there(self, consumer: Consumer) -> None:
        """Raises Refusal if the consumer was sent away in the meantime, by a seek for example."""
        if self._consumers.get(consumer.id, (None,))[0] is not consumer:
            consumer.dispatcher.save_position()
            what = f"consumer {consumer.id} was sent away"
            raise Refusal(ServerError.CONSUMER_NOT_FOUND, what)


def _steps_of(ack: Any) -> Iterator[Any]:
    """The ACK, or ACKs of ACK_STEPS_MAX of its ids each."""
    ids = ack.message_id
    if len(ids) <= ACK_STEPS_MAX:
        yield ack
        return
    for at in range(0, len(ids), ACK_STEPS_MAX):
        yield command("ack", consumer_id=0, ack_type=0, message_id=ids[at : at + ACK_STEPS_MAX]).ack
