"""Deduplication as Pulsar's own client meets it, which names no batch's highest sequence id."""

import uuid

import pulsar

from spark_ledger.topic import blocking
from spark_ledger.topic.log.policies import TopicPolicies
from tests.integration.pulsar_clients import TIMEOUT_MS, connected


def test_a_producer_goes_on_after_the_last_message_of_its_last_batch(cluster):
    name, topics = f"t-{uuid.uuid4()}", blocking.topics(cluster.service_url)
    topics.run(topics.client.topics.create(name, 1, TopicPolicies(deduplication=True)))
    for _ in range(2):  # the second sends all of the first's again, and no more
        with connected(cluster.broker_url) as client:
            producer = client.create_producer(
                name, "me", batching_enabled=True, batching_max_publish_delay_ms=1000
            )
            for i in range(1, 51):
                producer.send_async(b"%d" % i, lambda *_: None, sequence_id=i)
            producer.flush()
    with connected(cluster.broker_url) as client:
        assert client.create_producer(name, "me").last_sequence_id() == 50
        reader = client.create_reader(name, pulsar.MessageId.earliest)
        found = []
        while reader.has_message_available():
            found.append(int(reader.read_next(TIMEOUT_MS).data()))
    assert found == list(range(1, 51))
