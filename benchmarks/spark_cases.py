"""What Spark Ledger promises of Spark beside rates: projection, small batches, polls, memory."""

import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable

from benchmarks import workload
from benchmarks.contenders import ledger
from benchmarks.figures import Figure
from benchmarks.nothing import Nothing
from benchmarks.processes import below, most_memory_mib
from spark_ledger.local import LocalCluster

PROJECTED = "value BINARY"
PROJECTION_GOAL = 1.3
PROJECTION_READS = 7
TURNS = 4
WARM_UP_BATCHES = 10
ONE_ROW_GOAL_MS = 50
POLLS = 2_000
POLL_GOAL_MS = 1
KIB = 1024
SAMPLE_S = 0.1
WORKER_GOAL_MIB, BOOKIE_GOAL_MIB = 600, 400
DRIVER_MEMORY = "1g"


def projection(*, rows: int, runs: int) -> list[Figure]:
    """All of Kafka's columns, and `value` alone, of the rows of so many writes, in turns; the first
    of each kind is not counted."""
    with LocalCluster(bookies=3, autorecovery=False) as cluster:
        kind = ledger("bench", cluster.service_url)
        spark = workload.session()
        for _ in range(runs):
            workload.write(workload.rows(spark, rows, 200, 2), kind)
        whole: list[float] = []
        projected: list[float] = []
        for _ in range(1 + PROJECTION_READS):
            for rates, schema in ((whole, None), (projected, PROJECTED)):
                took_s = workload.seconds(
                    lambda schema=schema: workload.read_batch(
                        spark, kind, columns=("*",), schema=schema
                    )
                )
                rates.append(rows * runs / took_s)
        spark.stop()
    ours, all_columns = statistics.median(projected[1:]), statistics.median(whole[1:])
    print("all columns, rows/s a read:", list(map(round, whole)))
    print("value, rows/s a read:", list(map(round, projected)))
    what = "read of `value` alone"
    return [Figure(what, ours, "rows/s", PROJECTION_GOAL, True, all_columns, "all columns")]


def micro(*, batches: int) -> list[Figure]:
    """One row in and one row out, a batch at a time, through the ledger and through nothing; the
    two take turns, so that a noisy machine is noisy to both."""
    each = -(-batches // TURNS) + WARM_UP_BATCHES
    with LocalCluster(bookies=3, autorecovery=False) as cluster:
        spark = workload.session()
        spark.dataSource.register(Nothing)
        nothing = workload.Format("nothing")
        into = ledger("one-row-in", cluster.service_url, partitions=1)
        workload.write(workload.rows(spark, 2 * each, 200, 1), into)
        one_at_a_time = {**into.read_options, "maxOffsetsPerTrigger": "1"}
        source = workload.Format("ledger", {}, one_at_a_time)
        sink = ledger("one-row-out", cluster.service_url, partitions=1)
        ours: list[float] = []
        baseline: list[float] = []
        for _ in range(TURNS):
            baseline += micro_batches_ms(spark, nothing, nothing, each)
            ours += micro_batches_ms(spark, source, sink, each)
        spark.stop()
    more = statistics.median(ours) - statistics.median(baseline)
    return [
        Figure("one-row batch, more than through nothing", more, "ms", ONE_ROW_GOAL_MS),
        Figure(f"one-row batch, median of {len(ours)}", statistics.median(ours), "ms"),
        Figure("one-row batch through nothing", statistics.median(baseline), "ms"),
    ]


def micro_batches_ms(
    spark: SparkSession, source: workload.Format, sink: workload.Format, batches: int
) -> list[float]:
    """The times of one-row micro-batches of one query, the first ones left out."""
    frame = spark.readStream.format(source.name).options(**source.read_options).load()
    with tempfile.TemporaryDirectory() as checkpoint:
        query = (
            frame.selectExpr("key", "value")
            .writeStream.format(sink.name)
            .options(**sink.write_options)
            .option("checkpointLocation", checkpoint)
            .start()
        )
        while query.exception() is None and len(_times_ms(query)) < batches:
            time.sleep(0.05)
        query.stop()
    if query.exception() is not None:
        raise query.exception()
    return _times_ms(query)[WARM_UP_BATCHES:batches]


def _times_ms(query: Any) -> list[float]:
    batches = (progress for progress in query.recentProgress if progress["numInputRows"] > 0)
    return [progress["durationMs"]["triggerExecution"] for progress in batches]


def poll(*, partitions: int) -> list[Figure]:
    """What an idle query pays: latestOffset of a source that has read everything there is."""
    from pyspark_ledger import DefaultSource

    with LocalCluster(bookies=3, autorecovery=False) as cluster:
        kind = ledger("bench", cluster.service_url, partitions=partitions)
        spark = workload.session()
        workload.write(workload.rows(spark, 10 * partitions, 200, 1), kind)
        spark.stop()
        source = DefaultSource(dict(kind.read_options))
        reader = source.streamReader(source.schema())
        end = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
        times = []
        for _ in range(POLLS):
            started = time.perf_counter()
            answer = reader.latestOffset(end, ReadAllAvailable())
            times.append(1e3 * (time.perf_counter() - started))
            assert answer == end
        reader.stop()
    what = f"idle poll, {partitions:,} partitions"
    return [
        Figure(f"{what}, median of {POLLS:,}", statistics.median(times), "ms", POLL_GOAL_MS),
        Figure(f"{what}, p99", sorted(times)[POLLS * 99 // 100], "ms"),
    ]


def fill(*, url: str, rows: int) -> None:
    """A topic of rows of 1 KiB, by a process that is not there any more when they are read."""
    spark = workload.session()
    workload.write(workload.rows(spark, rows, KIB, 2), ledger("large", url))
    spark.stop()


def memory(*, gb: float) -> list[Figure]:
    """The most memory of each process while a large topic is read, all columns, both ways."""
    rows = int(gb * 1e9 / KIB)
    with LocalCluster(bookies=3, autorecovery=False) as cluster:
        script = str(Path(__file__).with_name("spark.py"))
        options = json.dumps({"url": cluster.service_url, "rows": rows})
        with tempfile.NamedTemporaryFile() as result:
            command = [sys.executable, script, "--case", "fill", options, result.name]
            subprocess.run(command, check=True)
        spark = workload.session(memory=DRIVER_MEMORY)
        kind = ledger("large", cluster.service_url)
        with Watched(workload.jvm_pid(spark)) as watched:
            workload.read_batch(spark, kind, columns=("*",))
            assert workload.read_stream(spark, kind).rows == rows
        spark.stop()
        bookies = max(most_memory_mib(one.pid) for one in cluster.bookies if one.pid is not None)
    jvm = watched.most_mib.pop(watched.pid)
    workers = max(watched.most_mib.values())
    topic = f"while {gb:g} GB are read"
    count = len(watched.most_mib)
    return [
        Figure(f"largest of {count} Python processes {topic}", workers, "MiB", WORKER_GOAL_MIB),
        Figure(f"Spark's JVM (heap of {DRIVER_MEMORY} at most) {topic}", jvm, "MiB"),
        Figure(
            f"largest bookie, {gb:g} GB written and read twice", bookies, "MiB", BOOKIE_GOAL_MIB
        ),
    ]


class Watched:
    """The most memory that a process and all below it ever held, looked at until they end."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.most_mib: dict[int, float] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory")

    def __enter__(self) -> "Watched":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(SAMPLE_S):
            for pid in (self.pid, *below(self.pid)):
                try:
                    self.most_mib[pid] = most_memory_mib(pid)
                except (OSError, LookupError):  # it has just ended; what it held is known
                    continue
