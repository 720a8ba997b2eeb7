"""What docs/operations.md tells an operator to do with bookies, done with real ones."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from spark_ledger import LedgerClient
from spark_ledger.local import LocalCluster
from spark_ledger.local.processes import LocalBookie
from tests.integration.healing import heals, is_whole, ledger_of, record_of
from tests.kit.cli import fails, spark_ledger, succeeds

SETTINGS: dict[str, object] = {"session_timeout_s": 2, "limbo_check_s": 0.5}
PAYLOADS = [b"payload %d" % number for number in range(30)]
LEDGERS = 8


@pytest.fixture
def three(fresh_cluster) -> LocalCluster:
    return fresh_cluster(3, bookie_settings=SETTINGS, autorecovery=True, lost_bookie_delay_s=5)


def changed(bookie: LocalBookie, **settings: object) -> None:
    """Stopped, with other settings, started."""
    bookie.stop()
    assert bookie.exit_code == 0
    bookie.settings = {**bookie.settings, **settings}
    bookie.start()


def listed(cluster: LocalCluster, bookie: LocalBookie) -> dict:
    rows = json.loads(succeeds("bookie", "list", "--json", "--service-url", cluster.service_url))
    return next(row for row in rows if row["id"] == bookie.id)


def audited(cluster: LocalCluster) -> bool:
    ended = spark_ledger("ledger", "audit", "--deep", "--service-url", cluster.service_url)
    return ended.returncode == 0


def looks_at_all(cluster: LocalCluster) -> None:
    """An auditor reads every record when it begins, and after that once a minute."""
    assert cluster.autorecovery is not None
    cluster.autorecovery.stop()
    cluster.autorecovery.start()


def limbo(cluster: LocalCluster) -> list[dict]:
    return json.loads(succeeds("ledger", "limbo", "--json", "--service-url", cluster.service_url))


def readable(client: LedgerClient, ledger_id: int) -> list[bytes]:
    with client.open_ledger(ledger_id) as reader:
        return [bytes(payload) for _, payload in reader.read(0, len(PAYLOADS) - 1)]


def test_a_bookie_at_another_address_keeps_its_id_and_its_ledgers(three: LocalCluster):
    bookie, *others = three.bookies
    with LedgerClient(three.service_url) as client:
        closed = ledger_of(client, PAYLOADS)
        before, ident = record_of(three, closed), bookie.id
        with client.create_ledger(3, 3, 2) as writer:
            writer.append(PAYLOADS[0])
            changed(bookie, listen="127.0.0.2:0")
            for payload in PAYLOADS[1:]:
                writer.append(payload)
        assert bookie.id == ident
        assert listed(three, bookie)["state"] == "rw"
        assert listed(three, bookie)["frames"] == bookie.frames
        assert bookie.frames.startswith("127.0.0.2:")
        looks_at_all(three)  # an entry that two bookies acknowledged, this one may lack
        assert heals(lambda: audited(three))
        assert record_of(three, closed).fragments == before.fragments
        for other in others:
            other.kill()
        assert readable(client, closed) == readable(client, writer.ledger_id) == PAYLOADS


def on_two_directories(cluster: LocalCluster, client: LedgerClient, added: Path) -> list[int]:
    """The first bookie has one more ledger directory; the ledgers that were made then."""
    bookie = cluster.bookies[0]
    folders = [bookie.folder / "ledgers", added]
    changed(bookie, ledger_directories=folders)
    return [ledger_of(client, PAYLOADS) for _ in range(LEDGERS)]


def test_a_directory_that_is_added_takes_new_ledgers_and_the_others_stay(
    three: LocalCluster, tmp_path: Path
):
    bookie = three.bookies[0]
    succeeds("autorecovery", "disable", "--service-url", three.service_url)
    with LedgerClient(three.service_url) as client:
        before, ident = ledger_of(client, PAYLOADS), bookie.id
        on_two_directories(three, client, tmp_path / "added")
        assert bookie.id == ident
        said = json.loads(succeeds("bookie", "info", bookie.frames, "--json"))
        paths = [each["path"] for each in said["directories"] if each["role"] == "ledger"]
        assert paths == [str(bookie.folder / "ledgers"), str(tmp_path / "added")]
        bookie.stop()  # flushed
        shutil.rmtree(tmp_path / "added")
        bookie.start()
        assert heals(lambda: limbo(three) != []), "some of the new ledgers lay there"
        assert before not in [one["ledger_id"] for one in limbo(three)]


def test_a_directory_that_is_replaced_by_an_empty_one_gets_its_copies_back(
    three: LocalCluster, tmp_path: Path
):
    bookie, *others = three.bookies
    with LedgerClient(three.service_url) as client:
        ledger_ids = on_two_directories(three, client, tmp_path / "disk")
        ident = bookie.id
        bookie.stop()
        shutil.rmtree(tmp_path / "disk")
        (tmp_path / "disk").mkdir()
        bookie.start()
        assert bookie.id == ident
        assert heals(lambda: listed(three, bookie)["why"] == "")
        assert heals(lambda: limbo(three) == [] and audited(three))
        assert all(is_whole(three, ledger_id) for ledger_id in ledger_ids)
        for other in others:
            other.kill()
        assert all(readable(client, ledger_id) == PAYLOADS for ledger_id in ledger_ids)


def test_a_bookie_on_empty_directories_is_a_new_one_and_the_old_one_is_forgotten(
    three: LocalCluster,
):
    url = ("--service-url", three.service_url)
    with LedgerClient(three.service_url) as client:
        ledger_id = ledger_of(client, PAYLOADS)
        bookie = three.bookies[0]
        old = bookie.id
        assert f"bookie {old} is registered: it runs" in fails("bookie", "forget", old, *url)
        bookie.destroy()
        assert heals(lambda: "still on bookie" in fails("bookie", "forget", old, *url))
        bookie.start()
        assert bookie.id != old
        assert heals(lambda: not record_of(three, ledger_id).names(old))
        assert heals(lambda: audited(three))
        succeeds("bookie", "forget", old, *url)
        assert readable(client, ledger_id) == PAYLOADS


@pytest.mark.slow
def test_a_decommission_goes_on_where_it_was_when_zookeeper_is_back(three: LocalCluster):
    url = ("--service-url", three.service_url)
    succeeds("autorecovery", "disable", *url)
    with LedgerClient(three.service_url) as client:
        ledger_ids = [ledger_of(client, PAYLOADS) for _ in range(LEDGERS)]
    three.add_bookie()
    going = three.bookies[0]
    command = [sys.executable, "-m", "spark_ledger.cli.main", "bookie", "decommission", going.id]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, *url], **pipes) as looks:
        assert "autorecovery is disabled" in looks.stdout.readline()
        three.zookeeper.kill()
        _, said = looks.communicate(timeout=120)
    assert looks.returncode == 1
    assert "[LEDGER_UNAVAILABLE]" in said and said.count("\n") == 1
    three.zookeeper.start()
    succeeds("autorecovery", "enable", *url)
    assert going.id in succeeds("bookie", "decommission", going.id, *url)
    assert not any(record_of(three, one).names(going.id) for one in ledger_ids)
    assert all(is_whole(three, one) for one in ledger_ids)
