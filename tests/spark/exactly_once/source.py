"""format("steps"): a streaming source whose rows follow from files alone, and which waits at files.

A folder of steps holds 0.json, 1.json, ... ({"tasks", "rows", "bytes", "keys"}); a step is a
micro-batch of so many tasks, each with so many rows of so many keys. Row r of task t of step s is
always the same value, of so many bytes, and says where it belongs. Only its key, and with it its
partition, is another one in a task's later attempts.

A folder of gates makes it wait: it touches `<point>.reached` and goes on when the file `<point>` is
gone. Points are `plan-<step>` and `<start|half|end>-<step>-<task>-<attempt>`; a file
`fail-<step>-<task>-<attempt>` fails that attempt at its half. An attempt leaves
`ran-<step>-<task>-<attempt>` where it began.
"""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

KEYS_MAX = 7
POLL_S = 0.01
COLUMNS = pa.schema([("key", pa.string()), ("value", pa.string())])
ROW_AT = len("00000:000:")
ROW_BYTES = len("000000")
PLACE_BYTES = ROW_AT + ROW_BYTES


@dataclass(frozen=True, slots=True)
class Step:
    """What a micro-batch holds."""

    number: int
    tasks: int
    rows: int
    bytes: int
    keys: int = KEYS_MAX

    def place(self, task: int, row: int) -> str:
        """Where a row belongs; values sort as they were written."""
        return f"{self.number:05d}:{task:03d}:{row:06d}"

    def write(self, folder: Path) -> None:
        """There whole or not at all."""
        fields = {n: getattr(self, n) for n in ("tasks", "rows", "bytes", "keys")}
        part = folder / f".{self.number}.part"
        part.write_text(json.dumps(fields))
        part.rename(folder / f"{self.number}.json")

    def places(self) -> list[str]:
        return [self.place(task, row) for task in range(self.tasks) for row in range(self.rows)]


def read_step(folder: Path, number: int) -> Step:
    return Step(number, **json.loads((folder / f"{number}.json").read_text()))


class Gates:
    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def wait_at(self, point: str) -> None:
        gate = self._folder / point
        if gate.exists():
            (self._folder / f"{point}.reached").touch()
        while gate.exists():
            time.sleep(POLL_S)

    def note(self, what: str) -> None:
        (self._folder / what).touch()

    def told_to(self, what: str) -> bool:
        return (self._folder / what).exists()


class StepsSource(DataSource):
    """Options: `steps` and `gates`, the two folders."""

    @classmethod
    def name(cls) -> str:
        return "steps"

    def schema(self) -> str:
        return "key STRING, value STRING"

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        return StepsReader(self.options["steps"], self.options["gates"])


class StepsReader(DataSourceStreamReader):
    """Offsets count steps."""

    def __init__(self, steps: str, gates: str) -> None:
        self._steps = Path(steps)
        self._gates = Gates(gates)
        self._there = 0

    def initialOffset(self) -> dict[str, int]:
        return {"steps": 0}

    def latestOffset(self, start: dict[str, int], limit: Any) -> dict[str, int]:
        while (self._steps / f"{self._there}.json").exists():
            self._there += 1
        return {"steps": max(start["steps"], self._there)}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        steps = [read_step(self._steps, number) for number in range(start["steps"], end["steps"])]
        for step in steps:
            self._gates.wait_at(f"plan-{step.number}")
        return [InputPartition((step, task)) for step in steps for task in range(step.tasks)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        step, task = partition.value
        context = TaskContext.get()
        assert context is not None
        attempt = context.attemptNumber()
        at = f"{step.number}-{task}-{attempt}"
        self._gates.note(f"ran-{at}")
        self._gates.wait_at(f"start-{at}")
        yield _rows(step, task, attempt, 0, step.rows // 2)
        self._gates.wait_at(f"half-{at}")
        if self._gates.told_to(f"fail-{at}"):
            raise RuntimeError(
                f"attempt {attempt} of task {task} of step {step.number} was to fail"
            )
        yield _rows(step, task, attempt, step.rows // 2, step.rows)
        self._gates.wait_at(f"end-{at}")


def _rows(step: Step, task: int, attempt: int, first: int, last: int) -> pa.RecordBatch:
    numbers = range(first, last)
    keys = [f"k{(row % step.keys + attempt) % KEYS_MAX}" for row in numbers]
    values = [step.place(task, row).ljust(step.bytes, "x") for row in numbers]
    return pa.record_batch([pa.array(keys), pa.array(values)], schema=COLUMNS)
