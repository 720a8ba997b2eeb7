"""Ledger records that are written by one multi, over a store that loses answers."""

import asyncio

import pytest

from spark_ledger import errors
from spark_ledger.ledger import transitions as t
from spark_ledger.ledger.records import IdSpent, LedgerRecords, MoveRefused
from spark_ledger.metadata import paths
from tests.unit.spark_ledger.ledger.fakes import simulated
from tests.unit.spark_ledger.ledger.stored_records import (
    APPLIED,
    CLOSE,
    END,
    LOST,
    OK,
    flaky,
    record_of,
    stored,
)

SEVERAL = range(7, 17)


async def several_closed(records, knowns):
    return await asyncio.gather(
        *(records.move(versioned, CLOSE[1]) for versioned in knowns), return_exceptions=True
    )


@pytest.mark.parametrize("script", [(OK,), (APPLIED,), (LOST,), (LOST, LOST, APPLIED)], ids=str)
@simulated
async def test_moves_that_are_made_together_take_one_write_and_each_is_made_once(script):
    store, records, first = await stored()
    rest = [await records.create(record_of(ledger_id)) for ledger_id in SEVERAL[1:]]
    disturbed = flaky(store, *script)
    made = await several_closed(disturbed, [first, *rest])
    assert [one.version for one in made] == [1] * len(SEVERAL)
    assert [t.end_of((await records.read(i, fresh=True)).record) for i in SEVERAL] == [END] * 10
    assert script != (OK,) or disturbed.metadata.sent == 1


@simulated
async def test_of_moves_that_are_made_together_one_that_is_refused_does_not_keep_the_others():
    store, records, first = await stored()
    rest = [await records.create(record_of(ledger_id)) for ledger_id in SEVERAL[1:]]
    await records.move(rest[3], t.mark_in_recovery)
    made = await several_closed(LedgerRecords(store.session("writer")), [first, *rest])
    assert isinstance(made[4], MoveRefused)
    assert sum(isinstance(one, MoveRefused) for one in made) == 1
    assert [one.version for one in made if not isinstance(one, MoveRefused)] == [1] * 9


def of_one_topic():
    return [record_of(i, topic="topic") for i in SEVERAL]


@pytest.mark.parametrize("fate", [OK, APPLIED])
@simulated
async def test_ledgers_that_are_made_together_are_each_made_once(fate):
    store, records, _ = await stored(record_of(99))
    await records.metadata.create(paths.topic("topic"), parents=True)
    await records.create(record_of(6))  # their folder
    disturbed = flaky(store, fate)
    made = await disturbed.create_several(of_one_topic())
    assert [one.record.ledger_id for one in made] == list(SEVERAL)
    assert made == [await records.read(i, fresh=True) for i in SEVERAL]
    assert fate != OK or disturbed.metadata.sent == 1


@simulated
async def test_of_ledgers_that_are_made_together_no_id_is_used_again_where_that_was_lost():
    store, records, _ = await stored(record_of(99))
    await records.metadata.create(paths.topic("topic"), parents=True)
    with pytest.raises(IdSpent):
        await flaky(store, LOST).create_several(of_one_topic())
    for ledger_id in SEVERAL:
        with pytest.raises(errors.NoSuchLedger):
            await records.read(ledger_id, fresh=True)
