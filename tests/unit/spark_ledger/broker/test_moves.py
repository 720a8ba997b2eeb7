"""Partitions that move between two brokers, on the simulated cluster, and those that stay."""

import asyncio
from contextlib import suppress
from types import SimpleNamespace

import pytest

from spark_ledger import errors
from spark_ledger.broker import names
from spark_ledger.broker.dispatch.subscriptions import SubscribeRequest
from spark_ledger.broker.log.ownership import Deposed
from spark_ledger.broker.produce.producer import DeclaredSchema
from spark_ledger.broker.settings import BrokerSettings
from spark_ledger.broker.wire.commands import AccessMode, Refusal, ServerError, SubscriptionType
from spark_ledger.topic.commit import seal
from spark_ledger.topic.entry.message_batch import Share, encode_header
from tests.kit.subscribing import subscribed
from tests.unit.spark_ledger.broker.owners import Sent
from tests.unit.spark_ledger.broker.two_brokers import PARTITIONS, Brokers, Producer, named
from tests.unit.spark_ledger.topic.stage import play

DECIDED_S = 12.0
"""Simulated: a partition that a broker gives up has been left by then."""


async def stored(broker, number):
    """The offset at which a message is stored there."""
    _, partition = await broker.partition(named(number))
    sent = Sent(b"x")
    partition.writer.append(sent)
    await sent.over.wait()
    assert not sent.errors
    return sent.offsets[0]


async def looked_up(asked, others, number):
    """The broker that a client of the partition ends at."""
    for _ in range(5):
        url, here = await asked.lookup(named(number), authoritative=False)
        if here:
            return asked
        asked = next(one for one in others if one.ownership.url == url)
        await asked.lookup(named(number), authoritative=True)
    raise AssertionError("it is sent from one to the other")


def test_partitions_given_to_a_broker_that_comes_go_on_there_and_the_others_are_not_disturbed():
    async def act(stage):
        brokers = Brokers(stage)
        a = await brokers.new("a")
        producers = []
        for number in range(PARTITIONS):
            await a.lookup(named(number), authoritative=False)
            topic, _ = await a.partition(named(number))
            producers.append(Producer(f"p{number}"))
            topic.partition(number).add_producer(producers[-1])
            assert await stored(a, number) == 0
        b = await brokers.new("b")
        assert await a.watch.give() > 0
        await asyncio.sleep(5)
        owners = await a.ownership.owners(topic.info.id, fresh=True)
        moved = [n for n in range(PARTITIONS) if owners.of(n).broker == "b"]
        assert 0 < len(moved) < PARTITIONS
        for number in range(PARTITIONS):
            assert producers[number].away == (number in moved)
            if number in moved:
                with pytest.raises(Refusal, match="another broker has partition") as refused:
                    await a.partition(named(number))
                assert refused.value.code is ServerError.SERVICE_NOT_READY
            there = await looked_up(a, [a, b], number)
            assert there is (b if number in moved else a)
            assert await stored(there, number) == 1
        await a.close()
        await b.close()

    play(act, partitions=PARTITIONS)


def test_what_a_dead_broker_had_is_served_by_the_other_after_what_it_left():
    async def act(stage):
        brokers = Brokers(stage)
        a, b = await brokers.new("a"), await brokers.new("b")
        had = []
        for number in range(PARTITIONS):
            there = await looked_up(a, [a, b], number)
            had += [number] if there is b else []
            assert await stored(there, number) == 0
        kept = {n: (await a.partition(named(n)))[1] for n in range(PARTITIONS) if n not in had}
        assert len(had) > 1
        brokers.dead.add(b.ownership.url)
        assert await a.ownership.membership.probe() == frozenset()
        await a.watch.take_over()
        topic, _ = await a.partition(named(had[0]))
        assert all(topic.has(number) for number in range(PARTITIONS))
        for number in range(PARTITIONS):
            assert await stored(a, number) == 1
        for number, partition in kept.items():
            assert (await a.partition(named(number)))[1] is partition
        zombie = Sent(b"z")
        other = b._topics.kept(topic.info.id)
        other.partition(had[0]).writer.append(zombie)
        await zombie.over.wait()
        assert zombie.errors
        assert await stored(a, had[0]) == 2
        await a.close()
        await b.close()

    play(act, partitions=PARTITIONS)


def test_a_consumer_goes_on_at_the_next_owner_where_it_was():
    async def act(stage):
        brokers = Brokers(stage)
        a, b = await brokers.new("a"), await brokers.new("b")
        link = SimpleNamespace(send=lambda frame: None)

        async def consumer(broker, number):
            topic, partition = await broker.partition(named(number))
            return topic, await subscribed(topic, partition, link=link)

        there = {n: await looked_up(a, [a, b], n) for n in range(PARTITIONS)}
        for number, broker in there.items():
            _, made = await consumer(broker, number)
            made.dispatcher.acks.add_up_to(10 + number)
            made.dispatcher.save_position()
        await asyncio.sleep(3)
        positions = await stage.client.subscriptions.positions(stage.topic.id, "s")
        assert positions == {number: 10 + number for number in range(PARTITIONS)}
        brokers.dead.add(b.ownership.url)
        await a.ownership.membership.probe()
        await a.watch.take_over()
        for number in [n for n, broker in there.items() if broker is b]:
            _, made = await consumer(a, number)
            assert made.dispatcher.acks.mark == 10 + number
        await a.close()
        await b.close()

    play(act, partitions=PARTITIONS)


async def taken(brokers, to, number, *, of):
    """The partition in the hands of `to`, which takes the other broker for dead."""
    brokers.dead.add(of.ownership.url)
    await to.lookup(named(number), authoritative=True)
    brokers.dead.discard(of.ownership.url)
    await of.ownership.membership.register()
    return await to.partition(named(number))


def test_an_owner_that_has_a_partition_again_knows_what_another_stored_there_meanwhile():
    async def act(stage):
        brokers = Brokers(stage)
        a, b = await brokers.new("a"), await brokers.new("b")
        await a.lookup(named(0), authoritative=True)
        _, first = await a.partition(named(0))
        assert await stored(a, 0) == 0
        await taken(brokers, b, 0, of=a)
        assert await stored(b, 0) == 1
        brokers.dead.add(b.ownership.url)
        await a.lookup(named(0), authoritative=True)
        _, again = await a.partition(named(0))
        assert again is not first
        assert again.log.end == 2
        await a.close()
        await b.close()

    play(act, partitions=PARTITIONS)


def test_an_exclusive_producer_that_comes_back_to_the_next_owner_again_and_again_is_not_fenced():
    async def act(stage):
        brokers = Brokers(stage)
        a, b = await brokers.new("a"), await brokers.new("b")
        await a.lookup(named(0), authoritative=True)
        topic, _ = await a.partition(named(0))
        fencing = AccessMode.EXCLUSIVE_WITH_FENCING
        before, made = Producer("x", fencing), Producer("p", fencing)
        assert topic.partition(0).add_producer(before)
        assert topic.partition(0).add_producer(made)
        there, _ = await taken(brokers, b, 0, of=a)
        for epoch in (1, 2, 3):
            again = Producer("p", fencing, epoch, made.topic_epoch)
            assert there.partition(0).add_producer(again)
            assert again.topic_epoch == made.topic_epoch
        newer = Producer("q", fencing)
        assert there.partition(0).add_producer(newer)
        assert newer.topic_epoch > made.topic_epoch
        with pytest.raises(Refusal, match="has taken"):
            there.partition(0).add_producer(Producer("p", fencing, 4, made.topic_epoch))
        await a.close()
        await b.close()

    play(act, partitions=PARTITIONS)


def test_who_waits_to_be_the_only_producer_of_a_partition_that_goes_is_sent_away():
    async def act(stage):
        brokers = Brokers(stage)
        a, b = await brokers.new("a"), await brokers.new("b")
        await a.lookup(named(0), authoritative=True)
        topic, partition = await a.partition(named(0))
        first = Producer("p", AccessMode.EXCLUSIVE)
        waiting = Producer("q", AccessMode.WAIT_FOR_EXCLUSIVE)
        assert partition.add_producer(first)
        assert not partition.add_producer(waiting)
        await taken(brokers, b, 0, of=a)
        await topic.look()
        partition.remove_producer(first)
        assert not waiting.is_ready
        await asyncio.sleep(DECIDED_S)
        assert waiting.away
        await a.close()
        await b.close()

    play(act, partitions=PARTITIONS)


def test_a_producer_that_comes_back_keeps_its_turn_and_its_connection_before_takes_no_more():
    async def act(stage):
        a = await Brokers(stage).new("a")
        await a.lookup(named(0), authoritative=True)
        _, partition = await a.partition(named(0))
        first = Producer("p", AccessMode.EXCLUSIVE)
        first.send_away = lambda: (setattr(first, "away", True), partition.remove_producer(first))
        waiting = Producer("q", AccessMode.WAIT_FOR_EXCLUSIVE)
        assert partition.add_producer(first)
        assert not partition.add_producer(waiting)
        again = Producer("p", AccessMode.EXCLUSIVE, 1, first.topic_epoch)
        assert partition.add_producer(again)
        assert first.away
        assert not (again.away or waiting.is_ready)
        partition.remove_producer(again)
        await asyncio.sleep(0)
        assert waiting.is_ready
        await a.close()

    play(act, partitions=PARTITIONS)


def test_an_exclusive_producer_that_waits_to_come_back_is_fenced_by_who_takes_its_place():
    async def act(stage):
        brokers = Brokers(stage)
        a, b = await brokers.new("a"), await brokers.new("b")
        await a.lookup(named(0), authoritative=True)
        before, _ = await a.partition(named(0))
        first = Producer("p", AccessMode.WAIT_FOR_EXCLUSIVE)
        assert before.partition(0).add_producer(first)
        topic, _ = await taken(brokers, b, 0, of=a)
        assert topic.partition(0).add_producer(Producer("x"))
        back = Producer("p", AccessMode.WAIT_FOR_EXCLUSIVE, 1, first.topic_epoch)
        new = Producer("q", AccessMode.WAIT_FOR_EXCLUSIVE)
        assert not topic.partition(0).add_producer(back)
        assert not topic.partition(0).add_producer(new)
        fencing = Producer("y", AccessMode.EXCLUSIVE_WITH_FENCING)
        assert topic.partition(0).add_producer(fencing)
        topic.partition(0).remove_producer(fencing)
        await asyncio.sleep(0)
        assert (back.away, back.is_ready, new.is_ready) == (True, False, True)
        await a.close()
        await b.close()

    play(act, partitions=PARTITIONS)


def test_a_seek_that_was_carried_out_holds_although_its_broker_dies_at_once():
    async def act(stage):
        brokers = Brokers(stage)
        a, b = await brokers.new("a"), await brokers.new("b")
        link = SimpleNamespace(send=lambda frame: None)

        async def consumer(broker):
            topic, partition = await broker.partition(named(0))
            return topic, await subscribed(topic, partition, link=link)

        await a.lookup(named(0), authoritative=True)
        topic, made = await consumer(a)
        made.dispatcher.acks.add_up_to(10)
        made.dispatcher.save_position()
        await asyncio.sleep(3)
        await topic.subscriptions.seek("s", made.dispatcher, 4)
        await taken(brokers, b, 0, of=a)
        assert (await consumer(b))[1].dispatcher.acks.mark == 4
        with pytest.raises(Deposed):  # it would change nothing
            await topic.subscriptions.seek("s", made.dispatcher, 7)
        await a.close()
        await b.close()

    play(act, partitions=PARTITIONS)


def test_who_subscribes_while_the_partition_goes_to_another_broker_is_told_to_look_it_up():
    async def act(stage):
        brokers = Brokers(stage)
        a, b = await brokers.new("a"), await brokers.new("b")
        await a.lookup(named(0), authoritative=True)
        topic, partition = await a.partition(named(0))
        opened = topic.subscriptions._opened

        async def opened_late(*some):
            await taken(brokers, b, 0, of=a)
            await topic.look()
            await asyncio.sleep(DECIDED_S)
            return await opened(*some)

        topic.subscriptions._opened = opened_late
        with pytest.raises(Refusal, match="look it up") as refused:
            await topic.subscriptions.subscribe(
                partition,
                "s",
                SubscribeRequest(SubscriptionType.EXCLUSIVE),
                durable=True,
                start=None,
                make=None,
                earliest=True,
            )
        assert refused.value.code is ServerError.SERVICE_NOT_READY
        await asyncio.sleep(DECIDED_S)
        (info,) = await stage.client.subscriptions.list(stage.topic.id, exact=True)
        assert not info.live, "a query may have it"
        await a.close()
        await b.close()

    play(act, partitions=PARTITIONS)


def test_a_lookup_makes_no_topic_and_names_the_broker_that_will_make_and_own_it():
    async def act(stage):
        brokers = Brokers(stage)
        a, b = await brokers.new("a"), await brokers.new("b")
        made_there = set()
        for i in range(8):
            name = names.parse(f"new-{i}")
            lookups = []
            for asked in (a, b):
                assert await asked.catalog.partitions_of(name, create=True) == 0
                url, here = await asked.lookup(name, authoritative=False)
                assert here == (url == asked.ownership.url)
                lookups.append(url)
            assert lookups[0] == lookups[1]
            assert await stage.client.topics.find(name.topic.full) is None
            with pytest.raises(Refusal) as refused:
                await a.partition(name, create=False)
            assert refused.value.code is ServerError.TOPIC_NOT_FOUND
            maker, other = (a, b) if lookups[0] == a.ownership.url else (b, a)
            assert await maker.lookup(name, authoritative=True) == (lookups[0], True)
            topic, _ = await maker.partition(name)  # another broker is never named now
            assert topic.info.name == name.topic
            assert await other.lookup(name, authoritative=False) == (lookups[0], False)
            made_there.add(maker.id)
        assert made_there == {"a", "b"}
        await a.close()
        await b.close()

    play(act)


def test_a_broker_that_makes_a_topic_owns_it_wherever_the_lookup_pointed():
    async def act(stage):
        brokers = Brokers(stage)
        a, b = await brokers.new("a"), await brokers.new("b")
        for i in range(8):
            await a.partition(names.parse(f"new-{i}"))
            url, here = await b.lookup(names.parse(f"new-{i}"), authoritative=False)
            assert (url, here) == (a.ownership.url, False)
        await a.close()
        await b.close()

    play(act)


def test_a_topic_that_no_client_may_make_is_not_found_by_a_lookup_either():
    async def act(stage):
        a = await Brokers(stage).new("a")
        a.settings = BrokerSettings(auto_create=False)
        name = names.parse("new")
        for ask in (
            lambda: a.lookup(name, authoritative=False),
            lambda: a.catalog.partitions_of(name, create=True),
            lambda: a.partition(name),
            lambda: a.lookup(names.parse("acme/none/new"), authoritative=False),
        ):
            with pytest.raises(Refusal) as refused:
                await ask()
            assert refused.value.code is ServerError.TOPIC_NOT_FOUND
        await a.close()

    play(act)


def test_a_topic_with_partitions_is_made_when_its_client_asks_how_many_it_has():
    async def act(stage):
        a = await Brokers(stage).new("a")
        a.settings = BrokerSettings(auto_create_partitions=3)
        name = names.parse("new")
        with pytest.raises(Refusal):
            await a.catalog.partitions_of(name, create=False)
        assert await stage.client.topics.find(name.topic.full) is None
        assert await a.catalog.partitions_of(name, create=True) == 3
        _, partition = await a.partition(names.parse("new-partition-2"))
        assert partition.number == 2
        await a.close()

    play(act)


def test_a_partition_whose_live_end_a_later_version_wrote_goes_round_until_a_broker_reads_it(
    monkeypatch,
):
    async def act(stage):
        brokers = Brokers(stage)
        made = {name: await brokers.new(name) for name in ("a", "b", "c")}
        await made["c"].lookup(named(0), authoritative=True)
        assert await stored(made["c"], 0) == 0
        later = bytearray(encode_header([Share(0, 1, 1)], 1))
        later[4] = 3
        _, partition = await made["c"].partition(named(0))
        await partition.writer._ledger.writer.append([bytes(later)], rows=1)
        brokers.dead.add(made.pop("c").ownership.url)
        await made["a"].ownership.membership.probe()

        reads = seal.decode_header

        async def asked(broker):
            await broker.lookup(named(0), authoritative=True)
            return (await broker.partition(named(0)))[1]

        passed = []
        for name in ("a", "b", "a"):
            with pytest.raises(Refusal, match="another broker has partition") as refused:
                await asked(made[name])
            assert refused.value.code is ServerError.SERVICE_NOT_READY
            owners = await made[name].ownership.owners(stage.topic.id, fresh=True)
            passed.append(owners.of(0).broker)
        assert passed == ["b", "a", "b"]

        def upgraded(payload):
            payload = bytearray(payload)
            payload[4] = min(payload[4], 2)
            return reads(bytes(payload))

        monkeypatch.setattr(seal, "decode_header", upgraded)
        assert (await asked(made["b"])).log.end == 2
        await made["a"].close()
        await made["b"].close()

    play(act)


def test_a_broker_alone_keeps_a_partition_that_it_cannot_open_and_tells_why():
    async def act(stage):
        brokers = Brokers(stage)
        a, b = await brokers.new("a"), await brokers.new("b")
        await b.lookup(named(0), authoritative=True)
        assert await stored(b, 0) == 0
        later = bytearray(encode_header([Share(0, 1, 1)], 1))
        later[4] = 3
        _, partition = await b.partition(named(0))
        await partition.writer._ledger.writer.append([bytes(later)], rows=1)
        brokers.dead.add(b.ownership.url)
        await a.ownership.membership.probe()
        await a.lookup(named(0), authoritative=True)
        with pytest.raises(errors.UnsupportedFormat, match="is of a later version"):
            await a.partition(named(0))
        assert (await a.ownership.owners(stage.topic.id, fresh=True)).of(0).broker == "a"
        await a.close()

    play(act)


@pytest.mark.parametrize(
    ("there", "comes", "asked"),
    [
        (Producer("p"), Producer("q"), False),
        (Producer("p"), Producer("p"), True),
        (Producer("p"), Producer("p", epoch=1), False),
        (Producer("p"), Producer("q", AccessMode.EXCLUSIVE), True),
        (Producer("p"), Producer("q", AccessMode.WAIT_FOR_EXCLUSIVE), True),
        (Producer("p"), Producer("q", AccessMode.EXCLUSIVE_WITH_FENCING), False),
        (Producer("p", AccessMode.EXCLUSIVE), Producer("q"), True),
        (Producer("p", connection=1), Producer("p", connection=1), False),
    ],
)
def test_those_are_asked_whether_they_are_there_because_of_which_another_cannot_come(
    there, comes, asked
):
    async def act(stage):
        a = await Brokers(stage).new("a")
        await a.lookup(named(0), authoritative=True)
        topic, _ = await a.partition(named(0))
        topic.partition(0).add_producer(there)
        assert topic.partition(0).producers_before(comes) == ([there] if asked else [])
        await a.close()

    play(act, partitions=PARTITIONS)


def test_a_partition_that_comes_back_while_it_is_left_is_served_again():
    async def act(stage):
        brokers = Brokers(stage)
        a, b = await brokers.new("a"), await brokers.new("b")
        await a.lookup(named(0), authoritative=True)
        assert await stored(a, 0) == 0
        topic, partition = await a.partition(named(0))
        close, decided = partition.writer.close, asyncio.Event()

        async def close_late():
            await decided.wait()
            await close()

        partition.writer.close = close_late
        assert await a.ownership.pass_on(topic.info.id, 0)
        await topic.look()
        assert await b.ownership.pass_on(topic.info.id, 0)
        for _ in range(5):  # while it is left
            with suppress(Refusal, errors.LedgerError):
                await a.partition(named(0))
            await asyncio.sleep(0.2)
        decided.set()
        await asyncio.sleep(2 * DECIDED_S)
        assert await looked_up(a, [a, b], 0) is a
        assert await stored(a, 0) > 0
        await asyncio.sleep(DECIDED_S)
        assert await stored(a, 0) > 1
        await a.close()
        await b.close()

    play(act, partitions=PARTITIONS)


def test_the_partitions_of_a_name_are_those_of_its_topic_today():
    async def act(stage):
        a = await Brokers(stage).new("a")
        name, topics = names.parse("new"), stage.client.topics
        await a.partition(name)
        assert await a.partitions_of(name, create=False) == 0
        await topics.change_policies("new", {"partitioned": True})
        assert await a.partitions_of(name, create=False) == 1
        deleted = await topics.delete("new")
        with pytest.raises(Refusal):
            await a.partitions_of(name, create=False)
        await topics.create("new", 3, {"partitioned": True})
        assert await a.partitions_of(name, create=False) == 3
        assert await topics.again(deleted) is None
        await a.close()

    play(act)


BESIDE_COLUMNS = DeclaredSchema(bytes(8), are_objects=True, beside_columns=True)


def producer_of_objects(name):
    made = Producer(name)
    made.declared, made.sends_objects = BESIDE_COLUMNS, True
    return made


def test_a_producer_of_bytes_that_waits_does_not_follow_where_columns_have_come():
    async def act(stage):
        a = await Brokers(stage).new("a")
        await a.lookup(named(0), authoritative=True)
        _, owned = await a.partition(named(0))
        first = Producer("p", AccessMode.EXCLUSIVE)
        waiting = Producer("q", AccessMode.WAIT_FOR_EXCLUSIVE)
        assert owned.add_producer(first) and not owned.add_producer(waiting)
        objects = producer_of_objects("o")
        assert owned.add_producer(objects)
        assert (first.away, waiting.away, owned.producers) == (True, True, [objects])
        await a.close()

    play(act, partitions=PARTITIONS)


def test_bytes_and_objects_beside_columns_are_judged_anew_where_they_meet():
    """The columns came, or went, after one of them was judged."""

    async def act(stage):
        a = await Brokers(stage).new("a")
        await a.lookup(named(0), authoritative=True)
        _, owned = await a.partition(named(0))
        objects, late = producer_of_objects("o"), Producer("p")
        assert owned.add_producer(objects)
        with pytest.raises(Refusal) as refused:
            owned.add_producer(late)
        assert refused.value.code is ServerError.SERVICE_NOT_READY
        assert objects.away and owned.producers == []
        assert owned.add_producer(late)  # the columns went
        await a.close()

    play(act, partitions=PARTITIONS)
