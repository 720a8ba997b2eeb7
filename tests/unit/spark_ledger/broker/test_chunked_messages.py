"""A message in chunks, on the simulated cluster: stored chunk by chunk, one row and one message."""

import asyncio
import logging
from types import SimpleNamespace

import pytest

from spark_ledger.topic.log.actions import Trim
from spark_ledger.topic.read.live import ends_of
from spark_ledger.topic.subscription.lag import topic_lag
from spark_ledger.topic.upkeep.compactor import compact
from tests.kit.pulsar_batches import chunked, lone, message
from tests.unit.spark_ledger.broker.hand_overs import by_spark, reached, request_for
from tests.unit.spark_ledger.broker.owners import (
    Owner,
    another_of,
    deduplicating,
    fenced_by_another,
    owner_of,
)
from tests.unit.spark_ledger.broker.sending import (
    WHOLE,
    Consuming,
    Sending,
    all_sent,
    closed,
    rows_between,
    until,
)
from tests.unit.spark_ledger.topic.stage import NOW_MS, play


def test_a_message_is_a_row_at_its_last_chunks_offset_and_each_chunk_has_that_id():
    async def act(stage):
        owner = await owner_of(stage)
        one, other = Sending(owner), Sending(owner, "q")
        first, second, third = chunked(WHOLE, 3, key="k")
        one.lone(b"before")
        one.send(first)
        other.lone(b"between")
        one.send(second, third)
        one.lone(b"after")
        await all_sent(owner)
        assert await one.said(5) == [(0, 0), (5, 4), (5, 4), (5, 4), (0, 5)]
        expected = [(0, b"before"), (2, b"between"), (4, WHOLE), (5, b"after")]
        assert await rows_between(stage.client, stage, 0, 6) == expected  # live
        await closed(owner)
        for lo in range(6):
            found = await rows_between(await stage.another(), stage, lo, 6)
            assert found == [row for row in expected if row[0] >= lo]

    play(act)


def test_messages_whose_chunks_are_mixed_are_rows_at_their_last_chunks_offsets():
    async def act(stage):
        owner = await owner_of(stage)
        one, other = Sending(owner), b"another one"
        first, second = chunked(WHOLE, 3, uuid="a"), chunked(other, 2, uuid="b")
        one.send(first[0], sequence_id=1)
        one.send(second[0], sequence_id=2)
        one.send(first[1], first[1], sequence_id=1)
        one.chunks.note_other_message()
        one.lone(b"between", 3)
        one.send(second[1], sequence_id=2)
        one.send(first[2], sequence_id=1)
        ids = [(1, 5), (2, 4), (1, 5), (1, 5), (3, 3), (2, 4), (1, 5)]
        assert await one.said(7) == ids
        made = await Consuming().begin(stage, owner, kept=False)
        got = await made.got(6)
        assert [at for at, _ in got] == [3, 4, 4, 5, 5, 5]
        assert [data for _, data in got[1:]] == [*second, *first]
        made.consumer.dispatcher.leave(made.consumer)
        expected = [(3, b"between"), (4, other), (5, WHOLE)]
        assert await rows_between(stage.client, stage, 0, 6) == expected  # live
        await closed(owner)
        assert await lags(stage, 0, 3, 4, 5, 6) == [3, 3, 2, 1, 0]
        assert await rows_between(await stage.another(), stage, 0, 6) == expected

    play(act)


def test_what_a_reader_has_met_of_a_message_it_does_not_read_again(monkeypatch):
    async def act(stage):
        owner = await owner_of(stage)
        Sending(owner).send(*chunked(WHOLE, 3))
        await all_sent(owner)
        await closed(owner)
        monkeypatch.setattr(stage.client, "state_with_tables", None)
        assert await rows_between(stage.client, stage, 0, 3) == [(2, WHOLE)]

    play(act)


def test_a_reader_that_keeps_little_reads_the_first_chunks_again(monkeypatch):
    monkeypatch.setattr("spark_ledger.topic.task_reader.CHUNK_CACHE_BYTES", 8)

    async def act(stage):
        owner = await owner_of(stage)
        Sending(owner).send(*chunked(WHOLE, 4))
        await all_sent(owner)
        assert await rows_between(stage.client, stage, 0, 4) == [(3, WHOLE)]
        await closed(owner)
        assert await rows_between(stage.client, stage, 0, 4) == [(3, WHOLE)]

    play(act)


@pytest.mark.parametrize("hands_over", [False, True])
def test_a_commit_of_spark_in_the_middle_of_a_message_leaves_it_whole(hands_over):
    async def act(stage):
        owner = await owner_of(stage)
        if hands_over:  # the chunks are in segments of one ledger
            reached(owner)
        one = Sending(owner)
        first, second, third = chunked(WHOLE, 3)
        one.send(first)
        await all_sent(owner)
        intent = await stage.intent()
        await stage.commit(intent, 1, await stage.written(intent, [b"of spark"]))
        one.send(second)
        await all_sent(owner)
        await stage.commit(intent, 2, await stage.written(intent, [b"more"]))
        one.send(third)
        assert await one.said(3) == [(5, 4)] * 3
        expected = [(1, b"of spark"), (3, b"more"), (4, WHOLE)]
        assert await rows_between(stage.client, stage, 0, 5) == expected
        assert await rows_between(await stage.another(), stage, 4, 5) == [(4, WHOLE)]
        assert await lags(stage, 0, 1, 2, 3, 4, 5) == [3, 3, 2, 2, 1, 0]
        await closed(owner)
        assert await lags(stage, 0, 1, 2, 3, 4, 5) == [3, 3, 2, 2, 1, 0]
        assert await rows_between(await stage.another(), stage, 2, 5) == expected[1:]

    play(act)


@pytest.mark.parametrize("seed", range(4))
def test_a_ledger_that_is_fenced_in_the_middle_of_a_message_leaves_it_whole(seed):
    async def act(stage):
        owner = await owner_of(stage)
        one = Sending(owner)
        one.lone(b"a")
        await all_sent(owner)
        parts = chunked(WHOLE, 5)
        one.send(*parts[:2])
        fencing = asyncio.create_task(fenced_by_another(stage, owner))
        await asyncio.sleep(0)
        one.send(*parts[2:])
        await fencing
        last = (await one.said(6))[-1][1]
        assert one.link.said[1:] == [(5, last)] * 5
        await closed(owner)
        found = await rows_between(await stage.another(), stage, 0, last + 1)
        assert found == [(0, b"a"), (last, WHOLE)]

    play(act, seed=seed)


def test_chunks_that_a_fenced_ledger_did_not_take_are_counted_where_they_are_stored_alone():
    async def act(stage):
        owner = await owner_of(stage)
        one = Sending(owner)
        one.lone(b"a")
        one.send(*chunked(WHOLE, 3), sequence_id=4)
        await all_sent(owner)
        await fenced_by_another(stage, owner)
        one.send(*chunked(WHOLE, 5))
        one.lone(b"b")
        await one.said(10)
        await closed(owner)
        state = await stage.client.log(stage.topic.id).fold(fresh=True)
        held = state.partitions[0]
        assert (held.live, held.end_offset) == (None, 10)
        assert [held.rows_between(0, end) for end in (1, 4, 9, 10)] == [1, 2, 3, 4]
        assert sum(each.number for each in held.rowless) == 6

    play(act)


@pytest.mark.parametrize("deduplicates", [False, True])
def test_a_message_whose_broker_went_in_the_middle_is_sent_again_and_is_there_once(deduplicates):
    async def act(stage):
        old = Owner(stage, stage.client, "a")
        old = await (deduplicating(old) if deduplicates else old.take())
        parts = chunked(WHOLE, 3)
        gone = Sending(old)
        gone.send(*parts[:2])
        await all_sent(old)
        assert gone.link.said == []  # so it comes again from the first chunk
        new = await (await another_of(stage)).take()
        again = Sending(new)
        again.send(*parts)
        assert await again.said(3) == [(5, 4)] * 3
        if deduplicates:
            again.send(*parts)
            assert (await again.said(6))[3:] == [(5, None)] * 3
        await closed(new)
        assert await rows_between(await stage.another(), stage, 0, 5) == [(4, WHOLE)]

    play(act)


def test_a_message_of_which_retention_took_the_first_chunk_goes_with_it(caplog):
    async def act(stage):
        owner = await owner_of(stage)
        one = Sending(owner)
        one.send(*chunked(WHOLE, 3))
        one.lone(b"after")
        await all_sent(owner)
        await closed(owner)
        intent = await stage.client.intents.open_system_intent("trim", "t")
        await stage.client.commit_actions(stage.topic.id, [Trim(((0, 1),))], intent)
        with caplog.at_level(logging.WARNING):
            found = await rows_between(await stage.another(), stage, 1, 4)
        assert found == [(3, b"after")]
        assert "a message of 3 chunks is left out: its last chunk is at offset 2" in caplog.text

    play(act)


def test_merging_keeps_chunks_as_they_are_and_messages_whole():
    async def act(stage):
        owner = await owner_of(stage)
        one = Sending(owner)
        parts = chunked(WHOLE, 4)
        one.send(*parts[:2])
        await all_sent(owner)
        intent = await stage.intent()
        await stage.commit(intent, 1, await stage.written(intent, [b"of spark"]))
        one.send(*parts[2:])
        one.lone(b"after")
        await all_sent(owner)
        await closed(owner)
        before = await rows_between(await stage.another(), stage, 0, 6)
        assert before == [(2, b"of spark"), (4, WHOLE), (5, b"after")]
        assert (await compact(stage.client, "t")).merged
        reader = await stage.another()
        assert await rows_between(reader, stage, 0, 6) == before
        assert await rows_between(reader, stage, 4, 6) == before[1:]

    play(act)


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("mark", range(5))
def test_a_consumer_gets_a_message_whole_wherever_it_begins(mark, kept):
    async def act(stage):
        owner = await owner_of(stage)
        made = await Consuming().begin(stage, owner, mark, kept=kept)
        one, parts = Sending(owner), chunked(WHOLE, 3)
        one.lone(b"first")
        one.send(parts[0])
        await all_sent(owner)
        intent = await stage.intent()
        await stage.commit(intent, 1, await stage.written(intent, [b"of spark"]))
        one.send(*parts[1:])
        one.lone(b"after")
        await all_sent(owner)
        whole, after = [(4, part) for part in parts], (5, lone(message(b"after")))
        before = [number for number in (0, 2) if number >= mark]
        found = await made.got(len(before) + 4)
        assert [at for at, _ in found[: len(before)]] == before
        assert found[len(before) :] == [*whole, after]
        made.consumer.dispatcher.leave(made.consumer)
        await closed(owner)

    play(act)


def test_chunks_of_a_message_that_is_not_whole_are_sent_to_nobody_and_need_no_acknowledgement():
    async def act(stage):
        owner = await owner_of(stage)
        made = await Consuming().begin(stage, owner)
        one = Sending(owner)
        one.lone(b"before")
        one.send(*chunked(WHOLE, 3)[:2])
        await all_sent(owner)
        await made.got(1)
        assert (await made.partition.last()).offset == 0
        one.chunks.give_up("it left", refuse=False)
        assert one.incomplete.value == 1
        one.lone(b"after")
        assert [at for at, _ in await made.got(2)] == [0, 3]
        for offset in (0, 3):
            made.dispatcher.acks.add(offset, offset + 1)
        assert made.dispatcher.acks.mark == 4
        made.consumer.dispatcher.leave(made.consumer)
        await closed(owner)

    play(act)


def test_the_last_message_is_known_without_the_tail_and_is_no_chunk():
    async def act(stage):
        owner = await owner_of(stage)
        one = Sending(owner)
        one.lone(b"before")
        one.send(*chunked(WHOLE, 4)[:3])
        await all_sent(owner)
        made = await Consuming().begin(stage, owner, kept=False)
        assert (await made.partition.last()).offset == 0
        one.send(chunked(WHOLE, 4)[3])
        await all_sent(owner)
        assert (await made.partition.last()).offset == 4
        made.consumer.dispatcher.leave(made.consumer)
        await closed(owner)

    play(act)


def test_the_last_message_is_one_of_spark_that_came_before_the_first_chunk_of_another():
    async def act(stage):
        owner = reached(await owner_of(stage))
        made = await Consuming().begin(stage, owner)
        one = Sending(owner)
        one.lone(b"before")
        await all_sent(owner)
        await by_spark(stage)
        one.send(chunked(WHOLE, 2)[0])
        await all_sent(owner)
        made.state = await owner.commits.state()
        assert (await made.partition.last()).offset == 1
        made.consumer.dispatcher.leave(made.consumer)
        await closed(owner)

    play(act)


def test_a_message_that_has_lost_a_chunk_is_passed_over(caplog):
    async def act(stage):
        owner = await owner_of(stage)
        one = Sending(owner)
        one.send(*chunked(WHOLE, 3))
        one.lone(b"after")
        await all_sent(owner)
        await closed(owner)
        intent = await stage.client.intents.open_system_intent("trim", "t")
        await stage.client.commit_actions(stage.topic.id, [Trim(((0, 1),))], intent)
        made = await Consuming().begin(stage, owner, kept=False)
        assert [at for at, _ in await made.got(1)] == [3]
        assert "a message of 3 chunks is passed over" in caplog.text
        made.consumer.dispatcher.leave(made.consumer)

    play(act)


async def lags(stage, *positions):
    """How many rows each position is behind."""
    state = await stage.client.log(stage.topic.id).fold(fresh=True)
    lives = await ends_of(stage.client.ledgers, state)
    return [topic_lag(state, {0: at}, NOW_MS, live_ends=lives)[0].rows for at in positions]


@pytest.mark.parametrize("by_owner", [True, False])
def test_chunks_before_the_last_one_are_no_lag(by_owner):
    async def act(stage):
        owner = await owner_of(stage)
        one = Sending(owner)
        one.lone(b"a")
        one.send(*chunked(WHOLE, 5))
        one.lone(b"b")
        one.lone(b"c")
        await all_sent(owner)
        expected = [4, 3, 3, 2, 1, 0]
        assert await lags(stage, 0, 1, 5, 6, 7, 8) == expected
        if by_owner:
            await closed(owner)
        else:
            await (await another_of(stage)).take()
        state = await stage.client.log(stage.topic.id).fold(fresh=True)
        assert state.partitions[0].live is None
        assert await lags(stage, 0, 1, 5, 6, 7, 8) == expected
        assert state.partitions[0].rows_between(0, 8) == 4

    play(act)


def test_a_message_whose_segment_is_handed_over_when_its_last_chunk_comes_is_not_passed_over():
    async def act(stage):
        owner = reached(await owner_of(stage))
        made = await Consuming().begin(stage, owner, tail_bytes=1)
        one, parts = Sending(owner), chunked(WHOLE, 3)
        one.send(*parts[:2])
        await all_sent(owner)
        await made.got(0)
        await until(lambda: made.dispatcher.position == 2)
        request = await request_for(owner)
        one.send(parts[2])
        await asyncio.sleep(0)
        await until(lambda: owner.writer.backlog.under_way)
        _, let_go = await stage.owners.ask(owner.ownership.url, request)
        await asyncio.sleep(1)
        let_go()
        one.lone(b"after")
        await all_sent(owner)
        found = await made.got(4)
        assert found == [*((2, part) for part in parts), (3, lone(message(b"after")))]
        made.consumer.dispatcher.leave(made.consumer)
        await owner.writer.close()

    play(act)


def test_the_last_message_is_not_one_before_rows_of_spark_that_the_log_tells_of_in_a_moment():
    async def act(stage):
        owner = reached(await owner_of(stage))
        made = await Consuming().begin(stage, owner, kept=False)
        one = Sending(owner)
        one.lone(b"a")
        await all_sent(owner)
        await by_spark(stage)
        end = owner.writer.open_end
        await until(lambda: end.live is not None and end.live.base == 2)
        found = asyncio.create_task(made.partition.last())
        await asyncio.sleep(0.1)
        made.state = await owner.commits.state()
        assert (await found).offset == (await made.partition.last()).offset == 1
        made.consumer.dispatcher.leave(made.consumer)
        await closed(owner)

    play(act)


def test_a_subscription_holds_the_first_chunks_of_a_message_until_it_is_acknowledged():
    async def act(stage):
        owner = await owner_of(stage)
        one, at = Sending(owner), []
        cursor = SimpleNamespace(check=lambda: None, track=lambda *_: None, ack_budget=None)
        cursor.advance = cursor.seek = lambda _, offset: at.append(offset)
        made = await Consuming().begin(stage, owner, cursor=cursor)
        one.lone(b"before")
        one.send(*chunked(WHOLE, 3))
        one.lone(b"after")
        await all_sent(owner)
        await made.got(5)
        for offset in (0, 4, 3):
            made.dispatcher.acks.add(offset, offset + 1)
            made.dispatcher.save_position()
        assert at == [1, 1, 5]
        made.consumer.dispatcher.leave(made.consumer)
        again = await Consuming().begin(stage, owner, at[1], kept=False, cursor=cursor)
        assert [number for number, _ in await again.got(4)] == [3, 3, 3, 4]
        again.dispatcher.seek(4)
        assert at[-1] == 4
        again.consumer.dispatcher.leave(again.consumer)
        await closed(owner)

    play(act)


@pytest.mark.parametrize("comes_later", [True, False])
def test_what_is_acknowledged_does_not_go_back_when_a_message_comes_that_began_before_it(
    comes_later,
):
    async def act(stage):
        owner = await owner_of(stage)
        long, other, at = Sending(owner), Sending(owner), []
        cursor = SimpleNamespace(check=lambda: None, track=lambda *_: None, ack_budget=None)
        cursor.advance = cursor.seek = lambda _, offset: at.append(offset)
        made = await Consuming().begin(stage, owner, cursor=cursor)
        first, last = chunked(WHOLE, 2)
        long.send(first)
        for n in range(10):
            other.lone(b"%d" % n)
        if not comes_later:
            long.send(last)
        await all_sent(owner)
        await made.got(10 if comes_later else 12)
        for offset in range(1, 9):
            made.dispatcher.acks.add(offset, offset + 1)
            made.dispatcher.save_position()
        if comes_later:
            long.send(last)
            await all_sent(owner)
            await made.got(12)
            made.dispatcher.acks.add(9, 10)
            made.dispatcher.save_position()
        assert at == sorted(at) and at[-1] == (10 if comes_later else 9)
        made.consumer.dispatcher.leave(made.consumer)
        again = await Consuming().begin(stage, owner, at[-1], kept=False)
        left = [10] if comes_later else [9, 10]
        assert [number for number, _ in await again.got(len(left) + 2)] == [*left, 11, 11]
        again.consumer.dispatcher.leave(again.consumer)
        await closed(owner)

    play(act)
