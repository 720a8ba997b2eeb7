"""The options of a read whose kind Spark has not said yet: it asks for columns first."""

import pytest

from spark_ledger.errors import LedgerError
from spark_ledger.spark.options import options
from spark_ledger.spark.options.start_positions import LATEST, AtEdge


@pytest.mark.parametrize("own", [{"maxOffsetsPerTrigger": "5"}, {"subscription": "s"}])
def test_what_is_wrong_with_a_streams_options_is_told_of_a_stream_when_columns_are_asked_for(own):
    wrong = {"topic": "t", "valueFormat": "arrow", "startingOffsets": "newest", **own}
    with pytest.raises(LedgerError, match="newest"):
        options.either_read_options(wrong)


def test_options_that_only_a_batch_has_are_taken_when_columns_are_asked_for():
    made = options.either_read_options({"topic": "t", "endingOffsets": "latest"})
    assert made.ending == AtEdge("endingOffsets", LATEST)
    with pytest.raises(LedgerError, match="newest"):
        options.either_read_options({"topic": "t", "endingOffsets": "newest"})


def test_a_batch_with_an_option_of_a_stream_is_told_of_that_option():
    given = {"topic": "t", "endingOffsets": "latest", "maxOffsetsPerTrigger": "5"}
    with pytest.raises(LedgerError, match="maxOffsetsPerTrigger belongs to a streaming read"):
        options.either_read_options(given)
