"""Steps of the program: what an operator does by the admin API, beside clients."""

import time
import uuid
from typing import Any

import pulsar

from tests.integration.pulsar.case import (
    EARLIEST,
    FAILOVER,
    SHARED,
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

EARLIEST_ID = {"ledgerId": -1, "entryId": -1, "partitionIndex": -1}


def _ask(case: Case, verb: str, topic: str, path: str = "", body: object = None) -> Any:
    return case.world.ask(verb, topic.replace("://", "/") + path, body)


def _status(case: Case, verb: str, topic: str, path: str = "", body: object = None) -> int:
    return int(_ask(case, verb, topic, path, body)[0])


def _lone(case: Case, topic: str) -> pulsar.Producer:
    return case.client.create_producer(topic, batching_enabled=False)


def _of_subscription(case: Case, topic: str, *names: str) -> list[Any]:
    subscription = _ask(case, "GET", topic, "/stats")[1]["subscriptions"]["s"]
    return [subscription[name] for name in names]


def _until(case: Case, topic: str, backlog: int) -> bool:
    """Whether the subscription has this backlog within some seconds."""
    for _ in range(100):
        if _of_subscription(case, topic, "msgBacklog") == [backlog]:
            return True
        time.sleep(0.1)
    return False


def _began(case: Case, kind: pulsar.ConsumerType = SHARED) -> tuple[str, pulsar.Consumer]:
    """A topic of six messages, and a consumer that has none of them acknowledged."""
    topic = case.topic(0)
    consumer = case.client.subscribe(topic, "s", kind)
    sent(_lone(case, topic), numbered(6))
    return topic, consumer


def _rest(case: Case, topic: str) -> list[str]:
    return text(drained(case.other.subscribe(topic, "s", SHARED), 3000))


# -- subscriptions ---------------------------------------------------------------------------------


def messages_are_skipped_except_those_that_are_acknowledged(case: Case) -> None:
    topic, consumer = _began(case)
    messages = received(consumer, 6, ack=False)
    consumer.acknowledge(messages[1])
    case.seen["acknowledged"] = _until(case, topic, 5)
    consumer.close()
    case.seen["status"] = _status(case, "POST", topic, "/subscription/s/skip/2")
    case.seen["rest"] = _rest(case, topic)


def all_messages_are_skipped(case: Case) -> None:
    topic, consumer = _began(case)
    consumer.close()
    case.seen["status"] = _status(case, "POST", topic, "/subscription/s/skip_all")
    case.seen["backlog"] = _of_subscription(case, topic, "msgBacklog")
    _lone(case, topic).send(b"6")
    case.seen["rest"] = _rest(case, topic)


def messages_expire_by_their_age(case: Case) -> None:
    topic, consumer = _began(case)
    consumer.close()
    time.sleep(4)
    sent(_lone(case, topic), [b"6", b"7"])
    case.seen["status"] = _status(case, "POST", topic, "/subscription/s/expireMessages/3")
    case.seen["passed"] = _until(case, topic, 2)
    case.seen["rest"] = _rest(case, topic)


def a_subscription_is_reset_to_a_time(case: Case) -> None:
    topic, consumer = _began(case)
    received(consumer, 6)
    case.seen["acknowledged"] = _until(case, topic, 0)
    consumer.close()
    time.sleep(0.5)
    middle_ms = int(time.time() * 1000)
    time.sleep(0.5)
    sent(_lone(case, topic), [b"6", b"7"])
    path = "/subscription/s/resetcursor"
    case.seen["to the middle"] = _status(case, "POST", topic, f"{path}/{middle_ms}")
    case.seen["from the middle"] = _rest(case, topic)


def a_subscription_is_reset_to_an_id(case: Case) -> None:
    topic = case.topic(0)
    consumer = case.client.subscribe(topic, "s", SHARED)
    ids = sent(_lone(case, topic), numbered(6))
    received(consumer, 6)
    case.seen["acknowledged"] = _until(case, topic, 0)
    consumer.close()
    at = {"ledgerId": ids[3].ledger_id(), "entryId": ids[3].entry_id(), "partitionIndex": -1}
    case.seen["status"] = _status(case, "POST", topic, "/subscription/s/resetcursor", at)
    case.seen["rest"] = _rest(case, topic)


def connected_consumers_go_on_where_a_subscription_was_reset_to(case: Case) -> None:
    topic, consumer = _began(case)
    received(consumer, 6)
    case.seen["acknowledged"] = _until(case, topic, 0)
    path = "/subscription/s/resetcursor"
    case.seen["status"] = _status(case, "POST", topic, path, EARLIEST_ID)
    case.seen["again"] = text(drained(consumer, 5000))


def a_subscription_is_made_before_it_has_consumers(case: Case) -> None:
    topic = case.topic(0)
    sent(_lone(case, topic), numbered(3))
    make = lambda name, body=None: _status(case, "PUT", topic, f"/subscription/{name}", body)  # noqa: E731
    case.seen["earliest"] = make("early", EARLIEST_ID)
    case.seen["latest"] = make("late")
    case.seen["again"] = make("early", EARLIEST_ID)
    case.seen["names"] = sorted(_ask(case, "GET", topic, "/subscriptions")[1])
    _lone(case, topic).send(b"3")
    for name in ("early", "late"):
        case.seen[f"values of {name}"] = text(drained(case.client.subscribe(topic, name), 3000))


def a_subscription_is_deleted_with_force_only_while_it_is_used(case: Case) -> None:
    topic, consumer = _began(case)
    delete = lambda path: _status(case, "DELETE", topic, f"/subscription/{path}")  # noqa: E731
    case.seen["used"] = delete("s")
    consumer.close()
    case.seen["unused"] = delete("s")
    case.seen["not there"] = delete("s")
    anew = case.client.subscribe(topic, "s", SHARED, initial_position=EARLIEST)
    case.seen["anew"] = text(drained(anew, 3000))
    anew.close()
    case.seen["with force"] = delete("s?force=true")
    case.seen["names"] = _ask(case, "GET", topic, "/subscriptions")[1]


def the_next_messages_of_a_subscription_are_shown(case: Case) -> None:
    topic, consumer = _began(case)
    received(consumer, 1)
    case.seen["acknowledged"] = _until(case, topic, 5)
    for number in (1, 5):
        path = f"/subscription/s/position/{number}"
        case.seen[f"number {number}"] = _ask(case, "GET", topic, path)
    case.seen["of no subscription"] = _status(case, "GET", topic, "/subscription/x/position/1")


def a_backlog_counts_what_is_not_acknowledged(case: Case) -> None:
    topic, consumer = _began(case)
    names = ("msgBacklog", "unackedMessages", "type")
    messages = received(consumer, 6, ack=False)
    for message in messages[::2]:
        consumer.acknowledge(message)
    case.seen["acknowledged"] = _until(case, topic, 3)
    case.seen["of the subscription"] = _of_subscription(case, topic, *names)
    consumers = _of_subscription(case, topic, "consumers")[0]
    case.seen["of the consumer"] = [consumer["unackedMessages"] for consumer in consumers]
    consumer.close()
    case.seen["without a consumer"] = _of_subscription(case, topic, "msgBacklog", "consumers")


# -- topics ----------------------------------------------------------------------------------------


def clients_go_on_after_an_unload(case: Case) -> None:
    topic, consumer = _began(case)
    producer = _lone(case, topic)
    messages = received(consumer, 6, ack=False)
    for message in (messages[0], messages[3]):
        consumer.acknowledge(message)
    case.seen["acknowledged"] = _until(case, topic, 4)
    case.seen["status"] = _status(case, "PUT", topic, "/unload")
    producer.send(b"6")
    case.seen["rest"] = sorted(text(drained(consumer, 5000)))


def an_active_consumer_goes_on_after_an_unload(case: Case) -> None:
    topic, consumer = _began(case, FAILOVER)
    received(consumer, 3)
    case.seen["acknowledged"] = _until(case, topic, 3)
    case.seen["status"] = _status(case, "PUT", topic, "/unload")
    case.seen["rest"] = sorted(set(text(drained(consumer, 5000))))


def a_topic_is_deleted_with_force_only_while_it_is_used(case: Case) -> None:
    topic, consumer = _began(case)
    case.seen["used"] = _status(case, "DELETE", topic)
    consumer.close()
    case.client.close()
    case.seen["unused"] = _status(case, "DELETE", topic)
    case.seen["not there"] = _status(case, "DELETE", topic)
    case.seen["stats"] = _status(case, "GET", topic, "/stats")


def the_partitions_of_a_topic_only_grow(case: Case) -> None:
    topic = f"persistent://public/default/g-{uuid.uuid4().hex[:12]}"
    case.seen["made"] = _status(case, "PUT", topic, "/partitions", 2)
    case.seen["made again"] = _status(case, "PUT", topic, "/partitions", 2)
    case.seen["grown"] = _status(case, "POST", topic, "/partitions", 3)
    case.seen["fewer"] = _status(case, "POST", topic, "/partitions", 1)
    case.seen["there are"] = _ask(case, "GET", topic, "/partitions")[1]["partitions"]
    case.seen["for a client"] = len(case.client.get_topic_partitions(topic))
    case.seen["deleted"] = _status(case, "DELETE", topic, "/partitions")


def the_rest_of_a_batch_comes_after_an_unload(case: Case) -> None:
    topic = case.topic(0)
    consumer = case.client.subscribe(topic, "s", SHARED, batch_index_ack_enabled=True)
    batch(batching(case, topic), numbered(5))
    messages = received(consumer, 5, ack=False)
    for message in messages[:3]:
        consumer.acknowledge(message)
    time.sleep(1)
    consumer.close()
    case.seen["unload"] = _status(case, "PUT", topic, "/unload")
    again = case.client.subscribe(topic, "s", SHARED, batch_index_ack_enabled=True)
    case.seen["rest"] = text(drained(again, 5000))
    case.seen["nothing more"] = nothing(again)
