"""The checking process: reads both topics and the Delta table and compares them with the csv."""

import time
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from spark_ledger.demo import compare, flights, picture, session, worker
from spark_ledger.demo.compare import Check
from spark_ledger.demo.worker import Told


def read_topic(spark: SparkSession, told: Told, topic: str, schema: str) -> pa.Table:
    value = F.from_json(F.col("value").cast("string"), schema)
    return (
        spark.read.format("ledger")
        .option("serviceUrl", told["service_url"])
        .option("subscribe", topic)
        .load()
        .select(F.col("key").cast("string"), "partition", "offset", value.alias("flight"))
        .select("key", "partition", "offset", "flight.*")
        .toArrow()
    )


def read_rate(spark: SparkSession, told: Told) -> tuple[int, int, float]:
    """(rows, bytes of keys and values, seconds) of one batch read of the topic `flights`."""
    started = time.monotonic()
    found = (
        spark.read.format("ledger")
        .option("serviceUrl", told["service_url"])
        .option("subscribe", "flights")
        .load()
        .agg(F.count("*"), F.sum(F.length("key") + F.length("value")))
        .first()
    )
    assert found
    rows, size = found
    return rows, size, time.monotonic() - started


def checks(spark: SparkSession, told: Told, table: pa.Table) -> list[Check]:
    csv = flights.read_flights(told["rows"])
    schema = flights.spark_schema(csv)
    every = read_topic(spark, told, "flights", schema)
    late = read_topic(spark, told, "late-flights", schema)
    expected_late = flights.late(csv)
    return [
        compare.rows_once("flights", csv, every),
        compare.same_values("flights", csv, every),
        compare.in_order_of_carrier(csv, every),
        compare.same_hours(flights.by_hour(csv), table),
        compare.rows_once("late-flights", expected_late, late),
        compare.same_values("late-flights", expected_late, late),
    ]


def main() -> None:
    told = worker.settings()
    heard = worker.listen()
    spark = session.start("check", Path(told["scratch"]), cores=2, delta=True)
    worker.report("ready")
    assert heard.get() == "check"
    table = spark.read.format("delta").load(told["table"]).toArrow()
    for check in checks(spark, told, table):
        worker.report("check", **asdict(check))
    rows, size, seconds = read_rate(spark, told)
    worker.report("read", rows=rows, bytes=size, seconds=seconds)
    for what, path in picture.save(table, Path(told["output"])).items():
        worker.report("saved", what=what, path=str(path))
    worker.report("done")
    spark.stop()


if __name__ == "__main__":
    main()
