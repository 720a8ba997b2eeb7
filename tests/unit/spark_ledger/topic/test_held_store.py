"""Commits, and what maintains topics, over a metadata store that is held and accepted."""

import asyncio
from dataclasses import replace

import pytest

from spark_ledger import errors
from spark_ledger.metadata import chain, cluster, hold, ledger_record, paths
from spark_ledger.metadata.cluster import ClusterRecord, Hold
from spark_ledger.topic.commit.draft import TxnKey
from spark_ledger.topic.upkeep.upkeep import Upkeep
from tests.simulation.restoring import copied, go_back
from tests.simulation.world import CLUSTER_ID
from tests.unit.spark_ledger.topic.stage import Stage, play

WHY = Hold("link 7 is not in it", "b1")


async def held(stage: Stage) -> None:
    await hold.put(stage.world.store.session("bookie"), CLUSTER_ID, WHY)


async def accepted(stage: Stage) -> None:
    await hold.accept(stage.world.store.session("person"))


def topics_of(stage: Stage) -> dict[str, bytes]:
    return {path: node.value for path, node in stage.world.store.walk("/topic-ids")}


def test_no_commit_is_made_of_a_held_store_and_what_was_is_read():
    async def act(stage):
        intent = await stage.intent()
        await stage.commit(intent, 0, await stage.written(intent, [b"a"]))
        written = await stage.written(intent, [b"b"])
        await held(stage)
        before = topics_of(stage)
        with pytest.raises(errors.MetadataHeld, match="metadata accept"):
            await stage.commit(intent, 1, written)
        assert topics_of(stage) == before
        assert await stage.rows() == [(0, b"a")]

    play(act)


def test_a_hold_that_comes_between_the_look_and_the_multi_stops_the_commit():
    async def act(stage):
        intent = await stage.intent()
        written = await stage.written(intent, [b"a"])
        plain = stage.client.store.multi

        async def multi(operations):
            if any(one.path.startswith("/topic-ids") for one in operations):
                await held(stage)
            await plain(operations)

        stage.client.store.multi = multi
        with pytest.raises(errors.MetadataHeld):
            await stage.commit(intent, 0, written)
        assert await stage.rows() == []

    play(act)


def test_what_was_written_before_an_accept_is_not_committed_after_it():
    """Its ledgers may have no record any more. The next run of the same process goes on."""

    async def act(stage):
        intent = await stage.intent()
        await stage.commit(intent, 0, await stage.written(intent, [b"a"]))
        written = await stage.written(intent, [b"lost"])
        await held(stage)
        await accepted(stage)
        with pytest.raises(errors.LedgerFenced, match="accepted"):
            await stage.commit(intent, 1, written)
        again = await stage.intent("run-2")
        await stage.commit(again, 1, await stage.written(again, [b"b"]))
        assert await stage.rows() == [(0, b"a"), (1, b"b")]

    play(act)


def test_a_commit_that_was_refused_under_the_hold_is_not_made_after_the_accept():

    async def act(stage):
        intent = await stage.intent()
        await stage.commit(intent, 0, await stage.written(intent, [b"a"]))
        written = await stage.written(intent, [b"lost"])
        await held(stage)
        for _ in range(2):
            with pytest.raises(errors.MetadataHeld):
                await stage.commit(intent, 1, written)
        await accepted(stage)
        with pytest.raises(errors.LedgerFenced, match="accepted"):
            await stage.commit(intent, 1, written)
        assert await stage.rows() == [(0, b"a")]

    play(act)


def test_a_process_that_began_after_the_accept_commits_no_ledger_that_lost_its_record():
    """Each commit of a query is of a new process of Spark's driver, which has seen no epoch."""

    async def act(stage):
        intent = await stage.intent()
        await stage.commit(intent, 0, await stage.written(intent, [b"a"]))
        kept = await stage.written(intent, [b"b"])
        await stage.client.cache.close()
        copy = copied(stage.world.store)
        lost = await stage.written(intent, [b"lost"], 1)
        go_back(stage.world.store, copy)
        await held(stage)
        await accepted(stage)
        process, txn = await stage.another(), TxnKey("q", "t", 1, "run-1")
        with pytest.raises(errors.LedgerFenced, match="no record"):
            await process.commit_topics({stage.topic.id: [kept, lost]}, txn, intent.id)
        await process.commit_topics({stage.topic.id: [kept]}, txn, intent.id)
        assert await stage.rows() == [(0, b"a"), (1, b"b")]

    play(act)


def test_a_process_that_began_after_the_accept_commits_no_ledger_of_another_creator():
    """The id was given out again before the store was held: it has a record, of another ledger."""

    async def act(stage):
        intent = await stage.intent()
        copy = copied(stage.world.store)
        lost = await stage.written(intent, [b"lost"])
        await stage.client.cache.close()
        (ledger_id,) = lost.creators
        node = stage.world.store.peek(paths.ledger(ledger_id))
        go_back(stage.world.store, copy)
        again = replace(ledger_record.decode(node.value), creator="of another")
        person = stage.world.store.session("other")
        await person.create(paths.ledger(ledger_id), ledger_record.encode(again), parents=True)
        await held(stage)
        await accepted(stage)
        process, txn = await stage.another(), TxnKey("q", "t", 0, "run-1")
        with pytest.raises(errors.LedgerFenced, match="record of another ledger"):
            await process.commit_topics({stage.topic.id: [lost]}, txn, intent.id)
        assert await stage.rows() == []

    play(act)


def test_a_process_forgets_what_it_folded_though_the_head_has_the_same_version_again():
    async def act(stage):
        intent, txn = await stage.intent(), TxnKey("q", "t", 1, "run-2")
        await stage.commit(intent, 0, await stage.written(intent, [b"a"], inline=True))
        copy = copied(stage.world.store)
        await stage.commit(intent, 1, await stage.written(intent, [b"lost"] * 3, inline=True))
        await stage.client.log(stage.topic.id).fold(fresh=True)
        go_back(stage.world.store, copy)
        await held(stage)
        await accepted(stage)
        other = await stage.another()
        again = await other.intents.open_query_intent("q", "run-2", "t")
        rows = await stage.written(again, [b"b"], inline=True)
        await other.commit_topics({stage.topic.id: [rows]}, txn, again.id)
        with pytest.raises(errors.LedgerFenced):
            await stage.commit(intent, 2, await stage.written(intent, [b"x"], inline=True))
        last = await stage.intent("run-3")
        await stage.commit(last, 2, await stage.written(last, [b"c"], inline=True))
        assert await stage.rows() == [(0, b"a"), (1, b"b"), (2, b"c")]
        state = await stage.client.log(stage.topic.id).fold(fresh=True)
        assert state.partitions[0].end_offset == 3

    play(act)


def test_a_process_that_knows_commits_of_the_store_before_does_not_commit_on_them():
    """The store goes back under a running process, twice to the same copy: versions come again."""

    async def act(stage):
        intent = await stage.intent()
        await stage.commit(intent, 0, await stage.written(intent, [b"a"], inline=True))
        copy = copied(stage.world.store)
        for run, lost in enumerate((3, 1), 2):
            for version in range(1, 1 + lost):
                await stage.commit(
                    intent, version, await stage.written(intent, [b"lost"], inline=True)
                )
            go_back(stage.world.store, copy)
            written = await stage.written(intent, [b"x"], inline=True)
            await held(stage)
            await accepted(stage)
            with pytest.raises(errors.LedgerFenced):
                await stage.commit(intent, 1 + lost, written)
            intent = await stage.intent(f"run-{run}")
            await stage.commit(intent, 1, await stage.written(intent, [b"b"], inline=True))
            assert await stage.rows() == [(0, b"a"), (1, b"b")]

    play(act)


def test_nothing_is_deleted_or_maintained_while_the_store_is_held():
    async def act(stage):
        intent = await stage.intent()
        await stage.written(intent, [b"never committed"])
        await stage.client.intents.finish(intent.id)
        upkeep = Upkeep(stage.client)
        await held(stage)
        before = copied(stage.world.store)
        for work in (upkeep.once, stage.janitor.clean):
            with pytest.raises(errors.MetadataHeld):
                await work()
        assert copied(stage.world.store) == before
        await accepted(stage)
        assert (await stage.janitor.clean(force=True)).deleted

    play(act)


def test_a_hold_that_comes_during_a_pass_of_the_janitor_deletes_nothing():
    async def act(stage):
        intent = await stage.intent()
        await stage.written(intent, [b"never committed"])
        await stage.client.intents.finish(intent.id)
        janitor, get = stage.janitor, stage.client.store.get

        async def get_beside_a_bookie(path, watch=None):
            if path == paths.topic_head(stage.topic.id):
                await held(stage)
            return await get(path, watch)

        stage.client.store.get = get_beside_a_bookie
        with pytest.raises(errors.MetadataHeld):
            await janitor.clean(force=True)
        stage.client.store.get = get
        assert len([ledger async for ledger in stage.client.ledgers.list()]) == 1

    play(act)


def test_a_pass_of_the_janitor_under_which_the_store_goes_back_deletes_nothing_more():
    """What it judged was of the newer store: in the older one a topic may refer to a ledger still,
    or be there. No bookie has held the store yet."""

    async def act(stage):
        intent = await stage.intent()
        await stage.written(intent, [b"never committed"])
        await stage.client.intents.finish(intent.id)
        get, copy = stage.client.store.get, copied(stage.world.store)

        async def get_while_it_is_restored(path, watch=None):
            node = await get(path, watch)
            if path == paths.topic_head(stage.topic.id) and stage.client.store.get != get:
                stage.client.store.get = get
                go_back(stage.world.store, copy)
                await asyncio.sleep(60)
            return node

        stage.client.store.get = get_while_it_is_restored
        with pytest.raises(errors.Unavailable, match="session"):
            await stage.janitor.clean(force=True)
        assert len([ledger async for ledger in stage.client.ledgers.list()]) == 1
        assert (await stage.janitor.clean(force=True)).deleted

    play(act)


def test_maintenance_appends_a_link_with_each_pass():
    async def act(stage):
        upkeep = Upkeep(stage.client)
        numbers = []
        for _ in range(10):
            await upkeep.once()
            numbers.append(chain.decode(stage.world.store.peek(paths.CHAIN).value).newest)
            await asyncio.sleep(60)
        assert numbers == sorted(numbers)
        assert numbers[-1] >= 8

    play(act)


def test_a_cluster_that_was_never_held_is_as_it_was():
    async def act(stage):
        intent = await stage.intent()
        await stage.commit(intent, 0, await stage.written(intent, [b"a"]))
        node = stage.world.store.peek(paths.CLUSTER)
        assert (cluster.decode(node.value), node.version) == (ClusterRecord(CLUSTER_ID), 0)

    play(act)
