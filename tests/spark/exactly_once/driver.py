"""The driver process of a case: queries from steps into a topic, as it is told over its stdin.

Told one JSON object a line: {"do": "start", "query", "topic", "several", "checkpoint", "steps",
"gates", "format"}, {"do": "stop", "query"}, {"do": "read", "topics", "into"}. Each is answered by
the event `did`, or `failed_to` with why; a query that ended with an error is the event `failed`.
"""

import json
import os
import queue
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from spark_ledger.spark.worker import worker_python
from spark_ledger_demo import worker
from spark_ledger_demo.worker import Settings
from tests.spark.exactly_once.failing_sink import FailingLedger
from tests.spark.exactly_once.source import PLACE_BYTES, ROW_AT, ROW_BYTES, StepsSource

POLL_S = 0.02
PARTITIONS = 3
IN_FLIGHT = "4m"  # so that a task sends entries long before its end
OUTAGE = "60s"  # less than what a test waits for a query to fail
BATCH_ROWS = "50"  # so that rows reach the sink while their source waits
FEW = 20  # of so many rows each topic but the first has one


def start_spark(scratch: Path, master: str, conf: dict[str, str]) -> SparkSession:
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = worker_python()
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    os.environ["SPARK_LOCAL_DIRS"] = str(scratch / "local")
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": "512m",
        "spark.driver.extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Xshare:auto",
        "spark.sql.warehouse.dir": str(scratch / "warehouse"),
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.execution.arrow.maxRecordsPerBatch": BATCH_ROWS,
        **conf,
    }
    builder = SparkSession.builder.master(master).appName("exactly once")
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("WARN")
    spark.dataSource.register(StepsSource)
    spark.dataSource.register(FailingLedger)
    return spark


class Driver:
    def __init__(self, spark: SparkSession, service_url: str) -> None:
        self._spark = spark
        self._service_url = service_url
        self._queries: dict[str, StreamingQuery] = {}

    def report_failures(self) -> None:
        for name, query in list(self._queries.items()):
            failure = query.exception()
            if failure is not None:
                del self._queries[name]
                worker.report("failed", query=name, why=str(failure))

    def start(self, told: Settings) -> None:
        rows = self._spark.readStream.format("steps").option("steps", told["steps"])
        loaded = rows.option("gates", told["gates"]).load()
        if told["several"]:
            number = f"cast(substring(value, {ROW_AT + 1}, {ROW_BYTES}) AS INT) % {FEW}"
            chosen = f"if({number} < {told['several']}, {number}, 0)"
            loaded = loaded.selectExpr("*", f"concat('{told['topic']}-', {chosen}) AS topic")
        writer = loaded.writeStream.format(told["format"]).option("serviceUrl", self._service_url)
        if not told["several"]:
            writer = writer.option("topic", told["topic"])
        writer = writer.option("partitions", PARTITIONS).option("maxInFlightBytes", IN_FLIGHT)
        writer = writer.option("outageTimeout", OUTAGE)
        writer = writer.options(**told.get("options", {}))
        writer = writer.option("checkpointLocation", told["checkpoint"])
        self._queries[told["query"]] = writer.queryName(told["query"]).start()

    def stop(self, told: Settings) -> None:
        query = self._queries.pop(told["query"], None)
        if query is not None:
            query.stop()

    def read(self, told: Settings) -> None:
        """The beginning and the length of every value, and where it is."""
        reader = self._spark.read.format("ledger").option("serviceUrl", self._service_url)
        values = reader.option("subscribe", told["topics"]).load()
        place = f"substring(cast(value as string), 1, {PLACE_BYTES}) AS place"
        where = ("topic", "partition", "offset")
        rows = values.selectExpr(place, "length(value) AS bytes", *where)
        pq.write_table(rows.toArrow(), told["into"])


def main() -> None:
    told = worker.settings()
    heard = worker.listen()
    conf: dict[str, Any] = told.get("conf", {})
    driver = Driver(start_spark(Path(told["scratch"]), told["master"], conf), told["service_url"])
    worker.report("ready")
    while True:
        driver.report_failures()
        try:
            command = json.loads(heard.get(timeout=POLL_S))
        except queue.Empty:
            continue
        try:
            getattr(driver, command["do"])(command)
        except Exception as error:
            worker.report("failed_to", do=command["do"], why=str(error))
        else:
            worker.report("did", do=command["do"])


if __name__ == "__main__":
    main()
