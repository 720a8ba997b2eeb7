"""Writing and reading through Spark, every format in turn: rows a second, processor time by part.

A turn is one run of one format. Before it the disk's write cache is emptied, so that nobody pays
for what another wrote; the processor time of a second after it counts too, for what goes on then.
A topic holds the rows of all runs when it is read. The time of a stream counts from its first
micro-batch on, for every format alike: what its query needs before that does not grow with the
rows (docs/decisions/0001-no-fork-server-of-sources.md). The rate with it is told beside.
"""

import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pyspark.sql import SparkSession

from benchmarks import contenders, workload
from benchmarks.contenders import DELTA, KAFKA, LEDGER, Contender
from benchmarks.figures import Figure
from benchmarks.processes import Below, adopt_orphans, cpu_s

PARTITIONS = 2
MEMORY = "6g"  # the rows are kept in it, 2 M of 1 KiB are 2.1 GB
SETTLE_S = 1.0
WARM_UP_ROWS = 10_000
WRITE_GOAL_KAFKA, READ_GOAL_KAFKA, GOAL_DELTA = 5.0, 1.8, 1.0
WRITE, BATCH_READ, STREAM_READ = "write", "batch read", "stream read"
STREAM_QUERY = "stream read, with its query's start"
ROWS_A_SECOND = "rows/s"


@dataclass
class Turns:
    """Of one action of one format: a figure for each run. CPU is seconds a million rows."""

    rows_a_s: list[float] = field(default_factory=list)
    cpu: dict[str, list[float]] = field(default_factory=dict)

    def median(self) -> float:
        return statistics.median(self.rows_a_s)


Measured = dict[tuple[str, str], Turns]
"""By action and format."""


def rates(
    *,
    rows: int,
    value_bytes: int,
    compression: str,
    runs: int,
    peers: Sequence[str],
    parts: Sequence[str],
) -> list[Figure]:
    """One case: rows of one size with one compression. What is only read is written first, and
    that is not told."""
    spark = workload.session(contenders.spark_conf(peers), memory=MEMORY)
    warm_up = workload.kept(workload.rows(spark, WARM_UP_ROWS, value_bytes, 2), WARM_UP_ROWS)
    frame = workload.kept(workload.rows(spark, rows, value_bytes, PARTITIONS), rows)
    measured: Measured = {}
    with contenders.running(peers, compression, spark, "bench", PARTITIONS) as found:
        taking = Taking(spark, found, measured)
        adopt_orphans()
        taking.turns(WRITE, WARM_UP_ROWS, 1, lambda one: workload.write(warm_up, one.format))
        measured.clear()
        taking.turns(WRITE, rows, runs, lambda one: workload.write(frame, one.format))
        if "read" in parts:
            total = runs * rows + WARM_UP_ROWS
            read = workload.read_batch
            taking.turns(BATCH_READ, total, runs, lambda one: read(spark, one.format))
            taking.turns(STREAM_QUERY, total, runs, lambda one: taking.stream(one, total))
        spark.stop()
    label = f"{value_bytes} B, {compression}"
    if "write" not in parts:
        measured = {key: turns for key, turns in measured.items() if key[0] != WRITE}
    return [
        *compared(measured, label, judged_by_delta=compression == "none"),
        *cpu(measured, label),
    ]


@dataclass
class Taking:
    """Turns: each action of each format, one after the other."""

    spark: SparkSession
    found: Sequence[Contender]
    measured: Measured
    below: Below = field(default_factory=lambda: Below(os.getpid()))

    def turns(self, action: str, rows: int, runs: int, act: Callable[[Contender], object]) -> None:
        for _ in range(runs):
            for one in self.found:
                self._turn(action, one, rows, act)
        for one in self.found:
            per_run = [round(rate) for rate in self.measured[action, one.name].rows_a_s]
            print(f"{one.name}, {action}, rows/s a run: {json.dumps(per_run)}", flush=True)

    def stream(self, one: Contender, total: int) -> None:
        self.told(one, total, workload.read_stream(self.spark, one.format))

    def told(self, one: Contender, total: int, streamed: workload.Streamed) -> None:
        """The rate of its micro-batches alone."""
        assert streamed.rows == total, f"{one.name} streamed {streamed.rows} of {total} rows"
        turns = self.measured.setdefault((STREAM_READ, one.name), Turns())
        turns.rows_a_s.append(total / streamed.batches_s)

    def _turn(
        self, action: str, one: Contender, rows: int, act: Callable[[Contender], object]
    ) -> None:
        os.sync()
        before = self._cpu_s(one)
        took_s = workload.seconds(lambda: act(one))
        time.sleep(SETTLE_S)
        turns = self.measured.setdefault((action, one.name), Turns())
        turns.rows_a_s.append(rows / took_s)
        for part, used in self._cpu_s(one).items():
            turns.cpu.setdefault(part, []).append((used - before[part]) / rows * 1e6)

    def _cpu_s(self, one: Contender) -> dict[str, float]:
        """Python is all below this process that is neither Spark's JVM nor stores."""
        jvm = workload.jvm_pid(self.spark)
        others = {jvm, *(pid for each in self.found for pid in each.pids)}
        used = {"Spark's JVM": cpu_s(jvm), "Python": self.below.cpu_s(others)}
        used |= one.cpu_s()
        return used


def compared(measured: Measured, label: str, *, judged_by_delta: bool) -> list[Figure]:
    """Ours beside each peer's. Delta's goal counts without compression, where it is as it comes."""
    figures = []
    for action in (WRITE, BATCH_READ, STREAM_READ, STREAM_QUERY):
        if (action, LEDGER) not in measured:
            continue
        ours = measured[action, LEDGER].median()
        beside = [name for name in (KAFKA, DELTA) if (action, name) in measured]
        for name in beside:
            goal = WRITE_GOAL_KAFKA if action == WRITE else READ_GOAL_KAFKA
            if action == STREAM_QUERY:
                goal = None
            elif name == DELTA:
                goal = GOAL_DELTA if judged_by_delta and action != BATCH_READ else None
            theirs = measured[action, name].median()
            what = f"{action}, {label}"
            figures.append(Figure(what, ours, ROWS_A_SECOND, goal, True, theirs, name))
        if not beside:
            figures.append(Figure(f"{action}, {label}", ours, ROWS_A_SECOND))
    return figures


def cpu(measured: Measured, label: str) -> list[Figure]:
    return [
        Figure(f"{action}, {label}: {name}, {part}", statistics.median(used), "CPU-s a M rows")
        for (action, name), turns in measured.items()
        for part, used in turns.cpu.items()
    ]
