"""When the demo breaks what."""

import pytest

from spark_ledger_demo.job import PLAN, DemoFault, Faults, batch_under_way


def checkpoint(folder, planned, ended):
    for name, numbers in (("offsets", planned), ("commits", ended)):
        (folder / name).mkdir()
        for number in numbers:
            (folder / name / str(number)).touch()
        (folder / name / f".{max(numbers, default=0)}.crc").touch()
    return folder


def test_no_fault_before_its_share_is_replayed():
    assert Faults().due(PLAN[0][0] - 0.01) is None


def test_faults_come_in_the_order_of_the_plan_and_once():
    faults = Faults()
    happened = []
    while (fault := faults.due(1.0)) is not None:
        happened.append(fault)
        faults.done(fault)
    assert happened == [DemoFault.KILL_BOOKIE, DemoFault.KILL_REPLAY, DemoFault.START_BOOKIE]
    assert not faults.left


def test_a_fault_out_of_turn_is_refused():
    with pytest.raises(AssertionError, match="not the next"):
        Faults().done(DemoFault.START_BOOKIE)


def test_a_batch_is_under_way_between_its_offsets_and_its_commit(tmp_path):
    assert batch_under_way(checkpoint(tmp_path, [0, 1, 2], [0, 1])) == 2


def test_no_batch_is_under_way_once_it_has_ended_or_before_the_first(tmp_path):
    assert batch_under_way(tmp_path / "absent") is None
    assert batch_under_way(checkpoint(tmp_path, [0, 1], [0, 1])) is None
