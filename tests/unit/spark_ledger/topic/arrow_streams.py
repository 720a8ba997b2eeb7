"""Streams of Arrow, whole and damaged."""

import random
import struct

import pyarrow as pa

from spark_ledger.topic.entry.message_batch import HEADERS_TYPE, encode_body

ROWS = 50


def rows() -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        [
            pa.array([b"k%d" % i if i % 3 else None for i in range(ROWS)], pa.binary()),
            pa.array([b"v" * (i % 7) for i in range(ROWS)], pa.binary()),
            pa.array(
                [[{"key": "name", "value": b"text"}] * (i % 3) for i in range(ROWS)], HEADERS_TYPE
            ),
            pa.array(
                [{"a": i, "m": [("x", i)]} for i in range(ROWS)],
                pa.struct([("a", pa.int32()), ("m", pa.map_(pa.string(), pa.int64()))]),
            ),
        ],
        names=["key", "value", "headers", "own"],
    )


def stream_of(batch: pa.RecordBatch, compression: str = "none") -> bytes:
    return b"".join(encode_body(batch, compression))


def damaged(rng: random.Random, stream: bytes) -> bytes:
    """Some bytes or words of it are others."""
    found = bytearray(stream)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(found))
        if rng.random() < 0.5:
            found[at] ^= 1 << rng.randrange(8)
        else:
            at -= at % 4
            value = rng.choice((0, 1, -1, 2**31 - 1, -(2**31), rng.randrange(2**31), 1 << 20))
            found[at : at + 4] = struct.pack("<i", value)[: len(found) - at]
    return bytes(found)
