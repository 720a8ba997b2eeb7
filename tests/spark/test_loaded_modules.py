"""What a process of Spark's loads to plan and read a stream, and what it leaves alone."""

import subprocess
import sys
from collections.abc import Iterator

import pyspark
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

from tests.spark.by_hand import Cluster

NOT_NEEDED = (
    "grpc",
    "numpy.ma",
    "pandas",
    "pyarrow.compute",
    "spark_ledger.spark.rows.typed_values",
    "spark_ledger.topic.checkpointer",
    "spark_ledger.topic.commit.commit",
    "spark_ledger.topic.upkeep.janitor",
    "spark_ledger.topic.schema.registry",
    "spark_ledger.topic.subscription.subscriptions",
    "typer",
)
LOADED = f"""
loaded = [module for module in {NOT_NEEDED} if module in sys.modules]
assert not loaded, loaded
"""
OFFERS = """
import sys
from pyspark_ledger import DefaultSource
assert len(DefaultSource({"subscribe": "any"}).schema()) == 7
"""
PLANS_AND_READS = """
import sys
from pyspark_ledger import DefaultSource
given = dict(zip(("serviceUrl", "subscribe"), sys.argv[1:]))
source = DefaultSource({**given, "startingOffsets": "earliest"})
run = source.streamReader(source.schema())
start = run.initialOffset()
end = run.latestOffset(start, run.getDefaultReadLimit())
run.reportLatestOffset()
batches = [batch for part in run.partitions(start, end) for batch in run.read(part)]
assert sum(batch.num_rows for batch in batches) == 2000
run.stop()
"""
NO_METADATA_IS_READ = """
from importlib import metadata
def refuse(*arguments):
    raise AssertionError("the metadata of all that is installed is read")
metadata.FastPath.search = refuse
"""


def run(code: str, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )
    assert not done.returncode, done.stderr


def test_a_source_that_says_its_columns_loads_nothing_that_connects():
    connects = "loaded += [m for m in ('spark_ledger.topic.client', 'kazoo') if m in sys.modules]\n"
    run(OFFERS + LOADED + connects + "assert not loaded, loaded\n")


def test_a_source_that_plans_and_reads_loads_neither_grpc_nor_what_only_writers_need(
    cluster, topic
):
    Cluster(cluster.service_url).write(topic, range(2000), partitions=2)
    run(PLANS_AND_READS + LOADED, cluster.service_url, topic)


def test_no_package_reads_the_metadata_of_all_that_is_installed():
    run(NO_METADATA_IS_READ + "import spark_ledger.spark.read.source, spark_ledger.process\n")


class Places(DataSource):
    """One row: where the process that plans and the one that reads have PySpark from."""

    @classmethod
    def name(cls) -> str:
        return "places"

    def schema(self) -> str:
        return "plans STRING, reads STRING"

    def streamReader(self, schema) -> "PlacesReader":
        return PlacesReader()


class PlacesReader(DataSourceStreamReader):
    def initialOffset(self) -> dict:
        return {"rows": 0}

    def latestOffset(self, start, limit) -> dict:
        return {"rows": 1}

    def partitions(self, start: dict, end: dict) -> list[InputPartition]:
        planned = InputPartition(pyspark.__file__)
        return [planned] if end["rows"] > start["rows"] else []

    def read(self, partition: InputPartition) -> Iterator[tuple[str, str]]:
        yield partition.value, pyspark.__file__


def test_a_query_plans_and_reads_with_pyspark_from_where_it_has_byte_code(spark, tmp_path):
    spark.dataSource.register(Places)
    found = spark.readStream.format("places").load().writeStream.format("memory")
    found = found.queryName("places_found").option("checkpointLocation", str(tmp_path))
    assert found.trigger(availableNow=True).start().awaitTermination(120)
    (row,) = spark.table("places_found").collect()
    assert (row.plans, row.reads) == (pyspark.__file__, pyspark.__file__)
