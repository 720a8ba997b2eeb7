"""Where topics and messages are: lookups, where readers begin, what of removed rows they get."""

import json
import time
import urllib.request

import pulsar
import pulsar.schema
import pytest

import spark_ledger
from spark_ledger.topic import blocking
from tests.integration.pulsar_clients import connected, rows_of, write
from tests.kit.processes import eventually

TIMEOUT_MS = 30_000


@pytest.fixture
def admin(cluster):
    return spark_ledger.Admin(cluster.service_url)


def admin_knows(admin, name):
    return name in [info.name.name for info in admin.topics()]


def rest_of(reader):
    values = []
    while reader.has_message_available():
        values.append(reader.read_next(TIMEOUT_MS).data())
    return values


def test_a_reader_that_seeks_to_a_time_reads_on_in_every_partition(client, admin, name):
    admin.create_topic(name, 3)
    round_robin = pulsar.PartitionsRoutingMode.RoundRobinDistribution
    producer = client.create_producer(name, message_routing_mode=round_robin)
    for _ in range(6):
        producer.send(b"before")
    time.sleep(0.1)
    moment_ms = int(time.time() * 1000)
    time.sleep(0.1)
    for i in range(6):
        producer.send(b"%d" % i)
    reader = client.create_reader(name, pulsar.MessageId.earliest)
    assert len(rest_of(reader)) == 12
    reader.seek(moment_ms)
    assert sorted(rest_of(reader)) == [b"%d" % i for i in range(6)]


def test_messages_that_were_truncated_are_not_handed_out_of_memory(client, admin, name):
    producer = client.create_producer(name)
    for i in range(10):
        producer.send(b"old%d" % i)
    reader = client.create_reader(name, pulsar.MessageId.earliest, receiver_queue_size=1)
    reader.read_next(TIMEOUT_MS)
    admin.truncate(name)
    producer.send(b"new")
    values = rest_of(reader)
    assert values[-1] == b"new"
    assert values[:-1] in ([], [b"old1"])  # what was on its way
    admin.truncate(name)
    late = client.create_reader(name, pulsar.MessageId.earliest)
    assert eventually(lambda: not late.has_message_available())


def test_the_last_message_inclusive_is_found_within_a_batch(client, cluster, admin, name):
    admin.create_topic(name)
    write(blocking.topics(cluster.service_url), name, [b"1", b"2", b"3"])
    reader = client.create_reader(name, pulsar.MessageId.latest, start_message_id_inclusive=True)
    assert rest_of(reader) == [b"3"]
    behind = client.create_reader(name, pulsar.MessageId.latest)
    assert not behind.has_message_available()


def test_a_lookup_makes_no_topic_and_a_producer_does(cluster, admin, client, name):
    def get(path):
        with urllib.request.urlopen(cluster.admin_url + path, timeout=30) as answer:
            return json.load(answer)

    path = f"persistent/public/default/{name}"
    assert get(f"/lookup/v2/topic/{path}")["brokerUrl"] == cluster.broker_url
    asked = get(f"/admin/v2/{path}/partitions?checkAllowAutoCreation=true")
    assert asked == {"partitions": 0, "deleted": False}
    assert client.get_topic_partitions(name) == [f"persistent://public/default/{name}"]
    assert not admin_knows(admin, name)
    with connected(cluster.admin_url) as by_http:
        by_http.create_producer(name).send(b"x")
    assert admin_knows(admin, name)


def test_a_row_of_spark_that_is_larger_than_a_batch_is_a_message_in_chunks(
    client, cluster, admin, name
):
    admin.create_topic(name)
    values = [b"before", b"x" * (12 << 20), b"after"]
    write(blocking.topics(cluster.service_url), name, values)
    reader = client.create_reader(name, pulsar.MessageId.earliest)
    assert rest_of(reader) == values
    consumer = client.subscribe(name, "s", initial_position=pulsar.InitialPosition.Earliest)
    before, large, _ = (consumer.receive(TIMEOUT_MS) for _ in values)
    assert (large.message_id().entry_id(), large.partition_key()) == (1, "1")
    consumer.acknowledge(before)
    consumer.close()
    consumer = client.subscribe(name, "s")
    again = consumer.receive(TIMEOUT_MS)
    assert again.data() == values[1]
    consumer.acknowledge(again)
    assert eventually(lambda: admin.lag(name, "s")[0].rows == 1)
    consumer.close()
    last = client.create_reader(name, large.message_id())
    assert rest_of(last) == values[2:]


def test_text_that_a_producer_declares_is_text_to_consumers_and_bytes_to_spark(
    client, cluster, admin, name
):
    text = pulsar.schema.StringSchema()
    with connected(cluster.broker_url) as other:
        consumer = other.subscribe(name, "s", schema=text)
        producer = client.create_producer(name, schema=text)
        for value in ("a", "ä"):
            producer.send(value)
        client.create_producer(name).send(b"bytes")
        values = [consumer.receive(TIMEOUT_MS).value() for _ in range(3)]
    assert values == ["a", "ä", "bytes"]
    topics = blocking.topics(cluster.service_url)
    write(topics, name, [b"end"])
    (rows,) = rows_of(topics, name).values()
    assert [row[1] for _, row in rows] == [b"a", "ä".encode(), b"bytes", b"end"]
    assert admin.schema(name).versions == ()
