"""Consumers at rows that no bookie has any more."""

import asyncio
import logging

import pytest

from spark_ledger import errors
from spark_ledger.broker.dispatch import dispatcher
from spark_ledger.broker.dispatch.subscriptions import Subscription
from spark_ledger.broker.produce import opening
from spark_ledger.topic.entry import pulsar_batch
from spark_ledger.topic.log.policies import TopicPolicies, value_of_text
from tests.unit.spark_ledger.broker.consumers import (
    EXCLUSIVE,
    LOST,
    Losing,
    consumer_of,
    play,
    settle,
    until,
)
from tests.unit.spark_ledger.broker.owners import owner_of
from tests.unit.spark_ledger.broker.sending import Consuming
from tests.unit.spark_ledger.topic import stage as stages
from tests.unit.spark_ledger.topic.batches import FOREIGN
from tests.unit.spark_ledger.topic.live_segments import deleted


def ended_of(one):
    ended = []
    one.on_end = ended.append
    return ended


@pytest.mark.parametrize("why", [LOST, errors.DigestMismatch("all"), RuntimeError("a defect")])
def test_a_consumer_at_rows_that_cannot_be_read_stays_and_says_so_once_and_goes_on(
    why, monkeypatch, caplog
):
    monkeypatch.setattr(dispatcher, "RETRY_S", 0.001)
    monkeypatch.setattr(dispatcher, "LOST_RETRY_S", 0.002)

    async def act(made):
        partition = Losing(1, 1, 1, gone=[1], why=why)
        one = consumer_of(Subscription("s", EXCLUSIVE, None), partition)
        made.append(one)
        ended = ended_of(one)
        one.dispatcher.flow(one, 10)
        await until(lambda: partition.reads > 5)
        assert one.link.messages == [(0, [])]
        assert not ended
        assert len([one for one in caplog.records if "pauses" in one.message]) == 1
        assert "partition 0 of topic t at offset 1" in caplog.text
        partition.gone.clear()  # a bookie that has them is back
        await until(lambda: len(one.link.messages) == 3)
        assert [at for at, _ in one.link.messages] == [0, 1, 2]

    with caplog.at_level(logging.WARNING):
        play(act)


def test_the_pauses_grow_and_end_when_it_is_sent_from_another_place(monkeypatch):
    monkeypatch.setattr(dispatcher, "RETRY_S", 0.001)

    async def act(made):
        partition = Losing(1, 1, 1, gone=[1])
        one = consumer_of(Subscription("s", EXCLUSIVE, None), partition)
        made.append(one)
        one.dispatcher.flow(one, 10)
        await asyncio.sleep(0.2)
        assert partition.reads < 15
        partition.gone.clear()
        one.dispatcher.rewind()
        await settle()
        assert [at for at, _ in one.link.messages][-2:] == [1, 2]

    play(act)


def test_by_the_policy_rows_that_are_lost_are_passed_over_and_need_no_acknowledgement(caplog):
    async def act(made):
        partition = Losing(1, 1, 2, 1, gone=[1])
        partition.skips = True
        one = consumer_of(Subscription("s", EXCLUSIVE, None), partition)
        made.append(one)
        one.dispatcher.flow(one, 10)
        await settle()
        assert [at for at, _ in one.link.messages] == [0, 2, 4]
        for offset in (0, 2, 3):
            one.dispatcher.acks.add(offset, offset + 1)
        assert one.dispatcher.acks.durable == 4
        assert (
            "passes over rows that cannot be read of partition 0 of topic t at offset 1"
            in caplog.text
        )

    with caplog.at_level(logging.WARNING):
        play(act)


@pytest.mark.parametrize("last", [False, True])
def test_after_rows_of_a_ledger_that_is_gone_the_next_ones_come_by_the_policy(last, monkeypatch):
    monkeypatch.setattr(dispatcher, "LOST_RETRY_S", 5.0)

    async def act(stage):
        ledgers = []
        for run, values in enumerate(([b"a"] * 3, [b"b"] * 3, [b"c"] * 3), 1):
            intent = await stage.intent(f"run-{run}")
            written = await stage.written(intent, values)
            await stage.commit(intent, run, written)
            state = await stage.client.log(stage.topic.id).fold(fresh=True)
            ledgers.append(next(one for one in state.ledgers() if one not in ledgers))
        await deleted(stage, ledgers[2 if last else 1])
        owner = await owner_of(stage)
        made = await Consuming().begin(stage, owner, kept=False)
        before, left = ([0, 3], [0, 3]) if last else ([0], [0, 6])
        assert [at for at, _ in await made.got(len(before))] == before
        await asyncio.sleep(60)
        assert len(made.frames) == len(before)
        await stage.client.topics.change_policies("t", {"on_lost_rows": "skip"})
        assert [at for at, _ in await made.got(2)] == left
        if last:
            await owner.all_stored(owner.send([b"d"]))
            found = await made.got(3)
            assert found[-1][0] == 9
            assert pulsar_batch.parse(found[-1][1]).messages == 1
        made.consumer.dispatcher.leave(made.consumer)
        await owner.writer.close()
        await owner.commits.close()

    stages.play(act)


@pytest.mark.parametrize("payload", FOREIGN.values(), ids=FOREIGN)
@pytest.mark.parametrize("is_sealed", [False, True])
def test_a_consumer_stays_at_a_foreign_entry_between_others_and_passes_over_it_by_the_policy(
    payload, is_sealed, monkeypatch, caplog
):
    monkeypatch.setattr(dispatcher, "LOST_RETRY_S", 5.0)

    async def act(stage):
        owner = await owner_of(stage)
        await owner.all_stored(owner.send([b"a"]))
        with monkeypatch.context() as patched:
            patched.setattr(opening, "encode_entry", lambda *_, **__: [payload])
            await owner.all_stored(owner.send([b"in its place is what is foreign"]))
        await owner.all_stored(owner.send([b"b"]))
        if is_sealed:
            await owner.writer.close()
        made = await Consuming().begin(stage, owner, kept=False)
        ended = ended_of(made.consumer)
        assert [at for at, _ in await made.got(1)] == [0]
        await asyncio.sleep(60)
        assert len(made.frames) == 1
        assert not ended
        assert len([one for one in caplog.records if "pauses" in one.message]) == 1
        assert "at offset 1" in caplog.text
        await stage.client.topics.change_policies("t", {"on_lost_rows": "skip"})
        assert [at for at, _ in await made.got(2)] == [0, 2]
        for offset in (0, 2):
            made.dispatcher.acks.add(offset, offset + 1)
        assert made.dispatcher.acks.durable == 3
        made.consumer.dispatcher.leave(made.consumer)
        await owner.writer.close()
        await owner.commits.close()

    with caplog.at_level(logging.WARNING):
        stages.play(act)


def test_what_a_later_version_wrote_is_not_passed_over(monkeypatch):
    monkeypatch.setattr(dispatcher, "RETRY_S", 0.001)

    async def act(made):
        partition = Losing(1, 1, gone=[0], why=errors.UnsupportedFormat("version 9"))
        partition.skips = True
        one = consumer_of(Subscription("s", EXCLUSIVE, None), partition)
        made.append(one)
        one.dispatcher.flow(one, 10)
        await asyncio.sleep(0.05)
        assert not one.link.messages

    play(act)


def test_the_policy_is_pause_or_skip():
    assert TopicPolicies().on_lost_rows == "pause"
    assert value_of_text("on_lost_rows", "skip") == "skip"
    with pytest.raises(errors.BadConfig, match="on_lost_rows 'drop' is not one of"):
        TopicPolicies(on_lost_rows="drop")
