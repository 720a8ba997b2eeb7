"""SIGTERM of every process while ZooKeeper hangs: none waits for it."""

import signal
import time

import pulsar

from bookie_server.__main__ import STOPPED
from spark_ledger.local.processes import LocalBroker
from tests.integration.pulsar_clients import TIMEOUT_MS, connected

WITHIN_S = 4.5  # 3 s of patience, and a loaded machine


def test_broker_bookie_and_autorecovery_end_within_seconds_while_zookeeper_hangs(
    fresh_cluster, tmp_path
):
    cluster = fresh_cluster(bookies=3, autorecovery=True)
    broker = LocalBroker(tmp_path / "broker.log", cluster.service_url)
    broker.start()
    try:
        with connected(broker.url) as client:
            consumer = client.subscribe("t", "s", initial_position=pulsar.InitialPosition.Earliest)
            producer = client.create_producer("t")
            producer.send(b"a")
            consumer.acknowledge(consumer.receive(TIMEOUT_MS))
            cluster.zookeeper.signal(signal.SIGSTOP)
            took_s = {
                name: _ended_after_s(process)
                for name, process in (
                    ("broker", broker),
                    ("autorecovery", cluster.autorecovery),
                    ("bookie", cluster.bookies[0]),
                )
            }
        assert max(took_s.values()) < WITHIN_S, took_s
        assert cluster.bookies[0].exit_code == STOPPED, "it flushed: nothing is to be replayed"
    finally:
        cluster.zookeeper.signal(signal.SIGCONT)
        broker.kill()


def _ended_after_s(process) -> float:
    began_s = time.monotonic()
    process.stop()
    return time.monotonic() - began_s
