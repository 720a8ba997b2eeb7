"""Runs notebooks one after the other in one process, as a test does; a JVM serves them all.

python -m tests.spark.notebooks FOLDER SERVICE_URL NAME:PARAMETER=VALUE,... ...

It prints a line of JSON for each: its error if it failed, its output, and how many rows each topic
of the cluster has after it. The session has Delta Lake, as Databricks' has; a notebook that starts
a cluster of its own (SERVICE_URL is not for it) ends the session, too, and so has to come last.
The name `delta` is no notebook's: a query into Delta whose task fails of a row, what Spark says of
it as the error, and what is found in that as the output. `delta-sql`: what statements of SQL say.
"""

import contextlib
import io
import json
import sys
from pathlib import Path

from pyspark.sql import SparkSession

from spark_ledger import Admin, cause_of, sql_setup
from spark_ledger.errors import LedgerError
from spark_ledger_demo import session
from spark_ledger_demo.notebook.run import CellFailed, run
from spark_ledger_demo.notebook.source import read_notebook

ROOT = Path(__file__).resolve().parents[2]
DELTA, DELTA_SQL = "delta", "delta-sql"


def result(name: str, given: dict[str, str]) -> dict[str, str]:
    said, error = io.StringIO(), ""
    try:
        with contextlib.redirect_stdout(said):
            run(read_notebook(ROOT / "notebooks" / f"{name}.py"), given)
    except (CellFailed, LedgerError) as failure:
        error = str(failure)
    return {"error": error, "said": said.getvalue()}


def fails_in_delta(spark: SparkSession, service_url: str, folder: str) -> dict[str, str]:
    ours, topic = {"serviceUrl": service_url, "valueFormat": "arrow"}, "too-large-for-an-int"
    rows = spark.sql("SELECT 5000000000 AS number")
    rows.write.format("ledger").options(**ours).mode("append").save(topic)
    read = spark.readStream.format("ledger").options(**ours, startingOffsets="earliest")
    into = read.schema("number INT").load(topic).writeStream.format("delta")
    into = into.option("checkpointLocation", f"{folder}/checkpoint").trigger(availableNow=True)
    try:
        into.start(f"{folder}/table").awaitTermination()
    except Exception as error:
        return {"error": str(error), "said": str(cause_of(error))}
    return {"error": "", "said": ""}


def sql_in_delta(spark: SparkSession, service_url: str) -> dict[str, str]:
    """What of SQL works beside Delta's catalog: the outcome of each statement, as text."""
    rows = spark.sql("SELECT 'k' AS key, 'v' AS value")
    rows.write.format("ledger").option("serviceUrl", service_url).mode("append").save("in-delta")
    sql_setup(spark, service_url)
    given = f"serviceUrl '{service_url}', topic 'in-delta'"
    columns = "(key STRING, value STRING)"
    statements = {
        "table": f"CREATE TABLE ledger_table {columns} USING ledger",
        "with": f"SELECT count(*) FROM ledger_table WITH ({given})",
        "view": f"CREATE TEMPORARY VIEW ledger_view {columns} USING ledger OPTIONS ({given})",
        "insert": "INSERT INTO ledger_view VALUES ('k', 'w')",
        "read": "SELECT count(*) FROM ledger_view",
        "function": "SELECT count(*) FROM read_ledger('in-delta')",
    }
    outcomes = {}
    for name, statement in statements.items():
        try:
            outcomes[name] = str([tuple(row) for row in spark.sql(statement).collect()])
        except Exception as error:
            outcomes[name] = str(error).splitlines()[0]
    return {"error": "", "said": json.dumps(outcomes)}


def main() -> None:
    folder, service_url, *wanted = sys.argv[1:]
    scratch = Path(folder) / "spark"
    spark = session.start("notebooks", scratch, cores=2, delta=True, task_failures_max=4)
    for each in wanted:
        name, _, rest = each.partition(":")
        given = dict(word.split("=", 1) for word in rest.split(",") if word)
        given.setdefault("folder", f"{folder}/{name}")
        if name == DELTA:
            found = fails_in_delta(spark, service_url, given["folder"])
        elif name == DELTA_SQL:
            found = sql_in_delta(spark, service_url)
        else:
            found = result(name, given)
        with Admin(service_url) as admin:
            rows = {
                str(topic.name): admin.describe(str(topic.name)).rows for topic in admin.topics()
            }
        print(json.dumps({"name": name, "rows": rows, **found}), flush=True)


if __name__ == "__main__":
    main()
