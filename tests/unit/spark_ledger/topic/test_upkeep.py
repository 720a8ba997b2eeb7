"""What is done for topics again and again, and who does it."""

import asyncio

import pytest

from spark_ledger import errors
from spark_ledger.metadata import paths
from spark_ledger.metadata.store import ANY_VERSION
from spark_ledger.metadata.store_calls import take_role
from spark_ledger.topic.log.intents import IDS_PER_BLOCK
from spark_ledger.topic.upkeep.janitor import Janitor
from spark_ledger.topic.upkeep.upkeep import LONG_LOG, Upkeep
from tests.unit.spark_ledger.topic.stage import play


async def old_rows(stage):
    """Two ledgers of rows that retention does not keep."""
    intent = await stage.client.intents.open_batch_intent("app", "r", "t")
    results = [await stage.written(intent, [b"%d" % n], n) for n in range(2)]
    await stage.commit(intent, 0, *results, finish_intent=True)
    await stage.client.topics.change_policies("t", {"retention_ms": 1, "delete_delay_ms": 50_000})
    await asyncio.sleep(10)


def test_rows_that_are_not_kept_go_and_their_ledgers_after_the_delay():
    async def act(stage):
        await old_rows(stage)
        upkeep = Upkeep(stage.client)

        first = await upkeep.once()
        await asyncio.sleep(60)
        second = await upkeep.once()

        assert (dict(first.trimmed["t"].starts), first.trimmed["t"].rows) == ({0: 2}, 2)
        assert (first.clean.deleted, second.trimmed) == ((), {})
        assert len(second.clean.deleted) == 1
        assert "1 deleted" in second.summary()
        await upkeep.close()

    play(act)


def test_many_passes_of_one_process_are_made_under_one_intent_that_ends_with_it():
    async def act(stage):
        upkeep = Upkeep(stage.client)
        await stage.client.topics.change_policies("t", {"retention_ms": 1})
        intent = await stage.intent()
        for version in range(3):
            await stage.commit(intent, version, await stage.written(intent, [b"a"]))
            await asyncio.sleep(1)
            assert (await upkeep.once()).trimmed["t"].rows == 1
        await upkeep.close()

        names = stage.world.store.peek_children(paths.INTENTS)
        intents = [await stage.client.intents.get(name) for name in names]
        assert [one.is_open for one in intents if one.record.kind == "system"] == [False]

    play(act)


def test_a_dry_run_says_what_would_go_and_lets_nothing_go():
    async def act(stage):
        await old_rows(stage)

        report = await Upkeep(stage.client).once(dry_run=True)

        assert report.trimmed["t"].rows == 2
        assert "would be trimmed" in report.summary()
        assert (await stage.client.log(stage.topic.id).fold(fresh=True)).start_offsets() == {0: 0}

    play(act)


def test_a_long_log_that_nobody_checkpoints_any_more_is_checkpointed():
    async def act(stage):
        intent = await stage.intent()
        stage.client.checkpoints.after_commit = lambda *arguments: None
        written = await stage.written(intent, [b"a"], inline=True)
        for version in range(LONG_LOG):
            await stage.commit(intent, version, written)

        report = await Upkeep(stage.client).once()
        again = await Upkeep(stage.client).once()

        assert (report.checkpointed, again.checkpointed) == (("t",), ())
        assert len(await stage.rows()) == LONG_LOG

    play(act)


def test_small_segments_are_merged_and_it_is_said_but_not_in_a_dry_run_nor_if_it_may_copy_nothing():
    async def act(stage):
        intent = await stage.intent()
        for version in range(8):
            await stage.commit(intent, version, await stage.written(intent, [b"a"]))
        await asyncio.sleep(100)

        nothing = [await Upkeep(stage.client).once(dry_run=True)]
        nothing.append(await Upkeep(stage.client, merge_bytes=0).once())
        upkeep = Upkeep(stage.client)
        report = await upkeep.once()
        await upkeep.close()

        assert [one.merged for one in nothing] == [{}, {}]
        assert report.merged["t"].segments == 8
        assert report.is_eventful and "8 segment(s) merged into 1" in report.summary()

    play(act)


def test_what_fails_for_one_topic_is_said_and_the_others_are_maintained():
    async def act(stage):
        await old_rows(stage)
        broken = await stage.client.topics.create("broken")
        await stage.client.topics.change_policies("broken", {"retention_ms": 1})
        await stage.client.store.set(paths.topic_head(broken.id), b'{"min_reader":99}', ANY_VERSION)

        report = await Upkeep(stage.client).once()

        assert list(report.trimmed) == ["t"]
        assert "reader version 99" in report.problems["broken"]
        assert any("topic broken" in warning for warning in report.warnings())

    play(act)


def test_a_process_that_was_taken_for_gone_goes_on_at_its_next_pass():
    async def act(stage):
        upkeep = Upkeep(stage.client)
        await stage.client.topics.change_policies("t", {"retention_ms": 1})
        query = await stage.intent()
        reports = []
        for version in range(3):
            await stage.commit(query, version, await stage.written(query, [b"a"]))
            await asyncio.sleep(1)
            reports.append(await upkeep.once())
            if not version:
                (used,) = [one for one in await stage.intents() if one.target == "topics"]
                await stage.client.intents.condemn(used.id, "stale")

        assert [list(one.trimmed) for one in reports] == [["t"], [], ["t"]]
        assert "FENCED" in reports[1].problems["t"]

    play(act)


def test_one_session_at_a_time_has_the_role_and_another_gets_it_when_that_is_over():
    async def act(stage):
        mine, other = stage.client.store, (await stage.another()).store

        role = paths.MAINTAINER
        told = [await take_role(each, role) for each in (mine, other, mine)]
        assert told == [True, False, True]
        await mine.close()
        for _ in range(100):
            if await take_role(other, role):
                return
            await asyncio.sleep(1)
        raise AssertionError("the role is nobody's")

    play(act)


def test_a_store_that_does_not_answer_is_an_error_of_the_pass():
    async def act(stage):
        stage.client.store.suspend(100)
        with pytest.raises(errors.Unavailable):
            await Upkeep(stage.client).once()

    play(act)


def test_a_pass_does_not_read_again_what_cannot_change():
    async def act(stage):
        ended = await stage.client.intents.open_batch_intent("app", "r", "t")
        await stage.commit(ended, 0, await stage.written(ended, [b"a"]), finish_intent=True)
        at_work = await stage.intent()
        lost = await stage.written(at_work, [b"lost"])
        await stage.client.cache.close()
        other = await stage.another()
        janitor = Janitor(other.store, other.ledgers, other.rng)
        await janitor.clean()
        await janitor.clean()
        await stage.client.ledgers.delete(lost.segments[0].ledger_id)
        janitor._inventory.forget([lost.segments[0].ledger_id])
        await janitor.clean()
        asked, get = [], janitor.store.get

        async def counted(path, watch=None):
            asked.append(path)
            return await get(path, watch)

        janitor.store.get = counted
        await janitor.clean()

        of_intents = [path for path in asked if path.startswith(f"{paths.INTENTS}/")]
        open_one = paths.intent(at_work.id)
        assert sorted(of_intents) == [open_one, paths.intent_heartbeat(at_work.id)]
        of_ledgers = [path for path in asked if path.startswith(f"{paths.LEDGERS}/")]
        never_made = IDS_PER_BLOCK - 1
        assert len(of_ledgers) == never_made

    play(act)
