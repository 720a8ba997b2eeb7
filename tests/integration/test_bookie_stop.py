"""How a bookie ends when it is told to: under load, and told twice."""

import contextlib
import os
import signal
import threading
from concurrent.futures import Future
from pathlib import Path

from bookie_server.__main__ import SECOND_SIGNAL, STOPPED
from spark_ledger import LedgerClient
from spark_ledger.config import client_config
from spark_ledger.errors import LedgerError
from spark_ledger.local import LocalCluster
from tests.kit.processes import eventually

PAYLOAD = bytes(16 * 1024)
APPENDS_MAX = 40_000
BEFORE = 500  # appends that are answered before the signal comes


def replayed(log: Path) -> list[str]:
    """What each start said of its replay."""
    return [line for line in log.read_text().splitlines() if "records replayed" in line]


def test_sigterm_under_load_loses_nothing_acknowledged_and_leaves_nothing_to_replay(fresh_cluster):
    cluster: LocalCluster = fresh_cluster(bookies=1)
    bookie = cluster.bookies[0]
    config = client_config(replica_timeout_s=30.0, spare_grace_s=2.0)
    with LedgerClient(cluster.service_url, config) as client:
        writer = client.create_ledger(1, 1, 1)
        adds: list[Future[int]] = []

        def load() -> None:
            with contextlib.suppress(LedgerError):  # the writer is over when its only bookie is
                while bookie.running and len(adds) < APPENDS_MAX:
                    adds.append(writer.append_async(PAYLOAD))

        loading = threading.Thread(target=load)
        loading.start()
        assert eventually(lambda: len(adds) > BEFORE and adds[BEFORE].done())
        bookie.stop()
        assert bookie.exit_code == STOPPED
        loading.join()
        acked = [number for number, add in enumerate(adds) if add.exception() is None]
        assert BEFORE < len(acked) < len(adds)
        bookie.start()
        assert replayed(bookie.log)[-1].endswith(" 0 records replayed")
        reader = client.open_ledger(writer.ledger_id)
        found = [entry_id for entry_id, _ in reader.read(0, acked[-1])]
        assert found == list(range(acked[-1] + 1))


def test_a_second_signal_ends_it_at_once_and_the_next_start_replays(fresh_cluster):
    cluster: LocalCluster = fresh_cluster(bookies=1, bookie_settings={"flush_interval_s": 600})
    bookie = cluster.bookies[0]
    with LedgerClient(cluster.service_url) as client:
        writer = client.create_ledger(1, 1, 1)
        writer.append(PAYLOAD)
        assert bookie.pid is not None
        os.kill(bookie.pid, signal.SIGSTOP)  # so that it has not ended before the second comes
        os.kill(bookie.pid, signal.SIGTERM)
        os.kill(bookie.pid, signal.SIGINT)
        os.kill(bookie.pid, signal.SIGCONT)
        bookie.wait_until_stopped()
        assert bookie.exit_code == SECOND_SIGNAL
        assert "a second signal to stop" in bookie.log.read_text()
        bookie.start()
        assert not replayed(bookie.log)[-1].endswith(" 0 records replayed")
        reader = client.open_ledger(writer.ledger_id)
        assert [bytes(payload) for _, payload in reader.read(0, 0)] == [PAYLOAD]


def test_a_bookie_told_to_stop_while_it_starts_ends_at_once(fresh_cluster):
    cluster: LocalCluster = fresh_cluster(bookies=1)
    bookie = cluster.bookies[0]
    bookie.stop()
    cluster.zookeeper.kill()  # so that it starts for as long as its connect_timeout_s
    bookie.launch()
    assert eventually(lambda: _handles(bookie.pid, signal.SIGTERM))
    bookie.ask_to_stop()
    bookie.wait_until_stopped()
    assert bookie.exit_code == STOPPED


def _handles(pid: int | None, number: signal.Signals) -> bool:
    """Whether the process has a handler of its own for the signal."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    caught = next(line.split()[1] for line in status if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (number - 1) & 1)
