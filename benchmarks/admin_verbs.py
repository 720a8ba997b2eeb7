"""How long the admin API takes to list many topics, and to show the statistics of many.

python benchmarks/admin_verbs.py       10,000 topics listed, a tenth of them partitioned; statistics
                                       of 1,000 in use; the first request's time, and the best
python benchmarks/admin_verbs.py --topics 2000 --used 200
"""

import argparse
import asyncio
import json
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pulsar

from benchmarks.socket_client import SocketClient
from spark_ledger.cli.common import with_topics
from spark_ledger.local import LocalCluster
from spark_ledger.metadata.store_calls import call_each
from spark_ledger.topic.client import TopicClient

REPEATS = 5
LISTS = (
    "persistent/public/many",
    "persistent/public/many/partitioned",
    "namespaces/public/many/topics",
)
STATS = "broker-stats/topics"


def make(service_url: str, count: int, used: int) -> None:
    async def work(client: TopicClient) -> None:
        async def create(name: str) -> None:
            is_partitioned = name.startswith("public/many/") and name.endswith("0")
            await client.topics.create(name, 1, {"partitioned": is_partitioned})

        names = [f"public/many/t{n}" for n in range(count)]
        await call_each(create, names + [f"public/used/u{n}" for n in range(used)], 32)

    with_topics(service_url, work)


class Timed(NamedTuple):
    """The times of some requests in ms, the response's bytes, and its content."""

    first_ms: float
    best_ms: float
    size: int
    content: Any

    def __str__(self) -> str:
        return f"{self.first_ms:.0f} ms, at best {self.best_ms:.0f} ms, {self.size >> 10} KiB"


def timed(url: str) -> Timed:
    times, body = [], b""
    for _ in range(REPEATS):
        began = time.perf_counter()
        with urllib.request.urlopen(url, timeout=60) as answer:
            body = answer.read()
        times.append((time.perf_counter() - began) * 1000)
    return Timed(times[0], min(times), len(body), json.loads(body))


async def list_of_protocol(url: str) -> Timed:
    client, times = await SocketClient.connected(url), list[float]()
    for _ in range(REPEATS):
        began = time.perf_counter()
        response = await client.ask("topics_of_namespace", namespace="public/many")
        times.append((time.perf_counter() - began) * 1000)
    topics = list(response.topics_of_namespace_response.topics)
    return Timed(times[0], min(times), response.ByteSize(), topics)


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
        for path in LISTS:
            listed = timed(f"{url}/{path}")
            print(f"GET {path}: {len(listed.content)} topics, {listed}")
        listed = asyncio.run(list_of_protocol(cluster.broker_url))
        print(f"GET_TOPICS_OF_NAMESPACE: {len(listed.content)} topics, {listed}")
        print(f"GET broker-stats/topics: {len(producers)} topics, {timed(f'{url}/{STATS}')}")
        print(f"GET .../stats of one topic: {timed(f'{url}/persistent/public/used/u1/stats')}")
        client.close()


if __name__ == "__main__":
    main()
