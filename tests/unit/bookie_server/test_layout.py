import os
from pathlib import Path

import pytest

from bookie_server.start import opening
from bookie_server.start.opening import BadLayout


def check(*paths: Path) -> None:
    opening.check_paths([(f"directory_{number}", path) for number, path in enumerate(paths)])


def test_directories_side_by_side_are_made(tmp_path: Path):
    check(tmp_path / "a" / "journal", tmp_path / "a" / "journal-2", tmp_path / "ledgers")
    assert (tmp_path / "a" / "journal-2").is_dir()


@pytest.mark.parametrize("second", ["a", "b/../a", "link"])
def test_a_directory_given_twice_is_refused_whatever_it_is_called(tmp_path: Path, second: str):
    (tmp_path / "link").symlink_to(tmp_path / "a")
    with pytest.raises(BadLayout, match=r"directory_0 .*/a and directory_1 .* are the same"):
        check(tmp_path / "a", tmp_path / second)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(("first", "second"), [("a", "a/b"), ("a/b/c", "a")])
def test_a_directory_inside_another_is_refused(tmp_path: Path, first: str, second: str):
    with pytest.raises(BadLayout, match="one is in the other"):
        check(tmp_path / first, tmp_path / second)


def test_a_directory_that_cannot_be_made_is_refused_with_the_systems_reason(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(BadLayout, match="cannot be used: Not a directory"):
        check(tmp_path / "file" / "journal")
    with pytest.raises(BadLayout, match="cannot be used: File exists"):
        check(tmp_path / "file")


def test_a_directory_that_may_not_be_written_is_refused(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("os.access", lambda *_: False)  # root may write everywhere
    with pytest.raises(BadLayout, match="no permission to read and write"):
        check(tmp_path)


def test_reserves_larger_than_their_disk_are_refused_with_the_setting_as_the_cause(tmp_path):
    system = os.statvfs(tmp_path)
    total = system.f_blocks * system.f_frsize
    both = [("ledger_directory", tmp_path), ("journal_directory", tmp_path)]
    opening.check_reserve(both, 1 << 20)
    with pytest.raises(opening.BadLayout, match=f"^disk_reserve_bytes {total // 2 + 1} "):
        opening.check_reserve(both, total // 2 + 1)
