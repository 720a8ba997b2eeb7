"""How Spark finds format("ledger"): Spark imports every top-level module named pyspark_*, and takes
the module's DefaultSource. Every session that uses any Python source imports this module, so the
import is light and never fails."""


def __getattr__(name: str) -> object:
    if name != "DefaultSource":
        raise AttributeError(name)
    try:
        from spark_ledger.spark.data_source import LedgerDataSource
    except Exception as error:  # a fault of this package must not break other sources
        raise AttributeError(name) from error
    return LedgerDataSource
