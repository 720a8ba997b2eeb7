"""The promise of an acknowledgement's receipt, with a real broker that is killed by SIGKILL."""

import time
import uuid

import pytest

from benchmarks.broker_socket import Link, batch_of, produce
from spark_ledger.broker.wire.commands import command
from spark_ledger.broker.wire.frames import encode
from spark_ledger.local import LocalCluster
from spark_ledger.local.processes import LocalBroker

MESSAGES = 300
ACK_RESPONSE = 38


@pytest.fixture
def brokers(tmp_path):
    with LocalCluster(bookies=3, autorecovery=False) as cluster:
        started = [LocalBroker(tmp_path / f"{i}.log", cluster.service_url) for i in range(2)]
        for broker in started:
            broker.start()
        yield started
        for broker in started:
            broker.stop()


def owner_of(broker, topic):
    """The URL to which clients of the topic are sent."""
    link = Link(broker.url)
    asked = command("lookup", topic=topic, request_id=2, authoritative=True)
    answer = link.ask(asked, "lookup_response").lookup_response
    link.close()
    return answer.brokerServiceUrl


def consumer_on(url, topic):
    link = Link(url)
    link.found(topic)
    fields = {"subscription": "s", "subType": 0, "consumer_id": 0, "initialPosition": 1}
    link.ask(command("subscribe", topic=topic, request_id=4, durable=True, **fields), "success")
    link.flow(2 * MESSAGES)
    return link


def offsets_of(link, count):
    ids = {}
    for frame in link.messages():
        id_ = frame.command.message.message_id
        ids[id_.entryId] = id_
        if len(ids) == count:
            return ids
    raise AssertionError("messages do not end")


def once_served(broker, topic):
    until_s = time.monotonic() + 60
    while True:
        try:
            return consumer_on(owner_of(broker, topic), topic)
        except (RuntimeError, OSError):
            assert time.monotonic() < until_s
            time.sleep(0.2)


def produced(broker, topic):
    """The URL of the broker that has the topic's messages: one of two that start gives partitions
    to the other at first."""
    until_s = time.monotonic() + 60
    while True:
        url = owner_of(broker, topic)
        try:
            produce(url, topic, batch_of(0, 100), MESSAGES, 0, 100)
            return url
        except (RuntimeError, OSError):
            assert time.monotonic() < until_s
            time.sleep(0.2)


def test_what_has_a_receipt_is_not_sent_again_after_the_broker_was_killed(brokers):
    topic = f"persistent://public/default/t-{uuid.uuid4()}"
    url = produced(brokers[0], topic)
    (killed,) = [broker for broker in brokers if broker.url == url]
    (other,) = [broker for broker in brokers if broker.url != url]
    link = consumer_on(url, topic)
    ids = offsets_of(link, MESSAGES)
    acked = sorted(ids)[1::3]
    for request, offset in enumerate(acked, 10):
        fields = {"ack_type": 0, "message_id": [ids[offset]], "request_id": request}
        link.send(encode(command("ack", consumer_id=0, **fields)))
    receipts = 0
    while receipts < len(acked):
        receipts += link.counted(ACK_RESPONSE)
    killed.kill()
    link.close()
    again = offsets_of(once_served(other, topic), MESSAGES - len(acked))
    assert sorted(again) == sorted(set(ids) - set(acked))
