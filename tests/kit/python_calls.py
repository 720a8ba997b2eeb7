"""Counts the calls of Python functions: what code costs where a processor's time is too noisy."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def calls_counted() -> Iterator[Counter[str]]:
    """The Python functions that this thread calls, by name; those of the tests do not count."""
    calls: Counter[str] = Counter()

    def called(frame: Any, event: str, _: Any) -> None:
        if event == "call" and "/tests/" not in frame.f_code.co_filename:
            calls[frame.f_code.co_qualname] += 1

    sys.setprofile(called)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def calls_that_grow(few: Counter[str], many: Counter[str], more: int) -> dict[str, float]:
    """How often each function was called for each of the `more` items that `many` is of."""
    grown = {name: (many[name] - few[name]) / more for name in many}
    return {name: count for name, count in grown.items() if count}
