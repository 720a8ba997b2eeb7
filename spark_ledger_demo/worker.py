"""A Spark process of the demo: the parent's handle of the process, and the functions that it runs.

Always true: the process and its children are in a separate process group, and one SIGKILL ends the
group; when the parent has ended, for whatever reason, the group kills itself. The process reports
events, one JSON object a line; the parent sends commands, one a line.
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
Settings = dict[str, Any]  # from the parent for its worker


class WorkerFailed(RuntimeError):
    """A Spark process ended by itself; the text has the path of its log."""


class DemoWorker:
    """The parent's handle. Events arrive in `events` as (this worker, event); the last event is
    `end`. `finished`: the end is expected, as the worker was killed or reported `done` before."""

    def __init__(
        self,
        name: str,
        module: str,
        settings: Mapping[str, Any],
        log: Path,
        events: "queue.Queue[tuple[DemoWorker, dict[str, Any]]]",
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
        """The id of the Python process, which is also the id of the group."""
        return self._process.pid

    def tell(self, command: str) -> None:
        assert self._process.stdin
        self._process.stdin.write(f"{command}\n".encode())
        self._process.stdin.flush()

    def hold(self) -> None:
        """Send SIGSTOP to the whole group."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.killpg(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Send SIGKILL to the whole group, Spark's JVM included; returns when the process has
        ended."""
        self.finished = True
        _kill_group(self._process.pid)
        self._process.wait()
        self._reader.join(STOP_TIMEOUT_S)
        self._log_file.close()

    def wait(self) -> int:
        """Wait for a worker that got the command to finish, and kill the rest of its group; returns
        the exit status."""
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
    """Report an event of the worker to its parent."""
    print(json.dumps({"event": event, **facts}), flush=True)


def settings() -> Settings:
    """The settings that the parent gave to this worker."""
    return json.loads(sys.argv[1])  # type: ignore[no-any-return]


def commands() -> Iterator[str]:
    """The parent's commands, as they come. The iterator never ends: when the parent has ended, this
    process kills itself.

    Reads the descriptor directly: a buffered reader in a daemon thread aborts a Python that is
    about to exit.
    """
    received = b""
    while chunk := os.read(0, 4096):
        received += chunk
        *lines, received = received.split(b"\n")
        for line in lines:
            yield line.decode()
    _kill_group(os.getpgid(0))


def listen() -> "queue.Queue[str]":
    """The parent's commands as a queue; the thread that reads them also notices the parent's
    end."""
    received: queue.Queue[str] = queue.Queue()

    def receive() -> None:
        for command in commands():
            received.put(command)

    threading.Thread(target=receive, name="parent", daemon=True).start()
    return received
