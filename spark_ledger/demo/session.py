"""Spark as the demo runs it: small, on loopback only, its workers on this interpreter; and every
finished micro-batch, reported to the parent process as it ends."""

import os
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
    StreamingQueryProgress,
)
from pyspark.sql.streaming.query import StreamingQuery

from spark_ledger.demo import jars, worker
from spark_ledger.spark.worker.worker_python import worker_python

DELTA_CONF = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    "spark.databricks.delta.snapshotPartitions": "2",
}


def start(
    name: str, scratch: Path, *, cores: int, delta: bool = False, task_failures_max: int = 1
) -> SparkSession:
    """A session whose temporary files are below `scratch`. A task that failed `task_failures_max`
    times fails its job; on one machine Spark's own default is 1, on a cluster 4."""
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = worker_python()
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    os.environ["SPARK_LOCAL_DIRS"] = str(scratch / "local")
    conf = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.ui.liveUpdate.period": "0",  # the status tracker sees a task when it starts
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": "1g",
        "spark.driver.extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
        "spark.sql.warehouse.dir": str(scratch / "warehouse"),
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "2",
        "spark.python.unix.domain.socket.enabled": "true",
        "spark.sql.execution.arrow.maxBytesPerBatch": str(2**31 - 1),  # docs/spark.md, first lines
        "spark.sql.streaming.numRecentProgressUpdates": "1000",
    }
    if delta:
        conf |= DELTA_CONF
        conf["spark.driver.extraClassPath"] = os.pathsep.join(map(str, jars.delta_jars()))
    builder = SparkSession.builder.master(f"local[{cores},{task_failures_max}]").appName(name)
    for key, value in conf.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("WARN")
    return spark


def report(progress: StreamingQueryProgress) -> None:
    """One `batch` event. The same batch may be reported twice; it is one batch all the same."""
    worker.report(
        "batch",
        query=progress.name,
        batch=progress.batchId,
        rows=progress.numInputRows,
        seconds=progress.durationMs.get("triggerExecution", 0) / 1000,
        dropped=sum(state.numRowsDroppedByWatermark for state in progress.stateOperators),
    )


def report_all(query: StreamingQuery) -> None:
    """At the end of a query: Spark's listeners may still owe its last batches."""
    for progress in query.recentProgress:
        report(progress)


class BatchListener(StreamingQueryListener):
    """Spark calls it after each micro-batch; asking a query instead costs more with every batch."""

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        pass

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        report(event.progress)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        pass

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        pass
