"""`spark-ledger ...` in a process of its own that has imported everything before it began: what a
command does costs a tenth of starting Python for it.

Always true: a command runs in a fork of a process that has only imported, with its caller's folder
and environment, and ends as Python ends; nothing that a command did is there for the next one.

A process that is the server: python -m tests.kit.commands SOCKET_FD
"""

import array
import atexit
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from functools import cache

MODULE = "spark_ledger.cli.main"
LOADED_BY_COMMANDS = (
    "kazoo.client",
    "pyarrow.compute",
    "spark_ledger.client.admin",
    "spark_ledger.ledger.connect",
    "spark_ledger.local",
    "spark_ledger.topic.client",
)
"""What commands import when they run."""
REQUEST_BYTES_MAX = 1 << 16
ENDED, FDS = "i", 3  # the exit status as one int; standard output, standard error, its way back


class CommandServer:
    """The process that forks; one of it serves all threads of a process of tests."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "tests.kit.commands", str(theirs.fileno())]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        self._sending = threading.Lock()
        atexit.register(self.close)

    def run(self, arguments: list[str], timeout_s: float) -> "subprocess.CompletedProcess[str]":
        """The command's output and exit status. Raises TimeoutError; the command is killed then."""
        mine, theirs = socket.socketpair()
        with mine, tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            with theirs, self._sending:
                fds = [out.fileno(), err.fileno(), theirs.fileno()]
                request = json.dumps([arguments, os.getcwd(), dict(os.environ)])
                socket.send_fds(self._socket, [request.encode()], fds)
            mine.settimeout(timeout_s)
            pid = _int(mine)
            try:
                status = _int(mine)
            except TimeoutError:
                os.kill(pid, signal.SIGKILL)
                raise
            texts = [(file.seek(0), file.read())[1] for file in (out, err)]
        return subprocess.CompletedProcess(arguments, status, *texts)

    def close(self) -> None:
        self._socket.close()  # and the server ends
        self._process.wait()


@cache
def server() -> CommandServer:
    return CommandServer()


def _int(way: socket.socket) -> int:
    received = way.recv(array.array(ENDED).itemsize)
    assert received, "the server of commands has died"
    return array.array(ENDED, received)[0]


def _send(way: int, number: int) -> None:
    os.write(way, array.array(ENDED, [number]).tobytes())


def _serve(requests: socket.socket) -> list[str]:
    """In a process that is to be a command: its arguments. Everywhere else it does not return."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who wait for commands
    while True:
        request, fds, _, _ = socket.recv_fds(requests, REQUEST_BYTES_MAX, FDS)
        if not request:
            os._exit(0)
        if os.fork() == 0:
            requests.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            *outputs, way = fds
            if command := os.fork():
                _send(way, command)
                _, status = os.waitpid(command, 0)
                _send(way, os.waitstatus_to_exitcode(status))
                os._exit(0)
            for fd, output in enumerate(outputs, start=1):
                os.dup2(output, fd)
            for fd in fds:
                os.close(fd)
            arguments, folder, environment = json.loads(request)
            os.chdir(folder)
            os.environ.clear()
            os.environ.update(environment)
            return arguments
        for fd in fds:
            os.close(fd)


def main() -> None:
    app = importlib.import_module(MODULE)
    for name in LOADED_BY_COMMANDS:
        importlib.import_module(name)
    assert threading.active_count() == 1, "a fork has one thread"
    gc.collect()
    gc.freeze()  # else each fork copies all of it only to look for garbage when it ends
    app.app(_serve(socket.socket(fileno=int(sys.argv[1]))), prog_name="spark-ledger")


if __name__ == "__main__":
    main()
