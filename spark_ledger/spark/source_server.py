"""Forks the processes of streaming sources from one that has loaded what they need.

Spark starts a process of its own for the source of each streaming query, without a daemon, and it
loads PySpark, Arrow and this package by itself: half a second before the first row. The first of
PySpark's daemons (daemon.py) forks one process more, which is this server; what Spark starts then
(source_process.py) asks it for a process and hands its own standard streams, environment and
folder over. Linux only: the server is found at an abstract socket named after the JVM's pid.

Always true:
- the two are of one user and below one JVM, which both look at before a word is said; the same
  Python, and the same environment but for what Spark sets for each process (SET_BY_SPARK). Else the
  one who asks does the work itself, as he does where no server answers;
- the process forked does nothing before the one who asked has heard of it, so the work is done
  once; it ends when that one does, and the server when its daemon does;
- the server has no connection and no thread; it forks and knows nothing of what it forked.
"""

import array
import json
import os
import runpy
import signal
import socket
import struct
import sys
import threading
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import NamedTuple

RUNNER = "pyspark.sql.streaming.python_streaming_source_runner"
AVAILABLE = (
    sys.platform == "linux"
    and hasattr(os, "pidfd_open")  # not every Python was built where these are known
    and hasattr(signal, "pidfd_send_signal")
)
SET_BY_SPARK = ("PYTHON_", "SPARK_", "PYSPARK_", "OMP_")
OF_SHELLS = ("_", "SHLVL", "PWD", "OLDPWD")
PATIENCE_S = 2.0
"""Of each step of asking; Spark gives the process 10 s to connect."""
LOOK_S = 0.5
STREAMS = 3
REQUEST_BYTES_MAX = 4 << 20
GO = b"g"
ENDED_WITH_ITS_ASKER = 1

_NUMBER = struct.Struct("!I")
_CREDENTIALS = struct.Struct("3i")


class Request(NamedTuple):
    """What a process is to be started with."""

    python: str
    arguments: list[str]
    environment: dict[str, str]
    folder: str


def address(jvm: int) -> str:
    """Of the server below that JVM; abstract, gone with who listens."""
    return f"\0spark-ledger-sources-{os.getuid()}-{jvm}"


def same_start(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Whether processes with these environments start alike."""
    return _start(one) == _start(other)


def _start(environment: Mapping[str, str]) -> dict[str, str]:
    told = {
        name: value
        for name, value in environment.items()
        if not name.startswith(SET_BY_SPARK) and name not in OF_SHELLS
    }
    path = told.get("PYTHONPATH", "").split(os.pathsep)
    told["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path))  # Spark names folders twice
    return told


def peer(connection: socket.socket) -> int:
    """The pid of the other side if it is of our user, 0 if not or if it is not known here."""
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(told)
    return int(pid) if user == os.getuid() else 0


def parent_of(pid: int) -> int:
    """0 where there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except OSError:
        return 0


# -- the server -------------------------------------------------------------------------------


class Asked:
    """A question that was taken, with the three standard streams that came with it."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._streams: list[int] = []
        self.request = Request("", [], {}, "")

    def receive(self) -> None:
        """Raises OSError, ValueError, TypeError: it is none."""
        fds = array.array("i")
        room = socket.CMSG_SPACE(STREAMS * fds.itemsize)
        head, told, _, _ = self._connection.recvmsg(_NUMBER.size, room)
        for level, kind, data in told:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
        self._streams = fds.tolist()
        (size,) = _NUMBER.unpack(head + _exactly(self._connection, _NUMBER.size - len(head)))
        if size > REQUEST_BYTES_MAX or len(self._streams) != STREAMS:
            raise ValueError(f"a question of {size} bytes with {len(self._streams)} streams")
        self.request = Request(*json.loads(_exactly(self._connection, size)))

    def close(self) -> None:
        self._connection.close()
        for stream in self._streams:
            os.close(stream)

    def work(self) -> None:
        """Be the process that was asked for, to its end; in one that was forked for it."""
        self._connection.sendall(_NUMBER.pack(os.getpid()))
        self._connection.settimeout(None)  # the asker says GO, or ends, which is heard too
        if self._connection.recv(1) != GO:
            return
        for at, stream in enumerate(self._streams):
            os.dup2(stream, at)
            os.close(stream)
        os.environ.clear()
        os.environ.update(self.request.environment)
        os.chdir(self.request.folder)
        sys.argv = [RUNNER, *self.request.arguments]
        threading.Thread(target=self._end_with_asker, name="asker", daemon=True).start()
        sys.modules.pop(RUNNER, None)  # it is run anew, as the main module
        runpy.run_module(RUNNER, run_name="__main__", alter_sys=True)

    def _end_with_asker(self) -> None:
        with suppress(OSError):
            self._connection.recv(1)
        os._exit(ENDED_WITH_ITS_ASKER)


def serve_beside() -> Asked | None:
    """Fork the server, if this JVM has none; to be called by a daemon that has loaded everything.

    None in the daemon; in what the server forks, what it is there for. The server does not return.
    """
    daemon, jvm = os.getpid(), os.getppid()
    listener = _bound(jvm)
    if listener is None:
        return None
    if _forked():
        return _Server(listener, daemon, jvm).serve()
    listener.close()
    return None


def _bound(jvm: int) -> socket.socket | None:
    """None: another daemon has the address, or no socket can be had."""
    with ExitStack() as here, suppress(OSError):
        listener = here.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.bind(address(jvm))
        here.pop_all()
        return listener
    return None


class _Server:
    def __init__(self, listener: socket.socket, daemon: int, jvm: int) -> None:
        self._listener = listener
        self._daemon = daemon
        self._jvm = jvm
        self._started_with = dict(os.environ)

    def serve(self) -> Asked:
        """In a child: what it was forked for. The server itself ends when the daemon is gone."""
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in range(STREAMS):
            os.dup2(nothing, stream)
        os.close(nothing)
        interrupted = signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._listener.listen()  # from now on it is this process whose pid is told
        self._listener.settimeout(LOOK_S)
        while os.getppid() == self._daemon:
            _wait_for_the_ended()
            if (asked := self._next()) is None:
                continue
            if _forked():
                self._listener.close()
                signal.signal(signal.SIGINT, interrupted)
                return asked
            asked.close()
        os._exit(0)

    def _next(self) -> Asked | None:
        """A question to be carried out; None: there was none, or it is refused."""
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return None
        connection.settimeout(PATIENCE_S)
        asked = Asked(connection)
        try:
            if parent_of(peer(connection)) == self._jvm:
                asked.receive()
                if self._starts_alike(asked.request):
                    return asked
        except (OSError, ValueError, TypeError):
            pass
        asked.close()
        return None

    def _starts_alike(self, request: Request) -> bool:
        alike = same_start(request.environment, self._started_with)
        return alike and request.python == sys.executable


def _wait_for_the_ended() -> None:
    """None stays a zombie, and their processor time is told as this process's children's."""
    with suppress(ChildProcessError):  # there are none
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _forked() -> bool:
    """Whether this is a new process; where none can be forked it is not."""
    try:
        return os.fork() == 0
    except OSError:
        return False


def _exactly(connection: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        part = connection.recv(size - len(found))
        if not part:
            raise OSError("who asked has gone")
        found += part
    return bytes(found)


# -- who asks ---------------------------------------------------------------------------------


class Forked:
    """A process that was forked for us: it ends when this one does."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self._connection = connection
        self._handle = os.pidfd_open(pid)
        self._ended_by = 0
        signal.pidfd_send_signal(self._handle, 0)  # raises OSError where it may not

    def go(self) -> None:
        """Let it begin; a signal that is to end this process is handed on from now on. Raises
        OSError: it has not begun."""
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # it goes to both
        signal.signal(signal.SIGTERM, self._hand_on)
        try:
            self._connection.sendall(GO)
        except OSError:
            signal.signal(signal.SIGINT, before)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if self._ended_by:
                os.kill(os.getpid(), self._ended_by)
            raise
        self._connection.settimeout(None)

    def wait(self) -> None:
        """For its end."""
        with suppress(OSError):
            self._connection.recv(1)

    def _hand_on(self, number: int, _: object) -> None:
        self._ended_by = number
        with suppress(OSError):
            signal.pidfd_send_signal(self._handle, number)


def ask(request: Request) -> Forked | None:
    """A process for the request, which waits for `go`; None: there is none to be had."""
    with ExitStack() as here, suppress(OSError):
        connection = here.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        connection.settimeout(PATIENCE_S)
        jvm = os.getppid()
        connection.connect(address(jvm))
        if parent_of(parent_of(peer(connection))) != jvm:
            return None
        told = json.dumps(request).encode()
        streams = array.array("i", range(STREAMS))
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)]
        connection.sendmsg([_NUMBER.pack(len(told))], rights)
        connection.sendall(told)
        (pid,) = _NUMBER.unpack(_exactly(connection, _NUMBER.size))
        forked = Forked(connection, pid)
        here.pop_all()
        return forked
    return None
