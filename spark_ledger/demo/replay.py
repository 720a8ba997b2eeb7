"""The replaying process: files of flights, one a trigger, into the topic `flights`.

Reports `batch` for each finished micro-batch and `tasks` while tasks of one run, so that whoever
wants to kill it in mid-batch knows when.
"""

import time
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from spark_ledger.demo import session, worker
from spark_ledger.demo.worker import Told

POLL_S = 0.02


def start_query(spark: SparkSession, told: Told) -> StreamingQuery:
    flights = (
        spark.readStream.schema(told["schema"])
        .option("maxFilesPerTrigger", 1)
        .csv(told["files"])
        .select(F.col("carrier").alias("key"), F.to_json(F.struct("*")).alias("value"))
    )
    return (
        flights.writeStream.format("ledger")
        .option("serviceUrl", told["service_url"])
        .option("topic", "flights")
        .option("partitions", told["partitions"])
        .option("checkpointLocation", told["checkpoint"])
        .trigger(availableNow=True)
        .start()
    )


def follow(spark: SparkSession, query: StreamingQuery) -> None:
    """Report until the query has ended; raises what it failed with."""
    tracker = spark.sparkContext.statusTracker()
    reported = 0
    while True:
        active = query.isActive
        running = _running_tasks(tracker)  # before progress: reported batches came before them
        progress = query.recentProgress
        for batch in progress[reported:]:
            seconds = batch["durationMs"]["triggerExecution"] / 1000
            worker.report(
                "batch", batch=batch["batchId"], rows=batch["numInputRows"], seconds=seconds
            )
        reported = len(progress)
        if not active:
            query.awaitTermination()
            return
        if running:
            worker.report("tasks")
        time.sleep(POLL_S)


def _running_tasks(tracker: object) -> int:
    stages = (tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds())  # type: ignore[attr-defined]
    return sum(stage.numActiveTasks for stage in stages if stage)


def main() -> None:
    told = worker.settings()
    worker.listen()
    spark = session.start("replay", Path(told["scratch"]), cores=1)
    worker.report("ready")
    query = start_query(spark, told)
    worker.report("started", query_id=query.id, run_id=query.runId)
    follow(spark, query)
    worker.report("done")
    spark.stop()


if __name__ == "__main__":
    main()
