"""The functions that a notebook takes from its runtime, for runtimes that do not have them.

    from spark_ledger.notebook import dbutils, display, displayHTML

If the importing cell already has a name (on Databricks, for example), the name stays the runtime's.
In Jupyter and in plain Python the names are those of spark_ledger_demo/notebook: `dbutils.widgets`
(a parameter, else an environment variable, else the default), `display` and `displayHTML` (in
Jupyter they show; elsewhere a table is printed as text, and a picture written to a file). No other
function of Databricks is imitated.

Always true: to import this module loads neither pyspark nor matplotlib nor IPython.
"""

import sys
from types import SimpleNamespace
from typing import Any

from spark_ledger_demo.notebook import outputs

__all__ = ["dbutils", "display", "displayHTML"]

_OURS = {
    "dbutils": SimpleNamespace(widgets=outputs.WIDGETS),
    "display": outputs.display,
    "displayHTML": outputs.display_html,
}


def __getattr__(name: str) -> Any:
    """The importing cell's value of the name if it has one, else the value of this package."""
    if name not in _OURS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return sys._getframe(1).f_globals.get(name, _OURS[name])
