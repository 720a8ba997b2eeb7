"""ENOSPC from a real file system: a bookie whose disk somebody else fills up."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from spark_ledger import LedgerClient
from spark_ledger.config import client_config
from spark_ledger.errors import LedgerError
from spark_ledger.local import LocalCluster
from tests.integration.small_disk import SmallDiskBookie, why_impossible
from tests.kit.cli import fails, succeeds
from tests.kit.processes import eventually

MIB = 1 << 20
SETTINGS: dict[str, object] = {
    "journal_bytes_max": 26 * MIB,
    "write_cache_bytes": 34 * MIB,
    "flush_interval_s": 0.5,
    "disk_free_bytes_min": 6 * MIB,
    "disk_reserve_bytes": 12 * MIB,
    "disk_check_s": 0.5,
}
PAYLOAD = bytes(256 * 1024)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[LocalCluster]:
    """ZooKeeper without bookies, where such file systems are to be had."""
    if why := why_impossible(tmp_path):
        pytest.skip(f"no file system of our own on this machine: {why}")
    with LocalCluster(bookies=0, autorecovery=False) as cluster:
        yield cluster


def listed(home: LocalCluster) -> tuple[str, str]:
    (bookie,) = json.loads(succeeds("bookie", "list", "--json", "--service-url", home.service_url))
    return bookie["state"], bookie["why"]


@pytest.mark.parametrize(
    ("small", "size_bytes"),
    [("ledgers", 96 * MIB), ("journal", 96 * MIB)],
    ids=["ledgers", "journal"],
)
def test_a_bookie_whose_disk_is_filled_up_turns_read_only_loses_nothing_and_comes_back(
    home: LocalCluster, tmp_path: Path, small: str, size_bytes: int
):
    bookie = SmallDiskBookie(tmp_path / "b", home.service_url, SETTINGS, small, size_bytes)
    bookie.start()
    config = client_config(spare_grace_s=2.0)
    try:
        with LedgerClient(home.service_url, config) as client:
            writer = client.create_ledger(1, 1, 1)
            for _ in range(8):
                writer.append(PAYLOAD)
            pending = [writer.append_async(PAYLOAD) for _ in range(8)]
            bookie.fill_up()
            acked = 8 + sum(1 for add in pending if add.exception() is None)
            assert eventually(lambda: listed(home)[0] == "ro")
            assert listed(home)[1].startswith("disk full: ")
            assert "readonly: disk full" in fails("bookie", "ready", bookie.frames)
            with pytest.raises(LedgerError, match=r"read-only: disk full: .* Free space"):
                client.create_ledger(1, 1, 1)
            reader = client.open_ledger(writer.ledger_id)  # fences, and closes the ledger
            assert sum(1 for _ in reader.read(0, acked - 1)) == acked
            bookie.empty_out()
            assert eventually(lambda: listed(home) == ("rw", ""))
            assert succeeds("bookie", "ready", bookie.frames) == "ready\n"
            with client.create_ledger(1, 1, 1) as another:
                assert another.append(PAYLOAD) == 0
        bookie.stop()
        assert bookie.exit_code == 0
    finally:
        bookie.kill()
