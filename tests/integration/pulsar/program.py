"""One program for Pulsar's Python client, of short steps: what it sees is a transcript.

Run against Pulsar standalone it says what a client is entitled to; run against our broker it has
to say the same. Every step has topics of its own and gives what it saw under names: values,
counts, comparisons of ids and the client's own names of errors, never an id, an address or a time.
A step that a broker breaks off ends with the name of that error.
"""

import itertools
import re
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import pulsar

TIMEOUT_MS = 30_000
NOTHING_MS = 700
"""How long nothing comes, where nothing is to come."""
EARLIEST, LATEST = pulsar.InitialPosition.Earliest, pulsar.InitialPosition.Latest
EXCLUSIVE, FAILOVER = pulsar.ConsumerType.Exclusive, pulsar.ConsumerType.Failover
MODE = pulsar.ProducerAccessMode
Seen = dict[str, Any]


class World(Protocol):
    """A broker with what a client cannot ask for."""

    url: str
    closed_url: str
    """Where no client makes a topic in the namespace public/closed."""

    def create(self, topic: str, partitions: int = 0, *, once: bool = False) -> None:
        """Make a topic; 0: not partitioned. `once`: with deduplication, in public/once."""

    def terminate(self, topic: str) -> None:
        """Take no more messages in it."""


@dataclass
class Case:
    """What a step works with."""

    world: World
    client: pulsar.Client
    other: pulsar.Client
    seen: Seen = field(default_factory=dict)

    def topic(
        self, partitions: int | None = None, *, once: bool = False, ns: str = "default"
    ) -> str:
        """A new name; with `partitions` the topic is there."""
        name = f"persistent://public/{ns}/d-{uuid.uuid4().hex[:12]}"
        if partitions is not None:
            self.world.create(name, partitions, once=once)
        return name

    def error(self, act: Callable[[], object]) -> str:
        """The name of the client's error; "none" where it works."""
        return error_of(act)


def error_of(act: Callable[[], object]) -> str:
    try:
        act()
    except pulsar.PulsarException as error:
        return type(error).__name__
    except ValueError as error:
        return f"ValueError: {error}"
    return "none"


def sent(producer: pulsar.Producer, values: Sequence[bytes], **said: Any) -> list[pulsar.MessageId]:
    return [producer.send(value, **said) for value in values]


def received(consumer: pulsar.Consumer, count: int, *, ack: bool = True) -> list[pulsar.Message]:
    found = []
    for _ in range(count):
        found.append(consumer.receive(TIMEOUT_MS))
        if ack:
            consumer.acknowledge(found[-1])
    return found


def text(messages: Sequence[pulsar.Message]) -> list[str]:
    return [one.data().decode() for one in messages]


def numbered(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


def nothing(consumer: pulsar.Consumer) -> bool:
    """Whether nothing comes."""
    return error_of(lambda: consumer.receive(NOTHING_MS)) == "Timeout"


def batch(producer: pulsar.Producer, values: Sequence[bytes]) -> list[pulsar.MessageId]:
    """Sent together, in one batch."""
    ids: list[pulsar.MessageId] = []
    for value in values:
        producer.send_async(value, lambda _, at: ids.append(at))
    producer.flush()
    return ids


def batching(case: Case, topic: str, **said: Any) -> pulsar.Producer:
    return case.client.create_producer(
        topic, batching_enabled=True, batching_max_publish_delay_ms=1000, **said
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
    consumer = case.client.subscribe(topic, "s", negative_ack_redelivery_delay_ms=100)
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
    time.sleep(0.2)
    middle_ms = int(time.time() * 1000)
    time.sleep(0.2)
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
        operation_timeout_seconds=5,
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


# -- what is not built here ------------------------------------------------------------------------


def a_shared_subscription_shares(case: Case) -> None:
    for kind in (pulsar.ConsumerType.Shared, pulsar.ConsumerType.KeyShared):
        topic = case.topic(0)
        case.seen[kind.name] = case.error(lambda: case.client.subscribe(topic, "s", kind))  # noqa: B023


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
    topic = case.topic().replace("persistent://", "non-persistent://")
    case.seen["a producer"] = case.error(lambda: case.client.create_producer(topic))


STEPS: tuple[Callable[[Case], None], ...] = (
    a_lone_message_has_all_that_was_said,
    a_batch_is_one_entry_with_an_index_for_each_message,
    null_and_empty_values_are_told_apart_from_others,
    a_message_with_every_codec_is_the_same,
    an_ordering_key_and_empty_properties_come_through,
    a_message_that_is_too_large_is_refused_and_the_next_one_taken,
    text_with_a_string_schema_comes_through,
    a_producers_name_is_taken_while_it_is_connected,
    an_exclusive_producer_is_alone,
    an_exclusive_producer_does_not_come_beside_shared_ones,
    a_fencing_producer_sends_the_others_away,
    sequence_ids_count_from_what_the_producer_says,
    what_is_sent_again_is_stored_once_with_deduplication,
    a_terminated_topic_takes_no_more_and_is_read_to_its_end,
    a_second_exclusive_consumer_is_refused,
    a_subscription_in_use_has_one_type,
    a_subscription_begins_at_the_end_or_where_it_is_told,
    a_durable_subscription_goes_on_after_what_was_acknowledged,
    a_cumulative_ack_covers_all_before_it,
    what_is_nacked_comes_again_and_says_so,
    what_is_asked_for_again_comes_again,
    of_failover_consumers_the_first_by_name_is_active,
    an_unsubscribed_name_begins_anew,
    a_name_that_others_use_is_not_unsubscribed,
    a_consumer_seeks_by_id_and_to_both_ends,
    a_consumer_seeks_by_time,
    a_seek_beyond_the_end_is_taken,
    a_reader_begins_where_it_is_told,
    a_reader_begins_within_a_batch,
    the_last_id_is_that_of_the_last_message,
    a_table_view_has_the_last_value_of_each_key,
    a_partitioned_topic_keeps_the_order_of_keys,
    a_partition_is_used_by_its_own_name,
    several_topics_and_a_pattern_are_consumed_together,
    a_topic_that_nobody_may_make_is_not_found,
    wrong_names_are_refused,
    a_shared_subscription_shares,
    a_chunked_message_is_taken,
    rows_with_a_schema_are_taken,
    a_topic_that_is_not_kept_is_made,
)


@contextmanager
def _connected(world: World):
    quiet = pulsar.ConsoleLogger(pulsar.LoggerLevel.Error)
    client = pulsar.Client(world.url, logger=quiet, operation_timeout_seconds=30)
    try:
        yield client
    finally:
        client.close()


def run(world: World, steps: Sequence[Callable[[Case], None]] = STEPS) -> dict[str, Seen]:
    """What each step saw."""
    transcript = {}
    for step in steps:
        with _connected(world) as client, _connected(world) as other:
            case = Case(world, client, other)
            try:
                step(case)
            except pulsar.PulsarException as error:
                case.seen["ended by"] = type(error).__name__
            transcript[step.__name__] = plain(case.seen)
    return transcript


def plain(seen: Any) -> Any:
    """As JSON would read it back."""
    if isinstance(seen, dict):
        return {key: plain(value) for key, value in seen.items()}
    return [plain(one) for one in seen] if isinstance(seen, list | tuple) else seen
