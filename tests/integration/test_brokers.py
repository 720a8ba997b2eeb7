"""Several brokers, each a process: partitions of one topic spread, die with one and go on."""

import json
import re
import signal
import threading
import time
import urllib.request
import uuid
from contextlib import contextmanager, suppress
from itertools import pairwise

import pulsar
import pytest

from spark_ledger.local import LocalCluster
from spark_ledger.local.processes import LocalBroker
from tests.integration.broker_stage import PARTITIONS, Stage
from tests.integration.pulsar_clients import TIMEOUT_MS, ask, connected
from tests.kit.processes import eventually

TAKEN_FOR_DEAD = "does not answer: others take its partitions over"


@pytest.fixture(scope="module")
def bookies():
    """A cluster in which no broker runs but a test's own."""
    with LocalCluster(bookies=3, autorecovery=False) as cluster:
        yield cluster


@pytest.fixture
def stage(bookies, tmp_path):
    brokers = [LocalBroker(tmp_path / f"{i}.log", bookies.service_url) for i in range(2)]
    try:
        for one in brokers:
            one.start()
        yield Stage(bookies, brokers, f"t-{uuid.uuid4()}")
    finally:
        for one in brokers:
            one.stop()  # in good order: the next test's find nothing of theirs


@contextmanager
def stopped(broker):
    broker.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        broker.signal(signal.SIGCONT)


def received(consumer, count):
    found = []
    while len(found) < count:
        message = consumer.receive(TIMEOUT_MS)
        consumer.acknowledge(message)
        found.append(int(message.data()))
    return found


def test_consumers_that_share_a_subscription_have_every_message_when_a_broker_is_killed(stage):
    with connected(stage.hosts) as client, connected(stage.hosts) as other:
        consumers = [
            each.subscribe(
                stage.name,
                "s",
                pulsar.ConsumerType.Shared,
                initial_position=pulsar.InitialPosition.Earliest,
                receiver_queue_size=5,
            )
            for each in (client, other, other)
        ]
        stage.send(client, 60)
        got = set()

        def receive():
            for consumer in consumers:
                with suppress(pulsar.Timeout):
                    message = consumer.receive(100)
                    consumer.acknowledge(message)
                    got.add(int(message.data()))

        assert eventually(lambda: receive() or len(got) >= 20)
        stage.other.kill()
        consumers.pop().close()

        def all_is_acknowledged():
            receive()  # also what was acknowledged at the broker that is gone
            return sum(stage.positions("s").values()) == 60

        assert eventually(all_is_acknowledged)
        assert got == set(range(60))


def test_a_topic_and_its_subscription_are_served_by_two_brokers_and_by_one_when_the_other_dies(
    stage,
):
    with connected(stage.hosts) as client:
        consumer = client.subscribe(
            stage.name, "s", initial_position=pulsar.InitialPosition.Earliest
        )
        stage.send(client, 40)
        both = {stage.first.url, stage.other.url}  # one that was too slow gets its share back later
        assert eventually(lambda: set(stage.owners().values()) == both)
        assert sorted(received(consumer, 40)) == list(range(40))
        assert eventually(lambda: sum(stage.positions("s").values()) == 40)
        (listed,) = stage.topics.run(stage.topics.client.subscriptions.list(stage.info.id))
        assert listed.live
        stage.other.kill()
        assert eventually(lambda: set(stage.owners().values()) == {stage.first.url})
        assert TAKEN_FOR_DEAD in stage.first.log.read_text(), "before the end of its session"
        stage.send(client, 40, first=40)
        assert sorted(received(consumer, 40)) == list(range(40, 80))
        assert eventually(lambda: sum(stage.positions("s").values()) == 80)
        consumer.unsubscribe()
        assert eventually(
            lambda: not stage.topics.run(stage.topics.client.subscriptions.list(stage.info.id))
        )


def test_what_a_hung_broker_had_is_served_by_another_and_it_does_no_harm_when_it_goes_on(stage):
    with connected(stage.hosts) as client:
        stage.send(client, 40)
    before = stage.owners()
    mine = [p for p, url in before.items() if url == stage.other.url]
    with stopped(stage.other):
        assert eventually(lambda: stage.other.url not in stage.owners().values())
        assert TAKEN_FOR_DEAD in stage.first.log.read_text(), "before the end of its session"
        with connected(stage.first.url) as client:
            stage.send(client, 40, first=40)
    # it goes on with the session it had, or without, and learns that others have its partitions
    with connected(stage.hosts) as client:
        stage.send(client, 40, first=80)
        assert {stage.owners()[p] for p in mine} == {stage.first.url}  # it gets a share back later
        reader = client.create_reader(stage.name, pulsar.MessageId.earliest)
        found = [int(reader.read_next(TIMEOUT_MS).data()) for _ in range(120)]
        assert sorted(found) == list(range(120))
        assert not reader.has_message_available()


def test_what_a_broker_that_stops_in_good_order_had_goes_on_at_once(stage):
    sent, stop = [], threading.Event()

    def produce():
        with connected(stage.hosts) as client:
            producer = client.create_producer(
                stage.name,
                message_routing_mode=pulsar.PartitionsRoutingMode.RoundRobinDistribution,
            )
            while not stop.is_set():
                producer.send(b"%d" % len(sent))
                sent.append(time.monotonic())
            producer.close()

    thread = threading.Thread(target=produce)
    thread.start()
    try:
        assert eventually(lambda: len(sent) > 50)
        stage.other.stop()
        count = len(sent)
        assert eventually(lambda: len(sent) > count + 50)
    finally:
        stop.set()
        thread.join()
    gaps = [b - a for a, b in pairwise(sent)]
    assert max(gaps) < 10
    with connected(stage.first.url) as client:
        reader = client.create_reader(stage.name, pulsar.MessageId.earliest)
        found = sorted(int(reader.read_next(TIMEOUT_MS).data()) for _ in range(len(sent)))
        assert found == list(range(len(sent)))


def test_a_service_url_of_http_works_unchanged(stage):
    with connected(stage.first.admin_url) as client:
        consumer = client.subscribe(
            [stage.name], "s", initial_position=pulsar.InitialPosition.Earliest
        )
        stage.send(client, 40)
        both = {stage.first.url, stage.other.url}  # one that was too slow gets its share back later
        assert eventually(lambda: set(stage.owners().values()) == both)
        assert sorted(received(consumer, 40)) == list(range(40))
        alone = client.create_producer(f"{stage.name}-alone")
        alone.send(b"made by naming it")
        pattern = client.subscribe(
            re.compile(f"persistent://public/default/{stage.name}.*"),
            "p",
            initial_position=pulsar.InitialPosition.Earliest,
        )
        assert len([pattern.receive(TIMEOUT_MS) for _ in range(41)]) == 41


def test_a_consumer_that_makes_its_topic_gets_it_from_whichever_broker_it_asks(stage):
    topics = [f"{stage.name}-new-{number}" for number in range(8)]
    with connected(stage.first.url) as client:
        for topic in topics:  # a client that is refused tries until its operation's time is over
            client.subscribe(topic, "s")
    lookups = f"{stage.first.admin_url}/lookup/v2/topic/persistent/public/default"
    owners = set()
    for topic in topics:
        with urllib.request.urlopen(f"{lookups}/{topic}") as response:
            owners.add(json.load(response)["brokerUrl"])
    assert owners == {stage.first.url, stage.other.url}


def test_topics_are_made_in_namespaces_that_are_there_as_these_say(stage):
    topics = stage.topics.client.topics
    stage.topics.run(topics.set_namespace("acme/four", {"auto_create_partitions": 4}))
    stage.topics.run(topics.set_namespace("acme/none", {"auto_create": False}))
    with connected(stage.hosts) as client:
        client.create_producer("persistent://acme/four/t").send(b"x")
        assert len(client.get_topic_partitions("persistent://acme/four/t")) == 4
        for wrong in ("persistent://acme/none/t", "persistent://nobody/has/t", "never-partition-2"):
            with pytest.raises(pulsar.PulsarException):
                client.create_producer(wrong)
    assert stage.topics.run(topics.find("never")) is None


def test_any_broker_shows_what_all_have_and_deletes_no_topic_that_another_one_s_clients_use(stage):
    path = f"persistent/public/default/{stage.name}"
    brokers = stage.first, stage.other
    with connected(stage.hosts) as client:
        client.subscribe(stage.name, "s", consumer_name="eater")
        stage.send(client, 2 * PARTITIONS)
        assert set(stage.owners().values()) == {broker.url for broker in brokers}
        for broker in brokers:
            _, stats = ask(broker.admin_url, "GET", f"{path}/partitioned-stats")
            assert stats["subscriptions"]["s"]["msgBacklog"] == 2 * PARTITIONS
            assert len(stats["subscriptions"]["s"]["consumers"]) == PARTITIONS
            assert len(stats["partitions"]) == PARTITIONS
            assert ask(broker.admin_url, "DELETE", f"{path}/partitions")[0] == 412
            for number in range(3):
                _, stats = ask(broker.admin_url, "GET", f"{path}-partition-{number}/stats")
                (consumer,) = stats["subscriptions"]["s"]["consumers"]
                assert consumer["consumerName"] == "eater"
    stage.other.stop()
    _, stats = ask(stage.first.admin_url, "GET", f"{path}/partitioned-stats")
    assert stats["subscriptions"]["s"]["msgBacklog"] == 2 * PARTITIONS
    assert eventually(
        lambda: ask(stage.first.admin_url, "DELETE", f"{path}/partitions") == (204, None)
    )
