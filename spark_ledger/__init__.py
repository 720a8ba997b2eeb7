"""Spark Ledger: replicated, append-only ledgers and topics for Spark.

Importing this package loads neither pyspark nor grpc: each of its names is imported at first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spark_ledger.client.admin import Admin
    from spark_ledger.client.ledger_client import LedgerClient
    from spark_ledger.errors import cause_of
    from spark_ledger.spark.jobs import compact
    from spark_ledger.spark.read.lag_listener import LagListener
    from spark_ledger.spark.session import in_session, register, sql_setup
    from spark_ledger.spark.worker import worker_python
    from spark_ledger.spark.write.foreach import foreach_writer

__version__ = "0.1.0"
__all__ = [
    "Admin",
    "LagListener",
    "LedgerClient",
    "__version__",
    "cause_of",
    "compact",
    "foreach_writer",
    "in_session",
    "register",
    "sql_setup",
    "worker_python",
]

_HOMES = {
    "Admin": "spark_ledger.client.admin",
    "LagListener": "spark_ledger.spark.read.lag_listener",
    "LedgerClient": "spark_ledger.client.ledger_client",
    "cause_of": "spark_ledger.errors",
    "compact": "spark_ledger.spark.jobs",
    "foreach_writer": "spark_ledger.spark.write.foreach",
    "in_session": "spark_ledger.spark.session",
    "register": "spark_ledger.spark.session",
    "sql_setup": "spark_ledger.spark.session",
    "worker_python": "spark_ledger.spark.worker",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)
