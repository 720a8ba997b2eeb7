"""What the tests' Spark and ZooKeeper are started with; with the classes that they find ready, if
these are there.

Always true: a JVM that finds an archive made by another Java, or of other jars, goes on without it.
"""

import sys
from pathlib import Path

# A JVM that lives for minutes earns back neither what its second compiler nor what its collector's
# threads take from a small machine; a fifth of what starting Spark costs is checking its classes.
UNCHECKED = "-XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
OPTIONS = f"-XX:+UseSerialGC -XX:TieredStopAtLevel=1 {UNCHECKED}"
COMPILE_SOON = "-XX:CompileThresholdScaling=0.4"  # Spark interprets for long what it calls often
# With one compiler a JVM has 48 MB for compiled code; some 350 tests in one Spark session fill it,
# and then the JVM throws InternalError: "Out of space in CodeCache".
CODE_CACHE = "-XX:ReservedCodeCacheSize=240m"
QUIET = "-Xlog:disable"  # no word on stdout about an archive that does not fit
FOLDER = Path(sys.prefix) / "share" / "spark-ledger" / "classes"
ZOOKEEPER = "zookeeper"
KINDS = ("spark", "delta", ZOOKEEPER)
"""Spark without and with Delta Lake's jars, and ZooKeeper: an archive is made for a class path."""


def options(kind: str = "spark") -> str:
    """The JVM's options, with the archive of that kind if there is one."""
    there = archive(kind)
    given = OPTIONS if kind == ZOOKEEPER else f"{OPTIONS} {COMPILE_SOON} {CODE_CACHE}"
    return f"{given} {QUIET} -XX:SharedArchiveFile={there}" if there.exists() else given


def archive(kind: str) -> Path:
    return FOLDER / f"{kind}.jsa"
