"""What must hold of every world, every step between two, every word of a process, and every end.

Always true: a world is judged once, on whatever way it came about. The state of topics is computed
by production code that folds them afresh, and beside it by applying every commit that was ever
made; the two must agree (T1). Invariants are numbered as in docs/simulation.md.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from spark_ledger import errors
from spark_ledger.metadata import ledger_record, paths
from spark_ledger.topic.commit.commit import CommitKind
from spark_ledger.topic.log import checkpoint, records, state
from spark_ledger.topic.log.records import Commit
from spark_ledger.topic.log.state import TopicState
from tests.simulation.exhaustive.topics import audit
from tests.simulation.exhaustive.topics.ledgers import rows_of
from tests.simulation.exhaustive.topics.processes import Note, Process
from tests.simulation.exhaustive.topics.scope import Scope
from tests.simulation.exhaustive.topics.stage import client_of, run_alone
from tests.simulation.exhaustive.topics.worlds import World

Row = Any
Content = dict[tuple[int, int], Row]
"""By partition and offset the row: its ledger and entry, or what the entry holds."""


class Broken(Exception):
    """An invariant does not hold."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(f"invariant {name}: {what}")


def content_of(folded: TopicState, world: World) -> Content:
    """Every row there is. Those of a live segment are what its ledger holds now."""
    found: Content = {}
    for held in folded.partitions:
        for part in held.stretches(held.start_offset, held.end_offset):
            for placed in part.table:
                for at, row in enumerate(rows_of(placed.segment), placed.base):
                    if part.lo <= at < part.hi:
                        found[held.number, at] = row
        if held.live is not None:
            ledger = held.live.ledger_id
            rows = world.ledgers[ledger].rows if ledger in world.ledgers else ()
            for entry in range(len(rows)):
                found[held.number, held.live.base + entry] = (ledger, entry)
    return found


def commits_of(world: World, topic: str) -> list[tuple[int, Commit]]:
    """Every commit ever made to the topic, in order."""
    return [
        (event[2], _decoded(event[3]))
        for event in world.history
        if event[0] == "commit" and event[1] == topic
    ]


def _decoded(body: bytes) -> Commit:
    found = records.decode_commit(body)
    assert isinstance(found, Commit), "bodies are small here"
    return found


class Judge:
    """Of one exploration. `judged` counts what was judged, by invariant."""

    def __init__(self, scope: Scope) -> None:
        self.judged: dict[str, int] = {}
        self.told: dict[str, int] = {}
        """What processes reported, and in how many worlds."""
        self._scope = scope
        self._worlds: dict[int, str] = {}
        self._steps: dict[tuple[int, int], str] = {}
        self._notes: dict[Any, str] = {}
        self._ends: dict[int, str] = {}
        self._folded: dict[Any, TopicState | str] = {}
        self._ghosts: dict[Any, TopicState] = {}

    def step(self, key: tuple[int, int], before: World, after: World) -> str:
        """What the step breaks, and the world it leads to; "" if nothing."""
        if key not in self._steps:
            self._steps[key] = self.world(key[1], after) or self._told(
                lambda: self._judge_step(before, after)
            )
        return self._steps[key]

    def world(self, number: int, world: World) -> str:
        if number not in self._worlds:
            self._worlds[number] = self._told(lambda: self._judge_world(world))
        return self._worlds[number]

    def note(self, number: int, world: World, who: str, note: Note) -> str:
        key = (number, who, note)
        if key not in self._notes:
            said = f"{who}: {note[0]}" + ("" if note[0].startswith("read") else f" {note[1]}")
            self.told[said] = self.told.get(said, 0) + 1
            self._notes[key] = self._told(lambda: self._judge_note(world, who, note))
        return self._notes[key]

    def final(self, number: int, world: World) -> str:
        """What is broken when nothing happens any more: what still should be possible is tried."""
        if number not in self._ends:
            self._ends[number] = self._told(lambda: self._judge_end(world))
        return self._ends[number]

    # -- worlds ------------------------------------------------------------------------------

    def _judge_world(self, world: World) -> None:
        for topic in self._scope.topics:
            ghost, folded = self.ghost(world, topic), self.folded(world, topic)
            self._count("T1")
            if (folded.next, content_of(folded, world)) != (ghost.next, content_of(ghost, world)):
                raise Broken(
                    "T1",
                    f"a fresh fold has {_summary(folded, world)}, what was committed is"
                    f" {_summary(ghost, world)}",
                )
            self._judge_ledgers(world, folded)
        self._judge_versions(world)
        if "live rows" in self._scope.rules:
            self._judge_rows(world)

    def _judge_versions(self, world: World) -> None:
        """T2: a version of a key was committed by one commit, over all topics."""
        self._count("T2")
        made: dict[tuple[str, str, int], dict[str, str]] = {}
        for topic in self._scope.topics:
            for _, commit in commits_of(world, topic):
                by_topic = made.setdefault((commit.app_id, commit.target, commit.version), {})
                if topic in by_topic or {*by_topic.values()} - {commit.commit_id}:
                    raise Broken(
                        "T2", f"version {commit.version} of {commit.app_id} was committed twice"
                    )
                by_topic[topic] = commit.commit_id

    def _judge_ledgers(self, world: World, folded: TopicState) -> None:
        """T4: what a topic refers to is there; T6: no committed range ends beyond its ledger."""
        if "ledgers" not in self._scope.rules:
            return
        self._count("T4", "T6")
        last: dict[int, int] = {}
        for row in content_of(folded, world).values():
            last[row[0]] = max(last.get(row[0], -1), row[1])
        for ledger, entry in last.items():
            node = world.nodes.get(paths.ledger(ledger))
            if node is None:
                raise Broken("T4", f"ledger {ledger} is referred to and was deleted")
            end = ledger_record.decode(node.value).last_entry
            if end is not None and end < entry:
                raise Broken("T6", f"ledger {ledger} is CLOSED at {end}, entry {entry} committed")

    def _judge_rows(self, world: World) -> None:
        """T7: every acknowledged row is in one segment or one live ledger that the log names."""
        self._count("T7")
        named: list[tuple[int, int]] = []
        for topic in self._scope.topics:
            named += content_of(self.folded(world, topic), world).values()
        for ledger, held in sorted(world.ledgers.items()):
            for entry, row in enumerate(held.rows):
                times = named.count((ledger, entry))
                if times != 1 and (times or ledger not in self._scope.tasks):
                    raise Broken("T7", f"row {row} was acknowledged and is there {times} times")
        rows = [world.ledgers[ledger].rows[entry] for ledger, entry in named]
        if len(set(rows)) != len(rows):
            raise Broken("T7", f"a row is there twice: {rows}")

    # -- steps, notes, ends ------------------------------------------------------------------

    def _judge_step(self, before: World, after: World) -> None:
        """T3: an offset has its row for ever; what is committed stays committed."""
        self._count("T3")
        for topic in self._scope.topics:
            was, now = self.folded(before, topic), self.folded(after, topic)
            if now.next < was.next:
                raise Broken("T1", f"the log went back from {was.next} to {now.next}")
            rows = content_of(now, after)
            for place, row in content_of(was, before).items():
                if place in rows and rows[place] != row:
                    raise Broken("T3", f"offset {place} was {row} and is {rows[place]}")
                if place not in rows and place[1] >= now.partitions[place[0]].start_offset:
                    raise Broken("T3", f"offset {place} was {row} and is gone")
            old, new = _checkpoint(before, topic), _checkpoint(after, topic)
            if new < old:
                raise Broken("T1", f"the checkpoint went back from {old} to {new}")

    def _judge_note(self, world: World, who: str, note: Note) -> None:
        kind, *facts = note
        if kind == "committed":
            self._judge_success(world, *facts)
        elif kind == "read":
            self._judge_read(world, who, *facts)
        elif kind == "read together":
            self._judge_together(world, facts[0])

    def _judge_success(
        self,
        world: World,
        outcome: str,
        run: str,
        version: int,
        intent: str,
        numbers: tuple[tuple[str, int], ...],
    ) -> None:
        """T2: success means that this run's rows are there, a no-op that an earlier run's are."""
        self._count("T2")
        for topic, number in numbers:
            made = dict(commits_of(world, topic)).get(number)
            if made is None or made.version != version:
                raise Broken("T2", f"{run} was told that version {version} is there; it is not")
            if made.run_id == run:
                continue
            if outcome == CommitKind.COMMITTED.value:
                raise Broken("T2", f"{run} was told of success, but {made.run_id} committed")
            if not self._before_intent(world, topic, number, intent):
                raise Broken("T2", f"{run} was told that version {version} is there; it came later")
        if not numbers and outcome == CommitKind.COMMITTED.value:
            raise Broken("T2", f"{run} was told of success, and nothing is there")

    def _before_intent(self, world: World, topic: str, number: int, intent: str) -> bool:
        keys = [event[:3] if event[0] == "commit" else event for event in world.history]
        return keys.index(("commit", topic, number)) < keys.index(("intent", intent))

    def _judge_read(
        self, world: World, who: str, topic: str, least: int, next_: int, rows: Any
    ) -> None:
        """T5: a reader returns what was committed, and nothing older than when it began."""
        self._count("T5")
        ghost = self.ghost(world, topic, next_)
        if next_ < least:
            raise Broken("T5", f"{who} read up to commit {next_}, {least} were there when it began")
        if dict(rows) != content_of(ghost, world):
            raise Broken("T5", f"{who} read {rows} up to commit {next_}")

    def _judge_together(self, world: World, nexts: tuple[tuple[str, int], ...]) -> None:
        """T9: of a commit over several topics a reader of them sees all or nothing."""
        self._count("T9")
        seen = {
            topic: {commit.commit_id for number, commit in commits_of(world, topic) if number < end}
            for topic, end in nexts
        }
        for topic, end in nexts:
            for number, commit in commits_of(world, topic):
                if number < end and any(
                    commit.commit_id not in seen[other] for other in commit.others
                ):
                    raise Broken("T9", f"commit {number} of {topic} was read without its others")

    def _judge_end(self, world: World) -> None:
        """T14: a new process can go on from here."""
        self._count("T14")
        for problem in audit.problems(self._scope, world):
            raise Broken("T14", problem)

    # -- what topics are ---------------------------------------------------------------------

    def folded(self, world: World, topic: str) -> TopicState:
        """By production code, from what there is now. Raises Broken where it cannot be read."""
        key = world.below(paths.topic(topic))
        if key not in self._folded:
            self._folded[key] = self._fold(world, topic)
        found = self._folded[key]
        if isinstance(found, str):
            raise Broken("T1", f"topic {topic} cannot be read: {found}")
        return found

    def _fold(self, world: World, topic: str) -> TopicState | str:
        results: list[TopicState | str] = []

        async def program(process: Process) -> None:
            try:
                results.append(await client_of(process).log(topic).fold(fresh=True))
            except (errors.LedgerError, ValueError) as error:
                results.append(str(error))

        run_alone(world, program)
        return results[0]

    def ghost(self, world: World, topic: str, upto: int | None = None) -> TopicState:
        """By applying every commit that was ever made, or those below `upto`."""
        made = commits_of(world, topic)
        made = made if upto is None else made[:upto]
        key = (topic, tuple(made))
        if key not in self._ghosts:
            self._ghosts[key] = self._applied(world, topic, made)
        return self._ghosts[key]

    def _applied(self, world: World, topic: str, made: list[tuple[int, Commit]]) -> TopicState:
        record = records.decode_topic(self._scope.world.nodes[paths.topic(topic)].value)
        ghost = state.empty(topic, record.partitions)
        for number, commit in made:
            if number != ghost.next:
                raise Broken("T1", f"number {number} was given, the next is {ghost.next}")
            try:
                ghost = state.apply(ghost, number, commit, 0)
            except errors.LedgerError as error:
                raise Broken("T1", f"commit {number} cannot be carried out: {error}") from error
        return ghost

    def _told(self, judge: Callable[[], None]) -> str:
        try:
            judge()
        except Broken as broken:
            return str(broken)
        return ""

    def _count(self, *names: str) -> None:
        for name in names:
            self.judged[name] = self.judged.get(name, 0) + 1


def _checkpoint(world: World, topic: str) -> int:
    node = world.nodes.get(paths.topic_checkpoint(topic))
    return 0 if node is None else checkpoint.decode_record(node.value).next


def _summary(folded: TopicState, world: World) -> str:
    return f"{folded.next} commits, {_rows(content_of(folded, world))}"


def _rows(content: Mapping[tuple[int, int], Row]) -> str:
    return ", ".join(_each(content))


def _each(content: Mapping[tuple[int, int], Row]) -> Iterator[str]:
    for (partition, offset), (ledger, entry) in sorted(content.items()):
        yield f"{partition}/{offset} = entry {entry} of {ledger}"
