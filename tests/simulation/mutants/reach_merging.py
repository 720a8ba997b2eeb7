"""Bugs of commits that are given up and of the ledgers of merges, looked for at the points of the
deeds named with each."""

from dataclasses import replace
from typing import Any

from spark_ledger.metadata import paths
from spark_ledger.metadata.store import OutcomeUnknown
from spark_ledger.topic.commit import commit
from tests.simulation.mutants.mutant import Mutant
from tests.simulation.mutants.topics import CHURN


def bodies_before_rows(send: Any) -> Any:
    """The ledger of a body stays open for the next rows of its intent, and no multi checks that the
    ledgers of a merge have records."""

    async def sent(self: Any, view: Any, drafts: Any, steps: Any) -> Any:
        others = [one for one in self._request.checks if not one.path.startswith(paths.LEDGERS)]
        self._request = replace(self._request, checks=others)
        outcome = await send(self, view, drafts, steps)
        for held in self._payloads._writers.values():
            held._named_once = False
        return outcome

    return sent


def goes_by_the_last_problem(timeout_error: Any) -> Any:
    """Whether a commit that was given up may have been made is decided by its last try alone."""

    def timeout_error_by_it(self: Any, timeout_s: float, problem: Any) -> Any:
        self._response_lost = isinstance(problem, OutcomeUnknown)
        return timeout_error(self, timeout_s, problem)

    return timeout_error_by_it


REACHED = (
    (
        Mutant(
            *("last problem decides", "hazard 3", commit._Commit, "_timeout_error"),
            *(goes_by_the_last_problem, CHURN),
        ),
        ("commit",),
    ),
    (
        Mutant(
            *("rows after a body", "hazard 94", commit._Commit, "_send"),
            *(bodies_before_rows, CHURN),
        ),
        ("merging round after round",),
    ),
)
