"""A session of Spark that a caller hands over: checked, told of this format, taken to threads."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from pyspark import inheritable_thread_target
from pyspark.sql import SparkSession

from spark_ledger.errors import OptionInvalid


def check_session(spark: object) -> None:
    """Raises OptionInvalid for what is no session, of Spark itself or of Spark Connect."""
    if not isinstance(spark, SparkSession) and type(spark).__name__ != "SparkSession":
        raise OptionInvalid(
            f"spark is {spark!r}, no SparkSession", "Give the session: SparkSession.active()."
        )


def register(spark: SparkSession) -> None:
    """Make `format("ledger")` known to the session, where Spark does not find it by itself.

    Spark looks for Python sources with the driver's Python, which PYSPARK_DRIVER_PYTHON may have
    made `jupyter`. A second call changes nothing. Raises OptionInvalid if `spark` is no
    session.
    """
    check_session(spark)
    from spark_ledger.spark.data_source import LedgerDataSource

    spark.dataSource.register(LedgerDataSource)


def in_session(spark: SparkSession, work: Callable[..., Any]) -> Callable[..., Any]:
    """`work`, to be called in another thread: `Thread(target=in_session(spark, work))`.

    Spark looks for Python sources in the session that is active in the thread that writes, and a
    new thread has none. The thread also knows the query of the foreachBatch that called this, so
    that its writes follow the rule of a query's batch. Raises OptionInvalid for what is no session.
    """
    check_session(spark)

    @wraps(work)
    def active(*arguments: Any, **named: Any) -> Any:
        if isinstance(spark, SparkSession):  # of Spark Connect the server has the session
            of_java = SparkSession._get_j_spark_session_class(spark._jvm)
            of_java.setActiveSession(spark._jsparkSession)
        return work(*arguments, **named)

    found: Callable[..., Any] = inheritable_thread_target(spark)(active)
    return found
