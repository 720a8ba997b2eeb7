"""How long a subscribe on a new topic takes: ours beside Pulsar standalone, in turns.

    PEERS_HOME=... python benchmarks/subscribing.py [topics]

Pulsar's Python client; the topic is made by the subscribe. All servers are up at once, and get one
topic after the other. The first tenth of the topics is a warm-up.
"""

import statistics
import sys
import time
import uuid
from contextlib import ExitStack

import pulsar

from benchmarks.broker_servers import OURS, OURS_3, PULSAR, Server, has_pulsar, running


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    names = [*([PULSAR] if has_pulsar() else []), OURS, OURS_3]
    with ExitStack() as stack:
        servers: list[Server] = [stack.enter_context(running(name, synced=True)) for name in names]
        clients = [pulsar.Client(server.url) for server in servers]
        times_ms: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(count):
            for server, client in zip(servers, clients, strict=True):
                topic = f"persistent://public/default/new-{uuid.uuid4()}"
                began_s = time.perf_counter()
                consumer = client.subscribe(topic, "s")
                times_ms[server.name].append(1e3 * (time.perf_counter() - began_s))
                consumer.close()
        for name, each in times_ms.items():
            each = sorted(each[count // 10 :])
            p50, p90 = statistics.median(each), each[int(0.9 * len(each))]
            print(f"{name}: p50 {p50:.1f} ms, p90 {p90:.1f} ms")
        for client in clients:
            client.close()


if __name__ == "__main__":
    main()
