from pathlib import Path

from bookie_server.__main__ import _parser
from bookie_server.api.settings import load, parse_overrides
from bookie_server.config import BookieConfig
from spark_ledger.local.local_bookie import LocalBookie


def settings_of(bookie: LocalBookie) -> BookieConfig:
    """As its process reads them."""
    _python, _m, _module, *arguments = bookie._command()
    return load(BookieConfig, None, parse_overrides(_parser().parse_args(arguments).set))


def test_directories_may_be_a_list_of_texts_or_paths_with_any_name(tmp_path: Path):
    several = [tmp_path / "l, 0", str(tmp_path / 'l"1"x'), "/größe"]
    bookie = LocalBookie(tmp_path, "zk://h:1/l", {"ledger_directories": several})
    config = settings_of(bookie)
    assert config.directories("ledger") == list(map(str, several))
    assert config.directories("journal") == [str(tmp_path / "journal")]
