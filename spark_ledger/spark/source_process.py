"""The process that Spark starts for the source of a streaming query, run by `spark-ledger-python`:
it has one forked that has everything loaded (source_server.py), and waits for its end; where there
is none to be had it does the work itself.
"""

import os
import runpy
import sys

from spark_ledger.spark import source_server
from spark_ledger.spark.source_server import RUNNER, Request


def main() -> None:
    if not had_it_forked():
        runpy.run_module(RUNNER, run_name="__main__", alter_sys=True)


def had_it_forked() -> bool:
    """Returns after the end of the process that was forked, True; False if there was none."""
    if not source_server.AVAILABLE:
        return False
    try:
        request = Request(sys.executable, sys.argv[1:], dict(os.environ), os.getcwd())
        if (forked := source_server.ask(request)) is None:
            return False
        forked.go()
    except OSError:  # it ended before it began, or our folder is gone
        return False
    forked.wait()
    return True


if __name__ == "__main__":
    main()
