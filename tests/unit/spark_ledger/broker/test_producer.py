"""A producer's answers, in order, on a link that keeps them."""

from types import SimpleNamespace

import pytest

from spark_ledger.broker.producer import Producer, SentBatch
from spark_ledger.broker.wire.commands import AccessMode, Refusal, ServerError
from spark_ledger.broker.wire.frames import FrameReader
from spark_ledger.topic.entry import pulsar_batch
from tests.kit.pulsar_batches import lone, message

WHY = Refusal(ServerError.CHECKSUM, "not so")


class Link:
    """`said`: sequence ids of receipts, and of what was refused, below 0."""

    def __init__(self):
        self.said = []

    def send(self, frame):
        (one,) = FrameReader().feed(frame)
        self.said.append(one.command.send_receipt.sequence_id)

    def send_error(self, producer_id, sequence_id, code, why):
        self.said.append(-sequence_id)

    def stored(self, size):
        pass


@pytest.fixture
def producer():
    policies = SimpleNamespace(deduplication=False)
    topic = SimpleNamespace(ledger=7, info=SimpleNamespace(policies=policies))
    partition = SimpleNamespace(number=0, shown=0)
    return Producer(Link(), 1, 1, "p", AccessMode.SHARED, 0, 0, topic, partition)


def sent(producer, sequence_id):
    data = lone(message(b"x"))
    send = SimpleNamespace(sequence_id=sequence_id, highest_sequence_id=0)
    producer.came()
    return SentBatch(producer, send, data, pulsar_batch.parse(data))


def test_a_refusal_comes_after_the_receipts_of_what_was_sent_before_and_before_those_after(
    producer,
):
    first, second = sent(producer, 1), sent(producer, 2)
    producer.refuse(3, WHY)
    producer.refuse(4, WHY)
    last = sent(producer, 5)
    assert producer.connection.said == []
    first.stored(0)
    assert producer.connection.said == [1]
    second.duplicate()
    assert producer.connection.said == [1, 2, -3, -4]
    last.stored(2)
    assert producer.connection.said == [1, 2, -3, -4, 5]


def test_a_refusal_of_one_that_has_all_its_receipts_comes_at_once(producer):
    sent(producer, 1).stored(0)
    producer.refuse(2, WHY)
    assert producer.connection.said == [1, -2]
