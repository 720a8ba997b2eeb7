"""The functions that a notebook takes from its runtime, for runtimes that do not have them.

    from spark_ledger.notebook import dbutils, display, displayHTML

On Databricks, or wherever the importing cell already has `dbutils`, the names stay the runtime's
own. In Jupyter and in plain Python they are those of spark_ledger_demo/notebook: `dbutils.widgets`
(a parameter, else an environment variable, else the default), `display` and `displayHTML` (shown in
Jupyter; a table as text, a picture as a file elsewhere). Nothing else of Databricks is imitated.

Always true: importing this loads neither pyspark nor matplotlib nor IPython.
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
    """The runtime's own if the importing cell has it, else ours."""
    if name not in _OURS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return sys._getframe(1).f_globals.get(name, _OURS[name])
