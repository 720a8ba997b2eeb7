"""What it costs a query to begin behind consumers that acknowledged every second row, one by one.

    python benchmarks/acked_starts.py [thousands of rows]

Three bookies and a broker on this machine, a topic with one partition, rows of 20 bytes in batches
of 1,000. A consumer acknowledges half of each batch: every second row, or rows at random. Then the
source of a stream, as Spark's process for it: the first offset, the first end (which makes the copy
durable), the plan, the plan by a run that starts again (which reads the copy), and a read of all
tasks in one process; beside a query that begins at the first row.
"""

import pickle
import random
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.broker_socket import Link, batch_of, produce
from spark_ledger.broker.wire.commands import command
from spark_ledger.broker.wire.frames import encode
from spark_ledger.local import LocalCluster
from spark_ledger.local.processes import LocalBroker
from spark_ledger.metadata import paths
from spark_ledger.spark.options.options import stream_read_options
from spark_ledger.spark.read.source import LedgerStreamReader
from spark_ledger.spark.rows.columns import DEFAULT_SCHEMA
from spark_ledger.spark.spark_version import value_of
from spark_ledger.topic import blocking
from spark_ledger.topic.acks.copies import decode_pointer

MESSAGES = 1000
WORDS = -(-MESSAGES // 64)


def every_second() -> list[int]:
    return [0x5555555555555555] * WORDS


def at_random() -> list[int]:
    return [random.getrandbits(64) - (1 << 63) for _ in range(WORDS)]


def acknowledge(url: str, topic: str, batches: int, left: Callable[[], list[int]]) -> None:
    """A consumer acknowledges all rows of each batch but those in `left`."""
    link = Link(url)
    link.subscribe_to(topic, "theirs", 0, 0)
    link.flow(batches * MESSAGES)
    for count, frame in enumerate(link.messages(), 1):
        id_ = frame.command.message.message_id
        del id_.ack_set[:]
        id_.ack_set.extend(left())
        id_.batch_size = MESSAGES
        link.send(encode(command("ack", consumer_id=0, ack_type=0, message_id=[id_])))
        if count == batches:
            break
    link.ask(command("close_consumer", consumer_id=0, request_id=9), "success")
    link.close()


class Times:
    def __init__(self) -> None:
        self.parts: list[str] = []

    def of(self, what: str, act: Callable[[], Any]) -> Any:
        began_s = time.perf_counter()
        result = act()
        self.parts.append(f"{what} {1000 * (time.perf_counter() - began_s):,.0f} ms")
        return result


def begin(name: str, service_url: str, topic: str, **options: str) -> None:
    given = stream_read_options({"serviceUrl": service_url, "subscribe": topic, **options})
    times, run = Times(), LedgerStreamReader(given, DEFAULT_SCHEMA)
    warm = LedgerStreamReader(given, DEFAULT_SCHEMA)
    warm.initialOffset()
    start = times.of("first offset", run.initialOffset)
    end = times.of("first end", lambda: run.latestOffset(start, run.getDefaultReadLimit()))
    tasks = times.of("plan", lambda: run.partitions(start, end))
    again = LedgerStreamReader(given, DEFAULT_SCHEMA)
    first = again.initialOffset()
    times.of("plan after a restart", lambda: again.partitions(first, end))
    sizes = [len(pickle.dumps(task)) for task in tasks]

    def read() -> int:
        batches = (batch for task in tasks for batch in run.read(task))
        return sum(batch.num_rows for batch in batches)

    rows = times.of("read", read)
    more = [len(pickle.dumps(part.acked)) for task in tasks for part in value_of(task).tasks]
    print(f"{name}: {', '.join(times.parts)}; {rows:,} rows in {len(tasks)} tasks,", end=" ")
    print(f"descriptions of {max(sizes):,} bytes at most, {max(more):,} for what is left out")
    for source in (warm, run, again):
        source.stop()


def copies(service_url: str, topic: str) -> None:
    topics = blocking.topics(service_url)
    client, info = topics.client, topics.run(topics.client.topics.open(topic))
    for name in topics.run(client.store.children(paths.acks(info.id))):
        if name.startswith("copy-"):
            node = topics.run(client.store.get(f"{paths.acks(info.id)}/{name}"))
            stored = decode_pointer(node.value).stored
            size = 0
            if stored is not None:
                size = topics.run(client.ledgers.record(stored.ledger_id)).record.length_bytes or 0
            print(f"  the copy: {len(node.value):,} bytes in ZooKeeper, {size:,} in a ledger")


def main() -> None:
    batches = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    with (
        LocalCluster(bookies=3, autorecovery=False) as cluster,
        tempfile.TemporaryDirectory() as at,
    ):
        broker = LocalBroker(Path(at) / "broker.log", cluster.service_url)
        broker.start()
        try:
            for name, left in (("every second row", every_second), ("at random", at_random)):
                topic = f"acked-{uuid.uuid4().hex}"
                full = f"persistent://public/default/{topic}"
                produce(broker.url, full, batch_of(MESSAGES, 20), batches, MESSAGES, 100)
                url = cluster.service_url
                begin("all rows", url, topic, startingOffsets="earliest")
                acknowledge(broker.url, full, batches, left)
                begin(name, url, topic, startingSubscription="theirs")
                copies(url, topic)
        finally:
            broker.stop()


if __name__ == "__main__":
    main()
