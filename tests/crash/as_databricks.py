"""Runs a notebook as Databricks does: `spark`, `dbutils`, `display` and `displayHTML` are there,
and widgets say the rest.

python -m tests.crash.as_databricks notebooks/01_bronze.py FOLDER SERVICE_URL ROWS
"""

import os
import runpy
import shutil
import sys
from pathlib import Path

from spark_ledger_demo import session


class Widgets:
    """Those whose names are given have been filled in; the others have what they begin with."""

    def __init__(self, filled: dict[str, str]) -> None:
        self._texts = dict(filled)

    def text(self, name: str, default: str, label: str = "") -> None:
        self._texts.setdefault(name, default)

    def get(self, name: str) -> str:
        return self._texts[name]


class Files:
    def rm(self, path: str, recurse: bool = False) -> bool:
        assert recurse
        shutil.rmtree(path, ignore_errors=True)
        return True

    def cp(self, source: str, to: str, recurse: bool = False) -> bool:
        assert recurse
        shutil.copytree(source, to)
        return True


class Utilities:
    def __init__(self, filled: dict[str, str]) -> None:
        self.widgets = Widgets(filled)
        self.fs = Files()


def main() -> None:
    notebook, folder, service_url, rows = sys.argv[1:]
    os.environ["DATABRICKS_RUNTIME_VERSION"] = "18.0"
    given = {"folder": folder, "service_url": service_url, "rows": rows}
    spark = session.start("as Databricks", Path(folder) / "spark", cores=2, delta=True)
    shown: list[object] = []
    runtime = {
        "spark": spark,
        "dbutils": Utilities(given),
        "display": shown.append,
        "displayHTML": shown.append,
    }
    names = runpy.run_path(notebook, dict(runtime))
    assert {name: names[name] for name in runtime} == runtime, "a name of the runtime was replaced"
    pictures = [one for one in shown if hasattr(one, "savefig")]
    assert pictures, "no picture was given to the runtime"
    assert names["cluster"] is None, "it started a cluster of its own"
    assert spark.range(3).count() == 3, "it ended a session that is not its own"


if __name__ == "__main__":
    main()
