"""The replaying process: files of flights, one a trigger, into the topic `flights`.

Reports `batch` for each finished micro-batch and, once told to `watch`, `tasks` again and again
while tasks run, so that a test can kill it in mid-batch.
"""

import queue
import time
from pathlib import Path

from pyspark import StatusTracker
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from spark_ledger.demo import session, worker
from spark_ledger.demo.worker import Told

POLL_S = 0.005


def start_query(spark: SparkSession, told: Told) -> StreamingQuery:
    flights = (
        spark.readStream.schema(told["schema"])
        .option("maxFilesPerTrigger", 1)
        .csv(told["files"])
        .select(F.col("carrier").alias("key"), F.to_json(F.struct("*")).alias("value"))
    )
    return (
        flights.writeStream.queryName("replay")
        .format("ledger")
        .option("serviceUrl", told["service_url"])
        .option("topic", "flights")
        .option("partitions", told["partitions"])
        .option("checkpointLocation", told["checkpoint"])
        .trigger(availableNow=True)
        .start()
    )


def follow(spark: SparkSession, query: StreamingQuery, heard: "queue.Queue[str]") -> None:
    """Until the query has ended; raises what it failed with."""
    tracker = spark.sparkContext.statusTracker()
    while query.isActive:
        if not heard.empty() and _tasks_run(tracker):
            worker.report("tasks")
        time.sleep(POLL_S)
    query.awaitTermination()
    session.report_all(query)


def _tasks_run(tracker: StatusTracker) -> bool:
    stages = (tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds())
    return any(stage.numActiveTasks for stage in stages if stage)


def main() -> None:
    told = worker.settings()
    heard = worker.listen()
    spark = session.start("replay", Path(told["scratch"]), cores=1)
    worker.report("ready")
    spark.streams.addListener(session.BatchListener())
    query = start_query(spark, told)
    worker.report("started", query_id=query.id, run_id=query.runId)
    follow(spark, query, heard)
    worker.report("done")
    spark.stop()


if __name__ == "__main__":
    main()
