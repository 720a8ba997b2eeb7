"""Every figure that Spark Ledger promises, measured here and printed beside its target.

    python benchmarks/spark.py                    ours, on an embedded cluster of three bookies
    python benchmarks/spark.py --peer kafka       the same workload on Kafka first, in the same run
    python benchmarks/spark.py --rows 200000      quicker, and less true

E=3 Qw=3 Qa=2, synced before every ack, compression none unless told; medians of three in one run.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pyspark.sql import SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable
from rich.console import Console
from rich.table import Table

from benchmarks import workload
from benchmarks.nothing import Nothing
from spark_ledger.local import LocalCluster

POLLS = 2_000
ONE_ROW_BATCHES = 40
WARM_UP_BATCHES = 10
TURNS = 3
MEMORY_BYTES = 2_000_000_000
MIB = 1024 * 1024


@dataclass(frozen=True)
class Figure:
    what: str
    measured: float
    target: float | None
    unit: str
    at_least: bool = False

    def row(self) -> tuple[str, str, str, str]:
        measured = f"{self.measured:,.0f}" if self.measured >= 100 else f"{self.measured:.3f}"
        measured = f"{measured} {self.unit}"
        if self.target is None:
            return self.what, measured, "none set", ""
        sign = ">=" if self.at_least else "<"
        reached = (self.measured >= self.target) if self.at_least else self.measured < self.target
        verdict = "[green]reached[/]" if reached else "[red]missed[/]"
        return self.what, measured, f"{sign} {self.target:,.0f}", verdict


def ledger(topic: str, url: str, compression: str, partitions: int) -> workload.Format:
    write = {"topic": topic, "partitions": str(partitions), "compression": compression}
    read = {"subscribe": topic, "startingOffsets": "earliest"}
    at = {"serviceUrl": url}
    return workload.Format("ledger", {**write, **at}, {**read, **at})


def empty_poll_ms(kind: workload.Format) -> list[float]:
    """What an idle query pays: latestOffset of a source that has read everything there is."""
    from pyspark_ledger import DefaultSource

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
    return times


def micro_batches_ms(
    spark: SparkSession, source: workload.Format, sink: workload.Format
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
        while query.exception() is None and _batches(query) < ONE_ROW_BATCHES:
            time.sleep(0.05)
        query.stop()
    if query.exception() is not None:
        raise query.exception()
    times = [p["durationMs"]["triggerExecution"] for p in query.recentProgress if _has_row(p)]
    return times[WARM_UP_BATCHES:ONE_ROW_BATCHES]


def _batches(query: Any) -> int:
    return sum(1 for progress in query.recentProgress if _has_row(progress))


def _has_row(progress: Any) -> bool:
    return progress["numInputRows"] > 0


def one_row_overhead_ms(spark: SparkSession, url: str) -> tuple[float, float]:
    """(through the ledger, through nothing): medians of one row in and one row out, a batch at a
    time; the two take turns, so that a noisy machine is noisy to both."""
    spark.dataSource.register(Nothing)
    nothing = workload.Format("nothing")
    into = ledger("one-row-in", url, "none", 1)
    workload.write(workload.rows(spark, 2 * ONE_ROW_BATCHES, 200, 1), into)
    one_at_a_time = {**into.read_options, "maxOffsetsPerTrigger": "1"}
    source = workload.Format("ledger", {}, one_at_a_time)
    sink = ledger("one-row-out", url, "none", 1)
    ours: list[float] = []
    baseline: list[float] = []
    for _ in range(TURNS):
        baseline += micro_batches_ms(spark, nothing, nothing)
        ours += micro_batches_ms(spark, source, sink)
    return statistics.median(ours), statistics.median(baseline)


def vm_hwm_mib(pid: int) -> float:
    """The most memory the process ever held, as Linux counts it."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise LookupError(f"no VmHWM in /proc/{pid}/status")


def measure(options: argparse.Namespace, console: Console) -> list[Figure]:
    with LocalCluster(bookies=3) as cluster:
        url = cluster.service_url
        kind = ledger("bench", url, options.compression, options.parts)
        spark = workload.session()
        frame = workload.rows(spark, options.rows, options.bytes, options.parts)
        rates = workload.measure(spark, kind, frame, options.runs)
        console.print(f"rows/s a run: {json.dumps(rounded(vars(rates)))}")
        written = options.runs * options.rows * options.bytes
        while written < MEMORY_BYTES:
            workload.write(frame, ledger("more", url, options.compression, options.parts))
            written += options.rows * options.bytes
        memory = max(vm_hwm_mib(bookie.pid) for bookie in cluster.bookies)
        polls = empty_poll_ms(kind)
        console.print(f"empty poll: p99 {sorted(polls)[int(0.99 * POLLS)]:.3f} ms")
        ours, baseline = one_row_overhead_ms(spark, url)
        console.print(f"one-row micro-batch: {ours:.0f} ms, through nothing {baseline:.0f} ms")
        spark.stop()
    return figures(rates.medians(), statistics.median(polls), ours - baseline, memory)


def figures(rates: dict[str, float], poll: float, overhead: float, memory: float) -> list[Figure]:
    return [
        Figure("write", rates["write"], 400_000, "rows/s", at_least=True),
        Figure("batch read", rates["batch_read"], 1_000_000, "rows/s", at_least=True),
        Figure("stream read (availableNow)", rates["stream_read"], None, "rows/s"),
        Figure("empty poll", poll, 1, "ms"),
        Figure("one-row micro-batch over nothing", overhead, 100, "ms"),
        Figure("bookie VmHWM after 2 GB", memory, 400, "MiB"),
    ]


def rounded(runs: dict[str, list[float]]) -> dict[str, list[int]]:
    return {name: [round(figure) for figure in values] for name, values in runs.items()}


def run_peer(name: str, options: argparse.Namespace) -> None:
    """The peer's brokers up, the same workload through them, and down again."""
    here = Path(__file__).resolve().parent / "peers"
    script = str(here / "peers.sh")
    environment = dict(os.environ, PYTHON=sys.executable)
    subprocess.run([script, "up", name, "3"], check=True, env=environment)
    try:
        command = [sys.executable, str(here / "spark_peer.py"), name]
        command += ["--rows", str(options.rows), "--runs", str(options.runs)]
        subprocess.run(command, check=True, env=environment)
    finally:
        subprocess.run([script, "down"], check=True, env=environment)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--bytes", type=int, default=200)
    parser.add_argument("--parts", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--compression", default="none", choices=["none", "lz4", "zstd"])
    parser.add_argument("--peer", choices=["kafka"], help="measure this peer first, same run")
    options = parser.parse_args()
    console = Console()
    if options.peer:
        run_peer(options.peer, options)
    results = measure(options, console)
    table = Table("figure", "here", "target", "", title=f"{options.rows:,} rows a run")
    for figure in results:
        table.add_row(*figure.row())
    console.print(table)
    print("command:", "python", "benchmarks/spark.py", *sys.argv[1:])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
