"""What a thousand micro-batches of one row leave behind, however far apart they are."""

import asyncio
from dataclasses import replace

import pytest

from spark_ledger.metadata import ledger_record, paths
from tests.simulation.budgets import STORAGE
from tests.unit.spark_ledger.topic.stage import play

BATCHES = 1000
CALM = replace(
    STORAGE,
    flush_interval_s=600.0,
    page_cache_sync_s=600.0,
    disk_check_s=600.0,
    limbo_check_s=600.0,
    tombstone_sweep_s=600.0,
    gc_interval_s=3600.0,
)
"""Bookies that do little by themselves: a day and a half passes here."""


def nodes_below(store, path):
    names = store.peek_children(path)
    return len(names) + sum(nodes_below(store, f"{path}/{name}") for name in names)


def ledgers_made(world):
    """By id the last record of each ledger that was ever made."""
    changes = [change for commit in world.store.log for change in commit.changes]
    made = {}
    for change in changes:
        name = change.path.removeprefix(f"{paths.LEDGERS}/").replace("/", "")
        if change.path.startswith(f"{paths.LEDGERS}/") and len(name) == 19 and change.after:
            made[int(name)] = ledger_record.decode(change.after.value)
    return made


@pytest.mark.parametrize("pause_s", [0.05, 120.0])
def test_a_thousand_one_row_batches_make_few_ledgers_and_leave_few_nodes(pause_s):
    async def act(stage):
        intent = await stage.intent()
        for batch in range(BATCHES):
            task = await stage.written(intent, [b"%d" % batch], batch % 4, inline=True)
            await stage.commit(intent, batch, task)
            await asyncio.sleep(pause_s)
        await stage.client.checkpoints.idle()
        await asyncio.sleep(60)

        made = ledgers_made(stage.world)
        assert len(made) < 50
        assert all(record.closed for record in made.values()), "none is left open"
        assert nodes_below(stage.world.store, paths.topic(stage.topic.id)) < 200
        rows = [row for p in range(4) for row in await stage.rows(p)]
        assert sorted(int(value) for _, value in rows) == list(range(BATCHES))

    play(act, partitions=4, storage=CALM)
