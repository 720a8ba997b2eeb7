"""Frames, byte by byte: what they look like, in which pieces they may come, what is none."""

import random

import pytest

from bookie_server.api import messages as m
from bookie_server.api.frames import (
    HEAD_BYTES,
    METHOD_NAMES,
    METHOD_NUMBERS,
    RECOVERY,
    SCRATCH_BYTES,
    BadFrame,
    FrameHead,
    FrameKind,
    FrameReader,
    pack_head,
    pack_wait,
    unpack_head,
    unpack_wait,
)

GOLDEN = bytes.fromhex("534c46310102010107000000e9030000")
"""SLF1, version 1, CALL, Add, recovery's, call 7, 1001 bytes."""
BODY_BYTES_MAX = 1 << 20


def call(number, body, method="Add"):
    return pack_head(FrameKind.CALL, number, len(body), METHOD_NUMBERS[method]) + body


def feed(reader, data, piece_bytes):
    """Give the reader the bytes in pieces of at most so many; returns all frames."""
    frames, at = [], 0
    while at < len(data):
        buffer = reader.buffer()
        count = min(piece_bytes(), len(buffer), len(data) - at)
        buffer[:count] = data[at : at + count]
        at += count
        frames += reader.take(count)
    return frames


def reader(admit=lambda head: True):
    return FrameReader(BODY_BYTES_MAX, admit)


def test_a_head_has_these_bytes():
    assert pack_head(FrameKind.CALL, 7, 1001, METHOD_NUMBERS["Add"], RECOVERY) == GOLDEN
    assert unpack_head(GOLDEN, 0, BODY_BYTES_MAX) == FrameHead(FrameKind.CALL, 7, 1001, 1, 1)


def test_the_time_to_wait_has_these_bytes():
    assert pack_wait(20) == b"\x14\x00\x00\x00"
    assert unpack_wait(memoryview(b"\x14\x00\x00\x00")) == 20
    with pytest.raises(BadFrame):
        unpack_wait(memoryview(b"\x14"))


def test_every_method_has_a_number_of_its_own():
    assert sorted(METHOD_NUMBERS) == sorted([*m.METHODS, *m.STREAMS])
    assert len(METHOD_NAMES) == len(METHOD_NUMBERS)
    assert 0 not in METHOD_NAMES


@pytest.mark.parametrize(
    ("at", "damage"),
    [(0, b"X"), (3, b"2"), (4, b"\x02"), (5, b"\x00"), (5, b"\x09"), (15, b"\xff")],
    ids=["magic", "magic's end", "version", "no kind", "unknown kind", "length"],
)
def test_a_damaged_head_is_no_frame(at, damage):
    damaged = GOLDEN[:at] + damage + GOLDEN[at + 1 :]
    with pytest.raises(BadFrame):
        unpack_head(damaged, 0, BODY_BYTES_MAX)
    with pytest.raises(BadFrame):
        feed(reader(), damaged, lambda: HEAD_BYTES)


@pytest.mark.parametrize("kind", [FrameKind.HELLO, FrameKind.CANCEL, FrameKind.END])
def test_what_has_no_body_announces_none(kind):
    with pytest.raises(BadFrame):
        unpack_head(pack_head(kind, 1, 1), 0, BODY_BYTES_MAX)


def test_a_body_beyond_the_most_is_no_frame_and_no_buffer_is_made_for_it():
    admitted = []
    with pytest.raises(BadFrame, match="the limit is"):
        feed(reader(admitted.append), pack_head(FrameKind.CALL, 1, BODY_BYTES_MAX + 1), lambda: 99)
    assert admitted == []


SIZES = [0, 1, 15, 16, 17, SCRATCH_BYTES - HEAD_BYTES, SCRATCH_BYTES, SCRATCH_BYTES + 1, 100_000]


@pytest.mark.parametrize("seed", range(8))
def test_frames_come_out_whole_in_whatever_pieces_they_arrive(seed):
    rng = random.Random(seed)
    bodies = [rng.randbytes(rng.choice(SIZES)) for _ in range(40)]
    data = b"".join(call(number, body) for number, body in enumerate(bodies))
    most = rng.choice([1, 7, 16, 5_000, 1 << 20])
    frames = feed(reader(), data, lambda: rng.randint(1, most))
    assert [bytes(frame.body) for frame in frames] == bodies
    assert [frame.head.call for frame in frames] == list(range(40))


@pytest.mark.parametrize("seed", range(8))
def test_what_is_not_admitted_is_passed_over_and_the_next_frame_found(seed):
    rng = random.Random(seed)
    bodies = [rng.randbytes(rng.choice(SIZES)) for _ in range(40)]
    data = b"".join(call(number, body) for number, body in enumerate(bodies))
    most = rng.choice([7, 5_000, 1 << 20])
    frames = feed(reader(lambda head: head.call % 3 == 0), data, lambda: rng.randint(1, most))
    assert len(frames) == 40
    for number, (frame, body) in enumerate(zip(frames, bodies, strict=True)):
        assert frame.body == (body if number % 3 == 0 else None)


def test_a_large_body_lies_in_one_buffer_that_nobody_else_writes_to():
    frames = feed(reader(), call(1, b"a" * 50_000) + call(2, b"b" * 50_000), lambda: 1 << 20)
    assert frames[0].body == b"a" * 50_000
    assert frames[0].body.readonly
