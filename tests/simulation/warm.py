"""The garbage collector stands still in a run (loop.py); here it gets its turn between runs."""

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager

EVERY = 20


def freeze() -> None:
    """Leave what is imported by now out of every later collection."""
    gc.collect()
    gc.freeze()


def collect(runs: int) -> None:
    """Collect after every so many runs: a run leaves cycles behind, but few."""
    if runs % EVERY == 0:
        gc.collect()


@contextmanager
def quiet() -> Iterator[None]:
    """What nodes log of injected faults is of no interest: a failing seed has its trace."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
