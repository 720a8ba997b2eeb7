"""Topics whose messages are only in memory, by Pulsar's own client at a real broker."""

import uuid

import pulsar
import pytest

from spark_ledger import errors
from tests.integration.pulsar_clients import TIMEOUT_MS, ask
from tests.kit.processes import eventually


@pytest.fixture
def topic():
    return f"non-persistent://public/default/n{uuid.uuid4().hex[:8]}"


def test_consumers_of_each_type_and_a_reader_get_what_comes_while_they_are_there(
    client, cluster, topics, topic
):
    producer = client.create_producer(topic)
    producer.send(b"before")
    kinds = pulsar.ConsumerType
    consumers = [
        client.subscribe(topic, kind.name, kind)
        for kind in (kinds.Exclusive, kinds.Failover, kinds.Shared, kinds.KeyShared)
    ]
    reader = client.create_reader(topic, pulsar.MessageId.earliest)
    path = f"non-persistent/{topic.removeprefix('non-persistent://')}"

    def has_all():
        _, stats = ask(cluster.admin_url, "GET", f"{path}/stats")
        subscriptions = stats["subscriptions"].values()
        ready = [c["availablePermits"] > 0 for sub in subscriptions for c in sub["consumers"]]
        return len(ready) == 5 and all(ready)

    assert eventually(has_all)
    sent = [b"%d" % number for number in range(50)]
    for value in sent:
        producer.send(value, partition_key=value.decode())
    for consumer in consumers:
        messages = [consumer.receive(TIMEOUT_MS) for _ in sent]
        assert [message.data() for message in messages] == sent
        for message in messages:
            consumer.acknowledge(message)
    assert [reader.read_next(TIMEOUT_MS).data() for _ in sent] == sent
    for consumer in consumers:
        consumer.unsubscribe()
    with pytest.raises(errors.TopicNameInvalid):
        topics.run(topics.client.topics.open(topic))


def test_partitions_have_their_own_messages(client, cluster, topic):
    path = f"non-persistent/{topic.removeprefix('non-persistent://')}"
    assert ask(cluster.admin_url, "PUT", f"{path}/partitions", 3) == (204, None)
    assert client.get_topic_partitions(topic) == [f"{topic}-partition-{n}" for n in range(3)]
    consumer = client.subscribe(topic, "s", pulsar.ConsumerType.Shared)
    producer = client.create_producer(
        topic, message_routing_mode=pulsar.PartitionsRoutingMode.RoundRobinDistribution
    )

    def ready():
        _, stats = ask(cluster.admin_url, "GET", f"{path}/partitioned-stats")
        consumers = stats["subscriptions"].get("s", {"consumers": []})["consumers"]
        return [one["availablePermits"] > 0 for one in consumers] == [True] * 3

    assert eventually(ready)
    for number in range(30):
        producer.send(b"%d" % number)
    messages = [consumer.receive(TIMEOUT_MS) for _ in range(30)]
    assert {int(message.data()) for message in messages} == set(range(30))
    assert {message.message_id().partition() for message in messages} == {0, 1, 2}
    assert ask(cluster.admin_url, "DELETE", f"{path}/partitions?force=true") == (204, None)
