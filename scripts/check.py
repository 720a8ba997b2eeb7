"""Runs every check of the project in order, cheap ones first, and prints how long each took.

    python scripts/check.py                 all of them, without the tests that are marked `slow`
    python scripts/check.py --all           with these
    python scripts/check.py tidy unit       these checks only

Stops at the first that fails and exits with its status.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ["bookie_server", "spark_ledger", "spark_ledger_demo", "pyspark_ledger"]
SOURCES = [*PACKAGES, "tests", "benchmarks", "scripts", "notebooks", "examples"]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(ROOT),
    "PYTHONDONTWRITEBYTECODE": "",  # hundreds of processes would compile every module anew
}


def ruff(*arguments: str) -> list[str]:
    return ["-m", "ruff", *arguments, "--no-cache", *SOURCES]  # a cache knows no new modules


def tests(*words: str, marks: str = "slow or not slow") -> list[str]:
    """A run of pytest; what the tests are chosen by comes last."""
    command = ["-m", "pytest", "-q", "-p", "tests.kit.skip_list", "--durations=12"]
    return [*command, *words, "-m", marks]


def without_slow(run: list[str]) -> list[str]:
    return [*run[:-1], f"({run[-1]}) and not slow"] if "pytest" in run else run


TWO = ["-n", "2"]
BY_FILE = ["--dist", "loadfile", "--no-loadscope-reorder"]
"""What a file has set up serves all its tests; files in the order of tests/conftest.py."""
MUTANTS = ["tests/simulation/test_mutants.py", "tests/simulation/test_reach.py"]
"""As long as all other files together, and each test stands alone."""
STEPS: dict[str, list[list[str]]] = {
    "lint": [ruff("check", "--quiet")],
    "format": [ruff("format", "--check", "--quiet")],
    "types": [["-m", "mypy", *(word for name in PACKAGES for word in ("-p", name))]],
    "tidy": [tests("-s", "tests/tidy")],
    "unit": [tests(*TWO, "tests/unit")],
    "storage": [tests(*TWO, "tests/storage")],
    "simulation": [
        tests(*TWO, *BY_FILE, *(f"--ignore={path}" for path in MUTANTS), "tests/simulation"),
        tests(*TWO, *MUTANTS),
    ],
    "integration": [
        tests("-n", "6", *BY_FILE, "tests/integration", marks="not alone"),  # they mostly wait
        tests("tests/integration", marks="alone"),
    ],
    "spark": [tests("-n", "3", *BY_FILE, "tests/spark")],  # half the time they wait
    "crash": [tests(*TWO, *BY_FILE, "tests/crash")],
}
"""The runs of each step, one after the other, with the tests that are marked `slow`."""
CLASSES = ["-m", "tests.kit.class_archives"]
WITH_SPARK = {"spark", "crash"}
"""Steps whose every JVM would load and check anew what is archived beside the steps before them."""


@contextmanager
def class_archives(wanted: bool) -> Iterator[Callable[[], object]]:
    """Their making has begun; what is given waits for its end, and it is over at the end of all."""
    command = [sys.executable, *CLASSES]
    if not wanted:
        yield lambda: None
        return
    with subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, start_new_session=True) as making:
        try:
            yield making.wait
        finally:
            if making.poll() is None:
                os.killpg(making.pid, signal.SIGKILL)  # its JVMs too


def run_step(name: str, slow: bool, archived: Callable[[], object]) -> tuple[int, float]:
    print(f"\n== {name}", flush=True)
    started, status = time.monotonic(), 0
    if name in WITH_SPARK:
        archived()
    for run in STEPS[name]:
        command = [sys.executable, *(run if slow else without_slow(run))]
        status = status or subprocess.call(command, cwd=ROOT, env=ENVIRONMENT)
    return status, time.monotonic() - started


def main() -> int:
    slow = "--all" in sys.argv
    names = [word for word in sys.argv[1:] if word != "--all"] or list(STEPS)
    unknown = [name for name in names if name not in STEPS]
    if unknown:
        print(f"unknown check {unknown[0]!r}; there are: {', '.join(STEPS)}", file=sys.stderr)
        return 2
    durations = {}
    with class_archives(not WITH_SPARK.isdisjoint(names)) as archived:
        for name in names:
            status, durations[name] = run_step(name, slow, archived)
            if status:
                print(f"\n{name} FAILED after {durations[name]:.0f} s", file=sys.stderr)
                return status
    print("\n" + "  ".join(f"{name} {seconds:.0f} s" for name, seconds in durations.items()))
    print(f"all {len(durations)} checks passed in {sum(durations.values()):.0f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
