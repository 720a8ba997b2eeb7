"""The exhaustive small scope: the explorer misses no interleaving, and finds known bugs."""

import random

import pytest

from tests.simulation.exhaustive import counting, exploring
from tests.simulation.exhaustive.__main__ import INCOMPLETE, lines, main
from tests.simulation.exhaustive.behaviour import Behaviours
from tests.simulation.exhaustive.exploring import SCOPES, Limits, explore
from tests.simulation.exhaustive.finish import Finish
from tests.simulation.exhaustive.judge import JUDGED
from tests.simulation.exhaustive.messages import Message
from tests.simulation.exhaustive.one_by_one import Live, every_run
from tests.simulation.exhaustive.search import Composition
from tests.simulation.exhaustive.stage import Scope, Stage
from tests.simulation.exhaustive.story import told
from tests.simulation.exhaustive.toy import ToyStage
from tests.simulation.invariants import Violation
from tests.simulation.replay import mutant_like
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


@pytest.mark.slow
def test_recovery_reads_that_do_not_fence_are_found_in_a_and_nothing_without_them():
    with mutant_like("2614").applied():
        found = explore(A, Limits(events_max=8)).found
    assert explore(A, Limits(events_max=8, states_max=found.states)).found.violation == ""
    assert found.violation.startswith("invariant 24:")  # decided by answers that do not fence
    assert "to CLOSED at -1" in told(found.story)[-1].text


def test_a_reply_before_the_fence_is_durable_is_found_when_a_bookie_crashes():
    with mutant_like("D1").applied():
        found = explore(C, Limits(events_max=5)).found
        lines_told = [str(line) for line in told(found.story, Stage(C))][-4:]
    assert explore(C, Limits(events_max=5, states_max=20 * found.states)).found.violation == ""
    assert found.violation.startswith("invariant 13:")
    assert [event for _, event in found.story[-2:]] == ["crash", "restart"]
    assert isinstance(found.story[-3][1], Message)
    gets, answers, crashes, _ = lines_told
    assert "gets recoverer's ReadLac (fencing)" in gets
    assert answers.endswith("LAC -1, fenced; durable there by now: nothing")
    assert crashes.endswith("loses power, and with it what was not synced: the fence")


@pytest.mark.slow
def test_stories_that_differ_by_the_names_of_bookies_alone_are_told_once():
    with mutant_like("D1").applied():
        behaviours = Behaviours(Stage(C), 5).learn()
        reports = [
            exploring.explored_part(behaviours, 0.0, Limits(events_max=5), b) for b in C.addresses
        ]
        stories: list = []
        first, second, third = (lines(report, stories) for report in reports)
    assert any("loses power" in line for line in first)
    assert second[-1] == "  the story is the one of b1 above, with b2 for b1"
    assert third[-1] == "  the story is the one of b1 above, with b3 for b1"
    assert stories[0][2] != told(reports[1].found.story, Stage(C))


@pytest.mark.slow
def test_with_only_one_invariant_others_may_be_broken_in_the_end_too(monkeypatch):
    stage = Stage(ONE_BOOKIE)
    broken = [Violation("1", "lost"), Violation("2", "short"), Violation("6", "torn")]
    monkeypatch.setattr(Finish, "_read_again", lambda *_: iter(broken))
    composition = Composition(Behaviours(stage).learn(), only="2")
    assert composition.explore().violation == "invariant 2: short"
    assert Composition(Behaviours(stage).learn(), only="4").explore().complete


@pytest.mark.slow
def test_every_invariant_that_is_judged_can_be_looked_for_alone(capsys):
    assert explore(TWO_BOOKIES).judged.keys() <= set(JUDGED)
    with pytest.raises(SystemExit) as ended:
        main(["A", "--only", "T1"])
    assert ended.value.code == 2
    assert "T13" in capsys.readouterr().err


@pytest.mark.parametrize("scope", ["B1", "C"])
def test_an_exploration_whose_time_is_over_says_so_also_while_it_learns(scope, capsys):
    assert main([scope, "--minutes", "0.005", "--jobs", "1"]) == INCOMPLETE
    assert "NOT complete: time was over before" in capsys.readouterr().out


@pytest.mark.slow
def test_states_that_were_not_followed_are_told(capsys):
    report = explore(TWO_BOOKIES, Limits(states_max=10))
    assert not report.found.complete
    assert "NOT complete" in lines(report, [])[-1]


@pytest.mark.parametrize("words", [["--minutes", "-1"], ["--minutes", "nan"], ["--jobs", "0"]])
def test_limits_that_make_no_sense_are_errors(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["A", *words])
    assert ended.value.code == 2
    assert f"argument {words[0]}" in capsys.readouterr().err


def test_a_mutant_that_there_is_not_is_an_error(capsys):
    assert main(["A", "--mutant", "zzz"]) == 2
    assert "BK#2614" in capsys.readouterr().err


def test_a_scope_that_does_not_exist_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["Z"])
    assert "there are A, A2, B, B1, C" in capsys.readouterr().err
