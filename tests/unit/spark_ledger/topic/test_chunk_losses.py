"""Rows that a checkpoint moved into a ledger and a chunk, taken away by who never saw that."""

import asyncio
import random

import pytest

from spark_ledger.metadata import paths
from spark_ledger.topic.log import checkpoint
from spark_ledger.topic.log.actions import Hole, Overwrite, Replace, Trim
from spark_ledger.topic.upkeep.janitor import Janitor
from tests.unit.spark_ledger.topic.checkpoints import commits
from tests.unit.spark_ledger.topic.stage import play, segment

DELAY_S = 600
ROWS = 15

TAKEN = [
    Trim(((0, ROWS),)),
    Hole(0, 0, ROWS),
    Replace(0, 0, ROWS, (segment(10**9, ROWS),), 6),
    Overwrite((segment(10**9, 5),), 6),
]


async def moved_to_a_ledger(stage):
    """A topic of five small commits whose rows the first checkpoint moved to a ledger, which is
    returned, and has in its tail. The planner has folded the commits and nothing else."""
    await stage.client.topics.change_policies("t", {"delete_delay_ms": DELAY_S * 1000})
    intent = await stage.intent()
    await commits(stage, intent, 5)
    planner = await stage.another()
    await planner.log(stage.topic.id).fold(fresh=True)
    await stage.client.checkpoints.make(stage.topic.id, intent.id)
    await stage.client.cache.close()
    state = await (await stage.another()).log(stage.topic.id).fold(fresh=True)
    (ledger,) = state.ledgers()
    return intent, planner, ledger


async def into_a_chunk(stage, monkeypatch, intent):
    """The next checkpoint has the rows in a chunk, which is in another ledger."""
    monkeypatch.setattr(checkpoint, "TAIL_BYTES_MAX", 0)
    await commits(stage, intent, 1)
    await stage.client.checkpoints.make(stage.topic.id, intent.id)
    await stage.client.cache.close()


async def take_away(stage, planner, taken):
    intent = await planner.intents.open_system_intent("compact", "t")
    await planner.commit_actions(stage.topic.id, [taken], intent, finish_intent=True)


async def check_the_delay(stage, intent, ledger):
    """The ledger stays for the delete delay from now on, and then it goes."""
    await stage.client.cache.close()
    await stage.client.intents.finish(intent.id)
    client = await stage.another()
    janitor = Janitor(client.store, client.ledgers, random.Random(1), lease_s=10**6)
    await asyncio.sleep(DELAY_S - 100)
    assert ledger not in (await janitor.clean()).deleted
    await asyncio.sleep(200)
    assert ledger in (await janitor.clean()).deleted


@pytest.mark.parametrize("taken", TAKEN)
def test_the_ledger_of_rows_taken_out_of_a_chunk_stays_for_the_delete_delay_and_then_goes(
    taken, monkeypatch
):
    async def act(stage):
        intent, planner, ledger = await moved_to_a_ledger(stage)
        await into_a_chunk(stage, monkeypatch, intent)
        await asyncio.sleep(2 * DELAY_S)

        await take_away(stage, planner, taken)

        await check_the_delay(stage, intent, ledger)

    play(act)


@pytest.mark.parametrize("taken", TAKEN)
def test_rows_taken_away_while_a_checkpoint_puts_them_into_a_chunk_stay_for_the_delete_delay(
    taken, monkeypatch
):
    async def act(stage):
        intent, planner, ledger = await moved_to_a_ledger(stage)
        await asyncio.sleep(2 * DELAY_S)
        store, path = stage.client.store, paths.topic_checkpoint(stage.topic.id)
        multi = store.multi

        async def late(operations):
            if any(one.path == path for one in operations):
                store.multi = multi
                await take_away(stage, planner, taken)
            return await multi(operations)

        store.multi = late
        await into_a_chunk(stage, monkeypatch, intent)
        newest = await (await stage.another()).log(stage.topic.id).newest_checkpoint()
        assert newest.record.next == 6, "the rows were there when it was made"

        await check_the_delay(stage, intent, ledger)

    play(act)


@pytest.mark.parametrize("taken", TAKEN)
def test_the_next_checkpoint_remembers_that_the_rows_went(taken, monkeypatch):
    async def act(stage):
        intent, planner, ledger = await moved_to_a_ledger(stage)
        await into_a_chunk(stage, monkeypatch, intent)
        await asyncio.sleep(2 * DELAY_S)
        await take_away(stage, planner, taken)
        went_ms = (await planner.log(stage.topic.id).fold(fresh=True)).commit_ms

        await stage.client.checkpoints.make(stage.topic.id, intent.id)

        state = await (await stage.another()).log(stage.topic.id).fold(fresh=True)
        assert state.dropped[ledger] == went_ms
        await check_the_delay(stage, intent, ledger)

    play(act)


def test_a_ledger_whose_rows_stay_in_their_chunk_is_not_among_those_that_were_dropped(monkeypatch):
    async def act(stage):
        intent, planner, ledger = await moved_to_a_ledger(stage)
        await into_a_chunk(stage, monkeypatch, intent)
        await take_away(stage, planner, Trim(((0, ROWS),)))

        await stage.client.checkpoints.make(stage.topic.id, intent.id)

        state = await (await stage.another()).log(stage.topic.id).fold(fresh=True)
        (kept,) = state.ledgers(await stage.client.chunks.load(state.chunks()))
        assert ledger in state.dropped
        assert kept != ledger and kept not in state.dropped

    play(act)
