"""The garbage collector stands still in a run (loop.py); here it gets its turn between runs."""

import gc

EVERY = 20


def freeze() -> None:
    """Leave what is imported by now out of every later collection."""
    gc.collect()
    gc.freeze()


def collect(runs: int) -> None:
    """Collect after every so many runs: a run leaves cycles behind, but few."""
    if runs % EVERY == 0:
        gc.collect()
