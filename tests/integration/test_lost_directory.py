"""A directory that goes under a bookie: it goes on with others, or ends with status 6; what was
lost is brought back."""

import json
import shutil
from pathlib import Path

import pytest

from bookie_server.__main__ import DISK_FAILED
from bookie_server.api.status import Status
from spark_ledger import LedgerClient
from spark_ledger.local import LocalCluster
from spark_ledger.local.maintenance import maintain
from spark_ledger.local.processes import LocalBookie
from spark_ledger.process import background_loop, ledger_store
from spark_ledger.repair.limbo import list_limbo
from tests.kit.cli import succeeds
from tests.kit.processes import eventually

SETTINGS: dict[str, object] = {"disk_check_s": 0.2, "flush_interval_s": 0.2, "refresh_s": 600}
SOON: dict[str, object] = {"limbo_check_s": 0.5}
PAYLOAD = bytes(64 * 1024)


def info(bookie: LocalBookie) -> dict:
    return json.loads(succeeds("bookie", "info", bookie.frames, "--json"))


def why(cluster: LocalCluster) -> tuple[str, str]:
    """What the registration says: the state and its reason."""
    (row,) = json.loads(succeeds("bookie", "list", "--json", "--service-url", cluster.service_url))
    return row["state"], row["why"]


def test_a_bookie_that_loses_one_of_its_ledger_directories_goes_on_and_says_which(
    fresh_cluster, tmp_path: Path
):
    folders = [tmp_path / "one", tmp_path / "two"]
    settings = {**SETTINGS, "ledger_directories": ",".join(map(str, folders))}
    cluster = fresh_cluster(bookies=1, bookie_settings=settings)
    bookie = cluster.bookies[0]
    with LedgerClient(cluster.service_url) as client:
        for _ in range(4):
            with client.create_ledger(1, 1, 1) as writer:
                writer.append(PAYLOAD)
        folders[1].rename(tmp_path / "taken away")
        assert eventually(lambda: "failed" in why(cluster)[1])
        state, reason = why(cluster)
        assert state == "rw"
        assert f"ledger directory {folders[1]} failed" in reason
        said = info(bookie)
        assert said["state"] == "writable"
        lost = [each["path"] for each in said["directories"] if each["failure"]]
        assert lost == [str(folders[1])]
        with client.create_ledger(1, 1, 1) as writer:
            assert writer.append(PAYLOAD) == 0
        reader = client.open_ledger(writer.ledger_id)
        assert [len(payload) for _, payload in reader.read(0, 0)] == [len(PAYLOAD)]
    bookie.stop()
    (tmp_path / "taken away").rename(folders[1])
    bookie.start()
    assert why(cluster) == ("rw", "")
    with LedgerClient(cluster.service_url) as client:
        for ledger_id in client.list_ledgers():
            reader = client.open_ledger(ledger_id)
            assert [len(payload) for _, payload in reader.read(0, 0)] == [len(PAYLOAD)]


def test_a_bookie_that_loses_its_only_ledger_directory_ends_with_status_6(
    fresh_cluster, tmp_path: Path
):
    cluster = fresh_cluster(bookies=1, bookie_settings=SETTINGS)
    bookie = cluster.bookies[0]
    ledgers = bookie.folder / "ledgers"
    ledgers.rename(tmp_path / "taken away")
    assert eventually(lambda: not bookie.running)
    assert bookie.exit_code == DISK_FAILED
    (last,) = [line for line in bookie.log.read_text().splitlines() if "bookie_server:" in line]
    assert "no ledger directory is left" in last
    assert str(ledgers) in last


ENTRIES, LEDGERS = 20, 6


def bookie_of_two_directories(cluster: LocalCluster, tmp_path: Path) -> tuple[LocalBookie, Path]:
    """The cluster's first bookie, on its ledger directory and on a second one, which is returned;
    both get ledgers."""
    bookie, second = cluster.bookies[0], tmp_path / "second"
    bookie.stop()
    folders = (bookie.folder / "ledgers", second)
    bookie.settings = {**SETTINGS, **SOON, "ledger_directories": ",".join(map(str, folders))}
    bookie.start()
    return bookie, second


def by_itself(cluster: LocalCluster, bookie: LocalBookie, ledger_id: int) -> set[Status]:
    """What the bookie answers, asked for all entries of the ledger."""
    bookies = ledger_store(cluster.service_url).cluster.bookies
    asked = bookies.read(bookie.id, ledger_id, 0, ENTRIES - 1, max_bytes=1 << 20)
    response = background_loop().run(asked)
    return {response.status, *(result.status for result in response.results)}


def in_limbo(cluster: LocalCluster) -> list[int]:
    """The ledgers that bookies list."""
    found = background_loop().run(list_limbo(ledger_store(cluster.service_url).metadata))
    return [one.ledger_id for one in found]


@pytest.mark.parametrize(
    ("when", "by"),
    [
        ("while it runs", "the janitor"),
        pytest.param("while it is stopped", "the command", marks=pytest.mark.slow),
    ],
)
def test_what_one_of_several_directories_held_is_brought_back_and_the_directory_given_up(
    fresh_cluster, tmp_path: Path, when, by
):
    cluster: LocalCluster = fresh_cluster(bookies=3, bookie_settings={**SETTINGS, **SOON})
    bookie, second = bookie_of_two_directories(cluster, tmp_path)
    with LedgerClient(cluster.service_url) as client:
        written = []
        for number in range(LEDGERS):
            with client.create_ledger(3, 3, 2) as writer:
                for entry in range(ENTRIES):
                    writer.append(b"%d of %d" % (entry, number) * 20)
            written.append(writer.ledger_id)
    assert eventually(lambda: all(by_itself(cluster, bookie, i) == {Status.OK} for i in written))
    bookie.stop()  # flushed
    if when == "while it runs":
        bookie.start()
        shutil.rmtree(second)
    else:
        shutil.rmtree(second)
        bookie.start()
        said = [line for line in bookie.log.read_text().splitlines() if "is not there" in line]
        assert ["ledgers are in limbo" in line for line in said] == [True]
    assert eventually(lambda: in_limbo(cluster) != [])
    assert eventually(lambda: len(in_limbo(cluster)) == info(bookie)["limbo_ledgers"])
    lost = in_limbo(cluster)
    assert 0 < len(lost) < LEDGERS
    assert all(by_itself(cluster, bookie, i) == {Status.OK, Status.LIMBO} for i in lost)
    if by == "the janitor":
        maintenance = background_loop().submit(maintain(cluster.service_url, pass_s=0.2))
        assert eventually(lambda: in_limbo(cluster) == [])
        maintenance.cancel()
    else:
        for ledger_id in lost:
            succeeds("ledger", "recover", ledger_id, "--service-url", cluster.service_url)
        assert eventually(lambda: in_limbo(cluster) == [])
    assert {status for i in written for status in by_itself(cluster, bookie, i)} == {Status.OK}
    assert info(bookie)["limbo_ledgers"] == 0
    bookie.kill()
    bookie.start()
    assert eventually(lambda: all(by_itself(cluster, bookie, i) == {Status.OK} for i in written))
    assert info(bookie)["limbo_ledgers"] == 0
    assert in_limbo(cluster) == []
