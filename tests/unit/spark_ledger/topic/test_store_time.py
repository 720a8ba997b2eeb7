import asyncio

from spark_ledger.topic.store_time import store_now_ms
from tests.simulation.store import EPOCH_MS
from tests.unit.spark_ledger.topic.stage import play


def true_ms():
    return EPOCH_MS + asyncio.get_running_loop().time() * 1000


def test_the_stores_time_is_told_at_each_call_anew():
    async def act(stage):
        store = (await stage.another()).store
        for _ in range(3):
            before = true_ms()
            told = await store_now_ms(store)
            assert before - 1 <= told <= true_ms()
            await asyncio.sleep(100)

    play(act)


def test_it_is_never_later_than_the_stores_own_and_comes_near_while_answers_are_lost():
    async def act(stage):
        store = stage.client.store
        stage.world.store.faults.unknown = 0.5
        stage.world.store.faults.lag_s = 0.5
        told = []
        for _ in range(40):
            told.append(await store_now_ms(store))
            assert told[-1] <= true_ms()
            await asyncio.sleep(1)
        stage.world.store.calm()

        assert max(told) > true_ms() - 10_000

    play(act)
