"""The garbage collector stands still in a run (loop.py); here it gets its turn between runs."""

import gc
import logging

EVERY = 20


def freeze() -> None:
    """Leave what is imported by now out of every later collection. What nodes log of the faults
    that a run injects is of no interest: a failing seed has its trace."""
    logging.disable(logging.CRITICAL)
    gc.collect()
    gc.freeze()


def collect(runs: int) -> None:
    """Collect after every so many runs: a run leaves cycles behind, but few."""
    if runs % EVERY == 0:
        gc.collect()
