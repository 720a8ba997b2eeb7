"""Limits of the ledger layer and of repair made small, so that a dozen entries meet what a million
would: a recovery in several requests, copies in several lots, checks of everything again and again.

Always true: they are drawn from the seed, hold for the whole run, and are what they were after it.
"""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from spark_ledger.ledger import recovery
from spark_ledger.repair import auditor, copies, worker

Limits = Mapping[tuple[ModuleType, str], Any]
REQUESTS: Limits = {
    (recovery, "WINDOW_FIRST"): 1,
    (recovery, "WINDOW_MAX"): 1,
    (copies, "ENTRIES_AT_ONCE"): 2,
}
"""Whatever may come in one request comes in many."""


def draw_limits(rng: random.Random) -> Limits:
    """The limits of a run: in a third of the runs as they are in production."""
    first = rng.choice((1, 2, 3))
    drawn = {
        (recovery, "WINDOW_FIRST"): first,
        (recovery, "WINDOW_MAX"): rng.choice((first, 2 * first, 512)),
        (copies, "ENTRIES_AT_ONCE"): rng.choice((1, 2, 4)),
        (auditor, "AGAIN_S"): 3.0,
        (auditor, "CHECK_AGAIN_S"): rng.choice((2.0, 6.0)),
        (auditor, "CHECKS_A_LOOK"): rng.choice((2, 256)),
        (worker, "LEDGERS_AT_ONCE"): rng.choice((1, 3)),
    }
    return drawn if rng.random() < 0.67 else {}


@contextmanager
def limited(limits: Limits) -> Iterator[None]:
    """Production code with these limits."""
    before = {key: getattr(*key) for key in limits}
    try:
        for (module, name), value in limits.items():
            setattr(module, name, value)
        yield
    finally:
        for (module, name), value in before.items():
            setattr(module, name, value)
