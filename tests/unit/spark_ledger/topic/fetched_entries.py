"""Entries of all kinds, as a read fetches them, and the rows that it makes of them."""

import zlib

import numpy as np
import pyarrow as pa

from bookie_server.api.entry import Entry, EntryHeader, payload_crc
from spark_ledger.topic.entry.message_batch import Share, encode_body, encode_header
from spark_ledger.topic.entry.pulsar_batch import frame_batches
from spark_ledger.topic.read.bad_entries import BadEntries, OnBadEntry
from spark_ledger.topic.read.pieces import PIECE_DTYPE
from spark_ledger.topic.read.slice_reader import FetchedEntry
from tests.kit.pulsar_batches import batch_of, lone, message

FIRST = 1000
ZSTD = pa.Codec("zstd")


def fetched(payload: bytes, *pieces: tuple[int, int, int, int, int], **more) -> FetchedEntry:
    """`pieces`: partition, first row, rows passed over and taken, offset of the first of these."""
    header = EntryHeader(7, 3, 2, 0, 0, len(payload), payload_crc([payload]))
    wanted = np.array([*map(tuple, pieces)], dtype=PIECE_DTYPE)
    return FetchedEntry(Entry(header, memoryview(payload)), wanted, **more)


def of_batches(*batches: tuple[int, bytes], **more) -> FetchedEntry:
    rows = sum(count for count, _ in batches)
    head = encode_header([Share(2, rows, 5)], 99, has_batches=True, **more)
    return fetched(head + b"".join(frame_batches(batches)), (2, 5, 0, rows, FIRST))


def read(entry: FetchedEntry, policy=OnBadEntry.FAIL, columns=None):
    """Offset, key and value of each row, and what was met."""
    bad, rows = BadEntries("orders", policy), []
    for block in entry.blocks(columns, bad):
        batch, offsets = block.record_batch, block.row_numbers("offset").tolist()
        named = [
            batch.column(name).to_pylist() if name in batch.schema.names else [None] * len(offsets)
            for name in ("key", "value")
        ]
        rows += zip(offsets, *named, strict=True)
    return rows, (bad.count, bad.rows)


GOOD = batch_of([message(b"a", "k"), message(b"b")])


AFTER = lone(message(b"z"))


def arrow(values=(b"a", b"b", b"c"), compression="none") -> bytes:
    batch = pa.RecordBatch.from_arrays([pa.array(values, pa.binary())], names=["value"])
    head = encode_header([Share(2, 2, 5), Share(4, len(values) - 2, 0)], 99)
    return head + b"".join(encode_body(batch, compression))


def entries() -> list[tuple[bytes, list[tuple[int, int, int, int, int]]]]:
    """Payloads of all kinds, with the pieces that are all their rows."""
    found = []
    for compression in ("none", "lz4", "zstd"):
        pieces = [(2, 5, 0, 2, FIRST), (4, 0, 0, 38, 500)]
        found.append((arrow([b"v%d" % i for i in range(40)], compression), pieces))
    many = batch_of([message(b"v" * (i % 9), f"k{i}", {"a": "b"}) for i in range(200)])
    packed = batch_of([message(b"v" * 90)] * 150, compression=2, compress=zlib.compress)
    zstd = batch_of([message(b"v" * 90)] * 3, compression=3, compress=compressed)
    for batches in ([(2, GOOD), (1, AFTER)], [(200, many)], [(150, packed), (3, zstd), (2, GOOD)]):
        entry = of_batches(*batches)
        found.append((bytes(entry.entry.payload), entry.pieces.tolist()))
    return found


def compressed(data: bytes) -> bytes:
    return bytes(ZSTD.compress(data, asbytes=True))
