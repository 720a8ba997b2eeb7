"""What clients ask for that cannot be, on a plain socket: the broker answers with Pulsar's codes
and the reason, serves on, and keeps nothing of it."""

import subprocess
import sys
import time

import pulsar
import pytest

from benchmarks.broker_socket import batch_of
from spark_ledger.broker.wire.commands import MessageId, ServerError
from spark_ledger.topic.entry import pulsar_batch
from spark_ledger.topic.entry.pulsar_message_pb2 import MessageMetadata
from tests.integration.pulsar_clients import ask
from tests.integration.pulsar_socket import Socket
from tests.kit.processes import eventually

EXCLUSIVE, SHARED, FAILOVER, KEY_SHARED = range(4)
KINDS = (EXCLUSIVE, SHARED, FAILOVER, KEY_SHARED)
MINUS_ONE, FAR = 2**64 - 1, 10**6
YEAR_9999_MS = 253_402_300_799_000


def lone(*_):
    return batch_of(0, 20)


@pytest.fixture
def link(cluster):
    made = Socket(cluster.broker_url)
    yield made
    made.close()


def shown(cluster, name, subscription="s"):
    """The subscription in the statistics."""
    _, stats = ask(cluster.admin_url, "GET", f"persistent/public/default/{name}/stats")
    return stats["subscriptions"][subscription]


def ranges(*given, mode=1):
    def prepare(part):
        part.keySharedMeta.keySharedMode = mode
        for start, end in given:
            part.keySharedMeta.hashRanges.add(start=start, end=end)

    return prepare


def nothing(part):
    pass


@pytest.mark.parametrize(
    ("fields", "prepare", "code", "words"),
    [
        ({"subType": 7}, nothing, ServerError.NOT_ALLOWED, "no type of subscriptions 7"),
        ({"subType": -1}, nothing, ServerError.NOT_ALLOWED, "no type of subscriptions -1"),
        ({"subType": 3}, ranges((0, 1), mode=5), ServerError.NOT_ALLOWED, "subscriptions 5"),
        ({"subType": 3}, ranges(), ServerError.CONSUMER_ASSIGN, "no range"),
        ({"subType": 3}, ranges((300, 200)), ServerError.CONSUMER_ASSIGN, "300 to 200"),
        ({"subType": 3}, ranges((-1, 5)), ServerError.CONSUMER_ASSIGN, "-1 to 5"),
        ({"subType": 3}, ranges((0, 65536)), ServerError.CONSUMER_ASSIGN, "0 to 65536"),
        ({"subType": 3}, ranges((5, 9), (9, 12)), ServerError.CONSUMER_ASSIGN, "9 to 12"),
        ({"subType": 0}, ranges((9, 5)), ServerError.CONSUMER_ASSIGN, "9 to 5"),
        ({"subscription": ""}, nothing, ServerError.PRODUCER_BUSY, "name is empty"),
        ({"subscription": "", "durable": False}, nothing, ServerError.PRODUCER_BUSY, "is empty"),
        ({"subscription": "x" * 256}, nothing, ServerError.NOT_ALLOWED, "not 256"),
        ({"consumer_name": "x" * 1025}, nothing, ServerError.NOT_ALLOWED, "1025 bytes"),
    ],
)
def test_a_consumer_that_cannot_be_makes_neither_topic_nor_subscription(
    link, topics, name, fields, prepare, code, words
):
    asked = {"topic": name, "subscription": "s", "consumer_id": 1, "durable": True} | fields
    error, message = link.refused("subscribe", prepare, **asked)
    assert (error, words in message) == (code, True), message
    assert topics.run(topics.client.topics.find(name)) is None
    link.subscribed(name, EXCLUSIVE, "s")  # the connection and the consumer's id are free


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"producer_access_mode": 5}, "no access mode 5"),
        ({"initial_subscription_name": "x" * 256}, "not 256"),
        ({"producer_name": "x" * 1025}, "1025 bytes"),
    ],
)
def test_a_producer_that_cannot_be_makes_no_topic(link, topics, name, fields, words):
    error, message = link.refused("producer", topic=name, producer_id=1, **fields)
    assert (error, words in message) == (ServerError.NOT_ALLOWED, True), message
    assert topics.run(topics.client.topics.find(name)) is None


@pytest.mark.parametrize("slash", ["a/b", "/", "..", "é" * 255])
def test_a_subscription_may_have_any_name_and_is_listed_by_it(link, topics, name, slash):
    link.subscribed(name, SHARED, slash)
    info = topics.run(topics.client.topics.open(name))
    listed = topics.run(topics.client.subscriptions.list(info.id))
    assert [subscription.name for subscription in listed] == [slash]
    assert link.ask("unsubscribe", consumer_id=1)[0] == "success"
    assert topics.run(topics.client.subscriptions.list(info.id)) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_subscription_has_consumers_of_one_type(link, cluster, name, kind):
    link.subscribed(name, kind)
    for other in KINDS:
        if other != kind:
            answer, part = link.subscribe(name, other, consumer_id=2)
            assert (answer, part.error) == ("error", ServerError.CONSUMER_BUSY)
            assert "'s' is used as" in part.message
    answer, part = link.subscribe(name, kind, durable=False, consumer_id=2)
    assert (answer, part.error) == ("error", ServerError.NOT_ALLOWED)
    assert len(shown(cluster, name)["consumers"]) == 1


def test_ranges_of_keys_that_a_connected_consumer_has_are_free_once_it_is_gone(link, cluster, name):
    link.subscribed(name, KEY_SHARED, prepare=ranges((0, 100)))
    for given in [(100, 200)], [(50, 60)], [(200, 300), (0, 0)]:
        answer, part = link.subscribe(name, KEY_SHARED, prepare=ranges(*given), consumer_id=2)
        assert (answer, part.error) == ("error", ServerError.CONSUMER_ASSIGN)
        assert "0 to 100, which a connected consumer has" in part.message
    answer, part = link.subscribe(name, KEY_SHARED, prepare=ranges(mode=0), consumer_id=2)
    assert (answer, part.error) == ("error", ServerError.CONSUMER_BUSY)
    assert len(shown(cluster, name)["consumers"]) == 1
    link.ask("close_consumer", consumer_id=1)
    link.subscribed(name, KEY_SHARED, prepare=ranges((50, 60)), consumer_id=2)


@pytest.mark.parametrize("kind", KINDS)
def test_an_ack_of_what_was_never_sent_is_refused_and_acknowledges_nothing(
    link, cluster, name, kind
):
    ledger = link.send(name, *map(lone, range(2)), batch_of(10, 20))
    link.subscribed(name, kind)
    link.tell("flow", consumer_id=1, messagePermits=100)
    link.taken(3)
    for entry in (12, FAR, 2**63 - 1, 2**63, MINUS_ONE):
        for extra in (
            *({}, {"batch_index": 5}, {"batch_index": 2**31 - 1}),
            *({"ack_set": [0]}, {"ack_set": [0] * 1000}),
        ):
            id_ = MessageId(ledgerId=ledger, entryId=entry, **extra)
            error, message = link.refused("ack", consumer_id=1, ack_type=0, message_id=[id_])
            assert (error, "was sent" in message) == (ServerError.METADATA, True), message
    id_ = MessageId(ledgerId=ledger + 2, entryId=0)
    error, message = link.refused("ack", consumer_id=1, ack_type=0, message_id=[id_])
    assert (error, "another topic" in message) == (ServerError.NOT_ALLOWED, True)
    assert link.refused("ack", consumer_id=9, ack_type=0)[0] == ServerError.CONSUMER_NOT_FOUND
    assert link.refused("ack", consumer_id=1, ack_type=7)[0] == ServerError.NOT_ALLOWED
    if kind in (EXCLUSIVE, FAILOVER):
        # a client names the message before the first batch, if it has the batch in part
        before = MessageId(ledgerId=ledger, entryId=MINUS_ONE)
        absurd = MessageId(ledgerId=ledger, entryId=MINUS_ONE, batch_index=5)
        for id_ in before, absurd:
            assert not link.ask("ack", consumer_id=1, ack_type=1, message_id=[id_])[1].message
        id_ = MessageId(ledgerId=ledger, entryId=FAR)
        error, _ = link.refused("ack", consumer_id=1, ack_type=1, message_id=[id_])
        assert error == ServerError.METADATA
    stats = shown(cluster, name)
    assert (stats["position"], stats["msgBacklog"], stats["unackedMessages"]) == (0, 12, 12)
    # a set that is longer than its batch counts as far as the batch goes
    id_ = MessageId(ledgerId=ledger, entryId=2, ack_set=[1] + [0] * 10_000)
    assert not link.ask("ack", consumer_id=1, ack_type=0, message_id=[id_])[1].message
    assert shown(cluster, name)["msgBacklog"] == 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_seek_beyond_the_end_goes_to_the_end_and_one_to_nowhere_is_refused(link, name, kind):
    ledger = link.send(name, *map(lone, range(3)))
    link.subscribed(name, kind)
    for nowhere, code in (
        ({}, ServerError.METADATA),
        ({"message_id": MessageId(ledgerId=ledger + 2, entryId=0)}, ServerError.NOT_ALLOWED),
    ):
        error, message = link.refused("seek", consumer_id=1, **nowhere)
        assert (error, bool(message)) == (code, True)
    for target, following in (
        ({"message_id": MessageId(ledgerId=ledger, entryId=FAR)}, 3),
        ({"message_id": MessageId(ledgerId=ledger, entryId=0, batch_index=2**31 - 1)}, 4),
        ({"message_publish_time": 2**64 - 1}, 5),
        ({"message_id": MessageId(ledgerId=ledger, entryId=2**64 - 5)}, 0),
        ({"message_publish_time": 0}, 0),
    ):
        assert link.ask("seek", consumer_id=1, **target)[0] == "success"
        link.subscribed(name, kind)
        link.send(name, lone())
        link.tell("flow", consumer_id=1, messagePermits=1)
        (message,) = link.taken(1)
        assert message.message_id.entryId == following
    assert link.refused("seek", consumer_id=9)[0] == ServerError.CONSUMER_NOT_FOUND


@pytest.mark.parametrize("kind", [SHARED, KEY_SHARED])
def test_only_messages_that_a_consumer_has_are_sent_again(link, cluster, name, kind):
    ledger = link.send(name, *map(lone, range(3)))
    link.subscribed(name, kind)
    link.tell("flow", consumer_id=1, messagePermits=100)
    link.taken(3)
    for entry in (3, FAR, 2**63 - 1, 2**63, MINUS_ONE):
        link.tell(
            "redeliver", consumer_id=1, message_ids=[MessageId(ledgerId=ledger, entryId=entry)]
        )
    link.tell("redeliver", consumer_id=1, message_ids=[MessageId(ledgerId=ledger + 2, entryId=0)])
    link.tell("redeliver", consumer_id=9, message_ids=[MessageId(ledgerId=ledger, entryId=0)])
    link.tell("redeliver", consumer_id=1, message_ids=[MessageId(ledgerId=ledger, entryId=1)])
    (again,) = link.taken(1)
    assert (again.message_id.entryId, again.redelivery_count) == (1, 1)
    link.until_served()
    assert not link.messages
    assert shown(cluster, name)["redeliveredMessages"] == 1


@pytest.mark.parametrize("kind", KINDS)
def test_permits_of_any_number_are_counted(link, name, kind):
    link.send(name, *map(lone, range(3)))
    link.subscribed(name, kind)
    link.tell("flow", consumer_id=9, messagePermits=1)
    link.tell("flow", consumer_id=1, messagePermits=0)
    link.until_served()
    assert not link.messages
    for _ in range(3):
        link.tell("flow", consumer_id=1, messagePermits=2**32 - 1)
    assert [message.message_id.entryId for message in link.taken(3)] == [0, 1, 2]


def test_priorities_and_a_position_that_no_client_gives_are_taken_as_they_are(link, cluster, name):
    link.send(name, lone())
    for consumer_id, priority in enumerate((2**31 - 1, 0, -(2**31))):
        link.subscribed(name, FAILOVER, consumer_id=consumer_id, priority_level=priority)
    active = shown(cluster, name)["activeConsumerName"]
    names = [consumer["consumerName"] for consumer in shown(cluster, name)["consumers"]]
    assert active == names[2]  # the lowest number is the best
    link.subscribed(name, EXCLUSIVE, "latest", consumer_id=5, initialPosition=7)
    assert shown(cluster, name, "latest")["msgBacklog"] == 0


@pytest.mark.parametrize("kind", [SHARED, KEY_SHARED])
def test_a_delay_to_the_past_is_none_and_one_to_the_end_of_time_holds(link, cluster, name, kind):
    def delayed(until_ms):
        metadata = MessageMetadata(producer_name="p", publish_time=1, deliver_at_time=until_ms)
        return pulsar_batch.build_batch(metadata, b"delayed")

    at_once = (0, 1, -1, -(2**63), int(time.time() * 1000) - 5000)
    late = (YEAR_9999_MS, 1000 * YEAR_9999_MS, 2**63 - 1)
    link.send(name, *map(delayed, at_once + late))
    link.subscribed(name, kind)
    link.tell("flow", consumer_id=1, messagePermits=100)
    assert [message.message_id.entryId for message in link.taken(5)] == [0, 1, 2, 3, 4]
    assert eventually(lambda: shown(cluster, name)["msgDelayed"] == 3)


@pytest.mark.parametrize(
    ("kind", "quota"),
    [
        ("destination_storage", {"limitSize": 0}),
        ("destination_storage", {"limit": "0"}),
        ("message_age", {"limitTime": 0}),
    ],
)
def test_a_quota_of_zero_is_refused_and_not_kept(cluster, topics, name, kind, quota):
    namespace = f"public/{name}"
    assert ask(cluster.admin_url, "PUT", f"namespaces/{namespace}", {})[0] == 204
    path = f"namespaces/{namespace}/backlogQuota?backlogQuotaType={kind}"
    body = quota | {"policy": "producer_exception"}
    status, refused = ask(cluster.admin_url, "POST", path, body)
    assert (status, "backlog_" in refused["reason"]) == (412, True), refused
    assert ask(cluster.admin_url, "GET", f"namespaces/{namespace}/backlogQuotaMap") == (200, {})


SUBSCRIBES_AGAIN = """
import sys, pulsar
client = pulsar.Client(sys.argv[1], logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Info))
try:
    client.subscribe(sys.argv[2], "s", pulsar.ConsumerType.Exclusive)
except pulsar.ConsumerBusy:
    client.close()
    print("refused")
"""


def test_the_reason_of_a_refusal_is_in_the_clients_log(cluster, client, name):
    client.subscribe(name, "s", pulsar.ConsumerType.Shared)
    # in a process of its own: a process has one logger of Pulsar's client
    script = [sys.executable, "-c", SUBSCRIBES_AGAIN, cluster.broker_url, name]
    ended = subprocess.run(script, capture_output=True, text=True, timeout=60, check=True)
    assert "refused" in ended.stdout
    assert "'s' is used as SHARED, not EXCLUSIVE" in ended.stdout + ended.stderr
