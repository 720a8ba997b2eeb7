"""The workload that every format is measured by: rows of a key and random hex bytes.

Write them, read them back as a batch, stream them with availableNow; each through Spark local[2]
and, on the reading side, into Spark's own `noop`. The same code for every format, so that only the
format differs.
"""

import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

from pyspark.sql import DataFrame, SparkSession

from spark_ledger.spark.worker import worker_python

ROOT = Path(__file__).resolve().parent.parent
HASH_CHARACTERS = 64
KEY_AND_VALUE = ("key", "value")


@dataclass(frozen=True)
class Format:
    """How a format is named, written and read. `schema`: how its source is told that only key and
    value are wanted, where that can be told."""

    name: str
    write_options: Mapping[str, str] = field(default_factory=dict)
    read_options: Mapping[str, str] = field(default_factory=dict)
    path: str | None = None
    schema: str | None = None


def session(
    conf: Mapping[str, str] | None = None, *, cores: int = 2, memory: str = "3g"
) -> SparkSession:
    """A local Spark on loopback only, set as docs/spark.md advises. One for each process:
    a second one would keep the first one's JVM and its `memory`."""
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = worker_python()
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # pip compiles what it installs
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), path] if path else [str(ROOT)])
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.memory": memory,
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.sql.shuffle.partitions": "2",
        "spark.python.unix.domain.socket.enabled": "true",  # as docs/spark.md advises
        "spark.sql.execution.arrow.maxBytesPerBatch": str(2**31 - 1),  # as docs/spark.md advises
        **(conf or {}),
    }
    builder = SparkSession.builder.master(f"local[{cores}]").appName("benchmark")
    for key, value in settings.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def jvm_pid(spark: SparkSession) -> int:
    """The process of Spark's JVM; Python workers are below it."""
    return int(spark.sparkContext._jvm.java.lang.ProcessHandle.current().pid())


def rows(spark: SparkSession, count: int, value_bytes: int, partitions: int) -> DataFrame:
    """The rows: values are hex of hashes, hard to compress."""
    hashes = -(-value_bytes // HASH_CHARACTERS)
    parts = (f"sha2(cast(id*{hashes}+{i} as string),256)" for i in range(hashes))
    value = f"substring(concat({','.join(parts)}),1,{value_bytes})"
    return spark.range(0, count, 1, partitions).selectExpr(
        "cast(cast(id as string) as binary) key", f"cast({value} as binary) value"
    )


def kept(frame: DataFrame, count: int) -> DataFrame:
    """The frame computed once and kept in memory, so that a write is a write."""
    frame = frame.persist()
    assert frame.count() == count
    return frame


def write(frame: DataFrame, target: Format) -> None:
    writer = frame.write.format(target.name).options(**target.write_options).mode("append")
    writer.save(target.path)


def read_batch(
    spark: SparkSession,
    source: Format,
    *,
    columns: tuple[str, ...] = KEY_AND_VALUE,
    schema: str | None = None,
) -> None:
    """All rows into nothing. `schema` is what the source is told to make instead of the format's,
    `columns` what is taken of it ("*": everything)."""
    reader = spark.read.format(source.name).options(**source.read_options)
    schema = schema or source.schema
    frame = (reader.schema(schema) if schema else reader).load(source.path)
    frame.selectExpr(*columns).write.format("noop").mode("overwrite").save()


@dataclass(frozen=True)
class Streamed:
    """Rows that Spark counted, and the seconds that its micro-batches took: without the start and
    the end of the query."""

    rows: int
    batches_s: float


def read_stream(spark: SparkSession, source: Format) -> Streamed:
    """Streams all there is."""
    reader = spark.readStream.format(source.name).options(**source.read_options)
    frame = (reader.schema(source.schema) if source.schema else reader).load(source.path)
    return streamed(frame.selectExpr(*KEY_AND_VALUE))


def streamed(frame: DataFrame) -> Streamed:
    """All there is of a streaming frame, into nothing."""
    with tempfile.TemporaryDirectory() as checkpoint:
        query = (
            frame.writeStream.format("noop")
            .trigger(availableNow=True)
            .option("checkpointLocation", checkpoint)
            .start()
        )
        query.awaitTermination()
        told = query.recentProgress
        took_ms = sum(progress["durationMs"]["triggerExecution"] for progress in told)
        return Streamed(sum(progress["numInputRows"] for progress in told), took_ms / 1e3)


def seconds(action: Callable[[], object]) -> float:
    started = perf_counter()
    action()
    return perf_counter() - started
