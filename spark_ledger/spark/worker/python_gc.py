"""What the garbage collector need not look at in a Python process that Spark started.

Spark's daemon collects after each task of a worker that it will use again, and Python by itself
while a process loads its modules: every time all that was ever loaded is visited, 40 to 60 ms for
the 80,000 objects of PySpark and of this package, none of them garbage. Always true: only in a
process of Spark's is anything set aside, never in a user's driver or another client; that is what
was there when this package began to load, and once more when its first connection stands, before a
row is read: what becomes garbage after that is found as ever.
"""

import gc
import os
from enum import Enum

RUNTIME_VARIABLE, WORKER = "SPARK_PYTHON_RUNTIME", "PYTHON_WORKER"
"""By which Spark's JVM tells a process that it is a worker."""


class Moment(Enum):
    """When things are set aside, each once in a process."""

    LOADING = "this package's modules are about to be loaded"
    CONNECTED = "they are loaded, and a connection stands"


_past: dict[Moment, None] = {}


def set_aside(moment: Moment) -> None:
    """Leave out of all later collections what there is now; at once, without a collection: what
    is garbage now stays, and that is the little that imports leave."""
    if moment in _past or os.environ.get(RUNTIME_VARIABLE) != WORKER:
        return
    _past[moment] = None
    gc.freeze()
