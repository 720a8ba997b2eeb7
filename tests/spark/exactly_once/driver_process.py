"""The world's handle of a driver: told what to do, waited for, killed."""

import json
import os
import queue
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spark_ledger_demo.worker import DemoWorker
from tests.crash.procfs import command_line
from tests.kit.processes import descendants
from tests.spark.exactly_once.query import Gate, Query

WAIT_S = 300.0
POLL_S = 0.01
Event = dict[str, Any]


class DriverProcess:
    """Whoever waits for something hears of queries that fail, and fails too, unless it is a failure
    that was waited for."""

    def __init__(
        self, service_url: str, folder: Path, number: int, master: str, conf: dict[str, str]
    ) -> None:
        told = {
            "service_url": service_url,
            "scratch": str(folder / f"scratch-{number}"),
            "master": master,
            "conf": conf,
        }
        self.killed = False
        self._log = folder / f"driver-{number}.log"
        self._events: queue.Queue[tuple[DemoWorker, Event]] = queue.Queue()
        module = "tests.spark.exactly_once.driver"
        self._worker = DemoWorker(f"driver-{number}", module, told, self._log, self._events)
        self._ready = False
        self._running: list[str] = []
        self._answers: list[Event] = []
        self._failures: dict[str, str] = {}

    @property
    def pid(self) -> int:
        return self._worker.pid

    def start(self, query: Query, format: str = "ledger", **options: str) -> None:
        """If it runs already it goes on."""
        if query.name in self._running:
            return
        self._running.append(query.name)
        self.do(
            "start",
            query=query.name,
            topic=query.topic,
            several=query.several,
            checkpoint=str(query.checkpoint),
            steps=str(query.steps),
            gates=str(query.gates),
            format=format,
            options=options,
        )

    def stop(self, query: Query) -> None:
        if query.name in self._running:
            self.do("stop", query=query.name)
            self._running.remove(query.name)

    def do(self, what: str, **told: Any) -> None:
        """Returns when it is done. Raises AssertionError, with why, when it failed."""
        self.wait(lambda: self._ready, "Spark's start")
        self._answers.clear()
        self._worker.tell(json.dumps({"do": what, **told}))
        self.wait(lambda: bool(self._answers), f"'{what}' to be done")
        answer = self._answers.pop()
        assert answer["event"] == "did", f"'{what}' failed: {answer['why']}"

    def wait(self, holds: Callable[[], bool], what: str) -> None:
        """Until it holds. Raises AssertionError when time is up, the driver is gone, or a query
        failed."""
        until = time.monotonic() + WAIT_S
        while not holds():
            self._take_event()
            for name, why in self._failures.items():
                raise AssertionError(f"{name} failed: {why}")
            assert time.monotonic() < until, f"no sign of {what} in {WAIT_S} s: {self._said()}"

    def wait_at(self, gate: Gate) -> None:
        self.wait(gate.reached, f"the point {gate.name}")

    def wait_failed(self, query: Query) -> str:
        """Until the query fails; why it did."""
        failed = self.fails_before(query, lambda: False)
        assert failed is not None
        return failed

    def fails_before(self, query: Query, holds: Callable[[], bool]) -> str | None:
        """Until the query fails, or this holds; why it failed."""
        until = time.monotonic() + WAIT_S
        while query.name not in self._failures:
            if holds():
                return None
            self._take_event()
            assert time.monotonic() < until, f"{query.name} has not failed: {self._said()}"
        return self._failures.pop(query.name)

    def freeze_jvm(self) -> None:
        below = descendants(self.pid)
        (jvm,) = (pid for pid in below if command_line(pid).split(b"\0")[0].endswith(b"java"))
        os.kill(jvm, signal.SIGSTOP)

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def kill(self) -> None:
        """SIGKILL to all of it."""
        if not self.killed:
            self.killed = True
            self._worker.kill()

    def _take_event(self) -> None:
        """The next, if there is one soon."""
        try:
            _, event = self._events.get(timeout=POLL_S)
        except queue.Empty:
            return
        match event["event"]:
            case "ready":
                self._ready = True
            case "failed":
                self._failures[event["query"]] = event["why"]
                self._running.remove(event["query"])
            case "end":
                raise AssertionError(f"the driver ended by itself: {self._said()}")
            case _:
                self._answers.append(event)

    def _said(self) -> str:
        return self.log()[-4000:]
