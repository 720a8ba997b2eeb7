"""Known bugs, put into the production code for the length of a run: the simulation must find them.

Always true: a mutant replaces one production function by one that does what the cited report
describes (production code has no switch for it); it is caught when an invariant or the liveness
bound fails, not when it raises. The same seeds are clean without it.
"""

from tests.simulation.mutants import (
    acking,
    adding,
    bookies,
    brokers,
    by_key,
    direct_logs,
    drawn,
    healing,
    limbo,
    long_lives,
    reading,
    records,
    recovering,
    sharing,
    storing,
    topics,
)
from tests.simulation.mutants.mutant import Mutant, run_changed

__all__ = ["MUTANTS", "Mutant", "run_changed"]

MUTANTS: tuple[Mutant, ...] = (
    *adding.MUTANTS,
    *recovering.MUTANTS,
    *bookies.MUTANTS,
    *storing.MUTANTS,
    *limbo.MUTANTS,
    *direct_logs.MUTANTS,
    *records.MUTANTS,
    *reading.MUTANTS,
    *topics.MUTANTS,
    *drawn.MUTANTS,
    *healing.MUTANTS,
    *brokers.MUTANTS,
    *sharing.MUTANTS,
    *by_key.MUTANTS,
    *acking.MUTANTS,
    *long_lives.MUTANTS,
)
