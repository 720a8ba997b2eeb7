"""What `broker.py` compares: brokers with their storage, each started empty and taken down again.

Pulsar is a standalone of `peers/peers.sh`: broker, bookie and metadata in one JVM, one copy. Ours
are processes of their own: a broker, one or three bookies, ZooKeeper. Where a name says `synced`
every copy that counts is on the disk before a receipt (Pulsar: journalSyncData=true), else it is
in the page cache (journalSyncData=false; durability `page-cache`). Always true: what was started
has ended when its context is left.
"""

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from benchmarks import contenders
from benchmarks.processes import below, cpu_s
from spark_ledger.local import LocalCluster
from spark_ledger.topic import blocking
from spark_ledger.topic.log.policies import TopicPolicies

PULSAR, OURS, OURS_3 = "Pulsar, one copy", "ours, one copy", "ours, three copies"
PULSAR_PORT, WEB_ABOVE = 16650, 1430
READY_S = 60


@dataclass(frozen=True)
class Server:
    """`pids` are the broker's, `storage` those of what is beside it. `create` makes a topic with so
    many partitions; 0: that is not partitioned."""

    name: str
    url: str
    pids: tuple[int, ...]
    storage: tuple[int, ...]
    create: Callable[[str, int], None]
    service_url: str = ""

    def cpu_s(self) -> tuple[float, float]:
        """Processor seconds of the broker, and of all."""
        broker = sum(map(cpu_s, self.pids))
        return broker, broker + sum(map(cpu_s, self.storage))


def running(name: str, *, synced: bool) -> "contextmanager[Server]":
    return _pulsar(synced) if name == PULSAR else _ours(name, synced)


def has_pulsar() -> bool:
    return (contenders.home() / "pulsar" / "lib").is_dir()


def install_pulsar() -> None:
    """Fetch it if it is not there; the network is needed once."""
    if not has_pulsar():
        contenders.peers_sh("install", "pulsar")


@contextmanager
def _pulsar(synced: bool) -> Iterator[Server]:
    run = contenders.home() / "run"
    if (run / "pulsar").exists():
        contenders.peers_sh("down")  # of a run that was killed
    try:
        _up(synced)
        pids = tuple(map(int, (run / "pids").read_text().split()))
        yield Server(PULSAR, f"pulsar://127.0.0.1:{PULSAR_PORT}", pids, (), lambda *_: None)
    finally:
        contenders.peers_sh("down")


def _up(synced: bool) -> None:
    """Returns when the namespace is there: the standalone makes it after its ports are open."""
    subprocess.run(
        [contenders.PEERS_SH, "up", "pulsar", str(PULSAR_PORT), str(synced).lower()],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    policies = f"http://127.0.0.1:{PULSAR_PORT + WEB_ABOVE}/admin/v2/namespaces/public/default"
    last = time.monotonic() + READY_S
    while True:
        try:
            with urlopen(Request(policies), timeout=5):
                return
        except (HTTPError, OSError):
            if time.monotonic() > last:
                raise
            time.sleep(0.5)


@contextmanager
def _ours(name: str, synced: bool) -> Iterator[Server]:
    copies = 3 if name == OURS_3 else 1
    policies = TopicPolicies(
        ensemble_size=copies,
        write_quorum=copies,
        ack_quorum=min(2, copies),
        durability="synced" if synced else "page-cache",
    )
    with LocalCluster(bookies=copies, autorecovery=False) as cluster:
        topics = blocking.topics(cluster.service_url)
        url = cluster.broker_url

        def create(topic: str, partitions: int) -> None:
            own = replace(policies, partitioned=partitions > 0)
            topics.run(topics.client.topics.create(topic, max(1, partitions), own))

        assert cluster.broker is not None and cluster.broker.pid is not None
        guarded = tuple(below(cluster.broker.pid))
        bookies = tuple(one.pid for one in cluster.bookies if one.pid is not None)
        yield Server(
            name,
            url,
            (cluster.broker.pid, *guarded),
            (*bookies, contenders.zookeeper_pid(cluster)),
            create,
            cluster.service_url,
        )
