"""The error of ours behind one of Spark's."""

import io
from types import SimpleNamespace

import pytest

import spark_ledger
from spark_ledger import errors

OURS = "[LEDGER_SCHEMA.INCOMPATIBLE] topic 't', offset 7: 5000000000. Read with the wider type."
STACK = f"SparkException: [TASK_WRITE_FAILED] ...\n at a.b(c)\nCaused by: X: {OURS}\n at"


class OfSpark(Exception):
    """As PySpark makes them."""

    def __init__(self, text: str, stack: str = "", cause: Exception | None = None) -> None:
        super().__init__(text)
        self._stackTrace = stack
        self._cause = cause


@pytest.mark.parametrize(
    "error",
    [
        OURS,
        OfSpark(f"[STREAM_FAILED] terminated: {OURS}\nat"),
        OfSpark("[STREAM_FAILED] [TASK_WRITE_FAILED]", STACK),
        OfSpark("[STREAM_FAILED]", "", OfSpark("[TASK_WRITE_FAILED]", "", OfSpark(OURS))),
    ],
)
def test_the_error_of_ours_is_found_in_the_text_the_stack_or_a_cause(error):
    assert spark_ledger.cause_of(error) == OURS


def test_every_class_of_error_is_found():
    for kind in errors.LedgerError.__subclasses__():
        assert spark_ledger.cause_of(f"X: {kind('it')}\n at") == str(kind("it"))


def test_an_error_without_one_of_ours_has_none_also_if_its_cause_is_itself():
    error = OfSpark("[TASK_WRITE_FAILED] [LEDGERS] none")
    error._cause = error
    assert spark_ledger.cause_of(error) is None
    assert spark_ledger.cause_of(None) is None


def test_a_listener_prints_why_a_query_failed():
    printed = io.StringIO()
    listener = spark_ledger.LagListener(file=printed)
    for exception in (None, "java.lang.OutOfMemoryError", STACK):
        listener.onQueryTerminated(SimpleNamespace(id="q", exception=exception))
    assert printed.getvalue() == f"query q failed: {OURS}\n"
