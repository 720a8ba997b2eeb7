"""Queries that hold no rows note that they read a topic, for the warning of `topic set`."""

import asyncio
from types import SimpleNamespace

from spark_ledger.metadata import paths
from spark_ledger.metadata.store import StoreUnavailable
from spark_ledger.spark.read import source
from spark_ledger.topic.subscription.unheld import (
    LATELY_S,
    NOTED_EVERY_S,
    note_reads,
    was_read_lately,
)
from tests.unit.spark_ledger.topic.stage import play

HOUR_MS = int(NOTED_EVERY_S * 1000)


def test_a_read_is_noted_once_an_hour_and_forgotten_after_a_day():
    async def act(stage):
        store, id_ = stage.client.store, stage.topic.id
        assert not await was_read_lately(store, id_)
        await note_reads(store, [id_], 0)
        first = await store.get(paths.topic_unheld(id_))
        for now_ms, version in ((HOUR_MS - 1, 0), (HOUR_MS, 1), (-HOUR_MS, 1)):
            await note_reads(store, [id_], first.modified_ms + now_ms)
            assert (await store.get(paths.topic_unheld(id_))).version == version
        await asyncio.sleep(LATELY_S)
        assert await was_read_lately(store, id_)
        await asyncio.sleep(NOTED_EVERY_S + 1)
        assert not await was_read_lately(store, id_)

    play(act)


def test_a_note_that_fails_ends_no_query():
    async def act(stage):
        store = stage.client.store

        async def fails(*_):
            raise StoreUnavailable("no answer")

        store.get = fails
        await note_reads(store, [stage.topic.id], 0)

    play(act)


def test_a_query_without_a_subscription_notes_its_topics_now_and_then(monkeypatch):
    noted, clock = [], SimpleNamespace(s=0.0)
    monkeypatch.setattr(source, "note_reads", lambda _, ids, now_ms: noted.append(ids))
    monkeypatch.setattr(source.time, "monotonic", lambda: clock.s)
    infos = {name: SimpleNamespace(id=f"id-{name}") for name in ("a", "b")}
    cluster = SimpleNamespace(run=lambda _: None, client=SimpleNamespace(store=None))
    topics = SimpleNamespace(infos=infos, cluster=cluster)
    cursor = source.QueryCursor(None)
    cursor.reserve(topics, {"a": {0: 0}, "b": {0: 0}})
    cursor.advance(topics, {}, {"a": {0: 0}, "b": {0: 0}})
    assert noted == [["id-a", "id-b"]]
    clock.s = NOTED_EVERY_S
    cursor.advance(topics, {}, {"b": {0: 0}})
    assert noted[1:] == [["id-b"]]
    source.QueryCursor(source.FollowedSubscription("held", source.CHECKPOINT)).release()
    assert len(noted) == 2
