"""Delays that no subscription needs any more leave the ack ledger of their partition."""

import pytest
from pyroaring import BitMap64

from spark_ledger.broker.dispatch.delays import DelayIndex, HeldMessages
from spark_ledger.topic.acks import partition_acks
from tests.unit.spark_ledger.topic.ack_owners import owner, play_here
from tests.unit.spark_ledger.topic.acking_brokers import acking_broker, acknowledge
from tests.unit.spark_ledger.topic.consumers import play_here as play_subscriptions


@pytest.fixture(autouse=True)
def every_index_is_large(monkeypatch):
    monkeypatch.setattr(partition_acks, "INLINE_BYTES_MAX", 1)


def index_of(delayed):
    index = DelayIndex()
    for offset, due_ms in delayed.items():
        index.add(offset, due_ms)
    return index


def delayed_by(index):
    rows = index.take_all()
    return dict(zip(rows.offsets.tolist(), rows.dues_ms.tolist(), strict=True))


@pytest.mark.parametrize("is_used", [False, True])
def test_delays_that_are_due_or_that_no_subscription_gets_are_in_no_later_ledger(is_used):
    async def act(stage):
        first = await owner(stage, 1)
        _, acks = first.serve()
        first.acks.delays.keep(index_of({1: 5000, 2: 5000, 8: 700, 9: 5000}))
        await first.acknowledge(acks, 3)
        second = await owner(stage, 2)
        second.now_ms, second.lowest = 1000, 2
        if is_used:  # by a subscription that has no consumer now
            second.acks.delays.keep(DelayIndex())
        _, acks = second.serve()
        await second.acknowledge(acks, 4)
        third = await owner(stage, 3)
        third.acks.delays.keep(index := DelayIndex())
        assert delayed_by(index) == {2: 5000, 9: 5000}

    play_here(act)


def test_a_delay_that_a_subscription_holds_stays_though_it_is_due_and_others_are_beyond_it():
    index = DelayIndex()
    held = HeldMessages(index, lambda: 100)
    held.begin()
    for offset in (3, 4):
        index.add(offset, 200)
    assert held.pass_over(3, BitMap64()) == 5
    index.forget_unused(1000, 5)
    assert delayed_by(index) == {3: 200, 4: 200}
    held.end()
    index.forget_unused(1000, 5)
    assert not len(index)


def test_an_offset_that_one_subscription_has_before_it_keeps_its_delay():
    async def act(stage):
        a = await acking_broker(stage, "a")
        cursor, acks = await a.consume(1)
        cursor.keep_delays(0, index_of({3: 5000, 6: 5000, 7: 5000}))
        await a.open(at=6, name="behind")
        acks.add_up_to(9)
        await acknowledge(cursor, acks)
        await a.release(cursor)
        await a.die()
        for epoch, name in ((2, "other"), (3, "another")):
            b = await acking_broker(stage, name)
            cursor, acks = await b.consume(epoch)
            acks.add_up_to(9 + epoch)
            await acknowledge(cursor, acks)
            await b.release(cursor)
            await b.die()
        b = await acking_broker(stage, "last")
        cursor, _ = await b.consume(4)
        cursor.keep_delays(0, index := DelayIndex())
        assert delayed_by(index) == {6: 5000, 7: 5000}

    play_subscriptions(act)
