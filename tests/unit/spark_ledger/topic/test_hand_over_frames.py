"""Frames between who commits past a live segment and its owner."""

import struct

import pytest

from spark_ledger.topic.commit import hand_over
from spark_ledger.topic.commit.hand_over import BadHandOverFrame, HandOver
from spark_ledger.topic.log.actions import OpenLive, SealLive
from tests.unit.spark_ledger.topic.stage import segment

LIVES = [("topic", 0, 7, 3), ("topic", 1, 2**53 + 1, 0)]
HANDED = [
    HandOver(
        "topic",
        SealLive(0, 7, segment(7, 3, 2), (("p", 5),), 3),
        OpenLive(0, 7, 1, "broker a", 4, True, 2, 5, 600),
    ),
    HandOver("topic", SealLive(1, 2**53 + 1, None)),
]


def framed(body):
    return hand_over.MAGIC + struct.pack(">I", len(body)) + body


def test_what_is_asked_for_is_understood_once_it_is_whole():
    frame = hand_over.encode_request(LIVES, 2.0)
    for cut in range(len(frame)):
        assert hand_over.decode_request(frame[:cut]) is None
    assert hand_over.decode_request(frame) == (LIVES, 2.0)


def test_an_answer_is_understood():
    frame = hand_over.encode_response(HANDED)
    assert struct.unpack(">I", frame[:4]) == (len(frame) - 4,)
    assert hand_over.decode_response(frame[4:]) == HANDED


def test_nobody_is_held_for_longer_than_the_longest_hold():
    assert hand_over.decode_request(hand_over.encode_request([], 3600)) == (
        [],
        hand_over.OWNER_HOLD_S_MAX,
    )


@pytest.mark.parametrize(
    "frame",
    [
        b"SLxx",
        b"\0\0\0\5",
        framed(b"no JSON"),
        framed(b"[]"),
        framed(b'{"version":1,"hold_ms":2000,"live":[]}'),
        framed(b'{"version":2,"hold_ms":2000,"live":[["topic",0,7]]}'),
        framed(b'{"version":2,"hold_ms":2000,"live":[["topic","x",1,1]]}'),
        framed(b'{"version":2,"hold_ms":"x","live":[]}'),
        hand_over.MAGIC + struct.pack(">I", hand_over.REQUEST_BYTES_MAX + 1),
        framed(b'{"version":2,"hold_ms":2000,"live":[]}') + b"more",
    ],
)
def test_a_request_that_is_none_is_not_understood(frame):
    with pytest.raises(BadHandOverFrame):
        hand_over.decode_request(frame)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b'{"version":1,"handed":[]}',
        b'{"version":2,"handed":[{}]}',
        b'{"version":2,"handed":[{"topic":"t","seal":{"action":"terminate"}}]}',
        b'{"version":2,"handed":[{"topic":"t","seal":{"action":"of a later version"}}]}',
        b'{"version":2,"handed":[{"topic":"t","seal":{"action":"seal","partition":0,"ledger":7,'
        b'"segment":null},"open":{"action":"open","partition":0,"ledger":8,"version":0,'
        b'"owner":"o","epoch":1}}]}',
    ],
)
def test_an_answer_that_is_none_is_not_understood(body):
    with pytest.raises(BadHandOverFrame):
        hand_over.decode_response(body)


def test_only_a_broker_has_a_name_by_which_it_is_reached():
    assert hand_over.broker_of(hand_over.owner_name("ab12")) == "ab12"
    assert hand_over.broker_of("another owner") is None
