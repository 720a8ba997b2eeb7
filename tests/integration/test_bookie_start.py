"""A start that is refused, on the real process: its exit status, and one line with what to do."""

import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from bookie_server.__main__ import BAD_CONFIG, BAD_DISKS, CANNOT_LISTEN, STOPPED, WRONG_DISKS
from bookie_server.disk.identity import FILE
from spark_ledger.local import LocalCluster
from spark_ledger.local.processes import LocalBookie
from tests.kit import commands

TIMEOUT_S = 120


@pytest.fixture(scope="module")
def home() -> Iterator[LocalCluster]:
    """A cluster of one bookie, which others' disks do not belong to."""
    with LocalCluster(bookies=1, autorecovery=False) as cluster:
        yield cluster


def bookie_server(arguments: list[str]) -> "subprocess.CompletedProcess[str]":
    return commands.server(commands.BOOKIE).run(arguments, TIMEOUT_S)


def refused(*settings: str) -> tuple[int, str]:
    """The exit status of a bookie that does not start, and the one line that it says of it."""
    ended = bookie_server([f"--set={each}" for each in settings])
    assert ended.stdout == ""
    said = [line for line in ended.stderr.splitlines() if line.startswith("bookie_server:")]
    assert len(said) == 1, ended.stderr
    assert "Traceback" not in ended.stderr
    return ended.returncode, said[0]


def on(home: LocalCluster, journal: Path, ledgers: Path) -> tuple[int, str]:
    return refused(
        f"service_url={home.service_url}",
        "listen=127.0.0.1:0",
        f"journal_directory={journal}",
        f"ledger_directory={ledgers}",
    )


def stopped_bookie(home: LocalCluster, folder: Path) -> LocalBookie:
    """Disks of another bookie of the cluster."""
    bookie = LocalBookie(folder, home.service_url, {})
    bookie.start()
    bookie.stop()
    return bookie


# -- 2: settings ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("journal", "ledgers", "says"),
    [
        ("a", "a", "are the same directory. Give each a directory of its own."),
        ("a", "a/b", "one is in the other. Give directories side by side."),
        ("a/b", "a", "one is in the other. Give directories side by side."),
        ("file/j", "a", "cannot be used: Not a directory"),
    ],
)
def test_directories_that_cannot_be_used_end_it_with_status_2(
    home: LocalCluster, tmp_path: Path, journal: str, ledgers: str, says: str
):
    (tmp_path / "file").touch()
    status, said = on(home, tmp_path / journal, tmp_path / ledgers)
    assert status == BAD_CONFIG
    assert says in said
    assert "journal_directory" in said


def test_the_old_and_the_new_setting_of_directories_together_end_it_with_status_2():
    status, said = refused("ledger_directory=a", "ledger_directories=b,c")
    assert status == BAD_CONFIG
    assert "give either ledger_directory or" in said


def test_a_setting_that_does_not_exist_ends_it_with_status_2():
    status, said = refused("ledger_directry=x")
    assert status == BAD_CONFIG
    assert "the nearest is 'ledger_directory'" in said


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("message_bytes_max=1000", "message_bytes_max must hold an entry of entry_bytes_max"),
        ("advertised=foo:bar:baz", "advertised: must be host or host:port"),
        ("ledger_directories=", "ledger_directories: must name a directory"),
        ("ledger_directories=[a", "ledger_directories: must be a,b or"),
    ],
)
def test_a_value_that_makes_no_sense_ends_it_with_status_2_and_a_short_line(
    setting: str, says: str
):
    status, said = refused(setting)
    assert status == BAD_CONFIG
    assert says in said
    assert len(said) < 250


def test_a_reserve_larger_than_the_disk_ends_it_with_status_2(home: LocalCluster, tmp_path: Path):
    status, said = refused(
        f"service_url={home.service_url}",
        f"journal_directory={tmp_path / 'journal'}",
        f'ledger_directories=["{tmp_path / "l0"}", "{tmp_path / "l1"}"]',
        f"disk_reserve_bytes={1 << 60}",
    )
    assert status == BAD_CONFIG
    assert "disk_reserve_bytes" in said
    assert (tmp_path / "l1").is_dir()


# -- 7: the disks are somebody else's, or in each other's place -----------------------------------


def test_a_directory_of_another_bookie_ends_it_with_status_7(home: LocalCluster, tmp_path: Path):
    one = stopped_bookie(home, tmp_path / "one")
    other = stopped_bookie(home, tmp_path / "other")
    status, said = on(home, one.folder / "journal", other.folder / "ledgers")
    assert status == WRONG_DISKS
    assert one.id in said
    assert other.id in said


def test_disks_of_another_cluster_end_it_with_status_7(home: LocalCluster, tmp_path: Path):
    with LocalCluster(bookies=1, data_dir=tmp_path, autorecovery=False) as foreign:
        folder = foreign.bookies[0].folder
    status, said = on(home, folder / "journal", folder / "ledgers")
    assert status == WRONG_DISKS
    assert "belong to cluster" in said


def test_journal_and_ledger_directories_swapped_end_it_with_status_7(
    home: LocalCluster, tmp_path: Path
):
    bookie = stopped_bookie(home, tmp_path / "one")
    status, said = on(home, bookie.folder / "ledgers", bookie.folder / "journal")
    assert status == WRONG_DISKS
    assert "journal_directory" in said


def test_a_copy_of_the_directories_of_a_bookie_that_runs_ends_it_with_status_7(
    home: LocalCluster, tmp_path: Path
):
    one = stopped_bookie(home, tmp_path / "one")
    shutil.copytree(one.folder, tmp_path / "copy")
    one.start()
    status, said = on(home, tmp_path / "copy" / "journal", tmp_path / "copy" / "ledgers")
    assert status == WRONG_DISKS
    assert f"running already, at {one.address}" in said
    one.kill()
    copy = LocalBookie(tmp_path / "copy", home.service_url, {})
    copy.start()  # the registration of the dead one is still there
    assert copy.id == one.id
    copy.stop()


# -- 4: the address is taken ----------------------------------------------------------------------


def test_an_address_that_is_taken_ends_it_with_status_4_before_anything_is_formatted(
    home: LocalCluster, tmp_path: Path
):
    status, said = refused(
        f"service_url={home.service_url}",
        f"listen={home.bookies[0].address}",
        f"journal_directory={tmp_path / 'journal'}",
        f"ledger_directory={tmp_path / 'ledgers'}",
    )
    assert status == CANNOT_LISTEN
    assert f"cannot listen on {home.bookies[0].address}: Address already in use" in said
    assert not (tmp_path / "journal" / FILE).exists()


# -- 8: damaged, or no bookie's ------------------------------------------------------------------


def test_a_damaged_identity_ends_it_with_status_8(home: LocalCluster, tmp_path: Path):
    bookie = stopped_bookie(home, tmp_path / "one")
    (bookie.folder / "journal" / FILE).write_text(f"nonsense {uuid.uuid4()}\n")
    status, said = on(home, bookie.folder / "journal", bookie.folder / "ledgers")
    assert status == BAD_DISKS
    assert "identity file is damaged" in said


def test_a_directory_that_holds_something_else_ends_it_with_status_8(
    home: LocalCluster, tmp_path: Path
):
    (tmp_path / "ledgers").mkdir()
    (tmp_path / "ledgers" / "holiday.jpg").touch()
    status, said = on(home, tmp_path / "journal", tmp_path / "ledgers")
    assert status == BAD_DISKS
    assert "holds" in said


# -- --rebuild-index -----------------------------------------------------------------------------


def test_indexes_that_are_whole_are_made_anew_by_force_only(home: LocalCluster, tmp_path: Path):
    bookie = stopped_bookie(home, tmp_path / "one")
    _python, _m, _module, *arguments = bookie.command()
    command = [part for part in [*arguments, "--rebuild-index"] if part != "--parent-pipe"]
    refusal, forced = (bookie_server([*command, *more]) for more in ([], ["--force"]))
    assert refusal.returncode == BAD_CONFIG
    assert "every index can be opened" in refusal.stderr
    assert forced.returncode == STOPPED
    assert "the index was made anew: 0 entries of 0 ledgers" in forced.stderr
    assert "limbo" not in forced.stderr
