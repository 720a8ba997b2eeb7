"""Stored bytes that cannot be decoded: an error with the place, left out, or given as they are;
what is beside them is read as ever."""

import logging
import random
import subprocess
import sys
import zlib

import pyarrow as pa
import pytest

from spark_ledger import errors
from spark_ledger.topic.entry import pulsar_parts
from spark_ledger.topic.entry.pulsar_batch import build_batch, last_chunk
from spark_ledger.topic.entry.pulsar_message_pb2 import MessageMetadata
from spark_ledger.topic.entry.pulsar_parts import Chunks
from spark_ledger.topic.read.bad_entries import OnBadEntry
from spark_ledger.topic.read.slice_reader import FetchedEntry
from tests.kit.pulsar_batches import batch_of, chunked, message
from tests.unit.spark_ledger.topic.fetched_entries import (
    AFTER,
    FIRST,
    GOOD,
    ZSTD,
    arrow,
    fetched,
    of_batches,
    read,
)

NOISE = build_batch(
    MessageMetadata(producer_name="p", sequence_id=1, publish_time=1, num_messages_in_batch=3),
    random.Random(1).randbytes(60),
)
UNKNOWN_CODEC = batch_of([message(b"v")] * 3, compression=9)
COUNTS = batch_of([message(b"v")] * 2, count=3)
ENCRYPTED = batch_of([message(b"v")] * 3, encrypted=True)
BOMB = batch_of(
    [message(b"v")] * 3,
    compression=3,
    uncompressed=130 << 20,
    compress=lambda _: ZSTD.compress(bytes(130 << 20), asbytes=True),
)
LESS = batch_of(  # decompresses to less than it declares, as only decompressing shows
    [message(b"v" * 9)] * 3,
    compression=1,
    uncompressed=90,
    compress=lambda data: pa.compress(data, "lz4_raw", asbytes=True),
)
COLUMNS = (None, frozenset({"value"}), frozenset({"key"}), frozenset())
BAD = pytest.mark.parametrize(
    "batch",
    [NOISE, UNKNOWN_CODEC, COUNTS, ENCRYPTED, BOMB, LESS],
    ids=["noise", "unknown codec", "other count", "encrypted", "130 MiB of zeros", "less"],
)


@BAD
def test_a_batch_that_cannot_be_decoded_is_an_error_that_names_its_place(batch):
    with pytest.raises(errors.BadEntry) as raised:
        read(of_batches((2, GOOD), (3, batch), (1, AFTER)))

    place = "topic 'orders', partition 2, offsets 1002 to 1004 (ledger 7, entry 3): "
    assert raised.value.what.startswith(place)
    facts = {"topic": "orders", "partition": 2, "offset": 1002, "end": 1005}
    assert raised.value.facts == {**facts, "ledger_id": 7, "entry_id": 3}
    assert "onBadEntry" in raised.value.remedy
    assert ("has the key" in raised.value.remedy) == (batch is ENCRYPTED)


@BAD
def test_skip_leaves_out_exactly_its_rows_and_counts_them(batch, caplog):
    with caplog.at_level(logging.WARNING):
        rows, met = read(of_batches((2, GOOD), (3, batch), (1, AFTER)), OnBadEntry.SKIP)

    assert rows == [(1000, b"k", b"a"), (1001, None, b"b"), (1005, None, b"z")]
    assert met == (1, 3)
    assert "partition 2, offsets 1002 to 1004 (ledger 7, entry 3)" in caplog.text


@BAD
def test_raw_gives_the_stored_bytes_as_the_value_of_one_row(batch):
    rows, met = read(of_batches((2, GOOD), (3, batch), (1, AFTER)), OnBadEntry.RAW)

    assert rows[2:] == [(1002, None, batch), (1005, None, b"z")]
    assert met == (1, 3)


@pytest.mark.parametrize("size", [None, 0, 10, 2000])
@pytest.mark.parametrize("kind", [1, 2, 3, 4])
def test_a_stored_message_of_another_size_than_it_declares_is_met_and_no_empty_row(kind, size):
    value, declared = b"real data " * 100, {} if size is None else {"uncompressed_size": size}
    metadata = MessageMetadata(producer_name="p", publish_time=1, compression=kind, **declared)
    codecs = {1: "lz4_raw", 3: "zstd", 4: "snappy"}
    payload = zlib.compress(value) if kind == 2 else pa.compress(value, codecs[kind], asbytes=True)
    batch = build_batch(metadata, payload)
    entry = of_batches((2, GOOD), (1, batch), (1, AFTER))

    with pytest.raises(errors.BadEntry, match="offset 1002 "):
        read(entry)
    rows, met = read(entry, OnBadEntry.SKIP)
    assert ([offset for offset, _, _ in rows], met) == ([1000, 1001, 1003], (1, 1))
    assert read(entry, OnBadEntry.RAW)[0][2] == (1002, None, batch)


@BAD
@pytest.mark.parametrize("policy", [OnBadEntry.SKIP, OnBadEntry.RAW])
def test_a_batch_is_bad_whatever_columns_are_read(batch, policy):
    entry = of_batches((2, GOOD), (3, batch), (1, AFTER))
    offsets = [[row[0] for row in read(entry, policy, columns)[0]] for columns in COLUMNS]
    assert offsets == [offsets[0]] * len(COLUMNS)
    for columns in COLUMNS:
        with pytest.raises(errors.BadEntry):
            read(entry, OnBadEntry.FAIL, columns)


def test_of_a_bad_batch_that_begins_before_the_read_no_row_is_raw():
    entry = of_batches((3, NOISE), (1, AFTER))
    later = fetched(bytes(entry.entry.payload), (2, 5, 1, 3, FIRST + 1))

    assert read(later, OnBadEntry.RAW) == ([(1003, None, b"z")], (1, 2))


def test_columns_of_a_bad_batch_that_is_not_read_are_no_fault():
    entry = of_batches((3, NOISE), (2, GOOD))
    later = fetched(bytes(entry.entry.payload), (2, 5, 4, 1, FIRST + 4))

    assert read(later) == ([(1004, None, b"b")], (0, 0))


def test_of_a_bad_entry_each_partition_is_met_by_itself():
    payload = arrow()[:-40]
    entry = fetched(payload, (2, 5, 0, 2, FIRST), (4, 0, 0, 1, 500))

    rows, met = read(entry, OnBadEntry.RAW)
    assert rows == [(1000, None, payload), (500, None, payload)]
    assert met == (2, 3)
    assert read(entry, OnBadEntry.SKIP) == ([], (2, 3))
    with pytest.raises(errors.BadEntry, match=r"partition 2, offsets 1000 to 1001 .*damaged Arrow"):
        read(entry)


def test_bytes_of_another_program_are_a_bad_entry():
    entry = fetched(b"hello", (2, 5, 0, 2, FIRST))

    assert read(entry, OnBadEntry.SKIP) == ([], (1, 2))
    assert read(entry, OnBadEntry.RAW, ["key"]) == ([(1000, None, None)], (1, 2))
    with pytest.raises(errors.BadEntry, match="topic 'orders', partition 2"):
        read(entry)


@pytest.mark.parametrize("policy", list(OnBadEntry))
def test_what_a_later_version_wrote_is_an_error_whatever_the_read_says(policy):
    payload = bytearray(arrow())
    payload[4] = 3  # the version
    entry = fetched(bytes(payload), (2, 5, 0, 2, FIRST))

    with pytest.raises(errors.UnsupportedFormat, match="topic 'orders', partition 2") as raised:
        read(entry, policy)
    assert not isinstance(raised.value, errors.BadEntry)
    assert "Upgrade" in raised.value.remedy


def test_a_message_whose_chunks_cannot_be_put_together_is_met_at_its_last_chunk():
    last = chunked(b"v" * 60, 3)[-1]
    fault = errors.BadEntry("a chunk before it is damaged")
    entry = of_batches((1, last_chunk([998, 999], last)), (1, AFTER), chunks=1)
    entry = FetchedEntry(entry.entry, entry.pieces, Chunks({}, {0: fault}))

    assert read(entry, OnBadEntry.SKIP) == ([(1001, None, b"z")], (1, 1))
    with pytest.raises(errors.BadEntry, match=r"offset 1000 .*a chunk before it is damaged"):
        read(entry)


def test_an_entry_of_batches_that_decompress_to_much_is_decoded_in_parts(monkeypatch):
    monkeypatch.setattr(pulsar_parts, "PART_BYTES_MAX", 50_000)
    value = bytes(20_000)
    batches = [
        (1, batch_of([message(value, f"k{i}")], compression=2, compress=zlib.compress))
        for i in range(9)
    ]
    entry = of_batches(*batches)
    assert len(entry.entry.payload) < 2000

    blocks = list(entry.blocks())
    assert [block.num_rows for block in blocks] == [2, 2, 2, 2, 1]
    assert read(entry)[0] == [(FIRST + i, b"k%d" % i, value) for i in range(9)]


def test_a_part_has_a_bounded_number_of_rows(monkeypatch):
    monkeypatch.setattr(pulsar_parts, "PART_ROWS_MAX", 5)
    entry = of_batches(*[(2, GOOD)] * 7)

    assert [block.num_rows for block in entry.blocks()] == [4, 4, 4, 2]


FUZZ = """
import random, resource, sys
sys.path[:0] = {path!r}
resource.setrlimit(resource.RLIMIT_AS, ({memory}, {memory}))
from spark_ledger import errors
from spark_ledger.topic.read.bad_entries import OnBadEntry
from tests.unit.spark_ledger.topic.arrow_streams import damaged
from tests.unit.spark_ledger.topic.fetched_entries import entries, fetched, read

rng, outcomes, every = random.Random({seed}), [0, 0], entries()
for _ in range({rounds}):
    payload, pieces = rng.choice(every)
    entry = fetched(damaged(rng, payload), *pieces)
    try:
        rows, met = read(entry)
        outcomes[0] += 1
        assert len(rows) == sum(piece[3] for piece in pieces), "each row once"
    except errors.UnsupportedFormat as error:
        assert isinstance(error.facts["offset"], int), error
        outcomes[1] += 1
        if isinstance(error, errors.BadEntry):
            assert read(entry, OnBadEntry.SKIP)[1][1] > 0
            read(entry, OnBadEntry.RAW)
print(*outcomes)
"""


def test_damaged_entries_give_documented_errors_or_rows_and_end_no_process():
    rounds = 1200
    code = FUZZ.format(path=sys.path, memory=4 << 30, seed=11, rounds=rounds)

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)

    assert done.returncode == 0, done.stderr[-3000:]
    rows, refused = map(int, done.stdout.split())
    assert rows + refused == rounds
    assert rows > rounds // 20
    assert refused > rounds // 4
