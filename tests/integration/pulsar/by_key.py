"""Steps of the program: Key_Shared subscriptions."""

from collections.abc import Iterable, Sequence
from typing import Any

import pulsar

from tests.integration.pulsar.case import (
    EARLIEST,
    KEY_SHARED,
    Case,
    drained,
    nothing,
    received,
    text,
)

KEYS = [f"k{number}" for number in range(12)]
LOW, HIGH = (0, 32_767), (32_768, 65_535)


def _auto(case: Case, topic: str, name: str, **options: Any) -> pulsar.Consumer:
    client = case.client if name == "a" else case.other
    return client.subscribe(topic, "s", KEY_SHARED, consumer_name=name, **options)


def _sticky(
    case: Case, topic: str, name: str, *ranges: tuple[int, int], **options: Any
) -> pulsar.Consumer:
    return _auto(case, topic, name, key_shared_policy=_ranges(*ranges), **options)


def _ranges(*ranges: tuple[int, int], loose: bool = False) -> pulsar.ConsumerKeySharedPolicy:
    mode = pulsar.KeySharedMode.Sticky
    return pulsar.ConsumerKeySharedPolicy(mode, loose, list(ranges))


def _lone(case: Case, topic: str) -> pulsar.Producer:
    return case.client.create_producer(topic, batching_enabled=False)


def _rounds(producer: pulsar.Producer, count: int, keys: Iterable[str] = KEYS) -> None:
    for number in range(count):
        for key in keys:
            producer.send(f"{key}:{number}".encode(), partition_key=key)


def _by_key(values: Sequence[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for value in values:
        key, number = value.split(":")
        found.setdefault(key, []).append(number)
    return {key: found[key] for key in sorted(found)}


def _judged(case: Case, *values: Sequence[str]) -> None:
    """Whether each key is at one consumer, in order; and all that came."""
    found = [_by_key(one) for one in values]
    case.seen["a key is at one consumer"] = not set(found[0]).intersection(*found[1:])
    case.seen["in order"] = all(
        numbers == sorted(numbers, key=int) for one in found for numbers in one.values()
    )
    case.seen["all"] = sum(map(len, values))


def a_key_is_at_one_consumer_in_order(case: Case) -> None:
    topic = case.topic(0)
    first, second = _auto(case, topic, "a"), _auto(case, topic, "b")
    _rounds(_lone(case, topic), 5)
    _judged(case, text(drained(first)), text(drained(second)))


def an_ordering_key_counts_before_the_key(case: Case) -> None:
    topic = case.topic(0)
    first, second = _auto(case, topic, "a"), _auto(case, topic, "b")
    producer = _lone(case, topic)
    for number in range(20):
        producer.send(b"same:%d" % number, partition_key=f"k{number}", ordering_key="same")
    counts = sorted(len(drained(one)) for one in (first, second))
    case.seen["counts"] = counts


def messages_without_a_key_are_spread(case: Case) -> None:
    topic = case.topic(0)
    first, second = _sticky(case, topic, "a", LOW), _sticky(case, topic, "b", HIGH)
    producer = _lone(case, topic)
    for number in range(40):
        producer.send(b"%d" % number)
    counts = [len(drained(one)) for one in (first, second)]
    case.seen |= {"all": sum(counts), "both have some": all(counts)}


def batches_of_one_key_go_to_its_consumer(case: Case) -> None:
    topic = case.topic(0)
    first, second = _auto(case, topic, "a"), _auto(case, topic, "b")
    producer = case.client.create_producer(
        topic,
        batching_enabled=True,
        batching_type=pulsar.BatchingType.KeyBased,
        batching_max_publish_delay_ms=1000,
    )
    for number in range(5):
        for key in KEYS:
            producer.send_async(f"{key}:{number}".encode(), None, partition_key=key)
    producer.flush()
    _judged(case, text(drained(first)), text(drained(second)))


def a_range_of_slots_has_the_same_keys_as_in_pulsar(case: Case) -> None:
    topic = case.topic(0)
    first, second = _sticky(case, topic, "a", LOW), _sticky(case, topic, "b", HIGH)
    _rounds(_lone(case, topic), 2)
    case.seen["low"] = _by_key(text(drained(first)))
    case.seen["high"] = _by_key(text(drained(second)))


def slots_in_no_range_wait_and_do_not_block_others(case: Case) -> None:
    topic = case.topic(0)
    first = _sticky(case, topic, "a", LOW)
    _rounds(_lone(case, topic), 2)
    case.seen["low"] = _by_key(text(drained(first)))
    case.seen["high, later"] = _by_key(text(drained(_sticky(case, topic, "b", HIGH))))


def several_ranges_of_one_consumer(case: Case) -> None:
    topic = case.topic(0)
    first = _sticky(case, topic, "a", (0, 9_999), (20_000, 39_999))
    second = _sticky(case, topic, "b", (10_000, 19_999), (40_000, 65_535))
    _rounds(_lone(case, topic), 1)
    case.seen |= {"a": sorted(text(drained(first))), "b": sorted(text(drained(second)))}


def ranges_do_not_overlap(case: Case) -> None:
    topic = case.topic(0)
    first = _sticky(case, topic, "a", (0, 100))
    case.seen |= {
        "the same": case.error(lambda: _sticky(case, topic, "b", (0, 100))),
        "a part": case.error(lambda: _sticky(case, topic, "b", (50, 200))),
        "an edge": case.error(lambda: _sticky(case, topic, "b", (100, 200))),
        "beside it": case.error(lambda: _sticky(case, topic, "b", (101, 200))),
        "overlapping themselves": case.error(
            lambda: _sticky(case, topic, "b", (300, 400), (350, 500))
        ),
        "beyond the last": case.error(lambda: _sticky(case, topic, "b", (300, 65_536))),
    }
    first.close()
    case.seen["once it is free"] = case.error(lambda: _sticky(case, topic, "b", (0, 100)))


def a_key_shared_subscription_in_use_has_one_mode(case: Case) -> None:
    topic = case.topic(0)
    first = _auto(case, topic, "a")
    loose = pulsar.ConsumerKeySharedPolicy(pulsar.KeySharedMode.AutoSplit, True)
    case.seen |= {
        "ranges": case.error(lambda: _sticky(case, topic, "b", LOW)),
        "out of order": case.error(lambda: _auto(case, topic, "b", key_shared_policy=loose)),
        "shared": case.error(lambda: case.other.subscribe(topic, "s", pulsar.ConsumerType.Shared)),
        "alike": case.error(lambda: _auto(case, topic, "b")),
    }
    first.close()


def a_key_moves_to_another_consumer_once_nothing_of_it_is_unacknowledged(case: Case) -> None:
    topic = case.topic(0)
    first = _auto(case, topic, "a")
    producer = _lone(case, topic)
    _rounds(producer, 1)
    before = received(first, len(KEYS), ack=False)
    second = _auto(case, topic, "b")
    _rounds(producer, 1)
    case.seen["nothing for the second"] = nothing(second)
    for message in before:
        first.acknowledge(message)
    values = text(drained(first)), text(drained(second))
    case.seen["both have some"] = all(values)
    _judged(case, *values)


def the_keys_of_a_consumer_that_leaves_go_on_in_order(case: Case) -> None:
    topic = case.topic(0)
    first, second = _auto(case, topic, "a"), _auto(case, topic, "b")
    _rounds(_lone(case, topic), 4)
    mine = text(drained(first, ack=False))
    others = text(drained(second))
    first.close()
    case.seen["of the one that left"] = sorted(mine) == sorted(left := text(drained(second)))
    _judged(case, left, [])
    case.seen["in all"] = len(left) + len(others)


def what_a_key_shared_consumer_nacks_comes_again(case: Case) -> None:
    topic = case.topic(0)
    consumer = _auto(case, topic, "a", negative_ack_redelivery_delay_ms=1000)
    _rounds(_lone(case, topic), 2, KEYS[:2])
    found = received(consumer, 4, ack=False)
    for message in found[1:]:
        consumer.acknowledge(message)
    consumer.negative_acknowledge(found[0])
    (again,) = received(consumer, 1)
    case.seen |= {"again": again.data().decode(), "count": again.redelivery_count()}
    case.seen["nothing more"] = nothing(consumer)


def a_full_consumer_holds_back_its_own_keys_only(case: Case) -> None:
    topic = case.topic(0)
    full = _sticky(case, topic, "a", LOW, receiver_queue_size=1)
    other = _sticky(case, topic, "b", HIGH)
    _rounds(_lone(case, topic), 3)
    case.seen["the other"] = _by_key(text(drained(other)))
    case.seen["the full one"] = _by_key(text(drained(full)))


def a_key_shared_subscription_begins_at_the_earliest_message(case: Case) -> None:
    topic = case.topic(0)
    _rounds(_lone(case, topic), 2)
    consumer = _auto(case, topic, "a", initial_position=EARLIEST)
    case.seen["all"] = _by_key(text(received(consumer, 2 * len(KEYS))))
