"""Ledgers are deleted: named as deleted and without a record, both or neither."""

import asyncio

import pytest

from spark_ledger import errors
from spark_ledger.ledger.records import LedgerRecords, OutcomeUnresolved
from spark_ledger.metadata import deleted_ledgers, paths
from spark_ledger.metadata.ledger_record import RecordState
from spark_ledger.metadata.store import Check
from tests.simulation.store import SimStore
from tests.unit.spark_ledger.ledger.fakes import simulated
from tests.unit.spark_ledger.ledger.stored_records import (
    GONE,
    UNKNOWN,
    closed_of,
    flaky,
    record_of,
    stored,
)


@pytest.mark.parametrize("state", [RecordState.OPEN, RecordState.IN_RECOVERY], ids=str)
@simulated
async def test_only_a_closed_ledger_is_deleted(state):
    _, records, known = await stored(record_of(state=state))
    with pytest.raises(errors.LedgerNotClosed, match=f"{state.value}, not CLOSED"):
        await records.delete(7)
    assert await records.read(7, fresh=True) == known


@pytest.mark.parametrize("script", UNKNOWN, ids=str)
@simulated
async def test_a_deletion_whose_answers_are_lost_deletes(script):
    store, records, _ = await stored(closed_of())
    await flaky(store, *script).delete(7)
    with pytest.raises(errors.NoSuchLedger):
        await records.read(7, fresh=True)


def named_in(store, ledger_id=7):
    folder = paths.ledger_folder(ledger_id)
    return deleted_ledgers.decode(store.peek(folder).value, folder)


@pytest.mark.parametrize("script", [(), *UNKNOWN], ids=str)
@simulated
async def test_who_deletes_a_ledger_names_it_in_the_same_multi(script):
    store, _, _ = await stored(closed_of())
    assert named_in(store) == frozenset()
    assert await flaky(store, *script).delete(7)
    assert named_in(store) == {7}
    assert store.peek(paths.ledger(7)) is None


@simulated
async def test_a_record_that_is_gone_already_is_not_named_by_who_finds_that():
    store, records, known = await stored(closed_of())
    await store.session("vandal").delete(paths.ledger(7), known.version)
    assert await records.delete(7)
    assert named_in(store) == frozenset()


@simulated
async def test_deletions_of_several_processes_and_of_many_ledgers_all_come_about():
    """All in one folder, whose value each of them changes."""
    store = SimStore()
    store.faults.lag_s = 0.5
    await store.session("founder").create(paths.LEDGERS)
    deleters = [LedgerRecords(store.session(f"deleter {n}")) for n in range(3)]
    for ledger_id in range(1, 61):
        await deleters[0].create(closed_of(ledger_id))
    await asyncio.gather(*(deleters[i % 3].delete(i) for i in range(1, 61)))
    assert named_in(store) == {*range(1, 61)}
    assert [i async for i in deleters[0].list()] == []


@simulated
async def test_many_deletions_of_one_process_are_few_writes():
    store, _, _ = await stored(closed_of())
    records = flaky(store)
    for ledger_id in range(8, 48):
        await records.create(closed_of(ledger_id))
    before = records.metadata.sent
    await asyncio.gather(*(records.delete(i) for i in range(7, 48)))
    assert records.metadata.sent - before <= 3


@pytest.mark.parametrize("together", [False, True])
@simulated
async def test_a_deletion_whose_condition_does_not_hold_changes_nothing(together):
    store, records, _ = await stored(closed_of())
    await records.create(closed_of(8))
    condition = [Check(paths.LEDGERS, 99)]
    deletions = [records.delete(7, condition), records.delete(8, [Check(paths.LEDGERS, 0)])]
    if together:
        assert await asyncio.gather(*deletions) == [False, True]
    else:
        assert [await deletion for deletion in deletions] == [False, True]
    assert named_in(store) == {8}
    assert store.peek(paths.ledger(7)) is not None


@simulated
async def test_a_damaged_set_of_deleted_ledgers_keeps_the_ledger():
    store, records, _ = await stored(closed_of())
    await store.session("vandal").set(paths.ledger_folder(7), b"SLD1 no", 0)
    with pytest.raises(errors.UnsupportedFormat, match="ledger 7 cannot be deleted"):
        await records.delete(7)
    assert store.peek(paths.ledger(7)) is not None


@simulated
async def test_deletions_that_race_each_other_all_succeed():
    store, _, _ = await stored(closed_of())
    store.faults.lag_s = 5.0
    rivals = [LedgerRecords(store.session(f"rival {n}")) for n in range(5)]
    await asyncio.gather(*(rival.delete(7) for rival in rivals))
    assert store.peek(paths.ledger(7)) is None


@simulated
async def test_a_deletion_nobody_can_be_asked_about_is_unresolved():
    store, _, _ = await stored(closed_of())
    with pytest.raises(OutcomeUnresolved):
        await flaky(store, GONE).delete(7)


@simulated
async def test_a_deletion_leaves_every_folder_above():
    store, records, _ = await stored(closed_of())
    folders = [path for path, _ in store.walk(paths.LEDGERS)][:-1]
    await records.delete(7)
    assert [path for path, _ in store.walk(paths.LEDGERS)] == folders
    assert [i async for i in records.list()] == []
