"""Every check of the demo finds what it is there to find."""

import pyarrow as pa
import pytest

from spark_ledger_demo import flights

CSV = pa.table({"row": [0, 1, 2, 3], "carrier": ["A", "B", "A", "B"], "delay": [5, 6, None, 8]})


def topic(rows, partitions=None):
    carriers = CSV["carrier"].to_pylist()
    return pa.table(
        {
            "row": rows,
            "key": [carriers[row % 4] for row in rows],
            "partition": partitions or [row % 2 for row in rows],
            "offset": list(range(len(rows))),
        }
    )


def test_rows_that_came_once_pass():
    assert flights.rows_once("t", CSV, topic([0, 1, 2, 3])).passed


@pytest.mark.parametrize("rows", [[0, 1, 2], [0, 1, 2, 3, 3], [0, 1, 2, 3, 4]])
def test_a_missing_a_doubled_and_a_foreign_row_fail(rows):
    assert not flights.rows_once("t", CSV, topic(rows)).passed


def test_order_within_a_carrier_is_what_counts():
    assert flights.in_order_of_carrier(CSV, topic([1, 0, 3, 2])).passed
    assert not flights.in_order_of_carrier(CSV, topic([2, 0, 1, 3])).passed


def test_a_carrier_in_two_partitions_fails():
    assert not flights.in_order_of_carrier(CSV, topic([0, 1, 2, 3], [0, 1, 1, 1])).passed


def test_one_changed_value_fails_and_names_its_column():
    changed = CSV.set_column(2, "delay", pa.array([5, 6, 0, 8]))
    check = flights.same_values("t", CSV, changed)
    assert not check.passed
    assert "delay" in check.detail
    assert flights.same_values("t", CSV, CSV.take([3, 2, 1, 0])).passed


def test_a_batch_committed_twice_or_never_fails():
    assert flights.committed_once(1, [0, 1, 2]).passed
    assert not flights.committed_once(1, [0, 1, 1]).passed
    assert not flights.committed_once(1, [0, 2]).passed
    assert not flights.committed_once(None, [0, 1]).passed
