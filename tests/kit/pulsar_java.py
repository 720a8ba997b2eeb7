"""Pulsar's Java client: its jars, and programs that use it.

    python -m tests.kit.pulsar_java         fetch the jars now; prints in one line what is missing

Java runs a program of one file as it is. A program of several files is compiled first.
"""

import subprocess
import sys
from pathlib import Path

from spark_ledger.local.embedded_zookeeper import find_java
from spark_ledger_demo.jars import JarsMissing, Library, jars_of

CLIENT = Library("pulsar-client", "org.apache.pulsar", "pulsar-client", "4.2.4")
QUICK_START = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xmx256m")
TIMEOUT_S = 300


def run(program: Path, *arguments: str) -> str:
    """The output of the program. Raises JarsMissing, and AssertionError with the end of its
    standard error if it fails."""
    return _output([*_java(), str(program), *arguments])


def run_files(files: list[Path], classes: Path, *arguments: str) -> str:
    """As `run`, of a program of several files, the one with `main` first; its classes go into the
    folder `classes`."""
    compiler = ["-m", "jdk.compiler/com.sun.tools.javac.Main", "-nowarn", "-d", str(classes)]
    _output([*_java(), *compiler, "-cp", _jars(), *map(str, files)])
    return _output([*_java(classes), files[0].stem, *arguments])


def _java(*classes: Path) -> list[str]:
    path = ":".join([*map(str, classes), _jars()])
    return [find_java(), *QUICK_START, "-cp", path]


def _jars() -> str:
    return ":".join(map(str, jars_of(CLIENT)))


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


if __name__ == "__main__":
    try:
        for jar in jars_of(CLIENT):
            print(jar)
    except JarsMissing as error:
        print(error, file=sys.stderr)
        raise SystemExit(1) from None
