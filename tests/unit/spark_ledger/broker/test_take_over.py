"""What a successor reads of a topic with deduplication: a bounded tail, in steps of an entry."""

import asyncio

import pytest

from spark_ledger.broker.log.topic_commits import RollLimits
from spark_ledger.topic.commit import commit, seal
from spark_ledger.topic.entry import pulsar_batch
from spark_ledger.topic.log import producers
from tests.kit.pulsar_batches import batch_of, message
from tests.unit.spark_ledger.broker.owners import Owner, Sent, another_of, deduplicating, sent_by
from tests.unit.spark_ledger.topic.batches import entry_of
from tests.unit.spark_ledger.topic.stage import play


@pytest.mark.parametrize("limits", [RollLimits(entries_read=3), RollLimits(bytes_read=200)])
@pytest.mark.parametrize("dies", [True, False])
def test_a_successor_reads_a_tail_alone_and_knows_how_far_every_producer_had_come(
    monkeypatch, limits, dies
):
    async def act(stage):
        old = await deduplicating(Owner(stage, stage.client, "a", limits))
        first = Sent(b"first", first=5, producer="early")
        old.writer.append(first)
        await first.over.wait()
        for number in range(0, 20, 2):
            await sent_by(old, number)
        live = old.writer.open_end.live
        assert live.first_entry > 0
        assert live.ledger_id == (await old.commits.state()).partitions[0].live.ledger_id
        if not dies:
            await old.writer.close()
        read = []
        decoded = pulsar_batch.producers_of
        monkeypatch.setattr(
            pulsar_batch, "producers_of", lambda *of: read.append(of) or decoded(*of)
        )
        new = await deduplicating(await another_of(stage))
        assert len(read) <= (3 if dies else 0)
        assert new.writer.backlog.sequence_ids.last("early") == 5
        assert new.writer.backlog.sequence_ids.last("p") == 19
        assert await sent_by(new, 18, 20) == [True, False]
        await new.writer.close()
        assert [value for _, value in await stage.rows()] == [
            b"first",
            *(b"%d" % number for number in range(22)),
        ]

    play(act)


def test_a_topic_without_deduplication_keeps_its_segment():
    async def act(stage):
        owner = await Owner(stage, stage.client, "a", RollLimits(entries_read=1)).take()
        for value in (b"a", b"b", b"c"):
            await owner.all_stored(owner.send([value]))
        assert owner.writer.open_end.live.first_entry == 0
        await owner.writer.close()

    play(act)


def test_a_successor_reads_each_entry_in_a_step_of_its_own(monkeypatch):
    async def act(stage):
        old = await deduplicating(Owner(stage, stage.client, "a"))
        for number in range(0, 12, 2):
            await sent_by(old, number)
        loop, notes, decoded = asyncio.get_running_loop(), [], pulsar_batch.producers_of

        def noted(*of):
            notes.append(loop.steps)
            return decoded(*of)

        monkeypatch.setattr(pulsar_batch, "producers_of", noted)
        new = await deduplicating(await another_of(stage))
        assert len(notes) == 6
        assert sorted(set(notes)) == notes
        await new.writer.close()

    play(act)


def test_an_entry_of_many_messages_is_read_in_several_steps(monkeypatch):
    monkeypatch.setattr(seal, "STEP_MESSAGES", 100)
    batch = [message(b"x")] * 50
    payload = entry_of(
        *((50, batch_of(batch, producer=name, names_highest=False)) for name in "abcdefgh")
    )

    async def main():
        known, turns = {}, 0
        reading = asyncio.ensure_future(seal.note_producers(payload, known))
        while not reading.done():
            await asyncio.sleep(0)
            turns += 1
        await reading
        return known, turns

    known, turns = asyncio.run(main())
    assert known == dict.fromkeys("abcdefgh", 49)
    assert turns >= 4


@pytest.mark.parametrize("dies", [False, True])
def test_a_partition_whose_producers_have_long_names_opens_again(dies, monkeypatch):
    monkeypatch.setattr(commit, "BODY_BYTES_MAX", 32 << 10)  # instead of 64 MiB
    monkeypatch.setattr(producers, "PRODUCERS_BYTES_MAX", 16 << 10)

    async def act(stage):
        old = await deduplicating(Owner(stage, stage.client, "a"))
        names = [f"{n:03}" + "x" * 1000 for n in range(40)]
        for number, name in enumerate(names):
            one = Sent(b"v", first=number, producer=name)
            old.writer.append(one)
            await one.over.wait()
        if not dies:
            await old.writer.close()
        new = await (await another_of(stage)).take()
        last = [new.writer.backlog.sequence_ids.last(name) for name in names]
        assert last[-10:] == list(range(30, 40))
        assert last[0] == -1
        assert await sent_by(new, 0) == [False]

    play(act)
