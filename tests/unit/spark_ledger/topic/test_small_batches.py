"""What many micro-batches of one row leave behind, however far apart they are; a thousand of them
two minutes apart are in `make bench`."""

import asyncio

import pytest

from spark_ledger.metadata import paths
from tests.unit.spark_ledger.topic.leftovers import ledgers_made, longest_open_s, nodes_below
from tests.unit.spark_ledger.topic.stage import play


@pytest.mark.parametrize(
    ("batches", "pause_s"), [pytest.param(1000, 0.05, marks=pytest.mark.slow), (250, 120.0)]
)
def test_many_one_row_batches_make_few_ledgers_and_leave_few_nodes(batches, pause_s):
    async def act(stage):
        intent = await stage.intent()
        for batch in range(batches):
            task = await stage.written(intent, [b"%d" % batch], batch % 4, inline=True)
            await stage.commit(intent, batch, task)
            await asyncio.sleep(pause_s)
        await stage.client.checkpoints.idle()
        await asyncio.sleep(60)

        made = ledgers_made(stage.world)
        assert len(made) < 50
        assert all(record.closed for record in made.values()), "none is left open"
        now_s = asyncio.get_running_loop().time()
        assert longest_open_s(stage.world, now_s) < 2 * stage.topic.policies.ledger_age_s_max
        assert nodes_below(stage.world.store, paths.topic(stage.topic.id)) < 200
        rows = [row for p in range(4) for row in await stage.rows(p)]
        assert sorted(int(value) for _, value in rows) == list(range(batches))

    play(act, partitions=4)
