"""The reading process: two queries over the topic `flights`.

One keeps count and mean arrival delay per hour, origin and carrier in a Delta table; its micro-
batches are merged, so a window shows before the watermark closes it and the last ones are there at
the end. The other writes the late flights to the topic `late-flights`.
"""

import queue
from pathlib import Path

from delta.tables import DeltaTable
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from spark_ledger.demo import session, worker
from spark_ledger.demo.flights import GROUP, LATE_MINUTES
from spark_ledger.demo.worker import Told

POLL_S = 0.2
VALUE = "time timestamp, origin string, carrier string, arr_delay bigint"
TABLE = (
    "hour_utc string, origin string, carrier string, "
    "flights bigint, arrived bigint, mean_delay double"
)


def flights(spark: SparkSession, told: Told) -> DataFrame:
    topic = (
        spark.readStream.format("ledger")
        .option("serviceUrl", told["service_url"])
        .option("subscribe", "flights")
        .option("startingOffsets", "earliest")
        .load()
    )
    value = F.col("value").cast("string")
    return topic.select("key", value.alias("value"), F.from_json(value, VALUE).alias("flight"))


def delays_by_hour(spark: SparkSession, told: Told) -> StreamingQuery:
    """Update mode: each micro-batch brings the new totals of the windows it changed."""
    windows = (
        flights(spark, told)
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
    table = DeltaTable.createIfNotExists(spark).location(told["table"])
    for column in TABLE.split(", "):
        name, kind = column.split()
        table = table.addColumn(name, kind)
    merged = table.execute()
    return (
        windows.writeStream.queryName("delays by hour")
        .outputMode("update")
        .option("checkpointLocation", f"{told['checkpoints']}/by-hour")
        .trigger(processingTime="2 seconds")
        .foreachBatch(lambda batch, _number: merge(merged, batch))
        .start()
    )


def merge(table: DeltaTable, batch: DataFrame) -> None:
    """Totals replace totals, so a batch that is merged again changes nothing."""
    batch = batch.persist()
    first = batch.agg(F.min("hour_utc")).first()
    if first is not None and first[0] is not None:
        same = " and ".join(f"t.{column} = b.{column}" for column in GROUP)
        only_new_files = f"t.hour_utc >= '{first[0]}'"  # lets Delta leave out older files
        (
            table.alias("t")
            .merge(batch.alias("b"), f"{only_new_files} and {same}")
            .whenMatchedUpdateAll()
            .whenNotMatchedInsertAll()
            .execute()
        )
    batch.unpersist()


def late_flights(spark: SparkSession, told: Told) -> StreamingQuery:
    return (
        flights(spark, told)
        .where(F.col("flight.arr_delay") >= LATE_MINUTES)
        .select("key", "value")
        .writeStream.queryName("late flights")
        .format("ledger")
        .option("serviceUrl", told["service_url"])
        .option("topic", "late-flights")
        .option("partitions", told["partitions"])
        .option("checkpointLocation", f"{told['checkpoints']}/late")
        .trigger(processingTime="1 second")
        .start()
    )


def follow(queries: list[StreamingQuery], heard: "queue.Queue[str]") -> None:
    """Read until told to finish; then read to the end of the topic and stop."""
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
        session.report_all(query)


def main() -> None:
    told = worker.settings()
    heard = worker.listen()
    spark = session.start("readers", Path(told["scratch"]), cores=2, delta=True)
    worker.report("ready")
    spark.streams.addListener(session.BatchListener())
    assert heard.get() == "read"
    follow([delays_by_hour(spark, told), late_flights(spark, told)], heard)
    worker.report("done")
    spark.stop()


if __name__ == "__main__":
    main()
