"""Chunks of a message on their way in: stored one by one, whole, given up, refused."""

from types import SimpleNamespace

import pytest

from spark_ledger import errors
from spark_ledger.broker.produce.chunks import BEGUN_MAX, ChunksOfProducer
from spark_ledger.broker.produce.producer import Producer, Run
from spark_ledger.broker.produce.waiting import Chunk, RefusedMessages
from spark_ledger.broker.wire.commands import AccessMode, ServerError
from spark_ledger.broker.wire.sends import Send
from spark_ledger.metrics import Counter
from spark_ledger.topic.entry import pulsar_batch, pulsar_columns
from tests.kit.pulsar_batches import chunked, lone, message, whole_of
from tests.unit.spark_ledger.broker.sending import Link


class Sending:
    """A producer that sends chunks; what is to be stored is in `appended`."""

    def __init__(self, deduplicates=True):
        log = SimpleNamespace(number_in_ids=0, ledger=7, deduplicates=deduplicates)
        partition = SimpleNamespace(number=0, log=log)
        partition.refused = RefusedMessages()
        self.link = Link()
        self.incomplete = Counter("incomplete", "")
        self.producer = Producer(self.link, 1, 1, "p", AccessMode.SHARED, 0, 0, partition, None)
        self.chunks = ChunksOfProducer(self.producer, self.incomplete, ServerError.CHECKSUM)
        self.appended = []

    def send(self, *parts, sequence_id=5):
        for data in parts:
            send = Send(1, sequence_id, 0, is_chunk=True)
            parsed = pulsar_batch.parse(data, check=True)
            assert parsed.is_chunk
            self.chunks.take(send, data, parsed, self.append)

    def append(self, run):
        run.number_sends()
        self.appended.append(run)

    def lone(self, sequence_id):
        """A message between chunks."""
        self.chunks.note_other_message()
        run = Run(self.producer, "p", batched=False)
        run.add(Send(1, sequence_id, 0, False), b"x", "p", False, 1, sequence_id)
        self.append(run)


@pytest.fixture
def sending():
    return Sending()


@pytest.fixture
def freely():
    """Where nobody looks at sequence ids."""
    return Sending(deduplicates=False)


def stored(runs, first):
    """They are, from that offset on."""
    for offset, run in enumerate(runs, first):
        run.sent(offset)
        run.stored(offset)


def test_each_chunk_is_stored_as_it_came_and_all_have_their_receipts_with_the_last(sending):
    parts = chunked(b"abcdefgh", 3, key="k")
    sending.send(*parts[:2])
    stored(sending.appended, 40)
    assert sending.link.said == []
    sending.send(parts[2])
    first, second, last = sending.appended
    assert [run.chunk for run in sending.appended] == [Chunk.EARLIER, Chunk.EARLIER, Chunk.LAST]
    assert (last.counts, last.batched, last.last_sequence_id) == ([1], False, 5)
    stored([last], 42)
    assert sending.link.said == [(5, 42)] * 3
    assert [bytes(pulsar_batch.chunk_in(run.batches[0])) for run in sending.appended] == parts
    assert pulsar_batch.earlier_offsets(last.batches[0]) == (40, 41)
    payloads = [pulsar_batch.payload_of_chunk(run.batches[0]) for run in (first, second)]
    found = pulsar_columns.decode_batches([pulsar_batch.join_chunks(payloads, last.batches[0])])
    assert found.column("value").to_pylist() == [b"abcdefgh"]
    assert found.column("key").to_pylist() == [b"k"]
    assert sending.incomplete.value == 0


def test_a_chunk_that_is_sent_again_to_another_ledger_has_the_offset_that_it_has_there(sending):
    sending.send(*chunked(b"abcdef", 3))
    for offset, run in enumerate(sending.appended, 40):
        run.sent(offset)
    for offset, run in enumerate(sending.appended[1:], 90):
        run.sent(offset)
    assert pulsar_batch.earlier_offsets(sending.appended[2].batches[0]) == (40, 90)


def test_a_refusal_after_a_message_comes_after_all_its_receipts(sending, monkeypatch):
    sending.send(*chunked(b"ab", 2))
    monkeypatch.setattr(pulsar_batch, "CHUNKED_BYTES_MAX", 1000)
    sending.send(*chunked(b"x" * 2000, 2), sequence_id=6)
    assert sending.link.said == []
    sending.appended[1].duplicate()
    assert sending.link.said[:2] == [(5, None)] * 2
    assert [one[0] for one in sending.link.said[2:]] == [6, 6]
    assert "at most 1000" in sending.link.said[2][1]


def test_a_message_in_more_chunks_than_its_last_one_can_name_is_refused(sending, monkeypatch):
    monkeypatch.setattr(pulsar_batch, "CHUNKS_MAX", 3)
    sending.send(*chunked(b"abcd", 4))
    assert [one[0] for one in sending.link.said] == [5] * 4
    assert "in 4 chunks, at most 3" in sending.link.said[0][1]
    assert sending.appended == []


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
    assert sending.incomplete.value == 1
    assert "'p' is incomplete: 2 of 4 chunks came" in caplog.text
    sending.send(*chunked(b"abcd", 3, uuid="next")[:1])
    sending.chunks.give_up("it left", refuse=False)
    assert (len(sending.link.said), sending.incomplete.value) == (2, 2)


def test_another_message_gives_up_the_one_before_it_and_is_whole(sending):
    sending.send(*chunked(b"abcd", 2, uuid="first")[:1])
    sending.send(*chunked(b"efgh", 2, uuid="second"), sequence_id=6)
    assert [one[0] for one in sending.link.said] == [5]
    stored(sending.appended, 1)
    assert sending.link.said[1:] == [(6, 3), (6, 3)]
    assert pulsar_batch.earlier_offsets(sending.appended[-1].batches[0]) == (2,)


def test_a_message_of_which_a_chunk_is_left_out_is_refused(sending):
    parts = chunked(b"abcdef", 3)
    sending.send(parts[0], parts[2], parts[2])
    stored(sending.appended, 0)
    assert Chunk.LAST not in [run.chunk for run in sending.appended]
    assert [one[0] for one in sending.link.said] == [5] * 3
    assert all(isinstance(one[1], str) for one in sending.link.said)


@pytest.mark.parametrize("order", [[0, 0, 1, 2], [0, 1, 1, 0, 2], [0, 0, 1, 0, 1, 2]])
def test_a_chunk_that_comes_again_has_its_receipt_and_is_stored_once(sending, order):
    parts = chunked(b"abcdef", 3)
    sending.send(*(parts[i] for i in order))
    assert len(sending.appended) == 3
    stored(sending.appended, 10)
    assert sending.link.said == [(5, 12)] * len(order)
    last = sending.appended[-1].batches[0]
    assert pulsar_batch.earlier_offsets(last) == (10, 11)


def test_messages_whose_chunks_a_producer_mixes_are_whole_and_answered_in_the_order_sent(freely):
    first, second = chunked(b"abcd", 2, uuid="first"), chunked(b"efghij", 3, uuid="second")
    freely.send(first[0], sequence_id=1)
    freely.send(*second[:2], sequence_id=2)
    freely.lone(3)
    freely.send(second[2], sequence_id=2)
    runs, freely.appended = freely.appended, []
    stored(runs, 0)
    assert freely.link.said == []  # the first message is not whole
    freely.send(first[1], sequence_id=1)
    stored(freely.appended, 5)
    assert freely.link.said == [(1, 5), (2, 4), (2, 4), (3, 3), (2, 4), (1, 5)]
    assert pulsar_batch.earlier_offsets(freely.appended[0].batches[0]) == (0,)
    assert pulsar_batch.earlier_offsets(runs[-1].batches[0]) == (1, 2)
    assert freely.incomplete.value == 0


def test_a_message_is_given_up_once_others_come_and_no_chunk_of_it_does(freely):
    parts = chunked(b"abcdef", 3, uuid="first")
    freely.send(parts[0], sequence_id=1)
    freely.lone(2)
    stored(freely.appended, 0)
    freely.link.look()
    freely.send(parts[1], sequence_id=1)  # it was not quiet
    freely.link.look()
    freely.link.is_read = False  # its chunks may wait where they are not read
    freely.link.look()
    freely.link.is_read = True
    freely.lone(3)
    stored(freely.appended[2:], 2)
    freely.link.look()
    assert freely.link.said == []
    freely.link.look()
    assert [one[0] for one in freely.link.said] == [1, 2, 1, 3]
    assert "2 of 3 chunks came, then other messages" in freely.link.said[0][1]
    assert (freely.link.said[1], freely.link.said[3]) == ((2, 1), (3, 3))
    assert freely.incomplete.value == 1
    freely.send(parts[2], sequence_id=1)
    assert "was refused" in freely.link.said[-1][1]
    assert not freely.link.looks  # nothing is begun


def test_a_message_after_which_nothing_comes_is_waited_for(freely):
    parts = chunked(b"ab", 2)
    freely.send(*chunked(b"cd", 2, uuid="other"), sequence_id=4)
    freely.send(parts[0])
    for _ in range(5):
        freely.link.look()
    freely.send(parts[1])
    stored(freely.appended, 0)
    assert freely.link.said == [(4, 1), (4, 1), (5, 3), (5, 3)]


def test_the_oldest_of_many_messages_that_were_begun_is_given_up(freely):
    for i in range(BEGUN_MAX + 1):
        freely.send(chunked(b"ab", 2, uuid=str(i))[0], sequence_id=i)
    assert [one[0] for one in freely.link.said] == [0]


def test_after_a_damaged_chunk_its_message_is_refused_and_never_called_stored(sending):
    parts = chunked(b"abcdef", 3)
    sending.chunks.note_damaged_chunk()  # the first
    sending.send(*parts[1:])
    assert all(isinstance(one[1], str) for one in sending.link.said)
    assert sending.appended == []
    sending.send(*chunked(b"abcdef", 2, uuid="next"))
    assert len(sending.appended) == 2


def test_a_message_that_is_not_stored_sends_its_producer_away_with_its_first_chunk(sending):
    sending.send(*chunked(b"ab", 2)[:1])
    sending.appended[0].failed(errors.LedgerClosed("given up"))
    assert sending.link.away
    assert sending.link.said == []


def test_a_terminated_topic_sends_the_producer_away_that_learns_the_reason_when_it_is_back(sending):
    sending.send(*chunked(b"ab", 2))
    for run in sending.appended:
        run.failed(errors.TopicTerminated("it is"))
    assert sending.link.away
    assert sending.link.said == [], "a SEND_ERROR with that reason is passed over by a client"


def test_chunks_are_cut_from_what_was_compressed():
    import zlib

    value = b"abc" * 200
    parts = chunked(value, 2, compression=2, compress=zlib.compress)
    named = pulsar_batch.last_chunk([8], parts[1])
    payload = pulsar_batch.parse(parts[0])
    earlier = [payload.data[payload.payload_at :]]
    stored = pulsar_batch.join_chunks(earlier, named)
    assert pulsar_columns.decode_batches([stored]).column("value").to_pylist() == [value]


def test_what_is_stored_of_chunks_is_no_batch_of_a_client():
    parts = chunked(b"ab", 2)
    first, last = pulsar_batch.earlier_chunk(parts[0]), pulsar_batch.last_chunk([3], parts[1])
    assert first[:2] == b"\x0e\x44"
    assert last[:14] == b"\x0e\x45" + bytes([0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 3])
    for stored_chunk in (first, last):
        with pytest.raises(errors.BadEntry):
            pulsar_batch.parse(stored_chunk, check=True)
        with pytest.raises(errors.BadEntry):
            pulsar_batch.chunk_in(stored_chunk[2:])
    for damaged in (last[:4], last[:13], b"\x0e\x45\xff\xff\xff\xff" + last[6:]):
        with pytest.raises(errors.BadEntry):
            pulsar_batch.earlier_offsets(damaged)


def test_a_message_that_an_earlier_version_stored_as_one_is_read_and_sent_as_then():
    parts = chunked(b"ab", 2)
    stored_whole = whole_of(parts)
    assert [bytes(one) for one in pulsar_batch.chunks_of(stored_whole)] == parts
    batch = pulsar_batch.parse(stored_whole)
    assert pulsar_columns.decode_batches([batch]).column("value").to_pylist() == [b"ab"]
    with pytest.raises(errors.BadEntry):
        pulsar_batch.parse(stored_whole, check=True)
    with pytest.raises(errors.BadEntry):
        pulsar_batch.parse(stored_whole[:-1])
    plain = lone(message(b"v"))
    assert [bytes(one) for one in pulsar_batch.chunks_of(plain)] == [plain]


def test_of_a_message_of_which_a_chunk_is_too_large_for_the_bookies_no_chunk_has_a_receipt(sending):
    parts = chunked(b"abcdefgh", 3, key="k")
    sending.send(*parts[:2])
    first, second = sending.appended
    stored([first], 40)
    second.sent(41)
    second.failed(errors.MessageTooBig("a bookie refused an entry of ledger 1"))
    sending.send(parts[2])
    assert len(sending.appended) == 2
    assert [number for number, _ in sending.link.said] == [5, 5, 5]
    assert all("refused" in str(why) for _, why in sending.link.said)
    assert not sending.link.away
