"""The server processes of the embedded cluster: one run of any (Child), what is started, stopped
and started again (LocalProcess), and the bookies, the broker and what heals them.

Always true: each runs in a session of its own, so Ctrl-C in the terminal is for us alone to handle;
it holds the reading end of a pipe whose writing end only we hold, and ends when that is closed;
what it says goes to its log file, of which the end is quoted when it fails. A broker keeps the
ports that it had first, so that clients find it again after a kill. Autorecovery that ends by
itself, or is killed by somebody else, is started again, later each time; after `kill` and `stop`
only `start` does.
"""

import contextlib
import fcntl
import json
import os
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from spark_ledger.errors import BadConfig, Unavailable

LOG_QUOTED_LINES = 5

HOST = "127.0.0.1"
PORTS = range(20000, 32000)


def hold(path: Path, refusal: BadConfig, flags: int = os.O_RDWR | os.O_CREAT) -> int:
    """The descriptor whose lock says that this process has the file, until it is closed or the
    process ends. Raises the refusal where another has it, OSError."""
    lock = os.open(path, flags | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise refusal from None
    return lock


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


START_TIMEOUT_S = 60.0


class LocalBookie(LocalProcess):
    """`folder` keeps its disks and its log; what is on them makes it the bookie that it is. To
    `stop` it: deregistered, flushed, sealed."""

    def __init__(self, folder: Path, service_url: str, settings: dict[str, object]) -> None:
        super().__init__(folder / "bookie.log")
        self.folder = folder
        self._service_url = service_url
        self.settings = settings
        self.id = ""
        """The bookie's UUID; empty before its first start."""
        self.address = ""
        """host:port at which it serves, or last served, gRPC."""
        self.frames = ""
        """host:port at which it speaks, or last spoke, frames, as clients do."""

    def start(self) -> None:
        """Start it; returns when it is registered as writable. Raises errors.Unavailable."""
        self.launch()
        self.wait_until_registered()

    def launch(self) -> None:
        """Start it and return at once; to be followed by `wait_until_registered`."""
        if self.running:
            raise ValueError(f"bookie {self.id} is running already")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._child = Child(f"bookie in {self.folder.name}", self.command(), self.log)

    def wait_until_registered(self) -> None:
        if self._child is None:
            raise Unavailable(f"the bookie in {self.folder} was not started")
        said = json.loads(self._child.first_line(START_TIMEOUT_S))
        self.id, self.address, self.frames = said["bookie_id"], said["address"], said["frames"]

    def destroy(self) -> None:
        """SIGKILL, and its directories are gone for good, as if its machine had burnt. `start`
        makes a new bookie, with another id, on empty folders."""
        self.kill()
        for directory in self._directories():
            shutil.rmtree(directory, ignore_errors=True)

    def command(self) -> list[str]:
        command = [sys.executable, "-m", "bookie_server", "--parent-pipe"]
        for key, value in self._all_settings().items():
            command += ["--set", f"{key}={_text(value)}"]
        return command

    def _all_settings(self) -> dict[str, object]:
        """One process heals the whole cluster (LocalAutorecovery), so a bookie hosts none."""
        ours = {"service_url": self._service_url, "listen": "127.0.0.1:0", "autorecovery": False}
        settings = {**ours, **self.settings}
        for kind, name in (("journal", "journal"), ("ledger", "ledgers")):
            if f"{kind}_directories" not in settings:
                settings.setdefault(f"{kind}_directory", self.folder / name)
        return settings

    def _directories(self) -> list[Path]:
        """Those that its settings name."""
        found: list[object] = []
        for kind in ("journal", "ledger"):
            several = self._all_settings().get(f"{kind}_directories")
            if isinstance(several, list | tuple):
                found += several
            elif several:
                found += [name.strip() for name in str(several).split(",")]
            else:
                found.append(self._all_settings()[f"{kind}_directory"])
        return [Path(str(name)) for name in found]


def _text(value: object) -> str:
    """The value as --set takes it; a list as in TOML, whose strings are JSON's."""
    if isinstance(value, list | tuple):
        return json.dumps([str(each) for each in value], ensure_ascii=False)
    return str(value)


class LocalBroker(LocalProcess):
    """`log`: what it says. A port of None: a free one."""

    def __init__(
        self,
        log: Path,
        service_url: str,
        port: int | None = None,
        admin_port: int | None = None,
    ) -> None:
        super().__init__(log)
        self._service_url = service_url
        self._ports = {"--broker-port": port, "--admin-port": admin_port}
        self.url = ""
        """Where Pulsar's clients reach it, once it was started."""
        self.admin_url = ""
        """And by HTTP."""

    def start(self) -> None:
        """Start it, and return when it serves; of no effect if it runs. Raises
        errors.Unavailable, which quotes its log."""
        if self.running:
            return
        self._ports = {flag: port or free_port() for flag, port in self._ports.items()}
        options = ["--parent-pipe", "--service-url", self._service_url]
        for flag, port in self._ports.items():
            options += [flag, str(port)]
        command = [sys.executable, "-m", "spark_ledger.cli.main", "broker", "start", *options]
        self._child = Child("the broker", command, self.log)
        said = json.loads(self._child.first_line(START_TIMEOUT_S))
        self.url, self.admin_url = str(said["broker_url"]), str(said["admin_url"])


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


def port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True


def free_port() -> int:
    """A free port below those that the kernel gives to outgoing connections: while the server is
    down, a client that tries again and again could otherwise be given the very port it calls, and
    be connected to itself."""
    for port in random.sample(PORTS, len(PORTS)):
        if port_is_free(port):
            return port
    raise Unavailable(f"no port between {PORTS.start} and {PORTS.stop} is free")
