"""The process of an embedded cluster that heals it and keeps up its topics (maintenance.py)."""

import signal
import sys
from pathlib import Path

from spark_ledger.local.child import Child

STOP_TIMEOUT_S = 5.0


class LocalAutorecovery:
    """`log`: what it says. It ends with the process that started it, whatever that dies of."""

    def __init__(self, log: Path, service_url: str) -> None:
        self.log = log
        self._service_url = service_url
        self._child: Child | None = None

    @property
    def pid(self) -> int | None:
        """None when it is not running."""
        return self._child.pid if self._child and self._child.running else None

    @property
    def exit_code(self) -> int | None:
        """Of its last process: None while it runs, negative for the signal that ended it."""
        return self._child.exit_code if self._child else None

    def start(self) -> None:
        """Start it and return at once; of no effect if it runs."""
        if self.pid is None:
            self._child = Child("autorecovery", self._command(), self.log)

    def kill(self) -> None:
        """SIGKILL, and wait until it has ended; its work is taken up by the next one."""
        if self._child:
            self._child.kill()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, as SIGSTOP to make it hang and SIGCONT to let it go on."""
        if self._child:
            self._child.signal(number)

    def stop(self) -> None:
        """End it in good order, and wait until it has ended: its session too."""
        self.ask_to_stop()
        self.wait_until_stopped()

    def ask_to_stop(self) -> None:
        if self._child:
            self._child.terminate()

    def wait_until_stopped(self) -> None:
        if self._child:
            self._child.wait(STOP_TIMEOUT_S)

    def _command(self) -> list[str]:
        options = ["--parent-pipe", "--service-url", self._service_url]
        return [sys.executable, "-m", "spark_ledger.cli.main", "autorecovery", "start", *options]
