"""Steps of the program: subscriptions, places, partitions and names."""

import re
import time
import uuid
from typing import Any

import pulsar

from tests.integration.pulsar.case import (
    EARLIEST,
    EXCLUSIVE,
    FAILOVER,
    LATEST,
    TIMEOUT_MS,
    Case,
    batch,
    batching,
    nothing,
    numbered,
    received,
    sent,
    text,
)

# -- subscriptions ---------------------------------------------------------------------------------


def a_second_exclusive_consumer_is_refused(case: Case) -> None:
    topic = case.topic(0)
    first = case.client.subscribe(topic, "s")
    case.seen["the second"] = case.error(lambda: case.other.subscribe(topic, "s"))
    case.seen["of another name"] = case.error(lambda: case.other.subscribe(topic, "t"))
    first.close()
    case.seen["afterwards"] = case.error(lambda: case.other.subscribe(topic, "s"))


def a_subscription_in_use_has_one_type(case: Case) -> None:
    topic = case.topic(0)
    first = case.client.subscribe(topic, "s", EXCLUSIVE)
    case.seen["failover"] = case.error(lambda: case.other.subscribe(topic, "s", FAILOVER))
    first.close()
    second = case.client.subscribe(topic, "s", FAILOVER)
    case.seen["exclusive"] = case.error(lambda: case.other.subscribe(topic, "s", EXCLUSIVE))
    second.close()
    case.seen["unused"] = case.error(lambda: case.other.subscribe(topic, "s", EXCLUSIVE))


def a_subscription_begins_at_the_end_or_where_it_is_told(case: Case) -> None:
    topic = case.topic(0)
    producer = case.client.create_producer(topic)
    sent(producer, numbered(3))
    late = case.client.subscribe(topic, "late", initial_position=LATEST)
    early = case.client.subscribe(topic, "early", initial_position=EARLIEST)
    producer.send(b"3")
    case.seen |= {"late": text(received(late, 1)), "early": text(received(early, 4))}


def a_durable_subscription_goes_on_after_what_was_acknowledged(case: Case) -> None:
    topic = case.topic(0)
    consumer = case.client.subscribe(topic, "s")
    sent(case.client.create_producer(topic), numbered(6))
    received(consumer, 4)
    consumer.close()
    consumer = case.client.subscribe(topic, "s", initial_position=EARLIEST)
    case.seen["again"] = text(received(consumer, 2))
    case.seen["nothing more"] = nothing(consumer)


def a_cumulative_ack_covers_all_before_it(case: Case) -> None:
    topic = case.topic(0)
    consumer = case.client.subscribe(topic, "s")
    sent(case.client.create_producer(topic, batching_enabled=False), numbered(6))
    found = received(consumer, 5, ack=False)
    consumer.acknowledge_cumulative(found[3])
    consumer.close()
    case.seen["again"] = text(received(case.client.subscribe(topic, "s"), 2))


def what_is_nacked_comes_again_and_says_so(case: Case) -> None:
    topic = case.topic(0)
    # later than the client sends the acknowledgement, which it groups with others for 100 ms
    consumer = case.client.subscribe(topic, "s", negative_ack_redelivery_delay_ms=1000)
    sent(case.client.create_producer(topic, batching_enabled=False), numbered(3))
    found = received(consumer, 3, ack=False)
    consumer.acknowledge(found[0])
    consumer.negative_acknowledge(found[1])
    again = received(consumer, 2)
    case.seen["again"] = text(again)
    case.seen["counts"] = [one.redelivery_count() for one in again]


def what_is_asked_for_again_comes_again(case: Case) -> None:
    topic = case.topic(0)
    consumer = case.client.subscribe(topic, "s")
    sent(case.client.create_producer(topic, batching_enabled=False), numbered(4))
    consumer.acknowledge(received(consumer, 4, ack=False)[0])
    consumer.redeliver_unacknowledged_messages()
    case.seen["again"] = text(received(consumer, 3))


def of_failover_consumers_the_first_by_name_is_active(case: Case) -> None:
    topic = f"{case.topic(1)}-partition-0"  # without partitions a hash of the name decides
    first = case.client.subscribe(topic, "s", FAILOVER, consumer_name="a")
    second = case.other.subscribe(topic, "s", FAILOVER, consumer_name="b")
    producer = case.client.create_producer(topic)
    producer.send(b"0")
    case.seen["the first has"] = text(received(first, 1))
    case.seen["the second has nothing"] = nothing(second)
    first.close()
    producer.send(b"1")
    case.seen["then the second has"] = text(received(second, 1))


def an_unsubscribed_name_begins_anew(case: Case) -> None:
    topic = case.topic(0)
    consumer = case.client.subscribe(topic, "s")
    producer = case.client.create_producer(topic)
    sent(producer, numbered(2))
    received(consumer, 1)
    case.seen["unsubscribe"] = case.error(consumer.unsubscribe)
    consumer = case.client.subscribe(topic, "s", initial_position=EARLIEST)
    case.seen["anew"] = text(received(consumer, 2))


def a_name_that_others_use_is_not_unsubscribed(case: Case) -> None:
    topic = case.topic(0)
    first = case.client.subscribe(topic, "s", FAILOVER)
    second = case.other.subscribe(topic, "s", FAILOVER)
    case.seen["beside another"] = case.error(first.unsubscribe)
    second.close()
    case.seen["alone"] = case.error(first.unsubscribe)


# -- places ----------------------------------------------------------------------------------------


def a_consumer_seeks_by_id_and_to_both_ends(case: Case) -> None:
    topic = case.topic(0)
    consumer = case.client.subscribe(topic, "s")
    producer = case.client.create_producer(topic, batching_enabled=False)
    ids = sent(producer, numbered(6))
    received(consumer, 6)
    consumer.seek(ids[3])
    case.seen["an id"] = text(received(consumer, 1))
    consumer.seek(pulsar.MessageId.earliest)
    case.seen["earliest"] = text(received(consumer, 2))
    consumer.seek(pulsar.MessageId.latest)
    case.seen["latest"] = nothing(consumer)
    producer.send(b"new")
    case.seen["and then"] = text(received(consumer, 1))


def a_consumer_seeks_by_time(case: Case) -> None:
    topic = case.topic(0)
    consumer = case.client.subscribe(topic, "s")
    producer = case.client.create_producer(topic, batching_enabled=False)
    before_ms = int(time.time() * 1000) - 60_000
    sent(producer, numbered(3))
    time.sleep(0.5)
    middle_ms = int(time.time() * 1000)
    time.sleep(0.5)
    sent(producer, [b"3", b"4"])
    received(consumer, 5)
    consumer.seek(middle_ms)
    case.seen["the middle"] = text(received(consumer, 2))
    consumer.seek(before_ms)
    case.seen["long before"] = text(received(consumer, 5))
    consumer.seek(int(time.time() * 1000) + 3_600_000)
    case.seen["an hour on"] = nothing(consumer)


def a_seek_beyond_the_end_is_taken(case: Case) -> None:
    topic = case.topic(0)
    consumer = case.client.subscribe(topic, "s")
    producer = case.client.create_producer(topic, batching_enabled=False)
    (last,) = sent(producer, [b"0"])
    received(consumer, 1)
    beyond = pulsar.MessageId(-1, last.ledger_id(), last.entry_id() + 1000, -1)
    case.seen["the seek"] = case.error(lambda: consumer.seek(beyond))
    case.seen["nothing"] = nothing(consumer)
    producer.send(b"1")
    case.seen["nothing of the next one"] = nothing(consumer)


def a_reader_begins_where_it_is_told(case: Case) -> None:
    topic = case.topic(0)
    ids = sent(case.client.create_producer(topic, batching_enabled=False), numbered(5))

    def read(start: pulsar.MessageId, **said: Any) -> list[str]:
        reader = case.client.create_reader(topic, start, **said)
        found = []
        while reader.has_message_available():
            found.append(reader.read_next(TIMEOUT_MS).data().decode())
        return found

    case.seen |= {
        "earliest": read(pulsar.MessageId.earliest),
        "latest": read(pulsar.MessageId.latest),
        "after an id": read(ids[2]),
        "from an id": read(ids[2], start_message_id_inclusive=True),
        "the last one": read(pulsar.MessageId.latest, start_message_id_inclusive=True),
    }


def a_reader_begins_within_a_batch(case: Case) -> None:
    topic = case.topic(0)
    ids = batch(batching(case, topic), numbered(5))
    after = case.client.create_reader(topic, ids[2])
    since = case.client.create_reader(topic, ids[2], start_message_id_inclusive=True)
    case.seen["after"] = after.read_next(TIMEOUT_MS).data().decode()
    case.seen["from"] = since.read_next(TIMEOUT_MS).data().decode()
    last = case.client.create_reader(topic, ids[4])
    case.seen["more after the last"] = last.has_message_available()


def the_last_id_is_that_of_the_last_message(case: Case) -> None:
    topic = case.topic(0)
    consumer = case.client.subscribe(topic, "s")
    case.seen["of none"] = consumer.get_last_message_id().entry_id()
    producer = case.client.create_producer(topic, batching_enabled=False)
    ids = sent(producer, numbered(2))
    case.seen["of a lone one"] = consumer.get_last_message_id() == ids[-1]
    ids = batch(batching(case, topic), numbered(3))
    case.seen["of a batch"] = consumer.get_last_message_id() == ids[-1]


def a_table_view_has_the_last_value_of_each_key(case: Case) -> None:
    topic = case.topic(0)
    producer = case.client.create_producer(topic)
    for number in range(10):
        producer.send(b"%d" % number, partition_key=f"k{number % 3}")
    view = case.client.create_table_view(topic)
    case.seen["size"] = len(view)
    case.seen["values"] = [view.get(key).decode() for key in ("k0", "k1", "k2")]


# -- partitions and names --------------------------------------------------------------------------


def a_partitioned_topic_keeps_the_order_of_keys(case: Case) -> None:
    topic = case.topic(3)
    names = case.client.get_topic_partitions(topic)
    producer = case.client.create_producer(topic, batching_enabled=False)
    consumer = case.client.subscribe(topic, "s")
    for number in range(30):
        producer.send(b"%d" % number, partition_key=f"k{number % 5}")
    by_key: dict[str, list[tuple[int, int]]] = {}
    for one in received(consumer, 30):
        place = (int(one.data()), one.message_id().partition())
        by_key.setdefault(one.partition_key(), []).append(place)
    case.seen |= {
        "partitions": [name.removeprefix(topic) for name in names],
        "by key": {key: by_key[key] for key in sorted(by_key)},
    }


def a_partition_is_used_by_its_own_name(case: Case) -> None:
    topic = case.topic(2)
    one = f"{topic}-partition-1"
    consumer = case.client.subscribe(one, "s")
    case.client.create_producer(one).send(b"x")
    found = consumer.receive(TIMEOUT_MS)
    case.seen |= {
        "partition": found.message_id().partition(),
        "topic": found.topic_name() == one,
        "one that is not there": case.error(
            lambda: case.client.create_producer(f"{topic}-partition-7")
        ),
    }


def several_topics_and_a_pattern_are_consumed_together(case: Case) -> None:
    stem = uuid.uuid4().hex[:12]
    topics = [f"persistent://public/default/m-{stem}-{number}" for number in range(2)]
    for topic in topics:
        case.world.create(topic)
        case.client.create_producer(topic).send(topic[-1].encode())
    both = case.client.subscribe(topics, "s", initial_position=EARLIEST)
    case.seen["several"] = sorted(text(received(both, 2)))
    pattern = re.compile(f"persistent://public/default/m-{stem}-.*")
    by_pattern = case.client.subscribe(pattern, "t", initial_position=EARLIEST)
    case.seen["a pattern"] = sorted(text(received(by_pattern, 2)))


def a_topic_that_nobody_may_make_is_not_found(case: Case) -> None:
    topic = case.topic(ns="closed")
    client = pulsar.Client(
        case.world.closed_url,
        operation_timeout_seconds=30,
        logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error),
    )
    try:
        case.seen["a producer"] = case.error(lambda: client.create_producer(topic))
        case.seen["a consumer"] = case.error(lambda: client.subscribe(topic, "s"))
        case.seen["a reader"] = case.error(
            lambda: client.create_reader(topic, pulsar.MessageId.earliest)
        )
    finally:
        client.close()


def wrong_names_are_refused(case: Case) -> None:
    make = case.client.create_producer
    case.seen |= {
        "no such scheme": case.error(lambda: make("http://public/default/x")),
        "too short": case.error(lambda: make("persistent://public/x")),
        "an unknown tenant": case.error(lambda: make("persistent://nobody/default/x")),
        "an unknown namespace": case.error(lambda: make("persistent://public/nowhere/x")),
    }
