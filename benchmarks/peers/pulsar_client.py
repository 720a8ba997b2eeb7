"""Pulsar's Python client against a standalone (peers.sh up pulsar; extra `bench`).

Prints throughput with batching at two message sizes, and the time from produce to consume at a
fixed rate.
"""

import os
import statistics
import threading
import time

import pulsar

URL = "pulsar://127.0.0.1:6650"
RECEIVE_TIMEOUT_MS = 20_000


def throughput(client: pulsar.Client, topic: str, message_bytes: int, count: int) -> None:
    consumer = client.subscribe(topic, "bench", consumer_type=pulsar.ConsumerType.Exclusive)
    producer = client.create_producer(
        topic,
        batching_enabled=True,
        batching_max_publish_delay_ms=10,
        block_if_queue_full=True,
        max_pending_messages=5000,
    )
    message = os.urandom(message_bytes)
    started = time.perf_counter()
    for _ in range(count):
        producer.send_async(message, None)
    producer.flush()
    produced = count / (time.perf_counter() - started)
    started = time.perf_counter()
    for _ in range(count):
        consumer.acknowledge(consumer.receive(RECEIVE_TIMEOUT_MS))
    consumed = count / (time.perf_counter() - started)
    consumer.close()
    producer.close()
    print(f"{message_bytes} B: produce {produced:,.0f}/s, consume + ack {consumed:,.0f}/s")


def latency(client: pulsar.Client, topic: str, rate: int, seconds: int) -> None:
    consumer = client.subscribe(topic, "bench")
    producer = client.create_producer(topic)
    count = rate * seconds
    times_ms: list[float] = []

    def receive() -> None:
        for _ in range(count):
            message = consumer.receive(RECEIVE_TIMEOUT_MS)
            times_ms.append(1e3 * (time.perf_counter() - float(message.data())))
            consumer.acknowledge(message)

    receiver = threading.Thread(target=receive, name="receive")
    receiver.start()
    started = time.perf_counter()
    for number in range(count):
        time.sleep(max(0.0, started + number / rate - time.perf_counter()))
        producer.send_async(repr(time.perf_counter()).encode(), None)
    receiver.join()
    p99 = sorted(times_ms)[int(0.99 * count)]
    print(f"at {rate}/s: p50 {statistics.median(times_ms):.2f} ms, p99 {p99:.2f} ms")


def main() -> None:
    topic = f"persistent://public/default/bench-{time.time_ns()}"
    client = pulsar.Client(URL, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
    throughput(client, f"{topic}-200", 200, 200_000)
    throughput(client, f"{topic}-1024", 1024, 200_000)
    latency(client, f"{topic}-latency", 200, 8)
    client.close()


if __name__ == "__main__":
    main()
