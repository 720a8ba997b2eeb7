"""Spark's Python processes: which Python they run, what they remember, what they do at their end.
Imports only the standard library: every session that looks for a Python source loads this file."""

import gc
import logging
import os
import signal
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from enum import Enum
from pathlib import Path
from types import FrameType
from typing import Generic, TypeVar

LAUNCHER = "spark-ledger-python"
RUNTIME_VARIABLE, WORKER = "SPARK_PYTHON_RUNTIME", "PYTHON_WORKER"
"""The variable, and its value, that Spark's JVM sets for a worker process."""
ENTRIES_MAX = 2048  # of about a KiB each
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

_log = logging.getLogger(__name__)


def worker_python() -> str:
    """The path of this interpreter for Spark's workers. Set the variable `PYSPARK_PYTHON` to it
    before the session starts. (If `PYSPARK_DRIVER_PYTHON` is set, Spark looks for sources with that
    interpreter: set both variables.)

    If the package's launcher was installed beside the interpreter, the path is the launcher's. The
    launcher runs the same Python, but loads PySpark from the folder in which pip unpacked and
    compiled it, not from `pyspark.zip`, which has no byte code. Every start of a worker, and so of
    a streaming query, takes about a second less (docs/performance-trials.md).
    """
    launcher = Path(sys.executable).parent / LAUNCHER
    return str(launcher) if os.access(launcher, os.X_OK) else sys.executable


# -- objects that the garbage collector need not visit -------------------------------------------


class Moment(Enum):
    """The moments at which the present objects are excluded from garbage collection, each once in
    a process."""

    LOADING = "this package's modules are about to be loaded"
    CONNECTED = "this package's modules are loaded, and a connection is open"


moments_seen: dict[Moment, None] = {}


def exclude_from_gc(moment: Moment) -> None:
    """Exclude all present objects from later collections. Present garbage then stays for ever; no
    collection comes first, as imports leave little garbage.

    Spark's daemon collects after each task of a worker that it will use again, and Python collects
    while a process loads its modules. Each collection would visit all loaded objects: 40 to 60 ms
    for the 80,000 objects of PySpark and of this package, which are no garbage. This function has
    an effect only in Spark's worker processes, never in a user's driver or another client.
    """
    if moment in moments_seen or os.environ.get(RUNTIME_VARIABLE) != WORKER:
        return
    moments_seen[moment] = None
    gc.freeze()


# -- what a process remembers for a while --------------------------------------------------------


class TtlCache(Generic[K, V]):
    """Keeps each value for `seconds` after `put`, so that a thousand small tasks do not send a
    thousand requests; beyond `entries_max` the oldest value is evicted. For one thread."""

    def __init__(self, seconds: float, entries_max: int = ENTRIES_MAX) -> None:
        self._seconds = seconds
        self._entries_max = entries_max
        self._entries: OrderedDict[K, tuple[V, float]] = OrderedDict()

    def get(self, key: K) -> V | None:
        entry = self._entries.get(key)
        return entry[0] if entry is not None and entry[1] > time.monotonic() else None

    def put(self, key: K, value: V) -> V:
        self._entries.pop(key, None)
        self._entries[key] = (value, time.monotonic() + self._seconds)
        if len(self._entries) > self._entries_max:
            self._entries.popitem(last=False)
        return value

    def drop_if(self, is_stale: Callable[[V], bool]) -> None:
        """Drop the values for which `is_stale` is true."""
        for key in [key for key, (value, _) in self._entries.items() if is_stale(value)]:
            del self._entries[key]


# -- the end of a process --------------------------------------------------------------------------

_functions: dict[Callable[[], None], int] = {}  # each with the id of its process


def call_before_termination(do: Callable[[], None]) -> None:
    """Call `do` once before this process ends by SIGTERM, the signal by which Spark ends a source's
    process when its query stops. `do` may interrupt the main thread at any line: `do` must take no
    lock that this thread uses elsewhere, and must end within seconds.

    When `do` has ended or failed, the process still ends by the signal. A second signal changes
    nothing (Spark sends two in a row). `do` is not called if other code handles the signal, or if
    the caller is not the main thread. A forked child does not call the functions of its parent.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminate)
    _functions[do] = os.getpid()


def _terminate(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)
    for do, pid in _functions.items():
        try:
            if pid == os.getpid():
                do()
        except Exception as error:  # no caller is left to get it
            _log.warning("before the end of the process: %r", error)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
