"""Batches past live segments that brokers own: real brokers, bookies and Pulsar's own client."""

import threading
import time
import uuid

import pulsar
import pyarrow as pa
import pytest

from spark_ledger.local.processes import LocalBroker
from spark_ledger.topic import blocking
from spark_ledger.topic.commit.commit import TxnKey
from tests.integration.pulsar_clients import connected, rows_of
from tests.kit.processes import eventually

PARTITIONS = 2


@pytest.fixture
def two_brokers(fresh_cluster, tmp_path):
    """A cluster, and its second broker."""
    cluster = fresh_cluster(bookies=3)
    other = LocalBroker(tmp_path / "other.log", cluster.service_url)
    other.start()
    try:
        yield cluster, other
    finally:
        other.kill()


class Batches:
    """Batches of one app, each a row to every partition of every topic, in one commit."""

    def __init__(self, topics, names):
        self.topics = topics
        self.infos = [topics.run(topics.client.topics.open(name)) for name in names]
        intents = topics.client.intents
        self.intent = topics.run(
            intents.open_batch_intent(str(uuid.uuid4()), "run", "*", random=True)
        )
        self.version = 0

    def commit(self):
        rows = [b"s%d" % self.version] * 20
        results = {}
        for info in self.infos:
            task = self.topics.task_writer(info, self.intent, task_index=0)
            task.write(pa.array([b"%d" % i for i in range(20)]), pa.array(rows))
            results[info.id] = [task.start_finish()()]
        txn = TxnKey(self.intent.app_id, self.intent.target, self.version, self.intent.run_id)
        self.topics.run(self.topics.client.commit_topics(results, txn, self.intent.id))
        self.version += 1

    def opened_by_brokers(self, info):
        """How many commits of the topic's log are its owner's own."""

        async def counted():
            log = self.topics.client.log(info.id)
            return [one.app_id async for _, _, one in log.commits()]

        return sum(app.startswith("broker-") for app in self.topics.run(counted()))

    def live_ledgers(self, info):
        """In how many ledgers the segments born live of each partition are."""
        state = self.topics.run(self.topics.client.log(info.id).fold(fresh=True))
        tables = [
            [part.table for part in held.stretches(held.start_offset, held.end_offset)]
            for held in state.partitions
        ]
        return [
            len({ledger for one in some for ledger in one.ledgers[one.counted].tolist()})
            for some in tables
        ]


class Producers:
    """Messages p0, p1, ... to each topic, until told."""

    def __init__(self, client, names):
        self._all = {
            name: client.create_producer(name, send_timeout_millis=0, block_if_queue_full=True)
            for name in names
        }
        self.receipts = {name: [] for name in names}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._send)
        self._thread.start()

    def _send(self):
        i = 0
        while not self._over.is_set():
            for name, producer in self._all.items():
                got = self.receipts[name]
                producer.send_async(b"p%d" % i, lambda r, at, i=i, got=got: got.append((r, i, at)))
            i += 1
            time.sleep(0.002)
        for producer in self._all.values():
            producer.flush()

    def further(self, count=50):
        """Until every topic has so many receipts more."""
        there = {name: len(got) for name, got in self.receipts.items()}
        assert eventually(
            lambda: all(len(got) > there[name] + count for name, got in self.receipts.items())
        )

    def end(self):
        self._over.set()
        self._thread.join()


def check(topics, name, receipts, batches):
    """Every receipt's message is where it says, once and in order, and every batch is there."""
    found = rows_of(topics, name)
    sent = {p: [row[1] for _, row in rows if row[1][:1] == b"p"] for p, rows in found.items()}
    for numbers in ([int(one[1:]) for one in some] for some in sent.values()):
        assert numbers == sorted(set(numbers))
    assert sum(map(len, sent.values())) == len(receipts)
    at_offset = {p: {offset: row[1] for offset, row in rows} for p, rows in found.items()}
    for result, i, at in receipts:
        assert result == pulsar.Result.Ok
        offset = at.entry_id() + max(0, at.batch_index())
        assert at_offset[at.partition()][offset] == b"p%d" % i
    spark = [row[1] for rows in found.values() for _, row in rows if row[1][:1] == b"s"]
    assert sorted(spark) == sorted(b"s%d" % n for n in range(batches) for _ in range(20))


def topics_of(cluster):
    """Eight new ones, and their names."""
    topics, names = blocking.topics(cluster.service_url), [f"t-{uuid.uuid4()}" for _ in range(8)]
    for name in names:
        topics.run(topics.client.topics.create(name, PARTITIONS))
    return topics, names


def test_one_commit_goes_past_live_segments_of_two_brokers(two_brokers):
    cluster, other = two_brokers
    topics, names = topics_of(cluster)
    batches = Batches(topics, names)
    with connected(f"{cluster.broker_url},{other.url.removeprefix('pulsar://')}") as client:
        producers = Producers(client, names)
        for _ in range(10):
            producers.further(10)
            batches.commit()
        producers.end()
    batches.commit()
    opened = [batches.opened_by_brokers(info) for info in batches.infos]
    assert min(opened) < 10  # by fencing there would be one for each batch
    assert 1 in [some for info in batches.infos for some in batches.live_ledgers(info)]
    for name in names:
        check(topics, name, producers.receipts[name], 11)


def test_an_owner_that_was_killed_is_fenced_at_once(two_brokers):
    cluster, other = two_brokers
    topics, names = topics_of(cluster)
    batches = Batches(topics, names)
    with connected(f"{cluster.broker_url},{other.url.removeprefix('pulsar://')}") as client:
        producers = Producers(client, names)
        for _ in range(3):
            producers.further(10)
            batches.commit()
            other.kill()
            began_s = time.monotonic()
            batches.commit()
            assert time.monotonic() - began_s < 10
            other.start()
            producers.further(10)
        producers.end()
    batches.commit()
    for name in names:
        spark = sum(
            row[1][:1] == b"s" for rows in rows_of(topics, name).values() for _, row in rows
        )
        assert spark == 20 * batches.version
