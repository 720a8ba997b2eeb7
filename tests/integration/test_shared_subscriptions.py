"""Several consumers of one subscription, with Pulsar's own client: each message goes to one of
them, and is acknowledged or comes again."""

import time
from collections import Counter
from contextlib import contextmanager

import pulsar
import pytest

from tests.integration.pulsar_clients import TIMEOUT_MS, connected, write

SOON_MS = 300
SHARED = pulsar.ConsumerType.Shared


@pytest.fixture(scope="module")
def clients(cluster):
    """Two connections."""
    with connected(cluster.broker_url) as one, connected(cluster.broker_url) as other:
        yield one, other


def subscribed(client, name, consumer_type=SHARED, **options):
    options.setdefault("initial_position", pulsar.InitialPosition.Earliest)
    return client.subscribe(name, "s", consumer_type, **options)


def sent(client, name, count, first=0, batched=False):
    with closing(client.create_producer(name, batching_enabled=batched)) as producer:
        for i in range(first, first + count):
            producer.send_async(b"%d" % i, lambda result, _: None)
        producer.flush()


@contextmanager
def closing(closable):
    try:
        yield closable
    finally:
        closable.close()


def received(consumers, count, *, acknowledge=True):
    """By message its consumer's place, until so many came; and the messages by place."""
    places, messages, until_s = {}, [[] for _ in consumers], time.monotonic() + TIMEOUT_MS / 1000
    while len(places) < count:
        assert time.monotonic() < until_s, f"{len(places)} of {count}"
        for place, consumer in enumerate(consumers):
            for message in drained(consumer, 20, acknowledge=acknowledge):
                places[int(message.data())] = place
                messages[place].append(message)
    return places, messages


def drained(consumer, wait_ms=SOON_MS, *, acknowledge=True):
    messages = []
    while True:
        try:
            messages.append(consumer.receive(wait_ms))
        except pulsar.Timeout:
            return messages
        if acknowledge:
            consumer.acknowledge(messages[-1])


@pytest.mark.parametrize("batched", [False, True])
def test_four_consumers_share_and_each_message_comes_to_one(clients, name, batched):
    consumers = [subscribed(clients[i % 2], name, receiver_queue_size=10) for i in range(4)]
    for first in range(0, 400, 100):
        sent(clients[0], name, 100, first, batched)
    places, messages = received(consumers, 400)
    assert sorted(places) == list(range(400))
    assert sum(map(len, messages)) == 400, "each comes once"
    assert batched or set(places.values()) == {0, 1, 2, 3}
    assert not any(drained(consumer) for consumer in consumers)
    for consumer in consumers:
        consumer.close()
    again = subscribed(clients[0], name)
    assert not drained(again)
    again.close()


def test_a_message_that_is_not_acknowledged_comes_again_with_its_count(clients, name):
    consumer = subscribed(
        clients[0], name, negative_ack_redelivery_delay_ms=100, receiver_queue_size=5
    )
    sent(clients[0], name, 3)
    counts = Counter()
    while counts != {0: 1, 1: 3, 2: 1}:
        message = consumer.receive(TIMEOUT_MS)
        number = int(message.data())
        assert message.redelivery_count() == counts[number]
        counts[number] += 1
        if number == 1 and counts[1] < 3:
            consumer.negative_acknowledge(message)
        else:
            consumer.acknowledge(message)
    assert not drained(consumer)
    consumer.close()


def test_what_a_consumer_does_not_acknowledge_in_time_comes_again(clients, name):
    consumer = subscribed(clients[0], name, unacked_messages_timeout_ms=10_000)
    sent(clients[0], name, 2)
    first, second = consumer.receive(TIMEOUT_MS), consumer.receive(TIMEOUT_MS)
    consumer.acknowledge(second)
    again = consumer.receive(TIMEOUT_MS)
    assert (again.data(), again.redelivery_count()) == (first.data(), 1)
    consumer.acknowledge(again)
    consumer.close()


def test_messages_of_a_consumer_that_is_closed_come_to_another(clients, name):
    leaving = subscribed(clients[0], name)
    staying = subscribed(clients[1], name)
    sent(clients[0], name, 60)
    places, _ = received([leaving, staying], 60, acknowledge=False)
    theirs = {number for number, place in places.items() if place == 0}
    assert theirs
    leaving.close()
    messages = drained(staying, 1000)
    assert {int(message.data()) for message in messages} == theirs
    assert {message.redelivery_count() for message in messages} == {0}
    staying.close()


def test_a_consumer_that_takes_nothing_stops_no_other(clients, name):
    small = subscribed(clients[0], name, receiver_queue_size=1)
    large = subscribed(clients[1], name, receiver_queue_size=100)
    sent(clients[0], name, 80)
    places, _ = received([large], 78)
    assert len(places) >= 78
    small.close()
    assert len(drained(large, 1000)) == 80 - len(places)
    large.close()


@pytest.mark.parametrize("index_acks", [False, True])
def test_a_batch_is_acknowledged_one_by_one(clients, name, index_acks):
    options = {"batch_index_ack_enabled": index_acks, "receiver_queue_size": 20}
    leaving = subscribed(clients[0], name, **options)
    sent(clients[0], name, 10, batched=True)
    messages = [leaving.receive(TIMEOUT_MS) for _ in range(10)]
    staying = subscribed(clients[1], name, **options)
    for message in messages[::2]:
        leaving.acknowledge(message)
    leaving.close()
    left = [int(message.data()) for message in drained(staying, 1000)]
    assert left == ([1, 3, 5, 7, 9] if index_acks else list(range(10)))
    staying.close()
    again = subscribed(clients[0], name, **options)
    assert not drained(again)
    again.close()


def test_one_type_at_a_time_and_any_type_once_no_consumer_is_there(clients, name):
    types = (pulsar.ConsumerType.Exclusive, pulsar.ConsumerType.Failover, SHARED)
    sent(clients[0], name, len(types))
    for place, kind in enumerate(types):
        consumer = subscribed(clients[0], name, kind)
        for other in types:
            if other is not kind or kind is pulsar.ConsumerType.Exclusive:
                with pytest.raises(pulsar.ConsumerBusy):
                    subscribed(clients[1], name, other)
        message = consumer.receive(TIMEOUT_MS)
        assert int(message.data()) == place
        consumer.acknowledge(message)
        consumer.close()


def test_rows_of_spark_are_shared(clients, topics, name):
    consumers = [subscribed(client, name, receiver_queue_size=500) for client in clients]
    write(topics, name, [b"%d" % i for i in range(2500)])
    _, messages = received(consumers, 2500)
    assert sum(map(len, messages)) == 2500
    for consumer in consumers:
        consumer.close()


def test_a_seek_sends_every_consumer_there(clients, name):
    consumers = [subscribed(client, name) for client in clients]
    sent(clients[0], name, 20)
    received(consumers, 20)
    consumers[0].seek(pulsar.MessageId.earliest)
    places, _ = received(consumers, 20)
    assert len(places) == 20
    for consumer in consumers:
        consumer.close()
