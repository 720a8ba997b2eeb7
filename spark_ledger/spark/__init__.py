"""format("ledger"): the only package, besides the demo, that imports pyspark."""
