"""How late each airline departs, by hour and airport: a topic of JSON events to a Delta table.

    spark-submit FILE TOPIC AIRLINES_CSV TABLE CHECKPOINT

This job stands in two files. delays_on_kafka.py reads Kafka; delays_on_ledger.py is its port, and
differs in two lines. An event is the JSON text of one departure, in `value`. Micro-batches are
merged into the table by hour, airport and airline, so a batch that Spark repeats changes nothing.
"""

import os
import sys

from delta.tables import DeltaTable
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

TOPIC, AIRLINES, TABLE, CHECKPOINT = sys.argv[1:]
EVENT = "time TIMESTAMP, carrier STRING, origin STRING, dep_delay INT, arr_delay INT"
SAME_ROW = "old.hour = new.hour AND old.origin = new.origin AND old.airline = new.airline"

spark = SparkSession.builder.getOrCreate()
airlines = spark.read.option("header", True).csv(AIRLINES)

events = (
    spark.readStream.format("kafka")
    .option("kafka.bootstrap.servers", os.environ["KAFKA_SERVERS"])
    .option("subscribe", TOPIC)
    .option("startingOffsets", "earliest")
    .option("maxOffsetsPerTrigger", 50_000)
    .load()
)
flights = (
    events.select(F.from_json(F.col("value").cast("string"), EVENT).alias("event"))
    .select("event.*")
    .withWatermark("time", "6 hours")
)
delays = (
    flights.join(F.broadcast(airlines), "carrier")
    .groupBy(F.window("time", "1 hour"), "origin", F.col("name").alias("airline"))
    .agg(
        F.count("*").alias("flights"),
        F.count("dep_delay").alias("departed"),
        F.avg("dep_delay").alias("mean_delay"),
        F.max("arr_delay").alias("worst_arrival"),
    )
    .select(F.col("window.start").alias("hour"), "*")
    .drop("window")
)
table = DeltaTable.createIfNotExists(spark).location(TABLE).addColumns(delays.schema).execute()


def merge(batch: DataFrame, batch_id: int) -> None:
    (
        table.alias("old")
        .merge(batch.alias("new"), SAME_ROW)
        .whenMatchedUpdateAll()
        .whenNotMatchedInsertAll()
        .execute()
    )


query = (
    delays.writeStream.foreachBatch(merge)
    .outputMode("update")
    .option("checkpointLocation", CHECKPOINT)
    .trigger(availableNow=True)
    .start()
)
query.awaitTermination()
