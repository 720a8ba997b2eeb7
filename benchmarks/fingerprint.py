"""What the fingerprint of a streaming query's batch costs, beside the whole write of the same rows.

    python benchmarks/fingerprint.py

Processor time of a row. The fingerprint, and the entries that the same batches of 10,000 rows make
(as Spark hands them over): of one thread, medians. The whole streaming write: of all processes
(Spark's JVM with its source, which is Parquet without compression, Python, three bookies,
ZooKeeper), by how much more five micro-batches cost than one; the median of three.
"""

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pyspark.sql import SparkSession

from benchmarks import workload
from benchmarks.processes import Below, adopt_orphans
from spark_ledger.local import LocalCluster
from spark_ledger.topic.commit.fingerprint import row_hashes
from spark_ledger.topic.entry.batch_encoder import BatchEncoder
from spark_ledger.topic.entry.routing import Router, Routing

ROWS = 10_000
TURNS = 15
PARTITIONS = 2
FILE_BYTES = 50 << 20
FILES_A_BATCH, BATCHES = 2, 5
WRITES = 3
SETTLE_S = 1.0


def texts(length: int, spread: int) -> pa.Array:
    """Hexadecimal text of about so many bytes."""
    rng = np.random.default_rng(length)
    cuts = rng.integers(0, spread + 1, ROWS).tolist()
    return pa.array([os.urandom(length // 2 + 1).hex()[: length - cut] for cut in cuts])


def shapes() -> dict[str, pa.RecordBatch]:
    rng = np.random.default_rng(1)
    keys = texts(12, 4)
    numbers = {f"n{i}": pa.array(rng.random(ROWS)) for i in range(8)}
    words = {f"w{i}": texts(10, 5) for i in range(4)}
    return {
        "key, 200 bytes": pa.record_batch({"key": keys, "value": texts(200, 0)}),
        "key, 150 to 200 bytes": pa.record_batch({"key": keys, "value": texts(200, 50)}),
        "key, 1 KiB": pa.record_batch({"key": keys, "value": texts(1024, 0)}),
        "12 typed columns": pa.record_batch({**numbers, **words}),
    }


def ns_a_row(work: Callable[[], object]) -> float:
    """The median of some turns, after one that is not counted."""
    took = []
    for _ in range(TURNS + 1):
        began = time.thread_time_ns()
        work()
        took.append((time.thread_time_ns() - began) / ROWS)
    return statistics.median(took[1:])


def encode(rows: pa.RecordBatch) -> None:
    encoder = BatchEncoder(Router(Routing.HASH, PARTITIONS, 0), lambda: 0, key_filters=True)
    typed = "value" not in rows.schema.names
    keys = None if typed else rows.column("key").cast(pa.binary())
    values = rows if typed else rows.column("value").cast(pa.binary())
    for entry in (*encoder.add(keys, values), *encoder.flush()):
        entry.payload([0] * len(entry.shares))


class Writes:
    """Streaming writes of one shape of rows into a topic."""

    def __init__(self, spark: SparkSession, url: str, folder: Path, rows: pa.RecordBatch) -> None:
        self._spark, self._url, self._folder = spark, url, folder
        self._typed = "value" not in rows.schema.names
        self._source, self._runs = folder / "in", 0
        self._source.mkdir(parents=True)
        slices = max(1, FILE_BYTES // rows.nbytes)
        self.batch_rows = slices * rows.num_rows * FILES_A_BATCH
        for number in range(FILES_A_BATCH * BATCHES):
            path = self._source / f"{number:03d}.parquet"
            table = pa.Table.from_batches([rows] * slices)
            pyarrow.parquet.write_table(table, path, compression="none", use_dictionary=False)

    def ns_a_row(self) -> float:
        """Beyond what a query and its first micro-batch cost."""
        one, all_ = self._cpu_s(1), self._cpu_s(BATCHES)
        return (all_ - one) / ((BATCHES - 1) * self.batch_rows) * 1e9

    def _cpu_s(self, batches: int) -> float:
        self._runs += 1
        names = "0" * 2 + f"[0-{FILES_A_BATCH * batches - 1}]"
        shown = self._spark.read.parquet(str(self._source)).schema
        reader = self._spark.readStream.schema(shown).option("maxFilesPerTrigger", FILES_A_BATCH)
        rows = reader.parquet(f"{self._source}/{names}.parquet")
        options = {"serviceUrl": self._url, "partitions": PARTITIONS}
        options |= {"valueFormat": "arrow"} if self._typed else {}
        writer = rows.writeStream.format("ledger").options(**options).trigger(availableNow=True)
        writer.option("checkpointLocation", str(self._folder / f"checkpoint-{self._runs}"))
        os.sync()
        time.sleep(SETTLE_S)
        below = Below(os.getpid())
        before = below.cpu_s()
        query = writer.start(f"{self._folder.name}-{self._runs}")
        query.awaitTermination()
        assert sum(one["numInputRows"] for one in query.recentProgress) == batches * self.batch_rows
        time.sleep(SETTLE_S)  # what goes on then counts too
        return below.cpu_s() - before


def main() -> None:
    adopt_orphans()
    spark = workload.session()
    print(f"{'rows':24} {'fingerprint, ns':>16} {'entries, ns':>12} {'write, ns':>10} {'share':>7}")
    with (
        LocalCluster(bookies=3, autorecovery=False) as cluster,
        tempfile.TemporaryDirectory(dir="/var/tmp") as folder,
    ):
        for number, (name, rows) in enumerate(shapes().items()):
            writes = Writes(spark, cluster.service_url, Path(folder) / f"rows-{number}", rows)
            writes.ns_a_row()  # code that the JVM has not compiled yet
            written = statistics.median(writes.ns_a_row() for _ in range(WRITES))
            hashed = ns_a_row(lambda rows=rows: row_hashes(rows))
            encoded = ns_a_row(lambda rows=rows: encode(rows))
            share = hashed / written
            print(
                f"{name:24} {hashed:16.0f} {encoded:12.0f} {written:10.0f} {share:7.1%}", flush=True
            )
        spark.stop()


if __name__ == "__main__":
    main()
