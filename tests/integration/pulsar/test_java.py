"""Pulsar's Java client and its Python client on the same topics."""

import json
import sys
import threading
import uuid
from decimal import Decimal
from pathlib import Path

import pulsar
import pyarrow as pa
import pytest

from spark_ledger.local.processes import Child
from spark_ledger.topic import blocking
from spark_ledger.topic.log.policies import TopicPolicies
from spark_ledger_demo.jars import JarsMissing, jars_of
from tests.integration.pulsar_clients import write, write_columns
from tests.kit import pulsar_java
from tests.kit.processes import eventually

TIMEOUT_MS = 30_000
START_TIMEOUT_S = 60.0
VALUES = [f"j{number}" for number in range(20)]


def listed(values):
    return f"[{', '.join(values)}]"


@pytest.fixture
def jars():
    try:
        return jars_of(pulsar_java.CLIENT)
    except JarsMissing as missing:
        pytest.skip(f"Pulsar's Java client is not here: {missing}")


def test_what_java_writes_and_reads_is_what_python_reads(jars, cluster):
    topic = f"persistent://public/default/java-{uuid.uuid4()}"
    topics = blocking.topics(cluster.service_url)
    once = TopicPolicies(deduplication=True, partitioned=False)
    topics.run(topics.client.topics.create(f"{topic}-once", 1, once))
    program = Path(__file__).with_name("Client.java")
    said = pulsar_java.run(program, cluster.broker_url, topic, f"{topic}-once")
    assert dict(line.split(": ", 1) for line in said.splitlines()) == {
        "entries": "11",
        "ascending": "true",
        "values": listed(VALUES),
        "keys": listed(f"k{number % 3}" for number in range(20)),
        "properties": "{number=13}",
        "event times": str(sum(range(20))),
        "a second one": "ConsumerBusyException",
        "the next one goes on with": listed(VALUES[15:]),
        "after a seek": "[j5]",
        "from the first": "[j0]",
        "the last id": "true",
        "read after an id": listed(VALUES[16:]),
        "a second producer": "ProducerBusyException",
        "known before 1": "-1",
        "known before 3": "4",
    }
    client = pulsar.Client(
        cluster.broker_url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error)
    )
    try:
        for name, values in ((topic, VALUES), (f"{topic}-once", [f"o{i}" for i in range(1, 7)])):
            reader = client.create_reader(name, pulsar.MessageId.earliest)
            found = []
            while reader.has_message_available():
                found.append(reader.read_next(TIMEOUT_MS))
            assert [one.data().decode() for one in found] == values
        reader = client.create_reader(topic, pulsar.MessageId.earliest)
        found = [reader.read_next(TIMEOUT_MS) for _ in VALUES]
        assert [one.partition_key() for one in found] == [f"k{i % 3}" for i in range(20)]
        assert [one.properties() for one in found] == [{"number": str(i)} for i in range(20)]
        assert [one.event_timestamp() for one in found] == [
            1_600_000_000_000 + i for i in range(20)
        ]
    finally:
        client.close()


def test_rows_of_spark_that_are_larger_than_javas_frames_come_in_chunks(jars, cluster):
    topic = f"persistent://public/default/java-{uuid.uuid4()}"
    topics = blocking.topics(cluster.service_url)
    topics.run(topics.client.topics.create(topic, 1, TopicPolicies(partitioned=False)))
    sizes = {"a": 10, "b": 12 << 20, "c": 4 << 20, "d": 4 << 20, "e": 3}
    values = [letter.encode() * size for letter, size in sizes.items()]
    write(topics, topic, values, event_times_us=[-5_000_000, None, 0, 7_000_000, -1])
    said = pulsar_java.run(Path(__file__).with_name("Rows.java"), cluster.broker_url, topic)
    rows = [f"{letter}{size}" for letter, size in sizes.items()]
    assert dict(line.split(": ", 1) for line in said.splitlines()) == {
        "rows": listed(rows),
        "keys": listed(map(str, range(5))),
        "event times": "[-5000, 0, 0, 7000, -1]",
        "not acknowledged": listed(rows[1:]),
        "behind the large one": listed(rows[2:]),
        "after a seek": listed(rows[2:3]),  # the one after it
        "read": listed(rows),
        "a range of hashes": "none",
    }


def test_typed_rows_are_objects_to_java_also_without_a_class_for_them(jars, cluster):
    topic = f"persistent://public/default/java-{uuid.uuid4()}"
    topics = blocking.topics(cluster.service_url)
    topics.run(topics.client.topics.create(topic, 1, TopicPolicies(partitioned=False)))
    columns = {
        "id": pa.array([1, 2]),
        "price": pa.array([Decimal("12.50"), None], pa.decimal128(30, 2)),
        "data": pa.array([b"bytes", None]),
        "place": pa.array([{"city": "Bern"}, None]),
        "names": pa.array([["a", "b"], None]),
        "counts": pa.array([[("x", 1)], None], pa.map_(pa.string(), pa.int64())),
    }
    write_columns(topics, topic, pa.record_batch(columns))
    said = pulsar_java.run(Path(__file__).with_name("Objects.java"), cluster.broker_url, topic)
    assert dict(line.split(": ", 1) for line in said.splitlines()) == {
        "row": "[1, 12.50, bytes, Bern, [a, b], {x=1}]",
        "nulls": "true",
        "version": "AAAAAAAAAAA=",
        "fields": listed(columns),
        "generic": "1 Bern",
        "bytes that are no object": "refused",
        "by AUTO_PRODUCE": "3 7.00",
        "its version": "AAAAAAAAAAA=",
        "a wrong type": "refused",
    }


def test_a_consumer_by_pattern_sees_topics_of_clients_and_of_spark_as_they_come(jars, cluster):
    stem = f"persistent://public/default/w{uuid.uuid4().hex[:8]}"
    topics = blocking.topics(cluster.service_url)
    client = pulsar.Client(
        cluster.broker_url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error)
    )

    def later_topics():
        eventually(lambda: topics.run(topics.client.topics.find(f"{stem}-a")) is not None)
        topics.run(topics.client.topics.create(f"{stem}-b", 4))
        for number in range(4):
            client.create_producer(f"{stem}-b-partition-{number}").send(b"b%d" % number)

    later = threading.Thread(target=later_topics)
    later.start()
    try:
        program = Path(__file__).with_name("Patterns.java")
        assert pulsar_java.run(program, cluster.broker_url, stem).strip() == "[a, b0, b1, b2, b3]"
    finally:
        later.join()
        client.close()


def test_java_sends_and_receives_over_a_broker_that_listens_on_ipv6_alone(
    jars, fresh_cluster, tmp_path
):
    options = ["--parent-pipe", "--service-url", fresh_cluster(3).service_url, "--host", "::1"]
    options += ["--broker-port", "0", "--admin-port", "0"]
    command = [sys.executable, "-m", "spark_ledger.cli.main", "broker", "start", *options]
    broker = Child("the broker", command, tmp_path / "broker.log")
    try:
        served = json.loads(broker.first_line(START_TIMEOUT_S))
        urls = [served["broker_url"], served["admin_url"]]
        assert [url.rpartition(":")[0] for url in urls] == ["pulsar://[::1]", "http://[::1]"]
        topic = f"persistent://public/default/java-{uuid.uuid4()}"
        received = pulsar_java.run(Path(__file__).with_name("Address.java"), topic, *urls)
        assert received.splitlines() == [f"{url}: [v0, v1, v2]" for url in urls]
    finally:
        broker.kill()
