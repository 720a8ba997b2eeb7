"""SIGKILL for bookies, the driver and its Python workers, at moments drawn by a printed seed.

    python -m tests.crash.chaos --kills 5 --seed 7

Rows go from files through two topics by two streaming queries while `--kills` processes of each
kind are killed; then every row must be in both topics once, in the same order within a key. What
is killed, and after how long, follows from the seed; what the machine does meanwhile does not.
"""

import argparse
import os
import queue
import random
import secrets
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from spark_ledger.local import LocalBookie, LocalCluster
from spark_ledger_demo.worker import DemoWorker
from tests.crash.procfs import python_workers
from tests.kit.history import History, Place

BOOKIES = 4
KEYS = 7
ROWS_PER_FILE = 400
FILE_EVERY_S = 0.25
PAUSE_S = (0.3, 3.0)
READY_TIMEOUT_S = 240
FINISH_TIMEOUT_S = 240
WORKERS_TRIED = 200
KINDS = ("bookie", "driver", "worker")


class Source:
    """Files of numbered rows, each there whole or not at all."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self.rows = 0
        self._next_at = 0.0

    def add_if_due(self) -> None:
        if time.monotonic() < self._next_at:
            return
        self._next_at = time.monotonic() + FILE_EVERY_S
        rows = range(self.rows, self.rows + ROWS_PER_FILE)
        lines = "".join(f"k{row % KEYS},{row}\n" for row in rows)
        hidden = self._folder / f".{self.rows}.csv"
        hidden.write_text(lines)
        hidden.rename(self._folder / f"{self.rows}.csv")
        self.rows += ROWS_PER_FILE


class Chaos:
    def __init__(self, cluster: LocalCluster, folder: Path, seed: int) -> None:
        self._cluster = cluster
        self._folder = folder
        self._rng = random.Random(seed)
        self._source = Source(folder / "files")
        self._events: queue.Queue[tuple[DemoWorker, dict[str, Any]]] = queue.Queue()
        self._down: LocalBookie | None = None
        self._killed: dict[str, int] = dict.fromkeys(KINDS, 0)
        self._started = time.monotonic()
        for name in ("scratch", "checkpoints", "results"):
            (folder / name).mkdir()

    def run(self, kills: int) -> None:
        """Kills, and then raises AssertionError if a row is lost, doubled or out of order."""
        plan = [kind for kind in KINDS for _ in range(kills)]
        self._rng.shuffle(plan)
        self._driver = self._start_driver()
        try:
            for kind in plan:
                self._pause(self._rng.uniform(*PAUSE_S))
                getattr(self, f"_kill_{kind}")()
            self._lose_a_commit_file()
            self._finish()
        finally:
            self._driver.kill()
        assert self._killed == dict.fromkeys(KINDS, kills)
        self._compare()

    # -- the driver -----------------------------------------------------------------------------

    def _start_driver(self) -> DemoWorker:
        told = {
            "service_url": self._cluster.service_url,
            **{name: str(self._folder / name) for name in ("scratch", "checkpoints", "results")},
            "files": str(self._folder / "files"),
        }
        log = self._folder / "driver.log"
        driver = DemoWorker("driver", "tests.crash.streams", told, log, self._events)
        self._driver = driver
        self._until(both_queries_move, READY_TIMEOUT_S)
        return driver

    def _until(self, reached: Callable[[dict[str, Any]], bool], timeout_s: float) -> None:
        """Feeds rows and takes events until one is the awaited one."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            for event in self._feed():
                if reached(event):
                    return
        raise AssertionError(f"the driver is silent for {timeout_s} s:\n{self._log_tail()}")

    def _feed(self) -> Iterator[dict[str, Any]]:
        self._source.add_if_due()
        try:
            worker, event = self._events.get(timeout=0.05)
        except queue.Empty:
            return
        if worker is not self._driver:
            return
        if event["event"] == "failed":
            self._say(f"query {event['query']} failed and was started again: {event['why']}")
        if event["event"] == "end" and not worker.finished:
            raise AssertionError(f"the driver ended by itself:\n{self._log_tail()}")
        yield event

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for _ in self._feed():
                pass

    def _finish(self) -> None:
        self._start_bookie_again()
        self._driver.tell("finish")
        until = time.monotonic() + FINISH_TIMEOUT_S
        while time.monotonic() < until:
            try:
                worker, event = self._events.get(timeout=1)
            except queue.Empty:
                continue
            if worker is self._driver and event["event"] == "done":
                return
            if worker is self._driver and event["event"] == "end":
                break
        raise AssertionError(f"the driver did not finish:\n{self._log_tail()}")

    def _log_tail(self) -> str:
        return (self._folder / "driver.log").read_text(errors="replace")[-4000:]

    # -- kills ----------------------------------------------------------------------------------

    def _kill_bookie(self) -> None:
        self._start_bookie_again()
        self._down = self._rng.choice(self._cluster.bookies)
        self._down.kill()
        self._count("bookie", self._down.id)
        self._pause(self._rng.uniform(*PAUSE_S))
        if self._rng.random() < 0.5:  # else the next kill meets a cluster that lacks a bookie
            self._start_bookie_again()

    def _start_bookie_again(self) -> None:
        if self._down:
            self._down.start()
            self._down = None

    def _kill_driver(self) -> None:
        self._driver.kill()
        self._count("driver", "its JVM included")
        self._driver = self._start_driver()

    def _kill_worker(self) -> None:
        """A process forked by Spark's Python daemon: one that runs, or has run, tasks."""
        for _ in range(WORKERS_TRIED):
            workers = python_workers(self._driver.pid)
            if workers:
                pid = self._rng.choice(workers)
                os.kill(pid, signal.SIGKILL)
                return self._count("worker", f"pid {pid}")
            self._pause(0.05)
        raise AssertionError("Spark ran no Python worker to kill")

    def _lose_a_commit_file(self) -> None:
        """As after a power cut: Spark has run the batch and lost its note of that."""
        self._driver.kill()
        for topic in ("first", "second"):
            commits = self._folder / "checkpoints" / topic / "commits"
            last = max(int(path.name) for path in commits.iterdir() if path.name.isdigit())
            for path in (commits / str(last), commits / f".{last}.crc"):
                path.unlink(missing_ok=True)
            self._say(f"deleted commits/{last} of query {topic}; starting it again")
        self._driver = self._start_driver()

    def _count(self, kind: str, what: str) -> None:
        self._killed[kind] += 1
        self._say(f"killed {kind} ({what})")

    def _say(self, text: str) -> None:
        seconds = time.monotonic() - self._started
        print(f"{seconds:6.1f} s  {self._source.rows:7,} rows  {text}", flush=True)

    # -- the end --------------------------------------------------------------------------------

    def _compare(self) -> None:
        """Files of one micro-batch come in any order, so the order in `first` is whatever it is."""
        history = History()
        for row in range(self._source.rows):
            history.promised("first", row)
        rows = self._rows_of("first")
        history.read("first", [(place, row) for place, _, row in rows], start=0)
        for _, key, row in rows:
            history.promised("second", row, lane=key)
        read = [(place, row) for place, _, row in self._rows_of("second")]
        history.read("second", read, start=0)
        history.check()
        self._say("both topics: every row once, and both in the same order within a key")

    def _rows_of(self, topic: str) -> list[tuple[Place, str, int]]:
        """Each row's place, key and number, by place."""
        rows = pq.read_table(self._folder / "results" / f"{topic}.parquet").to_pylist()
        found = [((r["partition"], r["offset"]), r["key"], int(r["value"])) for r in rows]
        return sorted(found)


def both_queries_move(event: dict[str, Any]) -> bool:
    """A kill before that would only try how Spark starts."""
    return event["event"] == "rows" and all(event["rows"].values())


def run(kills: int, seed: int) -> None:
    print(f"\nchaos: seed {seed}, {kills} kills of each of {', '.join(KINDS)}", flush=True)
    with (
        LocalCluster(bookies=BOOKIES) as cluster,
        tempfile.TemporaryDirectory(prefix="chaos-") as folder,
    ):
        Chaos(cluster, Path(folder), seed).run(kills)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=5, help="of each kind")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 32))
    options = parser.parse_args()
    run(options.kills, options.seed)


if __name__ == "__main__":
    main()
