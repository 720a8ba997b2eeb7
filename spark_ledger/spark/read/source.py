"""The sources of a stream and of a batch, which give Spark offsets and tasks in the driver, and
rows in tasks; and the subscription that follows a streaming query.

Always true: an offset is never below the start that Spark passed, unless the batch begins where the
query's subscription was moved to; without new rows the offset is that start object itself. An idle
poll uses only the state in memory, and waits until reported changes are in memory. The first poll
of a run, the first offset and the target of availableNow are read after a sync. A batch read also
plans after a sync, so it has all rows committed before; the source takes no filter from Spark (the
reason is in options.py).

Spark stores only the end of batch 0, not its begin. Whenever Spark plans batch 0, also after a
restart, it calls initialOffset again, and the result may be a later offset ("latest", or a
subscription that has moved). So the end of batch 0 carries the begin of the batch (`_first`;
without `_first` the batch has no row) and the times without a zone by which the batch was planned
(`_zoneless`). Batch 0 reads only rows that existed when the first offset was computed, so it has no
row of a partition that begins at "latest". If a later batch begins where the subscription was moved
to, its end has `_first` too.
"""

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from spark_ledger.errors import RowsTrimmed, SubscriptionMoved, TopicDeleted
from spark_ledger.spark.options import limits, offsets
from spark_ledger.spark.options.offsets import Ends, Positions
from spark_ledger.spark.options.options import FollowedSubscription, ReadOptions
from spark_ledger.spark.options.start_positions import OFFSET_MAX, AtSubscription
from spark_ledger.spark.options.table import CHECKPOINT, FAIL
from spark_ledger.spark.read import tasks as read_tasks
from spark_ledger.spark.read.copies import ACKED, QueryCopies, names_in, names_needed, with_names
from spark_ledger.spark.read.planning import Acked, ReadStart
from spark_ledger.spark.read.topics_read import TopicsRead
from spark_ledger.spark.rows.columns import check_projection
from spark_ledger.spark.spark_version import ReadLimit, SupportsTriggerAvailableNow, value_of
from spark_ledger.spark.worker import call_before_termination
from spark_ledger.topic.blocking import BlockingCursor, open_cursor, release_all
from spark_ledger.topic.read.acked import NO_ACKED
from spark_ledger.topic.subscription.lag import spark_metrics
from spark_ledger.topic.subscription.unheld import NOTED_EVERY_S, note_reads

FIRST = "_first"
ZONELESS = "_zoneless"
"""The key in the end of batch 0 for the times without a zone, each with its milliseconds in the
driver's zone."""
LAG_INTERVAL_S = 1.0
MOVED_SHOWN = 8
BEYOND_END_REMEDY = (
    "If the metadata store was restored from an older backup, bring back the newer store; else"
    " start with a new checkpoint and startingOffsets."
)


class LedgerStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The source of a stream. One instance lives in the source's own process as long as the query
    runs. Spark makes another instance and sends it to the tasks; this other instance never connects
    in the driver."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        check_projection(schema, options.value_format)
        self.options = options
        self.schema = schema
        self._topics: TopicsRead | None = None
        self._target: Positions | None = None
        self._has_polled = False
        self._initial_offset: dict[str, Any] | None = None
        self._first_ends: Ends | None = None
        self._last_decoded: tuple[dict[str, Any], Ends, Positions] | None = None
        self._checked_offset: tuple[dict[str, Any], int] | None = None
        self._idle_poll: tuple[Ends, Positions] | None = None
        self._done_positions: Positions | None = None
        self._last_report: tuple[Ends, Positions | None, float, dict[str, Any]] | None = None
        self._last_batch_s: float | None = None
        self._cursor = QueryCursor(options.subscription)
        self._copies = QueryCopies()

    def initialOffset(self) -> dict[str, Any]:
        if self._initial_offset is None:
            topics = self._connected_topics()
            topic_ends = topics.fresh_ends()
            start = topics.start(self.options.starting, topic_ends)
            encoded = offsets.encode(start.positions, topic_ends)
            encoded = with_names(encoded, self._copies.begin(topics, start.acked))
            self._initial_offset = self._cursor.with_token(encoded)
            self._first_ends = topic_ends
        return self._initial_offset

    def getDefaultReadLimit(self) -> ReadLimit:
        return limits.read_limit(self.options.limits)

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = offsets.ends_of(self._connected_topics().fresh_ends())

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        topic_ends = self._ends_at_poll(start)
        positions = self._positions(start, topic_ends)
        if self._is_at_end(positions, topic_ends) and self._connected_topics().catch_up():
            # an idle poll ends processAllAvailable, so it needs the reported changes
            topic_ends = self._connected_topics().ends()
            positions = self._positions(start, topic_ends)
        if (
            self._idle_poll is not None
            and self._idle_poll[0] is topic_ends
            and self._idle_poll[1] is positions
        ):
            self._cursor.check()
            return start
        if not offsets.is_within(positions, topic_ends):
            topic_ends = self._connected_topics().fresh_ends()
            positions = self._positions(start, topic_ends)
            offsets.check_within(positions, topic_ends, "the query's offset", BEYOND_END_REMEDY)
        self._check_store(start, positions, "the query's offset")
        begin, begin_positions = self._begin_of_batch(start, positions, topic_ends)
        self._cursor.check()
        latest = self._end_to_read(begin_positions, topic_ends)
        if latest == begin_positions:
            self._idle_poll = (topic_ends, positions)
            if self._target is not None:
                self._cursor.release()
            return start
        acked = self._copies.acked(self._connected_topics(), begin, begin_positions)
        end = self._limited_end(begin_positions, latest, limit, acked)
        if end == begin_positions:
            return start
        self._last_batch_s = time.monotonic()
        encoded = offsets.encode(end, topic_ends, self._tokens(start, positions, end))
        encoded = with_names(encoded, self._copies.names_after(begin))
        is_initial = start == self._initial_offset
        if begin is not start:
            self._copies.store(self._connected_topics(), names_in(begin))
        if is_initial or begin is not start:
            encoded[FIRST] = {name: value for name, value in begin.items() if name != QUERY}
            times = self.options.zoneless_times if is_initial else ()
            encoded[ZONELESS] = [list(time) for time in times]
        self._cursor.allow_claims()
        offset = self._cursor.with_token(encoded)
        self._checked_offset = (offset, self._connected_topics().shorter_logs)
        return offset

    def reportLatestOffset(self) -> dict[str, Any] | None:
        topic_ends, done_positions, now_s = (
            self._topic_ends(),
            self._done_positions,
            time.monotonic(),
        )
        last = self._last_report
        is_same = last is not None and last[0] is topic_ends and last[1] is done_positions
        if last is not None and is_same and now_s - last[2] < LAG_INTERVAL_S:
            return last[3]
        latest = offsets.encode(offsets.ends_of(topic_ends), topic_ends)
        if done_positions is not None:
            now_ms = time.time_ns() // 1_000_000
            lags = self._connected_topics().lags(done_positions, now_ms, self._copies.last)
            latest["_rowsBehind"] = sum(lag.rows for lag in lags)
            latest["_bytesBehind"] = sum(lag.bytes for lag in lags)
            latest["_millisBehind"] = max((lag.millis for lag in lags), default=0)
            latest["_metrics"] = spark_metrics(lags)
        self._last_report = (topic_ends, done_positions, now_s, latest)
        return latest

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        topic_ends = self._topic_ends()
        if start != end and (FIRST in end or start == self._initial_offset):
            start = end.get(FIRST, end)
        starts, ends = self._decode(start, topic_ends), self._decode(end, topic_ends)
        if not offsets.is_within(ends, topic_ends):
            topic_ends = self._connected_topics().fresh_ends()
            starts, ends = self._decode(start, topic_ends), self._decode(end, topic_ends)
            offsets.check_within(ends, topic_ends, "the end of the batch", BEYOND_END_REMEDY)
        offsets.check_order(starts, ends)
        self._check_store(end, ends, "the end of the batch")
        topics = self._connected_topics()
        self._cursor.moved_to(topics, end, starts)
        self._cursor.advance(topics, end, starts)
        tasks = topics.plan(starts, ends, self._copies.acked(topics, start, starts))
        values = topics.values(self.schema)
        return read_tasks.partitions_of(self.options, tasks, values, self._zoneless(end))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_tasks.read_rows(self.options, value_of(partition), self.schema)

    def commit(self, end: dict[str, Any]) -> None:
        if self.options.subscription is not None or ACKED in end:
            topics = self._connected_topics()
            positions = self._decode(end, self._topic_ends())
            self._cursor.advance(topics, end, positions)
            self._copies.delete_passed(topics, end, positions)

    def stop(self) -> None:
        self._cursor.release()
        if self._topics is not None:
            self._topics.close()

    def _zoneless(self, end: dict[str, Any]) -> tuple[tuple[str, int], ...]:
        """The times without a zone by which batch 0 was planned, maybe by an earlier run with other
        options. Empty for a later batch, which needs no time."""
        if FIRST not in end:
            return ()
        stored_times = end.get(ZONELESS)
        if stored_times is None:
            return self.options.zoneless_times
        return tuple((text, millis) for text, millis in stored_times)

    # -- whether the metadata store went back in time -------------------------------------------

    def _tokens(self, start: dict[str, Any], positions: Positions, end: Positions) -> Positions:
        """The tokens of the commits that made the last rows before `end`."""

        def has_moved(topic: str, partition: int) -> bool:
            return end[topic][partition] != positions.get(topic, {}).get(partition)

        tokens = self._connected_topics().tokens(end)
        return offsets.keep_tokens(offsets.tokens_of(start), tokens, has_moved)

    def _check_store(self, offset: dict[str, Any], positions: Positions, what: str) -> None:
        """Raises OffsetOfAnotherStore if the store now has other rows before the offset than when
        the offset was made: the metadata store went back in time. An offset that this run made
        needs no check until a topic's log becomes shorter."""
        topics = self._connected_topics()
        offset_and_logs = (offset, topics.shorter_logs)
        if self._checked_offset == offset_and_logs:
            return
        tokens = offsets.tokens_of(offset)
        if tokens:
            topics.check_tokens(positions, tokens, what)
        for topic, name in names_needed(offset, positions).items():
            if name.tokens:
                ends, tokens = {topic: dict(name.ends)}, {topic: dict(name.tokens)}
                topics.check_tokens(ends, tokens, "the query's copy of acknowledgements")
        self._checked_offset = offset_and_logs

    # -- offsets --------------------------------------------------------------------------------

    def _begin_of_batch(
        self, start: dict[str, Any], positions: Positions, topic_ends: Ends
    ) -> tuple[dict[str, Any], Positions]:
        """The offset at which the next batch begins, and its positions: `start`, or where the
        query's subscription is now. Moves the subscription in the first case."""
        if start == self._initial_offset:
            self._cursor.allow_claims()
        moved = self._cursor.moved_to(self._connected_topics(), start, positions)
        if moved is not None:
            names = self._copies.names_after(start)
            names = {t: name for t, name in names.items() if moved.positions[t] == positions[t]}
            offset = offsets.encode(moved.positions, topic_ends)
            names |= self._copies.begin(self._connected_topics(), moved.acked)
            return with_names(offset, names), moved.positions
        if positions is not self._done_positions:
            self._done_positions = positions
            self._move_cursor(start, positions)
        return start, positions

    def _move_cursor(self, start: dict[str, Any], positions: Positions) -> None:
        """Move the subscription, as all rows before `positions` are done. `start` is in Spark's
        checkpoint, unless it is the initial offset. The initial offset becomes the end of batch 0
        if there are no rows, so its copies are made durable now."""
        if start == self._initial_offset:
            self._copies.store(self._connected_topics(), names_in(start))
            self._cursor.reserve(self._connected_topics(), positions)
        else:
            self._cursor.advance(self._connected_topics(), start, positions)

    def _is_at_end(self, positions: Positions, topic_ends: Ends) -> bool:
        if (
            self._idle_poll is not None
            and self._idle_poll[0] is topic_ends
            and self._idle_poll[1] is positions
        ):
            return self._target is None
        return self._target is None and offsets.ends_of(topic_ends) == positions

    def _end_to_read(self, positions: Positions, topic_ends: Ends) -> Positions:
        """The end of the topics, or the target of availableNow if the target is earlier; never
        below `positions`."""
        end = offsets.ends_of(topic_ends)
        if self._target is not None:
            end = offsets.earlier_positions(end, self._target)
        return offsets.later_positions(positions, end)

    def _limited_end(
        self, positions: Positions, end: Positions, limit: ReadLimit, acked: Acked
    ) -> Positions:
        """The end of one micro-batch within the limits."""
        applied = limits.effective_limits(self.options.limits, limit)
        if self._target is None and applied.rows_min is not None:
            last_s = self._last_batch_s
            waited_ms = None if last_s is None else int((time.monotonic() - last_s) * 1000)
            if limits.holds_back(applied, self._backlog_rows(positions, end, acked), waited_ms):
                return positions
        if not applied.has_maximum:
            return end
        curve_of = self._connected_topics().curves(positions, end, acked)
        return limits.admit(positions, end, applied, curve_of)

    def _backlog_rows(self, positions: Positions, end: Positions, acked: Acked) -> int:
        """The rows to read, without trimmed rows and without offsets that have no row."""
        curve_of = self._connected_topics().curves(positions, end, acked)
        return sum(
            curve_of(topic, p, offset, end[topic][p]).rows
            for topic, parts in positions.items()
            for p, offset in parts.items()
            if offset < end[topic][p]
        )

    def _positions(self, start: dict[str, Any], topic_ends: Ends) -> Positions:
        """The positions of `start`; the same object as in the last call, if they are equal."""
        last = self._last_decoded
        if last is not None and last[1] is topic_ends and last[0] == start:
            return last[2]
        positions = self._decode(start, topic_ends)
        if last is not None and last[2] == positions:
            positions = last[2]
        self._last_decoded = (start, topic_ends, positions)
        return positions

    def _decode(self, offset: dict[str, Any], topic_ends: Ends) -> Positions:
        lossy = not self.options.fail_on_data_loss
        by_pattern = self.options.pattern is not None
        return offsets.decode(offset, topic_ends, by_pattern=by_pattern, lossy=lossy)

    # -- the ends of the topics -----------------------------------------------------------------

    def _ends_at_poll(self, start: dict[str, Any]) -> Ends:
        """The topics' ends; at the first poll of a new query the ends by which the initial offset
        was computed."""
        first_ends, self._first_ends = self._first_ends, None
        if first_ends is None or start != self._initial_offset:
            return self._topic_ends()
        self._has_polled = True
        return first_ends

    def _topic_ends(self) -> Ends:
        topics = self._connected_topics()
        if self._has_polled:
            return topics.ends()
        topic_ends = topics.fresh_ends()
        self._has_polled = True
        return topic_ends

    def _connected_topics(self) -> TopicsRead:
        if self._topics is None:
            topics = TopicsRead(self.options)
            topics.follow()
            self._topics = topics
        return self._topics


QUERY = "_query"


class QueryCursor:
    """The subscription that follows a query (`subscription=`), for one source. `followed` None: the
    query has no subscription, and the methods only note that a query reads the topics without one.

    Spark gives a source neither the id of its query nor the id of its run. So a random token
    identifies the query: the first offset carries the token (`_query`), and every later offset
    repeats it. The source's process identifies the run.

    Always true: only a token that is in Spark's checkpoint claims a subscription. So a run that
    restarts from the checkpoint is the same query, and has the subscription at once, even if the
    run before was killed. Until its token is in the checkpoint, the source only reserves the
    subscription: it checks that no query has the subscription, and creates the subscription so that
    retention keeps the rows. A cursor is opened once for each topic, and advanced only to positions
    that Spark reports as done. The source waits for its cursors only at the end of an availableNow
    run (Spark may kill the process then), so that rowsBehind is 0 afterwards. Spark stops a run by
    SIGTERM, and the run then releases the subscription; any other end is a crash. Two sources have
    two tokens, so two sources of one query cannot use one subscription: LEDGER_SUBSCRIPTION.BUSY.

    A run that restarts first sees whether its subscription was moved, unless onSubscriptionMoved is
    `checkpoint`. Until then the run claims nothing, as a claim would move the subscription to the
    checkpoint. A run that goes on where the subscription is may claim when the end of the batch
    that begins there is made: if the run is killed before, the subscription stays as it was.
    """

    def __init__(self, followed: FollowedSubscription | None) -> None:
        self._name = None if followed is None else followed.name
        self._on_moved = CHECKPOINT if followed is None else followed.on_moved
        self._may_claim = self._on_moved == CHECKPOINT
        self._run_id = secrets.token_hex(16)
        self._query_id: str | None = None
        self._is_stored = False
        self._reserved: dict[str, None] = {}
        self._cursors: dict[str, BlockingCursor] = {}
        self._is_released = False
        self._noted_s = float("-inf")

    def with_token(self, offset: dict[str, Any]) -> dict[str, Any]:
        """The offset, with the query's token if there is a subscription."""
        if self._name is None:
            return offset
        self._query_id = self._query_id or secrets.token_hex(16)
        return dict(sorted({**offset, QUERY: self._query_id}.items()))

    def reserve(self, topics: TopicsRead, positions: Positions) -> None:
        """Reserve the subscription for a query that will read from these positions on, before
        Spark's checkpoint has an offset of the query. Raises SubscriptionBusy."""
        if self._name is None:
            self._note_reads(topics, positions)
            return
        for topic, parts in positions.items():
            if topic not in self._reserved:
                info, assigned = topics.infos[topic], _assigned(topics, topic)
                reserving = topics.cluster.client.subscriptions.reserve(
                    info, self._name, start=dict(parts), partitions=assigned
                )
                topics.cluster.run(reserving)
                self._reserved[topic] = None

    def advance(
        self, topics: TopicsRead, stored_offset: Mapping[str, Any], positions: Positions
    ) -> None:
        """Advance the cursors: all rows before `positions` are done. `stored_offset` is an offset
        in Spark's checkpoint. Raises SubscriptionBusy, LedgerFenced (a newer run has the
        subscription)."""
        if self._name is None:
            self._note_reads(topics, positions)
            return
        if self._is_released or not self._may_claim:
            return
        token = stored_offset.get(QUERY)
        if isinstance(token, str):
            self._query_id, self._is_stored = token, True
        if not self._is_stored:
            self.reserve(topics, positions)
            return
        for topic, parts in positions.items():
            cursor = self._cursors.get(topic) or self._open(topics, topic, parts)
            cursor.check()
            cursor.advance(parts)

    def allow_claims(self) -> None:
        """Called when it is decided where the query goes on."""
        self._may_claim = True

    def moved_to(
        self, topics: TopicsRead, stored_offset: Mapping[str, Any], positions: Positions
    ) -> ReadStart | None:
        """Where the query's subscription is now, if others moved it away from `positions` and the
        query does not go on by its checkpoint; None otherwise. A topic whose subscription was not
        moved keeps its positions. Raises SubscriptionMoved, SubscriptionBusy."""
        token = stored_offset.get(QUERY)
        if self._may_claim or self._name is None or not isinstance(token, str):
            self.allow_claims()
            return None
        subscriptions = topics.cluster.client.subscriptions
        moved: dict[str, ReadStart] = {}
        for topic, parts in positions.items():
            info = topics.infos[topic]
            if topics.cluster.run(subscriptions.is_of_query(info.id, self._name, token)):
                continue
            topic_ends = {topic: topics.fresh_ends()[topic]}
            start = topics.start(AtSubscription("onSubscriptionMoved", self._name), topic_ends)
            at = {p: start.positions[topic][p] for p in parts}
            if start.acked or at != parts:
                moved[topic] = ReadStart({topic: at}, start.acked)
        if moved and self._on_moved == FAIL:
            raise moved_error(self._name, positions, moved)
        if not moved:
            self.allow_claims()
            return None
        for topic, start in moved.items():
            reserving = subscriptions.reserve(
                topics.infos[topic], self._name, start=start.positions[topic]
            )
            topics.cluster.run(reserving)  # raises SubscriptionBusy if a query uses it
        return ReadStart(
            {t: moved[t].positions[t] if t in moved else parts for t, parts in positions.items()},
            {topic: rows for start in moved.values() for topic, rows in start.acked.items()},
        )

    def _note_reads(self, topics: TopicsRead, positions: Positions) -> None:
        """Note, now and then, that a query without a subscription reads the topics."""
        if time.monotonic() < self._noted_s + NOTED_EVERY_S:
            return
        self._noted_s = time.monotonic()
        ids = [topics.infos[topic].id for topic in positions if topic in topics.infos]
        now_ms = time.time_ns() // 1_000_000
        topics.cluster.run(note_reads(topics.cluster.client.store, ids, now_ms))

    def check(self) -> None:
        """Raises LedgerFenced if another run has the subscription now."""
        for cursor in self._cursors.values():
            cursor.check()

    def release(self) -> None:
        """Write the query's positions and release the subscription: this run has ended."""
        self._is_released = True
        for cursor in self._cursors.values():
            cursor.release()
        self._cursors.clear()

    def _open(self, topics: TopicsRead, topic: str, positions: Mapping[int, int]) -> BlockingCursor:
        assert self._name is not None
        assert self._query_id is not None
        cursor = open_cursor(
            topics.cluster,
            topics.infos[topic],
            *(self._name, self._query_id, self._run_id),
            start=dict(positions),
            partitions=_assigned(topics, topic),
        )
        call_before_termination(release_all)
        self._cursors[topic] = cursor
        return cursor


def moved_error(
    name: str, positions: Positions, moved: Mapping[str, ReadStart]
) -> SubscriptionMoved:
    differing = [
        f"in partition {p} of topic {topic!r} it is at {start.positions[topic][p]}"
        f"{' with acknowledged rows beyond' if beyond.count(p, at, OFFSET_MAX) else ''}, the query"
        f" at {at}"
        for topic, start in moved.items()
        for beyond in [start.acked.get(topic, NO_ACKED)]
        for p, at in positions[topic].items()
        if start.positions[topic][p] != at or beyond.count(p, at, OFFSET_MAX)
    ]
    ellipsis = "; ..." if len(differing) > MOVED_SHOWN else ""
    return SubscriptionMoved(
        f"subscription {name!r} was moved while the query was not running:"
        f" {'; '.join(differing[:MOVED_SHOWN])}{ellipsis}"
    )


def _assigned(topics: TopicsRead, topic: str) -> tuple[int, ...] | None:
    assigned = topics.options.assigned
    return None if assigned is None else assigned[topic]


LOAD_AGAIN = "Load the DataFrame again: Spark uses the plan of its first query for all its queries."


class LedgerBatchReader(DataSourceReader):
    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        check_projection(schema, options.value_format)
        self.options = options
        self.schema = schema

    def partitions(self) -> Sequence[InputPartition]:
        topics = TopicsRead(self.options)
        topic_ends = topics.fresh_ends()
        start = topics.start(self.options.starting, topic_ends)
        end = topics.start(self.options.ending, topic_ends).positions
        offsets.check_order(start.positions, end)
        tasks = topics.plan(start.positions, end, start.acked)
        values, batch_plan = topics.values(self.schema), secrets.token_hex(8)
        return read_tasks.partitions_of(self.options, tasks, values, batch_plan=batch_plan)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        read_tasks.check_zone(self.options.zoneless_times)  # also for a task without rows
        try:
            yield from read_tasks.read_rows(self.options, value_of(partition), self.schema)
        except (RowsTrimmed, TopicDeleted) as error:  # the rows existed when the read was planned
            raise type(error)(error.what, LOAD_AGAIN, **error.facts) from None
