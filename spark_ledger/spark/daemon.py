"""PySpark's daemon, which loads the modules of its workers before it forks them.

Spark starts one daemon for each kind of worker (planning, writing, commits, tasks), and the daemon
forks the workers. Spark ends workers that were idle for a minute. A worker that loads PySpark,
Arrow and this package by itself takes most of a second each time; a forked worker has these modules
already. `spark-ledger-python` runs this module as PySpark's daemon.

Always true: no module that this daemon loads opens a file or socket, or starts a Python thread: a
forked worker could not use them. (jemalloc and OpenBLAS, under Arrow and numpy, start a thread
each, and both handle a fork.) If the daemon cannot load a module, the worker loads the module
itself, and raises the error.
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
"""These modules import all others that tasks, planning and commits share."""
TASK_WORKER, TASK_MODULES = "pyspark.worker", ("pandas",)
"""If pandas is installed, Arrow imports it to check the result of a writing task."""

EXIT_NOT_REUSED = 1
"""The exit code of a worker that Spark does not use again."""


def main() -> None:
    """Load the modules, then run PySpark's daemon for the module of workers in `sys.argv[1]`."""
    role = sys.argv[1] if sys.argv[1:] else TASK_WORKER
    for module in (role, *MODULES, *(TASK_MODULES if role == TASK_WORKER else ())):
        with suppress(Exception):
            importlib.import_module(module)
    gc.freeze()  # so that a collection in a worker does not copy the pages of these objects
    from pyspark import daemon

    daemon.worker = _without_traceback(daemon.worker)
    daemon.manager()


def _without_traceback(worker: Callable[..., int]) -> Callable[..., int]:
    """The worker, but a BrokenPipeError ends it without a traceback on the user's screen: Spark
    closes the connection of a worker that was idle for a minute."""

    def run(*arguments: Any) -> int:
        try:
            return worker(*arguments)
        except BrokenPipeError:
            return EXIT_NOT_REUSED

    return run


if __name__ == "__main__":
    main()
