"""Checkpoints of queries that write go back: what a batch's rows are follows from its plan.

Spark notes a planned batch before its tasks run, so a replay has the same rows. A checkpoint that
was restored, or lost its newest files, has forgotten its newest plans: the numbers come again, with
other rows. Always true: a plan has a number of its own and its rows follow from that, so two plans
never have the same rows, unless both have none; who is told that a batch is done finds the rows of
its plan in the topic (T1). A user who is refused puts the newest checkpoint back, or appends.
"""

from dataclasses import dataclass, field
from random import Random

import pyarrow as pa

from spark_ledger import errors
from spark_ledger.topic.client import TopicClient
from spark_ledger.topic.commit import replay
from spark_ledger.topic.commit.fingerprint import Fingerprint
from spark_ledger.topic.commit.replay import OnReplay, QueryBatch, TaskWork
from spark_ledger.topic.log.intents import Intent
from tests.simulation.world import World

SHARE = 0.4
"""Of the runs begin with a checkpoint that went back."""
REWINDS_MAX = 3
BACK_MAX = 3
APPENDS = 0.4

Refused = errors.CheckpointBehind | errors.ReplayDiffers


@dataclass
class PlannedBatch:
    """A batch as its query's offset log has it: all that is drawn of it is drawn from `seed`."""

    number: int
    seed: str
    on_replay: OnReplay
    counted: Fingerprint = field(default_factory=Fingerprint)
    work: TaskWork = TaskWork.WRITE

    @property
    def batch(self) -> QueryBatch:
        return QueryBatch(self.counted.content, self.on_replay)

    @property
    def content(self) -> str:
        """What is committed of it. Its number is there for plans without rows, whose fingerprints
        are equal."""
        return f"{self.counted.content.fingerprint} of plan {self.number}"

    def rng(self, *of: object) -> Random:
        return Random(":".join(map(str, (self.seed, *of))))

    def count(self, topic: str, index: int, rows: int) -> None:
        """Rows that a task was given; the same whoever counts them."""
        told = [f"{self.number}:{topic}:{index}:{row}" for row in range(rows)]
        self.counted.add(pa.record_batch([pa.array(told, pa.string())], ["row"]))


class Checkpoints:
    """Of the queries that write, in a run with rewinds."""

    def __init__(self, world: World, on: bool, next_version: dict[str, int]) -> None:
        self.on = on
        self._world = world
        self._rng = world.loop.random_for("topic replays")
        self._next_version = next_version
        self.plans: dict[tuple[str, int], int] = {}
        self.numbers = 0
        self._rewinds: dict[str, int] = {}
        self._on_replay: dict[str, OnReplay] = {}

    def restored(self, query: str) -> None:
        """A run begins; its checkpoint may be an older one."""
        if not self.on or self._rng.random() >= SHARE:
            return
        done = self._next_version[query]
        back = min(done, self._rng.randint(1, BACK_MAX))
        if not back or self._rewinds.get(query, 0) >= REWINDS_MAX:
            return
        self._rewinds[query] = self._rewinds.get(query, 0) + 1
        self._world.ghost.meet("checkpoint goes back")
        self._world.trace.note(query, f"its checkpoint goes back by {back} of {done} batches")
        self._next_version[query] = done - back
        for key in [key for key in self.plans if key[0] == query and key[1] >= done - back]:
            del self.plans[key]

    def planned(self, query: str, version: int, *, overwrites: bool) -> PlannedBatch | None:
        """As the offset log has it, or planned now; None in a run whose checkpoints stay."""
        if not self.on:
            return None
        if (query, version) not in self.plans:
            self.numbers += 1
            self.plans[query, version] = self.numbers
        number = self.plans[query, version]
        usual = OnReplay.REPLACE if overwrites else OnReplay.FAIL
        on_replay = self._on_replay.get(query, usual)
        return PlannedBatch(number, f"{query}:{number}:{self._world.loop.seed}", on_replay)

    async def look(
        self, topics: TopicClient, intent: Intent, planned: PlannedBatch, version: int
    ) -> None:
        """What its tasks do, as each of them finds out. Raises errors.CheckpointBehind."""
        if version <= intent.record.w0:
            record = await topics.intents.txn_record(intent)
            query, on_replay = intent.app_id, planned.on_replay
            planned.work = replay.task_work(record, query, version, on_replay)
            self._world.ghost.meet(f"replay: tasks {planned.work.name.lower()}")

    def done(self, query: str) -> None:
        """Its batch was told to be committed."""
        if self._on_replay.pop(query, None) is not None:
            self._world.ghost.meet("batch planned anew appended")

    def refused(self, query: str, error: Refused) -> None:
        """What the user does about it."""
        self._world.ghost.meet(f"refused: {type(error).__name__}")
        if self._rng.random() < APPENDS:
            self._on_replay[query] = OnReplay.APPEND
            return
        recorded = error.facts["recorded_version"]
        assert isinstance(recorded, int)
        self._next_version[query] = recorded + 1  # as the newest checkpoint has it
