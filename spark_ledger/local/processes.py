"""The server processes of the embedded cluster: one run of a command (Child), a process that can be
started and stopped many times (LocalProcess), and its kinds: bookie, broker, autorecovery.

Always true: each child process runs in a separate session, so that Ctrl-C in the terminal reaches
only this process. A child's standard input is a pipe from this process. The child ends when the
pipe is closed; the death of this process closes it, too. A child's output goes to its log file; an
error quotes the end of that file. A broker keeps its first ports, so that clients find it again
after a kill. If autorecovery ends by itself, or is killed from outside, it is started again, after
a longer pause each time; after `kill` and `stop` only `start` starts it.
"""

import contextlib
import errno
import fcntl
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from spark_ledger import net
from spark_ledger.errors import BadConfig, Unavailable

LOG_QUOTED_LINES = 5

HOST = "127.0.0.1"
PORTS = range(20000, 32000)
_given_ports: set[int] = set()  # by `free_port`
PORT_TRIES = 3
"""How often a server starts with other ports: another process may take one before it listens."""


def lock_path(path: Path, refusal: BadConfig, flags: int = os.O_RDWR | os.O_CREAT) -> int:
    """Lock the file or folder until the returned descriptor is closed or this process ends. Raises
    `refusal` if another process has the lock, and OSError."""
    lock = os.open(path, flags | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise refusal from None
    return lock


class Child:
    """One process, which runs from the constructor on. The waiting methods block; times are in
    seconds."""

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
        """None while the process runs; negative: the signal that ended it."""
        return self._process.poll()

    def first_line(self, timeout_s: float) -> str:
        """The first line that the process writes to its standard output, when it serves. Raises
        errors.Unavailable, which quotes the log, if the process ends or writes no line in time."""
        output, line = self._process.stdout, b""
        assert output is not None
        deadline = time.monotonic() + timeout_s
        while not line.endswith(b"\n"):
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not select.select([output], [], [], left_s)[0]:
                self.kill()
                raise self.failure_error(f"did not start within {timeout_s:g} s")
            chunk = os.read(output.fileno(), 4096)
            if not chunk:
                self._process.wait()
                raise self.failure_error(f"ended with exit status {self._process.returncode}")
            line += chunk
        return line.decode()

    def failure_error(self, what: str) -> Unavailable:
        """The error that quotes `what` happened to this process, and the end of its log."""
        lines = self._log.read_text(errors="replace").strip().splitlines()[-LOG_QUOTED_LINES:]
        quoted = "; its log ends: " + " | ".join(lines) if lines else ""
        return Unavailable(f"{self.name} {what}{quoted}", f"See {self._log}.")

    def kill(self) -> None:
        """Send SIGKILL to the process and its group, and wait for its end."""
        self.signal(signal.SIGKILL)
        self.wait_for_end()

    def signal(self, number: signal.Signals) -> None:
        """Send the signal to the process and its group; does not wait."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):  # the process ended just now
                os.killpg(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM; does not wait."""
        if self.running:
            self._process.terminate()

    def wait(self, timeout_s: float) -> None:
        """Wait for the end of the process; kill it after `timeout_s`."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
        self.wait_for_end()

    def wait_for_end(self) -> None:
        """Wait for the end of the process."""
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


class LocalProcess:
    """A command that can be started many times; one process at a time runs it."""

    STOP_TIMEOUT_S = 15.0

    def __init__(self, log: Path) -> None:
        self.log = log
        """The file for the output of the processes."""
        self._child: Child | None = None

    @property
    def pid(self) -> int | None:
        """The id of the running process; None without a running process."""
        return self._child.pid if self._child and self._child.running else None

    @property
    def running(self) -> bool:
        return self.pid is not None

    @property
    def exit_code(self) -> int | None:
        """The exit code of the last process: None while the process runs; negative: the signal that
        ended it."""
        return self._child.exit_code if self._child else None

    def kill(self) -> None:
        """Send SIGKILL, and wait until the process has ended."""
        if self._child:
            self._child.kill()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, such as SIGSTOP to make the process hang and SIGCONT to let it go on."""
        if self._child:
            self._child.signal(number)

    def stop(self) -> None:
        """End the process in good order, and wait until it has ended."""
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
    """A bookie. `folder` keeps its disks and its log; the disks have its identity. `stop`
    deregisters it, flushes and seals."""

    def __init__(self, folder: Path, service_url: str, settings: dict[str, object]) -> None:
        super().__init__(folder / "bookie.log")
        self.folder = folder
        self._service_url = service_url
        self.settings = settings
        self.id = ""
        """The bookie's UUID; empty before its first start."""
        self.address = ""
        """The present or last host:port for gRPC."""
        self.frames = ""
        """The present or last host:port for frames (the wire of clients)."""

    def start(self) -> None:
        """Start the bookie; returns when it is registered as writable. Raises
        errors.Unavailable."""
        self.launch()
        self.wait_until_registered()

    def launch(self) -> None:
        """Start the bookie and return at once; call `wait_until_registered` afterwards."""
        if self.running:
            raise ValueError(f"bookie {self.id} is running already")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._child = Child(f"bookie in {self.folder.name}", self.command(), self.log)

    def wait_until_registered(self) -> None:
        if self._child is None:
            raise Unavailable(f"the bookie in {self.folder} was not started")
        facts = json.loads(self._child.first_line(START_TIMEOUT_S))
        self.id, self.address, self.frames = facts["bookie_id"], facts["address"], facts["frames"]

    def destroy(self) -> None:
        """Send SIGKILL and delete the bookie's directories, as if its machine were lost. `start`
        then makes a new bookie, with another id."""
        self.kill()
        for directory in self._directories():
            shutil.rmtree(directory, ignore_errors=True)

    def command(self) -> list[str]:
        command = [sys.executable, "-m", "bookie_server", "--parent-pipe"]
        for key, value in self._all_settings().items():
            command += ["--set", f"{key}={_setting_text(value)}"]
        return command

    def _all_settings(self) -> dict[str, object]:
        """The settings of the bookie, without autorecovery, which one process hosts for the whole
        cluster (LocalAutorecovery)."""
        defaults = {
            "service_url": self._service_url,
            "listen": "127.0.0.1:0",
            "autorecovery": False,
        }
        settings = {**defaults, **self.settings}
        for kind, name in (("journal", "journal"), ("ledger", "ledgers")):
            if f"{kind}_directories" not in settings:
                settings.setdefault(f"{kind}_directory", self.folder / name)
        return settings

    def _directories(self) -> list[Path]:
        """The directories that its settings name."""
        names: list[object] = []
        for kind in ("journal", "ledger"):
            directories = self._all_settings().get(f"{kind}_directories")
            if isinstance(directories, list | tuple):
                names += directories
            elif directories:
                names += [name.strip() for name in str(directories).split(",")]
            else:
                names.append(self._all_settings()[f"{kind}_directory"])
        return [Path(str(name)) for name in names]


def _setting_text(value: object) -> str:
    """The value as --set takes it. A list becomes a TOML list of strings."""
    if isinstance(value, list | tuple):
        return json.dumps([str(item) for item in value], ensure_ascii=False)
    return str(value)


class LocalBroker(LocalProcess):
    """A broker. `log`: the file for its output. `port`, `admin_port`: its ports; None: a free port.
    `config`: a file of its other settings."""

    def __init__(
        self,
        log: Path,
        service_url: str,
        port: int | None = None,
        admin_port: int | None = None,
        config: Path | None = None,
    ) -> None:
        super().__init__(log)
        self._service_url = service_url
        self._config = config
        self._ports: dict[str, int | None] = {"--broker-port": port, "--admin-port": admin_port}
        self.url = ""
        """The URL for Pulsar's clients; "" before the first start."""
        self.admin_url = ""
        """The URL for HTTP requests of Pulsar's clients."""

    def start(self) -> None:
        """Start the broker, and return when it serves; without effect if it runs. Raises
        errors.Unavailable, which quotes its log."""
        if self.running:
            return
        for attempt in range(1, PORT_TRIES + 1):
            ports = {flag: port or free_port() for flag, port in self._ports.items()}
            try:
                self._run(ports)
                break
            except Unavailable as error:  # another process may have taken a port meanwhile
                is_taken = ports != self._ports and os.strerror(errno.EADDRINUSE) in str(error)
                if not is_taken or attempt == PORT_TRIES:
                    raise
        self._ports = dict(ports)

    def _run(self, ports: Mapping[str, int]) -> None:
        options = ["--parent-pipe", "--service-url", self._service_url]
        for flag, port in ports.items():
            options += [flag, str(port)]
        if self._config is not None:
            options += ["--config", str(self._config)]
        command = [sys.executable, "-m", "spark_ledger.cli.main", "broker", "start", *options]
        self._child = Child("the broker", command, self.log)
        facts = json.loads(self._child.first_line(START_TIMEOUT_S))
        self.url, self.admin_url = str(facts["broker_url"]), str(facts["admin_url"])


PAUSE_S, PAUSE_MAX_S, LONG_RUN_S = 1.0, 60.0, 60.0


class LocalAutorecovery(LocalProcess):
    """Autorecovery and upkeep, as a process. `log`: the file for its output."""

    STOP_TIMEOUT_S = 5.0

    def __init__(self, log: Path, service_url: str, pause_s: float = PAUSE_S) -> None:
        super().__init__(log)
        self._service_url = service_url
        self._pause_s = pause_s
        self._is_given_up = threading.Event()
        self._starting = threading.Lock()

    def start(self) -> None:
        """Start autorecovery and return at once; without effect if it runs."""
        if self.running:
            return
        with self._starting:
            self._is_given_up.set()  # ends the thread that waits to start the process again
            is_given_up = self._is_given_up = threading.Event()
            child = self._child = self._new_child()
        name = "autorecovery-restarts"
        threading.Thread(
            target=self._restart_repeatedly, args=(child, is_given_up), name=name, daemon=True
        ).start()

    def kill(self) -> None:
        """Send SIGKILL, and wait until the process has ended; the next process continues its
        work."""
        self._stop_restarting()
        super().kill()

    def ask_to_stop(self) -> None:
        self._stop_restarting()
        super().ask_to_stop()

    def _stop_restarting(self) -> None:
        with self._starting:
            self._is_given_up.set()

    def _restart_repeatedly(self, child: Child, is_given_up: threading.Event) -> None:
        wait_s = self._pause_s
        while True:
            began_s = time.monotonic()
            child.wait_for_end()
            if time.monotonic() - began_s >= LONG_RUN_S:
                wait_s = self._pause_s
            is_given_up.wait(wait_s)
            with self._starting:
                if is_given_up.is_set():
                    return
                child = self._child = self._new_child()
            wait_s = min(2 * wait_s, PAUSE_MAX_S)

    def _new_child(self) -> Child:
        return Child("autorecovery", self._command(), self.log)

    def _command(self) -> list[str]:
        options = ["--parent-pipe", "--service-url", self._service_url]
        return [sys.executable, "-m", "spark_ledger.cli.main", "autorecovery", "start", *options]


def free_port() -> int:
    """A free port below the ports that the kernel gives to outgoing connections. If a server used
    such a port and went down, a client that retries could get that port, and connect to itself. A
    process gets no port twice, while there are others: its connection to a cluster that it stopped
    would try to go on at the next cluster there."""
    for port in sorted(random.sample(PORTS, len(PORTS)), key=_given_ports.__contains__):
        if net.is_free(HOST, port):
            _given_ports.add(port)
            return port
    raise Unavailable(f"no port between {PORTS.start} and {PORTS.stop} is free")
