"""The streaming source: what Spark asks the driver (offsets, tasks) and the tasks (rows).

Always true: an offset never falls below the one Spark passed as start, and is that very one when
there is nothing new; an idle poll is answered from memory; the first poll of a run, the first
offset and the target of availableNow are read after a sync.

Spark keeps only the end of batch 0 and asks for the first offset again whenever it plans that
batch, also after a restart, when "latest" is further on. So batch 0 reads no further than what
was there when the first offset was found: a partition that begins at "latest" has no row in it,
and its end in batch 0 is where it begins, whatever the first offset is by then.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from spark_ledger.spark import limits, offsets, read_tasks
from spark_ledger.spark.driver_state import TopicsRead
from spark_ledger.spark.offsets import Positions, TopicEnds
from spark_ledger.spark.options import ReadOptions
from spark_ledger.spark.schema import check_projection


class LedgerStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """One lives in the source's own process as long as the query runs. Another is made where the
    tasks are planned and sent to them: it never connects."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        check_projection(schema)
        self.options = options
        self.schema = schema
        self._topics: TopicsRead | None = None
        self._target: Positions | None = None
        self._polled = False
        self._initial: dict[str, Any] | None = None
        self._there_at_first: dict[str, TopicEnds] | None = None
        self._behind: Positions | None = None

    def initialOffset(self) -> dict[str, Any]:
        if self._initial is None:
            known = self._opened().fresh_ends()
            start = offsets.resolve(self.options.starting, known)
            self._initial, self._there_at_first = offsets.encode(start, known), known
        return self._initial

    def getDefaultReadLimit(self) -> ReadLimit:
        rows_max = self.options.max_offsets_per_trigger
        return ReadAllAvailable() if rows_max is None else ReadMaxRows(rows_max)

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = offsets.ends_of(self._opened().fresh_ends())

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        known = self._known_at_poll(start)
        first = offsets.decode(start, known)
        if not offsets.within(first, known):
            known = self._opened().fresh_ends()
            offsets.check_within(first, known, "the query's offset")
        self._behind = first
        end = self._bounded(first, known)
        if isinstance(limit, ReadMaxRows):
            end = limits.admit(first, end, limits.Limits(limit.max_rows), _evenly)
        return start if end == first else offsets.encode(end, known)

    def reportLatestOffset(self) -> dict[str, Any] | None:
        known = self._known()
        latest = offsets.encode(offsets.ends_of(known), known)
        if self._behind is not None:
            latest["_rowsBehind"] = offsets.rows_between(self._behind, offsets.ends_of(known))
        return latest

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        known = self._known()
        first, last = offsets.decode(start, known), offsets.decode(end, known)
        if not offsets.within(last, known):
            known = self._opened().fresh_ends()
            offsets.check_within(last, known, "the offset to be read to")
        if start == self._initial:
            first = offsets.nearest(first, last)
        offsets.check_order(first, last)
        planned = self._opened().plan(
            first, last, self.options.min_partitions or 1, self.options.fail_on_data_loss
        )
        return [InputPartition(task) for task in planned]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_tasks.read_rows(self.options.service_url, partition.value, self.schema)

    def _bounded(self, first: Positions, known: dict[str, TopicEnds]) -> Positions:
        """All there is, or the target of availableNow; never below `first`."""
        end = offsets.ends_of(known)
        if self._target is not None:
            end = offsets.nearest(end, self._target)
        return offsets.furthest(first, end)

    def _known_at_poll(self, start: dict[str, Any]) -> dict[str, TopicEnds]:
        """What is known; at the first poll of a new query what was when its start was found."""
        there_at_first, self._there_at_first = self._there_at_first, None
        if there_at_first is None or start != self._initial:
            return self._known()
        self._polled = True
        return there_at_first

    def _known(self) -> dict[str, TopicEnds]:
        topics = self._opened()
        if self._polled:
            return topics.ends()
        known = topics.fresh_ends()
        self._polled = True
        return known

    def _opened(self) -> TopicsRead:
        if self._topics is None:
            topics = TopicsRead(self.options.service_url, self.options.topics)
            topics.follow()
            self._topics = topics
        return self._topics


def _evenly(topic: str, partition: int, lo: int, hi: int) -> limits.Curve:
    return limits.Curve.even(lo, hi)
