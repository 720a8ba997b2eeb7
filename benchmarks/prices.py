"""What mechanisms buy and what they cost, each beside the way without it, in turns on one machine.

    python benchmarks/prices.py --only keys          a read by key, with filters of keys and without
    python benchmarks/prices.py --only durability    adds of page-cache ledgers and of synced ones
    python benchmarks/prices.py --only cursors       positions into a ledger and into ZooKeeper
    python benchmarks/prices.py --only foreach       a stream written by foreach_writer and others
    python benchmarks/prices.py --only chunks        reads that look for chunks of messages or not
    python benchmarks/prices.py --pairs 9            pairs of each (default 7); all cases

The figures of docs/decisions are of these commands. A ratio is of one pair, the mechanism by the
way without it; what is printed is the median of the pairs' ratios with their quartiles, and the
medians of both sides. The first pair does not count, and the first of a pair takes turns.
Processor time is what to compare where other work runs beside.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pyarrow as pa
import pyarrow.compute as pc

from benchmarks import workload
from benchmarks.contenders import zookeeper_pid
from benchmarks.processes import Below, adopt_orphans, cpu_s, written_bytes
from spark_ledger import LedgerClient
from spark_ledger.config import client_config
from spark_ledger.local import LocalCluster
from spark_ledger.topic import blocking
from spark_ledger.topic.blocking import BlockingTopics
from spark_ledger.topic.commit.draft import TxnKey
from spark_ledger.topic.log.topics import TopicInfo
from spark_ledger.topic.read.live import ends_of, live_task
from spark_ledger.topic.read.plan import Cutting, ReadTask, plan_read
from spark_ledger.topic.subscription import cursor
from spark_ledger.topic.subscription.cursor import Cursor
from spark_ledger.topic.write import TaskSettings

MB, GB, MS, US = 1e6, 1e9, 1e3, 1e6
KEYED_ROWS, KEYED_PARTITIONS, VALUE_BYTES = 1_000_000, 4, 200
FILTERED = TaskSettings()
UNFILTERED = TaskSettings(key_filters=False)
ADDS, SINGLE_ADDS, ADD_BYTES = 20_000, 300, 1 << 10
POSITIONS, MOVES = (4, 100, 1000), 100
STREAMED_ROWS, STREAMED_BYTES = 200_000, 100
MESSAGES, SMALL_TASKS, SMALL_ROWS = 100_000, 1_000, 100

Figures = Mapping[str, float]
Side = Callable[[], Figures]


def show(what: str, mechanism: Side, without: Side, pairs: int) -> None:
    """The figures of both, measured in turns."""
    done: list[tuple[Figures, Figures]] = []
    for number in range(pairs + 1):
        if number % 2:
            done.append((mechanism(), without()))
        else:
            second = without()
            done.append((mechanism(), second))
    done = done[1:]
    print(f"{what}, {pairs} pairs, load {os.getloadavg()[0]:.1f}", flush=True)
    for name in done[0][0]:
        this, other = ([pair[side][name] for pair in done] for side in (0, 1))
        middles = f"{statistics.median(this):12,.2f} and {statistics.median(other):12,.2f}"
        if min(other) <= 0:
            print(f"  {name:34} {middles}", flush=True)
            continue
        ratios = [mine / theirs for mine, theirs in zip(this, other, strict=True)]
        low, middle, high = statistics.quantiles(ratios)
        print(f"  {name:34} {middles}: {middle:.3f}x ({low:.3f} to {high:.3f})", flush=True)


def bookie_pids(cluster: LocalCluster) -> list[int]:
    return [bookie.pid for bookie in cluster.bookies if bookie.pid is not None]


def used_s(pids: list[int]) -> float:
    return sum(map(cpu_s, pids))


# -- topics ----------------------------------------------------------------------------------------


def written(
    topics: BlockingTopics,
    name: str,
    batches: list[tuple[pa.Array, pa.Array]],
    settings: TaskSettings,
    partitions: int = 1,
) -> TopicInfo:
    """A new topic with these keys and values, a task for each batch."""
    client = topics.client
    info = topics.run(client.topics.create(name, partitions))
    intent = topics.run(client.intents.open_query_intent(name, "run", "prices"))
    results = []
    for number, (keys, values) in enumerate(batches):
        writer = topics.task_writer(info, intent, task_index=number, settings=settings)
        writer.write(keys, values)
        results.append(writer.start_finish()())
    txn = TxnKey(intent.app_id, intent.target, 0, intent.run_id)
    topics.run(client.commit_topics({info.id: results}, txn, intent.id))
    return info


def tasks_of(topics: BlockingTopics, info: TopicInfo) -> list[ReadTask]:
    """A task for all that commits have, and one for each live segment."""
    client, name = topics.client, info.name.short
    state = topics.run(client.log(info.id).fold(fresh=True))
    starts = state.start_offsets()
    ranges = {p: (starts[p], end) for p, end in state.end_offsets().items()}
    read = topics.run(client.tables(state, ranges))
    tasks = plan_read(state, ranges, topic=name, cutting=Cutting(task_bytes=1 << 40), read=read)
    for p, end in topics.run(ends_of(client.ledgers, state)).items():
        task = live_task(name, state, p, 0, end)
        tasks += [] if task is None else [task]
    return tasks


def random_rows(rows: int, value_bytes: int, first: int = 0) -> tuple[pa.Array, pa.Array]:
    """Different keys, and values that do not compress."""
    keys = pa.array([b"key-%d" % number for number in range(first, first + rows)], pa.binary())
    ends = pa.array(range(0, rows * value_bytes + 1, value_bytes), pa.int32()).buffers()[1]
    data = pa.py_buffer(os.urandom(rows * value_bytes))
    return keys, pa.Array.from_buffers(pa.binary(), rows, [None, ends, data])


def of_key(
    topics: BlockingTopics, tasks: list[ReadTask], key: bytes, *, filtered: bool
) -> tuple[int, int]:
    """The rows with the key, and the entries that were decoded for them."""
    rows = entries = 0
    for task in tasks:
        for block in topics.read(task, ["key"], keys=[key] if filtered else None):
            rows += pc.sum(pc.equal(block.record_batch.column("key"), key)).as_py() or 0
            entries += len({(run["ledger"], run["entry"]) for run in block.runs})
    return rows, entries


def keys(pairs: int) -> None:
    with LocalCluster(bookies=3, autorecovery=False) as cluster:
        topics, pids = blocking.topics(cluster.service_url), bookie_pids(cluster)
        part = KEYED_ROWS // KEYED_PARTITIONS
        batches = [random_rows(part, VALUE_BYTES, i * part) for i in range(KEYED_PARTITIONS)]
        numbers = iter(range(1000))

        def writes(settings: TaskSettings) -> Figures:
            began_s, own_s, theirs_s = time.monotonic(), time.process_time(), used_s(pids)
            name = f"written-{next(numbers)}"
            written(topics, name, batches, settings, KEYED_PARTITIONS)
            return {
                "write, client, CPU-s a M rows": 1e6 / KEYED_ROWS * (time.process_time() - own_s),
                "write, bookies, CPU-s a M rows": 1e6 / KEYED_ROWS * (used_s(pids) - theirs_s),
                "write, s": time.monotonic() - began_s,
            }

        what = f"{KEYED_ROWS:,} rows of {VALUE_BYTES} B in {KEYED_PARTITIONS} partitions"
        show(what, lambda: writes(FILTERED), lambda: writes(UNFILTERED), pairs)
        tasks = tasks_of(topics, written(topics, "keyed", batches, FILTERED, KEYED_PARTITIONS))

        def reads(key: bytes, expected: int, *, filtered: bool) -> Figures:
            began_s, own_s, theirs_s = time.monotonic(), time.process_time(), used_s(pids)
            rows, entries = of_key(topics, tasks, key, filtered=filtered)
            assert rows == expected
            return {
                "entries decoded": entries,
                "client, CPU-ms": MS * (time.process_time() - own_s),
                "bookies, CPU-ms": MS * (used_s(pids) - theirs_s),
                "ms": MS * (time.monotonic() - began_s),
            }

        for key, expected, which in (
            (b"key-%d" % (KEYED_ROWS // 3), 1, "one key of them"),
            (b"another", 0, "a key that no row has"),
        ):
            show(
                f"read of {which}",
                lambda key=key, n=expected: reads(key, n, filtered=True),
                lambda key=key, n=expected: reads(key, n, filtered=False),
                pairs,
            )


def chunks(pairs: int) -> None:
    from benchmarks import broker_client

    with LocalCluster(bookies=3, autorecovery=False) as cluster:
        topics = blocking.topics(cluster.service_url)
        batches = [random_rows(SMALL_ROWS, 100, SMALL_ROWS * n) for n in range(SMALL_TASKS)]
        to_ledgers = TaskSettings(inline_bytes_max=0)
        read = {"entries of 100 rows": written(topics, "small", batches, to_ledgers)}
        with broker_client.connected(cluster.broker_url) as client:
            for name, batched in (("batches of messages", True), ("lone messages", False)):
                topic, message = name.replace(" ", "-"), os.urandom(100)
                broker_client.produce(client, topic, message, MESSAGES, batched)
                read[name] = topics.run(topics.client.topics.open(topic))

        def reads(tasks: list[ReadTask], *, look: bool) -> Figures:
            began_s, own_s, rows = time.monotonic(), time.process_time(), 0
            for task in tasks:
                for block in topics.read(replace(task, chunked=look)):
                    rows += block.record_batch.num_rows
            own_s = time.process_time() - own_s
            took_s = time.monotonic() - began_s
            return {"client, CPU-us a row": US * own_s / rows, "us a row": US * took_s / rows}

        for name, info in read.items():
            tasks = tasks_of(topics, info)
            show(
                f"read of {name}, not looking for chunks and looking",
                lambda tasks=tasks: reads(tasks, look=False),
                lambda tasks=tasks: reads(tasks, look=True),
                pairs,
            )


# -- ledgers ---------------------------------------------------------------------------------------


def durability(pairs: int) -> None:
    payload = os.urandom(ADD_BYTES)
    with LocalCluster(bookies=3, autorecovery=False) as cluster:
        pids = bookie_pids(cluster)
        config = client_config(inflight_bytes=1_000_000)
        with LedgerClient(cluster.service_url, config) as client:

            def adds(kind: str) -> Figures:
                with client.create_ledger(3, 3, 2, durability=kind) as writer:
                    alone = []
                    for _ in range(SINGLE_ADDS):
                        began_s = time.monotonic()
                        writer.append(payload)
                        alone.append(MS * (time.monotonic() - began_s))
                    began_s, theirs_s = time.monotonic(), used_s(pids)
                    for _ in range(ADDS):
                        last = writer.append_async(payload)
                    last.result()
                    took_s, theirs_s = time.monotonic() - began_s, used_s(pids) - theirs_s
                client.delete_ledger(writer.ledger_id)
                return {
                    "a single add, p50, ms": statistics.median(alone),
                    "a single add, p99, ms": statistics.quantiles(alone, n=100)[-1],
                    "adds/s": ADDS / took_s,
                    "a bookie, CPU-us an add": US * theirs_s / 3 / ADDS,
                }

            what = f"adds of {ADD_BYTES} B, page-cache and synced"
            show(what, lambda: adds("page-cache"), lambda: adds("synced"), pairs)


def cursors(pairs: int) -> None:
    with LocalCluster(bookies=3, autorecovery=False) as cluster:
        topics, bookies = blocking.topics(cluster.service_url), bookie_pids(cluster)
        store = zookeeper_pid(cluster)
        pids = [store, *bookies]
        cursor.WRITE_EVERY_S = 0.0

        async def moved(of: Cursor, partitions: int, first: int) -> None:
            for number in range(first, first + MOVES):
                of.advance(dict.fromkeys(range(partitions), number))
                await of.durable()

        def moves(of: Cursor, partitions: int, often_s: float) -> Figures:
            cursor.OFTEN_S = often_s
            first = 1 + max(of.confirmed.values(), default=0)
            cpus_s, sizes = list(map(cpu_s, pids)), list(map(written_bytes, pids))
            began_s = time.monotonic()
            topics.run(moved(of, partitions, first))
            took_s = time.monotonic() - began_s
            cpus_s = [now - then for now, then in zip(map(cpu_s, pids), cpus_s, strict=True)]
            sizes = [now - then for now, then in zip(map(written_bytes, pids), sizes, strict=True)]
            return {
                "ms a write": MS * took_s / MOVES,
                "ZooKeeper, CPU-ms a write": MS * cpus_s[0] / MOVES,
                "ZooKeeper, bytes a write": sizes[0] / MOVES,
                "three bookies, CPU-ms a write": MS * sum(cpus_s[1:]) / MOVES,
                "three bookies, bytes a write": sum(sizes[1:]) / MOVES,
            }

        for count in POSITIONS:
            info = topics.run(topics.client.topics.create(f"of-{count}", count))
            opened = [
                topics.run(topics.client.subscriptions.open(info, name, name, "run"))
                for name in ("in-a-ledger", "in-the-record")
            ]
            show(
                f"a position of {count} partitions, in a cursor ledger and in the record",
                lambda of=opened[0], n=count: moves(of, n, often_s=1e9),
                lambda of=opened[1], n=count: moves(of, n, often_s=0.0),
                pairs,
            )
            for each in opened:
                topics.run(each.release())


# -- Spark -----------------------------------------------------------------------------------------


def foreach(pairs: int) -> None:
    import spark_ledger

    adopt_orphans()
    with LocalCluster(bookies=3, autorecovery=False) as cluster:
        os.environ["SPARK_LEDGER_SERVICE_URL"] = cluster.service_url
        url = {"serviceUrl": cluster.service_url}
        spark = workload.session()
        target = workload.Format("ledger", {**url, "topic": "streamed"})
        workload.write(workload.rows(spark, STREAMED_ROWS, STREAMED_BYTES, 2), target)
        below, numbers = Below(os.getpid()), iter(range(1000))

        def batch_writer(topic: str) -> Callable[[Any, int], None]:
            def write(frame: Any, number: int) -> None:
                options = {**url, "txnAppId": topic, "txnVersion": str(number)}
                frame.write.format("ledger").options(**options).mode("append").save(topic)

            return write

        def streams(way: str) -> Figures:
            topic = f"{way}-{next(numbers)}"
            reading = spark.readStream.format("ledger").options(**url, startingOffsets="earliest")
            frame = reading.load("streamed")
            writing = frame.selectExpr("key", "value").writeStream.trigger(availableNow=True)
            if way == "sink":
                writing = writing.format("ledger").options(**url, topic=topic)
            elif way == "foreachBatch":
                writing = writing.foreachBatch(batch_writer(topic))
            else:
                writing = writing.foreach(spark_ledger.foreach_writer(topic, **url))
            cpus_s = below.cpu_s()
            with tempfile.TemporaryDirectory() as checkpoint:
                query = writing.option("checkpointLocation", checkpoint).start()
                query.awaitTermination()
            told = query.recentProgress
            assert sum(progress["numInputRows"] for progress in told) == STREAMED_ROWS
            took_ms = sum(progress["durationMs"]["triggerExecution"] for progress in told)
            each = 1e6 / STREAMED_ROWS
            return {
                "s a M rows": each * took_ms / MS,
                "all processes, CPU-s a M rows": each * (below.cpu_s() - cpus_s),
            }

        for other in ("sink", "foreachBatch"):
            what = f"{STREAMED_ROWS:,} rows of {STREAMED_BYTES} B by foreach_writer and by {other}"
            show(what, lambda: streams("foreach"), lambda other=other: streams(other), pairs)
        spark.stop()


CASES: Mapping[str, Callable[[int], None]] = {
    "keys": keys,
    "durability": durability,
    "cursors": cursors,
    "foreach": foreach,
    "chunks": chunks,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default=",".join(CASES), help=f"of: {', '.join(CASES)}")
    parser.add_argument("--pairs", type=int, default=7, help="at least 2")
    options = parser.parse_args()
    for name in options.only.split(","):
        CASES[name](options.pairs)


if __name__ == "__main__":
    main()
