"""No ledger stays OPEN for longer than twice its roll age, whoever made it and however that ended
(hazard 19): in virtual time, with maintenance passing by every ten minutes."""

import asyncio
import random
from dataclasses import replace

import pytest

from spark_ledger.metadata import paths
from spark_ledger.metadata.ledger_record import decode
from spark_ledger.topic import checkpointer
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.commit import draft as commit_draft
from spark_ledger.topic.log.actions import Append, OpenLive
from spark_ledger.topic.log.ledger_cache import IDLE_S
from spark_ledger.topic.log.policies import ROLL_AGE_S_MAX
from spark_ledger.topic.subscription.cursor import IDLE_S as CURSOR_IDLE_S
from spark_ledger.topic.upkeep.janitor import Janitor
from spark_ledger.topic.upkeep.ledger_inventory import LedgerInventory
from tests.simulation.contents import is_record
from tests.unit.spark_ledger.topic.stage import NOW_MS, TARGET, play, segment
from tests.unit.spark_ledger.topic.subscription_stage import fill, opened, told

PASS_S = 600
AGE_S = 60


@pytest.fixture(autouse=True)
def _bodies_and_roots_are_in_ledgers(monkeypatch):
    monkeypatch.setattr(commit_draft, "BODY_INLINE_BYTES_MAX", 10)
    monkeypatch.setattr(checkpointer, "ROOT_INLINE_BYTES_MAX", 0)


async def a_task(stage, intent):
    await stage.written(intent, [b"a"])


async def a_commit(stage, intent):
    await stage.client.commit_actions(stage.topic.id, [Append((segment(10**9, 1),))], intent)


async def a_checkpoint(stage, intent):
    await a_commit(stage, intent)
    await stage.client.cache.close()
    await stage.client.checkpoints.make(stage.topic.id, intent.id)


async def a_merge(stage, intent):
    """A worker of a job that merges, under the intent of the job."""
    own = await stage.client.intents.open_system_intent("compact", TARGET)
    await stage.written(own, [b"a"])


async def a_live_segment(stage, intent):
    """An owner of a partition's open end."""
    own = await stage.client.intents.open_system_intent("own", TARGET)
    ledger_id = await stage.client.intents.ledger_id(own)
    policies = stage.topic.policies
    quorums = (policies.ensemble_size, policies.write_quorum, policies.ack_quorum)
    writer = await stage.client.ledgers.create(
        *quorums, intent=own.id, topic=stage.topic.id, ledger_id=ledger_id
    )
    await writer.append(b"row", 1)
    live = OpenLive(0, writer.ledger_id, writer.version, "owner", 1)
    await stage.client.commit_actions(stage.topic.id, [live], own)


async def a_cursor(stage, intent):
    cursor = await opened(stage, client=stage.client)
    await told(cursor, 1, 2, 3)


KINDS = [a_task, a_commit, a_checkpoint, a_merge, a_live_segment, a_cursor]


def open_ledgers(stage):
    """The paths of the records of all ledgers that are not CLOSED."""
    found = stage.world.store.walk(paths.LEDGERS)
    return [path for path, node in found if is_record(path) and not decode(node.value).closed]


async def doomed(stage, kind):
    """A process makes ledgers of that kind, and is killed at work."""
    process = await stage.world.client("doomed")
    client = TopicClient(process.ledgers, process.rng, lambda: NOW_MS)
    theirs = replace(stage, client=client)
    await process.run(kind(theirs, await stage.intent()))
    process.kill()
    assert open_ledgers(stage)


async def maintained(stage, janitor, until_s, *, beating):
    """Maintenance until then; `beating`: somebody else of each writer shows that it is at work."""
    while asyncio.get_running_loop().time() < until_s:
        if beating:
            for intent in await stage.intents():
                await stage.client.intents.heartbeat(intent)
        await janitor.clean()
        await asyncio.sleep(PASS_S)
    await janitor.clean()


@pytest.mark.parametrize("beating", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_killed_process_left_open_is_closed_before_twice_its_roll_age(kind, beating):
    async def act(stage):
        await fill(stage, 100)
        await doomed(stage, kind)
        client = await stage.another()
        janitor = Janitor(client.store, client.ledgers, random.Random(1))
        by_policy = kind not in (a_cursor, a_live_segment, a_merge)
        roll_s = stage.topic.policies.ledger_age_s_max if by_policy else ROLL_AGE_S_MAX
        now_s = asyncio.get_running_loop().time()

        await maintained(stage, janitor, now_s + 2 * roll_s - PASS_S, beating=beating)

        assert open_ledgers(stage) == []

    play(act)


@pytest.mark.parametrize("kind", [one for one in KINDS if one is not a_live_segment])
def test_what_a_process_that_lives_on_does_not_use_is_closed_by_itself(kind):
    async def act(stage):
        await fill(stage, 100)
        await kind(stage, await stage.intent())
        assert open_ledgers(stage)

        await asyncio.sleep(10 + (CURSOR_IDLE_S if kind is a_cursor else IDLE_S))

        assert open_ledgers(stage) == []

    play(act)


@pytest.mark.parametrize("kind", [a_task, a_commit, a_checkpoint])
def test_a_ledger_in_steady_use_is_rolled_at_its_age(kind):
    async def act(stage):
        topic = await stage.client.topics.change_policies("t", {"ledger_age_s_max": AGE_S})
        stage = replace(stage, topic=topic)
        intent = await stage.intent()
        made: dict[str, float] = {}
        ever: dict[str, None] = {}
        for _ in range(15):
            await kind(stage, intent)
            now_s = asyncio.get_running_loop().time()
            made = {path: made.get(path, now_s) for path in open_ledgers(stage)}
            ever |= dict.fromkeys(made)
            assert max(now_s - since_s for since_s in made.values()) < 2 * AGE_S
            await asyncio.sleep(20)
        assert len(ever) > 1 or kind is a_checkpoint

    play(act)


def test_a_task_that_is_stopped_while_its_ledger_is_made_leaves_none_open():
    async def act(stage):
        policies, cache = stage.topic.policies, stage.client.cache
        intent = await stage.intent()
        made = 0
        for steps in range(60):
            asking = asyncio.create_task(cache.acquire(stage.topic.id, policies, intent))
            await asyncio.wait([asking], timeout=steps * 0.0005)
            asking.cancel()
            await asyncio.wait([asking])
            if not asking.cancelled():
                cache.release(asking.result())
                made += 1
            await cache.close()
            assert open_ledgers(stage) == []
        assert 0 < made < 60

    play(act)


def test_of_writers_that_ended_and_ledgers_that_went_an_observer_remembers_nothing():
    async def act(stage):
        intent = await stage.intent()
        for version in range(5):
            await stage.commit(intent, version, await stage.written(intent, [b"a"]))
            await stage.client.cache.close()
        inventory = LedgerInventory(stage.client.store)
        inventory.learn(one for one in await inventory.look([intent]) if one.closed)
        assert len(inventory.of_open_intents) == len(inventory.closed) == 5
        ended = await stage.client.intents.finish(intent.id)

        found = await inventory.look([ended])
        assert (len(found), inventory.of_open_intents) == (5, {})
        await inventory.look([])  # the intent was removed, and its ledgers before it

        assert inventory.closed == {}

    play(act)
