"""What one client asks for together is taken in steps that are bounded, in its order."""

import asyncio
from collections import Counter
from types import SimpleNamespace

from spark_ledger.broker.dispatch.acking import ACK_STEPS_MAX, AckHandler, ConnectedConsumer
from spark_ledger.broker.dispatch.dispatcher import Consumer
from spark_ledger.broker.dispatch.subscriptions import Subscription
from spark_ledger.broker.serve.commands import refusal_of
from spark_ledger.broker.wire.commands import AckType, MessageId, SubscriptionType, command
from spark_ledger.broker.wire.frames import PulsarFrameReader, encode
from tests.kit.waiting import until
from tests.unit.spark_ledger.broker.connections import Tail, connected


def acks_of(count, request_id):
    ids = [MessageId(ledgerId=7, entryId=i) for i in range(count)]
    return command("ack", consumer_id=1, ack_type=0, request_id=request_id, message_id=ids)


def test_acknowledging_many_ids_is_done_in_bounded_steps_before_what_comes_after_it():
    async def main():
        async with connected() as (connection, _):
            given, steps, moved, redelivered, turns = 3 * ACK_STEPS_MAX, [], [], [], [0]

            def acknowledge(*_):
                steps.append(turns[0])
                yield True

            def redeliver(*_):
                redelivered.append(len(steps))

            dispatcher = SimpleNamespace(acknowledge=acknowledge, redeliver=redeliver)
            dispatcher.acknowledge_lone = lambda _, ack: ack.message_id
            dispatcher.save_position = lambda: moved.append(len(steps))
            dispatcher.when_durable = lambda receipt: receipt(None)
            consumer = SimpleNamespace(id=1, dispatcher=dispatcher)
            connection.client.consumers[1] = ConnectedConsumer(consumer, None, "s")
            connection.client.connected = True
            asked = encode(command("redeliver", consumer_id=1))
            connection.data_received(encode(acks_of(given, 1)) + encode(acks_of(3, 2)) + asked)
            assert not connection.is_read
            async with asyncio.timeout(30):
                while not redelivered:
                    await asyncio.sleep(0)
                    turns[0] += 1
            assert moved == [given, given + 3]
            assert redelivered == [given + 3]
            assert max(Counter(steps).values()) <= ACK_STEPS_MAX + 3
            await until(lambda: connection.is_read)
            connection.client.consumers.clear()
            connection.close()

    asyncio.run(main())


def test_an_ack_whose_sets_have_many_stretches_is_carried_out_in_bounded_steps():
    async def main():
        async with connected() as (connection, _):
            dispatcher = Subscription("s", SubscriptionType.EXCLUSIVE, None).dispatcher(Tail(), 0)
            consumer = Consumer(connection, 1, "a", 0, dispatcher, lambda _: None)
            consumer.sent.note(0, 20_000)
            steps, turns = [], [0]
            dispatcher.acks.add = lambda lo, hi: steps.append(turns[0]) is None
            dispatcher.partition.end = 1 << 40
            moved = []
            dispatcher.save_position = lambda: moved.append(len(steps))
            connection.client.consumers[1] = ConnectedConsumer(consumer, None, "s")
            connection.client.connected = True
            ack = command("ack", consumer_id=1, ack_type=AckType.INDIVIDUAL)
            for _ in range(3):
                message_id = ack.ack.message_id.add(ledgerId=77, entryId=0)
                message_id.ack_set.extend([0x5555555555555555] * 313)
            connection.data_received(encode(ack))
            async with asyncio.timeout(30):
                while not moved:
                    await asyncio.sleep(0)
                    turns[0] += 1
            assert len(steps) == 30_000
            assert max(Counter(steps).values()) <= ACK_STEPS_MAX
            connection.client.consumers.clear()
            connection.close()
            consumer.dispatcher.leave(consumer)

    asyncio.run(main())


def test_an_ack_of_ids_that_acknowledge_nothing_is_carried_out_in_bounded_steps():
    """Of batches that were not sent to the consumer: a set of theirs is not believed."""

    async def main():
        async with connected() as (connection, _):
            dispatcher = Subscription("s", SubscriptionType.EXCLUSIVE, None).dispatcher(Tail(), 0)
            consumer = Consumer(connection, 1, "a", 0, dispatcher, lambda _: None)
            looked, turns, plain = [], [0], consumer.sent.message_count
            consumer.sent.message_count = lambda *of: looked.append(turns[0]) or plain(*of)
            connection.client.consumers[1] = ConnectedConsumer(consumer, None, "s")
            connection.client.connected = True
            ack = command("ack", consumer_id=1, ack_type=AckType.INDIVIDUAL)
            for entry_id in range(5 * ACK_STEPS_MAX):
                ack.ack.message_id.add(ledgerId=77, entryId=entry_id).ack_set.append(1)
            connection.data_received(encode(ack))
            async with asyncio.timeout(30):
                while connection.client.ack_handler.is_busy:
                    await asyncio.sleep(0)
                    turns[0] += 1
            assert len(looked) == 5 * ACK_STEPS_MAX
            assert max(Counter(looked).values()) <= ACK_STEPS_MAX
            connection.client.consumers.clear()
            connection.close()
            consumer.dispatcher.leave(consumer)

    asyncio.run(main())


def test_after_a_defect_in_an_ack_its_connection_is_read_again():
    def acknowledge(*_):
        yield from [False] * ACK_STEPS_MAX

    def send(_):
        raise RuntimeError("a defect")

    async def main():
        dispatcher = SimpleNamespace(acknowledge=acknowledge)
        dispatcher.acknowledge_lone = lambda _, ack: ack.message_id
        consumer, idle = SimpleNamespace(id=1, dispatcher=dispatcher), asyncio.Event()
        ack_handler = AckHandler(
            {1: ConnectedConsumer(consumer, None, "s")}, send, refusal_of, idle.set
        )
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        ack_handler.add(acks_of(1, 1).ack)
        assert ack_handler.is_busy
        async with asyncio.timeout(10):
            await idle.wait()
        assert not ack_handler.is_busy

    asyncio.run(main())


def test_of_requests_that_come_together_no_more_are_begun_than_may_be_under_way(monkeypatch):
    monkeypatch.setattr("spark_ledger.broker.serve.client.REQUESTS_MAX", 10)

    async def main():
        async with connected() as (connection, client):
            under_way, most, go_on = [], [], asyncio.Event()

            async def names_in(_):
                under_way.append(1)
                most.append(len(under_way))
                await go_on.wait()
                under_way.pop()
                return []

            connection.client.broker.catalog = SimpleNamespace(names_in=names_in)
            connection.client.connected = True
            asked = [
                encode(command("topics_of_namespace", namespace="a/b", request_id=number))
                for number in range(50)
            ]
            connection.data_received(b"".join(asked))
            await asyncio.sleep(0)
            assert (max(most), connection.is_read) == (10, False)
            go_on.set()
            loop, reader, answers = asyncio.get_running_loop(), PulsarFrameReader(), []
            async with asyncio.timeout(30):
                while len(answers) < 50:
                    answers += reader.feed(await loop.sock_recv(client, 1 << 20))
            numbers = [one.command.topics_of_namespace_response.request_id for one in answers]
            assert numbers == list(range(50))
            assert connection.is_read

    asyncio.run(main())
