"""A client's connection on a real socket, without a cluster."""

import asyncio
import time
import zlib

import pyarrow as pa
import pytest

from spark_ledger import errors
from spark_ledger.broker.dispatch.dispatcher import Consumer
from spark_ledger.broker.dispatch.subscriptions import Subscription
from spark_ledger.broker.produce.producer import RUN_BYTES_MAX, RUN_UNPACKED_MAX
from spark_ledger.broker.produce.waiting import Chunk
from spark_ledger.broker.serve import presence
from spark_ledger.broker.serve.commands import refusal_of
from spark_ledger.broker.serve.connection import UNSENT_BYTES_MAX
from spark_ledger.broker.wire.commands import (
    AckType,
    LookupType,
    Refusal,
    ServerError,
    SubscriptionType,
    command,
)
from spark_ledger.broker.wire.frames import PulsarFrameReader, encode
from spark_ledger.metadata.store import StoreUnavailable
from spark_ledger.metrics import Counter
from spark_ledger.topic.entry.pulsar_batch import build_batch
from spark_ledger.topic.entry.pulsar_message_pb2 import MessageMetadata
from tests.kit.pulsar_batches import batch_of, chunked, lone, message
from tests.kit.waiting import until
from tests.unit.spark_ledger.broker.connections import (
    BATCH_BYTES,
    BATCHES,
    LONG,
    Partition,
    Tail,
    connected,
    runs_of,
    sent,
)


def test_of_a_client_that_does_not_read_little_is_kept():
    async def main():
        async with connected() as (connection, client):
            subscription = Subscription("s", SubscriptionType.EXCLUSIVE, None)
            dispatcher = subscription.dispatcher(Tail(), 0)
            one = Consumer(connection, 1, "a", 0, dispatcher, lambda _: None)
            one.dispatcher.join(one)
            one.dispatcher.flow(one, 1000)
            async with asyncio.timeout(30):
                await connection.full.wait()
            for _ in range(100):
                await asyncio.sleep(0)
                unsent = connection.transport.get_write_buffer_size()
                assert unsent < UNSENT_BYTES_MAX + 2 * BATCH_BYTES
            low, _ = connection.transport.get_write_buffer_limits()
            await until(lambda: connection.transport.get_write_buffer_size() > low)
            loop, came = asyncio.get_running_loop(), 0
            async with asyncio.timeout(30):  # and as it reads, the rest comes
                while came < BATCHES * BATCH_BYTES:
                    came += len(await loop.sock_recv(client, 1 << 20))
            one.dispatcher.leave(one)

    asyncio.run(main())


async def full_of_what_is_not_read(connection):
    """Its client reads nothing; so it is not read either."""
    subscription = Subscription("s", SubscriptionType.EXCLUSIVE, None)
    one = Consumer(connection, 1, "a", 0, subscription.dispatcher(Tail(), 0), lambda _: None)
    one.dispatcher.join(one)
    one.dispatcher.flow(one, 1000)
    async with asyncio.timeout(30):
        await connection.full.wait()
    assert not connection.is_read
    return one


def test_a_client_that_hangs_has_lost_its_connection_when_it_is_asked_whatever_waits_to_be_sent(
    monkeypatch,
):
    monkeypatch.setattr(presence, "ANSWER_S", 0.05)

    async def main():
        async with connected() as (connection, _):
            one = await full_of_what_is_not_read(connection)
            async with asyncio.timeout(10):
                assert not any(await asyncio.gather(connection.answers(), connection.answers()))
            assert not connection.open
            one.dispatcher.leave(one)

    asyncio.run(main())


def test_a_client_that_reads_nothing_for_long_has_lost_its_connection(monkeypatch):
    for name in ("ASK_S", "SILENT_S"):
        monkeypatch.setattr(presence, name, 0.05)

    async def main():
        async with connected() as (connection, _):
            one = await full_of_what_is_not_read(connection)
            await until(lambda: not connection.open)
            one.dispatcher.leave(one)

    asyncio.run(main())


def test_a_client_that_answers_keeps_its_connection_also_where_it_takes_little():
    async def main():
        async with connected() as (connection, client):
            loop = asyncio.get_running_loop()
            hello = command("connect", client_version="raw", protocol_version=19)
            await loop.sock_sendall(client, encode(hello))
            asked = asyncio.create_task(connection.answers())
            await asyncio.sleep(0)
            await loop.sock_sendall(client, encode(command("pong")))
            assert await asked
            one = await full_of_what_is_not_read(connection)
            asked = asyncio.create_task(connection.answers())
            await asyncio.sleep(0)
            assert connection.is_read
            await loop.sock_sendall(client, encode(command("pong")))
            assert await asked
            assert not connection.is_read, "as before it was asked"
            connection.transport.abort()
            one.dispatcher.leave(one)

    asyncio.run(main())


def stand_still():
    """As a process that was stopped: longer than the client has to answer."""
    time.sleep(0.1)


def test_a_client_whose_answer_came_while_the_broker_stood_still_keeps_its_connection(monkeypatch):
    monkeypatch.setattr(presence, "ANSWER_S", 0.05)

    async def main():
        async with connected() as (connection, client):
            loop = asyncio.get_running_loop()
            hello = command("connect", client_version="raw", protocol_version=19)
            await loop.sock_sendall(client, encode(hello))
            await until(lambda: connection.client.connected)
            asked = asyncio.create_task(connection.answers())
            await asyncio.sleep(0)
            await loop.sock_sendall(client, encode(command("pong")))
            stand_still()
            assert await asked
            connection.transport.abort()

    asyncio.run(main())


def test_an_ack_of_a_consumer_that_is_not_there_is_refused():
    async def main():
        async with connected() as (connection, client):
            loop, frames = asyncio.get_running_loop(), PulsarFrameReader()
            hello = command("connect", client_version="raw", protocol_version=19)
            ack = command("ack", consumer_id=5, ack_type=AckType.INDIVIDUAL, request_id=8)
            place = ack.ack.message_id.add()
            place.ledgerId, place.entryId = 1, 1
            await loop.sock_sendall(client, encode(hello) + encode(ack))
            answers = []
            async with asyncio.timeout(10):
                while len(answers) < 2:
                    answers += frames.feed(await loop.sock_recv(client, 1 << 16))
            response = answers[1].command.ack_response
            assert (response.request_id, response.consumer_id) == (8, 5)
            assert response.error == ServerError.CONSUMER_NOT_FOUND
            connection.transport.abort()

    asyncio.run(main())


def test_what_a_producer_sends_that_was_never_here_is_answered_by_its_end():
    async def main():
        async with connected() as (_, client):
            loop, reader = asyncio.get_running_loop(), PulsarFrameReader()
            hello = command("connect", client_version="raw", protocol_version=19)
            lost = command("send", producer_id=5, sequence_id=0, num_messages=1)
            await loop.sock_sendall(client, encode(hello))
            await loop.sock_sendall(client, encode(lost, lone(message(b"x"))))
            found = []
            async with asyncio.timeout(30):
                while len(found) < 2:
                    found += reader.feed(await loop.sock_recv(client, 1 << 16))
            assert found[1].command.close_producer.producer_id == 5

    asyncio.run(main())


def test_a_request_that_the_metadata_store_does_not_serve_in_time_is_tried_again_by_the_client():
    away = StoreUnavailable("the metadata store did not answer in time")
    refusal = refusal_of(away)
    assert refusal.code is ServerError.SERVICE_NOT_READY, "an unknown error would end the client's"
    assert str(away) in str(refusal)


def test_a_name_that_is_not_utf_8_is_refused_and_logged_as_no_defect(caplog):
    async def main():
        async with connected() as (_, client):
            loop, reader = asyncio.get_running_loop(), PulsarFrameReader()
            hello = command("connect", client_version="raw", protocol_version=19)
            asked = encode(command("partitioned_metadata", topic="abc", request_id=1))
            await loop.sock_sendall(client, encode(hello) + asked.replace(b"abc", b"a\xffc"))
            found = []
            async with asyncio.timeout(30):
                while len(found) < 2:
                    found += reader.feed(await loop.sock_recv(client, 1 << 16))
            said = found[1].command.partitioned_metadata_response
            assert said.error == ServerError.NOT_ALLOWED

    asyncio.run(main())
    assert not caplog.records


def test_what_producers_send_in_one_go_is_one_run_of_each():
    frames = [sent(1 + i % 2, i) for i in range(6)]
    runs, answers = asyncio.run(runs_of(frames))
    assert runs == [(1, [0, 2, 4]), (2, [1, 3, 5])]
    found = [one.send_receipt for one in answers]
    assert [one.sequence_id for one in found] == [0, 2, 4, 1, 3, 5]
    assert [one.message_id.entryId for one in found] == [10, 11, 12] * 2


def test_what_a_producer_sends_that_waits_for_its_turn_is_not_taken():
    async def main():
        async with connected() as (connection, client):
            partition = Partition(deduplication=False)
            partition.produce(connection, 1)
            connection.data_received(sent(1, 0))
            partition.produce(connection, 1, may_send=False)
            connection.data_received(sent(1, 1) + sent(1, 2))
            return partition.runs, await asyncio.get_running_loop().sock_recv(client, 1 << 20)

    runs, answer = asyncio.run(main())
    assert runs == [(1, [0])]
    (closed, *_) = PulsarFrameReader().feed(answer)
    assert closed.command.close_producer.producer_id == 1


def test_a_run_ends_where_another_kind_follows_or_it_is_large():
    batch = batch_of([message(b"a"), message(b"b")], sequence_id=2)
    large = lone(message(bytes(RUN_BYTES_MAX)), sequence_id=4)
    other = lone(message(b"x"), producer="q", sequence_id=6)
    frames = [sent(1, 0), sent(1, 1), sent(1, 2, batch), sent(1, 4, large), sent(1, 5)]
    runs, answers = asyncio.run(runs_of([*frames, sent(1, 6, other)]))
    assert [numbers for _, numbers in runs] == [[0, 1], [2], [4], [5], [6]]
    assert [one.send_receipt.sequence_id for one in answers] == [0, 1, 2, 4, 5, 6]


def test_sequence_ids_that_do_not_rise_begin_another_run_of_a_topic_with_deduplication():
    frames = [sent(1, number) for number in (0, 1, 1, 2, 0)]
    assert asyncio.run(runs_of(frames))[0] == [(1, [0, 1, 1, 2, 0])]
    runs, _ = asyncio.run(runs_of(frames, deduplication=True))
    assert [numbers for _, numbers in runs] == [[0, 1], [1, 2], [0]]


def test_a_message_that_is_damaged_is_refused_between_the_receipts_of_those_around_it():
    damaged = lone(message(b"x"))[:-1] + b"y"
    runs, answers = asyncio.run(runs_of([sent(1, 0), sent(1, 1, damaged), sent(1, 2)]))
    assert [numbers for _, numbers in runs] == [[0], [2]]
    assert [one.send_receipt.sequence_id for one in answers if one.HasField("send_receipt")] == [
        0,
        2,
    ]
    assert answers[1].send_error.sequence_id == 1
    assert answers[1].send_error.error == ServerError.CHECKSUM


def test_a_producer_that_is_sent_away_late_takes_no_chunks_of_the_one_that_has_its_number_now():
    async def main():
        async with connected() as (connection, _):
            connection.client.broker.incomplete = Counter("incomplete", "")
            partition = Partition(deduplication=False)
            partition.produce(connection, 1)
            before = connection.client.intake.producers[1]
            connection.client.intake.remove(before)
            partition.produce(connection, 1)
            first, last = chunked(b"ab", 2)
            said = command("send", producer_id=1, sequence_id=5, is_chunk=True)
            connection.data_received(encode(said, first))
            before.send_away()
            connection.data_received(encode(said, last))
            assert [run.chunk for run in partition.appended] == [Chunk.EARLIER, Chunk.LAST]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("asked", "what"),
    [
        (command("producer", topic="t", txn_enabled=True, request_id=7), "transactions"),
        (command("producer", topic="t", producer_name=LONG, request_id=7), "a producer has 1026"),
        (command("producer", topic="t", initial_subscription_name=LONG, request_id=7), "1026"),
        (command("subscribe", topic="t", subscription=LONG, request_id=7), "a subscription has"),
        (
            command("subscribe", topic="t", subscription="s", consumer_name=LONG, request_id=7),
            "1026",
        ),
    ],
)
def test_what_a_request_asks_for_and_is_not_built_is_refused(asked, what):
    async def main():
        async with connected() as (connection, client):
            connection.client.connected = True
            connection.data_received(encode(asked))
            loop, reader, found = asyncio.get_running_loop(), PulsarFrameReader(), []
            async with asyncio.timeout(30):
                while not found:
                    found += reader.feed(await loop.sock_recv(client, 1 << 16))
            assert found[0].command.error.error == ServerError.NOT_ALLOWED
            assert what in found[0].command.error.message

    asyncio.run(main())


def test_a_client_learns_the_largest_message_and_a_larger_one_is_refused():
    async def main():
        async with connected(message_bytes_max=1 << 20) as (connection, client):
            connection.client.broker.incomplete = Counter("incomplete", "")
            partition = Partition(deduplication=False)
            hello = command("connect", client_version="raw", protocol_version=19)
            connection.data_received(encode(hello))
            partition.produce(connection, 1)
            data = lone(message(b"x" * ((1 << 20) + (64 << 10))), sequence_id=0)
            connection.data_received(encode(command("send", producer_id=1, sequence_id=0), data))
            loop, reader, found = asyncio.get_running_loop(), PulsarFrameReader(), []
            async with asyncio.timeout(30):
                while len(found) < 2:
                    found += reader.feed(await loop.sock_recv(client, 1 << 16))
            assert found[0].command.connected.max_message_size == 1 << 20
            assert found[1].command.send_error.error == ServerError.NOT_ALLOWED
            assert not partition.appended

    asyncio.run(main())


@pytest.mark.parametrize(
    ("kind", "answer"),
    [("lookup", "lookup_response"), ("partitioned_metadata", "partitioned_metadata_response")],
)
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (StoreUnavailable("away"), ServerError.METADATA),
        (errors.Unavailable("away"), ServerError.METADATA),
        (errors.TopicNotFound("away"), ServerError.TOPIC_NOT_FOUND),
        (Refusal(ServerError.SERVICE_NOT_READY, "away"), ServerError.SERVICE_NOT_READY),
    ],
)
def test_a_client_whose_lookup_the_store_does_not_serve_keeps_its_connection(
    kind, answer, error, code
):
    """After ServiceNotReady it closes the connection: the broker wants that where it ends."""

    async def main():
        async with connected() as (connection, client):
            connection.client.connected = True

            async def refused(*_, **__):
                raise error

            broker = connection.client.broker
            broker.lookup = broker.partitions_of = refused
            connection.data_received(encode(command(kind, topic="t", request_id=7)))
            loop, reader, found = asyncio.get_running_loop(), PulsarFrameReader(), []
            async with asyncio.timeout(30):
                while not found:
                    found += reader.feed(await loop.sock_recv(client, 1 << 16))
            response = getattr(found[0].command, answer)
            assert (response.request_id, response.error) == (7, code)
            assert "away" in response.message

    asyncio.run(main())


def test_a_lookup_that_names_a_listener_has_no_broker():
    async def main():
        async with connected() as (connection, client):
            connection.client.connected = True
            asked = command("lookup", topic="t", request_id=7, advertised_listener_name="out")
            connection.data_received(encode(asked))
            loop, reader, found = asyncio.get_running_loop(), PulsarFrameReader(), []
            async with asyncio.timeout(30):
                while not found:
                    found += reader.feed(await loop.sock_recv(client, 1 << 16))
            response = found[0].command.lookup_response
            assert response.response == LookupType.FAILED
            assert response.error == ServerError.SERVICE_NOT_READY
            assert response.message == "the broker do not have out listener"

    asyncio.run(main())


def test_a_send_of_a_transaction_is_refused():
    said = command("send", producer_id=1, sequence_id=1, txnid_most_bits=0)
    frame = encode(said, lone(message(b"x"), sequence_id=1))
    runs, answers = asyncio.run(runs_of([sent(1, 0), frame, sent(1, 2)]))
    assert [numbers for _, numbers in runs] == [[0], [2]]
    assert answers[1].send_error.error == ServerError.NOT_ALLOWED


@pytest.mark.parametrize("batched", [False, True])
def test_a_publish_time_that_no_timestamp_reaches_is_refused(batched):
    made, kept = batch_of if batched else lambda some, **kw: lone(*some, **kw), [message(b"x")]
    late = made(kept, sequence_id=1, publish_ms=2**62)
    runs, answers = asyncio.run(runs_of([sent(1, 0), sent(1, 1, late), sent(1, 2)]))
    assert [numbers for _, numbers in runs] == [[0], [2]]
    assert "publish time" in answers[1].send_error.message


def undecodable(which):
    """A batch that can never be decoded, and what of it is wrong."""
    said = {"producer_name": "p", "sequence_id": 1, "publish_time": 1}
    few = [message(b"x")] * 3
    zeros = pa.Codec("zstd").compress(bytes(130 << 20), asbytes=True)
    noise = build_batch(MessageMetadata(num_messages_in_batch=3, **said), b"\xa5" * 60)
    alone = MessageMetadata(compression=3, uncompressed_size=130 << 20, **said)
    return {
        "codec": (batch_of(few, sequence_id=1, compression=9), "unknown compression 9"),
        "lone codec": (
            build_batch(MessageMetadata(compression=9, **said), b"x"),
            "unknown compression",
        ),
        "zeros": (build_batch(alone, zeros), "136314880 bytes, decompressed"),
        "size": (batch_of(few, sequence_id=1, compression=1, uncompressed=9 << 20), "cannot be"),
        "noise": (noise, "first message"),
        "count": (batch_of(few, sequence_id=1, count=40), "cannot have 40 messages"),
        "nothing declared": (compressed(2, zlib.compress(b"data")), "declares 0"),
        "0 declared": (compressed(2, zlib.compress(b"data"), uncompressed_size=0), "declares 0"),
        "snappy": (
            compressed(4, pa.compress(bytes(9000), "snappy", asbytes=True), uncompressed_size=10),
            "has 9000",
        ),
    }[which]


def compressed(kind, payload, **declared):
    """A lone message."""
    said = {"producer_name": "p", "sequence_id": 1, "publish_time": 1}
    return build_batch(MessageMetadata(compression=kind, **said, **declared), payload)


@pytest.mark.parametrize(
    "which",
    [
        *("codec", "lone codec", "zeros", "size", "noise", "count"),
        *("nothing declared", "0 declared", "snappy"),
    ],
)
def test_a_batch_that_can_never_be_decoded_is_refused_and_has_no_receipt(which):
    batch, what = undecodable(which)
    runs, answers = asyncio.run(runs_of([sent(1, 0), sent(1, 1, batch), sent(1, 2)]))
    assert [numbers for _, numbers in runs] == [[0], [2]]
    assert what in answers[1].send_error.message
    assert "onBadEntry" not in answers[1].send_error.message


def test_a_run_has_a_bounded_number_of_bytes_when_it_is_decompressed():
    large = batch_of(
        [message(bytes(3 << 20))], sequence_id=1, compression=2, compress=zlib.compress
    )
    runs, _ = asyncio.run(runs_of([sent(1, number, large) for number in range(1, 6)]))
    assert [numbers for _, numbers in runs] == [[1, 2], [3, 4], [5]]


def test_lone_compressed_messages_make_runs_of_bounded_size_when_they_are_decompressed():
    value = bytes(1 << 20)
    packed = zlib.compress(value)

    def one(number):
        said = {"producer_name": "p", "sequence_id": number, "publish_time": 1}
        metadata = MessageMetadata(compression=2, uncompressed_size=len(value), **said)
        return sent(1, number, build_batch(metadata, packed))

    runs, _ = asyncio.run(runs_of([one(number) for number in range(30)]))
    assert [number for _, numbers in runs for number in numbers] == list(range(30))
    assert max(len(numbers) for _, numbers in runs) <= RUN_UNPACKED_MAX // len(value)
    assert len(runs) < 8


def test_a_client_whose_sends_are_held_has_its_pings_answered(monkeypatch):
    monkeypatch.setattr("spark_ledger.broker.serve.connection.CONNECTION_BYTES_MAX", 1000)
    monkeypatch.setattr("spark_ledger.broker.serve.presence.HELD_PONG_S", 0.01)

    async def main():
        async with connected() as (connection, client):
            partition = Partition(deduplication=False)
            partition.produce(connection, 1)
            held = sent(1, 0, lone(message(bytes(2000))))
            connection.data_received(held)
            assert not connection.is_read
            loop, reader, answers = asyncio.get_running_loop(), PulsarFrameReader(), []
            async with asyncio.timeout(30):
                while len(answers) < 3:
                    data = await loop.sock_recv(client, 1 << 20)
                    answers += [one.command for one in reader.feed(data)]
            assert all(one.HasField("pong") for one in answers)
            partition.appended[0].stored(0)
            assert connection.is_read

    asyncio.run(main())
