"""Where consumers are, where something comes between two steps of a write: a seek, a trim, another
broker."""

import asyncio

import pytest

from spark_ledger import errors
from spark_ledger.metadata import paths
from spark_ledger.metadata.store import Create, MultiFailed, OutcomeUnknown
from tests.unit.spark_ledger.topic.consumers import (
    PARTITIONS,
    adopted,
    broker,
    play_here,
    positions,
    shares_of,
    written,
)


async def until(so):
    for _ in range(300):
        if so():
            return
        await asyncio.sleep(0.1)
    raise AssertionError("it does not come about")


def test_what_is_told_during_a_write_is_durable_with_the_next_one():
    async def act(stage):
        a = await broker(stage, "a")
        at_a = await a.open()
        await at_a.adopt(0, 1)
        await written(at_a)
        store, multi = a.client.store, a.client.store.multi

        async def sought_meanwhile(operations):
            store.multi = multi
            at_a.advance(0, 10)
            await multi(operations)
            stage.world.store.stall(8)

        store.multi = sought_meanwhile
        at_a.advance(0, 50)
        await until(lambda: store.multi == multi)
        with pytest.raises(errors.Unavailable, match="was not written"):
            await a.cursors.written(at_a, 3)
        await a.cursors.written(at_a, 30)
        assert (await positions(stage))[0] == 10

    play_here(act)


def test_a_step_back_after_a_write_whose_answer_was_lost_fails_a_trim_that_was_planned_before_it():
    async def act(stage):
        a = await broker(stage, "a")
        at_a = await a.open()
        await at_a.adopt(0, 1)
        await written(at_a)
        store, multi, planned = a.client.store, a.client.store.multi, []

        async def answer_lost(operations):
            store.multi = multi
            await multi(operations)
            planned.append(
                await stage.client.subscriptions.holds(stage.topic.id, PARTITIONS, 2**62)
            )
            at_a.advance(0, 10)
            raise OutcomeUnknown("the answer was lost")

        store.multi = answer_lost
        at_a.advance(0, 50)
        await until(lambda: planned)
        await a.cursors.written(at_a, 30)
        assert (await positions(stage))[0] == 10
        with pytest.raises(MultiFailed):
            await stage.client.store.multi([planned[0].check, Create("/never")])

    play_here(act)


def test_what_a_broker_that_was_taken_for_dead_writes_in_that_moment_is_not_lost():
    async def act(stage):
        a, b = await broker(stage, "a"), await broker(stage, "b")
        at_a = await a.open()
        await at_a.adopt(0, 1)
        await written(at_a)
        await stage.client.store.delete(paths.broker("a"))
        store, multi = b.client.store, b.client.store.multi

        async def after_a_write(operations):
            store.multi = multi
            at_a.advance(0, 50)
            await a.cursors.written(at_a, 5)
            await multi(operations)

        store.multi = after_a_write
        at_b = await b.open()
        assert shares_of(stage) == ["b"]
        assert await adopted(at_b, 0, 2) == 50

    play_here(act)
