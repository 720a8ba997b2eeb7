"""Frames of Pulsar's protocol: whole, in pieces, and damaged."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_ledger.broker.wire.commands import (
    BaseCommand,
    MessageId,
    command,
    name_of,
    signed,
    unsigned,
)
from spark_ledger.broker.wire.frames import (
    FRAME_BYTES_MAX,
    MalformedFrame,
    PulsarFrame,
    PulsarFrameReader,
    encode,
)

PING = bytes.fromhex("00000009 00000005 0812 920100")


def test_a_ping_is_the_bytes_that_the_protocol_says():
    assert encode(command("ping")) == PING
    (frame,) = PulsarFrameReader().feed(PING)
    assert (name_of(frame.command), frame.batch) == ("ping", None)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.binary(max_size=300), min_size=1, max_size=8), st.data())
def test_frames_come_out_whole_however_they_are_cut(batches, data):
    sent = [PulsarFrame(command("send", producer_id=i), b or None) for i, b in enumerate(batches)]
    stream = b"".join(encode(one.command, one.batch or b"") for one in sent)
    reader, found, at = PulsarFrameReader(), [], 0
    while at < len(stream):
        size = data.draw(st.integers(1, len(stream) - at))
        found += reader.feed(stream[at : at + size])
        at += size
    assert found == sent


@pytest.mark.parametrize(
    "damaged",
    [
        (FRAME_BYTES_MAX + 1).to_bytes(4, "big"),
        bytes(4),
        bytes.fromhex("00000009 00000006 0812 920100"),
        bytes.fromhex("00000009 00000005 0812 920109"),
    ],
    ids=["too large", "too small", "a command beyond its frame", "no command"],
)
def test_bytes_that_are_no_frame_are_refused(damaged):
    with pytest.raises(MalformedFrame):
        PulsarFrameReader().feed(damaged)


def test_a_frame_too_large_is_refused_although_it_comes_in_pieces():
    reader = PulsarFrameReader()
    assert reader.feed(b"\xff\xff") == []
    with pytest.raises(MalformedFrame):
        reader.feed(b"\xff\xff")


def test_a_command_that_is_not_known_is_read_and_has_no_name():
    unknown = BaseCommand.FromString(bytes.fromhex("0863 9a0600"))
    assert name_of(unknown) is None
    assert name_of(BaseCommand(type=6)) is None  # says SEND, and has none


def test_a_command_carries_the_number_of_its_field():
    receipt = command("send_receipt", producer_id=3, message_id=MessageId(ledgerId=1, entryId=2))
    assert (receipt.type, receipt.send_receipt.message_id.entryId) == (7, 2)


@settings(deadline=None, max_examples=50)
@given(st.integers(-(2**63), 2**63 - 1))
def test_a_signed_number_survives_as_an_unsigned_one(number):
    assert signed(unsigned(number)) == number
    assert 0 <= unsigned(number) < 2**64
