"""SENDs on their way in and their receipts on their way out, by hand. Pure.

Lone messages cost what their frames cost. Always true: what is read here is what protobuf would
read, or None: what clients do not send as a rule is left to protobuf. Receipts are the bytes that
protobuf would make.
"""

from collections.abc import Iterable
from typing import NamedTuple

from spark_ledger.broker.wire.frames import SIZES
from spark_ledger.topic.entry.pulsar_batch import varint

_SEND = b"\x08\x06\x32"  # says SEND; then the size of `send`
_PRODUCER_ID, _SEQUENCE_ID, _MESSAGES, _HIGHEST, _IS_CHUNK = 0x08, 0x10, 0x18, 0x30, 0x38
_RECEIPT = b"\x08\x07\x3a"
_MORE_BYTES_MAX = 8  # longer numbers are left to protobuf


class Send(NamedTuple):
    producer_id: int
    sequence_id: int
    highest_sequence_id: int
    is_chunk: bool


def send_of(data: bytes, at: int, end: int) -> Send | None:
    """The SEND whose command is data[at:end]."""
    size = end - at - len(_SEND) - 1
    if not data.startswith(_SEND, at) or not 0 <= size <= 127 or data[end - size - 1] != size:
        return None
    at = end - size
    producer_id = sequence_id = highest = is_chunk = 0
    while at + 1 < end:
        tag, number = data[at], data[at + 1]
        at += 2
        if number > 127:
            number, at = _more(data, at, number & 127)
        if tag == _SEQUENCE_ID:
            sequence_id = number
        elif tag == _PRODUCER_ID:
            producer_id = number
        elif tag == _HIGHEST:
            highest = number
        elif tag == _IS_CHUNK:
            is_chunk = number
        elif tag != _MESSAGES:
            return None
    if at != end:
        return None
    return tuple.__new__(Send, (producer_id, sequence_id, highest, is_chunk != 0))


def _more(data: bytes, at: int, number: int) -> tuple[int, int]:
    """A number that goes on at `at`, and where it ends: far away if it is too long."""
    shift, end = 7, min(at + _MORE_BYTES_MAX, len(data))
    while at < end:
        byte = data[at]
        at += 1
        number |= (byte & 127) << shift
        if byte <= 127:
            return number, at
        shift += 7
    return 0, len(data) + 1


def receipts(batches: Iterable[tuple[Send, int]], ledger: int, partition: int) -> bytes:
    """The frames of the SEND_RECEIPTs of batches: of each how it was sent and the entry of its
    message id."""
    place = b"\x08" + varint(ledger) + b"\x10"
    shown = b"\x18" + varint(partition & (1 << 64) - 1)
    out: list[bytes] = []
    shape = None  # of the one before: what is the same where it is
    before = between = b""
    for (producer_id, sequence_id, highest, _), entry in batches:
        number, at = varint(sequence_id), varint(entry)
        last = b"\x20" + varint(highest) if highest else b""
        if shape != (producer_id, len(number), len(at), len(last)):
            shape = (producer_id, len(number), len(at), len(last))
            producer = b"\x08" + varint(producer_id) + b"\x10"
            place_bytes = len(place) + len(at) + len(shown)
            between = b"\x1a" + varint(place_bytes) + place
            size = len(producer) + len(number) + len(between) - len(place) + place_bytes + len(last)
            command_size = len(_RECEIPT) + 1 + size
            head = SIZES.pack(command_size + 4, command_size)
            before = head + _RECEIPT + varint(size) + producer
        out += (before, number, between, at, shown, last)
    return b"".join(out)
