"""A LocalCluster in a background process (`python -m spark_ledger.local.background`); the cluster's
folder identifies it.

Always true: the background process has the lock of the folder's `cluster.lock` as long as it lives,
so the lock shows whether the cluster is up; the file has the process's pid. `cluster.json` has the
cluster's URLs, and exists only while the cluster serves.
"""

import contextlib
import fcntl
import json
import os
import shlex
import signal
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

from spark_ledger import net
from spark_ledger.errors import BadConfig, LedgerError, Unavailable, counted
from spark_ledger.local.cluster import LocalCluster, count_of_bookies
from spark_ledger.local.maintenance import maintain_on
from spark_ledger.local.processes import HOST, Child, lock_path
from spark_ledger.process import background_loop
from spark_ledger.topic.log.policies import PASS_BYTES, TopicPolicies

LOCK_FILE, STATE_FILE, LOG_FILE = "cluster.lock", "cluster.json", "cluster.log"
START_TIMEOUT_S, STOP_TIMEOUT_S, POLL_S = 120.0, 60.0, 0.02


@dataclass(frozen=True, slots=True)
class Background:
    """A cluster that is up: its process, its service URL, the folder of its data, its broker's
    URLs for Pulsar's clients and for HTTP, and the file of the broker's other settings; "" without
    a broker, or without the file."""

    pid: int
    service_url: str
    data_dir: str
    broker_url: str = ""
    admin_url: str = ""
    broker_config: str = ""


def up(
    data_dir: Path,
    bookies: int = 3,
    port: int | None = None,
    *,
    merge_bytes: int = PASS_BYTES,
    broker_port: int | None = None,
    admin_port: int | None = None,
    broker_config: Path | None = None,
) -> Background:
    """Start a cluster in the background; returns when it serves. Each minute the cluster copies
    about `merge_bytes` at most, to merge small segments of topics. `broker_port`: the port of the
    broker; None: no broker. `admin_port`: the broker's port for HTTP; None: a free port.
    `broker_config`: a file of the broker's other settings.

    Raises errors.BadConfig (the cluster is up already, a port is taken, there is no Java),
    errors.Unavailable.
    """
    data_dir = data_dir.absolute()
    if _holder(data_dir) is not None:
        raise _already_up_error(data_dir)
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadConfig(f"{data_dir} cannot be used: {error.strerror}") from error
    ports = ((broker_port, "--broker-port"), (admin_port, "--admin-port"))
    for number, flag in ports if broker_port is not None else ():
        if number is not None and not net.is_free(HOST, number):
            raise BadConfig(
                f"the broker's port {number} is taken",
                f"Choose another port with {flag}, or start without a broker: --no-broker.",
            )
    arguments = {"data_dir": str(data_dir), "bookies": bookies, "port": port}
    arguments |= {"merge_bytes": merge_bytes, "broker_port": broker_port, "admin_port": admin_port}
    if broker_config is not None:
        arguments["broker_config"] = str(broker_config.absolute())
    command = [sys.executable, "-m", "spark_ledger.local.background", json.dumps(arguments)]
    child = Child("the cluster", command, data_dir / LOG_FILE)
    try:
        facts = json.loads(child.first_line(START_TIMEOUT_S))
    except BaseException:
        child.kill()
        raise
    if "error" in facts:
        child.wait(STOP_TIMEOUT_S)
        raise (BadConfig if facts["wrong_use"] else Unavailable)(facts["error"], facts["remedy"])
    return Background(**facts)


def refuse_too_few(data_dir: Path, bookies: int) -> None:
    """Raises errors.BadConfig if the cluster would have fewer bookies than a topic's ledgers need,
    so that every write would fail."""
    needed = TopicPolicies().ensemble_size
    bookie_count = max(bookies, count_of_bookies(data_dir))
    if bookie_count < needed:
        raise BadConfig(
            f"with {counted(bookie_count, 'bookie')} no row and no message can be stored: topics"
            f" need {needed} bookies, with a copy on each",
            f"Give --bookies {needed}, or leave the option out: all bookies run on this machine."
            f" (For ledgers of fewer copies: LocalCluster(bookies={bookie_count}) in Python.)",
        )


def find(data_dir: Path) -> Background:
    """The cluster that is up in the folder. Raises errors.BadConfig if no cluster is up in it."""
    data_dir = data_dir.absolute()
    if _holder(data_dir) is None:
        raise _nothing_up_error(data_dir)
    try:
        return Background(**json.loads((data_dir / STATE_FILE).read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise Unavailable(
            f"the cluster in {data_dir} is starting or stopping", "Try again in a moment."
        ) from None


def down(data_dir: Path) -> None:
    """Stop the cluster of the folder; on return all its processes have ended.

    Raises errors.BadConfig if no cluster is up in the folder.
    """
    data_dir = data_dir.absolute()
    pid = _holder(data_dir)
    if pid is None:
        raise _nothing_up_error(data_dir)
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while time.monotonic() < deadline:
            if _holder(data_dir) is None:
                return
            time.sleep(POLL_S)
    raise Unavailable(f"process {pid} does not end", "End it by hand.")


def _already_up_error(data_dir: Path) -> BadConfig:
    """The error names the parts of the cluster that have died, and what starts them again."""
    what, down = (
        f"a cluster is up already in {data_dir}",
        f"--data-dir {shlex.quote(str(data_dir))}",
    )
    end = f"end it with `spark-ledger down {down}`: its data stay, and the next `up` starts all its"
    try:
        cluster = find(data_dir)
    except LedgerError:  # it starts or stops
        return BadConfig(what, f"Use it, or {end} processes again.")
    bookies = [
        f"bookie {number}"
        for number in range(count_of_bookies(data_dir))
        if not _is_used(data_dir / "bookies" / str(number))
    ]
    zookeeper = [] if _is_served(cluster.service_url) else ["ZooKeeper"]
    if zookeeper or bookies:
        broker = [] if _is_served(cluster.broker_url) else ["broker"]
        dead = ", ".join([*zookeeper, *bookies, *broker])
        return BadConfig(
            f"{what}, and parts of it have died: {dead}", f"To start them, {end} processes again."
        )
    if not _is_served(cluster.broker_url):
        return BadConfig(
            f"{what}, and its broker has died",
            f"Start the broker with `{_broker_command(cluster)}`, or {end} processes again.",
        )
    return BadConfig(what, f"Use it, or {end} processes again.")


def _broker_command(cluster: Background) -> str:
    """The command that starts the cluster's broker again."""
    options = ["--service-url", cluster.service_url]
    for flag, url in (("--broker-port", cluster.broker_url), ("--admin-port", cluster.admin_url)):
        options += [flag, str(urlsplit(url).port)]
    if cluster.broker_config:
        options += ["--config", cluster.broker_config]
    return f"spark-ledger broker start {shlex.join(options)}"


def _is_served(url: str) -> bool:
    """Whether a process listens at the URL, or there is no URL."""
    place = urlsplit(url)
    return place.hostname is None or not net.is_free(place.hostname, place.port or 0)


def _is_used(folder: Path) -> bool:
    """Whether a bookie runs on this folder: the process has locked a file in each directory."""
    for path in folder.glob("*/*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            finally:
                os.close(fd)
    return False


def _nothing_up_error(data_dir: Path) -> BadConfig:
    return BadConfig(
        f"no cluster is up in {data_dir}",
        "Start a cluster with `spark-ledger up`, or give its folder with --data-dir.",
    )


def _holder(data_dir: Path) -> int | None:
    """The pid of the process that holds the folder's lock; None if no process holds it."""
    try:
        fd = os.open(data_dir / LOCK_FILE, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        return int(os.pread(fd, 32, 0) or 0) or None
    finally:
        os.close(fd)


# -- the background process -------------------------------------------------------------------


def main() -> None:
    """Run the background process; its argument has the arguments of `up`, as JSON."""
    arguments = json.loads(sys.argv[1])
    data_dir, merge_bytes = Path(arguments.pop("data_dir")), arguments.pop("merge_bytes")
    stop = threading.Event()
    state = data_dir / STATE_FILE
    try:
        lock = lock_path(
            data_dir / LOCK_FILE, _already_up_error(data_dir)
        )  # until the process ends
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)
        state.unlink(missing_ok=True)
        # autorecovery=False: this process hosts autorecovery and upkeep itself
        with LocalCluster(data_dir=data_dir, autorecovery=False, **arguments) as cluster:
            signal.signal(signal.SIGTERM, lambda *_: stop.set())
            broker = cluster.broker
            urls = ("", "") if broker is None else (broker.url, broker.admin_url)
            config = arguments.get("broker_config", "")
            background = Background(os.getpid(), cluster.service_url, str(data_dir), *urls, config)
            new_state = state.with_suffix(".new")
            new_state.write_text(json.dumps(asdict(background)), encoding="utf-8")
            new_state.replace(state)  # in one step, so that no reader sees half of the file
            maintenance = background_loop().submit(
                maintain_on(cluster.service_url, merge_bytes=merge_bytes)
            )
            maintenance.add_done_callback(_report_end)
            if _print_facts(asdict(background)):
                stop.wait()
            else:
                print("`spark-ledger up` ended before the cluster was ready: the cluster stops")
            maintenance.cancel()
            state.unlink(missing_ok=True)
    except LedgerError as error:
        wrong_use = isinstance(error, BadConfig)
        _print_facts({"error": error.what, "remedy": error.remedy, "wrong_use": wrong_use})
        sys.exit(1)


def _report_end(maintenance: "Future[None]") -> None:
    if not maintenance.cancelled():
        print(f"maintenance ended: {maintenance.exception()!r}", file=sys.stderr, flush=True)


def _print_facts(facts: dict[str, object]) -> bool:
    """Print the one line that `up` waits for. Returns False if `up` ended before; what is printed
    from then on goes to the log, as errors do."""
    try:
        print(json.dumps(facts), flush=True)
    except BrokenPipeError:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        return False
    return True


if __name__ == "__main__":
    main()
