"""Spark and Pulsar's client on the same topics."""

import random
import socket
from contextlib import suppress

import pulsar
import pytest
from pyspark.errors import StreamingQueryException

from spark_ledger.broker.wire.commands import command
from spark_ledger.broker.wire.frames import encode
from spark_ledger.topic.entry.pulsar_batch import build_batch
from spark_ledger.topic.entry.pulsar_message_pb2 import MessageMetadata
from tests.kit.processes import eventually

WAIT_MS = 120_000


@pytest.fixture
def client(cluster):
    quiet = pulsar.ConsoleLogger(pulsar.LoggerLevel.Error)
    one = pulsar.Client(cluster.broker_url, logger=quiet)
    yield one
    one.close()


def test_spark_reads_what_producers_send_before_and_after_it_is_sealed(
    spark, cluster, client, topic, tmp_path
):
    producer = client.create_producer(topic, batching_enabled=True)

    def send(numbers):
        for i in numbers:
            producer.send_async(
                b"v%d" % i, lambda *_: None, partition_key=f"k{i}", properties={"n": str(i)}
            )
        producer.flush()

    send(range(100))
    url = cluster.service_url
    options = {"serviceUrl": url, "includeHeaders": "true", "startingOffsets": "earliest"}
    more = {"includeProducer": "true", "includeMetadata": "true"}
    read = spark.read.format("ledger").options(**options, **more).load(topic)
    rows = read.selectExpr(
        *("CAST(key AS STRING)", "CAST(value AS STRING)", "headers", "offset", "timestamp"),
        *("eventTime", "producerName", "sequenceId"),
    ).collect()
    rows.sort(key=lambda row: row.offset)
    assert [(row.key, row.value, row.offset) for row in rows] == [
        (f"k{i}", f"v{i}", i) for i in range(100)
    ]
    assert rows[7].headers[0].key == "n"
    assert bytes(rows[7].headers[0].value) == b"7"
    assert all(row.timestamp is not None and row.eventTime is None for row in rows)
    assert {row.producerName for row in rows} == {producer.producer_name()}
    assert [row.sequenceId for row in rows] == list(range(100))

    stream = spark.readStream.format("ledger").options(**options).load(topic)
    query = (
        stream.selectExpr("key", "value")
        .writeStream.format("ledger")
        .options(serviceUrl=url, checkpointLocation=str(tmp_path / "checkpoint"))
        .start(f"{topic}-copy")
    )
    try:
        query.processAllAvailable()
        send(range(100, 150))  # which the query hears of as it is confirmed
        copied = client.create_reader(f"{topic}-copy", pulsar.MessageId.earliest)
        found = [copied.read_next(WAIT_MS) for _ in range(150)]
    finally:
        query.stop()
    assert sorted(int(one.data()[1:]) for one in found) == list(range(150))
    assert {one.partition_key() for one in found} == {f"k{i}" for i in range(150)}


def test_a_chunked_message_is_one_row_to_spark(spark, cluster, client, topic):
    producer = client.create_producer(topic, batching_enabled=False, chunking_enabled=True)
    producer.send(b"first")
    producer.send(bytes(6 << 20), partition_key="k")
    producer.send(b"last")
    options = {"serviceUrl": cluster.service_url, "startingOffsets": "earliest"}
    read = spark.read.format("ledger").options(**options).load(topic)
    assert read.count() == 3
    rows = read.selectExpr("offset", "length(value) AS size", "CAST(key AS STRING)").collect()
    rows.sort(key=lambda row: row.offset)
    assert [(row.offset, row.size, row.key) for row in rows] == [
        *((0, 5, None), (2, 6 << 20, "k"), (3, 4, None))  # its first chunk is at 1
    ]


def stored_as_it_is(cluster, topic, batch):
    """A batch sent as bytes, which has its receipt."""
    host, _, port = cluster.broker_url.removeprefix("pulsar://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=60) as raw, raw.makefile("rb") as said:
        for one in (
            encode(command("connect", client_version="test", protocol_version=15)),
            encode(command("producer", topic=topic, producer_id=1, request_id=1)),
            encode(command("send", producer_id=1, sequence_id=0, num_messages=1), batch),
        ):
            raw.sendall(one)
            answer = said.read(int.from_bytes(said.read(4)))
    assert answer[5] == 7, "a SEND_RECEIPT"


def test_a_message_that_cannot_be_decoded_is_met_as_the_query_says(
    spark, cluster, client, topic, tmp_path
):
    producer = client.create_producer(topic)
    for i in range(3):
        producer.send(b"v%d" % i)
    metadata = MessageMetadata(
        producer_name="p", sequence_id=0, publish_time=1, compression=1, uncompressed_size=900
    )
    noise = build_batch(metadata, random.Random(3).randbytes(200))
    stored_as_it_is(cluster, topic, noise)
    producer.send(b"v3")
    url = cluster.service_url
    options = {"serviceUrl": url, "startingOffsets": "earliest"}

    def read(**more):
        read = spark.read.format("ledger").options(**options, **more).load(topic)
        return [(row.offset, bytes(row.value)) for row in read.orderBy("offset").collect()]

    place = (
        rf"\[LEDGER_TOPIC.BAD_ENTRY\] topic '.*{topic}', partition 0, offset 3 \(ledger \d+, entry"
    )
    with pytest.raises(Exception, match=place):
        read()
    good = [(0, b"v0"), (1, b"v1"), (2, b"v2"), (4, b"v3")]
    assert read(onBadEntry="skip") == good
    assert read(onBadEntry="raw") == sorted([*good, (3, noise)])
    stream = spark.readStream.format("ledger").options(**options, onBadEntry="skip").load(topic)
    query = (
        stream.selectExpr("key", "value")
        .writeStream.format("ledger")
        .options(serviceUrl=url, checkpointLocation=str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start(f"{topic}-copy")
    )
    assert query.awaitTermination(WAIT_MS / 1000)
    copied = spark.read.format("ledger").options(**options).load(f"{topic}-copy")
    assert sorted(bytes(row.value) for row in copied.collect()) == [b"v0", b"v1", b"v2", b"v3"]


def test_spark_writes_to_a_topic_that_a_producer_writes_to(spark, cluster, client, topic, keyed):
    producer = client.create_producer(topic)
    producer.send(b"first")
    write = keyed(20).write.format("ledger").option("serviceUrl", cluster.service_url)
    write.mode("append").save(topic)
    producer.send(b"last")
    reader = client.create_reader(topic, pulsar.MessageId.earliest)
    found = [reader.read_next(WAIT_MS).data() for _ in range(22)]
    assert (found[0], found[-1]) == (b"first", b"last")
    assert sorted(found[1:-1], key=int) == [b"%d" % i for i in range(20)]


def test_a_query_goes_on_behind_consumers_and_consumers_behind_the_query(
    spark, cluster, client, topic, tmp_path
):
    producer = client.create_producer(topic, batching_enabled=True)

    def send(numbers):
        for i in numbers:
            producer.send_async(b"%d" % i, lambda *_: None)
        producer.flush()

    def subscribe():
        first = pulsar.InitialPosition.Earliest
        return client.subscribe(topic, "both", initial_position=first, batch_index_ack_enabled=True)

    def is_let_go():
        nonlocal consumer
        with suppress(pulsar.ConsumerBusy):
            consumer = subscribe()
            return True
        return False

    def receive(count):
        found = [consumer.receive(WAIT_MS) for _ in range(count)]
        consumer.acknowledge_cumulative(found[-1])
        return [int(one.data()) for one in found]

    def start(checkpoint, **options):
        stream = spark.readStream.format("ledger").option("serviceUrl", cluster.service_url)
        rows = stream.options(subscription="both", startingSubscription="both", **options)

        def keep(batch, _):
            read.extend(int(row.value) for row in batch.collect())

        write = rows.load(topic).writeStream.foreachBatch(keep)
        return write.option("checkpointLocation", str(tmp_path / checkpoint))

    read: list[int] = []
    send(range(10))
    send(range(10, 30))
    consumer = subscribe()
    assert receive(10) == list(range(10))
    with pytest.raises(StreamingQueryException, match=r"LEDGER_SUBSCRIPTION\.BUSY"):
        start("refused").start().processAllAvailable()
    consumer.close()
    query = start("one").start()
    query.processAllAvailable()
    with pytest.raises(pulsar.ConsumerBusy):
        subscribe()
    query.stop()
    assert sorted(read) == list(range(10, 30))

    send(range(30, 40))
    assert eventually(is_let_go), "Spark ends a source's process after `stop` has returned"
    assert receive(4) == list(range(30, 34))  # in the middle of a batch
    consumer.close()
    start("two").trigger(availableNow=True).start().awaitTermination(120)
    assert sorted(read) == list(range(10, 30)) + list(range(34, 40))

    start("one").trigger(availableNow=True).start().awaitTermination(120)
    assert sorted(read[26:]) == list(range(30, 40)), "its checkpoint decides"


def test_a_query_with_a_new_subscription_begins_in_an_open_ledger(
    spark, cluster, client, topic, tmp_path
):
    producer = client.create_producer(topic)
    for i in range(10):
        producer.send(b"%d" % i)
    options = {"serviceUrl": cluster.service_url, "subscription": "new"}
    found = []
    query = (
        spark.readStream.format("ledger")
        .options(**options)
        .load(topic)
        .writeStream.option("checkpointLocation", str(tmp_path))
        .foreachBatch(lambda rows, _: found.extend(row.offset for row in rows.collect()))
        .start()
    )
    try:
        query.processAllAvailable()
        producer.send(b"10")
        assert eventually(lambda: found == [10]), found
    finally:
        query.stop()


def test_typed_rows_are_json_objects_to_a_consumer(spark, cluster, client, topic):
    rows = spark.range(3).selectExpr("id", "cast(id * 2 as double) AS reading")
    options = {"serviceUrl": cluster.service_url, "valueFormat": "arrow"}
    rows.write.format("ledger").options(**options).mode("append").save(topic)
    reader = client.create_reader(topic, pulsar.MessageId.earliest)
    found = sorted(reader.read_next(WAIT_MS).data() for _ in range(3))
    assert found == [b'{"id":%d,"reading":%d}' % (i, 2 * i) for i in range(3)]
