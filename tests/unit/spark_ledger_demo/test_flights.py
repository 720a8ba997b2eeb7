"""The demo's order, its files, and what must come out of them."""

import pyarrow as pa
import pytest

from spark_ledger_demo import flights


@pytest.fixture(scope="module")
def table():
    return flights.read_flights(5_000)


def test_flights_come_in_order_of_departure_and_then_of_their_number_in_the_csv(table):
    order = list(zip(table["time"].to_pylist(), table["row"].to_pylist(), strict=True))
    assert order == sorted(order)


def test_all_flights_are_there_once():
    rows = flights.read_flights()["row"].to_pylist()
    assert len(rows) == 336_776
    assert sorted(rows) == list(range(336_776))


def test_departure_is_the_hour_of_the_csv_and_its_minute(table):
    row = table.filter(pa.compute.equal(table["row"], 0)).to_pylist()[0]
    assert (row["time_hour"], row["minute"]) == ("2013-01-01T10:00:00Z", 15)
    assert row["time"] == "2013-01-01T10:15:00Z"


def test_replay_files_hold_every_row_in_order_and_their_times_rise(table, tmp_path):
    paths = flights.write_replay_files(table, tmp_path / "files")
    rows = [int(line.split(",")[0]) for path in paths for line in path.open()]
    times = [path.stat().st_mtime for path in paths]
    assert rows == table["row"].to_pylist()
    assert times == sorted(set(times))


@pytest.mark.parametrize(("rows", "files"), [(2_000, 20), (60_000, 30), (336_776, 40)])
def test_few_flights_are_few_files(tmp_path, rows, files):
    table = pa.table({"row": range(rows)})
    assert len(flights.write_replay_files(table, tmp_path / "files")) == files


def test_by_hour_counts_cancelled_flights_but_leaves_them_out_of_the_mean():
    plain = {
        "row": [0, 1, 2],
        "time": ["2013-01-01T10:15:00Z", "2013-01-01T10:59:00Z", "2013-01-01T11:00:00Z"],
        "origin": ["JFK"] * 3,
        "carrier": ["AA"] * 3,
        "arr_delay": pa.array([10, None, -4], pa.int64()),
    }
    hours = flights.by_hour(pa.table(plain)).to_pylist()
    assert [(h["hour_utc"], h["flights"], h["arrived"], h["mean_delay"]) for h in hours] == [
        ("2013-01-01T10", 2, 1, 10.0),
        ("2013-01-01T11", 1, 1, -4.0),
    ]


def test_late_means_sixty_minutes_or_more():
    table = pa.table({"arr_delay": pa.array([59, 60, 61, None], pa.int64())})
    assert flights.late(table)["arr_delay"].to_pylist() == [60, 61]
