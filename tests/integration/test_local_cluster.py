"""The embedded cluster, with real processes."""

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from spark_ledger import LedgerClient
from spark_ledger.errors import BadConfig, Unavailable
from spark_ledger.local import LocalCluster, processes
from tests.kit.processes import alive, descendants, eventually

MAKES_A_CLUSTER_AND_HANGS = """
import json, signal
from spark_ledger.local import LocalCluster, processes
cluster = LocalCluster(bookies=1)
print(json.dumps({"folder": str(cluster.data_dir)}), flush=True)
signal.pause()
"""


def status_of(pid: int | None, name: str) -> str:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line.split(":", 1)[1].strip() for line in lines if line.startswith(f"{name}:"))


def listening_addresses(pids: list[int]) -> set[str]:
    """Addresses (hexadecimal, as the kernel writes them) that the processes listen on."""
    sockets = set()
    for pid in pids:
        for target in open_files(pid):
            if target.startswith("socket:["):
                sockets.add(target[8:-1])
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in sockets:
                found.add(fields[1].rpartition(":")[0])
    return found


def test_every_bookie_of_a_cluster_runs_and_is_another_one(cluster: LocalCluster):
    assert len(cluster.bookies) == 3
    assert len({bookie.id for bookie in cluster.bookies}) == 3
    assert alive(bookie.pid for bookie in cluster.bookies) == [b.pid for b in cluster.bookies]
    assert cluster.service_url.startswith("zk://127.0.0.1:")


def test_all_servers_listen_on_the_loopback_interface_only(cluster: LocalCluster):
    children = descendants(os.getpid())
    loopback = {"0100007F", "0000000000000000FFFF00000100007F"}
    assert listening_addresses(children) <= loopback
    assert listening_addresses(children)


def test_a_killed_bookie_comes_back_as_itself(cluster: LocalCluster):
    bookie = cluster.bookies[0]
    before, pid = bookie.id, bookie.pid
    bookie.kill()
    assert bookie.pid is None
    assert not alive([pid])
    bookie.start()
    assert bookie.id == before
    assert bookie.pid not in (None, pid)


def test_a_stopped_bookie_ends_in_good_order_and_comes_back(cluster: LocalCluster):
    bookie = cluster.bookies[1]
    before = bookie.id
    bookie.stop()
    assert not bookie.running
    assert bookie.exit_code == 0
    bookie.start()
    assert bookie.id == before


def test_starting_a_running_bookie_is_refused(cluster: LocalCluster):
    with pytest.raises(ValueError, match="running already"):
        cluster.bookies[0].start()


def test_a_data_dir_is_taken_up_again_with_the_same_bookies(tmp_path: Path, fresh_cluster):
    first = fresh_cluster(bookies=1, data_dir=tmp_path)
    first.add_bookie()
    ids = [bookie.id for bookie in first.bookies]
    first.stop()
    again = fresh_cluster(bookies=1, data_dir=tmp_path)
    assert [bookie.id for bookie in again.bookies] == ids
    again.stop()
    assert tmp_path.exists()


def test_one_cluster_at_a_time_has_a_data_dir(tmp_path: Path, fresh_cluster):
    first = fresh_cluster(bookies=1, data_dir=tmp_path)
    for _ in range(2):
        with pytest.raises(BadConfig, match=f"{tmp_path} is in use by another cluster"):
            LocalCluster(bookies=1, data_dir=tmp_path)
    assert first.bookies[0].running
    first.stop()
    fresh_cluster(bookies=1, data_dir=tmp_path)


def test_a_data_dir_that_cannot_be_written_is_one_clear_error(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(BadConfig, match="cannot be used: Not a directory"):
        LocalCluster(bookies=1, data_dir=tmp_path / "file" / "below")


def has_open(pid: int, folder: Path) -> bool:
    """Whether the process has a file of the folder open."""
    return any(Path(target).is_relative_to(folder) for target in open_files(pid))


def open_files(pid: int) -> list[str]:
    """What its descriptors are of; one that it closes meanwhile is in the list or not."""
    found = []
    with contextlib.suppress(FileNotFoundError):  # the process has just ended
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                found.append(os.readlink(fd))
    return found


def test_a_cluster_without_a_data_dir_leaves_nothing(fresh_cluster):
    cluster = fresh_cluster(bookies=1)
    folder = cluster.data_dir
    own = [pid for pid in descendants(os.getpid()) if has_open(pid, folder)]
    assert len(own) == 3  # a bookie, ZooKeeper and its guardian
    cluster.stop()
    assert not folder.exists()
    assert not alive(own)
    cluster.stop()


def test_a_bookie_of_another_cluster_is_refused_with_status_7(tmp_path: Path, fresh_cluster):
    fresh_cluster(bookies=1, data_dir=tmp_path / "a").stop()
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "bookies").rename(tmp_path / "b" / "bookies")
    fresh_cluster(bookies=1, data_dir=tmp_path / "a").stop()
    (tmp_path / "a" / "bookies" / "0").rename(tmp_path / "b" / "bookies" / "1")
    with pytest.raises(Unavailable, match=r"exit status 7.*belong to cluster"):
        fresh_cluster(data_dir=tmp_path / "b")


@pytest.mark.parametrize("which", ["maker", "maker's group"])
def test_no_process_outlives_the_one_that_made_the_cluster(which: str):
    maker = subprocess.Popen(
        [sys.executable, "-c", MAKES_A_CLUSTER_AND_HANGS],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert maker.stdout is not None
    folder = Path(json.loads(maker.stdout.readline())["folder"])
    children = descendants(maker.pid)
    assert len(children) == 4  # and what heals it
    (os.kill if which == "maker" else os.killpg)(maker.pid, signal.SIGKILL)
    maker.wait()
    maker.stdout.close()
    assert eventually(lambda: not alive(children))
    assert eventually(lambda: not folder.exists())


def test_zookeeper_does_not_outlive_a_killed_guardian(fresh_cluster):
    cluster = fresh_cluster(bookies=1)
    guardian = cluster.zookeeper.pid
    server = descendants(guardian)
    assert len(server) == 1
    os.kill(guardian, signal.SIGKILL)
    assert eventually(lambda: not alive(server))


def test_zookeeper_comes_back_at_the_same_address_and_bookies_register_again(fresh_cluster):
    cluster = fresh_cluster(bookies=1, bookie_settings={"session_timeout_s": 2})
    url = cluster.service_url
    cluster.zookeeper.kill()
    cluster.zookeeper.start()
    assert cluster.service_url == url
    assert cluster.bookies[0].running
    cluster.add_bookie()


def test_a_port_that_is_taken_is_one_clear_error(cluster: LocalCluster, tmp_path: Path):
    port = int(cluster.service_url.split(":")[2].partition("/")[0])
    with pytest.raises(BadConfig, match=f"port {port} is taken"):
        LocalCluster(bookies=1, data_dir=tmp_path, port=port)


def bookie_server(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "bookie_server", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_broker_takes_another_port_if_its_free_port_is_taken_before_it_listens(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    free_port = processes.free_port
    with socket.create_server((processes.HOST, 0)) as taken:
        ports = iter([free_port(), taken.getsockname()[1]])
        monkeypatch.setattr(processes, "free_port", lambda: next(ports, None) or free_port())
        broker = processes.LocalBroker(tmp_path / "broker.log", cluster.service_url)
        try:
            broker.start()
            assert str(taken.getsockname()[1]) in (tmp_path / "broker.log").read_text()
            url = broker.url
            broker.kill()
            broker.start()
            assert broker.url == url
        finally:
            broker.kill()


def test_a_wrong_setting_ends_a_bookie_with_status_2_and_one_line(tmp_path: Path):
    ended = bookie_server("--set", "journal_byte_max=1")
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert "unknown setting 'journal_byte_max'; the nearest is 'journal_bytes_max'" in ended.stderr


def test_a_bookie_without_zookeeper_ends_with_status_3_and_names_the_url(tmp_path: Path):
    settings = {
        "service_url": "zk://127.0.0.1:1/ledger",
        "connect_timeout_s": 0.5,
        "journal_directory": tmp_path / "journal",
        "ledger_directory": tmp_path / "ledgers",
    }
    ended = bookie_server(*(f"--set={key}={value}" for key, value in settings.items()))
    assert ended.returncode == 3
    assert "zk://127.0.0.1:1/ledger" in ended.stderr


def test_a_bookie_whose_port_is_taken_ends_with_status_4_and_names_it(
    cluster: LocalCluster, tmp_path: Path
):
    settings = {
        "service_url": cluster.service_url,
        "listen": cluster.bookies[2].address,
        "journal_directory": tmp_path / "journal",
        "ledger_directory": tmp_path / "ledgers",
    }
    ended = bookie_server(*(f"--set={key}={value}" for key, value in settings.items()))
    assert ended.returncode == 4
    assert f"cannot listen on {cluster.bookies[2].address}" in ended.stderr


def test_a_second_process_on_the_same_disks_ends_with_status_8(cluster: LocalCluster):
    bookie = cluster.bookies[2]
    settings = {
        "service_url": cluster.service_url,
        "listen": "127.0.0.1:0",
        "journal_directory": bookie.folder / "journal",
        "ledger_directory": bookie.folder / "ledgers",
    }
    ended = bookie_server(*(f"--set={key}={value}" for key, value in settings.items()))
    assert ended.returncode == 8
    assert "another bookie is running" in ended.stderr


def test_a_bookie_whose_disk_fails_while_it_serves_ends_with_status_6_and_loses_nothing(
    fresh_cluster,
):
    cluster = fresh_cluster(bookies=4)
    with LedgerClient(cluster.service_url) as client, client.create_ledger(3, 3, 2) as ledger:
        ledger.append(b"before")
        members = client.ledger_metadata(ledger.ledger_id).last_fragment.ensemble
        failing = next(bookie for bookie in cluster.bookies if bookie.id == members[0])
        resource.prlimit(failing.pid, resource.RLIMIT_FSIZE, (0, 0))  # every write: EFBIG
        assert ledger.append(b"after") == 1
        assert eventually(lambda: not failing.running)
        assert failing.exit_code == 6
        failing.start()
        reader = client.open_ledger(ledger.ledger_id)
        assert [bytes(payload) for _, payload in reader.read(0, 1)] == [b"before", b"after"]


def test_a_bookie_that_cannot_open_its_disk_ends_with_status_6(fresh_cluster):
    cluster = fresh_cluster(bookies=1)
    bookie = cluster.bookies[0]
    bookie.kill()  # after a stop nothing in the journal would be needed
    journal = bookie.folder / "journal"
    for file in journal.rglob("*"):
        if file.is_file() and file.stat().st_size > 4096:
            file.unlink()
            file.mkdir()
    with pytest.raises(Unavailable, match="exit status 6"):
        bookie.start()
