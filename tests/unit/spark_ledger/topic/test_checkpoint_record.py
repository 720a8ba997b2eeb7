import json
from dataclasses import replace

import pytest

from spark_ledger import errors
from spark_ledger.topic.log import checkpoint
from spark_ledger.topic.log.checkpoint import CheckpointRecord, next_record
from spark_ledger.topic.log.segment_table import BlobPointer

POINTER = BlobPointer(42, 3, 0, 2, 9000, 77)
INLINE = CheckpointRecord(128, b"root", 64, None, 60, "i")


def test_the_bytes_of_a_record():
    assert checkpoint.encode_record(replace(INLINE, previous_root=POINTER)) == (
        b'{"intent":"i","min_reader":1,"min_writer":1,"next":128,"previous":64,"previous_root":'
        b'{"bytes":9000,"crc":77,"first":0,"last":2,"ledger_id":42,"metadata_version":3},'
        b'"root":{"crc":3649068959,"inline":"cm9vdA=="},"trimmed":60}'
    )


@pytest.mark.parametrize(
    "record",
    [INLINE, CheckpointRecord(1, POINTER, 0, b"before"), CheckpointRecord(1, POINTER, 0, POINTER)],
)
def test_a_record_is_read_as_it_was_written(record):
    assert checkpoint.decode_record(checkpoint.encode_record(record)) == record


@pytest.mark.parametrize(
    "changed",
    [
        {"min_reader": 4},
        {"next": None},
        {"root": {"inline": "cm9vdA==", "crc": 1}},
        {"root": {"inline": "cm9v", "crc": 3649068959}},
        {"root": {"inline": "!", "crc": 0}},
        {"root": {"ledger_id": 1}},
        {"previous_root": 7},
    ],
)
def test_a_damaged_record_is_an_error(changed):
    plain = {**json.loads(checkpoint.encode_record(INLINE)), **changed}
    with pytest.raises(errors.UnsupportedFormat):
        checkpoint.decode_record(json.dumps(plain).encode())
    with pytest.raises(errors.UnsupportedFormat):
        checkpoint.decode_record(checkpoint.encode_record(INLINE)[:-1])


def test_a_record_follows_only_one_that_went_less_far():
    first = next_record(None, 64, b"a", "i")
    second = next_record(replace(first, trimmed=0), 128, POINTER, "j")
    third = next_record(replace(second, trimmed=64), 200, b"c", "k")

    assert (first.previous, first.previous_root) == (0, None)
    assert (second.previous, second.previous_root) == (64, b"a")
    assert (third.previous, third.previous_root, third.trimmed) == (128, None, 64)
    assert second.root_ledgers() == [42] and third.root_ledgers() == []
    for number in (127, 128):
        with pytest.raises(ValueError, match="does not follow"):
            next_record(second, number, b"b", "j")
