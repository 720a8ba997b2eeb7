"""A server process of the embedded cluster.

Always true: it runs in a session of its own, so Ctrl-C in the terminal is for us alone to handle;
it holds the reading end of a pipe whose writing end only we hold, and ends when that is closed;
what it says goes to its log file, of which the end is quoted when it fails.
"""

import os
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from spark_ledger.errors import Unavailable

LOG_QUOTED_LINES = 5


class Child:
    """One process, running from the constructor on. Waiting is blocking, times are seconds."""

    def __init__(self, name: str, command: Sequence[str], log: Path) -> None:
        self.name = name
        self._log = log
        with log.open("ab") as sink:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self._process.poll()

    def first_line(self, timeout_s: float) -> str:
        """The first line it writes to its standard output: how it says that it serves.

        Raises errors.Unavailable, quoting the log, when it ends or does not say so in time.
        """
        output, line = self._process.stdout, b""
        assert output is not None
        deadline = time.monotonic() + timeout_s
        while not line.endswith(b"\n"):
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not select.select([output], [], [], left_s)[0]:
                self.kill()
                raise self.failed(f"did not start within {timeout_s:g} s")
            part = os.read(output.fileno(), 4096)
            if not part:
                self._process.wait()
                raise self.failed(f"ended with exit status {self._process.returncode}")
            line += part
        return line.decode()

    def failed(self, what: str) -> Unavailable:
        """The error for `what` went wrong with this process, with the end of its log."""
        said = self._log.read_text(errors="replace").strip().splitlines()[-LOG_QUOTED_LINES:]
        quoted = "; it said: " + " | ".join(said) if said else ""
        return Unavailable(f"{self.name} {what}{quoted}", f"See {self._log}.")

    def kill(self) -> None:
        """SIGKILL to the process and its group; waits."""
        self.signal(signal.SIGKILL)
        self._end()

    def signal(self, number: signal.Signals) -> None:
        """Send the signal to the process and its group; does not wait."""
        if self.running:
            os.killpg(self.pid, number)

    def terminate(self) -> None:
        """SIGTERM; does not wait."""
        if self.running:
            self._process.terminate()

    def wait(self, timeout_s: float) -> None:
        """Until it has ended; killed after `timeout_s`."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
        self._end()

    def _end(self) -> None:
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
