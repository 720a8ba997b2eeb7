"""What a topic dropped is deleted while the query that wrote it goes on, and nothing that a commit
can still name."""

import asyncio
from dataclasses import replace

from spark_ledger.topic.log.intents import PARTS
from spark_ledger.topic.log.policies import TopicPolicies
from spark_ledger.topic.parts import Part, commit_part
from tests.unit.spark_ledger.topic.janitors import janitor_of, ledger_of, trimmed
from tests.unit.spark_ledger.topic.stage import play


async def of_no_delay(stage):
    """What its topic drops may go at once."""
    policies = TopicPolicies(delete_delay_ms=0)
    return replace(stage, topic=await stage.client.topics.create("u", policies=policies))


async def committed_part(stage, intent, epoch, written):
    part = Part(0, epoch, f"{epoch}")
    await commit_part(stage.client, {stage.topic.id: [written]}, intent, part)


def test_a_ledger_to_which_the_version_under_way_wrote_before_its_close_stays_for_its_commit():
    async def act(stage):
        stage = await of_no_delay(stage)
        intent = await stage.intent()
        first = await stage.written(intent, [b"a"])
        await stage.commit(intent, 0, first)
        next_ = await stage.written(intent, [b"b"])
        assert ledger_of(next_) == ledger_of(first)
        await stage.client.cache.close()
        await trimmed(stage)
        for _ in range(3):
            assert (await (await janitor_of(stage)).clean()).deleted == ()
            await asyncio.sleep(7200)
            await stage.client.intents.heartbeat(intent)
        await stage.commit(intent, 1, next_)
        assert (await (await janitor_of(stage)).clean()).deleted == ()
        assert await stage.rows() == [(1, b"b")]

    play(act)


def test_what_an_idle_query_wrote_before_its_last_version_goes_though_the_janitor_began_after_it():
    async def act(stage):
        stage = await of_no_delay(stage)
        intent, ledgers = await stage.intent(), []
        for version in range(5):
            written = await stage.written(intent, [b"x"] * 3)
            ledgers.append(ledger_of(written))
            await stage.commit(intent, version, written)
            await stage.client.cache.close()
        await trimmed(stage)

        report = await (await janitor_of(stage)).clean()

        assert report.deleted == tuple(ledgers[:-1])
        assert "version" in report.waiting[ledgers[-1]], "the next version may have written to it"

    play(act)


def test_what_tasks_that_commit_their_parts_wrote_goes_while_their_run_goes_on():
    async def act(stage):
        stage = await of_no_delay(stage)
        client = stage.client
        intent = await client.intents.open_query_intent("app", "r", "t", kind=PARTS)
        janitor, ledgers = await janitor_of(stage), []
        for epoch in range(3):
            written = await stage.written(intent, [b"%d" % epoch] * 3)
            ledgers.append(ledger_of(written))
            await committed_part(stage, intent, epoch, written)
            await asyncio.sleep(5)
        assert len({*ledgers}) == 3, "no two commits name one ledger"
        await trimmed(stage)
        under_way = await stage.written(intent, [b"under way"])
        await client.cache.close()

        report = await janitor.clean()

        assert report.deleted == tuple(ledgers)
        assert (await client.intents.get(intent.id)).is_open
        await committed_part(stage, intent, 3, under_way)
        assert await stage.rows() == [(9, b"under way")]

    play(act)
