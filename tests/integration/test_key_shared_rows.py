"""Rows of Spark, and messages of a producer with the same keys, for a Key_Shared subscription, with
Pulsar's own client."""

import time

import pulsar
import pytest

from spark_ledger.broker.dispatch.key_slots import slot_of
from spark_ledger.broker.dispatch.slot_owners import EvenSlots
from tests.integration.pulsar_clients import TIMEOUT_MS, connected, write

KEYS = [f"key {i}" for i in range(24)]
SOON_MS = 300
POLL_MS = 5


@pytest.fixture(scope="module")
def clients(cluster):
    """Two connections."""
    with connected(cluster.broker_url) as one, connected(cluster.broker_url) as other:
        yield one, other


def subscribed(client, name, **options):
    start = pulsar.InitialPosition.Earliest
    kind = pulsar.ConsumerType.KeyShared
    options = {"receiver_queue_size": 300, "negative_ack_redelivery_delay_ms": 100, **options}
    return client.subscribe(name, "s", kind, initial_position=start, **options)


def written(topics, name, rows):
    """Rows that Spark writes: they have the keys in turns, and their numbers as values."""
    keys = [KEYS[i % len(KEYS)].encode() for i in rows]
    write(topics, name, [b"%d" % i for i in rows], keys)


def received(consumers, count):
    """What each consumer gets until so many messages came, and soon after that, acknowledged. They
    come without a break of a minute, at whatever rate the machine has. A consumer without messages
    is left at once: the others, whose queues hold 300 messages, are full meanwhile."""
    messages, came, until_s = [[] for _ in consumers], 0, time.monotonic() + TIMEOUT_MS / 1000
    while came < count:
        assert time.monotonic() < until_s, f"{came} of {count}"
        for consumer, of_consumer in zip(consumers, messages, strict=True):
            of_consumer += drained(consumer, POLL_MS)
        before, came = came, len({m.data() for got in messages for m in got})
        if came > before:
            until_s = time.monotonic() + TIMEOUT_MS / 1000
    for consumer, of_consumer in zip(consumers, messages, strict=True):
        of_consumer += drained(consumer)
    return messages


def drained(consumer, wait_ms=SOON_MS):
    """What comes without a break of so many milliseconds, acknowledged."""
    messages = []
    while True:
        try:
            messages.append(consumer.receive(wait_ms))
        except pulsar.Timeout:
            return messages
        consumer.acknowledge(messages[-1])


def places_of(messages):
    """By key the place of the consumer that got it; each key is at one, and in order."""
    places, last = {}, {}
    for place, of_consumer in enumerate(messages):
        for message in of_consumer:
            key, number = message.partition_key(), int(message.data())
            assert places.setdefault(key, place) == place, key
            assert last.get(key, -1) < number, key
            last[key] = number
    return places


def owners_of(places):
    """By key the place that owns its slot, after these joined (a number) or left (below 0)."""
    owners = EvenSlots()
    for place in places:
        owners.leave(~place) if place < 0 else owners.join(place)
    return {key: owners.owner_of(slot_of(key.encode())) for key in KEYS}


def offsets(messages):
    ids = [message.message_id() for of_consumer in messages for message in of_consumer]
    return sorted(id_.entry_id() + max(0, id_.batch_index()) for id_ in ids)


def test_keys_stay_with_their_consumer_whoever_wrote_them_while_consumers_join_and_leave(
    clients, topics, name
):
    consumers = [subscribed(client, name) for client in clients]
    written(topics, name, range(1500))
    messages = received(consumers, 1500)
    assert places_of(messages) == owners_of([0, 1])
    assert offsets(messages) == list(range(1500))

    producer = clients[0].create_producer(name, batching_enabled=False)
    for number, key in enumerate(KEYS):
        producer.send(b"%d" % number, partition_key=key)
    producer.close()
    messages = received(consumers, len(KEYS))
    assert places_of(messages) == owners_of([0, 1])
    assert offsets(messages) == list(range(1500, 1500 + len(KEYS)))

    consumers.append(subscribed(clients[0], name))
    written(topics, name, range(600))
    messages = received(consumers, 600)
    assert places_of(messages) == owners_of([0, 1, 2])
    assert all(messages) and sum(map(len, messages)) == 600

    consumers[0].close()
    written(topics, name, range(600))
    messages = received(consumers[1:], 600)
    left = {key: place - 1 for key, place in owners_of([0, 1, 2, ~0]).items()}
    assert places_of(messages) == left
    assert not any(drained(consumer) for consumer in consumers[1:])
    for consumer in consumers[1:]:
        consumer.close()


def test_a_row_of_spark_that_is_not_acknowledged_comes_again_alone(clients, topics, name):
    consumers = [subscribed(clients[i % 2], name) for i in range(4)]
    written(topics, name, range(48))
    messages = [consumer.receive(TIMEOUT_MS) for consumer in consumers]
    for consumer, message in zip(consumers, messages, strict=True):
        consumer.negative_acknowledge(message)
    again = received(consumers, 48)
    for message, of_consumer in zip(messages, again, strict=True):
        counts = {int(m.data()): m.redelivery_count() for m in of_consumer}
        assert counts[int(message.data())] == 1
    for consumer in consumers:
        consumer.close()


def test_a_consumer_that_takes_nothing_stops_no_other_and_then_gets_all_of_its_own(
    clients, topics, name
):
    consumers = [subscribed(clients[i % 2], name) for i in range(4)]
    *others, still = consumers
    owners = owners_of(range(4))
    its_keys = [key for key in KEYS if owners[key] == 3]
    turns, of_each_key, taken = 8, 500, 0
    for turn in range(turns):
        begin = turn * of_each_key * len(KEYS)
        written(topics, name, range(begin, begin + of_each_key * len(KEYS)))
        count = of_each_key * (len(KEYS) - len(its_keys))
        messages = received(others, count)
        assert places_of(messages) == {key: owners[key] for key in KEYS if key not in its_keys}
        taken += count
    assert taken > 60_000
    messages = received([still], turns * of_each_key * len(its_keys))
    assert places_of(messages).keys() == set(its_keys)
    assert len(offsets(messages)) == turns * of_each_key * len(its_keys)
    for consumer in consumers:
        consumer.close()
