"""What a checkpoint keeps of a topic, over random histories; its bytes and what damages them."""

import random
from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_ledger import errors
from spark_ledger.topic.commit import draft as commit_draft
from spark_ledger.topic.log import checkpoint, state
from spark_ledger.topic.log.actions import (
    Append,
    Trim,
)
from spark_ledger.topic.log.blobs import pack, unpack
from spark_ledger.topic.log.checkpoint import Root
from spark_ledger.topic.log.records import Commit
from tests.unit.spark_ledger.topic.checkpoints import History, Shelf
from tests.unit.spark_ledger.topic.stage import segment


def outline(topic):
    """What there is beside rows."""
    held = [(p.start_offset, p.end_offset, p.live, p.rearranged) for p in topic.partitions]
    rows = [p.rows_between(p.start_offset, p.end_offset) for p in topic.partitions]
    plain = (topic.next, topic.terminated, topic.commit_ms, topic.min_writer, topic.shared_commits)
    return held, rows, plain, topic.last_of_app, topic.last_of_others, topic.bodies


@given(st.integers(0, 2**32), st.integers(5, 60), st.floats(0.02, 0.6))
@settings(max_examples=60, deadline=None)
def test_a_fold_from_checkpoints_is_the_fold_of_all_commits_ever(seed, count, how_often):
    history, rng = History(seed), random.Random(seed + 1)
    shelf = Shelf(rng)
    whole = short = state.empty("id", 2)
    for number in range(count):
        made = history.commit(whole)
        if made is None or not made.actions:
            continue
        made = replace(made, actions=commit_draft.with_dropped_ledgers(whole, made.actions))
        whole = state.apply(whole, whole.next, made, 1000 * number)
        short = state.apply(short, short.next, made, 1000 * number)
        if rng.random() < how_often:
            short = shelf.checkpointed(short)

    assert shelf.contents(short) == shelf.contents(whole)
    assert outline(short) == outline(whole)
    assert whole.dropped.items() <= short.dropped.items(), "and what the checkpoints moved"


def test_a_checkpoint_holds_every_field_of_the_state():
    stored = {
        *checkpoint.SCALAR_FIELDS,
        "dropped",
        "bodies",
        "shared_commits",
        "last_of_app",
        "partitions",
    }
    of_head = {"head_version", "deleted", "turn"}
    assert {field.name for field in fields(state.TopicState)} == stored | of_head


def many_commits(count, partitions=3):
    topic = state.empty("id", partitions)
    for number in range(count):
        some = tuple(segment(number, 2, 1, partition=p) for p in range(partitions))
        topic = state.apply(topic, number, Commit("", "", "", 0, "", "", (Append(some),)), number)
    return topic


def test_the_intervals_of_many_small_commits_become_one_for_each_partition():
    topic = many_commits(100)
    parts = [checkpoint.merge_intervals(held) for held in topic.partitions]

    assert [len(held.intervals) for held in topic.partitions] == [100] * 3
    assert [len(some) for some in parts] == [1] * 3
    assert [(some[0].lo, some[0].hi, some[0].bytes) for some in parts] == [(0, 300, 30_000)] * 3
    assert (parts[0][0].first_ms, parts[0][0].last_ms) == (0, 99)


def test_thousands_of_small_commits_are_a_few_intervals_and_a_root_of_some_kilobytes():
    commits = 3_000
    shelf = Shelf(random.Random(1))
    topic = state.empty("id", 2)
    for number in range(commits):
        made = Commit("", "", "", 0, "", "", (Append((segment(number, 1),)),))
        topic = state.apply(topic, number, made, number)
        if number % 64 == 63:
            topic = shelf.stored(
                topic, [checkpoint.merge_intervals(held) for held in topic.partitions]
            )
            assert sum(len(held.intervals) for held in topic.partitions) == 1
    assert topic.end_offsets() == {0: commits, 1: 0}
    assert len(checkpoint.encode_root(Root(topic))) < 10 * commits


def test_chunks_have_about_as_many_segments_each_as_fit_a_mebibyte():
    parts = [checkpoint.merge_intervals(held) for held in many_commits(400).partitions]

    chunks = checkpoint.cut_into_chunks(parts, 4 * checkpoint.CHUNK_BYTES_MAX)

    sizes = [len(checkpoint.tail_table(part)) for part in chunks]
    assert sizes == [240] * 5
    assert sum(map(checkpoint.rows_of, chunks)) == 3 * 1200


def test_a_chunk_of_which_little_is_left_goes_back_to_the_tail():
    shelf = Shelf(random.Random(0))
    topic = many_commits(40)
    parts = [checkpoint.merge_intervals(held) for held in topic.partitions]
    (part,) = checkpoint.cut_into_chunks(parts, 1)
    parts = checkpoint.with_chunk(parts, part, shelf.chunk(part))
    topic = checkpoint.checkpoint_state(
        topic, parts, trimmed=0, unnamed_ledgers=(), deleted_ledgers=()
    )
    assert checkpoint.sparse_chunks(topic) == [] != topic.chunks()

    trim = Trim(tuple((p, 80) for p in range(3)))
    topic = state.apply(topic, topic.next, Commit("", "", "", 0, "", "", (trim,)), 100)

    assert checkpoint.sparse_chunks(topic) == topic.chunks()


def test_ledgers_of_bodies_below_the_trimmed_log_and_of_unnamed_roots_are_dropped_from_now_on():
    topic = replace(many_commits(3), bodies={7: 0, 8: 2}, dropped={5: 0, 6: 1}, commit_ms=50)
    parts = [checkpoint.merge_intervals(held) for held in topic.partitions]

    settled = checkpoint.checkpoint_state(
        topic, parts, trimmed=2, unnamed_ledgers=[9, 8], deleted_ledgers=[5]
    )

    assert settled.bodies == {8: 2}
    assert settled.dropped == {6: 1, 7: 50, 9: 50}


def test_the_bytes_of_a_root_are_magic_header_and_four_arrow_streams():
    raw = unpack(checkpoint.encode_root(Root(many_commits(2), (3,))))

    size = int.from_bytes(raw[4:8], "little")
    assert raw[:4] == b"SLR1"
    assert raw[8 : 8 + size].startswith(
        b'{"min_reader":1,"topic_id":"id","next":2,"terminated":false,"commit_ms":1,'
    )
    assert b'"before":[3],"streams":[' in raw[8 : 8 + size]
    assert raw[8 + size : 12 + size] == b"\xff\xff\xff\xff"  # of an Arrow IPC stream


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: b"SLR2" + raw[4:],
        lambda raw: raw[:-1],
        lambda raw: raw + b"x",
        lambda raw: raw[:30],
        lambda raw: raw.replace(b'"next"', b'"nxet"'),
        lambda raw: raw.replace(b'"min_reader":1', b'"min_reader":9'),
        lambda raw: raw.replace(b"rearranged", b"rearranges"),
    ],
)
def test_a_damaged_root_is_an_error(damage):
    raw = unpack(checkpoint.encode_root(Root(many_commits(2))))
    with pytest.raises(errors.UnsupportedFormat):
        checkpoint.decode_root(pack(damage(raw)))
