"""A run that is forked stays the run that it was, and each continuation can be run again alone."""

import os
from dataclasses import replace

import pytest

from tests.simulation import __main__ as command
from tests.simulation import forking, replay
from tests.simulation.forking import Forks, run_forked
from tests.simulation.mutants import MUTANTS
from tests.simulation.scenario import run_seed
from tests.simulation.warm import quiet

SEED = 34
CAUGHT = "recovery begins below the last fragment"


@pytest.fixture(autouse=True)
def _quiet():
    with quiet():
        yield


@pytest.fixture
def forked():
    return run_forked(SEED, replay.drawn_plan(SEED), children=2, depth=2)


def test_a_forked_run_goes_on_as_if_nothing_had_been_and_its_continuations_go_elsewhere(forked):
    digests = [one.digest for one in forked.continued]
    assert len(digests) >= 3
    assert forked.outcome.digest == run_seed(SEED).digest
    assert len({forked.outcome.digest, *digests}) == len(digests) + 1


def test_a_continuation_is_the_same_when_it_is_run_again_without_a_fork(forked):
    deepest = max(forked.continued, key=lambda one: len(one.reseeds))
    for one in (forked.continued[0], deepest):
        plan = replace(replay.drawn_plan(SEED), reseeds=one.reseeds)
        assert run_seed(SEED, plan).digest == one.digest
    assert len(deepest.reseeds) == 2


@pytest.mark.slow
def test_what_a_continuation_found_is_told_with_a_command_line_that_finds_it_again(capsys):
    mutant = next(mutant for mutant in MUTANTS if mutant.name == CAUGHT)
    first, found = _first_found_by_a_continuation(mutant)
    assert found.broken == "20"
    start = ["--seeds", "1", "--start", str(first), "--mutant", CAUGHT]
    points = [f"--reseed={name}:{number}" for name, number in found.reseeds]
    assert command.main([*start, *points]) == 1
    assert "not deterministic" not in capsys.readouterr().out
    assert command.main(start) == 0


def _first_found_by_a_continuation(mutant):
    for seed in range(29, 60):
        plan = replay.changed_plan(seed, mutant.plan_changes)
        with mutant.applied():
            done = run_forked(seed, plan, 2)
        broken = [one for one in done.continued if one.broken]
        if broken and done.failure is None:
            return seed, broken[0]
    raise AssertionError("none of the seeds' continuations found it")


def test_a_continuation_that_dies_is_a_failure_that_names_where_it_began(monkeypatch):
    monkeypatch.setattr(Forks, "end", lambda self, run: (run(), self._results and os._exit(9))[0])
    done = run_forked(SEED, replay.drawn_plan(SEED), 1)
    assert {one.broken for one in done.continued} == {"died"}
    assert done.continued[0].reseeds[0][0] in forking.FORKED


def test_a_reseed_that_names_no_number_is_refused(capsys):
    assert command.main(["--reseed", "no spare bookie"]) == 2
    assert "a reseed is SITUATION:NUMBER, not no spare bookie" in capsys.readouterr().err
