"""Spark Ledger: replicated, append-only ledgers and topics for Spark.

Importing it loads neither pyspark nor grpc: what it offers is imported when first used.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spark_ledger.client.ledger_client import LedgerClient

__version__ = "0.1.0"
__all__ = ["LedgerClient", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LedgerClient":
        from spark_ledger.client.ledger_client import LedgerClient

        return LedgerClient
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
