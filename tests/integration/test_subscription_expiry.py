"""Subscriptions that expire, with Pulsar's own client and a broker that is killed by SIGKILL."""

import pytest

from spark_ledger.local import LocalCluster
from spark_ledger.local.processes import LocalBroker
from spark_ledger.topic import blocking
from spark_ledger.topic.subscription.nodes import brokers_alive
from spark_ledger.topic.upkeep.upkeep import Upkeep
from tests.integration.pulsar_clients import ask, connected
from tests.kit.processes import eventually

POLICY = "namespaces/public/default/subscriptionExpirationTime"


@pytest.fixture
def cluster():
    with LocalCluster(bookies=3, autorecovery=False) as local:
        yield local


def test_a_subscription_expires_once_its_consumers_or_their_broker_have_gone(cluster, tmp_path):
    broker = LocalBroker(tmp_path / "broker.log", cluster.service_url)
    broker.start()
    topics = blocking.topics(cluster.service_url)
    store, subscriptions = topics.client.store, topics.client.subscriptions
    info = topics.run(topics.client.topics.create("t", policies={"subscription_expiry_ms": 1}))
    upkeep = Upkeep(topics.client)

    def names_after_a_pass():
        topics.run(upkeep.once())
        return [item.name for item in topics.run(subscriptions.list(info.id))]

    topics.run(subscriptions.create(info.id, "query"))
    with connected(broker.url) as client:
        client.subscribe("t", "used")
        client.subscribe("t", "left").close()
        assert eventually(lambda: names_after_a_pass() == ["query", "used"])
        broker.kill()
        while topics.run(brokers_alive(store)):
            assert names_after_a_pass() == ["query", "used"]
        assert names_after_a_pass() == ["query", "used"], "a consumer may come back"
    assert names_after_a_pass() == ["query", "used"], "no consumer can come without a broker"
    broker.start()
    assert eventually(lambda: names_after_a_pass() == ["query"])


def test_the_policy_is_set_in_minutes_shown_and_removed(cluster):
    topics, url = blocking.topics(cluster.service_url), cluster.admin_url
    info = topics.run(topics.client.topics.create("t"))
    assert ask(url, "GET", POLICY) == (204, None)
    assert ask(url, "POST", POLICY, 90) == (204, None)
    assert ask(url, "GET", POLICY) == (200, 90)
    opened = topics.run(topics.client.topics.open(info.name.full))
    assert opened.policies.subscription_expiry_ms == 90 * 60_000
    assert ask(url, "POST", POLICY, -1)[0] == 412
    assert ask(url, "DELETE", POLICY) == (204, None)
    assert ask(url, "GET", POLICY) == (204, None)
