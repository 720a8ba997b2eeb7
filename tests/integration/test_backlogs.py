"""Quotas of what subscriptions leave unread, and messages that expire, with Pulsar's own client."""

import pulsar
import pytest

from tests.integration.pulsar_clients import TIMEOUT_MS
from tests.kit.processes import eventually

VALUE = bytes(1000)
NEVER_MS = 3_600_000


def made(topics, name, **policies):
    topics.run(topics.client.topics.create(name, 1, {"partitioned": False, **policies}))


def outcome_of(client, name):
    """The error of making a producer, or the producer."""
    try:
        return client.create_producer(name)
    except pulsar.PulsarException as refused:
        return type(refused).__name__


def position_after_a_producer(client, topics, name, subscription):
    client.create_producer(name).close()
    info = topics.run(topics.client.topics.open(name))
    return topics.run(topics.client.subscriptions.positions(info.id, subscription))[0]


@pytest.mark.parametrize(
    ("on_backlog", "error"),
    [
        ("hold", "ProducerBlockedQuotaExceededError"),
        ("exception", "ProducerBlockedQuotaExceededException"),
    ],
)
def test_producers_wait_until_the_slowest_subscription_has_consumed(
    client, topics, name, on_backlog, error
):
    made(topics, name, backlog_bytes_max=3000, on_backlog=on_backlog)
    consumer = client.subscribe(name, "slow", initial_position=pulsar.InitialPosition.Earliest)
    producer = client.create_producer(name, batching_enabled=False)
    for _ in range(5):
        producer.send(VALUE)
    # a broker judges a producer by a look that is a second old at most
    assert eventually(lambda: outcome_of(client, name) == error)
    for _ in range(5):
        consumer.acknowledge(consumer.receive(TIMEOUT_MS))
    assert eventually(lambda: not isinstance(outcome_of(client, name), str))
    again = client.create_producer(name)
    again.send(b"more")
    assert consumer.receive(TIMEOUT_MS).data() == b"more"


def test_an_eviction_moves_the_slowest_subscription_and_takes_every_producer(client, topics, name):
    made(topics, name, backlog_bytes_max=5000, on_backlog="eviction")
    client.subscribe(name, "slow", initial_position=pulsar.InitialPosition.Earliest).close()
    producer = client.create_producer(name, batching_enabled=False)
    for _ in range(20):
        producer.send(VALUE)
    assert eventually(lambda: position_after_a_producer(client, topics, name, "slow") >= 15)
    left = client.subscribe(name, "slow").receive(TIMEOUT_MS).message_id().entry_id()
    assert 15 <= left < 20


def test_messages_that_are_older_than_their_time_to_live_are_passed_over(client, topics, name):
    made(topics, name, message_ttl_ms=300, backlog_ms_max=NEVER_MS)
    client.subscribe(name, "away", initial_position=pulsar.InitialPosition.Earliest).close()
    producer = client.create_producer(name, batching_enabled=False)
    producer.send(b"old")
    assert eventually(lambda: position_after_a_producer(client, topics, name, "away") == 1)
    consumer = client.subscribe(name, "away")
    producer.send(b"new")
    assert consumer.receive(TIMEOUT_MS).data() == b"new"
