"""Messages that Pulsar's client cuts into chunks, by a real broker and real bookies."""

import asyncio
import random
import socket
from contextlib import contextmanager

import pulsar
import pytest

from spark_ledger.broker.wire.commands import command
from spark_ledger.broker.wire.frames import encode
from spark_ledger.cli.nodes import living_brokers
from spark_ledger.topic import blocking
from tests.integration.pulsar_clients import TIMEOUT_MS, connected, rows_of, sealed
from tests.kit.processes import eventually
from tests.kit.pulsar_batches import chunked


@pytest.mark.parametrize("codec", ["NONE", "LZ4"])
def test_a_chunked_message_is_one_row_and_one_message(client, cluster, topics, name, codec):
    large = [random.Random(i).randbytes(11 << 20) for i in range(2)]
    settings = {"batching_enabled": False, "chunking_enabled": True}
    settings["compression_type"] = getattr(pulsar.CompressionType, codec)
    producer = client.create_producer(name, **settings)
    consumer = client.subscribe(name, "s", initial_position=pulsar.InitialPosition.Earliest)
    first = producer.send(b"first")
    at = producer.send(large[0], partition_key="k", properties={"a": "1"}, event_timestamp=1000)
    with connected(cluster.broker_url) as other:  # whose chunks come between the first one's
        beside, said = other.create_producer(name, **settings), []
        for _ in range(2):
            beside.send_async(large[1], lambda result, _: said.append(result))
            producer.send_async(large[0], lambda result, _: said.append(result))
        assert eventually(lambda: len(said) == 4)
        assert said == [pulsar.Result.Ok] * 4
        last = producer.send(b"last")
        # three chunks a message, each with an offset: the id is that of the last one
        assert (first.entry_id(), at.entry_id(), last.entry_id()) == (0, 3, 16)

        found = [consumer.receive(TIMEOUT_MS) for _ in range(7)]
        values = [one.data() for one in found]
        assert (values[0], values[1], values[6]) == (b"first", large[0], b"last")
        assert sorted(values[2:6]) == sorted(large * 2)
        assert (found[1].partition_key(), found[1].properties()) == ("k", {"a": "1"})
        consumer.acknowledge_cumulative(found[1])
        consumer.acknowledge(found[3])
        consumer.close()
        again = other.subscribe(name, "s", start_message_id_inclusive=True)
        rest = [again.receive(TIMEOUT_MS).data() for _ in range(4)]
        assert rest in ([values[2], *values[4:7]], values[2:6])  # single acks may be forgotten
        again.seek(at)
        assert again.receive(TIMEOUT_MS).data() == large[0]
        again.close()
        reader = other.create_reader(name, at, start_message_id_inclusive=True)
        came = [reader.read_next(TIMEOUT_MS).data() for _ in range(6)]
        assert came == values[1:]
        assert not reader.has_message_available()
    sealed(topics, name)
    (rows,) = rows_of(topics, name).values()
    offsets = [offset for offset, _ in rows[:8]]
    assert (offsets[:2], offsets[5:]) == ([0, 3], [15, 16, 17])
    assert [row[1] for _, row in rows[:7]] == values
    assert rows[1][1][0] == b"k"
    assert rows[1][1][3] == [{"key": "a", "value": b"1"}]


def test_a_message_whose_producer_goes_in_the_middle_is_counted_where_brokers_are_listed(
    cluster, name
):
    url = cluster.broker_url  # the first use starts the broker
    before = incomplete_at(cluster)
    with chunk_by_chunk(url, name, 3) as send:
        send(0)
    assert eventually(lambda: incomplete_at(cluster) == before + 1)


@contextmanager
def chunk_by_chunk(url, name, chunks):
    """Sends the chunks of one message, each when it is asked for: Pulsar's client sends them at
    once. A chunk's number in; returns without a look at its receipt."""
    parts = chunked(b"large" * 100, chunks)
    host, _, port = url.removeprefix("pulsar://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=60) as raw, raw.makefile("rb") as read:
        for request in (
            command("connect", client_version="test", protocol_version=15),
            command("producer", topic=name, producer_id=1, request_id=1, producer_name="p"),
        ):
            raw.sendall(encode(request))
            read.read(int.from_bytes(read.read(4)))

        def send(chunk):
            head = command("send", producer_id=1, sequence_id=0, num_messages=1, is_chunk=True)
            raw.sendall(encode(head, parts[chunk]))

        yield send


def test_acknowledgements_between_the_chunks_of_a_message_outlive_a_killed_broker(
    fresh_cluster, name
):
    """C8 of a user's report: the position fell from 91 to 0 when the chunked message came."""
    cluster = fresh_cluster(bookies=3)
    with connected(cluster.broker_url) as client:
        consumer = client.subscribe(name, "s")
        with chunk_by_chunk(cluster.broker_url, name, 2) as send:
            send(0)
            producer = client.create_producer(name, batching_enabled=False)
            ids = [producer.send(b"%d" % i) for i in range(100)]
            assert [at.entry_id() for at in ids] == list(range(1, 101))
            for i in range(91):
                message = consumer.receive(TIMEOUT_MS)
                assert message.data() == b"%d" % i
                consumer.acknowledge(message)
            assert eventually(lambda: position_of(cluster, name) == 92)
            send(1)
            rest = [consumer.receive(TIMEOUT_MS).data() for _ in range(10)]
            assert rest == [*(b"%d" % i for i in range(91, 100)), b"large" * 100]
            assert eventually(lambda: position_of(cluster, name) == 92)
        cluster.broker.kill()
        cluster.broker.start()
        consumer.close()
    with connected(cluster.broker_url) as client:
        consumer = client.subscribe(name, "s")
        again = [consumer.receive(TIMEOUT_MS).data() for _ in range(10)]
        assert sorted(again) == sorted(rest)
        with pytest.raises(pulsar.Timeout):
            consumer.receive(1000)


def position_of(cluster, name):
    """The offset at which a broker would go on for subscription `s` if it died now."""
    topics = blocking.topics(cluster.service_url)
    info = topics.run(topics.client.topics.find(name))
    return topics.run(topics.client.subscriptions.positions(info.id, "s")).get(0, 0)


def incomplete_at(cluster):
    listed = asyncio.run(living_brokers(cluster.service_url))
    (count,) = (one["incomplete_messages"] for one in listed if one["url"] == cluster.broker_url)
    return count


def test_a_message_of_100_mib_goes_through_a_broker_that_does_not_hold_it(
    client, cluster, topics, name
):
    large = random.Random(7).randbytes(1 << 20) * 100
    producer = client.create_producer(
        name, batching_enabled=False, chunking_enabled=True, send_timeout_millis=120_000
    )
    producer.send(b"first")
    before = peak_bytes(cluster.broker.pid)
    at = producer.send(large)
    reader = client.create_reader(name, pulsar.MessageId.earliest)
    assert reader.read_next(TIMEOUT_MS).data() == b"first"
    assert reader.read_next(3 * TIMEOUT_MS).data() == large
    assert not reader.has_message_available()
    grown = peak_bytes(cluster.broker.pid) - before
    print(f"the broker grew by {grown >> 20} MiB at most, of {before >> 20} MiB")
    sealed(topics, name)
    (rows,) = rows_of(topics, name).values()
    assert [offset for offset, _ in rows[:3]] == [0, at.entry_id(), at.entry_id() + 1]
    assert rows[1][1][1] == large


def peak_bytes(pid):
    """The most memory that a process has had."""
    with open(f"/proc/{pid}/status") as status:
        said = dict(line.split(":", 1) for line in status)
    return int(said["VmHWM"].split()[0]) << 10
