"""Runs a notebook as Databricks does: `spark` and `dbutils` are there, and widgets say the rest.

python -m tests.crash.as_databricks notebooks/01_flights.py FOLDER SERVICE_URL
"""

import runpy
import shutil
import sys
from pathlib import Path

from spark_ledger.demo import session


class Widgets:
    """Those whose names are given have been filled in; the others have what they begin with."""

    def __init__(self, filled: dict[str, str]) -> None:
        self._texts = dict(filled)

    def text(self, name: str, default: str) -> None:
        self._texts.setdefault(name, default)

    def get(self, name: str) -> str:
        return self._texts[name]


class Files:
    def rm(self, path: str, recurse: bool = False) -> bool:
        assert recurse
        shutil.rmtree(path, ignore_errors=True)
        return True


class Utilities:
    def __init__(self, filled: dict[str, str]) -> None:
        self.widgets = Widgets(filled)
        self.fs = Files()


def main() -> None:
    notebook, folder, service_url = sys.argv[1:]
    given = {"FLIGHTS_FOLDER": folder, "LEDGER_SERVICE_URL": service_url}
    spark = session.start("as Databricks", Path(folder) / "spark", cores=2, delta=True)
    names = runpy.run_path(notebook, {"spark": spark, "dbutils": Utilities(given)})
    assert names["cluster"] is None, "it started a cluster of its own"
    assert spark.range(3).count() == 3, "it ended a session that is not its own"


if __name__ == "__main__":
    main()
