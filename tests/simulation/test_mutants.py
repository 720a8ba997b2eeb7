"""Each known bug is caught by the seed that caught it before, which is clean without the bug.

When the code has moved on since, other seeds are tried; `python -m tests.simulation mutants
--refresh` stores new ones. `make test` takes one bug of each area: of adding, of
recovery, of storing, of topics, and so on.
"""

import json
from pathlib import Path

import pytest

from spark_ledger.errors import LedgerError
from tests.simulation.invariants import Violation
from tests.simulation.ledger_work import LedgerWork
from tests.simulation.mutants import MUTANTS, Mutant
from tests.simulation.mutants.command import main
from tests.simulation.mutants.mutant import MutantBroken, stored_seeds
from tests.simulation.mutants.reach import REACHED
from tests.simulation.mutants.search import search
from tests.simulation.warm import quiet


@pytest.fixture(autouse=True)
def _quiet():
    with quiet():
        yield


def one_of_each_area() -> list[Mutant]:
    """The one that was found soonest when seeds were stored."""
    stored, found = stored_seeds(), {}
    for mutant in sorted(MUTANTS, key=lambda mutant: stored.get(mutant.name, {}).get("seed", 0)):
        found.setdefault(mutant.make.__module__, mutant)
    return list(found.values())


NOT_SLOW = one_of_each_area()
KNOWN = [
    pytest.param(
        mutant,
        marks=() if mutant in NOT_SLOW else pytest.mark.slow,
        id=mutant.name.replace(" ", "-"),
    )
    for mutant in MUTANTS
]


@pytest.mark.parametrize("mutant", KNOWN)
def test_a_known_bug_is_caught_and_the_same_seed_is_clean_without_it(mutant: Mutant):
    seed = mutant.catching_seed()
    assert seed is not None
    assert mutant.clean(seed)


def test_every_mutant_has_a_name_of_its_own_and_a_stored_seed():
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names) >= 20
    assert sorted(stored_seeds()) == sorted(names)


def test_every_mutant_is_a_row_of_the_documented_table():
    told = (Path(__file__).parents[2] / "docs" / "simulation.md").read_text()
    rows = [f"\n| {mutant.name} | {mutant.report} |" for mutant in MUTANTS]
    assert [row for row in rows if row not in told] == []


def test_production_code_is_whole_again_after_a_mutant():
    before = [vars(mutant.owner)[mutant.attribute] for mutant in MUTANTS]
    for mutant in MUTANTS:
        with pytest.raises(ZeroDivisionError), mutant.applied():
            assert vars(mutant.owner)[mutant.attribute] is not None
            raise ZeroDivisionError
    assert [vars(mutant.owner)[mutant.attribute] for mutant in MUTANTS] == before


def failing(failure: Exception) -> Mutant:
    """Its own code raises the failure."""

    def fails(write):
        async def failing(self, client):
            raise failure

        return failing

    return Mutant("fails", "none", LedgerWork, "write", fails)


def test_caught_means_that_an_invariant_failed_and_not_that_an_error_was_raised():
    assert failing(Violation("8", "an invariant")).caught(0) == "8"
    assert failing(Violation("no defect", "")).caught(0) is None
    assert failing(LedgerError("expected of nobody")).caught(0) is None


def test_a_mutant_whose_own_code_fails_is_broken_whatever_fails_next():
    def takes_what_is_no_more(write):
        async def writes(self, client):
            try:
                await write(self, client.no_such_attribute)
            except AttributeError:
                raise Violation("8", "that is what production makes of it") from None

        return writes

    with pytest.raises(MutantBroken, match="KeyError"):
        failing(KeyError(1)).caught(0)
    broken = Mutant("broken", "none", LedgerWork, "write", takes_what_is_no_more)
    assert broken.caught(0) == "8"  # what it handles itself is its own affair
    with pytest.raises(MutantBroken, match="positional"):
        Mutant("other arguments", "none", LedgerWork, "write", lambda write: lambda: 1).caught(0)
    found = search(failing(KeyError(1)), 0, 5)
    assert (found.seeds, found.seed) == (1, None)
    assert "KeyError" in found.broken


def test_a_search_counts_the_seeds_it_needed_and_says_when_none_caught_the_mutant():
    harmless = Mutant("harmless", "none", LedgerWork, "close", lambda close: close)
    assert search(harmless, 0, 2).seeds == 2
    assert search(harmless, 0, 2).seed is None
    mutant = next(m for m in MUTANTS if m.name == "recovery closes at the LAC")
    found = search(mutant, 0, 50)
    assert found.seed == found.seeds - 1
    assert found.clean


def test_the_command_prints_for_each_mutant_whether_it_is_caught_and_after_how_many_seeds(capsys):
    few = ["--name", "recovery closes at the LAC", "--starts", "1", "--jobs", "1"]
    assert main(["--json", *few]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert told["name"] == "recovery closes at the LAC"
    assert told["caught"] is True
    assert 1 <= told["seeds"] <= 100
    assert main(["--seeds-max", "0", *few]) == 1
    assert "0 of 1 caught" in capsys.readouterr().out


@pytest.mark.parametrize(
    "mutant", [*MUTANTS, *(mutant for mutant, _ in REACHED)], ids=lambda mutant: mutant.name
)
def test_each_bug_replaces_what_there_is(mutant):
    assert mutant.attribute in vars(mutant.owner)
