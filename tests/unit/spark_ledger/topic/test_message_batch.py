import pyarrow as pa
import pytest

from spark_ledger import errors
from spark_ledger.topic.message_batch import (
    COMPRESSIONS,
    HEADER_BYTES,
    SCHEMA,
    decode_batch,
    encode_batch,
    encode_header,
)


def batch(keys, values):
    return pa.RecordBatch.from_arrays(
        [pa.array(keys, pa.binary()), pa.array(values, pa.binary())], schema=SCHEMA
    )


def encoded(rows, compression="none"):
    parts = encode_batch(rows, partition=3, first_row=70, written_ms=1000, compression=compression)
    return b"".join(parts)


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_rows_come_back_with_null_kept_apart_from_empty(compression):
    rows = batch([b"k", None, b""], [b"v", b"", None])

    found = decode_batch(encoded(rows, compression))

    assert found.record_batch.equals(rows)
    assert (found.partition, found.first_row, found.rows, found.written_ms) == (3, 70, 3, 1000)


def test_a_slice_is_encoded_without_the_rows_around_it():
    rows = batch([b"a"] * 1000, [b"x" * 100] * 1000)

    payload = encoded(rows.slice(500, 2))

    assert len(payload) < 1000
    assert decode_batch(payload).record_batch.equals(rows.slice(500, 2))


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_what_is_encoded_is_read_only_so_a_ledgers_writer_does_not_copy_it(compression):
    rows = batch([b"k"], [b"v"])
    parts = encode_batch(rows, partition=0, first_row=0, written_ms=0, compression=compression)
    assert all(memoryview(part).readonly for part in parts)


def test_a_header_has_these_bytes():
    assert encode_header(3, 2, 70, 1000).hex() == (
        "534c4d310100000003000000020000004600000000000000e803000000000000"
    )


def test_what_follows_the_header_is_an_arrow_stream_that_any_client_reads():
    payload = encoded(batch([b"k"], [b"v"]))

    table = pa.ipc.open_stream(payload[HEADER_BYTES:]).read_all()

    assert table.to_pydict() == {"key": [b"k"], "value": [b"v"]}


@pytest.mark.parametrize("at", [0, 4, 5])
def test_another_magic_version_or_flag_is_refused(at):
    payload = bytearray(encoded(batch([b"k"], [b"v"])))
    payload[at] ^= 0xFF

    with pytest.raises(errors.UnsupportedFormat, match="message batch was expected"):
        decode_batch(payload)


@pytest.mark.parametrize("kept", [0, 10, HEADER_BYTES, HEADER_BYTES + 20, 300])
def test_a_batch_cut_short_is_refused(kept):
    payload = encoded(batch([b"k"], [b"v" * 500]))

    with pytest.raises(errors.UnsupportedFormat, match="damaged"):
        decode_batch(payload[:kept])


def test_a_header_that_counts_other_rows_than_there_are_is_refused():
    payload = bytearray(encoded(batch([b"k"], [b"v"])))
    payload[12] = 2

    with pytest.raises(errors.UnsupportedFormat, match="says 2"):
        decode_batch(payload)


def test_an_unknown_compression_is_refused():
    with pytest.raises(ValueError, match="'gzip'"):
        encoded(batch([b"k"], [b"v"]), "gzip")
