"""CREATE TABLE ... AS SELECT and INSERT INTO without an option: in a session of its own, that
LEDGER_SERVICE_URL tells the cluster."""

import os
import subprocess
import sys

import pytest

CTAS = """
import sys
from pyspark.sql import SparkSession

topic, folder = sys.argv[1:]
builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
builder = builder.config("spark.driver.bindAddress", "127.0.0.1")
builder = builder.config("spark.driver.host", "127.0.0.1")
spark = builder.config("spark.sql.warehouse.dir", folder).getOrCreate()
spark.sql(
    f"CREATE TABLE flights USING ledger AS SELECT '{topic}' AS topic, CAST(id AS STRING) AS value"
    " FROM range(5)"
)
spark.sql(f"INSERT INTO flights SELECT '{topic}', '5'")
found = spark.sql(f"SELECT value FROM flights WITH (subscribe '{topic}')").collect()
print(sorted(int(row.value) for row in found))
"""


@pytest.mark.slow
def test_ctas_and_insert_need_no_option_where_rows_name_their_topic(topics, topic, tmp_path):
    url = {"LEDGER_SERVICE_URL": topics.service_url}
    done = subprocess.run(
        [sys.executable, "-c", CTAS, topic, str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, **url, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split("\n")[-2] == "[0, 1, 2, 3, 4, 5]"
