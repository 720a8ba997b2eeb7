import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_ledger import errors
from spark_ledger.topic.subscription.cursor_ledger import (
    BadCursorEntry,
    CursorEntry,
    decode,
    encode,
)

ENTRY = CursorEntry(3, {0: 10, 2: 2**40})
GOLDEN = bytes.fromhex(
    "534c4331"  # magic
    "01" "00" "0000"  # version, flags, reserved
    "0300000000000000"  # epoch
    "02000000" "00000000"  # two positions, reserved
    "00000000" "02000000"  # their partitions
    "0a00000000000000" "0000000000010000"  # the positions
)  # fmt: skip


def test_an_entry_has_the_bytes_of_the_picture():
    assert encode(ENTRY) == GOLDEN
    assert decode(memoryview(GOLDEN)) == ENTRY


positions = st.dictionaries(st.integers(0, 2**31), st.integers(0, 2**62), max_size=20)


@given(st.integers(0, 2**40), positions)
def test_what_was_encoded_is_decoded(epoch, somewhere):
    entry = CursorEntry(epoch, somewhere)
    assert decode(encode(entry)) == entry


@pytest.mark.parametrize(
    ("at", "bytes_", "what"),
    [
        (0, b"X", "begins with"),
        (16, b"\x03", "3 positions in"),
        (24, b"\x02", "do not rise"),
        (39, b"\x80", "negative"),
    ],
)
def test_a_damaged_entry_is_told_from_a_good_one(at, bytes_, what):
    damaged = GOLDEN[:at] + bytes_ + GOLDEN[at + len(bytes_) :]
    with pytest.raises(BadCursorEntry, match=what):
        decode(damaged)


@pytest.mark.parametrize("length", [0, 23, 24, len(GOLDEN) - 1])
def test_a_cut_entry_is_damaged(length):
    with pytest.raises(BadCursorEntry):
        decode(GOLDEN[:length])


@pytest.mark.parametrize("at", [4, 5])
def test_an_entry_of_a_later_version_or_with_unknown_flags_is_not_guessed(at):
    with pytest.raises(errors.UnsupportedFormat, match="version"):
        decode(GOLDEN[:at] + b"\x02" + GOLDEN[at + 1 :])


def test_a_hundred_thousand_partitions_take_little_more_than_a_megabyte():
    entry = encode(CursorEntry(1, {p: p * 1000 for p in range(100_000)}))
    assert len(entry) == struct.calcsize("<4sBBHqII") + 100_000 * 12
    assert decode(entry).positions[99_999] == 99_999_000
