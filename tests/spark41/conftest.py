"""The session and topics of tests/spark, on Spark 4.1; with a newer one nothing is collected."""

from spark_ledger.spark.spark_version import ADMISSION_CONTROL
from tests.spark.conftest import keyed, spark, topic, topics  # noqa: F401

collect_ignore_glob = ["test_*.py"] if ADMISSION_CONTROL else []
