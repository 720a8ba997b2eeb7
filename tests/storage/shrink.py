"""A failing case made small: operations are left out, then their bytes made zero, while it fails.

Always true: what is returned fails with the same kind of exception as what was given.
"""

from collections.abc import Callable

from tests.storage.case import run_case
from tests.storage.operations import OPERATION_BYTES

RUNS_MAX = 2000


def failure_of(case: bytes) -> Exception | None:
    """What the case fails with."""
    try:
        run_case(case)
    except Exception as error:
        return error
    return None


def shrunk(case: bytes, fails: Callable[[bytes], Exception | None] = failure_of) -> bytes:
    """A case with as few operations and bytes other than zero as can be found in RUNS_MAX runs."""
    kind = type(fails(case))
    left = RUNS_MAX

    def still(candidate: bytes) -> bool:
        nonlocal left
        left -= 1
        return left > 0 and type(fails(candidate)) is kind

    parts = [case[at : at + OPERATION_BYTES] for at in range(0, len(case), OPERATION_BYTES)]
    size = len(parts) // 2
    while size:
        at = 1  # the first says what the node is made of
        while at < len(parts):
            fewer = parts[:at] + parts[at + size :]
            if still(b"".join(fewer)):
                parts = fewer
            else:
                at += size
        size //= 2
    return _zeroed(b"".join(parts), still)


def _zeroed(case: bytes, still: Callable[[bytes], bool]) -> bytes:
    for at in range(len(case)):
        simpler = case[:at] + b"\0" + case[at + 1 :]
        if case[at] and still(simpler):
            case = simpler
    return case
