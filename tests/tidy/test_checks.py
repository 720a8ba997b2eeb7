"""Each test is run by a step of scripts/check.py: by `make test`, or, if it is marked `slow`, by
`make test-all`."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
ELSEWHERE = "spark41"
"""Run on another Spark, by a target of its own."""
EVERY_TEST = (["slow or not slow"], ["alone", "not alone"])
"""What the runs that have the same file choose its tests by."""


def loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check", ROOT / "scripts" / "check.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CHECK = loaded()
RUNS = [run for runs in CHECK.STEPS.values() for run in runs if "pytest" in run]


def has(run: list[str], file: str) -> bool:
    paths = [word for word in run if word.startswith("tests/")]
    named = any(file == path or file.startswith(f"{path}/") for path in paths)
    return named and f"--ignore={file}" not in run


def test_every_file_of_tests_is_run_whole_by_one_step():
    files = [path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(files) > 100
    for file in files:
        if file.parts[1] != ELSEWHERE:
            found = sorted(run[-1] for run in RUNS if has(run, file.as_posix()))
            assert found in EVERY_TEST, f"{file} is run {len(found)} times"


@pytest.mark.parametrize("run", RUNS, ids=" ".join)
def test_make_test_leaves_out_of_each_run_what_is_marked_slow_and_nothing_else(run):
    assert CHECK.without_slow(run) == [*run[:-1], f"({run[-1]}) and not slow"]
