"""The workload that every format is measured by: rows of a key and 200 random hex bytes.

Write them, read them back as a batch, stream them with availableNow; each through Spark local[2]
and, on the reading side, into Spark's own `noop`. The same code for every format, so that only the
format differs.
"""

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

ROOT = Path(__file__).resolve().parent.parent
HASH_CHARACTERS = 64


@dataclass(frozen=True)
class Format:
    """How a format is named, written and read."""

    name: str
    write_options: Mapping[str, str] = field(default_factory=dict)
    read_options: Mapping[str, str] = field(default_factory=dict)
    path: str | None = None


@dataclass
class Rates:
    """Rows per second, one figure a run."""

    write: list[float] = field(default_factory=list)
    batch_read: list[float] = field(default_factory=list)
    stream_read: list[float] = field(default_factory=list)

    def medians(self) -> dict[str, float]:
        return {name: statistics.median(runs) for name, runs in vars(self).items() if runs}


def session(conf: Mapping[str, str] | None = None, cores: int = 2) -> SparkSession:
    """A local Spark on loopback only, whose workers run this interpreter."""
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), path] if path else [str(ROOT)])
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.memory": "3g",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.sql.shuffle.partitions": "2",
        **(conf or {}),
    }
    builder = SparkSession.builder.master(f"local[{cores}]").appName("benchmark")
    for key, value in settings.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def rows(spark: SparkSession, count: int, value_bytes: int, partitions: int) -> DataFrame:
    """The rows, computed once and kept in memory: values are hex of hashes, hard to compress."""
    hashes = -(-value_bytes // HASH_CHARACTERS)
    parts = (f"sha2(cast(id*{hashes}+{i} as string),256)" for i in range(hashes))
    value = f"substring(concat({','.join(parts)}),1,{value_bytes})"
    frame = spark.range(0, count, 1, partitions).selectExpr(
        "cast(cast(id as string) as binary) key", f"cast({value} as binary) value"
    )
    frame = frame.persist()
    assert frame.count() == count
    return frame


def write(frame: DataFrame, target: Format) -> None:
    writer = frame.write.format(target.name).options(**target.write_options).mode("append")
    writer.save(target.path)


def read_batch(spark: SparkSession, source: Format) -> None:
    frame = spark.read.format(source.name).options(**source.read_options).load(source.path)
    frame.selectExpr("key", "value").write.format("noop").mode("overwrite").save()


def read_stream(spark: SparkSession, source: Format) -> int:
    """Streams all there is and returns the number of rows that Spark counted."""
    frame = spark.readStream.format(source.name).options(**source.read_options).load(source.path)
    with tempfile.TemporaryDirectory() as checkpoint:
        query = (
            frame.selectExpr("key", "value")
            .writeStream.format("noop")
            .trigger(availableNow=True)
            .option("checkpointLocation", checkpoint)
            .start()
        )
        query.awaitTermination()
        return sum(progress["numInputRows"] for progress in query.recentProgress)


def seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def measure(spark: SparkSession, kind: Format, frame: DataFrame, runs: int) -> Rates:
    """Writes `frame` `runs` times into the same place, then reads all of it as often both ways."""
    count = frame.count()
    total = count * runs
    rates = Rates()
    for _ in range(runs):
        rates.write.append(count / seconds(lambda: write(frame, kind)))
    for _ in range(runs):
        rates.batch_read.append(total / seconds(lambda: read_batch(spark, kind)))
        started = time.perf_counter()
        streamed = read_stream(spark, kind)
        rates.stream_read.append(total / (time.perf_counter() - started))
        assert streamed == total, f"streamed {streamed} of {total} rows"
    return rates
