"""Arrow streams whose bytes are damaged or forged: an error, never foreign memory or a signal."""

import struct
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest

from spark_ledger import errors
from spark_ledger.topic.entry.arrow_stream import UNPACKED_BYTES_MAX, read_batch
from spark_ledger.topic.entry.message_batch import HEADERS_TYPE
from tests.unit.spark_ledger.topic.arrow_streams import ROWS, rows, stream_of


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
def test_what_a_writer_made_is_read(compression):
    assert read_batch(stream_of(rows(), compression)) == (ROWS, rows())


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
def test_only_the_fields_that_are_wanted_are_read(compression):
    stream = stream_of(rows(), compression)

    count, batch = read_batch(stream, lambda schema: [schema.get_field_index("own")])
    assert (count, batch) == (ROWS, rows().select(["own"]))
    assert read_batch(stream, lambda schema: []) == (ROWS, None)


def test_text_that_is_not_utf8_is_read_as_it_was_written():
    raw = pa.array([b"\xff\xfe", b"a"], pa.binary())
    pairs = pa.StructArray.from_arrays(
        [raw.view(pa.string()), raw], fields=list(HEADERS_TYPE.value_type)
    )
    headers = pa.Array.from_buffers(
        HEADERS_TYPE, 1, [None, pa.py_buffer(np.array([0, 2], np.int32))], children=[pairs]
    )
    maps = pa.MapArray.from_arrays([0, 2], raw.view(pa.string()), raw.view(pa.string()))
    batch = pa.RecordBatch.from_arrays(
        [headers, raw.view(pa.string()).slice(0, 1), maps], names=["headers", "text", "map"]
    )

    assert read_batch(stream_of(batch)) == (1, batch)


def forged(batch: pa.RecordBatch, column: int, offsets: list[int]) -> bytes:
    """The stream with other offsets of a column of bytes."""
    before = bytes(batch.column(column).buffers()[1])[: 4 * len(offsets)]
    stream = stream_of(batch)
    assert stream.count(before) == 1, "the offsets are found"
    return stream.replace(before, struct.pack(f"<{len(offsets)}i", *offsets))


@pytest.mark.parametrize(
    "offsets",
    [[0, 1 << 30, 6], [0, -4096, 6], [-8, 3, 6], [0, 3, 1 << 20], [0, 5, 4]],
    ids=["far", "before", "first before", "last far", "falling"],
)
def test_offsets_beyond_the_values_are_an_error_and_never_foreign_memory(offsets):
    batch = pa.RecordBatch.from_arrays([pa.array([b"abc", b"def"], pa.binary())], names=["value"])

    with pytest.raises(errors.BadEntry, match="damaged Arrow stream"):
        read_batch(forged(batch, 0, offsets))


def test_bytes_that_decompress_to_more_than_is_read_are_refused_before_it():
    huge = pa.RecordBatch.from_arrays(
        [pa.array([bytes(1 << 20)] * 4, pa.binary())], names=["value"]
    )
    stream = stream_of(huge, "zstd")
    assert len(stream) < 4096

    pool = pa.default_memory_pool()
    before = pool.bytes_allocated()
    peak = pool.max_memory()
    with pytest.raises(
        errors.BadEntry, match=r"4194\d\d\d bytes, decompressed; at most 4194000 are"
    ):
        read_batch(stream, bytes_max=4_194_000)
    assert pool.bytes_allocated() == before
    assert pool.max_memory() == peak, "nothing was decompressed"
    assert read_batch(stream, bytes_max=4_200_000)[0] == 4


@pytest.mark.parametrize("size", [UNPACKED_BYTES_MAX + 1, 1 << 62, -(1 << 62), -2])
def test_a_buffer_that_declares_another_size_than_it_has_is_refused(size):
    batch = pa.RecordBatch.from_arrays([pa.array([b"v" * 5000], pa.binary())], names=["value"])
    stream = stream_of(batch, "lz4")
    before, _, after = stream.rpartition(struct.pack("<q", 5000))
    assert len(before) > 200, "in the body"

    with pytest.raises(errors.BadEntry, match="damaged Arrow stream"):
        read_batch(before + struct.pack("<q", size) + after)


def test_more_rows_than_may_be_are_refused():
    batch = pa.RecordBatch.from_arrays([pa.nulls(1000)], names=["value"])

    with pytest.raises(errors.BadEntry, match="1000 rows, at most 999 are read"):
        read_batch(stream_of(batch), rows_max=999)


def test_a_stream_with_a_dictionary_is_none_of_ours():
    batch = pa.RecordBatch.from_arrays([pa.array(["a", "a"]).dictionary_encode()], names=["value"])

    with pytest.raises(errors.BadEntry, match="second message is of kind 2"):
        read_batch(stream_of(batch))


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
def test_every_cut_is_an_error(compression):
    stream = stream_of(rows().slice(0, 3), compression)
    body_ends = len(stream) - 8  # the end of the stream is not needed

    for size in range(0, body_ends, 3):
        with pytest.raises(errors.BadEntry):
            read_batch(stream[:size])


FUZZ = """
import random, resource, sys
sys.path[:0] = {path!r}
resource.setrlimit(resource.RLIMIT_AS, ({memory}, {memory}))
from spark_ledger import errors
from spark_ledger.topic.entry.arrow_stream import read_batch
from tests.unit.spark_ledger.topic.arrow_streams import damaged, rows, stream_of

rng, refused, read = random.Random({seed}), 0, 0
streams = [stream_of(rows(), one) for one in ("none", "lz4", "zstd")]
for _ in range({rounds}):
    stream = damaged(rng, rng.choice(streams))
    try:
        _, batch = read_batch(stream)
    except errors.BadEntry:
        refused += 1
    else:
        read += 1
        for column in [] if batch is None else batch.columns:  # touch every value that it has
            try:
                column.to_pylist()
            except ValueError:  # text that is not UTF-8, a struct with two fields of one name
                pass
print(refused, read)
"""


def test_damaged_streams_end_no_process_and_take_no_memory():
    rounds = 4000
    code = FUZZ.format(path=sys.path, memory=4 << 30, seed=7, rounds=rounds)

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)

    assert done.returncode == 0, done.stderr[-2000:]
    refused, read = map(int, done.stdout.split())
    assert refused + read == rounds
    assert refused > rounds // 4
    assert read > rounds // 20, "bytes of values may be any"
