"""Under the intent of a merge, a broker or a batch job a ledger is written for one commit or one
checkpoint (hazard 94): what the janitor may delete, because the topic dropped it, comes into no
later commit."""

import asyncio
from dataclasses import replace

import pytest

from spark_ledger.metadata import paths
from spark_ledger.topic import checkpointer
from spark_ledger.topic.commit import draft as commit_draft
from spark_ledger.topic.log.actions import Append
from spark_ledger.topic.log.blobs import BlobWriter
from spark_ledger.topic.log.policies import TopicPolicies
from spark_ledger.topic.upkeep.compactor import Compaction, MergePace
from tests.unit.spark_ledger.topic.janitors import janitor_of
from tests.unit.spark_ledger.topic.merged_segments import all_merged
from tests.unit.spark_ledger.topic.stage import inline, play


async def without_delay(stage):
    """The stage with a topic whose ledgers may be deleted as soon as it has dropped them."""
    policies = TopicPolicies(delete_delay_ms=0)
    return replace(stage, topic=await stage.client.topics.create("u", policies=policies))


async def batches(stage, intent, first, count):
    for version in range(first, first + count):
        result = await stage.written(intent, [b"%d" % version] * 2)
        await stage.commit(intent, version, result)


async def later_checkpoints(stage, intent, first):
    """Another process makes as many checkpoints as it takes for the topic to drop the bodies of all
    commits before, and the roots of all checkpoints before."""
    other = await stage.another()
    for version in range(first, first + 4):
        await batches(stage, intent, version, 1)
        await other.checkpoints.make(stage.topic.id)


async def values(stage):
    return [int(value) for _, value in await stage.rows()]


def twice(*numbers):
    return [number for number in numbers for _ in range(2)]


@pytest.mark.parametrize("named_by", ["the body of a commit", "a checkpoint"])
def test_rows_of_a_merge_are_not_in_a_ledger_that_its_intent_has_named_before(
    named_by, monkeypatch
):
    if named_by == "a checkpoint":
        monkeypatch.setattr(checkpointer, "ROOT_INLINE_BYTES_MAX", 0)
    else:
        monkeypatch.setattr(commit_draft, "BODY_INLINE_BYTES_MAX", 300)

    async def act(stage):
        stage = await without_delay(stage)
        intent = await stage.intent()
        own = await stage.client.intents.open_system_intent("merge", "topics")

        async def one_for_all():
            return own

        await batches(stage, intent, 0, 6)
        first = Compaction(stage.client, stage.topic, open_intent=one_for_all)
        while tasks := await first.plan():
            await first.carry_out(tasks, MergePace(None))
        if named_by == "a checkpoint":
            await stage.client.checkpoints.make(stage.topic.id, own.id)
        await batches(stage, intent, 6, 6)
        second = Compaction(stage.client, stage.topic, open_intent=one_for_all)
        written = await all_merged(stage, second)
        await later_checkpoints(stage, intent, 12)
        await stage.client.cache.close()
        deleted = (await (await janitor_of(stage)).clean()).deleted
        await second.commit(written)

        assert deleted, "what the first round's body or the checkpoint was in"
        assert second.total.commits == 1
        assert await values(stage) == twice(*range(16))

    play(act)


def test_a_checkpoint_before_the_commit_of_a_job_does_not_name_the_ledger_of_its_rows(monkeypatch):
    monkeypatch.setattr(checkpointer, "ROOT_INLINE_BYTES_MAX", 0)

    async def act(stage):
        stage = await without_delay(stage)
        intent = await stage.intent()
        await batches(stage, intent, 0, 4)
        job = await stage.client.intents.open_batch_intent("job", "run", "u")
        result = await stage.written(job, [b"99"] * 2)
        await stage.client.checkpoints.make(stage.topic.id, job.id)
        await later_checkpoints(stage, intent, 4)
        await stage.client.cache.close()
        await (await janitor_of(stage)).clean()
        await stage.commit(job, 0, result, finish_intent=True)

        assert await values(stage) == twice(*range(8), 99)

    play(act)


def test_a_body_of_a_broker_is_not_in_a_ledger_that_a_janitor_has_judged(monkeypatch):
    """The ledger is taken for abandoned and recovered; the janitor judges it before the commit that
    names it, and deletes it afterwards."""
    monkeypatch.setattr(commit_draft, "BODY_INLINE_BYTES_MAX", 10)
    judged, named = asyncio.Event(), asyncio.Event()
    checks = BlobWriter.checks

    async def act(stage):
        stage = await without_delay(stage)
        own = await stage.client.intents.open_system_intent("broker", stage.topic.id)

        async def committed():
            await stage.client.commit_actions(stage.topic.id, [Append((inline(b"row"),))], own)

        await committed()
        other = await stage.another()
        await later_checkpoints(replace(stage, client=other), await stage.intent(), 0)
        janitor = await janitor_of(stage)
        delete = janitor._delete
        cleaning = []

        async def after_the_commit(*about):
            judged.set()
            await named.wait()
            return await delete(*about)

        async def judged_meanwhile(held):
            if not cleaning:
                (ledger,) = held._last_entry_by_ledger
                await other.ledgers.recover(ledger)
                cleaning.append(asyncio.create_task(janitor.clean()))
                await judged.wait()
            return await checks(held)

        janitor._delete = after_the_commit
        monkeypatch.setattr(BlobWriter, "checks", judged_meanwhile)
        await committed()
        named.set()
        await cleaning[0]

        state = await (await stage.another()).log(stage.topic.id).fold(fresh=True)
        assert state.end_offsets() == {0: 10}

    play(act)


def test_a_merge_whose_ledger_is_gone_is_not_committed_and_is_planned_again():
    async def act(stage):
        intent = await stage.intent()
        await batches(stage, intent, 0, 6)
        compaction = Compaction(stage.client, stage.topic)
        written = await all_merged(stage, compaction)
        (gone,) = {segment.ledger_id for one in written for segment in one.segments}
        await stage.client.cache.close()
        assert await (await stage.another()).ledgers.delete(gone)
        await compaction.commit(written)
        assert compaction.total.commits == 0

        while tasks := await compaction.plan():
            await compaction.carry_out(tasks, MergePace(None))

        assert compaction.total.commits == 1
        assert stage.world.store.peek(paths.ledger(gone)) is None
        assert await values(stage) == twice(*range(6))
        await compaction.aclose()

    play(act)
