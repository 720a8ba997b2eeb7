import asyncio

import pytest

from spark_ledger import errors
from tests.unit.spark_ledger.topic.stage import play
from tests.unit.spark_ledger.topic.subscription_stage import (
    fill,
    listed,
    opened,
    positions,
    told,
)


def test_a_query_finds_its_subscription_where_its_last_run_left_it():
    async def act(stage):
        await fill(stage, 10)
        cursor = await opened(stage, run="r1")
        await told(cursor, 1, 3)
        await cursor.release()

        again = await opened(stage, run="r2")

        assert await again.recovered() == {0: 3}
        assert await positions(stage) == {0: 3}

    play(act)


def test_positions_told_often_go_to_a_ledger_and_are_read_back_from_it():
    async def act(stage):
        await fill(stage, 10)
        cursor = await opened(stage)
        await told(cursor, 1, 2, 3, 4)
        await asyncio.sleep(2)  # the ledger's readers hear of its last entry when nothing follows
        found = await listed(stage)

        assert found.ledger_id is not None
        assert found.positions[0] < 4
        assert await positions(stage) == {0: 4}

    play(act)


def test_the_next_run_fences_the_ledger_of_a_crashed_one_and_finds_its_last_position():
    async def act(stage):
        await fill(stage, 10)
        cursor = await opened(stage, run="r1")
        await told(cursor, 1, 2, 3, 7)
        ledger_id = (await listed(stage)).ledger_id
        await cursor.abandon()

        again = await opened(stage, run="r2")

        assert await again.recovered() == {0: 7}
        await again.durable()
        assert (await listed(stage)).epoch == 2
        assert (await listed(stage)).ledger_id is None
        await asyncio.sleep(5)
        with pytest.raises(errors.NoSuchLedger):
            await stage.client.ledgers.record(ledger_id, fresh=True)

    play(act)
