from pathlib import Path

from bookie_server.__main__ import parse_arguments
from bookie_server.api.settings import load, parse_overrides
from bookie_server.config import BookieConfig
from spark_ledger.local.processes import LocalBookie


def settings_of(bookie: LocalBookie) -> BookieConfig:
    """As its process reads them."""
    _python, _m, _module, *arguments = bookie.command()
    return load(BookieConfig, None, parse_overrides(parse_arguments(arguments).set))


def test_directories_may_be_a_list_of_texts_or_paths_with_any_name(tmp_path: Path):
    several = [tmp_path / "l, 0", str(tmp_path / 'l"1"x'), "/größe"]
    bookie = LocalBookie(tmp_path, "zk://h:1/l", {"ledger_directories": several})
    config = settings_of(bookie)
    assert config.directories("ledger") == list(map(str, several))
    assert config.directories("journal") == [str(tmp_path / "journal")]


def test_a_destroyed_bookie_has_none_of_its_directories_and_keeps_its_log(tmp_path: Path):
    several = [tmp_path / "disk 1", tmp_path / "disk 2"]
    listed = LocalBookie(tmp_path / "a", "zk://h:1/l", {"ledger_directories": several})
    named = f"{tmp_path / 'x'}, {tmp_path / 'y'}"
    told = LocalBookie(tmp_path / "b", "zk://h:1/l", {"journal_directories": named})
    folders = [*several, tmp_path / "a" / "journal", tmp_path / "x", tmp_path / "y"]
    folders.append(tmp_path / "b" / "ledgers")
    for folder in folders:
        (folder / "deep").mkdir(parents=True)
    listed.log.touch()
    listed.destroy()
    told.destroy()
    assert not any(folder.exists() for folder in folders)
    assert listed.log.exists()
