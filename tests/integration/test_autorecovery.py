"""Bookies are lost for good, one after another, and nobody has to do anything: real processes."""

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from spark_ledger import Admin, LedgerClient
from spark_ledger.errors import BadConfig
from spark_ledger.local import LocalCluster
from spark_ledger.local.processes import LocalBookie
from spark_ledger.topic import blocking
from tests.integration.healing import (
    PATIENCE_S,
    all_records,
    heals,
    is_whole,
    ledger_of,
    record_of,
    status,
)
from tests.integration.topic_rows import read_all, write_and_commit
from tests.kit.cli import fails, spark_ledger, succeeds
from tests.kit.processes import alive, as_from_a_terminal, descendants, eventually

DELAY_S, LONG_S = 2, 30
SETTINGS: dict[str, object] = {"session_timeout_s": 2}
PASSWORD = b"secret"


@pytest.fixture(scope="module")
def four() -> Iterator[LocalCluster]:
    with LocalCluster(bookies=4, bookie_settings=SETTINGS, lost_bookie_delay_s=DELAY_S) as cluster:
        yield cluster


@pytest.fixture
def healing(four: LocalCluster) -> LocalCluster:
    """Four bookies at least, of which all run, and what heals them, whatever a test before left."""
    assert four.autorecovery is not None
    four.autorecovery.start()
    for bookie in four.bookies:
        if not bookie.running:
            bookie.start()
    set_to(four, lost_bookie_delay_s=DELAY_S, repair_bytes_per_s=0)
    succeeds("autorecovery", "enable", "--service-url", four.service_url)
    return four


def set_to(cluster: LocalCluster, **settings: float) -> None:
    given = [f"{name}={value}" for name, value in settings.items()]
    succeeds("autorecovery", "set", *given, "--service-url", cluster.service_url)


def named(cluster: LocalCluster, bookie_id: str) -> bool:
    return any(record.names(bookie_id) for record in all_records(cluster))


@pytest.mark.slow
def test_bookies_are_destroyed_in_turn_until_no_original_copy_is_left_and_every_row_is_there(
    healing: LocalCluster,
):
    topics = blocking.topics(healing.service_url)
    info = topics.run(topics.client.topics.create(f"t-{uuid.uuid4()}"))
    rows = [b"row %06d " % number * 40 for number in range(2000)]
    payloads = [b"payload %d" % number for number in range(50)]
    originals = {bookie.id for bookie in healing.bookies}
    with LedgerClient(healing.service_url) as client:
        plain, secret = ledger_of(client, payloads), ledger_of(client, payloads, PASSWORD)
        for version, bookie in enumerate(healing.bookies):
            write_and_commit(topics, info, version, rows[version * 500 : (version + 1) * 500])
            lost = bookie.id
            bookie.destroy()
            assert heals(lambda lost=lost: not named(healing, lost))
            bookie.start()
            assert bookie.id not in originals
        assert is_whole(healing, plain)
        assert is_whole(healing, secret, PASSWORD)
        for record in all_records(healing):
            assert not any(map(record.names, originals))
            assert not record.joining
        for ledger_id, password in ((plain, b""), (secret, PASSWORD)):
            with client.open_ledger(ledger_id, password=password) as reader:
                assert [bytes(p) for _, p in reader.read(0, len(payloads) - 1)] == payloads
    assert read_all(topics, info) == rows
    command = ("ledger", "underreplicated", "--json", "--service-url", healing.service_url)
    assert heals(lambda: json.loads(succeeds(*command)) == [])


def test_for_a_bookie_that_is_back_in_time_nothing_is_copied(healing: LocalCluster):
    set_to(healing, lost_bookie_delay_s=LONG_S)
    with LedgerClient(healing.service_url) as client:
        ledger_id = ledger_of(client, [b"payload"])
        assert heals(lambda: is_whole(healing, ledger_id)), "a third copy may come after the close"
    before = record_of(healing, ledger_id)
    bookie = next(one for one in healing.bookies if before.names(one.id))
    bookie.kill()
    assert heals(lambda: bookie.id in status(healing)["down"])
    bookie.start()
    assert heals(lambda: bookie.id not in status(healing)["down"])
    now = status(healing)
    assert (now["lost"], now["under_replicated"], now["alarm"]) == ({}, 0, "")
    assert record_of(healing, ledger_id) == before


def test_a_process_that_dies_while_it_copies_is_followed_by_another_that_ends_the_work(
    healing: LocalCluster,
):
    autorecovery = healing.autorecovery
    assert autorecovery is not None
    set_to(healing, lost_bookie_delay_s=DELAY_S, repair_bytes_per_s=100_000)
    with LedgerClient(healing.service_url) as client:
        ledger_id = ledger_of(client, [bytes(100_000)] * 50)
    lost = next(one for one in healing.bookies if record_of(healing, ledger_id).names(one.id))
    was = lost.id
    lost.destroy()
    assert heals(lambda: bool(record_of(healing, ledger_id).joining))
    autorecovery.kill()
    assert record_of(healing, ledger_id).names(was), "it takes 50 s at that rate"
    set_to(healing, repair_bytes_per_s=0)
    autorecovery.start()
    assert heals(lambda: not named(healing, was))
    assert not any(one.joining for one in all_records(healing))
    assert is_whole(healing, ledger_id)
    lost.start()


def test_a_hosting_process_ends_in_good_order_and_gives_its_role_back_at_once(
    healing: LocalCluster,
):
    autorecovery = healing.autorecovery
    assert autorecovery is not None
    assert heals(lambda: bool(status(healing)["auditor"]))
    autorecovery.stop()
    assert autorecovery.exit_code == 0
    assert status(healing)["auditor"] == ""
    autorecovery.start()


def test_a_hosting_process_that_somebody_kills_comes_back_and_takes_its_role_again(
    healing: LocalCluster,
):
    autorecovery = healing.autorecovery
    assert autorecovery is not None
    before = autorecovery.pid
    assert before is not None
    assert heals(lambda: status(healing)["auditor"].endswith(f":{before}"))
    os.kill(before, signal.SIGKILL)
    assert heals(lambda: autorecovery.pid not in (None, before))
    assert heals(lambda: status(healing)["auditor"].endswith(f":{autorecovery.pid}"))


def test_a_wrong_setting_is_one_line_and_changes_nothing(cluster: LocalCluster):
    url = ("--service-url", cluster.service_url)
    before = status(cluster)
    said = fails("autorecovery", "set", "repair_bytes_per_s=7", "lost_bookie_delay_s=0", *url)
    assert "[LEDGER_CONFIG.INVALID] lost_bookie_delay_s = 0.0 is not between 0 and a year" in said
    assert status(cluster) == before


def test_admin_has_the_same_verbs(healing: LocalCluster):
    set_to(healing, lost_bookie_delay_s=DELAY_S, repair_bytes_per_s=0)
    with LedgerClient(healing.service_url) as client:
        ledger_id = ledger_of(client, [b"payload"])
    healing.add_bookie()
    going = next(one for one in healing.bookies if record_of(healing, ledger_id).names(one.id))
    with Admin(healing.service_url) as admin:
        now = admin.set_autorecovery(repair_bytes_per_s=1 << 20)
        assert (now.repair_bytes_per_s, now.lost_bookie_delay_s) == (1 << 20, DELAY_S)
        assert not admin.set_autorecovery(enabled=False).enabled
        left = admin.decommission_bookie(going.id, wait=False)
        assert left.ledgers > 0 and "autorecovery is disabled" in left.hindrance
        listed = admin.underreplicated()
        assert len(listed) == left.ledgers
        assert {one.bookie_id for work in listed for one in work.reasons} == {going.id}
        assert admin.autorecovery_status().draining == (going.id,)
        assert admin.set_autorecovery(enabled=True).enabled
        assert admin.decommission_bookie(going.id).done
        assert heals(lambda: admin.underreplicated() == [])
        assert admin.cancel_decommission(going.id)
        assert not admin.cancel_decommission(going.id)
        with pytest.raises(BadConfig, match="force is given without enabled=True"):
            admin.set_autorecovery(force=True)
        with pytest.raises(BadConfig, match="is not between 0 and a year"):
            admin.set_autorecovery(enabled=False, lost_bookie_delay_s=0)
        assert admin.autorecovery_status().enabled


def test_a_bookie_started_by_hand_hosts_a_process_that_lives_as_long_as_it(
    cluster: LocalCluster, tmp_path: Path
):
    bookie = LocalBookie(tmp_path, cluster.service_url, {"autorecovery": True})
    bookie.start()
    try:
        assert bookie.pid is not None
        (first,) = descendants(bookie.pid)
        assert b"autorecovery" in Path(f"/proc/{first}/cmdline").read_bytes()
        assert eventually(lambda: bool(status(cluster)["auditor"]))
        os.kill(first, signal.SIGKILL)
        assert eventually(lambda: not alive([first]))
        assert eventually(lambda: len(alive(descendants(bookie.pid or 0))) == 1)
        (second,) = alive(descendants(bookie.pid))
        bookie.kill()
        assert eventually(lambda: not alive([second]))
    finally:
        bookie.kill()


def test_a_bookie_is_decommissioned_by_command_under_writes_stopped_and_forgotten(
    healing: LocalCluster,
):
    url = ("--service-url", healing.service_url)
    set_to(healing, lost_bookie_delay_s=DELAY_S, repair_bytes_per_s=0)
    healing.add_bookie()
    payloads = [b"payload %d" % number for number in range(20)]
    with LedgerClient(healing.service_url) as client:
        closed = [ledger_of(client, payloads) for _ in range(4)]
        writer = client.create_ledger(3, 3, 2)
        writer.append(payloads[0])
        going = next(
            one for one in healing.bookies if record_of(healing, writer.ledger_id).names(one.id)
        )
        moved = succeeds("bookie", "decommission", going.id, *url)
        assert f"spark-ledger bookie forget {going.id}" in moved
        assert not named(healing, going.id)
        assert writer.append(payloads[1]) == 1, "the idle writer replaced it itself"
        writer.close()
        assert all(is_whole(healing, ledger_id) for ledger_id in [*closed, writer.ledger_id])
        assert state_of(healing, going) == "ro"
    going.stop()
    succeeds("bookie", "forget", going.id, *url)
    assert going.id not in succeeds("bookie", "list", *url)
    going.destroy()
    going.start()


def test_ctrl_c_ends_the_looking_on_and_says_that_draining_goes_on_until_it_is_cancelled(
    healing: LocalCluster,
):
    url = ("--service-url", healing.service_url)
    healing.add_bookie()
    with LedgerClient(healing.service_url) as client:
        ledger_id = ledger_of(client, [b"payload"])
    going = next(one for one in healing.bookies if record_of(healing, ledger_id).names(one.id))
    succeeds("autorecovery", "disable", *url)
    command = [sys.executable, "-m", "spark_ledger.cli.main", "bookie", "decommission", going.id]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, *url], **pipes, preexec_fn=as_from_a_terminal) as looks:
        try:
            assert "autorecovery is disabled" in looks.stdout.readline()
            looks.send_signal(signal.SIGINT)
            _, said = looks.communicate(timeout=PATIENCE_S)
        finally:
            looks.kill()
    assert looks.returncode == 130
    assert f"bookie {going.id} is drained all the same" in said and "--cancel" in said
    assert status(healing)["draining"] == [going.id]
    assert heals(lambda: state_of(healing, going) == "ro")
    assert "stays" in succeeds("bookie", "decommission", going.id, "--cancel", *url)
    assert heals(lambda: state_of(healing, going) == "rw")
    assert record_of(healing, ledger_id).names(going.id)


def state_of(cluster: LocalCluster, bookie: LocalBookie) -> str:
    listed = succeeds("bookie", "list", "--json", "--service-url", cluster.service_url)
    return next(one["state"] for one in json.loads(listed) if one["id"] == bookie.id)


def test_a_list_that_nobody_fills_says_so_and_an_audit_names_who_does_not_answer(
    healing: LocalCluster,
):
    url = ("--service-url", healing.service_url)
    none = "no ledger is under-replicated"
    assert heals(lambda: none in succeeds("ledger", "underreplicated", *url))
    succeeds("autorecovery", "disable", *url)
    with LedgerClient(healing.service_url) as client:
        ledger_id = ledger_of(client, [b"payload"])
    record = record_of(healing, ledger_id)
    bookie = next(one for one in healing.bookies if record.names(one.id))
    bookie.kill()
    assert "autorecovery is disabled" in succeeds("ledger", "underreplicated", *url)
    audited = spark_ledger("ledger", "audit", *url)
    assert f"copies count as missing: {bookie.id}" in audited.stdout
    bookie.start()
