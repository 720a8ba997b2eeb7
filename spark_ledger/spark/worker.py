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
    """The path of this interpreter for Spark's workers: `PYSPARK_PYTHON`, set before the session.
    (If `PYSPARK_DRIVER_PYTHON` is set, Spark looks for sources with that one: set it too.)

    If the package's launcher was installed beside the interpreter, the path is the launcher's: the
    same Python, but it loads PySpark from the folder where pip unpacked and compiled it, not from
    `pyspark.zip`, which has no byte code. Every start of a worker, and so of a streaming query,
    takes about a second less (docs/performance-trials.md). Else it is the interpreter itself.
    """
    launcher = Path(sys.executable).parent / LAUNCHER
    return str(launcher) if os.access(launcher, os.X_OK) else sys.executable


# -- objects that the garbage collector need not visit -------------------------------------------


class Moment(Enum):
    """When objects are set aside, each moment once in a process."""

    LOADING = "this package's modules are about to be loaded"
    CONNECTED = "they are loaded, and a connection stands"


_past: dict[Moment, None] = {}


def set_aside(moment: Moment) -> None:
    """Exclude all present objects from later collections; at once, without a collection: present
    garbage stays, and imports leave little of it.

    Spark's daemon collects after each task of a worker that it will use again, and Python by itself
    while a process loads its modules. Each collection would visit all loaded objects: 40 to 60 ms
    for the 80,000 objects of PySpark and of this package, none of them garbage. Objects are set
    aside only in Spark's worker processes, never in a user's driver or another client.
    """
    if moment in _past or os.environ.get(RUNTIME_VARIABLE) != WORKER:
        return
    _past[moment] = None
    gc.freeze()


# -- what a process remembers for a while --------------------------------------------------------


class TtlCache(Generic[K, V]):
    """Keeps each value for `seconds` after `put`, so that a thousand small tasks do not ask a
    thousand times; beyond `entries_max` it evicts the oldest. For one thread."""

    def __init__(self, seconds: float, entries_max: int = ENTRIES_MAX) -> None:
        self._seconds = seconds
        self._entries_max = entries_max
        self._held: OrderedDict[K, tuple[V, float]] = OrderedDict()

    def get(self, key: K) -> V | None:
        held = self._held.get(key)
        return held[0] if held is not None and held[1] > time.monotonic() else None

    def put(self, key: K, value: V) -> V:
        self._held.pop(key, None)
        self._held[key] = (value, time.monotonic() + self._seconds)
        if len(self._held) > self._entries_max:
            self._held.popitem(last=False)
        return value

    def forget(self, is_meant: Callable[[V], bool]) -> None:
        """Drop the values for which `is_meant` is true."""
        for key in [key for key, (value, _) in self._held.items() if is_meant(value)]:
            del self._held[key]


# -- its end ---------------------------------------------------------------------------------------

_before: dict[Callable[[], None], int] = {}  # each with the id of the process that calls it


def before_termination(do: Callable[[], None]) -> None:
    """Call `do` once, in the main thread, wherever that is then, before this process ends by
    SIGTERM: so Spark ends a source's process when its query stops. `do` must not take a lock that
    this thread holds elsewhere, and must end by itself in seconds.

    The process still ends by the signal, once `do` has ended or failed; the same signal again
    changes nothing (Spark sends it twice, one right after the other). If other code handles the
    signal, or in a thread that may not handle it, this does nothing. A forked child does not call
    the functions of its parent.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminate)
    _before[do] = os.getpid()


def _terminate(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)
    for do, pid in _before.items():
        try:
            if pid == os.getpid():
                do()
        except Exception as error:  # no caller is left to get it
            _log.warning("before the end of the process: %r", error)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
