"""The main job: replay, two readers, faults in between, checks at the end.

One loop takes the events of the Spark processes in turn, and acts on each event. Always true: every
fault happens once, in the order of PLAN, and only after its share of the rows has been replayed;
the replay is killed only while a batch is under way in its checkpoint. The log keeps about the last
128 commit records; the loop reads the log often enough (LOOK_EVERY), and keeps all records that it
has read.
"""

import queue
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from spark_ledger.local import LocalBookie, LocalCluster
from spark_ledger.metadata.ledger_record import RecordState
from spark_ledger.topic.blocking import BlockingTopics, topics
from spark_ledger.topic.log.records import Commit
from spark_ledger.topic.log.segments import INLINE
from spark_ledger_demo import flights
from spark_ledger_demo.flights import FlightCheck
from spark_ledger_demo.worker import DemoWorker, WorkerFailed


class DemoFault(Enum):
    KILL_BOOKIE = "kill a bookie"
    KILL_REPLAY = "kill the replay in mid-batch"
    START_BOOKIE = "start the bookie again"


PLAN = ((0.25, DemoFault.KILL_BOOKIE), (0.5, DemoFault.KILL_REPLAY), (0.7, DemoFault.START_BOOKIE))


class Faults:
    def __init__(self) -> None:
        self._left = list(PLAN)

    @property
    def left(self) -> list[DemoFault]:
        return [fault for _share, fault in self._left]

    def due(self, share_replayed: float) -> DemoFault | None:
        """The next fault, if its share is reached; `done` takes the fault off the list."""
        if self._left and share_replayed >= self._left[0][0]:
            return self._left[0][1]
        return None

    def done(self, fault: DemoFault) -> None:
        assert self._left and self._left[0][1] is fault, f"{fault} is not the next fault"
        self._left.pop(0)


def batch_under_way(checkpoint: Path) -> int | None:
    """The batch that has begun and not ended, by the checkpoint; None without such a batch.

    Spark writes offsets/N before it runs batch N, and commits/N after batch N.
    """
    planned = _numbers(checkpoint / "offsets")
    ended = _numbers(checkpoint / "commits")
    last = max(planned, default=-1)
    return last if last > max(ended, default=-1) else None


def _numbers(folder: Path) -> list[int]:
    if not folder.is_dir():
        return []
    return [int(path.name) for path in folder.iterdir() if path.name.isdigit()]


LOOK_EVERY = 32
"""How many commits may come between two reads of the log."""


@dataclass(frozen=True)
class LedgerFact:
    ledger_id: int
    ensemble: tuple[str, ...]
    """The bookies of the ledger's last fragment."""
    fragments: int
    is_open: bool
    """Whether a task may still write to the ledger."""


class TopicHistory:
    def __init__(self, service_url: str) -> None:
        self._topics: BlockingTopics = topics(service_url)
        self._seen: dict[str, dict[int, Commit]] = {}

    def commits(self, topic: str) -> list[Commit]:
        """The commit records of a topic, in log order: records in the log, and records that were
        read before."""
        seen = self._seen.setdefault(topic, {})
        seen.update(self._topics.run(self._commits(topic)))
        return [seen[number] for number in sorted(seen)]

    def versions(self, topic: str, app_id: str) -> list[int]:
        """The batch ids that a query committed, in log order: no number may come twice."""
        return [commit.version for commit in self.commits(topic) if commit.app_id == app_id]

    def ledgers(self, topic: str) -> list[LedgerFact]:
        """The ledgers that hold a topic's committed segments, oldest first; rows inside commits
        have no ledger."""
        ids = self._topics.run(self._ledger_ids(topic))
        return [self._topics.run(self._ledger(ledger_id)) for ledger_id in ids]

    async def _commits(self, topic: str) -> dict[int, Commit]:
        client = self._topics.client
        log = client.log((await client.topics.open(topic)).id)
        await log.fold(fresh=True)
        return {number: commit async for number, _, commit in log.commits()}

    async def _ledger_ids(self, topic: str) -> list[int]:
        """The ids of the topic's ledgers, each placed by the newest commit with rows in the
        ledger."""
        client = self._topics.client
        state = await client.log((await client.topics.open(topic)).id).fold(fresh=True)
        ranges = {held.number: (held.start_offset, held.end_offset) for held in state.partitions}
        state, read = await client.state_with_tables(state, ranges)
        newest: dict[int, int] = {}
        for held in state.partitions:
            for stretch in held.stretches(held.start_offset, held.end_offset, read):
                for placed in stretch.table:
                    ledger_id = placed.segment.ledger_id
                    newest[ledger_id] = max(placed.commit, newest.get(ledger_id, placed.commit))
        newest.pop(INLINE, None)
        return sorted(newest, key=lambda ledger_id: (newest[ledger_id], ledger_id))

    async def _ledger(self, ledger_id: int) -> LedgerFact:
        record = (await self._topics.client.ledgers.record(ledger_id, fresh=True)).record
        is_open = record.state is RecordState.OPEN
        last = record.fragments[-1].ensemble
        return LedgerFact(ledger_id, last, len(record.fragments), is_open)


PARTITIONS = 4
SILENCE_S_MAX = 120  # after this time without an event, a Spark process hangs
REPLAY, BY_HOUR, LATE = "replay", "delays by hour", "late flights"  # names of the queries
Event = dict[str, Any]


class Display:
    """The output on the terminal: moving bars, lines with their time, a table of checks."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._started = time.monotonic()
        self._bars: dict[str, TaskID] = {}
        self._progress = Progress(
            TextColumn("{task.description:>28}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    def say(self, text: str) -> None:
        self.console.print(
            f"[dim]{self.elapsed_s:6.1f} s[/]  {text}", highlight=False, soft_wrap=True
        )

    @contextmanager
    def bars(self, *names: str, total: int) -> Iterator[None]:
        self._bars = {name: self._progress.add_task(name, total=total) for name in names}
        with self._progress:
            yield

    def move(self, name: str, rows: int) -> None:
        self._progress.update(self._bars[name], completed=rows)

    def checks(self, checks: list[FlightCheck]) -> None:
        table = Table("check, against the csv itself", "found", "", box=None, pad_edge=False)
        for check in checks:
            verdict = "[green]passed[/]" if check.passed else "[red]FAILED[/]"
            table.add_row(check.what, check.detail, verdict)
        self.console.print(table, highlight=False)


class MainJob:
    def __init__(
        self, cluster: LocalCluster, display: Display, output: Path, rows: int | None
    ) -> None:
        self._cluster = cluster
        self._display = display
        self._output = output
        self._rows = rows
        self._scratch = cluster.data_dir / "demo"
        self._events: queue.Queue[tuple[DemoWorker, Event]] = queue.Queue()
        self._workers: dict[str, DemoWorker] = {}
        self._audit = TopicHistory(cluster.service_url)
        self._faults = Faults()
        self._victim: LocalBookie | None = None
        self._killed_batch: int | None = None
        self._opened = 0
        self._query_id = ""
        self._total = 0
        self._schema = ""
        self._batches: dict[str, dict[int, Event]] = {REPLAY: {}, BY_HOUR: {}, LATE: {}}
        self._checks: list[FlightCheck] = []
        self._read: Event = {}

    def run(self) -> bool:
        """Run the job; returns whether every check passed."""
        self._start("readers")
        self._prepare()
        self._start("replay")
        with self._display.bars(REPLAY, BY_HOUR, LATE, total=self._total):
            self._until_done("replay")
            self._display.say("the replay is complete")
            self._start("check")
            self._workers["readers"].tell("finish")
            self._until_done("readers")
        self._display.say("both readers have read to the end; checking against the csv")
        self._workers["check"].tell("check")
        self._until_done("check")
        return self._report()

    def stop(self) -> None:
        """End every Spark process at once, and delete their temporary files."""
        for worker in self._workers.values():
            worker.kill()
        shutil.rmtree(self._scratch, ignore_errors=True)

    # -- the Spark processes --------------------------------------------------------------------

    def _prepare(self) -> None:
        csv = flights.read_flights(self._rows)
        files = flights.write_replay_files(csv, self._scratch / "files")
        self._total = csv.num_rows
        self._schema = flights.spark_schema(csv)
        self._display.say(f"{self._total:,} flights of 2013 in {len(files)} files, in time order")

    def _start(self, name: str) -> None:
        scratch = self._scratch / name
        scratch.mkdir(parents=True, exist_ok=True)
        settings = {
            "name": name,
            "service_url": self._cluster.service_url,
            "rows": self._rows,
            "schema": self._schema,
            "partitions": PARTITIONS,
            "scratch": str(scratch),
            "files": str(self._scratch / "files"),
            "checkpoints": str(self._scratch / "checkpoints"),
            "output": str(self._output),
            "table": str(self._output / "flights_by_hour"),
        }
        log = self._output / "logs" / f"{name}.log"
        self._workers[name] = DemoWorker(
            name, "spark_ledger_demo.session", settings, log, self._events
        )

    # -- events ---------------------------------------------------------------------------------

    def _until_done(self, name: str) -> None:
        """Take events until the worker of this name reports `done`, and wait for its end."""
        while True:
            try:
                worker, event = self._events.get(timeout=SILENCE_S_MAX)
            except queue.Empty:
                silence = f"no Spark process reported an event for {SILENCE_S_MAX} s"
                raise WorkerFailed(f"{silence}; logs: {self._output / 'logs'}") from None
            if worker is not self._workers[worker.name]:
                continue  # a late event of a worker that was killed
            self._take(worker, event)
            if worker.name == name and event["event"] == "done":
                worker.wait()
                return

    def _take(self, worker: DemoWorker, event: Event) -> None:
        match event["event"]:
            case "started":
                self._query_id = event["query_id"]
                self._display.say(f"replay: query {self._query_id}, run {event['run_id']}")
            case "batch":
                self._batch(event)
            case "tasks":
                self._tasks_run()
            case "check":
                self._checks.append(FlightCheck(event["what"], event["passed"], event["detail"]))
            case "read":
                self._read = event
            case "saved":
                self._display.say(f"{event['what']}: {event['path']}")
            case "end" if not worker.finished:
                raise WorkerFailed(f"{worker.name} ended by itself; its log: {worker.log}")

    def _batch(self, event: Event) -> None:
        query = event["query"]
        is_first = not self._batches[REPLAY]
        self._batches[query][event["batch"]] = event
        self._display.move(query, self._rows_of(query))
        if query != REPLAY:
            return
        if is_first:
            self._workers["readers"].tell("read")  # the topic exists after its first write
        if len(self._batches[REPLAY]) % LOOK_EVERY == 0:
            self._audit.commits("flights")
        match self._faults.due(self._replayed):
            case DemoFault.KILL_BOOKIE:
                self._kill_bookie()
            case DemoFault.KILL_REPLAY:
                self._workers["replay"].tell("watch")
            case DemoFault.START_BOOKIE:
                self._start_bookie()

    def _tasks_run(self) -> None:
        if self._faults.due(self._replayed) is DemoFault.KILL_REPLAY:
            self._kill_replay()

    def _rows_of(self, query: str) -> int:
        return sum(batch["rows"] for batch in self._batches[query].values())

    @property
    def _replayed(self) -> float:
        """The share of all flights that are replayed."""
        return self._rows_of(REPLAY) / self._total

    # -- faults ---------------------------------------------------------------------------------

    def _kill_bookie(self) -> None:
        """Kill the bookie with the most open ledgers, so that tasks meet the failure; if no ledger
        is open now, try again at the next batch."""
        members = [ledger.ensemble for ledger in self._audit.ledgers("flights") if ledger.is_open]
        if not members:
            return
        counts = [sum(b.id in ensemble for ensemble in members) for b in self._cluster.bookies]
        self._victim = self._cluster.bookies[counts.index(max(counts))]
        self._victim.kill()
        self._display.say(f"[yellow]killed[/] bookie {self._victim.id} (SIGKILL)")
        self._faults.done(DemoFault.KILL_BOOKIE)

    def _start_bookie(self) -> None:
        assert self._victim
        self._fragments_opened()
        self._victim.start()
        self._display.say(f"started bookie {self._victim.id} again")
        self._faults.done(DemoFault.START_BOOKIE)

    def _fragments_opened(self) -> int:
        """The number of fragments that the failure has opened. The largest number so far counts, as
        a merge may remove such ledgers later."""
        opened = sum(ledger.fragments - 1 for ledger in self._audit.ledgers("flights"))
        self._opened = max(self._opened, opened)
        return self._opened

    def _kill_replay(self) -> None:
        """Kill the replay if the batch of its tasks is still under way; the process is stopped
        during this check."""
        replay = self._workers["replay"]
        replay.hold()
        batch = batch_under_way(self._scratch / "checkpoints" / "replay")
        if batch is None:
            return replay.go_on()
        replay.kill()
        committed = self._audit.versions("flights", self._query_id).count(batch)
        progress = "already" if committed else "not yet"
        self._display.say(
            f"[yellow]killed[/] the replay (SIGKILL, JVM included) while tasks of batch "
            f"{batch} ran; the batch was {progress} in the topic's log"
        )
        self._killed_batch = batch
        self._faults.done(DemoFault.KILL_REPLAY)
        return self._start("replay")

    # -- the end --------------------------------------------------------------------------------

    def _report(self) -> bool:
        checks = [*self._checks, *self._own_checks()]
        self._display.checks(checks)
        self._say_rates()
        return all(check.passed for check in checks)

    def _own_checks(self) -> list[FlightCheck]:
        versions = self._audit.versions("flights", self._query_id)
        dropped = sum(batch["dropped"] for batch in self._batches[BY_HOUR].values())
        in_sequence = versions == sorted(versions)
        left = ", ".join(fault.value for fault in self._faults.left)
        opened = self._fragments_opened()
        return [
            FlightCheck("every fault happened", not left, f"not: {left}" if left else "all three"),
            FlightCheck(
                "the killed bookie was replaced", opened > 0, f"fragments opened: {opened}"
            ),
            flights.committed_once(self._killed_batch, versions),
            FlightCheck("replay: commits in sequence", in_sequence, f"{len(versions)} commits"),
            FlightCheck("watermark dropped no row", not dropped, f"{dropped} dropped"),
        ]

    def _say_rates(self) -> None:
        batches = self._batches[REPLAY].values()
        rows, seconds = self._rows_of(REPLAY), sum(batch["seconds"] for batch in batches)
        megabytes = self._read["bytes"] / 1e6
        ledgers = [*self._audit.ledgers("flights"), *self._audit.ledgers("late-flights")]
        self._display.say(
            f"in:  {rows:,} rows, {megabytes:.1f} MB (three copies of each), "
            f"{rows / seconds:,.0f} rows/s in {len(batches)} micro-batches"
        )
        self._display.say(
            f"out: {self._read['rows']:,} rows, {self._read['rows'] / self._read['seconds']:,.0f} "
            f"rows/s in one batch read"
        )
        self._display.say(
            f"fragments opened by the failure: {self._opened}; ledgers at the end: {len(ledgers)}"
        )
