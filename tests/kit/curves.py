"""Curves of rows for the limits of a micro-batch."""

import numpy as np

from spark_ledger.spark.options.limits import NEVER_MS, Curve


def even(lo: int, hi: int, size: int = 0, since_ms: int = NEVER_MS) -> Curve:
    """A curve of rows of equal size, `size` bytes together."""
    edges, rows, sizes = (np.array(pair, np.int64) for pair in ((lo, hi), (0, hi - lo), (0, size)))
    return Curve(edges, rows, sizes, since_ms)
