"""Pulsar's own client, a real broker and real bookies."""

import json
import socket
import subprocess
import sys
import threading
import time
import uuid

import pulsar
import pyarrow as pa
import pytest

from spark_ledger import errors
from spark_ledger.broker.dispatch.subscriptions import CLOSE_WAIT_S
from spark_ledger.broker.log.ownership import Ownership
from spark_ledger.broker.wire.commands import command
from spark_ledger.broker.wire.frames import encode
from spark_ledger.local.processes import LocalBroker
from spark_ledger.topic import blocking
from spark_ledger.topic.log.policies import TopicPolicies
from spark_ledger.topic.subscription.consumer_cursors import WRITTEN_S
from spark_ledger.topic.upkeep.admin import TopicAdmin
from tests.integration.frozen import frozen
from tests.integration.pulsar_clients import TIMEOUT_MS, connected, rows_of, sealed, write
from tests.kit.processes import eventually

CODECS = ("NONE", "LZ4", "ZLib", "ZSTD", "SNAPPY")
SPREAD = 16  # topics: that all fall on one of two brokers happens to nobody


def received(consumer, count):
    found = []
    while len(found) < count:
        message = consumer.receive(TIMEOUT_MS)
        found.append(message)
        consumer.acknowledge(message)
    return found


@pytest.mark.parametrize("batched", [False, True])
def test_what_a_producer_sends_is_read_with_key_value_properties_and_times(
    client, topics, name, batched
):
    before_ms = int(time.time() * 1000)
    for codec in CODECS:
        producer = client.create_producer(
            name,
            compression_type=getattr(pulsar.CompressionType, codec),
            batching_enabled=batched,
        )
        producer.send_async(
            b"value of " + codec.encode() * 50,
            lambda result, _: None,
            partition_key="key",
            properties={"a": "1", "b": "ü"},
            event_timestamp=1_600_000_000_000,
        )
        producer.send_async(None, lambda result, _: None, partition_key="gone")
        producer.flush()
        producer.close()
    sealed(topics, name)
    (rows,) = rows_of(topics, name).values()
    assert [offset for offset, _ in rows] == list(range(len(rows)))
    for i, codec in enumerate(CODECS):
        key, value, event_time, headers, published_ms = rows[2 * i][1]
        assert (key, value) == (b"key", b"value of " + codec.encode() * 50)
        assert event_time.timestamp() == 1_600_000_000
        assert headers == [{"key": "a", "value": b"1"}, {"key": "b", "value": "ü".encode()}]
        assert before_ms <= published_ms <= time.time() * 1000
        assert rows[2 * i + 1][1][:4] == (b"gone", None, None, None)


def test_what_is_sent_is_seen_by_the_command_line_before_it_is_sealed(client, cluster, name):
    client.create_producer(name).send(b"live", partition_key="k", properties={"a": "b"})
    tail = [sys.executable, "-m", "spark_ledger.cli.main", "topic", "tail", name]
    tail += ["--no-follow", "--json", "--service-url", cluster.service_url]
    said = json.loads(subprocess.run(tail, check=True, capture_output=True).stdout)
    assert (said["offset"], said["key"], said["value"]) == (0, "k", "live")


def test_what_spark_wrote_is_consumed_and_both_are_in_one_order(client, topics, name):
    topics.run(topics.client.topics.create(name))
    write(topics, name, [b"s%d" % i for i in range(2500)], [b"k%d" % i for i in range(2500)])
    consumer = client.subscribe(name, "s", initial_position=pulsar.InitialPosition.Earliest)
    producer = client.create_producer(name)
    producer.send(b"between")
    write(topics, name, [b"more"])
    producer.send(b"last")
    found = received(consumer, 2503)
    values = [one.data() for one in found]
    assert values == [*(b"s%d" % i for i in range(2500)), b"between", b"more", b"last"]
    assert found[7].partition_key() == "k7"
    assert found[7].properties() == {"from": "spark"}
    offsets = [
        one.message_id().entry_id() + max(0, one.message_id().batch_index()) for one in found
    ]
    assert offsets == list(range(2503))


def test_partitions_keep_the_order_of_their_keys(client, topics, name):
    topics.run(topics.client.topics.create(name, 4))
    producer = client.create_producer(name, batching_enabled=True, block_if_queue_full=True)
    for i in range(2000):
        producer.send_async(b"%d" % i, lambda result, _: None, partition_key=f"k{i % 17}")
    producer.flush()
    consumer = client.subscribe(
        name,
        "s",
        pulsar.ConsumerType.Failover,
        initial_position=pulsar.InitialPosition.Earliest,
    )
    by_key = {}
    for one in received(consumer, 2000):
        by_key.setdefault(one.partition_key(), []).append(int(one.data()))
    assert sum(map(len, by_key.values())) == 2000
    assert all(some == sorted(some) for some in by_key.values())


def test_a_reader_starts_where_it_is_told_and_sees_what_is_available(client, name):
    producer = client.create_producer(name, batching_enabled=True)
    ids = {}
    for i in range(100):
        producer.send_async(b"%d" % i, lambda result, at, i=i: ids.__setitem__(i, at))
    producer.flush()
    with_all = client.create_reader(name, pulsar.MessageId.earliest)
    seen = []
    while with_all.has_message_available():
        seen.append(int(with_all.read_next(TIMEOUT_MS).data()))
    assert seen == list(range(100))
    latest = client.create_reader(name, pulsar.MessageId.latest)
    assert not latest.has_message_available()
    producer.send(b"new")
    assert latest.read_next(TIMEOUT_MS).data() == b"new"
    since = client.create_reader(name, ids[41], start_message_id_inclusive=True)
    assert since.read_next(TIMEOUT_MS).data() == b"41"
    after = client.create_reader(name, ids[41])
    assert after.read_next(TIMEOUT_MS).data() == b"42"


def test_a_consumer_seeks_by_id_and_by_time(client, name):
    producer = client.create_producer(name)
    consumer = client.subscribe(name, "s")
    ids = [producer.send(b"%d" % i) for i in range(5)]
    time.sleep(0.3)  # the broker's clock is the metadata store's, but for what its answer took
    middle_ms = int(time.time() * 1000)
    time.sleep(0.3)
    for i in range(5, 10):
        producer.send(b"%d" % i)
    assert [one.data() for one in received(consumer, 10)] == [b"%d" % i for i in range(10)]
    consumer.seek(ids[3])
    assert received(consumer, 1)[0].data() in (b"3", b"4")
    consumer.seek(middle_ms)
    assert received(consumer, 1)[0].data() == b"5"
    consumer.seek(pulsar.MessageId.earliest)
    assert received(consumer, 1)[0].data() == b"0"


def test_a_topic_is_told_by_its_partitions_unless_a_client_made_it(client, topics, name):
    client.create_producer(name).send(b"x")
    assert client.get_topic_partitions(name) == [f"persistent://public/default/{name}"]
    with pytest.raises(errors.BadConfig, match="is not partitioned"):
        topics.run(TopicAdmin(topics.client).grow(name, 2))
    topics.run(topics.client.topics.create(f"{name}-3", 3))
    parts = [f"persistent://public/default/{name}-3-partition-{p}" for p in range(3)]
    assert client.get_topic_partitions(f"{name}-3") == parts


def test_a_table_view_has_the_last_value_of_each_key(client, name):
    producer = client.create_producer(name)
    for i in range(10):
        producer.send(b"%d" % i, partition_key=f"k{i % 3}")
    view = client.create_table_view(name)
    assert {key: view.get(key) for key in ("k0", "k1", "k2")} == {
        "k0": b"9",
        "k1": b"7",
        "k2": b"8",
    }


def test_what_is_not_acknowledged_comes_again_after_a_negative_ack_and_a_reconnect(client, name):
    producer = client.create_producer(name)
    consumer = client.subscribe(name, "s", negative_ack_redelivery_delay_ms=1000)
    for i in range(4):
        producer.send(b"%d" % i)
    first = [consumer.receive(TIMEOUT_MS) for _ in range(4)]
    consumer.acknowledge(first[0])
    consumer.acknowledge(first[2])
    consumer.negative_acknowledge(first[1])
    assert [consumer.receive(TIMEOUT_MS).data() for _ in range(2)] == [b"1", b"3"]
    consumer.close()
    again = client.subscribe(name, "s")
    assert again.receive(TIMEOUT_MS).data() == b"1"


def test_a_cumulative_ack_in_the_middle_is_where_the_next_consumer_begins(client, name):
    producer = client.create_producer(name)
    consumer = client.subscribe(name, "s")
    for i in range(10):
        producer.send(b"%d" % i)
    messages = [consumer.receive(TIMEOUT_MS) for _ in range(10)]
    consumer.acknowledge_cumulative(messages[6])
    consumer.close()
    assert client.subscribe(name, "s").receive(TIMEOUT_MS).data() == b"7"


def test_a_close_waits_until_its_subscription_is_free_but_not_long_where_zookeeper_does_not_answer(
    fresh_cluster, name
):
    cluster = fresh_cluster(bookies=3)
    topics = blocking.topics(cluster.service_url)
    topic_id = topics.run(topics.client.topics.create(name)).id

    def listed():
        (one,) = topics.run(topics.client.subscriptions.list(topic_id))
        return one.live, dict(one.positions)

    def read(client):
        earliest = pulsar.InitialPosition.Earliest
        consumer = client.subscribe(name, "s", initial_position=earliest)
        received(consumer, 1)
        return consumer

    with connected(cluster.broker_url) as client:
        producer = client.create_producer(name)
        for _ in range(3):
            producer.send(b"one")
        read(client).close()
        assert listed() == (False, {0: 1})
        read(client).close()
        assert listed() == (False, {0: 2})
        consumer = read(client)
        with frozen(cluster.zookeeper):
            began_s = time.monotonic()
            consumer.close()
            assert CLOSE_WAIT_S <= time.monotonic() - began_s < 20
        assert eventually(lambda: listed() == (False, {0: 3}))
        leaving = threading.Thread(target=client.subscribe(name, "s").unsubscribe, daemon=True)
        with frozen(cluster.zookeeper):
            leaving.start()
            leaving.join(2 * WRITTEN_S)
            assert leaving.is_alive(), "it is not deleted yet"
        leaving.join(60)
        assert not topics.run(topics.client.subscriptions.list(topic_id))


def test_of_failover_consumers_one_is_active_and_the_next_goes_on(client, cluster, name):
    producer = client.create_producer(name)
    failover = pulsar.ConsumerType.Failover
    with connected(cluster.broker_url) as other:
        first = client.subscribe(name, "s", failover, consumer_name="a")
        second = other.subscribe(name, "s", failover, consumer_name="b")
        producer.send(b"0")
        (one,) = received(first, 1)
        assert one.data() == b"0"
        with pytest.raises(pulsar.Timeout):
            second.receive(300)
        first.close()
        producer.send(b"1")
        assert received(second, 1)[0].data() == b"1"


def test_what_is_taken_or_not_built_is_refused_by_pulsars_own_errors(client, cluster, name):
    client.create_producer(name, access_mode=pulsar.ProducerAccessMode.Exclusive)
    client.subscribe(name, "s")
    with connected(cluster.broker_url) as other:
        with pytest.raises(pulsar.ProducerBusy):
            other.create_producer(name)
        with pytest.raises(pulsar.ProducerFenced):
            other.create_producer(name, access_mode=pulsar.ProducerAccessMode.Exclusive)
        with pytest.raises(pulsar.ConsumerBusy):
            other.subscribe(name, "s")


@pytest.mark.parametrize("wrong", ["a b", "x" * 300])
def test_a_wrong_name_fails_at_once(client, wrong):
    begun = time.monotonic()
    for act in (client.create_producer, lambda name: client.subscribe(name, "s")):
        with pytest.raises(pulsar.NotAllowedError):
            act(wrong)
    assert time.monotonic() - begun < 20  # of the 30 that one waits for what may be tried again


def test_a_send_after_the_topic_was_terminated_fails(client, topics, name):
    producer = client.create_producer(name)
    producer.send(b"kept")
    topics.run(TopicAdmin(topics.client).terminate(name))
    with pytest.raises(pulsar.TopicTerminated):
        producer.send(b"late")
    (rows,) = rows_of(topics, name).values()
    assert [row[1] for _, row in rows] == [b"kept"]


def test_a_subscription_that_others_use_is_not_unsubscribed(client, cluster, topics, name):
    def subscribed(by):
        return by.subscribe(
            name,
            "s",
            pulsar.ConsumerType.Failover,
            initial_position=pulsar.InitialPosition.Earliest,
        )

    first = subscribed(client)
    with connected(cluster.broker_url) as other:
        for by in (client, other):
            second = subscribed(by)
            with pytest.raises(pulsar.PulsarException, match="MetadataError"):
                first.unsubscribe()
            second.close()
    client.create_producer(name).send(b"still")
    assert received(first, 1)[0].data() == b"still"
    first.unsubscribe()


def test_where_rows_are_typed_no_producer_of_bytes_comes(client, topics, name):
    info = topics.run(topics.client.topics.create(name))
    topics.run(topics.client.schemas.register(info, pa.schema([("a", pa.int64())])))
    with pytest.raises(pulsar.IncompatibleSchema):
        client.create_producer(name)
    client.subscribe(name, "s")


def test_one_producer_waits_to_be_the_only_one_and_another_fences_it(client, cluster, name):
    mode = pulsar.ProducerAccessMode
    first = client.create_producer(name, access_mode=mode.Exclusive)
    first.send(b"first")
    with connected(cluster.broker_url) as other:
        made = []

        def wait():
            made.append(other.create_producer(name, access_mode=mode.WaitForExclusive))

        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        waiting.join(0.5)
        assert waiting.is_alive()
        first.close()
        waiting.join(60)
        made[0].send(b"second")
        with connected(cluster.broker_url) as third:
            fencing = third.create_producer(name, access_mode=mode.ExclusiveWithFencing)
            fencing.send(b"third")
            with pytest.raises(pulsar.PulsarException):
                made[0].send(b"lost")
    reader = client.create_reader(name, pulsar.MessageId.earliest)
    found = [reader.read_next(TIMEOUT_MS).data() for _ in range(3)]
    assert found == [b"first", b"second", b"third"]
    assert not reader.has_message_available()


@pytest.mark.parametrize(
    "damaged", [b"\xff" * 100, encode(command("ping")), encode(command("send", producer_id=1))]
)
def test_bytes_that_are_no_request_end_their_own_connection_alone(client, cluster, name, damaged):
    producer = client.create_producer(name)
    host, _, port = cluster.broker_url.removeprefix("pulsar://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=60) as raw:
        raw.sendall(damaged)
        assert raw.recv(100) == b""
    assert producer.send(b"still").entry_id() == 0


def test_topics_by_pattern_and_an_unsubscribed_name(client, topics):
    import re

    stem = f"p{uuid.uuid4().hex}"
    for i in range(2):
        client.create_producer(f"{stem}-{i}").send(b"%d" % i)
    consumer = client.subscribe(
        re.compile(f"persistent://public/default/{stem}-.*"),
        "s",
        initial_position=pulsar.InitialPosition.Earliest,
    )
    assert sorted(one.data() for one in received(consumer, 2)) == [b"0", b"1"]
    info = topics.run(topics.client.topics.open(f"{stem}-0"))
    assert [s.name for s in topics.run(topics.client.subscriptions.list(info.id))] == ["s"]
    consumer.unsubscribe()
    assert topics.run(topics.client.subscriptions.list(info.id)) == []


def test_spark_commits_while_producers_go_on_and_nothing_is_lost_or_doubled(client, topics, name):
    topics.run(topics.client.topics.create(name))
    producer = client.create_producer(name, batching_enabled=True, block_if_queue_full=True)
    results, over = [], threading.Event()

    def send():
        i = 0
        while not over.is_set():
            producer.send_async(b"p%d" % i, lambda result, at, i=i: results.append((result, i, at)))
            i += 1
            time.sleep(0.0005)
        producer.flush()

    sending = threading.Thread(target=send)
    sending.start()
    for i in range(5):
        write(topics, name, [b"s%d-%d" % (i, n) for n in range(10)])
        time.sleep(0.2)
    over.set()
    sending.join()
    sealed(topics, name)
    (rows,) = rows_of(topics, name).values()
    values = {offset: row[1] for offset, row in rows}
    sent = [value for value in values.values() if value.startswith(b"p")]
    assert sent == [b"p%d" % i for i in range(len(results))]
    for result, i, at in results:
        assert result == pulsar.Result.Ok
        assert values[at.entry_id() + max(0, at.batch_index())] == b"p%d" % i
    spark = [value for value in values.values() if value.startswith(b"s")]
    assert len(spark) == 50


@pytest.mark.parametrize("once", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_killed_brokers_topics_lose_nothing_and_consumers_go_on(fresh_cluster, name, once):
    cluster = fresh_cluster(bookies=3)
    topics = blocking.topics(cluster.service_url)
    topics.run(topics.client.topics.create(name, 1, TopicPolicies(deduplication=once)))
    with connected(cluster.broker_url) as client:
        producer = client.create_producer(name, send_timeout_millis=0, block_if_queue_full=True)
        consumer = client.subscribe(name, "s")
        receipts, sent, over = {}, [0], threading.Event()

        def send():
            while not over.is_set():
                i = sent[0]
                producer.send_async(b"%d" % i, lambda r, at, i=i: receipts.setdefault(i, (r, at)))
                sent[0] += 1
                time.sleep(0.001)

        sending = threading.Thread(target=send)
        sending.start()
        for _ in range(3):
            there = len(receipts)
            assert eventually(lambda there=there: len(receipts) > there + 100)
            cluster.broker.kill()
            cluster.broker.start()
        there = len(receipts)
        assert eventually(lambda there=there: len(receipts) > there + 100)
        over.set()
        sending.join()
        producer.flush()
        assert eventually(lambda: len(receipts) == sent[0])
        consumed = set()
        while len(consumed) < sent[0]:
            consumed.add(int(consumer.receive(TIMEOUT_MS).data()))
        assert consumed == set(range(sent[0]))
        cluster.broker.stop()
    (rows,) = rows_of(topics, name).values()
    values = [int(row[1]) for _, row in rows]
    assert [offset for offset, _ in rows] == list(range(len(rows)))
    assert set(values) == set(range(sent[0]))
    firsts = list(dict.fromkeys(values))
    assert firsts == sorted(firsts)
    for i, (result, at) in receipts.items():
        assert result == pulsar.Result.Ok
        stored_before = once and at.ledger_id() < 0
        assert stored_before or values[at.entry_id()] == i
    assert not once or values == list(range(sent[0]))


def test_a_consumer_goes_on_after_the_broker_was_stopped_and_started(fresh_cluster, name):
    cluster = fresh_cluster(bookies=3)
    with connected(cluster.broker_url) as client:
        producer = client.create_producer(name)
        consumer = client.subscribe(name, "s")
        for i in range(10):
            producer.send(b"%d" % i)
        received(consumer, 6)
    cluster.broker.stop()
    cluster.broker.start()
    with connected(cluster.broker_url) as client:
        consumer = client.subscribe(name, "s")
        assert [one.data() for one in received(consumer, 4)] == [b"%d" % i for i in range(6, 10)]


def test_topics_spread_over_brokers_and_those_of_a_killed_one_are_taken_over(
    fresh_cluster, name, tmp_path
):
    cluster = fresh_cluster(bookies=3)
    other = LocalBroker(tmp_path / "other.log", cluster.service_url)
    try:
        first = cluster.broker_url
        other.start()
        hosts = f"{first},{other.url.removeprefix('pulsar://')}"
        topics = blocking.topics(cluster.service_url)
        with connected(hosts) as client:
            producers = [client.create_producer(f"{name}-{i}") for i in range(SPREAD)]
            for producer in producers:
                producer.send(b"before")
            infos = [topics.run(topics.client.topics.open(f"{name}-{i}")) for i in range(SPREAD)]

            def owners():
                ownership = Ownership(topics.client.store, "nobody", "")
                return {topics.run(ownership.owners(info.id)).of(0).url for info in infos}

            both = {first, other.url}  # one that was too slow gets its share back later
            assert eventually(lambda: owners() == both)
            other.kill()
            for producer in producers:
                producer.send(b"after")
            said = cluster.broker.log.read_text()
            assert "does not answer: others take its partitions over" in said
            assert owners() == {first}
            for i in range(SPREAD):
                reader = client.create_reader(f"{name}-{i}", pulsar.MessageId.earliest)
                found = [reader.read_next(TIMEOUT_MS).data() for _ in range(2)]
                assert found == [b"before", b"after"]
    finally:
        other.kill()
