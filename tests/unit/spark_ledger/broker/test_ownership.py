"""Which broker has a topic, on the simulated store."""

import pytest

from spark_ledger.broker.owner.ownership import Deposed, Ownership
from tests.unit.spark_ledger.topic.stage import play

TOPICS = [f"topic-{i}" for i in range(20)]


class Brokers:
    """Brokers of one cluster; those in `dead` do not answer."""

    def __init__(self, stage):
        self.stage, self.dead = stage, set()

    async def new(self, name, url=None):
        async def answers(at):
            return at not in self.dead

        url = url or f"pulsar://{name}:1"
        made = Ownership(self.stage.client.store, name, url, answers)
        await made.register()
        return made


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
        assert await b.choose("t", here=False) == (await b.owner("t"))
        assert (await b.owner("t")).epoch == 2
        with pytest.raises(Deposed):
            await a.check("t", 1)
        await b.check("t", 2)

    play(act)


def test_one_that_starts_again_on_its_port_takes_what_the_killed_one_had():
    async def act(stage):
        brokers = Brokers(stage)
        a = await brokers.new("a")
        for topic in TOPICS:
            await a.choose(topic, here=True)
        again = await brokers.new("b", a.url)  # the killed one is still listed, and answers
        for topic in TOPICS:
            assert (await again.choose(topic, here=False)).broker == "b"

    play(act)
