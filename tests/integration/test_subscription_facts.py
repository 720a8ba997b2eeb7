"""What a subscription keeps of the client that made it, and what a consumer learns of itself."""

import pytest

from benchmarks.broker_socket import batch_of
from spark_ledger.broker.wire.commands import ServerError
from tests.integration.pulsar_clients import ask
from tests.integration.pulsar_socket import Socket

EXCLUSIVE, SHARED = 0, 1
TYPES = {EXCLUSIVE: "Exclusive", SHARED: "Shared"}


@pytest.fixture
def link(cluster):
    made = Socket(cluster.broker_url)
    yield made
    made.close()


def with_properties(**properties):
    def prepare(part):
        for key, value in properties.items():
            part.subscription_properties.add(key=key.encode(), value=value.encode())

    return prepare


def kept(topics, name):
    info = topics.run(topics.client.topics.open(name))
    (subscription,) = topics.run(topics.client.subscriptions.list(info.id))
    return dict(subscription.properties)


def test_the_properties_of_a_subscription_are_those_of_the_client_that_made_it(
    link, cluster, topics, name
):
    admin, path = cluster.admin_url, f"persistent/public/default/{name}"

    def shown():
        stats = ask(admin, "GET", f"{path}/stats")[1]["subscriptions"]["s"]
        of_verb = ask(admin, "GET", f"{path}/subscription/s/properties")
        assert of_verb == (200, stats["subscriptionProperties"])
        return of_verb[1]

    link.subscribed(name, SHARED, prepare=with_properties(team="blue", é="ü"))
    assert shown() == kept(topics, name) == {"team": "blue", "é": "ü"}
    link.subscribed(name, SHARED, prepare=with_properties(team="red"), consumer_id=2)
    assert shown() == {"team": "blue", "é": "ü"}
    assert ask(admin, "PUT", f"{path}/subscription/s/properties", {"a": "b"})[0] == 204
    assert shown() == kept(topics, name) == {"a": "b"}
    link.send(name, batch_of(0, 20))  # the consumers are still there
    link.tell("flow", consumer_id=1, messagePermits=1)
    link.taken(1)
    assert link.ask("seek", consumer_id=1, message_publish_time=0)[0] == "success"
    link.subscribed(name, SHARED)
    for consumer_id in (1, 2):
        link.ask("close_consumer", consumer_id=consumer_id)
    assert shown() == kept(topics, name) == {"a": "b"}
    for body, status in (({"a": 1}, 400), ([], 204), (["a"], 400), ({"a": "x" * 20_000}, 412)):
        assert ask(admin, "PUT", f"{path}/subscription/s/properties", body)[0] == status
    assert kept(topics, name) == {}
    made = {"ledgerId": -1, "entryId": -1, "properties": {"by": "admin"}}
    assert ask(admin, "PUT", f"{path}/subscription/s2", made)[0] == 204
    assert ask(admin, "GET", f"{path}/subscription/s2/properties") == (200, {"by": "admin"})
    assert ask(admin, "GET", f"{path}/subscription/s3/properties")[0] == 404


def test_properties_that_are_too_large_are_refused_and_nothing_is_made(link, topics, name):
    answer, part = link.subscribe(name, SHARED, prepare=with_properties(a="x" * 20_000))
    assert (answer, part.error) == ("error", ServerError.NOT_ALLOWED)
    assert "20001 bytes" in part.message
    assert topics.run(topics.client.topics.find(name)) is None


@pytest.mark.parametrize("kind", TYPES)
def test_a_consumer_gets_its_statistics(link, name, kind):
    link.send(name, *(batch_of(0, 20) for _ in range(5)))
    link.subscribed(name, kind, consumer_name="c")
    link.tell("flow", consumer_id=1, messagePermits=3)
    link.taken(3)
    answer, stats = link.ask("consumer_stats", consumer_id=1)
    assert answer == "consumer_stats_response"
    assert not stats.HasField("error_code")
    assert (stats.consumerName, stats.type, stats.msgBacklog) == ("c", TYPES[kind], 5)
    assert (stats.unackedMessages, stats.availablePermits) == (3, 0)
    assert stats.address and stats.connectedSince and not stats.blockedConsumerOnUnackedMsgs


def test_an_unknown_consumer_has_no_statistics(link):
    answer, stats = link.ask("consumer_stats", consumer_id=9)
    assert (answer, stats.error_code) == ("consumer_stats_response", ServerError.CONSUMER_NOT_FOUND)
    assert stats.error_message
