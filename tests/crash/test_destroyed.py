"""Bookies are destroyed for good, one after another, while two streaming queries go on: nobody has
to do anything, and in the end no disk is left of those that the rows were first written to."""

import tempfile
import time
from pathlib import Path

import pytest

from spark_ledger.local import LocalCluster
from spark_ledger.metadata.ledger_record import LedgerRecord
from spark_ledger.process import background_loop, ledger_store
from tests.crash.chaos import BOOKIES, READY_TIMEOUT_S, Chaos, both_queries_move

DESTROYED = 10
DELAY_S = 5
HEALED_TIMEOUT_S = 180
SETTINGS: dict[str, object] = {"session_timeout_s": 5}
SEED = 1


class Destruction(Chaos):
    """Of which the seed draws nothing: bookies go in turn."""

    def run_through(self, cluster: LocalCluster) -> None:
        originals = {bookie.id for bookie in cluster.bookies}
        self._driver = self._start_driver()
        try:
            for number in range(DESTROYED):
                bookie = cluster.bookies[number % BOOKIES]
                lost = bookie.id
                bookie.destroy()
                self._say(f"destroyed bookie {number % BOOKIES}, the {number + 1}. one")
                self._until_healed(lost)
                bookie.start()
                self._until(both_queries_move, READY_TIMEOUT_S)
            assert not originals & {bookie.id for bookie in cluster.bookies}
            self._finish()
        finally:
            self._driver.kill()
        assert not any(record.names(lost) for lost in originals for record in self._records())
        self._compare()

    def _until_healed(self, lost: str) -> None:
        until = time.monotonic() + HEALED_TIMEOUT_S
        while True:
            naming = [one.ledger_id for one in self._records() if one.names(lost)]
            if not naming:
                return
            assert time.monotonic() < until, f"ledgers {naming} still name bookie {lost}"
            self._pause(1.0)

    def _records(self) -> list[LedgerRecord]:
        store = ledger_store(self._cluster.service_url)

        async def listed() -> list[LedgerRecord]:
            return [(await store.record(one, fresh=True)).record async for one in store.list()]

        return background_loop().run(listed())


@pytest.mark.slow
def test_bookies_destroyed_in_turn_take_no_row_with_them():
    with (
        LocalCluster(
            bookies=BOOKIES, bookie_settings=SETTINGS, lost_bookie_delay_s=DELAY_S
        ) as cluster,
        tempfile.TemporaryDirectory(prefix="destroyed-") as folder,
    ):
        Destruction(cluster, Path(folder), SEED).run_through(cluster)
