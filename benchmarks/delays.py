"""How late delayed messages come, with Pulsar's own client.

A producer sends `--messages` that are due evenly over `--seconds`, or all at once (`--seconds 0`),
`--ahead` seconds from the beginning on. A Shared consumer notes when each one comes; producer,
broker and consumer have one clock. Before its time no message may come.
"""

import argparse
import time

import numpy as np
import pulsar

from spark_ledger.local.cluster import LocalCluster


def main() -> None:
    arguments = _parser().parse_args()
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--ahead", type=float, default=15.0)
    return parser


if __name__ == "__main__":
    main()
