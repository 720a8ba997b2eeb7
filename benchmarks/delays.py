"""How late delayed messages come, with Pulsar's own client.

A producer sends `--messages` that are due evenly over `--seconds`, or all at once (`--seconds 0`),
`--ahead` seconds from the beginning on. A Shared consumer notes when each one comes; producer,
broker and consumer have one clock. Before its time no message may come. `--cold`: the broker is
killed before that, and has no message in memory when they are due.

`--restart`: messages of `--bytes` are due in an hour, at random times within `--seconds`. Measured
is what a broker reads until it holds all of them: at first, and after it was killed.
"""

import argparse
import asyncio
import json
import random
import re
import subprocess
import time
import urllib.request
from pathlib import Path

import numpy as np
import pulsar

from benchmarks.processes import memory_mib
from benchmarks.socket_client import SocketClient
from spark_ledger.local.cluster import LocalCluster
from spark_ledger.topic.entry import pulsar_batch
from spark_ledger.topic.entry.pulsar_message_pb2 import MessageMetadata


def main() -> None:
    arguments = _parser().parse_args()
    if arguments.restart:
        restart(arguments.messages, arguments.bytes, arguments.seconds)
        return
    with LocalCluster(bookies=3) as cluster:
        client = pulsar.Client(cluster.broker_url)
        consumer = client.subscribe(
            "delays",
            "s",
            consumer_type=pulsar.ConsumerType.Shared,
            initial_position=pulsar.InitialPosition.Earliest,
            receiver_queue_size=10_000,
        )
        producer = client.create_producer(
            "delays", batching_enabled=False, max_pending_messages=5_000, block_if_queue_full=True
        )
        begin_ms = int((time.time() + arguments.ahead) * 1000)
        step_ms = 1000 * arguments.seconds / arguments.messages
        for number in range(arguments.messages):
            producer.send_async(
                b"x" * 200,
                None,
                deliver_at=begin_ms + int(number * step_ms),
                properties={"due": str(begin_ms + int(number * step_ms))},
            )
        producer.flush()
        sent_s = time.time() - begin_ms / 1000 + arguments.ahead
        if arguments.cold:
            assert cluster.broker is not None
            cluster.broker.kill()
            cluster.broker.start()
        late_ms = np.zeros(arguments.messages)
        came_ms = np.zeros(arguments.messages)
        for number in range(arguments.messages):
            message = consumer.receive(int(1000 * (arguments.ahead + arguments.seconds + 60)))
            now_ms = time.time() * 1000
            late_ms[number] = now_ms - int(message.properties()["due"])
            came_ms[number] = now_ms
            consumer.acknowledge(message)
        p50_ms, p99_ms, last_ms = (round(ms) for ms in np.percentile(late_ms, (50, 99, 100)))
        print(
            f"{arguments.messages} messages due over {arguments.seconds} s, sent in {sent_s:.1f} s:"
            f" late by {p50_ms} ms (p50), {p99_ms} ms (p99), {last_ms} ms at most;"
            f" {int((late_ms < 0).sum())} early; the last came"
            f" {(came_ms.max() - begin_ms) / 1000:.1f} s after the first was due"
        )
        client.close()


# -- a restart ---------------------------------------------------------------------------------


def restart(messages: int, message_bytes: int, spread_s: float) -> None:
    """The broker is killed once it holds all messages, and starts again."""
    with LocalCluster(bookies=3, autorecovery=False) as cluster:
        broker, name = cluster.broker_url, f"public/default/r-{time.time_ns()}"
        begin_ms = int((time.time() + 3600) * 1000)
        asyncio.run(send_delayed(broker, name, messages, message_bytes, begin_ms, spread_s))
        assert cluster.broker is not None
        for what in ("at first", "after a kill", "after another kill"):
            began_s, began = time.monotonic(), bytes_read(cluster)
            asyncio.run(held(broker, cluster.admin_url, name, messages))
            took_s, mib = time.monotonic() - began_s, (bytes_read(cluster) - began) / 2**20
            memory = memory_mib(cluster.broker.pid or 0)
            print(
                f"{messages} delayed messages of {message_bytes} bytes, {what}: held after"
                f" {took_s:.1f} s, {mib:.1f} MiB read, broker {memory:.0f} MiB"
            )
            time.sleep(3)
            cluster.broker.kill()
            cluster.broker.start()


async def send_delayed(
    url: str, name: str, messages: int, message_bytes: int, begin_ms: int, spread_s: float
) -> None:
    client = await SocketClient.connected(url)
    await client.look_up(name)
    batches = []
    for _ in range(1000):
        due_ms = begin_ms + int(1000 * spread_s * random.random())
        metadata = MessageMetadata(
            producer_name="p", sequence_id=0, publish_time=begin_ms, deliver_at_time=due_ms
        )
        batches.append(pulsar_batch.build_batch(metadata, random.randbytes(message_bytes)))
    await client.produce(name, 0, messages, batches)
    await client.close()


async def held(url: str, admin_url: str, name: str, messages: int) -> None:
    """Returns once a Shared consumer's subscription holds so many messages."""
    client = await SocketClient.connected(url)
    while True:
        try:
            await client.look_up(name)
            await client.subscribe(name, "s", 0, lambda *_: None, 1000, subType=1)
            break
        except RuntimeError:
            await asyncio.sleep(0.1)
    while await asyncio.to_thread(delayed_of, admin_url, name) < messages:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    await client.close()


def delayed_of(admin_url: str, name: str) -> int:
    with urllib.request.urlopen(f"{admin_url}/admin/v2/persistent/{name}/stats") as response:
        return int(json.load(response)["subscriptions"]["s"]["msgDelayed"])


def bytes_read(cluster: LocalCluster) -> int:
    """By the broker: from the bookies' files, which are on this machine, and on its connections to
    bookies that are open."""
    assert cluster.broker is not None
    read = Path(f"/proc/{cluster.broker.pid}/io").read_text()
    total = int(read.partition("rchar: ")[2].split()[0])
    for bookie in cluster.bookies:
        number = bookie.frames.rpartition(":")[2]
        asked = ["ss", "-tinH", "sport", "=", f":{number}"]
        shown = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
        total += sum(map(int, re.findall(r"bytes_sent:(\d+)", shown)))
    return total


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--ahead", type=float, default=15.0)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--restart", action="store_true")
    parser.add_argument("--bytes", type=int, default=100)
    return parser


if __name__ == "__main__":
    main()
