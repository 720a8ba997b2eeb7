"""Bugs of upkeep and take-over are caught where they were caught before: at a point of a verb, at
the points of a bookie's deed, or by a seed. `python -m tests.simulation.mutants.reach` looks anew.
"""

from pathlib import Path

import pytest

from tests.simulation.mutants.reach import EQUIVALENT, REACHED, stored
from tests.simulation.warm import quiet

FOUND = stored()
AGAIN = [(mutant, deeds) for mutant, deeds in REACHED if mutant.name in FOUND]


@pytest.fixture(autouse=True)
def _quiet():
    with quiet():
        yield


@pytest.mark.parametrize(
    ("mutant", "deeds"), AGAIN, ids=[mutant.name.replace(" ", "-") for mutant, _ in AGAIN]
)
def test_a_bug_is_caught_where_it_was_caught(mutant, deeds):
    assert FOUND[mutant.name].near(mutant)


def test_every_bug_that_is_caught_is_a_row_of_the_documented_table_and_others_are_told():
    told = (Path(__file__).parents[2] / "docs" / "simulation.md").read_text()
    assert [m.name for m, _ in AGAIN if f"\n| {m.name} | {m.report} |" not in told] == []
    assert [m.name for m, _ in REACHED if m.name not in told] == []
    assert len({mutant.name for mutant, _ in REACHED}) == len(REACHED)


def test_what_breaks_no_promise_is_told_with_its_reason_and_is_not_counted_as_caught():
    told = " ".join((Path(__file__).parents[2] / "docs" / "simulation.md").read_text().split())
    assert set(EQUIVALENT) <= {mutant.name for mutant, _ in REACHED}
    assert not set(EQUIVALENT) & set(FOUND)
    assert [name for name, why in EQUIVALENT.items() if why not in told] == []
