"""`spark-ledger bookie`, as a user and as a readiness probe run it."""

import json
import uuid

import pytest

from bookie_server import __version__
from spark_ledger.local import LocalCluster
from spark_ledger.local.processes import free_port
from tests.kit.cli import fails, succeeds
from tests.kit.processes import eventually


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands find no metadata store."""
    monkeypatch.setenv("LEDGER_SERVICE_URL", "zk://127.0.0.1:1/nobody")


def listed(cluster: LocalCluster) -> dict[str, dict]:
    said = succeeds("bookie", "list", "--json", "--service-url", cluster.service_url)
    return {bookie["id"]: bookie for bookie in json.loads(said)}


def test_list_tells_of_each_bookie_its_state_version_and_space(cluster: LocalCluster):
    found = listed(cluster)
    for bookie in cluster.bookies:
        row = found[bookie.id]
        assert (row["state"], row["why"]) == ("rw", "")
        assert (row["frames"], row["address"]) == (bookie.frames, bookie.address)
        assert row["version"] == __version__
        assert row["total_bytes"] >= row["free_bytes"] > 0
    plain = succeeds("bookie", "list", "--service-url", cluster.service_url)
    assert plain.split("\n")[0].split() == [
        *("BOOKIE", "STATE", "FRAMES", "GRPC", "RACK", "FREE", "LIMBO", "VERSION", "WHY")
    ]


def test_a_bookie_that_is_gone_is_down_and_its_info_cannot_be_had(fresh_cluster):
    cluster = fresh_cluster(bookies=1)
    gone = cluster.bookies[0]
    gone.stop()
    assert eventually(lambda: listed(cluster)[gone.id]["state"] == "down")
    assert "not registered" in listed(cluster)[gone.id]["why"]
    said = fails("bookie", "info", gone.id, "--service-url", cluster.service_url)
    assert f"the bookie at {gone.frames} does not answer" in said


def test_a_lost_bookie_that_no_ledger_names_is_forgotten(fresh_cluster):
    cluster = fresh_cluster(bookies=1)
    gone, url = cluster.bookies[0], ("--service-url", cluster.service_url)
    assert "Stop it first" in fails("bookie", "forget", gone.id, *url)
    gone.stop()
    assert "is forgotten" in succeeds("bookie", "forget", gone.id, *url)
    assert listed(cluster) == {}


@pytest.mark.usefixtures("alone")
def test_info_tells_of_directories_and_needs_nobody_else(cluster: LocalCluster):
    bookie = cluster.bookies[0]
    by_address = json.loads(succeeds("bookie", "info", bookie.frames, "--json"))
    url = ("--service-url", cluster.service_url)
    by_id = json.loads(succeeds("bookie", "info", bookie.id, "--json", *url))
    for said in (by_address, by_id):
        assert (said["bookie_id"], said["state"]) == (bookie.id, "writable")
        assert sorted(each["role"] for each in said["directories"]) == ["journal", "ledger"]
        assert not any(each["full"] or each["failure"] for each in said["directories"])
    plain = succeeds("bookie", "info", bookie.frames)
    assert ["state", "writable"] in [line.split() for line in plain.splitlines()]


def test_info_of_a_bookie_nobody_knows_says_where_to_look(cluster: LocalCluster):
    said = fails("bookie", "info", str(uuid.uuid4()), "--service-url", cluster.service_url)
    assert "was ever registered in this cluster" in said


@pytest.mark.usefixtures("alone")
def test_ready_is_status_0_for_a_bookie_that_takes_entries(cluster: LocalCluster):
    assert succeeds("bookie", "ready", cluster.bookies[0].frames) == "ready\n"


@pytest.mark.usefixtures("alone")
def test_ready_says_that_it_was_given_the_port_of_grpc(cluster: LocalCluster):
    said = fails("bookie", "ready", cluster.bookies[0].address)
    assert "gRPC is served there; frames have a port of their own" in said
    assert "`spark-ledger bookie list` has the port" in " ".join(said.split())


def test_ready_is_status_1_where_no_bookie_answers():
    address = f"127.0.0.1:{free_port()}"
    assert f"the bookie at {address} does not answer" in fails("bookie", "ready", address)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.1:99999"])
def test_ready_is_status_1_for_what_is_no_address(address: str):
    assert f"'{address}' is not an address of a bookie" in fails("bookie", "ready", address)
