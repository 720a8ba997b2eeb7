"""What all tests share: clusters that are always cleaned up, and the interpreter Spark runs."""

import os
from collections.abc import Callable, Iterator

import pytest

from spark_ledger import worker_python
from spark_ledger.local import LocalCluster

os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = worker_python()
# A JVM that lives for minutes earns back neither what its second compiler nor what its collector's
# threads take from a small machine; a fifth of what starting Spark costs is checking its classes.
JVM = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
UNCHECKED = "-XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
for _options in ("SPARK_SUBMIT_OPTS", "SPARK_LAUNCHER_OPTS"):
    os.environ.setdefault(_options, f"{JVM} {UNCHECKED}")


@pytest.fixture(scope="session")
def cluster() -> Iterator[LocalCluster]:
    """Three bookies, shared by all tests of the session: leave them running as you found them."""
    with LocalCluster(bookies=3) as shared:
        yield shared


@pytest.fixture
def fresh_cluster() -> Iterator[Callable[..., LocalCluster]]:
    """Makes clusters of the test's own, with LocalCluster's arguments."""
    made: list[LocalCluster] = []

    def make(*arguments, **settings) -> LocalCluster:
        made.append(LocalCluster(*arguments, **settings))
        return made[-1]

    yield make
    for one in made:
        one.stop()
