"""What topics are by the writes the store applied, and the judge of each of these writes.

Always true: nothing here asks the code under test what it remembers: commits, checkpoints, trims
and deletions are judged when the store applies them, in its order. A topic's state is that of all
its commits ever, whatever became of their nodes (T1): `state.apply` is taken as given, for a whole
fold and a fold from a checkpoint both go through it, and unit tests know its results.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from spark_ledger.metadata import paths
from spark_ledger.metadata.store import Versioned
from spark_ledger.topic.commit import draft as commit_draft
from spark_ledger.topic.commit.commit import POINTER_BYTES_MAX
from spark_ledger.topic.log import checkpoint, records, state
from spark_ledger.topic.log.actions import (
    Append,
    Grow,
    OpenLive,
    Overwrite,
    SealLive,
    Trim,
    adds_rows,
    dropped_of,
)
from spark_ledger.topic.log.checkpoint import CheckpointRecord
from spark_ledger.topic.log.policies import TopicPolicies
from spark_ledger.topic.log.records import Commit, SpilledBody, TopicLife
from spark_ledger.topic.log.segment_table import TableChunk
from spark_ledger.topic.log.segments import Segment
from spark_ledger.topic.log.state import TopicState
from tests.simulation import invariants
from tests.simulation.invariants import Violation
from tests.simulation.store import EPOCH_MS
from tests.simulation.store import Commit as Written
from tests.simulation.store_tree import Change
from tests.simulation.topic_held import held_rows_stay
from tests.simulation.world import World

if TYPE_CHECKING:
    from tests.simulation.brokers.truth import Truth

EPHEMERALS_MAX = 2
LOCKS = paths.UNDERREPLICATED_LOCKS  # of these a worker has some more
"""Of a session (hazard 45): a bookie makes its new one before the other goes."""
LISTING_BYTES_MAX = 1 << 20
"""As much as ZooKeeper answers with (jute.maxbuffer)."""
LIVE = "live"
"""The topic whose only partition ends in a live segment."""
BROKERED = "b"
"""The topic that brokers serve."""
PRODUCED = "produced in "
"""How who wrote a row begins that brokers stored."""

Shape = tuple[tuple[int, int, int, int], ...]
"""Of each partition: start, end, rows kept, the last commit that did not just append."""


def shape_of(folded: TopicState) -> Shape:
    """What two folds of the same commits have in common, wherever they began."""
    return tuple(
        (p.start_offset, p.end_offset, p.rows_between(0, p.end_offset), p.rearranged)
        for p in folded.partitions
    )


def live_name(ledger_id: int) -> str:
    """What the rows of a live ledger say they are of, as others name a task attempt."""
    return f"live{ledger_id}"


@dataclass(frozen=True)
class Span:
    """Rows from offset `base` on that one task attempt wrote, committed at `commit_ms`."""

    base: int
    attempt: str
    commit_ms: int
    rows: tuple[bytes | None, ...] | None = None
    """Of what brokers stored: each row; None of an offset without one."""


Positions = dict[int, int]


@dataclass
class Whereabouts:
    """Where one subscription may have been, by partition: at most there, and since when."""

    since: list[tuple[float, Positions]] = field(default_factory=list)

    def is_at(self, now_s: float, positions: Positions) -> None:
        """Note that the subscription is there now, and nowhere else until its next move."""
        self.since.append((now_s, positions))

    def goes_to(self, now_s: float, positions: Positions) -> None:
        """Note a move of the subscription that may be made or not."""
        last = self.since[-1][1] if self.since else {}
        further = {p: max(last.get(p, 0), offset) for p, offset in positions.items()}
        self.since.append((now_s, last | further))

    def grown(self, partitions: range) -> None:
        """It is at the first row of those that came."""
        at = self.since[-1][1]
        for p in partitions if at else ():
            at.setdefault(p, 0)

    def at_most(self, partition: int, from_s: float) -> int | None:
        """The lowest of what it was from then on; None: it may have been anywhere."""
        first = max((i for i, (s, _) in enumerate(self.since) if s <= from_s), default=0)
        found = (at.get(partition) for _, at in self.since[first:])
        return min((offset for offset in found if offset is not None), default=None)


@dataclass
class LogGhost:
    """One topic, by its id."""

    topic_id: str
    name: str
    policies: TopicPolicies
    state: TopicState
    made_with: int = 1
    """So many partitions."""
    shapes: list[Shape] = field(default_factory=list)
    """By the number of commits: the shape after so many."""
    commits: dict[int, Commit] = field(default_factory=dict)
    logged_at: dict[int, int] = field(default_factory=dict)
    """By commit: the zxid that made it."""
    logged_s: list[float] = field(default_factory=list)
    """By commit: when it was made, in simulated seconds."""
    deleted_ms: int | None = None
    """When it was deleted, by the store's clock."""
    spans: dict[int, list[Span]] = field(default_factory=dict)
    """By partition, rising."""
    checkpoint: CheckpointRecord | None = None
    root_before: frozenset[int] = frozenset()
    """Ledgers that the checkpoint before the newest names in its record or an inline root."""
    previous: int = 0
    """How far the checkpoint before the newest went."""
    short: TopicState | None = None
    """Folded from the checkpoint that counts, where its root is in its record."""
    lives: dict[int, float] = field(default_factory=dict)
    """Ledgers that were ever live, in the order of the log: since when it names them as that."""
    gone_s: float | None = None
    """When a client first learned that the topic is deleted."""
    subscriptions: dict[str, Whereabouts] = field(default_factory=dict)
    """By name: the rows that no process may take away, from the moment that it is made."""

    def grown(self, partitions: int) -> None:
        """Each subscription is at the first row of a new partition: no process may take it away."""
        for subscription in self.subscriptions.values():
            subscription.grown(range(len(self.state.partitions), partitions))

    def starts(self) -> list[tuple[int, int]]:
        """Each partition with the first offset that it keeps."""
        return [*self.state.start_offsets().items()]

    def span_at(self, partition: int, offset: int) -> Span | None:
        """Whose row is at the offset."""
        spans = self.spans.get(partition, [])
        at = bisect_right(spans, offset, key=lambda span: span.base) - 1
        ended = offset >= self.state.partitions[partition].end_offset
        return None if at < 0 or ended else spans[at]

    def stored_by_brokers(self, partition: int, offset: int) -> tuple[str, int] | None:
        """Its place, if brokers stored the row there."""
        span = self.span_at(partition, offset)
        stored = span is not None and span.rows is not None
        return (f"{PRODUCED}{partition}", offset) if stored else None

    def places(self) -> dict[tuple[str, int], tuple[int, int]]:
        """Partition and offset of each row, by attempt and number: of attempts whose rows are all
        in one partition, for which of several has a row is known to who wrote it."""
        partitions: dict[str, dict[int, None]] = {}
        for p, spans in self.spans.items():
            for span in spans:
                partitions.setdefault(span.attempt, {})[p] = None
        found: dict[tuple[str, int], tuple[int, int]] = {}
        counts: dict[str, int] = {}
        for p, spans in self.spans.items():
            ends = [span.base for span in spans[1:]] + [self.state.partitions[p].end_offset]
            for span, end in zip(spans, ends, strict=True):
                if len(partitions[span.attempt]) > 1:
                    continue
                for offset in range(span.base, end):
                    row = counts[span.attempt] = counts.get(span.attempt, -1) + 1
                    found[span.attempt, row] = (p, offset)
        return found

    def trimmed_attempts(self) -> dict[str, None]:
        """Those of which rows may be gone: whose partition starts after their first."""
        found: dict[str, None] = {}
        for p, spans in self.spans.items():
            start = self.state.partitions[p].start_offset
            found |= {span.attempt: None for span in spans if span.base < start}
        return found


@dataclass
class TopicGhost:
    """What was written and committed, by the log itself."""

    grace_s: float = 0.0
    """What a subscription had so long ago is held (subscription/records.py)."""
    logs: dict[str, LogGhost] = field(default_factory=dict)
    """By topic id."""
    next_version: dict[str, int] = field(default_factory=dict)
    """By query, its checkpoint: what a new run begins with."""
    rows_of: dict[str, int] = field(default_factory=dict)
    """By task attempt: how many rows it wrote."""
    key_of: dict[bytes, bytes | None] = field(default_factory=dict)
    """By value of a row: its key."""
    topic_of: dict[str, str] = field(default_factory=dict)
    """By task attempt: the id of the topic that it wrote for."""
    expected: dict[tuple[str, int, str], list[str]] = field(default_factory=dict)
    """By (intent, version, topic id): the task attempts of the segments, in the commit's order."""
    committed: dict[str, float] = field(default_factory=dict)
    """Task attempts whose rows are in the log, with the simulated second of the commit."""
    begun_at: dict[str, int] = field(default_factory=dict)
    """By run: the zxid that made its first intent."""
    overwritten_held: dict[tuple[str, int], None] = field(default_factory=dict)
    """Commits, by intent and version, that may replace rows that a subscription holds."""
    contents: dict[tuple[str, int], str] = field(default_factory=dict)
    """By (intent, version): what is committed under it, as PlannedBatch.content has it, "" if it
    has no plan."""
    authors: dict[tuple[str, int, str], dict[str, None]] = field(default_factory=dict)
    """By (app id, version, content): the commits, by id, that contribute to it, over all topics, in
    their order."""
    shared: dict[str, dict[str, int]] = field(default_factory=dict)
    """By commit over several topics: its number in each."""
    bodies: dict[tuple[str, str], bytes] = field(default_factory=dict)
    """By (commit id, topic id): the last body that was about to be committed."""
    offsets: dict[Any, bytes | None] = field(default_factory=dict)
    """(topic id, partition, offset): the row first read there; None: no row is there."""
    truth: "Truth | None" = None
    """Of the topic that brokers serve."""
    ends_told: dict[tuple[str, str], dict[int, int]] = field(default_factory=dict)
    """(client, topic id): where each partition ended when it last polled."""

    def key_of_commit(self, commit: Commit) -> tuple[str, int, str]:
        """What contributes rows once: a version, as it was planned."""
        content = self.contents.get((commit.intent, commit.version), "")
        return commit.app_id, commit.version, content

    def replayed(self, key: tuple[str, int, str]) -> tuple[str, int, str]:
        """Whose commit a batch that was done already is a replay of: a plan without rows may be
        taken for any other of its number (hazard 11)."""
        rows = key[2].partition(" ")[0]
        alike = (k for k in self.authors if k[:2] == key[:2] and k[2].partition(" ")[0] == rows)
        return key if key in self.authors else next(alike, key)

    def named(self, name: str) -> LogGhost | None:
        """The topic that has the name now."""
        there = [log for log in self.logs.values() if not log.state.deleted]
        found = [log for log in there if log.name.endswith(f"/{name}")]
        return found[-1] if found else None


class TopicJudge:
    """Listens to the store."""

    def __init__(self, world: World, ghost: TopicGhost) -> None:
        self._world = world
        self._ghost = ghost
        world.store.listeners.append(self.applied)

    def applied(self, written: Written) -> None:
        try:
            self._costs(written)
            self._commits(written)
            for change in written.changes:
                self._changed(change, written)
        except Violation as violation:
            self._world.observers.violated(violation)
        except Exception as error:  # the store must answer all the same
            defect = Violation("no defect", f"judging write {written.zxid} raised {error!r}")
            self._world.observers.violated(defect)

    def _costs(self, written: Written) -> None:
        """What a write, and what it makes, costs the store (T15)."""
        ghost = self._world.ghost
        size = sum(len(c.path) + len(c.after.value) for c in written.changes if c.after)
        invariants.a_write_is_small(ghost, size, commit_draft.MULTI_BYTES_MAX)
        for change in written.changes:
            if change.before is not None or change.after is None:
                continue
            if change.after.owner and not change.path.startswith(LOCKS):
                owned = self._world.store.ephemerals_of(change.after.owner)
                count = sum(not path.startswith(LOCKS) for path in owned)
                invariants.a_session_has_few_ephemerals(
                    ghost, written.session, count, EPHEMERALS_MAX
                )
            folder = change.path.rpartition("/")[0] or "/"
            listed = self._world.store.child_count(folder) * len(change.path)
            invariants.a_listing_is_small(ghost, folder, listed, LISTING_BYTES_MAX)

    def _changed(self, change: Change, written: Written) -> None:
        path, after = change.path, change.after
        if path.startswith(paths.LEDGERS) and after is None:
            self._ledger_gone(int(path.removeprefix(paths.LEDGERS).replace("/", "")), written)
        parts = path.split("/")
        if path.startswith(f"{paths.INTENTS}/") and len(parts) == 3 and change.before is None:
            assert after is not None
            run = records.decode_intent(after.value).run_id
            self._ghost.begun_at.setdefault(run, written.zxid)
        if not path.startswith(f"{paths.TOPIC_IDS}/"):
            return
        if len(parts) == 3 and after is not None:
            self._topic(parts[2], after)
        elif parts[3:] == ["head"] and after is not None:
            self._head(self._ghost.logs[parts[2]], after, written)
        elif parts[3:] == ["checkpoint"] and after is not None and after.value:
            self._checkpoint(self._ghost.logs[parts[2]], after)
        elif len(parts) == 5 and parts[3] == "log" and after is None:
            self._trimmed(self._ghost.logs[parts[2]], int(parts[4]))

    def _topic(self, topic_id: str, node: Versioned) -> None:
        record = records.decode_topic(node.value)
        known = self._ghost.logs.get(topic_id)
        if known is not None:
            known.policies = record.policies
            return
        empty = state.empty(topic_id, record.partitions)
        log = LogGhost(topic_id, record.name, record.policies, empty, record.partitions)
        log.shapes.append(shape_of(empty))
        self._ghost.logs[topic_id] = log

    def _head(self, log: LogGhost, node: Versioned, written: Written) -> None:
        if records.decode_head(node.value).life is TopicLife.DELETED and not log.state.deleted:
            log.state = replace(log.state, deleted=True)
            log.deleted_ms = EPOCH_MS + int(written.time * 1000)

    # -- commits ---------------------------------------------------------------------------------

    def _commits(self, written: Written) -> None:
        """One write makes one commit, in one topic or in several."""
        made: dict[str, tuple[int, Versioned]] = {}
        for change in written.changes:
            parts = change.path.split("/")
            new = change.before is None and change.after is not None
            if new and f"/{parts[1]}" == paths.TOPIC_IDS and parts[3:4] == ["log"] and parts[4:]:
                made[parts[2]] = (int(parts[4]), change.after)
        if not made:
            return
        ghost = self._world.ghost
        schemas = sum(change.path.endswith("/schema") for change in written.changes)
        invariants.a_commit_writes_each_topic_twice(ghost, len(made), len(written.changes), schemas)
        numbers = {topic_id: number for topic_id, (number, _) in made.items()}
        bodies = {topic_id: self._body(topic_id, node) for topic_id, (_, node) in made.items()}
        first = next(iter(bodies.values()))
        key = self._ghost.key_of_commit(first)
        authors = self._ghost.authors.setdefault(key, {})
        authors[first.commit_id] = None
        invariants.a_version_contributes_rows_at_most_once(ghost, key, len(authors))
        if len(made) > 1:
            self._ghost.shared[first.commit_id] = numbers
        for topic_id, commit in bodies.items():
            self._logged(topic_id, numbers[topic_id], commit, made[topic_id][1], written)

    def _body(self, topic_id: str, node: Versioned) -> Commit:
        found = records.decode_commit(node.value)
        most = max(commit_draft.BODY_INLINE_BYTES_MAX, POINTER_BYTES_MAX)
        size = len(node.value)
        invariants.a_commits_nodes_are_small(self._world.ghost, topic_id, size, most)
        if isinstance(found, SpilledBody):
            body = records.decode_commit(self._ghost.bodies[found.commit_id, topic_id])
            assert isinstance(body, Commit)
            self._named(found.body.ledger_id, found.body.last)
            return body
        return found

    def _logged(
        self, topic_id: str, number: int, commit: Commit, node: Versioned, written: Written
    ) -> None:
        log, ghost = self._ghost.logs[topic_id], self._world.ghost
        before = log.state
        invariants.nothing_is_committed_to_a_deleted_topic(ghost, topic_id, before.deleted)
        invariants.commits_follow_one_another(ghost, topic_id, before.next, number)
        log.commits[number], log.logged_at[number] = commit, written.zxid
        log.logged_s.append(written.time)
        ends = before.end_offsets()
        for action in commit.actions:
            if isinstance(action, Trim):
                self._rows_let_go(log, commit, action, written.time)
            if isinstance(action, Overwrite):
                since_s = written.time - self._ghost.grace_s
                asked = (commit.intent, commit.version) in self._ghost.overwritten_held
                held_rows_stay(self._world.ghost, log, ends, since_s, asked=asked)
            if isinstance(action, Append | Overwrite):
                commit_ms = max(before.commit_ms, node.created_ms)
                self._rows_come(log, commit, action.segments, ends, commit_ms, written.time)
            if isinstance(action, Grow):
                log.grown(action.partitions)
            if isinstance(action, OpenLive):
                log.lives[action.ledger_id] = written.time
            if isinstance(action, SealLive):
                commit_ms = max(before.commit_ms, node.created_ms)
                self._rows_sealed(log, action, ends, commit_ms, written.time)
            for segment in getattr(action, "segments", ()):
                if not segment.inline:
                    self._named(segment.ledger_id, segment.entries[-1][1])
            if isinstance(action, Overwrite):
                self._rows_replaced(log, number, commit)
        log.state = state.apply(before, number, commit, node.created_ms)
        self._ledgers_let_go(log, before, commit)
        log.shapes.append(shape_of(log.state))
        if log.short is not None:
            log.short = state.apply(log.short, number, commit, node.created_ms)

    def _rows_come(
        self,
        log: LogGhost,
        commit: Commit,
        segments: Sequence[Segment],
        ends: dict[int, int],
        commit_ms: int,
        commit_s: float,
    ) -> None:
        written_for = (commit.intent, commit.version, log.topic_id)
        attempts = self._ghost.expected.get(written_for)
        invariants.rows_come_to_the_topic_they_were_written_for(
            self._world.ghost, log.topic_id, attempts is not None
        )
        assert attempts is not None
        for segment, attempt in zip(segments, attempts, strict=True):
            if segment.partition >= log.made_with:
                self._world.ghost.meet("rows in a partition that came later")
            self._ghost.committed[attempt] = commit_s
            spans = log.spans.setdefault(segment.partition, [])
            spans.append(Span(ends[segment.partition], attempt, commit_ms))
            ends[segment.partition] += segment.rows

    def _rows_replaced(self, log: LogGhost, number: int, commit: Commit) -> None:
        """By an overwrite, whose run began with its first intent."""
        self._world.ghost.meet("rows replaced")
        begun = self._ghost.begun_at[commit.run_id]
        foreign = [
            other
            for other, one in log.commits.items()
            if one.app_id != commit.app_id and any(map(adds_rows, one.actions))
        ]
        since = [other for other in foreign if log.logged_at[other] > begun]
        invariants.an_overwrite_takes_what_it_knew(self._world.ghost, log.topic_id, number, since)

    def _ledgers_let_go(self, log: LogGhost, before: TopicState, commit: Commit) -> None:
        """Those to which nothing refers after the commit: it names them, so that the delete delay
        begins."""
        if not any(isinstance(action, Overwrite | Trim) for action in commit.actions):
            return
        lost = {*before.ledgers()} - {*log.state.ledgers()}
        named = {one for action in commit.actions for one in dropped_of(action)}
        invariants.what_a_commit_takes_away_it_names(
            self._world.ghost, log.topic_id, sorted(lost - named)
        )

    def _rows_sealed(
        self, log: LogGhost, seal: SealLive, ends: dict[int, int], commit_ms: int, commit_s: float
    ) -> None:
        segment, name, rows = seal.segment, live_name(seal.ledger_id), None
        truth = self._ghost.truth
        if truth is not None and truth.log is log:
            live = log.state.partitions[seal.partition].live
            assert live is not None
            rows = truth.sealed(live, seal)
            for offset, row in enumerate(rows, ends[seal.partition]):
                place = (log.topic_id, seal.partition, offset)
                known = self._ghost.offsets
                invariants.an_offset_is_one_row_for_ever(self._world.ghost, known, place, row)
        if segment is None:
            return
        if rows is None:
            self._ghost.committed[name], self._ghost.rows_of[name] = commit_s, segment.rows
        if segment.counted:  # its rows have their owner's times
            spans = log.spans.get(segment.partition, ())
            earlier_ms = max((span.commit_ms for span in spans), default=0)
            commit_ms = min(max(segment.max_ms, earlier_ms), commit_ms)
        base = ends[segment.partition]
        ends[segment.partition] += segment.rows
        log.spans.setdefault(segment.partition, []).append(Span(base, name, commit_ms, rows))

    def _named(self, ledger_id: int, last_entry: int) -> None:
        """At the commit its ledger is there, and every entry of it was acked to its writer."""
        ghost, ledger = self._world.ghost, self._world.ghost.ledgers[ledger_id]
        invariants.what_a_commit_names_is_there(ghost, ledger_id, ledger.deleted)
        invariants.what_is_committed_was_acked(ghost, ledger, last_entry)

    def _rows_let_go(self, log: LogGhost, commit: Commit, trim: Trim, trimmed_s: float) -> None:
        ghost, policies = self._world.ghost, log.policies
        now_ms = EPOCH_MS + int(trimmed_s * 1000)
        for p, offset in trim.offsets:
            for name, subscription in log.subscriptions.items():
                at = subscription.at_most(p, trimmed_s)
                invariants.nothing_held_is_trimmed(ghost, name, p, offset, at)
                at = subscription.at_most(p, trimmed_s - self._ghost.grace_s)
                invariants.what_was_held_lately_is_not_trimmed(ghost, name, p, offset, at)
            last = log.span_at(p, offset - 1)
            if commit.app_id.startswith("retain-") and policies.retention_ms is not None:
                age_ms = now_ms - (now_ms if last is None else last.commit_ms)
                if policies.retention_bytes is None:
                    invariants.retention_goes_by_the_stores_time(
                        ghost, p, offset, age_ms, policies.retention_ms
                    )

    # -- checkpoints -----------------------------------------------------------------------------

    def _checkpoint(self, log: LogGhost, node: Versioned) -> None:
        record, before = checkpoint.decode_record(node.value), log.checkpoint
        was = (0, 0) if before is None else (before.next, before.trimmed)
        now = (record.next, record.trimmed)
        self._world.ghost.meet("checkpoint trims" if was[0] == now[0] else "checkpoint")
        invariants.a_checkpoint_only_rises(self._world.ghost, log.topic_id, was, now)
        log.checkpoint = record
        if was[0] != now[0]:
            log.previous = was[0]
            log.root_before = frozenset() if before is None else _ledgers_of_root(before)
        if isinstance(record.root, bytes) and was[0] != now[0]:
            log.short = checkpoint.decode_root(record.root).state
            self.compared(log.topic_id, log.short)
            for number in range(record.next, log.state.next):
                made = self._world.store.log[log.logged_at[number] - 1]
                now_ms = EPOCH_MS + int(made.time * 1000)
                log.short = state.apply(log.short, number, log.commits[number], now_ms)
        elif was[0] != now[0]:
            log.short = None

    def _trimmed(self, log: LogGhost, number: int) -> None:
        """A commit's node is deleted: two checkpoints have it."""
        if log.state.deleted:
            return
        invariants.a_commit_goes_when_two_checkpoints_have_it(
            self._world.ghost, number, log.previous
        )

    def compared(self, topic_id: str, folded: TopicState) -> None:
        """A fold, from wherever it began, is that of all commits ever (T1)."""
        shapes = self._ghost.logs[topic_id].shapes
        wanted = shapes[folded.next] if folded.next < len(shapes) else ()
        invariants.a_fold_is_that_of_all_commits_ever(
            self._world.ghost, folded.next, shape_of(folded), wanted
        )

    # -- deletions ---------------------------------------------------------------------------------

    def _ledger_gone(self, ledger_id: int, written: Written) -> None:
        now_ms = EPOCH_MS + int(written.time * 1000)
        for log in self._ghost.logs.values():
            told = [folded for folded in (log.state, log.short) if folded is not None]
            record = log.checkpoint
            named = record is not None and ledger_id in record.root_ledgers()
            named = named or ledger_id in log.root_before
            previous = 0 if record is None else record.previous
            named = named or any(ledger_id in _ledgers_told(one, previous) for one in told)
            if named and log.deleted_ms is not None:
                self._gone_with_its_topic(log, ledger_id, now_ms - log.deleted_ms)
                continue
            for folded in told:
                self._gone_in_time(log, ledger_id, now_ms, folded)
            invariants.what_a_commit_names_is_there(self._world.ghost, ledger_id, named)

    def _gone_with_its_topic(self, log: LogGhost, ledger_id: int, since_ms: int) -> None:
        """What the topic still named when it was deleted is dropped by that."""
        self._world.ghost.meet("ledger of a deleted topic deleted")
        invariants.what_was_dropped_stays_for_the_delete_delay(
            self._world.ghost, ledger_id, since_ms, log.policies.delete_delay_ms
        )

    def _gone_in_time(self, log: LogGhost, ledger_id: int, now_ms: int, folded: TopicState) -> None:
        dropped_ms = folded.dropped.get(ledger_id)
        if dropped_ms is not None:
            self._world.ghost.meet("dropped ledger deleted")
            invariants.what_was_dropped_stays_for_the_delete_delay(
                self._world.ghost, ledger_id, now_ms - dropped_ms, log.policies.delete_delay_ms
            )


def _ledgers_told(folded: TopicState, previous: int = 0) -> dict[int, None]:
    """The ledgers that the state names, but for those that only its chunks do, and for bodies that
    a checkpoint up to commit `previous` took the place of."""
    found = {ledger: None for ledger, last in folded.bodies.items() if last >= previous}
    for held in folded.partitions:
        if held.live is not None:
            found[held.live.ledger_id] = None
        for one in held.intervals:
            if isinstance(one.source, TableChunk):
                found[one.source.pointer.ledger_id] = None
            elif one.source is not None:
                table = one.source.between(held.number, one.lo, one.hi)
                found |= dict.fromkeys(table.ledger_ids())
    return found


def _ledgers_of_root(record: CheckpointRecord) -> frozenset[int]:
    """What a reader needs that has read this record, as far as it can be told without a ledger."""
    if not isinstance(record.root, bytes):
        return frozenset([record.root.ledger_id])
    return frozenset(checkpoint.chunk_ledgers(checkpoint.decode_root(record.root).state))
