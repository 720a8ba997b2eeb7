"""A cursor's process dies, or does not hear what became of what it asked, at any step."""

import asyncio

import pytest

from spark_ledger import errors
from spark_ledger.metadata import paths
from spark_ledger.metadata.store import StoreError, StoreUnavailable
from spark_ledger.topic.acks import steps
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.log import records
from spark_ledger.topic.log.records import IntentState
from spark_ledger.topic.subscription.cursor import Cursor
from spark_ledger.topic.subscription.nodes import SubscriptionNodes
from spark_ledger.topic.subscription.seek_target import End
from tests.simulation.loop import current
from tests.unit.spark_ledger.topic.stage import NOW_MS, play
from tests.unit.spark_ledger.topic.subscription_stage import (
    Doomed,
    cursor_ledgers,
    fill,
    opened,
    positions,
    subscriptions_of,
    told,
)

OFFSETS = (10, 20, 30, 40, 50, 25, 60, 70)  # into the record, a ledger, another one, back, again
AT_ONCE = 12  # kill points of one test


@pytest.fixture(autouse=True)
def short_ledgers(monkeypatch):
    monkeypatch.setattr(steps, "LEDGER_ENTRIES_MAX", 3)


async def events_of_a_whole_life(stage):
    counted = await Doomed.of(stage, "counted")
    await counted.play(*OFFSETS)
    assert counted.confirmed == OFFSETS[-1]
    return counted.events


async def check_ledgers_have_an_end(stage):
    """Each ledger that is there is named by a subscription, or the janitor may take it."""
    named = await cursor_ledgers(stage.client, stage.topic.id)
    async for ledger_id in stage.client.ledgers.list():
        record = (await stage.client.ledgers.record(ledger_id)).record
        intent = records.decode_intent(stage.world.store.peek(paths.intent(record.intent)).value)
        assert ledger_id in named or intent.state is not IntentState.OPEN


@pytest.mark.parametrize(
    "part", [0, 1, *(pytest.param(part, marks=pytest.mark.slow) for part in range(2, 8))]
)
def test_whoever_comes_after_a_crash_at_any_step_finds_what_was_confirmed_or_later(part):
    async def act(stage):
        await fill(stage, 100)
        events = await events_of_a_whole_life(stage)
        points = range(1 + part, events + 10, max(1, events // (8 * AT_ONCE)) * 8)
        for at in points:
            name = f"s{at}"
            doomed = await Doomed.of(stage, name, at)
            await doomed.play(*OFFSETS)
            some = subscriptions_of(await stage.another())

            again = await some.open(stage.topic, name, "q", "r2", start=End.EARLIEST)

            found = (await again.recovered()).get(0)
            steps = [0, *OFFSETS]
            confirmed = steps.index(doomed.confirmed or 0)
            assert steps.index(found) >= confirmed, f"killed at {at}"
            await told(again, 80)
            await again.release()
            assert await some.positions(stage.topic.id, name) == {0: 80}
        await asyncio.sleep(5)
        await check_ledgers_have_an_end(stage)

    play(act, seed=part)


@pytest.mark.parametrize("seed", range(6))
def test_a_run_that_dies_while_it_takes_over_leaves_the_position_to_the_next(seed):
    async def act(stage):
        await fill(stage, 100)
        for at in range(1 + seed, 60, 6):
            name = f"s{at}"
            first = await Doomed.of(stage, name)
            await first.play(10, 20, 30, release=False)
            first.process.kill()
            second = await Doomed.of(stage, name, at)
            await second.play(run="r2", release=False)
            second.process.kill()
            some = subscriptions_of(await stage.another())

            third = await some.open(stage.topic, name, "q", "r3")

            assert await third.recovered() == {0: 30}, f"killed at {at}"
            await third.release()

    play(act, seed=seed)


@pytest.mark.parametrize("seed", range(8))
def test_lost_answers_and_a_lagging_store_lose_no_position(seed):
    async def act(stage):
        await fill(stage, 100)
        stage.world.store.faults.unknown = 0.2
        stage.world.store.faults.lag_s = 0.5
        told_last = 0
        for run in range(3):
            cursor = None
            while cursor is None:
                try:
                    cursor = await opened(stage, run=f"r{run}")
                except (errors.Unavailable, StoreError):
                    continue
            assert (await cursor.recovered())[0] == told_last
            for offset in OFFSETS:
                told_last = offset + run
                cursor.advance({0: told_last})
                await cursor.durable()
            await cursor.abandon()
        stage.world.store.calm()

        last = await opened(stage, run="last")

        assert await last.recovered() == {0: told_last}

    play(act, seed=seed)


@pytest.mark.parametrize("seed", range(8))
def test_runs_that_die_among_bookies_and_a_store_that_fail_lose_no_position(seed):
    async def act(stage):
        rng = current().random_for("chaos")
        await fill(stage, 10_000)
        faults = stage.world.store.faults
        faults.unknown, faults.lag_s = 0.05, 0.3

        async def hurt():
            while True:
                await asyncio.sleep(rng.uniform(0.5, 8))
                node = rng.choice(stage.world.nodes)
                node.kill("random")
                await asyncio.sleep(rng.uniform(0.5, 4))
                await node.start()

        hurting = asyncio.get_running_loop().create_task(hurt())
        offset = confirmed = 0
        for run in range(6):
            process = await stage.world.client(f"run-{run}")
            client = TopicClient(process.ledgers, process.rng, lambda: NOW_MS)
            cursors = []
            process.run(keep_opening(stage, client, f"r{run}", cursors))
            for _ in range(rng.randrange(5, 30)):
                offset += 1
                for cursor in cursors:
                    cursor.advance({0: offset})
                await asyncio.sleep(rng.uniform(0.2, 2))
            confirmed = max([confirmed, *(one.confirmed.get(0, 0) for one in cursors)])
            process.kill()
        hurting.cancel()
        await asyncio.gather(hurting, return_exceptions=True)
        stage.world.calm()
        await asyncio.gather(*(node.start() for node in stage.world.nodes))

        last = await opened(stage, run="last")

        assert confirmed > 0
        assert confirmed <= (await last.recovered())[0] <= offset

    play(act, seed=seed)


async def keep_opening(stage, client, run, cursors):
    while not cursors:
        try:
            some = subscriptions_of(client)
            cursors.append(await some.open(stage.topic, "s", "q", run, start=End.EARLIEST))
        except errors.Unavailable:
            await asyncio.sleep(0.5)


@pytest.mark.parametrize("seed", range(8))
def test_of_two_runs_that_race_for_a_name_the_loser_is_told_and_writes_nothing(seed):
    async def act(stage):
        await fill(stage, 100)
        racing = [opened(stage, run=run) for run in ("r1", "r2")]
        cursors = await asyncio.gather(*racing, return_exceptions=True)
        here = [cursor for cursor in cursors if isinstance(cursor, Cursor)]
        assert all(isinstance(one, Cursor | errors.LedgerFenced) for one in cursors)
        for offset in (10, 20, 30):
            for number, cursor in enumerate(here):
                cursor.advance({0: offset + number})
            await asyncio.sleep(2)

        (winner,) = [cursor for cursor in here if cursor.failure is None]

        assert winner.confirmed == {0: 30 + here.index(winner)}
        for loser in here:
            if loser is not winner:
                with pytest.raises(errors.LedgerFenced, match=r"taken over|newer run|superseded"):
                    loser.check()
                loser.advance({0: 90})
        await asyncio.sleep(30)
        await winner.release()
        found = await subscriptions_of(stage.client).positions(stage.topic.id, "s")
        assert found == winner.confirmed

    play(act, seed=seed)


def test_a_run_that_was_overtaken_adds_nothing_to_its_ledger_any_more():
    async def act(stage):
        await fill(stage, 100)
        first = await opened(stage, run="r1")
        await told(first, 10, 20)
        ledger = first._ledger
        nodes = SubscriptionNodes(stage.client.store, stage.topic.id)
        record = (await nodes.read("s")).record
        second = await opened(stage, run="r2")
        await second.recovered()

        with pytest.raises(errors.LedgerFenced):
            await ledger.append(record, {0: 90})

        first.advance({0: 90})
        with pytest.raises(errors.LedgerFenced, match="taken over by query q, run r2"):
            await first.durable()
        assert await second.recovered() == {0: 20}
        assert await subscriptions_of(stage.client).positions(stage.topic.id, "s") == {0: 20}

    play(act)


@pytest.mark.parametrize(("before", "unheard"), [(50, 20), (20, 50)])
def test_a_position_of_which_nothing_was_heard_is_not_taken_for_unwritten(
    before, unheard, monkeypatch
):
    async def act(stage):
        await fill(stage, 100)
        cursor = await opened(stage)
        await told(cursor, before)
        nodes, write = (
            SubscriptionNodes(stage.client.store, stage.topic.id),
            SubscriptionNodes.write,
        )
        written = asyncio.Event()

        async def unanswered(self, seen, record, *others):
            monkeypatch.undo()
            await write(self, seen, record, *others)
            written.set()
            raise StoreUnavailable("the answer was lost")

        monkeypatch.setattr(SubscriptionNodes, "write", unanswered)
        cursor.advance({0: unheard})
        await written.wait()
        assert await positions(stage) == {0: unheard}
        version = (await stage.client.store.get(nodes.folder)).version

        await told(cursor, before)

        assert await positions(stage) == {0: before}
        trims_fail = (await stage.client.store.get(nodes.folder)).version > version
        assert trims_fail is (before < unheard)
        await cursor.release()

    play(act)
