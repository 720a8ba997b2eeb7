"""A streaming job written for Kafka and its port, run on the same events: are their tables equal?

    python benchmarks/port.py                  a year of flights, the original beside the port
    python benchmarks/port.py --with none      the port alone
    python benchmarks/port.py --rows 30000     fewer events

The jobs are examples/delays_on_kafka.py and examples/delays_on_ledger.py, as they stand. Each
table is compared row by row with an aggregation of the same events that uses neither Spark nor a
topic. Exits with status 1 where a row differs.
"""

import argparse
import os
import runpy
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
from pyspark.sql import DataFrame, SparkSession

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import contenders, workload
from benchmarks.contenders import BROKER, DELTA, KAFKA, LEDGER
from spark_ledger.local import LocalCluster
from spark_ledger_demo.flights import csv_path, read_flights
from spark_ledger_demo.jars import JarsMissing

TOPIC = "departures"
PARTITIONS = 2
EVENT = ("time", "carrier", "origin", "dep_delay", "arr_delay")
ROW = ("hour", "origin", "airline")
AIRLINES = csv_path().with_name("airlines.csv")
CONF = {
    "spark.sql.session.timeZone": "UTC",
    "spark.databricks.delta.snapshotPartitions": "2",  # 50 are for clusters
}


@dataclass(frozen=True)
class Job:
    """One of the two files, and where its events are."""

    name: str
    environment: Mapping[str, str]
    events: workload.Format

    @property
    def script(self) -> Path:
        return workload.ROOT / "examples" / f"delays_on_{self.name}.py"

    def run(self, folder: Path) -> Path:
        """The table that it made. It uses the session that there is, as a job on a cluster does."""
        table, checkpoint = folder / f"{self.name}-table", folder / f"{self.name}-checkpoint"
        before = sys.argv
        sys.argv = [str(self.script), TOPIC, str(AIRLINES), str(table), str(checkpoint)]
        os.environ.update(self.environment)
        try:
            runpy.run_path(str(self.script), run_name="__main__")
        finally:
            sys.argv = before
        return table


def events_of(spark: SparkSession, flights: pa.Table) -> DataFrame:
    """One JSON text a flight, in time order within each partition: one task writes them."""
    partition = f"CAST(row % {PARTITIONS} AS INT) AS partition"
    event = f"to_json(struct({', '.join(EVENT)})) AS value"
    rows = spark.createDataFrame(flights.select(["row", *EVENT])).coalesce(1)
    return rows.selectExpr("carrier AS key", event, partition)


def expected(flights: pa.Table) -> pa.Table:
    """What the job's table must hold, from the csv itself."""
    airlines = pa.csv.read_csv(AIRLINES).rename_columns(["carrier", "airline"])
    hour = pc.strptime(pc.utf8_slice_codeunits(flights["time"], 0, 13), "%Y-%m-%dT%H", "us")
    events = flights.select(["row", *EVENT]).append_column("hour", hour)
    named = events.join(airlines, "carrier", join_type="inner")
    aggregates = [("row", "count"), ("dep_delay", "count"), ("dep_delay", "mean")]
    grouped = named.group_by(list(ROW)).aggregate([*aggregates, ("arr_delay", "max")])
    names = ["flights", "departed", "mean_delay", "worst_arrival"]
    return in_order(grouped.rename_columns([*ROW, *names]))


def made(spark: SparkSession, table: Path) -> pa.Table:
    found = spark.read.format("delta").load(str(table)).toArrow()
    hour = found.column_names.index("hour")
    return in_order(found.set_column(hour, "hour", found["hour"].cast(pa.timestamp("us"))))


def in_order(rows: pa.Table) -> pa.Table:
    return rows.sort_by([(name, "ascending") for name in ROW]).combine_chunks()


def differing(found: pa.Table, wanted: pa.Table) -> list[str]:
    """What is not equal, in words; nothing if every row is, to the last bit of each mean."""
    if found.num_rows != wanted.num_rows:
        return [f"{found.num_rows:,} rows instead of {wanted.num_rows:,}"]
    found = found.select(wanted.column_names).cast(wanted.schema)
    return [
        f"column {name} differs"
        for name in wanted.column_names
        if not found[name].equals(wanted[name])
    ]


def compare(flights: pa.Table, peers: Sequence[str], folder: Path) -> bool:
    wanted = expected(flights)
    right = True
    with ExitStack() as stack:
        spark = workload.session({**contenders.spark_conf([DELTA, *peers]), **CONF})
        stack.callback(spark.stop)
        for job in jobs(stack, spark, peers):
            workload.write(events_of(spark, flights), job.events)
            wrong = differing(made(spark, job.run(folder)), wanted)
            right &= not wrong
            verdict = "; ".join(wrong) or f"all {wanted.num_rows:,} rows as computed from the csv"
            print(f"{job.script.name}: {flights.num_rows:,} events: {verdict}")
    return right


def jobs(stack: ExitStack, spark: SparkSession, peers: Sequence[str]) -> list[Job]:
    cluster = stack.enter_context(LocalCluster(bookies=3, autorecovery=False))
    ours = contenders.ledger(TOPIC, cluster.service_url, partitions=PARTITIONS)
    found = [Job(LEDGER, {"LEDGER_SERVICE_URL": cluster.service_url}, ours)]
    if KAFKA in peers:
        stack.enter_context(contenders.kafka_brokers())
        contenders.create_kafka_topic(spark, TOPIC, PARTITIONS)
        found.append(Job(KAFKA, {"KAFKA_SERVERS": BROKER}, contenders.kafka(TOPIC, "none")))
    return found


def main() -> int:
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--with", dest="peers", choices=[KAFKA, "none"], default=KAFKA)
    parser.add_argument("--rows", type=int, help="so many of the year's flights")
    given = parser.parse_args()
    peers = [] if given.peers == "none" else [given.peers]
    try:
        contenders.install([DELTA, *peers])
    except JarsMissing as error:
        raise SystemExit(str(error)) from None
    with tempfile.TemporaryDirectory(prefix="port-") as folder:
        return 0 if compare(read_flights(given.rows), peers, Path(folder)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
