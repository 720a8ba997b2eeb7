"""Listings and topics as SQL table functions.

    spark_ledger.sql_setup(spark)
    spark.sql("SELECT * FROM ledger_lag('flights') WHERE rowsBehind > 0")
    spark.sql("SELECT * FROM read_ledger(topic => 'flights', endingOffsets => 'latest')")

Always true: the functions know the cluster that `sql_setup` was given; each runs as one task of
Spark, for so Spark runs a table function. `read_ledger` hands rows over one by one: it is for a
look at a topic; a table WITH options (docs/spark.md) is read by many tasks, column by column.
"""

from collections.abc import Iterator
from typing import Any, cast

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.functions import arrow_udtf, udtf
from pyspark.sql.types import StructType
from pyspark.sql.udtf import AnalyzeArgument, AnalyzeResult, UserDefinedTableFunction

from spark_ledger.config import resolve_service_url
from spark_ledger.errors import OptionConflict, OptionInvalid
from spark_ledger.spark.options.values import as_given
from spark_ledger.spark.read import listings
from spark_ledger.spark.read.tasks import session_zone
from spark_ledger.spark.session import check_session

PREFIX = "ledger_"
READ = "read_ledger"


def sql_setup(spark: SparkSession, service_url: str | None = None) -> list[str]:
    """Register the functions in the session, for the cluster at `service_url` (None:
    LEDGER_SERVICE_URL, else the default); returns their names. A second call replaces the
    functions, so that they use its URL. Changes no topic. Raises errors.BadConfig,
    errors.OptionInvalid."""
    check_session(spark)
    url = resolve_service_url(service_url)
    names = []
    for view in listings.VIEWS:
        kind = _of_cluster(url, view) if view == "bookies" else _of_topics(url, view)
        schema = _text(listings.schema_of(view))
        function = cast(UserDefinedTableFunction, arrow_udtf(kind, returnType=schema))
        spark.udtf.register(PREFIX + view, function)
        names.append(PREFIX + view)
    spark.udtf.register(READ, cast(UserDefinedTableFunction, udtf(_reading(url))))
    return [*names, READ]


def _of_topics(url: str, view: str) -> type:
    class Listing:
        """The view of a topic, of all of them where none is named."""

        def eval(self, topic: pa.Array | None = None, *more: pa.Array) -> Iterator[pa.Table]:
            if more:
                raise OptionInvalid(
                    f"{PREFIX}{view} has {1 + len(more)} arguments",
                    "Name one topic, or none for all of them.",
                )
            named = None if topic is None else topic[0].as_py()
            if not isinstance(named, str | None):
                raise OptionInvalid(f"topic is {named}, no text", "Give its name as 'flights'.")
            yield listings.table(url, view, named)

    return Listing


def _of_cluster(url: str, view: str) -> type:
    class Listing:
        """The view of the cluster."""

        def eval(self, *arguments: pa.Array) -> Iterator[pa.Table]:
            if arguments:
                raise OptionInvalid(
                    f"{PREFIX}{view} has {len(arguments)} arguments", "It takes none."
                )
            yield listings.table(url, view)

    return Listing


def _reading(url: str) -> type:
    class ReadLedger:
        """A batch read; the arguments are its options, the first may be the topic by its place."""

        @staticmethod
        def analyze(
            placed: AnalyzeArgument | None = None, **arguments: AnalyzeArgument
        ) -> AnalyzeResult:
            arguments = _with_topic(placed, arguments)
            given = {name: _constant(name, one) for name, one in arguments.items()}
            return AnalyzeResult(_source(url, given).schema())

        def eval(self, placed: Any = None, **arguments: Any) -> Iterator[tuple[Any, ...]]:
            arguments = _with_topic(placed, arguments)
            options = {name: as_given(one) for name, one in arguments.items()}
            zone, given = session_zone(), " ".join(options).lower()
            if zone is not None and "timestamp" in given and "timezone" not in given:
                options["timeZone"] = zone
            source = _source(url, options)
            reader = source.reader(source.schema())
            for partition in reader.partitions():
                for batch in reader.read(partition):
                    columns = (column.to_pylist() for column in batch.columns)
                    yield from zip(*columns, strict=True)

    return ReadLedger


def _with_topic(placed: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments, with the one that was given by its place. Raises OptionConflict."""
    if placed is None:
        return arguments
    if "topic" in arguments:
        raise OptionConflict("read_ledger has a topic by its place and another by name")
    return {**arguments, "topic": placed}


def _source(url: str, options: dict[str, str]) -> Any:
    from spark_ledger.spark.data_source import LedgerDataSource

    return LedgerDataSource({"serviceUrl": url, **options})


def _constant(name: str, argument: AnalyzeArgument) -> str:
    if not argument.isConstantExpression or argument.value is None:
        raise OptionInvalid(f"{name} is no constant", "Give read_ledger its options as literals.")
    return as_given(argument.value)


def _text(schema: StructType) -> str:
    return ", ".join(f"{one.name} {one.dataType.simpleString()}" for one in schema.fields)
