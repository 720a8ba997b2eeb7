"""What a subscription keeps of the client that made it, and what a consumer learns of itself."""

import pytest

from benchmarks.broker_socket import batch_of
from spark_ledger.broker.dispatch.key_slots import SLOTS, slot_of
from spark_ledger.broker.wire.commands import MessageId, ServerError
from tests.integration.pulsar_clients import ask
from tests.integration.pulsar_socket import Socket

EXCLUSIVE, SHARED, FAILOVER, KEY_SHARED = range(4)
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


@pytest.mark.parametrize("kind", [EXCLUSIVE, SHARED, FAILOVER, KEY_SHARED])
def test_a_consumer_learns_that_it_has_all_of_a_terminated_topic(link, cluster, name, kind):
    ledger = link.send(name, *(batch_of(0, 20) for _ in range(2)))
    link.subscribed(name, kind)
    link.tell("flow", consumer_id=1, messagePermits=9)
    link.taken(2)
    terminate = f"persistent/public/default/{name}/terminate"
    assert ask(cluster.admin_url, "POST", terminate)[0] in (200, 204)
    ids = [MessageId(ledgerId=ledger, entryId=entry) for entry in range(2)]
    link.tell("ack", consumer_id=1, ack_type=0, message_id=ids)
    assert link.until("reached_end_of_topic").consumer_id == 1


def test_a_reader_of_ranges_of_keys_gets_only_their_messages(link, name):
    keys = [f"key-{number}" for number in range(20)]
    link.send(name, *(batch_of(0, 20, key=key) for key in keys))

    def low_half(part):
        part.keySharedMeta.keySharedMode = 1
        part.keySharedMeta.hashRanges.add(start=0, end=SLOTS // 2 - 1)

    link.subscribed(name, EXCLUSIVE, "r", low_half, durable=False)
    link.tell("flow", consumer_id=1, messagePermits=100)
    expected = [at for at, key in enumerate(keys) if slot_of(key.encode()) < SLOTS // 2]
    assert 0 < len(expected) < len(keys)
    assert [message.message_id.entryId for message in link.taken(len(expected))] == expected
    link.until_served()
    assert not link.messages


@pytest.mark.parametrize("kind", [EXCLUSIVE, FAILOVER])
def test_messages_have_the_epoch_of_the_consumer_that_asked_for_everything_again(link, name, kind):
    link.send(name, batch_of(0, 20))
    link.subscribed(name, kind, consumer_epoch=3)
    link.tell("flow", consumer_id=1, messagePermits=9)
    assert link.taken(1)[0].consumer_epoch == 3
    link.tell("redeliver", consumer_id=1, consumer_epoch=4)
    assert link.taken(1)[0].consumer_epoch == 4


def test_a_producer_makes_the_subscription_that_it_names_at_the_first_message(link, topics, name):
    link.send(name, batch_of(0, 20))
    answer, _ = link.ask("producer", topic=name, producer_id=2, initial_subscription_name="s")
    assert answer == "producer_success"
    assert kept(topics, name) == {}  # there is one subscription
    link.subscribed(name, SHARED, initialPosition=0)
    link.tell("flow", consumer_id=1, messagePermits=9)
    assert link.taken(1)[0].message_id.entryId == 0


def test_a_forced_unsubscribe_sends_the_other_consumers_away(link, cluster, topics, name):
    other = Socket(cluster.broker_url)
    link.subscribed(name, SHARED)
    other.subscribed(name, SHARED, consumer_id=7)
    error, message = link.refused("unsubscribe", consumer_id=1)
    assert (error, "other consumers" in message) == (ServerError.METADATA, True)
    assert link.ask("unsubscribe", consumer_id=1, force=True)[0] == "success"
    assert other.until("close_consumer").consumer_id == 7
    info = topics.run(topics.client.topics.open(name))
    assert topics.run(topics.client.subscriptions.list(info.id)) == []
    other.close()
