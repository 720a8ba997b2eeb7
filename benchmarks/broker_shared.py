"""Shared and Key_Shared subscriptions under load: one topic is read by one subscription after the
other, with several consumers each, which acknowledge every message.

By Pulsar's Python client (each consumer in a thread), its Java client (message listeners), and a
socket that acknowledges what came together by one ACK.
"""

import selectors
import threading
import time

import pulsar

from benchmarks import broker_client
from benchmarks.broker_socket import Link
from spark_ledger.broker.wire.commands import command
from spark_ledger.broker.wire.frames import encode

TYPES = {"Shared": pulsar.ConsumerType.Shared, "Key_Shared": pulsar.ConsumerType.KeyShared}
SUB_TYPES = {"Shared": 1, "Key_Shared": 3}
QUEUE = 1_000
TIMEOUT_S = 120.0


def by_client(url: str, topic: str, count: int, kind: str, number: int) -> float:
    """Seconds until so many consumers of a new subscription have acknowledged `count`."""
    with broker_client.connected(url) as client:
        name = f"s-{time.time_ns()}"
        left, lock, end = [count], threading.Lock(), threading.Event()

        def take(consumer: pulsar.Consumer, message: pulsar.Message) -> None:
            consumer.acknowledge(message)
            with lock:
                left[0] -= 1
                if not left[0]:
                    end.set()

        began = time.perf_counter()
        for _ in range(number):
            client.subscribe(
                topic,
                name,
                consumer_type=TYPES[kind],
                receiver_queue_size=QUEUE,
                initial_position=pulsar.InitialPosition.Earliest,
                message_listener=take,
            )
        if not end.wait(TIMEOUT_S):
            raise RuntimeError(f"{left[0]} messages of {count} did not come")
        return time.perf_counter() - began


def by_socket(url: str, topic: str, batches: int, batch: int, kind: str, number: int) -> float:
    """As `by_client`; `batches` entries of `batch` messages (0: a lone one)."""
    links = [Link(url) for _ in range(number)]
    name = f"s-{time.time_ns()}"
    began = time.perf_counter()
    selector = selectors.DefaultSelector()
    owed = [0] * number
    for consumer_id, link in enumerate(links):
        link.subscribe_to(topic, name, SUB_TYPES[kind], consumer_id)
        selector.register(link, selectors.EVENT_READ, consumer_id)
        link.flow(QUEUE, consumer_id)
    left = batches
    while left > 0:
        ready = selector.select(TIMEOUT_S)
        if not ready:
            raise RuntimeError(f"{left} batches of {batches} did not come")
        for key, _ in ready:
            consumer_id = key.data
            link = links[consumer_id]
            if not (ids := link.message_ids()):
                continue
            left -= len(ids)
            owed[consumer_id] += len(ids) * max(1, batch)
            ack = command("ack", consumer_id=consumer_id, ack_type=0, message_id=ids)
            link.send(encode(ack))
            if owed[consumer_id] >= QUEUE // 2:
                link.flow(owed[consumer_id], consumer_id)
                owed[consumer_id] = 0
    seconds = time.perf_counter() - began
    for link in links:
        link.close()
    return seconds
