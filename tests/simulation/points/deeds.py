"""Deeds on topics, and the processes that come after. Each deed is one verb of the topic layer."""

import asyncio
from functools import partial
from typing import Any

from spark_ledger.errors import (
    LedgerFenced,
    TopicDeleted,
    TxnConflict,
)
from spark_ledger.topic import checkpointer
from spark_ledger.topic.commit import commit
from spark_ledger.topic.commit import draft as commit_draft
from spark_ledger.topic.log import checkpoint
from spark_ledger.topic.upkeep.admin import TopicAdmin
from spark_ledger.topic.upkeep.compactor import compact
from tests.simulation.points.enumerate import Deed
from tests.simulation.points.fates import ALONE, Fate
from tests.simulation.points.stage import Stage
from tests.simulation.topic_work import TOPIC
from tests.simulation.world import Client

IN_LEDGERS: dict[Any, Any] = {
    (checkpoint, "TAIL_BYTES_MAX"): 0,
    (checkpoint, "CHUNK_BYTES_MAX"): 1_500,
    (checkpointer, "ROOT_INLINE_BYTES_MAX"): 0,
    (commit, "INLINE_COMMIT_BYTES_MAX"): 300,
    (commit_draft, "BODY_INLINE_BYTES_MAX"): 400,
}
"""Chunks, roots and bodies are in ledgers."""
OTHER = "u"


# -- commits -------------------------------------------------------------------------------------


async def two_batches(stage: Stage) -> None:
    await stage.batches([0, 1])


async def commits(stage: Stage, client: Client) -> None:
    await stage.batch(client, 2, stage.new_run())


async def another_run_commits(stage: Stage, *names: str) -> None:
    """The same version first, as Spark replays it, and then the next."""
    run, topics = stage.new_run(), names or (TOPIC,)
    for version in (2, 3):
        batch = partial(stage.batch, version=version, run=run, names=topics)
        await stage.patiently("next run", batch)


async def two_topics(stage: Stage) -> None:
    await stage.create(await stage.world.client("founder"), OTHER)
    await stage.batches([0, 1], names=(TOPIC, OTHER))


async def commits_to_two(stage: Stage, client: Client) -> None:
    await stage.batch(client, 2, stage.new_run(), names=(TOPIC, OTHER))


async def another_run_commits_to_two(stage: Stage) -> None:
    await another_run_commits(stage, TOPIC, OTHER)


async def overwrites(stage: Stage, client: Client) -> None:
    await stage.batch(client, 2, stage.new_run(), overwrite=True)


async def others_add(stage: Stage) -> None:
    await stage.batches([0], query="r")
    await stage.batches([2], overwrite=True)


# -- upkeep --------------------------------------------------------------------------------------


async def batches_and_checkpoints(stage: Stage) -> None:
    writer = await stage.batches(range(3))
    await writer.run(stage.checkpoint(writer))
    writer = await stage.batches(range(3, 6))
    await writer.run(stage.checkpoint(writer))
    await stage.batches(range(6, 8))


async def makes_a_checkpoint(stage: Stage, client: Client) -> None:
    await stage.checkpoint(client)


async def others_make_checkpoints(stage: Stage) -> None:
    for version in (8, 9):
        await stage.batches([version])
        await stage.patiently("checkpointer", stage.checkpoint)
    await others_clean(stage)


async def trims(stage: Stage, client: Client) -> None:
    await stage.trim(client, 0.5)


async def others_trim(stage: Stage) -> None:
    await stage.batches([2])
    await stage.patiently("trimmer", lambda client: stage.trim(client, 0.8), TxnConflict)
    await stage.patiently("checkpointer", stage.checkpoint)


async def old_batches(stage: Stage) -> None:
    await stage.batches([0, 1])
    await asyncio.sleep(20)


async def retains(stage: Stage, client: Client) -> None:
    await stage.retain(client)


async def others_retain(stage: Stage) -> None:
    await stage.batches([2])
    await stage.patiently("retainer", stage.retain)


async def small_batches(stage: Stage) -> None:
    await stage.batches(range(5))


async def merges(stage: Stage, client: Client) -> None:
    await compact(stage.topics(client), TOPIC)


async def others_merge(stage: Stage) -> None:
    await stage.batches([5])
    await stage.patiently("trimmer", lambda client: stage.trim(client, 0.3))
    await stage.patiently("merger", lambda client: compact(stage.topics(client), TOPIC))
    await stage.patiently("checkpointer", stage.checkpoint)


async def grows(stage: Stage, client: Client) -> None:
    await TopicAdmin(stage.topics(client)).grow(TOPIC, 4)


async def others_grow(stage: Stage) -> None:
    await stage.batches([2])
    grow = lambda client: TopicAdmin(stage.topics(client)).grow(TOPIC, 5)  # noqa: E731
    await stage.patiently("grower", grow)


async def deletes(stage: Stage, client: Client) -> None:
    await TopicAdmin(stage.topics(client)).delete(TOPIC)
    await stage.create(client, TOPIC)


async def others_use_it(stage: Stage) -> None:
    run = stage.new_run()
    batch = lambda client: stage.batch(client, 2, run)  # noqa: E731
    await stage.patiently("founder", lambda client: stage.create(client, TOPIC))
    await stage.patiently("next run", batch, TopicDeleted)
    janitor = lambda client: stage.janitor(client).clean(force=True)  # noqa: E731
    await stage.patiently("janitor", janitor)
    await stage.patiently("founder", lambda client: stage.create(client, TOPIC))


async def creates(stage: Stage, client: Client) -> None:
    await stage.create(client, OTHER)
    await stage.batch(client, 0, stage.new_run(), query="r", names=(OTHER, TOPIC))


async def others_create(stage: Stage) -> None:
    await stage.patiently("founder", lambda client: stage.create(client, OTHER))
    run = stage.new_run()
    batch = lambda client: stage.batch(client, 0, run, query="r", names=(OTHER, TOPIC))  # noqa: E731
    await stage.patiently("next run", batch)


async def others_clean(stage: Stage) -> None:
    """A janitor takes a silent process for gone, and deletes its ledgers."""
    await stage.patiently("janitor", lambda client: cleans(stage, client))


# -- cleaning ------------------------------------------------------------------------------------


async def much_to_clean(stage: Stage) -> None:
    """A writer that died before its commit, one that stands still before it, and rows that were
    replaced."""
    await stage.batches([0, 1])
    await stage.batches([2], overwrite=True)
    stage.work.inline_bytes = (0,)
    dead = await stage.world.client("dead")
    work = dead.run(stage.batch(dead, 0, stage.new_run(), query="r", asleep=True), "dies")
    await asyncio.sleep(8)
    dead.kill()
    await asyncio.gather(work, return_exceptions=True)
    sleeper = await stage.world.client("sleeper")
    batch = stage.batch(sleeper, 0, stage.new_run(), query="s", asleep=True)
    stage.sleeper = sleeper, sleeper.run(batch, "sleeps")
    client = await stage.world.client("checkpointer")
    await client.run(stage.checkpoint(client))
    await asyncio.sleep(8)


async def cleans(stage: Stage, client: Client, passes: int = 4) -> None:
    """Pass after pass, until the silent are condemned, their ledgers closed, and deleted."""
    janitor = stage.janitor(client)
    for _ in range(passes):
        await janitor.clean(force=True)
        await asyncio.sleep(15)


async def condemns(stage: Stage, client: Client) -> None:
    """Passes up to the one that takes the sleeping process for gone, and deletes the ledgers that
    only that process could name."""
    janitor = stage.janitor(client)
    for _ in range(20):
        report = await janitor.clean(force=True)
        if any(intent.startswith("s@") for intent in report.condemned):
            return
        await asyncio.sleep(15)
    raise AssertionError("who sleeps was never taken for gone")


async def others_clean_for_long(stage: Stage) -> None:
    """The process that makes a checkpoint is taken for gone."""
    await stage.patiently("janitor", lambda client: cleans(stage, client, passes=14))


async def others_clean_and_commit(stage: Stage) -> None:
    await stage.wake()
    janitor = lambda client: stage.janitor(client).clean(force=True)  # noqa: E731
    await stage.patiently("janitor", janitor)
    run = stage.new_run()
    await stage.patiently("next run", lambda client: stage.batch(client, 3, run), LedgerFenced)
    await stage.patiently("checkpointer", stage.checkpoint)


async def a_deleted_topic(stage: Stage) -> None:
    await much_to_clean(stage)
    await stage.create(await stage.world.client("founder"), OTHER)
    await stage.batches([0, 1], query="w", names=(OTHER, TOPIC))
    client = await stage.world.client("deleter")
    await client.run(TopicAdmin(stage.topics(client)).delete(OTHER))
    await asyncio.sleep(2)


DEEDS = (
    Deed(
        *("commit", two_batches, commits, another_run_commits),
        fates=(*ALONE, Fate.ANSWER_LOST_AWAY, Fate.REQUEST_LOST_AWAY),
        commits_once=True,
    ),
    Deed("commit of bodies in ledgers", two_batches, commits, another_run_commits, IN_LEDGERS),
    Deed("commit to two topics", two_topics, commits_to_two, another_run_commits_to_two),
    Deed("commit beside a janitor", two_batches, commits, others_clean, IN_LEDGERS),
    Deed("overwrite", two_batches, overwrites, others_add),
    Deed("checkpoint", batches_and_checkpoints, makes_a_checkpoint, others_make_checkpoints),
    Deed(
        *("checkpoint in ledgers", batches_and_checkpoints, makes_a_checkpoint),
        *(others_make_checkpoints, IN_LEDGERS),
    ),
    Deed(
        *("checkpoint beside a janitor", batches_and_checkpoints, makes_a_checkpoint),
        *(others_clean_for_long, IN_LEDGERS),
    ),
    Deed("trim", two_batches, trims, others_trim, commits_once=True),
    Deed("retention", old_batches, retains, others_retain, policies={"retention_ms": 10_000}),
    Deed("merge", small_batches, merges, others_merge),
    Deed("growth", two_batches, grows, others_grow, commits_once=True),
    Deed("deletion", two_batches, deletes, others_use_it),
    Deed("creation", two_batches, creates, others_create),
    Deed("janitor", much_to_clean, cleans, others_clean_and_commit),
    Deed("janitor and a broker that wakes", much_to_clean, condemns, others_clean_and_commit),
    Deed("janitor beside a deleted topic", a_deleted_topic, cleans, others_clean_and_commit),
)
