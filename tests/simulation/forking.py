"""A run is forked where it first meets a rare situation, and goes on in several ways from there.

Always true:
- what the process was forked with is all that a continuation has: it reseeds every generator of the
  run and goes on to the end, so that seed, plan and reseeds (Plan.reseeds) alone give the same run
  again, without a fork (`--seeds 1 --start SEED --reseed SITUATION:NUMBER`);
- the run that was forked goes on as if nothing had been: its digest is that of the plain seed;
- children are run one after the other, each with a bound on its processor time; one that dies is a
  failure of its own.
"""

import os
import pickle
import resource
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NoReturn

from tests.simulation.invariants import Violation
from tests.simulation.plan import Plan
from tests.simulation.scenario import Outcome, SeedFailed, run_seed

FORKED: tuple[str, ...] = (
    "ended by negatives with a holder unheard",
    "unacknowledged entry dropped",
    "recovery aborted, then finished",
    "three recoveries of one ledger at once",
    "slot flapped C->D->C",
    "change put off",
    "no spare bookie",
    "ensemble changed in recovery",
    "closed with an empty last fragment",
    "unknown outcome of a move, applied",
    "unknown outcome of a move, not applied",
    "deleted ledger refused an add",
    "zombie add after wipe",
    "zombie add after delete",
    "limbo answered",
    "limbo cleared by repair",
    "one of several directories lost",
    "bit rot met by a recovery",
    "bookie exited by a failed disk",
    "crashed in the middle of a checkpoint",
    "torn write in a direct log at a start",
    "damage in a direct log at a start",
    "flush waited for large entries",
    "log of large entries compacted",
    "large entry flushed elsewhere, its directory was lost",
    "large entry on its way taken over by the journal",
    "location given in vain",
    "states of a poll did not agree",
    "own: TxnConflict",
    "run: TxnConflict",
    "run: TopicRecreated",
    "trim: SubscriptionBusy",
    "source died in a batch",
    "source batch done again",
    "row read that was taken away before",
    "rows retained no more",
    "rows in a partition that came later",
    "rows replaced",
    "dropped ledger deleted",
    "ledger of a deleted topic deleted",
    "two janitors at work during the chaos",
    "segments merged",
    "commit: LedgerFenced",
    "cursor's owner died once it was told",
    "subscription sought",
    "live segment sealed",
    "rows trimmed",
)
"""Situations that few seeds meet while there is chaos: at most one in seven."""
CHILD_CPU_S = 60
FORKS_MAX = 6
"""Situations at which one run is forked, at most."""


@dataclass(frozen=True)
class Continued:
    """How one continuation ended."""

    reseeds: tuple[tuple[str, int], ...]
    cpu_s: float
    digest: str = ""
    broken: str = ""
    """The number of the invariant that failed, or the name of what it ended with."""
    told: str = ""
    met: dict[str, int] = field(default_factory=dict)


class Forks:
    """The forks of one seed's run: `children` at each of the first FORKS_MAX rare situations."""

    def __init__(self, plan: Plan, children: int, depth: int = 1) -> None:
        self.plan = plan
        self.children = children
        self.continued: list[Continued] = []
        self._depth = depth
        self._left = FORKS_MAX
        self._results: int | None = None
        """In a child: where it writes what became of it."""

    def at(self, situation: str) -> int | None:
        """Fork. In the run itself None is returned once all children have ended; in a child, what
        it is to be reseeded with."""
        if situation not in FORKED or not self._left or not self._depth:
            return None
        self._left -= 1
        for number in range(1, self.children + 1):
            reseeds = (*self.plan.reseeds, (situation, number))
            read, write = os.pipe()
            pid = os.fork()
            if not pid:
                os.close(read)
                self._become_child(write, reseeds)
                return number
            os.close(write)
            self._listen(pid, read, reseeds)
        return None

    def _become_child(self, results: int, reseeds: tuple[tuple[str, int], ...]) -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (CHILD_CPU_S, CHILD_CPU_S))
        self._results, self._depth = results, self._depth - 1
        self.plan = replace(self.plan, reseeds=reseeds)
        self.continued, self._left = [], FORKS_MAX

    def _listen(self, pid: int, results: int, reseeds: tuple[tuple[str, int], ...]) -> None:
        with os.fdopen(results, "rb") as pipe:
            told = pipe.read()
        _, status, usage = os.wait4(pid, 0)
        if told:
            self.continued += pickle.loads(told)
        else:
            cpu_s = usage.ru_utime + usage.ru_stime
            died = f"a continuation died, wait status {status}"
            self.continued.append(Continued(reseeds, cpu_s, broken="died", told=died))

    def end(self, run: Callable[[], Outcome]) -> Outcome:
        """Run the seed; a child tells its parent how it ended, and exits. Raises SeedFailed."""
        try:
            outcome = run()
        except SeedFailed as failure:
            if self._results is not None:
                self._tell(_failed(self.plan, failure))
            raise
        except BaseException as error:
            if self._results is not None:
                self._tell(Continued(self.plan.reseeds, 0, broken="died", told=repr(error)))
            raise
        if self._results is not None:
            self._tell(Continued(self.plan.reseeds, 0, outcome.digest, met=outcome.met))
        return outcome

    def _tell(self, mine: Continued) -> NoReturn:
        assert self._results is not None
        try:
            cpu_s = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
            with os.fdopen(self._results, "wb") as pipe:
                pickle.dump([replace(mine, cpu_s=cpu_s), *self.continued], pipe)
        finally:
            os._exit(0)


def _failed(plan: Plan, failure: SeedFailed) -> Continued:
    cause = failure.cause
    broken = cause.name if isinstance(cause, Violation) else type(cause).__name__
    return Continued(
        plan.reseeds, 0, broken=broken, told=f"{failure}\n  reseeded at {plan.reseeds}"
    )


def run_forked(seed: int, plan: Plan, children: int, depth: int = 1) -> "Forked":
    """Run the seed, and from each rare situation that it meets `children` continuations."""
    forks = Forks(plan, children, depth)
    outcome, failure = None, None
    try:
        outcome = forks.end(lambda: run_seed(seed, plan, forks.at))
    except SeedFailed as failed:
        failure = failed
    return Forked(outcome, failure, forks.continued)


@dataclass(frozen=True)
class Forked:
    """The run itself, one of whose first two is None, and its continuations."""

    outcome: Outcome | None
    failure: SeedFailed | None
    continued: list[Continued]
