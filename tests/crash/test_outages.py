"""ZooKeeper hangs, and is killed, for longer than a session lasts: two streaming queries go on."""

import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spark_ledger.local import LocalCluster
from tests.crash.chaos import BOOKIES, Chaos, both_queries_move

SEED = 1
AWAY_S = 60.0  # twice a session


class Outages(Chaos):
    """The queries of chaos, of which none may fail; rows come all the time."""

    def run_through(self, cluster: LocalCluster) -> None:
        self._driver = self._start_driver()
        try:
            for mode in ("hangs", "is killed"):
                self._say(f"ZooKeeper {mode} for {AWAY_S:g} s")
                self._away(cluster, mode)
                self._until(both_queries_move, AWAY_S)
            self._finish()
        finally:
            self._driver.kill()
        self._compare()

    def _away(self, cluster: LocalCluster, mode: str) -> None:
        if mode == "hangs":
            cluster.zookeeper.signal(signal.SIGSTOP)
            self._pause(AWAY_S)
            cluster.zookeeper.signal(signal.SIGCONT)
        else:
            cluster.zookeeper.kill()
            self._pause(AWAY_S)
            cluster.zookeeper.start()

    def _feed(self) -> Iterator[dict[str, Any]]:
        for event in super()._feed():
            assert event["event"] != "failed", event["why"]
            yield event


@pytest.mark.slow
def test_queries_go_on_by_themselves_after_an_outage_of_zookeeper_with_every_row_once():
    with (
        LocalCluster(bookies=BOOKIES, autorecovery=False) as cluster,
        tempfile.TemporaryDirectory(prefix="outages-") as folder,
    ):
        Outages(cluster, Path(folder), SEED).run_through(cluster)
