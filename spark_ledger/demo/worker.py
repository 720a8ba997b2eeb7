"""A Spark process of the demo, seen from both sides.

Always true: the process and all it starts are in a process group of their own, which a SIGKILL
ends as one; when its parent is gone, however it went, the group kills itself. It reports events,
one JSON object a line; commands reach it the same way.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

STOP_TIMEOUT_S = 10
Told = dict[str, Any]  # what a parent gave to its worker


class WorkerFailed(RuntimeError):
    """A Spark process ended by itself; the text names its log."""


class Worker:
    """The parent's handle. Events arrive in `events` as (this worker, event); the last of them is
    `end`. `finished`: that end is no surprise, it was killed or said `done` before."""

    def __init__(
        self,
        name: str,
        module: str,
        settings: Mapping[str, Any],
        log: Path,
        events: "queue.Queue[tuple[Worker, dict[str, Any]]]",
    ) -> None:
        self.name = name
        self.log = log
        self.finished = False
        self._events = events
        self._log_file = log.open("ab")
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log_file,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, name=f"events-{name}", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Of the Python process, and of the group."""
        return self._process.pid

    def tell(self, command: str) -> None:
        assert self._process.stdin
        self._process.stdin.write(f"{command}\n".encode())
        self._process.stdin.flush()

    def hold(self) -> None:
        """SIGSTOP for the whole group."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.killpg(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL for the whole group, Spark's JVM included; returns when it is gone."""
        self.finished = True
        _kill_group(self._process.pid)
        self._process.wait()
        self._reader.join(STOP_TIMEOUT_S)
        self._log_file.close()

    def wait(self) -> int:
        """The exit status of a worker that was told to finish; then whatever it left is killed."""
        status = self._process.wait()
        self.kill()
        return status

    def _read(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            if line.startswith(b"{"):
                event = json.loads(line)
                self.finished |= event["event"] == "done"
                self._events.put((self, event))
        self._events.put((self, {"event": "end"}))


def _kill_group(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def report(event: str, **facts: Any) -> None:
    """Said by the worker to its parent."""
    print(json.dumps({"event": event, **facts}), flush=True)


def settings() -> Told:
    """What the parent gave to this worker."""
    return json.loads(sys.argv[1])  # type: ignore[no-any-return]


def commands() -> Iterator[str]:
    """What the parent says, as it says it. Never ends: without a parent this process dies.

    Reads the descriptor itself: a buffered reader held by a daemon thread aborts a Python that
    is about to exit.
    """
    heard = b""
    while chunk := os.read(0, 4096):
        heard += chunk
        *lines, heard = heard.split(b"\n")
        for line in lines:
            yield line.decode()
    _kill_group(os.getpgid(0))


def listen() -> "queue.Queue[str]":
    """Commands as a queue, read by a thread that also notices the parent's death."""
    heard: queue.Queue[str] = queue.Queue()

    def hear() -> None:
        for command in commands():
            heard.put(command)

    threading.Thread(target=hear, name="parent", daemon=True).start()
    return heard
