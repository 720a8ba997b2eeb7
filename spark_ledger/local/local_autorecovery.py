"""The process of an embedded cluster that heals it and keeps up its topics (maintenance.py).

Always true: one that ends by itself, or is killed by somebody else, is started again, later each
time, as a bookie starts its own again; after `kill` and `stop` only `start` does.
"""

import sys
import threading
import time
from pathlib import Path

from spark_ledger.local.child import Child, LocalProcess

PAUSE_S, PAUSE_MAX_S, LASTED_S = 1.0, 60.0, 60.0


class LocalAutorecovery(LocalProcess):
    """`log`: what it says. It ends with the process that started it, whatever that dies of."""

    STOP_TIMEOUT_S = 5.0

    def __init__(self, log: Path, service_url: str, pause_s: float = PAUSE_S) -> None:
        super().__init__(log)
        self._service_url = service_url
        self._pause_s = pause_s
        self._over = threading.Event()
        self._starting = threading.Lock()

    def start(self) -> None:
        """Start it and return at once; of no effect if it runs."""
        if self.running:
            return
        with self._starting:
            self._over.set()  # for who waits to start it again
            over = self._over = threading.Event()
            child = self._child = self._new()
        name = "autorecovery-restarts"
        threading.Thread(target=self._again, args=(child, over), name=name, daemon=True).start()

    def kill(self) -> None:
        """SIGKILL, and wait until it has ended; its work is taken up by the next one."""
        self._give_up()
        super().kill()

    def ask_to_stop(self) -> None:
        self._give_up()
        super().ask_to_stop()

    def _give_up(self) -> None:
        with self._starting:
            self._over.set()

    def _again(self, child: Child, over: threading.Event) -> None:
        wait_s = self._pause_s
        while True:
            began_s = time.monotonic()
            child.wait_for_end()
            if time.monotonic() - began_s >= LASTED_S:
                wait_s = self._pause_s
            over.wait(wait_s)
            with self._starting:
                if over.is_set():
                    return
                child = self._child = self._new()
            wait_s = min(2 * wait_s, PAUSE_MAX_S)

    def _new(self) -> Child:
        return Child("autorecovery", self._command(), self.log)

    def _command(self) -> list[str]:
        options = ["--parent-pipe", "--service-url", self._service_url]
        return [sys.executable, "-m", "spark_ledger.cli.main", "autorecovery", "start", *options]
