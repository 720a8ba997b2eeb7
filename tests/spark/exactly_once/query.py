"""A query as the world sees it: its folders. Which steps it was fed, which Spark has noted as done,
at which gates it waits."""

import contextlib
import json
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tests.spark.exactly_once.source import Step, read_step

SMALL = {"rows": 60, "bytes": 100}
BIG = {"rows": 400, "bytes": 6_000, "keys": 1}  # at its half a task has sent entries
ROWS_DRAWN = 20


class Query:
    """It writes to `topic`; or, with `several`, each of its rows names one of that many."""

    def __init__(
        self,
        folder: Path,
        topic: str,
        rng: random.Random,
        checkpoint: Path | None = None,
        *,
        several: int = 0,
    ) -> None:
        self.name = folder.name
        self.topic = topic
        self.several = several
        self.topics = tuple(f"{topic}-{i}" for i in range(several)) or (topic,)
        self.checkpoint = checkpoint or folder / "checkpoint"
        self.steps = folder / "steps"
        self.gates = folder / "gates"
        self.failing = folder / "commit.failing"
        self._folder = folder
        self._rng = rng
        for made in (self.steps, self.gates):
            made.mkdir(parents=True, exist_ok=True)

    def beside(self, name: str) -> "Query":
        """The same steps until now, on the very same checkpoint and topic."""
        return self._another(name, self.checkpoint)

    def copied(self, name: str) -> "Query":
        """The same steps until now, on a copy of the checkpoint, into the same topic."""
        made = self._another(name, None)
        shutil.copytree(self.checkpoint, made.checkpoint)
        return made

    def _another(self, name: str, checkpoint: Path | None) -> "Query":
        folder = self._folder.with_name(f"{self.name}-{name}")
        shutil.copytree(self.steps, folder / "steps")
        return Query(folder, self.topic, self._rng, checkpoint, several=self.several)

    # -- what it is fed --------------------------------------------------------------------------

    @property
    def next_step(self) -> int:
        return sum(1 for _ in self.steps.glob("[0-9]*.json"))

    def feed(self, big: bool = False, tasks: int = 2) -> int:
        """One more step, which the query may take at once; its number."""
        size = dict(BIG if big else SMALL)
        size["rows"] += self._rng.randrange(ROWS_DRAWN)
        step = Step(self.next_step, tasks, **size)
        step.write(self.steps)
        return step.number

    def refeed(self, number: int, rows: int) -> None:
        """A step gets other rows: nothing has read it yet."""
        replace(read_step(self.steps, number), rows=rows).write(self.steps)

    def fed(self) -> list[Step]:
        return [read_step(self.steps, number) for number in range(self.next_step)]

    @contextlib.contextmanager
    def gate(self, point: str) -> Iterator["Gate"]:
        """The query waits at that point until the end of the block, or until it is opened."""
        gate = Gate(self.gates / point)
        try:
            yield gate
        finally:
            gate.open()

    def ran(self, step: int, task: int, attempt: int) -> bool:
        """Whether there was such an attempt."""
        return (self.gates / f"ran-{step}-{task}-{attempt}").exists()

    # -- its checkpoint --------------------------------------------------------------------------

    @property
    def id(self) -> str:
        """What Spark calls it, in every run."""
        return str(json.loads((self.checkpoint / "metadata").read_text())["id"])

    def save(self, name: str) -> Path:
        """A copy of the checkpoint of a query that stands still; where it is."""
        kept = self._folder / f"checkpoint-{name}-{self.next_step}"
        shutil.copytree(self.checkpoint, kept)
        return kept

    def restore(self, kept: Path) -> None:
        shutil.rmtree(self.checkpoint)
        shutil.copytree(kept, self.checkpoint)

    def steps_done(self) -> int:
        """How many are in batches that Spark has noted as committed."""
        last = self.newest("commits")
        if last < 0:
            return 0
        text = (self.checkpoint / "offsets" / str(last)).read_text()
        return int(json.loads(text.splitlines()[-1])["steps"])

    def newest(self, log: str) -> int:
        """The last number in `offsets` or `commits`; -1: none."""
        found = (path.name for path in (self.checkpoint / log).glob("[0-9]*"))
        return max((int(name) for name in found if name.isdigit()), default=-1)


class Gate:
    def __init__(self, path: Path) -> None:
        self.name = path.name
        self._path = path
        path.touch()

    def reached(self) -> bool:
        return self._path.with_name(f"{self.name}.reached").exists()

    def open(self) -> None:
        self._path.unlink(missing_ok=True)
