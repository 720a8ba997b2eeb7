"""Deeds of those who work for topics without being asked: merging, the expiry of intents, the
heartbeat of an intent, and what Spark's `foreach` commits part by part."""

import asyncio
from typing import Any

from spark_ledger.metadata.store_calls import store_now_ms
from spark_ledger.topic import parts
from spark_ledger.topic.commit.commit import TxnKey
from spark_ledger.topic.log import intents
from spark_ledger.topic.upkeep import intent_expiry
from spark_ledger.topic.upkeep.intent_expiry import IntentExpiry
from spark_ledger.topic.upkeep.merge_plan import MergeLimits
from spark_ledger.topic.upkeep.upkeep import Merging, TopicHead
from tests.simulation.invariants import require
from tests.simulation.points.deeds import IN_LEDGERS, others_clean, small_batches, two_batches
from tests.simulation.points.enumerate import Deed
from tests.simulation.points.fates import Fate
from tests.simulation.points.stage import LEASE_S, Stage
from tests.simulation.topic_work import TOPIC
from tests.simulation.world import Client

KEPT_S = 20
SOON_OVER: dict[Any, Any] = {
    (intent_expiry, "KEPT_MS"): KEPT_S * 1000,
    (intents, "IDS_KEPT_S"): KEPT_S / 2,
}
"""Intents and blocks of ids go after seconds, not after days."""
OFTEN: dict[Any, Any] = {(intents, "HEARTBEAT_S"): LEASE_S / 4}
"""A heartbeat within the lease that janitors have here."""


# -- merging --------------------------------------------------------------------------------------


async def merges_unasked(stage: Stage, client: Client) -> None:
    """Two passes: the second has nothing to do, or what came since the first; then it ends."""
    topics = stage.topics(client)
    merging = Merging(topics, MergeLimits(), bytes_per_s=None, quiet_ms=0)
    for _ in range(2):
        info = await topics.topics.open(TOPIC)
        head = TopicHead(info, (await topics.log(info.id).fold()).next)
        await merging.once([head], await store_now_ms(topics.store))
    await merging.close()


async def others_merge_unasked(stage: Stage) -> None:
    await stage.batches([5])
    await stage.patiently("trimmer", lambda client: stage.trim(client, 0.3))
    await stage.patiently("merger", lambda client: merges_unasked(stage, client))
    await stage.patiently("checkpointer", stage.checkpoint)


async def nothing_yet(stage: Stage) -> None:
    """A topic without rows."""


async def merges_round_after_round(stage: Stage, client: Client) -> None:
    """Two rounds under one intent, the second soon after the commit of the first."""
    topics = stage.topics(client)
    merging = Merging(topics, MergeLimits(), bytes_per_s=None, quiet_ms=0)
    for versions in (range(5), range(5, 10)):
        await stage.batches(versions)
        info = await topics.topics.open(TOPIC)
        head = TopicHead(info, (await topics.log(info.id).fold(fresh=True)).next)
        await merging.once([head], await store_now_ms(topics.store))
    await merging.close()


async def others_make_its_ledgers_needless(stage: Stage) -> None:
    """Checkpoints make the topic drop what is in ledgers beside rows, and a janitor deletes it."""
    for version in range(3):
        await stage.batches([version], query="r")
        await stage.patiently("checkpointer", stage.checkpoint)
    janitor = lambda client: stage.janitor(client).clean(force=True)  # noqa: E731
    await stage.patiently("janitor", janitor)


# -- expiry ---------------------------------------------------------------------------------------


async def intents_long_over(stage: Stage) -> None:
    """Of jobs: one that committed, one that was given up with its rows in a ledger. Their rows'
    ledgers are there, or have gone."""
    stage.work.inline_bytes = (0,)
    await two_batches(stage)
    client = await stage.world.client("jobs")
    await client.run(_job(stage, client, 1, commits=True))
    await client.run(_job(stage, client, 2, commits=False))
    await client.run(stage.retain(client))
    await asyncio.sleep(KEPT_S + 5)
    await others_clean(stage)
    await asyncio.sleep(KEPT_S + 5)


async def _job(stage: Stage, client: Client, number: int, *, commits: bool) -> None:
    topics = stage.topics(client)
    info = await topics.topics.open(TOPIC)
    app_id, run_id = f"job-{number}", f"run of job-{number}"
    intent = await topics.intents.open_batch_intent(app_id, run_id, TOPIC, random=True)
    results = await stage.work.run_tasks(client, topics, [info], intent, 0)
    if not commits:
        await topics.intents.finish(intent.id)
        return
    txn = TxnKey(app_id, intent.target, 0, run_id)
    await topics.commit_topics(results, txn, intent.id, finish_intent=True)


async def expires(stage: Stage, client: Client) -> None:
    topics = stage.topics(client)
    await IntentExpiry(topics.store).once(await store_now_ms(topics.store))


async def others_expire(stage: Stage) -> None:
    """And write, with ids of new blocks; what is at work is left alone."""
    client = await stage.world.client("jobs")
    await client.run(_job(stage, client, 3, commits=True))
    await stage.batches([2])
    await stage.patiently("janitor", lambda client: stage.janitor(client).clean(force=True))
    await asyncio.sleep(KEPT_S + 5)
    await stage.patiently("expiry", lambda client: expires(stage, client))


# -- heartbeats -----------------------------------------------------------------------------------


async def beats_and_commits(stage: Stage, client: Client) -> None:
    """A job whose rows take longer than a lease, which shows that somebody works under its intent
    while a janitor looks; then it commits."""
    topics = stage.topics(client)
    info = await topics.topics.open(TOPIC)
    intent = await topics.intents.open_batch_intent("job-1", "run-of-job-1", TOPIC)
    results = await stage.work.run_tasks(client, topics, [info], intent, 0)
    for _ in range(6):
        await topics.intents.heartbeat(intent)
        await asyncio.sleep(intents.HEARTBEAT_S)
    txn = TxnKey("job-1", intent.target, 0, "run-of-job-1")
    await topics.commit_topics(results, txn, intent.id, finish_intent=True)


async def a_janitor_at_work(stage: Stage) -> None:
    await two_batches(stage)
    client = await stage.world.client("janitor")
    janitor = stage.janitor(client)

    async def cleans() -> None:
        while True:
            await janitor.clean()
            await asyncio.sleep(5)

    client.run(cleans(), "cleans")


async def others_commit_and_clean(stage: Stage) -> None:
    await stage.batches([2])
    await asyncio.sleep(60)
    await others_clean(stage)


# -- parts ----------------------------------------------------------------------------------------

EPOCH = 3


async def commits_a_part(stage: Stage, client: Client, run: int = 0) -> None:
    """Its rows are written anew each time; they are in the topic once."""
    topics = stage.topics(client)
    info = await topics.topics.open(TOPIC)
    intent = await topics.intents.open_query_intent("q", f"run-{run or stage.new_run()}", TOPIC)
    results = await stage.work.run_tasks(client, topics, [info], intent, EPOCH)
    expected = stage.work.ghost.expected
    version = EPOCH * parts.COMMITS_MAX_OF_EPOCH
    expected[intent.id, version, info.id] = expected[intent.id, EPOCH, info.id]
    await parts.commit_part(topics, results, intent, parts.Part(1, EPOCH, "digest"))
    times = sum(commit.app_id == "q#part-1" for commit in stage.log().commits.values())
    require(times == 1, "T1", f"part 1 of epoch {EPOCH} was committed {times} times")


async def others_commit_it(stage: Stage) -> None:
    """As it was, by the next runs. (One that is cut otherwise is committed whatever was.)"""
    for _ in range(2):
        run = stage.new_run()

        async def again(client: Client, run: int = run) -> None:
            await commits_a_part(stage, client, run)

        await stage.patiently("next run", again)


DEEDS = (
    Deed("merging unasked", small_batches, merges_unasked, others_merge_unasked),
    Deed(
        *("merging round after round", nothing_yet, merges_round_after_round),
        *(others_make_its_ledgers_needless, IN_LEDGERS),
        fates=(Fate.BESIDE,),
    ),
    Deed("expiry of intents", intents_long_over, expires, others_expire, SOON_OVER),
    Deed(
        "heartbeat of an intent",
        a_janitor_at_work,
        beats_and_commits,
        others_commit_and_clean,
        OFTEN,
    ),
    Deed("commit of a part", two_batches, commits_a_part, others_commit_it),
)
