"""Calls for the caller's SparkSession: they check that an object is a session, register
`format("ledger")` and SQL table functions in a session, and make a session active in a new thread.

    spark_ledger.sql_setup(spark)
    spark.sql("SELECT * FROM ledger_lag('flights') WHERE rowsBehind > 0")
    spark.sql("SELECT * FROM read_ledger(topic => 'flights', endingOffsets => 'latest')")

Always true: the table functions use the cluster at the URL that `sql_setup` got; each call of a
function runs as one task of Spark, as with every table function. `read_ledger` gives rows to Spark
one by one, so use it for few rows. For many rows, use a table, and name the topic in WITH
(docs/spark.md, "Tables"): many tasks read the topic, column by column.
"""

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, cast

import pyarrow as pa
from pyspark import inheritable_thread_target
from pyspark.sql import SparkSession
from pyspark.sql.functions import arrow_udtf, udtf
from pyspark.sql.udtf import AnalyzeArgument, AnalyzeResult, UserDefinedTableFunction

from spark_ledger.config import resolve_service_url
from spark_ledger.errors import OptionConflict, OptionInvalid
from spark_ledger.spark.options.values import option_text
from spark_ledger.spark.read import listings
from spark_ledger.spark.read.tasks import session_time_zone

PREFIX = "ledger_"
READ = "read_ledger"


def check_session(spark: object) -> None:
    """Raises OptionInvalid unless `spark` is a session, of Spark itself or of Spark Connect."""
    if not isinstance(spark, SparkSession) and type(spark).__name__ != "SparkSession":
        raise OptionInvalid(
            f"spark is {spark!r}, not a SparkSession", "Give the session: SparkSession.active()."
        )


def register(spark: SparkSession) -> None:
    """Register `format("ledger")` in the session. Call this only if Spark does not find the format
    by itself. Spark finds Python data sources by running the driver's Python; if
    PYSPARK_DRIVER_PYTHON is `jupyter`, this fails. A second call changes nothing. Raises
    OptionInvalid if `spark` is not a session.
    """
    check_session(spark)
    from spark_ledger.spark.data_source import LedgerDataSource

    spark.dataSource.register(LedgerDataSource)


def in_session(spark: SparkSession, work: Callable[..., Any]) -> Callable[..., Any]:
    """`work`, with this session active in another thread.

        Thread(target=in_session(spark, work))

    Spark looks for Python data sources in the active session of the thread that writes, and a new
    thread has no active session. If a foreachBatch function calls `in_session`, Spark also counts
    the new thread to the query: if Spark repeats the micro-batch, writes of the thread follow the
    rules for a repeated micro-batch (docs/spark.md, "Exactly once"). Raises OptionInvalid if
    `spark` is not a session.
    """
    check_session(spark)

    @wraps(work)
    def with_session(*arguments: Any, **keywords: Any) -> Any:
        # A Spark Connect session lives in the server: it has no JVM session to activate here.
        if isinstance(spark, SparkSession):
            java_class = SparkSession._get_j_spark_session_class(spark._jvm)
            java_class.setActiveSession(spark._jsparkSession)
        return work(*arguments, **keywords)

    in_thread: Callable[..., Any] = inheritable_thread_target(spark)(with_session)
    return in_thread


def sql_setup(spark: SparkSession, service_url: str | None = None) -> list[str]:
    """Register the functions in the session, for the cluster at `service_url` (None:
    LEDGER_SERVICE_URL, else the default); returns their names. A second call replaces the
    functions, so that they use the second call's URL. Changes no topic. Raises errors.BadConfig,
    errors.OptionInvalid."""
    check_session(spark)
    url = resolve_service_url(service_url)
    names = []
    for view in listings.VIEWS:
        columns = listings.schema_of(view).fields
        schema = ", ".join(f"{column.name} {column.dataType.simpleString()}" for column in columns)
        function = cast(
            UserDefinedTableFunction, arrow_udtf(_listing_function(url, view), returnType=schema)
        )
        spark.udtf.register(PREFIX + view, function)
        names.append(PREFIX + view)
    spark.udtf.register(READ, cast(UserDefinedTableFunction, udtf(_read_function(url))))
    return [*names, READ]


def _listing_function(url: str, view: str) -> type:
    topics_max = 0 if view == "bookies" else 1

    class Listing:
        """The rows of `view` (one of listings.VIEWS) for a topic; without a topic, for all topics
        or for the cluster."""

        def eval(self, topic: pa.Array | None = None, *more: pa.Array) -> Iterator[pa.Table]:
            count = (topic is not None) + len(more)
            if count > topics_max:
                raise OptionInvalid(
                    f"{PREFIX}{view} has {count} arguments",
                    "Name one topic, or no topic for all topics."
                    if topics_max
                    else "Call it without arguments.",
                )
            name = None if topic is None else topic[0].as_py()
            if not isinstance(name, str | None):
                raise OptionInvalid(
                    f"topic is {name}, not text",
                    "Give the topic's name as a string, for example 'flights'.",
                )
            yield listings.table(url, view, name)

    return Listing


def _read_function(url: str) -> type:
    class ReadLedger:
        """A batch read. Named arguments are the options of the read; the first argument without a
        name is the topic."""

        @staticmethod
        def analyze(
            positional_topic: AnalyzeArgument | None = None, **arguments: AnalyzeArgument
        ) -> AnalyzeResult:
            arguments = _with_topic(positional_topic, arguments)
            options = {name: _constant_text(name, argument) for name, argument in arguments.items()}
            return AnalyzeResult(_source(url, options).schema())

        def eval(self, positional_topic: Any = None, **arguments: Any) -> Iterator[tuple[Any, ...]]:
            arguments = _with_topic(positional_topic, arguments)
            options = {name: option_text(argument) for name, argument in arguments.items()}
            zone, option_names = session_time_zone(), " ".join(options).lower()
            has_time = "timestamp" in option_names and "timezone" not in option_names
            if zone is not None and has_time:
                options["timeZone"] = zone
            source = _source(url, options)
            reader = source.reader(source.schema())
            for partition in reader.partitions():
                for batch in reader.read(partition):
                    columns = (column.to_pylist() for column in batch.columns)
                    yield from zip(*columns, strict=True)

    return ReadLedger


def _with_topic(positional_topic: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """The named arguments, with the topic among them. Raises OptionConflict."""
    if positional_topic is None:
        return arguments
    if "topic" in arguments:
        raise OptionConflict("read_ledger has a topic as its first argument and as topic => ...")
    return {**arguments, "topic": positional_topic}


def _source(url: str, options: dict[str, str]) -> Any:
    from spark_ledger.spark.data_source import LedgerDataSource

    return LedgerDataSource({"serviceUrl": url, **options})


def _constant_text(name: str, argument: AnalyzeArgument) -> str:
    if not argument.isConstantExpression or argument.value is None:
        raise OptionInvalid(
            f"{name} is not a constant", "Give read_ledger its options as literals."
        )
    return option_text(argument.value)
