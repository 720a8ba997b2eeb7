"""Batches of a partition from any offset on: of Spark's commits, of sealed and of live ledgers."""

import asyncio
from types import SimpleNamespace

import pytest

from spark_ledger import errors
from spark_ledger.broker.dispatch.positions import marked_entry
from spark_ledger.broker.log.partition import Partition
from spark_ledger.broker.log.tail import Stored, TailBudget
from spark_ledger.topic.entry import pulsar_batch, pulsar_columns
from spark_ledger.topic.log.actions import Hole, Trim
from tests.unit.spark_ledger.broker.owners import owner_of
from tests.unit.spark_ledger.topic.stage import NOW_MS, play

SPARK = [b"s%d" % i for i in range(2500)]


class Reading:
    """A partition with Spark's rows, a sealed ledger's and a live one's; without its tail if not
    `kept`."""

    async def made(self, stage, *, kept):
        self.heard = None  # the state that is known once the partition catches up
        self.history = 0  # of the topic's log, once it does
        self.owner = owner = await owner_of(stage)
        self.state = await owner.commits.state()
        budget = TailBudget(1 << 20 if kept else 1)
        given = (stage.client, stage.topic, 0, lambda: self.state, budget, self.catch_up)
        self.partition = Partition(*given)
        self.partition.open_end = owner.writer.open_end
        owner.stored = self.partition.add_stored
        await owner.all_stored(owner.send([b"a", b"b", b"c"], [b"d"]))
        intent = await stage.intent()
        await stage.commit(intent, 1, await stage.written(intent, SPARK))
        await owner.all_stored(owner.send([b"e", b"f"]))
        await owner.all_stored(owner.send([b"g"]))
        self.state = await owner.commits.state()
        self.values = [b"a", b"b", b"c", b"d", *SPARK, b"e", b"f", b"g"]
        return self

    async def catch_up(self):
        self.state = self.heard or self.state
        return self.history

    async def close(self):
        await self.owner.writer.close()


def values_of(batch):
    return (
        pulsar_columns.decode_batches([pulsar_batch.parse(batch.data)]).column("value").to_pylist()
    )


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("start", [0, 1, 3, 4, 1500, 2503, 2504, 2505, 2506])
def test_batches_follow_each_other_from_any_offset_to_the_end(start, kept):
    async def act(stage):
        reading = await Reading().made(stage, kept=kept)
        partition, at, first = reading.partition, start, True
        assert partition.end == len(reading.values) == 2507
        while at < partition.end:
            found = await partition.read(at)
            assert found[0].offset <= at if first else found[0].offset == at
            for batch in found:
                assert values_of(batch) == reading.values[batch.offset : batch.end]
                assert batch.offset <= at < batch.end
                at, first = batch.end, False
        assert await partition.read(at) == []
        await reading.close()

    play(act)


def test_rows_of_spark_come_in_the_same_batches_wherever_a_reader_begins():
    async def act(stage):
        reading = await Reading().made(stage, kept=False)
        at, in_order = 4, set()
        while at < 2504:
            found = await reading.partition.read(at)
            in_order |= {one.offset for one in found}
            at = found[-1].end
        apart = {(await reading.partition.read(at))[0].offset for at in range(4, 2504, 100)}
        assert len(apart) > 3
        assert apart <= in_order
        await reading.close()

    play(act)


def test_what_a_consumer_had_no_permits_for_is_not_read_again(monkeypatch):
    async def act(stage):
        reading = await Reading().made(stage, kept=True)
        partition = reading.partition
        first, second, *_ = await partition.read(4)  # rows of Spark, in batches of 1,000
        monkeypatch.setattr(stage.client, "state_with_tables", None)
        assert (await partition.read(first.end))[0] == second
        await reading.close()

    play(act)


def test_what_is_in_memory_of_a_store_that_went_back_is_not_given_out_behind_newer_rows():
    """The owner goes on below: offsets of batches that were confirmed before are others' now."""

    async def act(stage):
        reading = await Reading().made(stage, kept=True)
        partition, end = reading.partition, reading.partition.end

        def store(offset, data):
            partition.add_stored(offset, SimpleNamespace(counts=[1], batches=[data], batched=False))

        for number in range(4):
            store(end + number, b"before")
        store(end + 1, b"after")
        assert [one.data for one in await partition.read(end + 1)] == [b"after"]
        assert partition.end == end + 2
        await reading.close()

    play(act)


def test_what_is_in_memory_is_forgotten_once_the_topic_has_another_history():
    async def act(stage):
        reading = await Reading().made(stage, kept=True)
        partition, end = reading.partition, reading.partition.end
        partition.add_stored(end, SimpleNamespace(counts=[1], batches=[b"before"], batched=False))
        assert [one.data for one in await partition.read(end)] == [b"before"]
        reading.history = 1
        assert await partition.read(end) == []
        assert partition.end == end
        await reading.close()

    play(act)


def test_the_last_batch_is_known_and_the_end_never_goes_back():
    async def act(stage):
        reading = await Reading().made(stage, kept=False)
        last = await reading.partition.last()
        assert (last.offset, last.messages) == (2506, 1)
        await reading.close()  # sealed, and the state of the reader does not have it yet
        assert reading.partition.end == 2507
        assert (await reading.partition.last()).offset == 2506

    play(act)


@pytest.mark.parametrize("kept", [True, False])
def test_rows_that_were_taken_out_are_not_the_last_ones_in_memory(kept):
    async def act(stage):
        reading = await Reading().made(stage, kept=kept)
        await reading.owner.writer.close()
        reading.state = await reading.owner.commits.state()
        assert (await reading.partition.last()).end == 2507
        intent = await stage.intent()
        await stage.client.commit_actions(stage.topic.id, [Hole(0, 2504, 2507)], intent)
        reading.state = await reading.owner.commits.state()
        assert reading.partition.removed(2500, 2507) == [(2504, 2507)]
        last = await reading.partition.last()
        assert (last.end, values_of(last)[-1]) == (2504, SPARK[-1])

    play(act)


@pytest.mark.parametrize("kept", [True, False])
def test_rows_that_were_trimmed_are_not_given_out_of_memory(kept):
    async def act(stage):
        reading = await Reading().made(stage, kept=kept)
        partition = reading.partition
        await partition.read(0)
        await reading.owner.writer.close()
        reading.state = await reading.owner.commits.state()
        assert (await partition.last()).end == 2507
        intent = await stage.intent()
        await stage.client.commit_actions(stage.topic.id, [Trim(((0, 2),))], intent)
        reading.heard = await reading.owner.commits.state()
        first = (await partition.read(0))[0]
        assert (first.offset, first.end) == (0, 3)  # the batch that has a row still
        assert partition.removed(0, 4) == [(0, 2)]
        assert partition.removed(2, 4) == []
        await stage.client.commit_actions(stage.topic.id, [Trim(((0, 2507),))], intent)
        reading.heard = await reading.owner.commits.state()
        assert await partition.last() is None
        assert await partition.read(0) == []

    play(act)


def test_the_mark_is_given_out_as_the_entry_of_a_batch():
    last = Stored(4, 3, b"", True)
    marks = [marked_entry(mark, last) for mark in (0, 3, 4, 5, 6, 7)]
    assert marks == [-1, 2, 3, 3, 3, 4]
    assert marked_entry(5, None) == 4


def test_a_moment_is_found_within_ledgers_by_the_brokers_clock_and_of_commits_by_theirs():
    async def act(stage):
        reading = await Reading().made(stage, kept=False)
        assert await reading.partition.since(0) == 0
        for late_ms in (NOW_MS * 2, 2**62, 2**64 - 1):
            assert await reading.partition.since(late_ms) == 2507
        assert await reading.partition.since(-(2**70)) == 0
        await reading.close()

    play(act)


def test_a_moment_within_a_ledger_that_ended_is_looked_for_once_that_is_sealed():
    async def act(stage):
        reading = await Reading().made(stage, kept=False)
        before, written_ms = reading.state, reading.owner.commits.now_ms()
        await reading.owner.writer.close()
        reading.state, sealed = before, await reading.owner.commits.state()
        found = asyncio.create_task(reading.partition.since(written_ms))
        await asyncio.sleep(1)
        assert not found.done()
        reading.state = sealed
        assert await found == 2504
        reading.state = before
        with pytest.raises(errors.Unavailable, match="not sealed yet"):
            await reading.partition.since(written_ms)

    play(act)
