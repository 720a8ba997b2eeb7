"""The features of Spark 4.2 that 4.1 lacks: limits of a micro-batch, and the lag of a source.

Only this file has differences between versions. It checks for each feature, not for a version, as
vendors' versions have some of the features. Always true: on 4.1 a micro-batch takes all rows, and
an option that needs admission control (limits of a micro-batch) is refused, so no query reads more
at once than its options allow. Spark 4.1 runs availableNow as one micro-batch, like Trigger.Once.
"""

import inspect
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyspark
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.pandas import types as arrow_types
from pyspark.sql.types import StructType

from spark_ledger.errors import NewerSparkNeeded

try:
    from pyspark.sql.streaming.datasource import ReadAllAvailable as ReadAllAvailable
    from pyspark.sql.streaming.datasource import ReadLimit as ReadLimit
    from pyspark.sql.streaming.datasource import ReadMaxBytes as ReadMaxBytes
    from pyspark.sql.streaming.datasource import ReadMaxRows as ReadMaxRows
    from pyspark.sql.streaming.datasource import ReadMinRows as ReadMinRows
    from pyspark.sql.streaming.datasource import (
        SupportsTriggerAvailableNow as SupportsTriggerAvailableNow,
    )

    ADMISSION_CONTROL = True
except ModuleNotFoundError:
    ADMISSION_CONTROL = False

    class ReadLimit:  # type: ignore[no-redef]
        """The limit of a micro-batch: Spark 4.1 has no limits, and takes all rows."""

    class SupportsTriggerAvailableNow:  # type: ignore[no-redef]
        """A class for the source to inherit, which Spark 4.1 ignores."""

    ReadAllAvailable = ReadMaxBytes = ReadMaxRows = ReadMinRows = ReadLimit  # type: ignore


_IN_UTC: dict[str, Any] = {}
if "timezone" in inspect.signature(arrow_types.to_arrow_schema).parameters:
    _IN_UTC = {"timezone": "UTC"}  # Spark 4.1 uses UTC without the argument


def arrow_schema(schema: StructType) -> pa.Schema:
    """The schema in Arrow, with timestamps in UTC. Raises PySparkTypeError for a type that Arrow
    lacks."""
    return arrow_types.to_arrow_schema(schema, **_IN_UTC)


def spark_schema(schema: pa.Schema) -> StructType:
    """The schema in Spark: a timestamp without a zone is TIMESTAMP_NTZ."""
    return arrow_types.from_arrow_schema(schema, prefer_timestamp_ntz=True)


def check_limits(limit_options: Iterable[str]) -> None:
    """Raises NewerSparkNeeded if options limit micro-batches, and Spark cannot limit them."""
    for option in limit_options:
        if not ADMISSION_CONTROL:
            raise NewerSparkNeeded(
                f"{option} is given, but Spark {pyspark.__version__} has no admission control for"
                " Python sources: a micro-batch takes all rows",
                f"Leave {option} out, or run Spark 4.2.",
            )


def check_lag() -> None:
    """Raises NewerSparkNeeded if Spark's progress events do not carry the lag of a query."""
    if not ADMISSION_CONTROL:
        raise NewerSparkNeeded(
            f"the progress of a query on Spark {pyspark.__version__} does not have the query's lag",
            "Give the query a subscription and read metadata=lag, or run Spark 4.2.",
        )


def value_of(partition: InputPartition | None) -> Any:
    """The value of a planned partition; None for the partition that Spark makes if a plan is
    empty."""
    return None if partition is None else partition.value


def stream_reader(reader: DataSourceStreamReader) -> DataSourceStreamReader:
    """The source's reader, which is made for 4.2, with the interface of this Spark."""
    return reader if ADMISSION_CONTROL else UnlimitedStreamReader(reader)


class UnlimitedStreamReader(DataSourceStreamReader):
    """The reader for Spark 4.1, which asks for the newest offset without giving the query's
    position.

    This reader therefore remembers the end of the last planned micro-batch. When a run resumes,
    Spark first plans an empty micro-batch, from the newest offset of the checkpoint to the same
    offset; before that call the reader does not know the query's position, and counts no row as
    read.
    """

    def __init__(self, reader: DataSourceStreamReader) -> None:
        self._reader = reader
        self._batch_end: dict[str, Any] | None = None

    def initialOffset(self) -> dict[str, Any]:
        return self._reader.initialOffset()

    def latestOffset(self) -> dict[str, Any]:  # type: ignore[override]
        if self._batch_end is None:
            self._batch_end = self._reader.initialOffset()
        return self._reader.latestOffset(self._batch_end, ReadAllAvailable())

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        is_resume = self._batch_end is None and start == end
        self._batch_end = end
        return [] if is_resume else self._reader.partitions(start, end)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self._reader.read(partition)

    def commit(self, end: dict[str, Any]) -> None:
        self._reader.commit(end)

    def stop(self) -> None:
        self._reader.stop()
