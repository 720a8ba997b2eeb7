"""Steps of the program: messages and producers, and what is not built here."""

import itertools
import time
from collections.abc import Sequence

import pulsar

from tests.integration.pulsar.case import (
    MODE,
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

# -- messages --------------------------------------------------------------------------------------


def a_lone_message_has_all_that_was_said(case: Case) -> None:
    topic = case.topic(0)
    consumer = case.client.subscribe(topic, "s")
    producer = case.client.create_producer(topic, producer_name="p", batching_enabled=False)
    receipt = producer.send(
        b"value",
        properties={"a": "1", "ü": "ß"},
        partition_key="key",
        event_timestamp=1_600_000_000_000,
    )
    one = consumer.receive(TIMEOUT_MS)
    case.seen |= {
        "data": one.data().decode(),
        "properties": one.properties(),
        "key": one.partition_key(),
        "ordering key": one.ordering_key(),
        "event time": one.event_timestamp(),
        "producer": one.producer_name(),
        "redelivery": one.redelivery_count(),
        "topic": one.topic_name() == topic,
        "the receipt's id": one.message_id() == receipt,
        "published lately": abs(one.publish_timestamp() - time.time() * 1000) < 60_000,
        "batch": (one.message_id().batch_index(), one.message_id().partition()),
    }


def a_batch_is_one_entry_with_an_index_for_each_message(case: Case) -> None:
    topic = case.topic(0)
    consumer = case.client.subscribe(topic, "s")
    ids = batch(batching(case, topic), numbered(10))
    found = received(consumer, 10)
    case.seen |= {
        "values": text(found),
        "index": [one.message_id().batch_index() for one in found],
        "receipts are the ids": [one.message_id() for one in found] == ids,
        "entries": len({one.message_id().entry_id() for one in found}),
        "ascending": all(a < b for a, b in itertools.pairwise(ids)),
    }


def null_and_empty_values_are_told_apart_from_others(case: Case) -> None:
    topic = case.topic(0)
    consumer = case.client.subscribe(topic, "s")
    for producer in (
        case.client.create_producer(topic, batching_enabled=False),
        batching(case, topic),
    ):
        batch(producer, [None, b"", b"x"])
    case.seen["values"] = text(received(consumer, 6))


def a_message_with_every_codec_is_the_same(case: Case) -> None:
    topic = case.topic(0)
    consumer = case.client.subscribe(topic, "s")
    for codec in ("NONE", "LZ4", "ZLib", "ZSTD", "SNAPPY"):
        kind = getattr(pulsar.CompressionType, codec)
        case.client.create_producer(topic, compression_type=kind).send(codec.encode() * 100)
    case.seen["sizes"] = [len(one.data()) for one in received(consumer, 5)]


def an_ordering_key_and_empty_properties_come_through(case: Case) -> None:
    topic = case.topic(0)
    consumer = case.client.subscribe(topic, "s")
    producer = case.client.create_producer(topic)
    producer.send(b"x", partition_key="k", ordering_key="o", properties={"": "empty", "e": ""})
    (one,) = received(consumer, 1)
    case.seen |= {"order": one.ordering_key(), "key": one.partition_key(), "said": one.properties()}


def a_message_that_is_too_large_is_refused_and_the_next_one_taken(case: Case) -> None:
    topic = case.topic(0)
    producer = case.client.create_producer(topic, batching_enabled=False)
    consumer = case.client.subscribe(topic, "s")
    case.seen["6 MiB"] = case.error(lambda: producer.send(b"x" * (6 << 20)))
    producer.send(b"y" * (4 << 20))
    case.seen["4 MiB"] = len(consumer.receive(TIMEOUT_MS).data())


def text_with_a_string_schema_comes_through(case: Case) -> None:
    topic = case.topic(0)
    schema = pulsar.schema.StringSchema()
    consumer = case.client.subscribe(topic, "s", schema=schema)
    case.client.create_producer(topic, schema=schema).send("grün")
    case.seen["value"] = consumer.receive(TIMEOUT_MS).value()


# -- producers -------------------------------------------------------------------------------------


def a_producers_name_is_taken_while_it_is_connected(case: Case) -> None:
    topic = case.topic(0)
    first = case.client.create_producer(topic, producer_name="p")
    again = lambda: case.other.create_producer(topic, producer_name="p")  # noqa: E731
    case.seen["while it is there"] = case.error(again)
    first.close()
    case.seen["after it was closed"] = case.error(again)
    case.seen["sending when closed"] = case.error(lambda: first.send(b"x"))


def an_exclusive_producer_is_alone(case: Case) -> None:
    topic = case.topic(0)
    first = case.client.create_producer(topic, access_mode=MODE.Exclusive)
    make = case.other.create_producer
    case.seen |= {
        "shared": case.error(lambda: make(topic)),
        "exclusive": case.error(lambda: make(topic, access_mode=MODE.Exclusive)),
    }
    first.close()
    case.seen["afterwards"] = case.error(lambda: make(topic, access_mode=MODE.Exclusive))


def an_exclusive_producer_does_not_come_beside_shared_ones(case: Case) -> None:
    topic = case.topic(0)
    case.client.create_producer(topic)
    make = case.other.create_producer
    case.seen["exclusive"] = case.error(lambda: make(topic, access_mode=MODE.Exclusive))
    case.seen["shared"] = case.error(lambda: make(topic))


def a_fencing_producer_sends_the_others_away(case: Case) -> None:
    topic = case.topic(0)
    first = case.client.create_producer(topic, access_mode=MODE.Exclusive)
    first.send(b"first")
    second = case.other.create_producer(topic, access_mode=MODE.ExclusiveWithFencing)
    second.send(b"second")
    case.seen["the first"] = case.error(lambda: first.send(b"lost"))
    reader = case.client.create_reader(topic, pulsar.MessageId.earliest)
    case.seen["values"] = [reader.read_next(TIMEOUT_MS).data().decode() for _ in range(2)]
    case.seen["more"] = reader.has_message_available()


def sequence_ids_count_from_what_the_producer_says(case: Case) -> None:
    topic = case.topic(0)
    producer = case.client.create_producer(topic, producer_name="p", initial_sequence_id=41)
    first = producer.last_sequence_id()
    sent(producer, numbered(3))
    case.seen |= {"first": first, "last": producer.last_sequence_id()}


def what_is_sent_again_is_stored_once_with_deduplication(case: Case) -> None:
    topic = case.topic(0, once=True, ns="once")
    consumer = case.client.subscribe(topic, "s")

    def send(ids: Sequence[int]) -> int:
        producer = case.client.create_producer(topic, producer_name="p", batching_enabled=False)
        known = producer.last_sequence_id()
        for number in ids:
            receipts.append(producer.send(b"%d" % number, sequence_id=number))
        producer.close()
        return known

    receipts: list[pulsar.MessageId] = []
    case.seen["known at first"] = send((1, 2, 3))
    case.seen["known again"] = send((2, 3, 4))
    case.seen["values"] = text(received(consumer, 4))
    case.seen["nothing more"] = nothing(consumer)
    case.seen["entry of what was there"] = receipts[3].entry_id()


def a_terminated_topic_takes_no_more_and_is_read_to_its_end(case: Case) -> None:
    topic = case.topic(0)
    producer = case.client.create_producer(topic)
    consumer = case.client.subscribe(topic, "s")
    sent(producer, numbered(2))
    case.world.terminate(topic)
    case.seen["a send"] = case.error(lambda: producer.send(b"late"))
    case.seen["a new producer"] = case.error(lambda: case.other.create_producer(topic))
    case.seen["values"] = text(received(consumer, 2))


# -- what is not built here ------------------------------------------------------------------------


def a_chunked_message_is_taken(case: Case) -> None:
    producer = case.client.create_producer(
        case.topic(0), batching_enabled=False, chunking_enabled=True
    )
    case.seen["6 MiB"] = case.error(lambda: producer.send(b"x" * (6 << 20)))


class Reading(pulsar.schema.Record):
    celsius = pulsar.schema.Double()


def rows_with_a_schema_are_taken(case: Case) -> None:
    schema = pulsar.schema.JsonSchema(Reading)
    make = case.client.create_producer
    case.seen["json"] = case.error(lambda: make(case.topic(0), schema=schema))


def a_topic_that_is_not_kept_is_made(case: Case) -> None:
    space = "namespaces/public/in-memory"  # its policy holds at every broker
    case.world.ask("PUT", space)
    allowed = {"allowAutoTopicCreation": True, "topicType": "non-partitioned"}
    case.world.ask("POST", f"{space}/autoTopicCreation", allowed)
    topic = case.topic(ns="in-memory").replace("persistent://", "non-persistent://")
    case.seen["a producer"] = case.error(lambda: case.client.create_producer(topic))
