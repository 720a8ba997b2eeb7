"""What all tests share: clusters that are always cleaned up, and the interpreter Spark runs."""

import os
from collections.abc import Callable, Iterator

import pytest

from spark_ledger import worker_python
from spark_ledger.local import LocalCluster, processes
from tests.kit import jvm, local_servers

os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = worker_python()
os.environ.setdefault("SPARK_SUBMIT_OPTS", jvm.options())
os.environ.setdefault("SPARK_LAUNCHER_OPTS", jvm.OPTIONS)
local_servers.used()

WORKERS_MAX = 16
WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % WORKERS_MAX
processes.PORTS = processes.PORTS[WORKER::WORKERS_MAX]
"""A server that a test stops for a while finds its port free: no other worker takes it."""

LONGEST = {
    "test_autorecovery",
    "test_demo",
    "test_exactly_once",
    "test_local_cluster",
    "test_notebooks",
    "test_operations",
    "test_simulation",
}
"""Files of tests that begin first, so that none of them is left when all others are done."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.stem not in LONGEST)


@pytest.fixture(scope="session")
def cluster() -> Iterator[LocalCluster]:
    """Three bookies, shared by all tests of the session: leave them running as you found them."""
    with LocalCluster(bookies=3, autorecovery=False) as shared:
        yield shared


@pytest.fixture
def fresh_cluster() -> Iterator[Callable[..., LocalCluster]]:
    """Makes clusters of the test's own, with LocalCluster's arguments; nothing heals or cleans them
    but the test, unless it asks for it."""
    made: list[LocalCluster] = []

    def make(*arguments, **settings) -> LocalCluster:
        made.append(LocalCluster(*arguments, **{"autorecovery": False, **settings}))
        return made[-1]

    yield make
    for one in made:
        one.stop()
