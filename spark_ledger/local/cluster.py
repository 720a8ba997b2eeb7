"""The embedded cluster: ZooKeeper, bookies, autorecovery with upkeep, and a broker, as processes on
this machine.

Always true: every process listens on the loopback interface; no process outlives the process that
made the cluster, even if that process is killed with SIGKILL; without a data_dir no file stays on
disk; one cluster at a time uses a data_dir.
"""

import atexit
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from spark_ledger.errors import BadConfig
from spark_ledger.local.embedded_zookeeper import EmbeddedZooKeeper
from spark_ledger.local.processes import LocalAutorecovery, LocalBookie, LocalBroker, lock_path
from spark_ledger.metadata.zookeeper import connect
from spark_ledger.process import background_loop
from spark_ledger.repair import status

ROOT = "/ledger"
LOCK_FILE = "in-use.lock"

Settings = dict[str, object]


class LocalCluster:
    """A context manager: the constructor starts the cluster, and leaving the `with` block stops it.

    `bookies`: the least number of bookies. `data_dir`: the folder of all data; None: a temporary
    folder that is deleted at exit. With the folder of an earlier cluster, all bookies of that
    cluster start. `port`: the port of ZooKeeper; None: a free port. `bookie_settings`: settings of
    conf/bookie.toml for every bookie, or a function that returns the settings of bookie 0, 1, ....
    `autorecovery`: whether a process hosts autorecovery and upkeep of topics; the start does not
    wait for this process. `lost_bookie_delay_s`: the new value of the cluster's setting; None: the
    value stays. `broker_port`: the port of a broker for Pulsar's clients, which starts at once;
    None: the broker starts on a free port when `broker_url` or `admin_url` is first used.
    `admin_port`: the broker's port for HTTP; None: a free port. `broker_config`: a file of the
    broker's other settings, as conf/broker.toml.

    Raises errors.BadConfig (Java is missing or too old, the port is taken, data_dir is in use or
    cannot be written) and errors.Unavailable (a process did not come up; quotes its log).
    """

    def __init__(
        self,
        bookies: int = 3,
        data_dir: str | Path | None = None,
        *,
        port: int | None = None,
        bookie_settings: Settings | Callable[[int], Settings] | None = None,
        autorecovery: bool = True,
        lost_bookie_delay_s: float | None = None,
        broker_port: int | None = None,
        admin_port: int | None = None,
        broker_config: str | Path | None = None,
    ) -> None:
        self._temporary = data_dir is None
        self._owner = os.getpid()
        if data_dir is None:
            self.data_dir = Path(tempfile.mkdtemp(prefix="spark-ledger-"))
        else:
            self.data_dir = Path(data_dir).absolute()
        self._lock: int | None = _lock_folder(self.data_dir)
        self._settings = bookie_settings or {}
        self._broker_config = None if broker_config is None else Path(broker_config)
        self.bookies: list[LocalBookie] = []
        self.autorecovery: LocalAutorecovery | None = None
        """None with autorecovery=False."""
        self.broker: LocalBroker | None = None
        """None until the broker is started."""
        delete_with_parent = self.data_dir if self._temporary else None
        self.zookeeper = EmbeddedZooKeeper(self.data_dir / "zookeeper", port, delete_with_parent)
        atexit.register(self.stop)
        try:
            self._start(bookies)
            if lost_bookie_delay_s is not None:
                background_loop().run(_set_lost_bookie_delay(self.service_url, lost_bookie_delay_s))
            if autorecovery:
                log = self.data_dir / "autorecovery.log"
                self.autorecovery = LocalAutorecovery(log, self.service_url)
                self.autorecovery.start()
            if broker_port is not None:
                self._start_broker(broker_port, admin_port)
        except BaseException:
            self.stop()
            raise

    @property
    def service_url(self) -> str:
        return f"zk://{self.zookeeper.address}{ROOT}"

    @property
    def broker_url(self) -> str:
        """The URL for Pulsar's clients. Raises errors.Unavailable if the broker does not start."""
        return (self.broker or self._start_broker(None, None)).url

    @property
    def admin_url(self) -> str:
        """As `broker_url`, for HTTP requests of Pulsar's clients."""
        return (self.broker or self._start_broker(None, None)).admin_url

    def add_bookie(self) -> LocalBookie:
        """Start one more bookie on an empty folder; returns when it is registered as writable."""
        bookie = self._new_bookie(len(self.bookies))
        bookie.start()
        self.bookies.append(bookie)
        return bookie

    def stop(self) -> None:
        """End all processes in good order, wait for them, and delete a temporary folder."""
        if os.getpid() != self._owner:
            return  # this process is a fork of the one that made the cluster
        atexit.unregister(self.stop)
        if self.broker is not None:
            self.broker.stop()
        if self.autorecovery is not None:
            self.autorecovery.ask_to_stop()
        for bookie in self.bookies:
            bookie.ask_to_stop()
        for bookie in self.bookies:
            bookie.wait_until_stopped()
        if self.autorecovery is not None:
            self.autorecovery.wait_until_stopped()
        self.zookeeper.stop()
        if self._lock is not None:
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # forks of this process have the file open too
            os.close(self._lock)
            self._lock = None
        if self._temporary:
            shutil.rmtree(self.data_dir, ignore_errors=True)

    def __enter__(self) -> "LocalCluster":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self, count: int) -> None:
        self.zookeeper.start()
        for number in range(max(count, count_of_bookies(self.data_dir))):
            bookie = self._new_bookie(number)
            self.bookies.append(bookie)
            bookie.launch()
        for bookie in self.bookies:
            bookie.wait_until_registered()

    def _start_broker(self, port: int | None, admin_port: int | None) -> LocalBroker:
        log = self.data_dir / "broker.log"
        broker = LocalBroker(log, self.service_url, port, admin_port, self._broker_config)
        broker.start()
        self.broker = broker
        return broker

    def _new_bookie(self, number: int) -> LocalBookie:
        folder = self.data_dir / "bookies" / str(number)
        settings = self._settings(number) if callable(self._settings) else self._settings
        return LocalBookie(folder, self.service_url, settings)


def count_of_bookies(data_dir: Path) -> int:
    """The number of bookies that an earlier cluster of the folder had."""
    names = [path.name for path in (data_dir / "bookies").glob("*") if path.name.isdigit()]
    return max([0, *(int(name) + 1 for name in names)])


async def _set_lost_bookie_delay(service_url: str, lost_bookie_delay_s: float) -> None:
    """Raises errors.BadConfig, errors.Unavailable."""
    store = await connect(service_url)
    try:
        await status.change_settings(store, lost_bookie_delay_s=lost_bookie_delay_s)
    finally:
        await store.close()


def _lock_folder(data_dir: Path) -> int:
    """Lock the folder for a cluster of this process; returns the descriptor that has the lock."""
    remedy = "Stop that cluster, or give another folder."
    in_use_error = BadConfig(f"folder {data_dir} is in use by another cluster", remedy)
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        return lock_path(data_dir / LOCK_FILE, in_use_error)
    except OSError as error:
        raise BadConfig(
            f"folder {data_dir} cannot be used: {error.strerror}", "Give another folder."
        ) from None
