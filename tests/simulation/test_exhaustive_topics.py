"""The topic layer's small scopes: nothing is broken, each rule taken out is found, and the explorer
leaves nothing out."""

import itertools

import pytest

from spark_ledger.metadata.store import Create, MultiFailed, OutcomeUnknown, Set, StoreUnavailable
from tests.simulation.exhaustive.__main__ import INCOMPLETE, main
from tests.simulation.exhaustive.topics import cleaning, command, live, runs, scopes
from tests.simulation.exhaustive.topics.mutants import RULES
from tests.simulation.exhaustive.topics.processes import Learner
from tests.simulation.exhaustive.topics.scope import Actor, Scope
from tests.simulation.exhaustive.topics.search import Search
from tests.simulation.exhaustive.topics.worlds import (
    APPLIED,
    FIRST,
    LOST_AFTER,
    LOST_BEFORE,
    REFUSED,
    carried_out,
)
from tests.simulation.warm import quiet

FOUND = {
    "1": "T1",
    "2": "T2",
    "4": "T4",
    "6": "T1",
    "7": "T5",
    "10": "T2",
    "11": "T2",
    "14": "T9",
    "28": "T7",
    "29": "T3",
}
"""By hazard the invariant that its rule, taken out, breaks first."""


@pytest.fixture(autouse=True)
def _quiet():
    with quiet():
        yield


@pytest.mark.parametrize("name", command.SMALL)
def test_every_interleaving_of_a_small_scope_keeps_the_invariants(name):
    found = Search(command.SMALL[name]()).explore()
    assert found.violation == ""
    assert found.complete
    assert found.ends > 1
    assert {"T1", "T2", "T3", "T14"} <= found.judged.keys()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_taken_out_is_found_and_nothing_is_broken_with_it(rule):
    made = command.MUTANTS[rule.hazard]
    with rule.applied():
        found = Search(made()).explore()
    assert found.violation.startswith(f"invariant {FOUND[rule.hazard]}:")
    assert Search(made()).explore(states_max=found.states).violation == ""


def test_each_hazard_that_the_scopes_are_there_for_has_a_rule_taken_out():
    assert {rule.hazard for rule in RULES} == command.MUTANTS.keys() == FOUND.keys()
    assert {rule.scope for rule in RULES} == command.FULL.keys()


@pytest.mark.parametrize(
    "scope",
    [
        lambda: scopes.commits((1, 1), (1,), read=False, faults=0),
        lambda: scopes.commits((1, 1), (), read=False, faults=1),
        lambda: runs.runs((((0,),), ((1,),)), read=False, faults=0),
        lambda: cleaning.cleaning((False,), (True,), faults=0),
    ],
)
def test_what_is_left_out_because_it_commutes_leads_nowhere_else(scope):
    some, every = Search(scope()).explore(), Search(scope(), every=True).explore()
    assert some.complete
    assert every.complete
    assert some.states < every.states
    ends = [{world.identity() for world in found.last.values()} for found in (some, every)]
    assert ends[0] == ends[1]
    assert some.told.keys() == every.told.keys()


def test_the_same_scope_explored_twice_is_the_same():
    one, other = (Search(command.SMALL["runs"]()).explore() for _ in range(2))
    assert (one.states, one.steps, one.told) == (other.states, other.steps, other.told)


def test_outcomes_of_a_commit_are_met_in_all_ways():
    found = Search(runs.runs((((0,),), ((0,),)), read=False, faults=1)).explore()
    assert {"run1: committed committed", "run1: failed LedgerFenced"} <= found.told.keys()
    assert "run2: committed already" in found.told


def test_a_janitor_that_is_first_deletes_and_one_that_is_late_keeps():
    found = Search(command.SMALL["cleaning"]()).explore()
    assert {"janitor: deleted (1,)", "janitor: deleted ()"} <= found.told.keys()


def test_without_bound_an_owner_and_a_batch_would_chase_each_other():
    found = Search(live.live(1, 1, faults=0)).explore()
    assert "spark: failed sealed again and again" in found.told


# -- what the search stands on ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fate", "applied", "raised"),
    [
        (APPLIED, True, None),
        (LOST_AFTER, True, OutcomeUnknown),
        (LOST_BEFORE, False, OutcomeUnknown),
        (REFUSED, False, StoreUnavailable),
    ],
)
def test_a_write_has_the_outcome_that_was_chosen(fate, applied, raised):
    world, answer = carried_out(FIRST, ("create", "/a", b"", False), fate)
    assert ("/a" in world.nodes) is applied
    assert "/a" not in FIRST.nodes
    assert answer[:2] == (("value", None) if raised is None else ("raised", raised))


def test_a_multi_changes_all_or_nothing():
    both = (Create("/a"), Set("/b", b"", 0))
    world, answer = carried_out(FIRST, ("multi", both))
    assert world.nodes == FIRST.nodes
    assert answer[1] is MultiFailed
    assert answer[2][0] == 1


def _process(chance):
    async def program(process):
        await process.sync(f"/{next(chance)}")
        await process.sync("/end")

    return program


def test_a_process_that_is_not_a_function_of_its_answers_is_noticed():
    learner = Learner("one", _process(itertools.count()))
    moment, _ = learner.after(learner.first, ("value", None))
    learner.after(moment, ("value", None))
    with pytest.raises(AssertionError, match="asks for the same things"):
        learner.after(moment, ("value", 1))
    learner.discard()


def test_a_process_that_lists_where_others_make_what_is_their_own_is_refused():
    async def program(process):
        await process.children("/intents")

    scope = Scope("wrong", "", (Actor("one", program),), FIRST, (), own=("/intents/system-",))
    with pytest.raises(AssertionError, match="others have their own"):
        Search(scope).explore()


def test_a_scope_that_says_less_than_its_processes_write_is_refused():
    async def program(process):
        await process.create("/a")

    scope = Scope("wrong", "", (Actor("one", program, ("/b",)),), FIRST, ())
    with pytest.raises(AssertionError, match="not what its scope says"):
        Search(scope).explore()


# -- the command --------------------------------------------------------------------------------


def test_a_mutant_is_told_with_its_story(capsys):
    assert main(["live", "--small", "--mutant", "hazard 29"]) == 1
    told = capsys.readouterr().out
    assert "VIOLATION: invariant T3" in told
    assert "spark: multi" in told


def test_an_exploration_whose_time_is_over_says_so(capsys):
    assert main(["cleaning", "--minutes", "0"]) == INCOMPLETE
    assert "NOT complete" in capsys.readouterr().out


def test_a_mutant_that_there_is_not_is_an_error(capsys):
    assert main(["runs", "--mutant", "zzz"]) == 2
    assert "hazard 10" in capsys.readouterr().err
