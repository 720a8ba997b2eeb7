"""`spark-ledger demo`: the main job from an empty folder to checked results, faults included.

Always true: however the demo ends (success, a failed check, Ctrl-C, a signal, even SIGKILL), all
processes that it started end, unless --keep keeps the cluster; the exit status is 0 only if every
check passed.
"""

import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from spark_ledger import net
from spark_ledger.errors import BadConfig, LedgerError
from spark_ledger.local import LocalCluster, background
from spark_ledger_demo.flights import FlightsMissing
from spark_ledger_demo.jars import JarsMissing, delta_jars
from spark_ledger_demo.job import Display, MainJob
from spark_ledger_demo.worker import WorkerFailed

BOOKIES = 4  # with E=3, a new fragment after a bookie's failure needs a spare
ROWS_MIN = 2_000
FAILED, INTERRUPTED = 1, 130
EXPECTED = (JarsMissing, FlightsMissing, WorkerFailed, LedgerError, OSError)
OURS = ("delays.csv", "delays.png", "flights_by_hour", "logs", "cluster")


def run(rows: int | None = None, keep: bool = False, output: str | Path = "demo-output") -> int:
    """Runs the main job on the first `rows` flights (None: all) and returns the exit status.

    Results and logs go to the folder `output`; files of an earlier run are replaced. `keep` leaves
    the cluster running, with its data in `output`/cluster.
    """
    console = Console()
    if rows is not None and rows < ROWS_MIN:
        console.print(f"demo: --rows needs at least {ROWS_MIN:,}, so that faults fall in mid-way")
        return FAILED
    try:
        with _sigterm_as_interrupt():
            return _run(console, rows, keep, Path(output).absolute())
    except KeyboardInterrupt:
        console.print("demo: interrupted; all processes that it started have ended")
        return INTERRUPTED
    except EXPECTED as error:
        console.print(f"[red]demo:[/] {error}", highlight=False)
        return FAILED


def _run(console: Console, rows: int | None, keep: bool, output: Path) -> int:
    display = Display(console)
    delta_jars()
    _clear(output)
    with LocalCluster(bookies=BOOKIES, data_dir=output / "cluster" if keep else None) as cluster:
        display.say(f"ZooKeeper and {BOOKIES} bookies are up: {cluster.service_url}")
        port = net.split(cluster.zookeeper.address)[1]
        job = MainJob(cluster, display, output, rows)
        try:
            passed = job.run()
        finally:
            job.stop()
    display.say("all checks passed" if passed else "[red]a check FAILED[/]")
    if keep:
        _leave_running(console, output / "cluster", port)
    return 0 if passed else FAILED


def _clear(output: Path) -> None:
    output.mkdir(parents=True, exist_ok=True)
    _refuse_if_up(output / "cluster")
    for name in OURS:
        path = output / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    (output / "logs").mkdir()


def _refuse_if_up(data_dir: Path) -> None:
    try:
        cluster = background.find(data_dir)
    except BadConfig:  # no cluster is up in the folder
        return
    raise BadConfig(
        f"the cluster of an earlier demo is up at {cluster.service_url}",
        f"End it with `spark-ledger down --data-dir {data_dir}`.",
    )


def _leave_running(console: Console, data_dir: Path, port: int) -> None:
    """Start a cluster on the same folder that outlives this process."""
    cluster = background.up(data_dir, BOOKIES, port)
    console.print(f"the cluster stays up at {cluster.service_url}", highlight=False)
    console.print(f"to end it: spark-ledger down --data-dir {cluster.data_dir}", highlight=False)


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
