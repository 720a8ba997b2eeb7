"""Seeds run clean and run the same twice: 80 in `make test`, 250 in `make test-all`, which judge
every invariant and meet what they must, too. A failing one is told with its story; a run of 10,000
(`make simulate`) must meet more."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from spark_ledger import topic
from spark_ledger.ledger.client import LedgerStore
from tests.simulation import invariants, parallel, replay, verbs
from tests.simulation.chaos import FAULTS
from tests.simulation.ghost import Ghost
from tests.simulation.mutants.brokers import SERVES
from tests.simulation.parallel import Chunk, Tally
from tests.simulation.scenario import run_seed
from tests.simulation.sometimes import SOMETIMES, missed
from tests.simulation.strikes import NAME as STRIKE
from tests.simulation.warm import quiet

ROOT = Path(__file__).resolve().parents[2]
SEEDS, NOT_SLOW = 250, 80
PROCESSES = 2
FIRST = int(os.environ.get("SIMULATION_START", "0"))
STORY_LINES = 200
OF_LEDGERS = 12
"""Seeds of ledgers alone (--plan '{"ledgers": true}')."""
SHARED_SEEDS = 2
"""Seeds of brokers with a subscription that consumers share."""
HOSTED = 34
"""A seed in which a process of production heals (service.py): what it publishes is in the store."""
DELETED = 5
"""A seed in which a consumer, where brokers serve, hears that its subscription is deleted."""
CHECK = "ledger.LedgerStore.check_registered"
JUDGED = [
    *(str(number) for number in range(1, 26)),
    *("29", "30", "31", "32", "33", "34", "35", "36", "37", "38", "39"),
    *(f"T{number}" for number in range(1, 18)),
    *(f"R{number}" for number in range(1, 6)),
    *(f"B{number}" for number in range(1, 26)),
]
"""Every invariant of a ledger and of the topics there are, by its number in docs/simulation.md."""


@pytest.fixture(autouse=True)
def _quiet():
    with quiet():
        yield


def run_all(seeds: range) -> Tally:
    """What the seeds add up to, up to the first that failed."""
    found = Tally()
    work = parallel.chunks(Chunk(seeds.start, len(seeds)), PROCESSES)
    for tally in parallel.run_all(work, PROCESSES):
        found.add(tally)
    print("\n".join(found.told(found.cpu_s, 1)))
    return found


def assert_clean(found: Tally, seeds: int) -> None:
    for failure in found.failures:
        story = failure.story.split("\n")[-STORY_LINES:]
        pytest.fail("\n".join([*story, failure.told, failure.again]), pytrace=False)
    assert found.seeds == seeds


@pytest.fixture(scope="module")
def first() -> Tally:
    return run_all(range(FIRST, FIRST + NOT_SLOW))


@pytest.fixture(scope="module")
def total(first: Tally) -> Tally:
    found = Tally()
    found.add(first)
    found.add(run_all(range(FIRST + NOT_SLOW, FIRST + SEEDS)))
    return found


def test_every_invariant_holds_in_the_first_runs(first):
    assert_clean(first, NOT_SLOW)


@pytest.mark.slow
def test_every_invariant_holds_in_every_run(total):
    assert_clean(total, SEEDS)


def test_every_invariant_is_a_function():
    assert sorted(invariants.ALL) == sorted(JUDGED)


@pytest.mark.slow
def test_every_invariant_was_judged(total):
    unjudged = [name for name in JUDGED if name not in total.checks]
    assert set(unjudged) <= {
        "33",
        "39",
        "B13",
        "B19",
        "B20",
        "B21",
        "B22",
        "B23",
        "B24",
        "B25",
    }  # by the tests below


def test_a_subscription_that_its_only_consumer_deletes_is_looked_for_where_one_does():
    plan = replay.changed_plan(DELETED, SERVES)
    assert "B13" in run_seed(DELETED, plan).checks


@pytest.mark.parametrize("seed", range(FIRST, FIRST + SHARED_SEEDS))
def test_consumers_that_share_a_subscription_keep_every_invariant(seed):
    plan = replay.changed_plan(seed, {**SERVES, "also": ("sharing",)})
    assert {"B19", "B20", "B21"} <= run_seed(seed, plan).checks.keys()


@pytest.mark.parametrize("seed", range(FIRST, FIRST + SHARED_SEEDS))
def test_consumers_that_share_a_subscription_by_keys_keep_every_invariant(seed):
    plan = replay.changed_plan(seed, {**SERVES, "also": ("keys",)})
    assert {"B19", "B20", "B21", "B23"} <= run_seed(seed, plan).checks.keys()


@pytest.mark.parametrize("also", ["sharing", "keys"])
def test_a_query_takes_over_what_consumers_share_and_gives_it_back(also):
    runs = [
        run_seed(seed, replay.changed_plan(seed, {**SERVES, "also": (also, "queries")}))
        for seed in range(FIRST, FIRST + SHARED_SEEDS)
    ]
    assert any("query gave it back" in run.met for run in runs)


def test_ledgers_alone_keep_every_invariant_and_all_their_copies():
    runs = [
        run_seed(seed, replay.changed_plan(seed, {"ledgers": True}))
        for seed in range(FIRST, FIRST + OF_LEDGERS)
    ]
    for name in ("8", "22", "39", "R1", "R2"):
        assert any(name in run.checks for run in runs), name
    strikes = [fault for run in runs for fault in run.injected if fault.name == STRIKE]
    assert len(strikes) > OF_LEDGERS
    assert run_seed(FIRST, runs[0].plan).digest == runs[0].digest


def test_overload_alone_is_judged_where_there_is_nothing_else_and_not_counted_elsewhere():
    overloaded = {"faults": ("overload",), "topics": False, "over_budget": False}
    runs = [
        run_seed(seed, replay.changed_plan(seed, overloaded)) for seed in range(FIRST, FIRST + 5)
    ]
    assert any("T15" in run.checks for run in runs)
    calm = replay.changed_plan(FIRST, {"topics": False})
    assert "T15" not in run_seed(FIRST, calm).checks
    losing = replay.changed_plan(FIRST, {**overloaded, "healing": True})
    assert "T15" not in run_seed(FIRST, losing).checks


@pytest.mark.slow
def test_the_runs_were_not_too_tame(total):
    assert missed(total.met, FAULTS, rare=False) == []


def test_every_public_verb_has_a_name_of_its_own_and_each_exception_is_one():
    names = verbs.names()
    assert len(names) == len(set(names))
    assert sorted({*verbs.EXCEPTIONS, *verbs.RARE} - set(names)) == []
    known = [module.__name__ for package in verbs.PACKAGES for module in verbs.modules(package)]
    assert sorted(set(verbs.REPLACED) - set(known)) == []


@pytest.mark.slow
def test_every_public_verb_is_called_in_runs_or_is_an_exception_with_its_reason(total):
    assert verbs.missing(total.met) == []
    called = [name for name in verbs.EXCEPTIONS if total.met.get(f"verb: {name}")]
    assert called == []  # it needs no exception


def test_a_new_verb_without_an_actor_that_calls_it_is_missed(monkeypatch):
    async def split(self) -> None:
        """A verb that nobody calls."""

    met = {f"verb: {name}": 1 for name in verbs.names()}
    assert verbs.missing(met) == []
    monkeypatch.setattr(LedgerStore, "split", split, raising=False)
    assert verbs.missing(met) == ["ledger.LedgerStore.split"]


def test_the_verbs_of_a_new_module_are_missed_and_what_only_computes_has_none(
    monkeypatch, tmp_path
):
    met = {f"verb: {name}": 1 for name in verbs.names()}
    (tmp_path / "splitting.py").write_text(
        "async def split(topic): ...\n"
        "def halves(topic): ...\n"
        "async def _look(topic): ...\n"
        "class Splitter:\n"
        "    async def once(self): ...\n"
        "    def twice(self): ...\n"
        "class Half:\n"
        "    def of(self): ...\n"
    )
    (tmp_path / "halving.py").write_text("def half(rows): ...\n")
    monkeypatch.setattr(topic, "__path__", [*topic.__path__, str(tmp_path)])
    new = ("splitting.split", "Splitter.once", "Splitter.twice")
    try:
        assert verbs.missing(met) == [f"topic.{name}" for name in new]
    finally:
        for name in ("splitting", "halving"):
            sys.modules.pop(f"{topic.__name__}.{name}", None)
            vars(topic).pop(name, None)


def test_production_code_is_whole_again_after_its_verbs_were_counted_and_each_is_noted_once():
    before = {verb.name: verb.function for verb in verbs.verbs()}
    ghost = Ghost()
    with verbs.counted(ghost):
        assert LedgerStore.__dict__["check_registered"] is not before[CHECK]
        for _ in range(2):
            LedgerStore.check_registered(None, 3, "").close()
            assert LedgerStore.__dict__["check_registered"] is before[CHECK]
    assert {name for name in ghost.met} == {f"verb: {CHECK}"}
    assert {verb.name: verb.function for verb in verbs.verbs()} == before


def test_a_situation_that_was_not_met_is_told_with_its_sentence():
    met = {name: 1 for name, _ in SOMETIMES}
    assert missed(met) == []
    assert missed({**met, "recovered": 0}) == ["recovered: IN_RECOVERY -> CLOSED"]
    assert missed(met, ["kill"]) == ["fault: kill: a class of fault happened"]


def test_the_same_seed_gives_the_same_run_twice():
    for seed in range(FIRST, FIRST + 5):
        runs = [run_seed(seed), run_seed(seed)]
        first, second = ((run.digest, run.steps) for run in runs)
        invariants.the_same_seed_gives_the_same_run(Ghost(), seed, first, second)


@pytest.mark.parametrize(("start", "seeds"), [(FIRST, 12), (HOSTED, 1)], ids=["many", "hosted"])
def test_the_same_seeds_give_the_same_runs_in_two_processes_with_other_hash_seeds(start, seeds):
    first, second = (_digests(hash_seed, start, seeds) for hash_seed in ("1", "2"))
    assert len(first) == seeds
    for line, other in zip(first, second, strict=True):
        seed = int(line.split()[0])
        invariants.the_same_seed_gives_the_same_run(Ghost(), seed, (line, 0), (other, 0))


def test_a_process_of_production_heals_by_itself_in_a_run_that_is_repeated():
    assert run_seed(HOSTED).met["verb: repair.Autorecovery.run"]


def _digests(hash_seed: str, start: int, seeds: int) -> list[str]:
    """The lines `seed digest` of a few seeds, run in a process of its own."""
    command = [sys.executable, "-m", "tests.simulation", "--digests"]
    command += ["--seeds", str(seeds), "--start", str(start)]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    return [line for line in done.stdout.splitlines() if len(line.split()) == 2][:seeds]
