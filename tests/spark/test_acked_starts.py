"""Queries that begin where consumers left off: what these acknowledged one by one is left out."""

import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pulsar
import pytest
from pyspark.errors import StreamingQueryException

from spark_ledger import errors
from spark_ledger.metadata import paths
from spark_ledger.topic.acks.copies import nodes_of_copies
from spark_ledger.topic.subscription.acked_now import acked_now
from tests.kit.processes import eventually
from tests.spark.by_hand import Cluster

WAIT_MS = 120_000
ROWS = 10_000
SHARED = pulsar.ConsumerType.Shared
PARTITION_ROWS = {0: 6000, 1: 2000, 2: 2000}
"""Consumers acknowledge every third and a random set of partition 0, nothing of 1, all of 2."""


@pytest.fixture
def client(cluster):
    quiet = pulsar.ConsoleLogger(pulsar.LoggerLevel.Error)
    made = pulsar.Client(cluster.broker_url, logger=quiet)
    yield made
    made.close()


@pytest.fixture
def by_hand(cluster) -> Cluster:
    return Cluster(cluster.service_url)


@pytest.fixture
def sent(client, by_hand, topic):
    """The values of 10,000 rows in three partitions, in batches of Pulsar's producers."""
    by_hand.run(by_hand.client.topics.create(topic, len(PARTITION_ROWS)))
    values = []
    for partition, count in PARTITION_ROWS.items():
        producer = client.create_producer(
            f"{topic}-partition-{partition}", batching_enabled=True, block_if_queue_full=True
        )
        for n in range(count):
            values.append(f"{partition}:{n}")
            producer.send_async(values[-1].encode(), lambda *_: None)
        producer.flush()
        producer.close()
    return values


def consume(client, topic, *, until, close=True):
    """Receive all and acknowledge those that `until` names; the consumer."""
    first = pulsar.InitialPosition.Earliest
    consumer = client.subscribe(
        *(topic, "theirs"),
        consumer_type=SHARED,
        initial_position=first,
        batch_index_ack_enabled=True,
        receiver_queue_size=ROWS,
    )
    left = set(until)
    while left:
        message = consumer.receive(WAIT_MS)
        value = message.data().decode()
        if value in left:
            consumer.acknowledge(message)
            left.remove(value)
    if close:
        consumer.close()
    return consumer


def chosen(values):
    """What consumers acknowledge at first."""
    at_random = random.Random(7).sample(range(PARTITION_ROWS[0]), 1500)
    numbers = {*range(0, PARTITION_ROWS[0], 3), *at_random}
    first = {f"0:{n}" for n in numbers}
    return first | {value for value in values if value.startswith("2:")}


def acked_count(by_hand, topic):
    """How many rows the subscription's consumers have acknowledged, as a query would get it."""
    client, info = by_hand.client, by_hand.info(topic)
    now = by_hand.run(acked_now(client.ledgers, info.id, "theirs"))
    return sum(now.positions.values()) + sum(map(len, now.acked.values()))


def copies_of(by_hand, topic):
    store, info = by_hand.client.store, by_hand.info(topic)
    names = by_hand.run(store.children(paths.acks(info.id)))
    return by_hand.run(nodes_of_copies(store, info.id, names))


def in_order(values):
    return sorted(values, key=lambda value: tuple(map(int, value.split(":"))))


class Reads:
    """Reads of the topic that begin at the subscription."""

    def __init__(self, spark, cluster, topic):
        self._spark, self._topic = spark, topic
        self._options = {"serviceUrl": cluster.service_url, "startingSubscription": "theirs"}
        self.batches = []

    def batch(self, **options):
        read = self._spark.read.format("ledger").options(**self._options, **options)
        return [bytes(row.value).decode() for row in read.load(self._topic).collect()]

    def stream(self, checkpoint, fails_after=None, **options):
        """The batches that a run to the end of the topic reads. `fails_after`: the run fails in the
        batch after this number of batches."""
        self.batches = []

        def keep(rows, _):
            if len(self.batches) == fails_after:
                raise ValueError("the test ends the query")
            self.batches.append([bytes(row.value).decode() for row in rows.collect()])

        stream = self._spark.readStream.format("ledger").options(**self._options, **options)
        write = stream.load(self._topic).writeStream.foreachBatch(keep)
        write = write.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True)
        query = write.start()
        if fails_after is None:
            assert query.awaitTermination(WAIT_MS / 1000)
        else:
            with pytest.raises(StreamingQueryException, match="the test ends the query"):
                query.awaitTermination(WAIT_MS / 1000)
        return self.batches


@pytest.fixture
def reads(spark, cluster, topic):
    return Reads(spark, cluster, topic)


def test_a_batch_and_a_stream_read_exactly_what_consumers_did_not_acknowledge(
    client, by_hand, reads, sent, topic, tmp_path
):
    acked = chosen(sent)
    consume(client, topic, until=acked)
    left = [value for value in sent if value not in acked]
    assert in_order(reads.batch()) == left
    assert in_order(reads.batch(minPartitions="12")) == left
    batches = reads.stream(tmp_path / "one", maxOffsetsPerTrigger="1500")
    assert in_order(value for batch in batches for value in batch) == left
    assert [len(batch) for batch in batches] == [1500] * (len(left) // 1500) + [len(left) % 1500]


def test_what_connected_consumers_acknowledge_counts_at_once(client, by_hand, reads, sent, topic):
    acked = chosen(sent)
    consumer = consume(client, topic, until=acked, close=False)
    assert eventually(lambda: acked_count(by_hand, topic) == len(acked))
    assert in_order(reads.batch()) == [value for value in sent if value not in acked]
    consumer.close()


def test_a_restart_after_consumers_acknowledged_more_reads_the_same_batches(
    client, by_hand, reads, sent, topic, tmp_path
):
    acked = chosen(sent)
    consume(client, topic, until=acked)
    first = reads.stream(tmp_path / "one", maxOffsetsPerTrigger="3000")
    assert len(first) > 1
    for commits in (tmp_path / "one" / "commits").iterdir():
        if commits.name.lstrip(".").startswith(("1", "2")):
            commits.unlink()  # as if the run was killed in batch 1
    for offset in (tmp_path / "one" / "offsets").iterdir():
        if offset.name.lstrip(".").startswith("2"):
            offset.unlink()
    consume(client, topic, until={f"1:{n}" for n in range(1500)})
    again = reads.stream(tmp_path / "one", maxOffsetsPerTrigger="3000")
    assert again == first[1:], "by the copy of its first offset"
    new = reads.stream(tmp_path / "two")
    assert in_order(value for batch in new for value in batch) == [
        value
        for value in sent
        if value not in acked and not (value.startswith("1:") and int(value[2:]) < 1500)
    ]


def test_a_query_killed_in_its_first_batch_reads_that_batch_again(
    client, cluster, by_hand, reads, sent, topic, tmp_path
):
    acked = chosen(sent)
    consume(client, topic, until=acked)
    seen = tmp_path / "seen"
    arguments = [cluster.service_url, topic, str(tmp_path / "one"), str(seen)]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.spark.killed_query", *arguments],
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert eventually(lambda: seen.exists() and seen.read_text().endswith("\n"), 120)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    killed_in = json.loads(Path(seen).read_text())
    assert len(killed_in) == 3000
    consume(client, topic, until={f"1:{n}" for n in range(1500)})
    batches = reads.stream(tmp_path / "one", maxOffsetsPerTrigger="3000")
    assert Counter(batches[0]) == Counter(killed_in)
    assert in_order(value for batch in batches for value in batch) == [
        value for value in sent if value not in acked
    ]


def test_a_copy_goes_with_the_query_that_is_beyond_it_and_stays_after_the_subscription(
    client, by_hand, reads, sent, topic, tmp_path
):
    consume(client, topic, until=chosen(sent))
    reads.stream(tmp_path / "one", maxOffsetsPerTrigger="3000")
    (copy_id,) = copies_of(by_hand, topic)
    info = by_hand.info(topic)
    by_hand.run(by_hand.client.subscriptions.delete(info.id, "theirs"))
    assert list(copies_of(by_hand, topic)) == [copy_id]
    producer = client.create_producer(topic)
    producer.send(b"0:9000")
    assert reads.stream(tmp_path / "one") == [["0:9000"]]
    assert not copies_of(by_hand, topic), "Spark has committed the end before that batch"
    producer.send(b"0:9001")
    assert reads.stream(tmp_path / "one") == [["0:9001"]]


def test_a_copy_that_is_gone_is_a_clear_error(client, by_hand, reads, sent, topic, tmp_path):
    consume(client, topic, until=chosen(sent))
    reads.stream(tmp_path / "one", maxOffsetsPerTrigger="3000")
    for folder in ("commits", "offsets"):
        for node in (tmp_path / "one" / folder).iterdir():
            if node.name.lstrip(".").startswith(("1", "2")):
                node.unlink()
    (copy_id,) = copies_of(by_hand, topic)
    info = by_hand.info(topic)
    by_hand.run(by_hand.client.ack_copies(info.id).delete(copy_id))
    with pytest.raises(Exception, match=r"LEDGER_SUBSCRIPTION\.COPY_GONE") as failure:
        reads.stream(tmp_path / "one", maxOffsetsPerTrigger="3000")
    cause = errors.cause_of(failure.value)
    assert cause is not None
    assert "Start the query with a new checkpoint and startingSubscription" in cause


def test_a_query_goes_on_behind_consumers_that_moved_its_subscription(
    client, by_hand, reads, sent, topic, tmp_path
):
    follows = {"subscription": "theirs", "onSubscriptionMoved": "subscription"}
    consume(client, topic, until={"1:0"})
    (first,) = reads.stream(tmp_path / "one", **follows)
    assert in_order(first) == [value for value in sent if value != "1:0"]
    producer = client.create_producer(f"{topic}-partition-1", batching_enabled=True)
    for n in range(2000, 2100):
        producer.send_async(b"1:%d" % n, lambda *_: None)
    producer.flush()
    acked = {f"1:{n}" for n in range(2000, 2100) if n % 3 == 1 or n < 2010}
    assert eventually(lambda: is_let_go(client, topic)), (
        "Spark ends a source's process after `stop`"
    )
    consume(client, topic, until=acked)
    (batch,) = reads.stream(tmp_path / "one", **follows)
    assert in_order(batch) == [f"1:{n}" for n in range(2000, 2100) if f"1:{n}" not in acked]
    producer.send(b"1:2100")
    assert reads.stream(tmp_path / "one", **follows) == [["1:2100"]]


@pytest.mark.parametrize("queries", [1, 2])
def test_consumers_after_a_query_get_neither_its_rows_nor_what_was_acknowledged_before(
    client, by_hand, reads, sent, topic, tmp_path, queries
):
    acked = chosen(sent)
    consume(client, topic, until=acked)
    left = set(sent) - acked
    for query in range(queries):
        options = {"subscription": "theirs", "maxOffsetsPerTrigger": "1000"}
        batches = reads.stream(tmp_path / f"{query}", fails_after=2, **options)
        rows = {value for batch in batches for value in batch}
        assert len(rows) == 2000
        assert rows <= left
        left -= rows
        if query + 1 == queries:
            assert eventually(lambda: is_let_go(client, topic))
    consumer = client.subscribe(
        *(topic, "theirs"),
        consumer_type=SHARED,
        batch_index_ack_enabled=True,
        receiver_queue_size=ROWS,
    )
    while left:
        message = consumer.receive(WAIT_MS)
        left.remove(message.data().decode())
        consumer.acknowledge(message)
    assert eventually(lambda: acked_count(by_hand, topic) == ROWS)
    consumer.close()


def is_let_go(client, topic):
    """Whether consumers may use the subscription."""
    try:
        client.subscribe(topic, "theirs", consumer_type=SHARED).close()
    except pulsar.ConsumerBusy:
        return False
    return True
