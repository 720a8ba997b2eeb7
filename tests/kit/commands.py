"""`spark-ledger ...`, `python -m bookie_server ...` and `python -m spark_ledger.notebook ...` in a
process of its own that had imported everything before it began: what a command does costs a tenth
of starting Python for it.

Always true: a command runs in a fork of a process that has only imported, with its caller's folder
and environment, and ends as Python ends; nothing that a command did is there for the next one.

A process that is the server: python -m tests.kit.commands MODULE SOCKET_FD
"""

import array
import atexit
import contextlib
import gc
import importlib
import importlib.util
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any

MODULE, BOOKIE, NOTEBOOK = "spark_ledger.cli.main", "bookie_server", "spark_ledger.notebook"
LOADED = {
    MODULE: (
        "kazoo.client",
        "pyarrow.compute",
        "spark_ledger.broker.server",
        "spark_ledger.client.admin",
        "spark_ledger.process",
        "spark_ledger.local.maintenance",
        "spark_ledger.topic.client",
    ),
    BOOKIE: (),
    NOTEBOOK: ("matplotlib.pyplot", "spark_ledger.local"),
}
"""By module that can be run, what it imports when it runs."""
ROOT = Path(__file__).resolve().parents[2]
WITHOUT_DISPLAY = {"MPLBACKEND": "agg"}
REQUEST_BYTES_MAX = 1 << 16
INT, FDS = "i", 4  # a pid or an exit status; standard input, output, error, the way back


class Running:
    """A command that runs, as far as a subprocess.Popen is used here; from any thread."""

    def __init__(self, way: socket.socket, arguments: Sequence[str]) -> None:
        self.pid = _int(way)
        self.args = arguments
        self.stdin: IO[bytes] | None = None
        self.stdout: IO[bytes] | None = None
        self.returncode: int | None = None
        self._way = way
        self._looking = threading.Lock()

    def poll(self) -> int | None:
        with self._looking:
            if self.returncode is None and select.select([self._way], [], [], 0)[0]:
                self.returncode = _int(self._way)
                self._way.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        ended = self._ended(timeout)
        if ended is None:
            raise subprocess.TimeoutExpired(list(self.args), timeout or 0)
        return ended

    def _ended(self, timeout: float | None) -> int | None:
        with contextlib.suppress(ValueError):  # another thread has seen its end, and closed the way
            select.select([self._way], [], [], timeout)
        return self.poll()

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class CommandServer:
    """The process that forks; one of a module serves all threads of a process of tests."""

    def __init__(self, module: str) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "tests.kit.commands", module, str(theirs.fileno())]
        environment = {**os.environ, **WITHOUT_DISPLAY}
        self._process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], cwd=ROOT, env=environment
        )
        theirs.close()
        self._sending = threading.Lock()
        self._owner = os.getpid()
        atexit.register(self.close)

    def start(
        self,
        arguments: Sequence[str],
        standard: tuple[int, int, int],
        *,
        session: bool = False,
        folder: str | Path = "",
        environment: Mapping[str, str] = {},
    ) -> Running:
        """Begin a command on those descriptors, which stay the caller's. In a session of its own or
        in ours, in that folder or ours, in our environment and that."""
        mine, theirs = socket.socketpair()
        where, environment = str(folder or os.getcwd()), {**os.environ, **environment}
        with theirs, self._sending:
            request = json.dumps([list(arguments), where, environment, session])
            fds = [*standard, theirs.fileno()]
            socket.send_fds(self._socket, [request.encode()], fds)
        return Running(mine, arguments)

    def run(
        self, arguments: list[str], timeout_s: float, **how: Any
    ) -> "subprocess.CompletedProcess[str]":
        """The command's output and exit status; `how`: as of `start`. Raises TimeoutError; the
        command is killed then."""
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            with open(os.devnull) as nothing:
                fds = (nothing.fileno(), out.fileno(), err.fileno())
                command = self.start(arguments, fds, **how)
            try:
                status = command.wait(timeout_s)
            except subprocess.TimeoutExpired as error:
                command.kill()
                raise TimeoutError(str(error)) from None
            texts = [(file.seek(0), file.read())[1] for file in (out, err)]
        return subprocess.CompletedProcess(arguments, status, *texts)

    def close(self) -> None:
        if os.getpid() == self._owner:
            self._socket.close()  # and the server ends
            self._process.wait()


@cache
def server(module: str = MODULE) -> CommandServer:
    return CommandServer(module)


def _int(way: socket.socket) -> int:
    received = way.recv(array.array(INT).itemsize)
    assert received, "the server of commands has died"
    return array.array(INT, received)[0]


def _send(way: int, number: int) -> None:
    os.write(way, array.array(INT, [number]).tobytes())


def _serve(requests: socket.socket) -> list[str]:
    """Returns only in a process that becomes a command: its arguments."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no call waits for the ends of its children
    while True:
        request, fds, _, _ = socket.recv_fds(requests, REQUEST_BYTES_MAX, FDS)
        if not request:
            os._exit(0)
        if os.fork() == 0:
            requests.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            *standard, way = fds
            arguments, folder, environment, session = json.loads(request)
            if command := os.fork():
                for fd in standard:
                    os.close(fd)
                _, status = os.waitpid(command, 0)
                with contextlib.suppress(BrokenPipeError):  # its caller ended before it
                    _send(way, os.waitstatus_to_exitcode(status))
                os._exit(0)
            if session:
                os.setsid()
            _send(way, os.getpid())
            for number, fd in enumerate(standard):
                os.dup2(fd, number)
            for fd in fds:
                os.close(fd)
            os.chdir(folder)
            os.environ.clear()
            os.environ.update(environment)
            return arguments
        for fd in fds:
            os.close(fd)


def main() -> None:
    name, requests = sys.argv[1], socket.socket(fileno=int(sys.argv[2]))
    package = importlib.util.find_spec(name).submodule_search_locations
    module = importlib.import_module(f"{name}.__main__" if package else name)
    for each in LOADED[name]:
        importlib.import_module(each)
    assert threading.active_count() == 1, "a fork has one thread"
    gc.collect()
    gc.freeze()  # else each fork copies all of it only to look for garbage when it ends
    arguments = _serve(requests)
    if name == BOOKIE:
        sys.argv[1:] = arguments
        module.main()
    else:
        module.app(arguments, prog_name="spark-ledger")


if __name__ == "__main__":
    main()
