"""Commits of parts: an epoch done again loses nothing, and doubles nothing if it is the same."""

import asyncio

import pytest

from spark_ledger import errors
from spark_ledger.topic.commit.draft import CommitKind
from spark_ledger.topic.log.records import TxnRecord
from spark_ledger.topic.parts import COMMITS_MAX_OF_EPOCH, Part, commit_part, next_version
from tests.unit.spark_ledger.topic.stage import RUN, play


async def written_part(stage, client, part, *rows, run_id=RUN):
    intent = await client.intents.open_query_intent("q", run_id, "t")
    result = await stage.written(intent, list(rows), part.number)
    return await commit_part(client, {stage.topic.id: [result]}, intent, part)


async def values(stage):
    return [value for _, value in await stage.rows()]


def test_the_version_of_a_part_rises_whatever_comes_and_only_the_same_content_has_none():
    record = TxnRecord(5 * COMMITS_MAX_OF_EPOCH, "digest")
    assert next_version(TxnRecord(), Part(0, 0, "a")) == 0
    assert next_version(record, Part(0, 5, "digest")) is None
    assert next_version(record, Part(0, 5, "other")) == 5 * COMMITS_MAX_OF_EPOCH + 1
    assert next_version(record, Part(0, 6, "digest")) == 6 * COMMITS_MAX_OF_EPOCH
    assert next_version(record, Part(0, 4, "digest")) == 5 * COMMITS_MAX_OF_EPOCH + 1


def test_a_part_repeated_as_it_was_is_in_the_topic_once_even_by_another_run():
    async def act(stage):
        part = Part(0, 0, "same")
        first = await written_part(stage, stage.client, part, b"a", b"b")
        again = await written_part(stage, stage.client, part, b"a", b"b")
        other = await stage.another()
        later = await written_part(stage, other, part, b"a", b"b", run_id="run-2")
        assert first.kind is CommitKind.COMMITTED
        assert again.kind is later.kind is CommitKind.ALREADY
        assert await values(stage) == [b"a", b"b"]

    play(act)


def test_a_part_repeated_with_other_rows_is_added_and_those_after_it_too():
    async def act(stage):
        await written_part(stage, stage.client, Part(0, 0, "prefix"), b"a")
        await written_part(stage, stage.client, Part(0, 0, "whole"), b"a", b"b")
        await written_part(stage, stage.client, Part(0, 0, "whole"), b"a", b"b")
        await written_part(stage, stage.client, Part(0, 1, "next"), b"c")
        assert await values(stage) == [b"a", b"a", b"b", b"c"]

    play(act)


def test_parts_of_one_epoch_do_not_stand_for_each_other():
    async def act(stage):
        for number in range(3):
            await written_part(stage, stage.client, Part(number, 0, "same"), b"%d" % number)
        assert await values(stage) == [b"0", b"1", b"2"]

    play(act)


def test_two_attempts_of_one_part_at_once_neither_fail_nor_lose_a_row():
    async def act(stage):
        other = await stage.another()
        await asyncio.gather(
            written_part(stage, stage.client, Part(0, 0, "one"), b"a", b"b"),
            written_part(stage, other, Part(0, 0, "two"), b"b", b"a"),
        )
        assert sorted(await values(stage)) == [b"a", b"a", b"b", b"b"]

    play(act)


def test_an_older_run_adds_nothing_any_more():
    async def act(stage):
        old = await stage.client.intents.open_query_intent("q", RUN, "t")
        result = await stage.written(old, [b"old"])
        await (await stage.another()).intents.open_query_intent("q", "run-2", "t")
        with pytest.raises(errors.LedgerFenced):
            await commit_part(stage.client, {stage.topic.id: [result]}, old, Part(0, 0, "x"))
        assert await values(stage) == []

    play(act)
