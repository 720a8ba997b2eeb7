"""What the topic layer's own bytes are in is never deleted while a fold may come to it."""

import random

import pytest

from spark_ledger.metadata import paths
from spark_ledger.topic import checkpointer
from spark_ledger.topic.commit import draft as commit_draft
from spark_ledger.topic.log import checkpoint, records
from spark_ledger.topic.log.actions import Append, Trim
from spark_ledger.topic.upkeep.janitor import Janitor
from tests.unit.spark_ledger.topic.stage import play, segment


async def committed(stage, count):
    """Commits of rows that are said to be in a ledger; nothing of them is the topic layer's."""
    intent = await stage.client.intents.open_system_intent("write", "t")
    for n in range(count):
        await stage.client.commit_actions(
            stage.topic.id, [Append((segment(10**9 + n, 5),))], intent
        )
    await stage.client.cache.close()
    await stage.client.intents.finish(intent.id)


async def checkpointed(stage):
    """A checkpoint in a ledger of its own, under an intent that has ended."""
    record = await stage.client.checkpoints.make(stage.topic.id)
    await stage.client.cache.close()
    return record


async def cleaned(stage):
    client = await stage.another()
    janitor = Janitor(client.store, client.ledgers, random.Random(1), lease_s=10**6)
    report = await janitor.clean(force=True)
    state = await (await stage.another()).log(stage.topic.id).fold(fresh=True)
    assert state.next, "it can be folded"
    return report


def test_the_ledgers_of_a_checkpoints_root_and_of_the_root_before_it_stay(monkeypatch):
    monkeypatch.setattr(checkpointer, "ROOT_INLINE_BYTES_MAX", 0)

    async def act(stage):
        roots = []
        for _ in range(3):
            await committed(stage, 2)
            roots.append((await checkpointed(stage)).root.ledger_id)
            report = await cleaned(stage)
            assert (report.deleted, set(report.kept)) == ((), set(roots[-2:]))
        assert len(set(roots)) == 3
        assert list(report.waiting) == roots[:1], "the delay holds for what none names any more"

    play(act)


def test_the_root_before_is_read_where_the_newest_cannot_be(monkeypatch):
    monkeypatch.setattr(checkpointer, "ROOT_INLINE_BYTES_MAX", 0)

    async def act(stage):
        for _ in range(2):
            await committed(stage, 2)
            record = await checkpointed(stage)
        await cleaned(stage)
        node = stage.world.store.peek(paths.topic_checkpoint(stage.topic.id))
        assert checkpoint.decode_record(node.value) == record
        await stage.client.ledgers.delete(record.root.ledger_id)

        reader = (await stage.another()).log(stage.topic.id)
        assert (await reader._root(record.previous_root)).state.next == 2

    play(act)


def test_the_ledgers_of_chunks_stay_of_the_newest_checkpoint_and_of_the_one_before(monkeypatch):
    monkeypatch.setattr(checkpoint, "TAIL_BYTES_MAX", 0)

    async def act(stage):
        chunks = []
        for n in range(3):
            await committed(stage, 2)
            await checkpointed(stage)
            state = await (await stage.another()).log(stage.topic.id).fold(fresh=True)
            chunks = [one.pointer.ledger_id for one in state.chunks()]
            assert len(set(chunks)) == n + 1
            report = await cleaned(stage)
            assert (report.deleted, set(report.kept)) == ((), set(chunks))

    play(act)


def test_a_chunk_whose_rows_all_went_stays_until_two_checkpoints_do_without_it(monkeypatch):
    monkeypatch.setattr(checkpoint, "TAIL_BYTES_MAX", 0)

    async def act(stage):
        await committed(stage, 2)
        await checkpointed(stage)
        state = await (await stage.another()).log(stage.topic.id).fold(fresh=True)
        (chunk,) = state.chunks()
        ledger = chunk.pointer.ledger_id
        found = [await cleaned(stage)]
        intent = await stage.client.intents.open_system_intent("trim", "t")
        await stage.client.commit_actions(stage.topic.id, [Trim(((0, 10),))], intent)
        await stage.client.intents.finish(intent.id)
        found.append(await cleaned(stage))
        for _ in range(2):
            await committed(stage, 1)
            await checkpointed(stage)
            found.append(await cleaned(stage))

        assert [ledger in one.kept for one in found] == [True, True, True, False]
        assert ledger in found[-1].waiting, "the delete delay holds for it"

    play(act)


@pytest.mark.parametrize("checkpoints", [0, 1, 2])
def test_the_ledger_of_a_commits_body_stays_while_the_log_has_the_commit(checkpoints, monkeypatch):
    monkeypatch.setattr(commit_draft, "BODY_INLINE_BYTES_MAX", 10)

    async def act(stage):
        await committed(stage, 1)
        log = paths.topic_log(stage.topic.id, 0)
        body = records.decode_commit(stage.world.store.peek(log).value).body.ledger_id
        for _ in range(checkpoints):
            await checkpointed(stage)
            await committed(stage, 1)

        report = await cleaned(stage)

        in_the_log = stage.world.store.peek(log) is not None
        assert in_the_log == (checkpoints < 2)
        assert body in (report.kept if in_the_log else report.waiting)

    play(act)
