"""The exhaustive small scope: the explorer misses no interleaving, and finds known bugs."""

import random

import pytest

from tests.simulation.exhaustive import counting
from tests.simulation.exhaustive.__main__ import main, mutated
from tests.simulation.exhaustive.behaviour import Behaviours
from tests.simulation.exhaustive.exploring import SCOPES, Limits, explore
from tests.simulation.exhaustive.messages import Message
from tests.simulation.exhaustive.one_by_one import Live, every_run
from tests.simulation.exhaustive.search import Composition
from tests.simulation.exhaustive.stage import Scope, Stage
from tests.simulation.exhaustive.story import told
from tests.simulation.exhaustive.toy import ToyStage
from tests.simulation.warm import quiet

ONE_BOOKIE = Scope("one", 1, 1, ensemble_size=1)
TWO_BOOKIES = Scope("two", 2, 2, ensemble_size=2)
A, C = SCOPES["A"][0], SCOPES["C"][0]


@pytest.fixture(autouse=True)
def _quiet():
    with quiet():
        yield


@pytest.mark.parametrize(
    ("askers", "servers", "needed"),
    [
        ({"a": [["s", "t"]], "b": [["s", "t"]]}, ["s", "t"], 2),
        ({"a": [["s", "t"], ["s"]], "b": [["s"]]}, ["s", "t"], 1),
        ({"a": [["s"], ["s", "t"]]}, ["s", "t"], 1),
    ],
)
def test_a_toy_has_as_many_runs_and_traces_as_are_met_one_by_one(askers, servers, needed):
    stage = ToyStage(askers, servers, needed)
    composition = Composition(Behaviours(stage).learn(), final=lambda *_: ("end", ""))
    assert (counting.runs(composition), counting.traces(composition)) == every_run(stage)
    assert composition.explore().complete


def test_production_code_has_as_many_runs_and_traces_as_are_met_one_by_one():
    stage = Stage(ONE_BOOKIE)
    composition = Composition(Behaviours(stage).learn())
    runs, traces = every_run(stage)
    assert (counting.runs(composition), counting.traces(composition)) == (runs, traces)
    assert runs > 100


def test_actors_that_all_live_at_once_do_what_was_learnt_of_each_alone():
    stage = Stage(TWO_BOOKIES)
    learners = Behaviours(stage).learn().learners
    for seed in range(30):
        rng, live = random.Random(seed), Live(stage)
        kinds = {name: learner.kinds[learner.root.kind] for name, learner in learners.items()}
        while choices := live.choices():
            name, event = choice = rng.choice(choices)
            learnt = {after[0]: after[1:] for after in kinds[name].next}
            step, kind = learnt[event]
            assert live.take(choice) == step
            kinds[name] = learners[name].kinds[kind]
            assert live.actors[name].facts() == kinds[name].facts
        live.discard()


def test_every_interleaving_with_two_bookies_keeps_the_invariants():
    report = explore(TWO_BOOKIES)
    assert report.found.violation == ""
    assert report.found.complete
    assert len(report.found.ends) == 3  # acked and kept; not acked: kept, dropped
    assert {"1", "2", "4", "5", "7", "8", "9", "12", "14", "20", "22"} <= report.judged.keys()


def test_the_same_scope_explored_twice_is_the_same():
    first, second = explore(ONE_BOOKIE), explore(ONE_BOOKIE)
    assert (first.found.states, first.found.steps) == (second.found.states, second.found.steps)
    assert first.found.ends == second.found.ends


def test_recovery_reads_that_do_not_fence_are_found_in_a_and_nothing_without_them():
    with mutated("2614"):
        found = explore(A, Limits(events_max=8)).found
    assert explore(A, Limits(events_max=8, states_max=found.states)).found.violation == ""
    assert found.violation.startswith("invariant 24:")  # decided by answers that do not fence
    assert "to CLOSED at -1" in told(found.story)[-1]


def test_a_reply_before_the_fence_is_durable_is_found_when_a_bookie_crashes():
    with mutated("D1"):
        found = explore(C, Limits(events_max=5)).found
    assert explore(C, Limits(events_max=5, states_max=20 * found.states)).found.violation == ""
    assert found.violation.startswith("invariant 13:")
    assert [event for _, event in found.story[-2:]] == ["crash", "restart"]
    assert isinstance(found.story[-3][1], Message)


def test_a_scope_that_does_not_exist_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["Z"])
    assert "there are A, A2, B, C" in capsys.readouterr().err
