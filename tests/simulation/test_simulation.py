"""Seeds run clean, run the same twice, and are not clean once a known bug is put in."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation.mutants import MUTANTS, Mutant, run_changed
from tests.simulation.scenario import SeedFailed, run_seed
from tests.simulation.warm import collect, quiet

ROOT = Path(__file__).resolve().parents[2]
SEEDS, CHUNK = 200, 10
FIRST = int(os.environ.get("SIMULATION_START", "0"))
JUDGED = [
    *("1", "2", "3", "4", "5", "6", "7", "8", "9", "10", "11", "12", "13", "14", "15"),
    *("17", "18", "19", "20", "22", "23", "29", "T1", "T2", "T3", "T5"),
]
"""The invariants that every 200 seeds must have judged; 33 is judged below."""

_checks: dict[str, int] = {}


@pytest.fixture(autouse=True)
def _quiet():
    with quiet():
        yield


@pytest.mark.parametrize("start", range(FIRST, FIRST + SEEDS, CHUNK))
def test_every_invariant_holds_in_every_run(start):
    for seed in range(start, start + CHUNK):
        try:
            outcome = run_seed(seed)
        except SeedFailed as failure:
            lines = failure.trace.split("\n")[-200:]
            pytest.fail("\n".join([*lines, str(failure)]), pytrace=False)
        for name, times in outcome.checks.items():
            _checks[name] = _checks.get(name, 0) + times
    collect(0)


def test_some_run_judged_each_invariant():
    if not _checks:
        for seed in range(FIRST, FIRST + 40):
            for name, times in run_seed(seed).checks.items():
                _checks[name] = _checks.get(name, 0) + times
    assert [name for name in JUDGED if name not in _checks] == []


def test_the_same_seed_gives_the_same_run_twice():
    for seed in range(FIRST, FIRST + 5):
        first, second = run_seed(seed), run_seed(seed)
        assert (first.digest, first.steps) == (second.digest, second.steps)


def test_the_same_seeds_give_the_same_runs_in_two_processes_with_other_hash_seeds():
    assert _digests("1") == _digests("2")


def _digests(hash_seed: str) -> list[str]:
    """The lines `seed digest` of a few seeds, run in a process of its own."""
    command = [sys.executable, "-m", "tests.simulation", "--digests"]
    command += ["--seeds", "12", "--start", str(FIRST)]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()[:12]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_a_known_bug_is_caught_and_the_same_seed_is_clean_without_it(mutant: Mutant):
    seed = mutant.catching_seed()
    assert seed is not None
    assert run_changed(seed, mutant.changes) is None
