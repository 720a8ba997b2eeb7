"""One Spark session for all tests of this folder, and topics of their own for each."""

import itertools
import os
import time
from collections.abc import Callable, Iterator

import pytest
from pyspark.sql import DataFrame, SparkSession

from spark_ledger.local import LocalCluster
from tests.spark.topics import SparkTopics

_numbers = itertools.count()
MACHINES_ZONE = "Asia/Kolkata"
"""Of this process, the JVM and Spark's workers: no full hour from UTC."""
SESSIONS_ZONE = {
    "test_batch": "America/New_York",
    "test_sink": "Pacific/Chatham",
    "test_source_batch": MACHINES_ZONE,
    "test_stream": "America/New_York",
    "test_typed_values": "America/New_York",
}
"""By the file of tests; UTC for the others."""


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """Two cores, loopback only, nothing registered: format("ledger") is found by its package."""
    before = os.environ.get("TZ")
    os.environ["TZ"] = MACHINES_ZONE
    time.tzset()
    session = (
        SparkSession.builder.master("local[2]")
        .appName("spark-ledger tests")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.python.unix.domain.socket.enabled", "true")  # as docs/spark.md advises
        .config("spark.sql.session.timeZone", "UTC")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()
    if before is None:
        del os.environ["TZ"]
    else:
        os.environ["TZ"] = before
    time.tzset()


@pytest.fixture(scope="module", autouse=True)
def sessions_zone(request: pytest.FixtureRequest) -> None:
    """The file's zone of the session, if its tests have one."""
    zone = SESSIONS_ZONE.get(request.module.__name__.rpartition(".")[2], "UTC")
    active = SparkSession.getActiveSession()
    if zone != "UTC" or active is not None:
        spark = active or request.getfixturevalue("spark")
        spark.conf.set("spark.sql.session.timeZone", zone)


@pytest.fixture
def topics(spark: SparkSession, cluster: LocalCluster) -> SparkTopics:
    return SparkTopics(spark, cluster.service_url)


@pytest.fixture
def topic() -> str:
    """A name that no other test uses."""
    return f"topic-{next(_numbers)}"


@pytest.fixture
def keyed(spark: SparkSession) -> Callable[..., DataFrame]:
    """`keyed(rows, keys=5, tasks=2, start=0)`: rows numbered in `value`, keys as text."""

    def make(rows: int, keys: int = 5, tasks: int = 2, start: int = 0) -> DataFrame:
        numbers = spark.range(start, start + rows, 1, tasks)
        return numbers.selectExpr(
            f"concat('k', cast(id % {keys} as string)) AS key", "cast(id as string) AS value"
        )

    return make
