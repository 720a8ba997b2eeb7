"""PySpark's daemon, with what its workers will need loaded before it forks them.

Spark starts one such process for each kind of worker and has it fork the workers: for planning,
for writing, for commits, and for tasks. It ends those that were idle for a minute. A worker that
had to load its part of PySpark, Arrow and this package by itself would take most of a second for
it, each time; a forked one has them. `spark-ledger-python` runs this as PySpark's daemon.

Always true: no module is loaded that opens anything or starts a thread of Python's, for a fork
would have half of it (the two that jemalloc and OpenBLAS start, under Arrow and numpy, are theirs
to bring over a fork, and they do). What cannot be loaded is left to the worker, which will say why.
"""

import gc
import importlib
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

MODULES = (
    "pyarrow",
    "kazoo.client",
    "spark_ledger.bookies.frame_network",
    "spark_ledger.process",
    "spark_ledger.metadata.zookeeper",
    "spark_ledger.spark.data_source",
    "spark_ledger.spark.read.source",
    "spark_ledger.spark.write.sink",
)
"""They import all the rest that tasks, planning and commits have in common."""
TASKS, OF_TASKS = "pyspark.worker", ("pandas",)
"""Arrow looks whether what a task that writes hands back is of pandas, where that is installed."""

GONE = 1
"""As a worker ends that is not used again."""


def main() -> None:
    """Load, and be PySpark's daemon: as it does, for the module of workers in `sys.argv[1]`."""
    role = sys.argv[1] if sys.argv[1:] else TASKS
    for module in (role, *MODULES, *(OF_TASKS if role == TASKS else ())):
        with suppress(Exception):
            importlib.import_module(module)
    gc.freeze()  # what is there stays, and a collection in a worker need not copy its pages
    from pyspark import daemon

    daemon.worker = _quiet(daemon.worker)
    daemon.manager()


def _quiet(worker: Callable[..., int]) -> Callable[..., int]:
    """Spark closes the connection of a worker that was idle for a minute. That is its end, of which
    PySpark's daemon tells by a traceback on the user's screen."""

    def run(*arguments: Any) -> int:
        try:
            return worker(*arguments)
        except BrokenPipeError:
            return GONE

    return run


if __name__ == "__main__":
    main()
