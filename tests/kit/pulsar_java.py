"""Pulsar's Java client: its jars, and programs of one file that use it.

    python -m tests.kit.pulsar_java         fetch the jars now; prints in one line what is missing

Java runs such a file as it is; nothing is built.
"""

import subprocess
import sys
from pathlib import Path

from spark_ledger.local.embedded_zookeeper import find_java
from spark_ledger_demo.jars import JarsMissing, Library, jars_of

CLIENT = Library("pulsar-client", "org.apache.pulsar", "pulsar-client", "4.2.4")
QUICK_START = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xmx256m")
TIMEOUT_S = 180


def run(program: Path, *arguments: str) -> str:
    """The output of the program. Raises JarsMissing, and AssertionError with the end of its
    standard error if it fails."""
    classes = ":".join(map(str, jars_of(CLIENT)))
    command = [find_java(), *QUICK_START, "-cp", classes, str(program), *arguments]
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
