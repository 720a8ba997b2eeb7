"""Topics whose messages are only in memory, at brokers of a simulated cluster."""

import asyncio
from itertools import chain

import pytest

from spark_ledger.broker import names
from spark_ledger.broker.wire.commands import Refusal, ServerError, command
from spark_ledger.broker.wire.frames import encode
from spark_ledger.metadata.store import ANY_VERSION
from tests.kit.pulsar_batches import batch_of, chunked, lone, message
from tests.unit.spark_ledger.broker.admin_requests import Asked
from tests.unit.spark_ledger.broker.background import Brokers
from tests.unit.spark_ledger.broker.sessions import Session
from tests.unit.spark_ledger.topic.stage import play

TOPIC = "non-persistent://public/default/n"
EXCLUSIVE, SHARED, FAILOVER, KEY_SHARED = range(4)


class Impatient(Session):
    """Fails if a response does not come."""

    async def answer(self, name, *asked, **fields):
        async with asyncio.timeout(60):
            return await super().answer(name, *asked, **fields)


async def broker_of(brokers, name="a"):
    broker = await brokers.new(name)
    broker.message_bytes_max = 4 << 10  # entries of the simulation are small
    return broker


async def session_at(broker):
    session = Impatient(broker)
    session.socket.get_extra_info = lambda name, default=None: ("h", 1)
    await session.answer("connected", "connect", client_version="raw", protocol_version=19)
    return session


async def producer_at(broker, topic=TOPIC):
    session = await session_at(broker)
    made = await session.answer("producer_success", "producer", topic=topic, producer_id=1)
    assert (made.last_sequence_id, made.producer_ready) == (-1, True)
    return session


async def send(session, *batches):
    """The ids of the receipts."""
    ids = []
    for sequence_id, (data, count) in enumerate(batches):
        session.ask("send", data, producer_id=1, sequence_id=sequence_id, num_messages=count)
        async with asyncio.timeout(60):
            ids.append((await session.socket.answer("send_receipt")).message_id)
    return [(id_.ledgerId, id_.entryId) for id_ in ids]


async def consumer_at(
    broker, kind=EXCLUSIVE, permits=1000, topic=TOPIC, consumer_id=1, session=None, **fields
):
    session = session or await session_at(broker)
    fields = {"subscription": "s", "consumer_id": consumer_id, "request_id": 1} | fields
    await session.answer("success", "subscribe", topic=topic, subType=kind, **fields)
    if permits:
        session.ask("flow", consumer_id=consumer_id, messagePermits=permits)
    return session


def received(session):
    """The entries of the messages that have come."""
    commands = []
    while not session.socket.answers.empty():
        commands.append(session.socket.answers.get_nowait())
    return [one.message.message_id.entryId for one in commands if one.HasField("message")]


def one_of(key):
    return lone(message(b"x", key=key)), 1


def test_messages_go_to_consumers_of_each_type_at_once_and_nothing_is_stored():
    async def act(stage):
        broker = await broker_of(Brokers(stage))
        producer = await producer_at(broker)
        assert await send(producer, one_of("k")) == [(0, 0)]  # it has no consumer
        alone = await consumer_at(broker, EXCLUSIVE, subscription="alone")
        first = await consumer_at(broker, FAILOVER, subscription="over", consumer_name="a")
        await consumer_at(
            *(broker, FAILOVER),
            session=first,
            consumer_id=2,
            subscription="over",
            consumer_name="b",
        )
        shared = [await consumer_at(broker, SHARED, subscription="shared") for _ in range(2)]
        keyed = [await consumer_at(broker, KEY_SHARED, subscription="keyed") for _ in range(2)]
        reader = await consumer_at(broker, EXCLUSIVE, subscription="reader", durable=False)
        ids = await send(
            producer,
            *[one_of(f"k{n}") for n in range(8)],
            (batch_of([message(b"x", key="k")] * 3), 3),
        )
        assert ids == [(0, entry) for entry in range(1, 10)]
        await asyncio.sleep(0.1)
        everything = list(range(1, 10))
        assert received(alone) == received(first) == received(reader) == everything
        of_shared = [received(one) for one in shared]
        assert sorted(chain(*of_shared)) == everything and all(of_shared)
        of_keyed = [received(one) for one in keyed]
        assert sorted(chain(*of_keyed)) == everything and all(of_keyed)
        assert await broker.client.topics.find("n") is None
        alone.ask("ack", consumer_id=1, ack_type=0, request_id=9, message_id=[])
        acked = await alone.socket.answer("ack_response")
        assert not acked.HasField("error")
        await first.answer("success", "close_consumer", consumer_id=1, request_id=2)
        await send(producer, one_of("k"))
        assert received(first) == [12]  # by the second consumer

    play(act)


def test_a_message_without_permits_is_dropped_and_counted():
    async def act(stage):
        broker = await broker_of(Brokers(stage))
        producer, ask = await producer_at(broker), Asked(broker)
        slow = await consumer_at(broker, EXCLUSIVE, permits=2, subscription="slow")
        shared = await consumer_at(broker, SHARED, permits=0, subscription="shared")
        await send(producer, *[one_of("k")] * 5)
        assert (received(slow), received(shared)) == ([0, 1], [])
        slow.ask("flow", consumer_id=1, messagePermits=10)
        slow.ask("redeliver", consumer_id=1)
        await asyncio.sleep(2)
        assert received(slow) == []  # what was dropped does not come later
        await send(producer, one_of("k"))
        assert received(slow) == [5]
        path = "/admin/v2/non-persistent/public/default/n/stats"
        status, stats = await ask("GET", path)
        assert status == 200 and [one["producerId"] for one in stats["publishers"]] == [1]
        subscriptions = stats["subscriptions"]
        drops = {name: sub["msgDropCount"] for name, sub in subscriptions.items()}
        assert drops == {"slow": 3, "shared": 6}
        assert stats["msgDropRate"] > 0 and subscriptions["slow"]["msgBacklog"] == 0
        assert subscriptions["shared"]["type"] == "Shared"
        await slow.answer("success", "unsubscribe", consumer_id=1, request_id=3)
        _, stats = await ask("GET", path)
        assert list(stats["subscriptions"]) == ["shared"]

    play(act)


def test_a_client_that_takes_no_bytes_loses_messages_and_the_broker_keeps_none():
    async def act(stage):
        broker = await broker_of(Brokers(stage))
        producer = await producer_at(broker)
        stuck = await consumer_at(broker, SHARED)
        stuck.connection.has_room.clear()
        await send(producer, *[one_of("k")] * 3)
        stuck.connection.has_room.set()
        await send(producer, one_of("k"))
        assert received(stuck) == [3]

    play(act)


def test_partitioned_topics_are_made_listed_grown_and_deleted():
    async def act(stage):
        broker = await broker_of(Brokers(stage))
        ask, base = Asked(broker), "/admin/v2/non-persistent/public/default"
        assert await ask("PUT", f"{base}/p/partitions", 2) == (204, None)
        assert (await ask("PUT", f"{base}/p/partitions", 2))[0] == 409
        assert await ask("PUT", f"{base}/single") == (204, None)
        assert await ask("POST", f"{base}/p/partitions", 3) == (204, None)
        assert (await ask("POST", f"{base}/p/partitions", 2))[0] == 422
        assert await ask("GET", f"{base}/p/partitions") == (200, {"partitions": 3})
        full = "non-persistent://public/default"
        names_of_p = [f"{full}/p-partition-{number}" for number in range(3)]
        assert await ask("GET", base) == (200, [*names_of_p, f"{full}/single"])
        assert await ask("GET", f"{base}/partitioned") == (200, [f"{full}/p"])
        listed = await ask("GET", "/admin/v2/namespaces/public/default/topics?mode=ALL")
        assert {*names_of_p, f"{full}/single"} < {*listed[1]}
        session = await session_at(broker)
        asked = {"request_id": 1, "namespace": "public/default", "mode": 1}
        answer = await session.answer(
            "topics_of_namespace_response", "topics_of_namespace", **asked
        )
        assert list(answer.topics) == [*names_of_p, f"{full}/single"]

        producer = await producer_at(broker, f"{full}/p-partition-2")
        consumer = await consumer_at(broker, topic=f"{full}/p-partition-2")
        await send(producer, one_of("k"))
        (command,) = [c for c in _commands(consumer) if c.HasField("message")]
        assert command.message.message_id.partition == 2
        _, whole = await ask("GET", f"{base}/p/partitioned-stats")
        assert whole["metadata"]["partitions"] == 3 and list(whole["partitions"]) == names_of_p
        assert whole["subscriptions"]["s"]["msgDropCount"] == 0
        for wrong in (f"{full}/p", f"{full}/p-partition-3", f"{full}/none-partition-0"):
            with pytest.raises(Refusal):
                await broker.partition(names.parse(wrong), create=True)

        assert (await ask("DELETE", f"{base}/p-partition-2?force=true"))[0] == 501
        assert (await ask("GET", f"{base}/p-partition-2/stats?here=true"))[0] == 200
        assert (await ask("GET", f"{base}/p-partition-3/stats"))[0] == 404
        assert (await ask("PUT", f"{base}/p-partition-3/unload"))[0] == 404
        assert await ask("GET", f"{base}/p/subscriptions") == (200, ["s"])
        for wrong in ("p", "p?force=true", "single/partitions", "single/partitions?force=true"):
            status, body = await ask("DELETE", f"{base}/{wrong}")
            assert status == 409 and "delete it as" in body["reason"]
        assert (await ask("DELETE", f"{base}/p/partitions"))[0] == 412
        assert await ask("DELETE", f"{base}/p/partitions?force=true") == (204, None)
        await consumer.socket.answer("close_consumer")  # within some seconds
        assert (await ask("GET", f"{base}/p/partitioned-stats"))[0] == 404
        assert await ask("GET", base) == (200, [f"{full}/single"])

    play(act)


def test_a_topic_whose_record_cannot_be_read_is_left_out_of_the_list(caplog):
    async def act(stage):
        broker = await broker_of(Brokers(stage))
        ask, base = Asked(broker), "/admin/v2/non-persistent/public/default"
        for name in ("bad", "good"):
            assert await ask("PUT", f"{base}/{name}") == (204, None)
        bad = names.parse("non-persistent://public/default/bad").topic
        await stage.client.store.set(bad.path, b'{"partitions":"2"}', ANY_VERSION)
        assert await ask("GET", base) == (200, ["non-persistent://public/default/good"])
        assert f"topic {bad} cannot be read, and is left out" in caplog.text

    play(act)


def _commands(session):
    while not session.socket.answers.empty():
        yield session.socket.answers.get_nowait()


def test_partitions_spread_over_brokers_and_fall_on_others_as_a_broker_comes_and_goes():
    async def act(stage):
        brokers = Brokers(stage)
        first = await broker_of(brokers)
        await first.non_persistent.records.put(names.parse(TOPIC).topic, 16)
        parts = [names.parse(f"{TOPIC}-partition-{number}") for number in range(16)]
        sessions = [await producer_at(first, f"{TOPIC}-partition-{n}") for n in range(16)]
        second = await broker_of(brokers, "b")
        owners = [(await first.lookup(part, authoritative=False)) for part in parts]
        urls = {url for url, _ in owners}
        assert urls == {first.ownership.url, second.ownership.url}
        for session, part, (url, is_here) in zip(sessions, parts, owners, strict=True):
            assert await second.lookup(part, authoritative=False) == (url, not is_here)
            if not is_here:
                await session.socket.answer("close_producer")  # it fell on the other one
                with pytest.raises(Refusal, match="another broker"):
                    await first.partition(part, create=True)
                await second.partition(part, create=True)
        await second.close()
        for part in parts:
            assert await first.lookup(part, authoritative=False) == (first.ownership.url, True)

    play(act)


def test_a_topic_that_no_client_uses_is_forgotten():
    async def act(stage):
        broker = await broker_of(Brokers(stage))
        producer = await producer_at(broker)
        consumers = [await consumer_at(broker, topic=f"{TOPIC}{n}") for n in range(3)]
        await asyncio.sleep(30)
        assert len(broker.non_persistent.open) == 4
        for session in (producer, *consumers[1:]):
            session.connection.connection_lost(None)
        await asyncio.sleep(30)
        assert [str(name) for name in broker.non_persistent.open] == [f"{TOPIC}0"]
        producer = await producer_at(broker)
        assert await send(producer, one_of("k")) == [(0, 0)]

    play(act)


JSON, FIELDS = 2, b'{"type": "record", "name": "R", "fields": [{"name": "a", "type": "int"}]}'
OTHER = b'{"type": "record", "name": "R", "fields": [{"name": "b", "type": "int"}]}'
BASE = "/admin/v2/non-persistent/public/default"


def declared(name, data, **fields):
    asked = command(name, topic=TOPIC, request_id=1, **fields)
    part = getattr(asked, name)
    part.schema.type, part.schema.schema_data = JSON, data
    return encode(asked)


async def answer_to(session, name, frame):
    session.connection.data_received(frame)
    async with asyncio.timeout(60):
        return await session.socket.answer(name)


def test_a_schema_is_kept_and_compared_until_the_topic_is_deleted():
    async def act(stage):
        broker = await broker_of(Brokers(stage))
        ask, schemas = Asked(broker), "/admin/v2/schemas/public/default/n"
        session = await session_at(broker)
        for producer_id in (1, 2):
            frame = declared("producer", FIELDS, producer_id=producer_id)
            made = await answer_to(session, "producer_success", frame)
            assert made.schema_version == bytes(8)
        frame = declared("subscribe", OTHER, consumer_id=1, subscription="s", subType=EXCLUSIVE)
        refused = await answer_to(session, "error", frame)
        assert refused.error == ServerError.INCOMPATIBLE_SCHEMA
        frame = declared("subscribe", FIELDS, consumer_id=1, subscription="s", subType=EXCLUSIVE)
        await answer_to(session, "success", frame)
        got = await session.answer("get_schema_response", "get_schema", topic=TOPIC, request_id=2)
        assert (got.schema.schema_data, got.schema_version) == (FIELDS, bytes(8))
        status, shown = await ask("GET", f"{schemas}/schema")
        assert (status, shown["version"], shown["data"]) == (200, 0, FIELDS.decode())

        other = await broker_of(Brokers(stage), "b")
        info = await other.non_persistent.existing(names.parse(TOPIC).topic)
        versions = (await other.schemas_of(info).of(info)).client_versions
        assert [version.schema.data for version in versions] == [FIELDS]
        assert await ask("DELETE", f"{BASE}/n?force=true") == (204, None)
        assert (await ask("GET", f"{schemas}/schema"))[0] == 404
        assert await ask("PUT", f"{BASE}/n") == (204, None)
        assert (await ask("GET", f"{schemas}/schema"))[0] == 404
        frame = declared("producer", OTHER, producer_id=3)
        session = await session_at(broker)
        made = await answer_to(session, "producer_success", frame)
        assert made.schema_version == bytes(8)

    play(act)


def test_the_limits_of_the_namespace_count():
    async def act(stage):
        broker = await broker_of(Brokers(stage))
        limits = {"producers_max": 1, "consumers_max": 2, "subscription_consumers_max": 1}
        set_limits = broker.client.topics.set_namespace
        await producer_at(broker)
        await set_limits("public/default", limits | {"topics_max": 3})
        session = await session_at(broker)
        refused = await session.answer("error", "producer", topic=TOPIC, producer_id=1)
        assert (refused.error, "max producers" in refused.message) == (
            ServerError.PRODUCER_BUSY,
            True,
        )
        for subscription, consumer_id in (("s", 1), ("other", 2)):
            asked = {"subscription": subscription, "consumer_id": consumer_id}
            await consumer_at(broker, SHARED, session=session, **asked)
        for subscription, words in (("s", "Subscription reached"), ("third", "Topic reached")):
            asked = {"topic": TOPIC, "subType": SHARED, "subscription": subscription}
            refused = await session.answer("error", "subscribe", consumer_id=3, **asked)
            assert (refused.error, words in refused.message) == (ServerError.CONSUMER_BUSY, True)
        ask = Asked(broker)
        assert (await ask("PUT", f"{BASE}/p/partitions", 3))[0] == 412
        assert await ask("PUT", f"{BASE}/p/partitions", 2) == (204, None)
        assert (await ask("POST", f"{BASE}/p/partitions", 3))[0] == 412
        refused = await session.answer("error", "producer", topic=f"{TOPIC}2", producer_id=2)
        assert "Exceed maximum number of topics" in refused.message

    play(act)


def test_the_rates_of_the_namespace_count_and_what_is_beyond_them_is_dropped():
    async def act(stage):
        broker = await broker_of(Brokers(stage))
        rates = {"subscription_dispatch_rate": "2 messages", "subscribe_rate": "1 requests, 30 s"}
        set_rates = broker.client.topics.set_namespace
        await set_rates("public/default", rates)
        alone = await consumer_at(broker, EXCLUSIVE, subscription="alone", consumer_name="c")
        shared = await consumer_at(broker, SHARED, subscription="shared", consumer_name="c2")
        asked = {"topic": TOPIC, "subType": SHARED, "consumer_id": 1, "consumer_name": "c"}
        await alone.answer("success", "close_consumer", consumer_id=1, request_id=2)
        refused = await alone.answer("error", "subscribe", subscription="alone", **asked)
        assert "subscribe rate limit" in refused.message
        alone = await consumer_at(broker, EXCLUSIVE, subscription="alone", consumer_name="other")
        producer = await producer_at(broker)
        await send(producer, *[one_of("k")] * 5)
        assert received(alone) == received(shared) == [0, 1]
        await asyncio.sleep(2)
        await send(producer, (batch_of([message(b"x")] * 3), 3), one_of("k"))
        assert received(alone) == received(shared) == [5]  # a batch goes whole
        _, stats = await Asked(broker)("GET", f"{BASE}/n/stats")
        assert {name: sub["msgDropCount"] for name, sub in stats["subscriptions"].items()} == {
            "alone": 4,
            "shared": 4,
        }

        await set_rates("public/default", {"publish_rate": "2 messages"})
        producer = await producer_at(broker)
        await send(producer, one_of("k"))
        assert not producer.connection.client.intake.rests
        await send(producer, one_of("k"))
        assert producer.connection.client.intake.rests

    play(act)


def test_the_namespaces_limit_of_subscriptions_counts_those_that_have_consumers():
    async def act(stage):
        broker = await broker_of(Brokers(stage))
        await broker.client.topics.set_namespace("public/default", {"subscriptions_max": 1})
        first = await consumer_at(broker, SHARED, subscription="a")
        await consumer_at(broker, SHARED, subscription="a", consumer_id=2, session=first)
        asked = {"topic": TOPIC, "subType": SHARED, "subscription": "b", "consumer_id": 3}
        refused = await first.answer("error", "subscribe", **asked)
        assert refused.error == ServerError.NOT_ALLOWED
        assert "maximum number of subscriptions of the topic: 1" in refused.message
        first.connection.connection_lost(None)
        await consumer_at(broker, SHARED, subscription="b")

    play(act)


def test_the_chunks_of_a_message_reach_the_consumer_of_their_key_and_a_lone_shared_consumer():
    async def act(stage):
        broker = await broker_of(Brokers(stage))
        alone = await consumer_at(broker, EXCLUSIVE, subscription="alone")
        shared = await consumer_at(broker, SHARED, subscription="shared")
        keyed = [await consumer_at(broker, KEY_SHARED, subscription="keyed") for _ in range(2)]
        producer = await producer_at(broker)
        chunks = chunked(b"x" * 900, 3, key="k")
        for data in chunks:
            fields = {"producer_id": 1, "sequence_id": 0, "is_chunk": True, "num_messages": 1}
            producer.ask("send", data, **fields)
        ids = [(await producer.socket.answer("send_receipt")).message_id for _ in chunks]
        assert [id_.entryId for id_ in ids] == [2, 2, 2]
        assert received(alone) == received(shared) == [0, 1, 2]
        assert sorted([received(one) for one in keyed]) == [[], [0, 1, 2]]

    play(act)


def test_subscriptions_are_listed_and_deleted_and_clients_come_back_after_an_unload():
    async def act(stage):
        broker = await broker_of(Brokers(stage))
        ask, producer = Asked(broker), await producer_at(broker)
        first = await consumer_at(broker, SHARED, subscription="a")
        other = await consumer_at(broker, SHARED, subscription="b")
        assert await ask("GET", f"{BASE}/n/subscriptions") == (200, ["a", "b"])
        assert (await ask("DELETE", f"{BASE}/n/subscription/none"))[0] == 404
        assert (await ask("DELETE", f"{BASE}/n/subscription/a"))[0] == 412
        assert await ask("DELETE", f"{BASE}/n/subscription/a?force=true") == (204, None)
        await first.socket.answer("close_consumer")
        assert await ask("GET", f"{BASE}/n/subscriptions") == (200, ["b"])
        assert (await ask("PUT", f"{BASE}/none/unload"))[0] == 404
        assert await ask("PUT", f"{BASE}/n/unload") == (204, None)
        await producer.socket.answer("close_producer")
        await other.socket.answer("close_consumer")
        await producer_at(broker)
        await consumer_at(broker, SHARED, subscription="b")
        assert await ask("PUT", "/admin/v2/namespaces/public/default/unload") == (204, None)
        assert await ask("GET", f"{BASE}/n/subscriptions") == (200, [])

    play(act)
