"""Acknowledgements of one connection's consumers, in the order in which they came.

Always true: one ACK is carried out at a time, in bounded steps, so no ACK blocks the loop for long;
until the ACK is done, no later command of its client is taken (serve/client.py). Nor is a command
taken while RECEIPTS_MAX of the connection's receipts wait: so while no acknowledgement becomes
durable, a client fills no memory with them.
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
RECEIPTS_MAX = 1000
"""How many receipts of a connection wait, at most, until their acknowledgements are durable."""
_WORDS_PER_STEP = 16  # unpacking 16 words of an id's set takes as long as one range
_DONE = object()


class ConnectedConsumer(NamedTuple):
    """A consumer of a connection. `name` is the name of its subscription; `subscriptions` are all
    subscriptions of its topic."""

    consumer: Consumer
    subscriptions: TopicSubscriptions
    name: str


class AckHandler:
    """`consumers` by their ids; `refusal_of` turns an exception into one of Pulsar's errors;
    `on_idle` is called when another ACK may be added after `is_busy`. `awaits_durable`: the receipt
    of an ACK is sent once its acknowledgements are durable; else once they are in memory."""

    def __init__(
        self,
        consumers: Mapping[int, ConnectedConsumer],
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
        self._waiting_receipts = 0
        self._steps: Iterator[None] | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether an ACK is not done yet, or too many receipts wait: no other ACK may be added
        meanwhile."""
        return self._steps is not None or self._waiting_receipts >= RECEIPTS_MAX

    def add(self, ack: Any) -> None:
        """Carry an ACK out, at once if one step is enough."""
        steps = self._answer_in_steps(ack)
        if next(steps, _DONE) is not _DONE:
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
        finally:  # also after a defect: otherwise the connection would never be read again
            if self._steps is steps:
                self._steps = None
                self._on_idle()

    def _answer_in_steps(self, ack: Any) -> Iterator[None]:
        connected = self._consumers.get(ack.consumer_id)
        refusal: Refusal | None = None
        if connected is None:  # e.g. a consumer that was sent away: its messages are sent again
            text = f"there is no consumer {ack.consumer_id}"
            refusal = Refusal(ServerError.CONSUMER_NOT_FOUND, text)
        else:
            try:
                yield from self._acknowledge(ack, connected.consumer)
            except Exception as error:
                refusal = self._refusal_of(error)
                if isinstance(error, errors.LedgerFenced | errors.SubscriptionNotFound):
                    connected.consumer.end()  # the subscription is deleted or served elsewhere
        if ack.HasField("request_id"):
            if refusal is not None or connected is None or not self._awaits_durable:
                self._respond(ack.consumer_id, ack.request_id, refusal)
            else:
                consumer, self._waiting_receipts = connected.consumer, self._waiting_receipts + 1
                receipt = partial(self._receipt, int(ack.request_id), consumer)
                consumer.dispatcher.when_durable(receipt)

    def _receipt(self, request_id: int, consumer: Consumer, error: Exception | None) -> None:
        """Answer an ACK whose acknowledgements are durable (`error` None) or cannot become
        durable."""
        if self._is_dropped:
            return
        self._waiting_receipts -= 1
        if self._waiting_receipts == RECEIPTS_MAX - 1:  # it may be called by `add`
            asyncio.get_running_loop().call_soon(self._on_idle)
        self._respond(consumer.id, request_id, None if error is None else self._refusal_of(error))
        if error is not None:
            consumer.end()

    def _respond(self, consumer_id: int, request_id: int, refusal: Refusal | None) -> None:
        response = command("ack_response", consumer_id=consumer_id, request_id=request_id)
        if refusal is not None:
            response.ack_response.error = refusal.code
            response.ack_response.message = refusal.message
        self._send(encode(response))

    def _acknowledge(self, ack: Any, consumer: Consumer) -> Iterator[None]:
        if ack.HasField("txnid_most_bits"):
            raise Refusal(ServerError.NOT_ALLOWED, NO_TRANSACTIONS)
        ack_type = checked(AckType, ack.ack_type, "type of acknowledgements")
        cost = 0
        last_refusal: Refusal | None = None
        for small_ack in _small_acks(ack):
            ids_left = small_ack.message_id
            if ack_type is AckType.INDIVIDUAL:
                ids_left = consumer.dispatcher.acknowledge_lone(consumer, small_ack)
                cost += len(small_ack.message_id) - len(ids_left)
                if cost >= ACK_STEPS_MAX:
                    cost = 0
                    yield
                    self._check_connected(consumer)
            for message_id in ids_left:
                cost += len(message_id.ack_set) // _WORDS_PER_STEP
                steps: Iterator[bool] | None = None
                is_refused = False
                while not is_refused:
                    try:
                        if steps is None:
                            steps = consumer.dispatcher.acknowledge(consumer, message_id, ack_type)
                        next(steps)
                    except StopIteration:
                        break
                    except Refusal as refusal:  # the other ids still count
                        last_refusal, is_refused = refusal, True
                    cost += 1
                    if cost >= ACK_STEPS_MAX:
                        cost = 0
                        yield
                        self._check_connected(consumer)
        consumer.dispatcher.save_position()
        if last_refusal is not None:
            raise last_refusal

    def _check_connected(self, consumer: Consumer) -> None:
        """Raises Refusal if the consumer was sent away between two steps, by a seek for
        example."""
        if self._consumers.get(consumer.id, (None,))[0] is not consumer:
            consumer.dispatcher.save_position()
            what = f"consumer {consumer.id} was sent away"
            raise Refusal(ServerError.CONSUMER_NOT_FOUND, what)


def _small_acks(ack: Any) -> Iterator[Any]:
    """The ACK, cut into ACKs of at most ACK_STEPS_MAX ids each."""
    ids = ack.message_id
    if len(ids) <= ACK_STEPS_MAX:
        yield ack
        return
    for at in range(0, len(ids), ACK_STEPS_MAX):
        yield command("ack", consumer_id=0, ack_type=0, message_id=ids[at : at + ACK_STEPS_MAX]).ack
