"""Compressed messages of Pulsar's clients: the size that metadata declares is the size that there
is, or the message is refused, or an error where it is read; never other bytes."""

import zlib

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_ledger import errors
from spark_ledger.topic.entry import pulsar_batch, pulsar_codecs, pulsar_columns
from spark_ledger.topic.entry.pulsar_message_pb2 import MessageMetadata
from tests.kit.pulsar_batches import batch_of, chunked, message

LZ4, ZLIB, ZSTD, SNAPPY = 1, 2, 3, 4
COMPRESS = {
    LZ4: pa.Codec("lz4_raw").compress,
    ZLIB: zlib.compress,
    ZSTD: pa.Codec("zstd").compress,
    SNAPPY: pa.Codec("snappy").compress,
}
NAMES = {LZ4: "lz4", ZLIB: "zlib", ZSTD: "zstd", SNAPPY: "snappy"}
EACH = pytest.mark.parametrize("kind", COMPRESS, ids=NAMES.values())
SHOWN = pytest.mark.parametrize("kind", [ZSTD, SNAPPY], ids=["zstd", "snappy"])
DATA = b"hello, this is real data " * 4
SKIPPABLE = bytes.fromhex("502a4d18 02000000 aabb")


def packed(kind: int, data: bytes) -> bytes:
    return bytes(COMPRESS[kind](data))


def declaring(size: int | None, kind: int, payload: bytes) -> pulsar_batch.Batch:
    """A lone message."""
    declared = {} if size is None else {"uncompressed_size": size}
    metadata = MessageMetadata(
        producer_name="p", sequence_id=1, publish_time=1, compression=kind, **declared
    )
    return pulsar_batch.parse(pulsar_batch.build_batch(metadata, payload), check=True)


def value_of(batch: pulsar_batch.Batch) -> bytes:
    return pulsar_columns.decode_batches([batch]).column("value").to_pylist()[0]


@EACH
@pytest.mark.parametrize("size", [None, 0])
@pytest.mark.parametrize("data", [DATA, b"x", bytes(5000), bytes(3 << 20)])
def test_bytes_that_are_declared_as_none_are_refused_and_never_an_empty_row(kind, size, data):
    batch = declaring(size, kind, packed(kind, data))

    assert pulsar_batch.fault_of(batch)
    with pytest.raises(errors.BadEntry):
        value_of(batch)


@EACH
@pytest.mark.parametrize("size", [None, 0])
def test_noise_that_is_declared_as_none_is_refused(kind, size):
    for noise in (b"x", b"x" * 20, b"\xff" * 64, b"\x01" * 5000):
        assert pulsar_batch.fault_of(declaring(size, kind, noise))


@EACH
def test_an_empty_message_is_accepted_and_read_as_clients_compress_it(kind):
    for payload in (packed(kind, b""), b""):
        for size in (None, 0):
            batch = declaring(size, kind, payload)
            assert pulsar_batch.fault_of(batch) is None
            assert value_of(batch) == b""
    for level in range(10):
        assert pulsar_batch.fault_of(declaring(0, ZLIB, zlib.compress(b"", level))) is None
    for level in range(1, 20):
        frame = pa.Codec("zstd", level).compress(b"", asbytes=True)
        assert pulsar_batch.fault_of(declaring(0, ZSTD, frame)) is None


@EACH
@settings(deadline=None, max_examples=80)
@given(st.binary(max_size=300), st.integers(0, 400), st.booleans())
def test_what_is_read_has_the_declared_size_or_is_an_error(kind, data, size, repeated):
    data = data * 50 if repeated else data
    for declared in (size, len(data) - 1, len(data), len(data) + 1):
        if declared < 0:
            continue
        batch = declaring(declared, kind, packed(kind, data))
        if declared == len(data):
            assert pulsar_batch.fault_of(batch) is None
            assert value_of(batch) == data
        else:
            with pytest.raises(errors.BadEntry):
                value_of(batch)


@SHOWN
@pytest.mark.parametrize("length", [1, 100, 127, 128, 300, 70_000, 3 << 20])
def test_a_size_that_the_bytes_show_is_compared_without_decompressing(kind, length):
    payload = packed(kind, b"ab" * (length // 2) + b"c" * (length % 2))

    assert pulsar_batch.fault_of(declaring(length, kind, payload)) is None
    for other in (length - 1, length + 1, length // 2, 2 * length):
        assert pulsar_batch.fault_of(declaring(other, kind, payload))


@SHOWN
def test_the_first_chunk_shows_the_size_of_its_message(kind):
    data = bytes(range(256)) * 300
    for size, is_refused in ((len(data), False), (10, kind == SNAPPY or None), (0, True)):
        chunk = chunked(data, 3, compression=kind, compress=lambda data: packed(kind, data))[0]
        parsed = pulsar_batch.parse(chunk)
        parsed.metadata.uncompressed_size = size
        fault = pulsar_batch.fault_of(parsed, whole=False)
        assert (fault is not None) == (is_refused is not False)


def test_a_block_of_lz4_is_no_larger_than_what_it_decompresses_to():
    assert "larger than the 10" in pulsar_batch.fault_of(declaring(10, LZ4, packed(LZ4, DATA)))
    noise = bytes(range(256)) * 8
    for length in (0, 1, 14, 15, 16, 255, 270, 2048):
        data = noise[:length]
        assert pulsar_batch.fault_of(declaring(length, LZ4, packed(LZ4, data))) is None


def test_several_frames_of_zstd_are_read_and_one_that_is_passed_over():
    for frames in (
        packed(ZSTD, DATA) + packed(ZSTD, b"more"),
        SKIPPABLE + packed(ZSTD, DATA + b"more"),
        packed(ZSTD, DATA + b"more") + SKIPPABLE,
    ):
        batch = declaring(len(DATA) + 4, ZSTD, frames)
        assert pulsar_batch.fault_of(batch) is None
        assert value_of(batch) == DATA + b"more"
    assert pulsar_batch.fault_of(declaring(10, ZSTD, packed(ZSTD, DATA) + packed(ZSTD, b"more")))


@pytest.mark.parametrize("kind", [ZLIB, ZSTD], ids=["zlib", "zstd"])
def test_bytes_that_do_not_begin_as_their_codec_are_refused(kind):
    assert "declares" in pulsar_batch.fault_of(declaring(20, kind, b"x" * 20))


@EACH
def test_a_payload_that_ends_early_or_has_no_bytes_is_an_error(kind):
    payload = packed(kind, DATA)
    for cut in range(len(payload) - (6 if kind == ZLIB else 0)):  # the last 6 are no data
        with pytest.raises(errors.BadEntry):
            value_of(declaring(len(DATA), kind, payload[:cut]))
    assert pulsar_batch.fault_of(declaring(1, kind, b""))


@EACH
def test_bytes_of_a_signed_view_are_compared_as_others(kind):
    view = memoryview(pa.py_buffer(packed(kind, bytes(range(256)))))
    assert pulsar_codecs.fault_of(kind, view, 256) is None


def test_the_error_does_not_name_a_size_at_which_decompressing_stopped():
    batch = batch_of(
        [message(bytes(130 << 20))], compression=ZLIB, uncompressed=1000, compress=zlib.compress
    )
    with pytest.raises(errors.BadEntry, match="declares 1000 bytes has more"):
        pulsar_batch.payload_of(pulsar_batch.parse(batch))
