"""What comes before the command line's nouns."""

from typer.testing import CliRunner

import spark_ledger
from spark_ledger.cli.main import app
from spark_ledger.errors import Unavailable


def test_the_version_is_told():
    result = CliRunner().invoke(app, ["--version"])

    assert (result.exit_code, result.output.strip()) == (0, spark_ledger.__version__)


def test_status_that_reaches_no_zookeeper_does_not_advise_itself(monkeypatch):
    async def unreachable(url):
        raise Unavailable("no ZooKeeper answers")

    monkeypatch.setattr("spark_ledger.cli.main.bookies_registered", unreachable)
    result = CliRunner().invoke(app, ["status", "--service-url", "zk://127.0.0.1:1/ledger"])

    assert isinstance(result.exception, Unavailable)
    assert "ZooKeeper" in result.exception.remedy
    assert "spark-ledger status" not in result.exception.remedy
