"""Spark's Python processes: which Python they run, what they remember, what they do at their end.
Imports nothing but the standard library: every session that looks for a Python source loads it."""

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
"""By which Spark's JVM tells a process that it is a worker."""
ENTRIES_MAX = 2048  # of about a KiB each
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

_log = logging.getLogger(__name__)


def worker_python() -> str:
    """The path of this interpreter for Spark's workers: `PYSPARK_PYTHON`, set before the session.
    (Where `PYSPARK_DRIVER_PYTHON` is set, what Spark finds by itself runs that: set it too.)

    Where the package's launcher was installed beside the interpreter, it is the launcher: the same
    Python, which loads PySpark from where pip unpacked and compiled it instead of from
    `pyspark.zip`, which has no byte code. Every start of a worker, and so of a streaming query,
    takes about a second less (docs/performance-trials.md). Elsewhere it is the interpreter itself.
    """
    launcher = Path(sys.executable).parent / LAUNCHER
    return str(launcher) if os.access(launcher, os.X_OK) else sys.executable


# -- what the garbage collector need not look at -------------------------------------------------


class Moment(Enum):
    """When things are set aside, each once in a process."""

    LOADING = "this package's modules are about to be loaded"
    CONNECTED = "they are loaded, and a connection stands"


_past: dict[Moment, None] = {}


def set_aside(moment: Moment) -> None:
    """Leave out of all later collections what there is now; at once, without a collection: what
    is garbage now stays, and that is the little that imports leave.

    Spark's daemon collects after each task of a worker that it will use again, and Python by itself
    while a process loads its modules: every time all that was ever loaded is visited, 40 to 60 ms
    for the 80,000 objects of PySpark and of this package, none of them garbage. Only in a process
    of Spark's is anything set aside, never in a user's driver or another client.
    """
    if moment in _past or os.environ.get(RUNTIME_VARIABLE) != WORKER:
        return
    _past[moment] = None
    gc.freeze()


# -- what a process remembers for a while --------------------------------------------------------


class TtlCache(Generic[K, V]):
    """Each value for `seconds` since it was put, so that a thousand small tasks do not ask a
    thousand times; of more than `entries_max` the oldest go first. For one thread."""

    def __init__(self, seconds: float, entries_max: int = ENTRIES_MAX) -> None:
        self._seconds = seconds
        self._entries_max = entries_max
        self._held: OrderedDict[K, tuple[V, float]] = OrderedDict()

    def get(self, key: K) -> V | None:
        found = self._held.get(key)
        return found[0] if found is not None and found[1] > time.monotonic() else None

    def put(self, key: K, value: V) -> V:
        self._held.pop(key, None)
        self._held[key] = (value, time.monotonic() + self._seconds)
        if len(self._held) > self._entries_max:
            self._held.popitem(last=False)
        return value

    def forget(self, which: Callable[[V], bool]) -> None:
        """Give out none of these any more."""
        for key in [key for key, (value, _) in self._held.items() if which(value)]:
            del self._held[key]


# -- its end ---------------------------------------------------------------------------------------

_before: dict[Callable[[], None], int] = {}  # and by which process that is to be done


def before_termination(do: Callable[[], None]) -> None:
    """`do` it, once, in the main thread, wherever that is then, before this process ends by
    SIGTERM: so Spark ends a source's process when its query stops. It may take no lock that this
    thread holds elsewhere, and ends by itself in seconds.

    The process ends by the signal all the same, once that is done or has failed; the same signal
    again changes nothing (Spark sends it twice, one right after the other). Where other code
    handles the signal, or in a thread that may not, nothing is changed. A forked child has nothing
    to do of what its parent has.
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
