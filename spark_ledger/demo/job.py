"""The main job: replay, two readers, faults in between, checks at the end.

One loop takes the events of the Spark processes in turn; everything else follows from them.
"""

import queue
import shutil
from pathlib import Path
from typing import Any

from spark_ledger.demo import compare, flights
from spark_ledger.demo.audit import LOOK_EVERY, Audit
from spark_ledger.demo.compare import Check
from spark_ledger.demo.display import Display
from spark_ledger.demo.faults import Fault, Faults, batch_under_way
from spark_ledger.demo.worker import Worker, WorkerFailed
from spark_ledger.local import LocalBookie, LocalCluster

PARTITIONS = 4
SILENCE_S_MAX = 120  # no event for so long means that a Spark process hangs
REPLAY, BY_HOUR, LATE = "replay", "delays by hour", "late flights"  # names of the queries
Event = dict[str, Any]


class MainJob:
    def __init__(
        self, cluster: LocalCluster, display: Display, output: Path, rows: int | None
    ) -> None:
        self._cluster = cluster
        self._display = display
        self._output = output
        self._rows = rows
        self._scratch = cluster.data_dir / "demo"
        self._events: queue.Queue[tuple[Worker, Event]] = queue.Queue()
        self._workers: dict[str, Worker] = {}
        self._audit = Audit(cluster.service_url)
        self._faults = Faults()
        self._victim: LocalBookie | None = None
        self._killed_batch: int | None = None
        self._query_id = ""
        self._total = 0
        self._schema = ""
        self._batches: dict[str, dict[int, Event]] = {REPLAY: {}, BY_HOUR: {}, LATE: {}}
        self._checks: list[Check] = []
        self._read: Event = {}

    def run(self) -> bool:
        """True if every check passed."""
        self._start("readers", "spark_ledger.demo.readers", self._reader_settings())
        self._prepare()
        self._start_replay()
        with self._display.bars(REPLAY, BY_HOUR, LATE, total=self._total):
            self._until_done("replay")
            self._display.say("the replay is complete")
            self._start("check", "spark_ledger.demo.check", self._check_settings())
            self._workers["readers"].tell("finish")
            self._until_done("readers")
        self._display.say("both readers have read to the end; checking against the csv")
        self._workers["check"].tell("check")
        self._until_done("check")
        return self._report()

    def stop(self) -> None:
        """Ends every Spark process, at once, and deletes what they kept for themselves."""
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

    def _start(self, name: str, module: str, settings: Event) -> None:
        scratch = self._scratch / name
        scratch.mkdir(parents=True, exist_ok=True)
        told = {"service_url": self._cluster.service_url, "scratch": str(scratch), **settings}
        log = self._output / "logs" / f"{name}.log"
        self._workers[name] = Worker(name, module, told, log, self._events)

    def _start_replay(self) -> None:
        self._start(
            "replay",
            "spark_ledger.demo.replay",
            {
                "files": str(self._scratch / "files"),
                "schema": self._schema,
                "partitions": PARTITIONS,
                "checkpoint": str(self._checkpoint),
            },
        )

    def _reader_settings(self) -> Event:
        return {
            "checkpoints": str(self._scratch / "checkpoints"),
            "table": str(self._output / "flights_by_hour"),
            "partitions": PARTITIONS,
        }

    def _check_settings(self) -> Event:
        table = self._output / "flights_by_hour"
        return {"rows": self._rows, "table": str(table), "output": str(self._output)}

    @property
    def _checkpoint(self) -> Path:
        return self._scratch / "checkpoints" / "replay"

    # -- events ---------------------------------------------------------------------------------

    def _until_done(self, name: str) -> None:
        """Takes events until that worker says it is done, and sees it out."""
        while True:
            try:
                worker, event = self._events.get(timeout=SILENCE_S_MAX)
            except queue.Empty:
                said = f"no Spark process said anything for {SILENCE_S_MAX} s"
                raise WorkerFailed(f"{said}; logs: {self._output / 'logs'}") from None
            if worker is not self._workers[worker.name]:
                continue  # the last words of one that was killed
            self._take(worker, event)
            if worker.name == name and event["event"] == "done":
                worker.wait()
                return

    def _take(self, worker: Worker, event: Event) -> None:
        match event["event"]:
            case "started":
                self._query_id = event["query_id"]
                self._display.say(f"replay: query {self._query_id}, run {event['run_id']}")
            case "batch":
                self._batch(event)
            case "tasks":
                self._tasks_run()
            case "check":
                self._checks.append(Check(event["what"], event["passed"], event["detail"]))
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
            self._workers["readers"].tell("read")  # the first write has made the topic
        if len(self._batches[REPLAY]) % LOOK_EVERY == 0:
            self._audit.commits("flights")
        match self._faults.due(self._replayed):
            case Fault.KILL_BOOKIE:
                self._kill_bookie()
            case Fault.KILL_REPLAY:
                self._workers["replay"].tell("watch")
            case Fault.START_BOOKIE:
                self._start_bookie()

    def _tasks_run(self) -> None:
        if self._faults.due(self._replayed) is Fault.KILL_REPLAY:
            self._kill_replay()

    def _rows_of(self, query: str) -> int:
        return sum(batch["rows"] for batch in self._batches[query].values())

    @property
    def _replayed(self) -> float:
        """The share of all flights."""
        return self._rows_of(REPLAY) / self._total

    # -- faults ---------------------------------------------------------------------------------

    def _kill_bookie(self) -> None:
        """One that the topic's newest ledger is written to, so that the failure is felt."""
        ensemble = self._audit.ledgers("flights")[-1].ensemble
        self._victim = next(b for b in self._cluster.bookies if b.id in ensemble)
        self._victim.kill()
        self._display.say(f"[yellow]killed[/] bookie {self._victim.id} (SIGKILL)")
        self._faults.done(Fault.KILL_BOOKIE)

    def _start_bookie(self) -> None:
        assert self._victim
        self._victim.start()
        self._display.say(f"started bookie {self._victim.id} again")
        self._faults.done(Fault.START_BOOKIE)

    def _kill_replay(self) -> None:
        """Only if the batch of the tasks is still under way: the replay is held while we look."""
        replay = self._workers["replay"]
        replay.hold()
        batch = batch_under_way(self._checkpoint)
        if batch is None:
            return replay.go_on()
        replay.kill()
        known = self._audit.versions("flights", self._query_id).count(batch)
        where = "already" if known else "not yet"
        self._display.say(
            f"[yellow]killed[/] the replay (SIGKILL, JVM included) while tasks of batch "
            f"{batch} ran; the batch was {where} in the topic's log"
        )
        self._killed_batch = batch
        self._faults.done(Fault.KILL_REPLAY)
        return self._start_replay()

    # -- the end --------------------------------------------------------------------------------

    def _report(self) -> bool:
        checks = [*self._checks, *self._own_checks()]
        self._display.checks(checks)
        self._say_rates()
        return all(check.passed for check in checks)

    def _own_checks(self) -> list[Check]:
        versions = self._audit.versions("flights", self._query_id)
        dropped = sum(batch["dropped"] for batch in self._batches[BY_HOUR].values())
        in_sequence = versions == sorted(versions)
        left = ", ".join(fault.value for fault in self._faults.left)
        return [
            Check("every fault happened", not left, f"not: {left}" if left else "all three"),
            compare.committed_once(self._killed_batch, versions),
            Check("replay: commits in sequence", in_sequence, f"{len(versions)} commits"),
            Check("watermark dropped no row", not dropped, f"{dropped} dropped"),
        ]

    def _say_rates(self) -> None:
        batches = self._batches[REPLAY].values()
        rows, seconds = self._rows_of(REPLAY), sum(batch["seconds"] for batch in batches)
        megabytes = self._read["bytes"] / 1e6
        ledgers = [*self._audit.ledgers("flights"), *self._audit.ledgers("late-flights")]
        opened = sum(ledger.fragments - 1 for ledger in ledgers)
        self._display.say(
            f"in:  {rows:,} rows, {megabytes:.1f} MB (three copies of each), "
            f"{rows / seconds:,.0f} rows/s in {len(batches)} micro-batches"
        )
        self._display.say(
            f"out: {self._read['rows']:,} rows, {self._read['rows'] / self._read['seconds']:,.0f} "
            f"rows/s in one batch read"
        )
        self._display.say(f"{opened} fragments opened by the failure, in {len(ledgers)} ledgers")
