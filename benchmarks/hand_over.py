"""How long a producer waits while batches of Spark's kind are committed to its partitions.

    python benchmarks/hand_over.py                       a minute for each case
    python benchmarks/hand_over.py --seconds 20 --partitions 4 --rates 200
    python benchmarks/hand_over.py --how fenced          owners do not answer, and are fenced
    python benchmarks/hand_over.py --ledgers             the ledgers made, of 100 partitions
    python benchmarks/hand_over.py --spark               by a streaming query, trigger 1 s

A process with Pulsar's client sends messages of 200 bytes, 200 a second or as fast as it can; this
one commits ten rows to every partition once a second, by the topic layer itself. Of each commit the
longest wait is taken: of a paced producer from sending a message to its receipt, of one at full
speed between two receipts of one partition. E=3 Qw=3 Qa=2, synced before every receipt.
"""

import argparse
import gc
import json
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import pyarrow as pa

from benchmarks.figures import Figure, show
from spark_ledger.local import LocalCluster
from spark_ledger.topic import blocking
from spark_ledger.topic.blocking import BlockingTopics
from spark_ledger.topic.commit.commit import TxnKey

GOAL_MS = 50.0
EVERY_S = 1.0
WARM_UP_S = 4.0
ROWS = 10
BODY = bytes(200)
HANDED, FENCED, NONE, SPARK = "handed over", "fenced", "no commits", "streaming query"


def produce(url: str, topic: str, rate: float, seconds: float) -> None:
    """A producer's process: prints what it saw as JSON."""
    import pulsar

    quiet = pulsar.ConsoleLogger(pulsar.LoggerLevel.Error)
    client = pulsar.Client(url, logger=quiet)
    producer = client.create_producer(
        topic,
        batching_enabled=not rate,
        batching_max_publish_delay_ms=2,
        block_if_queue_full=True,
        message_routing_mode=pulsar.PartitionsRoutingMode.RoundRobinDistribution,
    )
    seen: list[tuple[float, float, int]] = []

    def got(sent_s: float) -> Callable[[Any, Any], None]:
        return lambda _, at: seen.append((sent_s, time.monotonic(), at.partition()))

    began_s = time.monotonic()
    count = 0
    while (now_s := time.monotonic()) < began_s + seconds:
        if rate:
            time.sleep(max(0.0, began_s + count / rate - now_s))
        producer.send_async(BODY, got(time.monotonic()))
        count += 1
    producer.flush()
    client.close()
    print(json.dumps(seen))


class Batches:
    """Ten rows to every partition, once a second, in commits of one app."""

    def __init__(self, topics: BlockingTopics, name: str) -> None:
        self._topics = topics
        self._info = topics.run(topics.client.topics.open(name))
        intents = topics.client.intents
        self._intent = topics.run(
            intents.open_batch_intent(str(uuid.uuid4()), "run", self._info.id, random=True)
        )
        self.commits: list[tuple[float, float]] = []

    def until(self, over: threading.Event) -> None:
        version = 0
        while not over.wait(EVERY_S - time.monotonic() % EVERY_S):
            self._commit(version)
            version += 1

    def _commit(self, version: int) -> None:
        topics, info, intent = self._topics, self._info, self._intent
        task = topics.task_writer(info, intent, task_index=0, partitions=info.partitions)
        count = ROWS * info.partitions
        keys = pa.array([b"%d" % i for i in range(count)], pa.binary())
        task.write(keys, pa.array([BODY] * count, pa.binary()))
        done = task.start_finish()()
        txn = TxnKey(intent.app_id, intent.target, version, intent.run_id)
        began_s = time.monotonic()
        topics.run(topics.client.commit_topics({info.id: [done]}, txn, intent.id))
        self.commits.append((began_s, time.monotonic()))


def waits_ms(seen: list[tuple[float, float, int]], since: list[float], rate: float) -> list[float]:
    """The longest wait after each of these times, until EVERY_S later."""
    found = np.array(seen)
    if rate:
        at, waited = found[:, 1], found[:, 1] - found[:, 0]
    else:
        pairs = [np.sort(found[found[:, 2] == p, 1]) for p in np.unique(found[:, 2])]
        at = np.concatenate([one[1:] for one in pairs])
        waited = np.concatenate([np.diff(one) for one in pairs])
    windows = ((at >= one) & (at < one + EVERY_S) for one in since)
    return [1000 * float(waited[window].max()) for window in windows if window.any()]


def ledgers(topics: BlockingTopics) -> int:
    async def counted() -> int:
        return len([one async for one in topics.client.ledgers.list()])

    return topics.run(counted())


@contextmanager
def querying(cluster: LocalCluster, topic: str) -> Iterator[None]:
    """A streaming query that commits to the topic once a second."""
    from benchmarks import workload

    spark = workload.session()
    text = "CAST(value AS STRING)"
    rows = spark.readStream.format("rate").option("rowsPerSecond", 10 * ROWS).load()
    with TemporaryDirectory() as checkpoint:
        query = (
            rows.selectExpr(f"CAST({text} AS BINARY) AS key", f"CAST({text} AS BINARY) AS value")
            .writeStream.format("ledger")
            .options(serviceUrl=cluster.service_url, checkpointLocation=checkpoint)
            .trigger(processingTime="1 second")
            .start(topic)
        )
        try:
            while query.lastProgress is None and query.isActive:
                time.sleep(0.1)  # the first batch takes many seconds
            yield
        finally:
            query.stop()
            spark.stop()


def commits_of(topics: BlockingTopics, name: str) -> list[tuple[float, float]]:
    """When the topic's commits that were not its owner's were made, by this machine's clock of
    intervals, and a moment before."""
    info = topics.run(topics.client.topics.open(name))

    async def made() -> list[int]:
        log = topics.client.log(info.id)
        return [ms async for _, ms, one in log.commits() if not one.app_id.startswith("broker-")]

    off_s = time.time() - time.monotonic()
    return [(ms / 1000 - off_s - EVERY_S / 2, ms / 1000 - off_s) for ms in topics.run(made())]


def case(cluster: LocalCluster, partitions: int, rate: float, seconds: float, how: str) -> None:
    topics, name = blocking.topics(cluster.service_url), f"t-{uuid.uuid4()}"
    topics.run(topics.client.topics.create(name, partitions))
    batches, over = Batches(topics, name), threading.Event()
    ask = topics.client.live_committer._ask
    if how == FENCED:
        topics.client.live_committer._ask = _nobody
    arguments = [cluster.broker_url, name, str(rate), str(seconds + WARM_UP_S)]
    committing = threading.Thread(target=batches.until, args=(over,))
    with querying(cluster, name) if how == SPARK else nullcontext():
        made, began_s = ledgers(topics), time.monotonic()
        producer = subprocess.Popen(
            [sys.executable, __file__, "--produce", *arguments], stdout=subprocess.PIPE, text=True
        )
        if how in (HANDED, FENCED):
            committing.start()
        seen = json.loads(producer.communicate()[0])
        made, took_s = ledgers(topics) - made, time.monotonic() - began_s
    over.set()
    if how in (HANDED, FENCED):
        committing.join()
    if how == SPARK:
        batches.commits = commits_of(topics, name)
    topics.client.live_committer._ask = ask
    since = [began for began, _ in batches.commits] or list(np.arange(seen[0][0], seen[-1][0], 1.0))
    since = [one for one in since if seen[0][0] + WARM_UP_S < one < seen[-1][0] - EVERY_S]
    found = waits_ms(seen, since, rate)
    pace = f"{rate:.0f} msg/s" if rate else "full speed"
    what = f"{pace}, {partitions} partitions, {how}"
    commits = [1000 * (end - begin) for begin, end in batches.commits] or [0.0]
    per_hour = made / took_s * 3600
    show(
        [
            Figure(f"{what}: longest wait a commit, p50", float(np.median(found)), "ms"),
            Figure(f"{what}: p99 of {len(found)}", float(np.quantile(found, 0.99)), "ms", GOAL_MS),
            Figure(f"{what}: a commit, p50", float(np.median(commits)), "ms"),
            Figure(f"{what}: messages", len(seen) / (seconds + WARM_UP_S), "/s"),
            Figure(f"{what}: ledgers made", per_hour, "/h"),
        ],
        what,
    )


async def _nobody(url: str, request: bytes) -> Any:
    raise ConnectionRefusedError("as if nobody listened")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--partitions", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--rates", type=float, nargs="*", default=[200.0, 0.0])
    parser.add_argument("--how", nargs="*", default=[HANDED], choices=[HANDED, FENCED, NONE])
    parser.add_argument("--ledgers", action="store_true")
    parser.add_argument("--spark", action="store_true")
    parser.add_argument("--produce", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    gc.freeze()  # as Spark's processes of ours do: a collection that visits all modules takes 0.2 s
    if given.produce:
        url, topic, rate, seconds = given.produce
        produce(url, topic, float(rate), float(seconds))
        return
    with LocalCluster(bookies=3, autorecovery=False) as cluster:
        for partitions in [100] if given.ledgers else given.partitions:
            for rate in given.rates:
                for how in [SPARK] if given.spark else given.how:
                    case(cluster, partitions, rate, given.seconds, how)


if __name__ == "__main__":
    main()
