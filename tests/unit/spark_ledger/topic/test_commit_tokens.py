"""Which commit made a row: what tells an offset of a store from the same offset of an older one."""

import logging
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_ledger.metadata import paths
from spark_ledger.topic.log import checkpoint, state
from spark_ledger.topic.log.actions import Append, OpenLive, Replace, SealLive, Trim
from spark_ledger.topic.log.checkpoint import Root
from spark_ledger.topic.log.records import Commit, decode_commit, encode_commit
from spark_ledger.topic.log.segment_table import SegmentTable
from spark_ledger.topic.log.segments import NO_TOKEN, PlacedSegment, token_of
from spark_ledger.topic.upkeep.compactor import compact
from tests.unit.spark_ledger.topic.checkpoints import History, Shelf
from tests.unit.spark_ledger.topic.stage import play, segment


def after(topic, commit_id, *actions):
    commit = Commit(commit_id, "app", "t", topic.next, "r", "i", actions)
    return state.apply(topic, topic.next, commit, 1000 + topic.next)


def tokens(topic, read=state.NO_TABLES, partition=0):
    """By offset, that of the row before."""
    held = topic.partitions[partition]
    last = held.end_offset + (held.live is not None)
    return {at: held.token_before(at, read) for at in range(held.start_offset + 1, last + 1)}


def test_a_row_has_the_token_of_the_commit_that_made_it():
    topic = after(state.empty("t", 1), "first", Append((segment(1, 2),)))
    topic = after(topic, "second", Append((segment(2, 1),)))
    first, second = token_of("first"), token_of("second")
    assert tokens(topic) == {1: first, 2: first, 3: second}
    assert topic.partitions[0].token_before(0) == NO_TOKEN


def test_rows_of_a_live_segment_have_the_token_of_its_opening_before_and_after_its_seal():
    topic = after(state.empty("t", 1), "open", OpenLive(0, 7, 0, "owner", 1))
    assert topic.partitions[0].token_before(3) == token_of("open")
    topic = after(topic, "seal", SealLive(0, 7, segment(7, 3)), Append((segment(8, 1),)))
    assert tokens(topic) == {**dict.fromkeys((1, 2, 3), token_of("open")), 4: token_of("seal")}


def test_the_end_has_its_token_when_all_rows_before_it_were_trimmed():
    topic = after(state.empty("t", 1), "rows", Append((segment(1, 2),)))
    topic = after(topic, "trim", Trim(((0, 2),)))
    assert topic.partitions[0].token_before(2) == token_of("rows")


def test_commits_in_one_millisecond_have_tokens_of_their_own():
    placed = [
        PlacedSegment(segment(n, 2), 2 * n, n, 5, (), ((2, token_of(str(n))),)) for n in range(3)
    ]
    rows, found = SegmentTable.of(placed).commit_tokens(1, 5)
    assert rows.tolist() == [1, 2, 1]
    assert found.tolist() == [token_of(str(n)) for n in range(3)]


def test_a_merge_keeps_the_tokens_of_its_rows_and_one_that_names_none_has_none():
    topic = after(state.empty("t", 1), "a", Append((segment(1, 2),)))
    topic = after(topic, "b", Append((segment(2, 2),)))
    told = ((2, token_of("a")), (2, token_of("b")))
    merged = Replace(0, 0, 4, (segment(9, 4),), topic.next, tokens=(told,))
    value = encode_commit(Commit("m", "app", "t", 2, "r", "i", (merged,)))
    assert decode_commit(value).actions == (merged,)
    assert tokens(after(topic, "merge", merged)) == tokens(topic)
    silent = replace(merged, tokens=())
    assert set(tokens(after(topic, "merge", silent)).values()) == {NO_TOKEN, token_of("b")}


def test_an_older_commit_of_the_same_number_and_place_has_another_token():
    before = after(state.empty("t", 1), "kept", Append((segment(1, 2),)))
    lost = after(before, "lost", Append((segment(2, 2),)))
    restored = after(before, "other", Append((segment(3, 5),)))
    at_lost = lost.partitions[0].token_before(4)
    assert at_lost != restored.partitions[0].token_before(4)
    assert lost.partitions[0].token_before(2) == restored.partitions[0].token_before(2)


class Named(History):
    """Commits with ids of their own; merges say which commits made their rows."""

    def commit(self, topic):
        made = super().commit(topic)
        return None if made is None else replace(made, commit_id=f"c{topic.next}")

    def replace(self, topic):
        (action,) = super().replace(topic)
        if isinstance(action, Replace):
            held = topic.partitions[action.partition]
            at, runs = action.start, []
            for one in action.segments:
                offsets = range(at + 1, at + one.rows + 1)
                runs.append(tuple((1, held.token_before(o, self.read)) for o in offsets))
                at += one.rows
            action = replace(action, tokens=tuple(runs))
        return (action,)


@given(st.integers(0, 10**9))
@settings(max_examples=20, deadline=None)
def test_tokens_are_the_same_after_any_checkpoint(seed):
    history = Named(seed)
    shelf = Shelf(history.rng)
    history.read = shelf.chunks
    straight = stored = state.empty("t", 2)
    for _ in range(25):
        commit = history.commit(straight)
        if commit is None:
            continue
        straight = state.apply(straight, straight.next, commit, 1000)
        stored = state.apply(stored, stored.next, commit, 1000)
        if history.rng.random() < 0.3:
            stored = shelf.checkpointed(stored)
        for held in straight.partitions:
            p = held.number
            assert tokens(stored, shelf.chunks, p) == tokens(straight, shelf.chunks, p)


def test_a_checkpoint_of_software_that_knew_no_tokens_is_read_and_has_none(monkeypatch):
    topic = after(state.empty("t", 2), "rows", Append((segment(1, 2),)))
    topic = after(topic, "open", OpenLive(1, 7, 0, "owner", 1))
    held = [replace(one, end_token=NO_TOKEN) for one in topic.partitions]
    held[1] = replace(held[1], live=replace(held[1].live, token=NO_TOKEN))
    old = replace(topic, partitions=tuple(held))
    again = checkpoint.decode_root(checkpoint.encode_root(Root(old))).state
    assert again.partitions[0].token_before(2) == NO_TOKEN
    assert again.partitions[1].token_before(5) == NO_TOKEN


def test_merging_keeps_the_tokens_that_a_topics_rows_had():
    async def act(stage):
        intent = await stage.intent()
        for version in range(6):
            await stage.commit(intent, version, await stage.written(intent, [b"%d" % version] * 2))
        await stage.client.cache.close()
        log = stage.client.log(stage.topic.id)
        before = tokens(await log.fold(fresh=True))
        await compact(stage.client, "t")
        merged = await log.fold(fresh=True)
        assert len(merged.partitions[0].stretches(0, 12)[0].table) == 1
        assert tokens(merged) == before
        assert len(set(before.values())) == 6

    play(act)


def test_a_topic_whose_log_is_an_older_one_is_read_anew(caplog):
    """As a process that goes on over a restored metadata store does."""
    caplog.set_level(logging.ERROR)

    async def act(stage):
        intent = await stage.intent()
        log, copy = stage.client.log(stage.topic.id), {}
        head = paths.topic_head(stage.topic.id)
        for version in range(4):
            await stage.commit(intent, version, await stage.written(intent, [b"x"]))
            if version == 1:
                copy = {head: await stage.client.store.get(head)}
        before = await log.fold(fresh=True)
        older = copy[head]
        get = stage.client.store.get

        async def restored(path, watch=None):
            return older if path == head else await get(path, watch)

        stage.client.store.get = restored
        after_it = await log.fold(fresh=True)
        assert (before.next, after_it.next) == (4, 2)
        assert after_it.partitions[0].end_offset == 2

    play(act)
    assert "an older one" in caplog.text


@pytest.mark.parametrize("text", ["", "c", "5f6a"])
def test_a_token_is_never_that_of_no_commit(text):
    assert token_of(text) != NO_TOKEN
