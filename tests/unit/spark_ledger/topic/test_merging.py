"""Merging that nobody asked for: what it does to topics, when, and how often it looks at them."""

import asyncio

from spark_ledger import errors
from spark_ledger.metadata import paths
from spark_ledger.metadata.store_calls import store_now_ms
from spark_ledger.topic.log import checkpoint
from spark_ledger.topic.upkeep.merge_plan import QUIET_MS, SLOT_MS
from spark_ledger.topic.upkeep.upkeep import INTENT_MS, Merging, TopicHead
from tests.unit.spark_ledger.topic.merged_segments import seen, segments
from tests.unit.spark_ledger.topic.stage import play

QUIET_S, SLOT_S = QUIET_MS / 1000 + 1, SLOT_MS / 1000


async def passed(stage, merging):
    """A pass over topic `t` as it is."""
    topic = await stage.client.topics.open("t")
    next_ = (await stage.client.log(topic.id).fold(fresh=True)).next
    now_ms = await store_now_ms(stage.client.store)
    return await merging.once([TopicHead(topic, next_)], now_ms)


async def commits(stage, count, first=0, rows=2):
    intent = await stage.intent()
    for version in range(first, first + count):
        await stage.commit(intent, version, await stage.written(intent, [b"%d" % version] * rows))
    await stage.client.cache.close()


def merging_of(stage, **settings):
    return Merging(stage.client, **{"bytes_per_s": None, **settings})


def test_many_small_segments_are_merged_once_they_are_settled_and_no_row_changes():
    async def act(stage):
        merging = merging_of(stage)
        await commits(stage, 8)
        before = await seen(stage)
        times = [one.commit_ms for one in await segments(stage)]

        early = await passed(stage, merging)
        await asyncio.sleep(QUIET_S)
        report = await passed(stage, merging)

        assert early.merged == {}, "what came just now is left alone"
        assert (report.merged["t"].segments, report.merged["t"].merged) == (8, 1)
        assert await seen(stage) == before
        (one,) = await segments(stage)
        assert [ms for _, ms in one.times] == times
        await merging.close()

    play(act)


def test_few_segments_are_merged_when_nothing_more_can_come_to_their_hour():
    async def act(stage):
        merging = merging_of(stage)
        await commits(stage, 3)
        await asyncio.sleep(QUIET_S)

        soon = await passed(stage, merging)
        await asyncio.sleep(SLOT_S + QUIET_S)
        late = await passed(stage, merging)

        assert (soon.merged, late.merged["t"].segments) == ({}, 3)
        await asyncio.sleep(SLOT_S + QUIET_S)
        assert (await passed(stage, merging)).merged == {}, "it is merged for good"

    play(act)


def test_a_topic_whose_policy_says_so_is_left_alone():
    async def act(stage):
        merging = merging_of(stage)
        await commits(stage, 8)
        await asyncio.sleep(QUIET_S)
        await stage.client.topics.change_policies("t", {"merging": False})
        assert (await passed(stage, merging)).merged == {}
        await stage.client.topics.change_policies("t", {"merging": True})
        assert list((await passed(stage, merging)).merged) == ["t"]

    play(act)


def test_a_pass_copies_no_more_than_it_may_and_the_next_begins_with_the_topics_behind():
    async def act(stage):
        others = [await stage.client.topics.create(name) for name in ("u", "v")]
        topics = [stage.topic, *others]
        for topic in topics:
            stage.topic = topic
            intent = await stage.client.intents.open_query_intent("q", "r", topic.name.short)
            for n in range(8):
                await stage.commit(intent, n, await stage.written(intent, [b"x"]))
        await asyncio.sleep(QUIET_S)
        merging = merging_of(stage, pass_bytes=1)

        merged = []
        for _ in range(4):
            heads = [
                TopicHead(one, (await stage.client.log(one.id).fold(fresh=True)).next)
                for one in topics
            ]
            now_ms = await store_now_ms(stage.client.store)
            merged.append(list((await merging.once(heads, now_ms)).merged))

        assert merged == [["t"], ["u"], ["v"], []]

    play(act)


def test_a_topic_at_rest_costs_a_pass_nothing_and_no_memory():
    async def act(stage):
        merging = merging_of(stage)
        await commits(stage, 3)
        topic = await stage.client.topics.open("t")
        heads = [TopicHead(topic, 3)]
        await asyncio.sleep(2 * SLOT_S)
        now_ms = await store_now_ms(stage.client.store)
        await merging.once(heads, now_ms)
        heads = [TopicHead(topic, 4)]  # its own commit
        await merging.once(heads, now_ms)
        asked = []
        for name in ("get", "sync", "multi", "set"):
            kept = getattr(stage.client.store, name)

            async def counted(*given, _kept=kept, _name=name):
                asked.append((_name, given[0]))
                return await _kept(*given)

            setattr(stage.client.store, name, counted)

        for _ in range(5):
            await merging.once(heads, now_ms)

        beats = [one for one in asked if "intents" in str(one)]
        assert asked == beats
        assert topic.id not in stage.client._logs

    play(act)


async def intent_of_merges(stage):
    """The id of the open intent under which topics are merged; None: there is none."""
    found = [one.id for one in await stage.intents() if one.is_open and one.target == "topics"]
    assert len(found) <= 1
    return found[0] if found else None


def test_what_comes_between_is_no_error_and_the_next_pass_tries_again(monkeypatch):
    async def act(stage):
        merging = merging_of(stage)
        await commits(stage, 8)
        await asyncio.sleep(QUIET_S)
        commit = stage.client.commit_actions

        async def overtaken(*given, **options):
            raise errors.TxnConflict("rearranged meanwhile")

        stage.client.commit_actions = overtaken
        conflict = await passed(stage, merging)
        stage.client.commit_actions = commit
        again = await passed(stage, merging)

        assert (conflict.merged, conflict.problems) == ({}, {})
        assert again.merged["t"].segments == 8

    play(act)


def test_an_intent_that_was_taken_for_gone_is_told_and_the_next_pass_has_another():
    async def act(stage):
        merging = merging_of(stage)
        await commits(stage, 8)
        await asyncio.sleep(QUIET_S)
        await passed(stage, merging)
        await commits(stage, 9, first=8)
        await asyncio.sleep(QUIET_S)
        await stage.client.intents.condemn(await intent_of_merges(stage), "stale")

        fenced = await passed(stage, merging)
        after = await passed(stage, merging)

        assert "t" in fenced.problems
        assert after.merged["t"].segments >= 9

    play(act)


def test_an_intent_ends_after_a_while_so_that_what_failed_under_it_goes():
    async def act(stage):
        merging = merging_of(stage)
        await commits(stage, 8)
        await asyncio.sleep(QUIET_S)
        await passed(stage, merging)
        used = await intent_of_merges(stage)
        await asyncio.sleep(INTENT_MS / 1000)
        await passed(stage, merging)
        assert not (await stage.client.intents.get(used)).is_open
        assert await intent_of_merges(stage) is None, (
            "the next one is made when there is something to merge"
        )
        assert stage.world.store.peek(paths.intent(used)) is not None

    play(act)


def test_segments_that_a_checkpoint_has_put_into_chunks_are_merged_too(monkeypatch):
    monkeypatch.setattr(checkpoint, "TAIL_BYTES_MAX", 0)

    async def act(stage):
        await commits(stage, 8)
        await stage.client.checkpoints.make(stage.topic.id)
        fresh = await stage.another()
        state = await fresh.log(stage.topic.id).fold(fresh=True)
        assert state.chunks(), "the segments are in a chunk"
        before = await seen(stage)
        await asyncio.sleep(QUIET_S)
        stage.client = fresh

        report = await passed(stage, merging_of(stage))

        assert report.merged["t"].segments == 8
        assert await seen(stage) == before

    play(act)
