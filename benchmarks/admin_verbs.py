"""How long the admin API takes to list many topics, and to show the statistics of many.

python benchmarks/admin_verbs.py                10,000 topics listed; statistics of 1,000 in use
python benchmarks/admin_verbs.py --topics 2000 --used 200
"""

import argparse
import json
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pulsar

from spark_ledger.cli.common import with_topics
from spark_ledger.local import LocalCluster
from spark_ledger.metadata.store_calls import call_each
from spark_ledger.topic.client import TopicClient

REPEATS = 5


def make(service_url: str, count: int, used: int) -> None:
    async def work(client: TopicClient) -> None:
        async def create(name: str) -> None:
            await client.topics.create(name, 1, {"partitioned": False})

        names = [f"public/many/t{n}" for n in range(count)]
        await call_each(create, names + [f"public/used/u{n}" for n in range(used)], 32)

    with_topics(service_url, work)


def best_ms(url: str) -> tuple[float, int, Any]:
    """The shortest of some requests, its bytes, and the JSON."""
    times, body = [], b""
    for _ in range(REPEATS):
        began = time.perf_counter()
        with urllib.request.urlopen(url, timeout=60) as answer:
            body = answer.read()
        times.append((time.perf_counter() - began) * 1000)
    return min(times), len(body), json.loads(body)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topics", type=int, default=10_000)
    parser.add_argument("--used", type=int, default=1_000)
    given = parser.parse_args()
    with LocalCluster(bookies=3, autorecovery=False) as cluster:
        url = f"{cluster.admin_url}/admin/v2"
        make(cluster.service_url, given.topics, given.used)
        quiet = pulsar.ConsoleLogger(pulsar.LoggerLevel.Error)
        client = pulsar.Client(cluster.broker_url, logger=quiet)
        producers = [
            client.create_producer(f"persistent://public/used/u{n}") for n in range(given.used)
        ]
        for path in ("persistent/public/many", "namespaces/public/many/topics"):
            took_ms, size, names = best_ms(f"{url}/{path}")
            print(f"GET {path}: {len(names)} topics, {took_ms:.0f} ms, {size >> 10} KiB")
        took_ms, size, _ = best_ms(f"{url}/broker-stats/topics")
        what = f"{len(producers)} topics, {took_ms:.0f} ms, {size >> 10} KiB"
        print(f"GET broker-stats/topics: {what}")
        took_ms, size, _ = best_ms(f"{url}/persistent/public/used/u0/stats")
        print(f"GET .../stats of one topic: {took_ms:.1f} ms")
        client.close()


if __name__ == "__main__":
    main()
