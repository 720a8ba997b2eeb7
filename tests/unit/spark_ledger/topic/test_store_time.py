import asyncio

from spark_ledger.metadata.store_calls import LONG_AGO_MS, store_now_ms
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


def test_while_answers_are_lost_the_time_is_true_or_not_told():
    async def act(stage):
        store = stage.client.store
        stage.world.store.faults.unknown = 0.5
        stage.world.store.faults.lag_s = 0.5
        told = []
        for _ in range(40):
            before = true_ms()
            now_ms = await store_now_ms(store)
            assert now_ms == LONG_AGO_MS or before - 1 <= now_ms <= true_ms()
            told.append(now_ms)
            await asyncio.sleep(1)
        stage.world.store.calm()

        assert 0 < told.count(LONG_AGO_MS) < 20

    play(act)
