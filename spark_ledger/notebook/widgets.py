"""`dbutils.widgets` outside of Databricks: parameters of a notebook.

Always true: a value is the one given by `--param name=value`, else that of the environment variable
of the name in capitals, else the default.
"""

import os
from collections.abc import Mapping, Sequence

from spark_ledger.errors import BadConfig


class Widgets:
    def __init__(self) -> None:
        self._given: dict[str, str] = {}
        self._values: dict[str, str] = {}

    def text(self, name: str, defaultValue: str, label: str = "") -> None:
        """A parameter of any text. The label is shown by Databricks only."""
        default = os.environ.get(name.upper(), str(defaultValue))
        self._values[name] = self._given.get(name, default)

    def dropdown(
        self, name: str, defaultValue: str, choices: Sequence[str], label: str = ""
    ) -> None:
        """A parameter that is one of `choices`. Raises errors.BadConfig if it is none of them."""
        self.text(name, defaultValue, label)
        if self._values[name] not in choices:
            raise BadConfig(
                f"parameter {name} is {self._values[name]!r}", f"Give one of {', '.join(choices)}."
            )

    def get(self, name: str) -> str:
        """The parameter's value. Raises errors.BadConfig if no cell made it."""
        if name not in self._values:
            there = ", ".join(sorted(self._values)) or "none"
            raise BadConfig(
                f"the notebook has no widget {name!r}",
                f"Make it with dbutils.widgets.text; there are: {there}.",
            )
        return self._values[name]

    def begin(self, given: Mapping[str, str]) -> None:
        """A notebook starts, with these parameters."""
        self._given, self._values = dict(given), {}

    def value(self, name: str, default: str) -> str:
        return self._values.get(name, default)


WIDGETS = Widgets()


class DBUtils:
    widgets = WIDGETS
