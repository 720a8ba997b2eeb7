"""SUBSCRIBE with the id of a consumer that the client has, that is being made, or that a seek sent
away."""

import asyncio

from spark_ledger.broker.wire.commands import ServerError
from tests.kit.pulsar_batches import lone, message
from tests.unit.spark_ledger.broker.sessions import TOPIC, Session, session_of
from tests.unit.spark_ledger.topic.stage import play

OF_S = {"topic": TOPIC, "subscription": "s", "initialPosition": 1, "consumer_id": 1}


def test_a_consumer_that_is_there_gets_another_success_and_goes_on_where_it_was():
    async def main(stage):
        broker, session = await session_of(stage)
        await session.answer("producer_success", "producer", topic=TOPIC, producer_id=1)
        await session.answer("success", "subscribe", request_id=2, **OF_S)
        data = lone(message(b"x"), sequence_id=0)
        await session.answer("send_receipt", "send", data, producer_id=1, num_messages=1)
        session.ask("flow", consumer_id=1, messagePermits=10)
        await session.socket.answer("message")
        again = await session.answer("success", "subscribe", request_id=3, **OF_S)
        assert again.request_id == 3
        await asyncio.sleep(5)
        assert session.socket.answers.empty(), "the message was sent again"
        session.connection.connection_lost(None)
        await broker.seal()

    play(main)


def test_a_consumer_that_is_being_made_is_asked_for_again_later():
    async def main(stage):
        broker, session = await session_of(stage)
        session.ask("subscribe", request_id=2, **OF_S)
        await asyncio.sleep(0)
        refused = await session.answer("error", "subscribe", request_id=3, **OF_S)
        assert (refused.request_id, refused.error) == (3, ServerError.SERVICE_NOT_READY)
        assert (await session.socket.answer("success")).request_id == 2
        session.connection.connection_lost(None)
        await broker.seal()

    play(main)


def test_a_consumer_that_is_closed_while_it_is_made_leaves_nothing():
    async def main(stage):
        broker, session = await session_of(stage)
        session.ask("subscribe", request_id=2, **OF_S)
        await asyncio.sleep(0)
        closed = await session.answer("success", "close_consumer", consumer_id=1, request_id=3)
        refused = await session.socket.answer("error")
        assert (closed.request_id, refused.request_id) == (3, 2)
        assert not session.connection.client.consumers
        assert not session.connection.client.subscribing
        other = Session(broker)
        await other.answer("connected", "connect", client_version="raw", protocol_version=19)
        await other.answer("success", "subscribe", request_id=2, **OF_S)
        for gone in (session, other):
            gone.connection.connection_lost(None)
        await broker.seal()

    play(main)


def test_a_consumer_that_a_seek_sent_away_is_back_after_the_response_to_the_seek():
    """A client forgets what came before this response: the messages would not come again."""

    async def main(stage):
        broker, session = await session_of(stage)
        await session.answer("producer_success", "producer", topic=TOPIC, producer_id=1)
        await session.answer("success", "subscribe", request_id=2, subType=1, **OF_S)
        data = lone(message(b"x"), sequence_id=0)
        await session.answer("send_receipt", "send", data, producer_id=1, num_messages=1)
        session.ask("seek", consumer_id=1, request_id=3, message_publish_time=0)
        await session.socket.answer("close_consumer")
        session.ask("subscribe", request_id=4, subType=1, **OF_S)
        answers = [await session.socket.answer("success") for _ in range(2)]
        assert [answer.request_id for answer in answers] == [3, 4]
        session.ask("flow", consumer_id=1, messagePermits=10)
        await session.socket.answer("message")
        session.connection.connection_lost(None)
        await broker.seal()

    play(main)


def test_a_consumer_learns_that_it_is_active_some_time_after_the_response_to_its_request():
    async def main(stage):
        broker, session = await session_of(stage)
        loop, answers = asyncio.get_running_loop(), session.socket.answers
        for consumer_id, name in ((1, "a"), (2, "b")):
            asked = {**OF_S, "consumer_id": consumer_id, "consumer_name": name}
            await session.answer("success", "subscribe", request_id=9, subType=2, **asked)
        made_s = loop.time()
        is_active = {}
        while loop.time() < made_s + 5:
            while not answers.empty():
                change = answers.get_nowait().active_consumer_change
                is_active[change.consumer_id] = change.is_active
                assert loop.time() >= made_s + 0.2, "the client does not know the consumer yet"
            await asyncio.sleep(0.05)
        assert is_active == {1: True, 2: False}
        session.connection.connection_lost(None)
        await broker.seal()

    play(main)
