"""What a command line asks for is checked before anything runs, and a mutant is found by what
people call it."""

import pytest

from tests.simulation import __main__ as command
from tests.simulation import parallel, replay
from tests.simulation.mutants.command import main as mutants
from tests.simulation.parallel import Failure, Tally
from tests.simulation.shrink import main as shrink


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch):
    def run_all(*_):
        raise AssertionError("something was run")

    monkeypatch.setattr(parallel, "run_all", run_all)


@pytest.mark.parametrize("which", ["recovery reads do not fence", "BK#2614", "2614", "not FENCE"])
def test_a_mutant_is_found_by_its_name_its_report_or_a_part_of_them(which):
    assert replay.mutant_like(which).name == "recovery reads do not fence"


def test_the_whole_name_or_report_goes_before_a_part_of_others():
    assert replay.mutant_like("D1").name == "reply before the fence"


def test_a_part_of_several_mutants_lists_them():
    with pytest.raises(ValueError, match="may be any of these") as refused:
        replay.mutant_like("BK#2179")
    told = str(refused.value).split("\n")[1:]
    assert [line.split(maxsplit=1)[1] for line in told] == [
        "lost answer taken for failure",
        "decision repeated blindly",
    ]


@pytest.mark.parametrize(
    "refuse", [lambda: command.main(["--mutant", "zzz"]), lambda: mutants(["--name", "zzz"])]
)
def test_a_mutant_that_there_is_not_lists_names_and_reports_one_in_a_line(refuse, capsys):
    assert refuse() == 2
    told = capsys.readouterr().err.split("\n")
    assert "there is no mutant 'zzz'" in told[0]
    assert "  BK#2614      recovery reads do not fence" in told


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        ("{", "not JSON"),
        ("[1]", "a JSON object"),
        ('{"colour": 1}', "has no 'colour'"),
        ('{"faults": ["losss"]}', "no fault class 'losss'"),
        ('{"faults": "loss"}', "a list of fault classes"),
        ('{"without": [["loss"]]}', "a list of fault classes"),
        ('{"without": ["slow netwrok"]}', "without: no fault class"),
        ('{"writers": -1}', "writers is a whole number"),
        ('{"writers": true}', "writers is a whole number"),
        ('{"streams": 0}', "streams is a whole number"),
        ('{"recoverers": "2"}', "recoverers is a whole number"),
        ('{"chaos_s": -1}', "chaos_s is a number of seconds"),
        ('{"between_s": NaN}', "between_s is a number of seconds"),
        ('{"slow": 2}', "slow is a share"),
        ('{"topics": 1}', "topics is true or false"),
        ('{"skip": [-1]}', "skip is a list"),
        ('{"entries": [5, 2]}', "entries is a pair"),
        ('{"entries": 3}', "entries is a pair"),
        ('{"entries": [0, 3]}', "entries is a pair"),
        ('{"quorum": [3, 2, 3]}', "E >= Qw >= Qa >= 1"),
        ('{"quorum": [3, 2]}', "E >= Qw >= Qa >= 1"),
        ('{"quorum": [3, 2, 0]}', "E >= Qw >= Qa >= 1"),
        ('{"quorum": [5, 3, 2], "bookies": 3}', "3 bookies are too few for E=5"),
        ('{"bookies": 1}', "1 bookies are too few"),
    ],
)
def test_a_plan_that_cannot_be_run_is_refused_before_anything_runs(plan, told, capsys):
    assert command.main(["--seeds", "3", "--plan", plan]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --plan: ")
    assert told in error
    assert shrink(["--seed", "1", "--plan", plan]) == 2


@pytest.mark.parametrize(
    "words", [["--seeds", "0"], ["--start", "-1"], ["--jobs", "-1"], ["--seeds", "many"]]
)
def test_numbers_that_make_no_sense_are_errors(words, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(words)
    assert ended.value.code == 2
    assert f"argument {words[0]}" in capsys.readouterr().err


def test_every_field_of_a_plan_has_its_check():
    plan = replay.drawn_plan(0)
    from tests.simulation.asked import _CHECKS

    assert sorted(_CHECKS) == sorted(vars(plan))


def test_making_small_needs_a_seed_or_a_mutant(capsys):
    with pytest.raises(SystemExit):
        shrink([])
    assert "--seed that fails, or a --mutant" in capsys.readouterr().err


def test_the_seed_of_a_mutant_is_the_stored_one_if_none_is_given(capsys):
    assert shrink(["--mutant", "BK#2614", "--runs", "1"]) == 0
    told = capsys.readouterr().out
    assert "invariant 24" in told
    assert "--mutant 'recovery reads do not fence'" in told


def test_a_sum_over_failing_runs_alone_says_nothing_of_entries():
    failed = Tally(seeds=1, failures=[Failure(3, "told", "story", "again")])
    assert len(failed.told(1.0, 1)) == 1
    failed.entries, failed.faults, failed.seeds = [4], [2], 2
    assert "of the 1 that did not" in failed.told(1.0, 1)[0]
    assert "4 entries" in "".join(failed.told(1.0, 1))


def test_a_plan_says_what_was_drawn_and_is_off_and_keeps_options_apart():
    changes = {"faults": ["loss", "slow network"], "without": ["slow network"], "skip": [4]}
    options = {"announce": True, "delayed": True, "password": False, "old_readers": False}
    options |= {
        "racks": "",
        **dict.fromkeys(("own_policy", "lasting", "operators", "page_cache", "healing"), False),
    }
    plan = replay.changed_plan(0, {**changes, **options, "over_budget": False, "large": 300})
    assert str(plan).endswith(
        "faults=loss (drawn but off: slow network) left out=4 options=announce, delayed, large 300"
    )
