"""Acknowledgements of a partition while a write is under way, after it failed, or while no consumer
uses their subscription."""

import asyncio

from spark_ledger import errors
from spark_ledger.topic.acks.entries import AckKey
from spark_ledger.topic.acks.ledger import OpenAckLedger
from tests.unit.spark_ledger.topic.ack_owners import KEY, durable, eventually, owner, play_here


def test_a_subscription_that_is_released_and_served_before_a_write_loses_no_acknowledgement():
    async def act(stage):
        made = await owner(stage, 1)
        _, acks = made.serve()
        await made.acknowledge(acks, 3)
        acks.add(5, 6)
        made.acks.changed(KEY)
        made.acks.release(KEY, is_written=False)
        _, acks = made.serve()
        await made.acknowledge(acks, 7)
        assert await durable(stage) == (0, [3, 5, 7])

    play_here(act)


def test_a_receipt_counts_for_what_an_ack_acknowledged_that_ended_with_its_connection():
    async def act(stage):
        made = await owner(stage, 1)
        _, acks = made.serve()
        await made.acknowledge(acks, 3)
        acks.add(5, 6)  # the connection ends between two steps of the ACK
        made.acks.release(KEY, is_written=True)
        _, acks = made.serve()
        await made.acknowledge(acks)  # 5 is acknowledged already
        assert await durable(stage) == (0, [3, 5])

    play_here(act)


def test_a_close_writes_what_a_released_subscription_acknowledged_before_a_write_failed(
    monkeypatch,
):
    async def act(stage):
        made = await owner(stage, 1)
        _, acks = made.serve()
        await made.acknowledge(acks, 3)
        plain, failures = OpenAckLedger.append, [errors.NotEnoughBookies("for a while")]

        async def append(*of):
            if failures:
                raise failures.pop()
            await plain(*of)

        monkeypatch.setattr(OpenAckLedger, "append", append)
        acks.add(5, 6)
        made.acks.changed(KEY)
        made.acks.release(KEY, is_written=False)

        async def has_failed():
            return not failures

        await eventually(has_failed)
        await made.acks.close(60.0)
        assert await durable(stage) == (0, [3, 5])

    play_here(act)


def test_a_write_that_began_before_a_seek_back_does_not_make_its_position_durable(monkeypatch):
    async def act(stage):
        made = await owner(stage, 1)
        subscription, acks = made.serve()
        await made.acknowledge(acks, 0)
        plain, begun, goes_on = OpenAckLedger.append, asyncio.Event(), asyncio.Event()

        async def append(*of):
            begun.set()
            await goes_on.wait()
            await plain(*of)

        monkeypatch.setattr(OpenAckLedger, "append", append)
        positions = []
        subscription.was_durable = lambda partition, epoch, position: positions.append(position)
        acks.add_up_to(8)
        made.acks.changed(KEY)
        await begun.wait()
        acks.reset(2)
        made.acks.reset(KEY)
        goes_on.set()
        await made.acks.durable(KEY)
        assert positions == [2]
        assert await durable(stage) == (2, [])

    play_here(act)


def test_what_a_subscription_acknowledged_before_its_release_counts_in_the_brokers_budget():
    async def act(stage):
        one = await owner(stage, 1)
        names = [AckKey(name, "token", 1) for name in ("s", "t", "u")]
        for key in names:
            _, acks = one.serve(key)
            await one.acknowledge(acks, *range(1, 40_000, 2), key=key)
            one.acks.release(key, is_written=True)
        assert one.budget.bytes > 3 * 8_000 and not one.budget.is_over
        one.serve(names[0])
        assert 3 * 8_000 > one.budget.bytes > 2 * 8_000, "its dispatcher counts it from now on"
        other = await owner(stage, 2)
        assert other.budget.bytes > 3 * 8_000, "what another owner had counts, too"
        other.serve(names[0])
        other.acks.release(names[0], is_written=True, is_gone=True)
        assert 3 * 8_000 > other.budget.bytes > 2 * 8_000
        one.acks.drop(errors.LedgerFenced("given up"))
        assert one.budget.bytes == 0 == len(one.budget.sets)
        assert (await owner(stage, 3)).budget.bytes > 3 * 8_000

    play_here(act)


def test_a_subscription_released_after_the_partition_was_lost_takes_nothing_of_the_budget():
    """The budget is the broker's: what stayed in it would pause the subscriptions of others."""

    async def act(stage):
        made = await owner(stage, 1)
        _, acks = made.serve()
        await made.acknowledge(acks, *range(1, 40_000, 2))
        made.acks.drop(errors.LedgerFenced("another broker has the partition"))
        made.acks.release(KEY, is_written=True)
        assert made.budget.bytes == 0 == len(made.budget.sets)

    play_here(act)
