"""What a producer sent that has gone: the rest fails, and its successor comes after it."""

import asyncio

import pytest

from spark_ledger.broker.produce import live_writer
from spark_ledger.broker.produce.step import INFLIGHT_ENTRIES_MAX
from spark_ledger.broker.wire.commands import AccessMode, Refusal, ServerError
from spark_ledger.errors import TopicNotFound
from tests.kit.pulsar_batches import chunked
from tests.unit.spark_ledger.broker.owners import Owner, Sent, deduplicating
from tests.unit.spark_ledger.broker.sending import TURN_S, WHOLE, Sending, closed, rows_between
from tests.unit.spark_ledger.broker.two_brokers import Brokers, Producer, named
from tests.unit.spark_ledger.topic.stage import play

SHARED, EXCLUSIVE = AccessMode.SHARED, AccessMode.EXCLUSIVE
FENCING, WAITING = AccessMode.EXCLUSIVE_WITH_FENCING, AccessMode.WAIT_FOR_EXCLUSIVE
UNDER_WAY, QUEUED = INFLIGHT_ENTRIES_MAX, 5
ALL = UNDER_WAY + QUEUED
HOLE_WAIT_S = 0.001


class Serving:
    """A broker and its bookies, which stand still at times."""

    def __init__(self, stage):
        self.stage = stage

    async def begin(self, mode, *, deduplication=False):
        """Producer x, of which the most that may be is under way, and more is queued."""
        if deduplication:
            await self.stage.client.topics.change_policies("t", {"deduplication": True})
        self.broker = await Brokers(self.stage).new("a")
        await self.broker.lookup(named(0), authoritative=True)
        self.topic, self.partition = await self.broker.partition(named(0))
        self.first = Producer("x", mode)
        self.topic.partition(0).add_producer(self.first)
        (one,) = await self.sends(self.first, 0)
        await one.over.wait()
        self.still()
        self.sent = await self.sends(self.first, *range(1, ALL))
        return self

    def still(self):
        for node in self.stage.world.nodes:
            node.process.pause()

    def go_on(self):
        for node in self.stage.world.nodes:
            node.process.resume()

    async def sends(self, producer, *numbers):
        """Messages, each an entry by itself as long as entries may be under way."""
        found = []
        for number in numbers:
            one = Sent(b"%s%d" % (producer.name.encode(), number), first=number)
            one.producer, one.producer_name = producer, producer.name
            self.partition.writer.append(one)
            found.append(one)
            await asyncio.sleep(HOLE_WAIT_S)
        return found

    async def comes(self, producer):
        """Ready or not."""
        if self.topic.partition(0).add_producer(producer):
            coming = asyncio.create_task(self.topic.partition(0).await_turn(producer))
            await asyncio.sleep(HOLE_WAIT_S)
            return coming
        return None

    async def rows(self):
        await self.broker.close()
        return [value.decode() for _, value in await self.stage.rows()]


def of_x(*numbers):
    return [f"x{number}" for number in numbers]


def test_nothing_of_a_fenced_producer_is_stored_after_its_successor_was_let_in():
    async def act(stage):
        here = await Serving(stage).begin(SHARED)
        new = Producer("y", FENCING)
        coming = await here.comes(new)
        assert here.first.away
        assert [bool(one.errors) for one in here.sent] == [False] * UNDER_WAY + [True] * (
            QUEUED - 1
        )
        assert not new.is_ready
        here.go_on()
        await coming
        assert new.is_ready
        assert all(one.offsets for one in here.sent[:UNDER_WAY])
        await here.sends(new, 0)
        assert await here.rows() == [*of_x(*range(UNDER_WAY + 1)), "y0"]

    play(act)


def test_a_successor_is_refused_where_the_partition_is_given_up_before_what_was_sent_is_decided():
    async def act(stage):
        here = await Serving(stage).begin(SHARED)
        new = Producer("y", FENCING)
        coming = await here.comes(new)
        here.topic.give_up(TopicNotFound("another broker has it"))
        with pytest.raises(Refusal) as refusal:
            await coming
        assert refusal.value.code is ServerError.SERVICE_NOT_READY
        assert not new.is_ready
        here.go_on()

    play(act)


@pytest.mark.parametrize("crashes", [False, True])
def test_who_waits_for_its_turn_is_let_in_after_what_the_one_before_has_stored(crashes):
    async def act(stage):
        here = await Serving(stage).begin(EXCLUSIVE)
        new = Producer("y", WAITING)
        assert await here.comes(new) is None
        here.topic.partition(0).remove_producer(here.first)
        if crashes:  # else it has closed, and its client waits for that
            here.partition.writer.backlog.drop([here.first])
        await asyncio.sleep(HOLE_WAIT_S)
        assert not new.is_ready
        here.go_on()
        await here.partition.writer.until_decided(lambda producer: producer is here.first)
        await asyncio.sleep(HOLE_WAIT_S)
        assert new.is_ready
        await here.sends(new, 0)
        assert await here.rows() == [*of_x(*range(UNDER_WAY + 1 if crashes else ALL)), "y0"]

    play(act)


@pytest.mark.parametrize("deduplication", [False, True])
def test_a_producer_that_comes_back_while_its_old_connection_is_there_sends_the_rest_once(
    deduplication,
):
    async def act(stage):
        here = await Serving(stage).begin(SHARED, deduplication=deduplication)
        other = Producer("z")
        here.topic.partition(0).add_producer(other)
        (beside,) = await here.sends(other, 0)
        new = Producer("x", SHARED, epoch=1)
        coming = await here.comes(new)
        assert here.first.away and not new.is_ready
        assert [len(one.errors) for one in here.sent] == [0] * UNDER_WAY + [1] * (QUEUED - 1)
        here.go_on()
        await coming
        if deduplication:
            assert here.partition.writer.backlog.sequence_ids.last("x") == UNDER_WAY
            again = await here.sends(new, *range(1, ALL))
        else:
            again = await here.sends(new, *range(UNDER_WAY + 1, ALL))
        await asyncio.gather(*(one.over.wait() for one in [*again, beside]))
        assert not any(one.errors for one in [*again, beside])
        rows = await here.rows()
        assert [row for row in rows if row != "z0"] == of_x(*range(ALL))
        assert "z0" in rows

    play(act)


def test_what_waits_for_a_message_that_is_dropped_is_sent_again():
    async def act(stage):
        here = await Serving(stage).begin(SHARED, deduplication=True)
        same = Producer("same name")  # as a program that names its messages itself
        same.name = "x"
        (later,) = await here.sends(same, ALL - 1)
        assert not (later.doubled or later.errors)  # it waits for the first one
        here.topic.partition(0).remove_producer(here.first)
        here.partition.writer.backlog.drop([here.first])
        assert later.errors
        here.go_on()
        again = await here.sends(same, *range(UNDER_WAY + 1, ALL))
        await asyncio.gather(*(one.over.wait() for one in again))
        assert not any(one.doubled for one in again)
        assert await here.rows() == of_x(*range(ALL))

    play(act)


@pytest.mark.parametrize("seed", range(8))
def test_what_was_under_way_in_a_ledger_that_is_fenced_is_stored_before_the_successor_or_never(
    seed,
):
    async def act(stage):
        here = await Serving(stage).begin(SHARED)
        here.go_on()
        await asyncio.sleep(0.002 * seed)
        intent = await stage.intent()
        spark = asyncio.create_task(
            stage.commit(intent, 1, await stage.written(intent, [b"of spark"]))
        )
        await asyncio.sleep(0.002 * (seed % 3))
        new = Producer("y", FENCING)
        coming = await here.comes(new)
        await coming
        (first,) = await here.sends(new, 0)
        await spark
        await first.over.wait()
        rows = await here.rows()
        assert rows.index("y0") > max(at for at, row in enumerate(rows) if row[0] == "x")
        stored = [f"x{number}" for number, one in enumerate(here.sent, 1) if one.offsets]
        assert [row for row in rows if row[0] == "x"] == ["x0", *stored]

    play(act, seed=seed)


def test_a_successor_waits_until_what_was_under_way_when_the_work_failed_is_decided():
    async def act(stage):
        here = await Serving(stage).begin(SHARED)
        work = here.partition.writer._task
        work.cancel()  # as any error that does not pass
        await asyncio.gather(work, return_exceptions=True)
        assert all(run.errors for run in here.sent)
        new = Producer("y", FENCING)
        coming = await here.comes(new)
        assert not new.is_ready
        here.go_on()
        await coming
        assert new.is_ready
        await here.sends(new, 0)
        rows = await here.rows()
        assert rows == [*of_x(*range(len(rows) - 1)), "y0"]

    play(act)


def test_a_successor_that_is_fenced_while_it_waits_is_refused():
    async def act(stage):
        here = await Serving(stage).begin(SHARED)
        second, third = Producer("y", FENCING), Producer("z", FENCING)
        coming, last = await here.comes(second), await here.comes(third)
        here.go_on()
        with pytest.raises(Refusal) as refused:
            await coming
        assert refused.value.code is ServerError.PRODUCER_FENCED
        await last
        assert (second.is_ready, third.is_ready) == (False, True)
        await here.broker.close()

    play(act)


def test_a_message_of_which_only_the_first_chunk_was_under_way_is_stored_when_it_comes_again():
    async def act(stage):
        owner = await deduplicating(Owner(stage, stage.client, "a"))
        before = Sending(owner)
        before.lone(b"before", sequence_id=1)
        await before.said(1)
        for node in stage.world.nodes:
            node.process.pause()
        parts = chunked(WHOLE, INFLIGHT_ENTRIES_MAX + 1)
        before.send(*parts)
        await asyncio.sleep(TURN_S)
        owner.writer.backlog.drop([before.producer])
        for node in stage.world.nodes:
            node.process.resume()

        again = Sending(owner)
        again.send(*parts)
        again.lone(b"after", sequence_id=6)
        receipts = await again.said(len(parts) + 1)

        assert None not in [offset for _, offset in receipts]
        await closed(owner)
        rows = await rows_between(await stage.another(), stage, 0, receipts[-1][1] + 1)
        assert [value for _, value in rows] == [b"before", WHOLE, b"after"]

    play(act)


def test_a_successor_asks_once_for_each_producer_after_a_change_whatever_is_queued(monkeypatch):
    monkeypatch.setattr(live_writer, "ENTRY_BYTES_MAX", 1000)  # the bookies take small ones

    async def act(stage):
        here = await Serving(stage).begin(SHARED)
        other = Producer("y", SHARED)
        here.topic.partition(0).add_producer(other)
        queued = await here.sends(other, *range(300))
        asked = 0

        def has_gone(producer):
            nonlocal asked
            asked += 1
            return producer is here.first

        settling = asyncio.create_task(here.partition.writer.until_decided(has_gone))
        await asyncio.sleep(HOLE_WAIT_S)
        assert not settling.done()
        here.go_on()
        assert await settling
        assert all(one.offsets for one in here.sent)
        assert asked <= 4 * ALL
        await asyncio.gather(*(one.over.wait() for one in queued))
        assert not here.partition.writer.backlog.run_counts.has_any(lambda _: True)
        await here.broker.close()

    play(act)


@pytest.mark.parametrize("deduplication", [False, True])
def test_later_chunks_that_come_on_the_next_connection_after_the_first_was_refused_are_refused(
    deduplication,
):
    async def act(stage):
        owner = Owner(stage, stage.client, "a")
        owner = await (deduplicating(owner) if deduplication else owner.take())
        before, (first, last) = Sending(owner), chunked(WHOLE, 2)
        before.send(first)
        before.chunks.give_up("it sent another message")  # its client hears of that, and no more
        before.chunks.forget()
        again = Sending(owner)
        again.send(last)
        ((_, refused),) = await again.said(1)
        assert "refused" in refused, "and is not said to be stored"
        again = Sending(owner)
        again.send(first, last)  # as a message that is sent anew
        assert [offset for _, offset in await again.said(2)] == [2, 2]
        await closed(owner)

    play(act)
