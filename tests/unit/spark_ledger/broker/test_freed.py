"""A broker that stays up for months: what it served and is needed no more goes meanwhile, from the
bookies, from the metadata store and from its own memory."""

import asyncio

from spark_ledger.broker import names
from spark_ledger.broker.dispatch.dispatcher import Consumer
from spark_ledger.broker.dispatch.subscriptions import SubscribeRequest
from spark_ledger.broker.log import topic_commits
from spark_ledger.broker.log.probes import FRESH_S, Heard, Probes
from spark_ledger.broker.settings import BrokerSettings
from spark_ledger.broker.wire.commands import SubscriptionType
from spark_ledger.metadata import paths
from spark_ledger.metadata.ledger_record import decode
from spark_ledger.topic import client as topic_client
from spark_ledger.topic.upkeep.upkeep import Upkeep
from tests.kit.subscribing import subscribed
from tests.unit.spark_ledger.broker.owners import Sent
from tests.unit.spark_ledger.broker.two_brokers import Brokers
from tests.unit.spark_ledger.topic.stage import play

RETENTION_BYTES = 40_000
PASSES, PASS_S = 7, 60.0
LOOKED_S = 70.0
"""Simulated: by then a broker has looked after all that it has, without being told of anything."""


async def maintained(stage, passes=PASSES):
    upkeep = Upkeep(await stage.another())
    for _ in range(passes):
        await asyncio.sleep(PASS_S)
        await upkeep.once()
    await upkeep.close()


def ledgers_left(stage):
    """The rows that the ledgers have which there are, by ledger id."""
    depth = paths.ledger(0).count("/")
    nodes = stage.world.store.walk(paths.LEDGERS)
    found = [decode(node.value) for path, node in nodes if path.count("/") == depth]
    return {record.ledger_id: record.rows for record in found}


async def sent(broker, name, *messages):
    _, partition = await broker.partition(names.parse(name))
    for one in messages:
        run = Sent(one)
        partition.writer.append(run)
        await run.over.wait()
        assert not run.errors
    return partition


def test_of_what_a_broker_at_work_wrote_all_goes_that_retention_lets_go(monkeypatch):
    monkeypatch.setattr(topic_commits, "ROLL_BYTES_MIN", 10_000)

    async def act(stage):
        changes = {"retention_bytes": RETENTION_BYTES, "delete_delay_ms": 0, "merging": False}
        await stage.client.topics.change_policies("t", changes)
        broker = await Brokers(stage).new("a")
        await sent(broker, "t-partition-0", *[bytes([n]) * 5_000 for n in range(80)])

        await maintained(stage)

        held = (await stage.client.log(stage.topic.id).fold(fresh=True)).partitions[0]
        kept = held.bytes_between(held.start_offset, held.end_offset)
        assert RETENTION_BYTES <= kept <= RETENTION_BYTES + 15_000
        assert sum(rows or 0 for rows in ledgers_left(stage).values()) * 5_000 <= kept
        (own,) = [one for one in await stage.intents() if one.app_id.startswith("broker-")]
        assert own.is_open, "it stays at work"
        await broker.close()

    play(act)


def test_what_merging_copied_under_a_broker_at_work_is_kept_once():
    async def act(stage):
        await stage.client.topics.change_policies("t", {"delete_delay_ms": 0})
        broker = await Brokers(stage).new("a")
        broker.settings = BrokerSettings(roll_entries=1)
        await sent(broker, "t-partition-0", *[bytes([n]) * 100 for n in range(10)])

        await asyncio.sleep(7200)
        await maintained(stage)

        state = await stage.client.log(stage.topic.id).fold(fresh=True)
        assert sorted(ledgers_left(stage)) == state.ledgers()
        assert len(state.ledgers()) == 1, "they were merged"
        await broker.close()

    play(act)


async def empty_of(stage, broker, topic_id):
    await asyncio.sleep(LOOKED_S)
    assert broker.live_writer(topic_id, 0) is None
    assert topic_id not in [topic.info.id for topic in broker.open_topics()]
    assert topic_id not in broker.client._followers
    assert topic_id not in broker.client._logs


def test_of_a_deleted_topic_its_broker_keeps_nothing_in_memory_and_the_store_no_record():
    async def act(stage):
        await stage.client.topics.change_policies("t", {"delete_delay_ms": 0})
        other = await stage.client.topics.create("u", 1)
        broker = await Brokers(stage).new("a")
        for name in ("t-partition-0", "u-partition-0"):
            await broker.lookup(names.parse(name), authoritative=True)
            await sent(broker, name, b"x")
        await stage.client.topics.delete("t")

        await empty_of(stage, broker, stage.topic.id)
        await maintained(stage, passes=3)

        store = stage.client.store
        assert await store.children(paths.BROKERS_TOPICS) == [other.id]
        assert await store.children(paths.TOPIC_IDS) == [other.id]
        assert (
            list(ledgers_left(stage))
            == (await stage.client.log(other.id).fold(fresh=True)).ledgers()
        )
        await sent(broker, "u-partition-0", b"y")
        await broker.close()

    play(act)


def test_a_lookup_of_a_partition_that_the_broker_has_waits_for_no_sync_of_the_store(monkeypatch):
    async def act(stage):
        broker = await Brokers(stage).new("a")
        await sent(broker, "t-partition-0", b"x")
        syncs, store, sync = [], broker.client.store, broker.client.store.sync

        async def counted(path="/"):
            syncs.append(path)
            await sync(path)

        with monkeypatch.context() as patched:
            patched.setattr(store, "sync", counted)
            name = names.parse("t-partition-0")
            assert await broker.lookup(name, authoritative=False) == (broker.ownership.url, True)
            topic, partition = await broker.partition(name)
        assert (topic.info.id, partition.number, syncs) == (stage.topic.id, 0, [])
        await broker.close()

    play(act)


def test_records_of_brokers_that_earlier_versions_left_of_deleted_topics_go():
    async def act(stage):
        store = stage.client.store
        await store.create(paths.brokers_of_topic("long-gone"), b"{}", parents=True)
        await store.create(paths.brokers_of_topic(stage.topic.id), b"{}")

        await maintained(stage, passes=1)

        assert await store.children(paths.BROKERS_TOPICS) == [stage.topic.id]

    play(act)


def test_a_topic_that_went_to_another_broker_is_followed_no_more_and_again_when_it_is_back():
    async def act(stage):
        brokers = Brokers(stage)
        a, b = await brokers.new("a"), await brokers.new("b")
        await a.lookup(names.parse("t-partition-0"), authoritative=True)
        await sent(a, "t-partition-0", b"x")
        brokers.dead.add(a.ownership.url)
        await b.lookup(names.parse("t-partition-0"), authoritative=True)
        await sent(b, "t-partition-0", b"y")

        await empty_of(stage, a, stage.topic.id)

        brokers.dead = {b.ownership.url}
        await a.lookup(names.parse("t-partition-0"), authoritative=True)
        partition = await sent(a, "t-partition-0", b"z")
        assert partition.log.end == 3
        await a.close()
        await b.close()

    play(act)


def test_readers_each_of_a_name_of_its_own_leave_nothing_at_the_topic():
    async def act(stage):
        broker = await Brokers(stage).new("a")
        await broker.lookup(names.parse("t-partition-0"), authoritative=True)
        topic, partition = await broker.partition(names.parse("t-partition-0"))

        async def start():
            return 0

        for n in range(20):
            consumer = await topic.subscriptions.subscribe(
                partition,
                f"reader-{n}",
                SubscribeRequest(SubscriptionType.EXCLUSIVE),
                durable=False,
                start=start,
                make=lambda dispatcher: Consumer(None, 1, "c", 0, dispatcher, lambda _: None),
                earliest=True,
            )
            topic.subscriptions.leave(f"reader-{n}", consumer)
        await asyncio.sleep(1)

        assert dict(topic.subscriptions._locks) == {}
        await broker.close()

    play(act)


def test_of_topics_that_a_broker_only_looked_up_it_keeps_a_bounded_number(monkeypatch):
    monkeypatch.setattr(topic_client, "LOGS_KEPT_MAX", 5)

    async def act(stage):
        broker = await Brokers(stage).new("a")
        await broker.lookup(names.parse("t-partition-0"), authoritative=True)
        await sent(broker, "t-partition-0", b"x")
        for n in range(20):
            await stage.client.topics.create(f"u{n}", 1)
            assert await broker.catalog.partitions_of(names.parse(f"u{n}"), create=False) == 1

        assert len(broker.client._logs) == 6
        assert stage.topic.id in broker.client._logs, "it is followed"
        await broker.close()

    play(act)


def test_a_broker_looks_at_all_topics_at_once_when_another_dies():
    async def act(stage):
        brokers = Brokers(stage)
        a, b = await brokers.new("a"), await brokers.new("b")
        for n in range(30):
            await stage.client.topics.create(f"u{n}", 1)
            await a.lookup(names.parse(f"u{n}-partition-0"), authoritative=True)
        calls = []
        store = a.client.store
        for name in ("sync", "children", "get_many"):
            call = getattr(store, name)

            def counted(*some, call=call, name=name, **more):
                calls.append(name)
                return call(*some, **more)

            setattr(store, name, counted)
        await b.ownership.membership.leave()

        assert await a.ownership.take_over() == {}

        assert len(calls) < 8, calls
        await a.close()
        await b.close()

    play(act)


TOPICS, IDLE_S = 30, 1800.0


def counted(store):
    """Counts what a process asks its session for."""
    calls = []
    for name in ("get", "sync", "children", "set", "multi", "create", "delete"):
        call = getattr(store, name)

        def counting(*some, call=call, name=name, **more):
            calls.append((name, some[0] if some else ""))
            return call(*some, **more)

        setattr(store, name, counting)
    return calls


def test_an_idle_topic_and_its_subscription_cost_the_metadata_store_a_request_in_some_seconds():
    async def act(stage):
        broker = await Brokers(stage).new("a")
        for n in range(TOPICS):
            await stage.client.topics.create(f"u{n}", 1)
            name = f"u{n}-partition-0"
            await broker.lookup(names.parse(name), authoritative=True)
            partition = await sent(broker, name, b"x")
            topic, _ = await broker.partition(names.parse(name))
            await subscribed(topic, partition)
        await asyncio.sleep(300)
        calls = counted(broker.client.store)

        await asyncio.sleep(IDLE_S)

        of_topics = [path for _, path in calls if "subscriptions" not in str(path)]
        per_s = len(of_topics) / TOPICS / IDLE_S
        of_each = (len(calls) - len(of_topics)) / TOPICS / IDLE_S
        assert per_s < 0.075, f"{per_s} requests a second for each idle topic"
        assert of_each < 0.08, f"{of_each} requests a second for each idle subscription"
        await broker.close()

    play(act)


def test_a_subscription_that_is_sought_or_deleted_by_others_is_seen_at_once():
    async def act(stage):
        broker = await Brokers(stage).new("a")
        await broker.lookup(names.parse("t-partition-0"), authoritative=True)
        partition = await sent(broker, "t-partition-0", b"x")
        topic, _ = await broker.partition(names.parse("t-partition-0"))
        ends = {name: asyncio.Event() for name in ("s", "the next one")}
        for name, ended in ends.items():
            await subscribed(topic, partition, name, end=ended.set)
            await asyncio.sleep(0.2)  # while the positions before it were just written
        await asyncio.sleep(5)

        for name, ended in ends.items():
            await stage.client.subscriptions.delete(stage.topic.id, name, force=True)
            async with asyncio.timeout(3):
                await ended.wait()
        await broker.close()

    play(act)


def test_a_partition_that_another_broker_takes_is_given_up_at_once():
    async def act(stage):
        brokers = Brokers(stage)
        a, b = await brokers.new("a"), await brokers.new("b")
        await a.lookup(names.parse("t-partition-0"), authoritative=True)
        await sent(a, "t-partition-0", b"x")
        topic, _ = await a.partition(names.parse("t-partition-0"))
        await asyncio.sleep(10)
        brokers.dead.add(a.ownership.url)

        await b.lookup(names.parse("t-partition-0"), authoritative=True)
        await asyncio.sleep(0.1)

        assert not topic.has(0)
        await a.close()
        await b.close()

    play(act)


def test_a_url_at_which_a_broker_was_once_is_forgotten():
    async def act(stage):
        async def ask(url):
            return Heard.ANSWER

        probes = Probes(ask)
        for n in range(50):
            assert await probes.answers(f"pulsar://broker-{n}:1")
            await asyncio.sleep(FRESH_S)

        assert len(probes._answered_s) <= 2

    play(act)
