"""The process of `make.py` that is killed in the middle of everything it does.

It runs a streaming query and a batch job, whose tasks come to a row at which they wait for ever,
after they have sent entries; and it writes to a ledger that it never closes. It is told one JSON
object as its argument: url, checkpoints, folder. What it has come to are files in `folder`.
"""

import json
import sys
import threading
import time
from pathlib import Path

from pyspark.sql import Column, SparkSession
from pyspark.sql.functions import udf

import spark_ledger
from spark_ledger import LedgerClient
from tests.stored import contents
from tests.stored.session import session

QUERY, JOB = "interrupted", "abandoned"
WAITS_AT = 400
"""Spark hands a Python function 100 rows at a time: of rows 120 to 420 in two partitions each task
has given its first 100 on when it comes to this one."""
SMALL_ENTRIES = "1m"
"""Of memory for a task, so that it sends entries of about 200 KiB as it goes on."""


def waiting(folder: Path, name: str) -> Column:
    reached = str(folder / f"{name}.waits")

    @udf("string")
    def given_on(value: str) -> str:
        if int(value.split()[0]) >= WAITS_AT:
            open(reached, "w").close()
            while True:
                time.sleep(1)
        return value

    return given_on("value").alias("value")


def run_query(spark: SparkSession, url: str, folder: Path, checkpoints: Path) -> None:
    rows = contents.source(spark, url, QUERY).selectExpr("key", "string(value) AS value")
    rows = rows.select("key", waiting(folder, QUERY))
    contents.start(rows, url, QUERY, checkpoints, maxInFlightBytes=SMALL_ENTRIES)


def run_job(spark: SparkSession, url: str, folder: Path) -> None:
    rows = contents.numbered(spark, 120, 420, repeated=700).select("key", waiting(folder, JOB))
    contents.append(rows, url, JOB, maxInFlightBytes=SMALL_ENTRIES)


def write_ledger(url: str, folder: Path) -> None:
    writer = LedgerClient(url).create_ledger(4, 3, 2, metadata={"name": "killed"})
    for number in range(contents.ENTRIES):
        writer.append(contents.payload("killed", number))
    (folder / "ledger.new").write_text(str(writer.ledger_id))
    (folder / "ledger.new").rename(folder / "ledger")


def main() -> None:
    told = json.loads(sys.argv[1])
    url, folder = told["url"], Path(told["folder"])
    spark = session("local[4]", folder / "spark")
    run_query(spark, url, folder, Path(told["checkpoints"]))
    job = spark_ledger.in_session(spark, lambda: run_job(spark, url, folder))
    threading.Thread(target=job, daemon=True).start()
    write_ledger(url, folder)
    while True:
        time.sleep(1)


if __name__ == "__main__":
    main()
