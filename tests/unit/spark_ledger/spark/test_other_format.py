import logging

import pyarrow as pa
import pytest

from spark_ledger.errors import OptionConflict
from spark_ledger.spark.options.options import batch_read_options
from spark_ledger.spark.rows import columns
from spark_ledger.spark.rows.other_format import LOGGED_MAX, OnOtherFormat, OtherRows
from tests.unit.spark_ledger.spark.typed_rows import rows, typed_rows


def test_rows_of_the_kind_that_is_wanted_are_no_others_and_all_are_read_where_they_are_errors():
    for policy in OnOtherFormat:
        assert not OtherRows(policy, typed=True).accepts(typed_rows(), "t")
        assert not OtherRows(policy, typed=False).accepts(rows(), "t")
    assert not OtherRows(OnOtherFormat.FAIL, typed=True).accepts(rows(), "t")


def test_the_others_are_counted_and_logged_with_their_places(caplog):
    caplog.set_level(logging.WARNING)
    others = OtherRows(OnOtherFormat.SKIP, typed=True)
    for _ in range(LOGGED_MAX + 5):
        assert others.accepts(rows(), "t")
    others.end()

    said = [one.getMessage() for one in caplog.records]
    place = "topic 't', partition 3, offsets 40 to 42: rows that are bytes are left out"
    assert said[:LOGGED_MAX] == [place] * LOGGED_MAX
    assert said[LOGGED_MAX:] == ["75 rows were of the other kind (onOtherFormat=skip)"]


def test_a_value_of_columns_is_null_with_all_that_is_beside_it():
    schema = pa.schema([("key", pa.string()), ("value", pa.binary()), ("valueSize", pa.int32())])
    made = columns.to_spark(typed_rows(), "t", schema, null_value=True)
    assert made.to_pydict() == {"key": ["a", None], "value": [None] * 2, "valueSize": [None] * 2}


def test_json_reads_both_kinds_and_takes_no_policy():
    with pytest.raises(OptionConflict, match="onOtherFormat is 'skip'"):
        batch_read_options({"topic": "t", "valueFormat": "json", "onOtherFormat": "skip"})
    assert batch_read_options({"topic": "t"}).on_other_format == "fail"
