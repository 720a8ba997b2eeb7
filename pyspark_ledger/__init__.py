"""How Spark finds format("ledger"): it imports every top-level module named pyspark_*, and takes
its DefaultSource. This runs for every user of any Python source: it is light and never raises."""

import contextlib

with contextlib.suppress(Exception):  # broken for us must not mean broken for other sources
    from spark_ledger.spark.data_source import LedgerDataSource as DefaultSource

    __all__ = ["DefaultSource"]
