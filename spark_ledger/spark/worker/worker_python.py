"""Which Python Spark's workers should run."""

import os
import sys
from pathlib import Path

LAUNCHER = "spark-ledger-python"


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
