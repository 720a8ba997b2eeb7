"""Which broker has which partition, on the simulated store."""

import asyncio
import json
from itertools import pairwise

import pytest

from spark_ledger.broker.log.membership import UrlTaken, brokers_alive
from spark_ledger.broker.log.ownership import Deposed, Ownership
from spark_ledger.metadata import paths
from tests.unit.spark_ledger.topic.stage import play

TOPICS = [f"topic-{i}" for i in range(20)]


class Brokers:
    """Brokers of one cluster; those in `dead` do not answer."""

    def __init__(self, stage):
        self.stage, self.dead = stage, set()

    async def new(self, name, url=None):
        url = url or f"pulsar://{name}:1"
        made = Ownership(self.stage.client.store, name, url, self.answers)
        await made.membership.register()
        return made

    async def answers(self, url):
        return url not in self.dead


def test_brokers_agree_on_the_owner_and_topics_spread():
    async def act(stage):
        brokers = Brokers(stage)
        a, b = await brokers.new("a"), await brokers.new("b")
        seen = set()
        for topic in TOPICS:
            first = await a.choose(topic, here=False)
            there = a if first.broker == "a" else b
            assert (await there.choose(topic, here=True)).broker == first.broker
            assert (await b.choose(topic, here=False)).broker == first.broker
            seen.add(first.broker)
        assert seen == {"a", "b"}

    play(act)


def test_a_topic_stays_with_its_owner_whoever_comes():
    async def act(stage):
        brokers = Brokers(stage)
        a = await brokers.new("a")
        for topic in TOPICS:
            assert (await a.choose(topic, here=False)).epoch == 1
        b = await brokers.new("b")
        for topic in TOPICS:
            assert (await b.choose(topic, here=True)).broker == "a"

    play(act)


def test_a_broker_whose_port_is_closed_loses_its_topics_before_its_session_ends():
    async def act(stage):
        brokers = Brokers(stage)
        a = await brokers.new("a")
        await a.choose("t", here=True)
        b = await brokers.new("b")
        brokers.dead.add(a.url)
        assert await b.choose("t", here=False) == (await b.owners("t")).of(0)
        assert (await b.owners("t")).of(0).epoch == 2
        with pytest.raises(Deposed):
            await a.check("t", 0, 1)
        await b.check("t", 0, 2)

    play(act)


def test_one_that_starts_again_on_its_port_takes_what_the_killed_one_had():
    async def act(stage):
        brokers = Brokers(stage)
        a = await brokers.new("a")
        for topic in TOPICS:
            await a.choose(topic, here=True)
        brokers.dead.add(a.url)  # its port is not open yet; the killed one is still listed
        again = await brokers.new("b", a.url)
        brokers.dead.clear()
        for topic in TOPICS:
            assert (await again.choose(topic, here=False)).broker == "b"

    play(act)


async def spread(stage, partitions=30):
    """Partitions of one topic, each asked of either broker."""
    brokers = Brokers(stage)
    a, b = await brokers.new("a"), await brokers.new("b")
    for number in range(partitions):
        first = await a.choose("t", number, partitions, here=False)
        there = a if first.broker == "a" else b
        await there.choose("t", number, partitions, here=True)
    return brokers, a, b


def test_partitions_of_a_topic_spread_over_brokers_in_one_record():
    async def act(stage):
        _, a, _ = await spread(stage)
        owners = await a.owners("t", fresh=True)
        of_a, of_b = owners.epochs_of("a"), owners.epochs_of("b")
        assert len(of_a) > 5 < len(of_b)
        assert sorted([*of_a, *of_b]) == list(range(30))
        assert stage.world.store.peek_children(paths.BROKERS_TOPICS) == ["t"]

    play(act)


def test_who_takes_a_partition_takes_what_else_falls_on_it_in_one_write():
    async def act(stage):
        a = await Brokers(stage).new("a")
        await a.choose("t", 7, 100, here=False)
        owners = await a.owners("t", fresh=True)
        assert owners.epochs_of("a") == dict.fromkeys(range(100), 1)
        assert owners.version == 0

    play(act)


def test_partitions_of_a_dead_broker_are_taken_and_those_of_others_stay_as_they_are():
    async def act(stage):
        brokers, a, b = await spread(stage)
        c = await brokers.new("c")
        before = await a.owners("t", fresh=True)
        await b.membership.leave()
        number = min(before.epochs_of("b"))
        taken = await c.choose("t", number, 30, here=True)
        assert (taken.broker, taken.epoch) == ("c", 2)
        after = await a.owners("t", fresh=True)
        assert after.epochs_of("a") == before.epochs_of("a")
        await a.check("t", min(before.epochs_of("a")), 1)
        with pytest.raises(Deposed, match=f"broker c has partition {number}"):
            await b.check("t", number, 1)

    play(act)


def test_a_record_of_before_which_gave_all_partitions_to_one_broker_is_taken_over():
    async def act(stage):
        brokers = Brokers(stage)
        a, b = await brokers.new("a"), await brokers.new("b")
        old = json.dumps({"broker": "gone", "epoch": 7, "url": "pulsar://gone:1"}).encode()
        await stage.client.store.create(paths.brokers_of_topic("t"), old)
        assert await b.take_over() == {}  # it says of no partition that it is there
        taken = await b.choose("t", 3, 5, here=True)
        assert (taken.broker, taken.url) == ("b", b.url)
        await b.check("t", 3, taken.epoch)
        for number in range(5):
            await a.choose("t", number, 5, here=True)
        owners = await a.owners("t", fresh=True)
        assert owners.of(3).broker == "b"
        assert {owners.of(number).broker for number in range(5)} <= {"a", "b"}

    play(act)


def test_a_broker_that_does_not_answer_is_buried_and_each_other_takes_what_falls_on_it():
    async def act(stage):
        brokers, a, b = await spread(stage, 40)
        c = await brokers.new("c")
        before = await a.owners("t", fresh=True)
        assert await a.membership.probe() == {"b", "c"}
        brokers.dead.add(b.url)
        assert await a.membership.probe() == {"c"}
        assert await c.membership.probe() == {"a"}
        await a.take_over()
        await c.take_over()
        after = await a.owners("t", fresh=True)
        assert not after.epochs_of("b")
        lost = before.epochs_of("b")
        assert {n for n in lost if after.of(n).broker == "c"} == set(after.epochs_of("c"))
        assert {after.of(n).broker for n in lost} == {"a", "c"}
        assert all(after.of(n).epoch == 2 for n in lost)
        assert (await a.take_over(), await c.take_over()) == ({}, {})

    play(act)


def test_a_broker_that_comes_later_is_given_what_falls_on_it_a_few_at_a_time():
    async def act(stage):
        brokers = Brokers(stage)
        a = await brokers.new("a")
        await a.choose("t", 0, 60, here=False)
        b = await brokers.new("b")
        given = [await a.give("t", 10) for _ in range(6)]
        assert given[:2] == [10, 10]
        assert given[-1] == 0
        owners = await a.owners("t", fresh=True)
        of_b = owners.epochs_of("b")
        assert len(of_b) == sum(given) > 20
        assert set(of_b.values()) == {2}
        assert {owners.of(number).url for number in of_b} == {b.url}
        with pytest.raises(Deposed):
            await a.check("t", min(of_b), 1)
        assert (await b.choose("t", min(of_b), 60, here=False)).broker == "b"
        assert (await a.give("t", 10), await b.give("t", 10)) == (0, 0)

    play(act)


def test_one_that_was_taken_for_dead_registers_again_and_finds_that_it_has_nothing():
    async def act(stage):
        brokers, a, b = await spread(stage)
        had = (await a.owners("t", fresh=True)).epochs_of("b")
        assert not await b.membership.keep()
        brokers.dead.add(b.url)
        await a.membership.probe()
        await a.take_over()
        brokers.dead.clear()
        assert await b.membership.keep()
        assert await a.membership.probe() == {"b"}
        with pytest.raises(Deposed):
            await b.check("t", min(had), 1)

    play(act)


def test_a_broker_says_how_many_chunked_messages_are_incomplete_as_long_as_it_lives():
    async def act(stage):
        a = await Brokers(stage).new("a")
        (said,) = (await brokers_alive(stage.client.store)).values()
        assert (said.url, said.incomplete) == (a.url, 0)
        a.membership.incomplete.add(2)
        assert not await a.membership.keep()
        (said,) = (await brokers_alive(stage.client.store)).values()
        assert (said.url, said.incomplete) == (a.url, 2)

    play(act)


def test_a_record_that_did_not_change_is_decoded_once_for_all_lookups():
    async def act(stage):
        _, a, _ = await spread(stage)
        before = await a.owners("t", fresh=True)
        assert await a.owners("t", fresh=True) is before
        await a.choose("t", 30, 31, here=True)
        after = await a.owners("t", fresh=True)
        assert after.version == before.version + 1 and after.of(30).broker == "a"
        assert before.of(30) is None

    play(act)


def test_brokers_that_cannot_reach_each_other_bury_each_other_less_and_less_often():
    async def act(stage):
        brokers, a, b = await spread(stage)
        loop = asyncio.get_running_loop()
        brokers.dead |= {a.url, b.url}
        buried = {a: [], b: []}

        async def watch(this, other):
            before = True
            while loop.time() < end_s:
                there = other.broker_id in await this.membership.probe()
                if before and not there:
                    buried[this].append(loop.time())
                before = there
                await asyncio.sleep(0.5)

        async def keep(this):
            while loop.time() < end_s:
                await this.membership.keep()
                await asyncio.sleep(2.0)

        end_s = loop.time() + 3600
        await asyncio.gather(watch(a, b), watch(b, a), keep(a), keep(b))
        for at in buried.values():
            gaps = [after - before for before, after in pairwise(at)]
            assert len(at) <= 11
            for gap, spared_s in zip(gaps, [30, 60, 120, 240, 480, 600, 600], strict=False):
                assert spared_s <= gap <= spared_s + 10

    play(act)


def test_a_spared_broker_is_buried_by_the_end_of_its_session_and_then_anew():
    async def act(stage):
        brokers = Brokers(stage)
        a = await brokers.new("a")
        other = await stage.world.client("other")
        b = Ownership(other.session, "b", "pulsar://b:1")
        await b.membership.register()
        brokers.dead.add(b.url)
        assert await a.membership.probe() == set()
        assert await b.membership.keep()
        assert await a.membership.probe() == {"b"}
        await a.choose("t", here=True)
        other.session.expire()
        await asyncio.sleep(60.0)
        assert await a.membership.probe() == set(), "the store has seen it die"
        assert await b.membership.keep()
        assert await a.membership.probe() == set(), "another session: its first burial"
        assert await b.membership.keep()
        assert await a.membership.probe() == {"b"}

    play(act)


def test_clients_are_sent_to_a_spared_owner_and_nothing_is_taken_from_it():
    async def act(stage):
        brokers, a, b = await spread(stage)
        number = min((await a.owners("t", fresh=True)).epochs_of("b"))
        brokers.dead.add(b.url)
        await a.membership.probe()
        await b.membership.keep()
        await a.membership.probe()
        before = await a.owners("t", fresh=True)
        assert (await a.choose("t", number, 30, here=False)).broker == "b"
        assert await a.take_over() == {}
        assert await a.owners("t", fresh=True) == before

    play(act)


def test_a_broker_that_hung_for_longer_than_a_moment_is_buried_anew_the_next_time():
    async def act(stage):
        brokers, a, b = await spread(stage)
        for _ in range(3):
            brokers.dead.add(b.url)
            assert await a.membership.probe() == set()
            await asyncio.sleep(6.0)
            assert await a.membership.probe() == set()
            await b.membership.keep()
            brokers.dead.clear()
            assert await a.membership.probe() == {"b"}

    play(act)


def test_a_url_at_which_another_broker_answers_is_refused_at_the_start():
    async def act(stage):
        brokers = Brokers(stage)
        a = await brokers.new("a")
        with pytest.raises(UrlTaken, match="broker a serves at pulsar://a:1 already"):
            await brokers.new("b", a.url)
        assert list(await a.membership.brokers()) == ["a"]
        assert not await a.membership.keep()

    play(act)


def test_of_two_brokers_that_live_with_one_url_the_later_one_ends():
    async def act(stage):
        brokers = Brokers(stage)
        a = await brokers.new("a")
        brokers.dead.add(a.url)  # who asks it reaches itself, whose port is not open yet
        b = Ownership(stage.client.store, "b", a.url, brokers.answers)
        b.membership.since_ms = 5
        await b.membership.register()
        assert await b.membership.probe() == set()
        assert await a.membership.keep()
        with pytest.raises(UrlTaken):
            await b.membership.probe()
        assert await a.membership.probe() == set()
        with pytest.raises(UrlTaken):
            await b.choose("t", here=True)
        assert (await a.choose("t", here=True)).broker == "a"

    play(act)


@pytest.mark.parametrize("value", [b"{}", b"[]", b"", b"\xff", b'{"url": 3}', b'{"url": null}'])
def test_a_broker_whose_node_is_malformed_is_none_and_hides_no_other(value, caplog):
    async def act(stage):
        brokers, a, b = await spread(stage)
        await stage.client.store.create(paths.broker("malformed"), value)
        assert await a.membership.probe() == {"b"}
        assert await b.membership.probe() == {"a"}
        brokers.dead.add(b.url)
        assert await a.membership.probe() == set()
        await stage.client.store.create(paths.brokers_of_topic("u"), b'{"brokers": {"b": 3}}')
        assert list(await a.take_over()) == ["t"], "a topic whose record is malformed hides none"
        assert "broker malformed cannot be decoded" in caplog.text

    play(act)
