"""Records of ledgers in a metadata store that went back in time under their writer."""

import dataclasses

import pytest

from spark_ledger import errors
from spark_ledger.ledger import transitions as t
from spark_ledger.ledger.records import LedgerRecords, MoveRefused
from spark_ledger.metadata import ledger_record, paths
from tests.simulation.restoring import copied, go_back
from tests.unit.spark_ledger.ledger.fakes import simulated
from tests.unit.spark_ledger.ledger.stored_records import (
    CHANGE,
    CLOSE,
    MARK,
    NAMES,
    record_of,
    stored,
)


@pytest.mark.parametrize("move", [CHANGE[1], CLOSE[1], MARK[1]], ids=NAMES[:3])
@simulated
async def test_a_record_that_went_back_with_its_store_keeps_the_fragments_that_came_since(move):
    store, records, known = await stored()
    copy = copied(store)
    for first, old, new in ((2, "c", "d"), (4, "d", "e")):
        known = await records.move(
            known,
            lambda record, f=first, o=old, n=new: t.change_ensemble(record, {2: o}, {2: n}, f),
        )
    go_back(store, copy)

    after = await records.move(known, move)

    assert [f.ensemble[2] for f in after.record.fragments][:3] == ["c", "d", "e"]
    assert after == await records.read(7, fresh=True)


@simulated
async def test_a_record_that_others_moved_on_after_its_store_went_back_counts():
    store, records, known = await stored()
    copy = copied(store)
    known = await records.move(known, CHANGE[1])
    go_back(store, copy)
    others = LedgerRecords(store.session("another"))
    await others.move(await others.read(7, fresh=True), MARK[1])
    with pytest.raises(MoveRefused):
        await records.move(known, CLOSE[1])


@simulated
async def test_a_ledger_whose_id_was_given_out_again_is_not_moved():
    store, records, known = await stored()
    admin = store.session("admin")
    await admin.delete(paths.ledger(7))
    other = dataclasses.replace(record_of(), creator="another's")
    await LedgerRecords(admin).create(other)
    await records.metadata.set(paths.ledger(7), ledger_record.encode(other), 0)
    with pytest.raises(errors.NoSuchLedger, match="another ledger has the id now"):
        await records.move(known, CLOSE[1])
