"""The admin API by real HTTP, with Pulsar's own client beside it."""

import json
import urllib.request
import uuid
from datetime import timedelta

import pulsar
import pytest

from tests.integration.pulsar_clients import TIMEOUT_MS, ask, connected
from tests.kit.processes import eventually


def test_a_namespace_and_its_topics_are_made_used_shown_and_deleted(cluster):
    url, tenant = cluster.admin_url, f"t{uuid.uuid4().hex}"
    space = f"{tenant}/n"
    topic = f"persistent/{space}/p"
    assert ask(url, "GET", f"namespaces/{space}")[0] == 404
    allowed = {"adminRoles": [], "allowedClusters": ["standalone"]}
    assert ask(url, "PUT", f"tenants/{tenant}", allowed) == (204, None)
    assert ask(url, "PUT", f"namespaces/{space}", {"deduplicationEnabled": True}) == (204, None)
    assert ask(url, "PUT", f"{topic}/partitions", 2) == (204, None)
    assert ask(url, "PUT", f"{topic}/partitions", 2)[0] == 409

    with connected(cluster.broker_url) as client:
        full = f"persistent://{space}/p"
        assert len(client.get_topic_partitions(full)) == 2
        consumer = client.subscribe(full, "s", properties={"of": "test"}, consumer_name="eater")
        producer = client.create_producer(full, producer_name="maker", properties={"k": "v"})
        for number in range(4):
            producer.send(b"%d" % number)
        _, stats = ask(url, "GET", f"{topic}/partitioned-stats")
        subscription = stats["subscriptions"]["s"]
        assert subscription["msgBacklog"] == 4 and subscription["type"] == "Exclusive"
        assert {one["producerName"] for one in stats["publishers"]} == {"maker"}
        assert stats["publishers"][0]["metadata"] == {"k": "v"}
        assert stats["publishers"][0]["clientVersion"].startswith("Pulsar-CPP")
        assert {one["consumerName"] for one in subscription["consumers"]} == {"eater"}
        assert stats["deduplicationStatus"] == "Enabled" and stats["storageSize"] > 0
        for _ in range(4):
            consumer.acknowledge(consumer.receive(TIMEOUT_MS))

        def backlog():
            _, stats = ask(url, "GET", f"{topic}/partitioned-stats")
            of = stats["subscriptions"]["s"]
            return of["msgBacklog"], of["unackedMessages"]

        assert eventually(lambda: backlog() == (0, 0))
        assert ask(url, "DELETE", f"{topic}/partitions")[0] == 412
        assert ask(url, "DELETE", f"{topic}/subscription/s")[0] == 412
        assert ask(url, "POST", f"{topic}/partitions", 3) == (204, None)
        assert len(client.get_topic_partitions(full)) == 3
    assert eventually(lambda: ask(url, "DELETE", f"{topic}/partitions") == (204, None))
    assert ask(url, "GET", f"persistent/{space}") == (200, [])
    assert ask(url, "DELETE", f"namespaces/{space}") == (204, None)
    assert ask(url, "DELETE", f"tenants/{tenant}") == (204, None)


def test_the_metadata_of_a_broker_is_at_the_service_url_that_it_was_started_with(cluster):
    url = cluster.service_url
    _, stores = ask(cluster.admin_url, "GET", "brokers/internal-configuration")
    assert (stores["metadataStoreUrl"], stores["configurationMetadataStoreUrl"]) == (url, url)
    _, settings = ask(cluster.admin_url, "GET", "brokers/configuration/runtime")
    assert settings["service_url"] == url


def test_a_backlog_is_skipped_under_a_connected_consumer(cluster, name):
    url, topic = cluster.admin_url, f"persistent/public/default/{name}"
    with connected(cluster.broker_url) as client:
        consumer = client.subscribe(name, "s", receiver_queue_size=1)
        producer = client.create_producer(name)
        for number in range(5):
            producer.send(b"%d" % number)
        assert ask(url, "GET", f"{topic}/stats")[1]["subscriptions"]["s"]["msgBacklog"] == 5
        assert ask(url, "POST", f"{topic}/subscription/s/skip_all") == (204, None)

        def goes_on():
            producer.send(b"new")
            try:
                return consumer.receive(1000).data() == b"new"
            except pulsar.Timeout:
                return False

        assert eventually(goes_on)
        assert ask(url, "GET", f"{topic}/subscriptions") == (200, ["s"])


def test_a_consumer_stays_while_backlogs_are_cleared_and_its_subscription_is_not_deleted_under_it(
    cluster, client, name
):
    url, space, kinds = cluster.admin_url, f"public/{name}", pulsar.ConsumerType
    assert ask(url, "PUT", f"namespaces/{space}") == (204, None)
    topic = f"{space}/t"
    consumer = client.subscribe(f"persistent://{topic}", "s", kinds.Shared, receiver_queue_size=1)
    producer = client.create_producer(f"persistent://{topic}", batching_enabled=False)

    def shown():
        _, stats = ask(url, "GET", f"persistent/{topic}/stats")
        (connected,) = stats["subscriptions"]["s"]["consumers"]
        return stats["subscriptions"]["s"]["msgBacklog"], connected["connectedSince"]

    _, since = shown()
    for verb in (
        f"namespaces/{space}/clearBacklog",
        f"namespaces/{space}/clearBacklog/s",
        f"persistent/{topic}/subscription/s/skip_all",
    ):
        for _ in range(5):
            producer.send(b"x")
        assert ask(url, "POST", verb) == (204, None)
        assert shown() == (0, since)
    assert ask(url, "POST", f"namespaces/{space}/unsubscribe/s")[0] == 412
    producer.send(b"new")
    while (message := consumer.receive(TIMEOUT_MS)).data() != b"new":
        pass
    consumer.acknowledge(message)
    assert eventually(lambda: shown() == (0, since))


@pytest.mark.parametrize("is_used", [True, False])
def test_skipping_and_expiring_keep_what_was_acknowledged_one_by_one(
    cluster, client, name, is_used
):
    path = f"persistent/public/default/{name}/subscription/s"

    def shared():
        return client.subscribe(
            name, "s", pulsar.ConsumerType.Shared, initial_position=pulsar.InitialPosition.Earliest
        )

    consumer = shared()
    producer = client.create_producer(name, batching_enabled=False)
    for number in range(12):
        producer.send(b"%d" % number)
    for message in [consumer.receive(TIMEOUT_MS) for _ in range(12)]:
        if int(message.data()) % 2:
            consumer.acknowledge(message)

    def shown():
        _, stats = ask(cluster.admin_url, "GET", f"persistent/public/default/{name}/stats")
        return stats["subscriptions"]["s"]

    def backlog():
        return shown()["msgBacklog"]

    assert eventually(lambda: backlog() == 6)
    if not is_used:
        consumer.close()
        assert eventually(lambda: not shown()["consumers"]) and backlog() == 6
    assert ask(cluster.admin_url, "POST", f"{path}/skip/2") == (204, None)  # 0 and 2
    assert ask(cluster.admin_url, "POST", f"{path}/skip/0") == (204, None)
    assert ask(cluster.admin_url, "POST", f"{path}/expireMessages/3600") == (204, None)
    if is_used:
        consumer.close()
    again = shared()
    assert [int(again.receive(TIMEOUT_MS).data()) for _ in range(4)] == [4, 6, 8, 10]
    assert ask(cluster.admin_url, "POST", f"{path}/expireMessages/0") == (204, None)
    again.close()
    producer.send(b"new")
    assert shared().receive(TIMEOUT_MS).data() == b"new"


def test_consumers_that_share_show_what_each_of_them_has(cluster, client, name):
    topic = f"persistent/public/default/{name}"
    shared = [
        client.subscribe(
            name,
            "s",
            pulsar.ConsumerType.Shared,
            consumer_name=f"c{number}",
            receiver_queue_size=10,
            negative_ack_redelivery_delay_ms=100,
        )
        for number in range(2)
    ]
    producer = client.create_producer(name, batching_enabled=False)
    for number in range(40):
        producer.send(b"%d" % number)

    def shown():
        return ask(cluster.admin_url, "GET", f"{topic}/stats")[1]["subscriptions"]["s"]

    assert eventually(lambda: shown()["unackedMessages"] == 20)
    subscription = shown()
    assert (subscription["type"], subscription["msgBacklog"]) == ("Shared", 40)
    assert {one["consumerName"]: one["unackedMessages"] for one in subscription["consumers"]} == {
        "c0": 10,
        "c1": 10,
    }
    shared[0].negative_acknowledge(shared[0].receive(TIMEOUT_MS))
    assert eventually(lambda: shown()["redeliveredMessages"] == 1)
    for consumer in shared:
        consumer.close()
    shared = [client.subscribe(name, "s", pulsar.ConsumerType.Shared)]
    producer.send(b"later", deliver_after=timedelta(hours=1))
    assert eventually(lambda: shown()["msgDelayed"] == 1)
    assert shown()["msgBacklogNoDelayed"] == shown()["msgBacklog"] - 1


def fetched(url, path):
    """The headers and the bytes of a message."""
    with urllib.request.urlopen(f"{url}/admin/v2/{path}", timeout=30) as answer:
        return answer.headers, answer.read()


def test_a_message_is_shown_by_its_id_and_as_the_next_of_a_subscription(cluster, client, name):
    url, topic = cluster.admin_url, f"persistent/public/default/{name}"
    consumer = client.subscribe(name, "s")
    producer = client.create_producer(name, compression_type=pulsar.CompressionType.ZLib)
    ids = [producer.send(b"lone", properties={"k\n": "é"}), producer.send(b"second")]
    headers, body = fetched(url, f"{topic}/ledger/{ids[0].ledger_id()}/entry/{ids[0].entry_id()}")
    assert body.endswith(b"lone")
    assert headers["X-Pulsar-Message-ID"] == f"{ids[0].ledger_id()}:{ids[0].entry_id()}"
    if headers["X-Pulsar-num-batch-message"] is None:
        assert json.loads(headers["X-Pulsar-PROPERTY"]) == {"k\n": "é"}
    peek = f"{topic}/subscription/s/position"
    assert fetched(url, f"{peek}/1")[1].endswith(b"lone")
    assert fetched(url, f"{peek}/2")[1].endswith(b"second")
    consumer.acknowledge(consumer.receive(TIMEOUT_MS))
    assert eventually(lambda: fetched(url, f"{peek}/1")[1].endswith(b"second"))
    for path, status in (
        (f"{topic}/ledger/{ids[0].ledger_id()}/entry/2", 404),
        (f"{topic}/ledger/{ids[0].ledger_id()}/entry/-1", 400),
        (f"{topic}/ledger/5/entry/0", 404),
        (f"{topic}/ledger/x/entry/0", 400),
        (f"{peek}/2", 404),
        (f"{peek}/0", 412),
    ):
        assert ask(url, "GET", path)[0] == status


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "http://evil.example"}, 403),
        ({"Host": "evil.example"}, 403),
        ({"Content-Type": "text/plain"}, 415),
    ],
)
def test_a_web_page_changes_nothing(cluster, name, headers, status):
    path = f"persistent/public/default/{name}/partitions"
    answered, body = ask(cluster.admin_url, "PUT", path, 2, **headers)
    assert answered == status and body["reason"]
    assert ask(cluster.admin_url, "GET", path)[0] == 404
