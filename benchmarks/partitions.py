"""Reading what 200 small tasks wrote over more and more partitions, beside Kafka in the same run.

    python benchmarks/partitions.py                       everything, in 8 to 17 minutes
    python benchmarks/partitions.py --with none           without Kafka
    python benchmarks/partitions.py --partitions 1 100 --runs 1

For each number of partitions: the seconds of a batch read, of a stream (availableNow, without its
query's start) and of one micro-batch of 1,000 rows, medians of turns that the formats take; and how
many payload bytes readers were given for each stored byte of the entries that the plan covers,
counted by the tasks of the same plans, read once more in this process. E=3 Qw=3 Qa=2; Kafka has
replication 3. 1,000 partitions are read by us alone (Spark makes a task for each of Kafka's, of a
quarter of a second), with 10,000 rows and with all.
"""

import argparse
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from py4j.protocol import Py4JJavaError
from pyspark.sql import DataFrame, SparkSession

from benchmarks import contenders, workload
from benchmarks.contenders import KAFKA, LEDGER
from benchmarks.figures import Figure, show
from benchmarks.workload import Format
from spark_ledger.ledger.reader import AsyncLedgerReader

TASKS = 200
VALUE_BYTES = 100
FEW_ROWS = 10_000  # over MANY partitions
MANY = 1_000
MICRO_ROWS = 1_000
MICRO_BATCHES, MICRO_WARM_UP = 9, 3
KAFKA_WRITES_MAX = 5
KAFKA_SOON = {"kafka.delivery.timeout.ms": "40000", "kafka.request.timeout.ms": "30000"}
READ_AGAIN_GOAL, SLOWER_GOAL, KAFKA_GOAL, MANY_GOAL_S = 1.2, 1.5, 1.0, 3.0
BATCH, STREAM, MICRO = "batch", "stream", "micro-batch of 1,000 rows"
Times = dict[tuple[str, str, int, int], float]
ReadAgain = dict[tuple[str, int, int], float]


def kinds(url: str, peers: Sequence[str], partitions: int, rows: int) -> dict[str, Format]:
    topic = f"p{partitions}-{rows}"
    ours = contenders.ledger(topic, url, partitions=partitions)
    found = {LEDGER: replace(ours, schema=contenders.KEY_AND_VALUE)}
    if KAFKA in peers:
        found[KAFKA] = contenders.kafka(topic, "none")
    return found


def micro_batch_s(spark: SparkSession, kind: Format) -> float:
    """The median time of micro-batches of MICRO_ROWS rows each; the first ones are not counted."""
    reader = spark.readStream.format(kind.name).options(**kind.read_options)
    reader = reader.option("maxOffsetsPerTrigger", str(MICRO_ROWS))
    frame = (reader.schema(kind.schema) if kind.schema else reader).load()
    with tempfile.TemporaryDirectory() as checkpoint:
        query = (
            frame.selectExpr(*workload.KEY_AND_VALUE)
            .writeStream.format("noop")
            .option("checkpointLocation", checkpoint)
            .start()
        )
        while query.exception() is None and len(_batches_ms(query)) < MICRO_BATCHES:
            time.sleep(0.05)
        query.stop()
        if query.exception() is not None:
            raise query.exception()
        return statistics.median(_batches_ms(query)[MICRO_WARM_UP:MICRO_BATCHES]) / 1e3


def _batches_ms(query: object) -> list[float]:
    some = (progress for progress in query.recentProgress if progress["numInputRows"] > 0)
    return [progress["durationMs"]["triggerExecution"] for progress in some]


def actions(spark: SparkSession, rows: int) -> dict[str, Callable[[Format], float]]:
    def stream(kind: Format) -> float:
        streamed = workload.read_stream(spark, kind)
        assert streamed.rows == rows, f"{kind.name} streamed {streamed.rows} of {rows} rows"
        return streamed.batches_s

    return {
        BATCH: lambda kind: workload.seconds(lambda: workload.read_batch(spark, kind)),
        STREAM: stream,
        MICRO: lambda kind: micro_batch_s(spark, kind),
    }


def written_to_kafka(
    spark: SparkSession, frame: DataFrame, kind: Format, partitions: int
) -> tuple[Format, float]:
    """Into a new topic each time until a write succeeds, and in how many seconds it did: with many
    partitions, three brokers on two cores now and then answer a write no more."""
    for again in range(KAFKA_WRITES_MAX):
        topic = f"{kind.read_options['subscribe']}-{again}"
        fresh = replace(
            kind,
            write_options={**kind.write_options, **KAFKA_SOON, "topic": topic},
            read_options={**kind.read_options, "subscribe": topic},
        )
        contenders.create_kafka_topic(spark, topic, partitions)
        try:
            return fresh, workload.seconds(partial(workload.write, frame, fresh))
        except Py4JJavaError as failure:
            print(f"  kafka did not take the rows: {failure.java_exception.getCause()}"[:160])
    raise SystemExit(f"Kafka took {partitions} partitions at none of {KAFKA_WRITES_MAX} tries")


@contextmanager
def counted() -> Iterator[Counter[tuple[int, int]]]:
    """The payload bytes that readers of this process are given, by entry; each time it is."""
    given: Counter[tuple[int, int]] = Counter()
    read_entries = AsyncLedgerReader.read_entries

    def counting(self: AsyncLedgerReader, *ids: object, **known: object) -> object:
        return _counted(read_entries(self, *ids, **known), given, sizes)

    sizes: dict[tuple[int, int], int] = {}
    AsyncLedgerReader.read_entries = counting
    try:
        yield given
    finally:
        AsyncLedgerReader.read_entries = read_entries
        given["stored", 0] = sum(sizes.values())


async def _counted(runs: object, given: Counter, sizes: dict[tuple[int, int], int]) -> object:
    async with aclosing(runs):
        async for run in runs:
            for entry in run:
                place = (entry.header.ledger_id, entry.header.entry_id)
                given[place] += len(entry.payload)
                sizes[place] = len(entry.payload)
            yield run


def bytes_read(kind: Format) -> dict[str, float]:
    """By kind of plan what its tasks are given, in stored bytes of the entries that it covers; 0
    where the plan covers none: all rows are in the commit itself."""
    from pyspark_ledger import DefaultSource

    found, plans = {}, {}
    for name, limit in ((STREAM, {}), (MICRO, {"maxOffsetsPerTrigger": str(MICRO_ROWS)})):
        source = DefaultSource({**kind.read_options, **limit})
        reader = source.streamReader(source.schema())
        start = reader.initialOffset()
        end = reader.latestOffset(start, reader.getDefaultReadLimit())
        plans[name] = (reader, reader.partitions(start, end))
    source = DefaultSource(dict(kind.read_options))
    batch = source.reader(source.schema())
    plans[BATCH] = (batch, batch.partitions())
    for name, (one, tasks) in plans.items():
        with counted() as given:
            for task in tasks:
                for _ in one.read(task):
                    pass
        stored = given.pop(("stored", 0))
        found[name] = sum(given.values()) / stored if stored else 0.0
        print(f"  {name}: {len(tasks)} tasks, {stored:,} stored bytes", flush=True)
    return found


@dataclass
class Measured:
    """`times` are seconds by action, format, partitions and rows; `read_again` how many bytes
    readers were given for each stored one, by plan, partitions and rows."""

    times: Times = field(default_factory=dict)
    read_again: ReadAgain = field(default_factory=dict)

    def case(
        self, spark: SparkSession, some: dict[str, Format], partitions: int, rows: int, runs: int
    ) -> None:
        print(f"{partitions} partitions, {rows:,} rows", flush=True)
        frame = workload.rows(spark, rows, VALUE_BYTES, TASKS)
        for name, kind in list(some.items()):
            if name == KAFKA:
                some[name], took_s = written_to_kafka(spark, frame, kind, partitions)
            else:
                took_s = workload.seconds(partial(workload.write, frame, kind))
            print(f"  {name}: written in {took_s:.1f} s", flush=True)
        for action, act in actions(spark, rows).items():
            taken: dict[str, list[float]] = {name: [] for name in some}
            for _ in range(runs):
                for name, kind in some.items():
                    taken[name].append(act(kind))
            for name, each in taken.items():
                self.times[action, name, partitions, rows] = statistics.median(each)
                told = " ".join(f"{one:.2f}" for one in each)
                print(f"  {name}, {action}: {told} s", flush=True)
        for plan, ratio in bytes_read(some[LEDGER]).items():
            self.read_again[plan, partitions, rows] = ratio


def measure(wanted: argparse.Namespace) -> list[Figure]:
    spark = workload.session(contenders.spark_conf(wanted.peers))
    spark.sparkContext.setLogLevel("OFF")  # a query that is stopped says so at length
    cases = [(count, FEW_ROWS if count >= MANY else wanted.rows) for count in wanted.partitions]
    cases += [(count, wanted.rows) for count in wanted.partitions if count >= MANY]
    measured = Measured()
    with contenders.running(wanted.peers, "none", spark, "warm-up", 1) as found:
        url = found[0].format.read_options["serviceUrl"]
        warm_up = kinds(url, wanted.peers, 1, FEW_ROWS)
        Measured().case(spark, warm_up, 1, FEW_ROWS, 1)
        for partitions, rows in cases:
            peers = wanted.peers if partitions < MANY else []
            some = kinds(url, peers, partitions, rows)
            measured.case(spark, some, partitions, rows, wanted.runs)
        spark.stop()
    return figures(measured.times, measured.read_again)


def figures(times: Times, read_again: ReadAgain) -> list[Figure]:
    found = []
    for (action, name, partitions, rows), took_s in times.items():
        if name != LEDGER:
            continue
        what = f"{partitions:,} partitions, {rows:,} rows: {action}"
        kafka_s = times.get((action, KAFKA, partitions, rows))
        goal = KAFKA_GOAL if kafka_s is not None else None
        found.append(Figure(what, took_s, "s", goal, False, kafka_s, "Kafka"))
        one_s = times.get((action, LEDGER, 1, rows))
        if one_s is not None and 1 < partitions <= 100:
            compared = f"{partitions:,} partitions beside 1: {action}"
            found.append(Figure(compared, took_s, "s", SLOWER_GOAL, False, one_s, "1 partition"))
        if partitions >= MANY and rows == FEW_ROWS:
            found.append(Figure(f"{what}, in seconds", took_s, "s", MANY_GOAL_S))
        again = read_again[action, partitions, rows]
        found.append(Figure(f"{what}, bytes read a stored byte", again, "", READ_AGAIN_GOAL))
    return found


def main() -> int:
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--with", dest="peers", default=KAFKA, choices=[KAFKA, "none"])
    parser.add_argument("--partitions", type=int, nargs="+", default=[1, 8, 32, 100, MANY])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=3)
    wanted = parser.parse_args()
    wanted.peers = [] if wanted.peers == "none" else [wanted.peers]
    contenders.install(wanted.peers)
    show(measure(wanted), f"{TASKS} tasks, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print("command: python benchmarks/partitions.py", *sys.argv[1:])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
