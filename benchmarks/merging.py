"""What merging that nobody asked for is worth: a topic written by many small tasks to many
partitions, read as it was written and once maintenance has merged it.

    python benchmarks/merging.py                     200 tasks, 100 partitions, 8 batches
    python benchmarks/merging.py --rows 10000        of one batch
    python benchmarks/merging.py --passes 3          of maintenance, an hour apart

Maintenance is told that it is an hour later each time, so that hours close; its pace is left out.
"""

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import workload
from benchmarks.contenders import ledger
from spark_ledger.local import LocalCluster
from spark_ledger.metadata.store_calls import store_now_ms
from spark_ledger.topic import blocking
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.upkeep.compactor import CompactionResult
from spark_ledger.topic.upkeep.merge_plan import SLOT_MS
from spark_ledger.topic.upkeep.upkeep import Merging, TopicHead

TOPIC = "merged"
VALUE_BYTES = 100
READS = 3


async def counted(client: TopicClient) -> tuple[int, int, int]:
    """Segments, different entries and payload bytes of the topic."""
    info = await client.topics.open(TOPIC)
    state = await client.log(info.id).fold(fresh=True)
    read = await client.chunks.load(state.chunks())
    found = [one for p in state.partitions for one in p.stretches(0, p.end_offset, read)]
    placed = [one.segment for part in found for one in part.table]
    entries = {
        (one.ledger_id, number, one.inline)
        for one in placed
        for first, last in one.entries
        for number in range(first, last + 1)
    }
    return len(placed), len(entries), sum(one.bytes for one in placed)


async def passed(client: TopicClient, merging: Merging, later_ms: int) -> CompactionResult:
    info = await client.topics.open(TOPIC)
    head = TopicHead(info, (await client.log(info.id).fold(fresh=True)).next)
    report = await merging.once([head], await store_now_ms(client.store) + later_ms)
    assert not report.problems, report.problems
    return report.merged.get(info.name.short, CompactionResult())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=200)
    parser.add_argument("--partitions", type=int, default=100)
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--rows", type=int, default=125_000)
    parser.add_argument("--passes", type=int, default=2)
    given = parser.parse_args()
    with LocalCluster(bookies=3, autorecovery=False) as cluster:
        spark = workload.session()
        kind = ledger(TOPIC, cluster.service_url, partitions=given.partitions)
        for _ in range(given.batches):
            workload.write(workload.rows(spark, given.rows, VALUE_BYTES, given.tasks), kind)
        topics = blocking.topics(cluster.service_url)

        def told(what: str) -> None:
            def read() -> None:
                workload.read_batch(spark, kind)

            read()  # the first one warms up
            times = [workload.seconds(read) for _ in range(READS)]
            segments, entries, size = topics.run(counted(topics.client))
            print(
                f"{what}: {segments} segments in {entries} entries, {size / 2**20:.1f} MiB,"
                f" read in {statistics.median(times):.2f} s",
                flush=True,
            )

        told("as written")
        merging = Merging(topics.client, bytes_per_s=None)
        for number in range(given.passes):
            done: list[CompactionResult] = []
            later_ms = number * 2 * SLOT_MS + 2 * 60_000
            took_s = workload.seconds(
                lambda later_ms=later_ms, done=done: done.append(
                    topics.run(passed(topics.client, merging, later_ms))
                )
            )
            one = done[0]
            told(
                f"after pass {number + 1} ({one.segments} segments became {one.merged},"
                f" {one.bytes / 2**20:.1f} MiB copied in {took_s:.1f} s)"
            )
        topics.run(merging.close())
        spark.stop()


if __name__ == "__main__":
    main()
