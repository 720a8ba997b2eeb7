"""The driver's view of the topics that a query reads: which topics, and their ends.

Always true: `ends` comes from memory, and returns the same object while nothing changed. If the
state in memory is too old (topic/read/follower.py has the limit), `ends` waits for the metadata
store. `fresh_ends` begins with a sync, so a user reads their own writes. A commit over several of
the topics is in the ends of all of them or of no topic. An end never goes back, even while rows
move from a live segment into a commit. A topic's id stays the id that the reader read first.

A background scan every RESCAN_S finds new topics that match a pattern. If the last scan is older
than RESCANS_MISSED_MAX times RESCAN_S, a poll waits for a new scan, so that it has every topic that
has existed for so long. A topic that is deleted before `ends` had it counts as if it never existed.
If a topic is deleted, and the user accepts losses, the topic is left out, and the scans look for
another topic with its name.
"""

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql.types import StructType

from spark_ledger.errors import TopicDeleted, TopicNotFound, TopicRecreated, Unavailable
from spark_ledger.process import background_loop
from spark_ledger.spark.options.limits import CurveOf
from spark_ledger.spark.options.offsets import TOPIC_DELETED_REMEDY, Ends, Positions, TopicEnds
from spark_ledger.spark.options.options import ReadOptions
from spark_ledger.spark.options.start_positions import ReadPosition
from spark_ledger.spark.read import planning
from spark_ledger.spark.read.planning import Acked, ReadStart
from spark_ledger.spark.rows.columns import has_payload, payload_of
from spark_ledger.spark.worker import Moment, exclude_from_gc
from spark_ledger.topic import blocking
from spark_ledger.topic.log.segments import LiveSegment
from spark_ledger.topic.log.state import TopicState
from spark_ledger.topic.log.topic_log import TopicLog, fold_agreeing, states_agree
from spark_ledger.topic.log.topics import TopicInfo
from spark_ledger.topic.read.follower import TopicFollower
from spark_ledger.topic.read.live import LiveEnds
from spark_ledger.topic.read.plan import ReadTask
from spark_ledger.topic.subscription.lag import PartitionLag

if TYPE_CHECKING:
    import pyarrow as pa

    from spark_ledger.spark.rows.client_values import ReadSchema
    from spark_ledger.spark.rows.typed_values import ValueReader
    from spark_ledger.topic.values.reader import ClientReader

RESCAN_S = 0.5
RESCANS_MISSED_MAX = 2
CATCH_UP_S = 1.0
RESCAN_WAIT_S = 2.0
"""How long a poll waits for a scan, at most; then the poll goes on with the topics it has."""
NO_CHANGES_SEEN = -1

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TopicsView:
    """The topics' states and their ends at a moment, by short name. `live_changes` is
    LiveEnds.changes at that moment."""

    states: Mapping[str, TopicState]
    ends: Ends
    live_changes: int


class TopicsRead:
    """The topics of one reader, in its driver-side process. Names are in their short form."""

    def __init__(self, options: ReadOptions) -> None:
        """Connects and finds the topics. Raises Unavailable, TopicNotFound, TopicNameInvalid."""
        self.options = options
        self.cluster = blocking.topics(
            options.service_url, options.outage_timeout_s, fail_fast=True
        )
        exclude_from_gc(Moment.CONNECTED)
        self.infos: dict[str, TopicInfo] = {}
        self._left_out_topics: dict[str, TopicInfo] = {}
        self._client_readers: dict[str, ClientReader] = {}  # by topic id
        self._client = self.cluster.client
        self._live = LiveEnds(self._client.ledgers)
        self._planner = planning.Planner(self._client, self._live, options)
        self._followers: dict[str, TopicFollower] | None = None
        self._last_view = TopicsView({}, {}, NO_CHANGES_SEEN)
        self.shorter_logs = 0
        """How often a topic's log became shorter, as the metadata store went back in time, or a
        live segment ended before an end that it had."""
        self._scan: Future[list[TopicInfo]] | None = None
        self._scan_started_s = time.monotonic()
        self._last_scan_started_s = self._scan_started_s  # of the last scan that has ended
        self.cluster.run(self._find_topics())

    def follow(self) -> None:
        """Keep the states current from now on, without a round trip for `ends`."""
        self._followers = {}
        self.cluster.run(self._follow_all())

    def ends(self) -> Ends:
        """The ends from memory; if the state in memory is too old, those of `fresh_ends`. Raises
        Unavailable, TopicDeleted, TopicRecreated."""
        assert self._followers is not None, "follow() comes first"
        self._look_for_topics()
        try:
            states = {name: follower.state() for name, follower in self._followers.items()}
        except (TopicDeleted, TopicNotFound, Unavailable):
            return self.fresh_ends()
        last, changes = self._last_view, self._live.changes
        is_same = last.live_changes == changes and len(states) == len(last.states)
        if is_same and all(last.states.get(name) is state for name, state in states.items()):
            return last.ends
        if any(state.deleted for state in states.values()) or not states_agree(states.values()):
            return self.fresh_ends()
        return self._remember(states, changes)

    def catch_up(self) -> bool:
        """Wait, CATCH_UP_S at most, until the changes that the metadata store reported are in
        memory. False if all of them are there already."""
        assert self._followers is not None, "follow() comes first"
        late_followers = [follower for follower in self._followers.values() if follower.is_behind]
        if not late_followers:
            return False
        loop = background_loop()
        wait(
            [loop.submit(follower.catch_up(CATCH_UP_S)) for follower in late_followers],
            2 * CATCH_UP_S,
        )
        return True

    def fresh_ends(self) -> Ends:
        """The ends with all rows that were committed before this call, and all rows of live
        segments that bookies report as confirmed. Raises Unavailable, TopicDeleted,
        TopicRecreated."""
        return self.cluster.run(self._fresh_ends())

    def start(self, place: ReadPosition, topic_ends: Ends) -> ReadStart:
        """The positions of `place` in the topics, and the rows beyond a subscription's position
        that its consumers have acknowledged; `topic_ends` is the last result of `fresh_ends`.

        Raises the errors of offsets.resolve, SubscriptionNotFound.
        """
        return self.cluster.run(
            self._planner.start(place, topic_ends, self._last_view.states, self.infos)
        )

    def tokens(self, positions: Positions) -> Positions:
        """The tokens of the commits that made the last rows before the positions; only tokens that
        are in memory, of rows below the known ends."""
        view = self._last_view
        below = {
            topic: {p: at for p, at in by_partition.items() if at <= view.ends[topic].ends[p]}
            for topic, by_partition in positions.items()
            if topic in view.ends
        }
        return planning.tokens_before(view.states, below)

    def check_tokens(self, positions: Positions, tokens: Positions, what: str) -> None:
        """Raises OffsetOfAnotherStore if the commit that made the last row before a position has
        another token than the position's. If the user accepts losses, logs the error instead."""
        self.cluster.run(
            self._planner.check_tokens(self._last_view.states, positions, tokens, what)
        )

    def curves(self, start: Positions, end: Positions, acked: Acked) -> CurveOf:
        """The curves of the rows between these positions, without the `acked` rows, for
        `limits.admit`."""
        return self.cluster.run(self._planner.curves(self._last_view.states, start, end, acked))

    def lags(self, positions: Positions, now_ms: int, acked: Acked) -> list[PartitionLag]:
        """The lags of the positions behind the last ends, without a round trip."""
        view = self._last_view
        return self._planner.lags(view.states, view.ends, positions, now_ms, acked)

    def plan(self, start: Positions, end: Positions, acked: Acked) -> list[ReadTask]:
        """Tasks that read from `start` to `end`, without the `acked` rows. Raises RowsLost and
        RowsTrimmed, unless the user accepts losses: then the tasks have all other rows. Raises the
        errors of LiveEnds.refresh."""
        return self.cluster.run(self._planner.plan(self._last_view.states, start, end, acked))

    def values(self, declared: StructType) -> "ValueReader | None":
        """The reader of payloads into the declared columns, by the schemas registered now; None if
        the format has no typed rows. Raises the errors of read_schema and ValueReader.of."""
        if not has_payload(self.options.value_format):
            return None
        from spark_ledger.spark.rows.typed_values import ValueReader, arrow_payload

        payload = payload_of(declared)
        schema = self.read_schema(arrow_payload(payload))
        return ValueReader.of(self.options.value_format, payload, schema.columns, schema.clients)

    def read_schema(self, declared: "pa.Schema | None") -> "ReadSchema":
        """The payload's columns, by the schemas registered now; `declared` are the columns that the
        user declared. Raises the errors of registered_schema and read_schema_of."""
        from spark_ledger.spark.rows import client_values, typed_values

        infos, schemas = list(self.infos.values()), self._client.schemas
        if self.options.value_format != typed_values.SCHEMA:
            registered = typed_values.registered_schema(
                schemas, infos, self.options.value_format, declared=declared is not None
            )
            return client_values.ReadSchema(self.cluster.run(registered), {})
        by_topic = [(info, self.cluster.run(schemas.of(info))) for info in infos]
        return client_values.read_schema_of(by_topic, declared, self._client_readers)

    def close(self) -> None:
        """Stop following live segments. The topics' followers go on: other readers of the process
        may use them."""
        self.cluster.run(self._live.close())

    # -- which topics -------------------------------------------------------------------------

    async def _find_topics(self) -> None:
        """Add the topics that the options name, or that match the pattern now."""
        if self.options.pattern is None:
            for name in self.options.topics:
                info = await self._client.topics.open(name)
                self.infos[info.name.short] = info
        else:
            self._add_topics(await self._matching(fresh=True))

    async def _matching(self, *, fresh: bool) -> list[TopicInfo]:
        """The topics that match the pattern and are not in `infos` yet; reads one node for each."""
        topics = self._client.topics
        if fresh:
            await self._client.store.sync()
        present = self.infos.keys()
        names = (name.short for name in await topics.names())
        new = self.options.matching(name for name in names if name not in present)
        infos = await asyncio.gather(*(topics.find(name, fresh=False) for name in new))
        return [info for info in infos if info is not None]

    def _add_topics(self, infos: Sequence[TopicInfo]) -> None:
        for info in infos:
            self.infos.setdefault(info.name.short, info)
        self.infos = dict(sorted(self.infos.items()))

    def _look_for_topics(self) -> None:
        """Add the topics of a scan that ended, and start a scan if RESCAN_S has passed. If the last
        scan is too old, wait for the new scan (not during an outage of the store). Waits for the
        first fold of new topics. Raises TopicRecreated."""
        self._take_scan()
        if self.options.pattern is None and not self._left_out_topics:
            return
        now_s = time.monotonic()
        if self._scan is None and now_s - self._scan_started_s >= RESCAN_S:
            self._scan_started_s = now_s
            has_pattern = self.options.pattern is not None
            scan = self._matching(fresh=False) if has_pattern else self._namesakes(fresh=False)
            self._scan = background_loop().submit(scan)
        age_s = now_s - self._last_scan_started_s
        if (
            self._scan
            and age_s >= RESCANS_MISSED_MAX * RESCAN_S
            and not self.cluster.is_disconnected
        ):
            wait([self._scan], RESCAN_WAIT_S)
            self._take_scan()

    def _take_scan(self) -> None:
        if self._scan is None or not self._scan.done():
            return
        scan, self._scan = self._scan, None
        if scan.exception() is None:
            self._last_scan_started_s = self._scan_started_s
            self._take_infos(scan.result())

    def _take_infos(self, infos: Sequence[TopicInfo]) -> None:
        if self.options.pattern is None:
            _check_same(self._left_out_topics, infos)
        else:
            self._add_topics(infos)
            self.cluster.run(self._follow_all())

    async def _namesakes(self, *, fresh: bool) -> list[TopicInfo]:
        """The topics that now have the names of left-out topics."""
        topics, names = self._client.topics, list(self._left_out_topics)
        infos = await asyncio.gather(*(topics.find(name, fresh=fresh) for name in names))
        return [info for info in infos if info is not None]

    # -- the ends of the topics -----------------------------------------------------------------

    async def _follow_all(self) -> None:
        assert self._followers is not None
        new = [name for name in self.infos if name not in self._followers]
        following = (self._client.follow(self.infos[name].id, name) for name in new)
        followers = await asyncio.gather(*following, return_exceptions=True)
        for name, follower in zip(new, followers, strict=True):
            if isinstance(follower, TopicFollower):
                self._followers[name] = follower
            elif isinstance(follower, TopicDeleted | TopicNotFound):
                await self._leave_out([name])
            else:
                raise follower
        self._followers = {name: self._followers[name] for name in self.infos}

    async def _fresh_ends(self) -> Ends:
        if self.options.pattern is not None:
            self._add_topics(await self._matching(fresh=True))
            if self._followers is not None:
                await self._follow_all()
        else:
            _check_same(self._left_out_topics, await self._namesakes(fresh=True))
        states = await self._fold_topics()
        await self._live.refresh(_live_segments(states))
        return self._remember(states, self._live.changes)

    async def _fold_topics(self) -> dict[str, TopicState]:
        """The topics' states, after `_leave_out` for deleted topics. Raises TopicDeleted,
        TopicRecreated."""
        while True:
            logs = {name: self._client.log(info.id) for name, info in self.infos.items()}
            try:
                folded = await fold_agreeing(list(logs.values()))
            except (TopicDeleted, TopicNotFound):
                deleted = [name for name, log in logs.items() if await _is_deleted(log)]
            else:
                states = dict(zip(logs, folded, strict=True))
                deleted = [name for name, state in states.items() if state.deleted]
                if not deleted:
                    return states
            await self._leave_out(deleted)

    async def _leave_out(self, deleted: Sequence[str]) -> None:
        """Go on without deleted topics. For a topic that the options name, or that `ends` had:
        raises TopicRecreated if another topic has the name now, and TopicDeleted unless the user
        accepts losses."""
        for name in deleted:
            info = self.infos[name]
            if self.options.pattern is None or name in self._last_view.ends:
                namesake = await self._client.topics.find(name)
                _check_same({name: info}, [] if namesake is None else [namesake])
                if self.options.fail_on_data_loss:
                    text = f"topic {name!r} (id {info.id}) was deleted"
                    raise TopicDeleted(text, TOPIC_DELETED_REMEDY, topic=name)
                _log.warning(
                    "topic %r (id %s) was deleted: as failOnDataLoss is false, it is left out",
                    name,
                    info.id,
                )
                self._left_out_topics[name] = info
        for name in deleted:  # a scan finds another topic of a name that is not in `infos`
            self.infos.pop(name, None)
            if self._followers is not None:
                self._followers.pop(name, None)

    def _remember(self, states: Mapping[str, TopicState], changes: int) -> Ends:
        """Remember these states; return their ends."""
        last = self._last_view
        self.shorter_logs += any(
            name in last.states and _is_shorter(state, last.states[name], last.ends[name])
            for name, state in states.items()
        )
        ends = {name: self._ends_of(name, state) for name, state in states.items()}
        self._last_view = TopicsView(states, ends, changes)
        if self._followers is not None:
            background_loop().loop.call_soon_threadsafe(self._live.follow, _live_segments(states))
        return ends

    def _ends_of(self, name: str, state: TopicState) -> TopicEnds:
        assert not state.deleted, f"topic {name!r} is deleted"
        assigned = None if self.options.assigned is None else self.options.assigned[name]
        last = self._last_view.ends.get(name)
        last_ends = () if last is None else last.ends
        ends = [self._planner.end_of(partition) for partition in state.partitions]
        return TopicEnds(
            state.topic_id,
            tuple(partition.start_offset for partition in state.partitions),
            tuple(
                max(end, last_ends[p]) if p < len(last_ends) else end for p, end in enumerate(ends)
            ),
            assigned,
        )


def _check_same(infos: Mapping[str, TopicInfo], namesakes: Iterable[TopicInfo]) -> None:
    """Raises TopicRecreated if a namesake of one of `infos` has another id."""
    for info in namesakes:
        name = info.name.short
        if name in infos and infos[name].id != info.id:
            raise TopicRecreated(
                f"topic {name!r} with id {infos[name].id} was deleted;"
                f" the topic of that name now has id {info.id}",
                topic=name,
            )


def _is_shorter(state: TopicState, before: TopicState, ends: TopicEnds) -> bool:
    """Whether the topic may lack commits of the state `before`, or live rows below its `ends`: then
    later rows may get their offsets."""
    if state is before:
        return False
    partitions = zip(before.partitions, state.partitions, ends.ends, strict=False)
    return state.next < before.next or any(
        earlier.live is not None and partition.end_offset < end and partition.live != earlier.live
        for earlier, partition, end in partitions
    )


async def _is_deleted(log: TopicLog) -> bool:
    try:
        await log.fold(fresh=True)
    except (TopicDeleted, TopicNotFound):
        return True
    return False


def _live_segments(states: Mapping[str, TopicState]) -> list[LiveSegment]:
    live = (partition.live for state in states.values() for partition in state.partitions)
    return [segment for segment in live if segment is not None]
