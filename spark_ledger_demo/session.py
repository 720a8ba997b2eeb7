"""The demo's Spark (small, on loopback only, its workers on this interpreter), and the work of its
three Spark processes. Each process reports every micro-batch to the parent process as it ends.

    replay    files of flights, one a trigger, into the topic `flights`. After the command `watch`
              it reports `tasks` again and again while tasks run, so that it can be killed mid-batch
    readers   two queries over the topic `flights`. One query keeps count and mean arrival delay per
              hour, origin and carrier in a Delta table. Its micro-batches are merged into the
              table, so the table has a window before the watermark closes the window, and at the
              end it has all windows. The other query writes the late flights to the topic
              `late-flights`
    check     reads both topics and the Delta table and compares them with the csv
"""

import os
import queue
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pyarrow as pa
from pyspark import StatusTracker
from pyspark.sql import DataFrame, DataFrameReader, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
    StreamingQueryProgress,
)
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamReader

from spark_ledger.spark.worker import worker_python
from spark_ledger_demo import flights, jars, worker
from spark_ledger_demo.flights import GROUP, LATE_MINUTES, FlightCheck
from spark_ledger_demo.worker import Settings

if TYPE_CHECKING:
    from delta.tables import DeltaTable

Heard = queue.Queue[str]
Reader = TypeVar("Reader", DataFrameReader, DataStreamReader)
REPLAY_POLL_S, POLL_S = 0.005, 0.2
VALUE = "time timestamp, origin string, carrier string, arr_delay bigint"
TABLE = (
    "hour_utc string, origin string, carrier string, "
    "flights bigint, arrived bigint, mean_delay double"
)
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
        # one compiler starts fast; its default of 48 MB for code is too little for a long session
        "spark.driver.extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
        " -XX:ReservedCodeCacheSize=240m",
        "spark.sql.warehouse.dir": str(scratch / "warehouse"),
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "2",
        "spark.python.unix.domain.socket.enabled": "true",
        "spark.sql.execution.arrow.maxBytesPerBatch": str(2**31 - 1),  # docs/spark.md, Setup
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
    """Report a `batch` event. A batch may be reported twice; the parent counts it once."""
    worker.report(
        "batch",
        query=progress.name,
        batch=progress.batchId,
        rows=progress.numInputRows,
        seconds=progress.durationMs.get("triggerExecution", 0) / 1000,
        dropped=sum(state.numRowsDroppedByWatermark for state in progress.stateOperators),
    )


def report_all(query: StreamingQuery) -> None:
    """Report all batches at the end of a query: Spark's listeners may lack the last ones."""
    for progress in query.recentProgress:
        report(progress)


class BatchListener(StreamingQueryListener):
    """Spark calls this listener after each micro-batch. (Asking the query instead costs more with
    every batch.)"""

    def onQueryStarted(self, event: QueryStartedEvent) -> None: ...

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        report(event.progress)

    def onQueryIdle(self, event: QueryIdleEvent) -> None: ...

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None: ...


# -- replay ----------------------------------------------------------------------------------------


def replay(spark: SparkSession, settings: Settings, heard: Heard) -> None:
    """Run the replay until its query has ended; raises the query's error."""
    query = (
        spark.readStream.schema(settings["schema"])
        .option("maxFilesPerTrigger", 1)
        .csv(settings["files"])
        .select(F.col("carrier").alias("key"), F.to_json(F.struct("*")).alias("value"))
        .writeStream.queryName("replay")
        .format("ledger")
        .option("serviceUrl", settings["service_url"])
        .option("topic", "flights")
        .option("partitions", settings["partitions"])
        .option("checkpointLocation", f"{settings['checkpoints']}/replay")
        .trigger(availableNow=True)
        .start()
    )
    worker.report("started", query_id=query.id, run_id=query.runId)
    tracker = spark.sparkContext.statusTracker()
    while query.isActive:
        if not heard.empty() and _tasks_run(tracker):
            worker.report("tasks")
        time.sleep(REPLAY_POLL_S)
    query.awaitTermination()
    report_all(query)


def _tasks_run(tracker: StatusTracker) -> bool:
    stages = (tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds())
    return any(stage.numActiveTasks for stage in stages if stage)


# -- readers ---------------------------------------------------------------------------------------


def readers(spark: SparkSession, settings: Settings, heard: Heard) -> None:
    """Read until the command to finish; then read to the end of the topic and stop."""
    assert heard.get() == "read"
    queries = [_delays_by_hour(spark, settings), _late_flights(spark, settings)]
    while True:
        for query in queries:
            failure = query.exception()
            if failure is not None:
                raise failure
        try:
            assert heard.get(timeout=POLL_S) == "finish"
            break
        except queue.Empty:
            continue
    for query in queries:
        query.processAllAvailable()
    for query in queries:
        query.stop()
        report_all(query)


def _ledger(reader: Reader, settings: Settings, topic: str) -> Reader:
    return (
        reader.format("ledger")
        .option("serviceUrl", settings["service_url"])
        .option("subscribe", topic)
    )


def _flights(spark: SparkSession, settings: Settings) -> DataFrame:
    topic = (
        _ledger(spark.readStream, settings, "flights").option("startingOffsets", "earliest").load()
    )
    value = F.col("value").cast("string")
    return topic.select("key", value.alias("value"), F.from_json(value, VALUE).alias("flight"))


def _delays_by_hour(spark: SparkSession, settings: Settings) -> StreamingQuery:
    """The query of the Delta table, in update mode: each micro-batch has the new totals of the
    windows that it changed."""
    from delta.tables import DeltaTable

    windows = (
        _flights(spark, settings)
        .select("flight.*")
        .withWatermark("time", "1 hour")
        .groupBy(F.window("time", "1 hour"), "origin", "carrier")
        .agg(
            F.count("*").alias("flights"),
            F.count("arr_delay").alias("arrived"),
            F.avg("arr_delay").alias("mean_delay"),
        )
        .withColumn("hour_utc", F.date_format("window.start", "yyyy-MM-dd'T'HH"))
        .select(*GROUP, "flights", "arrived", "mean_delay")
    )
    table = DeltaTable.createIfNotExists(spark).location(settings["table"])
    for column in TABLE.split(", "):
        name, kind = column.split()
        table = table.addColumn(name, kind)
    merged = table.execute()
    return (
        windows.writeStream.queryName("delays by hour")
        .outputMode("update")
        .option("checkpointLocation", f"{settings['checkpoints']}/by-hour")
        .trigger(processingTime="2 seconds")
        .foreachBatch(lambda batch, _number: _merge(merged, batch))
        .start()
    )


def _merge(table: "DeltaTable", batch: DataFrame) -> None:
    """Merge a batch into the table. Totals replace totals, so merging a batch twice changes
    nothing."""
    batch = batch.persist()
    first = batch.agg(F.min("hour_utc")).first()
    if first is not None and first[0] is not None:
        is_same_group = " and ".join(f"t.{column} = b.{column}" for column in GROUP)
        is_not_older = f"t.hour_utc >= '{first[0]}'"  # lets Delta leave out older files
        (
            table.alias("t")
            .merge(batch.alias("b"), f"{is_not_older} and {is_same_group}")
            .whenMatchedUpdateAll()
            .whenNotMatchedInsertAll()
            .execute()
        )
    batch.unpersist()


def _late_flights(spark: SparkSession, settings: Settings) -> StreamingQuery:
    return (
        _flights(spark, settings)
        .where(F.col("flight.arr_delay") >= LATE_MINUTES)
        .select("key", "value")
        .writeStream.queryName("late flights")
        .format("ledger")
        .option("serviceUrl", settings["service_url"])
        .option("topic", "late-flights")
        .option("partitions", settings["partitions"])
        .option("checkpointLocation", f"{settings['checkpoints']}/late")
        .trigger(processingTime="1 second")
        .start()
    )


# -- check -----------------------------------------------------------------------------------------


def check(spark: SparkSession, settings: Settings, heard: Heard) -> None:
    assert heard.get() == "check"
    table = spark.read.format("delta").load(settings["table"]).toArrow()
    for result in _checks(spark, settings, table):
        worker.report("check", **asdict(result))
    _report_read_rate(spark, settings)
    for what, path in flights.save(table, Path(settings["output"])).items():
        worker.report("saved", what=what, path=str(path))


def _read_topic(spark: SparkSession, settings: Settings, topic: str, schema: str) -> pa.Table:
    value = F.from_json(F.col("value").cast("string"), schema)
    return (
        _ledger(spark.read, settings, topic)
        .load()
        .select(F.col("key").cast("string"), "partition", "offset", value.alias("flight"))
        .select("key", "partition", "offset", "flight.*")
        .toArrow()
    )


def _report_read_rate(spark: SparkSession, settings: Settings) -> None:
    """Report rows, bytes of keys and values, and seconds of one batch read of `flights`."""
    started = time.monotonic()
    totals = (
        _ledger(spark.read, settings, "flights")
        .load()
        .agg(F.count("*"), F.sum(F.length("key") + F.length("value")))
        .first()
    )
    assert totals
    rows, size = totals
    worker.report("read", rows=rows, bytes=size, seconds=time.monotonic() - started)


def _checks(spark: SparkSession, settings: Settings, table: pa.Table) -> list[FlightCheck]:
    csv = flights.read_flights(settings["rows"])
    schema = flights.spark_schema(csv)
    every = _read_topic(spark, settings, "flights", schema)
    late = _read_topic(spark, settings, "late-flights", schema)
    expected_late = flights.late(csv)
    return [
        flights.rows_once("flights", csv, every),
        flights.same_values("flights", csv, every),
        flights.in_order_of_carrier(csv, every),
        flights.same_hours(flights.by_hour(csv), table),
        flights.rows_once("late-flights", expected_late, late),
        flights.same_values("late-flights", expected_late, late),
    ]


def main() -> None:
    """Run the process whose name is in the settings."""
    settings, heard = worker.settings(), worker.listen()
    name = settings["name"]
    is_replay = name == "replay"
    cores, needs_delta = 1 if is_replay else 2, not is_replay
    spark = start(name, Path(settings["scratch"]), cores=cores, delta=needs_delta)
    worker.report("ready")
    spark.streams.addListener(BatchListener())
    {"replay": replay, "readers": readers, "check": check}[name](spark, settings, heard)
    worker.report("done")
    spark.stop()


if __name__ == "__main__":
    main()
