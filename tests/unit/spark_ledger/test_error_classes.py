"""Errors keep their form, and docs/errors.md lists them all."""

import inspect
import pickle
import re
from pathlib import Path

from spark_ledger import errors

PAGE = Path(__file__).parents[3] / "docs" / "errors.md"
CLASSES = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, errors.LedgerError) and kind is not errors.LedgerError
]


def test_the_page_of_errors_lists_every_class_with_its_sql_state():
    listed = set(re.findall(r"^\| `(LEDGER_[A-Z_.]+)` \| (\w{5}) \|", PAGE.read_text(), re.M))
    assert listed == {(kind.error_class, kind.sql_state) for kind in CLASSES}


def test_an_error_says_class_what_and_remedy_and_survives_pickling():
    for kind in CLASSES:
        error = pickle.loads(pickle.dumps(kind("it broke.", ledger=7)))
        assert str(error) == f"[{kind.error_class}] it broke. {kind.remedy}"
        assert error.facts == {"ledger": 7}
        assert re.fullmatch(r".*[.?]", kind.remedy)
