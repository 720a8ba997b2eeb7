"""Brokers without ZooKeeper: one that alone is cut off lets go what another has taken; where it is
down for all, all serve on."""

import threading
import time
import uuid
from itertools import pairwise

import pulsar
import pytest

from spark_ledger.local import LocalCluster
from spark_ledger.local.processes import LocalBroker
from tests.integration.broker_stage import Stage
from tests.integration.proxy import Proxy
from tests.integration.pulsar_clients import TIMEOUT_MS, connected
from tests.kit.processes import eventually

LET_GO_S = 5.0
"""After the fence; and so long the next look of a client takes at most."""
SESSION_S = 10.0


@pytest.fixture(scope="module")
def bookies():
    """A cluster in which no broker runs but a test's own."""
    with LocalCluster(bookies=3, autorecovery=False) as cluster:
        yield cluster


@pytest.fixture
def through(bookies):
    with Proxy(int(bookies.zookeeper.address.rpartition(":")[2])) as proxy:
        yield proxy


@pytest.fixture
def stage(bookies, through, tmp_path):
    """The other broker reaches ZooKeeper by the proxy."""
    urls = bookies.service_url, f"zk://{through.address}/ledger"
    brokers = [LocalBroker(tmp_path / f"{i}.log", url) for i, url in enumerate(urls)]
    try:
        for broker in brokers:
            broker.start()
        yield Stage(bookies, brokers, f"t-{uuid.uuid4()}")
    finally:
        through.heal()
        for broker in brokers:
            broker.stop()


def spread(stage):
    """Each partition has an owner, and both brokers have some; by partition the URL."""
    with connected(stage.hosts) as client:
        stage.send(client, 40)
    both = {stage.first.url, stage.other.url}
    assert eventually(lambda: set(stage.owners().values()) == both)
    return stage.owners()


class Sending(threading.Thread):
    """A producer that sends one message after the other; notes when each had its receipt."""

    def __init__(self, url, topic, *, operation_s=5):
        super().__init__(daemon=True)
        self.client = pulsar.Client(url, operation_timeout_seconds=operation_s)
        self.producer = self.client.create_producer(topic, send_timeout_millis=30_000)
        self.receipts, self.stopping = [], threading.Event()
        self.start()

    def run(self):
        while not self.stopping.is_set():
            self.producer.send(b"%d" % len(self.receipts))
            self.receipts.append(time.monotonic())
            time.sleep(0.01)

    def stop(self):
        self.stopping.set()
        self.join()
        self.client.close()

    @property
    def longest_s(self):
        return max(after - before for before, after in pairwise(self.receipts))


def values(url, topic, count):
    with connected(url) as client:
        reader = client.create_reader(topic, pulsar.MessageId.earliest)
        found = []
        while len(found) < count or reader.has_message_available():
            found.append(reader.read_next(TIMEOUT_MS).data())
        return found


def test_a_broker_cut_off_from_zookeeper_sends_away_the_clients_of_what_another_took(
    stage, through
):
    owners = spread(stage)
    mine = [number for number, url in owners.items() if url == stage.other.url]
    quiet, busy = (f"{stage.name}-partition-{number}" for number in mine[:2])
    with connected(stage.hosts) as client:
        consumer = client.subscribe(quiet, "s", consumer_type=pulsar.ConsumerType.Failover)
        with connected(stage.other.url) as before:
            before.create_producer(quiet).send(b"opens a ledger there")
        consumer.acknowledge(consumer.receive(TIMEOUT_MS))
        sending = Sending(stage.hosts, busy)
        try:
            assert eventually(lambda: len(sending.receipts) > 10)
            through.cut()
            taken = eventually(lambda: stage.owners()[mine[0]] == stage.first.url, 30)
            assert taken, "its session ends"
            began_s = time.monotonic()
            with connected(stage.first.url) as other:
                other.create_producer(quiet).send(b"sent to the new owner")
            while consumer.receive(TIMEOUT_MS).data() != b"sent to the new owner":
                pass  # what was acknowledged without the store comes again
            took_s = time.monotonic() - began_s
            print(f"its consumer is at the new owner after {took_s:.1f} s")
            assert took_s < LET_GO_S + 2.0
            count = len(sending.receipts)
            assert eventually(lambda: len(sending.receipts) > count + 10)
            print(f"its producer waited for {sending.longest_s:.1f} s")
            through.heal()
            count = len(sending.receipts)
            assert eventually(lambda: len(sending.receipts) > count + 10)
        finally:
            sending.stop()
    assert stage.other.running
    sent = {b"%d" % i for i in range(len(sending.receipts))}
    assert sent <= set(values(stage.first.url, busy, len(sent)))


@pytest.mark.parametrize("down_s", [1.5 * SESSION_S, pytest.param(120.0, marks=pytest.mark.slow)])
def test_while_zookeeper_is_down_for_all_every_broker_serves_on(bookies, stage, down_s):
    owners = spread(stage)
    topics = [f"{stage.name}-partition-{number}" for number in owners]
    both = [
        next(name for name, url in zip(topics, owners.values(), strict=True) if url == of)
        for of in (stage.first.url, stage.other.url)
    ]
    producers = [Sending(stage.hosts, name) for name in both]
    try:
        assert eventually(lambda: all(len(one.receipts) > 10 for one in producers))
        with connected(stage.hosts) as client:
            consumer = client.subscribe(both[0], "s")
            bookies.zookeeper.kill()
            until_s = time.monotonic() + down_s
            received = 0
            while time.monotonic() < until_s:
                consumer.acknowledge(consumer.receive(TIMEOUT_MS))
                received += 1
            assert received > down_s
            bookies.zookeeper.start()
            until_s = time.monotonic() + SESSION_S + LET_GO_S
            while time.monotonic() < until_s:
                consumer.acknowledge(consumer.receive(TIMEOUT_MS))
    finally:
        for one in producers:
            one.stop()
    longest_s = max(one.longest_s for one in producers)
    print(f"the longest wait for a receipt: {longest_s:.2f} s")
    for one, name in zip(producers, both, strict=True):
        sent = {b"%d" % i for i in range(len(one.receipts))}
        assert sent <= set(values(stage.first.url, name, len(sent)))
    assert longest_s < 1.0


@pytest.mark.slow
def test_a_client_that_asks_for_a_topic_while_zookeeper_is_down_keeps_its_producers(bookies, stage):
    """A client with a partitioned topic asks every minute. This client has one connection for all,
    since its service URL is the broker's."""
    sending = Sending(stage.first.url, f"{stage.name}-alone", operation_s=30)
    try:
        assert eventually(lambda: len(sending.receipts) > 10)
        bookies.zookeeper.kill()
        ask = sending.client.get_topic_partitions
        asking = threading.Thread(target=ask, args=[f"{stage.name}-other"], daemon=True)
        asking.start()  # the broker refuses within some 15 s, and the client asks again
        until_s = time.monotonic() + 2 * SESSION_S
        assert eventually(lambda: sending.receipts[-1] > until_s, 3 * SESSION_S)
    finally:
        bookies.zookeeper.start()
    asking.join()
    sending.stop()
    assert sending.longest_s < 1.0
