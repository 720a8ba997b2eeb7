"""Damage that no list tells of yet: the repair command asks the bookies themselves; an index that
RocksDB calls corrupt costs its directory, or makes the node read-only and says what to do."""

import json
import time
from pathlib import Path

from bookie_server.api.status import Status
from bookie_server.logs.rocks_index import REBUILD
from spark_ledger import LedgerClient
from spark_ledger.local import LocalCluster
from spark_ledger.local.processes import LocalBookie
from spark_ledger.process import background_loop, ledger_store
from tests.integration.damage import (
    PAYLOADS,
    SETTINGS,
    flip_in_the_entry_log,
    in_limbo,
    is_flushed,
    write,
)
from tests.kit.cli import spark_ledger, succeeds
from tests.kit.processes import eventually

LEDGERS, BIG = 8, 1000
BLOCK_BYTES = 4096  # of a table


def recover(cluster: LocalCluster, ledger_id: int) -> dict[str, dict]:
    """What became of each bookie, as the command says."""
    url = ("--service-url", cluster.service_url)
    said = json.loads(succeeds("ledger", "recover", ledger_id, "--json", *url))
    return {one["bookie_id"]: one for one in said["repaired"]}


def by_itself(cluster: LocalCluster, bookie: LocalBookie, ledger_id: int) -> list[Status]:
    bookies = ledger_store(cluster.service_url).cluster.bookies
    asked = bookies.read(bookie.id, ledger_id, 0, len(PAYLOADS) - 1, max_bytes=1 << 20)
    response = background_loop().run(asked)
    return [response.status, *(result.status for result in response.results)]


def test_bookies_damaged_in_turn_and_recovered_after_each_lose_nothing_though_none_lists_it(
    fresh_cluster,
):
    cluster: LocalCluster = fresh_cluster(bookies=3, bookie_settings=SETTINGS)
    with LedgerClient(cluster.service_url) as client:
        (ledger_id,) = write(client)
        assert eventually(lambda: all(is_flushed(b, PAYLOADS[-1]) for b in cluster.bookies))
        for bookie in cluster.bookies:
            flip_in_the_entry_log(bookie, PAYLOADS[5])
            done = recover(cluster, ledger_id)
            assert all(one["cleared"] for one in done.values())
            assert {each: one["copied"] for each, one in done.items()} == {
                each.id: int(each is bookie) for each in cluster.bookies
            }
            assert {one["compared"] for one in done.values()} == {len(PAYLOADS)}
        assert in_limbo(cluster) == {}
        reader = client.open_ledger(ledger_id, recover=False)
        found = [bytes(payload) for _, payload in reader.read(0, len(PAYLOADS) - 1)]
        assert found == PAYLOADS


def test_a_ledger_whose_entry_is_found_damaged_is_listed_at_once_and_a_silent_member_is_told_of(
    fresh_cluster,
):
    cluster: LocalCluster = fresh_cluster(bookies=3, bookie_settings=SETTINGS)
    bookie, silent = cluster.bookies[:2]
    with LedgerClient(cluster.service_url) as client:
        (ledger_id,) = write(client)
        assert eventually(lambda: is_flushed(bookie, PAYLOADS[5]))
        flip_in_the_entry_log(bookie, PAYLOADS[5])
        assert Status.IO_ERROR in by_itself(cluster, bookie, ledger_id)
        began = time.monotonic()
        assert eventually(lambda: in_limbo(cluster) == {ledger_id: bookie.id})
        assert time.monotonic() - began < 100  # of the 600 after which it is looked at anyway
        silent.stop()
        url = ("--service-url", cluster.service_url)
        ended = spark_ledger("ledger", "recover", ledger_id, *url)
        assert ended.returncode == 1
        assert "no answer" in ended.stdout
        silent.start()
        succeeds("ledger", "limbo", "--repair", *url)
        assert eventually(lambda: in_limbo(cluster) == {})


def flip_in_the_tables(folder: Path) -> None:
    """Bytes of where the tables of the index say where entries lie."""
    tables = [path for path in folder.rglob("*.sst") if path.stat().st_size > 4 * BLOCK_BYTES]
    assert tables
    for path in tables:
        data = bytearray(path.read_bytes())
        for at in range(40, len(data) // 8, 64):
            data[at] ^= 1
        path.write_bytes(data)


def why(cluster: LocalCluster, bookie: LocalBookie) -> tuple[str, str, int]:
    """State, reason and ledgers in limbo, as `bookie list` has them."""
    rows = json.loads(succeeds("bookie", "list", "--json", "--service-url", cluster.service_url))
    return next((r["state"], r["why"], r["limbo_ledgers"]) for r in rows if r["id"] == bookie.id)


def many_small_entries(client: LedgerClient) -> list[int]:
    """More than fit into one block of a table."""
    found = []
    for _ in range(LEDGERS):
        with client.create_ledger(3, 3, 2) as writer:
            for _ in range(BIG):
                writer.append_async(b"small")
        found.append(writer.ledger_id)
    return found


def test_a_corrupt_table_of_the_only_index_makes_the_node_read_only_and_names_the_command(
    fresh_cluster,
):
    cluster: LocalCluster = fresh_cluster(bookies=3, bookie_settings={"refresh_s": 600})
    bookie = cluster.bookies[0]
    with LedgerClient(cluster.service_url) as client:
        ledger_id = many_small_entries(client)[0]
        bookie.stop()
        flip_in_the_tables(Path(bookie.folder))
        bookie.start()
        assert eventually(lambda: why(cluster, bookie)[0] == "ro")
        assert REBUILD in why(cluster, bookie)[1]
        info = json.loads(succeeds("bookie", "info", bookie.frames, "--json"))
        assert (info["state"], REBUILD in info["reason"]) == ("readonly", True)
        lines = [line for line in bookie.log.read_text().splitlines() if "is damaged" in line]
        assert ["ERROR" in line for line in lines] == [True], lines
        reader = client.open_ledger(ledger_id)
        assert len([each for each in reader.read(0, BIG - 1)]) == BIG


def test_a_corrupt_table_of_one_of_several_indexes_costs_its_directory_and_the_command_repairs_all(
    fresh_cluster, tmp_path: Path
):
    cluster: LocalCluster = fresh_cluster(bookies=3, bookie_settings={"refresh_s": 600})
    bookie, second = cluster.bookies[0], tmp_path / "second"
    bookie.stop()
    folders = f"{Path(bookie.folder) / 'ledgers'},{second}"
    bookie.settings = {"refresh_s": 600, "ledger_directories": folders}
    bookie.start()
    with LedgerClient(cluster.service_url) as client:
        written = many_small_entries(client)
    bookie.stop()
    flip_in_the_tables(second)
    bookie.start()
    assert eventually(lambda: len(in_limbo(cluster)) > 0)
    assert eventually(lambda: why(cluster, bookie)[2] == len(in_limbo(cluster)))
    state, reason, count = why(cluster, bookie)
    assert (state, 0 < count < LEDGERS) == ("rw", True)
    assert "index is damaged" in reason
    url = ("--service-url", cluster.service_url)
    assert f"repaired: {count}" in succeeds("ledger", "limbo", "--repair", *url)
    assert eventually(lambda: in_limbo(cluster) == {})
    assert all(set(by_itself(cluster, bookie, each)) == {Status.OK} for each in written)
