"""Chunks of a message on their way in: held, whole, given up, refused."""

from types import SimpleNamespace

import pytest

from spark_ledger import errors
from spark_ledger.broker import chunks
from spark_ledger.broker.broker import HeldChunks
from spark_ledger.broker.chunks import ChunksOfProducer
from spark_ledger.broker.producer import Producer
from spark_ledger.broker.wire.commands import AccessMode, ServerError
from spark_ledger.broker.wire.frames import FrameReader
from spark_ledger.broker.wire.sends import Send
from spark_ledger.topic.entry import pulsar_batch, pulsar_columns
from tests.kit.pulsar_batches import chunked, lone, message


class Link:
    """`said`: of each answer the sequence id and the offset, None of one stored before, or why it
    was refused."""

    def __init__(self):
        self.said, self.away, self.waiting = [], False, 0

    def send(self, frame):
        for one in FrameReader().feed(frame):
            found = one.command.send_receipt
            at = found.message_id.entryId
            self.said.append((found.sequence_id, None if at == 2**64 - 1 else at))

    def send_error(self, producer_id, sequence_id, code, why):
        self.said.append((sequence_id, why))

    def send_producer_away(self, producer):
        self.away = True

    def stored(self, size):
        pass


class Sending:
    """A producer that sends chunks; what is whole is in `appended`."""

    def __init__(self, bytes_max=1000):
        policies = SimpleNamespace(deduplication=True)
        topic = SimpleNamespace(ledger=7, info=SimpleNamespace(policies=policies))
        partition = SimpleNamespace(number=0, shown=0)
        self.link = Link()
        self.held = HeldChunks(bytes_max)
        self.producer = Producer(self.link, 1, 1, "p", AccessMode.SHARED, 0, 0, topic, partition)
        self.chunks = ChunksOfProducer(self.producer, self.held, ServerError.CHECKSUM)
        self.appended = []

    def send(self, *parts, sequence_id=5):
        for data in parts:
            send = Send(1, sequence_id, 0, is_chunk=True)
            parsed = pulsar_batch.parse(data, check=True)
            assert parsed.is_chunk
            self.chunks.take(send, data, parsed, self.append)

    def append(self, run):
        run.producer.came(run.receipts)
        self.appended.append(run)


@pytest.fixture
def sending():
    return Sending()


def test_a_message_is_stored_with_its_last_chunk_and_each_chunk_has_its_receipt(sending):
    parts = chunked(b"abcdefgh", 3, key="k")
    sending.send(*parts[:2])
    assert sending.appended == []
    assert sending.held.bytes > 0
    sending.send(parts[2])
    (whole,) = sending.appended
    assert (whole.counts, whole.batched, whole.last_sequence_id) == ([1], False, 5)
    assert [bytes(one) for one in pulsar_batch.chunks_of(whole.batches[0])] == parts
    found = pulsar_columns.decoded([pulsar_batch.parse(whole.batches[0])])
    assert found.column("value").to_pylist() == [b"abcdefgh"]
    assert found.column("key").to_pylist() == [b"k"]
    assert sending.link.said == []
    whole.stored(40)
    assert sending.link.said == [(5, 40)] * 3
    assert sending.held.bytes == sending.held.given_up == 0


def test_a_refusal_after_a_message_comes_after_all_its_receipts(sending):
    sending.send(*chunked(b"ab", 2))
    sending.send(*chunked(b"x" * 2000, 2), sequence_id=6)
    assert sending.link.said == []
    sending.appended[0].duplicate()
    assert sending.link.said[:2] == [(5, None)] * 2
    assert [one[0] for one in sending.link.said[2:]] == [6, 6]
    assert "at most 1000" in sending.link.said[2][1]


def test_later_chunks_of_a_message_that_has_had_receipts_are_told_that_it_is_stored(sending):
    parts = chunked(b"abcdefgh", 4)
    sending.send(*parts[2:])
    assert sending.link.said == [(5, None)] * 2
    assert sending.appended == []


def test_a_message_whose_last_chunk_does_not_come_is_refused_and_counted(sending, caplog):
    sending.send(*chunked(b"abcd", 4)[:2])
    sending.chunks.give_up("it sent another message")
    assert [one[0] for one in sending.link.said] == [5, 5]
    assert "2 of 4 chunks came" in sending.link.said[0][1]
    assert (sending.held.bytes, sending.held.given_up) == (0, 1)
    assert "'p' is incomplete: 2 of 4 chunks came" in caplog.text
    sending.send(*chunked(b"abcd", 3)[:1])
    sending.chunks.give_up("it left", refuse=False)
    assert (len(sending.link.said), sending.held.given_up) == (2, 2)


def test_another_message_gives_up_the_one_before_it_and_is_whole(sending):
    sending.send(*chunked(b"abcd", 2, uuid="first")[:1])
    sending.send(*chunked(b"efgh", 2, uuid="second"), sequence_id=6)
    assert [one[0] for one in sending.link.said] == [5]
    (whole,) = sending.appended
    found = pulsar_columns.decoded([pulsar_batch.parse(whole.batches[0])])
    assert found.column("value").to_pylist() == [b"efgh"]


@pytest.mark.parametrize("order", [[0, 2], [0, 0], [0, 1, 1]])
def test_chunks_in_another_order_are_refused_all(sending, order):
    parts = chunked(b"abcdef", 3)
    sending.send(*(parts[i] for i in order))
    sending.send(parts[2])
    assert sending.appended == []
    assert [one[0] for one in sending.link.said] == [5] * (len(order) + 1)
    assert all(isinstance(one[1], str) for one in sending.link.said)
    assert sending.held.bytes == 0


def test_after_a_damaged_chunk_its_message_is_refused_and_never_called_stored(sending):
    parts = chunked(b"abcdef", 3)
    sending.chunks.damaged()  # the first
    sending.send(*parts[1:])
    assert all(isinstance(one[1], str) for one in sending.link.said)
    sending.send(*chunked(b"abcdef", 2, uuid="next"))
    assert len(sending.appended) == 1


def test_a_broker_full_of_chunks_sends_a_producer_away_without_a_refusal(monkeypatch):
    monkeypatch.setattr(chunks, "HELD_BYTES_MAX", 150)
    sending = Sending()
    sending.send(*chunked(b"x" * 300, 3)[:2])
    assert sending.link.away
    assert (sending.link.said, sending.held.bytes, sending.held.given_up) == ([], 0, 0)


def test_a_terminated_topic_refuses_each_chunk(sending):
    sending.send(*chunked(b"ab", 2))
    sending.appended[0].failed(errors.TopicTerminated("it is"))
    assert [one[0] for one in sending.link.said] == [5, 5]


def test_chunks_are_cut_from_what_was_compressed():
    import zlib

    value = b"abc" * 200
    parts = chunked(value, 2, compression=2, compress=zlib.compress)
    stored = pulsar_batch.parse(pulsar_batch.joined(parts))
    assert pulsar_columns.decoded([stored]).column("value").to_pylist() == [value]


def test_what_is_stored_as_chunks_is_no_batch_of_a_client():
    stored = pulsar_batch.joined(chunked(b"ab", 2))
    assert stored[:2] == b"\x0e\x43"
    with pytest.raises(pulsar_batch.Damaged):
        pulsar_batch.parse(stored, check=True)
    with pytest.raises(pulsar_batch.Damaged):
        pulsar_batch.parse(stored[:-1])
    plain = lone(message(b"v"))
    assert [bytes(one) for one in pulsar_batch.chunks_of(plain)] == [plain]
