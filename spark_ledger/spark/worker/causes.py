"""The error of ours behind one of Spark's.

Delta's sink wraps what a task failed of: the message of Spark's error is `[TASK_WRITE_FAILED]`, and
ours is in its cause only, which Python's text of it does not show.
"""

import re
from collections.abc import Iterator

_OURS = re.compile(r"\[LEDGER(?:_[A-Z]+)*(?:\.[A-Z_]+)?\] [^\n]*")
_STACKS = ("_stackTrace", "_stacktrace")
"""Where PySpark's exceptions keep the text of the JVM's, with all its causes; so do Connect's."""


def cause_of(error: object) -> str | None:
    """The first `[LEDGER_...] what is wrong. What to do.` in an exception of Spark's, in its causes
    or in a text; None if there is none.

        try:
            query.awaitTermination()
        except StreamingQueryException as error:
            print(spark_ledger.cause_of(error) or error)
    """
    for text in _texts(error):
        found = _OURS.search(text)
        if found is not None:
            return found[0].strip()
    return None


def _texts(error: object) -> Iterator[str]:
    seen: list[object] = []
    while error is not None and not any(error is one for one in seen):
        seen.append(error)
        yield str(error)
        yield from (text for name in _STACKS if isinstance(text := getattr(error, name, None), str))
        error = getattr(error, "_cause", None) or getattr(error, "__cause__", None)
