"""Speculation: a slow task's second attempt, on another host, while the first is still writing.

Local mode does not speculate, and Spark never puts two attempts on one host name: so a standalone
master and two workers, at 127.0.0.1 and 127.0.0.2.
"""

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyspark

from spark_ledger.spark.worker import worker_python
from tests.kit import jvm
from tests.kit.processes import eventually
from tests.spark.exactly_once.driver_process import DriverProcess
from tests.spark.exactly_once.query import Query
from tests.spark.exactly_once.world import World

HOSTS = ("127.0.0.1", "127.0.0.2")
START_S = 60.0
ROOT = Path(__file__).parents[3]
CONF = {
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.multiplier": "1.1",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.minTaskRuntime": "100ms",
    "spark.speculation.efficiency.enabled": "false",
    "spark.executor.memory": "512m",
    "spark.executor.extraJavaOptions": jvm.options(),
    "spark.executorEnv.PYTHONPATH": str(ROOT),
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
}


@contextmanager
def standalone(folder: Path) -> Iterator[str]:
    """The master's URL; its two workers have a core each."""
    folder.mkdir()
    started: list[subprocess.Popen[bytes]] = []
    try:
        log = folder / "master.log"
        started.append(_start(log, "Master", "--host", HOSTS[0], "--port", "0"))
        url = _said(log, r"Starting Spark master at (spark://\S+)")
        for host in HOSTS:
            log, work = folder / f"worker-{host}.log", folder / f"work-{host}"
            given = ("--host", host, "--cores", "1", "--memory", "1g", "--work-dir", str(work))
            started.append(_start(log, "Worker", *given, url))
        for host in HOSTS:
            _said(folder / f"worker-{host}.log", r"(Successfully registered)")
        yield url
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait()


def speculated(world: World, master: str) -> Query:
    """A query that has done two steps with a second attempt of a task: one whose first attempt was
    killed as the loser, in mid-task, and one whose attempts both ran on when there were two."""
    driver = world.new_driver(master, **CONF)
    query = world.new_query()
    driver.start(query)
    query.feed()
    driver.wait(lambda: query.steps_done() > 0, "the first step")
    for first_goes_on in (False, True):
        _speculate(world, driver, query, first_goes_on)
    driver.kill()
    return query


def _speculate(world: World, driver: DriverProcess, query: Query, first_goes_on: bool) -> None:
    """Both attempts have sent entries when one of them, or both, go on."""
    step = query.next_step
    with query.gate(f"half-{step}-1-0") as first, query.gate(f"half-{step}-1-1") as second:
        query.feed(big=True)
        driver.wait_at(first)
        driver.wait_at(second)
        world.clean()
        if first_goes_on:
            first.open()
        second.open()
        driver.wait(lambda: query.steps_done() > step, "the step")


def _start(log: Path, what: str, *given: str) -> "subprocess.Popen[bytes]":
    spark_class = Path(pyspark.__file__).parent / "bin" / "spark-class"
    command = [str(spark_class), f"org.apache.spark.deploy.{what.lower()}.{what}"]
    environment = dict(
        os.environ,
        SPARK_DAEMON_MEMORY="256m",
        SPARK_DAEMON_JAVA_OPTS=jvm.options(),
        SPARK_LOCAL_DIRS=str(log.parent),
        SPARK_NO_DAEMONIZE="1",
        PYSPARK_PYTHON=worker_python(),
    )
    with log.open("wb") as sink:
        return subprocess.Popen(
            [*command, "--webui-port", "0", *given], env=environment, stdout=sink, stderr=sink
        )


def _said(log: Path, pattern: str) -> str:
    def found() -> re.Match[str] | None:
        return re.search(pattern, log.read_text(errors="replace"))

    assert eventually(lambda: found() is not None, START_S), log.read_text(errors="replace")[-2000:]
    match = found()
    assert match is not None
    return match.group(1)
