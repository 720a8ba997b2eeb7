"""A producer's answers, in order, on a link that keeps them."""

from types import SimpleNamespace

import pytest

from spark_ledger.broker.produce.producer import RUN_MESSAGES_MAX, Producer, Run
from spark_ledger.broker.produce.waiting import SequenceIds
from spark_ledger.broker.wire.commands import AccessMode, Refusal, ServerError
from spark_ledger.broker.wire.frames import PulsarFrameReader
from spark_ledger.broker.wire.sends import Send
from spark_ledger.topic.entry import pulsar_batch
from spark_ledger.topic.entry.pulsar_message_pb2 import MessageMetadata
from tests.kit.pulsar_batches import lone, message

WHY = Refusal(ServerError.CHECKSUM, "not so")


class Link:
    """`said`: sequence ids of receipts, and of what was refused, below 0."""

    def __init__(self):
        self.said = []

    def send(self, frame):
        for one in PulsarFrameReader().feed(frame):
            if one.command.HasField("send_error"):
                self.said.append(-one.command.send_error.sequence_id)
            else:
                self.said.append(one.command.send_receipt.sequence_id)

    def stored(self, size):
        pass


@pytest.fixture
def producer():
    log = SimpleNamespace(number_in_ids=0, ledger=7, deduplicates=False)
    partition = SimpleNamespace(number=0, log=log)
    return Producer(Link(), 1, 1, "p", AccessMode.SHARED, 0, 0, partition, None)


def sent(producer, *sequence_ids):
    run = Run(producer, "p", batched=False)
    for number in sequence_ids:
        assert run.add(Send(1, number, 0, False), lone(message(b"x")), "p", False, 1, number)
    run.number_sends()
    return run


def test_a_refusal_comes_after_the_receipts_of_what_was_sent_before_and_before_those_after(
    producer,
):
    first, second = sent(producer, 0, 1), sent(producer, 2)
    producer.refuse(3, WHY)
    producer.refuse(4, WHY)
    last = sent(producer, 5)
    assert producer.connection.said == []
    first.stored(0)
    assert producer.connection.said == [0, 1]
    second.duplicate()
    assert producer.connection.said == [0, 1, 2, -3, -4]
    last.stored(2)
    assert producer.connection.said == [0, 1, 2, -3, -4, 5]


def test_a_refusal_of_one_that_has_all_its_receipts_comes_at_once(producer):
    sent(producer, 1).stored(0)
    producer.refuse(2, WHY)
    assert producer.connection.said == [1, -2]


def numbers(runs):
    return [(run.first_sequence_id, run.last_sequence_id) for run in runs]


def test_of_a_run_that_came_before_in_part_only_the_rest_is_new(producer):
    ids = SequenceIds()
    ids.begin({"p": 2})
    first = sent(producer, 3, 4)
    assert ids.new_part_of(first) == [first]
    again = sent(producer, 1, 2, 3, 5, 7)
    assert numbers(ids.new_part_of(again)) == [(5, 5), (7, 7)]
    assert producer.connection.said == []  # two were stored before, after the first run's receipts
    first.stored(0)
    assert producer.connection.said == [3, 4, 1, 2]  # the third waits until the first run is noted
    ids.note_stored(first)
    assert producer.connection.said == [3, 4, 1, 2, 3]
    ids.doubt()
    assert ids.new_part_of(again) == [again]


def test_a_client_is_answered_as_its_last_message_only_what_is_stored_where_others_have_failed(
    producer,
):
    ids = SequenceIds()
    ids.begin({"p": 2})
    ids.new_part_of(sent(producer, 3))
    assert ids.last("p") == 3
    ids.doubt()
    assert ids.last("p") == 2


def test_a_run_has_no_more_messages_than_an_entry_counts(producer):
    run = Run(producer, "p", batched=True)
    assert run.add(Send(1, 0, 0, False), b"x", "p", True, 1 << 25, 0)
    assert not run.add(Send(1, 1, 0, False), b"x", "p", True, RUN_MESSAGES_MAX, 1)


def test_messages_of_which_nobody_could_read_the_bytes_are_not_believed():
    said = {"producer_name": "p", "sequence_id": 0, "publish_time": 1, "compression": 3}
    size = 6 << 20
    payload = bytes.fromhex("28b52ffd0000")  # a frame of zstd that does not show its size
    payload += bytes((size >> 15) - len(payload))  # zstd makes no more of it
    for count, believed in ((size // 6, True), (size // 6 + 1, False)):
        metadata = MessageMetadata(num_messages_in_batch=count, uncompressed_size=size, **said)
        data = pulsar_batch.build_batch(metadata, payload)
        assert (pulsar_batch.fault_of(pulsar_batch.parse(data, check=True)) is None) == believed
