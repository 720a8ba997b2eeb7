"""The sources of a stream and of a batch: Spark gets offsets and tasks from them in the driver, and
rows in tasks; and the subscription that follows a streaming query.

Always true: an offset never falls below the start that Spark passed, and is that very start if
there is nothing new; an idle poll looks in memory only, and waits until reported changes are there;
the first poll of a run, the first offset and the target of availableNow are read after a sync. So
is a batch, which holds all that was committed before; the source takes no filter from Spark (the
reason is in options.py).

Spark keeps only the end of batch 0 and asks for the first offset again whenever it plans that
batch, also after a restart, when "latest" or a subscription is further on. So the end of batch 0
names the begin of the batch (`_first`; without it the batch has no row) and the times without a
zone by which it was planned (`_zoneless`), and batch 0 reads only rows that were there when the
first offset was found: it has no row of a partition that begins at "latest".
"""

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from spark_ledger.errors import RowsTrimmed, TopicDeleted
from spark_ledger.spark.options import limits, offsets
from spark_ledger.spark.options.offsets import Ends, Positions
from spark_ledger.spark.options.options import ReadOptions
from spark_ledger.spark.read import tasks as read_tasks
from spark_ledger.spark.read.topics_read import TopicsRead
from spark_ledger.spark.rows.columns import check_projection
from spark_ledger.spark.spark_version import ReadLimit, SupportsTriggerAvailableNow, planned
from spark_ledger.spark.worker import before_termination
from spark_ledger.topic.blocking import BlockingCursor, open_cursor, release_all
from spark_ledger.topic.subscription.lag import spark_metrics

FIRST = "_first"
ZONELESS = "_zoneless"
"""In the end of batch 0: times without a zone, and the milliseconds that they were taken for."""
LAG_AGAIN_S = 1.0
BEYOND = (
    "If the metadata store was restored from an older backup, bring back the newer one; else start"
    " with a new checkpoint and startingOffsets."
)


class LedgerStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """One reader lives in the source's own process as long as the query runs. Another one is made
    where tasks are planned, and sent to them: it never connects."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        check_projection(schema, options.value_format)
        self.options = options
        self.schema = schema
        self._topics: TopicsRead | None = None
        self._target: Positions | None = None
        self._polled = False
        self._initial: dict[str, Any] | None = None
        self._there_at_first: Ends | None = None
        self._decoded: tuple[dict[str, Any], Ends, Positions] | None = None
        self._of_store: tuple[dict[str, Any], int] | None = None
        self._idle: tuple[Ends, Positions] | None = None
        self._behind: Positions | None = None
        self._reported: tuple[Ends, Positions | None, float, dict[str, Any]] | None = None
        self._gave_s: float | None = None
        self._cursor = QueryCursor(options.subscription)

    def initialOffset(self) -> dict[str, Any]:
        if self._initial is None:
            topics = self._opened()
            topic_ends = topics.fresh_ends()
            start = topics.positions(self.options.starting, topic_ends)
            self._initial = self._cursor.signed(offsets.encode(start, topic_ends))
            self._there_at_first = topic_ends
        return self._initial

    def getDefaultReadLimit(self) -> ReadLimit:
        return limits.read_limit(self.options.limits)

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = offsets.ends_of(self._opened().fresh_ends())

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        topic_ends = self._known_at_poll(start)
        first = self._positions(start, topic_ends)
        if self._nothing_after(first, topic_ends) and self._opened().catch_up():
            topic_ends = self._opened().ends()  # processAllAvailable returns at the first idle poll
            first = self._positions(start, topic_ends)
        if self._idle is not None and self._idle[0] is topic_ends and self._idle[1] is first:
            self._cursor.check()
            return start
        if not offsets.within(first, topic_ends):
            topic_ends = self._opened().fresh_ends()
            first = self._positions(start, topic_ends)
            offsets.check_within(first, topic_ends, "the query's offset", BEYOND)
        self._check_store(start, first, "the query's offset")
        if first is not self._behind:
            self._behind = first
            self._move_cursor(start, first)
        self._cursor.check()
        latest = self._bounded(first, topic_ends)
        if latest == first:
            self._idle = (topic_ends, first)
            if self._target is not None:
                self._cursor.release()
            return start
        end = self._admitted(first, latest, limit)
        if end == first:
            return start
        self._gave_s = time.monotonic()
        given = offsets.encode(end, topic_ends, self._tokens(start, first, end))
        if start == self._initial:
            given[FIRST] = {name: at for name, at in start.items() if name != QUERY}
            given[ZONELESS] = [list(time) for time in self.options.zoneless]
        signed = self._cursor.signed(given)
        self._of_store = (signed, self._opened().went_back)
        return signed

    def reportLatestOffset(self) -> dict[str, Any] | None:
        topic_ends, behind, now_s = self._known(), self._behind, time.monotonic()
        last = self._reported
        same = last is not None and last[0] is topic_ends and last[1] is behind
        if last is not None and same and now_s - last[2] < LAG_AGAIN_S:
            return last[3]
        latest = offsets.encode(offsets.ends_of(topic_ends), topic_ends)
        if behind is not None:
            lags = self._opened().lags(behind, time.time_ns() // 1_000_000)
            latest["_rowsBehind"] = sum(lag.rows for lag in lags)
            latest["_bytesBehind"] = sum(lag.bytes for lag in lags)
            latest["_millisBehind"] = max((lag.millis for lag in lags), default=0)
            latest["_metrics"] = spark_metrics(lags)
        self._reported = (topic_ends, behind, now_s, latest)
        return latest

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        topic_ends = self._known()
        if start == self._initial:
            start = end.get(FIRST, end)
        first, last = self._decode(start, topic_ends), self._decode(end, topic_ends)
        if not offsets.within(last, topic_ends):
            topic_ends = self._opened().fresh_ends()
            first, last = self._decode(start, topic_ends), self._decode(end, topic_ends)
            offsets.check_within(last, topic_ends, "the offset to be read to", BEYOND)
        offsets.check_order(first, last)
        self._check_store(end, last, "the offset to be read to")
        topics = self._opened()
        self._cursor.at(topics, end, first)
        tasks = topics.plan(first, last)
        values = topics.values(self.schema)
        return read_tasks.partitions_of(self.options, tasks, values, self._zoneless(end))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_tasks.read_rows(self.options, planned(partition), self.schema)

    def commit(self, end: dict[str, Any]) -> None:
        if self.options.subscription is not None:
            topics = self._opened()
            self._cursor.at(topics, end, self._decode(end, self._known()))

    def stop(self) -> None:
        self._cursor.release()
        if self._topics is not None:
            self._topics.close()

    def _zoneless(self, end: dict[str, Any]) -> tuple[tuple[str, int], ...]:
        """The times without a zone by which the batch was planned: those of the run that planned
        batch 0, whatever options this run has. Later batches need no time."""
        if FIRST not in end:
            return ()
        planned_by = end.get(ZONELESS)
        if planned_by is None:
            return self.options.zoneless
        return tuple((text, millis) for text, millis in planned_by)

    # -- the store that the rows were in --------------------------------------------------------

    def _tokens(self, start: dict[str, Any], first: Positions, end: Positions) -> Positions:
        """The tokens of the commits that made the last rows before `end`."""

        def moved(topic: str, partition: int) -> bool:
            return end[topic][partition] != first.get(topic, {}).get(partition)

        return offsets.tokens_kept(offsets.tokens_of(start), self._opened().tokens(end), moved)

    def _check_store(self, offset: dict[str, Any], positions: Positions, what: str) -> None:
        """Raises OffsetOfAnotherStore if the rows before the offset are others than when the offset
        was given: then the metadata store is an older one. Offsets that this run gave need no
        check, until a topic's log is shorter than before."""
        looked_at = (offset, self._opened().went_back)
        if self._of_store == looked_at:
            return
        tokens = offsets.tokens_of(offset)
        if tokens:
            self._opened().check_tokens(positions, tokens, what)
        self._of_store = looked_at

    # -- offsets --------------------------------------------------------------------------------

    def _move_cursor(self, start: dict[str, Any], first: Positions) -> None:
        """All rows before `first` are done. Spark keeps the offsets that it passes, except the
        first."""
        if start == self._initial:
            self._cursor.reserve(self._opened(), first)
        else:
            self._cursor.at(self._opened(), start, first)

    def _nothing_after(self, first: Positions, topic_ends: Ends) -> bool:
        if self._idle is not None and self._idle[0] is topic_ends and self._idle[1] is first:
            return self._target is None
        return self._target is None and offsets.ends_of(topic_ends) == first

    def _bounded(self, first: Positions, topic_ends: Ends) -> Positions:
        """The end of the topics, or the target of availableNow; never below `first`."""
        end = offsets.ends_of(topic_ends)
        if self._target is not None:
            end = offsets.nearest(end, self._target)
        return offsets.furthest(first, end)

    def _admitted(self, first: Positions, end: Positions, limit: ReadLimit) -> Positions:
        """The end of one micro-batch within the limits."""
        obeyed = limits.obeyed(self.options.limits, limit)
        if self._target is None and obeyed.rows_min is not None:
            gave_s = self._gave_s
            since_ms = None if gave_s is None else int((time.monotonic() - gave_s) * 1000)
            if limits.holds_back(obeyed, self._backlog_rows(first, end), since_ms):
                return first
        if not obeyed.bounded:
            return end
        return limits.admit(first, end, obeyed, self._opened().curves(first, end))

    def _backlog_rows(self, first: Positions, end: Positions) -> int:
        """Without rows that are gone and offsets without a row."""
        curve_of = self._opened().curves(first, end)
        return sum(
            curve_of(topic, p, at, end[topic][p]).rows
            for topic, parts in first.items()
            for p, at in parts.items()
            if at < end[topic][p]
        )

    def _positions(self, start: dict[str, Any], topic_ends: Ends) -> Positions:
        """`start` decoded; the same object for the same offset and topics."""
        last = self._decoded
        if last is not None and last[1] is topic_ends and last[0] == start:
            return last[2]
        positions = self._decode(start, topic_ends)
        if last is not None and last[2] == positions:
            positions = last[2]
        self._decoded = (start, topic_ends, positions)
        return positions

    def _decode(self, offset: dict[str, Any], topic_ends: Ends) -> Positions:
        lossy = not self.options.fail_on_data_loss
        by_pattern = self.options.pattern is not None
        return offsets.decode(offset, topic_ends, by_pattern=by_pattern, lossy=lossy)

    # -- the ends of the topics -----------------------------------------------------------------

    def _known_at_poll(self, start: dict[str, Any]) -> Ends:
        """The known ends; at the first poll of a new query those at which its start was found."""
        there_at_first, self._there_at_first = self._there_at_first, None
        if there_at_first is None or start != self._initial:
            return self._known()
        self._polled = True
        return there_at_first

    def _known(self) -> Ends:
        topics = self._opened()
        if self._polled:
            return topics.ends()
        topic_ends = topics.fresh_ends()
        self._polled = True
        return topic_ends

    def _opened(self) -> TopicsRead:
        if self._topics is None:
            topics = TopicsRead(self.options)
            topics.follow()
            self._topics = topics
        return self._topics


QUERY = "_query"


class QueryCursor:
    """The subscription that follows a query (`subscription=`), for one source. `name` None: there
    is no subscription, and nothing happens.

    Spark gives a source neither its query's id nor its run's. So the query is a token that its
    first offset carries (`_query`) and that every later offset takes over; a run is a process of
    the source. Always true: a subscription is claimed only by a token that is in Spark's
    checkpoint, so a run that restarts from there is the same query and has the subscription at
    once, whenever the run before was killed. Before that the source only checks that the
    subscription is free, and makes it, without a user, so that the rows to read stay. A cursor is
    opened once for each topic and advanced only to positions that Spark reports as done. The source
    waits for it only at the end of an availableNow run (Spark may kill the process then), so that
    rowsBehind is 0 afterwards. A run that is stopped releases the subscription: Spark ends the
    process by SIGTERM, and any other end is as a crash. Two sources have two tokens: the same
    subscription twice in one query is LEDGER_SUBSCRIPTION.BUSY.
    """

    def __init__(self, name: str | None) -> None:
        self._name = name
        self._run_id = secrets.token_hex(16)
        self._query_id: str | None = None
        self._kept = False
        self._reserved: dict[str, None] = {}
        self._cursors: dict[str, BlockingCursor] = {}
        self._over = False

    def signed(self, offset: dict[str, Any]) -> dict[str, Any]:
        """The offset, with the query's token if there is a subscription."""
        if self._name is None:
            return offset
        self._query_id = self._query_id or secrets.token_hex(16)
        return dict(sorted({**offset, QUERY: self._query_id}.items()))

    def reserve(self, topics: TopicsRead, positions: Positions) -> None:
        """Reserve the subscription for a query that will read from these positions on; Spark keeps
        no offset of it yet. Raises SubscriptionBusy."""
        if self._name is None:
            return
        for topic, parts in positions.items():
            if topic not in self._reserved:
                info, assigned = topics.infos[topic], _assigned(topics, topic)
                reserving = topics.cluster.client.subscriptions.reserve(
                    info, self._name, start=dict(parts), partitions=assigned
                )
                topics.cluster.run(reserving)
                self._reserved[topic] = None

    def at(self, topics: TopicsRead, kept: Mapping[str, Any], positions: Positions) -> None:
        """All rows before `positions` are done; `kept` is an offset in Spark's checkpoint. Raises
        SubscriptionBusy, LedgerFenced (a newer run has the subscription)."""
        if self._name is None or self._over:
            return
        signed = kept.get(QUERY)
        if isinstance(signed, str):
            self._query_id, self._kept = signed, True
        if not self._kept:
            self.reserve(topics, positions)
            return
        for topic, parts in positions.items():
            cursor = self._cursors.get(topic) or self._open(topics, topic, parts)
            cursor.check()
            cursor.advance(parts)

    def check(self) -> None:
        """Raises LedgerFenced once another run has the subscription."""
        for cursor in self._cursors.values():
            cursor.check()

    def release(self) -> None:
        """Write the query's positions and release the subscription: this run is over."""
        self._over = True
        for cursor in self._cursors.values():
            cursor.release()
        self._cursors.clear()

    def _open(self, topics: TopicsRead, topic: str, positions: Mapping[int, int]) -> BlockingCursor:
        assert self._name is not None
        assert self._query_id is not None
        made = open_cursor(
            topics.cluster,
            topics.infos[topic],
            *(self._name, self._query_id, self._run_id),
            start=dict(positions),
            partitions=_assigned(topics, topic),
        )
        before_termination(release_all)
        self._cursors[topic] = made
        return made


def _assigned(topics: TopicsRead, topic: str) -> tuple[int, ...] | None:
    assigned = topics.options.assigned
    return None if assigned is None else assigned[topic]


AGAIN = "Load it again: Spark keeps the plan of a DataFrame's first query for all that follow."


class LedgerBatchReader(DataSourceReader):
    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        check_projection(schema, options.value_format)
        self.options = options
        self.schema = schema

    def partitions(self) -> Sequence[InputPartition]:
        topics = TopicsRead(self.options)
        topic_ends = topics.fresh_ends()
        start = topics.positions(self.options.starting, topic_ends)
        end = topics.positions(self.options.ending, topic_ends)
        offsets.check_order(start, end)
        tasks = topics.plan(start, end)
        values, batch_plan = topics.values(self.schema), secrets.token_hex(8)
        return read_tasks.partitions_of(self.options, tasks, values, batch_plan=batch_plan)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        read_tasks.check_zone(self.options.zoneless)  # also if nothing is read
        try:
            yield from read_tasks.read_rows(self.options, planned(partition), self.schema)
        except (RowsTrimmed, TopicDeleted) as error:  # the rows were there at the time of the plan
            raise type(error)(error.what, AGAIN, **error.facts) from None
