"""What a node of the list of under-replicated ledgers means."""

from spark_ledger.repair.work_list import Cause, decode, encode


def test_a_cause_that_a_newer_version_writes_keeps_the_ledger_on_the_list():
    value = b'{"reasons": [["future", "bookie-1", 5]]}'
    listed = decode(7, value, version=2)
    assert [reason.why for reason in listed.reasons] == [Cause.LACKING]
    assert listed.reasons[0].why.lacks_copies


def test_a_node_keeps_its_bytes():
    value = b'{"reasons":[["lost","bookie-1",5],["misplaced","bookie-2",6]]}'
    assert encode(decode(7, value, version=0)) == value
