"""Steps of the program: Shared subscriptions, what is sent again, dead letters, delays."""

import time
import uuid
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pulsar

from tests.integration.pulsar.case import (
    EARLIEST,
    EXCLUSIVE,
    FAILOVER,
    KEY_SHARED,
    SHARED,
    TIMEOUT_MS,
    Case,
    batch,
    batching,
    drained,
    nothing,
    numbered,
    received,
    sent,
    text,
)

NACK_MS = 1000
"""Later than the client sends acknowledgements, which it groups with others for 100 ms."""


def shared(case: Case, topic: str, **options: Any) -> pulsar.Consumer:
    return case.client.subscribe(topic, "s", SHARED, **options)


def also(case: Case, topic: str, **options: Any) -> pulsar.Consumer:
    """Another consumer of the subscription, of another connection."""
    return case.other.subscribe(topic, "s", SHARED, **options)


def lone(case: Case, topic: str) -> pulsar.Producer:
    return case.client.create_producer(topic, batching_enabled=False)


def ordered(values: Sequence[str]) -> list[str]:
    return sorted(values, key=int)


# -- which consumer gets what ----------------------------------------------------------------------


def shared_consumers_have_each_message_once(case: Case) -> None:
    topic = case.topic(0)
    first, second = shared(case, topic), also(case, topic)
    sent(lone(case, topic), numbered(40))
    values = [text(drained(one)) for one in (first, second)]
    case.seen["all"] = ordered(values[0] + values[1]) == [str(number) for number in range(40)]
    case.seen["both have some"] = all(values)


def a_shared_consumer_without_room_gets_no_more(case: Case) -> None:
    topic = case.topic(0)
    full = shared(case, topic, receiver_queue_size=1)
    other = also(case, topic)
    sent(lone(case, topic), numbered(10))
    case.seen["the other"] = len(drained(other))
    case.seen["the full one"] = len(received(full, 1))
    case.seen["nothing more"] = nothing(full)


def a_shared_consumer_without_a_queue_takes_one_at_a_time(case: Case) -> None:
    topic = case.topic(0)
    consumer = shared(case, topic, receiver_queue_size=0, initial_position=EARLIEST)
    sent(lone(case, topic), numbered(3))
    # the client has no receive with a timeout here
    case.seen["values"] = text([consumer.receive() for _ in range(3)])


def a_batch_goes_to_one_shared_consumer(case: Case) -> None:
    topic = case.topic(0)
    first, second = shared(case, topic), also(case, topic)
    batch(batching(case, topic), numbered(8))
    case.seen["counts"] = sorted(len(drained(one)) for one in (first, second))


def a_shared_consumer_that_joins_later_gets_some_too(case: Case) -> None:
    topic = case.topic(0)
    first = shared(case, topic)
    producer = lone(case, topic)
    sent(producer, numbered(4))
    case.seen["before"] = text(received(first, 4))
    second = also(case, topic)
    sent(producer, numbered(40))
    counts = [len(drained(one)) for one in (first, second)]
    case.seen["afterwards"] = {"all": sum(counts), "both have some": all(counts)}


def a_shared_subscription_begins_where_it_is_told(case: Case) -> None:
    topic = case.topic(0)
    producer = lone(case, topic)
    sent(producer, numbered(3))
    late = case.client.subscribe(topic, "late", SHARED)
    early = case.client.subscribe(topic, "early", SHARED, initial_position=EARLIEST)
    producer.send(b"3")
    case.seen |= {"late": text(received(late, 1)), "early": text(received(early, 4))}


def a_partitioned_topic_is_shared(case: Case) -> None:
    topic = case.topic(3)
    first, second = shared(case, topic), also(case, topic)
    sent(lone(case, topic), numbered(60))
    values = [text(drained(one)) for one in (first, second)]
    case.seen["all"] = ordered(values[0] + values[1]) == [str(number) for number in range(60)]
    case.seen["both have some"] = all(values)


def several_topics_are_shared(case: Case) -> None:
    stem = uuid.uuid4().hex[:12]
    topics = [f"persistent://public/default/n-{stem}-{number}" for number in range(3)]
    for topic in topics:
        case.world.create(topic)
    first, second = (one.subscribe(topics, "s", SHARED) for one in (case.client, case.other))
    for topic in topics:
        sent(lone(case, topic), numbered(4))
    counts = Counter(text(drained(first)) + text(drained(second)))
    case.seen["counts"] = {value: counts[value] for value in sorted(counts)}


def a_chunked_message_goes_whole_to_one_shared_consumer(case: Case) -> None:
    topic = case.topic(0)
    first, second = shared(case, topic), also(case, topic)
    make = case.client.create_producer
    producer = make(topic, batching_enabled=False, chunking_enabled=True)
    producer.send(b"x" * (6 << 20))
    values = drained(first) + drained(second)
    case.seen["lengths"] = [len(one.data()) for one in values]


# -- types -----------------------------------------------------------------------------------------


def a_shared_subscription_in_use_has_one_type(case: Case) -> None:
    topic = case.topic(0)
    consumer = shared(case, topic)
    for kind in (EXCLUSIVE, FAILOVER, KEY_SHARED, SHARED):
        error = case.error(lambda: case.other.subscribe(topic, "s", kind))  # noqa: B023
        case.seen[kind.name] = error
    case.seen["of one name"] = case.error(lambda: also(case, topic, consumer_name="a"))
    case.seen["of that name again"] = case.error(lambda: shared(case, topic, consumer_name="a"))
    consumer.close()


def a_subscription_changes_its_type_while_it_is_unused(case: Case) -> None:
    topic = case.topic(0)
    consumer = shared(case, topic)
    sent(lone(case, topic), numbered(5))
    found = received(consumer, 5, ack=False)
    for at in (0, 2):
        consumer.acknowledge(found[at])
    consumer.close()
    for kind in (EXCLUSIVE, KEY_SHARED, FAILOVER):
        consumer = case.client.subscribe(topic, "s", kind)
        case.seen[kind.name] = text(received(consumer, 3, ack=False))
        consumer.close()


# -- acknowledging ---------------------------------------------------------------------------------


def what_is_acknowledged_one_by_one_does_not_come_again(case: Case) -> None:
    topic = case.topic(0)
    consumer = shared(case, topic)
    sent(lone(case, topic), numbered(6))
    found = received(consumer, 6, ack=False)
    for at in (0, 2, 3):
        consumer.acknowledge(found[at])
    consumer.close()
    consumer = shared(case, topic)
    again = received(consumer, 3)
    case.seen |= {"again": text(again), "nothing more": nothing(consumer)}
    case.seen["counts"] = [one.redelivery_count() for one in again]


def a_shared_consumer_does_not_acknowledge_cumulatively(case: Case) -> None:
    for kind in (SHARED, KEY_SHARED):
        topic = case.topic(0)
        consumer = case.client.subscribe(topic, "s", kind)
        sent(lone(case, topic), numbered(2))
        last = received(consumer, 2, ack=False)[-1]
        error = case.error(lambda: consumer.acknowledge_cumulative(last))  # noqa: B023
        case.seen[kind.name] = error


def _part_of_a_batch(case: Case, kind: pulsar.ConsumerType, by_index: bool) -> list[str]:
    """What comes again of a batch of five of which two are acknowledged."""
    topic = case.topic(0)
    options = {"batch_index_ack_enabled": by_index}
    consumer = case.client.subscribe(topic, "s", kind, **options)
    batch(batching(case, topic), numbered(5))
    found = received(consumer, 5, ack=False)
    for at in (1, 3):
        consumer.acknowledge(found[at])
    consumer.close()
    return text(drained(case.client.subscribe(topic, "s", kind, **options)))


def a_batch_acknowledged_in_part_comes_again_whole(case: Case) -> None:
    for kind in (SHARED, EXCLUSIVE):
        case.seen[kind.name] = _part_of_a_batch(case, kind, False)


def of_a_batch_acknowledged_by_index_the_rest_comes_again(case: Case) -> None:
    for kind in (SHARED, EXCLUSIVE, KEY_SHARED):
        case.seen[kind.name] = _part_of_a_batch(case, kind, True)


# -- sent again ------------------------------------------------------------------------------------


def what_a_shared_consumer_nacks_is_counted(case: Case) -> None:
    topic = case.topic(0)
    consumer = shared(case, topic, negative_ack_redelivery_delay_ms=200)
    lone(case, topic).send(b"x")
    counts = []
    for _ in range(4):
        (message,) = received(consumer, 1, ack=False)
        counts.append(message.redelivery_count())
        consumer.negative_acknowledge(message)
    case.seen["counts"] = counts


def only_what_is_nacked_comes_again(case: Case) -> None:
    topic = case.topic(0)
    consumer = shared(case, topic, negative_ack_redelivery_delay_ms=NACK_MS)
    sent(lone(case, topic), numbered(5))
    found = received(consumer, 5, ack=False)
    for at in (1, 3):
        consumer.negative_acknowledge(found[at])
    again = received(consumer, 2)
    case.seen |= {"again": text(again), "nothing more": nothing(consumer)}
    case.seen["counts"] = [one.redelivery_count() for one in again]


def what_is_nacked_may_go_to_another_consumer(case: Case) -> None:
    topic = case.topic(0)
    first = shared(case, topic, receiver_queue_size=1, negative_ack_redelivery_delay_ms=NACK_MS)
    lone(case, topic).send(b"x")
    (message,) = received(first, 1, ack=False)
    second = also(case, topic)
    first.negative_acknowledge(message)
    first.close()
    again = received(second, 1)
    case.seen |= {"again": text(again), "nothing more": nothing(second)}


def a_nack_within_a_batch(case: Case) -> None:
    topic = case.topic(0)
    options = {"negative_ack_redelivery_delay_ms": NACK_MS, "batch_index_ack_enabled": True}
    consumer = shared(case, topic, **options)
    batch(batching(case, topic), numbered(4))
    found = received(consumer, 4, ack=False)
    for at in (0, 2):
        consumer.acknowledge(found[at])
    consumer.negative_acknowledge(found[1])
    again = drained(consumer, 3 * NACK_MS)
    case.seen |= {"again": text(again), "counts": [one.redelivery_count() for one in again]}


def all_that_a_shared_consumer_has_is_asked_for_again(case: Case) -> None:
    topic = case.topic(0)
    consumer = shared(case, topic)
    sent(lone(case, topic), numbered(4))
    consumer.acknowledge(received(consumer, 4, ack=False)[1])
    time.sleep(NACK_MS / 1000)
    consumer.redeliver_unacknowledged_messages()
    again = received(consumer, 3)
    case.seen |= {"again": ordered(text(again)), "nothing more": nothing(consumer)}
    case.seen["counts"] = [one.redelivery_count() for one in again]


def what_a_consumer_that_leaves_had_goes_to_the_others(case: Case) -> None:
    topic = case.topic(0)
    first = shared(case, topic)
    sent(lone(case, topic), numbered(6))
    found = received(first, 6, ack=False)
    first.acknowledge(found[4])
    second = also(case, topic)
    case.seen["nothing at first"] = nothing(second)
    first.close()
    again = received(second, 5)
    case.seen |= {"again": text(again), "nothing more": nothing(second)}
    case.seen["counts"] = [one.redelivery_count() for one in again]


def the_count_of_a_message_begins_anew_after_the_last_consumer(case: Case) -> None:
    topic = case.topic(0)
    consumer = shared(case, topic, negative_ack_redelivery_delay_ms=200)
    lone(case, topic).send(b"x")
    for _ in range(2):
        consumer.negative_acknowledge(received(consumer, 1, ack=False)[0])
    case.seen["before"] = received(consumer, 1, ack=False)[0].redelivery_count()
    consumer.close()
    case.seen["afterwards"] = received(shared(case, topic), 1)[0].redelivery_count()


# -- dead letters ----------------------------------------------------------------------------------


def _dead(case: Case, topic: str, **policy: Any) -> None:
    """Nack a message until its client gives it up."""
    dead = pulsar.ConsumerDeadLetterPolicy(2, **policy)
    options = {"negative_ack_redelivery_delay_ms": 100, "dead_letter_policy": dead}
    consumer = shared(case, topic, **options)
    case.client.create_producer(topic).send(b"x", partition_key="k", properties={"p": "1"})
    counts = []
    for _ in range(3):
        (message,) = received(consumer, 1, ack=False)
        counts.append(message.redelivery_count())
        consumer.negative_acknowledge(message)
    case.seen["counts"] = counts
    case.seen["nothing more"] = nothing(consumer)


def a_message_that_is_nacked_too_often_is_a_dead_letter(case: Case) -> None:
    topic, dead = case.topic(0), case.topic(0)
    letters = case.other.subscribe(dead, "letters")
    _dead(case, topic, dead_letter_topic=dead)
    (letter,) = received(letters, 1)
    case.seen |= {"value": letter.data().decode(), "key": letter.partition_key()}
    case.seen["properties"] = sorted(letter.properties())
    case.seen["of that topic"] = letter.properties()["REAL_TOPIC"] == topic


def dead_letters_have_a_topic_of_their_own(case: Case) -> None:
    topic = case.topic(0)
    _dead(case, topic, initial_subscription_name="kept")
    letters = case.other.subscribe(f"{topic}-s-DLQ", "kept")
    case.seen["kept"] = text(received(letters, 1))


# -- later -----------------------------------------------------------------------------------------


def a_delayed_message_comes_when_it_is_due(case: Case) -> None:
    topic = case.topic(0)
    consumer = shared(case, topic)
    producer = lone(case, topic)
    producer.send(b"later", deliver_at=int(time.time() * 1000) + 3500)
    producer.send(b"now")
    case.seen["at once"] = text(received(consumer, 1))
    case.seen["nothing more"] = nothing(consumer)
    case.seen["then"] = text(received(consumer, 1))


def delayed_messages_come_in_the_order_in_which_they_are_due(case: Case) -> None:
    topic = case.topic(0)
    consumer = shared(case, topic)
    producer = lone(case, topic)
    now_ms = int(time.time() * 1000)
    for value, delay_ms in ((b"third", 6000), (b"first", 2000), (b"second", 4000)):
        producer.send(value, deliver_at=now_ms + delay_ms)
    case.seen["values"] = text(received(consumer, 3))


def a_message_that_was_due_long_ago_comes_at_once(case: Case) -> None:
    topic = case.topic(0)
    consumer = shared(case, topic)
    lone(case, topic).send(b"x", deliver_at=1000)
    case.seen["values"] = text(received(consumer, 1))


def only_shared_subscriptions_delay(case: Case) -> None:
    topic = case.topic(0)
    consumers = {
        kind.name: case.client.subscribe(topic, kind.name, kind)
        for kind in (EXCLUSIVE, FAILOVER, SHARED, KEY_SHARED)
    }
    time.sleep(1.5)  # an active consumer gets nothing in its first second
    lone(case, topic).send(b"x", deliver_at=int(time.time() * 1000) + 4000)
    case.seen = {name: nothing(one) for name, one in consumers.items()}


# -- moved and deleted -----------------------------------------------------------------------------


def a_shared_subscription_is_put_to_an_id(case: Case) -> None:
    topic = case.topic(0)
    consumer = shared(case, topic)
    ids = sent(lone(case, topic), numbered(6))
    received(consumer, 6)
    consumer.seek(ids[3])
    case.seen["an id"] = text(received(consumer, 2))
    consumer.seek(pulsar.MessageId.earliest)
    case.seen["earliest"] = text(received(consumer, 6))
    consumer.seek(pulsar.MessageId.latest)
    case.seen["latest"] = nothing(consumer)


def a_seek_moves_all_shared_consumers(case: Case) -> None:
    topic = case.topic(0)
    first, second = shared(case, topic), also(case, topic)
    sent(lone(case, topic), numbered(10))
    before = drained(first) + drained(second)
    case.seen["before"] = len(before)
    first.seek(pulsar.MessageId.earliest)
    again = text(drained(first, 3000)) + text(drained(second))
    case.seen["again"] = ordered(again) == [str(number) for number in range(10)]


def a_shared_subscription_is_put_to_a_time(case: Case) -> None:
    topic = case.topic(0)
    consumer = shared(case, topic)
    producer = lone(case, topic)
    sent(producer, numbered(3))
    time.sleep(0.5)
    middle_ms = int(time.time() * 1000)
    time.sleep(0.5)
    sent(producer, [b"3", b"4"])
    received(consumer, 5)
    consumer.seek(middle_ms)
    case.seen["the middle"] = text(received(consumer, 2))


def a_seek_within_a_batch_goes_by_its_index(case: Case) -> None:
    topic = case.topic(0)
    ids = batch(batching(case, topic), numbered(5))
    for kind in (EXCLUSIVE, SHARED):
        for inclusive in (False, True):
            options = {"initial_position": EARLIEST, "start_message_id_inclusive": inclusive}
            name = f"{kind.name}, {'from' if inclusive else 'after'}"
            consumer = case.client.subscribe(topic, name, kind, **options)
            received(consumer, 5)
            consumer.seek(ids[2])
            case.seen[name] = text(drained(consumer, 3000))
            consumer.close()


def a_shared_subscription_is_unsubscribed_by_its_last_consumer(case: Case) -> None:
    topic = case.topic(0)
    first, second = shared(case, topic), also(case, topic)
    sent(lone(case, topic), numbered(2))
    case.seen["beside another"] = case.error(first.unsubscribe)
    second.close()
    case.seen["alone"] = case.error(first.unsubscribe)
    anew = shared(case, topic, initial_position=EARLIEST)
    case.seen["anew"] = text(received(anew, 2))


def the_last_id_of_a_shared_subscription(case: Case) -> None:
    topic = case.topic(0)
    consumer = shared(case, topic)
    ids = sent(lone(case, topic), numbered(3))
    case.seen["the last"] = consumer.get_last_message_id() == ids[-1]
    case.seen["values"] = [consumer.receive(TIMEOUT_MS).data().decode() for _ in range(3)]
