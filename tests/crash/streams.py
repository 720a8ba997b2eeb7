"""The driver that chaos kills: files -> topic `first` -> topic `second`, two streaming queries.

A query that failed (a task whose worker was killed four times) is started again from its
checkpoint, as whoever runs it would. Told `finish`, it reads to the end and writes what both
topics hold to parquet files.
"""

import queue
from pathlib import Path

import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from spark_ledger_demo import session, worker
from spark_ledger_demo.worker import Settings

POLL_S = 0.2
PARTITIONS = 3


def from_files(spark: SparkSession, told: Settings) -> DataFrame:
    reader = spark.readStream.schema("key string, value string").option("maxFilesPerTrigger", 20)
    return reader.csv(told["files"])


def from_topic(spark: SparkSession, told: Settings) -> DataFrame:
    reader = spark.readStream.format("ledger").option("serviceUrl", told["service_url"])
    reader = reader.option("subscribe", "first").option("startingOffsets", "earliest")
    return reader.load().select("key", "value")


def into_topic(frame: DataFrame, told: Settings, topic: str) -> StreamingQuery:
    return (
        frame.writeStream.queryName(topic)
        .format("ledger")
        .option("serviceUrl", told["service_url"])
        .option("topic", topic)
        .option("partitions", PARTITIONS)
        .option("checkpointLocation", f"{told['checkpoints']}/{topic}")
        .start()
    )


def wait_for_first_batch(query: StreamingQuery, told: Settings) -> None:
    """The topic is made by the first write; a reader that comes before it would be refused.
    Spark keeps the notes of its last batches only: any will do."""
    commits = Path(told["checkpoints"]) / "first" / "commits"
    while query.isActive and not any(commits.glob("[0-9]*")):
        query.awaitTermination(POLL_S)


class Streams:
    def __init__(self, spark: SparkSession, told: Settings) -> None:
        self._spark = spark
        self._told = told
        self._queries: dict[str, StreamingQuery] = {}

    def start(self, topic: str) -> None:
        source = from_files if topic == "first" else from_topic
        frame = source(self._spark, self._told)
        self._queries[topic] = into_topic(frame, self._told, topic)
        if topic == "first":
            wait_for_first_batch(self._queries[topic], self._told)

    def restart_failed(self) -> None:
        for topic, query in list(self._queries.items()):
            failure = query.exception()
            if failure is not None:
                worker.report("failed", query=topic, why=str(failure)[-600:])
                self.start(topic)

    def report(self) -> None:
        rows = {
            topic: sum(progress["numInputRows"] for progress in query.recentProgress)
            for topic, query in self._queries.items()
        }
        worker.report("rows", rows=rows)

    def read_to_the_end(self) -> None:
        for query in self._queries.values():
            query.processAllAvailable()
        for query in self._queries.values():
            query.stop()

    def save(self, topic: str) -> None:
        reader = self._spark.read.format("ledger").option("serviceUrl", self._told["service_url"])
        table = (
            reader.option("subscribe", topic)
            .load()
            .selectExpr("cast(key as string)", "cast(value as string)", "partition", "offset")
            .toArrow()
        )
        pq.write_table(table, f"{self._told['results']}/{topic}.parquet")


def main() -> None:
    told = worker.settings()
    heard = worker.listen()
    spark = session.start("chaos", Path(told["scratch"]), cores=2, task_failures_max=4)
    streams = Streams(spark, told)
    for topic in ("first", "second"):
        streams.start(topic)
    worker.report("ready")
    while True:
        streams.restart_failed()
        streams.report()
        try:
            assert heard.get(timeout=POLL_S) == "finish"
            break
        except queue.Empty:
            continue
    streams.read_to_the_end()
    for topic in ("first", "second"):
        streams.save(topic)
    worker.report("done")
    spark.stop()


if __name__ == "__main__":
    main()
