"""A server process of the embedded cluster: one run of it (Child), and what is started, stopped and
started again (LocalProcess).

Always true: it runs in a session of its own, so Ctrl-C in the terminal is for us alone to handle;
it holds the reading end of a pipe whose writing end only we hold, and ends when that is closed;
what it says goes to its log file, of which the end is quoted when it fails.
"""

import contextlib
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
        self.wait_for_end()

    def signal(self, number: signal.Signals) -> None:
        """Send the signal to the process and its group; does not wait."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):  # another thread saw its end just now
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
        self.wait_for_end()

    def wait_for_end(self) -> None:
        """Until it has ended, whatever of."""
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


class LocalProcess:
    """What runs a command, one process at a time, as often as it is started."""

    STOP_TIMEOUT_S = 15.0

    def __init__(self, log: Path) -> None:
        self.log = log
        """What it says."""
        self._child: Child | None = None

    @property
    def pid(self) -> int | None:
        """None when it is not running."""
        return self._child.pid if self._child and self._child.running else None

    @property
    def running(self) -> bool:
        return self.pid is not None

    @property
    def exit_code(self) -> int | None:
        """Of its last process: None while it runs, negative for the signal that ended it."""
        return self._child.exit_code if self._child else None

    def kill(self) -> None:
        """SIGKILL, and wait until it has ended."""
        if self._child:
            self._child.kill()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, as SIGSTOP to make it hang and SIGCONT to let it go on."""
        if self._child:
            self._child.signal(number)

    def stop(self) -> None:
        """End it in good order, and wait until it has ended."""
        self.ask_to_stop()
        self.wait_until_stopped()

    def ask_to_stop(self) -> None:
        if self._child:
            self._child.terminate()

    def wait_until_stopped(self) -> None:
        if self._child:
            self._child.wait(self.STOP_TIMEOUT_S)
