"""PySpark's daemon, which loads the modules of its workers before it forks them.

Spark starts one such process for each kind of worker, and it forks the workers: for planning, for
writing, for commits, and for tasks. Spark ends workers that were idle for a minute. A worker that
had to load its part of PySpark, Arrow and this package by itself would take most of a second for
that, each time; a forked worker has them. `spark-ledger-python` runs this as PySpark's daemon.

Always true: no module is loaded that opens a file or socket, or starts a Python thread, as a fork
would have half of it (jemalloc and OpenBLAS, under Arrow and numpy, start a thread each, and bring
it over a fork). A module that cannot be loaded is left to the worker, which raises the reason.
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
"""They import all other modules that tasks, planning and commits share."""
TASKS, OF_TASKS = "pyspark.worker", ("pandas",)
"""Arrow checks whether the result of a writing task is of pandas, if pandas is installed."""

GONE = 1
"""The exit code of a worker that is not used again."""


def main() -> None:
    """Load the modules, then run PySpark's daemon for the module of workers in `sys.argv[1]`."""
    role = sys.argv[1] if sys.argv[1:] else TASKS
    for module in (role, *MODULES, *(OF_TASKS if role == TASKS else ())):
        with suppress(Exception):
            importlib.import_module(module)
    gc.freeze()  # these objects stay, and a collection in a worker need not copy their pages
    from pyspark import daemon

    daemon.worker = _quiet(daemon.worker)
    daemon.manager()


def _quiet(worker: Callable[..., int]) -> Callable[..., int]:
    """The worker without the traceback on the user's screen with which PySpark's daemon reports its
    end: Spark closes the connection of a worker that was idle for a minute."""

    def run(*arguments: Any) -> int:
        try:
            return worker(*arguments)
        except BrokenPipeError:
            return GONE

    return run


if __name__ == "__main__":
    main()
