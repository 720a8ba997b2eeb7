"""What comes before the command line's nouns."""

from typer.testing import CliRunner

import spark_ledger
from spark_ledger.cli.main import app


def test_the_version_is_told():
    told = CliRunner().invoke(app, ["--version"])

    assert (told.exit_code, told.output.strip()) == (0, spark_ledger.__version__)
