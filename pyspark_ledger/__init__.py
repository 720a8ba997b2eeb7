"""How Spark finds format("ledger"): it imports every top-level module named pyspark_*, and takes
its DefaultSource. This runs for every user of any Python source: it is light and never raises."""


def __getattr__(name: str) -> object:
    if name != "DefaultSource":
        raise AttributeError(name)
    try:
        from spark_ledger.spark.data_source import LedgerDataSource
    except Exception as error:  # broken for us must not mean broken for other sources
        raise AttributeError(name) from error
    return LedgerDataSource
