"""Policies set by the admin API are enforced on clients: Pulsar's own client meets each of them."""

import time
import uuid
from datetime import timedelta

import pulsar
import pytest

from spark_ledger import errors
from spark_ledger.metadata.store_calls import store_now_ms
from spark_ledger.topic.upkeep.admin import retain
from tests.integration.pulsar_clients import TIMEOUT_MS, ask, connected, sealed
from tests.kit.processes import eventually

SHARED = pulsar.ConsumerType.Shared
EARLIEST = pulsar.InitialPosition.Earliest
SOON_MS = 1000
HOUR_MS = 3_600_000


@pytest.fixture
def space(cluster):
    """A namespace that no other test has, by its path."""
    path = f"public/n{uuid.uuid4().hex}"
    assert ask(cluster.admin_url, "PUT", f"namespaces/{path}") == (204, None)
    return path


def outcome(act):
    """The name of Pulsar's error, or what `act` returns."""
    try:
        return act()
    except pulsar.PulsarException as refused:
        return type(refused).__name__


@pytest.mark.parametrize("level", ["topic", "namespace"])
def test_limits_hold_for_the_client_that_comes_next_and_end_with_their_policy(
    cluster, client, space, level
):
    url, name = cluster.admin_url, f"persistent://{space}/t"
    assert ask(url, "PUT", f"persistent/{space}/t") == (204, None)
    client.create_producer(name).close()  # the broker has the topic open from now on

    def path(of_topic, of_namespace):
        of = {"topic": f"persistent/{space}/t/{of_topic}"}
        return of.get(level, f"namespaces/{space}/{of_namespace}")

    def limited(policy, body, act, error):
        """`act` is refused while the policy counts."""
        assert ask(url, "POST", policy, body) == (204, None)
        assert outcome(act) == error
        assert ask(url, "DELETE", policy) == (204, None)
        return act()

    def produce():
        return client.create_producer(name)

    def of(subscription):
        return lambda: client.subscribe(name, subscription, SHARED)

    produce()
    limited(path("maxProducers", "maxProducersPerTopic"), 1, produce, "ProducerBusy")
    of("s")()
    each = path("maxConsumersPerSubscription", "maxConsumersPerSubscription")
    limited(each, 1, of("s"), "ConsumerBusy")
    assert ask(url, "POST", each, 2) == (204, None)
    assert outcome(of("s")) == "ConsumerBusy"
    client.subscribe(name, "other", SHARED)  # another subscription has its own limit
    limited(path("maxConsumers", "maxConsumersPerTopic"), 3, of("other"), "ConsumerBusy")
    subscriptions = path("maxSubscriptionsPerTopic", "maxSubscriptionsPerTopic")
    limited(subscriptions, 2, of("third"), "NotAllowedError")
    none = {"allowAutoSubscriptionCreation": False}
    policy = path("autoSubscriptionCreation", "autoSubscriptionCreation")
    assert ask(url, "POST", policy, none) == (204, None)
    with connected(cluster.broker_url, operation_timeout_seconds=2) as hurried:
        # Pulsar's client asks again after SubscriptionNotFound, until its time is over
        assert outcome(lambda: hurried.subscribe(name, "fourth")) == "Timeout"
    assert "fourth" not in ask(url, "GET", f"persistent/{space}/t/subscriptions")[1]
    client.create_reader(name, pulsar.MessageId.earliest)


def test_a_consumer_gets_no_more_messages_than_it_may_hold(cluster, client, name):
    policy = f"persistent/public/default/{name}/maxUnackedMessagesOnConsumer"
    producer = client.create_producer(name, batching_enabled=False)
    client.subscribe(name, "s", SHARED, initial_position=EARLIEST).close()
    for number in range(20):
        producer.send(b"%d" % number)
    assert ask(cluster.admin_url, "POST", policy, 4) == (204, None)
    consumer = client.subscribe(name, "s", SHARED)
    held = [consumer.receive(TIMEOUT_MS) for _ in range(4)]
    assert outcome(lambda: consumer.receive(SOON_MS)) == "Timeout"
    for message in held:
        consumer.acknowledge(message)
    assert consumer.receive(TIMEOUT_MS).data() == b"4"
    assert ask(cluster.admin_url, "POST", policy, 0) == (204, None)
    consumer.close()
    consumer = client.subscribe(name, "s", SHARED)
    assert {int(consumer.receive(TIMEOUT_MS).data()) for _ in range(16)} == set(range(4, 20))


def test_no_client_and_no_query_makes_a_topic_beyond_its_namespaces_limit(
    cluster, client, topics, space
):
    assert ask(cluster.admin_url, "POST", f"namespaces/{space}/maxTopicsPerNamespace", 1)[0] == 204
    client.create_producer(f"persistent://{space}/one").send(b"x")
    assert outcome(lambda: client.create_producer(f"persistent://{space}/two")) == "NotAllowedError"
    with pytest.raises(errors.BadConfig, match="maximum number of topics"):
        topics.run(topics.client.topics.create(f"{space}/three"))
    assert ask(cluster.admin_url, "GET", f"persistent/{space}")[1] == [f"persistent://{space}/one"]


def test_a_ledger_has_the_quorums_of_its_time(cluster, client, topics, name):
    consumer = client.subscribe(name, "s")  # the broker has the topic open from now on
    quorums = {"bookkeeperEnsemble": 1, "bookkeeperWriteQuorum": 1, "bookkeeperAckQuorum": 1}
    path = f"persistent/public/default/{name}/persistence"
    assert ask(cluster.admin_url, "POST", path, quorums) == (204, None)
    client.create_producer(name).send(b"x")
    consumer.receive(TIMEOUT_MS)
    info = topics.run(topics.client.topics.open(name))
    live = topics.run(topics.client.log(info.id).fold(fresh=True)).partitions[0].live
    record = topics.run(topics.client.ledgers.record(live.ledger_id)).record
    assert (record.ensemble_size, record.write_quorum, record.ack_quorum) == (1, 1, 1)


def test_without_retention_rows_go_that_every_subscription_has_passed(
    cluster, client, topics, name
):
    path = f"persistent/public/default/{name}/retention"
    producer, consumer = client.create_producer(name), client.subscribe(name, "s")
    info = topics.run(topics.client.topics.open(name))
    sent = producer.send(b"passed")
    sealed(topics, name)
    while consumer.receive(TIMEOUT_MS).message_id().entry_id() == sent.entry_id():
        pass
    consumer.acknowledge_cumulative(sent)

    def trimmed():
        """How many rows retention would take away, two hours from now: rows stay for an hour."""
        later_ms = topics.run(store_now_ms(topics.client.store)) + 2 * HOUR_MS
        return topics.run(retain(topics.client, info, None, later_ms)).rows

    assert trimmed() == 0
    none = {"retentionTimeInMinutes": 0, "retentionSizeInMB": 0}
    assert ask(cluster.admin_url, "POST", path, none) == (204, None)
    consumer.close()
    assert eventually(lambda: trimmed() > 0)
    keeps = {"retentionTimeInMinutes": 600, "retentionSizeInMB": -1}
    assert ask(cluster.admin_url, "POST", path, keeps) == (204, None)
    assert trimmed() == 0


# -- rates and delays ------------------------------------------------------------------------------


def seconds_of(act):
    began_s = time.monotonic()
    act()
    return time.monotonic() - began_s


@pytest.mark.parametrize("kind", [SHARED, pulsar.ConsumerType.Exclusive])
@pytest.mark.parametrize("policy", ["dispatchRate", "subscriptionDispatchRate"])
def test_consumers_get_messages_at_the_rate_of_the_policy(cluster, client, name, policy, kind):
    producer = client.create_producer(name, batching_enabled=False)
    for _ in range(30):
        producer.send_async(b"x", lambda *_: None)
    producer.flush()
    rate = {"dispatchThrottlingRateInMsg": 10, "ratePeriodInSecond": 1}
    path = f"persistent/public/default/{name}/{policy}"
    assert ask(cluster.admin_url, "POST", path, rate) == (204, None)

    def receive_all(subscription):
        consumer = client.subscribe(name, subscription, kind, initial_position=EARLIEST)
        for _ in range(30):
            consumer.receive(TIMEOUT_MS)
        consumer.close()

    assert seconds_of(lambda: receive_all("a")) > 1.8  # ten at once, ten a second
    assert ask(cluster.admin_url, "DELETE", path) == (204, None)
    assert seconds_of(lambda: receive_all("b")) < 1.8


def test_producers_send_at_the_rate_of_the_policy(cluster, client, name):
    def send_all():
        producer = client.create_producer(name, batching_enabled=False)
        for _ in range(30):
            producer.send(b"x")
        producer.close()

    send_all()
    path = f"persistent/public/default/{name}/publishRate"
    assert ask(cluster.admin_url, "POST", path, {"publishThrottlingRateInMsg": 10}) == (204, None)
    assert seconds_of(send_all) > 1.8
    assert ask(cluster.admin_url, "DELETE", path) == (204, None)
    assert seconds_of(send_all) < 1.8


def test_a_consumer_subscribes_as_often_as_the_policy_says(cluster, client, name):
    path = f"persistent/public/default/{name}/subscribeRate"
    client.create_producer(name).close()
    rate = {"subscribeThrottlingRatePerConsumer": 1, "ratePeriodInSecond": 3600}
    assert ask(cluster.admin_url, "POST", path, rate) == (204, None)

    def subscribe(consumer):
        with connected(cluster.broker_url) as other:  # consumer ids begin again
            other.subscribe(name, "s", SHARED, consumer_name=consumer)

    subscribe("a")
    assert outcome(lambda: subscribe("a")) == "NotAllowedError"
    subscribe("b")
    assert ask(cluster.admin_url, "DELETE", path) == (204, None)
    subscribe("a")


def test_delays_are_as_long_as_the_policy_says(cluster, client, name):
    path = f"persistent/public/default/{name}/delayedDelivery"
    client.create_producer(name).close()
    delays = {"active": False, "tickTime": 1000, "maxDeliveryDelayInMillis": 60_000}
    assert ask(cluster.admin_url, "POST", path, delays) == (204, None)
    producer, consumer = client.create_producer(name), client.subscribe(name, "s", SHARED)
    hour, minute = (timedelta(milliseconds=ms) for ms in (HOUR_MS, 60_000))
    assert outcome(lambda: producer.send(b"x", deliver_after=hour)) == "ChecksumError"
    producer.send(b"x", deliver_after=minute)
    assert consumer.receive(TIMEOUT_MS).data() == b"x"
