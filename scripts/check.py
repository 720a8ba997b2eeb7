"""Runs every check of the project in order, cheap ones first, and prints how long each took.

    python scripts/check.py                 all of them
    python scripts/check.py tidy unit       these only

Stops at the first that fails and exits with its status.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ["bookie_server", "spark_ledger", "pyspark_ledger"]
SOURCES = [*PACKAGES, "tests", "benchmarks", "scripts", "notebooks"]
PYTEST = ["-m", "pytest", "-q", "-p", "tests.skip_list", "--durations=5"]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(ROOT),
    "PYTHONDONTWRITEBYTECODE": "",  # hundreds of processes would compile every module anew
}


def ruff(*arguments: str) -> list[str]:
    return ["-m", "ruff", *arguments, "--no-cache", *SOURCES]  # a cache knows no new modules


TWO = ["-n", "2"]
TWO_FILES = [*TWO, "--dist", "loadfile"]  # what a file has set up serves all its tests
CLASSES = ["-m", "tests.class_archives"]  # what every JVM of these steps would load and check anew
STEPS: dict[str, list[list[str]]] = {
    "lint": [ruff("check", "--quiet")],
    "format": [ruff("format", "--check", "--quiet")],
    "types": [["-m", "mypy", *(word for name in PACKAGES for word in ("-p", name))]],
    "tidy": [[*PYTEST, "-s", "tests/tidy"]],
    "unit": [[*PYTEST, *TWO, "tests/unit"]],
    "storage": [[*PYTEST, *TWO, "tests/storage"]],
    "simulation": [[*PYTEST, *TWO_FILES, "tests/simulation"]],
    "integration": [
        [*PYTEST, *TWO_FILES, "-m", "not alone", "tests/integration"],
        [*PYTEST, "-m", "alone", "tests/integration"],
    ],
    "spark": [CLASSES, [*PYTEST, *TWO_FILES, "tests/spark"]],
    "crash": [CLASSES, [*PYTEST, *TWO_FILES, "-m", "not chaos", "tests/crash"]],
}
"""The runs of each step, one after the other."""


def run_step(name: str) -> tuple[int, float]:
    print(f"\n== {name}", flush=True)
    started, status = time.monotonic(), 0
    for run in STEPS[name]:
        status = status or subprocess.call([sys.executable, *run], cwd=ROOT, env=ENVIRONMENT)
    return status, time.monotonic() - started


def main() -> int:
    names = sys.argv[1:] or list(STEPS)
    unknown = [name for name in names if name not in STEPS]
    if unknown:
        print(f"unknown check {unknown[0]!r}; there are: {', '.join(STEPS)}", file=sys.stderr)
        return 2
    durations = {}
    for name in names:
        status, durations[name] = run_step(name)
        if status:
            print(f"\n{name} FAILED after {durations[name]:.0f} s", file=sys.stderr)
            return status
    print("\n" + "  ".join(f"{name} {seconds:.0f} s" for name, seconds in durations.items()))
    print(f"all {len(durations)} checks passed in {sum(durations.values()):.0f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
