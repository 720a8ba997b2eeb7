"""What a broker does in the background goes on, whatever nodes the store has and whatever fails."""

import asyncio
import json

import pytest

from spark_ledger.broker import names
from spark_ledger.broker.broker import Broker
from spark_ledger.broker.log.membership import Membership, Registered
from spark_ledger.broker.log.ownership import Ownership
from spark_ledger.broker.owner.owned_topic import LEDGERS_ASKED_AT_ONCE, REREAD_S
from spark_ledger.broker.produce.live_writer import LiveWriter
from spark_ledger.broker.wire.commands import Refusal
from spark_ledger.metadata import paths
from spark_ledger.metadata.ledger_record import RecordState
from spark_ledger.topic.read.follower import TopicFollower
from tests.unit.spark_ledger.broker.background import Brokers
from tests.unit.spark_ledger.broker.owners import Sent
from tests.unit.spark_ledger.broker.two_brokers import Producer
from tests.unit.spark_ledger.topic.stage import play

PARTITIONS = 24


def test_a_malformed_node_among_the_brokers_does_not_end_the_watch():
    async def act(stage):
        brokers = Brokers(stage)
        a, b = await brokers.new("a"), await brokers.new("b")
        await b.ownership.choose("t", here=True)
        await stage.client.store.create(paths.broker("x"), b"{}")
        await asyncio.sleep(5)
        await b.seal()  # its background ends: it is dead
        brokers.dead.add(b.ownership.url)
        await asyncio.sleep(5)
        assert await brokers.owner(a) == "a"
        await a.seal()

    play(act)


def test_a_broker_sees_by_the_registrations_whether_brokers_without_ack_ledgers_live():
    async def act(stage):
        brokers = Brokers(stage)
        a, _ = await brokers.new("a"), await brokers.new("b")
        await asyncio.sleep(2)
        assert not a.cursors.has_older_brokers
        older = json.dumps({"url": "pulsar://older:1", "incomplete": 0, "since_ms": 1}).encode()
        await stage.client.store.create(paths.broker("older"), older)
        await asyncio.sleep(2)
        assert a.cursors.has_older_brokers
        await stage.client.store.delete(paths.broker("older"))
        await asyncio.sleep(2)
        assert not a.cursors.has_older_brokers
        await a.seal()

    play(act)


@pytest.mark.parametrize("name", ["probe", "keep"])
def test_a_defect_in_one_look_does_not_end_the_background(name, monkeypatch, caplog):
    async def act(stage):
        brokers = Brokers(stage)
        a, b = await brokers.new("a"), await brokers.new("b")
        await b.ownership.choose("t", here=True)
        right, failed = getattr(Membership, name), asyncio.Event()

        async def wrong(self):
            failed.set()
            raise ZeroDivisionError("a defect")

        monkeypatch.setattr(Membership, name, wrong)
        await failed.wait()
        monkeypatch.setattr(Membership, name, right)
        await asyncio.sleep(1)
        assert "a defect" in caplog.text
        await b.seal()  # its background ends: it is dead
        brokers.dead.add(b.ownership.url)
        await stage.client.store.delete(paths.broker("a"))
        await asyncio.sleep(10)
        assert await brokers.owner(a) == "a"
        assert "a" in await a.ownership.membership.brokers()
        await a.seal()

    play(act)


def test_a_broker_that_another_buried_registers_again_at_once():
    async def act(stage):
        a = await Brokers(stage).new("a")
        await asyncio.sleep(5.3)
        await stage.client.store.delete(paths.broker("a"))
        await asyncio.sleep(0.5)
        assert list(await a.ownership.membership.brokers()) == ["a"]
        await a.seal()

    play(act)


def test_a_broker_listens_before_others_see_it_and_gives_no_partition_out_before():
    async def act(stage):
        brokers = Brokers(stage)
        a = await brokers.new("a")
        await a.lookup(names.parse("t-partition-0"), authoritative=True)
        process = await stage.world.client("process of b")
        b = Broker(process.ledgers, process.rng, "pulsar://b:1")
        b.id = b.cursors.broker_id = "b"
        asked = []

        async def answers(url):  # who asks b before it listens reaches no one
            asked.append(list(await a.ownership.membership.brokers()))
            return bool(listening)

        b.ownership = Ownership(process.ledgers.metadata, "b", "pulsar://b:1", answers)
        listening, register = [], b.ownership.membership.register

        async def registers():
            assert listening
            with pytest.raises(Refusal, match="the broker is starting"):
                await b.lookup(names.parse("t-partition-0"), authoritative=True)
            await register()

        b.ownership.membership.register = registers
        await stage.client.store.create(
            paths.broker("killed"), Registered("pulsar://b:1").encoded(), ephemeral=True
        )
        await b.start(lambda: listening.append(True))
        assert asked == [["a", "killed"]], "before it listens"
        assert sorted(await a.ownership.membership.brokers()) == ["a", "b"]
        await b.lookup(names.parse("t-partition-0"), authoritative=True)
        await a.seal()
        await b.seal()

    play(act)


def test_a_broker_whose_url_another_has_ends_by_itself_and_says_why():
    async def act(stage):
        brokers = Brokers(stage)
        a = await brokers.new("a")
        url = a.ownership.url
        brokers.dead.add(url)  # who asks it reaches itself
        b = await brokers.new("b", url)
        over = asyncio.Event()
        b.watch.on_failure = over.set
        async with asyncio.timeout(10):
            await over.wait()
        failure = b.watch.failure
        assert failure is not None and "serves at pulsar://a:1 already" in str(failure)
        await b.close()
        await asyncio.sleep(5)
        assert a.watch.failure is None
        said = json.loads((await stage.client.store.get(paths.broker("a"))).value)
        assert said["url"] == url and said["since_ms"] > 0
        await a.seal()

    play(act)


async def serving(broker, messages=3):
    """Its partition of the topic, with a producer, and a live ledger that has messages."""
    await broker.lookup(names.parse("t-partition-0"), authoritative=True)
    topic, partition = await broker.partition(names.parse("t-partition-0"))
    producer = Producer("p")
    topic.partition(0).add_producer(producer)
    await stored(partition, messages)
    return partition, producer


async def stored(partition, messages):
    for _ in range(messages):
        sent = Sent(b"x")
        partition.writer.append(sent)
        await sent.over.wait()
        assert not sent.errors


def test_a_broker_without_store_sends_clients_away_within_five_seconds_of_the_fence():
    async def act(stage):
        brokers = Brokers(stage)
        a, b = await brokers.new("a"), await brokers.new("b")
        partition, producer = await serving(a)
        ledger = stage.world.ghost.ledgers[partition.writer.open_end.live.ledger_id]
        await asyncio.sleep(2)
        a.client.store.suspend(600.0)
        async with asyncio.timeout(60):
            while ledger.record.state is RecordState.OPEN:
                assert not producer.away, "nothing is fenced"
                await stored(partition, 1)
                await asyncio.sleep(0.1)
        await asyncio.sleep(5)
        assert producer.away
        with pytest.raises(Refusal, match="another broker"):
            topic, _ = await b.partition(names.parse("t-partition-0"))
            (await a._opened(topic.info)).partition(0)
        await b.close()

    play(act)


def test_without_a_store_a_broker_serves_on_for_as_long_as_nothing_is_fenced():
    async def act(stage):
        a = await Brokers(stage).new("a")
        partition, producer = await serving(a)
        a.client.store.suspend(600.0)
        loop = asyncio.get_running_loop()
        for _ in range(300):
            began_s = loop.time()
            await stored(partition, 1)
            assert loop.time() < began_s + 1.0
            await asyncio.sleep(1)
        assert not producer.away
        await asyncio.sleep(320)
        await stored(partition, 1)
        await a.close()

    play(act)


def test_so_many_ledgers_at_a_time_are_asked_for_fences_and_one_failure_is_of_one(
    monkeypatch, caplog
):
    async def act(stage):
        a = await Brokers(stage).new("a")
        await a.lookup(names.parse("t-partition-0"), authoritative=True)
        topic, _ = await a.partition(names.parse("t-partition-0"))
        asked, at_once, most = [], 0, 0

        async def is_fenced(writer):
            nonlocal at_once, most
            asked.append(writer._number)
            at_once, most = at_once + 1, max(most, at_once + 1)
            try:
                await asyncio.sleep(600 if writer._number == 3 else 0.1)
                if writer._number == 2:
                    raise ZeroDivisionError("a defect")
                return writer._number > 20
            finally:
                at_once -= 1

        monkeypatch.setattr(LiveWriter, "is_fenced", is_fenced)
        has = [number for number in range(PARTITIONS) if topic.has(number)]
        assert has == list(range(PARTITIONS))
        async with asyncio.timeout(5):
            await topic.leave_fenced()
        assert sorted(asked) == has
        assert most == LEDGERS_ASKED_AT_ONCE
        assert [number for number in has if not topic.has(number)] == [21, 22, 23]
        assert "a defect" in caplog.text
        await a.close()

    play(act, partitions=PARTITIONS)


def test_a_topic_whose_follower_failed_for_good_is_given_up_and_opened_anew(monkeypatch):
    async def act(stage):
        a = await Brokers(stage).new("a")
        partition, producer = await serving(a)
        topic = a.open_topics()[0]

        async def wrong(self, *, fresh):
            raise ZeroDivisionError("a defect")

        right = TopicFollower._read
        monkeypatch.setattr(TopicFollower, "_read", wrong)
        await asyncio.sleep(2 * REREAD_S)
        assert producer.away
        monkeypatch.setattr(TopicFollower, "_read", right)
        await asyncio.sleep(1)
        assert topic not in a.open_topics()
        again, _ = await serving(a)
        assert again is not partition
        assert again.log.end == 6
        await a.close()

    play(act)


def test_a_broker_that_is_stopped_while_the_store_is_away_ends_within_seconds():
    async def act(stage):
        a = await Brokers(stage).new("a")
        partition, _ = await serving(a)
        a.client.store.suspend(600.0)
        began_s = asyncio.get_running_loop().time()
        await a.seal()
        await a.close()
        assert asyncio.get_running_loop().time() < began_s + 4.0
        assert partition.log.end == 3, "what waited was stored"

    play(act)
