"""Offsets without a row: in a range, in headers, seals, a topic's state and checkpoints."""

from dataclasses import replace

import pytest

from spark_ledger import errors
from spark_ledger.topic.entry import message_batch
from spark_ledger.topic.entry.message_batch import (
    NO_ROWLESS,
    Rowless,
    Share,
    append_rowless,
    count_rowless,
    decode_header,
    encode_header,
)
from spark_ledger.topic.log import actions, checkpoint, state
from spark_ledger.topic.log.actions import OpenLive, SealLive, Trim
from spark_ledger.topic.log.checkpoint import Root
from spark_ledger.topic.log.records import Commit
from spark_ledger.topic.read.live import LiveEnd
from spark_ledger.topic.read.plan import plan_read
from spark_ledger.topic.subscription.lag import topic_lag
from tests.unit.spark_ledger.topic.stage import segment

APP = {"commit_id": "c", "app_id": "a", "target": "t", "version": 0, "run_id": "r", "intent": "i"}
COUNTED = replace(segment(7, 10), entries=((0, 9),), entry_rows=())


def folded(*steps):
    found = state.empty("t", 1)
    for action in steps:
        found = state.apply(found, found.next, Commit(**APP, actions=(action,)), 1)
    return found


def sealed(*some):
    """Segments of ten rows each."""
    steps = [(OpenLive(0, 7, 1, "o", 1), SealLive(0, 7, COUNTED, rowless=one)) for one in some]
    return folded(*(action for pair in steps for action in pair))


def test_a_range_without_a_break_is_counted_exactly_and_others_outside_of_it():
    one = NO_ROWLESS.with_next(3).with_next(4).with_next(5)
    assert one == Rowless(3, 6, 3)
    assert [one.count_between(lo, 9) for lo in (0, 3, 4, 5, 6, 7)] == [3, 3, 2, 1, 0, 0]
    assert one.count_between(7, 9) == one.count_between(0, 3) == NO_ROWLESS.count_between(0, 9) == 0
    apart = one.with_next(9)
    assert (apart.count_between(0, 10), apart.count_between(10, 20), apart.count_between(0, 3)) == (
        4,
        0,
        0,
    )
    assert one.shift(10) == Rowless(13, 16, 3)
    assert NO_ROWLESS.shift(10) == NO_ROWLESS


def test_ranges_that_follow_each_other_have_as_many_as_all_together():
    apart = Rowless(2, 12, 3)
    for cut in range(14):
        assert apart.count_between(0, cut) + apart.count_between(cut, 14) == 3
    assert sum(apart.count_between(at, at + 1) for at in range(14)) == 3
    assert max(apart.count_between(at, at + 1) for at in range(14)) == 1


def test_so_many_are_kept_and_the_oldest_are_put_together(monkeypatch):
    monkeypatch.setattr(message_batch, "ROWLESS_KEPT_MAX", 2)
    kept = ()
    for at in (0, 10, 20, 30):
        kept = append_rowless(kept, Rowless(at, at + 2, 2), 0)
    assert kept == (Rowless(0, 22, 6), Rowless(30, 32, 2))
    assert count_rowless(kept, 0, 100) == 8
    assert append_rowless(kept, NO_ROWLESS, 25) == (Rowless(30, 32, 2),)


def test_a_header_says_them_and_how_many_of_the_batches_are_chunks():
    head = encode_header([Share(2, 1, 5)], 9, has_batches=True, chunks=1, rowless=Rowless(3, 6, 3))
    assert head[5] == 8 | 32
    assert head[32:].hex() == "0100000000000000" + "".join(
        f"{number:02x}00000000000000" for number in (3, 6, 3)
    )
    found = decode_header(head)
    assert (found.chunks, found.rowless, found.body_at) == (1, Rowless(3, 6, 3), 64)
    plain = decode_header(encode_header([Share(2, 1, 5)], 9, has_batches=True))
    assert (plain.chunks, plain.rowless, plain.body_at) == (0, NO_ROWLESS, 32)
    for damaged in (head[:-1], head[:-8] + b"\x04" + bytes(7)):
        with pytest.raises(errors.UnsupportedFormat):
            decode_header(damaged)


def test_a_seal_is_the_same_in_json_and_without_them_as_it_was():
    seal = SealLive(0, 7, COUNTED, rowless=Rowless(3, 6, 3))
    assert actions.from_json(actions.to_json(seal)) == seal
    assert "rowless" not in actions.to_json(SealLive(0, 7, COUNTED))


def test_a_state_counts_rows_without_them_wherever_their_segment_begins():
    held = sealed(NO_ROWLESS, Rowless(3, 6, 3)).partitions[0]
    assert held.rowless == (Rowless(13, 16, 3),)
    counts = [held.rows_between(lo, 20) for lo in (0, 10, 13, 16, 19)]
    assert counts == [17, 7, 4, 4, 1]


def test_what_is_trimmed_is_forgotten_with_the_next_seal():
    topic = sealed(Rowless(3, 6, 3))
    more = (Trim(((0, 8),)), OpenLive(0, 7, 1, "o", 1), SealLive(0, 7, COUNTED))
    for action in more:
        topic = state.apply(topic, topic.next, Commit(**APP, actions=(action,)), 1)
    assert topic.partitions[0].rowless == ()
    assert topic.partitions[0].rows_between(8, 20) == 12


def test_only_a_plan_of_a_partition_that_has_them_puts_messages_together():
    last_chunk_alone = sealed(Rowless(9, 10, 1), NO_ROWLESS)
    assert [task.chunked for task in plan_read(last_chunk_alone, {0: (10, 20)})] == [True]
    assert [task.chunked for task in plan_read(sealed(NO_ROWLESS, NO_ROWLESS), {0: (0, 20)})] == [
        False
    ]


def test_a_checkpoints_root_keeps_them():
    topic = sealed(Rowless(3, 6, 3))
    again = checkpoint.decode_root(checkpoint.encode_root(Root(topic, ()))).state
    assert again.partitions[0].rowless == topic.partitions[0].rowless
    assert again.partitions[0].rows_between(0, 10) == 7


def test_those_of_a_live_segment_are_no_lag():
    topic = folded(OpenLive(0, 7, 1, "o", 1))
    live = LiveEnd(9, 10, 1000, rowless=Rowless(3, 6, 3))
    lags = [topic_lag(topic, {0: at}, 9, live_ends={0: live})[0].rows for at in (0, 5, 6, 10)]
    assert lags == [7, 4, 4, 0]
