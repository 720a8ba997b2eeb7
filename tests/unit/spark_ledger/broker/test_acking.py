"""What one ACK does beside its acknowledgements: its steps, its answer, and what it saves."""

import asyncio
from collections import Counter

import pytest

from spark_ledger import errors
from spark_ledger.broker.dispatch.acking import (
    ACK_STEPS_MAX,
    RECEIPTS_MAX,
    AckHandler,
    ConnectedConsumer,
)
from spark_ledger.broker.serve.commands import refusal_of
from spark_ledger.broker.wire.commands import MessageId, Refusal, ServerError, command
from spark_ledger.broker.wire.frames import PulsarFrameReader
from tests.kit.pulsar_batches import lone, message
from tests.unit.spark_ledger.broker.sessions import TOPIC, Session, session_of
from tests.unit.spark_ledger.topic.stage import play


class Asked:
    """A consumer, and its dispatcher: what an ACK asks of them."""

    id = 1

    def __init__(self, failure=None):
        self.dispatcher, self.failure = self, failure
        self.turn, self.turns, self.saved, self.ends, self.receipts = 0, [], [], 0, []
        self.answers, self.idles = [], 0
        self.consumers = {1: ConnectedConsumer(self, None, "s")}
        self.ack_handler = AckHandler(self.consumers, self._send, refusal_of, self._on_idle)

    def _on_idle(self):
        self.idles += 1

    def acknowledge_lone(self, consumer, ack):
        return ack.message_id

    def acknowledge(self, *_):
        self.turns.append(self.turn)
        yield True

    def save_position(self):
        self.saved.append(len(self.turns))
        if self.failure is not None:
            raise self.failure

    def when_durable(self, receipt):
        self.receipts.append(receipt)

    def end(self):
        self.ends += 1

    def _send(self, frame):
        (sent,) = PulsarFrameReader().feed(frame)
        self.answers.append(sent.command.ack_response)

    def add(self, count, words=0):
        ids = [MessageId(ledgerId=7, entryId=i, ack_set=[1] * words) for i in range(count)]
        asked = command("ack", consumer_id=1, ack_type=0, request_id=3, message_id=ids)
        self.ack_handler.add(asked.ack)

    async def done(self):
        async with asyncio.timeout(30):
            while self.ack_handler.is_busy:
                await asyncio.sleep(0)
                self.turn += 1


def test_long_sets_count_for_the_length_of_a_step():
    async def main():
        asked = Asked()
        words = 16 * ACK_STEPS_MAX // 10
        asked.add(35, words)
        await asked.done()
        assert len(asked.turns) == 35 and max(Counter(asked.turns).values()) <= 10

    asyncio.run(main())


def test_what_was_acknowledged_before_the_consumer_was_sent_away_is_saved():
    async def main():
        asked = Asked()
        asked.add(2 * ACK_STEPS_MAX)
        del asked.consumers[1]
        await asked.done()
        assert asked.saved == [ACK_STEPS_MAX] == [len(asked.turns)]
        (answer,) = asked.answers
        assert answer.error == ServerError.CONSUMER_NOT_FOUND and answer.request_id == 3

    asyncio.run(main())


def test_an_id_that_is_refused_at_once_keeps_no_other_id_of_its_ack_from_counting(monkeypatch):
    acknowledge = Asked.acknowledge

    def refuses_one(asked, consumer, message_id, ack_type):
        if message_id.entryId == 1:
            raise Refusal(ServerError.NOT_ALLOWED, "it is of another topic")
        return acknowledge(asked)

    monkeypatch.setattr(Asked, "acknowledge", refuses_one)
    asked = Asked()
    asked.add(3)
    assert (len(asked.turns), asked.saved) == (2, [2])
    assert [answer.error for answer in asked.answers] == [ServerError.NOT_ALLOWED]


@pytest.mark.parametrize(
    ("failure", "ends"),
    [
        (errors.LedgerFenced("another broker has it"), 1),
        (errors.SubscriptionNotFound("it was deleted"), 1),
        (errors.Unavailable("for a while"), 0),
    ],
)
def test_a_consumer_whose_subscription_is_gone_is_sent_away_with_the_answer(failure, ends):
    asked = Asked(failure)
    asked.add(1)
    assert [answer.HasField("error") for answer in asked.answers] == [True]
    assert (asked.ends, asked.receipts) == (ends, [])


@pytest.mark.parametrize("failure", [None, errors.LedgerFenced("another broker has it")])
def test_a_receipt_that_comes_after_the_connection_ended_is_sent_to_nobody(failure):
    asked = Asked()
    asked.add(1)
    asked.add(1)
    first, second = asked.receipts
    first(failure)
    assert len(asked.answers) == 1 and asked.ends == (failure is not None)
    asked.ack_handler.drop()
    second(failure)
    assert len(asked.answers) == 1 and asked.ends == (failure is not None)


def test_a_client_is_not_read_on_while_too_many_of_its_receipts_wait_for_the_store():
    async def main():
        asked = Asked()
        for _ in range(RECEIPTS_MAX):
            assert not asked.ack_handler.is_busy
            asked.add(1)
        assert asked.ack_handler.is_busy and asked.answers == []
        kept = {type(kept) for receipt in asked.receipts for kept in receipt.args}
        assert kept == {int, Asked}, "an ACK has megabytes of ids"
        asked.receipts.pop()(None)
        assert not asked.ack_handler.is_busy and asked.idles == 0
        await asyncio.sleep(0)
        asked.receipts.pop()(None)
        await asyncio.sleep(0)
        assert asked.idles == 1 and len(asked.answers) == 2

    asyncio.run(main())


def test_a_client_that_is_read_no_more_gets_its_receipts_and_is_read_on():
    async def main(stage):
        broker, before = await session_of(stage)
        session = Session(broker)
        await session.answer("connected", "connect", client_version="raw", protocol_version=19)
        await session.answer("producer_success", "producer", topic=TOPIC, producer_id=1)
        of_s = {"topic": TOPIC, "subscription": "s", "initialPosition": 1, "consumer_id": 1}
        await session.answer("success", "subscribe", request_id=2, **of_s)
        data = lone(message(b"x"), sequence_id=0)
        await session.answer("send_receipt", "send", data, producer_id=1, num_messages=1)
        session.ask("flow", consumer_id=1, messagePermits=1)
        id_ = (await session.socket.answer("message")).message_id
        count = 3 * RECEIPTS_MAX
        for number in range(count):
            asked = {"consumer_id": 1, "ack_type": 0, "message_id": [id_]}
            session.ask("ack", request_id=number, **asked)
        assert not session.socket.is_reading()
        answers = [await session.socket.answer("ack_response") for _ in range(count)]
        assert [answer.request_id for answer in answers] == list(range(count))
        assert session.socket.is_reading()
        for gone in (before, session):
            gone.connection.connection_lost(None)
        await broker.seal()

    play(main)


@pytest.mark.parametrize("receipt", ["durable", "memory"])
def test_a_receipt_waits_for_the_store_unless_the_broker_is_set_to_give_it_from_memory(receipt):
    async def main(stage):
        broker, before = await session_of(stage)
        broker.settings = broker.settings.model_copy(update={"ack_receipt": receipt})
        session = Session(broker)
        await session.answer("connected", "connect", client_version="raw", protocol_version=19)
        await session.answer("producer_success", "producer", topic=TOPIC, producer_id=1)
        of_s = {"topic": TOPIC, "subscription": "s", "initialPosition": 1, "consumer_id": 1}
        await session.answer("success", "subscribe", request_id=2, **of_s)
        data = lone(message(b"x"), sequence_id=0)
        await session.answer("send_receipt", "send", data, producer_id=1, num_messages=1)
        session.ask("flow", consumer_id=1, messagePermits=1)
        id_ = (await session.socket.answer("message")).message_id
        asked_s = asyncio.get_running_loop().time()
        asked = {"consumer_id": 1, "ack_type": 0, "message_id": [id_], "request_id": 3}
        answer = await session.answer("ack_response", "ack", **asked)
        assert not answer.HasField("error")
        assert (asyncio.get_running_loop().time() == asked_s) is (receipt == "memory")
        for gone in (before, session):
            gone.connection.connection_lost(None)
        await broker.seal()

    play(main)
