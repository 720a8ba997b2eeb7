"""What listings of a cluster say."""

import asyncio

import pytest

from bookie_server.serve.registration import Registration, RegistrationState
from spark_ledger import errors
from spark_ledger.topic import views
from spark_ledger.topic.log.actions import Hole, Terminate
from spark_ledger.topic.subscription.seek_target import End
from spark_ledger.topic.upkeep.admin import TopicAdmin
from tests.unit.spark_ledger.topic.live_segments import listed
from tests.unit.spark_ledger.topic.stage import play
from tests.unit.spark_ledger.topic.subscription_stage import commit, fill


async def written(stage, *batches, inline=False):
    """One commit of each batch of rows."""
    intent = await stage.intent()
    for version, rows in enumerate(batches):
        result = await stage.written(intent, rows, inline=inline)
        await stage.commit(intent, version, result, user_metadata=f"batch {version}")


def test_topics_are_listed_with_their_rows_retention_and_time():
    async def act(stage):
        await written(stage, [b"a", b"b"], [b"c"])
        await stage.client.topics.create("other", 3)
        await TopicAdmin(stage.client).change_policies("other", {"retention_ms": 1000})
        other, t = await listed(await stage.another(), "topics")
        assert (t["topic"], t["partitions"], t["rows"], t["commits"]) == ("t", 1, 3, 2)
        assert t["topicId"] == stage.topic.id
        assert t["createdAt"] <= t["committedAt"]
        assert (t["terminated"], t["schemaVersion"]) == (False, 0)
        assert (other["topic"], other["partitions"], other["rows"]) == ("other", 3, 0)
        assert (other["committedAt"], other["retentionMs"]) == (None, 1000)

    play(act)


def test_a_listing_of_named_topics_has_only_those_and_refuses_one_that_is_not_there():
    async def act(stage):
        await stage.client.topics.create("other", 1)
        (one,) = await listed(stage.client, "topics", ["other"])
        assert one["topic"] == "other"
        with pytest.raises(errors.TopicNotFound):
            await views.plan(stage.client, "topics", ["nothing"])

    play(act)


def test_a_topic_that_is_deleted_while_it_is_listed_is_left_out():
    async def act(stage):
        await stage.client.topics.create("other", 1)
        parts = await views.plan(stage.client, "topics")
        await TopicAdmin(stage.client).delete("t")
        (batch,) = await views.read(stage.client, parts[0])
        assert batch.column("topic").to_pylist() == ["other"]

    play(act)


def test_partitions_are_listed_with_the_offsets_that_are_kept():
    async def act(stage):
        await fill(stage, 10)
        await fill(stage, 4, partition=1)
        await TopicAdmin(stage.client).trim("t", {0: 3})
        first, second = await listed(stage.client, "partitions")
        assert (first["earliestOffset"], first["latestOffset"], first["rows"]) == (3, 10, 7)
        assert (second["earliestOffset"], second["latestOffset"], second["bytes"]) == (0, 4, 400)

    play(act, partitions=2)


def test_segments_are_listed_without_what_was_trimmed_or_taken_out():
    async def act(stage):
        await fill(stage, 10)
        await fill(stage, 10)
        await commit(stage, Hole(0, 12, 15))
        await TopicAdmin(stage.client).trim("t", {0: 3})
        found = await listed(stage.client, "segments")
        spans = [(one["firstOffset"], one["lastOffset"], one["rows"]) for one in found]
        assert spans == [(3, 9, 7), (10, 11, 2), (15, 19, 5)]
        assert {one["ledgerId"] for one in found} == {10**9}

    play(act)


def test_rows_that_are_in_the_commit_itself_are_a_segment_without_a_ledger():
    async def act(stage):
        await written(stage, [b"a", b"b"], inline=True)
        (one,) = await listed(stage.client, "segments")
        assert (one["ledgerId"], one["rows"], one["entries"]) == (None, 2, 1)

    play(act)


def test_segments_in_chunks_of_a_checkpoint_are_listed_as_those_that_are_not(monkeypatch):
    monkeypatch.setattr("spark_ledger.topic.log.checkpoint.TAIL_BYTES_MAX", 1)
    monkeypatch.setattr(views, "CHUNKS_PER_PART", 1)

    async def act(stage):
        for _ in range(3):
            await written_once_more(stage)
        before = await listed(stage.client, "segments")
        await stage.client.checkpoints.make(stage.topic.id)
        other = await stage.another()
        state = await other.log(stage.topic.id).fold(fresh=True)
        assert state.chunks(), "the checkpoint has no chunk: the test proves nothing"
        assert await listed(other, "segments") == before

    async def written_once_more(stage):
        intent = await stage.intent()
        state = await stage.client.log(stage.topic.id).fold(fresh=True)
        result = await stage.written(intent, [b"x" * 100])
        await stage.commit(intent, state.next, result)

    play(act)


def test_ledgers_are_listed_with_their_topic_and_copies_that_are_missing():
    async def act(stage):
        await written(stage, [b"a", b"b"])
        found = await listed(stage.client, "ledgers", ["t"])
        assert [one["topic"] for one in found] == ["t"]
        (one,) = found
        assert (one["ensembleSize"], one["writeQuorum"], one["ackQuorum"]) == (3, 3, 2)
        assert not one["underReplicated"] and len(one["ensemble"]) == 3
        assert one in await listed(stage.client, "ledgers")
        await stage.client.topics.create("other", 1)
        assert await listed(stage.client, "ledgers", ["other"]) == []

    play(act)


def test_a_ledger_of_a_bookie_that_is_not_registered_is_under_replicated():
    async def act(stage):
        await written(stage, [b"a"])
        (before,) = await listed(stage.client, "ledgers", ["t"])
        store = stage.client.store
        await store.delete(f"/bookies/available/{before['ensemble'][0]}")
        (after,) = await listed(stage.client, "ledgers", ["t"])
        assert after == {**before, "underReplicated": True}
        states = {one["bookieId"]: one["state"] for one in await listed(stage.client, "bookies")}
        assert states.get(before["ensemble"][0]) != "writable"
        assert states[before["ensemble"][1]] == "writable"

    play(act)


def test_a_bookie_that_is_read_only_and_one_that_is_down_are_listed_with_the_reason():
    async def act(stage):
        async def standing():
            return RegistrationState(5 << 20, 1 << 30, readonly_reason="disk full")

        dead = stage.world.nodes[0]
        addresses = "b9:3181", "b9:3182"
        full = Registration(stage.client.store, "full", *addresses, "r1", standing, refresh_s=60.0)
        await full.start(first_seen_ms=1)
        dead.kill()
        await asyncio.sleep(60)  # its session ends

        rows = {one["bookieId"]: one for one in await listed(stage.client, "bookies")}
        down, read_only = rows.pop(dead.bookie_id), rows.pop("full")
        assert down["state"] == "down"
        assert down["why"].startswith("not registered: it is down")
        assert (read_only["state"], read_only["why"]) == ("read-only", "disk full")
        assert (read_only["address"], read_only["rack"]) == ("b9:3181", "r1")
        assert read_only["freeBytes"] == 5 << 20
        assert [(one["state"], one["why"]) for one in rows.values()] == [("writable", None)] * 3
        await full.stop()

    play(act)


def test_subscriptions_and_their_lag_are_listed():
    async def act(stage):
        await fill(stage, 10)
        subscriptions = stage.client.subscriptions
        await subscriptions.create(stage.topic.id, "early", End.EARLIEST)
        await subscriptions.create(stage.topic.id, "six", {0: 6})
        early, six = await listed(stage.client, "subscriptions")
        assert (early["subscription"], early["inUse"], early["queryId"]) == ("early", False, None)
        assert six["topic"] == "t"
        first, second = await listed(await stage.another(), "lag")
        assert (first["subscription"], first["rowsBehind"], first["bytesBehind"]) == (
            *("early", 10),
            1000,
        )
        assert (second["committedOffset"], second["latestOffset"]) == (6, 10)
        assert second["rowsBehind"] == 4 and second["millisBehind"] >= 0

    play(act)


def test_commits_are_listed_with_who_made_them_what_they_did_and_the_users_text():
    async def act(stage):
        await written(stage, [b"a", b"b"], [b"c"])
        await commit(stage, Terminate())
        one, two, three = await listed(stage.client, "commits")
        assert (one["commit"], one["kinds"], one["rows"]) == (0, ["append"], 2)
        assert (two["appId"], two["version"], two["userMetadata"]) == ("q", 1, "batch 1")
        assert (three["kinds"], three["rows"], three["userMetadata"]) == (["terminate"], 0, None)
        assert one["at"] <= two["at"] <= three["at"]

    play(act)


def test_commits_that_a_checkpoint_took_out_of_the_log_are_listed_no_more():
    async def act(stage):
        for _ in range(3):
            await fill(stage, 1)
            await stage.client.checkpoints.make(stage.topic.id)
        log = stage.client.log(stage.topic.id)
        await log.newest_checkpoint()
        numbers = [one["commit"] for one in await listed(stage.client, "commits")]
        assert numbers == list(range(log.trimmed, 3)) and log.trimmed > 0

    play(act)


def test_a_listing_of_many_topics_comes_in_several_parts(monkeypatch):
    monkeypatch.setattr(views, "TOPICS_PER_PART", 2)

    async def act(stage):
        for name in ("a", "b", "c", "d"):
            await stage.client.topics.create(name, 1)
        assert len(await views.plan(stage.client, "topics")) == 3
        names = [one["topic"] for one in await listed(stage.client, "topics")]
        assert names == ["a", "b", "c", "d", "t"]

    play(act)


def test_no_topics_make_no_part():
    async def act(stage):
        for view in views.SCHEMAS.keys() - {"bookies", "ledgers"}:
            assert await views.plan(stage.client, view, []) == []

    play(act)


def test_every_view_names_each_column_once():
    for view, schema in views.SCHEMAS.items():
        lower = [name.lower() for name in schema.names]
        assert len(set(lower)) == len(lower), view
