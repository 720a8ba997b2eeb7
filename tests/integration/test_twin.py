"""Two processes on copies of one bookie's directories: asked for their id, or found out later."""

import asyncio
import json
import shutil
import signal

import pytest

from bookie_server.__main__ import WRONG_DISKS
from bookie_server.serve import registration
from spark_ledger import LedgerClient
from spark_ledger.local.cluster import LocalCluster
from spark_ledger.local.processes import LocalBookie
from tests.kit.cli import succeeds
from tests.kit.processes import eventually


def test_a_bookie_says_its_id_at_its_port_of_frames(cluster: LocalCluster):
    bookie = cluster.bookies[0]
    assert asyncio.run(registration.who_is(bookie.frames)) == bookie.id


def test_whatever_else_is_there_is_no_bookie(cluster: LocalCluster):
    at = cluster.bookies[0].address  # gRPC is served there
    for address in (at, "127.0.0.1:1", "127.0.0.1", "", "localhost:http"):
        assert asyncio.run(registration.who_is(address)) == "", address


@pytest.mark.parametrize("said", [b"", b"SLF1 and then nothing", b"\0" * 64])
def test_a_server_that_is_silent_or_speaks_something_else_is_no_bookie(said, monkeypatch):
    monkeypatch.setattr(registration, "RESPONSE_S", 0.2)

    async def act() -> str:
        async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(said)
            await reader.read()
            writer.close()

        server = await asyncio.start_server(speak, "127.0.0.1", 0)
        async with server:
            host, port = server.sockets[0].getsockname()
            return await registration.who_is(f"{host}:{port}")

    assert asyncio.run(act()) == ""


def test_a_copy_that_started_while_its_original_was_paused_ends_and_so_does_the_original(
    fresh_cluster, tmp_path
):
    """What the copy alone acknowledged is unknown to the original at its next start, and repaired
    from the others."""
    settings = {"session_timeout_s": 2, "refresh_s": 1, "limbo_check_s": 0.5}
    cluster = fresh_cluster(3, bookie_settings=settings, autorecovery=False)
    original = cluster.bookies[0]
    with LedgerClient(cluster.service_url) as client:
        writer = client.create_ledger(3, 3, 2)
        writer.append(b"both have it")
        original.signal(signal.SIGSTOP)
        folder = tmp_path / "copy"
        shutil.copytree(original.folder, folder)
        beside = LocalBookie(folder, cluster.service_url, settings)
        beside.start()
        assert beside.id == original.id
        for _ in range(20):
            writer.append(b"the original does not")
        original.signal(signal.SIGCONT)
        assert eventually(lambda: not original.running and not beside.running, 60)
        assert (original.exit_code, beside.exit_code) == (WRONG_DISKS, WRONG_DISKS)
        assert "another process serves as this bookie" in original.log.read_text()
        assert "another process serves as this bookie" in beside.log.read_text()
        (row,) = (row for row in listed(cluster) if row["id"] == original.id)
        assert row["state"] == "down" and "two processes served as it" in row["why"]

        original.start()
        original.stop()
        original.start()  # again, quickly: its own start is nobody else's
        (row,) = (row for row in listed(cluster) if row["id"] == original.id)
        assert "two processes" not in row["why"]
        assert limbo_of(cluster, original, writer.ledger_id) == "lost"
        writer.append(b"last")
        writer.close()
        succeeds("ledger", "limbo", "--repair", "--service-url", cluster.service_url)
        assert eventually(lambda: limbo_of(cluster, original, writer.ledger_id) is None, 30)
        with client.open_ledger(writer.ledger_id) as reader:
            found = [bytes(payload) for _, payload in reader.read(0, 21)]
        assert found == [b"both have it", *[b"the original does not"] * 20, b"last"]


def listed(cluster: LocalCluster) -> list[dict]:
    rows: list[dict] = json.loads(
        succeeds("bookie", "list", "--json", "--service-url", cluster.service_url)
    )
    return rows


def limbo_of(cluster: LocalCluster, bookie: LocalBookie, ledger_id: int) -> str | None:
    """Why the ledger is listed as in limbo at the bookie."""
    rows = json.loads(succeeds("ledger", "limbo", "--json", "--service-url", cluster.service_url))
    found = [
        r["reason"] for r in rows if (r["bookie_id"], r["ledger_id"]) == (bookie.id, ledger_id)
    ]
    return found[0] if found else None
