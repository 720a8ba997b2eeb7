"""The driver's view of the topics that a query reads: which topics, and their ends.

Always true: `ends` is from memory (topic/read/follower.py bounds its age: beyond that `ends` waits
for the metadata store) and returns the very same object while nothing changed; `fresh_ends` begins
with a sync, so a user reads their own writes. A commit over several of the topics is in the ends of
all or of none; an end never goes back, whether its rows are in a live segment or, by now, in a
commit. A topic keeps the id with which it was found. A background scan every RESCAN_S finds topics
that a pattern matches later; a poll whose last scan is UNSEEN_RESCANS times as old waits for a new
scan, so that it has every topic that existed for so long. A topic that is deleted before `ends` had
it counts as never there. If a topic is gone, and that is no loss, the reader looks for another
topic of its name: at once, and by the same scans from then on.
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
from spark_ledger.spark.options.offsets import GO_ON, Ends, Positions, TopicEnds
from spark_ledger.spark.options.options import ReadOptions
from spark_ledger.spark.options.start_positions import ReadPosition
from spark_ledger.spark.read import planning
from spark_ledger.spark.rows.columns import has_payload, payload_of
from spark_ledger.spark.worker import Moment, set_aside
from spark_ledger.topic import blocking
from spark_ledger.topic.log.segments import LiveSegment
from spark_ledger.topic.log.state import TopicState
from spark_ledger.topic.log.topic_log import TopicLog, agree, fold_agreeing
from spark_ledger.topic.log.topics import TopicInfo
from spark_ledger.topic.read.follower import TopicFollower
from spark_ledger.topic.read.live import LiveEnds
from spark_ledger.topic.read.plan import ReadTask
from spark_ledger.topic.subscription.lag import PartitionLag

if TYPE_CHECKING:
    from spark_ledger.spark.rows.typed_values import ValueReader

RESCAN_S = 0.5
UNSEEN_RESCANS = 2
CATCH_UP_S = 1.0
RESCAN_WAIT_S = 2.0
"""A poll waits at most so long for a scan; then it responds with the topics that it knows."""
NOTHING_SEEN = -1

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class View:
    """The topics' states and their ends at a moment, by short name."""

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
        set_aside(Moment.CONNECTED)
        self.infos: dict[str, TopicInfo] = {}
        self._left_out: dict[str, TopicInfo] = {}
        self._client = self.cluster.client
        self._live = LiveEnds(self._client.ledgers)
        self._planner = planning.Planner(self._client, self._live, options)
        self._followers: dict[str, TopicFollower] | None = None
        self._view = View({}, {}, NOTHING_SEEN)
        self.went_back = 0
        """How often a topic's log was shorter than before: the store is an older one."""
        self._scan: Future[list[TopicInfo]] | None = None
        self._scanning_s = self._scanned_s = (
            time.monotonic()
        )  # start of the last, of one that ended
        self.cluster.run(self._find())

    def follow(self) -> None:
        """Keep the states current from now on, without a round trip for `ends`."""
        self._followers = {}
        self.cluster.run(self._follow_all())

    def ends(self) -> Ends:
        """The ends from memory; as `fresh_ends` if these are too old. Raises Unavailable,
        TopicDeleted, TopicRecreated."""
        assert self._followers is not None, "follow() comes first"
        self._look_for_topics()
        try:
            states = {name: follower.state() for name, follower in self._followers.items()}
        except (TopicDeleted, TopicNotFound, Unavailable):
            return self.fresh_ends()
        seen, changes = self._view, self._live.changes
        same = seen.live_changes == changes and len(states) == len(seen.states)
        if same and all(seen.states.get(name) is state for name, state in states.items()):
            return seen.ends
        if any(state.deleted for state in states.values()) or not agree(states.values()):
            return self.fresh_ends()
        return self._seen(states, changes)

    def catch_up(self) -> bool:
        """Wait, CATCH_UP_S at most, until reported changes are in memory; False without any."""
        assert self._followers is not None, "follow() comes first"
        behind = [follower for follower in self._followers.values() if follower.behind]
        if not behind:
            return False
        loop = background_loop()
        wait([loop.submit(follower.caught_up(CATCH_UP_S)) for follower in behind], 2 * CATCH_UP_S)
        return True

    def fresh_ends(self) -> Ends:
        """The ends with all that was committed before this call, and all that bookies report as
        confirmed. Raises Unavailable, TopicDeleted, TopicRecreated."""
        return self.cluster.run(self._fresh_ends())

    def positions(self, place: ReadPosition, topic_ends: Ends) -> Positions:
        """The positions of `place` in the topics; `topic_ends` is the last result of `fresh_ends`.

        Raises as offsets.resolve, SubscriptionNotFound.
        """
        return self.cluster.run(
            self._planner.positions(place, topic_ends, self._view.states, self.infos)
        )

    def tokens(self, positions: Positions) -> Positions:
        """The tokens of the commits that made the last rows before the positions, as far as they
        are known without a round trip."""
        return planning.tokens_before(self._view.states, positions)

    def check_tokens(self, positions: Positions, tokens: Positions, what: str) -> None:
        """Raises OffsetOfAnotherStore if the last row before a position was made by another commit
        than the one with the position's token. If losses are accepted, it only logs that."""
        self.cluster.run(self._planner.check_tokens(self._view.states, positions, tokens, what))

    def curves(self, start: Positions, end: Positions) -> CurveOf:
        """The curves of the rows between these positions, for `limits.admit`."""
        return self.cluster.run(self._planner.curves(self._view.states, start, end))

    def lags(self, positions: Positions, now_ms: int) -> list[PartitionLag]:
        """The lags of the positions behind the known ends, without a round trip."""
        return self._planner.lags(self._view.states, self._view.ends, positions, now_ms)

    def plan(self, start: Positions, end: Positions) -> list[ReadTask]:
        """Tasks that read from `start` to `end`. Raises RowsLost and RowsTrimmed, unless losses are
        accepted: then the tasks hold exactly the other rows. Raises as LiveEnds.look."""
        return self.cluster.run(self._planner.plan(self._view.states, start, end))

    def values(self, declared: StructType) -> "ValueReader | None":
        """The reader of payloads into the declared columns, by the schemas registered now; None in
        a format whose payload is one column. Raises as registered_schema and ValueReader.of."""
        value_format = self.options.value_format
        if not has_payload(value_format):
            return None
        from spark_ledger.spark.rows.typed_values import ValueReader, registered_schema

        infos, schemas = list(self.infos.values()), self._client.schemas
        registered = self.cluster.run(
            registered_schema(schemas, infos, value_format, declared=True)
        )
        return ValueReader.of(value_format, payload_of(declared), registered)

    def close(self) -> None:
        """Stop following live segments. The topics' followers stay: other readers of the process
        may use them."""
        self.cluster.run(self._live.close())

    # -- which topics -------------------------------------------------------------------------

    async def _find(self) -> None:
        """Take the topics that the options name, or that match the pattern now."""
        if self.options.pattern is None:
            for name in self.options.topics:
                info = await self._client.topics.open(name)
                self.infos[info.name.short] = info
        else:
            self._take(await self._matching(fresh=True))

    async def _matching(self, *, fresh: bool) -> list[TopicInfo]:
        """The topics that match the pattern and are not in `infos` yet. Each costs a read."""
        topics = self._client.topics
        if fresh:
            await self._client.store.sync()
        present = self.infos.keys()
        names = (name.short for name in await topics.names())
        new = self.options.matching(name for name in names if name not in present)
        infos = await asyncio.gather(*(topics.find(name, fresh=False) for name in new))
        return [info for info in infos if info is not None]

    def _take(self, infos: Sequence[TopicInfo]) -> None:
        for info in infos:
            self.infos.setdefault(info.name.short, info)
        self.infos = dict(sorted(self.infos.items()))

    def _look_for_topics(self) -> None:
        """Take the topics of a scan that ended; start a scan if it is time, and wait for it if the
        last one is too old (not while the store is away). Waits for the first fold of new topics.
        Raises TopicRecreated."""
        self._take_scan()
        if self.options.pattern is None and not self._left_out:
            return
        now_s = time.monotonic()
        if self._scan is None and now_s - self._scanning_s >= RESCAN_S:
            self._scanning_s = now_s
            named = self.options.pattern is None
            looking = self._namesakes(fresh=False) if named else self._matching(fresh=False)
            self._scan = background_loop().submit(looking)
        unseen_s = now_s - self._scanned_s
        if self._scan and unseen_s >= UNSEEN_RESCANS * RESCAN_S and not self.cluster.away:
            wait([self._scan], RESCAN_WAIT_S)
            self._take_scan()

    def _take_scan(self) -> None:
        if self._scan is None or not self._scan.done():
            return
        scan, self._scan = self._scan, None
        if scan.exception() is None:
            self._scanned_s = self._scanning_s
            self._take_found(scan.result())

    def _take_found(self, infos: Sequence[TopicInfo]) -> None:
        if self.options.pattern is None:
            _check_same(self._left_out, infos)
        else:
            self._take(infos)
            self.cluster.run(self._follow_all())

    async def _namesakes(self, *, fresh: bool) -> list[TopicInfo]:
        """The topics that now have the names of topics that are left out."""
        topics, names = self._client.topics, list(self._left_out)
        infos = await asyncio.gather(*(topics.find(name, fresh=fresh) for name in names))
        return [info for info in infos if info is not None]

    # -- how far they go ------------------------------------------------------------------------

    async def _follow_all(self) -> None:
        assert self._followers is not None
        new = [name for name in self.infos if name not in self._followers]
        following = (self._client.follow(self.infos[name].id, name) for name in new)
        made = await asyncio.gather(*following, return_exceptions=True)
        for name, follower in zip(new, made, strict=True):
            if isinstance(follower, TopicFollower):
                self._followers[name] = follower
            elif isinstance(follower, TopicDeleted | TopicNotFound):
                await self._leave_out([name])
            else:
                raise follower
        self._followers = {name: self._followers[name] for name in self.infos}

    async def _fresh_ends(self) -> Ends:
        if self.options.pattern is not None:
            self._take(await self._matching(fresh=True))
            if self._followers is not None:
                await self._follow_all()
        else:
            _check_same(self._left_out, await self._namesakes(fresh=True))
        states = await self._folded()
        await self._live.look(_lives(states))
        return self._seen(states, self._live.changes)

    async def _folded(self) -> dict[str, TopicState]:
        """The topics' states, without deleted topics if that is no loss; else raises TopicDeleted.
        Raises TopicRecreated."""
        while True:
            logs = {name: self._client.log(info.id) for name, info in self.infos.items()}
            try:
                folded = await fold_agreeing(list(logs.values()))
            except (TopicDeleted, TopicNotFound):
                gone = [name for name, log in logs.items() if await _is_gone(log)]
            else:
                states = dict(zip(logs, folded, strict=True))
                gone = [name for name, state in states.items() if state.deleted]
                if not gone:
                    return states
            await self._leave_out(gone)

    async def _leave_out(self, gone: Sequence[str]) -> None:
        """Go on without topics that are gone. For topics that the options name, or that `ends` had,
        raises TopicRecreated if another topic has the name now, TopicDeleted if that is a loss."""
        for name in gone:
            info = self.infos[name]
            if self.options.pattern is None or name in self._view.ends:
                namesake = await self._client.topics.find(name)
                _check_same({name: info}, [] if namesake is None else [namesake])
                if self.options.fail_on_data_loss:
                    what = f"topic {name!r} (id {info.id}) was deleted"
                    raise TopicDeleted(what, GO_ON, topic=name)
                _log.warning(
                    "topic %r (id %s) was deleted: as failOnDataLoss is false, it is left out",
                    name,
                    info.id,
                )
                self._left_out[name] = info
        for name in gone:  # a scan by the pattern finds a topic that takes such a name
            self.infos.pop(name, None)
            if self._followers is not None:
                self._followers.pop(name, None)

    def _seen(self, states: Mapping[str, TopicState], changes: int) -> Ends:
        """Remember these states; return their ends."""
        before = self._view.states
        self.went_back += any(
            name in before and state.next < before[name].next for name, state in states.items()
        )
        ends = {name: self._ends_of(name, state) for name, state in states.items()}
        self._view = View(states, ends, changes)
        if self._followers is not None:
            background_loop().loop.call_soon_threadsafe(self._live.follow, _lives(states))
        return ends

    def _ends_of(self, name: str, state: TopicState) -> TopicEnds:
        assert not state.deleted, f"topic {name!r} is gone"
        assigned = None if self.options.assigned is None else self.options.assigned[name]
        before = self._view.ends.get(name)
        ends_before = () if before is None else before.ends
        ends = [self._planner.end_of(held) for held in state.partitions]
        return TopicEnds(
            state.topic_id,
            tuple(held.start_offset for held in state.partitions),
            tuple(
                max(end, ends_before[p]) if p < len(ends_before) else end
                for p, end in enumerate(ends)
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


async def _is_gone(log: TopicLog) -> bool:
    try:
        await log.fold(fresh=True)
    except (TopicDeleted, TopicNotFound):
        return True
    return False


def _lives(states: Mapping[str, TopicState]) -> list[LiveSegment]:
    every = (held.live for state in states.values() for held in state.partitions)
    return [live for live in every if live is not None]
