"""What a codec costs and saves: real flights written and read with none, lz4 and zstd.

    python benchmarks/compression.py                       2 M flights, five rounds
    python benchmarks/compression.py --rows 200000 --rounds 3

Twice: as columns (`valueFormat` `arrow`; a read takes five of twelve) and as JSON text in `value`.
In each round the codecs take turns, so that a noisy machine is noisy to all; the ratios to `none`
are of one round, and their median counts. CPU is of Spark's JVM, Python and the bookies together.
A topic holds the rows of all rounds when it is read. Bytes are those of one of three copies.
"""

import argparse
import signal
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from rich.console import Console
from rich.table import Table

from benchmarks import contenders, spark_typed, workload
from benchmarks.contenders import Contender
from benchmarks.processes import adopt_orphans
from benchmarks.spark_rates import (
    BATCH_READ,
    MEMORY,
    STREAM_QUERY,
    STREAM_READ,
    WARM_UP_ROWS,
    WRITE,
    Measured,
    Taking,
    Turns,
)
from spark_ledger.local import LocalCluster

CODECS = ("none", "lz4", "zstd")
TYPED, JSON = "columns", "JSON text"
KINDS = (TYPED, JSON)
ACTIONS = ((WRITE, WRITE), (BATCH_READ, BATCH_READ), (STREAM_READ, STREAM_QUERY))
"""Rates, and whose processor time is told beside them."""


def contender(cluster: LocalCluster, kind: str, codec: str) -> Contender:
    """A topic of its own."""
    topic = f"{kind.split()[0].lower()}-{codec}"
    one = Contender(
        codec,
        contenders.ledger(topic, cluster.service_url, codec),
        contenders.servers(cluster),
    )
    if kind == TYPED:
        return spark_typed.with_columns(one)
    return replace(one, format=replace(one.format, schema="value BINARY"))


def frames(spark: SparkSession, kind: str, rows: int) -> tuple[DataFrame, DataFrame]:
    """The rows to write, and a few of them to warm up with; made before they are written."""

    def of(count: int) -> DataFrame:
        frame = spark_typed.flights(spark, count)
        if kind == TYPED:
            return frame
        return workload.kept(frame.select(F.to_json(F.struct("*")).alias("value")), count)

    return of(rows), of(min(rows, WARM_UP_ROWS))


def stored_bytes(spark: SparkSession, one: Contender) -> int:
    options = one.format.read_options
    listing = spark.read.format("ledger").option("serviceUrl", options["serviceUrl"])
    segments = listing.option("metadata", "segments").load(options["subscribe"])
    return int(segments.agg(F.sum("bytes")).first()[0])


def measure(spark: SparkSession, kind: str, rows: int, rounds: int) -> tuple[Measured, list[int]]:
    """The figures of each codec and the bytes it stores, on a cluster of its own."""
    frame, warm_up = frames(spark, kind, rows)
    measured: Measured = {}
    with LocalCluster(bookies=3, autorecovery=False) as cluster:
        found = [contender(cluster, kind, codec) for codec in CODECS]
        taking = Taking(spark, found, measured)
        taking.turns(WRITE, WARM_UP_ROWS, 1, lambda one: workload.write(warm_up, one.format))
        measured.clear()
        taking.turns(WRITE, rows, rounds, lambda one: workload.write(frame, one.format))
        total = rows * rounds + min(rows, WARM_UP_ROWS)
        taking.turns(BATCH_READ, total, rounds, lambda one: read(spark, one))
        taking.turns(STREAM_QUERY, total, rounds, lambda one: stream(taking, one, total))
        stored = [stored_bytes(spark, one) // total for one in found]
    for one in (frame, warm_up):
        one.unpersist()
    return measured, stored


def read(spark: SparkSession, one: Contender) -> None:
    opened(spark.read, one).write.format("noop").mode("overwrite").save()


def stream(taking: Taking, one: Contender, total: int) -> None:
    taking.told(one, total, workload.streamed(opened(taking.spark.readStream, one)))


def opened(reader: Any, one: Contender) -> DataFrame:
    kind = one.format
    return reader.format(kind.name).options(**kind.read_options).schema(kind.schema).load()


def ratio(turns: Turns, base: Turns) -> float:
    """The median over rounds of so many times what `none` did in the same round."""
    pairs = zip(turns.rows_a_s, base.rows_a_s, strict=True)
    return statistics.median(ours / theirs for ours, theirs in pairs)


def cpu_s(turns: Turns) -> float:
    """Of all parts, a million rows."""
    return sum(map(statistics.median, turns.cpu.values()))


def show(kind: str, measured: Measured, stored: list[int]) -> None:
    columns = ("rows/s", "x none", "CPU-s a M rows")
    table = Table(title=f"12 columns of flights as {kind}", pad_edge=False)
    for column in ("codec", "bytes a row", "", *columns):
        table.add_column(column, justify="right")
    for codec, row_bytes in zip(CODECS, stored, strict=True):
        for action, cpu_of in (
            (WRITE, WRITE),
            (BATCH_READ, BATCH_READ),
            (STREAM_READ, STREAM_QUERY),
        ):
            turns = measured[action, codec]
            rate, used = turns.median(), cpu_s(measured[cpu_of, codec])
            times = ratio(turns, measured[action, CODECS[0]])
            table.add_row(
                codec, str(row_bytes), action, f"{rate:,.0f}", f"{times:.2f}", f"{used:.2f}"
            )
        table.add_section()
    Console(width=100).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=["columns", "json"], help="one kind of rows")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    kinds = {"columns": [TYPED], "json": [JSON]}.get(given.only, KINDS)
    adopt_orphans()
    spark = workload.session(memory=MEMORY)
    for kind in kinds:
        show(kind, *measure(spark, kind, given.rows, given.rounds))
    spark.stop()


if __name__ == "__main__":
    main()
