"""Pulsar's own client (pulsar-client, C++ inside) at work: the same code for every broker."""

import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pulsar

TIMEOUT_MS = 60_000
PENDING_MAX = 5_000
BATCH_DELAY_MS = 10


@contextmanager
def connected(url: str) -> Iterator[pulsar.Client]:
    client = pulsar.Client(url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
    try:
        yield client
    finally:
        client.close()


def produce_by_itself(url: str, topic: str, message: bytes, count: int, batched: bool) -> float:
    """`produce` with a client of its own."""
    with connected(url) as client:
        return produce(client, topic, message, count, batched)


def consume_by_itself(url: str, topic: str, count: int) -> float:
    """`consume` with a client of its own."""
    with connected(url) as client:
        return consume(client, topic, count)


def produce(client: pulsar.Client, topic: str, message: bytes, count: int, batched: bool) -> float:
    """Seconds for so many messages, each with its receipt."""
    producer = client.create_producer(
        topic,
        batching_enabled=batched,
        batching_max_publish_delay_ms=BATCH_DELAY_MS,
        block_if_queue_full=True,
        max_pending_messages=PENDING_MAX,
    )
    failed: list[pulsar.Result] = []

    def receipt(result: pulsar.Result, _: object) -> None:
        if result != pulsar.Result.Ok:
            failed.append(result)

    began = time.perf_counter()
    for _ in range(count):
        producer.send_async(message, receipt)
    producer.flush()
    took = time.perf_counter() - began
    producer.close()
    assert not failed, failed[:3]
    return took


def consume(client: pulsar.Client, topic: str, count: int) -> float:
    """Seconds until a new subscription has received and acknowledged so many."""
    consumer = client.subscribe(
        topic,
        f"s-{time.time_ns()}",
        receiver_queue_size=5_000,
        initial_position=pulsar.InitialPosition.Earliest,
    )
    began = time.perf_counter()
    for _ in range(count):
        consumer.acknowledge(consumer.receive(TIMEOUT_MS))
    took = time.perf_counter() - began
    consumer.close()
    return took


@dataclass(frozen=True)
class Latency:
    p50_ms: float
    p99_ms: float


def latency(client: pulsar.Client, topic: str, rate: int, seconds: int) -> Latency:
    """From before a message is sent until a consumer has it, `rate` a second, not batched."""
    consumer = client.subscribe(topic, "latency")
    producer = client.create_producer(topic, batching_enabled=False)
    count = rate * seconds
    times_ms: list[float] = []

    def receive() -> None:
        for _ in range(count):
            message = consumer.receive(TIMEOUT_MS)
            times_ms.append(1e3 * (time.perf_counter() - float(message.data())))
            consumer.acknowledge(message)

    receiver = threading.Thread(target=receive, name="receive")
    receiver.start()
    began = time.perf_counter()
    for number in range(count):
        time.sleep(max(0.0, began + number / rate - time.perf_counter()))
        producer.send_async(repr(time.perf_counter()).encode(), lambda *_: None)
    receiver.join()
    consumer.close()
    producer.close()
    counted = sorted(times_ms[rate:])  # the first second warms up
    return Latency(statistics.median(counted), counted[int(0.99 * len(counted))])
