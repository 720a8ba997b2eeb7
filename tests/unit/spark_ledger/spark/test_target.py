"""The topic that the first write makes."""

import pytest

from spark_ledger.errors import OptionInvalid
from spark_ledger.spark.options import stream_write_options
from spark_ledger.spark.target import policies_of, target_name


def quorums(**given: str) -> tuple[int, int, int]:
    policies = policies_of(stream_write_options({"topic": "t", **given}))
    return policies.ensemble_size, policies.write_quorum, policies.ack_quorum


def test_quorums_that_are_not_given_are_the_nearest_to_the_defaults():
    assert quorums() == (3, 3, 2)
    assert quorums(ensembleSize="1") == (1, 1, 1)
    assert quorums(ensembleSize="5") == (5, 3, 2)
    assert quorums(writeQuorum="4") == (4, 4, 2)
    assert quorums(ensembleSize="5", writeQuorum="4", ackQuorum="4") == (5, 4, 4)


def test_quorums_that_do_not_fit_are_refused():
    with pytest.raises(OptionInvalid, match="ackQuorum 3"):
        quorums(writeQuorum="2", ackQuorum="3")


def test_a_topic_is_the_same_target_however_it_is_spelled():
    full = stream_write_options({"topic": "persistent://public/default/t"})
    assert target_name(full) == target_name(stream_write_options({"path": "t"})) == "t"
