"""What the fingerprint of a streaming query's batch costs, beside making entries of the same rows.

    python benchmarks/fingerprint.py

Of batches of 10,000 rows, as Spark hands them over, in processor time of one thread. Making entries
is a part of what a write costs: the share of a whole write is smaller (docs/performance-trials.md).
"""

import os
import statistics
import time
from collections.abc import Callable

import numpy as np
import pyarrow as pa

from spark_ledger.topic.batch_encoder import BatchEncoder
from spark_ledger.topic.fingerprint import row_hashes
from spark_ledger.topic.routing import Router, Routing

ROWS = 10_000
TURNS = 15
PARTITIONS = 2


def texts(length: int, spread: int) -> pa.Array:
    """Hexadecimal text of about so many bytes."""
    rng = np.random.default_rng(length)
    cuts = rng.integers(0, spread + 1, ROWS).tolist()
    return pa.array([os.urandom(length // 2 + 1).hex()[: length - cut] for cut in cuts])


def shapes() -> dict[str, pa.RecordBatch]:
    rng = np.random.default_rng(1)
    keys = texts(12, 4)
    numbers = {f"n{i}": pa.array(rng.random(ROWS)) for i in range(8)}
    words = {f"w{i}": texts(10, 5) for i in range(4)}
    return {
        "key, 200 bytes": pa.record_batch({"key": keys, "value": texts(200, 0)}),
        "key, 150 to 200 bytes": pa.record_batch({"key": keys, "value": texts(200, 50)}),
        "key, 1 KiB": pa.record_batch({"key": keys, "value": texts(1024, 0)}),
        "12 typed columns": pa.record_batch({**numbers, **words}),
    }


def ns_a_row(work: Callable[[], object]) -> float:
    """The median of some turns, after one that is not counted."""
    took = []
    for _ in range(TURNS + 1):
        began = time.thread_time_ns()
        work()
        took.append((time.thread_time_ns() - began) / ROWS)
    return statistics.median(took[1:])


def encode(rows: pa.RecordBatch) -> None:
    encoder = BatchEncoder(Router(Routing.HASH, PARTITIONS, 0), lambda: 0, key_filters=True)
    typed = "value" not in rows.schema.names
    keys = None if typed else rows.column("key").cast(pa.binary())
    values = rows if typed else rows.column("value").cast(pa.binary())
    for entry in (*encoder.add(keys, values), *encoder.flush()):
        entry.payload([0] * len(entry.shares))


def main() -> None:
    print(f"{'rows':24} {'fingerprint, ns a row':>24} {'entries, ns a row':>20}")
    for name, rows in shapes().items():
        hashed = ns_a_row(lambda rows=rows: row_hashes(rows))
        encoded = ns_a_row(lambda rows=rows: encode(rows))
        print(f"{name:24} {hashed:24.0f} {encoded:20.0f}")


if __name__ == "__main__":
    main()
