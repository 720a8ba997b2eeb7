"""A janitor beside another one, and over a store whose replicas lag: nothing that is needed goes,
and nothing is forgotten that is left."""

import asyncio

import pytest

from spark_ledger import errors
from spark_ledger.metadata import paths
from spark_ledger.topic.log.intents import STALE
from spark_ledger.topic.upkeep.janitor import remove_tree
from tests.unit.spark_ledger.topic.janitors import DELAY_S, delayed, janitor_of
from tests.unit.spark_ledger.topic.stage import play


class AsOfSync:
    """A replica that tells of a query's commits as they were at the last sync."""

    def __init__(self, store, path):
        self.path, self.get, self.sync, self.seen = path, store.get, store.sync, None
        store.get, store.sync = self.late_get, self.synced

    async def synced(self, path="/"):
        await self.sync(path)
        self.seen = await self.get(self.path)

    async def late_get(self, path, watch=None):
        return self.seen if path == self.path else await self.get(path, watch)


def test_a_ledger_that_a_query_is_about_to_commit_stays_also_where_the_janitors_replica_lags():
    async def act(stage):
        intent = await stage.intent()
        await stage.commit(intent, 0, await stage.written(intent, [b"0"]))
        janitor = await janitor_of(stage, lease_s=10_000)
        AsOfSync(janitor.store, paths.txn(intent.app_id, intent.target))
        children, late = janitor.store.children, []

        async def while_it_looks(path, watch=None):
            janitor.store.children = children
            for version in (1, 2):
                await stage.commit(intent, version, await stage.written(intent, [b"%d" % version]))
            await stage.client.cache.close()  # the next batch has a ledger of its own
            late.append(await stage.written(intent, [b"late"]))
            await stage.client.cache.close()
            return await children(path, watch)

        janitor.store.children = while_it_looks
        await janitor.clean()
        assert late, "it was written before the janitor looked at ledgers"
        await asyncio.sleep(4000)
        assert (await janitor.clean()).deleted == ()
        await stage.commit(intent, 3, *late)
        assert [value for _, value in await stage.rows()] == [b"0", b"1", b"2", b"late"]

    play(act)


def test_a_ledger_made_before_another_janitor_took_its_topics_tree_is_deleted_too():
    async def act(stage):
        await delayed(stage)
        intent = await stage.client.intents.open_batch_intent("app", "r", "t")
        ledger_id = await stage.client.intents.ledger_id(intent)
        await stage.client.topics.delete("t")
        janitor = await janitor_of(stage)
        await janitor.clean(condemn=[intent.id])
        await asyncio.sleep(DELAY_S)
        get, made = janitor.store.get, []

        async def beside_another(path, watch=None):
            if path == paths.STORE_CLOCK:  # the ledgers there are were listed
                janitor.store.get = get
                options = {"ledger_id": ledger_id, "intent": intent.id, "topic": stage.topic.id}
                made.append(await stage.client.ledgers.create(3, 3, 2, **options))
                assert await remove_tree(stage.client.store, stage.topic.id)
            return await get(path, watch)

        janitor.store.get = beside_another
        reports = [await janitor.clean() for _ in range(3)]
        assert [report.deleted for report in reports] == [(), (made[0].ledger_id,), ()]
        assert stage.world.store.peek_children(paths.TOPICS_DELETED) == []

    play(act)


def test_a_run_that_was_taken_for_dead_overwrites_what_was_there_when_it_began_alone():
    async def act(stage):
        def opened():
            return stage.client.intents.open_query_intent(
                "o", "run", "t", overwrites=[stage.topic.id]
            )

        other = await stage.client.intents.open_batch_intent("app", "r", "t")
        await stage.commit(other, 0, await stage.written(other, [b"before"]))
        first = await opened()
        await stage.client.intents.condemn(first.id, STALE)
        await stage.commit(other, 1, await stage.written(other, [b"added meanwhile"]))
        again = await opened()
        with pytest.raises(errors.TxnConflict):
            await stage.commit(again, 0, await stage.written(again, [b"new"]), overwrite=True)
        assert [value for _, value in await stage.rows()] == [b"before", b"added meanwhile"]

    play(act)
